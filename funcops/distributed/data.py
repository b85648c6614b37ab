"""Data parallelism: sums of gradient trees over ranks, in buckets, as values in flight.

    flying = reduce_start(dparams, mesh["dp"])      # from the last weight gradient of a stage on
    ...
    dparams = finish(flying)

An ordered sum adds the ranks' gradients one after another in float32 (float64 for float64), in the order of the ranks: the same
bits as adding the gradients of their microbatches on one process, whatever the buckets. It sends parts to their ranks, which add
them up, and gathers the sums: the bytes of an all-reduce. Any other sum is the backend's own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops.distributed.async_collectives import (
    Flight,
    InFlight,
    all_to_all_start,
    finish,
    gather_start,
    scatter_sum_start,
    sum_over_start,
)
from funcops.distributed.buckets import BUCKET_BYTES, Bucket, Kind, float_leaves, part_shape, plan, require_bytes
from funcops.distributed.checks import require_axis
from funcops.distributed.comm import place
from funcops.distributed.mesh import Axis, Mesh
from funcops.distributed.specs import Spec, Specs, check_own, is_leaf, specs_by_path
from funcops.engine.backend import wide
from funcops.engine.contract.accumulators import check_into
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.schema import WGRAD, saved, static
from funcops.engine.errors import fail, in_step, join_path, require, require_dtype, require_flag, require_type
from funcops.engine.trees import flatten, paths, unflatten

_HERE = Axis("here", 1, 0)
# from a received tensor to the next communication or, at last, to the result; a tracer does not support generators
Onward = Callable[[Tensor], "Tensor | Flying"]


class Flying(NamedTuple):
    """A communication in flight, and the function that takes its value."""

    h: InFlight
    onward: Onward


class Sums(NamedTuple):
    """How a tree is summed. `dtype`: the dtype of the sums; None: each leaf's own."""

    buckets: tuple[Bucket, ...]
    shard: Axis | None
    ordered: bool
    dtype: torch.dtype | None


class Reducing(Flight):
    """Sums in flight, which `finish` returns. A ledger counts their bytes."""

    buckets: Any = saved("an InFlight each", needed_by=WGRAD)
    spec: Any = static()

    def complain(self, where: str) -> None:
        self.unused(where)

    def arrive(self, into: Any) -> Any:
        return self.advance(into).finish()

    def advance(self, into: Any) -> Landing:
        """Wait for the first communication of each bucket, and start its next one."""
        sums, flying, spec = self.cfg, self.buckets, self.spec
        places: list[Any] = [None] * spec.num_leaves
        if into is not None:
            places = _accumulators(into, sums, spec)
        for bucket, h in zip(sums.buckets, flying, strict=True):
            if not h.fresh():
                _named(bucket, h.complain, "finish")
        self.empty()
        onward = [_rest(bucket, sums, places if into is not None else None) for bucket in sums.buckets]
        came = [_named(bucket, finish, h) for bucket, h in zip(sums.buckets, flying, strict=True)]
        return Landing(sums, spec, into, places, [rest(value) for value, rest in zip(came, onward, strict=True)])


class Landing(NamedTuple):
    """Sums after the first communication of each bucket: the next one in flight, or the sums themselves."""

    sums: Sums
    spec: Any
    into: Any
    places: list[Any]
    came: list[Tensor | Flying]

    def finish(self) -> Any:
        found: list[Any] = [None] * self.spec.num_leaves
        for bucket, row in zip(self.sums.buckets, _together(self.came, self.sums.buckets), strict=True):
            for index, t in bucket.parts(row):
                found[index] = t
        if self.into is None:
            return unflatten(self.spec, found)
        pairs = [(to, t) for to, t in zip(self.places, found, strict=True) if t is not None]
        if pairs:
            torch._foreach_copy_([to for to, _ in pairs], [t for _, t in pairs])
        return self.into


def reduce_start(
    dparams: Any,
    over: Axis | tuple[Axis, ...] | Mapping[str, tuple[Axis, ...]],
    *,
    shard: Axis | None = None,
    ordered: bool = True,
    dtype: torch.dtype | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Reducing:
    """Begin to sum a tree of gradients over ranks; `finish(h)` returns the tree of sums, `finish(h, into=sums)` adds them to
    accumulators, also in the ranks' order. None leaves stay None. All ranks must call it in the same order, with the same leaves.

    over: the axes over which all leaves are summed, or a mapping of dotted paths to axes; the first is the slowest in the order of
    the sum. shard: one of the axes, along which each rank gets only its part (`own_shards`): 1/n of the bytes. ordered: see the
    module. dtype: the dtype of the sums, in which unordered ones are also sent; by default each leaf's own. A bucket has one dtype,
    and at most `bucket_bytes` or one leaf; a leaf that fills a bucket is not copied, and must not be written to before `finish`.

    Raises `TypeError` for a leaf that is neither a float tensor nor None, `ValueError` for a missing path.

    >>> import torch
    >>> from funcops import dist
    >>> from funcops.testing import run_ranks
    >>> def each(mesh):
    ...     flying = dist.reduce_start({"w": torch.tensor([1.0 + mesh["dp"].rank]), "frozen": None}, mesh["dp"])
    ...     return dist.finish(flying)
    ...
    >>> run_ranks({"dp": 4}, each)[0]
    {'w': tensor([10.]), 'frozen': None}
    """
    where = "reduce_start"
    require_flag(where, ordered=ordered)
    require_dtype(where, dtype)
    require_bytes(where, bucket_bytes)
    if shard is not None:
        require_axis(where, shard, "shard")
    found = float_leaves(where, "dparams", dparams)
    axes = _axes_of(where, found, over, shard)
    kinds = tuple(
        [Kind(i, path, tuple(t.shape), t.dtype, t.device, axes[path]) for i, (path, t) in enumerate(found.items()) if t is not None]
    )
    values, spec = flatten(dparams)
    own = shard if shard is not None and shard.size > 1 else None
    buckets = plan(kinds, 1 if own is None else own.size, bucket_bytes, ordered)
    sums = Sums(buckets, own, ordered, dtype)
    flying = tuple([_first(bucket, bucket.pack(values, None if ordered else dtype), sums) for bucket in buckets])
    made: Any = Reducing.keep(sums, Needs.ALL, buckets=flying, spec=spec)
    return made  # type: ignore[no-any-return]


def sum_axes(dparams: Any, specs: Specs, mesh: Mesh) -> dict[str, tuple[Axis, ...]]:
    """The `over` of `reduce_start`: by path, every axis of the mesh, except pp, that the leaf's spec does not name. Raises as
    `sum_gradients`.

    >>> import torch
    >>> from funcops import dist
    >>> mesh, specs = dist.Mesh.abstract({"dp": 2, "tp": 2}, rank=0), {"up": dist.Spec("tp", 0)}
    >>> found = dist.sum_axes({"up": torch.ones(2, 4), "norm": torch.ones(4)}, specs, mesh)
    >>> {path: [axis.name for axis in axes] for path, axes in found.items()}
    {'norm': ['dp', 'tp'], 'up': ['dp']}
    """
    found = _specs("sum_axes", dparams, specs, mesh)
    return {path: tuple([axis for axis in mesh.axes if spec.summed_over(axis)]) for path, spec in found.items()}


def part_axes(tree: Any, specs: Specs, mesh: Mesh) -> dict[str, tuple[Axis, ...]]:
    """The `parts` of `global_norm`: by path, the axes that the leaf's spec names. Raises as `sum_gradients`.

    >>> import torch
    >>> from funcops import dist
    >>> mesh, specs = dist.Mesh.abstract({"dp": 2, "tp": 2}, rank=0), {"up": dist.Spec("tp", 0)}
    >>> found = dist.part_axes({"up": torch.ones(2, 4), "norm": torch.ones(4)}, specs, mesh)
    >>> {path: [axis.name for axis in axes] for path, axes in found.items()}
    {'norm': [], 'up': ['tp']}
    """
    found = _specs("part_axes", tree, specs, mesh)
    return {path: tuple([mesh[name] for name in spec.names]) for path, spec in found.items()}


def _specs(where: str, tree: Any, specs: Specs, mesh: Mesh) -> dict[str, Spec]:
    found = specs_by_path(where, tree, specs, mesh)
    for path, t in paths(tree).items():
        if is_leaf(where, path, t):
            check_own(where, path, t, found[path], mesh)
    return found


def axes_of(where: str, over: Any, name: str = "over") -> tuple[Axis, ...]:
    """Check that `over` is an axis or different axes, and return the axes that have several ranks."""
    given = over if isinstance(over, tuple) else (over,)
    for i, axis in enumerate(given):
        require_axis(where, axis, join_path(name, i if isinstance(over, tuple) else None))
    require(len(set(given)) == len(given), where, name, "different axes", ", ".join(map(str, given)))
    return tuple([axis for axis in given if axis.size > 1])


def axes_by_path(where: str, found: Mapping[str, Any], over: Mapping[str, Any], name: str = "over") -> dict[str, tuple[Axis, ...]]:
    """The axes of each path. Raises `ValueError` for a path that the tree lacks."""
    for path in over:
        if path not in found:
            fail(where, name, f"by paths of the tree ({', '.join(found) or 'none'})", repr(path))
    return {path: axes_of(where, axes, f"{name}[{path!r}]") for path, axes in over.items()}


def _axes_of(where: str, found: Mapping[str, Any], over: Any, shard: Axis | None) -> Mapping[str, tuple[Axis, ...]]:
    axes: Mapping[str, tuple[Axis, ...]]
    if isinstance(over, Mapping):
        axes = axes_by_path(where, found, over)
        for path, t in found.items():
            if t is not None and path not in axes:
                fail(where, "over", f"a mapping with every path that has a gradient, such as {path}", ", ".join(axes) or "none")
    else:
        require_type(where, "over", over, Axis, tuple, Mapping)
        axes = dict.fromkeys(found, axes_of(where, over))
    if shard is not None and shard.size > 1:
        for path, t in found.items():
            if t is not None and shard not in axes[path]:
                fail(where, "shard", f"one of the axes that {path or 'dparams'} is summed over ({_said(axes[path])})", shard)
    return axes


def _said(axes: tuple[Axis, ...]) -> str:
    return ", ".join(map(str, axes)) or "none of several ranks"


def _accumulators(into: Any, sums: Sums, spec: Any) -> list[Any]:
    """Check all leaves of `into`, and return them."""
    like: list[Any] = [None] * spec.num_leaves
    for bucket in sums.buckets:
        for leaf in bucket.leaves:
            t = torch.empty((), dtype=bucket.dtype, device=bucket.device)
            like[leaf.number] = t.expand(part_shape(leaf.shape, bucket.rows))
    check_into("finish", into, unflatten(spec, like))
    return list(paths(into).values())


def _order(bucket: Bucket, sums: Sums) -> list[Axis]:
    """The axes of a bucket in the order of communication: first the one along which it is sharded."""
    return sorted(bucket.axes, key=lambda axis: axis != sums.shard)


def _first(bucket: Bucket, flat: Tensor, sums: Sums) -> InFlight:
    order = _order(bucket, sums)
    if not order:
        return sum_over_start(flat, _HERE)
    if sums.ordered:
        return all_to_all_start(flat.view(order[0].size, -1), order[0])
    return (scatter_sum_start if order[0] == sums.shard else sum_over_start)(flat, order[0])


def _rest(bucket: Bucket, sums: Sums, into: list[Any] | None) -> Onward:
    """The steps after the first communication of a bucket, up to its row of sums."""
    start = None if into is None else bucket.pack_parts(into, _widest(into, bucket))
    out = start.dtype if start is not None else sums.dtype or bucket.dtype
    order = _order(bucket, sums)
    if sums.ordered:
        return _ordered(bucket, order, sums, start, out)

    def summed(value: Tensor, axes: list[Axis]) -> Tensor | Flying:
        if axes:
            return Flying(sum_over_start(value, axes[0]), lambda came: summed(came, axes[1:]))
        return value.to(out) if start is None else start.add_(value)

    return lambda value: summed(value.view(-1), order[1:])


def _widest(into: list[Any], bucket: Bucket) -> torch.dtype:
    return functools.reduce(torch.promote_types, [into[leaf.number].dtype for leaf in bucket.leaves])


def _ordered(bucket: Bucket, order: list[Axis], sums: Sums, start: Tensor | None, out: torch.dtype) -> Onward:
    """Every rank receives all ranks' values of its piece of the bucket and adds them up; the sums are gathered along all axes but
    the one along which the bucket is sharded."""
    sizes, last = [axis.size for axis in order], max(len(order) - 1, 0)
    others = [axis for axis in order if axis != sums.shard]

    def spread(value: Tensor, axes: list[Axis]) -> Tensor | Flying:
        if axes:
            return Flying(all_to_all_start(value.movedim(0, last), axes[0]), lambda came: spread(came, axes[1:]))
        value = value.movedim(0, last) if order else value
        places = [i for axis in bucket.axes for i, other in enumerate(order) if other == axis]  # a tracer does not support index()
        value = value.permute(*places, len(order)).reshape(math.prod(sizes), -1)
        own = start
        if own is not None:
            own = own.view(*[axis.size for axis in others], -1)[tuple([place(axis, own) for axis in others])].reshape(-1)
        return gathered(added(value, own, out), others[::-1])

    def gathered(total: Tensor, axes: list[Axis]) -> Tensor | Flying:
        return Flying(gather_start(total, axes[0]), lambda came: gathered(came, axes[1:])) if axes else total

    return lambda value: spread(value.view(*sizes, -1), order[1:])


def added(rows: Tensor, start: Tensor | None, out: torch.dtype) -> Tensor:
    """start + rows[0] + rows[1] + ..., in this order, each sum rounded to float32 (or to the dtype of start or rows, if wider), and
    the last to `out`."""
    if start is None:
        total, rest = rows[0].to(wide(rows.dtype)), rows[1:]
    else:
        total, rest = start.to(torch.promote_types(start.dtype, wide(rows.dtype))), rows
    for i, row in enumerate(rest):
        total = total.add_(row) if i else total + row  # the first term may be the caller's, so it is not written to
    return total.to(out)


def _together(came: list[Tensor | Flying], buckets: tuple[Bucket, ...]) -> list[Tensor]:
    """Finish all buckets, one communication of each in turn: while one is waited for, the next ones of the buckets before it are in
    flight."""
    found: list[Any] = list(came)
    while any([isinstance(one, Flying) for one in found]):
        found = [
            one.onward(_named(bucket, finish, one.h)) if isinstance(one, Flying) else one
            for one, bucket in zip(found, buckets, strict=True)
        ]
    return found


def _named(bucket: Bucket, fn: Any, *args: Any) -> Any:
    try:
        return fn(*args)
    except Exception as error:
        in_step(error, bucket)
        raise
