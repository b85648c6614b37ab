"""Grouped products over descriptors: against the loop over groups in float64; and how often their matrices leave memory."""

import collections
import itertools
import random as draws

import pytest
import torch

from funcops.engine.backend import backend, gemm
from funcops.library.kernels import experts
from funcops.library.kernels import grouped as declared
from funcops.testing.tolerances import assert_close

by_triton = pytest.importorskip("funcops.library.kernels.triton.grouped")
SIZES = [5, 0, 16], [130, 1, 0, 70], [0, 0], [64]


@pytest.fixture
def launched(monkeypatch):
    """The names of launches over descriptors."""
    found = []
    for name in ("_launch_described", "_launch_wgrad_described"):
        launch = getattr(by_triton, name)
        monkeypatch.setattr(
            by_triton, name, lambda *args, name=name, launch=launch, **kw: (found.append(name), launch(*args, **kw))
        )
    return found


def drawn(seed, dtype):
    """Rows, of which the last have no group and are NaN, gradients and matrices; with an index of every second seed."""
    rng = draws.Random(seed)
    sizes, k, outer = SIZES[seed % len(SIZES)], rng.choice((40, 64, 136)), rng.choice((64, 128, 192))
    generator = torch.Generator().manual_seed(seed)
    rows, groups = sum(sizes) + 3, len(sizes)
    offsets = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32)
    every = 2 if seed % 2 else 1
    index = torch.randperm(rows, generator=generator).to(torch.int32) if seed % 2 else None
    x, dy = torch.randn(-(-rows // every), k, generator=generator), torch.randn(rows, outer, generator=generator)
    w, b = torch.randn(groups, outer, k, generator=generator), torch.randn(groups, outer, generator=generator)
    if index is None:
        x[sum(sizes) :] = float("nan")
    dy[sum(sizes) :] = float("nan")
    return *(t.to(dtype) for t in (x, dy, w, b)), offsets, index, every, torch.rand(rows, generator=generator), sum(sizes)


def exact(args):
    return [t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in args]


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 12))])
def test_products_over_descriptors_are_those_of_each_group(seed, launched):
    """No other group's row has a say, even if it is NaN."""
    dtype = torch.float16 if seed % 3 == 0 else torch.bfloat16
    x, dy, w, b, offsets, index, every, scales, rows = drawn(seed, dtype)
    into = torch.ones(w.shape)
    for function, args in (
        (declared.grouped_product, (x, w, b, offsets, index, every, None if seed % 2 else scales, True)),
        (declared.grouped_product, (dy, w, None, offsets, None, 1, None, False)),
        (declared.grouped_wgrad, (dy, x, offsets, None, index, every, None, False)),
        (declared.grouped_wgrad, (x, dy, offsets, index, None, every, None, False)),
    ):
        with backend("triton"), gemm("specialised"):
            found = function(*args)
        with backend("torch"):
            wanted = function(*exact(args))
        y, of_rows = (found, function is declared.grouped_product) if torch.is_tensor(found) else (found[0], False)
        wanted = wanted if torch.is_tensor(wanted) else wanted[0]
        assert_close(y[:rows] if of_rows else y, wanted[:rows] if of_rows else wanted, dtype=dtype)
    with backend("triton"), gemm("specialised"):
        declared.grouped_wgrad_into(dy, x, offsets, None, index, every, None, into, None)
    with backend("torch"):
        assert_close(into, declared.grouped_wgrad(*exact((dy, x, offsets, None, index, every, None)), False)[0] + 1, dtype=dtype)
    assert collections.Counter(launched) == {"_launch_described": 2, "_launch_wgrad_described": 3}


def test_a_descriptor_is_the_choice_of_a_table_or_a_request():
    """Until a device has measured it, neither it nor torch's product is the default."""
    t = torch.empty(64, 64, dtype=torch.bfloat16)
    odd, wide = torch.empty(64, 60, dtype=torch.bfloat16), torch.empty(64, 64)
    for name, wanted in (("auto", "pointer"), ("triton", "pointer"), ("cublas", "pointer"), ("specialised", "descriptor")):
        with gemm(name):  # torch's is for CUDA
            assert by_triton.way_of("product", t, t) == wanted and by_triton.way_of("wgrad", t, t) == wanted
            assert by_triton.way_of("product", odd, t) == by_triton.way_of("product", wide, wide) == "pointer"


def bytes_of_matrices(rows, groups, length, width, tile, stretch, programs=132, cache=by_triton.HALF_CACHE):
    """The bytes of matrices [groups, width, length] of 16 bits that leave memory: tiles run `programs` at a time, in order, and
    what was read is kept as long as `cache` bytes hold it. `rows`: of each group."""
    columns, high = -(-width // tile.n), -(-rows // tile.m)
    tiles, kept, read = high * groups, collections.OrderedDict(), 0
    size = {"row": 2 * tile.m * length, "column": 2 * tile.n * length}
    held = 0
    for first in range(0, tiles * columns, programs):
        now = {}
        for work in range(first, min(first + programs, tiles * columns)):
            start = work // (stretch * columns) * stretch
            height = min(tiles - start, stretch)
            m, n = start + work % (stretch * columns) % height, work % (stretch * columns) // height
            now |= {("row", m): None, ("column", m // high, n): None}
        for key in now:
            if key not in kept:
                held += size[key[0]]
                read += size[key[0]] if key[0] == "column" else 0
            kept[key] = kept.pop(key, None)
            while held > cache:
                held -= size[kept.popitem(last=False)[0][0]]
    return read


@pytest.mark.parametrize(
    ("rows", "groups", "length", "width", "wanted"),
    [(512, 128, 2048, 1536, (1.0, 1.0)), (8192, 8, 4096, 28672, (8.0, 4.0))],
    ids=["Qwen3-30B-A3B", "Mixtral"],
)
def test_matrices_are_read_less_often(rows, groups, length, width, wanted):
    """In multiples of the bytes of all matrices: in the order of tiles over pointers, and over descriptors."""
    all_of_them = 2 * groups * length * width
    before = bytes_of_matrices(rows, groups, length, width, by_triton.SQUARE, by_triton.GROUP) / all_of_them
    stretch = by_triton.stretch(length, by_triton.WIDE)
    after = bytes_of_matrices(rows, groups, length, width, by_triton.WIDE, stretch) / all_of_them
    assert (before, after) == wanted


@pytest.mark.turns("seed", "kind", every=3)
@pytest.mark.parametrize("kind", ["swiglu", "glu", "clamped_swiglu"])
@pytest.mark.parametrize("seed", range(3))
def test_experts_over_descriptors_are_those_of_torch(seed, kind, launched):
    """Both products of experts, with the gated unit as a kernel of its own: any results wanted, choices dropped, a bias or none."""
    rng, generator = draws.Random(seed), torch.Generator().manual_seed(seed)
    tokens, choices, groups, width, inner = rng.choice((9, 40)), 2, 3, 64, 32
    indices = torch.randint(0, groups + 1, (tokens, choices), generator=generator)  # the last: dropped
    order = indices.flatten().argsort(stable=True)
    offsets = torch.cat((torch.zeros(1), indices.flatten().bincount(minlength=groups + 1)[:groups].cumsum(0))).to(torch.int32)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order))).view_as(indices)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    x, dy, up, down = draw(tokens, width), draw(tokens, width), draw(groups, 2 * inner, width), draw(groups, width, inner)
    bias, of_down = (draw(groups, 2 * inner), draw(groups, width)) if seed else (None, None)
    weights, how = torch.rand(tokens, choices, generator=generator), (kind, 7.0, 1.702, 1.0, False)
    z = experts.experts_up.kernel.torch_impl(*exact((x, up, bias, weights, order, offsets)), *how)[0].to(torch.bfloat16)
    of_dy = dy, down, z, weights, order, offsets, place, of_down, indices
    calls = [(experts.experts_up, (x, up, bias, weights, order, offsets, *how))]
    for wanted in ((True, True, True), (True, False, False), (False, True, True), (True, True, False)):
        calls.append((experts.experts_dgrad, (*of_dy, *how, *wanted)))
    for function, args in calls:
        with backend("triton"), gemm("specialised"):
            found = function(*args)
        with backend("torch"):
            wanted = function(*exact(args))
        assert_close(found, wanted, dtype=torch.bfloat16)
    assert launched == ["_launch_described"] * len(calls)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_over_pointers_read_rows_longer_than_a_tile(dtype):
    generator, width, inner = torch.Generator().manual_seed(0), 144, 16
    offsets, order = torch.tensor([0, 2, 2, 5], dtype=torch.int32), torch.randperm(6, generator=generator)
    x, up = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((3, width), (3, 2 * inner, width)))
    args = x, up, None, torch.rand(3, 2, generator=generator), order, offsets, "swiglu", 7.0, 1.702, 1.0, False
    with backend("triton"):
        found = experts.experts_up(*args)
    wanted = experts.experts_up.kernel.torch_impl(*exact(args))
    assert_close([t[:5] for t in found], [t[:5] for t in wanted], dtype=dtype, length=width)


def test_products_that_the_library_makes_are_those_of_torch(monkeypatch):
    """Also with rows that an index takes, factors of rows, and a bias."""
    asked = []
    monkeypatch.setattr(by_triton, "way_of", lambda kind, *operands: asked.append(kind) or "library")
    for seed in (1, 3):
        x, dy, w, b, offsets, index, every, scales, _ = drawn(seed, torch.float32)
        dy = dy.nan_to_num(0.0)
        for function, args in (
            (declared.grouped_product, (x, w, b, offsets, index, every, scales, True)),
            (declared.grouped_wgrad, (dy, x, offsets, None, index, every, scales, True)),
        ):
            with backend("triton"):
                found = function(*args)
            with backend("torch"):
                wanted = function(*args)
            for one, other in zip(*(t if isinstance(t, tuple) else (t,) for t in (found, wanted)), strict=True):
                assert torch.equal(one, other)
    assert asked == ["product", "wgrad"] * 2


@pytest.mark.parametrize(
    ("change", "served"),
    [
        (lambda rows, other: (rows, other), True),
        (lambda rows, other: (rows, other.expand(2, 16, 16).contiguous()), True),
        (lambda rows, other: (rows.float(), other.float()), False),
        (lambda rows, other: (rows[:, :12].contiguous(), other), False),
        (lambda rows, other: (rows.mT, other), False),
        (lambda rows, other: (rows[:0], other), False),
        (lambda rows, other: (rows.flatten()[1:17].view(1, 16), other), False),
        (lambda rows, other: (rows, other[:12].expand(2, 12, 16).contiguous()), False),
        (lambda rows, other: (rows, other[:12].contiguous()), True),
    ],
)
def test_torchs_grouped_product_takes_even_rows_of_16_bits(change, served, monkeypatch):
    """On a device that is new enough, and in memory that begins on a multiple of 16 bytes."""
    given = change(*torch.zeros(2, 16, 16, dtype=torch.bfloat16))
    monkeypatch.setattr(declared, "_grouped_mm", declared._grouped_mm or torch.mm)
    monkeypatch.setattr(torch.version, "hip", None)
    for capability, new in (((9, 0), served), ((7, 5), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert declared.library_serves(*given) is new
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert declared.library_serves(*given) is False
