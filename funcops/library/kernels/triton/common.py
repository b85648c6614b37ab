"""Helpers of the Triton kernels: widening loads, rounding stores, block sizes."""

from __future__ import annotations

import functools
from typing import Any, Optional

import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from funcops.engine.backend.shared import shared_memory

IN_INTERPRETER = bool(knobs.runtime.interpret)
INTERPRETED = tl.constexpr(IN_INTERPRETER)  # for kernels


@triton.jit
def load_wide(ptr, mask):
    """A masked load in float32; 0 where masked."""
    return tl.load(ptr, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def rounded(v, DTYPE: tl.constexpr):
    """Cast float32 to another dtype, rounding to nearest even."""
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = v.to(tl.int32, bitcast=True)  # the interpreter's own cast truncates
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        v = tl.where(v == v, nearest.to(tl.float32, bitcast=True), v)
    return v.to(DTYPE)


@triton.jit
def store_rounded(ptr, v, mask):
    """A masked store of float32 in the pointer's dtype, rounding to nearest even."""
    tl.store(ptr, rounded(v, ptr.dtype.element_ty), mask=mask)


@triton.jit
def anew(t, none):
    """t itself, but to the compiler another value: t widened again is not t widened before, which would stay in registers of twice
    the size. Two 16-bit values stay in one register. none: a zero of which the compiler does not know that it is one."""
    if INTERPRETED or t.dtype.primitive_bitwidth != 16 or not tl.target_info.is_cuda():
        return t
    else:
        return tl.inline_asm_elementwise("xor.b32 $0, $1, $2;", "=r,r,r,r", [t, none], t.dtype, is_pure=True, pack=2)


def cdiv(n: int, size: int) -> int:
    """n / size, rounded up. Triton's own takes microseconds on the host."""
    return -(-n // size)


@functools.lru_cache(maxsize=4096)
def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


@functools.lru_cache(maxsize=4096)
def block_of(n: int, most: int) -> int:
    """The power of two that holds n, at least 16 and at most `most`."""
    return max(16, min(most, next_power_of_2(n)))


@functools.lru_cache(maxsize=4096)
def columns_of(width: int, most: int) -> int:
    """The columns of a program that takes a part of several rows: at most `most`, and so few that blocks of them hold a width with
    at most a sixteenth to spare, unless that were fewer than 128."""
    block = block_of(width, most)
    while block > 128 and 16 * (cdiv(width, block) * block - width) > width:
        block //= 2
    return block


@functools.lru_cache(maxsize=4096)
def warps_of(block: int) -> int:
    return max(1, min(16, block // 512))


def most_warps() -> int:
    """The most warps of a program, which has at most 1,024 threads."""
    return 32 if IN_INTERPRETER else 1024 // int(_target(driver.active.get_current_device(), driver.active).warp_size)


def copies_by_itself() -> bool:
    """Whether loads can go to shared memory while a program computes."""
    return shared_memory().copies


def stages() -> int:
    """The most pipeline stages of loads: several if the device copies to its shared memory by itself."""
    return 3 if copies_by_itself() else 1


@functools.lru_cache(maxsize=64)
def _target(device: int, active: Any) -> Any:
    return active.get_current_target()


def contiguous(t: Optional[Tensor]) -> Optional[Tensor]:
    return None if t is None else t.contiguous()


def flat_rows(t: Tensor) -> tuple[Tensor, int, int]:
    """Contiguous `t`, its number of rows and its row length."""
    t = t.contiguous()
    width = t.shape[-1]
    return t, t.numel() // width if width else 0, width
