"""The law Invariant: in the mode of `funcops.invariant` a row has the same bits whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from funcops.engine.backend import select
from funcops.engine.trees import leaves, paths, tensors, tree_map
from funcops.testing.case import Case
from funcops.testing.checks import equal_bits, float_like

SIZES = dict(rows=16, queries=32)  # small blocks, of which a small batch has several
MOST_ROWS, MOST_ELEMENTS = 300, 1 << 16
_REMEDY = """
Either rows mix, as in a mean over them, or a function of torch computes the last elements of its vectorised loop by another
formula, as F.softplus does on a CPU. Leave `mixes` out of make_op, or say in it what rows depend on; or compute the function on a
multiple of 32 elements: vectorized(fn, x) of funcops.library.kernels.pins pads x (in_vectors) and cuts the zeros off again."""


def exempt(case: Case) -> bool:
    """Whether a case's op, or a part of it, lets rows depend on each other, or its author has not said that it does not. So is
    every case where the library is not there, which has the bodies of the mode."""
    if case.op.mixes is None or find_spec("funcops.library") is None:
        return True
    from funcops.library.ops._mixing import mixing

    return any(True for _ in mixing(case.op, case.cfg))


def law_invariant(case: Case, dtype: torch.dtype) -> None:
    """In the mode, y and dx of a row are the same bits beside any other rows, and with causal attention before any positions; of an
    op that says so, with its parts (`Op.mixes`). Not in Triton's interpreter, where NumPy multiplies, and a row's place in a tile
    decides. On a device a kernel that the mode refuses by name obeys."""
    if exempt(case) or (case.device == "cpu" and select.choice()[0] == "triton"):
        return
    try:
        count_compared(case, dtype)
    except ValueError as error:
        if case.device == "cpu" or " in invariant mode: " not in str(error):
            raise


def count_compared(case: Case, dtype: torch.dtype) -> int:
    """The law, and how many batches and prefixes it compared: none for an x without rows, or whose parts cannot be put together."""
    from funcops.library.kernels.pins import Pins, pinning

    params, x = case.make(dtype)
    others = [case.make(dtype, seed)[1] for seed in (1, 2)]
    with pinning(Pins(**SIZES)):
        own = _run(case, params, x, 7)
        return sum(1 for _ in _batches(case, params, x, others, own)) + sum(1 for _ in _prefixes(case, params, x))


def _run(case: Case, params: Any, x: Any, seed: int, changed: Any = None) -> tuple[Any, Any, Any]:
    """y, dy and dx. `changed(dy)`: another dy in place of the drawn one."""
    y, residuals = case.op.fwd(params, x, case.cfg)
    dy = float_like(y, seed)
    dy = dy if changed is None else changed(dy)
    return y, dy, case.op.bwd(residuals, dy, case.cfg)[1]


def _batches(case: Case, params: Any, x: Any, others: list[Any], own: Any) -> Iterator[int]:
    """Compare a case's rows in other batches: one of them alone, all behind and before others, fewer and many."""
    main = next(iter(tensors(x)), None)
    if main is None or main.dim() < 2 or not len(main):
        return
    count, size = len(main), sum(t.numel() for t in tensors(x))
    most = max(1, min(MOST_ROWS // count, MOST_ELEMENTS // max(1, size)))
    for before, after in ((1, 0), (0, 2), (min(3, most), 1), (most // 2, most // 2), (0, most)):
        parts = [*[others[i % 2] for i in range(before)], x, *[others[i % 2] for i in range(after)]]
        yield from _compared(case, params, parts, before * count, count, own, x)
    yield from _compared(case, params, [_cut(x, count, slice(0, 1))], 0, 1, own, x)


def _cut(tree: Any, count: int, at: slice) -> Any:
    return tree_map(lambda t: t[at] if isinstance(t, Tensor) and t.dim() and len(t) == count else t, tree)


def _compared(case: Case, params: Any, parts: list[Any], first: int, count: int, own: Any, x: Any) -> Iterator[int]:
    """Compare rows [0, count) of `own` with rows from `first` on of all parts together."""
    whole = len(next(iter(tensors(x))))
    y, dy, dx = own
    rows = slice(first, first + count)

    def joined(mine: Any, *each: Any) -> Any:
        rows_of_it = isinstance(mine, Tensor) and mine.dim() and len(mine) == whole and len({len(t) for t in each}) == 1
        return torch.cat(each) if rows_of_it else mine  # what has no rows, such as a table by position, is the case's own

    def placed(drawn: Any) -> Any:
        def one(d: Any, mine: Any) -> Any:
            if isinstance(d, Tensor) and d.dim() and len(d) >= first + count and isinstance(mine, Tensor) and len(mine) == whole:
                d[rows] = mine[:count]
                return d
            return mine

        return tree_map(one, drawn, dy)

    batch = tree_map(joined, x, *parts)
    total = len(next(iter(tensors(batch))))
    try:
        got_y, _, got_dx = _run(case, params, batch, 8, placed)
    except (IndexError, RuntimeError, TypeError, ValueError):
        return  # parts that cannot be put together so, as where each batch has a table of its own
    for name, wanted, got in (("y", y, got_y), ("dx", dx, got_dx)):
        for (path, a), b in zip(paths({name: wanted}).items(), leaves(got), strict=True):
            if isinstance(a, Tensor) and isinstance(b, Tensor) and a.dim() and len(a) == whole and len(b) == total:
                same = equal_bits(a[:count], b[rows])
                assert same, f"{path} of {count} rows differs in a batch of {total}, from row {first} on{_REMEDY}"
    yield 1


def _prefixes(case: Case, params: Any, x: Any) -> Iterator[int]:
    """Compare the first positions of causal attention with themselves before others."""
    if not (case.cfg.attends and case.cfg.causal) or case.cfg.packed:
        return
    q, k, *_ = (t for t in tensors(x))
    length = q.shape[1]
    if length != k.shape[1]:
        return

    def cut(tree: Any, to: int) -> Any:
        return tree_map(lambda t: t[:, :to] if isinstance(t, Tensor) and t.dim() > 1 and t.shape[1] == length else t, tree)

    for to in {1, length // 2, length - 1} - {0, length}:

        def before(dy: Tensor, to: int = to) -> Tensor:
            dy[:, to:] = 0
            return dy

        y, dy, dx = _run(case, params, x, 9, before)
        got_y, _, got_dx = _run(case, params, cut(x, to), 9, lambda _, dy=dy, to=to: cut(dy, to))
        for name, wanted, got in (("y", y, got_y), ("dx", dx, got_dx)):
            for (path, a), b in zip(paths({name: cut(wanted, to)}).items(), leaves(got), strict=True):
                same = a is b is None or equal_bits(a, b)
                assert same, f"{path} of {to} positions differs before {length - to} more"
        yield 1
