"""Checkpoints of sharded trees, in the format of torch's distributed checkpoints (DCP): written on one mesh, read on any other.

    save({"params": params, "state": state}, "step-1000", specs, mesh)
    tree = load("step-1000", like, specs, mesh)                        # on another mesh, or in one process

A folder holds a file from each rank that writes, and an index. A shard is written at its offsets in the whole leaf, by one of the
ranks that have it; before that, hashes of tensors that should be the same on several ranks are compared. torch's own `load` also
reads such a folder, and `load` reads one of torch's.

All that a rank can do wrong happens within `_agreed`, so that no rank waits for one that has raised.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import threading
import warnings
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from funcops.distributed import comm
from funcops.distributed.boxes import Box, own_boxes
from funcops.distributed.checkpoint_files import LONGEST, Part, check_files, check_same, folder_of, stamp
from funcops.distributed.checkpoint_index import INDEX, Key, Leaf, read_index, seal
from funcops.distributed.checkpoint_shards import DATA, checksum, read_tensors
from funcops.distributed.mesh import Mesh
from funcops.distributed.specs import PIPELINE, WHOLE, Spec, Specs, check_own, is_leaf, specs_by_path, whole_shape
from funcops.engine.contract.digest import digest
from funcops.engine.errors import (
    CheckpointError,
    CheckpointWriteError,
    DonatedError,
    check,
    describe,
    fail,
    require_flag,
    require_type,
    short,
    unwritten,
)
from funcops.engine.trees import _by_path as leaves_by_path
from funcops.engine.trees import elements, paths, with_leaves
from funcops.optim.quantized_state import decoded, encoded_like, wide_like

T = TypeVar("T")
R = TypeVar("R")
KINDS = (CheckpointWriteError, CheckpointError, ValueError, TypeError, FileNotFoundError, OSError)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)
MOST_BITS = 2039  # of an int with 255 bytes: torch's reader knows no longer form
ERRORS = {error.__name__: error for error in KINDS}  # by name, of an error on another rank; the rest become RuntimeError


class _LeafShards(NamedTuple):
    """A leaf as a rank describes it to all: the whole, the rank's boxes, and a digest of them if other ranks have the same. A leaf
    that is not a tensor has no dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    spec: Spec
    boxes: tuple[Box, ...]
    digest: int

    def kind(self) -> str:
        return f"{'no tensor' if self.dtype is None else f'{short(self.dtype)}{list(self.shape)}'} by {self.spec}"


def save(tree: Any, path: str | os.PathLike[str], specs: Specs, mesh: Mesh) -> None:
    """Write every tensor of a tree, of which this rank has its part, to the folder `path`, completely or not at all: to a folder
    beside it, which is renamed at the end. All ranks of the mesh must call it, on one file system. Leaves that are numbers, bools
    or strings are written, too, and must be the same on all ranks that have them; leaves that are None have no entry. A leaf of
    `optim.quantize_state` has one spec, and is written as the tensor that it stands for, so that any mesh reads it.

    `path` must be new, an empty folder, or the folder of a checkpoint with no other file in it, which is replaced. The index has a
    checksum of each part, which `load` compares.

    Raises on every rank, before anything is written, `CheckpointError` for a leaf without values; for one of a dtype that torch
    does not write, such as bits16 or uint4; for an int of more than 2,039 bits, which torch does not read; for two leaves of one
    path; for a leaf of which ranks have different values along an axis that its spec does not name, two stages of a pipeline
    included; for a path that is something else than a checkpoint, that is not the same on all ranks, or to which another save
    writes. Raises `ValueError` for specs that do not fit, and for a folder's name of more than 232 bytes, and
    `CheckpointWriteError`, an `OSError`, if a rank cannot write. The other ranks' error then names that rank. A save that is killed
    or interrupted leaves the checkpoint from before it, or the new one, for `load`; the next save to `path` removes what it left.

    >>> import tempfile, torch
    >>> from funcops import dist
    >>> from funcops.testing import run_ranks
    >>> specs = {"w": dist.Spec("tp", 0)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = f"{folder}/step-1000"
    ...     def write(mesh):
    ...         dist.save(dist.shard({"w": torch.arange(4.0)}, specs, mesh), path, specs, mesh)
    ...     def read(mesh):
    ...         return dist.load(path, {"w": torch.empty(4 // mesh.size, device="meta")}, specs, mesh)
    ...     _ = run_ranks({"tp": 2}, write)
    ...     run_ranks({"tp": 4}, read)[3], run_ranks({"tp": 1}, read)[0]
    ...
    ({'w': tensor([3.])}, {'w': tensor([0., 1., 2., 3.])})
    """
    saving = _begun("save", tree, path, specs, mesh)
    try:
        saving.write()
    except BaseException:  # Ctrl-C: its traceback may live on, and would keep the path locked
        saving.drop()
        raise
    saving.finish()


def save_start(tree: Any, path: str | os.PathLike[str], specs: Specs, mesh: Mesh) -> Saving:
    """Begin to `save`: the tensors that this rank writes are copied to the CPU, so that they may change, and a thread writes them.
    `finish()` of what it returns waits for all ranks, and puts the folder in place; until then `path` has the checkpoint from
    before, and no other save to it can begin. All ranks must call both, in the same order as what else they send. Raises as `save`,
    and `finish()` raises `CheckpointWriteError` on every rank if one could not write, `DonatedError` if it is called again. What it
    returns warns if it is dropped before.

    >>> import tempfile, torch
    >>> from funcops import dist
    >>> alone, w = dist.Mesh.abstract({"dp": 1}, rank=0), torch.arange(2.0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saving = dist.save_start({"w": w}, f"{folder}/a", {}, alone)
    ...     w += 1                                              # the next step
    ...     saving.finish()
    ...     dist.load(f"{folder}/a", {"w": w}, {}, alone)
    ...
    {'w': tensor([0., 1.])}
    """
    saving = _begun("save_start", tree, path, specs, mesh)
    try:
        _agreed(mesh, saving.copy)
    except BaseException:
        saving.drop()
        raise
    saving.thread.start()
    return saving


class Saving:
    """A checkpoint that is being written, from `save_start`."""

    def __init__(
        self, mesh: Mesh, named: dict[str, Any], leaves: Any, target: Path, folder: Path, part: Part | None, plans: Any
    ) -> None:
        self.mesh, self.named, self.leaves, self.target, self.folder, self.part = mesh, named, leaves, target, folder, part
        self.writer, all_plans, self.metadata = plans
        self.plan = all_plans[mesh.rank]
        self.thread = threading.Thread(target=self.write, daemon=True)
        self.unfinished = weakref.finalize(self, _warn, target)
        self.written: Any = None
        self.error: Exception | None = None

    def copy(self) -> None:
        """Copy the tensors that this rank writes."""
        wanted = {item.index.fqn for item in self.plan.items}
        self.named = {
            name: t.detach().to("cpu", copy=True) if isinstance(t, Tensor) else t
            for name, t in self.named.items()
            if name in wanted
        }

    def write(self) -> None:
        """Write this rank's file; nothing is sent."""
        given = _Given(self.named, self.leaves)
        try:
            self.writer.prepare_local_plan(self.plan)
            self.written = self.writer.write_data(self.plan, given).wait(), given.sums
        except Exception as error:
            self.error = error

    def finish(self) -> None:
        """Wait until all ranks have written, and put the checkpoint in place."""
        if not self.unfinished.alive:
            raise DonatedError(f"save_start: finish() must be called once, got a second call for {os.fspath(self.target)!r}")
        if self.thread.ident is not None:
            self.thread.join()
        self.unfinished.detach()  # not before: a wait that Ctrl-C ends may be made again

        def written() -> Any:
            if self.error is not None:
                raise self._unwritten(self.error)
            return self.written

        def place() -> None:
            if self.part is None:
                return
            try:
                self.writer.finish(self.metadata, [results for results, _ in said])
                seal(self.folder, {key: found for _, sums in said for key, found in sums.items()})
                ends = read_index(self.folder, (self.folder / INDEX).read_bytes()).ends
                check_files("save", self.folder, ends, ends)  # on a file system of its own a rank's file is missing here
                self.part.put_in_place()
            except Exception as error:
                raise self._unwritten(error) from error

        try:
            _, said = _agreed(self.mesh, written)
            _agreed(self.mesh, place)
        except BaseException:
            self.drop()
            raise

    def _unwritten(self, error: Exception) -> Exception:
        return unwritten("save", self.target, error) if isinstance(error, (OSError, RuntimeError)) else error

    def drop(self) -> None:
        self.unfinished.detach()
        if self.part is not None:
            self.part.drop()


def _warn(target: Path) -> None:
    """The end of a `Saving` that nobody can finish any more."""
    said = f"save_start: {os.fspath(target)!r} was never put in place: call finish() of what save_start returns"
    warnings.warn(f"{said} (the checkpoint from before is unchanged)", RuntimeWarning, stacklevel=2)


def _begun(where: str, tree: Any, path: str | os.PathLike[str], specs: Specs, mesh: Mesh) -> Saving:
    """Agree on who writes what, and on the folder; nothing is written yet."""
    require_type(where, "mesh", mesh, Mesh)

    def described() -> tuple[dict[str, Any], dict[str, _LeafShards], Path]:
        require_type(where, "path", path, str, os.PathLike)
        named, found = _by_path("save", "tree", decoded(tree), specs, mesh)
        target = Path(os.path.realpath(path))
        if not target.parent.is_dir():
            raise FileNotFoundError(f"save: path must be in an existing folder, got {os.fspath(path)!r}")
        if (length := len(os.fsencode(target.name))) > LONGEST:
            fail("save", "path", f"a folder whose name has at most {LONGEST} bytes", f"{length}, {target.name!r}")
        return named, _described(named, found, mesh), target

    def begun() -> Part | None:
        if mesh.rank:
            return None
        try:
            return Part(target)
        except OSError as error:
            raise unwritten("save", os.fspath(target), error) from error

    def seen() -> None:
        """A rank that names another folder, or has another file system, does not see the new one where its path says."""
        if target.name != targets[0].name or not folder.is_dir():
            got = f"{os.fspath(targets[0])!r} on rank 0 and {os.fspath(target)!r} on rank {mesh.rank}"
            fail("save", "path", "one folder, of one file system, on all ranks", got, CheckpointError)

    (named, own, target), said = _agreed(mesh, described, lambda mine: mine[1:])
    leaves, targets = [one for one, _ in said], [one for _, one in said]
    _check_alike(leaves, mesh)
    part, (name, *_) = _agreed(mesh, begun, lambda mine: mine and mine.folder.name)
    folder = target.with_name(name)
    try:
        _agreed(mesh, seen)
        return Saving(mesh, named, own, target, folder, part, _plans(leaves, mesh, folder))
    except BaseException:
        if part is not None:
            part.drop()
        raise


def load(path: str | os.PathLike[str], like: T, specs: Specs, mesh: Mesh, *, verify: bool | None = None) -> T:
    """Read this rank's part of the tree in a folder, with the structure, shapes and dtypes of `like`, which is this rank's part,
    too. Each leaf is on the device of its leaf in `like`; if that is the meta device, on the mesh's. A leaf of `like` that is a
    number, a bool or a string is replaced by the one in the folder; one of `optim.quantize_state` is read in float and rounded to 8
    bits: on the mesh that wrote it to the same bits. All ranks of the mesh must call it, and each reads only its own part.

    `verify`: whether to compare what is read with the checksums that `save` wrote; by default from files of at most 256 MiB. A
    checkpoint without checksums, of torch's or an older version's, loads as it is. No class that the folder names is imported
    (SECURITY.md).

    Raises on every rank, before any tensor is read, `CheckpointError` that lists every leaf that is missing, extra, of another
    shape or of another dtype, or that names a file which is missing, too short or too long, or is not in the folder; and if ranks
    name different checkpoints; `FileNotFoundError` if the folder has no checkpoint. Raises `CheckpointError` for a part that does
    not have the dtype, shape or bits that were saved, and if a save has replaced the checkpoint meanwhile. The other ranks' error
    then names that rank.

    >>> import tempfile, torch
    >>> from funcops import dist
    >>> specs, alone = {}, dist.Mesh.abstract({"dp": 1}, rank=0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     dist.save({"w": torch.arange(2.0)}, f"{folder}/step-1000", specs, alone)
    ...     dist.load(f"{folder}/step-1000", {"w": torch.empty(2, device="meta")}, specs, alone)
    ...
    {'w': tensor([0., 1.])}
    """
    require_type("load", "mesh", mesh, Mesh)

    def asked() -> _Asked:
        require_type("load", "path", path, str, os.PathLike)
        if verify is not None:
            require_flag("load", verify=verify)
        wide = wide_like(like)
        named, found = _by_path("load", "like", wide, specs, mesh)
        boxes = {
            name: own_boxes(check_own("load", name, t, found[name], mesh), found[name], mesh) if isinstance(t, Tensor) else ()
            for name, t in named.items()
        }
        folder = folder_of(path)
        seen = stamp(folder)
        return _Asked(wide, named, found, boxes, folder, seen, (folder / INDEX).read_bytes())

    mine, said = _agreed(mesh, asked, lambda mine: (list(mine.named), zlib.crc32(mine.data), os.fspath(mine.folder)))
    for rank, (_, found, folder) in enumerate(said):
        if found != said[0][1]:
            got = f"{said[0][2]!r} on rank 0 and {folder!r} on rank {rank}"
            fail("load", "path", "the same checkpoint on all ranks", got, CheckpointError)
    every = set().union(*(names for names, *_ in said))

    def read() -> T:
        own = _read(path, mine, every, mesh, verify)
        check_same("load", mine.folder, mine.stamp)
        return encoded_like(with_leaves(mine.like, [own.get(name) for name in paths(mine.like)]), like, mesh.device)

    return _agreed(mesh, read, lambda _: None)[0]


class _Asked(NamedTuple):
    """A rank's request to `load`: leaves, specs and boxes by path, and the folder with the bytes of its index."""

    like: Any
    named: dict[str, Any]
    specs: dict[str, Spec]
    boxes: dict[str, tuple[Box, ...]]
    folder: Path
    stamp: tuple[int, int]
    data: bytes


def _read(path: Any, asked: _Asked, every: set[str], mesh: Mesh, verify: bool | None) -> dict[str, Any]:
    """The leaves by path. `every`: the paths of the leaves of all ranks."""
    index = read_index(asked.folder, asked.data)
    vectors = {name: inner for name, inner in elements(asked.like).items() if inner and f"{name}.{inner[0]}" in asked.named}
    old = _old_vectors(path, index.leaves, vectors)
    wanted = _with_vectors(asked.named, old)
    tensors = {name: t for name, t in wanted.items() if isinstance(t, Tensor)}
    whole: dict[str, Any] = dict.fromkeys(wanted)
    whole |= {name: (whole_shape(t.shape, asked.specs.get(name, WHOLE), mesh), t.dtype) for name, t in tensors.items()}
    _check_there(path, index.leaves, whole, every | set(old))
    boxes = asked.boxes | {name: (Box((0,), (len(inner),), (0,)),) for name, inner in old.items()}
    made: Any = {True: torch.zeros, False: torch.empty}  # as torch has no zeros of 4 bits for a leaf without elements
    own = {
        name: made[t.numel() > 0](t.shape, dtype=t.dtype, device=mesh.device if t.is_meta else t.device)
        for name, t in tensors.items()
    }
    into = {name: (t, boxes[name]) for name, t in own.items()}
    found = own | read_tensors(asked.folder, index, into, wanted.keys() - own.keys(), verify)
    for name, inner in vectors.items():
        if name not in found:
            found[name] = torch.stack([found[f"{name}.{path}"] for path in inner])
    return found


def load_values(path: str | os.PathLike[str]) -> dict[str, bool | int | float | str]:
    """The numbers, bools and strings in a folder, by path, such as the step and the settings of a run, which say what `like` to
    make for `load`. Each rank may call it; nothing is sent. Raises `FileNotFoundError` if the folder has no checkpoint,
    `CheckpointError` if it is broken.

    >>> import tempfile, torch
    >>> from funcops import dist
    >>> alone = dist.Mesh.abstract({"dp": 1}, rank=0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     dist.save({"w": torch.arange(2.0), "run": {"step": 1000}}, f"{folder}/a", {}, alone)
    ...     dist.load_values(f"{folder}/a")
    ...
    {'run.step': 1000}
    """
    require_type("load_values", "path", path, str, os.PathLike)
    folder = folder_of(path)
    seen = stamp(folder)
    index = read_index(folder, (folder / INDEX).read_bytes())
    found = read_tensors(folder, index, {}, [name for name, leaf in index.leaves.items() if leaf.dtype is None], None)
    check_same("load_values", folder, seen)
    return found


def _by_path(where: str, of: str, tree: Any, specs: Specs, mesh: Mesh) -> tuple[dict[str, Any], dict[str, Spec]]:
    """The leaves of a tree, which the argument `of` is, and their specs by path; of a vector with an element for each tensor of
    another field (`AdamWState.step`), each element, at the path of that tensor behind the vector's own."""
    leaves = leaves_by_path(where, of, tree, error=CheckpointError)
    found = specs_by_path(where, tree, specs, mesh)
    named = {name: t for name, t in leaves.items() if type(t) in DATA or is_leaf(where, name, t)}
    for name, t in named.items():
        if type(t) in DATA and found[name].names:
            fail(where, f"the spec of {name}", "one that shards nothing (the leaf is not a tensor)", found[name])
    for name, inner in elements(tree).items():
        if name not in named:
            continue
        check(where, name, named[name], (len(inner),))
        if found[name].names:
            fail(where, f"the spec of {name}", "one that shards nothing (each of its elements has a path)", found[name])
        vector, spec = named.pop(name), found.pop(name)
        for path, t in zip(inner, vector.unbind(), strict=True):
            if f"{name}.{path}" in leaves:
                fail(where, of, "a tree with one leaf per path", f"{name}.{path} beside {name}, which has it", CheckpointError)
            named[f"{name}.{path}"], found[f"{name}.{path}"] = t, spec
    return named, found


def is_saved(path: str | os.PathLike[str]) -> bool:
    """Whether a folder has a checkpoint that `load` reads; also beside it, if a save was killed before it could rename its folder.
    Raises `TypeError` for a path that is neither a string nor a `PathLike`.

    >>> from funcops import dist
    >>> dist.is_saved("no such folder")
    False
    """
    require_type("is_saved", "path", path, str, os.PathLike)
    try:
        return folder_of(path).is_dir()
    except FileNotFoundError:
        return False


def _old_vectors(path: Any, there: Mapping[str, Leaf], vectors: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """The vectors that an older version wrote whole: they fit only a rank with the same leaves."""
    old = {name: inner for name, inner in vectors.items() if name in there}
    for name, inner in old.items():
        size = there[name].size
        if size != (len(inner),):
            wanted = f"an element for each of this rank's {len(inner)} tensors (load it on the mesh that wrote it, then save it)"
            fail("load", f"{name} of {os.fspath(path)}", wanted, f"one vector of {list(size)}", CheckpointError)
    return old


def _with_vectors(named: Mapping[str, Any], old: Mapping[str, list[str]]) -> dict[str, Any]:
    """The leaves to read, with each of these vectors instead of its elements."""
    wanted = dict(named)
    for name, inner in old.items():
        found = [wanted.pop(f"{name}.{path}") for path in inner]
        wanted[name] = found[0].new_empty(len(inner))
    return wanted


def _agreed(mesh: Mesh, act: Callable[[], R], tell: Callable[[R], Any] = lambda mine: mine) -> tuple[R, list[Any]]:
    """Call `act` on each rank; return its result, and what `tell` makes of the result of each rank. If it raises on a rank, all
    raise: that rank its own error, the others the error of the first such rank."""
    mine: Any = None
    error: Exception | None = None
    told = pickle.dumps(None)
    try:
        mine = act()
        told = pickle.dumps(tell(mine))
    except Exception as caught:
        error = caught
    said = "" if error is None else f"{error or type(error).__name__} (on rank {mesh.rank})"
    kind = next((name for name, known in ERRORS.items() if isinstance(error, known)), "RuntimeError")
    found = [(mesh.rank, kind, said, told)]
    for axis in reversed(mesh.axes):
        found = [one for lot in comm.all_bytes(pickle.dumps(found), axis, mesh.device) for one in pickle.loads(lot)]
    if error is not None:
        raise error
    for _, kind, said, _ in found:
        if said:
            raise ERRORS.get(kind, RuntimeError)(said)
    return mine, [pickle.loads(one[3]) for one in found]


def _described(named: Mapping[str, Any], specs: Mapping[str, Spec], mesh: Mesh) -> dict[str, _LeafShards]:
    leaves = {}
    for name, t in named.items():
        if not isinstance(t, Tensor):
            if type(t) is int and t.bit_length() > MOST_BITS:
                fail(
                    "save", name, f"of at most {MOST_BITS} bits, which torch reads (save a string)", t.bit_length(), CheckpointError
                )
            leaves[name] = _LeafShards((), None, specs[name], (Box((), (), ()),), zlib.crc32(repr(t).encode()))
            continue
        if t.is_meta or t.layout is not torch.strided or t.is_nested:
            fail("save", name, "a dense tensor with values", f"{describe(t)} on {t.device}", CheckpointError)
        if not (t.is_floating_point() or t.is_complex() or t.dtype in (torch.bool, *INTEGERS)):
            wanted = "of a dtype that torch writes (view it as torch.uint8, and keep the dtype apart)"
            fail("save", name, wanted, describe(t), CheckpointError)
        boxes = own_boxes(check_own("save", name, t, specs[name], mesh), specs[name], mesh)
        alike = math.prod(axis.size for axis in _unnamed(specs[name], mesh)) * mesh.sizes.get(PIPELINE, 1) > 1
        leaves[name] = _LeafShards(whole_shape(t.shape, specs[name], mesh), t.dtype, specs[name], boxes, digest(t) if alike else 0)
    return leaves


def _unnamed(spec: Spec, mesh: Mesh) -> list[Any]:
    """The axes along which all ranks have the same part of a leaf."""
    return [axis for axis in mesh.axes if axis.name not in (*spec.names, PIPELINE)]


def _coordinates(rank: int, spec: Spec, mesh: Mesh) -> tuple[tuple[int, ...], int]:
    """Which part of a leaf a rank has, and the rank's number among the ranks that have the same part."""
    at, number = {}, 0
    for axis in reversed(mesh.axes):
        rank, at[axis.name] = divmod(rank, axis.size)
    for axis in _unnamed(spec, mesh):
        number = number * axis.size + at[axis.name]
    return tuple(at.get(name, 0) for name in (*spec.names, PIPELINE)), number


def _check_alike(said: Sequence[Mapping[str, _LeafShards]], mesh: Mesh) -> None:
    """Check that ranks have the same leaves, and the same bits where they have the same part of a leaf."""
    stages: dict[Any, tuple[int, Mapping[str, _LeafShards]]] = {}
    wholes: dict[str, tuple[int, _LeafShards]] = {}
    parts: dict[Any, tuple[int, _LeafShards, int]] = {}
    for rank, leaves in enumerate(said):
        other, there = stages.setdefault(_coordinates(rank, WHOLE, mesh)[0], (rank, leaves))
        odd = sorted(there.keys() ^ leaves.keys())
        if odd:
            fail("save", "tree", f"of the same leaves on ranks {other} and {rank}", f"{odd[0]} on one of them", CheckpointError)
        for name, one in leaves.items():
            other, known = wholes.setdefault(name, (rank, one))
            if known[:3] != one[:3]:
                wanted = f"of one shape and dtype, with one spec, on ranks {other} and {rank}"
                fail("save", name, wanted, f"{known.kind()} and {one.kind()}", CheckpointError)
            *place, stage = _coordinates(rank, one.spec, mesh)[0]
            other, known, of = parts.setdefault((name, *place), (rank, one, stage))
            if known.digest != one.digest:
                otherwise = "sharded by an axis in its spec" if stage == of else f"of another path on each stage of {PIPELINE}"
                wanted = f"the same on ranks {other} and {rank}, or {otherwise}"
                fail("save", name, wanted, f"other values (its spec is {one.spec})", CheckpointError)


def _plans(said: Sequence[Mapping[str, _LeafShards]], mesh: Mesh, folder: Path) -> tuple[Any, list[Any], Any]:
    """The writer, the plan of each rank, and the index. Of the ranks that have the same part, a hash of the leaf's name chooses one
    to write it."""
    from torch.distributed.checkpoint.default_planner import create_default_global_save_plan

    plans, seen = [], set()
    for rank, leaves in enumerate(said):
        items = []
        for name, one in leaves.items():
            count = math.prod(axis.size for axis in _unnamed(one.spec, mesh))
            boxes = one.boxes if _coordinates(rank, one.spec, mesh)[1] == zlib.crc32(ascii(name).encode()) % count else ()
            if not math.prod(one.shape):
                boxes = (Box((0,) * len(one.shape), one.shape, (0,) * len(one.shape)),)
            for box in boxes:
                if (name, box.offsets) not in seen:  # another stage may have it, too
                    seen.add((name, box.offsets))
                    items.append(_item(name, one, box))
        plans.append(_dcp().SavePlan(items))
    plans, metadata = create_default_global_save_plan(plans)
    writer = _dcp().FileSystemWriter(folder)
    return writer, writer.prepare_global_plan(plans), metadata


def _item(name: str, leaf: _LeafShards, box: Box) -> Any:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    if leaf.dtype is None:
        return WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO)
    chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
    data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=leaf.dtype), size=torch.Size(leaf.shape))
    return WriteItem(index=MetadataIndex(name, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)


class _Given:
    """The planner that DCP's writer asks for tensors and bytes to write."""

    def __init__(self, named: Mapping[str, Any], leaves: Mapping[str, _LeafShards]) -> None:
        self.named, self.leaves, self.sums = named, leaves, dict[Key, str]()

    def resolve_data(self, item: Any) -> Any:
        name, offsets = item.index.fqn, tuple(item.index.offset or ())
        value = self.named[name]
        if not isinstance(value, Tensor):
            data = io.BytesIO()
            torch.save(value, data)
            self.sums[name, offsets] = checksum(value)
            return data
        box = next((box for box in self.leaves[name].boxes if box.offsets == offsets), None)
        t = value.detach() if box is None else box.within(value.detach())
        self.sums[name, offsets] = checksum(t)
        return t


def _check_there(
    path: Any, there: Mapping[str, Leaf], whole: Mapping[str, tuple[Any, torch.dtype] | None], every: set[str]
) -> None:
    """Raise `CheckpointError` unless a folder has these leaves, and no others but the leaves of other ranks. `whole`: their shapes
    and dtypes, or None for a leaf that is not a tensor."""
    wrong: dict[str, list[str]] = {"missing": [], "extra": sorted(there.keys() - every), "mis-shaped": [], "mis-typed": []}
    for name, leaf in whole.items():
        if name not in there or (there[name].dtype is None) != (leaf is None):
            wrong["missing"].append(f"{name}, a number or a string" if leaf is None else f"{name} {short(leaf[1])}{list(leaf[0])}")
        elif leaf is not None:
            (shape, dtype), (size, kind, _) = leaf, there[name]
            if size != tuple(shape):
                wrong["mis-shaped"].append(f"{name} {list(shape)}, got {list(size)}")
            if kind is not dtype and kind is not None:  # None would be missing, above
                wrong["mis-typed"].append(f"{name} {short(dtype)}, got {short(kind)}")
    said = "".join(f"\n  {kind}: {'; '.join(names)}" for kind, names in wrong.items() if names)
    if said:
        raise CheckpointError(f"load: {os.fspath(path)} must hold exactly the leaves of like, got{said}")


def _dcp() -> Any:
    import torch.distributed.checkpoint

    return torch.distributed.checkpoint
