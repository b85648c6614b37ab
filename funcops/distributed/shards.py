"""Trees sharded over an axis, as in ZeRO: params, gradients and an optimiser's state.

    shards = own_shards(params, dp)                                   # 1/n of the bytes
    state = adamw_init(shards, cfg)
    grads = finish(reduce_start(dparams, dp, shard=dp))               # the parts of the sums
    shards, state = adamw_update(shards, grads, state, cfg)
    params = finish(gather_shards_start(shards, params, dp))

A rank's part of a leaf [d, *] is d / n of its rows; if n does not divide d, 1/n of its elements, zero-padded. The tree
keeps its structure and paths, so that any elementwise update takes shards as it takes params.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from funcops.distributed import comm
from funcops.distributed.async_collectives import Flight, finish, gather_start
from funcops.distributed.buckets import BUCKET_BYTES, Kind, float_leaves, part_shape, plan, require_bytes
from funcops.distributed.checks import require_axis
from funcops.distributed.mesh import Axis
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.schema import WGRAD, saved, static
from funcops.engine.errors import check, describe, fail, in_step, join_path
from funcops.engine.trees import flatten, paths, same_structure, tree_map_tensors, unflatten, with_leaves

T = TypeVar("T")


def own_shards(tree: T, axis: Axis) -> T:
    """This rank's part of every leaf, in new memory. None leaves stay None. Raises `TypeError` for a leaf that is neither a float
    tensor nor None.

    >>> import torch
    >>> from funcops import dist
    >>> axis = dist.Mesh.abstract({"dp": 2}, rank=1)["dp"]
    >>> dist.own_shards({"w": torch.arange(4.0), "odd": torch.ones(3)}, axis)
    {'w': tensor([2., 3.]), 'odd': tensor([1., 0.])}
    """
    require_axis("own_shards", axis)
    found = float_leaves("own_shards", "tree", tree)
    return with_leaves(tree, [None if t is None else own_part(t, axis) for t in found.values()])


def own_part(t: Tensor, axis: Axis) -> Tensor:
    """This rank's part of a tensor, in new memory."""
    shape, rank = part_shape(tuple(t.shape), axis.size), comm.place(axis, t)
    size = math.prod(shape)
    flat = t.detach().reshape(-1)[rank * size : (rank + 1) * size]
    if flat.numel() < size:
        return torch.cat([flat, flat.new_zeros(size - flat.numel())])
    return flat.clone().view(shape)


class Gathering(Flight):
    """A tree that is being gathered from its shards; `finish` returns it."""

    buckets: Any = saved("an InFlight each", needed_by=WGRAD)
    spec: Any = static()

    def arrive(self, into: Any) -> Any:
        if into is not None:
            fail("finish", "into", "None (only sums from reduce_start can be added)", describe(into), TypeError)
        buckets, flying, spec = self.cfg, self.buckets, self.spec
        self.empty()
        found: list[Any] = [None] * spec.num_leaves
        for bucket, h in zip(buckets, flying, strict=True):
            try:
                flat = finish(h)
            except Exception as error:
                in_step(error, bucket)
                raise
            for place, t in bucket.wholes(flat):
                found[place] = t
        return unflatten(spec, found)


def gather_shards_start(shards: Any, like: Any, axis: Axis, *, bucket_bytes: int = BUCKET_BYTES) -> Gathering:
    """Begin to gather a tree from shards, as `own_shards` returns them; `finish(h)` returns the tree, in new memory.
    like: a tree of tensors of the whole shapes, on any device. A bucket has at most `bucket_bytes` of whole leaves, or one leaf.

    Raises `ValueError` for a shard whose shape does not fit `like`, `TypeError` for a leaf that is not a float tensor.

    >>> import torch
    >>> from funcops import dist
    >>> from funcops.testing import run_ranks
    >>> whole = {"w": torch.arange(4.0)}
    >>> def each(mesh):
    ...     mine = dist.own_shards(whole, mesh["dp"])
    ...     return dist.finish(dist.gather_shards_start(mine, whole, mesh["dp"]))
    ...
    >>> run_ranks({"dp": 2}, each)[0]
    {'w': tensor([0., 1., 2., 3.])}
    """
    require_axis("gather_shards_start", axis)
    own = shards if axis.size > 1 else tree_map_tensors(torch.clone, shards)  # nothing is sent: what would arrive are the shards
    return start_gathering("gather_shards_start", "shards", own, like, axis, bucket_bytes)


def start_gathering(
    where: str, name: str, shards: Any, like: Any, axis: Axis, bucket_bytes: int, codes: Callable[[Any], Any] | None = None
) -> Gathering:
    """`gather_shards_start` for the function `where`, whose argument `name` has the shards. `codes`: makes the tree that is sent in
    their place, in which a weight may be in codes, sharded along dimension 0."""
    require_axis(where, axis)
    require_bytes(where, bucket_bytes)
    found, whole = float_leaves(where, name, shards), paths(like)
    if not same_structure(shards, like):
        apart = [path for path in (*found, *whole) if path not in found or path not in whole]
        fail(where, name, "a tree like `like`", f"one that differs at {', '.join(apart) or 'its containers'}")
    for path, t in found.items():
        if t is None:
            continue
        if not isinstance(whole[path], Tensor):
            fail(where, join_path("like", path), "a tensor", describe(whole[path]), TypeError)
        check(where, join_path(name, path), t, part_shape(tuple(whole[path].shape), axis.size))
    sent = shards if codes is None else codes(shards)
    shapes = {path: tuple(t.shape) for path, t in whole.items() if isinstance(t, Tensor)}
    kinds = tuple(
        [
            Kind(i, path, shapes[path] if path in shapes else (axis.size * t.shape[0], *t.shape[1:]), t.dtype, t.device, (axis,))
            for i, (path, t) in enumerate(paths(sent).items())
            if t is not None
        ]
    )
    values, spec = flatten(sent)
    buckets = plan(kinds, axis.size, bucket_bytes)
    flying = tuple([gather_start(bucket.pack_parts(values), axis) for bucket in buckets])
    made: Any = Gathering.keep(buckets, Needs.ALL, buckets=flying, spec=spec)
    return made  # type: ignore[no-any-return]
