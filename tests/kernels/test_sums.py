"""Sums over many rows and chunks in 16 bits are taken in float32, and rounded once."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from funcops import (
    BiasConfig,
    EmbeddingConfig,
    LayerNormConfig,
    LinearConfig,
    LinearCrossEntropyConfig,
    LinearParams,
    RMSNormConfig,
    batch_wgrads,
    bias,
    embedding,
    layer_norm,
    linear,
    linear_cross_entropy,
    random,
    rms_norm,
)
from funcops.engine.trees import cast, paths, tree_map, tree_map_tensors
from funcops.library.kernels.triton.matmul import _add_wide
from funcops.testing.tolerances import ROUNDOFF, SUM_FACTOR, SUM_ROUNDINGS

ROWS, D = 4096, 16
IDS = torch.arange(ROWS) % 3
LABELS = torch.arange(ROWS) % 256
SIZES = LinearCrossEntropyConfig(D, 256, reduction="sum", chunk_bytes=4 * ROWS * 4)  # 4 classes at a time: 64 chunks
OPS = {
    "linear": (linear, LinearConfig(D, 8), lambda rows: rows),
    "bias": (bias, BiasConfig(D), lambda rows: rows),
    "rms_norm": (rms_norm, RMSNormConfig(D), lambda rows: rows),
    "layer_norm": (layer_norm, LayerNormConfig(D), lambda rows: rows),
    "embedding": (embedding, EmbeddingConfig(3, D), lambda rows: IDS),
    "linear_cross_entropy": (linear_cross_entropy, SIZES, lambda rows: (rows, LABELS)),
}
# The error of one rounding, in units of the roundoff: 0.7 to 1.1, as the numbers lie.
# The loss's gradient of the logits is rounded too.
LIMITS = {"linear_cross_entropy": 2.0}


def ran(op, cfg, make_x, dtype):
    """params, and (residuals, dy) in `dtype` and in float64, with the same numbers; the mean of dy is not zero, so that sums
    grow."""
    generator = torch.Generator().manual_seed(0)
    params = cast(op.init(cfg, key=random.key(0), dtype=torch.float64), dtype)
    x = tree_map_tensors(
        lambda t: t.to(dtype) if t.is_floating_point() else t, make_x(torch.randn(ROWS, D, generator=generator).double())
    )
    found = []
    for width in (dtype, torch.float64):
        y, residuals = op.fwd(cast(params, width), cast(x, width), cfg)
        dy = (torch.randn(y.shape, generator=torch.Generator().manual_seed(1)) + 0.5).to(dtype).to(y.dtype)
        found.append((residuals, dy))
    return params, found


def off(got, want):
    """The root mean square error over the root mean square of the values."""
    return float((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_gradients_are_rounded_once(name, dtype):
    op, cfg, make_x = OPS[name]
    _, ((residuals, dy), (exact, d_exact)) = ran(op, cfg, make_x, dtype)
    want = paths(op.bwd(exact, d_exact, cfg))
    dx, pending = op.dgrad(residuals, dy, cfg)
    for got in (op.bwd(residuals, dy, cfg), (op.wgrad(pending, cfg), dx)):
        for path, g in paths(got).items():
            assert g is None or off(g, want[path]) < LIMITS.get(name, 1.25) * ROUNDOFF[dtype], path


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("how", [None, "each", "concatenate", "batch", "group"])
def test_biases_of_joined_products_reach_wide_accumulators_unrounded(how, dtype):
    op, cfg, make_x = OPS["linear"]
    params, ((residuals, dy), (exact, d_exact)) = ran(op, cfg, make_x, dtype)
    want = op.bwd(exact, d_exact, cfg)[0]
    _, pending = op.dgrad(residuals, dy, cfg)
    sums = tree_map(lambda p: torch.zeros_like(p, dtype=torch.float32), params)
    got = batch_wgrads(op, [pending, pending], cfg, into=sums, how=how)
    assert off(got.bias, 2 * want.bias) < 1e-6
    assert off(got.weight, 2 * want.weight) < ROUNDOFF[dtype]


@pytest.mark.turns("bias")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [(), (1,), (2,), (3,), (17,), (1, 1), (1, 3)], ids=str)
def test_a_linear_layers_sums_are_as_exact_as_pytorchs(rows, bias):
    """The mean error over some draws, of y and every gradient by both backwards, in roundings of the sum of all terms' sizes.
    A single number from a lucky draw would prove nothing."""
    generator = torch.Generator().manual_seed(0)
    for inner, outer in itertools.product((1, 3, 65, 129), (1, 5, 65, 129)):
        cfg, found = LinearConfig(inner, outer, bias=bias), []
        for _ in range(12):
            x, w, b, dy = (torch.randn(s, generator=generator) for s in ((*rows, inner), (outer, inner), (outer,), (*rows, outer)))
            leaves = [x, w, b][: 2 + bias]
            want, sizes, own = (by_autograd([f(t) for t in leaves], f(dy)) for f in (torch.Tensor.double, wide_size, torch.clone))
            y, residuals = linear.fwd(LinearParams(w, b if bias else None), x, cfg)
            dx, pending = linear.dgrad(residuals, dy, cfg)
            for dparams, d_x in (linear.bwd(residuals, dy, cfg), (linear.wgrad(pending, cfg), dx)):
                got = [y, d_x, dparams.weight, dparams.bias][: 3 + bias]
                found.append([(roundings(g, e, s), roundings(o, e, s)) for g, o, e, s in zip(got, own, want, sizes, strict=True)])
        for ours, torchs in torch.tensor(found).mean(0).tolist():
            assert ours <= SUM_FACTOR * torchs + SUM_ROUNDINGS, (inner, outer, ours, torchs)


def by_autograd(leaves, dy):
    """y and the gradients of the leaves."""
    for t in leaves:
        t.requires_grad_()
    y = torch.nn.functional.linear(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def wide_size(t):
    return t.double().abs()


def roundings(got, want, sizes):
    return float((got.double() - want).abs().max() / sizes.max()) / ROUNDOFF[torch.float32]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_wide_sum_takes_narrow_factors(device, monkeypatch):
    """The library of a device takes them as they are; on a CPU they are cast."""
    with FakeTensorMode():
        sizes = ((3, 5), torch.float32), ((3, 4), torch.bfloat16), ((4, 5), torch.bfloat16)
        out, a, b = (torch.empty(size, dtype=dtype, device=device) for size, dtype in sizes)
    calls = []
    monkeypatch.setattr(torch, "addmm", lambda *args, **options: calls.append(([t.dtype for t in args], options)))
    _add_wide(out, a, b, 0.5, 1.0)
    ((dtypes, options),) = calls
    assert options.pop("out") is out and (options.pop("beta"), options.pop("alpha")) == (1.0, 0.5)
    of_factors = torch.float32 if device == "cpu" else torch.bfloat16
    assert dtypes == [torch.float32, of_factors, of_factors] and options == (
        {} if device == "cpu" else {"out_dtype": torch.float32}
    )
