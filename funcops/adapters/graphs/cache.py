"""`GraphCache`: a function of inputs of many sizes, captured for a few sizes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops.adapters.graphs.backend import backend_of
from funcops.adapters.graphs.graphed import Graphed, graphed
from funcops.engine.errors import describe, fail, require, require_callable, require_count, require_type
from funcops.engine.trees import tree_map_tensors


class CacheReport(NamedTuple):
    """Calls that found a captured size, calls that had to capture, captures evicted; the sizes held, least recently used first;
    bytes of their inputs and outputs, and of the pool that they share."""

    hits: int
    misses: int
    evicted: int
    sizes: tuple[int, ...]
    input_bytes: int
    output_bytes: int
    pool_bytes: int


class GraphCache:
    """`fn` captured for each of `sizes`; a call is padded to the smallest size that fits, and its result is cut to the call's size.

        cache = GraphCache(fn, sizes=(64, 128, 256), size_of=lambda params, x: len(x), pad=pad, cut=cut, inputs={"0": "pinned"})
        cache.warm(params, x)
        y = cache(params, x)

    `pad(trees, size)` returns the padded arguments, `cut(result, size)` the part of the result for the first `size`; `pad_rows` and
    `cut_rows` do so for a leading dimension. All graphs share one memory pool: `warm` captures the largest size first, so that the
    others fit into its memory. At most `capacity` graphs are held; the least recently used is evicted. The other arguments are as
    for `graphed`. A copy captures anew.

    >>> import torch
    >>> from funcops.graphs import GraphCache, cut_rows, pad_rows
    >>> cache = GraphCache(
    ...     lambda x: 2 * x, sizes=(4, 8), size_of=len, pad=lambda trees, size: (pad_rows(trees[0], size),), cut=cut_rows
    ... )
    >>> cache.warm(torch.ones(1))
    >>> cache(torch.ones(3)), cache.report().hits
    (tensor([2., 2., 2.]), 1)
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        sizes: Sequence[int],
        size_of: Callable[..., int],
        pad: Callable[[tuple[Any, ...], int], tuple[Any, ...]],
        cut: Callable[[Any, int], Any],
        capacity: int | None = None,
        **options: Any,
    ) -> None:
        require_callable("GraphCache", fn=fn, size_of=size_of, pad=pad, cut=cut)
        require_type("GraphCache", "sizes", sizes, tuple, list)
        right = len(sizes) > 0 and all(isinstance(s, int) and s > 0 for s in sizes)
        require(right, "GraphCache", "sizes", "positive numbers", list(sizes))
        if capacity is not None:
            require_count("GraphCache", capacity=capacity)
        if options.get("outputs") == "borrow":
            fail("GraphCache", "outputs", "'clone', because graphs of one pool overwrite each other's buffers", "'borrow'")
        self.fn, self.sizes, self.size_of, self.pad, self.cut = fn, tuple(sorted(set(sizes))), size_of, pad, cut
        self.capacity = len(self.sizes) if capacity is None else capacity
        self.options = options
        self.__setstate__({})

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("_held", "_pool")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.hits = self.misses = self.evicted = 0
        self._held: OrderedDict[int, Graphed] = OrderedDict()
        self._pool: Any = None

    def __call__(self, *trees: Any) -> Any:
        """Call the captured function. Raises `ValueError` for inputs larger than every size, and the errors of a `Graphed` call."""
        size = self.size_of(*trees)
        fitting = next((one for one in self.sizes if one >= size), None)
        if fitting is None:
            fail("GraphCache", "the size of the inputs", f"at most {self.sizes[-1]}", size)
        padded = self.pad(trees, fitting)
        found = self._held.get(fitting)
        if found is None:
            self.misses += 1
            found = self._capture(fitting, padded)
        else:
            self.hits += 1
        self._held.move_to_end(fitting)
        return self.cut(found(*padded), size)

    def warm(self, *trees: Any) -> None:
        """Capture as many sizes as `capacity` allows, the largest first, for inputs like these."""
        for size in reversed(self.sizes[-self.capacity :]):
            if size not in self._held:
                self._capture(size, self.pad(trees, size))

    def _capture(self, size: int, padded: tuple[Any, ...]) -> Graphed:
        while len(self._held) >= self.capacity:
            _, old = self._held.popitem(last=False)
            old.reset()
            self.evicted += 1
        if not self._held:  # a pool whose graphs are all gone takes no more
            self._pool = backend_of(*padded).pool()
        made = graphed(self.fn, *padded, pool=self._pool, **self.options)
        self._held[size] = made
        return made

    def report(self) -> CacheReport:
        each = [held.report() for held in self._held.values()]
        held = sum(r.input_bytes for r in each), sum(r.output_bytes for r in each), each[0].pool_bytes if each else 0
        return CacheReport(self.hits, self.misses, self.evicted, tuple(self._held), *held)

    def reset(self) -> None:
        """Free all graphs; the counts stay."""
        for held in self._held.values():
            held.reset()
        self._held.clear()


def pad_rows(tree: Any, size: int, value: float = 0) -> Any:
    """Pad every tensor [n, ...], with n at most `size`, to [size, ...] with `value`. Raises `ValueError` for a tensor with more
    rows, or without dimensions, or that has no such value, `TypeError` if `value` is not a number.

    >>> import torch
    >>> from funcops.graphs import pad_rows
    >>> pad_rows({"x": torch.ones(2, 2)}, 3)
    {'x': tensor([[1., 1.],
            [1., 1.],
            [0., 0.]])}
    """

    require_count("pad_rows", 0, size=size)
    require_type("pad_rows", "value", value, float, int, bool)

    def fill(t: Tensor) -> Tensor:
        require(t.dim() >= 1 and t.shape[0] <= size, "pad_rows", "a tensor", f"[at most {size}, ...]", list(t.shape))
        whole = not (t.is_floating_point() or t.is_complex())
        require(not whole or float(value).is_integer(), "pad_rows", "value", f"a whole number for {describe(t)}", value)
        return t if t.shape[0] == size else torch.cat((t, t.new_full((size - t.shape[0], *t.shape[1:]), value)))

    return tree_map_tensors(fill, tree)


def cut_rows(tree: Any, size: int) -> Any:
    """The first `size` rows of every tensor [n, ...]. Raises `ValueError` for a negative size.

    >>> import torch
    >>> from funcops.graphs import cut_rows
    >>> cut_rows({"x": torch.arange(4.0)}, 3)
    {'x': tensor([0., 1., 2.])}
    """
    require_count("cut_rows", 0, size=size)
    return tree_map_tensors(lambda t: t[:size], tree)
