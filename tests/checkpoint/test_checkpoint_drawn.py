"""Drawn trees with drawn dtypes, layouts and names: either the saved tree loads bit for bit, or `save` raises by path and writes
nothing."""

import os
import resource
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from funcops import checkpoint
from funcops.checkpoint import CODES, CheckpointError, load, save
from funcops.engine.trees import leaf, leaves, paths, same_structure, tree

pytest.importorskip("safetensors")

LACKED = [torch.complex128, torch.complex32, torch.float8_e8m0fnu]
SHAPES = [(), (0,), (1,), (3,), (2, 3), (2, 0, 3), (2, 1, 2)]


@tree
class Node:
    weight: Tensor = leaf("[...]")
    bias: Tensor | None = leaf("[...]")


LAYOUTS = {
    "plain": lambda t: t,
    "transposed": lambda t: t.mT if t.dim() > 1 else t,
    "expanded": lambda t: t.expand(2, *t.shape),
    "strided": lambda t: torch.stack((t, t), -1)[..., 1],
    "part": lambda t: torch.cat((t.reshape(-1), t.reshape(-1)))[t.numel() :].reshape(t.shape),
    "conjugate": lambda t: t.conj() if t.is_complex() else t,
    "negative": lambda t: torch._neg_view(t) if t.itemsize > 1 and t.dtype.is_signed and t.dtype is not torch.bool else t,
    "wants gradient": lambda t: t.requires_grad_() if t.is_floating_point() and t.itemsize > 1 else t,
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
}
REFUSED = {
    "meta": lambda: torch.empty(2, device="meta"),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "number": lambda: 3,
    "fake": lambda: torch._subclasses.FakeTensorMode().from_tensor(torch.ones(2)),
}


@st.composite
def tensors(draw, dtypes=(*CODES.values(), *LACKED)):
    shape, dtype = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(dtypes))
    size = torch.Size(shape).numel() * dtype.itemsize
    if dtype is torch.bool:
        return torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size)), dtype=dtype).reshape(shape)
    data = bytearray(draw(st.binary(min_size=size, max_size=size)))  # NaNs with a payload among them
    t = (
        (torch.frombuffer(data, dtype=torch.uint8).clone() if size else torch.empty(0, dtype=torch.uint8))
        .view(dtype)
        .reshape(shape)
    )
    return LAYOUTS[draw(st.sampled_from(list(LAYOUTS)))](t) if dtype in CODES.values() and dtype.itemsize > 1 else t


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)  # what UTF-8 has, which `st.text()` looks for letter by letter
NAMES = TEXT | st.sampled_from(["__metadata__", "a", "b", "a.b", "", ".", "\ud800", "é", "x" * 5000]) | st.integers(0, 9)


def trees(leaf_of):
    return st.recursive(
        leaf_of | st.none(),
        lambda inner: (
            st.dictionaries(NAMES, inner, max_size=3)
            | st.lists(inner, max_size=3)
            | st.tuples(inner, inner)
            | st.builds(Node, inner, inner)
        ),
        max_leaves=6,
    )


def bits(t):
    plain = t.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return plain.flatten().view(torch.uint8) if t.numel() else torch.empty(0)


def same(a, b):
    assert same_structure(a, b)
    for x, y in zip(leaves(a), leaves(b), strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert x.dtype is y.dtype and x.shape == y.shape and torch.equal(bits(x), bits(y))


def served(value):
    """Whether nothing in the tree is a reason to refuse it."""
    found = paths(value)
    if len(found) != len(leaves(value)) or found.get("") is not None:
        return False
    writable = all(name.isprintable() and name.isascii() and name != "__metadata__" for name in found)
    return writable and all(t is None or t.dtype in CODES.values() for t in found.values())


def check(value, folder):
    path = folder / "f"
    before = {one.name for one in folder.iterdir()}
    try:
        save(value, path, metadata={"a": "b"} if len(leaves(value)) % 2 else None)
    except CheckpointError as error:
        assert not served(value), error
        assert str(error).isascii() or str(error).startswith("save: tree")
        assert {one.name for one in folder.iterdir()} == before
    else:
        same(value, load(path, value))
        assert {one.name for one in folder.iterdir()} == before | {"f"}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(value=trees(tensors()))
def test_drawn_trees(value, tmp_path_factory):
    check(value, tmp_path_factory.mktemp("drawn"))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(first=tensors(tuple(CODES.values())), names=st.lists(NAMES, min_size=2, max_size=4))
def test_drawn_names_of_shared_memory(first, names, tmp_path_factory):
    check(dict.fromkeys(names, first), tmp_path_factory.mktemp("shared"))


@pytest.mark.parametrize("dtype", [*CODES.values(), *LACKED], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_in_every_layout(dtype, layout, tmp_path):
    t = torch.arange(6).reshape(2, 3).to(torch.uint8).to(dtype) if dtype is not torch.float8_e8m0fnu else torch.ones(2, 3).to(dtype)
    try:
        t = LAYOUTS[layout](t)
    except (RuntimeError, NotImplementedError):
        return  # torch has no such tensor
    if dtype in CODES.values():
        return check({"a": t, "b": (t, None)}, tmp_path)
    with pytest.raises(CheckpointError, match=r"save: tree.b.0 must be of a dtype among float64, .*, got "):
        save({"a": None, "b": (t,)}, tmp_path / "f")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", REFUSED)
def test_a_tensor_without_values_raises(kind, tmp_path):
    with pytest.raises(CheckpointError, match=r"save: tree.a.1 must be "):
        save({"a": (torch.ones(2), REFUSED[kind]())}, tmp_path / "f")
    assert not list(tmp_path.iterdir())


def test_empty_trees_and_names(tmp_path):
    for value in (
        {},
        (),
        {"a": None},
        {"a": {}, "b": ()},
        {"": torch.ones(1)},
        {1: torch.ones(1), 2: None},
        {"a.b": torch.ones(1)},
    ):
        check(value, tmp_path)
    for value, match in (
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, r"save: tree must be a tree with one leaf per path, got .*: a\.b$"),
        ({"__metadata__": torch.ones(1)}, r"save: tree.__metadata__ must be another name"),
        ({"": torch.ones(1)}, "save: tree must be a tree whose leaves have names"),
        ({"a": torch._neg_view(torch.ones(1).to(torch.float8_e5m2))}, "save: tree.a must be a tensor that torch can copy"),
        ({"\ud800": torch.ones(1)}, "must be named by text that can be encoded"),
    ):
        with pytest.raises(CheckpointError, match=match):
            save(value, tmp_path / "f")
    name = "n" * 250  # with a suffix it would be too long
    save({"a": torch.ones(1)}, tmp_path / name)
    (tmp_path / "link").symlink_to(tmp_path / name)
    save({"a": torch.zeros(1)}, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and load(tmp_path / name, {"a": torch.ones(1)})["a"] == 0
    with pytest.raises(IsADirectoryError, match="save: path must be a file"):
        save({"a": torch.ones(1)}, tmp_path)


@pytest.mark.parametrize("moment", ["write", "replace", "full", "other"])
def test_an_interrupted_save_leaves_the_old_file(moment, tmp_path, monkeypatch):
    path, old = tmp_path / "f", {"a": torch.arange(50_000.0)}
    save(old, path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE) if sys.platform != "win32" else None

    def stopped(*args, **options):
        raise KeyboardInterrupt

    import safetensors.torch

    if moment == "write":
        monkeypatch.setattr(safetensors.torch, "save_file", stopped)
    elif moment == "replace":
        monkeypatch.setattr(os, "replace", stopped)
    elif moment == "other":  # a format that wrote something else than it was given
        real = safetensors.torch.save_file
        monkeypatch.setattr(safetensors.torch, "save_file", lambda entries, *rest, **options: real({}, *rest, **options))
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises((KeyboardInterrupt, OSError, CheckpointError)):
            save({"a": torch.zeros(50_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    monkeypatch.undo()
    same(old, load(path, old))
    assert [one.name for one in tmp_path.iterdir()] == ["f"] and checkpoint.read_metadata(path) == {}
