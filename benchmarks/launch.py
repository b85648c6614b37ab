"""Host time of a Triton launch: our launcher against `kernel[grid](...)`, with the driver stubbed, so on any machine.

The kernel is compiled for sm_90 (or for the GPU's own target if Triton's driver is active) and never runs: the time is the host's,
up to the driver's launch call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.measure import Row, interleaved, summary
from funcops.engine.backend.launch import launcher
from funcops.testing.aot import stubbed


@triton.jit
def four(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n), mask=i < n)


@triton.jit
def ten(x_ptr, y_ptr, z_ptr, n, m, s0, s1, eps: tl.float32, BLOCK: tl.constexpr, FLAG: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i * s0, tl.load(x_ptr + i * s1, mask=i < n) + eps, mask=i < m)


@triton.jit
def nineteen(
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    e_ptr,
    f_ptr,
    m,
    n,
    k,
    s0,
    s1,
    s2,
    s3,
    s4,
    eps: tl.float32,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FLAG: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(f_ptr + i * s0, tl.load(a_ptr + i * s1, mask=i < n) + eps, mask=i < m)


def cases() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Kernels of 4, 10 and 19 arguments, and arguments for them."""
    x, y, z = torch.zeros(3, 64)
    return {
        "4 arguments": (four, (x, y, 64, 128)),
        "10 arguments": (ten, (x, y, z, 64, 128, 1, 1, 1e-5, 128, True)),
        "19 arguments": (nineteen, (x, y, z, x, y, z, 64, 128, 32, 1, 1, 16, 48, 7, 1e-5, 128, 128, 64, True)),
    }


def run() -> list[Row]:
    rows: list[Row] = []
    with stubbed():
        for name, (kernel, args) in cases().items():
            ours = launcher(kernel)
            functions: dict[str, Callable[[], Any]] = {
                "funcops": lambda launch=ours, args=args: launch(4, 1, 1, *args),
                "kernel[grid]": lambda kernel=kernel, args=args: kernel[(4, 1, 1)](*args),
            }
            rows += summary("launch", name, interleaved(functions, rounds=25, calls=1000), "funcops")
    return rows
