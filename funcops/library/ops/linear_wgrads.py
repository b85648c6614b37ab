"""Weight gradients of several linear layers, or of several microbatches of one, in few products.

    dw_k += sum over i of dy_i^T x_i, over the products i that add to dw_k

concatenate: dy = [dy_1; dy_2; ...], x likewise, one product for one dw. batch: [n, O, R] @ [n, R, I], n weights of one shape.
group: as batch, with R_i rows each (`torch.nn.functional.grouped_mm`, which takes rows of a multiple of 16 bytes, not float64;
other products run alone).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from funcops.engine.backend import wide
from funcops.engine.contract.accumulators import takes_sums
from funcops.library.kernels import fused_linear
from funcops.library.kernels.tables import Tables

P = TypeVar("P")


class Limits(NamedTuple):
    """The most rows of a product for which joining it with others was measured to be faster than running it alone; of the three,
    `concatenate` is the highest."""

    concatenate: int = -1
    batch: int = -1
    group: int = -1


# Measured by `python -m benchmarks wgrads`; see docs/benchmarks/cpu-wgrads.csv. Products of other devices and dtypes, which were
# not measured, run alone.
MEASURED = {
    ("cpu", torch.bfloat16): Limits(256, 256, 16),
    ("cpu", torch.float16): Limits(256, 256, 16),
    ("cpu", torch.float32): Limits(concatenate=16),
}
NEVER = Limits()
JOINED_ROWS = 2048  # of a concatenation: longer ones were not faster, and their copies are larger


_ends = Tables(32)  # the row ends of grouped products


class Product(NamedTuple):
    """dy [R, O] and x [R, I] of one weight gradient, and its accumulators dw [O, I] and db [O] or None; all checked. `made` returns
    x, in its turn: an x that is gathered for the product should not wait beside others."""

    dy: Tensor
    made: Callable[[], Tensor]
    dw: Tensor
    db: Tensor | None
    rows: int
    limits: Limits

    @staticmethod
    def of(dy: Tensor, x: Tensor | Callable[[], Tensor], dw: Tensor, db: Tensor | None) -> Product:
        """A product of dy [*, O] and x [*, I], or the function that returns x."""
        made = (lambda: x) if isinstance(x, Tensor) else x
        if dy.dim() != 2:
            dy = dy.reshape(-1, dy.shape[-1])
        return Product(dy, made, dw, db, dy.shape[0], MEASURED.get((dy.device.type, dy.dtype), NEVER))

    @property
    def x(self) -> Tensor:
        """x [R, I], which is made now."""
        x = self.made()
        return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])

    @staticmethod
    def join(products: list[Product], how: str | None) -> None:
        """Add every product to its accumulators, joined as `how` says, or in the way that was measured to be fastest."""
        left = products
        if how is not None or any([p.rows <= p.limits.concatenate for p in products]):  # no way's limit is higher
            for name, key, run in WAYS:
                candidates = [p for p in left if how == name or (how is None and p.rows <= getattr(p.limits, name))]
                if len(candidates) > 1:
                    left = join_some(left, candidates, key, run)
        for p in left:
            _add(p)

    @property
    def accumulator(self) -> tuple[int, tuple[int, ...]]:
        """The accumulator's address and strides: the views of a stacked leaf are new objects in every call."""
        return self.dw.data_ptr(), self.dw.stride()

    @property
    def sizes(self) -> tuple[int, int]:
        return self.dw.shape[0], self.dw.shape[1]

    @property
    def groupable(self) -> bool:
        size = self.dy.element_size()
        return size < 8 and not any(width * size % 16 for width in self.sizes)


def join_some(products: list[P], candidates: list[P], key: Callable[[P], Hashable], run: Any) -> list[P]:
    """Run together the candidates that have the same `key`, unless it is None. Returns the other products."""
    marks = [key(p) for p in candidates]
    if len(set(marks)) == len(marks):
        return products
    sets: dict[Hashable, list[P]] = {}
    for p, mark in zip(candidates, marks, strict=True):
        if mark is not None:
            sets.setdefault(mark, []).append(p)
    done: set[int] = set()
    for found in sets.values():
        if len(found) > 1:
            run(found)
            done.update(map(id, found))
    return [p for p in products if id(p) not in done] if done else products


def _concatenate(products: list[Product]) -> None:
    part: list[Product] = []
    for p in products:
        if part and sum(one.rows for one in part) + p.rows > JOINED_ROWS:
            _one_product(part)
            part = []
        part.append(p)
    _one_product(part)


def _one_product(products: list[Product]) -> None:
    dy, x = _stacked(products)
    first = products[0]
    if takes_sums(first.dw, dy.dtype):
        fused_linear.fused_linear_wgrad_into(dy, x, 1.0, first.dw, None)
    else:
        first.dw.add_(torch.mm(dy.mT, x))
    _add_biases(products)


def _batch(products: list[Product]) -> None:
    n, rows, (out, inner) = len(products), products[0].rows, products[0].sizes
    dy, x = _stacked(products)
    found = torch.bmm(dy.view(n, rows, out).mT, x.view(n, rows, inner))
    _add_all(products, found)


def _group(products: list[Product]) -> None:
    dy, x = _stacked(products)
    rows = tuple([p.rows for p in products])
    ((ends,), _, _) = _ends.get(dy.device, rows, lambda: ((torch.tensor(rows, device="cpu").cumsum(0, dtype=torch.int32),), None))
    _add_all(products, torch.nn.functional.grouped_mm(dy.mT, x, offs=ends))


def _stacked(products: list[Product]) -> tuple[Tensor, Tensor]:
    """All rows of dy, and of x, in one buffer: a single large allocation is reused without new pages."""
    rows = sum(p.rows for p in products)
    out, inner = products[0].sizes
    buffer = products[0].dy.new_empty(rows * (out + inner))
    dy, x = buffer[: rows * out].view(rows, out), buffer[rows * out :].view(rows, inner)
    torch.cat([p.dy for p in products], out=dy)
    torch.cat([p.x for p in products], out=x)
    return dy, x


def _add_all(products: list[Product], found: Tensor) -> None:
    if len({p.accumulator for p in products}) == len(products) and all(p.dw.dtype is products[0].dw.dtype for p in products):
        torch._foreach_add_([p.dw for p in products], list(found.unbind()))
    else:
        for p, dw in zip(products, found.unbind(), strict=True):
            p.dw.add_(dw)
    _add_biases(products)


def _add_biases(products: Iterable[Product]) -> None:
    for p in products:
        if p.db is not None:
            p.db.add_(p.dy.sum(0, dtype=wide(p.dy.dtype)))


def _add(p: Product) -> None:
    """Add one product alone: in the product itself if the accumulators are as wide as its sums."""
    if takes_sums(p.dw, p.dy.dtype) and takes_sums(p.db, p.dy.dtype):
        fused_linear.fused_linear_wgrad_into(p.dy, p.x, 1.0, p.dw, p.db)
    else:
        p.dw.add_(torch.mm(p.dy.mT, p.x))
        _add_biases([p])


WAYS: tuple[tuple[str, Callable[[Product], Hashable], Callable[[list[Product]], None]], ...] = (
    ("concatenate", lambda p: (p.accumulator, p.dy.dtype), _concatenate),
    ("batch", lambda p: (p.rows, *p.sizes, p.dy.dtype, p.dy.device), _batch),
    ("group", lambda p: (*p.sizes, p.dy.dtype, p.dy.device) if p.groupable else None, _group),
)
