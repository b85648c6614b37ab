"""Checksums: the hash of a tensor sees each bit and its place, and a file of which any bit was flipped does not load as if it were
whole."""

import json
import os
import random as python_random
import threading

import pytest
import torch

from funcops import checkpoint, dist
from funcops.checkpoint import CHECKSUMS, CODES, CheckpointError, load, read_metadata, save
from funcops.engine.contract.digest import digest
from funcops.engine.errors import CheckpointWriteError
from funcops.engine.trees import paths, tree_map

safetensors = pytest.importorskip("safetensors.torch")

DTYPES = [*CODES.values(), torch.complex128, torch.complex32]
TREE = {"a": torch.arange(5.0), "b": torch.tensor([True, False]), "n": None, "c": torch.tensor(-(2**40))}
METADATA = {"step": "1000", "note": "µ"}


def drawn(dtype, count, seed=0):
    made = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return (made % 2 if dtype is torch.bool else made).view(dtype)


def flipped(t, bit):
    raw = t.clone().view(torch.uint8)
    raw[bit // 8] ^= 1 << bit % 8
    return raw.view(t.dtype)


@pytest.mark.turns("dtype", every=11)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_each_bit_and_its_place_change_the_hash(dtype):
    """Each bit of 5 elements flipped, the bytes moved, zeros of each length: the hashes all differ."""
    t = drawn(dtype, 5)
    others = [flipped(t, bit) for bit in range(8 * t.nbytes)] if dtype is not torch.bool else []
    others += [t.view(torch.uint8).roll(shift).view(dtype) for shift in range(1, t.nbytes) if dtype is not torch.bool]
    zeros = [torch.zeros(n, dtype=torch.uint8).view(torch.bool if dtype is torch.bool else torch.uint8) for n in range(40)]
    seen = {digest(one) for one in (t, *others, *zeros)}
    assert len(seen) == 1 + len(others) + len(zeros)


@pytest.mark.turns("dtype")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_flipped_signs_are_seen(dtype):
    """One sign of each element, all signs, each pair of neighbours: what a sum of the bits loses."""
    t = torch.randn(300, generator=torch.Generator().manual_seed(1)).to(dtype)
    others = [-t]
    for i in range(len(t)):
        for there in ([i], [i, (i + 1) % len(t)]):
            other = t.clone()
            other[there] *= -1
            others.append(other)
    assert len({digest(one) for one in (t, *others)}) == 602


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_layouts_and_addresses_do_not_change_the_hash(dtype):
    t = drawn(dtype, 24).reshape(4, 6)
    apart = torch.stack((t.view(torch.uint8), t.view(torch.uint8)), 1)[:, 0].view(dtype)
    moved = torch.empty(t.nbytes + 3, dtype=torch.uint8)[3:]
    moved.copy_(t.view(torch.uint8).reshape(-1))
    assert digest(t) == digest(apart) == digest(moved) == digest(t.t().contiguous().t()) == digest(t.reshape(-1))
    assert digest(t) != digest(t.t()) and digest(t[0, 0]) == digest(t[:1, :1]) and digest(t[:0]) == digest(torch.empty(0))
    one = t[:1, :1]
    for strides in ((3, 2), (1, 5), (0, 0), (2, 1)):
        assert digest(one) == digest(t.as_strided((1, 1), strides)) == digest(t.as_strided((1,), strides[:1])), strides
    if dtype.is_complex:
        assert digest(t.conj()) == digest(t.conj().resolve_conj()) != digest(t)


def test_pieces_do_not_change_the_hash():
    """A tensor longer than the piece that is hashed at once: words of each piece have a place of their own."""
    t = torch.zeros(3 * 2**15 + 1, dtype=torch.int64)
    found = {digest(t)}
    for at in (0, 2**15 - 1, 2**15, 2**16, 3 * 2**15):
        t[at] = 1
        found.add(digest(t))
        t[at] = 0
    assert len(found) == 6


@pytest.mark.turns("part", every=24)
@pytest.mark.parametrize("part", range(24))
def test_a_flipped_bit_does_not_load_as_the_saved_tree(part, tmp_path):
    """Each bit of a file in turn: the tree and its metadata are those saved, or the error names the file."""
    path = tmp_path / "f.safetensors"
    save(TREE, path, metadata=METADATA)
    whole, refused = path.read_bytes(), 0
    for bit in range(part, 8 * len(whole), 24):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            found, said = load(path, TREE), read_metadata(path)
        except CheckpointError as error:
            assert str(path) in str(error)
            refused += 1
        else:
            assert all(t is None or torch.equal(t, TREE[name]) for name, t in found.items()), bit
            assert METADATA.items() <= said.items(), bit
    assert refused > len(whole) / 8


def test_a_large_file_is_compared_on_request(tmp_path, monkeypatch):
    """A flip in the last value; also `verify=False` for a small file, and files without checksums."""
    path = tmp_path / "f.safetensors"
    save(TREE, path)
    data = bytearray(path.read_bytes())
    data[-2] ^= 4
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"^load: {path} must be as saved \(use an older checkpoint.*, got other bits in"):
        load(path, TREE)
    load(path, TREE, verify=False)
    assert checkpoint.SMALL == 256 * 2**20, "pages say so"
    monkeypatch.setattr(checkpoint, "SMALL", path.stat().st_size - 1)
    load(path, TREE)
    with pytest.raises(CheckpointError, match="other bits in"):
        load(path, TREE, verify=True)
    with pytest.raises(TypeError, match="^load: verify must be bool, got 'yes'"):
        load(path, TREE, verify="yes")
    given = {name: t for name, t in TREE.items() if t is not None}
    safetensors.save_file(given, path, metadata={"format": "pt"})
    assert torch.equal(load(path, TREE, verify=True)["a"], TREE["a"]) and read_metadata(path) == {"format": "pt"}


@pytest.mark.parametrize("sums", ["", "[", "[]", "3", "[" * 100_000, "{}", json.dumps({"": "0", "a": 3})])
def test_checksums_that_are_none_are_refused(sums, tmp_path):
    path = tmp_path / "f.safetensors"
    safetensors.save_file({"a": torch.ones(2)}, path, metadata={CHECKSUMS: sums})
    for read in (lambda: load(path, {"a": torch.ones(2)}), lambda: read_metadata(path)):
        with pytest.raises(CheckpointError, match="must be as saved"):
            read()


def test_what_save_may_not_replace_or_name(tmp_path):
    with pytest.raises(ValueError, match=f"^save: metadata must be of names that save does not write itself, got '{CHECKSUMS}'"):
        save(TREE, tmp_path / "a", metadata={CHECKSUMS: ""})
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileExistsError, match=r"^save: path must be a new or regular file, got .*pipe"):
        save(TREE, tmp_path / "pipe")
    with pytest.raises(IsADirectoryError):
        save(TREE, tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["pipe"]


def test_a_disk_that_is_full_is_an_error_of_both_kinds(tmp_path, monkeypatch):
    save(TREE, tmp_path / "a", metadata={"step": "1"})

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors, "save_file", full)
    with pytest.raises(
        CheckpointWriteError, match=r"^save: path must be one that can be written to \(free space there.*No space left"
    ):
        save({"a": torch.zeros(5)}, tmp_path / "a")
    assert issubclass(CheckpointWriteError, OSError) and read_metadata(tmp_path / "a") == {"step": "1"}
    assert len(os.listdir(tmp_path)) == 1


def test_saves_to_one_path_at_once_leave_one_of_them(tmp_path):
    """Eight threads: the file is always one that was written whole."""
    trees = [{"a": torch.full((1000,), float(i))} for i in range(8)]
    threads = [threading.Thread(target=save, args=(tree, tmp_path / "a")) for tree in trees]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    found = load(tmp_path / "a", trees[0])["a"]
    assert bool((found == found[0]).all()) and os.listdir(tmp_path) == ["a"]


def drawn_collision(draw):
    """A tree in which two leaves have one path, below drawn dicts: a key with a dot, or keys of two types."""
    name, inner = draw.choice("abc"), str(draw.randrange(3))
    tree = draw.choice(
        [
            {f"{name}.{inner}": 1, name: {inner: 2}},
            {f"{name}.{inner}": 1, name: [2, 2, 2]},
            {1: 1, "1": 2} if draw.random() < 0.5 else {True: 1, "True": 2},
            {f"{name}.x.{inner}": 1, f"{name}.x": {inner: 2}},
            {name: {f"x.{inner}": 1, "x": (2, 2, 2)}},
        ]
    )
    for _ in range(draw.randrange(3)):
        tree = draw.choice([{"k": tree}, [tree, 3], (3, tree)])
    return tree


@pytest.mark.turns("seed", "none", every=10)
@pytest.mark.parametrize("none", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_two_leaves_of_one_path_are_refused(seed, none, tmp_path):
    """Also if one of them is None."""
    tree = drawn_collision(python_random.Random(seed))
    with pytest.raises(
        ValueError, match=r"^paths: tree must be a tree with one leaf per path, got .* give two leaves the same path: "
    ):
        paths(tree)
    tree = tree_map(lambda n: None if none and n == 1 else torch.full((2,), float(n)), tree)
    alone = dist.Mesh.abstract({"dp": 1}, 0)
    with pytest.raises(CheckpointError, match="^save: tree must be a tree with one leaf per path"):
        save(tree, tmp_path / "f")
    with pytest.raises(CheckpointError, match="^save: tree must be a tree with one leaf per path"):
        dist.save(tree, tmp_path / "f", {}, alone)
    assert os.listdir(tmp_path) == []
    save({"z": torch.ones(1)}, tmp_path / "f")
    dist.save({"z": torch.ones(1)}, tmp_path / "g", {}, alone)
    with pytest.raises(CheckpointError, match="^load: like must be a tree with one leaf per path"):
        load(tmp_path / "f", tree)
    with pytest.raises(CheckpointError, match="^load: like must be a tree with one leaf per path"):
        dist.load(tmp_path / "g", tree, {}, alone)


def test_equal_trees_give_equal_files(tmp_path):
    """Whatever the names, and however many metadata there are, whose order a hash map with a random seed would draw."""
    for i, names in enumerate(["a b c d e f", 'ä \x7f " \\ \n ☃', " "]):
        tree = {f"w{name}": torch.arange(3.0) for name in "xy"}
        metadata = dict.fromkeys(names.split(" "), "é\u2028\t")
        files = [tmp_path / f"{i}-{j}.safetensors" for j in range(6)]
        for file in files:
            save(tree, file, metadata=metadata)
        assert len({file.read_bytes() for file in files}) == 1
        assert read_metadata(files[0]) == metadata and torch.equal(load(files[0], tree, verify=True)["wx"], tree["wx"])
