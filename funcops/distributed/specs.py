"""Sharding as data: for each leaf, by path, the axis of a mesh and the dimension that it shards.

    specs = {"*.up.weight": Spec("tp", 0, parts=(hidden, hidden)), "*.down.weight": Spec("tp", 1), "*norm*": Spec()}
    own = shard(params, specs, mesh)               # this rank's part of every leaf
    whole = unshard(own, specs, mesh)              # the whole tree
    dparams = sum_gradients(dparams, specs, mesh)  # over every axis, pp aside, that a leaf's spec does not name

A path takes precedence over globs, and the first matching glob over later ones; a leaf without a match is the same on all ranks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import Tensor

from funcops.distributed import comm
from funcops.distributed.async_collectives import finish, sum_over_start
from funcops.distributed.buckets import part_shape
from funcops.distributed.checks import check_tensor
from funcops.distributed.mesh import Axis, Mesh
from funcops.distributed.shards import own_part
from funcops.engine.contract.op import config
from funcops.engine.errors import describe, fail, require, require_type
from funcops.engine.trees import paths, tree_map_with_path, with_leaves
from funcops.optim.quantized_state import coded_paths

T = TypeVar("T")
PIPELINE = "pp"  # the axis along which ranks have different leaves
Ranges = tuple[tuple[int, int], ...]  # starts and lengths along a dimension


@config
class Spec:
    """How the ranks hold a leaf: `axis` shards its dimension `dim`, or all ranks have all of it (""). `parts`: the sizes along
    `dim` of leaves packed into one (q, k and v; gates and values), each of which is sharded by itself. `fsdp`: an axis that further
    shards dimension 0 of each rank's part, as in ZeRO-3. `alike`: an axis along which all ranks have the same leaf and compute the
    same gradient, which is then not summed over it (tensor parallelism without sequence parallelism). `whole`: the leaf's
    shape, needed if `fsdp` does not divide dimension 0 of a rank's part: it then shards the part's elements, in memory order, and
    pads them with zeros (`own_shards`).

    >>> import torch
    >>> from funcops.dist import Mesh, Spec, shard
    >>> qkv = torch.arange(8).reshape(8, 1)
    >>> shard(qkv, {"": Spec("tp", 0, parts=(4, 2, 2))}, Mesh.abstract({"tp": 2}, rank=1)).flatten()
    tensor([2, 3, 5, 7])
    """

    axis: str = field(kw_only=False, default="")
    dim: int = field(kw_only=False, default=0)
    parts: tuple[int, ...] = ()
    fsdp: str = ""
    alike: str = ""
    whole: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        require(not self.axis or self.axis.isidentifier(), "Spec", "axis", "the name of an axis", repr(self.axis))
        require(not self.fsdp or self.fsdp.isidentifier(), "Spec", "fsdp", "the name of an axis", repr(self.fsdp))
        require(not self.fsdp or self.fsdp != self.axis, "Spec", "fsdp", "another axis", repr(self.fsdp))
        require(not self.alike or self.alike.isidentifier(), "Spec", "alike", "the name of an axis", repr(self.alike))
        free = not self.alike or self.alike not in self.names
        require(free, "Spec", "alike", "an axis that does not shard the leaf", repr(self.alike))
        require(self.dim >= 0, "Spec", "dim", "at least 0", self.dim)
        right = isinstance(self.parts, tuple) and all(type(n) is int and n >= 1 for n in self.parts)
        require(right, "Spec", "parts", "a tuple of sizes of at least 1", describe(self.parts))
        require(not self.parts or bool(self.axis), "Spec", "parts", "() without axis", self.parts)
        sizes = self.whole is None or (isinstance(self.whole, tuple) and all(type(n) is int and n >= 0 for n in self.whole))
        require(sizes, "Spec", "whole", "None or a tuple of sizes", describe(self.whole))
        require(
            self.whole is None or not self.axis or self.dim < len(self.whole),
            "Spec",
            "whole",
            f"of more than {self.dim} sizes",
            self.whole,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The axes that shard the leaf."""
        return tuple(name for name in (self.axis, self.fsdp) if name)

    def summed_over(self, axis: Axis) -> bool:
        """Whether the leaf's gradient is a sum over the ranks of the axis."""
        return axis.name not in (PIPELINE, self.axis, self.fsdp, self.alike)


Specs = Mapping[str, Spec]
WHOLE = Spec()
UNSENT = (torch.int16, torch.uint16, torch.uint32, torch.uint64)  # which Gloo cannot send, and 8-bit floats
SENT = {1: torch.uint8, 2: torch.bfloat16, 4: torch.int32, 8: torch.int64}  # dtypes of as many bytes that it can


def specs_by_path(where: str, tree: Any, specs: Specs, mesh: Mesh) -> dict[str, Spec]:
    """The spec of every leaf of a tree, by path. Raises `ValueError` for a spec that decides no leaf, or names an axis that the
    mesh lacks."""
    require_type(where, "mesh", mesh, Mesh)
    require_type(where, "specs", specs, Mapping)
    for path in coded_paths(tree):
        wanted = "a tensor: blocks of 256 end where the parts of ranks do not (optim.quantize_state after sharding)"
        fail(where, path or "tree", wanted, "a BlockTensor", TypeError)
    for glob, spec in specs.items():
        require_type(where, "specs", glob, str)
        require_type(where, f"specs[{glob!r}]", spec, Spec)
        for name in (*spec.names, *([spec.alike] if spec.alike else [])):
            require(name in mesh.sizes, where, f"specs[{glob!r}]", f"of axes of the mesh ({', '.join(mesh.sizes)})", repr(name))
    globs = [glob for glob in specs if any(c in glob for c in "*?[")]
    known, deciding, found = paths(tree), set(), {}
    for path in known:
        key = path if path in specs else next((glob for glob in globs if fnmatchcase(path, glob)), None)
        deciding.add(key)
        found[path] = WHOLE if key is None else specs[key]
    for glob in specs:
        if glob not in deciding:
            wanted = f"paths, or globs that are the first to match a leaf ({', '.join(known) or 'no leaves'})"
            fail(where, "specs", wanted, repr(glob))
    return found


def own_ranges(where: str, path: str, shape: Sequence[int], spec: Spec, mesh: Mesh) -> tuple[Ranges, ...]:
    """This rank's ranges of a whole leaf of `shape`, along each of its dimensions; before `fsdp`, if that shards it by elements
    (`by_elements`). Raises `ValueError` if an axis does not divide it."""
    if spec.whole is not None and tuple(shape) != spec.whole:
        fail(where, path, f"{list(spec.whole)}, as its spec says", list(shape))
    found: list[Ranges] = [((0, n),) for n in shape]
    if spec.axis:
        axis = mesh[spec.axis]
        if spec.dim >= len(shape):
            fail(where, path, f"of more than {spec.dim} dimensions (its spec shards dimension {spec.dim})", list(shape))
        parts = spec.parts or (shape[spec.dim],)
        if sum(parts) != shape[spec.dim]:
            fail(where, path, f"of {sum(parts)}, the sum of its spec's parts, along dimension {spec.dim}", list(shape))
        for n in parts:
            _require_divides(where, path, n, axis, shape, spec.dim)
        starts = [sum(parts[:i]) for i in range(len(parts))]
        owned = [(s + axis.rank * (n // axis.size), n // axis.size) for s, n in zip(starts, parts, strict=True)]
        found[spec.dim] = tuple(owned) if axis.size > 1 else found[spec.dim]
    if spec.fsdp and mesh[spec.fsdp].size > 1 and by_elements(spec, mesh) is None:
        axis = mesh[spec.fsdp]
        rows = sum(n for _, n in found[0]) if found else 0
        if not found:
            fail(where, path, f"of at least one dimension ({axis} shards it; or give its spec whole=())", list(shape))
        if rows % axis.size:
            wanted = (
                f"of sizes along dimension 0 that {axis} divides (it does not divide {rows}; or give its spec whole={tuple(shape)})"
            )
            fail(where, path, wanted, list(shape))
        found[0] = within(found[0], axis.rank * (rows // axis.size), rows // axis.size)
    return tuple(found)


def _require_divides(where: str, path: str, n: int, axis: Axis, shape: Sequence[int], dim: int) -> None:
    if n % axis.size:
        fail(where, path, f"of sizes along dimension {dim} that {axis} divides (it does not divide {n})", list(shape))


def by_elements(spec: Spec, mesh: Mesh) -> tuple[int, ...] | None:
    """The shape of a rank's part before `fsdp`, if that does not divide its rows and so shards its elements; else None."""
    if spec.whole is None or not spec.fsdp or mesh[spec.fsdp].size == 1:
        return None
    shape = list(spec.whole)
    if spec.axis:
        shape[spec.dim] //= mesh[spec.axis].size
    return None if shape and shape[0] % mesh[spec.fsdp].size == 0 else tuple(shape)


def within(ranges: Ranges, first: int, length: int) -> Ranges:
    """The `length` positions from the `first` on, of ranges laid end to end."""
    found, at = [], 0
    for start, n in ranges:
        low, high = max(first, at), min(first + length, at + n)
        if low < high:
            found.append((start + low - at, high - low))
        at += n
    return tuple(found) or ((ranges[0][0], 0),)


def take(t: Tensor, ranges: Sequence[Ranges]) -> Tensor:
    """These ranges of a whole leaf, concatenated along each dimension, in new contiguous memory; the leaf itself if they cover all
    of it."""
    if all(r == ((0, n),) for r, n in zip(ranges, t.shape, strict=True)):
        return t
    for dim, pieces in enumerate(ranges):
        cut = [t.narrow(dim, start, n) for start, n in pieces]
        t = cut[0] if len(cut) == 1 else torch.cat(cut, dim)
    return t.clone(memory_format=torch.contiguous_format) if t._is_view() else t.contiguous()


def whole_shape(shape: Sequence[int], spec: Spec, mesh: Mesh) -> tuple[int, ...]:
    """The shape of the whole leaf, if a rank's part has `shape`."""
    if spec.whole is not None:
        return spec.whole
    found = list(shape)
    if spec.fsdp:
        found[0] *= mesh[spec.fsdp].size
    if spec.axis:
        found[spec.dim] *= mesh[spec.axis].size
    return tuple(found)


def is_leaf(where: str, path: str, t: Any) -> bool:
    """Whether a leaf is a tensor. Raises `TypeError` for one that is neither a plain tensor nor None."""
    if t is not None:
        check_tensor(where, path or "tree", t, (...,))
    return t is not None


def shard(tree: T, specs: Specs, mesh: Mesh) -> T:
    """This rank's part of every leaf of a whole tree. A leaf that is not sharded is the same object. Nothing is sent.

    >>> import torch
    >>> from funcops.dist import Mesh, Spec, shard
    >>> params = {"up": torch.arange(4.0), "norm": torch.ones(2)}
    >>> shard(params, {"up": Spec("tp", 0)}, Mesh.abstract({"tp": 2}, rank=1))
    {'up': tensor([2., 3.]), 'norm': tensor([1., 1.])}
    """
    found = specs_by_path("shard", tree, specs, mesh)

    def own(path: str, t: Any) -> Any:
        if not is_leaf("shard", path, t):
            return t
        spec = found[path]
        own = take(t, own_ranges("shard", path, t.shape, spec, mesh))
        return own if by_elements(spec, mesh) is None else own_part(own, mesh[spec.fsdp])

    return tree_map_with_path(own, tree)


def fsdp_specs(like: Any, specs: Specs, mesh: Mesh, axis: str = "dp") -> dict[str, Spec]:
    """The specs of the trees of shards that `own_shards(like, mesh[axis])` returns, by path: ZeRO's params, gradients or state, for
    `save` and `load` on a mesh of any size. like: the tree with this rank's parts before that, on any device; specs: its specs.
    Raises as `shard`.

    >>> import torch
    >>> from funcops import dist
    >>> mesh = dist.Mesh.abstract({"dp": 2}, rank=1)
    >>> dist.fsdp_specs({"w": torch.ones(4, 3), "odd": torch.ones(257)}, {}, mesh)["odd"].whole
    (257,)
    """
    where, found = "fsdp_specs", specs_by_path("fsdp_specs", like, specs, mesh)
    n, made = mesh[axis].size, {}
    for path, t in paths(like).items():
        if is_leaf(where, path, t):
            check_own(where, path, t, found[path], mesh)
            even = t.dim() > 0 and t.shape[0] % n == 0
            whole = None if even else tuple(whole_shape(t.shape, found[path], mesh))
            made[path] = dataclasses.replace(found[path], fsdp=axis, whole=whole)
    return made


def unshard(tree: T, specs: Specs, mesh: Mesh) -> T:
    """Gather the whole tree, on every rank: the inverse of `shard`. All ranks of the mesh must call it. Raises
    `ValueError` or `TypeError` for a part of another shape or dtype than its rank should have.

    >>> import torch
    >>> from funcops import dist
    >>> from funcops.testing import run_ranks
    >>> specs = {"up": dist.Spec("tp", 0)}
    >>> run_ranks({"tp": 2}, lambda mesh: dist.unshard({"up": torch.tensor([1.0 + mesh["tp"].rank])}, specs, mesh))[0]
    {'up': tensor([1., 2.])}
    """
    found = specs_by_path("unshard", tree, specs, mesh)
    for path, t in paths(tree).items():
        if is_leaf("unshard", path, t):  # before anything is sent
            check_own("unshard", path, t, found[path], mesh)
    return tree_map_with_path(lambda path, t: _gathered(t, found[path], mesh) if isinstance(t, Tensor) else t, tree)


def check_own(where: str, path: str, t: Tensor, spec: Spec, mesh: Mesh) -> tuple[Ranges, ...]:
    """`own_ranges` for a rank's part of a leaf. Raises `ValueError` if `t` cannot be one."""
    _check_dims(where, path, t, spec)
    ranges, shape = own_ranges(where, path, whole_shape(t.shape, spec, mesh), spec, mesh), by_elements(spec, mesh)
    own = [sum(n for _, n in pieces) for pieces in ranges] if shape is None else list(part_shape(shape, mesh[spec.fsdp].size))
    if own != list(t.shape):
        fail(where, path, f"this rank's part, {own}", describe(t))
    return ranges


def _check_dims(where: str, path: str, t: Tensor, spec: Spec) -> None:
    least = 0 if spec.whole is not None else max([spec.dim + 1] * bool(spec.axis) + [1] * bool(spec.fsdp), default=0)
    if t.dim() < least:
        fail(where, path, f"of at least {least} dimension{'s' * (least > 1)}", describe(t))


def _gathered(t: Tensor, spec: Spec, mesh: Mesh) -> Tensor:
    kind = t.dtype if t.dtype in UNSENT or (t.dtype.is_floating_point and t.itemsize == 1) else None
    t = t if kind is None else t.view(SENT[t.itemsize])
    if spec.fsdp:
        t, shape = comm.gather(t, mesh[spec.fsdp]), by_elements(spec, mesh)
        t = t if shape is None else t[: math.prod(shape)].view(shape)
    if spec.axis:
        axis = mesh[spec.axis]
        t = comm.gather(t, axis, spec.dim)
        if len(spec.parts) > 1 and axis.size > 1:
            sizes = [n // axis.size for n in spec.parts] * axis.size
            pieces, count = t.split(sizes, spec.dim), len(spec.parts)
            t = torch.cat([pieces[r * count + i] for i in range(count) for r in range(axis.size)], spec.dim)
    return t if kind is None else t.view(kind)


def sum_gradients(dparams: T, specs: Specs, mesh: Mesh) -> T:
    """Sum each gradient over every axis of the mesh, except `pp`, that its spec does not name: along these axes ranks have
    different rows of the batch, and each the gradient of its own. All sums over one axis are in flight at once. All ranks of the
    mesh must call it.

    >>> import torch
    >>> from funcops import dist
    >>> from funcops.testing import run_ranks
    >>> dparams, specs = {"up": torch.ones(1), "norm": torch.ones(1)}, {"up": dist.Spec("tp", 0)}
    >>> run_ranks({"dp": 2, "tp": 2}, lambda mesh: dist.sum_gradients(dparams, specs, mesh))[0]
    {'up': tensor([2.]), 'norm': tensor([4.])}
    """
    found = specs_by_path("sum_gradients", dparams, specs, mesh)
    named = paths(dparams)
    given = [path for path, t in named.items() if is_leaf("sum_gradients", path, t)]
    for path in given:
        _check_dims("sum_gradients", path, named[path], found[path])
    for axis in mesh.axes:
        if axis.size > 1 and axis.name != PIPELINE:
            summed = [path for path in given if found[path].summed_over(axis)]
            started = [sum_over_start(named[path], axis) for path in summed]
            named.update(zip(summed, [finish(h) for h in started], strict=True))
    return with_leaves(dparams, named.values())
