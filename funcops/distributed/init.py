"""Params by shard: of what an op's `init` draws each rank draws its own part alone, in the bits that it has in the whole.

    specs = specs_of(chain, cfg)                             # what the parallel layers of a model share out
    params = init(chain, cfg, specs, mesh, key=key)

The draws of an `init` are put off until it is known which leaf each has become. Numbers depend on their place in the whole leaf.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from funcops import random
from funcops.compose.step import check_body
from funcops.contract.marks import version
from funcops.contract.op import Op
from funcops.contract.walk import nested, steps
from funcops.distributed.mesh import Axis, Mesh
from funcops.distributed.specs import WHOLE, Ranges, Spec, Specs, own_ranges, specs_by_path, take
from funcops.errors import fail, join_path, require, require_device, require_dtype
from funcops.program.values import abstract_params
from funcops.trees import at, has, leaves, paths, tree_map_with_path

PartOf = Callable[[str, Sequence[int]], "Sequence[Ranges]"]  # of a leaf's path and its shape


class _Stacks(TorchDispatchMode):
    """Notes which tensors are stacked of which, along dimension 0, as those of the layers of a repeat are."""

    runs = True  # see funcops.backend.declare.tracing

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[int, tuple[Tensor, list[Tensor]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.stack.default and len(args) == 1:
            self.of[id(made)] = made, list(args[0])
        return made


class _Found(NamedTuple):
    """A tree, and by the identity of its tensors the places of the draws that they are, untouched: one, or those of a stack."""

    tree: Any
    draws: list[Any]
    places: dict[int, tuple[int, ...]]
    stacked: set[int]

    @staticmethod
    def of(make: Callable[[], Any], takes: Callable[[int], bool]) -> _Found:
        with random.put_off(takes) as draws, _Stacks() as stacks:
            tree = make()
        one = {id(draw[0]): (i,) for i, draw in enumerate(draws) if draw is not None and version(draw[0]) == 0}
        places: dict[int, tuple[int, ...]] = {**one}
        for name, (made, parts) in stacks.of.items():
            if version(made) == 0 and all(id(part) in one for part in parts):
                places[name] = tuple(one[id(part)][0] for part in parts)
        return _Found(tree, [None if draw is None else draw[1] for draw in draws], places, stacks.of.keys() - one.keys())

    def part(self, t: Tensor, ranges: Sequence[Ranges]) -> Tensor:
        """The part of a leaf."""
        if id(t) not in self.places:
            return take(t, ranges)
        draws = [self.draws[i] for i in self.places[id(t)]]
        if id(t) not in self.stacked:
            return draws[0].part(ranges)  # type: ignore[no-any-return]
        return torch.stack([draws[i].part(ranges[1:]) for start, n in ranges[0] for i in range(start, start + n)])


def own_parts(make: Callable[[], Any], part_of: PartOf) -> Any:
    """The tree that `make()` makes, of each leaf the part that `part_of` says. A leaf that is a draw, or draws stacked, is drawn in
    part; one that is more than drawn, and so is on the meta device now, is made whole first."""
    found = _Found.of(make, lambda place: True)
    clean = {place for t in leaves(found.tree) if id(t) in found.places for place in found.places[id(t)]}
    if any(isinstance(t, Tensor) and t.is_meta and id(t) not in found.places for t in leaves(found.tree)):
        clean = set()  # a leaf is made of a draw, and it does not say of which
    if len(clean) < len(found.draws):
        found = _Found.of(make, clean.__contains__)

    def own(path: str, t: Any) -> Any:
        return found.part(t, part_of(path, t.shape)) if isinstance(t, Tensor) else t

    return tree_map_with_path(own, found.tree)


def init_part(cfg: Any, make: Callable[[], Any]) -> Any:
    """Of what `make` draws for a whole layer the part of a rank, as the layer's config says in its `specs`: all have its bits."""
    mesh, specs = Mesh(axes=(cfg.axis,)), cfg.specs
    return own_parts(make, lambda path, shape: own_ranges("init", path, shape, specs.get(path, WHOLE), mesh))


def specs_of(op: Op, cfg: Any) -> dict[str, Spec]:
    """What the parallel layers of a model share out, by the path of the leaf in its params; other leaves are the same on all ranks.
    Where these layers are without sequence parallelism, other leaves have a spec too, as their gradients are whole (`Spec.alike`):
    all but those between a column layer and its row layer (a norm of each head), of which a rank has the gradient of its features.
    Raises `ValueError` where layers over one axis are some with it, and some without.

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
    """The leaves of the steps in whose x each rank of the axis has different features."""
    found, apart, before = set[str](), False, dict[int, bool]()
    for part, around in nested(cfg, layers=True):
        if around and around[-1].cfg.branching:
            apart = before[len(around) - 1]
        if part.composite:
            before[len(around)] = apart
            continue
        own = any(axis.name in spec.names for spec in part.cfg.specs.values())
        if apart and not own and has(params, part.path):
            found |= {join_path(part.path, name) for name in paths(at(params, part.path))}
        if own and part.cfg.apart is not None:
            apart = part.cfg.apart
    return found


def _shared(cfg: Any, params: Any) -> dict[str, tuple[Spec, tuple[Axis, ...]]]:
    """Spec and axes of each leaf that a part of the config shards, by path. A config that shards all leaves of its parts has the
    axis for `fsdp`, and what they are before that for `like`."""
    found: dict[str, tuple[Spec, tuple[Axis, ...]]] = {}
    for part, around in nested(cfg, layers=True):
        dims = sum(one.cfg.stacked for one in around)  # how many dimensions stacking has put before a leaf's own
        for name, spec in () if part.composite else part.cfg.specs.items():
            path = join_path(part.path, name)
            if path in found or at(params, path) is not None:
                outer, axes = found.get(path, (WHOLE, ()))
                found[path] = Spec(spec.axis, spec.dim + dims, parts=spec.parts, fsdp=outer.fsdp), (part.cfg.axis, *axes)
        fsdp = part.cfg.fsdp if part.composite else None
        for name, t in () if fsdp is None else paths(part.cfg.like).items():
            if t is not None:
                path = join_path(part.path, name)
                if dims or not t.dim() or t.shape[0] % fsdp.size:
                    fail("specs_of", path, f"of a first dimension of its own that {fsdp} divides", list(t.shape))
                outer, axes = found.get(path, (Spec(fsdp=fsdp.name), ()))
                found[path] = outer, (fsdp, *axes)
    return found


def init(
    op: Op, cfg: Any, specs: Specs, mesh: Mesh, *, key: Tensor | None = None, device: Any = None, dtype: torch.dtype | None = None
) -> Any:
    """This rank's part of every leaf of what `op.init(cfg, key=key)` draws, and no more of it: the parts of all are its bits, on
    every mesh. Nothing is sent. What the parallel layers of a config share out themselves the specs must say too (`specs_of`).

    Raises `ValueError` for a spec that decides no leaf, or that does not divide it, one that a parallel layer contradicts, and a
    layer on an axis of another mesh.

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
        if (given.axis, given.dim, given.parts or spec.parts, given.fsdp if spec.fsdp else "") != (
            spec.axis,
            spec.dim,
            spec.parts,
            spec.fsdp,
        ):
            fail("init", f"the spec of {path}", f"{spec}, as its layer shares it out", given)
        found[path] = Spec(fsdp="" if spec.fsdp else given.fsdp)
    return own_parts(
        lambda: op.init(cfg, key=key, device=device, dtype=dtype),
        lambda path, shape: own_ranges("init", path, shape, found.get(path, WHOLE), mesh),
    )
