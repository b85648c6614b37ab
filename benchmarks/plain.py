"""The decoder of examples/train_lm.py, and its block, as plain nn.Modules under autograd: the reference for funcops.

It shares no code with funcops. B rows, T positions, D width, H heads of size K = D / H, G key and value heads.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FusedRMSNorm(torch.autograd.Function):
    """`F.rms_norm` as torch's kernel for a GPU (`_fused_rms_norm`) keeps it: x, the weight and each row's 1 / rms in float32. On a
    CPU torch runs it in steps, and also keeps their values in float32."""

    ROWS = 256  # at once: the kernel makes no tensor in float32

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: tuple[int], weight: Tensor, eps: float) -> Tensor:
        y, rstd = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
        for rows, own, out in zip(*FusedRMSNorm.split(x, rstd, y), strict=True):
            wide = rows.float()
            own.copy_(wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_())
            out.copy_((wide * own).mul_(weight))
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, Tensor, None]:  # type: ignore[override]
        x, weight, rstd = ctx.saved_tensors
        dx, dw = torch.empty_like(x), torch.zeros_like(weight, dtype=torch.float32)
        for rows, own, given, out in zip(*FusedRMSNorm.split(x, rstd, dy, dx), strict=True):
            n, dn = rows.float() * own, given.float() * weight
            dw += (given.float() * n).sum(0)
            out.copy_(own * (dn - n * (dn * n).mean(-1, keepdim=True)))
        return dx, None, dw.to(weight.dtype), None

    @staticmethod
    def split(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
        return [t.view(-1, t.shape[-1]).split(FusedRMSNorm.ROWS) for t in tensors]


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-5):
        super().__init__()
        self.dim, self.eps, self.run = (dim,), eps, F.rms_norm
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, self.dim, self.weight, self.eps)


class FusedLayerNorm(torch.autograd.Function):
    """`F.layer_norm` as torch's kernel for a GPU keeps it: x, the parameters, and each row's mean and 1 / deviation in float32. On
    a CPU torch keeps these two in x's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: tuple[int], weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        y, mean, rstd = torch.native_layer_norm(x.float(), dim, weight.float(), bias.float(), eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, bias, mean, rstd = ctx.saved_tensors
        wide = [t.float() for t in (weight, bias)]
        found = torch.ops.aten.native_layer_norm_backward(dy.float(), x.float(), weight.shape, mean, rstd, *wide, [True] * 3)
        dx, dw, db = (t.to(x.dtype) for t in found)
        return dx, None, dw, db, None


def fused_dropout(x: Tensor, p: float) -> Tensor:
    """Dropout as torch runs it on a GPU, which keeps a mask of one byte an element. On a CPU it keeps a factor in x's dtype."""
    return torch.native_dropout(x, p, True)[0]


class DroppedLinear(nn.Linear):
    """A linear layer whose output goes through dropout."""

    def __init__(self, dim_in: int, dim_out: int, p: float):
        super().__init__(dim_in, dim_out)
        self.p = p
        self.drop: Any = F.dropout

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(super().forward(x), self.p)


def as_on_a_gpu(module: nn.Module) -> nn.Module:
    """The module, whose norms and dropouts keep what they keep on a GPU."""
    part: Any
    for part in module.modules():
        if isinstance(part, RMSNorm):
            part.run = FusedRMSNorm.apply
        elif isinstance(part, nn.LayerNorm):
            vars(part)["forward"] = functools.partial(_layer_norm, part)
        elif isinstance(part, DroppedLinear):
            part.drop = fused_dropout
        elif isinstance(part, nn.Dropout):
            vars(part)["forward"] = functools.partial(fused_dropout, p=part.p)
    return module


def _layer_norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    return FusedLayerNorm.apply(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


def rope_tables(context: int, size: int, theta: float) -> tuple[Tensor, Tensor]:
    """The cosines and sines of position * theta^(-2i/K), float64 [T, K/2]."""
    frequency = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angle = torch.arange(context, dtype=torch.float64)[:, None] * frequency
    return angle.cos(), angle.sin()


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i + K/2}) of x [B, T, H, K]; cos, sin: [T, 1, K/2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, dim: int, n_heads: int, n_kv_heads: int):
        super().__init__()
        self.size = dim // n_heads
        self.gqa = n_heads != n_kv_heads
        self.norm = RMSNorm(dim)
        self.q = nn.Linear(dim, n_heads * self.size, bias=False)
        self.k = nn.Linear(dim, n_kv_heads * self.size, bias=False)
        self.v = nn.Linear(dim, n_kv_heads * self.size, bias=False)
        self.out = nn.Linear(n_heads * self.size, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.norm(x)
        q, k, v = (p(x).unflatten(-1, (-1, self.size)) for p in (self.q, self.k, self.v))
        q, k = rope(q, cos, sin), rope(k, cos, sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.gqa)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.norm = RMSNorm(dim)
        self.up = nn.Linear(dim, 2 * hidden, bias=False)  # the gate's rows first
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(self.norm(x)).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, hidden: int):
        super().__init__()
        self.attn = Attention(dim, n_heads, n_kv_heads)
        self.mlp = MLP(dim, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(x, cos, sin)
        return x + self.mlp(x)


class PlainBlock(nn.Module):
    """One block with its rotation tables, made once for each dtype. The blocks of a model share them."""

    def __init__(self, dim: int, heads: int, hidden: int, length: int, kv_heads: int | None = None):
        super().__init__()
        self.block = Block(dim, heads, kv_heads or heads, hidden)
        self.tables = rope_tables(length, dim // heads, 10000.0)
        self.cos, self.sin = (t[:, None].float() for t in self.tables)

    def forward(self, x: Tensor) -> Tensor:
        if self.cos.dtype != x.dtype:
            self.cos, self.sin = (t[:, None].to(x.dtype) for t in self.tables)
        return self.block(x, self.cos, self.sin)


class PlainGPT2Block(nn.Module):
    """A GPT-2 block with dropout on its two branches."""

    def __init__(self, dim: int, heads: int, hidden: int, p: float):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.qkv, self.out = nn.Linear(dim, 3 * dim), DroppedLinear(dim, dim, p)
        self.up, self.down = nn.Linear(dim, hidden), DroppedLinear(hidden, dim, p)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class PlainLlama(nn.Module):
    """Maps bytes [B, T], T up to `context`, to logits [B, T, vocab], or with `labels` [B, T] to the mean cross entropy."""

    def __init__(
        self,
        *,
        dim: int,
        n_layers: int,
        n_heads: int,
        n_kv_heads: int,
        hidden: int,
        context: int,
        vocab: int = 256,
        tied: bool = False,
        theta: float = 10000.0,
    ):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, n_heads, n_kv_heads, hidden) for _ in range(n_layers))
        self.norm = RMSNorm(dim)
        self.head = None if tied else nn.Linear(dim, vocab, bias=False)
        self.tables = rope_tables(context, dim // n_heads, theta)
        self.rope: dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

    def cos_sin(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """The tables in the activations' dtype, rounded once from float64 (a buffer would follow .to() and back)."""
        where = (like.dtype, like.device)
        if where not in self.rope:
            cos, sin = (t[:, None].to(like.device, like.dtype) for t in self.tables)
            self.rope[where] = cos, sin
        return self.rope[where]

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        cos, sin = (t[: tokens.shape[1]] for t in self.cos_sin(x))
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = F.linear(self.norm(x), self.embed.weight if self.head is None else self.head.weight)
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def plain_name(path: str) -> str:
    """The plain module's name for a path of ours."""
    return path.replace(".qkv.", ".").replace(".proj.", ".").replace(".moe.routed.", ".").replace(".moe.", ".")
