"""Checkpoints of sharded trees, in the format of torch's distributed checkpoints (DCP): written on one mesh, read on any other.

    save({"params": params, "state": state}, "step-1000", specs, mesh)
    tree = load("step-1000", like, specs, mesh)                        # on another mesh, or in one process

A folder holds a file from each rank that writes, and an index. A shard is written at its offsets in the whole leaf, by one of the
ranks that have it; before that, tensors that should be the same on several ranks are compared bit for bit. torch's own `load` also
reads such a folder, and `load` reads one of torch's.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import secrets
import shutil
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from funcops.distributed import comm
from funcops.distributed.boxes import Box, own_boxes
from funcops.distributed.checkpoint_files import check_files, folder_of, index_of, put_in_place
from funcops.distributed.mesh import Mesh
from funcops.distributed.specs import PIPELINE, WHOLE, Spec, Specs, check_own, is_leaf, specs_by_path, whole_shape
from funcops.errors import CheckpointError, check, describe, fail, require_type, short
from funcops.optim.quantized_state import decoded, encoded_like, wide_like
from funcops.trees import elements, paths, with_leaves

T = TypeVar("T")
R = TypeVar("R")
DATA = (bool, int, float, str)  # the types of leaves that are not tensors
ERRORS = {error.__name__: error for error in (CheckpointError, ValueError, TypeError, FileNotFoundError, OSError)}


class _LeafShards(NamedTuple):
    """A leaf as a rank describes it to all: the whole, the rank's boxes, and a digest of them if other ranks have the same. A leaf
    that is not a tensor has no dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    spec: Spec
    boxes: tuple[Box, ...]
    digest: int


def save(tree: Any, path: str | os.PathLike[str], specs: Specs, mesh: Mesh) -> None:
    """Write every tensor of a tree, of which this rank has its part, to the folder `path`, completely or not at all: to a folder
    beside it, which is renamed at the end. All ranks of the mesh must call it, on one file system. Leaves that are numbers, bools
    or strings are written, too, and must be the same on all ranks that have them; leaves that are None have no entry. A leaf of
    `optim.quantize_state` has one spec, and is written as the tensor that it stands for, so that any mesh reads it.

    Raises on every rank, before anything is written, `CheckpointError` for a leaf without values, and for a leaf of which ranks
    have different values along an axis that its spec does not name, two stages of a pipeline included; `ValueError` for specs that
    do not fit, `OSError` if the folder cannot be written. A save that is killed leaves the checkpoint from before it, or the new
    one, for `load`; the next save to `path` removes what it left.

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
    saving.write()
    saving.finish()


def save_start(tree: Any, path: str | os.PathLike[str], specs: Specs, mesh: Mesh) -> Saving:
    """Begin to `save`: the tensors that this rank writes are copied to the CPU, so that they may change, and a thread writes them.
    `finish()` of what it returns waits for all ranks, and puts the folder in place; until then `path` has the checkpoint from
    before. All ranks must call both, in the same order as what else they send. Raises as `save`, and `finish()` raises `OSError`
    on every rank if one could not write.

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
    saving.copy()
    saving.thread.start()
    return saving


class Saving:
    """A checkpoint that is being written, from `save_start`."""

    def __init__(
        self, mesh: Mesh, named: dict[str, Any], leaves: Any, beside: Path, target: Path, plans: tuple[Any, Any, Any]
    ) -> None:
        self.mesh, self.named, self.leaves, self.beside, self.target = mesh, named, leaves, beside, target
        self.writer, all_plans, self.metadata = plans
        self.plan = all_plans[mesh.rank]
        self.thread = threading.Thread(target=self.write, daemon=True)
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
        try:
            self.writer.prepare_local_plan(self.plan)  # creates the folder
            self.written = self.writer.write_data(self.plan, _Given(self.named, self.leaves)).wait()
        except Exception as error:
            self.error = error

    def finish(self) -> None:
        """Wait until all ranks have written, and put the checkpoint in place."""
        if self.thread.ident is not None:
            self.thread.join()

        def written() -> Any:
            if self.error is not None:
                raise self.error
            return self.written

        def place() -> None:
            if self.mesh.rank == 0:
                self.writer.finish(self.metadata, results)
                put_in_place(self.beside, self.target)

        try:
            results = _together(self.mesh, written)
            _together(self.mesh, place)
        except BaseException:
            if self.mesh.rank == 0:
                shutil.rmtree(self.beside, ignore_errors=True)
            raise


def _begun(where: str, tree: Any, path: str | os.PathLike[str], specs: Specs, mesh: Mesh) -> Saving:
    """Agree on who writes what; nothing is written yet."""
    require_type(where, "path", path, str, os.PathLike)
    named, found = _by_path("save", decoded(tree), specs, mesh)
    target = Path(os.path.realpath(path))

    def described() -> tuple[str, dict[str, _LeafShards]]:
        if not target.parent.is_dir():
            raise FileNotFoundError(f"save: path must be in an existing folder, got {os.fspath(path)!r}")
        return secrets.token_hex(8), _described(named, found, mesh)

    said = _together(mesh, described)
    leaves = [one for _, one in said]
    _check_alike(leaves, mesh)
    beside = target.with_name(f".{target.name}.{said[0][0]}.part")
    return Saving(mesh, named, leaves[mesh.rank], beside, target, _plans(leaves, mesh, beside))


def load(path: str | os.PathLike[str], like: T, specs: Specs, mesh: Mesh) -> T:
    """Read this rank's part of the tree in a folder, with the structure, shapes and dtypes of `like`, which is this rank's part,
    too. Each leaf is on the device of its leaf in `like`; if that is the meta device, on the mesh's. A leaf of `like` that is a
    number, a bool or a string is replaced by the one in the folder; one of `optim.quantize_state` is read in float and rounded to 8
    bits: on the mesh that wrote it to the same bits. All ranks of the mesh must call it, and each reads only its own part.

    Raises on every rank, before any tensor is read, `CheckpointError` that lists every leaf that is missing, extra, of another
    shape or of another dtype, or that names a file which was cut short; `FileNotFoundError` if the folder has no checkpoint.

    >>> import tempfile, torch
    >>> from funcops import dist
    >>> specs, alone = {}, dist.Mesh.abstract({"dp": 1}, rank=0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     dist.save({"w": torch.arange(2.0)}, f"{folder}/step-1000", specs, alone)
    ...     dist.load(f"{folder}/step-1000", {"w": torch.empty(2, device="meta")}, specs, alone)
    ...
    {'w': tensor([0., 1.])}
    """
    require_type("load", "path", path, str, os.PathLike)
    given, like = like, wide_like(like)
    named, found = _by_path("load", like, specs, mesh)
    boxes = {
        name: own_boxes(check_own("load", name, t, found[name], mesh), found[name], mesh) if isinstance(t, Tensor) else ()
        for name, t in named.items()
    }
    vectors = {name: inner for name, inner in elements(like).items() if inner and f"{name}.{inner[0]}" in named}

    every = set().union(*_together(mesh, lambda: list(named)))

    def read() -> dict[str, Any]:
        folder = folder_of(path)
        reader = _dcp().FileSystemReader(folder)
        metadata = index_of(reader, folder)
        there = metadata.state_dict_metadata
        old = _old_vectors(path, there, vectors)
        wanted = _with_vectors(named, old)
        tensors = {name: t for name, t in wanted.items() if isinstance(t, Tensor)}
        whole: dict[str, Any] = dict.fromkeys(wanted)
        whole |= {name: (whole_shape(t.shape, found.get(name, WHOLE), mesh), t.dtype) for name, t in tensors.items()}
        _check_there(path, there, whole, every | set(old))
        into = _Into({name: torch.zeros(t.shape, dtype=t.dtype, device=_device(t, mesh)) for name, t in tensors.items()})
        boxes.update({name: (Box((0,), (len(inner),), (0,)),) for name, inner in old.items()})
        items = [item for name in wanted for item in into.asks(name, there[name], boxes[name])]
        check_files(folder, metadata.storage_data, items)
        reader.set_up_storage_reader(metadata, mesh.rank == 0)
        reader.read_data(_dcp().LoadPlan(items), into).wait()
        return into.leaves

    own: dict[str, Any] = {}
    _together(mesh, lambda: own.update(read()))
    for name, inner in vectors.items():
        if name not in own:
            own[name] = torch.stack([own[f"{name}.{path}"] for path in inner])
    return encoded_like(with_leaves(like, [own.get(name) for name in paths(like)]), given, mesh.device)


def _by_path(where: str, tree: Any, specs: Specs, mesh: Mesh) -> tuple[dict[str, Any], dict[str, Spec]]:
    """The leaves of a tree and their specs by path; of a vector with an element for each tensor of another field
    (`AdamWState.step`), each element, at the path of that tensor behind the vector's own."""
    found = specs_by_path(where, tree, specs, mesh)
    named = {name: t for name, t in paths(tree).items() if type(t) in DATA or is_leaf(where, name, t)}
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
        named |= {f"{name}.{path}": t for path, t in zip(inner, vector.unbind(), strict=True)}
        found |= {f"{name}.{path}": spec for path in inner}
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


def _old_vectors(path: Any, there: Mapping[str, Any], vectors: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """The vectors that an older version wrote whole: they fit only a rank with the same leaves."""
    old = {name: inner for name, inner in vectors.items() if name in there}
    for name, inner in old.items():
        size = tuple(getattr(there[name], "size", ()))
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


def _together(mesh: Mesh, act: Callable[[], R]) -> list[R]:
    """Call `act` on each rank, and return all results on all ranks. If it raises on a rank, all raise: that rank its own error, the
    others the error of the first such rank."""
    mine: Any = None
    error: Exception | None = None
    try:
        mine = act()
    except Exception as caught:
        error = caught
    said = "" if error is None else f"{error} (on rank {mesh.rank})"
    kind = next((name for name, known in ERRORS.items() if isinstance(error, known)), "OSError")
    found = [(mesh.rank, kind, said, mine)]
    for axis in reversed(mesh.axes):
        found = [one for lot in comm.all_bytes(pickle.dumps(found), axis, mesh.device) for one in pickle.loads(lot)]
    if error is not None:
        raise error
    for _, kind, said, _ in found:
        if said:
            raise ERRORS[kind](said)
    return [one[3] for one in found]


def _described(named: Mapping[str, Any], specs: Mapping[str, Spec], mesh: Mesh) -> dict[str, _LeafShards]:
    leaves = {}
    for name, t in named.items():
        if not isinstance(t, Tensor):
            leaves[name] = _LeafShards((), None, specs[name], (Box((), (), ()),), zlib.crc32(repr(t).encode()))
            continue
        if t.is_meta or t.layout is not torch.strided or t.is_nested:
            fail("save", name, "a dense tensor with values", f"{describe(t)} on {t.device}", CheckpointError)
        boxes = own_boxes(check_own("save", name, t, specs[name], mesh), specs[name], mesh)
        alike = math.prod(axis.size for axis in _unnamed(specs[name], mesh)) * mesh.sizes.get(PIPELINE, 1) > 1
        leaves[name] = _LeafShards(whole_shape(t.shape, specs[name], mesh), t.dtype, specs[name], boxes, _digest(t) if alike else 0)
    return leaves


def _unnamed(spec: Spec, mesh: Mesh) -> list[Any]:
    """The axes along which all ranks have the same part of a leaf."""
    return [axis for axis in mesh.axes if axis.name not in (*spec.names, PIPELINE)]


def _digest(t: Tensor) -> int:
    """A hash of a tensor's bits and their positions."""
    flat = t.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = len(flat) // 8 * 8
    words = flat[:whole] if flat.data_ptr() % 8 == 0 and flat.storage_offset() % 8 == 0 else flat[:whole].clone()
    total = 0
    for piece in (*words.view(torch.int64).split(2**22), flat[whole:]):
        weights = torch.arange(1, len(piece) + 1, device=t.device) * 0x9E3779B1
        total = total * 31 + int((piece * (weights ^ (weights >> 15))).sum())
    return total % 2**64


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
                fail("save", name, wanted, f"{_of(known)} and {_of(one)}", CheckpointError)
            *place, stage = _coordinates(rank, one.spec, mesh)[0]
            other, known, of = parts.setdefault((name, *place), (rank, one, stage))
            if known.digest != one.digest:
                otherwise = "sharded by an axis in its spec" if stage == of else f"of another path on each stage of {PIPELINE}"
                wanted = f"the same on ranks {other} and {rank}, or {otherwise}"
                fail("save", name, wanted, f"other values (its spec is {one.spec})", CheckpointError)


def _of(leaf: _LeafShards) -> str:
    kind = "no tensor" if leaf.dtype is None else f"{short(leaf.dtype)}{list(leaf.shape)}"
    return f"{kind} by {leaf.spec}"


def _plans(said: Sequence[Mapping[str, _LeafShards]], mesh: Mesh, folder: Path) -> tuple[Any, list[Any], Any]:
    """The writer, the plan of each rank, and the index. Of the ranks that have the same part, a hash of the leaf's name chooses one
    to write it."""
    from torch.distributed.checkpoint.default_planner import create_default_global_save_plan

    plans, seen = [], set()
    for rank, leaves in enumerate(said):
        items = []
        for name, one in leaves.items():
            count = math.prod(axis.size for axis in _unnamed(one.spec, mesh))
            boxes = one.boxes if _coordinates(rank, one.spec, mesh)[1] == zlib.crc32(name.encode()) % count else ()
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
        self.named, self.leaves = named, leaves

    def resolve_data(self, item: Any) -> Any:
        name = item.index.fqn
        if not isinstance(self.named[name], Tensor):
            data = io.BytesIO()
            torch.save(self.named[name], data)
            return data
        offsets = tuple(item.index.offset)
        box = next((box for box in self.leaves[name].boxes if box.offsets == offsets), None)
        t = self.named[name].detach()
        return t if box is None else box.within(t)


class _Into:
    """The planner that DCP's reader asks for tensors to read into, and gives bytes."""

    def __init__(self, leaves: dict[str, Any]) -> None:
        self.leaves, self.boxes = leaves, dict[tuple[str, tuple[int, ...]], Box]()

    def asks(self, name: str, metadata: Any, boxes: Sequence[Box]) -> Iterable[Any]:
        """The items to read for a leaf. Raises `CheckpointError` if the folder lacks some of its values."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
        from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
        from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

        if name not in self.leaves:
            index, nowhere = MetadataIndex(name), torch.Size((0,))
            return [ReadItem(LoadItemType.BYTE_IO, index, nowhere, index, nowhere, nowhere)]
        self.boxes.update({(name, box.offsets): box for box in boxes})
        wanted = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]
        count = sum(box.numel for box in boxes)
        items = create_read_items_for_chunk_list(name, metadata, wanted) if count else []
        there = sum(math.prod(item.lengths) for item in items)
        if there != count:
            fail("load", name, f"complete, with {count} values", there, CheckpointError)
        return items

    def resolve_tensor(self, item: Any) -> Tensor:
        box = self.boxes[item.dest_index.fqn, tuple(item.dest_index.offset)]
        t = box.within(self.leaves[item.dest_index.fqn])
        for dim, (start, n) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            t = t.narrow(dim, start, n)
        return t

    def load_bytes(self, item: Any, data: Any) -> None:
        self.leaves[item.dest_index.fqn] = torch.load(data, weights_only=True)

    def commit_tensor(self, item: Any, t: Tensor) -> None:
        pass


def _check_there(path: Any, there: Mapping[str, Any], whole: Mapping[str, tuple[Any, torch.dtype] | None], every: set[str]) -> None:
    """Raise `CheckpointError` unless a folder has these leaves, and no others but the leaves of other ranks. `whole`: their shapes
    and dtypes, or None for a leaf that is not a tensor."""
    wrong: dict[str, list[str]] = {"missing": [], "extra": sorted(there.keys() - every), "mis-shaped": [], "mis-typed": []}
    for name, leaf in whole.items():
        if name not in there or hasattr(there[name], "size") != (leaf is not None):
            wrong["missing"].append(f"{name}, a number or a string" if leaf is None else f"{name} {short(leaf[1])}{list(leaf[0])}")
        elif leaf is not None:
            (shape, dtype), size, kind = leaf, tuple(there[name].size), there[name].properties.dtype
            if size != tuple(shape):
                wrong["mis-shaped"].append(f"{name} {list(shape)}, got {list(size)}")
            if kind is not dtype:
                wrong["mis-typed"].append(f"{name} {short(dtype)}, got {short(kind)}")
    said = "".join(f"\n  {kind}: {'; '.join(names)}" for kind, names in wrong.items() if names)
    if said:
        raise CheckpointError(f"load: {os.fspath(path)} must hold exactly the leaves of like, got{said}")


def _device(t: Tensor, mesh: Mesh) -> Any:
    return mesh.device if t.is_meta else t.device


def _dcp() -> Any:
    import torch.distributed.checkpoint

    return torch.distributed.checkpoint
