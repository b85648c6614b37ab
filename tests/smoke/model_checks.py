"""Checks of whole models, long sequences and ranks, in the registry of `checks.py`."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from checks import SmokeDevice, check, same
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from funcops import (
    AttentionConfig,
    ExpertsConfig,
    LinearConfig,
    RopeConfig,
    RouteConfig,
    TorchConfig,
    WithExtras,
    attention,
    chain,
    donate,
    linear,
    op_from_module,
    random,
)
from funcops.adapters.graphs import graphed
from funcops.dist import Axis, ColumnLinearConfig, RowLinearConfig, column_linear, row_linear
from funcops.distributed import comm
from funcops.engine.backend import backend
from funcops.engine.trees import tree_map_tensors
from funcops.invariant import with_invariant
from funcops.library.kernels.cudnn_attention import cudnn_serves
from funcops.models import DecoderConfig, LatentConfig, MoEConfig, cache_init, check_invariant, decode, decoder, decoder_x
from funcops.testing.tolerances import assert_close

SIZES = dict(vocab=64, dim=64, layers=2, heads=4, kv_heads=2, head_size=16, hidden=96, context=64)


@check
def decoding_gives_the_logits_of_the_cpu(on: SmokeDevice) -> Any:
    """A prompt, and tokens one by one: with whole keys and values, with a ring of slots, and from latents."""
    plain = DecoderConfig(**SIZES, rope=RopeConfig(16))  # type: ignore[arg-type]
    latent = LatentConfig(kv_rank=32, rope_size=16, plain_size=16, value_size=16)
    of_latents = DecoderConfig(**SIZES | dict(kv_heads=4, head_size=32), rope=RopeConfig(16), latent=latent)  # type: ignore[arg-type]
    ring = DecoderConfig(**SIZES, rope=RopeConfig(16), windows=(5, None))  # type: ignore[arg-type]
    ids = torch.randint(64, (3, 20), generator=torch.Generator().manual_seed(0))
    for cfg in (plain, ring, of_latents):
        params = chain.init(decoder(cfg), key=random.key(0))
        found = []
        for device in ("cpu", on.device):
            given = tree_map_tensors(lambda t, to=device: t.to(to), params)
            cache, logits = cache_init(cfg, 3, context=32, chunk=9, device=device), []
            for part in (ids[:, :9], ids[:, 9:18], ids[:, 18:19], ids[:, 19:]):
                y, cache = decode(given, donate(cache), part.to(device), cfg)
                logits.append(y.cpu())
            found.append(torch.cat(logits, 1))
        assert_close(found[1], found[0], dtype=torch.float32, length=96)
    return {}


@check
def training_and_decoding_give_the_same_bits_in_the_mode(on: SmokeDevice) -> Any:
    """With few rows and many: windows, grouped heads of 24 elements, experts, an odd vocabulary."""
    of_experts = MoEConfig(route=RouteConfig(4, 2), experts=ExpertsConfig(4, dim=64, hidden=48))
    sizes = SIZES | dict(context=on.size(2048, 64), vocab=on.size(20_001, 131))
    for options in (dict(), dict(windows=(40, None), norm="layer_norm"), dict(moe=of_experts, head_size=24)):
        for dtype in (torch.float32, torch.bfloat16) if on.real else (torch.bfloat16,):
            cfg = DecoderConfig(**sizes | options, rope=RopeConfig(24 if "head_size" in options else 16))  # type: ignore[arg-type]
            model = with_invariant(decoder(cfg))
            params = chain.init(model, key=random.key(0), device=on.device, dtype=dtype)
            assert check_invariant(params, cfg, model, tokens=on.size(700, 6)) > 0
    return {}


@check
def attention_by_cudnn_is_that_of_the_formula(on: SmokeDevice) -> Any:
    """It runs by request: lengths that 128 does not divide, grouped heads, rows whose exponentials are 0 in float32, q, k and v in
    one memory, and gradients of heads that lie apart. The result says how many calls cuDNN took."""
    served = []
    for length, causal, packed in itertools.product((64, 192, 256, 704) if on.real else (8,), (True, False), (True, False)):
        whole = on.randn(2, length, 8 * 64, seed=length).bfloat16()
        whole[:, ::3, :256], whole[..., 256:384] = 4.0, 0.1 * whole[..., 256:384] - 4.0
        q, k, v = (t.unflatten(-1, (-1, 64)) for t in whole.split([256, 128, 128], -1))
        q, k, v = (q, k, v) if packed else (t.contiguous() for t in (q, k, v))
        dy, cfg = on.randn(2, 4, length, 64, seed=1).bfloat16().transpose(1, 2), AttentionConfig(causal=causal)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            served.append(cudnn_serves(*(t.transpose(1, 2) for t in (q, k, v)), causal))
            y, kept = attention.fwd(None, (q, k, v), cfg)
            found = attention.bwd(kept, dy, cfg)[1]
        assert kept is not None and (kept.logsumexp < -88.7).any() and all(t.isfinite().all() for t in (y, *found))
        exact = [t.double().requires_grad_() for t in (q, k, v)]
        mask = torch.full((length, length), -torch.inf if causal else 0.0, device=on.device).triu(1)
        heads = [exact[0].transpose(1, 2), *(t.transpose(1, 2).repeat_interleave(2, 1) for t in exact[1:])]
        want = ((heads[0] @ heads[1].mT / 8 + mask).softmax(-1) @ heads[2]).transpose(1, 2)
        want.backward(dy.double())
        assert_close((y, *found), (want.detach(), *(t.grad for t in exact)), dtype=torch.bfloat16, length=length)
    return {"by cuDNN": sum(served), "calls": len(served)}


def rows_of_attention(q: Tensor, k: Tensor, v: Tensor, dy: Tensor, row: int, window: int) -> tuple[Tensor, Tensor]:
    """y and dq of a row of causal attention [T, D] with a window, in float64."""
    seen = slice(max(0, row - window + 1), row + 1)
    one, keys, values = q[row].double().requires_grad_(), k[seen].double(), v[seen].double()
    y = torch.softmax(keys @ one * q.shape[1] ** -0.5, 0) @ values
    y.backward(dy[row].double())
    assert one.grad is not None
    return y.detach(), one.grad


@check
def a_window_over_a_long_sequence(on: SmokeDevice) -> Any:
    """Rows at the ends and in the middle, by a formula of each."""
    length, window, size = on.size(65_536, 70), on.size(1_000, 9), on.size(64, 8)
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v, dy = (on.randn(1, length, 2, size, dtype=dtype, seed=i) for i in range(4))
        with backend("triton"):
            y, kept = attention.fwd(None, (q, k, v), AttentionConfig(causal=True, window=window))
            dq, _, _ = attention.bwd(kept, dy, AttentionConfig(causal=True, window=window))[1]
        for row in (0, window - 1, window, length // 2, length - 1):
            for head in range(2):
                want = rows_of_attention(*(t[0, :, head] for t in (q, k, v, dy)), row, window)
                assert_close((y[0, row, head].double(), dq[0, row, head].double()), want, dtype=dtype, length=window * size)
    return {"length": length, "window": window}


@check
def documents_packed_into_a_row_see_only_themselves(on: SmokeDevice) -> Any:
    """Empty documents and one of a single token, too: each as if it were alone."""
    lengths = (3, 0, on.size(2_000, 20), 1, on.size(777, 5))
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=on.device)
    for dtype in (torch.float32, torch.bfloat16):
        q, dy = (on.randn(1, sum(lengths), 4, 16, dtype=dtype, seed=i) for i in range(2))
        k, v = (on.randn(1, sum(lengths), 2, 16, dtype=dtype, seed=i) for i in (2, 3))
        with backend("triton"):
            y, kept = attention.fwd(None, (q, k, v, ends), AttentionConfig(causal=True, packed=True))
            dx = attention.bwd(kept, dy, AttentionConfig(causal=True, packed=True))[1]
        for start, stop in zip(ends.tolist(), ends.tolist()[1:], strict=False):
            alone, held = attention.fwd(None, tuple(t[:, start:stop] for t in (q, k, v)), AttentionConfig(causal=True))
            want = attention.bwd(held, dy[:, start:stop], AttentionConfig(causal=True))[1]
            got = y[:, start:stop], *(t[:, start:stop] for t in dx[:3])
            assert_close(got, (alone, *want), dtype=dtype, length=16 * max(1, stop - start))
    return {"lengths": lengths}


@check
def more_windows_than_one_dimension_of_a_grid_takes(on: SmokeDevice) -> Any:
    """Swin's attention: many short windows with a bias, of which the last are compared."""
    count, last = on.size(70_000, 5), slice(-3, None)
    q, k, v, dy = (on.randn(count, 16, 1, 16, dtype=torch.bfloat16, seed=i) for i in range(4))
    bias, cfg = on.randn(1, 1, 16, 16, dtype=torch.bfloat16, seed=4), AttentionConfig(bias=True)
    with backend("triton"):
        y, kept = attention.fwd(None, (q, k, v, bias), cfg)
        dx = attention.bwd(kept, dy, cfg)[1]
    exact = [t[last].double().requires_grad_() for t in (q, k, v)]
    scores = torch.einsum("bthd,bshd->bhts", *exact[:2]) * 0.25 + bias.double()
    want = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), exact[2])
    want.backward(dy[last].double())
    got = y[last], *(t[last] for t in dx[:3])
    assert_close(got, (want.detach(), *(t.grad for t in exact)), dtype=torch.bfloat16, length=256)
    return {"windows": count}


@check
def a_step_of_experts_in_a_graph_gives_the_bits_of_the_eager_one(on: SmokeDevice) -> Any:
    mixture = MoEConfig(route=RouteConfig(4, 2), experts=ExpertsConfig(4, 64, 32))
    cfg = DecoderConfig(**SIZES, rope=RopeConfig(16), moe=mixture)  # type: ignore[arg-type]
    model = decoder(cfg, loss=True)
    for dtype in (torch.float32, torch.bfloat16):
        params = chain.init(model, key=random.key(0), device=on.device, dtype=dtype)
        ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0)).to(on.device)
        x = decoder_x(cfg, ids, dtype, labels=ids)

        def step(params: Any, x: Any) -> Any:
            y, kept = chain.fwd(params, x, model)
            dy = WithExtras(torch.ones_like(y.main), dict.fromkeys(y.extras)) if type(y) is WithExtras else torch.ones_like(y)
            return y, chain.bwd(donate(kept), dy, model)[0]

        same(graphed(step, params, x)(params, x), step(params, x))
    return {}


class Unequal(int):
    """A size that equals no number, so that an axis of one rank sends as one of several does."""

    def __eq__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


@check
def collectives_of_one_rank(on: SmokeDevice) -> Any:
    """NCCL runs them on a device, Gloo elsewhere. Each gives x back, and layers over the axis are the plain layer."""
    group = torch.distributed
    if group.is_initialized():
        return {"not asked": "this process has a group"}
    group.init_process_group("nccl" if on.real else "gloo", store=group.HashStore(), rank=0, world_size=1)
    try:
        axis = Axis("tp", 1, rank=0, group=group.group.WORLD.group_name)
        object.__setattr__(axis, "size", Unequal(1))
        x, dy = on.randn(8, 16), on.randn(8, 24, seed=1)
        sent = [comm.gather(x, axis), comm.scatter_sum(x, axis, 1), comm.sum_over(x, axis), comm.all_to_all(x, axis, 0, 1)]
        same(sent, [x] * 4)
        same(comm.largest(x.abs(), axis), x.abs())
        params = linear.init(LinearConfig(16, 24), key=random.key(0), device=on.device)
        y, kept = linear.fwd(params, x, LinearConfig(16, 24))
        want = y, linear.bwd(kept, dy, LinearConfig(16, 24))
        for op, of in ((column_linear, ColumnLinearConfig), (row_linear, RowLinearConfig)):
            for overlap in ("none", "bulk", "ring"):
                cfg = of(16, 24, axis=axis, sequence_parallel=True, overlap=overlap)
                y, kept = op.fwd(params, x, cfg)
                assert_close((y, op.bwd(kept, dy, cfg)), want, dtype=torch.float32, length=24)
    finally:
        group.destroy_process_group()
    return {"backend": "nccl" if on.real else "gloo"}


class Mlp(torch.nn.Module):
    """A norm and a gated MLP, as Hugging Face's Llama has them, and torch's attention in between."""

    def __init__(self, dim: int, device: str) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(dim, device=device, dtype=torch.bfloat16))
        sizes = (dim, 2 * dim), (dim, 2 * dim), (2 * dim, dim)
        self.gate, self.up, self.down = [torch.nn.Linear(*io, bias=False, device=device, dtype=torch.bfloat16) for io in sizes]

    def forward(self, x: Tensor) -> Tensor:
        n = x.float()
        n = self.weight * (n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        heads = n.unflatten(-1, (-1, 16)).transpose(0, 1).unsqueeze(0)
        mixed = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        n = mixed[0].transpose(0, 1).flatten(1)
        return x + self.down(torch.nn.functional.silu(self.gate(n)) * self.up(n))


@check
def known_parts_of_a_module_run_by_kernels(on: SmokeDevice) -> Any:
    """Within the rounding of bfloat16 from autograd's gradients in float32."""
    torch.manual_seed(0)
    dim = on.size(1024, 16)
    model, x = Mlp(dim, on.device), on.randn(on.size(2048, 3), dim, dtype=torch.bfloat16)
    with backend("triton"):
        op, params = op_from_module(model, x)
        y, residuals = op.fwd(params, x, TorchConfig())
        dparams, dx = op.bwd(residuals, y, TorchConfig())
    names = [str(node.target) for node in residuals.traced.graphs.forward.graph.nodes]
    assert "funcops.rms_norm_fwd.default" in names and "funcops.glu_pair_fwd.default" in names, names
    wide = model.float()
    given = x.float().requires_grad_()
    want = wide(given)
    grads = torch.autograd.grad(want, [given, *wide.parameters()], y.float())
    found = y, dx, *[dparams[name] for name, _ in wide.named_parameters()]
    off = [float((a.float() - b).norm() / b.norm()) for a, b in zip(found, (want.detach(), *grads), strict=True)]
    assert max(off) < 2**-5, off
    return {"relative errors": off}
