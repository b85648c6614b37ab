"""Quantisers to the bit: against ml_dtypes, a search of the whole grid in float64, and the published formulas in numpy;
stochastic rounding and transforms."""

import math
import random as draws
import re

import pytest
import torch

from funcops import random
from funcops.engine.backend import backend
from funcops.engine.trees import replace
from funcops.library import formats
from funcops.library.formats import Format, QWeight, dense, quantize_sides, quantize_tensor, turned
from funcops.library.formats.qtensor import check_quantized
from funcops.library.kernels import quantize as kernels
from funcops.low_precision import MXFP8

np = pytest.importorskip("numpy")
ml_dtypes = pytest.importorskip("ml_dtypes")
ELEMENTS = "e4m3", "e5m2", "e2m1"
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}
THEIRS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}
NAN = {"e4m3": 0x7F, "e5m2": 0x7F, "e2m1": 7}
FORMATS = [format.args() for format in formats.FORMATS]
SHAPES = (256, 272), (303, 300), (305, 256), (2048, 2000)
SMALL = (130, 272), (47, 300), (49, 256), (1, 7), (3, 1), (129, 31)
EMPTY = (0, 5), (4, 0), (0, 0), (2, 0, 3), (2, 3, 0), (7,)


# The rounding of one element


def grid(element):
    """The finite values of the codes 0, 1, 2, ... without sign, from the meaning of the bits."""
    bits, mantissa, bias = {"e4m3": (8, 3, 7), "e5m2": (8, 2, 15), "e2m1": (4, 1, 1)}[element]
    values = []
    for code in range(2 ** (bits - 1)):
        exponent, rest = code >> mantissa, code & (2**mantissa - 1)
        fraction = rest / 2**mantissa + (exponent > 0)
        values.append(math.ldexp(fraction, max(exponent, 1) - bias))
    return np.array([v for v in values if v <= LARGEST[element]])


def nearest(v, element):
    """Codes of float32 values: the nearest in float64, ties to the even code."""
    values = grid(element)
    with np.errstate(invalid="ignore"):
        wide = np.abs(v.astype(np.float64)).reshape(-1)
        above = np.clip(np.searchsorted(values, wide), 1, len(values) - 1)
        low, high = wide - values[above - 1], values[above] - wide
        code = np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    code = np.where(np.isnan(wide), NAN[element], code + np.signbit(v).reshape(-1) * (8 if element == "e2m1" else 128))
    return code.astype(np.uint8).reshape(v.shape)


def patterns():
    """Every bfloat16, as float32."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()


def hard(element):
    """Every point of the grid, every midpoint, the neighbours of both, of either sign; and values far outside."""
    values = grid(element)
    steps = [values, (values[1:] + values[:-1]) / 2, values[-1:] * 1.0625, values[-1:] * 1.125, [1e-30, 1e-45, 1e38, np.inf]]
    points = np.concatenate(steps).astype(np.float32)
    around = np.concatenate([points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(np.inf))])
    return torch.from_numpy(np.concatenate([around, -around, np.float32([np.nan, -np.nan])]))


def encoded(x, element):
    codes, _ = kernels.quantize_scaled(x, element, torch.ones(1))
    if element == "e2m1":
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)[..., : x.shape[-1]]
    return codes.numpy()


@pytest.mark.parametrize("element", ELEMENTS)
def test_codes_of_every_value(element):
    for x in (patterns(), hard(element)):
        got = encoded(x, element)
        assert np.array_equal(got, nearest(x.numpy(), element))
        number = ~np.isnan(x.numpy())
        clamped = np.clip(x.numpy(), -LARGEST[element], LARGEST[element])  # before the cast, which saturates nowhere
        theirs = clamped[number].astype(THEIRS[element]).view(np.uint8)
        assert number.sum() > len(x) * 0.9 and np.array_equal(got[number], theirs & (15 if element == "e2m1" else 255))
        assert np.all(got[~number] == NAN[element])


def test_nothing_is_cast_that_a_cast_must_saturate(monkeypatch):
    """Casts behave as in torch 2.11: NaN above the largest e4m3, infinity above the largest e5m2."""
    x = torch.cat((torch.logspace(-3, 38, 400), torch.tensor([math.inf, -math.inf, math.nan]), -torch.logspace(-3, 38, 400)))
    x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))].view(11, 73)
    plain, beyond = torch.Tensor.to, {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}

    def cast(t, *args, **options):
        out = plain(t, *args, **options)
        if out.dtype in beyond:
            out.view(torch.uint8)[t.abs() > torch.finfo(out.dtype).max] = beyond[out.dtype]
        return out

    def codes(args):
        whole = torch.tensor([1.0]) if args[3] == "e4m3" or args[1:3] == (0, 0) else None  # so that what is above it saturates
        return *kernels.quantize_row(x, *args, whole, None), *kernels.quantize_scaled(x, args[0], torch.tensor([9.0]))

    want = [codes(args) for args in FORMATS]
    monkeypatch.setattr(torch.Tensor, "to", cast)
    assert x.mul(10.0).to(torch.float8_e4m3fn).view(torch.uint8).eq(0x7F).any()
    assert all(same(codes(args), codes_want) for args, codes_want in zip(FORMATS, want, strict=True))


@pytest.mark.parametrize("element", ELEMENTS)
def test_every_code_decodes_as_elsewhere(element):
    codes = np.arange(16 if element == "e2m1" else 256, dtype=np.uint8)
    want = codes.view(THEIRS[element]).astype(np.float32)
    packed = torch.from_numpy(codes[0::2] | codes[1::2] << 4 if element == "e2m1" else codes)[None]
    assert np.array_equal(kernels.decode(packed, element)[0].numpy(), want, equal_nan=True)


def test_every_scale_decodes_as_elsewhere():
    codes = torch.arange(256, dtype=torch.uint8)
    for kind, theirs in (("e8m0", ml_dtypes.float8_e8m0fnu), ("e4m3", ml_dtypes.float8_e4m3fn)):
        want = codes.numpy().view(theirs).astype(np.float32)
        assert np.array_equal(kernels.decode_scales(codes, kind).numpy(), want, equal_nan=True)


@pytest.mark.parametrize("kind", ["e8m0", "e4m3"])
def test_triton_decodes_every_scale(kind):
    """The factor of an element that is 1, subnormal scales too."""
    if kind == "e8m0":
        args = torch.full((256, 32), 0x38, dtype=torch.uint8), torch.arange(256, dtype=torch.uint8)[:, None], None, "e4m3", 1, 32
    else:
        args = torch.full((256, 8), 0x22, dtype=torch.uint8), torch.arange(256, dtype=torch.uint8)[:, None], None, "e2m1", 1, 16
    want = kernels.decode_scales(args[1], kind).expand(256, args[5])
    with backend("triton"), np.errstate(invalid="ignore"):
        found = kernels.dequantize(*args, kind, args[5], torch.float32)
    assert np.array_equal(found.numpy(), want.numpy(), equal_nan=True)


@pytest.mark.parametrize("shape", [(129, 5), (5, 129), (128, 128), (1, 257), (0, 3)])
def test_triton_transposes_all_of_the_codes(shape):
    codes = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with backend("triton"):
        assert torch.equal(kernels.transpose(codes), codes.mT)


# Whole formats, by the formulas as they are published


def f32(value):
    return np.asarray(value, dtype=np.float32)


def current_scale(amax, element, pow2, infinite):
    """Transformer Engine's compute_scale_from_amax with epsilon 0; `infinite` replaces an overflowing quotient."""
    with np.errstate(divide="ignore", over="ignore"):
        s = f32(LARGEST[element]) / amax
    s = np.where((amax == 0) | np.isinf(amax), f32(1), np.where(np.isinf(s), f32(infinite), s))
    return (s.view(np.int32) & np.int32(-8388608)).view(np.float32) if pow2 else s


def mx_exponent(amax, element):
    """ceil(log2(amax / largest)) + 127, from 0 to 254, in exact arithmetic."""
    v = amax * f32(1 / LARGEST[element])
    fraction, exponent = np.frexp(v.astype(np.float64))
    up = np.where(np.isinf(v), 254, np.where(v == 0, 0, exponent - (fraction == 0.5) + 127))
    return np.clip(up, 0, 254).astype(np.uint8)


def nv_scales(amax, whole):
    """s_b = e4m3(amax_b * (S / 6)), and 1 / (s_b / S)."""
    huge = np.finfo(np.float32).max
    with np.errstate(divide="ignore", over="ignore"):
        s = np.minimum(f32(448 * 6) / whole, huge)
        s = np.where((whole == 0) | (s == 0), f32(1), s)[0]
        stored = nearest(np.minimum(amax * (s * f32(1 / 6)), f32(448)), "e4m3")
        factor = np.minimum(f32(1) / (stored.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * (f32(1) / s)), huge)
    return stored, factor


def published(x, element, rows, cols, kind, whole):
    """Codes and scales of x [R, K], as kernels make them. `whole` is the amax of x if the format has a scale for all of x."""
    wide = x.float().numpy()
    r, k = wide.shape
    block, turned = cols == 128 and x.dtype is torch.bfloat16, (rows, cols) == (1, 128) and kind in ("pow2", "float32")
    rows, cols = rows or max(r, 1), cols or max(k, 1)

    def most(values):
        if not values.size:
            return np.zeros((-(-r // rows), -(-k // cols)), values.dtype)
        return np.maximum.reduceat(np.maximum.reduceat(values, range(0, r, rows), 0), range(0, k, cols), 1)

    amax, spoilt = most(np.where(np.isnan(wide), f32(0), np.abs(wide))), most(np.isnan(wide))
    if kind == "e4m3":
        scales, factor = nv_scales(amax, whole)
    elif kind == "e8m0":
        scales = mx_exponent(amax, element)
        factor = np.ldexp(f32(1), 127 - scales.astype(np.int32)).astype(np.float32)
    else:
        amax = amax if whole is None else np.broadcast_to(whole, amax.shape)
        factor = current_scale(f32(amax), element, kind == "pow2", 3.3895313892515355e38 if block else 3.4028234663852886e38)
        scales = f32(1) / factor
    if element == "e2m1":
        scales = np.where(spoilt, 0x7F if kind == "e4m3" else 0xFF, scales).astype(np.uint8)
    spread = np.repeat(np.repeat(factor, rows, 0), cols, 1)[:r, :k]
    with np.errstate(over="ignore", invalid="ignore"):
        codes = nearest(wide * spread, element)
    if element == "e2m1":
        codes = np.pad(codes, ((0, 0), (0, k % 2)))
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    return torch.from_numpy(codes), torch.from_numpy(np.ascontiguousarray(scales.T if turned else scales))


def some(cases, nth):
    """All cases; every nth is in the first tier."""
    return [pytest.param(case, marks=() if i % nth == 0 else pytest.mark.slow, id=str(case)) for i, case in enumerate(cases)]


def source(shape, dtype, kind, seed):
    """Numbers of many sizes or of few; tiles of zeros; some infinities and NaN; sizes at which 448 over them is infinite."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    if kind == "wide":
        x = x * torch.exp2(torch.randint(-30, 30, shape, generator=g))
    if kind == "tiny":
        x = x * 2.0 ** torch.randint(-149, -120, shape, generator=g)
    x = x.to(dtype)
    if kind == "special" and x.numel() > 4:
        at = torch.randperm(x.numel(), generator=g)[: max(4, x.numel() // 700)]
        x.view(-1)[at] = torch.tensor([math.nan, math.inf, -math.inf, -math.nan]).repeat(len(at) // 4 + 1)[: len(at)].to(dtype)
        x[: x.shape[0] // 2] *= (x[: x.shape[0] // 2].isfinite()).to(dtype)  # NaN stays, and most of a half is 0
        x[: x.shape[0] // 4] = 0
    return x


def check_format(x, args):
    needs = args[3] == "e4m3" or args[1:3] == (0, 0)
    row = x.reshape(-1, x.shape[-1]) if x.numel() else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    whole = kernels.amax(x, False) if needs else None
    want = published(row, *args, None if whole is None else whole.numpy())
    turned_want = published(row.mT, *args, None if whole is None else whole.numpy())
    codes, scales = kernels.quantize_row(x, *args, whole, None)
    assert codes.shape[:-1] == x.shape[:-1] and same((codes.reshape(want[0].shape), scales), want)
    assert same(kernels.quantize_col(x, *args, whole, None, False), turned_want)
    both = kernels.quantize_both(x, *args, whole)
    assert same((both[0].reshape(want[0].shape), *both[1:]), want + turned_want)


def same(got, want):
    return all(g.dtype is w.dtype and g.shape == w.shape and torch.equal(bits(g), bits(w)) for g, w in zip(got, want, strict=True))


def bits(t):
    """The bytes; all NaN have the same, as their other bits are not specified."""
    t = torch.where(t.isnan(), math.nan, t) if t.is_floating_point() else t
    return t.clone(memory_format=torch.contiguous_format).view(torch.uint8)


SOURCES = "normal", "wide", "tiny", "special"


@pytest.mark.parametrize("args", some(FORMATS, 2))
def test_formats_by_the_published_formulas(args):
    """Each format has shapes and sources of its own, drawn by its name."""
    rng = draws.Random(str(args))
    for shape in (*rng.sample(SMALL, 2), rng.choice(EMPTY)):
        dtype = rng.choice([torch.bfloat16, torch.float16, torch.float32, torch.float64])
        x = source(shape, dtype, rng.choice(SOURCES), rng.randrange(99))
        if rng.random() < 0.4 and len(shape) == 2:
            x = source(shape[::-1], dtype, "normal", 1).mT
        check_format(x, args)
    check_format(source((4, 128), torch.bfloat16, "tiny", 0), args)  # as wide as a block, whatever the tile


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "shape", "kind"),
    [(args, SHAPES[i % 3], SOURCES[(i + j) % 4]) for i, args in enumerate(FORMATS) for j in range(2)]
    + [(args, SHAPES[3], "special") for args in FORMATS[2::5]],
    ids=str,
)
def test_formats_at_full_sizes(args, shape, kind):
    check_format(source(shape, torch.bfloat16, kind, 0), args)


@pytest.mark.parametrize("element", ELEMENTS)
def test_scales_of_every_largest_element(element):
    """A tile for each bfloat16, with that one number, and for float32 numbers at and near a quotient that is a power of two."""
    edges = f32([LARGEST[element] * 2.0**e for e in range(-150, 112)])
    edges = np.concatenate([edges, np.nextafter(edges, f32(0)), np.nextafter(edges, f32(np.inf))])
    random_bits = np.random.default_rng(0).integers(0, 0x7F800000, 20000, dtype=np.int32).view(np.float32)
    for x in (patterns().to(torch.bfloat16)[:, None], torch.from_numpy(np.concatenate([edges, random_bits]))[:, None]):
        for rows, cols, kind in ((1, 0, "float32"), (1, 128, "pow2"), (1, 32, "e8m0")):
            if element != "e2m1" or kind == "e8m0":
                args = x, element, rows, cols, kind, None
                assert same(kernels.quantize_row(*args, None), published(*args))
    for whole in (0.0, 1e-45, 1e-30, 6.0, 2688.0, 1e38, math.inf) if element == "e2m1" else ():
        x, largest = patterns().to(torch.bfloat16)[:, None], torch.tensor([whole])
        args = x, element, 1, 16, "e4m3"
        assert same(kernels.quantize_row(*args, largest, None), published(*args, largest.numpy()))


def test_nan_stays_and_infinity_saturates():
    x = torch.ones(256, 256)
    x[0, 3], x[200, 5], x[200, 140] = math.nan, math.inf, -math.inf
    for args in FORMATS:
        q = quantize_tensor(x, Format(args[0], args[1:3], args[3]))
        y = q.dequantize()
        assert y[0, 3].isnan() and (y[200].isfinite().all() or args[3] == "e8m0"), args
        assert y[200, 5] >= LARGEST[args[0]] and y[200, 140] == -y[200, 5], args
        assert args[0] == "e2m1" or y.isnan().sum() == 1, args


def test_dequantising_is_within_half_a_step():
    x = torch.randn(3, 40, 300).to(torch.bfloat16)
    for args in FORMATS:
        format = Format(args[0], args[1:3], args[3])
        row, col = quantize_sides(x, format)
        for q in (row, col, quantize_tensor(x, format, side="col")):
            y = q.dequantize()
            assert y.shape == x.shape and y.dtype is x.dtype and dense(q).equal(y)
            assert (y - x).float().norm() / x.float().norm() < {"e4m3": 0.04, "e5m2": 0.07, "e2m1": 0.16}[args[0]]


# Rounding at random


@pytest.mark.parametrize("element", ELEMENTS)
def test_rounding_at_random_is_right_on_average(element):
    values, n = grid(element), 2**16
    points = [0.0, values[1] * 0.3, values[2] * 1.1, values[-2] * 1.01, (values[5] + values[6]) / 2, -values[4] * 1.09]
    for i, point in enumerate(points):
        x = torch.full((n,), point, dtype=torch.float32)
        q = quantised(x, element, random.key(i))
        at = np.searchsorted(values, abs(point), side="right") - 1
        low, high = values[at], values[min(at + 1, len(values) - 1)]
        assert set(q.abs().unique().tolist()) <= {low, high} and not (q * math.copysign(1, point) < 0).any()
        chance = (abs(point) - low) / (high - low)
        sigma = (high - low) * math.sqrt(chance * (1 - chance) / n)
        assert abs(q.double().mean().item() - point) <= 4 * sigma + 2**-24 * (high - low)


def quantised(x, element, key):
    """x rounded by the key, at a scale of 1: the given amax is the element's largest."""
    if element == "e2m1":
        full = torch.tensor([6.0 * 448.0])
        tiles = torch.cat((x.view(-1, 15), torch.full((len(x) // 15, 1), 6.0)), 1) if len(x) % 15 == 0 else None
        if tiles is None:
            return quantised(torch.cat((x, x[: -len(x) % 15])), element, key)[: len(x)]
        codes, scales = kernels.quantize_row(tiles, element, 1, 16, "e4m3", full, key)
        return kernels.dequantize(codes, scales, torch.ones(1), element, 1, 16, "e4m3", 16, torch.float32)[:, :15].reshape(-1)
    codes, scales = kernels.quantize_row(x, element, 0, 0, "float32", torch.tensor([LARGEST[element]]), key)
    assert scales.item() == 1.0
    return kernels.dequantize(codes, scales, None, element, 0, 0, "float32", len(x), torch.float32)


def test_the_key_alone_decides():
    x = torch.randn(64, 128)
    for args in FORMATS[2::3]:
        format = Format(args[0], args[1:3], args[3])
        for side in ("row", "col"):
            one, again, other = (quantize_tensor(x, format, side=side, key=random.key(k)).codes for k in (1, 1, 2))
            assert torch.equal(one, again) and not torch.equal(one, other)
        exact = quantize_tensor(x, format).dequantize()
        if args[3] == "pow2":
            assert torch.equal(quantize_tensor(exact, format, key=random.key(3)).dequantize(), exact), "on the grid nothing moves"


# Transforms


def test_the_hadamard_transform_keeps_products():
    h = np.array([[1.0]])
    for _ in range(4):
        h = np.block([[h, h], [h, -h]])
    h = torch.from_numpy(h / 4 * np.array(kernels.SIGNS)[:, None]).float()
    assert torch.equal(kernels.hadamard_of(torch.eye(16)), h) and torch.equal(h @ h.T, torch.eye(16))
    for k in (16, 64, 75):
        a, b = torch.randn(9, k), torch.randn(12, k)
        assert torch.allclose(kernels.hadamard_of(a) @ kernels.hadamard_of(b).mT, a @ b.mT, atol=1e-5)
    spike = torch.zeros(64, 16)
    spike[5, 2] = 100.0
    assert kernels.amax(spike, True).item() == 25.0, "an outlier is spread over 16"


@pytest.mark.parametrize("rows", [150, 37])
def test_square_tiles_turn_exactly(rows):
    for args in FORMATS:
        if args[1] == args[2]:
            x = source((rows, 133), torch.bfloat16, "normal", 3)
            format = Format(args[0], args[1:3], args[3])
            direct, again = quantize_tensor(x, format, side="col"), turned(quantize_tensor(x, format))
            assert same((again.codes, again.scales), (direct.codes, direct.scales)), args


@pytest.mark.parametrize("mode", ["rceil", "ceil"])
def test_mx_codes_by_rows_give_the_numbers_by_columns(mode):
    """Elements span less than 14,336, so they keep their bits; near 448 a tile may have half its scale, and twice the code."""
    draw, format = torch.Generator().manual_seed(0), Format("e4m3", (1, 32), "e8m0", scaling_mode=mode)
    x = (torch.rand(75, 96, generator=draw) + 0.5) * 2.0 ** torch.randint(-5, 5, (75, 96), generator=draw)
    direct, again = quantize_tensor(x, format, side="col"), turned(quantize_tensor(x, format))
    assert not same((again.codes, again.scales), (direct.codes, direct.scales))
    assert (again.shape, again.side, again.scales.shape) == (x.shape, "col", direct.scales.shape)
    assert torch.equal(again.dequantize(), direct.dequantize())


def test_mx_codes_that_saturate_are_not_tiled_anew():
    for mode, saturates in (("rceil", False), ("ceil", False), ("floor", True), ("even", True)):
        format = Format("e4m3", (1, 32), "e8m0", scaling_mode=mode)
        assert format.retiles is not saturates
        if saturates:
            with pytest.raises(ValueError, match="turned: q.format must be one with square tiles or power-of-two scales"):
                turned(quantize_tensor(torch.ones(2, 32), format))
            with pytest.raises(ValueError, match="MXFP8: keep must be 'input' or 'col', as codes by rows would be rounded"):
                MXFP8(scaling_mode=mode, keep="row")


# By Triton's interpreter


def compared(kernel, *args):
    with backend("triton"), np.errstate(over="ignore", invalid="ignore"):  # the interpreter computes with numpy
        got = kernel(*args)
    want = kernel.kernel.torch_impl(*args)
    assert same(*(t if isinstance(t, tuple) else (t,) for t in (got, want))), (kernel.kernel.name, args)
    return got


@pytest.mark.turns("args", every=2)
@pytest.mark.parametrize("args", some(FORMATS, 5))
def test_triton_gives_the_same_bits(args):
    """Every kernel, of shapes, dtypes and sources drawn for the format."""
    rng, (element, rows, cols, kind) = draws.Random(f"triton {args}"), args
    for shape in (rng.choice(SMALL), rng.choice(EMPTY), (2, 3, rng.randint(1, 40))):
        dtype, lies = rng.choice([torch.bfloat16, torch.float16, torch.float32]), rng.random() < 0.5 and len(shape) == 2
        x = source(shape[::-1], dtype, rng.choice(SOURCES), 1).mT if lies else source(shape, dtype, rng.choice(SOURCES), 2)
        whole = compared(kernels.amax, x, False) if kind == "e4m3" or rows == 0 else None
        codes, scales = compared(kernels.quantize_row, x, *args, whole, None)
        compared(kernels.quantize_col, x, *args, whole, None, False)
        compared(kernels.quantize_both, x, *args, whole)
        scales = formats.by_tiles(scales, Format(element, (rows, cols), kind))
        tensor = kernels.tensor_scale(whole) if kind == "e4m3" else None
        out = rng.choice([torch.bfloat16, torch.float16, torch.float32, torch.float64])
        compared(kernels.dequantize, codes, scales, tensor, *args, shape[-1], out)
        compared(kernels.transpose, codes)
        if kind == "pow2":
            compared(kernels.retile, codes, scales, element, rows, cols)
        compared(kernels.quantize_scaled, x, element, torch.tensor([rng.choice([1.0, 0.25, 3e4])]))


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.slow
def test_triton_encodes_and_decodes_every_value(element):
    compared(kernels.quantize_scaled, torch.cat((patterns(), hard(element))), element, torch.ones(1))
    codes = torch.arange(256, dtype=torch.uint8).repeat(1, 1)
    kind, width = ("e8m0", 512) if element == "e2m1" else ("float32", 256)
    scales = torch.full((1, 1), 127, dtype=torch.uint8) if element == "e2m1" else torch.ones(1, 1)
    compared(kernels.dequantize, codes, scales, None, element, 0, 0, kind, width, torch.float32)
    for x in (patterns().to(torch.bfloat16)[::251, None], hard(element)[::7, None]):
        compared(kernels.quantize_row, x, element, 1, 32, "e8m0", None, None)
        if element != "e2m1":
            compared(kernels.quantize_row, x, element, 1, 128, "pow2", None, None)
            compared(kernels.quantize_row, x[::60], element, 1, 0, "float32", None, None)


@pytest.mark.parametrize("shape", [(256, 256), (32, 512), (128, 64)])
def test_the_bytes_of_codes_and_scales(shape):
    for format in formats.FORMATS:
        q = quantize_tensor(torch.ones(shape), format)
        assert format.nbytes(*shape) == (q.codes.nbytes, q.scales.nbytes), format.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tile", [(0, 0), (1, 0), (1, 128), (128, 128)], ids=str)
def test_the_factor_of_numbers_too_small_for_one_is_the_greatest(tile, dtype):
    """448 over the largest number is infinite: the factor is float32's greatest, and bfloat16's for blocks of that dtype."""
    x = torch.full((128, 128), 1e-38, dtype=dtype)
    _, scales = kernels.quantize_row(x, "e4m3", *tile, "float32", None, None)
    greatest = torch.tensor(torch.finfo(torch.bfloat16 if dtype is torch.bfloat16 and tile[1] else torch.float32).max)
    assert torch.equal(scales.unique(), (1.0 / greatest)[None])


@pytest.mark.parametrize("side", ["row", "col"])
def test_a_scale_beside_the_tiles_is_there_where_the_format_has_one(side):
    for format in (Format("e4m3", (1, 128), "pow2"), Format("e4m3", (0, 0), "float32"), Format("e2m1", (1, 16), "e4m3")):
        q = quantize_tensor(torch.randn(32, 128), format, side=side)
        assert (q.scale is None) == (format.scales != "e4m3")
        check_quantized("test", "q", q, format, side, q.shape)
        wrong = replace(q, scale=torch.ones(1) if q.scale is None else None)
        wanted = rf"None \({format.name}\), got float32" if q.scale is None else r"a tensor \[1\], got None"
        with pytest.raises((ValueError, TypeError), match=rf"^test: q.scale must be {wanted}"):
            check_quantized("test", "q", wrong, format, side, q.shape)


def test_weights_in_a_format_are_compared_by_identity():
    """They are compared as tensors are: as keys of a dict, and in a set."""
    made = QWeight(quantize_tensor(torch.ones(32, 128), Format("e4m3", (1, 128), "pow2")))
    other = QWeight(made.row)
    assert made == made and made != other and len({made, other}) == 2


def test_a_tensor_in_a_format_has_dense_zeros_and_a_shape_of_its_own():
    q = quantize_tensor(torch.ones(32, 128, dtype=torch.bfloat16), Format("e4m3", (1, 128), "pow2"))
    for asked, dtype in ((None, torch.bfloat16), (torch.float32, torch.float32)):
        zeros = q.zero_gradient(asked)
        assert torch.equal(zeros, torch.zeros(32, 128, dtype=dtype)) and zeros.dtype is dtype
    with pytest.raises(ValueError, match=r"^test: q must be \[128, 32\], got \[32, 128\]"):
        check_quantized("test", "q", q, q.format, "row", torch.Size((128, 32)))


BLOCK, ONE = Format("e4m3", (1, 128), "pow2"), torch.ones(32, 128)
WHOLE, NIBBLES = Format("e4m3", (0, 0), "float32"), Format("e2m1", (1, 16), "e4m3")
REFUSED = {
    "Format: scales must be one of pow2, float32, e8m0, e4m3 (did you mean pow2?), got 'pow3'": lambda: Format(
        "e4m3", (1, 128), "pow3"
    ),
    "Format: amax_epsilon must be 0, or a normal float32 (2^-126 at least), got -1.0": lambda: Format("e4m3", amax_epsilon=-1.0),
    "quantize_tensor: format must be Format, got 'e4m3'": lambda: quantize_tensor(ONE, "e4m3"),
    "quantize_tensor: side must be 'row' or 'col', got 'both'": lambda: quantize_tensor(ONE, BLOCK, side="both"),
    "quantize_tensor: hadamard must be False for the side 'row', got True": lambda: quantize_tensor(ONE, BLOCK, hadamard=True),
    "quantize_tensor: amax must be [1], got [2]": lambda: quantize_tensor(ONE, WHOLE, amax=torch.ones(2)),
    "quantize_sides: format must be Format, got 'e4m3'": lambda: quantize_sides(ONE, "e4m3"),
    "quantize_sides: x must be float64 or float32 or bfloat16 or float16, got int32": lambda: quantize_sides(ONE.int(), BLOCK),
    "quantize_sides: x must be [*, K], with at least one dimension, got float32[]": lambda: quantize_sides(
        torch.tensor(1.0), BLOCK
    ),
    "turned: q must be QTensor, got float32[32, 128]": lambda: turned(ONE),
    "turned: q.side must be 'row', got 'col'": lambda: turned(quantize_tensor(ONE, BLOCK, side="col")),
    "test: q must be QTensor, got float32[32, 128]": lambda: check_quantized("test", "q", ONE, BLOCK, "row", ONE.shape),
    "test: q.scale must be [1], got [2]": lambda: check_quantized(
        "test", "q", replace(quantize_tensor(ONE, NIBBLES), scale=torch.ones(2)), NIBBLES, "row", ONE.shape
    ),
}


@pytest.mark.parametrize("said", REFUSED)
def test_refused(said):
    with pytest.raises((ValueError, TypeError), match=f"^{re.escape(said)}$"):
        REFUSED[said]()
