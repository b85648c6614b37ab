"""Products by a ring: parts are sent from rank to rank, each while another part is multiplied.

    gathered_products    the parts of all ranks arrive one after the other, and each is multiplied on arrival, once or more often
    scattered_products   the sum of a part passes all ranks, each of which adds its product, and ends at the part's rank

n - 1 shifts, each in flight while one product of 1/n of the rows is computed. Rows are as in one large product; sums are in the
order of the ring, which starts after the rank that ends with them, and in the dtype of the product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from funcops.distributed import comm
from funcops.distributed.mesh import Axis
from funcops.library.kernels import pointwise

T = TypeVar("T")


def gathered_products(x: Tensor, axis: Axis, product: Callable[[Tensor], T]) -> tuple[list[T], list[Tensor]]:
    """x: [m, *], this rank's -> lists, by rank, of the product of its x, and of its x."""
    n, rank = axis.size, axis.rank
    xs: list[Tensor] = [x] * n
    ys: list[T] = [None] * n  # type: ignore[list-item]
    for step in range(n):
        sent = comm.start_shift(x, axis, 1) if step < n - 1 else None
        ys[rank - step] = product(x)
        xs[rank - step] = x
        x = x if sent is None else comm.wait(sent, axis)[0]
    return ys, xs


def scattered_products(rows: Sequence[T], axis: Axis, product: Callable[[T], Tensor]) -> Tensor:
    """rows: of an x [n m, *], the part [m, *] of each rank -> [m, *]: this rank's rows of the sum of all ranks' products of x."""
    n, rank = axis.size, axis.rank
    total = product(rows[rank - 1])
    for step in range(2, n + 1):
        sent = comm.start_shift(total, axis, 1)
        own = product(rows[rank - step])
        total = pointwise.add(comm.wait(sent, axis)[0], own)
    return total
