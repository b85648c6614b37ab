"""Products by CUDA's library: their arguments, with torch's CPU kernels and with the checks that torch makes without a device."""

import itertools
import random as draws
import types

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from funcops.engine.backend import gemm, shared
from funcops.library.formats import Format, quantize_tensor, turned
from funcops.library.kernels.scaled_mm import scaled_mm

ours = pytest.importorskip("funcops.library.kernels.triton.scaled_mm")
library = pytest.importorskip("funcops.library.kernels.triton.scaled_library")
layouts = pytest.importorskip("funcops.library.kernels.triton.scaled_layouts")
ways = pytest.importorskip("funcops.library.kernels.triton.scaled_ways")
pytestmark = pytest.mark.skipif(library._WAYS is None, reason="torch has no scaled_mm")
TENSOR, EACH, BLOCK, SQUARE = (0, 0), (1, 0), (1, 128), (128, 128)
PAIRS = (TENSOR, TENSOR), (EACH, EACH), (BLOCK, SQUARE), (BLOCK, BLOCK)
ON_CPU = pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU"), reason="this torch's CPU has no scaled_mm"
)
ELEMENTS = tuple(itertools.product(("e4m3", "e5m2"), repeat=2))


def operands(m, n, k, elements, tiles):
    g = torch.Generator().manual_seed(m + n + k)
    sides = zip((m, n), elements, tiles, strict=True)
    return [quantize_tensor(torch.randn(rows, k, generator=g), Format(element, tile, "float32")) for rows, element, tile in sides]


def asked(p, q, elements, tiles, out=torch.bfloat16):
    return library.product(p.codes, p.scales, q.codes, q.scales, elements, tiles, out)


def on_cuda(t):
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")


@ON_CPU
@pytest.mark.parametrize("tiles", PAIRS[:2], ids=str)
def test_products_equal_products_of_decoded_operands(tiles):
    for elements, (m, n, k) in itertools.product(ELEMENTS[:3], ((1, 16, 32), (37, 48, 16), (2, 16, 144))):
        p, q = operands(m, n, k, elements, tiles)
        got = asked(p, q, elements, tiles, torch.float32)
        torch.testing.assert_close(got.double(), p.dequantize(torch.float64) @ q.dequantize(torch.float64).mT, rtol=1e-5, atol=1e-4)
        batched = library.product(p.codes[None], p.scales, q.codes, q.scales, elements, tiles, torch.float32)
        assert torch.equal(batched, got[None])


def test_calls_pass_the_checks_of_cuda(monkeypatch):
    """Fake tensors of a CUDA device let torch check shapes, strides and dtypes of quantised operands and scales; a call that torch
    refuses is never made. (If blocks do not divide a size, torch's checks expect too few scales.)"""
    monkeypatch.setattr(library, "_aligned", lambda *tensors: True)
    rng, served, left = draws.Random(0), 0, 0
    for tiles, elements in itertools.product(PAIRS, ELEMENTS):
        for _ in range(6):
            m, n, k = rng.choice([4, 16, 100, 128, 260, 33]), rng.choice([128, 384, 72]), rng.choice([128, 512, 640, 200])
            p, q = operands(m, n, k, elements, tiles)
            with FakeTensorMode():
                of_p, of_q = ([on_cuda(t) for t in (one.codes, one.scales)] for one in (p, q))
                c = library.product(*of_p, *of_q, elements, tiles, torch.bfloat16)
            unserved = n % 16 or k % 16 or elements == ("e5m2", "e5m2")
            unserved = unserved or (tiles[0] == BLOCK and (elements != ("e4m3", "e4m3") or m % 4))
            assert (c is None) == bool(unserved), (tiles, elements, m, n, k)
            assert c is None or (c.shape == (m, n) and c.is_contiguous())
            served, left = served + (c is not None), left + (c is None)
    assert served >= 15 and left >= 15


def test_scales_lie_as_the_library_reads_them():
    """No product of a recipe copies a scale, unless the weights' tiles along K are not a multiple of four."""
    x, w = torch.randn(256, 512), torch.randn(384, 512)
    row, square = quantize_tensor(x, Format("e4m3", BLOCK)), quantize_tensor(w, Format("e4m3", SQUARE))
    for q, tile in ((row, BLOCK), (turned(row), BLOCK), (quantize_tensor(x, row.format, side="col"), BLOCK), (square, SQUARE)):
        assert layouts.as_read(q.scales, tile).data_ptr() == q.scales.data_ptr()


@ON_CPU
def test_products_go_to_the_library_unless_ours_are_requested(monkeypatch):
    """The library is patched to serve this device; products that it refuses are ours."""
    asked_for, product = [], library.product

    def counted(*args):
        asked_for.append(product(*args))
        return asked_for[-1]

    monkeypatch.setattr(ours, "_library_serves", lambda *_: True)
    monkeypatch.setattr(library, "product", counted)
    p, q = operands(16, 16, 32, ELEMENTS[0], PAIRS[0])
    args = *p.args, *q.args, "e4m3", 0, 0, "e4m3", 0, 0, "float32", 32, torch.float32
    got = scaled_mm.kernel.triton_impl(*args)
    assert got is asked_for[0]
    with gemm("triton"):
        torch.testing.assert_close(scaled_mm.kernel.triton_impl(*args), got)
    assert len(asked_for) == 1
    p, q = operands(16, 7, 32, ELEMENTS[0], PAIRS[0])
    args = *p.args, *q.args, *args[6:]
    assert scaled_mm.kernel.triton_impl(*args).shape == (16, 7) and asked_for[1:] == [None]


def test_addresses_that_the_library_refuses_are_left():
    p, q = operands(16, 16, 32, ELEMENTS[0], PAIRS[0])
    p.codes = torch.cat((p.codes.new_zeros(1), p.codes.flatten()))[1:].view(16, 32)
    assert asked(p, q, ELEMENTS[0], PAIRS[0]) is None


CAPABILITIES = (80, 86, 89, 90, 100, 103, 120, 121)
WAYS = {  # the kind of scales, elements and tiles of both: the capabilities that have it, and where a device has confirmed it
    ("float32", "e4m3", "e5m2", TENSOR, TENSOR): ((89, 90, 100, 103, 120, 121), (90,)),
    ("pow2", "e5m2", "e4m3", TENSOR, TENSOR): ((89, 90, 100, 103, 120, 121), (90,)),
    ("float32", "e4m3", "e4m3", EACH, EACH): ((90, 100, 103), (90,)),
    ("float32", "e4m3", "e4m3", BLOCK, SQUARE): ((90,), (90,)),
    ("float32", "e5m2", "e4m3", BLOCK, SQUARE): ((), ()),
    ("float32", "e5m2", "e5m2", TENSOR, TENSOR): ((), ()),
    ("float32", "e4m3", "e4m3", SQUARE, BLOCK): ((), ()),
    ("e8m0", "e4m3", "e5m2", (1, 32), (32, 32)): ((100, 103, 120, 121), ()),
    ("e8m0", "e5m2", "e5m2", (1, 32), (1, 32)): ((), ()),
    ("e8m0", "e4m3", "e4m3", (1, 32), (1, 16)): ((), ()),
    ("e4m3", "e2m1", "e2m1", (1, 16), (16, 16)): ((100, 103, 120, 121), ()),
    ("e4m3", "e4m3", "e2m1", (1, 16), (16, 16)): ((), ()),
}


class Active:
    """A stand-in for Triton's driver on a CUDA device."""

    def __init__(self, arch):
        self.target = types.SimpleNamespace(backend="cuda", arch=arch)
        self.utils = types.SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 101376})

    def get_current_device(self):
        return 0

    def get_current_target(self):
        return self.target


@pytest.fixture
def on(monkeypatch):
    """Makes the device one of a capability, with CUDA's library."""

    def choose(arch):
        for module in (ours, shared):
            monkeypatch.setattr(module, "IN_INTERPRETER", False)
            monkeypatch.setattr(module, "driver", types.SimpleNamespace(active=Active(arch)))
        monkeypatch.setattr(ours, "INTERPRETED", False)
        monkeypatch.setattr(ways, "SERVED", True)

    return choose


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_library_serves_what_was_measured_or_is_asked_for_or_has_no_other_kernel(way, on):
    (kind, a, b, *tiles), (devices, confirmed) = way, WAYS[way]
    for arch in CAPABILITIES:
        on(arch)
        served = {}
        for provider in ("auto", "cublas"):
            with gemm(provider):
                served[provider] = ours._library_serves(kind, (a, b), tuple(tiles), 0, ours.driver.active)
        alone = arch < (100 if kind in ways.SMALL else 90)
        assert served == {"auto": arch in (devices if alone else confirmed), "cublas": arch in devices}, arch


@ON_CPU
@pytest.mark.parametrize(("m", "n", "k"), [(16, 16, 32), (5, 7, 33), (1, 32, 100), (3, 17, 16)])
def test_a_device_of_89_multiplies_codes_of_any_size_by_the_library(m, n, k, on, monkeypatch):
    """And of any address. It has no kernel of ours, so what the library lacks raises, as do ours by request."""
    on(89)
    calls, inner = [], torch.nn.functional.scaled_mm
    monkeypatch.setattr(
        torch.nn.functional, "scaled_mm", lambda *given, **how: calls.append(given[0].shape) or inner(*given, **how)
    )
    for elements in ELEMENTS:
        p, q = operands(m, n, k, elements, PAIRS[0])
        p.codes = torch.cat((p.codes.new_zeros(1), p.codes.flatten()))[1:].view(p.codes.shape)
        args = *p.args, *q.args, elements[0], 0, 0, elements[1], 0, 0, "float32", k, torch.float32
        raises = pytest.raises(ValueError, match="device must be of sm_90 or later for 8-bit products.*emulate=True.*got sm_89")
        if elements == ("e5m2", "e5m2"):
            with raises:
                scaled_mm.kernel.triton_impl(*args)
            continue
        got = scaled_mm.kernel.triton_impl(*args)
        want = p.dequantize(torch.float64) @ q.dequantize(torch.float64).mT
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)
        assert got.is_contiguous() and calls.pop() == (m, -(-k // 16) * 16) and not calls
        with gemm("triton"), raises:
            scaled_mm.kernel.triton_impl(*args)


SMALL_PAIRS = [("e8m0", a, b, 32) for a, b in ELEMENTS[:3]] + [("e4m3", "e2m1", "e2m1", 16)]


def of_small_blocks(kind, a, b, size, rows):
    """Operands with small blocks, the second one's square or not, and the arguments of their product."""
    g, whole = torch.Generator().manual_seed(rows), torch.tensor([3.0]) if kind == "e4m3" else None
    tiles = (1, size), draws.Random(rows).choice([(1, size), (size, size)])
    sizes = (rows, 48), (a, b), tiles
    p, q = (
        quantize_tensor(torch.randn(m, 192, generator=g), Format(e, t, kind), amax=whole) for m, e, t in zip(*sizes, strict=True)
    )
    return p, q, (*p.args, *q.args, a, *tiles[0], b, *tiles[1], kind, 192, torch.float32)


def as_cublas_reads(codes, scales, recipe):
    """The numbers of codes [R, K] whose scales lie as cuBLAS's page says: in tiles of 128 rows and 4 columns, one after the other
    along K; in a tile byte 16 (r % 32) + 4 (r / 32) + c. Of a byte of two 4-bit codes the lower half is first."""
    ways = torch.nn.functional.ScalingType
    (blocks, *whole), size = scales, {ways.BlockWise1x32: 32, ways.BlockWise1x16: 16}[recipe[0]]
    if codes.dtype is torch.float4_e2m1fn_x2:
        halves = codes.view(torch.uint8)
        at = torch.stack((halves & 15, halves >> 4), -1).flatten(1).long()
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[at & 7] * (1 - 2 * (at >> 3))
    else:
        values = codes.float()
    r, c = torch.arange(values.shape[0])[:, None], torch.arange(values.shape[1] // size)[None, :]
    across = -(-c.shape[1] // 4)
    byte = ((r // 128) * across + c // 4) * 512 + 16 * (r % 32) + 4 * (r % 128 // 32) + c % 4
    assert blocks.numel() == -(-values.shape[0] // 128) * across * 512
    decoded = values.double() * blocks.double()[byte].repeat_interleave(size, 1)
    return decoded * whole[0].double() if whole else decoded


@pytest.mark.parametrize("pair", SMALL_PAIRS, ids=str)
def test_small_blocks_reach_the_library_as_it_reads_them(pair, on, monkeypatch):
    """They do by request alone, on Blackwell; the library here is written from cuBLAS's page."""

    def by_its_page(a, b, of_a, recipe_a, of_b, recipe_b, swizzle_a, swizzle_b, output_dtype):
        orders = torch.nn.functional.SwizzleType
        assert swizzle_a == swizzle_b == [orders.SWIZZLE_32_4_4, orders.NO_SWIZZLE][: len(of_a)]
        assert not {t.dtype for t in (of_a[0], of_b[0])} - {torch.float8_e8m0fnu, torch.float8_e4m3fn}
        found.append((as_cublas_reads(a, of_a, recipe_a) @ as_cublas_reads(b.mT, of_b, recipe_b).mT).to(output_dtype))
        return found[-1]

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", by_its_page)
    for arch, rows in ((100, 40), (120, 300)):
        p, q, args = of_small_blocks(*pair, rows)
        on(arch)
        found = []
        with gemm("cublas"):
            got = scaled_mm.kernel.triton_impl(*args)
        assert len(found) == 1 and got.data_ptr() == found[0].data_ptr()
        torch.testing.assert_close(got.double(), p.dequantize(torch.float64) @ q.dequantize(torch.float64).mT, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("pair", SMALL_PAIRS, ids=str)
def test_calls_of_small_blocks_pass_torchs_checks(pair, monkeypatch):
    """Which a call with a scale too few does not."""
    monkeypatch.setattr(library, "_aligned", lambda *tensors: True)
    kind, a, b, _ = pair
    for rows in (1, 48, 129):
        p, q, args = of_small_blocks(*pair, rows)
        tiles = tuple(args[7:9]), tuple(args[10:12])
        of_p, of_q = ([None if t is None else t.to("meta") for t in one.args] for one in (p, q))
        c = library.product(*of_p[:2], *of_q[:2], (a, b), tiles, torch.bfloat16, kind, (of_p[2], of_q[2]))
        assert c.shape == (rows, 48)
        if torch.__version__ >= "2.14":  # which checks scales on a device alone: its meta function tells a shape
            continue
        with monkeypatch.context() as patch, pytest.raises(RuntimeError):
            patch.setattr(layouts, "swizzled", lambda scales: scales.flatten()[1:])
            library.product(*of_p[:2], *of_q[:2], (a, b), tiles, torch.bfloat16, kind, (of_p[2], of_q[2]))
