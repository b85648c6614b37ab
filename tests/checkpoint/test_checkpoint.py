"""Checkpoints: what is restored, what is refused, and that files are written whole or not at all."""

from __future__ import annotations

import builtins
import re

import pytest
import torch
from torch import Tensor

from funcops.checkpoint import CheckpointError, load, read_metadata, save
from funcops.engine.trees import leaf, paths, same_structure, tree
from funcops.optim import AdamWConfig, adamw_init

pytest.importorskip("safetensors")


@tree
class Layer:
    weight: Tensor = leaf("[O, I]")
    bias: Tensor | None = leaf("[O]")


def model():
    shared = torch.randn(4, 3)
    return {
        "embed": shared,
        "blocks": (Layer(torch.randn(3, 4).t(), None), Layer(torch.randn(2, 2).bfloat16(), torch.zeros(0))),
        "head": shared,
        "view": shared[1:],
        "part": torch.randn(10, 10)[2:4, 3:5],
        "counts": {"steps": torch.tensor(7), "flags": torch.tensor([True, False])},
        "grad": torch.ones(2, dtype=torch.float64, requires_grad=True),
    }


def same(a, b):
    assert same_structure(a, b)
    other = paths(b)
    for path, t in paths(a).items():
        assert other[path] is None if t is None else (torch.equal(t, other[path]) and t.dtype is other[path].dtype), path


def test_round_trip(tmp_path):
    params = model()
    save(params, tmp_path / "a.safetensors", metadata={"step": "10", "note": "a b"})
    back = load(tmp_path / "a.safetensors", params)
    same(params, back)
    assert not back["grad"].requires_grad
    assert back["embed"].untyped_storage().data_ptr() != back["head"].untyped_storage().data_ptr()
    assert read_metadata(tmp_path / "a.safetensors") == {"step": "10", "note": "a b"}
    back["embed"].add_(1)  # its own memory
    same(params, load(str(tmp_path / "a.safetensors"), params))
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_into_a_tree_on_meta_and_a_state(tmp_path):
    params = {"a": torch.randn(2, 3), "b": None}
    state = adamw_init(params, AdamWConfig())
    save((params, state), tmp_path / "s", metadata=None)
    with torch.device("meta"):
        like = {"a": torch.empty(2, 3), "b": None}
        like_state = adamw_init(like, AdamWConfig())
    same((params, state), load(tmp_path / "s", (like, like_state)))
    assert read_metadata(tmp_path / "s") == {}


def test_every_fault_is_listed_at_once(tmp_path):
    save({"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(4), "x": torch.ones(1), "n": torch.ones(1)}, tmp_path / "f")
    like = {"a": torch.ones(2), "b": torch.ones(3, 1), "c": torch.ones(4).bfloat16(), "m": torch.ones(5), "n": None}
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "f", like)
    assert str(caught.value) == (
        f"load: {tmp_path / 'f'} must hold the tree of like, got\n"
        "  missing: m float32[5]\n"
        "  extra: n; x\n"
        "  mis-shaped: b [3, 1], got [3]\n"
        "  mis-typed: c bfloat16, got float32"
    )


def test_many_faults_are_cut_with_their_count(tmp_path):
    save({"a": torch.ones(2)}, tmp_path / "f")
    for count, end in ((11, "p010 float32[1]"), (12, "p009 float32[1] and 2 more"), (300, "p009 float32[1] and 290 more")):
        with pytest.raises(CheckpointError) as caught:
            load(tmp_path / "f", {"a": torch.ones(2)} | {f"p{i:03}": torch.ones(1) for i in range(count)})
        assert str(caught.value).endswith(f"; {end}"), caught.value


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "f"
    save({"a": torch.ones(2)}, path)

    def broken(*args):
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", broken)
    with pytest.raises(OSError, match="disk full"):
        save({"a": torch.zeros(2)}, path)
    monkeypatch.undo()
    assert torch.equal(load(path, {"a": torch.empty(2)})["a"], torch.ones(2))
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_errors(tmp_path):
    path = tmp_path / "f"
    with pytest.raises(CheckpointError, match="save: tree.a must be a tensor or None, got 3"):
        save({"a": 3}, path)
    with pytest.raises(CheckpointError, match="one leaf per path, got keys with dots"):
        save({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, path)
    with pytest.raises(CheckpointError, match="leaves have names, got a bare tensor"):
        save(torch.ones(1), path)
    with pytest.raises(TypeError, match=r"save: metadata\['step'\] must be str, got 3"):
        save({"a": torch.ones(1)}, path, metadata={"step": 3})
    with pytest.raises(TypeError, match="save: a name in metadata must be str, got 3"):
        save({"a": torch.ones(1)}, path, metadata={3: "step"})
    for key, text in (("note", "\ud800"), ("\ud800", "note")):
        said = f"save: metadata[{key!r}] must be named by text that can be encoded, got '\\ud800'"
        with pytest.raises(CheckpointError, match=f"^{re.escape(said)}$"):
            save({"a": torch.ones(1)}, path, metadata={key: text})
    with pytest.raises(FileNotFoundError, match="load: path must be an existing file"):
        load(path, {})
    with pytest.raises(FileNotFoundError):
        save({"a": torch.ones(1)}, tmp_path / "nowhere" / "f")
    path.write_bytes(b"no tensors here")
    with pytest.raises(CheckpointError, match="must be a safetensors file, got"):
        load(path, {})
    with pytest.raises(CheckpointError, match="read_metadata: .* must be a safetensors file"):
        read_metadata(path)
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_without_safetensors(tmp_path, monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("safetensors"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match="pip install safetensors$"):
        save({"a": torch.ones(1)}, tmp_path / "f")


@pytest.mark.parametrize("shape", [(3, 2), (2, 4), (1, 3), (6,), (2, 3, 1), ()])
def test_a_leaf_of_another_shape_is_named(tmp_path, shape):
    save({"a": torch.ones(2, 3), "b": torch.ones(2)}, tmp_path / "t.safetensors")
    with pytest.raises(CheckpointError, match=rf"mis-shaped: a {re.escape(str(list(shape)))}, got \[2, 3\]"):
        load(tmp_path / "t.safetensors", {"a": torch.ones(shape), "b": torch.ones(2)})


def test_parts_of_one_tensor_come_back(tmp_path):
    """Also overlapping and empty parts, in either order."""
    t = torch.arange(20.0)
    for parts in ({"a": t, "b": t[5:5]}, {"a": t[5:5], "b": t}, {"a": t[:10], "b": t[10:], "c": t[3:12], "d": t[:0]}):
        save(parts, tmp_path / "file.safetensors")
        found = load(tmp_path / "file.safetensors", parts)
        assert all(found[name].equal(part) for name, part in parts.items())
