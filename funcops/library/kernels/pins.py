"""The mode in which the bits of a row do not depend on which other rows come with it: what kernels run in its block.

    with pinning(Pins(rows=128, queries=128)):         # a kernel whose rows are "mixed" raises by name in the block
        y = linear_fwd(x, w, b)                     # in products of 128 rows each

A product of torch on the CPU orders its sums by how many rows it gets: only products of one constant number of rows give a row the
same bits beside any others. So a pinned product takes `Pins.rows` rows at a time, and the last ones with rows of zeros. An
elementwise function of torch computes 32 floats at a time and the rest by another formula: a pinned one gets a multiple of 32.
Attention takes blocks of `Pins.queries` queries, which begin at multiples of it (`block_attention`).

Triton's kernels are ours, so there the sizes follow from widths and dtypes alone: an implementation that keeps to it in the mode is
marked (`launched`), and any other is refused by name. `Pins` does not choose among their tiles.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from funcops.engine.backend import select, tracing
from funcops.engine.backend.declare import capturing
from funcops.engine.errors import fail, require_count

if TYPE_CHECKING:
    from funcops.engine.backend import Kernel

__all__ = ["Pins", "in_blocks", "in_pieces", "in_vectors", "launched", "own", "pinned", "pinning", "pins", "vectorized"]

VECTORS = 32  # elements that torch's loops on the CPU compute at a time; the rest goes by another formula
MOST = 128  # queries of a block of attention
ALONE = 1 << 15  # elements that torch's loops leave to one thread
LEAST = 16  # columns of a product: fewer may be a product of matrix and vector, which sums in another order
NOMINAL = 32  # blocks of rows for which classes are cut into chunks, whatever the number of rows is
ADDRESS = 16  # bytes: Triton builds another kernel, whose sums may have another order, for addresses that are not multiples of it
_bodies: dict[Kernel, Callable[..., Any]] = {}
_launched: dict[Kernel, Callable[..., Any]] = {}


class Pins(NamedTuple):
    """The sizes of blocks: the rows of a product, and the queries of attention, 32, 64, 96 or 128. Sizes change the bits, so
    training and decoding must have the same. `Pins()(kernel, first)` is the function that runs the kernel for tensors like
    `first`."""

    rows: int = 128
    queries: int = 128

    def __call__(self, kernel: Kernel, first: Tensor) -> Callable[..., Any]:
        where = f"{kernel.name} in invariant mode"
        require_eager(where, first)
        if by_triton(first) and not kernel.library:
            return functools.partial(_launch, kernel, launched_body(kernel))
        if kernel.rows == "mixed":
            remedy = "'each' or 'pinned' (declare @kernel(rows=...) once its rows do not depend on others)"
            fail(where, "rows", remedy, "'mixed'")
        if kernel.rows == "each":
            return kernel.torch_impl
        if kernel not in _bodies:
            package, _, family = kernel.module.rpartition(".")
            importlib.import_module(f"{package}.pinned.{family}")
        return functools.partial(_bodies[kernel], self)


def by_triton(first: Tensor) -> bool:
    """Whether a kernel for tensors like `first` is Triton's, and not torch's on the CPU."""
    return select.wants_triton(first) and first.dtype is not torch.float64


def launched_body(kernel: Kernel) -> Callable[..., Any]:
    """The body that runs a kernel by Triton in the mode. Raises `ValueError` for a kernel without one."""
    kernel.find_triton()
    if kernel not in _launched:
        wanted = "apart in its Triton implementation, which says so by @launched"
        fail(f"{kernel.name} in invariant mode", "rows", wanted, "an implementation that does not, or none")
    return _launched[kernel]


def at_sixteen(t: Tensor) -> Tensor:
    """t, or a copy if its address is not a multiple of 16 bytes, for which another build would serve."""
    return t.clone() if t.data_ptr() % ADDRESS else t


def _launch(kernel: Kernel, body: Callable[..., Any], *args: Any) -> Any:
    given = [at_sixteen(t) if isinstance(t, Tensor) else t for t in args]
    with torch.cuda.device_of(args[0]):
        result = body(*given)
    for t, copy in zip(args, given, strict=True):
        if t is not copy and kernel.mutates:
            t.copy_(copy)
    return result


def require_eager(where: str, first: Tensor) -> None:
    """Raise `ValueError` unless a call like this runs as it is written, by torch on the CPU or by Triton."""
    if not (first.is_cpu or by_triton(first)):
        wanted = "the CPU by torch, or Triton's kernels: torch's on a device choose an order of sums by the number of rows"
        fail(where, "device", wanted, f"{first.dtype} on {first.device} by torch")
    if tracing() or capturing():
        fail(where, "call", "eager: a compiler orders sums by itself, and a recorder reads no positions", "a call under a tracer")


def require_our_products(where: str) -> None:
    """Raise `ValueError` in a block that requests products of a library on a device."""
    if select.choice()[1] not in (None, "auto", "triton"):
        wanted = "'auto' or 'triton' in invariant mode: a library chooses by the number of rows"
        fail(where, "gemm", wanted, repr(select.choice()[1]))


def check_pins(where: str, found: Pins) -> None:
    """Raise `ValueError` or `TypeError` for sizes of blocks that no kernel has."""
    require_count(where, rows=found.rows, queries=found.queries)
    if found.queries % VECTORS or found.queries > MOST:
        wanted = f"a multiple of {VECTORS}, the queries that torch's kernel takes at a time of up to {MOST}"
        fail(where, "queries", wanted, found.queries)


def pins() -> Pins | None:
    """The sizes of the block around; None outside of the mode."""
    return select.choice()[2] if select.chosen_anywhere else None


def pinning(found: Pins) -> AbstractContextManager[None]:
    """A block in the mode. What decides is a config: `funcops.invariant` opens the block around the functions of an op."""
    return select.chosen((*select.choice()[:2], found))


def pinning_where_served(first: Tensor) -> AbstractContextManager[Any]:
    """A block in the mode, if it is not one and a call like this runs in it; else a block in which nothing changes."""
    served = (first.is_cpu or by_triton(first)) and not (tracing() or capturing() or pins())
    return pinning(Pins()) if served else nullcontext()


def pinned(kernel: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: `body(pins, *args)` runs a kernel that is declared with `rows="pinned"`, in the mode."""

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        _bodies[kernel.kernel] = body
        return body

    return decorate


def launched(kernel: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: `body(*args)` runs a kernel by Triton in the mode, and there a row's bits do not depend on other rows. The body is
    the Triton implementation itself, which is declared before, or one for the mode alone."""

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        implementation = kernel.kernel.triton_impl
        declared = getattr(implementation, "__wrapped__", implementation) is body
        _launched[kernel.kernel] = implementation if declared else body
        return body

    return decorate


def own(kernel: Any) -> Callable[..., Any]:
    """The torch implementation of a kernel, for the body of another one: in the mode, the pinned one."""
    found = pins()
    return kernel.kernel.torch_impl if found is None else found(kernel.kernel, torch.empty(0))  # type: ignore[no-any-return]


def nominal_rows(rows: int) -> int:
    """How many rows decide on the size of other chunks: in the mode, not how many there are."""
    found = pins()
    return rows if found is None else NOMINAL * found.rows


def in_blocks(product: Callable[[Tensor, Tensor], Any], x: Tensor, width: int, rows: int) -> Tensor:
    """y [N, width] of x [N, K]: `product(part, out)` writes the product of `rows` rows at a time."""
    count = len(x)
    y = x.new_empty((-(-count // rows) * rows, width))
    for at in range(0, count, rows):
        part = x[at : at + rows]
        product(part if len(part) == rows else pad(part, (0, 0, 0, rows - len(part))), y[at : at + rows])
    return y[:count]


def row_product(x: Tensor, w: Tensor, b: Tensor | None, rows: int) -> Tensor:
    """x w + b in blocks of rows. x: [*, K]; w: [K, N]; b: [N] or None."""
    flat, width = x.reshape(-1, x.shape[-1]), w.shape[1]
    few = max(0, LEAST - width)
    w, b = (pad(w, (0, few)), b if b is None else pad(b, (0, few))) if few else (w, b)

    def product(part: Tensor, out: Tensor) -> None:
        torch.mm(part, w, out=out) if b is None else torch.addmm(b, part, w, out=out)

    y = in_blocks(product, flat if flat.is_contiguous() else flat.contiguous(), width + few, rows)
    return (y[:, :width].contiguous() if few else y).view(*x.shape[:-1], width)


def in_vectors(t: Tensor) -> Tensor:
    """The elements of t in a row, and zeros up to whole vectors."""
    flat = t.reshape(-1)
    flat = flat if flat.is_contiguous() else flat.contiguous()
    return pad(flat, (0, -flat.numel() % VECTORS)) if flat.numel() % VECTORS else flat


def vectorized(fn: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """An elementwise function of tensors of one shape, in whole vectors."""
    first = tensors[0]
    return in_pieces(fn, *[in_vectors(t) for t in tensors])[: first.numel()].view(first.shape)


def in_pieces(fn: Callable[..., Tensor], *flat: Tensor) -> Tensor:
    """A function of vectors [n] in whole vectors, whose result is [*, n], in pieces that torch leaves to one thread: several would
    part them anywhere."""
    if torch.get_num_threads() == 1 or flat[0].numel() <= ALONE:
        return fn(*flat)
    return torch.cat([fn(*parts) for parts in zip(*[t.split(ALONE) for t in flat], strict=True)], -1)
