"""Groups of rows with a scale each, by Triton's interpreter: the bits of torch's bodies, in one launch for each."""

import itertools
import random as draws

import pytest
import torch

from funcops.engine.backend import backend
from funcops.library.kernels.grouped_quantize import group_amax, quantize_groups, quantize_groups_scaled

by_triton = pytest.importorskip("funcops.library.kernels.triton.grouped_quantize")
WAYS = ("e4m3", 0, "float32", 0.0), ("e5m2", 0, "pow2", 0.0), ("e4m3", 0, "float32", 1e-2), ("e2m1", 16, "e4m3", 0.0)
SIZES = [5, 0, 16], [33, 1, 0, 70], [0, 0], [1], [0, 300]
DTYPES = torch.bfloat16, torch.float32, torch.float16


def drawn(seed):
    """Rows of very different sizes, some beyond the last group, with NaN, zeros and infinity; every second time gathered."""
    rng = draws.Random(seed)
    sizes, width, beyond = SIZES[seed % len(SIZES)], rng.choice((1, 16, 40, 129, 1030)), rng.choice((0, 3))
    generator = torch.Generator().manual_seed(seed)
    rows = sum(sizes) + beyond
    every = rng.choice((1, 2)) if seed % 2 else 1
    index = torch.randperm(rows, generator=generator).to(torch.int32) if seed % 2 else None
    x = torch.randn(-(-rows // every), width, generator=generator) * torch.randn(-(-rows // every), 1, generator=generator).exp()
    if len(x) > 4:
        x[0, 0], x[1], x[4, -1] = float("nan"), 0.0, float("inf")
    offsets = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32)
    return x.to(DTYPES[seed % 3]), offsets, index, every


def same(found, wanted):
    for one, other in zip(*(t if isinstance(t, tuple) else (t,) for t in (found, wanted)), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            assert one.numpy().tobytes() == other.numpy().tobytes()


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 30))])
def test_both_implementations_give_the_same_bits(seed, monkeypatch):
    rows, launches = drawn(seed), []
    launch = by_triton._launch
    monkeypatch.setattr(by_triton, "_launch", lambda *args, **kw: (launches.append(args), launch(*args, **kw)))
    with backend("torch"):
        amax = group_amax(*rows, False)
    calls = [(group_amax, (*rows, False)), (quantize_groups_scaled, (*rows, "e4m3", torch.rand(len(rows[1]) - 1) * 100))]
    calls += [(quantize_groups, (*rows, amax, None, *way)) for way in WAYS]
    for function, args in calls:
        with backend("torch"):
            wanted = function(*args)
        with backend("triton"):
            same(function(*args), wanted)
    assert len(launches) == (len(calls) if len(rows[0]) else 0)


def test_a_groups_codes_are_its_own():
    """Whatever the other groups' rows are: no scale of a group is made from another's."""
    x, offsets = torch.randn(12, 32), torch.tensor([0, 5, 12], dtype=torch.int32)
    other = torch.cat((x[:5], 1e4 * x[5:]))
    for name in ("torch", "triton"):
        with backend(name):
            one, two = (
                quantize_groups(t, offsets, None, 1, group_amax(t, offsets, None, 1, False), None, *WAYS[0]) for t in (x, other)
            )
        same(tuple(t[:5] for t in one[:2]), tuple(t[:5] for t in two[:2]))
        assert not torch.equal(one[1][5:], two[1][5:])


def test_words_and_transforms_are_left_to_torch():
    x, offsets = torch.randn(32, 16), torch.tensor([0, 16, 32], dtype=torch.int32)
    with backend("torch"):
        amax = group_amax(x, offsets, None, 1, True)
        wanted = quantize_groups(x, offsets, None, 1, amax, torch.arange(512).view(32, 16), *WAYS[3])
    with backend("triton"):
        same(group_amax(x, offsets, None, 1, True), amax)
        same(quantize_groups(x, offsets, None, 1, amax, torch.arange(512).view(32, 16), *WAYS[3]), wanted)


@pytest.mark.parametrize("gathered", [False, True])
def test_rows_without_columns_have_scales_and_no_codes(gathered):
    x, offsets = torch.empty(3, 0), torch.tensor([0, 2, 3], dtype=torch.int32)
    index = torch.tensor([2, 0, 1, 1], dtype=torch.int32) if gathered else None
    args = x, offsets, index, 1, "e4m3", torch.tensor([2.0, 3.0])
    with backend("torch"):
        wanted = quantize_groups_scaled(*args)
    with backend("triton"):
        same(quantize_groups_scaled(*args), wanted)
