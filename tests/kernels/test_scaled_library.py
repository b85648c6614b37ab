"""Products by CUDA's library: their arguments, with torch's CPU kernels and with the checks that torch makes without a device."""

import itertools
import random as draws

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from funcops.engine.backend import gemm
from funcops.library.formats import Format, quantize_tensor, turned
from funcops.library.kernels.scaled_mm import scaled_mm

ours = pytest.importorskip("funcops.library.kernels.triton.scaled_mm")
library = pytest.importorskip("funcops.library.kernels.triton.scaled_library")
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
        assert library._along(q.scales, tile).data_ptr() == q.scales.data_ptr()


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
