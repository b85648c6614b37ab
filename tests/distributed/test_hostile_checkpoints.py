"""Checkpoints that a stranger made: nothing in them runs, nothing outside of the folder is read, and what is not a checkpoint is
refused by name."""

import copyreg
import io
import itertools
import os
import pickle
import random as python_random
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from funcops import dist
from funcops.distributed import Mesh
from funcops.engine.errors import CheckpointError
from funcops.testing import run_ranks

ONE = Mesh.abstract({"dp": 1}, 0)
TREE = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3).bfloat16(), "step": 7, "note": "x"}
LIKE = {"w": torch.zeros(2, 3), "b": torch.zeros(3).bfloat16(), "step": 0, "note": ""}
ran = []


def attack(*args):
    ran.append(args)


class Attack:
    def __new__(cls, *args, **kwargs):
        attack("new")
        return super().__new__(cls)

    def __init__(self, *args):
        attack("init")

    def __setstate__(self, state):
        attack("setstate")


class Reduced:
    def __reduce__(self):
        return attack, ("reduced",)


def text(value):
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def named(name, module=__name__):
    return f"c{module}\n{name}\n".encode()


def by_two_texts(name, module=__name__):
    return text(module) + text(name) + b"\x93"


POLLUTION = b"N}" + text("state_dict_metadata") + b"K\x03s\x86b"  # the state of a class: attributes to be set
PICKLES = {  # each pushes a value, on the way to which unpickling runs code
    "reduce": named("attack") + b")R",
    "reduce by two texts": by_two_texts("attack") + b")R",
    "os.system": named("system", "os") + text("touch ran") + b"\x85R",
    "eval": named("eval", "builtins") + text("attack()") + b"\x85R",
    "getattr": named("getattr", "builtins") + text("x") + text("upper") + b"\x86R",
    "an attribute of torch's module": by_two_texts("os.system", Metadata.__module__) + text("touch ran") + b"\x85R",
    "a function of torch's": named("set_default_dtype", "torch") + named("float64", "torch") + b"\x85R",
    "torch.load": named("load", "torch") + text("x") + b"\x85R",
    "global": named("attack"),
    "a module that runs code": named("s", "this"),
    "inst": f"(i{__name__}\nattack\n".encode(),
    "obj": b"(" + named("Attack") + b"o",
    "newobj": named("Attack") + b")\x81",
    "newobj with keywords": named("Attack") + b")}\x92",
    "build": named("Attack") + b")\x81}b",
    "build of torch's class": named("Metadata", Metadata.__module__) + POLLUTION,
    "build of an enum": named("_MEM_FORMAT_ENCODING", Metadata.__module__) + POLLUTION,
    "extension of one byte": b"\x82\x07)R",
    "extension of two bytes": b"\x83\x07\x00)R",
    "extension of four bytes": b"\x84\x07\x00\x00\x00)R",
    "persistent id": b"Pattack\n",
    "persistent id of a value": text("attack") + b"Q",
    "buffer": b"\x97",
}
PLACES = {
    "version": lambda m: setattr(m, "version", "PLACE"),
    "planner_data": lambda m: setattr(m, "planner_data", {"w": "PLACE"}),
    "storage_data": lambda m: setattr(m, "storage_data", "PLACE"),
    "a leaf": lambda m: m.state_dict_metadata.update(w="PLACE"),
    "a name": lambda m: m.state_dict_metadata.update({"PLACE": m.state_dict_metadata.pop("w")}),
    "a size": lambda m: setattr(m.state_dict_metadata["w"], "size", "PLACE"),
    "a dtype": lambda m: setattr(m.state_dict_metadata["w"].properties, "dtype", "PLACE"),
    "chunks": lambda m: setattr(m.state_dict_metadata["w"], "chunks", "PLACE"),
    "offsets": lambda m: setattr(m.state_dict_metadata["w"].chunks[0], "offsets", "PLACE"),
    "sizes": lambda m: setattr(m.state_dict_metadata["w"].chunks[0], "sizes", "PLACE"),
    "a file": lambda m: setattr(next(iter(m.storage_data.values())), "relative_path", "PLACE"),
    "a start": lambda m: setattr(next(iter(m.storage_data.values())), "offset", "PLACE"),
    "a length": lambda m: setattr(next(iter(m.storage_data.values())), "length", "PLACE"),
    "a form": lambda m: setattr(next(iter(m.storage_data.values())), "transform_descriptors", "PLACE"),
}
UNREAD = ("version", "planner_data")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dist.save(TREE, tmp_path / "a", {}, ONE)
    ran.clear()
    return tmp_path / "a"


def metadata_of(folder):
    return pickle.loads((folder / ".metadata").read_bytes())


def with_at(whole, place, pushed):
    """An index, in a form without lengths of frames, with a pickled value at a place."""
    metadata = pickle.loads(whole)
    PLACES[place](metadata)
    data = pickle.dumps(metadata, protocol=2)
    assert data.count(text("PLACE")) == 1
    return data.replace(text("PLACE"), pushed)


def loads_or_raises(folder):
    """Whether each reader raises `CheckpointError`; otherwise it must read what was saved."""
    assert dist.is_saved(folder)
    raised = []
    for read in (lambda: dist.load(folder, LIKE, {}, ONE), lambda: dist.load_values(folder)):
        try:
            found = read()
        except CheckpointError as error:
            raised.append(str(error))
        else:
            same(found)
    assert len(raised) != 1 or "must hold exactly" in raised[0] or "w" in raised[0]
    return bool(raised)


def same(found):
    for name, value in found.items():
        assert torch.equal(value, TREE[name]) if isinstance(value, torch.Tensor) else value == TREE[name], name
    assert {"step", "note"} <= found.keys()


@pytest.mark.turns("part", "cached")
@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize("cached", [True, False], ids=["cached extensions", ""])
def test_no_pickle_runs_code(folder, part, cached):
    """Each way in which a pickle can run code, at each place of an index, and as a whole index; a part is each way at three."""
    whole = (folder / ".metadata").read_bytes()
    before = {name: vars(Metadata).get(name) for name in ("state_dict_metadata", "__setstate__")}
    copyreg.add_extension(__name__, "attack", 7)
    try:
        if cached:
            pickle.loads(b"\x82\x07.")  # after this `pickle` does not ask for what it stands for
        for kind, place in itertools.product(PICKLES, [*PLACES, "all"][part::5]):
            data = b"\x80\x04" + PICKLES[kind] + b"." if place == "all" else with_at(whole, place, PICKLES[kind])
            (folder / ".metadata").write_bytes(data)
            refused = loads_or_raises(folder)
            assert refused or (kind.startswith("build of") and place in UNREAD), (kind, place)
            assert not ran and not os.path.exists("ran") and torch.get_default_dtype() is torch.float32, (kind, place)
            assert {name: vars(Metadata).get(name) for name in before} == before, (kind, place)
    finally:
        copyreg.remove_extension(__name__, "attack", 7)


VALUES = (3, -1, 2**70, True, 1.5, "x", b"x", None, [], [3], (), (-1, 2), (2**40, 2**40), ("a", "b"), {}, {"w": 3}, [[]] * 3)


@pytest.mark.turns("part")
@pytest.mark.parametrize("part", range(4))
def test_a_field_of_another_kind_is_refused(folder, part):
    """Each place with values of other kinds: an error by the index's name, or what was saved if nothing reads the field."""
    whole = (folder / ".metadata").read_bytes()
    for place, value in list(itertools.product(PLACES, VALUES))[part::4]:
        data = with_at(whole, place, pickle.dumps(value, protocol=2)[2:-1])
        (folder / ".metadata").write_bytes(data)
        refused = loads_or_raises(folder)
        same_as = (place, value) in (("a form", None), ("a form", []), ("a form", ()), ("a form", {}))
        assert refused or place in UNREAD or same_as or place == "a start", (place, value)


@pytest.mark.turns("depth")
@pytest.mark.parametrize("depth", [1_000, 200_000])
def test_deep_and_endless_pickles_are_refused(folder, depth):
    for data in (b"\x80\x04" + b"]" * depth + b"a" * (depth - 1) + b".", b"(" * depth, b"\x80\x04" + b"\x8d" + b"\xff" * 8, b""):
        (folder / ".metadata").write_bytes(data)
        with pytest.raises(CheckpointError, match=r"^load: .*\.metadata must be a whole index"):
            dist.load(folder, LIKE, {}, ONE)


OUTSIDE = (
    "../secret",
    "../../etc/passwd",
    "a/../../secret",
    "sub/secret",
    "./secret",
    "",
    ".",
    "..",
    "..\\secret",
    "C:secret",
    "x\0",
)


@pytest.mark.turns("name", every=6)
@pytest.mark.parametrize("name", [*OUTSIDE, "ABSOLUTE"])
def test_files_outside_of_the_folder_are_not_read(folder, name):
    """Also if the file there has just what the index says."""
    secret = folder.parent / "secret"
    (folder / "__0_0.distcp").rename(secret)
    metadata = metadata_of(folder)
    for place in metadata.storage_data.values():
        place.relative_path = str(secret) if name == "ABSOLUTE" else name
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"^load: .*\.metadata must be .* which is not the name of a file in the folder"):
        dist.load(folder, LIKE, {}, ONE)
    with pytest.raises(CheckpointError, match="which is not the name of a file in the folder"):
        dist.load_values(folder)


@pytest.mark.turns("kind", every=2)
@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "folder"])
def test_a_link_or_a_pipe_is_no_file_of_the_folder(folder, kind):
    file = folder / "__0_0.distcp"
    file.rename(folder.parent / "secret")
    if "link" in kind:
        file.symlink_to(folder.parent / ("secret" if kind == "link" else "none"))
    elif kind == "pipe":
        os.mkfifo(file)  # which would wait for a writer
    else:
        file.mkdir()
    wanted = rf"^load: {file} must be a file of " + (r".*got a link to " if "link" in kind else r".*got no file")
    for read in (lambda: dist.load(folder, LIKE, {}, ONE), lambda: dist.load_values(folder)):
        with pytest.raises(CheckpointError, match=wanted):
            read()


@pytest.mark.parametrize("to", ["../secret", "ABSOLUTE", "copy"])
def test_an_index_that_is_a_link_is_not_followed(folder, to):
    index, secret = folder / ".metadata", folder / to if to == "copy" else folder.parent / "secret"
    index.rename(secret)
    index.symlink_to(secret if to == "ABSOLUTE" else to)
    for read in (lambda: dist.load(folder, LIKE, {}, ONE), lambda: dist.load_values(folder)):
        with pytest.raises(CheckpointError, match=rf"^load: {index} must be a file of the folder .*, got a link to "):
            read()


def written(value):
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


W = TREE["w"]
SHARDS = {
    "a wider dtype": W.double(),
    "a narrower dtype": W.half(),
    "integers": W.long(),
    "more rows": torch.zeros(3, 3),
    "more columns": torch.zeros(2, 4),
    "fewer rows": W[:1].clone(),
    "turned": W.t().contiguous(),
    "flat": W.reshape(-1),
    "more dimensions": W[None],
    "no dimensions": torch.tensor(1.0),
    "on meta": W.to("meta"),
    "sparse": W.to_sparse(),
    "a parameter": torch.nn.Parameter(W),
    "a list": [1.0, 2.0],
    "a dict": {"w": W},
    "a number": 3,
    "none": None,
    "an object": Reduced(),
    "an object in a list": [W, Reduced()],
}
BYTES = {
    "no zip": b"x" * 100,
    "nothing": b"",
    "a pickle": pickle.dumps(Reduced()),
    "a pickle of an old form": pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + pickle.dumps(Reduced(), 2) * 3,
    "half": written(W)[: len(written(W)) // 2],
}


@pytest.mark.turns("leaf", "kind", every=8)
@pytest.mark.parametrize("leaf", ["w", "step"])
@pytest.mark.parametrize("kind", [*SHARDS, *BYTES])
def test_a_shard_that_holds_something_else_is_refused(folder, leaf, kind):
    """An index that names it, without checksums, as another writer's: never narrowed, cast, or run."""
    if leaf == "step" and kind == "a number":
        return
    data = BYTES[kind] if kind in BYTES else written(SHARDS[kind])
    metadata = metadata_of(folder)
    for index, place in metadata.storage_data.items():
        if index.fqn == leaf:
            place.relative_path, place.offset, place.length = "odd.distcp", 0, len(data)
    (folder / "odd.distcp").write_bytes(data)
    others = [place for place in metadata.storage_data.values() if place.relative_path != "odd.distcp"]
    os.truncate(folder / "__0_0.distcp", max(place.offset + place.length for place in others))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=rf"^load: {leaf} in {re.escape(str(folder))}/odd.distcp must be "):
        dist.load(folder, LIKE, {}, ONE)
    assert not ran


def test_a_file_that_is_too_long_is_refused(folder):
    with (folder / "__0_0.distcp").open("ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match=r"^load: .*__0_0.distcp must be a file of \d+ bytes .*, got \d+ bytes"):
        dist.load(folder, LIKE, {}, ONE)


@pytest.mark.turns("seed", every=10)
@pytest.mark.parametrize("seed", range(10))
def test_chunks_that_overlap_do_not_stand_for_others(tmp_path, seed):
    """The chunks have as many values as the leaf, but two have the same place, and another place has none."""
    draw = python_random.Random(seed)
    specs = {"w": dist.Spec("tp", draw.randrange(2))}
    tree = {"w": torch.arange(16.0).reshape(4, 4)}
    run_ranks({"tp": 4}, lambda mesh: dist.save(dist.shard(tree, specs, mesh), tmp_path / "a", specs, mesh))
    metadata = metadata_of(tmp_path / "a")
    one, other = draw.sample(range(4), 2)
    chunks = metadata.state_dict_metadata["w"].chunks
    chunks[one] = chunks[other]
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="^load: w must be in chunks without a common value"):
        dist.load(tmp_path / "a", tree, {}, ONE)


@pytest.mark.turns("seed", every=8)
@pytest.mark.parametrize("seed", range(8))
def test_a_flipped_bit_does_not_load_as_what_was_saved(folder, seed):
    """A drawn bit of any file, the index among them: an error that names the folder, or the values that were saved."""
    draw, refused = python_random.Random(seed), 0
    for file in sorted(folder.iterdir()):
        whole = file.read_bytes()
        for _ in range(60):
            data, bit = bytearray(whole), draw.randrange(8 * len(whole))
            data[bit // 8] ^= 1 << bit % 8
            file.write_bytes(data)
            try:
                same(dist.load(folder, LIKE, {}, ONE))
            except CheckpointError as error:
                assert str(folder) in str(error)
                refused += 1
        file.write_bytes(whole)
    assert refused > 50


@pytest.mark.turns("name", every=2)
@pytest.mark.parametrize("name", ["w", "b", "step", "note"])
def test_a_large_file_is_compared_on_request(folder, name, monkeypatch):
    """Another value of each leaf, in a file that torch reads without an error."""
    metadata = metadata_of(folder)
    (index, place) = next((index, place) for index, place in metadata.storage_data.items() if index.fqn == name)
    other = written(TREE[name] + 1 if name != "note" else "y")
    assert len(other) == place.length
    data = bytearray((folder / place.relative_path).read_bytes())
    data[place.offset : place.offset + place.length] = other
    (folder / place.relative_path).write_bytes(data)
    wanted = rf"^load: {name} in .*distcp must be as saved \(use an older checkpoint, or copy .*\), got other bits"
    with pytest.raises(CheckpointError, match=wanted):
        dist.load(folder, LIKE, {}, ONE)
    dist.load(folder, LIKE, {}, ONE, verify=False)
    monkeypatch.setattr("funcops.distributed.checkpoint_shards.SMALL", 100)
    dist.load(folder, LIKE, {}, ONE)
    with pytest.raises(CheckpointError, match=wanted):
        dist.load(folder, LIKE, {}, ONE, verify=True)
    with pytest.raises(TypeError, match="^load: verify must be bool, got 1"):
        dist.load(folder, LIKE, {}, ONE, verify=1)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing checkpoint")
def test_torch_may_write_over_it(folder):
    """Its index has no checksums: the old ones are gone."""
    other = {**TREE, "w": 2 * W}
    dcp.save(dict(other), checkpoint_id=folder, no_dist=True)
    found = dist.load(folder, LIKE, {}, ONE, verify=True)
    assert torch.equal(found["w"], 2 * W)
    dist.save(TREE, folder, {}, ONE)
    same(dist.load(folder, LIKE, {}, ONE))
    assert os.listdir(folder.parent) == ["a"]
