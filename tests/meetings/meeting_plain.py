"""The decoder of the table of meetings in plain PyTorch: one function of the params by path, which autograd differentiates."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from funcops.models import DecoderConfig


def plain_gradients(
    sizes: DecoderConfig, params: Mapping[str, Tensor], batches: list[tuple[Tensor, Tensor]], packed: tuple[int, ...], scale: float
) -> dict[str, Tensor]:
    """The mean loss over the batches, as "loss", and its gradients by path. `packed`: the lengths of the documents of a row, or ();
    `scale`: of the adapters."""
    own = {path: t.detach().clone().requires_grad_() for path, t in params.items() if t is not None}
    loss = torch.stack([_Plain(sizes, own, packed, scale).loss(*batch) for batch in batches]).mean()
    found = torch.autograd.grad(loss, list(own.values()), allow_unused=True)
    grads = {path: torch.zeros_like(t) if g is None else g for (path, t), g in zip(own.items(), found, strict=True)}
    return {"loss": loss.detach(), **grads}


class _Plain:
    def __init__(self, sizes: DecoderConfig, params: Mapping[str, Tensor], packed: tuple[int, ...], scale: float) -> None:
        self.sizes, self.params, self.packed, self.scale = sizes, params, packed, scale

    def loss(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.params["embed.weight"][ids]
        for i in range(self.sizes.layers):
            x = x + self.attention(f"blocks.{i}.attn", self.norm(f"blocks.{i}.attn.norm", x), i)
            inner = self.norm(f"blocks.{i}.mlp.norm", x)
            x = x + (self.mlp if self.sizes.moe is None else self.mixture)(f"blocks.{i}.mlp", inner)
        logits = self.linear("head", self.norm("norm", x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def norm(self, path: str, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.sizes.eps) * self.params[f"{path}.weight"]

    def linear(self, path: str, x: Tensor) -> Tensor:
        if f"{path}.weight" in self.params:
            return x @ self.params[f"{path}.weight"].T
        low = (x @ self.params[f"{path}.both.lora.a"].T) @ self.params[f"{path}.both.lora.b"].T
        return x @ self.params[f"{path}.both.base.weight"].T + self.scale * low

    def places(self, length: int) -> tuple[Tensor, Tensor]:
        """The position of each token in its document, and the number of the document."""
        lengths = self.packed or (length,)
        position = torch.cat([torch.arange(n) for n in lengths])
        return position, torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def attention(self, path: str, x: Tensor, layer: int) -> Tensor:
        sizes, (batch, length, _) = self.sizes, x.shape
        position, document = self.places(length)
        q, k, v = (self.linear(f"{path}.qkv.{n}.proj", x).unflatten(-1, (-1, sizes.head_size)) for n in "qkv")
        q, k = (self.turned(t, position) for t in (q, k))
        k, v = (t.repeat_interleave(sizes.heads // sizes.kv_heads, 2) for t in (k, v))
        scores = torch.einsum("bthd,bshd->bhts", q, k) * sizes.head_size**-0.5
        behind = torch.arange(length)[:, None] - torch.arange(length)
        window = sizes.windows[layer] if sizes.windows else None
        seen = (behind >= 0) & (document[:, None] == document) & (behind < (window or length))
        p = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return self.linear(f"{path}.out", torch.einsum("bhts,bshd->bthd", p, v).reshape(batch, length, -1))

    def turned(self, x: Tensor, position: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angle = position[:, None].double() * 10000.0 ** (-torch.arange(half).double() / half)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def mlp(self, path: str, x: Tensor) -> Tensor:
        gate, value = self.linear(f"{path}.up", x).chunk(2, -1)
        return self.linear(f"{path}.down", F.silu(gate) * value)

    def mixture(self, path: str, x: Tensor) -> Tensor:
        """Each token through its two best experts of four, every expert computed for every token."""
        best, chosen = self.linear(f"{path}.gate", x).topk(2, -1)
        weights = torch.zeros(*x.shape[:-1], self.sizes.moe.experts.experts, dtype=x.dtype).scatter(-1, chosen, best.softmax(-1))
        gate, value = torch.einsum("bth,eih->btei", x, self.params[f"{path}.experts.up.weight"]).chunk(2, -1)
        each = torch.einsum("btei,ehi->bteh", F.silu(gate) * value, self.params[f"{path}.experts.down.weight"])
        return (weights[..., None] * each).sum(-2)
