"""Quantisers: codes of 8 or 4 bits, and the scales that decode them: x ~ codes * scales.

x: [*, K], taken as [R, K] rows. A tile of `rows` x `cols` elements (0: all) shares one scale; edge tiles are smaller.
"row" codes have the layout of x, with tiles along K; "col" codes have the layout of x^T, [K, R], with tiles along R.
Codes are uint8: a byte of e4m3 or e5m2, or two of e2m1, the even element low. scales: [R / rows, K / cols], which
quantisers return transposed if `by_columns`; of four kinds:

    pow2     float32, a power of two, so that codes can be tiled anew without another rounding
    float32  float32
    e8m0     uint8, the exponent of a power of two with bias 127 (OCP MX): the least with which no element exceeds the largest
    e4m3     uint8, an e4m3 number, with one float32 scale for the whole tensor (NVFP4)

Quantisers also take, for e8m0 scales, another rule of the exponent, from the amax a of a tile and the exponent m of the largest
power of two on the element's grid (torchao's `ScaleCalculationMode`):

    e8m0_floor  floor(log2(a)) - m, of OCP MX 1.0: elements above the largest saturate
    e8m0_even   floor(log2(a rounded to the element's bits of mantissa, ties up)) - m
    e8m0_ceil   ceil(log2(a)) - m

and for e4m3 scales the choice, tile by tile, of the one that maps the amax to 6 or to 4, whichever has the smaller error (arXiv
2512.02010), with 256 in place of 448 as the largest scale: e4m3_mse by the sum of squares, e4m3_mae by the sum of sizes.

`epsilon` is the least amax that the scale of a tile is made from, in pow2 and float32.
Elements are rounded to nearest, ties to even codes, or stochastically with a key. Above the largest they saturate; NaN stays NaN.
Sources: NVIDIA Transformer Engine (recipe_common.cuh, core_nvfp4.cuh); OCP MX 1.0, with the exponent rounded up (arXiv 2506.08027).
"""

from __future__ import annotations

import math
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from funcops.engine import random
from funcops.engine.backend import kernel


class Element(NamedTuple):
    """A floating-point grid: its largest value, the exponent of its smallest normal number, its bits of mantissa, torch's dtype."""

    largest: float
    emin: int
    mantissa: int
    dtype: torch.dtype | None = None

    @property
    def least(self) -> float:
        """The smallest value above 0."""
        return 2.0 ** (self.emin - self.mantissa)


ELEMENTS = {
    "e4m3": Element(448.0, -6, 3, torch.float8_e4m3fn),
    "e5m2": Element(57344.0, -14, 2, torch.float8_e5m2),
    "e2m1": Element(6.0, 0, 1),
}
KINDS = ("pow2", "float32", "e8m0", "e4m3")
FOUR_OVER_SIX = ("e4m3_mse", "e4m3_mae")
FEWER = 256.0  # the largest scale if a tile may be mapped to 4, whose scale is larger by half
NAN, NAN_E8M0 = 0x7F, 0xFF
GREATEST = torch.finfo(torch.float32).max
BLOCK = 128
HADAMARD = 16  # elements along the last dimension that are transformed together
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)  # of the matrix's rows, as in Transformer Engine
_NEGATIVE = sum(1 << i for i, sign in enumerate(SIGNS) if sign < 0)


@kernel()
def quantize_row(
    x: Tensor, element: str, rows: int, cols: int, kind: str, amax: Optional[Tensor], key: Optional[Tensor], epsilon: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Codes [*, K] (e2m1: [*, (K + 1) / 2]) and scales [R / rows, K / cols]. `amax`, float32 [1]: of the whole tensor, used
    for a single tile and for e4m3 scales; or [R, 1], of each row or its group. `key`: for stochastic rounding; or a random word for
    each element."""
    codes, scales = _quantize(matrix(x), x.dtype, element, rows, cols, kind, amax, key, epsilon)
    return codes.reshape(*x.shape[:-1], codes.shape[-1]), scales


@kernel()
def quantize_col(
    x: Tensor,
    element: str,
    rows: int,
    cols: int,
    kind: str,
    amax: Optional[Tensor],
    key: Optional[Tensor],
    hadamard: bool,
    epsilon: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Codes [K, R] of the transposed x (e2m1: [K, (R + 1) / 2]) and scales [K / rows, R / cols]; `hadamard`: of x transformed along
    R by `hadamard_of`, 16 at a time. `amax` is then the amax after the transform; of groups it is [R / cols, 1], one for each block
    of rows; of columns [1, K]."""
    given = hadamard_of(matrix(x).mT).mT if hadamard else matrix(x)
    return _quantize(given, x.dtype, element, rows, cols, kind, amax, key, epsilon, turn=True)


@kernel()
def quantize_both(
    x: Tensor, element: str, rows: int, cols: int, kind: str, amax: Optional[Tensor], epsilon: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize_row` and `quantize_col`, in one read of x if tiles are not square."""
    wide, how = matrix(x).float(), (x.dtype, element, rows, cols, kind, amax, None, epsilon)
    codes, scales = _quantize(wide, *how)
    return codes.reshape(*x.shape[:-1], codes.shape[-1]), scales, *_quantize(wide, *how, turn=True)


@kernel()
def quantize_scaled(x: Tensor, element: str, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [*, K] of x * scale (float32 [1], or [R, 1] for each row), and the largest |x| [1] (float32, without NaN)."""
    wide = x.float()
    return _encode(wide * scale, element, None), _largest(wide)


@kernel()
def amax(x: Tensor, hadamard: bool) -> Tensor:
    """The largest |x| as float32 [1], without NaN; 0 for an empty x. `hadamard`: after x is transformed along its rows."""
    return _largest(hadamard_of(matrix(x).mT) if hadamard else x.float())


@kernel()
def retile(codes: Tensor, scales: Tensor, element: str, rows: int, cols: int, epsilon: float = 0.0) -> tuple[Tensor, Tensor]:
    """Make "col" codes [K, R] and scales from "row" codes [*, K] and their power-of-two scales [R / rows, K / cols]."""
    x = decode_tiles(matrix(codes), scales, None, element, rows, cols, "pow2", codes.shape[-1])
    return _quantize(x, torch.float32, element, rows, cols, "pow2", None, None, epsilon, turn=True)


@kernel()
def transpose(codes: Tensor) -> Tensor:
    """Transpose bytes [*, K] to [K, R]."""
    return matrix(codes).mT.contiguous()


@kernel()
def dequantize(
    codes: Tensor,
    scales: Tensor,
    scale: Optional[Tensor],
    element: str,
    rows: int,
    cols: int,
    kind: str,
    width: int,
    out: torch.dtype,
) -> Tensor:
    """x [*, width] in the dtype `out`: codes times scales (times `scale`, float32 [1], for the whole tensor), rounded once."""
    made = decode_tiles(matrix(codes), scales, scale, element, rows, cols, kind, width)
    return made.reshape(*codes.shape[:-1], width).to(out)


def line_amax(x: Tensor, columns: bool, hadamard: bool) -> Tensor:
    """The largest |x| of each row [R, 1], or of each column [1, K], as float32, without NaN; `hadamard`: as for `amax`."""
    wide = hadamard_of(matrix(x).mT).mT if hadamard else matrix(x).float()
    if 0 in wide.shape:
        return wide.new_zeros((1, wide.shape[1]) if columns else (wide.shape[0], 1))
    return magnitudes(wide).amax(0 if columns else 1, keepdim=True)


def tensor_scale(amax: Tensor, largest: float = 448.0) -> Tensor:
    """1 / S, the scale that decodes a whole tensor, or a row, whose tiles have e4m3 scales up to `largest`: S = largest * 6 / amax,
    1 if amax is 0 or infinite."""
    return 1.0 / _tensor_factor(amax, largest)


def _tensor_factor(amax: Tensor, largest: float = 448.0) -> Tensor:
    s = _over(largest * 6.0, amax)
    return torch.where((amax == 0) | (s == 0), 1.0, s.clamp(max=GREATEST))


def hadamard_of(x: Tensor) -> Tensor:
    """x [*, K] times D H / 4 in blocks of 16 along K (padded with zeros): H Sylvester's matrix of +-1, D = diag(SIGNS); orthogonal,
    so that the product of two transformed tensors is the product of the tensors. In float32, added in stages of 8, 4, 2, 1."""
    pad = -x.shape[-1] % HADAMARD
    t = (torch.nn.functional.pad(x.float(), (0, pad)) if pad else x.float()).unflatten(-1, (-1, HADAMARD))
    return (_sylvester(t * _signs(t)) * 0.25).flatten(-2)


def hadamard_undone(x: Tensor) -> Tensor:
    """Undo `hadamard_of`."""
    t = _sylvester(x.unflatten(-1, (-1, HADAMARD)) * 0.25)
    return (t * _signs(t)).flatten(-2)


def _signs(t: Tensor) -> Tensor:
    """SIGNS, made on t's device, so that nothing is copied to it."""
    return 1.0 - 2.0 * ((_NEGATIVE >> torch.arange(HADAMARD, device=t.device)) & 1).to(t.dtype)


def _sylvester(t: Tensor) -> Tensor:
    """t [..., 16] times H, which is symmetric; in place."""
    for half in (8, 4, 2, 1):
        a, b = t.unflatten(-1, (-1, 2, half)).unbind(-2)
        difference = a - b
        a.add_(b)
        b.copy_(difference)
    return t


def decode_tiles(
    codes: Tensor, scales: Tensor, scale: Tensor | None, element: str, rows: int, cols: int, kind: str, width: int
) -> Tensor:
    """Decode codes [R, ...] with their scales to float32 [R, width]."""
    decoded = decode_scales(scales, kind)
    if scale is not None:
        decoded = decoded * scale
    values = decode(codes, element)[:, :width]
    if 0 in values.shape:
        return values
    rows, cols = rows or len(values), cols or width
    if len(values) % rows == 0 and width % cols == 0:
        values.unflatten(1, (-1, cols)).unflatten(0, (-1, rows)).mul_(decoded[:, None, :, None])
        return values
    return values * _spread(_spread(decoded, rows, 0)[: len(values)], cols, 1)[:, :width]


def decode(codes: Tensor, element: str) -> Tensor:
    """The float32 values of codes, two for each byte of e2m1. Through the bits of float16, which a CPU widens many at a time; its
    own conversion from 8 bits takes them one by one."""
    dtype = ELEMENTS[element].dtype
    if dtype is not None and codes.device.type != "cpu":
        return codes.view(dtype).float()
    if element == "e5m2":
        return (codes.to(torch.int16) << 8).view(torch.float16).float()
    if element == "e4m3":
        bits = (codes.view(torch.int8).to(torch.int16) << 7).bitwise_and_(-0x4080)  # the sign, and from bit 7 on the rest
        bits.bitwise_or_((bits + 0x80).bitwise_and_(0x4000))  # the sum reaches that bit only for a NaN
        return bits.view(torch.float16).float().mul_(2.0**8)
    return _values(torch.stack((codes & 15, codes >> 4), -1).flatten(-2))


def _values(nibbles: Tensor) -> Tensor:
    """The float32 values of e2m1 codes, one a byte."""
    nibbles = nibbles.to(torch.int16)
    return ((nibbles & 8) << 12 | (nibbles & 7) << 9).view(torch.float16).float().mul_(2.0**14)


def decode_scales(scales: Tensor, kind: str) -> Tensor:
    """The float32 factors of codes, from stored scales."""
    if kind == "e8m0":
        return torch.where(scales == NAN_E8M0, torch.nan, _power(scales.to(torch.int32)))
    return scales.view(torch.float8_e4m3fn).float() if kind == "e4m3" else scales


def by_columns(rows: int, cols: int, kind: str) -> bool:
    """Whether quantisers return scales transposed, one block's scales of all rows together, as CUDA's library reads float32 scales
    of rows. Functions that take scales take [R / rows, K / cols], of any strides."""
    return rows == 1 and cols > 0 and kind in ("pow2", "float32")


def matrix(x: Tensor) -> Tensor:
    """x [*, K] as [R, K]."""
    return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _over(number: float, t: Tensor) -> Tensor:
    """number / t, rounded once: torch computes `number / t` as number * (1 / t)."""
    return torch.full_like(t, number) / t


def _spread(t: Tensor, times: int, dim: int) -> Tensor:
    return t if times == 1 else t.repeat_interleave(times, dim)


def _largest(wide: Tensor) -> Tensor:
    if wide.numel() == 0:
        return wide.new_zeros(1)
    return magnitudes(wide).amax().reshape(1)


def magnitudes(wide: Tensor) -> Tensor:
    """|x|, and 0 for NaN."""
    return torch.nan_to_num(wide, nan=0.0, posinf=torch.inf, neginf=-torch.inf).abs_()


def _power(biased: Tensor) -> Tensor:
    """2^(biased - 127) for int32 exponents from 0 to 254; at 0 it is a subnormal number."""
    return torch.where(biased == 0, 0x400000, biased << 23).view(torch.float32)


def _quantize(
    x: Tensor,
    dtype: torch.dtype,
    element: str,
    rows: int,
    cols: int,
    kind: str,
    amax: Tensor | None,
    key: Tensor | None,
    epsilon: float,
    turn: bool = False,
) -> tuple[Tensor, Tensor]:
    """Codes and scales of x [R, K], which had the given dtype; `turn`: of the transposed x, without a copy of it."""
    blocks, turned = cols == BLOCK, not turn if by_columns(rows, cols, kind) else turn
    if turn:
        rows, cols = cols, rows
    r, k = x.shape
    rows, cols, amax = rows or max(r, 1), cols or max(k, 1), None if amax is None else amax.float()
    wide, down, along = x.float(), (r + rows - 1) // rows, (k + cols - 1) // cols
    if r % rows or k % cols:
        wide = torch.nn.functional.pad(wide, (0, along * cols - k, 0, down * rows - r))
    tiles = wide.reshape(down, rows, along, cols)  # not as many as fit: a tracer would divide symbols
    found = tiles.new_zeros(tiles.shape[0], tiles.shape[2]) if 0 in tiles.shape else magnitudes(tiles).amax((1, 3))
    if amax is not None and amax.dim() < 2:
        amax = amax.reshape(-1, 1)
    if amax is not None and not kind.startswith("e4m3"):
        found = amax.expand_as(found)
    if epsilon:
        found = found.clamp(min=epsilon)
    if kind in FOUR_OVER_SIX:
        assert amax is not None
        factor, scales = _four_over_six(tiles, found, amax, kind)
    else:
        factor, scales = _scales(found, element, kind, dtype, amax, blocks)
    if ELEMENTS[element].dtype is None and 0 not in tiles.shape:  # its codes have no NaN, so the tile's scale becomes NaN
        scales = torch.where(tiles.amax((1, 3)).isnan(), NAN if kind.startswith("e4m3") else NAN_E8M0, scales)
    scaled = (tiles * factor[:, None, :, None]).reshape(down * rows, along * cols)[:r, :k]
    return _encode(scaled.mT if turn else scaled, element, key), scales.mT.contiguous() if turned else scales


def _scales(amax: Tensor, element: str, kind: str, dtype: torch.dtype, whole: Tensor | None, blocks: bool) -> tuple[Tensor, Tensor]:
    """The float32 factors of elements, and the scales to store, from the largest |x| of each tile. If `largest` / |x| is infinite,
    the factor is float32's greatest number, or bfloat16's for blocks of that dtype."""
    largest = ELEMENTS[element].largest
    if kind == "e4m3":
        assert whole is not None
        stored = (amax * (_tensor_factor(whole) * (1.0 / 6.0))).clamp(max=448.0).to(torch.float8_e4m3fn)
        return (1.0 / (stored.float() * tensor_scale(whole))).clamp(max=GREATEST), stored.view(torch.uint8)
    if kind.startswith("e8m0"):
        exponent = _rounded_up(amax * (1.0 / largest)) if kind == "e8m0" else _by_rule(amax, ELEMENTS[element], kind)
        return _power(254 - exponent), exponent.to(torch.uint8)
    s = _over(largest, amax)
    finite = torch.finfo(dtype).max if dtype is torch.bfloat16 and blocks else GREATEST
    s = torch.where((amax == 0) | (amax == torch.inf), 1.0, torch.where(s == torch.inf, finite, s))
    if kind == "pow2":
        s = (s.view(torch.int32) & 0x7F800000).view(torch.float32)
    return s, 1.0 / s


def _four_over_six(tiles: Tensor, found: Tensor, whole: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """`_scales` for e4m3 scales that map a tile's largest |x| to 6 or, if its error is then smaller, to 4. In the order of
    operations of Transformer Engine's quantize_4over6_nvfp4.cuh, so that equal errors are equal there."""
    s = _tensor_factor(whole, FEWER)
    base = found / torch.full_like(found, 6.0) * s
    stored, factors, errors = [], [], []
    for expand in (1.0, 1.5):
        stored.append((base * expand).clamp(max=448.0).to(torch.float8_e4m3fn))
        scale = stored[-1].float()
        factors.append((1.0 / (scale * (1.0 / s))).clamp(max=GREATEST))
        v = (tiles * factors[-1][:, None, :, None]).clamp_(-6.0, 6.0)
        v = _values(_e2m1(v)).mul_(scale[:, None, :, None]).mul_(whole[:, None, :, None])
        difference = v.div_(torch.full_like(v, 6.0 * FEWER)).sub_(tiles)
        errors.append(_in_order(difference.square_() if kind == "e4m3_mse" else difference.abs_()))
    four, (six_scale, four_scale) = errors[1] < errors[0], (t.view(torch.uint8) for t in stored)
    return torch.where(four, factors[1], factors[0]), torch.where(four, four_scale, six_scale)


def _in_order(t: Tensor) -> Tensor:
    """The sums of tiles [R, rows, K, cols]: one after the other along a tile's row, or its only column; then rows by halves."""
    total, *rest = (t if t.shape[3] > 1 else t.transpose(1, 3)).unbind(3)
    for one in rest:
        total = total + one
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total[:, 0]


def _rounded_up(value: Tensor) -> Tensor:
    """The biased exponent, int32 from 0 to 254, of the least power of two that is at least value, which is >= 0."""
    bits = value.view(torch.int32)
    exponent, rest = bits >> 23, bits & 0x7FFFFF
    up = (rest > 0) & (exponent < 254) & ((exponent > 0) | (rest > 0x400000))
    return (exponent + up).clamp(max=254)


def _by_rule(amax: Tensor, of: Element, kind: str) -> Tensor:
    """The biased exponent, int32 from 0, of the scale of tiles, by another rule than the least power of two that fits."""
    bits = amax.view(torch.int32)
    if kind == "e8m0_even":
        bits = bits + (1 << (22 - of.mantissa))
    exponent = (bits >> 23) - (math.frexp(of.largest)[1] - 1)
    if kind == "e8m0_ceil":
        exponent = exponent + ((bits & 0x7FFFFF) > 0)
    return exponent.clamp(min=0)


def _encode(v: Tensor, element: str, key: Tensor | None) -> Tensor:
    """Encode float32 values [*, K], which are overwritten."""
    of = ELEMENTS[element]
    if key is not None:
        v = _stochastic(v, of, key if key.dim() > 1 else random.bits(key, v.numel()).reshape(v.shape))
    v.clamp_(-of.largest, of.largest)  # torch 2.11's cast gives NaN above the largest, and infinity for e5m2
    if of.dtype is not None:
        return v.nan_to_num_(nan=torch.nan).to(of.dtype).view(torch.uint8)  # NaN with one sign, as a device's instruction makes it
    codes = _e2m1(v.nan_to_num_(nan=of.largest))
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _e2m1(v: Tensor) -> Tensor:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6, ties to the even code, and the sign in bit 3. v within +-6."""
    bits = v.view(torch.int32)
    a = bits & 0x7FFFFFFF
    normal = (a >> 22).bitwise_and_(1).add_(a).add_(0x1FFFFF - 0x3F000000).bitwise_right_shift_(22)
    small = (a.view(torch.float32) + 4194304.0).view(torch.int32).sub_(0x4A800000)  # the sum is rounded to halves
    code = torch.maximum(small.clamp_(max=2), normal)  # `small` is larger below 1, `normal` from 1 on
    return code.bitwise_or_((bits >> 28).bitwise_and_(8)).to(torch.uint8)


def _stochastic(v: Tensor, of: Element, bits: Tensor) -> Tensor:
    """Round v to one of its two neighbours: up if u >= 1 - r, where u is made of 24 random bits and r is the part of a step by
    which |v| exceeds the lower one. Each term is exact, so a value on the grid stays; float32 could round |v| + u step up."""
    a = v.abs()
    step = _step(a, of)
    steps = a / step
    low = steps.floor()
    up = (bits >> 8).float() * 2.0**-24 >= 1 - (steps - low)
    return torch.where(v == v, torch.copysign((low + up) * step, v), v)


def _step(a: Tensor, of: Element) -> Tensor:
    """The distance between neighbours of the grid at a >= 0, a power of two."""
    exponent = ((a.view(torch.int32) >> 23) & 0xFF).clamp(127 + of.emin, 254)
    return ((exponent - of.mantissa) << 23).view(torch.float32)
