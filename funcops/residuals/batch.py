"""Weight gradients that are collected: an op that knows how to join its products with others leaves them here (`collect`), and all
that were left run together at the end of the `batch_wgrads` around it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Run = Callable[[list[Any], Any], None]
Products = dict[Run, list[Any]]


class _Collector:
    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.products: Products = {}


_collector: _Collector | None = None
_one_at_a_time = threading.Lock()


@contextmanager
def collector() -> Iterator[Products]:
    """What this thread's weight gradients leave in the block."""
    global _collector
    with _one_at_a_time:
        _collector = _Collector()
        try:
            yield _collector.products
        finally:
            _collector = None


def collecting() -> bool:
    """Whether this thread's weight gradients are being collected."""
    return _collector is not None and _collector.thread == threading.get_ident()


@contextmanager
def apart() -> Iterator[None]:
    """Within a `collector`, weight gradients of the block run at once."""
    global _collector
    outer, _collector = _collector, None
    try:
        yield
    finally:
        _collector = outer


def collect(run: Run, product: Any) -> None:
    """Leave a product to the enclosing `batch_wgrads`, which ends with `run(products, how)`."""
    assert _collector is not None
    _collector.products.setdefault(run, []).append(product)
