"""Products of codes: Triton's interpreter against the decoded operands in float64, and the errors of devices that lack a format."""

import importlib
import random as draws
import re
import types

import pytest
import torch

from funcops.engine.backend import backend
from funcops.library.formats import Format, quantize_tensor
from funcops.library.kernels import quantize
from funcops.library.kernels.scaled_mm import scaled_mm

pytest.importorskip("triton")
TENSOR, EACH, BLOCK, SQUARE = (0, 0), (1, 0), (1, 128), (128, 128)
PAIRS = [
    *(
        (a, b, kind, tiles)
        for a, b in (("e4m3", "e4m3"), ("e5m2", "e4m3"))
        for kind in ("pow2", "float32")
        for tiles in (
            (TENSOR, TENSOR),
            (EACH, EACH),
            (EACH, TENSOR),
            (BLOCK, SQUARE),
            (BLOCK, BLOCK),
            (SQUARE, BLOCK),
            (BLOCK, TENSOR),
        )
    ),
    *(("e4m3", b, "e8m0", tiles) for b in ("e4m3", "e5m2", "e2m1") for tiles in (((1, 32), (1, 32)), ((1, 32), (32, 32)))),
    ("e2m1", "e2m1", "e4m3", ((1, 16), (1, 16))),
    ("e2m1", "e2m1", "e4m3", ((1, 16), (16, 16))),
]
SIZES = (5, 7, 3), (1, 1, 1), (130, 33, 129), (64, 140, 272), (17, 16, 300), (3, 4, 0), (0, 4, 9)


def product(m, n, k, a, b, kind, tiles, out, seed=0):
    """Arguments, and the product of the decoded operands in float64, with the sum of its terms' sizes."""
    g = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(rows, k, generator=g) * torch.exp2(torch.randint(-6, 6, (rows, 1), generator=g)) for rows in (m, n))
    formats = Format(a, tiles[0], kind), Format(b, tiles[1], kind)
    p, q = quantize_tensor(left, formats[0]), quantize_tensor(right, formats[1])
    args = *p.args, *q.args, a, *tiles[0], b, *tiles[1], kind, k, out
    decoded = [t.dequantize(torch.float64) for t in (p, q)]
    return args, decoded[0] @ decoded[1].mT, decoded[0].abs() @ decoded[1].abs().mT


@pytest.mark.parametrize(
    ("a", "b", "kind", "tiles"),
    [pytest.param(*pair, marks=() if i % 6 == 0 or i == 3 else pytest.mark.slow, id=str(pair)) for i, pair in enumerate(PAIRS)],
)
def test_products_equal_products_of_decoded_operands(a, b, kind, tiles):
    """Each pair of formats has two drawn sizes, both implementations and every dtype."""
    rng = draws.Random(str((a, b, kind, tiles)))
    for m, n, k in rng.sample(SIZES, 2):
        for name, out, within in (
            ("torch", torch.float32, 1e-6),
            ("triton", torch.float32, 1e-6),
            ("triton", torch.bfloat16, 2**-8),
        ):
            args, want, size = product(m, n, k, a, b, kind, tiles, out, rng.randrange(99))
            with backend(name):
                got = scaled_mm(*args)
            assert got.dtype is out and got.shape == want.shape
            rounding = within * want.abs() if out is torch.bfloat16 else 0.0
            assert ((got.double() - want).abs() <= 1e-6 * size + rounding).all(), (name, out, (m, n, k))


@pytest.mark.parametrize(("a", "b"), [("e4m3", "e4m3"), ("e5m2", "e4m3")])
@pytest.mark.parametrize(
    "tiles", [(TENSOR, TENSOR), (EACH, EACH), (EACH, TENSOR), (TENSOR, EACH), (BLOCK, SQUARE), (BLOCK, BLOCK), (SQUARE, BLOCK)]
)
def test_devices_that_multiply_codes_scale_the_sums(a, b, tiles, monkeypatch):
    """The kernel's own way with 8-bit codes on Hopper, here in the interpreter, with scales of any size."""
    ours = importlib.import_module("funcops.library.kernels.triton.scaled_mm")
    codes_of, small = ours._codes, ours.BLOCKS._replace(m=16, n=16)

    def typed(codes, element, *how):
        found = codes_of(codes, element, *how)
        found.base = found.base.view(ours.ELEMENTS[element].dtype)
        return found

    monkeypatch.setattr(ours, "_chosen", lambda *_: (small, small.k, small.k))
    monkeypatch.setattr(ours, "_codes", typed)
    monkeypatch.setattr(ours, "INTERPRETED", False)
    args, want, size = product(18, 7, 144, a, b, "float32", tiles, torch.float32)
    with backend("triton"):
        got = scaled_mm(*args)
    assert ((got.double() - want).abs() <= 1e-6 * size).all()


DECODED = [(a, b, kind, tiles) for a, b, kind, tiles in PAIRS if kind != "float32"]


@pytest.fixture
def hopper(monkeypatch):
    """Codes that the device does not multiply, decoded and multiplied by our kernels in the interpreter; counts them."""
    ours, found = pytest.importorskip("funcops.library.kernels.triton.scaled_mm"), []
    by_decoding = ours._by_decoding
    monkeypatch.setattr(ours, "_chosen", lambda *_: None)
    monkeypatch.setattr(ours, "_decodes", lambda a, kind, b, other: ours._exact(a, kind) and ours._exact(b, other))
    monkeypatch.setattr(ours, "_by_decoding", lambda *args: found.append(args) or by_decoding(*args))
    return found


@pytest.mark.parametrize(
    ("a", "b", "kind", "tiles"),
    [pytest.param(*pair, marks=() if i % 5 == 0 else pytest.mark.slow, id=str(pair)) for i, pair in enumerate(DECODED)],
)
def test_devices_without_a_format_multiply_exact_operands(a, b, kind, tiles, hopper):
    for (m, n, k), out in zip(
        ((5, 7, 3), (130, 33, 129), (64, 140, 272)), (torch.float32, torch.float16, torch.bfloat16), strict=True
    ):
        args, want, size = product(m, n, k, a, b, kind, tiles, out)
        with backend("triton"):
            got = scaled_mm(*args, True)
            each = [
                quantize.dequantize(*args[i : i + 2], None, *args[j : j + 3], kind, k, torch.bfloat16) for i, j in ((0, 6), (3, 9))
            ]
        assert got.dtype is out and got.shape == want.shape
        rounding = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}[out] * want.abs()
        assert ((got.double() - want).abs() <= 1e-6 * size + rounding + 1e-7).all(), (m, n, k)
        for one, (codes, scales, _, *how) in zip(each, ((*args[:3], *args[6:9]), (*args[3:6], *args[9:12])), strict=True):
            assert torch.equal(one.float(), quantize.dequantize(codes, scales, None, *how, kind, k, torch.float32))
    assert len(hopper) == 3


def test_scales_of_rows_and_two_kinds_are_decoded_too(hopper):
    x, w = torch.randn(40, 64), torch.randn(24, 64)
    p, q = quantize_tensor(x, Format("e2m1", (1, 16), "e4m3", row_scaled=True)), quantize_tensor(w, Format("e4m3", (1, 32), "e8m0"))
    args = *p.args, *q.args, "e2m1", 1, 16, "e4m3", 1, 32, "e4m3", 64, torch.float32, True, "e8m0"
    with backend("triton"):
        got, turned = scaled_mm(*args), scaled_mm(*q.args, *p.args, *args[9:12], *args[6:9], "e8m0", *args[13:16], "e4m3")
    want = p.dequantize(torch.float64) @ q.dequantize(torch.float64).mT
    assert p.scale.shape == (40, 1) and len(hopper) == 2
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(turned.double(), want.mT, rtol=1e-5, atol=1e-4)


def test_float32_scales_of_blocks_are_not_exact_in_bfloat16(hopper):
    args, *_ = product(20, 24, 128, "e4m3", "e4m3", "float32", (BLOCK, SQUARE), torch.float32)
    with backend("triton"):
        assert torch.equal(scaled_mm(*args), scaled_mm.kernel.torch_impl(*args))
    assert not hopper


def test_a_nan_spoils_its_row_and_column_alone():
    for a, b, kind, tiles in (PAIRS[0], PAIRS[3], PAIRS[-1]):
        x, w = torch.randn(40, 256), torch.randn(24, 256)
        x[3, 7], w[20, 100] = float("nan"), float("nan")
        p, q = quantize_tensor(x, Format(a, tiles[0], kind)), quantize_tensor(w, Format(b, tiles[1], kind))
        args = *p.args, *q.args, a, *tiles[0], b, *tiles[1], kind, 256, torch.float32
        with backend("triton"):
            got = scaled_mm(*args)
        assert torch.equal(got.isnan(), scaled_mm(*args).isnan()) and got[3].isnan().all() and not got.isnan().all()


@pytest.mark.parametrize("pair", [PAIRS[0], PAIRS[3], PAIRS[-1]], ids=str)
def test_codes_in_any_strides_give_the_same_bits(pair):
    args, *_ = product(40, 24, 256, *pair, torch.float32)
    tensors = [i for i, t in enumerate(args) if isinstance(t, torch.Tensor)]
    with backend("triton"):
        want = scaled_mm(*args)
        for i in tensors:
            apart = torch.stack((args[i], args[i]), -1)[..., 0]
            assert torch.equal(scaled_mm(*args[:i], apart, *args[i + 1 :]), want), i


@pytest.mark.parametrize(
    ("kind", "element", "arch", "needed", "what"),
    [("f32", "e4m3", 80, 90, "8-bit"), ("e8m0", "e4m3", 90, 100, "MX"), ("e4m3", "e2m1", 90, 100, "NVFP4")],
)
def test_a_device_without_such_products_is_named(kind, element, arch, needed, what, monkeypatch):
    module = importlib.import_module("funcops.library.kernels.triton.scaled_mm")
    monkeypatch.setattr(module, "INTERPRETED", False)

    def chosen(arch, emulate=False):
        target = types.SimpleNamespace(backend="cuda", arch=arch)
        active = type("Active", (), {"get_current_target": staticmethod(lambda: target)})()
        return module._chosen.__wrapped__(kind, element, element, 0, 0, emulate, 0, active)

    said = f"of sm_{needed} or later for {what} products of {element} by {element} (or emulate=True), got sm_{arch}"
    with pytest.raises(ValueError, match=re.escape(said)):
        chosen(arch)
    assert chosen(arch, emulate=True) is None and chosen(needed) is not None


def test_codes_that_begin_between_multiples_of_16_bytes_give_the_same_bits():
    """A part of a larger tensor may begin so."""
    args, *_ = product(18, 8, 128, *PAIRS[0], torch.float32)
    moved = torch.cat((args[0].new_zeros(1), args[0].flatten()))[1:].view_as(args[0])
    assert moved.data_ptr() % 16 and moved.is_contiguous()
    with backend("triton"):
        assert torch.equal(scaled_mm(moved, *args[1:]), scaled_mm(*args))


@pytest.mark.parametrize(
    ("cols", "capability", "name"), [(0, 90, "WHOLE"), (128, 90, "BLOCKS"), (128, 100, "SINCE"), (64, 90, None)]
)
def test_tiles_of_codes_are_chosen_by_their_scales(cols, capability, name):
    """A block that is not of 128 columns has no product of codes on any device."""
    module = importlib.import_module("funcops.library.kernels.triton.scaled_mm")
    assert module._tile_of("float32", "e4m3", "e4m3", cols, capability) is (None if name is None else getattr(module, name))
