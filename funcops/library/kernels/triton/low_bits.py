"""Numbers of 8 and 4 bits in Triton: codes of float32 values, values of codes, and the scales of tiles.

If a device has the instruction (NATIVE), it encodes: round to nearest even, saturating, NaN as 0x7F. Values are not clamped
before, since min and max lose NaN. Otherwise bit operations do the same; in the interpreter too, whose casts are wrong.
"""

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl
from triton.runtime import driver

from funcops.library.kernels.triton.common import IN_INTERPRETER, INTERPRETED

GREATEST = tl.constexpr(3.4028234663852886e38)  # of float32
BFLOAT16 = tl.constexpr(3.3895313892515355e38)
NAN_E4M3, NAN_E8M0 = tl.constexpr(0x7F), tl.constexpr(0xFF)


@triton.jit
def encode(v, ELEMENT: tl.constexpr, NATIVE: tl.constexpr):
    """Encode float32 values as uint8: nearest, ties to even codes, saturated; NaN has one code (e2m1: 7)."""
    if NATIVE and ELEMENT == "e4m3":
        return v.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    elif NATIVE and ELEMENT == "e5m2":
        return v.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        bits = v.to(tl.int32, bitcast=True)
        if ELEMENT == "e4m3":
            code = _code(bits, 0x43E00000, 20, 0x3C000000, 0x3C800000, 16384.0, 0x46800000)
        elif ELEMENT == "e5m2":
            code = _code(bits, 0x47600000, 21, 0x38000000, 0x38800000, 128.0, 0x43000000)
        else:
            code = _code(bits, 0x40C00000, 22, 0x3F000000, 0x3F800000, 4194304.0, 0x4A800000)
        sign = (bits >> 28) & 8 if ELEMENT == "e2m1" else (bits >> 24) & 0x80
        return tl.where(v == v, code | sign, 7 if ELEMENT == "e2m1" else 0x7F).to(tl.uint8)


@triton.jit
def _code(
    bits, MOST: tl.constexpr, SHIFT: tl.constexpr, BIAS: tl.constexpr, NORMAL: tl.constexpr, MAGIC: tl.constexpr,
    MAGIC_BITS: tl.constexpr,
):
    """The code without its sign. NORMAL: the least normal number; below it the sum with MAGIC rounds to the subnormal step."""
    a = tl.minimum(bits & 0x7FFFFFFF, MOST)
    normal = (a + ((1 << (SHIFT - 1)) - 1) + ((a >> SHIFT) & 1) - BIAS) >> SHIFT
    small = (a.to(tl.float32, bitcast=True) + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS
    return tl.where(a < NORMAL, small, normal)


@triton.jit
def decode(code, ELEMENT: tl.constexpr, NATIVE: tl.constexpr):
    """The exact float32 values of uint8 codes."""
    if NATIVE and ELEMENT == "e4m3":
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif NATIVE and ELEMENT == "e5m2":
        return code.to(tl.float8e5, bitcast=True).to(tl.float32)
    else:  # exponent and mantissa as a float32's of a far smaller exponent, subnormal where the code is
        bits = code.to(tl.int32)
        if ELEMENT == "e4m3":
            size = bits & 0x7F
            v = (size << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
            v = tl.where(size == 0x7F, float("nan"), v)
        elif ELEMENT == "e5m2":
            size = bits & 0x7F
            v = (size << 21).to(tl.float32, bitcast=True) * 5.192296858534828e33  # 2^112
            v = tl.where(size >= 0x7C, tl.where(size == 0x7C, float("inf"), float("nan")), v)
        else:
            v = ((bits & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
        sign = (bits & 8) << 28 if ELEMENT == "e2m1" else (bits & 0x80) << 24  # not -v, which loses 0's sign
        return (v.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def scale_at(i, j, high, wide, ROWS: tl.constexpr, KIND: tl.constexpr):
    """The offset of the scale of rows i and blocks j among [high, wide], as `funcops.library.kernels.quantize.by_columns` says."""
    return j * high + i if ROWS == 1 and (KIND == "pow2" or KIND == "float32") else i * wide + j


@triton.jit
def packed(codes, A: tl.constexpr, B: tl.constexpr):
    """Codes [A, B] of 4 bits as bytes [A, B / 2], the even one low."""
    low, high = tl.split(tl.reshape(codes, [A, B // 2, 2]))
    return low | (high << 4)


@triton.jit
def unpacked(codes, A: tl.constexpr, B: tl.constexpr):
    """Bytes [A, B / 2] as codes [A, B]."""
    return tl.reshape(tl.join(codes & 15, codes >> 4), [A, B])


@triton.jit
def decode_scale(scales, KIND: tl.constexpr):
    """The float32 factors of codes, from stored scales."""
    if KIND == "e8m0":
        return tl.where(scales == NAN_E8M0, float("nan"), power(scales.to(tl.int32)))
    elif KIND == "e4m3":
        return decode(scales, "e4m3", False)
    else:
        return scales


@triton.jit
def power(biased):
    """2^(biased - 127), for integers from 0 to 254."""
    return tl.where(biased == 0, 0x400000, biased << 23).to(tl.float32, bitcast=True)


@triton.jit
def tensor_factor(amax):
    """S = 448 * 6 / amax, for a tensor whose tiles have e4m3 scales."""
    s = tl.div_rn(2688.0, tl.where(amax == 0, 2688.0, amax))
    return tl.where(s == 0, 1.0, tl.where(s > GREATEST, GREATEST, s))


@triton.jit
def scales_of(
    amax, whole, ELEMENT: tl.constexpr, KIND: tl.constexpr, EPSILON: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr
):
    """The factors of elements, and the scales to store, from the largest |x| of tiles, at least EPSILON; `whole`: the tensor's
    largest. NARROW: blocks of bfloat16, whose greatest number replaces an infinite `largest / amax`."""
    if EPSILON > 0:
        amax = tl.maximum(amax, EPSILON)
    LARGEST: tl.constexpr = 448.0 if ELEMENT == "e4m3" else (57344.0 if ELEMENT == "e5m2" else 6.0)
    if KIND == "e4m3":
        s = tensor_factor(whole)
        stored = encode(amax * (s * (1.0 / 6.0)), "e4m3", NATIVE)
        scale = decode(stored, "e4m3", NATIVE) * tl.div_rn(1.0, s)
        factor = tl.div_rn(1.0, tl.where(scale == 0, 1.0, scale))
        return tl.where((scale == 0) | (factor > GREATEST), GREATEST, factor), stored
    elif KIND == "e8m0":
        bits = (amax * (1.0 / LARGEST)).to(tl.int32, bitcast=True)
        exponent, rest = bits >> 23, bits & 0x7FFFFF
        up = (rest > 0) & (exponent < 254) & ((exponent > 0) | (rest > 0x400000))
        exponent = tl.minimum(exponent + up.to(tl.int32), 254)
        return power(254 - exponent), exponent.to(tl.uint8)
    elif KIND == "e8m0_floor" or KIND == "e8m0_even" or KIND == "e8m0_ceil":
        bits = amax.to(tl.int32, bitcast=True)
        if KIND == "e8m0_even":
            bits += 0x80000 if ELEMENT == "e4m3" else (0x100000 if ELEMENT == "e5m2" else 0x200000)
        exponent = (bits >> 23) - (8 if ELEMENT == "e4m3" else (15 if ELEMENT == "e5m2" else 2))
        if KIND == "e8m0_ceil":
            exponent += ((bits & 0x7FFFFF) > 0).to(tl.int32)
        exponent = tl.maximum(exponent, 0)
        return power(254 - exponent), exponent.to(tl.uint8)
    elif KIND == "pow2":  # the exponent of 1.75 * 2^n / amax, which a quotient's rounding never changes
        bits = amax.to(tl.int32, bitcast=True)
        exponent = (269 if ELEMENT == "e5m2" else 262) - ((bits + 0x1FFFFF) >> 23)  # a mantissa over 0x600000 carries
        exponent = tl.where((bits - 1).to(tl.uint32) >= 0x7F7FFFFF, 127, tl.minimum(exponent, 254))  # 0, or infinite
        return (exponent << 23).to(tl.float32, bitcast=True), power(254 - exponent)  # at least 7
    else:
        s = tl.div_rn(LARGEST, tl.where((amax == 0) | (amax == float("inf")), LARGEST, amax))
        s = tl.where(s == float("inf"), BFLOAT16 if NARROW else GREATEST, s)
        return s, tl.div_rn(1.0, s)


@triton.jit
def load_exact(ptr, mask):
    """A masked load in float32, exact also for subnormal bfloat16, which the interpreter's own cast gets wrong."""
    if INTERPRETED and ptr.dtype.element_ty == tl.bfloat16:
        bits = tl.load(ptr, mask=mask, other=0.0).to(tl.int16, bitcast=True).to(tl.int32) << 16
        return bits.to(tl.float32, bitcast=True)
    else:
        return tl.load(ptr, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_exact(ptr, v, mask):
    """A masked store of float32, rounded to the pointer's dtype, exact also for subnormal numbers."""
    if INTERPRETED and ptr.dtype.element_ty == tl.bfloat16:
        bits = v.to(tl.int32, bitcast=True)
        nearest = tl.where(v == v, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
        tl.store(ptr, nearest.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=mask)
    else:
        tl.store(ptr, v.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def sizes(x):
    """|x|, so that a maximum ignores NaN: a device's does, but numpy's, which the interpreter uses, does not."""
    return tl.where(x == x, tl.abs(x), 0.0) if INTERPRETED else tl.abs(x)


@triton.jit
def number(amax):
    """amax, or 0 if it is NaN, as it is for elements that are all NaN."""
    return tl.where(amax == amax, amax, 0.0)


@triton.jit
def times(x, scales, A: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """x [A, B] times the scales [A / ROWS, B / COLS] of its tiles."""
    if ROWS == 1 and COLS == B:
        return x * scales
    else:
        tiles = tl.reshape(x, [A // ROWS, ROWS, B // COLS, COLS])
        return tl.reshape(tiles * scales[:, None, :, None], [A, B])


@triton.jit
def largest(x, A: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The largest of x >= 0 [A, B] in each tile: [A / ROWS, B / COLS]."""
    if ROWS == 1 and COLS == B:
        return tl.max(x, 1)[:, None]
    else:
        return tl.max(tl.max(tl.reshape(x, [A // ROWS, ROWS, B // COLS, COLS]), 3), 1)


@triton.jit
def quantise(
    x, whole, A: tl.constexpr, B: tl.constexpr, ELEMENT: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, EPSILON: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr,
):
    """Unpacked codes [A, B], and the scales to store [A / ROWS, B / COLS], of whole tiles of x [A, B]."""
    factor, stored = scales_of(number(largest(sizes(x), A, B, ROWS, COLS)), whole, ELEMENT, KIND, EPSILON, NARROW, NATIVE)
    if ELEMENT == "e2m1":  # its codes have no NaN, so the tile's scale becomes NaN
        spoilt = largest((x != x).to(tl.int32), A, B, ROWS, COLS)
        stored = tl.where(spoilt > 0, NAN_E4M3 if KIND == "e4m3" else NAN_E8M0, stored).to(tl.uint8)
    return encode(times(x, factor, A, B, ROWS, COLS), ELEMENT, NATIVE), stored


def native() -> bool:
    """Whether the current device has the instructions that encode 8 bits. The interpreter has none, but if it counts or plans for
    an absent device, launches are as on that device."""
    if IN_INTERPRETER and not getattr(driver._active, "stands_in", False):
        return False
    active = driver.active
    return _native(active.get_current_device(), active)


@functools.lru_cache(maxsize=64)
def _native(device: int, active: Any) -> bool:
    target = active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= 89)
