"""Products of rows in the mode of `pins`: N, K and the dtype choose the kernel and its tile, and nothing splits K.

A row's sum then goes over K in one order, whatever rows come with it and wherever it stands among them: a tile's rows do not mix.
The tile is the table's (`gemm_table`) for a constant number of rows. No library multiplies, as it chooses by the number of rows.
"""

from __future__ import annotations

import functools
from typing import Optional

import torch
from torch import Tensor

from funcops.library.kernels.pins import require_our_products
from funcops.library.kernels.triton.common import cdiv
from funcops.library.kernels.triton.gemm import shared_of
from funcops.library.kernels.triton.gemm_table import choose, fitting
from funcops.library.kernels.triton.matmul import (
    Epilogue,
    Facts,
    Matrix,
    Plan,
    _describable,
    _even,
    _sizes,
    by_descriptor,
    by_pointer,
    columns_at_a_time,
    device_facts,
    tile_for,
)

ROWS = 128  # for which a tile is chosen, whatever the number of rows is


@functools.lru_cache(maxsize=1024)
def plan_for(dtype: torch.dtype, into: torch.dtype, k: int, n: int, b: tuple[int, int], family: str, facts: Facts) -> Plan:
    """The plan, but for its number of programs, of products of rows [*, k] and B [k, n] with strides `b`."""
    family = "accumulate" if family == "none" and into is not dtype else family  # as in `plan_of`
    own = choose(family, dtype, ROWS, n, k % 16 == 0 and _even(b))
    described = own.descriptor is not None and facts.descriptors and _describable(dtype, into, (ROWS, k), (k, 1), n, b)
    tile = tile_for(own, described)
    if described:
        of_own = dtype.itemsize, into.itemsize, facts.memory
        tile = fitting(tile, lambda part: shared_of(*_sizes(part), *of_own), facts.memory.limit)
    length = max(1, cdiv(k, tile.k)) * tile.k
    return Plan(described, False, tile, columns_at_a_time(tile, family, facts), facts.multiprocessors, 1, 0, length, 1, length)


def product_of_rows(rows: Tensor, b: Matrix, e: Epilogue, out: Optional[Tensor] = None) -> Tensor:
    """Compute f(scale rows B + bias) + add, as `matmul` does, for rows [*, K] and B [K, N], into `out` [*, N] if given."""
    require_our_products("a product of rows")
    (right, (k, n), b_strides), rows = b, rows.contiguous()
    out = rows.new_empty(*rows.shape[:-1], n) if out is None else out
    if out.numel():
        m, facts = out.numel() // n, device_facts()
        plan = plan_for(rows.dtype, out.dtype, k, n, b_strides, e.family(out), facts)
        tiles = cdiv(m, plan.tile.m) * cdiv(n, plan.tile.n)
        plan = plan._replace(programs=min(plan.programs, tiles) if plan.described else tiles, slice_rows=m)
        run = by_descriptor if plan.described else by_pointer
        run((rows, (m, k), (k, 1)), (right, (k, n), b_strides), out, e, plan, None)
    return out
