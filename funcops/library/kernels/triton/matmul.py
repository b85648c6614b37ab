"""Matrix products with an epilogue: the choice of a kernel, its grid, and the splits of the inner dimension."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Optional

import torch
import triton
from torch import Tensor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from funcops.engine.backend.select import gemm_provider
from funcops.engine.backend.shared import HOPPER, SharedMemory, shared_memory
from funcops.library.kernels.triton.common import IN_INTERPRETER, block_of, cdiv, warps_of
from funcops.library.kernels.triton.gemm import launch_after, launch_descriptor, launch_pointer, launch_sum_splits, shared_of
from funcops.library.kernels.triton.gemm_specialised import launch_specialised, specialised_shared_of
from funcops.library.kernels.triton.gemm_table import FUSED, SPECIALISED, Choice, Tile, choose, fitting
from funcops.library.kernels.triton.norm import add_parts, row_sums
from funcops.library.kernels.triton.providers import PRODUCTS, Provider

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


PLAIN = Epilogue()

# a matrix: the tensor in whose memory it lies, from its first element on, the shape and the strides. A view takes longer to make
Matrix = tuple[Tensor, tuple[int, int], tuple[int, int]]


def rows_of(t: Tensor) -> Matrix:
    """The rows [*, N] of a tensor, copied if their strides differ."""
    if t.dim() != 2:
        if t.is_contiguous():
            n = t.shape[-1]
            return t, (t.numel() // n if n else 0, n), (n, 1)
        t = t.reshape(-1, t.shape[-1])
    return t, t.shape, t.stride()  # type: ignore[return-value]


def columns_of(t: Tensor) -> Matrix:
    """The transpose of `rows_of`."""
    memory, (m, n), (outer, inner) = rows_of(t)
    return memory, (n, m), (inner, outer)


class Plan(NamedTuple):
    """How products of one kind are launched. `columns` of a tile are finished at a time. The inner dimension has `splits` parts of
    `per_split`; a tile takes the row sums of A in `shares` parts of `per_share`."""

    described: bool
    specialised: bool
    tile: Tile
    columns: int
    programs: int
    splits: int
    slice_rows: int
    per_split: int
    shares: int
    per_share: int


def matmul(a: Matrix, b: Matrix, out: Tensor, epilogue: Epilogue, choice: Optional[Choice] = None) -> None:
    """Compute out [M, N] from A [M, K] and B [K, N] of any strides and one dtype, by the provider that is requested. `out`, and
    an added tensor, is contiguous and not empty; its rows may have more than one dimension."""
    sums, provider = epilogue.sums, gemm_provider()
    if provider in PRODUCTS and by_another(a, b, out, epilogue, PRODUCTS[provider]):
        return
    (left, shape, strides), (right, (_, n), b_strides) = a, b
    plan = plan_of(
        left.dtype, out.dtype, shape, strides, n, b_strides, epilogue.family(out), sums is not None,
        _on_16_bytes(left, right, out), device_facts(), provider == "specialised", choice,
    )
    if plan.specialised:
        by_specialised(a, b, out, epilogue, plan)
        return
    run, (m, _) = by_descriptor if plan.described else by_pointer, shape
    if sums is not None and plan.splits * plan.shares > 1:
        sums = out.new_empty((plan.splits * plan.shares, m), dtype=torch.float32)
    if plan.splits == 1:
        run(a, b, out, epilogue, plan, sums)
    else:
        parts = out.new_empty((plan.splits, plan.slice_rows, n), dtype=torch.float32)
        run(a, b, parts, Epilogue(scale=epilogue.scale), plan, sums)
        add_up(parts, plan.slice_rows * n, out, epilogue.add is not None)
    if sums is not None and epilogue.sums is not None and sums is not epilogue.sums:
        add_up(sums, m, epilogue.sums, epilogue.add is not None)


@functools.lru_cache(maxsize=4096)
def plan_of(
    dtype: torch.dtype, into: torch.dtype, shape: tuple[int, int], a: tuple[int, int], n: int, b: tuple[int, int], family: str,
    sums: bool, on_16_bytes: bool, facts: Facts, specialised: bool, choice: Optional[Choice],
) -> Plan:
    """The plan for A of `shape` with strides `a`, and B [K, n] with strides `b`. A training step asks for the same plans again and
    again, and making one takes longer than a launch."""
    (m, k), (has_descriptors, multiprocessors, memory, accumulates_apart) = shape, facts
    family = "accumulate" if family == "none" and into is not dtype else family  # a wide tile of float32 would not fit
    own, split = (choice or choose(name, dtype, m, n, _even(a) and _even(b)) for name in (family, "split"))
    described = own.descriptor is not None and has_descriptors and on_16_bytes and _describable(dtype, into, shape, a, n, b)
    of_own, asked = (dtype.itemsize, into.itemsize, memory), SPECIALISED[family != "none"]
    specialised = specialised and described and specialised_shared_of(*_sizes(asked), *of_own) <= memory.limit
    if accumulates_apart and family == "kept":  # its warps would spill, in whatever parts they finish a tile
        specialised = False
    if specialised and not sums:
        tile, splits = asked, 1
    else:
        specialised, tile = False, tile_for(split, described)
        splits = 1 if family in FUSED else number_of_splits(cdiv(m, tile.m) * cdiv(n, tile.n), k)
        tile = tile if splits > 1 else tile_for(own, described)
        if described:  # into a workspace of float32, where it is split
            sizes = of_own if splits == 1 else (dtype.itemsize, 4, memory)
            tile = fitting(tile, lambda part: shared_of(*_sizes(part), *sizes), memory.limit)
    tiles, per_split = cdiv(m, tile.m) * cdiv(n, tile.n), max(1, cdiv(cdiv(k, splits), tile.k)) * tile.k
    programs = min(multiprocessors, tiles * splits) if described else tiles
    slice_rows = cdiv(m, tile.m) * tile.m if described else m
    shares = number_of_shares(cdiv(n, tile.n), per_split) if sums else 1
    per_share = cdiv(per_split // tile.k, shares) * tile.k
    columns = columns_at_a_time(tile, family, facts) if splits == 1 else tile.n
    slice_rows = m if splits == 1 else slice_rows
    return Plan(described, specialised, tile, columns, programs, splits, slice_rows, per_split, shares, per_share)


def columns_at_a_time(tile: Tile, family: str, facts: Facts) -> int:
    """The columns of a tile that an epilogue finishes at a time: half of them where sums have memory of their own."""
    return tile.n // 2 if facts.accumulates_apart and family != "none" else tile.n


def multiply(a: Matrix, b: Matrix, out: Tensor, epilogue: Epilogue) -> None:
    """`matmul`, or the library's product and a kernel for the epilogue if that is faster."""
    (by_library if _library_serves(a, b, out, epilogue) else matmul)(a, b, out, epilogue)


def _library_serves(a: Matrix, b: Matrix, out: Tensor, epilogue: Epilogue, requested: str = "") -> bool:
    provider, family = requested or gemm_provider(), epilogue.family(out)
    if provider not in ("auto", "cublas") or (epilogue.add is out and family != "accumulate"):
        return False
    (left, (m, _), _), (_, (_, n), _) = a, b
    return provider == "cublas" or _left_by_table(family, left.dtype, m, n) or not descriptors_serve(a, b, out)


@torch.no_grad()
def by_another(left: Matrix, right: Matrix, out: Tensor, e: Epilogue, provider: Provider) -> bool:
    """The product by a library of the table of providers, or else by the one of torch where that serves by default; False if
    neither takes it. Row sums are ours."""
    a, b = view_of(left), view_of(right)
    flat = out.view(a.shape[0], b.shape[1])
    z, add = (t if t is None else t.view_as(flat) for t in (e.z, e.add))
    given = e._replace(z=z, add=flat if e.add is out else add, sums=None)
    if a.shape[1] == 0 or not provider(a, b, flat, given):
        served = _library_serves(left, right, out, e, "auto")
        if served:
            by_library(left, right, out, e)
        return served
    if e.sums is not None:
        sum_rows(a.mT, e.sums, e.add is not None)
    return True


def left_to_library(family: str, dtype: torch.dtype, m: int, n: int) -> bool:
    """Whether torch's kernels are as fast as any of ours, by the table, or the device's shared memory does not hold the tile with
    which ours is; False if a provider is requested."""
    return gemm_provider() == "auto" and _left_by_table(family, dtype, m, n)


def _left_by_table(family: str, dtype: torch.dtype, m: int, n: int) -> bool:
    library, tile, _ = choose(family, dtype, m, n, True)
    if library or tile is None:
        return library
    memory = device_facts().memory
    return shared_of(*_sizes(tile), dtype.itemsize, dtype.itemsize, memory) > memory.limit


def view_of(matrix: Matrix) -> Tensor:
    memory, shape, strides = matrix
    return memory.as_strided(shape, strides)


@torch.no_grad()
def by_library(left: Matrix, right: Matrix, out: Tensor, e: Epilogue) -> None:
    a, b, keep, accumulates = view_of(left), view_of(right), e.mode == "keep", e.add is out
    m, n = a.shape[0], b.shape[1]
    out = out.view(m, n)
    t = e.z.view(m, n) if keep and e.z is not None else out
    start = e.bias if e.bias is not None else out if accumulates else None
    if out.dtype is not a.dtype:
        _add_wide(out, a, b, e.scale, 1.0 if accumulates else 0.0)
    elif start is None and e.scale == 1.0:
        torch.mm(a, b, out=t)
    else:
        torch.addmm(t if start is None else start, a, b, beta=0.0 if start is None else 1.0, alpha=e.scale, out=t)
    if e.kind or e.z is not None or (e.add is not None and not accumulates):
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


def _sizes(tile: Tile) -> tuple[int, int, int, int]:
    return tile.m, tile.n, tile.k, tile.stages


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


def by_pointer(a: Matrix, b: Matrix, c: Tensor, e: Epilogue, plan: Plan, sums: Optional[Tensor]) -> None:
    (left, (m, k), strides), (right, (_, n), b_strides), tile = a, b, plan.tile
    launch_pointer(
        plan.programs, plan.splits, 1, left, right, c, e.bias, e.z, e.add, sums, m, n, k, *strides, *b_strides,
        plan.per_split, plan.shares, plan.per_share, e.scale,
        e.bias is not None, e.mode, e.kind, e.add is not None, sums is not None, precision(left.dtype),
        tile.m, tile.n, tile.k, GROUP, num_warps=tile.warps, num_stages=tile.stages,
    )


def by_descriptor(a: Matrix, b: Matrix, c: Tensor, e: Epilogue, plan: Plan, sums: Optional[Tensor]) -> None:
    (left, (m, k), strides), (_, (_, n), _), tile = a, b, plan.tile
    a_desc, a_flipped = _factor(a, tile.m, tile.k)
    b_desc, b_flipped = _factor(b, tile.k, tile.n)
    launch_descriptor(
        plan.programs, 1, 1, a_desc, b_desc, descriptor_of(c, [plan.splits * plan.slice_rows, n], [n, 1], tile.m, plan.columns),
        e.bias, e.z, e.add, left, sums, m, n, k, *strides, plan.per_split, plan.splits, plan.slice_rows, plan.shares,
        plan.per_share, e.scale,
        e.bias is not None, e.mode, e.kind, e.add is not None, sums is not None, a_flipped, b_flipped,
        tile.m, tile.n, tile.k, GROUP, num_warps=tile.warps, num_stages=tile.stages,
    )


def _factor(matrix: Matrix, rows: int, columns: int) -> tuple[TensorDescriptor, bool]:
    """The descriptor of a factor, or of its transpose if the factor's columns are contiguous, and which it is."""
    t, (m, n), (outer, inner) = matrix
    if inner == 1:
        return descriptor_of(t, [m, n], [outer, 1], rows, columns), False
    return descriptor_of(t, [n, m], [inner, outer], columns, rows), True


def by_specialised(a: Matrix, b: Matrix, c: Tensor, e: Epilogue, plan: Plan) -> None:
    (left, (m, k), strides), (right, (_, n), b_strides), tile = a, b, plan.tile
    a_flipped, b_flipped = strides[1] != 1, b_strides[1] != 1
    triton.set_allocator(scratch)
    launch_specialised(
        plan.programs, 1, 1, left, right, c, e.bias, e.z, e.add, m, n, k, max(strides),
        max(b_strides), e.scale, e.bias is not None, e.mode, e.kind, e.add is not None, a_flipped, b_flipped,
        tile.m, tile.n, tile.k, plan.columns, GROUP, num_warps=tile.warps, num_stages=tile.stages,
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


def _even(strides: tuple[int, int]) -> bool:
    """Whether the stride other than 1 is a multiple of 16 elements."""
    rows, columns = strides
    return (rows if columns == 1 else columns) % 16 == 0


def descriptors_serve(a: Matrix, b: Matrix, out: Tensor) -> bool:
    """Whether the device has tensor descriptors, and they take these strides: one is 1, the other a multiple of 16 bytes that
    holds a row."""
    (left, shape, strides), (right, (_, n), b_strides) = a, b
    described = _describable(left.dtype, out.dtype, shape, strides, n, b_strides)
    return described and device_facts()[0] and _on_16_bytes(left, right, out)


def _on_16_bytes(a: Tensor, b: Tensor, out: Tensor) -> bool:
    return (a.data_ptr() | b.data_ptr() | out.data_ptr()) & 15 == 0


def _describable(
    dtype: torch.dtype, into: torch.dtype, shape: tuple[int, int], a: tuple[int, int], n: int, b: tuple[int, int]
) -> bool:
    m, k = shape
    factors = ((m, k), a), ((k, n), b)
    return m * k > 0 and n * into.itemsize % 16 == 0 and all([_dense(*of, dtype.itemsize) for of in factors])


def _dense(shape: tuple[int, int], strides: tuple[int, int], size: int) -> bool:
    """Not expanded, rows do not overlap, and each begins on a multiple of 16 bytes."""
    rows, columns = strides
    outer, row = (rows, shape[1]) if columns == 1 else (columns, shape[0])
    return (rows == 1 or columns == 1) and outer >= row and outer * size % 16 == 0


def precision(dtype: torch.dtype) -> str:
    """float32 products are exact unless torch's own switches ask for tf32, so that cuBLAS and these kernels agree.
    `torch.backends.cuda.matmul.fp32_precision` reads them all, the older switches too."""
    asked = dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if asked else "ieee"


class Facts(NamedTuple):
    """Whether a device has tensor descriptors, the number of its multiprocessors, as a persistent kernel has one program for each,
    its shared memory, and whether products are summed in memory of their own (tcgen05): then an epilogue can take them from there
    in parts, where other devices hold them in registers all the time."""

    descriptors: bool
    multiprocessors: int
    memory: SharedMemory
    accumulates_apart: bool = False


def device_facts() -> Facts:
    if IN_INTERPRETER:
        return Facts(True, 4, HOPPER)
    active = driver.active  # a property that calls a function
    return _facts(active.get_current_device(), active)


@functools.lru_cache(maxsize=64)
def _facts(device: int, active: Any) -> Facts:
    target = active.get_current_target()
    count = active.utils.get_device_properties(device)["multiprocessor_count"]
    arch = target.arch if target.backend == "cuda" else 0
    return Facts(arch >= 90, count, shared_memory(), 100 <= arch < 120)
