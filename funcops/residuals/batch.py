"""`batch_wgrads`: many pending weight gradients in few matrix products.

Every op's `wgrad` runs as it always does, with accumulators to add to; one that knows how to join products with others leaves its
own here (`collect`), and all that were left run together at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from funcops.errors import describe, fail, require, require_type
from funcops.op import Op
from funcops.schema import Donated
from funcops.trees import fake, leaves, tree_map, tree_map_tensors

HOW = ("each", "concatenate", "batch", "group")

Run = Callable[[list[Any], Any], None]


class _Collector:
    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.products: dict[Run, list[Any]] = {}


_collector: _Collector | None = None
_one_at_a_time = threading.Lock()


def collecting() -> bool:
    """Whether this thread's weight gradients are being collected."""
    return _collector is not None and _collector.thread == threading.get_ident()


def collect(run: Run, product: Any) -> None:
    """Leave a product to the enclosing `batch_wgrads`, which ends with `run(products, how)`."""
    assert _collector is not None
    _collector.products.setdefault(run, []).append(product)


def batch_wgrads(op: Op, pendings: Sequence[Any], cfg: Any, *, into: Any = None, how: str | None = None) -> Any:
    """The sum of `op.wgrad(pending, cfg)` over the pendings (microbatches), added to `into` where that is given.

    Products of linear layers, wherever in a chain they are, run together. `how`: "concatenate" those for one weight along tokens,
    "batch" those of one shape (`torch.bmm`), "group" those that differ in tokens alone (`grouped_mm`), "each" alone; by default
    whichever a measured table says is fastest for the device, dtype and sizes (`docs/benchmarks/cpu-wgrads.csv`, made by
    `python -m funcops.bench wgrads`). Their sums are those of the one-by-one results, in another order of addition.

    Raises what `op.wgrad` raises, and `ValueError` for an unknown `how` or no pending at all.
    """
    global _collector
    require_type("batch_wgrads", "op", op, Op)
    require_type("batch_wgrads", "pendings", pendings, list, tuple)
    require(len(pendings) > 0, "batch_wgrads", "pendings", "at least one", "none")
    require(how is None or how in HOW, "batch_wgrads", "how", f"None or one of {', '.join(HOW)}", repr(how))
    if collecting():
        fail("batch_wgrads", "call", "outside of another", "one within", RuntimeError)
    sums = into if into is not None else _zeros(op, pendings, cfg)
    with _one_at_a_time:
        _collector = _Collector()
        try:
            for pending in pendings:
                op.wgrad(pending, cfg, into=sums)
            products = _collector.products
        finally:
            _collector = None
    for run, found in products.items():
        run(found, how)
    return sums


def _zeros(op: Op, pendings: Sequence[Any], cfg: Any) -> Any:
    """Like the gradients that will come; shapes and dtypes from a run without data."""
    nodes = [p._node if type(p) is Donated else p for p in pendings]
    first = next((node for node in nodes if node is not None), None)
    with FakeTensorMode(allow_non_fake_inputs=True):
        shaped = op.wgrad(tree_map_tensors(fake, first), cfg)
    like = next((t for t in leaves(first) if isinstance(t, Tensor)), None)

    def zeros(t: Any) -> Any:
        if t is None:
            return None
        if not isinstance(t, Tensor) or like is None:
            fail("batch_wgrads", "gradient", "a tensor", describe(t), TypeError)
        return like.new_zeros(t.shape, dtype=t.dtype)

    return tree_map(zeros, shaped)
