"""Sharded init: each rank draws only its own part of an op's params, with the same bits as in the whole.

    specs = specs_of(chain, cfg)                             # how the parallel layers of a model shard its params
    params = init(chain, cfg, specs, mesh, key=key)

The draws of an `init` are deferred until it is known which leaf each becomes. Numbers depend on their index in the whole leaf.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from funcops.distributed.boxes import own_runs
from funcops.distributed.buckets import part_shape
from funcops.distributed.mesh import Axis, Mesh
from funcops.distributed.specs import WHOLE, Ranges, Spec, Specs, by_elements, own_ranges, specs_by_path, take, whole_shape, within
from funcops.engine import random
from funcops.engine.compose.step import check_body
from funcops.engine.contract.op import Op
from funcops.engine.contract.walk import nested, steps
from funcops.engine.errors import fail, join_path, require, require_callable, require_device, require_dtype
from funcops.engine.program.values import abstract_params
from funcops.engine.trees import at, has, leaves, paths, tree_map_with_path

T = TypeVar("T")
PartOf = Callable[[str, Sequence[int]], "tuple[Spec, Mesh]"]  # (path, shape) of a leaf -> how it is sharded


class _Uses(TorchDispatchMode):
    """Notes which tensors are stacks of others along dimension 0, as for the layers of a repeat, and which of the tensors on the
    meta device have changed since they were made: `t.data[0] = 0` counts as no version of t, and `t.data = u` has other memory."""

    runs = True  # see funcops.engine.backend.declare.tracing

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self.made: dict[int, Any] = {}  # by tensor, its storage; kept, as a freed one's address is used again
        self.written: dict[int, Any] = {}  # by address, the storages that were written to

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        stacks = func is torch.ops.aten.stack.default and len(args) == 1
        if stacks:
            self.of[id(made)] = made, list(args[0])
        if (stacks or func is torch.ops.aten.empty.memory_format) and made.is_meta:
            self.made[id(made)] = made.untyped_storage()
        if func._schema.is_mutable:
            given = {**dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)), **(kwargs or {})}
            changed = [given.get(one.name) for one in func._schema.arguments if one.alias_info and one.alias_info.is_write]
            storages = [t.untyped_storage() for t in leaves(changed) if isinstance(t, Tensor) and t.is_meta]
            self.written |= {storage._cdata: storage for storage in storages}
        return made

    def unchanged(self, t: Tensor) -> bool:
        first, now = self.made.get(id(t)), t.untyped_storage()._cdata
        return first is not None and first._cdata == now and now not in self.written


class _Found(NamedTuple):
    """A tree, and by the `id` of its tensors the indices of the draws that a tensor is, unmodified: one, or a stack of them."""

    tree: Any
    draws: list[Any]
    indices: dict[int, tuple[int, ...]]
    stacked: set[int]

    @staticmethod
    def of(make: Callable[[], Any], takes: Callable[[int], bool]) -> _Found:
        with random.put_off(takes) as draws, _Uses() as uses:
            tree = make()
        one = {id(draw[0]): (i,) for i, draw in enumerate(draws) if draw is not None and uses.unchanged(draw[0])}
        indices: dict[int, tuple[int, ...]] = {**one}
        for name, (made, parts) in uses.of.items():
            if made.is_meta and uses.unchanged(made) and all(id(part) in one for part in parts):
                indices[name] = tuple(one[id(part)][0] for part in parts)
        return _Found(tree, [None if draw is None else draw[1] for draw in draws], indices, uses.of.keys() - one.keys())

    def part(self, t: Tensor, ranges: Sequence[Ranges]) -> Tensor:
        """The ranges of a leaf; if it is a draw, only these are drawn."""
        if id(t) not in self.indices:
            return take(t, ranges)
        draws = [self.draws[i] for i in self.indices[id(t)]]
        if id(t) not in self.stacked:
            return draws[0].part(ranges)  # type: ignore[no-any-return]
        return torch.stack([draws[i].part(ranges[1:]) for start, n in ranges[0] for i in range(start, start + n)])

    def own(self, path: str, t: Tensor, spec: Spec, mesh: Mesh) -> Tensor:
        """A rank's part of a leaf."""
        ranges, shape = own_ranges("init", path, t.shape, spec, mesh), by_elements(spec, mesh)
        if shape is None:
            return self.part(t, ranges)
        cut = [[within(r, *piece) for r, *piece in zip(ranges, *run, strict=True)] for run in own_runs(shape, spec, mesh)]
        nothing = self.part(t, [within(r, 0, 0) for r in ranges]).reshape(-1)[:0]
        flat = torch.cat([nothing, *[self.part(t, one).reshape(-1) for one in cut]])
        missing = math.prod(part_shape(shape, mesh[spec.fsdp].size)) - len(flat)
        return torch.cat((flat, flat.new_zeros(missing))) if missing else flat


def own_parts(make: Callable[[], Any], part_of: PartOf) -> Any:
    """The tree that `make()` makes, with the part of each leaf that `part_of` says. A leaf that is a draw, or a stack of draws, is
    drawn in part; a leaf that is computed from draws, and so is on the meta device now, is made whole first."""
    found = _Found.of(make, lambda index: True)
    if any(isinstance(t, Tensor) and t.is_meta and id(t) not in found.indices for t in leaves(found.tree)):
        found = _Found.of(make, lambda index: False)  # a leaf is computed from a draw, and it is unknown from which

    def own(path: str, t: Any) -> Any:
        return found.own(path, t, *part_of(path, t.shape)) if isinstance(t, Tensor) else t

    return tree_map_with_path(own, found.tree)


def init_part(cfg: Any, make: Callable[[], Any]) -> Any:
    """This rank's part, by the `specs` of the layer's config, of the params that `make` draws for the whole layer, in their
    bits."""
    mesh, specs = Mesh(axes=(cfg.axis,)), cfg.specs
    return own_parts(make, lambda path, shape: (specs.get(path, WHOLE), mesh))


def specs_of(op: Op, cfg: Any) -> dict[str, Spec]:
    """The specs of the leaves that a model's parallel layers shard, by path in its params; other leaves are the same on all ranks.
    Without sequence parallelism other leaves have a spec, too, as each rank has their whole gradient (`Spec.alike`), except leaves
    between a column layer and its row layer (a norm of each head), for which a rank has the gradient of its own features.
    Raises `ValueError` if some layers over an axis have sequence parallelism, and others do not.

    >>> from funcops import ChainConfig, Step, chain, dist
    >>> axis = dist.Mesh.abstract({"tp": 2}, rank=0)["tp"]
    >>> up, down = dist.ColumnLinearConfig(8, 16, axis=axis), dist.RowLinearConfig(16, 8, axis=axis)
    >>> specs = dist.specs_of(chain, ChainConfig(steps=(Step("up", dist.column_linear, up), Step("down", dist.row_linear, down))))
    >>> {path: (spec.axis, spec.dim) for path, spec in specs.items()}
    {'up.weight': ('tp', 0), 'up.bias': ('tp', 0), 'down.weight': ('tp', 1)}
    """
    check_body("specs_of", op, cfg)
    params = abstract_params(op, cfg)
    found = {path: spec for path, (spec, _) in _shared(cfg, params).items()}
    ways = dict.fromkeys(
        (part.cfg.axis, part.cfg.sequence_parallel)
        for part in steps(cfg)
        if part.cfg.sequence_parallel is not None and part.cfg.axis.size > 1
    )
    for axis, sequence in ways:
        if not sequence:
            said = "the same in all layers over " + str(axis)
            require((axis, True) not in ways, "specs_of", "cfg.sequence_parallel", said, "both")
            partial = _between(cfg, params, axis)
            for path, t in paths(params).items():
                spec = found.get(path, WHOLE)
                if t is not None and axis.name not in spec.names and path not in partial:
                    found[path] = dataclasses.replace(spec, alike=axis.name)
    return found


def _between(cfg: Any, params: Any, axis: Axis) -> set[str]:
    """The leaves of the steps whose x has its features sharded over the axis."""
    found, sharded, before = set[str](), False, dict[int, bool]()
    for part, around in nested(cfg, layers=True):
        if around and around[-1].cfg.branching:
            sharded = before[len(around) - 1]
        if part.composite:
            before[len(around)] = sharded
            continue
        own = any(axis.name in spec.names for spec, _ in _own(part.cfg).values())
        if sharded and not own and has(params, part.path):
            found |= {join_path(part.path, name) for name in paths(at(params, part.path))}
        if own and part.cfg.shards_features is not None:
            sharded = part.cfg.shards_features
    return found


def _own(cfg: Any) -> dict[str, tuple[Spec, tuple[Axis, ...]]]:
    """The specs of a config's own params, and the axis of the config, if it has one."""
    return {name: (one, (cfg.axis,)) if isinstance(one, Spec) else (Spec(*one), ()) for name, one in cfg.specs.items()}


def _shared(cfg: Any, params: Any) -> dict[str, tuple[Spec, tuple[Axis, ...]]]:
    """Spec and axes of each leaf that a part of the config shards, by path. A config that shards all leaves of its parts has the
    axis as `fsdp`, and the unsharded leaves as `like`."""
    found: dict[str, tuple[Spec, tuple[Axis, ...]]] = {}
    for part, around in nested(cfg, layers=True):
        dims = sum(one.cfg.stacked for one in around)  # how many dimensions stacking has put before a leaf's own
        for name, (spec, own) in _own(part.cfg).items():
            path = join_path(part.path, name)
            if path in found or at(params, path) is not None:
                outer, axes = found.get(path, (WHOLE, ()))
                whole = outer.whole
                if whole is not None:
                    require(bool(own), "specs_of", path, f"of a size that {outer.fsdp!r} divides", list(whole))
                    whole = tuple([n * own[0].size if i == spec.dim else n for i, n in enumerate(whole)])
                found[path] = Spec(spec.axis, spec.dim + dims, parts=spec.parts, fsdp=outer.fsdp, whole=whole), (*own, *axes)
        if part.composite and part.cfg.fsdp is not None:
            fsdp = part.cfg.fsdp
            for name, t in paths(part.cfg.like).items():
                path = join_path(part.path, name)
                if t is None:
                    continue
                if dims:
                    wanted = (
                        f"of a first dimension of its own ({fsdp} shards layers that are stacked: make them with stacked=False)"
                    )
                    fail("specs_of", path, wanted, list(t.shape))
                whole = None if t.dim() and t.shape[0] % fsdp.size == 0 else tuple(t.shape)
                outer, axes = found.get(path, (Spec(fsdp=fsdp.name, whole=whole), ()))
                found[path] = outer, (fsdp, *axes)
    return found


def init_tree(make: Callable[[], T], specs: Specs, mesh: Mesh) -> T:
    """Draw only this rank's part of every leaf of the tree that `make()` makes with `funcops.random`, with the same bits on every
    mesh: `init` for a function of one's own. Draws are deferred while `make` runs, so it must not read their values. Raises
    `ValueError` for a spec that decides no leaf or does not divide its leaf.

    >>> from funcops import dist, random
    >>> mesh, specs = dist.Mesh.abstract({"tp": 2}, rank=1), {"w": dist.Spec("tp", 0)}
    >>> mine = dist.init_tree(lambda: {"w": random.normal(random.key(0), (4, 2), std=0.1)}, specs, mesh)
    >>> mine["w"].equal(random.normal(random.key(0), (4, 2), std=0.1)[2:])
    True
    """
    require_callable("init_tree", make=make)
    with random.put_off():
        like = make()
    found = specs_by_path("init_tree", like, specs, mesh)
    return own_parts(make, lambda path, shape: (found[path], mesh))  # type: ignore[no-any-return]


def init(
    op: Op, cfg: Any, specs: Specs, mesh: Mesh, *, key: Tensor | None = None, device: Any = None, dtype: torch.dtype | None = None
) -> Any:
    """Draw only this rank's part of every leaf of `op.init(cfg, key=key)`, with the same bits on every mesh. Nothing is sent. The
    specs must include the leaves that the config's parallel layers shard (`specs_of`); specs of another mesh do if they have
    `whole` where this one does not divide a leaf.

    Raises `ValueError` for a spec that decides no leaf, does not divide its leaf or contradicts a parallel layer, and for a layer
    on an axis of another mesh.

    >>> import torch
    >>> from funcops import LinearConfig, dist, linear, random
    >>> mesh, specs = dist.Mesh.abstract({"tp": 2}, rank=1), {"weight": dist.Spec("tp", 0)}
    >>> cfg, key = LinearConfig(4, 6), random.key(0)
    >>> mine = dist.init(linear, cfg, specs, mesh, key=key)
    >>> mine.weight.shape, mine.weight.equal(linear.init(cfg, key=key).weight[3:])
    (torch.Size([3, 4]), True)
    """
    check_body("init", op, cfg)
    require_device("init", device)
    require_dtype("init", dtype)
    params = abstract_params(op, cfg)
    found = specs_by_path("init", params, specs, mesh)
    for path, (spec, axes) in _shared(cfg, params).items():
        given = found[path]
        for axis in axes:
            if mesh.sizes.get(axis.name) is None or mesh[axis.name] != axis:
                fail("init", f"the axis of {path}", "one of the mesh", f"{axis} with rank {axis.rank} and group {axis.group!r}")
        if spec.fsdp and spec.whole is None and given.whole == whole_shape(at(params, path).shape, spec, mesh):
            spec = dataclasses.replace(spec, whole=given.whole)  # made on a mesh that does not divide the leaf, as this one does
        own = given.axis, given.dim, given.parts or spec.parts, *((given.fsdp, given.whole) if spec.fsdp else ("", None))
        if own != (spec.axis, spec.dim, spec.parts, spec.fsdp, spec.whole):
            fail("init", f"the spec of {path}", f"{spec}, as its layer shards it", given)
        found[path] = (
            WHOLE if spec.fsdp else Spec(fsdp=given.fsdp, whole=None if given.whole is None else tuple(at(params, path).shape))
        )
    return own_parts(lambda: op.init(cfg, key=key, device=device, dtype=dtype), lambda path, shape: (found.get(path, WHOLE), mesh))
