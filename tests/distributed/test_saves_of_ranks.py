"""Saves and loads in which one rank does something else than the others: all raise, nobody waits, and what was there stays."""

import contextlib
import functools
import gc
import itertools
import os
import random as python_random
import re
import resource
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from forked import codes

from funcops import dist
from funcops.distributed import Mesh, Spec, checkpoint, checkpoint_files
from funcops.engine.errors import CheckpointError, CheckpointWriteError
from funcops.testing import run_ranks

ONE = Mesh.abstract({"dp": 1}, 0)
GRID = {"dp": 2, "tp": 2}
PARTS = 7
W = torch.arange(8.0).reshape(4, 2)
SPECS = {"w": Spec("tp", 0)}


def tree(scale=1.0):
    return {"w": scale * W, "b": torch.ones(3), "step": 7}


def own(mesh, scale=1.0):
    return {"w": scale * W.chunk(2)[mesh["tp"].rank], "b": torch.ones(3), "step": 7}


def holds(path, scale=1.0):
    found = dist.load(path, {"w": W, "b": torch.ones(3), "step": 0}, {}, ONE, verify=True)
    return torch.equal(found["w"], scale * W) and found["step"] == 7


def started(given, path, specs, mesh):
    dist.save_start(given, path, specs, mesh).finish()


@pytest.fixture
def folder(tmp_path):
    run_ranks(GRID, lambda mesh: dist.save(own(mesh), tmp_path / "a", SPECS, mesh))
    return tmp_path / "a"


class Odd:
    """An object that no tree holds, and that no message can be made of."""


SAVES = {  # by its mistake, how a rank changes tree, path and specs
    "no path": lambda t, p, s: (t, 3, s),
    "a path in no folder": lambda t, p, s: (t, p / "no" / "b", s),
    "a path that is too long": lambda t, p, s: (t, p.with_name("x" * 300), s),
    "specs of another type": lambda t, p, s: (t, p, [("w", Spec())]),
    "a spec of another type": lambda t, p, s: (t, p, {"w": "tp"}),
    "a spec of no leaf": lambda t, p, s: (t, p, {**s, "no.such": Spec()}),
    "a spec of no axis": lambda t, p, s: (t, p, {"w": Spec("ep", 0)}),
    "a spec of a dimension that is missing": lambda t, p, s: (t, p, {"w": Spec("tp", 2)}),
    "a spec that shards a number": lambda t, p, s: (t, p, {**s, "step": Spec("tp", 0)}),
    "another spec": lambda t, p, s: (t, p, {"w": Spec("dp", 0)}),
    "no spec": lambda t, p, s: (t, p, {}),
    "a leaf that is an object": lambda t, p, s: ({**t, "b": Odd()}, p, s),
    "a leaf without values": lambda t, p, s: ({**t, "b": t["b"].to("meta")}, p, s),
    "a leaf of another shape": lambda t, p, s: ({**t, "b": torch.ones(4)}, p, s),
    "a leaf of another dtype": lambda t, p, s: ({**t, "b": t["b"].double()}, p, s),
    "a leaf of other values": lambda t, p, s: ({**t, "b": -t["b"]}, p, s),
    "a number of another value": lambda t, p, s: ({**t, "step": 8}, p, s),
    "a leaf that is sparse": lambda t, p, s: ({**t, "b": t["b"].to_sparse()}, p, s),
    "a leaf too many": lambda t, p, s: ({**t, "c": torch.ones(1)}, p, s),
    "a leaf too few": lambda t, p, s: ({"w": t["w"], "step": 7}, p, s),
    "two leaves of one path": lambda t, p, s: ({**t, "x.y": 1, "x": {"y": 2}}, p, s),
    "another folder": lambda t, p, s: (t, p.with_name("b"), s),
    "a folder in another": lambda t, p, s: (t, p.parent / "inner" / "a", s),
}
LOADS = {
    "no path": SAVES["no path"],
    "no checkpoint": lambda t, p, s: (t, p.parent / "inner", s),
    "another checkpoint": lambda t, p, s: (t, p.with_name("other"), s),
    "specs of another type": SAVES["specs of another type"],
    "a spec of no leaf": SAVES["a spec of no leaf"],
    "a spec of no axis": SAVES["a spec of no axis"],
    "no spec": lambda t, p, s: (t, p, {}),
    "a leaf that is an object": SAVES["a leaf that is an object"],
    "a leaf of another shape": lambda t, p, s: ({**t, "b": torch.ones(4)}, p, s),
    "a leaf of another dtype": SAVES["a leaf of another dtype"],
    "a leaf too many": SAVES["a leaf too many"],
    "a number for a leaf": lambda t, p, s: ({**t, "b": 3}, p, s),
    "two leaves of one path": SAVES["two leaves of one path"],
}


def heard_by_ranks(act, mistakes, folder, part):
    """Each rank's error, by the mistake and by the rank that makes it; a part of them."""

    def run(mesh):
        heard = {}
        for kind, rank in list(itertools.product(mistakes, range(mesh.size)))[part::PARTS]:
            given = own(mesh, 2.0), folder, SPECS
            given = mistakes[kind](*given) if mesh.rank == rank else given
            with pytest.raises((ValueError, TypeError, OSError)) as raised:
                act(*given, mesh)
            heard[kind, rank] = str(raised.value)
        return heard

    return run_ranks(GRID, run)


@pytest.mark.turns("part", "start")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("start", [False, True], ids=["save", "save_start"])
def test_a_mistake_on_one_rank_of_a_save_raises_on_all(folder, start, part):
    (folder.parent / "inner").mkdir()
    act = started if start else dist.save
    heard = heard_by_ranks(act, SAVES, folder, part)
    for kind, rank in heard[0]:
        said = [each[kind, rank] for each in heard]
        texts = {re.sub(r" \(on rank \d\)$", "", one) for one in said}
        assert len(texts) == 1 or (rank == 0 and "folder" in kind), said  # the others see that they have another folder than rank 0
        assert all(f"rank {rank}" in one or "ranks " in one for i, one in enumerate(said) if i != rank), said
        assert all(one.startswith("save") for one in said), said
    assert sorted(os.listdir(folder.parent)) == ["a", "inner"] and holds(folder)


@pytest.mark.turns("part")
@pytest.mark.parametrize("part", range(PARTS))
def test_a_mistake_on_one_rank_of_a_load_raises_on_all(folder, part):
    (folder.parent / "inner").mkdir()
    run_ranks(GRID, lambda mesh: dist.save(own(mesh, 3.0), folder.with_name("other"), SPECS, mesh))
    heard = heard_by_ranks(lambda t, p, s, mesh: dist.load(p, t, s, mesh), LOADS, folder, part)
    for kind, rank in heard[0]:
        said = [each[kind, rank] for each in heard]
        assert all(f"rank {rank}" in one or "rank 0 and" in one for i, one in enumerate(said) if i != rank), said
        assert all(one.startswith("load: ") for one in said), said


def test_a_broken_shard_of_one_rank_raises_on_all(folder):
    """The file of each rank in turn: cut, and of other bits."""
    for file in sorted(folder.glob("*.distcp")):
        whole = file.read_bytes()
        if not whole:
            continue
        for data in (whole[:-1], whole[:-700] + b"\0" * 700, whole + b"x"):
            file.write_bytes(data)

            def read(mesh, file=file):
                with pytest.raises(CheckpointError, match=f"^load: .*{file.name}"):
                    dist.load(folder, own(mesh), SPECS, mesh)

            run_ranks(GRID, read)
        file.write_bytes(whole)
    assert holds(folder)


def full_after(count):
    """A stream that has room for so many bytes."""

    def create(self, path, mode, left=count):
        @contextlib.contextmanager
        def opened():
            with open(path, mode) as stream:
                real, room = stream.write, [left]

                class Full:
                    def __getattr__(self, name):
                        return getattr(stream, name)

                    def write(self, data):
                        room[0] -= len(data)
                        if room[0] < 0:
                            raise OSError(28, "No space left on device")
                        return real(data)

                yield Full()

        return opened()

    return create


@pytest.mark.turns("room", "start", every=5)
@pytest.mark.parametrize("start", [False, True], ids=["save", "save_start"])
@pytest.mark.parametrize("room", [0, 1, 500, 1300, 1700])
def test_a_disk_that_is_full_raises_on_all_and_keeps_the_old(folder, room, start, monkeypatch):
    def write(mesh):
        with pytest.raises(CheckpointWriteError) as raised:
            (started if start else dist.save)(own(mesh, 2.0), folder, SPECS, mesh)
        return str(raised.value)

    with monkeypatch.context() as patch:
        patch.setattr(dcp.filesystem.FileSystem, "create_stream", full_after(room))
        heard = run_ranks(GRID, write)
    remedy = rf"^save: path must be one that can be written to \(free space there.*\), got '{folder}': "
    assert all(re.match(remedy, one) for one in heard) and sum("(on rank" in one for one in heard) < 4
    assert os.listdir(folder.parent) == ["a"] and holds(folder)


def save_with_room(folder, room):
    """A save by a process whose files may have so many bytes, as torch's writer in C++ meets it."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
    try:
        dist.save({"w": torch.ones(100_000), "b": torch.ones(3), "step": 7}, folder, {}, ONE)
    except CheckpointWriteError:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  what is printed has no room
        os._exit(3)


@pytest.mark.slow
def test_a_disk_that_is_full_in_a_process(folder):
    rooms = {f"room{n}": n for n in (0, 100, 1000, 70_000, 399_000, 400_500, 10_000_000)}
    done = codes({name: functools.partial(save_with_room, folder, room) for name, room in list(rooms.items())[:-1]}, folder.parent)
    assert set(done.values()) == {3} and holds(folder)
    assert {one.name for one in folder.parent.iterdir() if one.suffix not in (".out", ".err")} == {"a"}
    assert codes({"enough": functools.partial(save_with_room, folder, 10_000_000)}, folder.parent) == {"enough": 0}


def test_a_rank_on_another_file_system_is_noticed(folder, monkeypatch):
    """A rank whose file is not where rank 0 looks; here it is deleted before the checkpoint is put in place."""
    real = dcp.FileSystemWriter.finish

    def finish(self, metadata, results):
        for file in self.path.glob("__3_*"):
            file.unlink()
        real(self, metadata, results)

    tree = lambda mesh: {f"l{i}": torch.full((2,), float(mesh.rank)) for i in range(8)}  # noqa: E731
    specs = {f"l{i}": Spec("tp", 0, fsdp="dp") for i in range(8)}
    monkeypatch.setattr(dcp.FileSystemWriter, "finish", finish)
    with pytest.raises(CheckpointError, match=r"^save: .*__3_0.distcp must be a file of at least .*got no file"):
        run_ranks(GRID, lambda mesh: dist.save(tree(mesh), folder, specs, mesh))
    assert os.listdir(folder.parent) == ["a"] and holds(folder)


@pytest.mark.slow
def test_two_saves_to_one_path_are_kept_apart(folder):
    """The second is refused on all ranks until the first is finished or dropped; one to another path is not."""

    def write(mesh):
        first = dist.save_start(own(mesh, 2.0), folder, SPECS, mesh)
        for save in (dist.save, dist.save_start):
            with pytest.raises(CheckpointError, match=r"^save: path must be one that no other save writes to "):
                save(own(mesh, 3.0), folder, SPECS, mesh)
        dist.save(own(mesh, 4.0), folder.with_name("other"), SPECS, mesh)
        first.finish()
        dropped = dist.save_start(own(mesh, 5.0), folder.with_name("third"), SPECS, mesh)
        dropped.thread.join()
        del dropped
        gc.collect()
        dist.save(own(mesh, 6.0), folder.with_name("third"), SPECS, mesh)

    run_ranks(GRID, write)
    assert holds(folder, 2.0) and holds(folder.with_name("other"), 4.0) and holds(folder.with_name("third"), 6.0)
    assert sorted(os.listdir(folder.parent)) == ["a", "other", "third"]


@pytest.mark.turns("moment")
@pytest.mark.parametrize("moment", ["check_replaceable", "hidden", "rmtree"])
def test_a_save_that_begins_while_another_ends_is_kept_apart(folder, moment, monkeypatch):
    """Begun within each call of a function with which the first puts its folder in place: refused, or written whole."""
    begun, counted = [], 0
    module = shutil if moment == "rmtree" else checkpoint_files
    real = getattr(module, moment)

    def meanwhile(*args, **kwargs):
        nonlocal counted
        found = real(*args, **kwargs)
        counted += 1
        if ending:
            with monkeypatch.context() as patch:
                patch.setattr(module, moment, real)
                try:
                    begun.append(dist.save_start(tree(float(counted)), folder, {}, ONE))
                except CheckpointError as error:
                    assert "no other save" in str(error)
        return found

    ending = False
    first = dist.save_start(tree(2.0), folder, {}, ONE)
    monkeypatch.setattr(module, moment, meanwhile)
    ending = True
    first.finish()
    ending = False
    assert holds(folder, 2.0) and counted
    for one in begun:
        one.finish()
    assert len(begun) < 2 and os.listdir(folder.parent) == ["a"]


@pytest.mark.turns("read")
@pytest.mark.parametrize("read", ["load", "load_values"])
def test_a_checkpoint_that_is_replaced_while_it_is_read_is_refused(folder, read, monkeypatch):
    """Between any two files: by one of the same sizes, without checksums, and by none."""
    opened = Path.open
    act = {"load": lambda: dist.load(folder, own_like(), {}, ONE, verify=False), "load_values": lambda: dist.load_values(folder)}[
        read
    ]

    def own_like():
        return {"w": W, "b": torch.ones(3), "step": 0}

    def replaced():
        run_ranks(GRID, lambda mesh: dist.save(own(mesh, 2.0), folder, SPECS, mesh))

    for change in (replaced, lambda: shutil.rmtree(folder)):
        for number in range(2 if read == "load" else 1):
            seen = 0

            def meanwhile(self, *args, change=change, number=number, **kwargs):
                nonlocal seen
                if self.suffix == ".distcp" and args == ("rb",):
                    seen += 1
                    if seen == number + 1:
                        change()
                return opened(self, *args, **kwargs)

            with monkeypatch.context() as patch:
                patch.setattr(Path, "open", meanwhile)
                with pytest.raises((CheckpointError, FileNotFoundError), match=rf"^{read}: |No such file"):
                    act()
            replaced()
            act()


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_refused(tmp_path, monkeypatch):
    dist.save(tree(), tmp_path / "a", {}, ONE)
    read = checkpoint.read_tensors

    def meanwhile(*args):
        found = read(*args)
        shutil.rmtree(tmp_path / "a")
        return found

    monkeypatch.setattr(checkpoint, "read_tensors", meanwhile)
    said = r"/a must be left alone while it is read \(load it again\), got one that a save has replaced meanwhile$"
    with pytest.raises(CheckpointError, match=f"^load_values: .*{said}"):
        dist.load_values(tmp_path / "a")


def test_ranks_that_load_other_checkpoints_are_told_both(tmp_path):
    for name, scale in (("a", 1.0), ("b", 2.0)):
        dist.save({"w": scale * W, "more": torch.ones(int(scale))}, tmp_path / name, {}, ONE)

    def run(mesh):
        path = tmp_path / "ab"[mesh.rank]
        with pytest.raises(CheckpointError) as raised:
            dist.load(path, {"w": W}, {}, mesh)
        return str(raised.value)

    got = f"got {str(tmp_path / 'a')!r} on rank 0 and {str(tmp_path / 'b')!r} on rank 1"
    assert run_ranks({"dp": 2}, run) == [f"load: path must be the same checkpoint on all ranks, {got}"] * 2


def test_a_file_system_without_locks_keeps_no_saves_apart(tmp_path, monkeypatch):
    """No file there says that another save goes on, as a lock does elsewhere; one that is gone meanwhile says nothing."""
    path, locked = tmp_path / "a", checkpoint_files._is_locked
    saving = dist.save_start(tree(), path, {}, ONE)
    (claim,) = tmp_path.glob(".a.*.lock")
    assert locked(claim) and not locked(tmp_path / ".a.0.lock")
    with pytest.raises(CheckpointError, match="^save: path must be one that no other save writes to "):
        dist.save(tree(), path, {}, ONE)

    def flock(*args):
        raise OSError("no locks here")

    with monkeypatch.context() as changed:
        changed.setattr(checkpoint_files.fcntl, "flock", flock)
        assert not locked(claim)
        dist.save(tree(2.0), tmp_path / "b", {}, ONE)
    assert holds(tmp_path / "b", 2.0)
    saving.finish()
    assert holds(path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    def mkdir(self, *args, **options):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as changed:
        changed.setattr(Path, "mkdir", mkdir)
        for save in (dist.save, dist.save_start):
            with pytest.raises(CheckpointWriteError, match=r"^save: path must be one that can be written to .*Permission denied$"):
                save(tree(), tmp_path / "a", {}, ONE)
    assert not list(tmp_path.iterdir())


def test_values_of_a_checkpoint_that_is_replaced_meanwhile_are_refused(tmp_path, monkeypatch):
    """They are of the old one, and the caller would load tensors of the new one."""
    dist.save({"step": 7}, tmp_path / "a", {}, ONE)
    opened = Path.open

    def meanwhile(self, *args, **kwargs):
        found = opened(self, *args, **kwargs)
        if self.suffix == ".distcp" and args == ("rb",):
            monkeypatch.setattr(Path, "open", opened)
            dist.save({"step": 8}, tmp_path / "a", {}, ONE)
        return found

    monkeypatch.setattr(Path, "open", meanwhile)
    with pytest.raises(CheckpointError, match="^load_values: "):
        dist.load_values(tmp_path / "a")
    assert Path.open is opened and dist.load_values(tmp_path / "a") == {"step": 8}


def test_a_save_does_not_keep_a_process_alive(tmp_path):
    """A process that ends, as by an error, does not wait for its thread, whose folder is not in place anyhow."""
    saving = dist.save_start({"step": 7}, tmp_path / "a", {}, ONE)
    assert saving.thread.daemon
    saving.finish()


@pytest.mark.turns("mode")
@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755])
def test_the_folder_keeps_its_mode(folder, mode):
    folder.chmod(mode)
    dist.save(tree(2.0), folder, {}, ONE)
    assert folder.stat().st_mode & 0o777 == mode


def refused_while_held(folder):
    """A save beside one of another process, which then is killed."""
    ready, told = os.pipe()
    child = os.fork()
    if not child:
        saving = dist.save_start(tree(2.0), folder, {}, ONE)
        os.write(told, b"x")
        signal.pause()
        saving.finish()
    os.read(ready, 1)
    try:
        dist.save(tree(3.0), folder, {}, ONE)
    except CheckpointError as error:
        assert "no other save" in str(error)
    else:
        raise AssertionError("the second save went on")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert holds(folder)
    dist.save(tree(3.0), folder, {}, ONE)
    assert holds(folder, 3.0)


@pytest.mark.slow
def test_saves_of_two_processes_are_kept_apart(folder):
    assert codes({"held": functools.partial(refused_while_held, folder)}, folder.parent) == {"held": 0}
    assert {one.name for one in folder.parent.iterdir() if one.suffix not in (".out", ".err")} == {"a"}


def file_at(path):
    path.write_text("notes")


def folder_with(*names, links=()):
    def make(path):
        path.mkdir()
        for name in names:
            if name.endswith("/"):
                (path / name).mkdir()
            else:
                (path / name).write_text("notes")
        for name in links:
            (path / name).symlink_to("/etc/hostname")

    return make


def checkpoint_with(name):
    def make(path):
        dist.save(tree(), path, {}, ONE)
        (path / name).write_text("notes")

    return make


def through_link(make):
    def through(path):
        make(path.with_name("real"))
        path.symlink_to(path.with_name("real"))

    return through


KEPT = {
    "a file": file_at,
    "a folder with a file": folder_with("notes.txt"),
    "a folder with a hidden file": folder_with(".git"),
    "a folder with a folder": folder_with("inner/"),
    "a folder with shards and no index": folder_with("__0_0.distcp"),
    "a folder with a folder for an index": folder_with(".metadata/"),
    "a folder whose shards are folders": folder_with(".metadata", "__0_0.distcp/"),
    "a folder with a link": folder_with(".metadata", links=["__0_0.distcp"]),
    "a checkpoint with notes": checkpoint_with("notes.txt"),
    "a checkpoint with hidden notes": checkpoint_with(".notes"),
    "a link to a file": through_link(file_at),
    "a link to a folder with a file": through_link(folder_with("notes.txt")),
    "a pipe": os.mkfifo,
}
REPLACED = {
    "nothing": lambda path: None,
    "an empty folder": folder_with(),
    "a checkpoint": lambda path: dist.save(tree(), path, {}, ONE),
    "a checkpoint of torch's": lambda path: dcp.save({"x": torch.ones(2)}, checkpoint_id=path, no_dist=True),
    "a link to nothing": lambda path: path.symlink_to(path.with_name("real")),
    "a link to a checkpoint": through_link(lambda path: dist.save(tree(), path, {}, ONE)),
    "a broken checkpoint": folder_with(".metadata", "__0_0.distcp"),
}


def everything(folder):
    return sorted((one.relative_to(folder), one.lstat().st_mode, one.lstat().st_mtime_ns) for one in folder.rglob("*"))


@pytest.mark.turns("kind", every=4)
@pytest.mark.parametrize("kind", KEPT)
def test_what_is_no_checkpoint_is_not_replaced(kind, tmp_path):
    KEPT[kind](tmp_path / "a")
    before = everything(tmp_path)
    for save in (dist.save, dist.save_start):
        with pytest.raises(CheckpointError, match=r"^save: path must be new, an empty folder, or the folder of"):
            save(tree(), tmp_path / "a", {}, ONE)
        assert everything(tmp_path) == before


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.turns("kind", every=3)
@pytest.mark.parametrize("kind", REPLACED)
def test_a_checkpoint_or_nothing_is_replaced(kind, tmp_path):
    REPLACED[kind](tmp_path / "a")
    dist.save(tree(2.0), tmp_path / "a", {}, ONE)
    assert holds(tmp_path / "a", 2.0) and set(os.listdir(tmp_path)) <= {"a", "real"}
    assert (tmp_path / "a").is_symlink() == ("link" in kind)


@pytest.mark.turns("path", "kind", every=5)
@pytest.mark.parametrize("path", [".", "..", "../..", "inner/..", ""])
@pytest.mark.parametrize("kind", ["an empty folder", "a checkpoint"])
def test_the_folder_of_the_process_is_not_replaced(path, kind, tmp_path, monkeypatch):
    here = tmp_path / "a" / "b"
    here.parent.mkdir()
    REPLACED[kind](here)
    monkeypatch.chdir(here)
    before = everything(tmp_path)
    with pytest.raises((CheckpointError, FileNotFoundError), match="^save: path must be "):
        dist.save(tree(), path, {}, ONE)
    assert everything(tmp_path) == before


def test_notes_that_come_while_a_save_runs_are_kept(folder):
    saving = dist.save_start(tree(2.0), folder, {}, ONE)
    (folder / "notes.txt").write_text("notes")
    with pytest.raises(CheckpointError, match=r"^save: path must be new, .*with notes.txt"):
        saving.finish()
    assert os.listdir(folder.parent) == ["a"] and (folder / "notes.txt").read_text() == "notes"


@pytest.mark.turns("dtype", "sizes", every=6)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.bool])
@pytest.mark.parametrize("sizes", [{"dp": 2}, {"pp": 2}], ids=str)
def test_copies_that_differ_in_a_bit_are_seen(dtype, sizes, tmp_path):
    """A drawn bit of a drawn rank's copy, all signs, and two values in turn: along an axis, and between stages."""
    draw = python_random.Random(str(dtype))
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (9 * dtype.itemsize,), dtype=torch.uint8)
    copies = []
    for _ in range(12):
        other, bit = raw.clone(), 0 if dtype is torch.bool else draw.randrange(8)
        other[draw.randrange(len(raw))] ^= 1 << bit
        copies.append(other.view(dtype))
    if dtype in (torch.float64, torch.float32, torch.bfloat16, torch.complex64):
        w = torch.randn(9).to(dtype)
        signs = [torch.ones(9).index_fill(0, torch.tensor(there), -1.0) for there in ([0], [8], [3, 4], [1, 7])]
        raw, copies = w.view(torch.uint8), [-w, w.roll(1), *[(w * sign).to(dtype) for sign in signs], *copies]

    def write(mesh):
        for at, other in enumerate(copies):
            mine = other if mesh.rank == at % 2 else raw.view(dtype)
            with pytest.raises(CheckpointError, match="^save: w must be the same on ranks 0 and 1, or "):
                dist.save({"w": mine}, tmp_path / "a", {}, mesh)

    run_ranks(sizes, write)
    assert not os.listdir(tmp_path)
