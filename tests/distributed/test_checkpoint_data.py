"""Checkpoints with leaves that are not tensors, and checkpoints that go between `funcops.dist` and torch's DTensors."""

import os
import random as python_random
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_dist_checkpoint import ONE

from funcops import dist
from funcops.checkpoint import CODES
from funcops.distributed import Spec
from funcops.distributed.checkpoint_index import MARK
from funcops.engine.contract.digest import digest
from funcops.engine.errors import CheckpointError
from funcops.engine.trees import paths
from funcops.optim import AdamWConfig, adamw_init
from funcops.testing import run_ranks

VALUES = (7, -3, 2**70, 0.1, float("inf"), True, False, "", "step 1,000", "µ\n")


def drawn(draw):
    tree = {f"v{i}": draw.choice(VALUES) for i in range(6)}
    return {**tree, "inner": {"w": torch.randn(4, 3), "note": draw.choice(VALUES), "none": None}}


@pytest.mark.parametrize("seed", range(3))
def test_numbers_and_strings_are_saved_and_loaded_on_any_mesh(seed, tmp_path):
    tree, specs = drawn(python_random.Random(seed)), {"inner.w": Spec("tp", 0)}

    def read(mesh):
        own = dist.shard({"w": tree["inner"]["w"]}, {"w": Spec("tp", 0)}, mesh)["w"]
        like = {**dict.fromkeys(tree, 0), "inner": {"w": own.to("meta"), "note": "", "none": None}}
        found = dist.load(tmp_path / "a", like, specs, mesh)
        assert torch.equal(found["inner"].pop("w"), own)
        want = {**tree, "inner": {"note": tree["inner"]["note"], "none": None}}
        assert [(path, type(v), v) for path, v in paths(found).items()] == [(path, type(v), v) for path, v in paths(want).items()]

    def write(mesh):
        own = dist.shard({"w": tree["inner"]["w"]}, {"w": Spec("tp", 0)}, mesh)
        dist.save({**tree, "inner": {**tree["inner"], **own}}, tmp_path / "a", specs, mesh)

    run_ranks({"dp": 2, "tp": 2}, write)
    run_ranks({"dp": 1, "tp": 4}, read)
    read(ONE)


def test_values_that_differ_between_ranks_are_refused(tmp_path):
    def write(mesh):
        with pytest.raises(CheckpointError) as raised:
            dist.save({"step": mesh.rank // 2}, tmp_path / "a", {}, mesh)
        return str(raised.value)

    said = (
        f"save: step must be the same on ranks 0 and 2, or sharded by an axis in its spec, got other values (its spec is {Spec()})"
    )
    assert run_ranks({"dp": 2, "tp": 2}, write) == [said] * 4


def test_a_number_and_a_tensor_are_not_taken_for_each_other(tmp_path):
    dist.save({"a": 3, "b": torch.ones(2)}, tmp_path / "a", {}, ONE)
    for like, said in (
        ({"a": torch.ones(()), "b": torch.ones(2)}, r"a float32\[\]"),
        ({"a": 1, "b": 2}, "b, a number or a string"),
    ):
        with pytest.raises(CheckpointError, match=rf"must hold exactly the leaves of like, got\n  missing: {said}"):
            dist.load(tmp_path / "a", like, {}, ONE)
    with pytest.raises(ValueError, match=r"^save: the spec of a must be one that shards nothing \(the leaf is not a tensor\)"):
        dist.save({"a": 3}, tmp_path / "b", {"a": Spec("tp", 0)}, ONE)
    with pytest.raises(TypeError, match="a must be a plain tensor|a must be a tensor"):
        dist.save({"a": object()}, tmp_path / "b", {}, ONE)


def test_an_element_of_a_vector_and_a_leaf_do_not_share_a_path(tmp_path):
    state = adamw_init({"w": torch.ones(2)}, AdamWConfig())
    with pytest.raises(
        CheckpointError, match=r"^save: tree must be a tree with one leaf per path, got opt\.step\.w beside opt\.step, "
    ):
        dist.save({"opt": state, "opt.step.w": torch.ones(2)}, tmp_path / "a", {}, ONE)


def test_a_save_in_the_background_has_the_values_from_its_start(tmp_path, monkeypatch):
    """The old checkpoint stays until `finish`, and if a rank cannot write."""
    specs = {"w": Spec("tp", 0)}

    def write(mesh):
        own = {"w": torch.full((2, 3), float(mesh["tp"].rank)), "b": torch.ones(2), "step": 1}
        dist.save(own, tmp_path / "a", specs, mesh)
        saving = dist.save_start({**own, "b": 2 * own["b"], "step": 2}, tmp_path / "a", specs, mesh)
        own["w"].fill_(9.0)
        before = dist.load(tmp_path / "a", own, specs, mesh)["step"]
        saving.finish()
        return before, dist.load(tmp_path / "a", own, specs, mesh)

    for rank, (before, found) in enumerate(run_ranks({"dp": 2, "tp": 2}, write)):
        assert (before, found["step"], found["b"].tolist()) == (1, 2, [2, 2]) and bool((found["w"] == rank % 2).all())

    def full(self, plan, planner):
        raise OSError("no space is left")

    def fails(mesh):
        saving = dist.save_start({"w": torch.ones(2, 3)}, tmp_path / "a", specs, mesh)
        with pytest.raises(OSError, match="no space is left"):
            saving.finish()
        return dist.load(tmp_path / "a", {"w": torch.ones(2, 3), "b": torch.ones(2), "step": 0}, specs, mesh)["step"]

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", full)
    assert run_ranks({"dp": 2, "tp": 2}, fails) == [2] * 4 and [one.name for one in tmp_path.iterdir()] == ["a"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_and_writes_them(tmp_path):
    dist.save({"step": 1000, "w": torch.arange(3.0)}, tmp_path / "ours", {}, ONE)
    into = {"step": 0, "w": torch.zeros(3)}
    dcp.load(into, checkpoint_id=tmp_path / "ours", no_dist=True)
    assert into["step"] == 1000 and into["w"].tolist() == [0, 1, 2]
    dcp.save({"step": 7, "name": "run", "w": torch.ones(3)}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    found = dist.load(tmp_path / "theirs", {"step": 0, "name": "", "w": torch.zeros(3)}, {}, ONE)
    assert (found["step"], found["name"], found["w"].tolist()) == (7, "run", [1, 1, 1])


NAMES = [
    "",
    " ",
    "..",
    "../x",
    "/x",
    "a/b",
    "a\\b",
    "a:b",
    "CON",
    "a\0b",
    "a\nb",
    "*",
    "\ud800",
    "é",
    "x" * 5000,
    MARK.decode(),
    "{}" * 3,
]


@pytest.mark.turns("name", every=6)
@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_leaves_of_any_name_come_back(name, tmp_path):
    """On two ranks: a shard, a copy, and a number."""
    tensors, step = {name: torch.arange(4.0), "in": {name: {"x": torch.ones(2)}}}, {"step": {name: 3}}
    specs = {name: dist.Spec("tp", 0)} if not set("*?[") & set(name) and name else {}
    write = lambda mesh: dist.save({**dist.shard(tensors, specs, mesh), **step}, tmp_path / "a", specs, mesh)  # noqa: E731
    run_ranks({"tp": 2}, write)
    found = dist.load(tmp_path / "a", {**tensors, **step}, {}, ONE)
    assert (
        torch.equal(found[name], tensors[name])
        and torch.equal(found["in"][name]["x"], torch.ones(2))
        and found["step"] == {name: 3}
    )
    assert os.listdir(tmp_path) == ["a"] and sorted(os.listdir(tmp_path / "a"))[0] == ".metadata"


@pytest.mark.parametrize("sign", [1, -1])
def test_an_int_that_torch_cannot_read_is_not_written(sign, tmp_path):
    for bits in (1, 63, 64, 1000, 2039):
        value = sign * (2**bits - 1)
        dist.save({"n": value}, tmp_path / "a", {}, ONE)
        assert dist.load_values(tmp_path / "a") == {"n": value}
    for bits in (2040, 16_000, 100_000):
        with pytest.raises(CheckpointError, match="^save: n must be of at most 2039 bits, which torch reads .*, got "):
            dist.save({"n": sign * (2**bits - 1)}, tmp_path / "a", {}, ONE)
    assert dist.load_values(tmp_path / "a") == {"n": value}


QUANTISED = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}  # of which torch makes tensors no longer
DTYPES = sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)} - QUANTISED, key=str)


@pytest.mark.turns("dtype", "start", every=12)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("start", [False, True], ids=["save", "save_start"])
@pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:BComplex32")
def test_a_leaf_of_any_dtype_comes_back_or_is_refused_by_name(dtype, start, tmp_path):
    """In its bits, also one element of any stride."""
    t = torch.ones(48, dtype=torch.uint8).view(dtype)
    leaves = [t[:2], t.as_strided((1,), (2,)), t[:0]]
    tree = {"w": leaves}

    def save():
        saving = dist.save_start(tree, tmp_path / "a", {}, ONE) if start else dist.save(tree, tmp_path / "a", {}, ONE)
        if start:
            saving.finish()

    try:
        save()
    except CheckpointError as error:
        assert re.match(r"save: w\.0 must be of a dtype that torch writes \(view it as torch\.uint8, ", str(error))
        assert not list(tmp_path.iterdir()) and dtype not in CODES.values()
        return
    found = dist.load(tmp_path / "a", tree, {}, ONE)["w"]
    for one, t in zip(found, leaves, strict=True):
        assert one.dtype is t.dtype and one.shape == t.shape and digest(one) == digest(t)


@pytest.mark.parametrize(("letter", "size"), [("n", 1), ("é", 2), ("日", 3), ("😀", 4)], ids=ascii)
def test_a_folder_of_a_long_name_is_refused(letter, size, tmp_path):
    """The longest that has room for the hidden one beside it, and those after it."""
    for count in (232 // size, 232 // size + 1, 255 // size, 300):
        path = tmp_path / (letter * count)
        if count * size <= 232:
            dist.save({"n": 3}, path, {}, ONE)
            assert dist.load_values(path) == {"n": 3}
        else:
            said = rf"^save: path must be a folder whose name has at most 232 bytes, got {count * size}, '"
            with pytest.raises(ValueError, match=said):
                dist.save({"n": 3}, path, {}, ONE)
    assert len(list(tmp_path.iterdir())) == 1
