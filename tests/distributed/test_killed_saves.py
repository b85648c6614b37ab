"""Checkpoints that were killed, cut short, or written by stages that disagree: a load gives whole values, or says what is wrong."""

import functools
import gc
import math
import os
import signal
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from forked import codes

from funcops import dist
from funcops.distributed import Mesh, Spec
from funcops.engine.errors import CheckpointError, DonatedError
from funcops.engine.trees import tree_map
from funcops.testing import run_ranks

ONE = Mesh.abstract({"dp": 1}, 0)
OLD = {"w": torch.arange(6.0), "b": torch.ones(3)}
NEW = tree_map(lambda t: -t, OLD)
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}
MOST = 20  # a save changes files fewer times


def load(folder):
    return dist.load(folder, tree_map(torch.zeros_like, OLD), {}, ONE)


def is_tree(found, tree):
    return all(torch.equal(found[name], t) for name, t in tree.items())


def save_until(folder, number):
    """Save `NEW` over a checkpoint, and be killed before the `number`th change of a file."""
    seen = 0

    def hook(event, args):
        nonlocal seen
        writes = event in CHANGES or (event == "open" and any(one in str(args[1]) for one in "wax+"))
        seen += writes
        if writes and seen > number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    dist.save(NEW, folder, {}, ONE)


@pytest.mark.slow
def test_a_save_that_is_killed_leaves_the_old_or_the_new(tmp_path):
    """Killed before each change of a file in turn; the next save leaves nothing beside its target."""
    folders = {f"{number}": tmp_path / f"run{number}" / "step-[1]*" for number in range(MOST)}
    for folder in folders.values():
        folder.parent.mkdir()
        dist.save(OLD, folder, {}, ONE)
    ended = codes({name: functools.partial(save_until, folder, int(name)) for name, folder in folders.items()}, tmp_path)
    killed = [name for name, code in ended.items() if code]
    assert 6 < len(killed) < MOST and all(ended[name] == -signal.SIGKILL for name in killed)
    found = [load(folder) for folder in folders.values()]
    assert all(is_tree(one, OLD) or is_tree(one, NEW) for one in found)
    assert is_tree(found[0], OLD) and is_tree(found[-1], NEW)
    between = [folder for folder in folders.values() if not folder.exists()]
    assert len(between) == 1 and is_tree(load(between[0]), NEW)  # killed between the two renames
    for folder in folders.values():
        dist.save(OLD, folder, {}, ONE)
        assert os.listdir(folder.parent) == [folder.name] and is_tree(load(folder), OLD)


def interrupted_at(number, act):
    """Call a function, and interrupt it, as Ctrl-C does, before the `number`th line of the files of checkpoints; whether it was."""
    left = number

    def of_line(frame, event, arg):
        nonlocal left
        left -= event == "line"
        if left == 0 and event == "line":
            raise KeyboardInterrupt
        return of_line

    def of_call(frame, event, arg):
        return of_line if frame.f_code.co_filename.endswith("checkpoint_files.py") else None

    before = sys.gettrace()
    sys.settrace(of_call)
    try:
        act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


PARTS = 8


@pytest.mark.turns("part")
@pytest.mark.parametrize("part", range(PARTS))
def test_a_save_that_is_interrupted_leaves_the_old_or_the_new(part, tmp_path):
    """Before each line in turn that looks at folders, locks and renames; the next save leaves nothing beside its target."""
    folder, count = tmp_path / "a", 0
    dist.save(OLD, folder, {}, ONE)
    for number in range(part + 1, 1000, PARTS):
        if not interrupted_at(number, lambda: dist.save(NEW, folder, {}, ONE)):
            break
        count += 1
        found = load(folder)
        assert is_tree(found, OLD) or is_tree(found, NEW), number
        gc.collect()
        dist.save(OLD, folder, {}, ONE)
        assert os.listdir(tmp_path) == ["a"] and is_tree(load(folder), OLD), number
    assert count > 5


@pytest.mark.parametrize("at", ["prepare_local_plan", "write_data", "finish"])
def test_after_an_interrupt_the_path_is_free(at, tmp_path, monkeypatch):
    """While the interrupt is handled, and while its traceback lives on, as in a notebook."""
    folder = tmp_path / "a"
    dist.save(OLD, folder, {}, ONE)

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as changed:
        changed.setattr(dcp.FileSystemWriter, at, interrupt)
        with pytest.raises(KeyboardInterrupt) as caught:
            dist.save(NEW, folder, {}, ONE)
    assert os.listdir(tmp_path) == ["a"] and is_tree(load(folder), OLD)
    dist.save(NEW, folder, {}, ONE)
    assert caught.tb and os.listdir(tmp_path) == ["a"] and is_tree(load(folder), NEW)


@pytest.mark.parametrize("sizes", [{"dp": 1}, {"dp": 2, "tp": 2}], ids=str)
def test_a_save_that_is_never_finished_warns(sizes, tmp_path):
    """On each rank; the next save has the path to itself."""
    folder = tmp_path / "a"

    def begin(mesh):
        dist.save(OLD, folder, {}, mesh)
        saving = dist.save_start(NEW, folder, {}, mesh)
        saving.thread.join()

    with pytest.warns(RuntimeWarning, match=rf"^save_start: '{folder}' was never put in place: call finish\(\) of") as said:
        run_ranks(sizes, begin)
        gc.collect()
    assert len(said) == math.prod(sizes.values()) and is_tree(load(folder), OLD)
    dist.save(NEW, folder, {}, ONE)
    assert os.listdir(tmp_path) == ["a"] and is_tree(load(folder), NEW)


def test_a_save_is_finished_once(tmp_path, recwarn):
    saving = dist.save_start(OLD, tmp_path / "a", {}, ONE)
    saving.finish()
    with pytest.raises(DonatedError, match=rf"^save_start: finish\(\) must be called once, got a second call for '{tmp_path}/a'"):
        saving.finish()
    assert is_tree(load(tmp_path / "a"), OLD)
    del saving
    gc.collect()
    assert not recwarn.list


def test_a_rename_that_fails_puts_the_old_checkpoint_back(tmp_path, monkeypatch):
    dist.save(OLD, tmp_path / "a", {}, ONE)
    rename = os.replace

    def fails(source, target):
        if str(source).endswith(".part"):
            raise OSError("no space left")
        rename(source, target)

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="no space left"):
        dist.save(NEW, tmp_path / "a", {}, ONE)
    assert os.listdir(tmp_path) == ["a"] and is_tree(load(tmp_path / "a"), OLD)


@pytest.mark.parametrize("part", [0.0, 0.5, 1.0], ids=["empty", "half", "without its last byte"])
def test_a_file_that_is_cut_short_is_named(tmp_path, part):
    """Each file of a checkpoint in turn, and each removed."""
    folder = tmp_path / "a"
    run_ranks({"tp": 2}, lambda mesh: dist.save(dist.shard(OLD, {"w": Spec("tp", 0)}, mesh), folder, {"w": Spec("tp", 0)}, mesh))
    files = [file for file in folder.iterdir() if file.stat().st_size]
    assert len(files) == 3
    for file in files:
        whole = file.read_bytes()
        file.write_bytes(whole[: int(part * (len(whole) - 1))])
        with pytest.raises(CheckpointError, match=f"^load: .*{file.name} must be a (whole index|file of at least)"):
            load(folder)
        file.unlink()
        with pytest.raises((CheckpointError, FileNotFoundError), match=r"^load: .*(got no file|folder of a checkpoint)"):
            load(folder)
        file.write_bytes(whole)
    assert is_tree(load(folder), OLD)


@pytest.mark.turns("seed", every=2)
@pytest.mark.parametrize("seed", range(6))
def test_stages_agree_on_a_leaf_that_several_have(tmp_path, seed):
    """Leaves of drawn stages of three, one leaf sharded over another axis: whichever stage has another value, all raise."""
    draw = torch.Generator().manual_seed(seed)
    of = {name: torch.rand(3, generator=draw) < 0.6 for name in "abcd"}
    shared = [name for name, there in of.items() if there.sum() > 1]

    def write(odd, mesh):
        stage, leaves = mesh["pp"].rank, {}
        for name, there in of.items():
            if there[stage]:
                last = stage == int(there.nonzero().max())
                leaves[name] = torch.full((4,), 2.0 if last and name == odd else 1.0)
        specs = {"a": Spec("tp", 0)} if "a" in leaves else {}
        dist.save(dist.shard(leaves, specs, mesh), tmp_path / "a", specs, mesh)

    run_ranks({"pp": 3, "tp": 2}, functools.partial(write, None))
    for odd in shared:
        wanted = rf"^save: {odd} must be the same on ranks \d and \d, or of another path on each stage of pp, got other values"
        with pytest.raises(CheckpointError, match=wanted):
            run_ranks({"pp": 3, "tp": 2}, functools.partial(write, odd))
    assert shared
