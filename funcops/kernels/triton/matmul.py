"""Matrix products with an epilogue: the choice of a kernel, its grid, and the splits of the inner dimension."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Optional

import torch
import triton
from torch import Tensor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from funcops.backend.select import gemm_provider
from funcops.kernels.triton.common import INTERPRETED, block_of, cdiv, warps_of
from funcops.kernels.triton.gemm import launch_after, launch_descriptor, launch_pointer, launch_sum_splits
from funcops.kernels.triton.gemm_specialised import launch_specialised
from funcops.kernels.triton.gemm_table import FUSED, SPECIALISED, Choice, Tile, choose
from funcops.kernels.triton.norm import add_parts, row_sums

FEW_TILES, LONG, MOST_SPLITS, SUM_BLOCK, GROUP = 128, 4096, 8, 1024, 8
SHARE, MOST_SHARES = 1024, 8  # of the inner dimension: the least share of the row sums that a tile takes
AFTER_COLUMNS, AFTER_TILE = 1024, 2048
MANY = 1 << 22  # elements, from which on our kernels sum rows faster than torch's


class Epilogue(NamedTuple):
    """C = f(scale A B + bias) + add. `z` with mode "keep" receives the argument of f; with "derivative" it is the argument
    of f', by which the product is multiplied. `add` may be the output itself. `sums` [M] receives the row sums of A; if `add` is
    given, they are added to it."""

    bias: Optional[Tensor] = None
    z: Optional[Tensor] = None
    mode: str = ""
    kind: str = ""
    add: Optional[Tensor] = None
    scale: float = 1.0
    sums: Optional[Tensor] = None

    def family(self, out: Tensor) -> str:
        if self.z is not None:
            return "kept"
        if self.add is not None and self.add is not out:
            return "added"
        if self.bias is not None or self.kind:
            return "fused"
        return "none" if self.add is None else "accumulate"


def matmul(a: Tensor, b: Tensor, out: Tensor, epilogue: Epilogue, choice: Optional[Choice] = None) -> None:
    """Compute out [M, N], contiguous and not empty, from A [M, K] and B [K, N] of any strides and one dtype."""
    (m, k), n = a.shape, b.shape[1]
    family, even = epilogue.family(out), aligned(a) and aligned(b)
    family = "accumulate" if family == "none" and out.dtype is not a.dtype else family  # a wide tile of float32 would not fit
    own, split = (choice or choose(name, a.dtype, m, n, even) for name in (family, "split"))
    described = own.descriptor is not None and descriptors_serve(a, b, out)
    if described and gemm_provider() == "specialised" and epilogue.sums is None:
        by_specialised(a, b, out, epilogue, SPECIALISED[family != "none"])
        return
    tile = tile_for(split, described)
    splits = 1 if family in FUSED else number_of_splits(cdiv(m, tile.m) * cdiv(n, tile.n), k)
    run, tile = by_descriptor if described else by_pointer, tile if splits > 1 else tile_for(own, described)
    per_split = max(1, cdiv(cdiv(k, splits), tile.k)) * tile.k
    shares = 1 if epilogue.sums is None else number_of_shares(cdiv(n, tile.n), per_split)
    sums = epilogue.sums
    if sums is not None and splits * shares > 1:
        sums = a.new_empty((splits * shares, m), dtype=torch.float32)
    if splits == 1:
        run(a, b, out, epilogue, tile, 1, m, per_split, sums, shares)
    else:
        rows = cdiv(m, tile.m) * tile.m if described else m
        parts = a.new_empty((splits, rows, n), dtype=torch.float32)
        run(a, b, parts, Epilogue(scale=epilogue.scale), tile, splits, rows, per_split, sums, shares)
        add_up(parts, rows * n, out, epilogue.add is not None)
    if sums is not None and epilogue.sums is not None and sums is not epilogue.sums:
        add_up(sums, m, epilogue.sums, epilogue.add is not None)


def multiply(a: Tensor, b: Tensor, out: Tensor, epilogue: Epilogue) -> None:
    """`matmul`, or the library's product and a kernel for the epilogue if that is faster."""
    (by_library if _library_serves(a, b, out, epilogue) else matmul)(a, b, out, epilogue)


def _library_serves(a: Tensor, b: Tensor, out: Tensor, epilogue: Epilogue) -> bool:
    provider, family = gemm_provider(), epilogue.family(out)
    if provider not in ("auto", "cublas") or (epilogue.add is out and family != "accumulate"):
        return False
    return provider == "cublas" or left_to_library(family, a.dtype, *out.shape) or not descriptors_serve(a, b, out)


def left_to_library(family: str, dtype: torch.dtype, m: int, n: int) -> bool:
    """Whether torch's kernels are as fast as any of ours, by the table; False if a provider is requested."""
    return gemm_provider() == "auto" and choose(family, dtype, m, n, True).library


@torch.no_grad()
def by_library(a: Tensor, b: Tensor, out: Tensor, e: Epilogue) -> None:
    (m, n), keep = out.shape, e.mode == "keep"
    t = e.z.view(m, n) if keep and e.z is not None else out
    start = e.bias if e.bias is not None else e.add if e.add is out else None
    if out.dtype is not a.dtype:
        _add_wide(out, a, b, e.scale, 1.0 if e.add is out else 0.0)
    elif start is None and e.scale == 1.0:
        torch.mm(a, b, out=t)
    else:
        torch.addmm(t if start is None else start, a, b, beta=0.0 if start is None else 1.0, alpha=e.scale, out=t)
    if e.kind or e.z is not None or (e.add is not None and e.add is not out):
        block = block_of(n, AFTER_COLUMNS)
        rows = AFTER_TILE // block
        launch_after(
            cdiv(m, rows), cdiv(n, block), 1, t, out, None if keep else e.z, e.add, m, n,
            "" if keep else e.mode, e.kind, e.add is not None, rows, block, num_warps=warps_of(AFTER_TILE),
        )
    if e.sums is not None:
        sum_rows(a.mT, e.sums, e.add is not None)


@torch.no_grad()
def sum_rows(rows: Tensor, total: Tensor, add: bool) -> None:
    """Write the sum of rows [*, D] to total [D]; with `add`, add it. Our kernels take one launch more than torch's, which matters
    if there is little to read."""
    if rows.numel() >= MANY:
        add_parts(row_sums(rows), total, add)
    elif add:
        total.add_(torch.sum(rows, 0, dtype=total.dtype))
    else:
        torch.sum(rows, 0, dtype=total.dtype, out=total)


def _add_wide(out: Tensor, a: Tensor, b: Tensor, scale: float, beta: float) -> None:
    """Add a product of narrower factors to a float32 `out`: only CUDA's library takes these factors as they are."""
    if a.is_cuda and torch.version.hip is None:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=beta, alpha=scale, out=out)
    else:
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=beta, alpha=scale, out=out)


def tile_for(choice: Choice, described: bool) -> Tile:
    tile = choice.descriptor if described else choice.pointer
    assert tile is not None
    return tile


def number_of_splits(tiles: int, k: int) -> int:
    """The number of parts of the inner dimension: it depends on the shape alone, and so does the order of a sum."""
    if tiles >= FEW_TILES or k < LONG:
        return 1
    return min(MOST_SPLITS, cdiv(FEW_TILES, tiles), k // (LONG // 4))


def number_of_shares(columns: int, per_split: int) -> int:
    """The number of shares of A's row sums, each for one tile of a row of tiles: all tiles share work that would keep
    one of them long at the end."""
    return max(1, min(MOST_SHARES, columns, per_split // SHARE))


def add_up(parts: Tensor, slice_size: int, out: Tensor, add: bool) -> None:
    n = out.numel()
    launch_sum_splits(cdiv(n, SUM_BLOCK), 1, 1, parts, out, n, slice_size, parts.shape[0], add, SUM_BLOCK)


def by_pointer(
    a: Tensor, b: Tensor, c: Tensor, e: Epilogue, tile: Tile, splits: int, slice_rows: int, per_split: int,
    sums: Optional[Tensor], shares: int,
) -> None:
    (m, k), n = a.shape, b.shape[1]
    tiles, per_share = cdiv(m, tile.m) * cdiv(n, tile.n), cdiv(per_split // tile.k, shares) * tile.k
    launch_pointer(
        tiles, splits, 1, a, b, c, e.bias, e.z, e.add, sums, m, n, k, *a.stride(), *b.stride(), per_split, shares,
        per_share, e.scale,
        e.bias is not None, e.mode, e.kind, e.add is not None, sums is not None, precision(a.dtype),
        tile.m, tile.n, tile.k, GROUP, num_warps=tile.warps, num_stages=tile.stages,
    )


def by_descriptor(
    a: Tensor, b: Tensor, c: Tensor, e: Epilogue, tile: Tile, splits: int, slice_rows: int, per_split: int,
    sums: Optional[Tensor], shares: int,
) -> None:
    (m, k), n = a.shape, b.shape[1]
    tiles, per_share = cdiv(m, tile.m) * cdiv(n, tile.n), cdiv(per_split // tile.k, shares) * tile.k
    a_flipped, b_flipped = a.stride(1) != 1, b.stride(1) != 1
    a_desc = descriptor(a.mT, tile.k, tile.m) if a_flipped else descriptor(a, tile.m, tile.k)
    b_desc = descriptor(b.mT, tile.n, tile.k) if b_flipped else descriptor(b, tile.k, tile.n)
    launch_descriptor(
        min(programs_at_once(), tiles * splits), 1, 1, a_desc, b_desc, descriptor(c.view(-1, n), tile.m, tile.n),
        e.bias, e.z, e.add, a, sums, m, n, k, *a.stride(), per_split, splits, slice_rows, shares,
        per_share, e.scale,
        e.bias is not None, e.mode, e.kind, e.add is not None, sums is not None, a_flipped, b_flipped,
        tile.m, tile.n, tile.k, GROUP, num_warps=tile.warps, num_stages=tile.stages,
    )


def by_specialised(a: Tensor, b: Tensor, c: Tensor, e: Epilogue, tile: Tile) -> None:
    (m, k), n = a.shape, b.shape[1]
    tiles = cdiv(m, tile.m) * cdiv(n, tile.n)
    a_flipped, b_flipped = a.stride(1) != 1, b.stride(1) != 1
    triton.set_allocator(scratch)
    launch_specialised(
        min(programs_at_once(), tiles), 1, 1, a, b, c, e.bias, e.z, e.add, m, n, k, max(a.stride()),
        max(b.stride()), e.scale, e.bias is not None, e.mode, e.kind, e.add is not None, a_flipped, b_flipped,
        tile.m, tile.n, tile.k, GROUP, num_warps=tile.warps, num_stages=tile.stages,
    )


def scratch(size: int, alignment: int, stream: Optional[int]) -> Tensor:
    """Allocate memory for descriptors that a kernel makes itself."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def descriptor(t: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Make the descriptor of a tensor that passed `descriptors_serve`."""
    return descriptor_of(t, [*t.shape], [*t.stride()], rows, columns)


def descriptor_of(t: Tensor, shape: list[int], strides: list[int], rows: int, columns: int) -> TensorDescriptor:
    """Make a descriptor of t's memory: a copy of a checked one, as a check takes longer than a launch."""
    made = object.__new__(TensorDescriptor)
    made.__dict__ = _checked(t.dtype, rows, columns).__dict__ | {"base": t, "shape": shape, "strides": strides}
    return made


@functools.lru_cache(maxsize=256)
def _checked(dtype: torch.dtype, rows: int, columns: int) -> TensorDescriptor:
    base = torch.empty(1, 256, dtype=dtype, device="meta")
    return TensorDescriptor(base, [1, 256], [256, 1], [rows, columns])


def aligned(t: Tensor) -> bool:
    rows, columns = t.stride()
    return (rows if columns == 1 else columns) % 16 == 0


def descriptors_serve(a: Tensor, b: Tensor, out: Tensor) -> bool:
    """Whether the device has tensor descriptors, and they take these strides: one is 1, the other a multiple of 16 bytes that
    holds a row."""
    return a.numel() > 0 and device_has_descriptors() and all([_describable(t) for t in (a, b, out)])


def _describable(t: Tensor) -> bool:
    (rows, columns), shape = t.stride(), t.shape
    outer, row = (rows, shape[1]) if columns == 1 else (columns, shape[0])
    dense = (rows == 1 or columns == 1) and outer >= row  # not expanded, and rows do not overlap
    return dense and outer * t.itemsize % 16 == 0 and t.data_ptr() % 16 == 0


def precision(dtype: torch.dtype) -> str:
    """float32 products are exact unless torch's own switches ask for tf32, so that cuBLAS and these kernels agree.
    `torch.backends.cuda.matmul.fp32_precision` reads them all, the older switches too."""
    asked = dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if asked else "ieee"


def device_has_descriptors() -> bool:
    return bool(INTERPRETED) or _facts(driver.active.get_current_device(), driver.active)[0]


def programs_at_once() -> int:
    """The number of programs of a persistent kernel: one per multiprocessor."""
    return 4 if INTERPRETED else _facts(driver.active.get_current_device(), driver.active)[1]


@functools.lru_cache(maxsize=64)
def _facts(device: int, active: Any) -> tuple[bool, int]:
    target = active.get_current_target()
    count = active.utils.get_device_properties(device)["multiprocessor_count"]
    return target.backend == "cuda" and target.arch >= 90, count
