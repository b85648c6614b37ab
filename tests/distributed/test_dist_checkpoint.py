"""Checkpoints written on one mesh are read on another bit for bit, or raise."""

import dataclasses
import os
import pickle
import random as python_random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from drawn_leaves import MESHES, bits, drawn_leaf

from funcops import chain, dist, random
from funcops.distributed import Mesh, Spec
from funcops.engine.errors import CheckpointError
from funcops.engine.trees import elements, paths, tree_map, tree_map_tensors
from funcops.models.blocks import block_config
from funcops.optim import AdamWConfig, adamw_init, adamw_update
from funcops.testing import run_ranks

ONE = Mesh.abstract({"dp": 1, "cp": 1, "tp": 1, "pp": 1}, 0)
RULES = {"*.proj": "column", "*.out": "row", "*.up": "column", "*.down": "row"}
KEY = random.key(3)
BLOCK = block_config(16, 4, 24)


def empty(tree):
    """The same shapes, on the meta device."""
    return tree_map_tensors(lambda t: t.to("meta"), tree)


def same(got, want):
    for (path, a), b in zip(paths(got).items(), paths(want).values(), strict=True):
        assert (a is None) == (b is None), path
        assert a is None or (a.dtype is b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))), path


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [*(pytest.param(one, marks=pytest.mark.slow) for one in MESHES[:3]), MESHES[3]], ids=str)
def test_any_mesh_reads_files_of_any_other(sizes, tmp_path):
    """12 leaves of drawn sizes, dtypes, parts and axes, an empty one, one without dimensions and None; read on every mesh."""
    draw, axes = python_random.Random(str(sizes)), ("dp", "tp")
    meshes = [{name: 1 for name in ("pp", "dp", "cp", "tp")} | one for one in (*MESHES[:-1], {"dp": 4}, {})]
    drawn = {f"l{i}": drawn_leaf(draw, {name: 4 for name in axes}) for i in range(12)}
    tree = {path: leaf for path, (leaf, _) in drawn.items()}
    tree |= {"empty": torch.zeros(0, 3), "step": torch.tensor(7), "none": None}
    specs = {path: spec for path, (_, spec) in drawn.items()}

    def write(mesh):
        dist.save(dist.shard(tree, specs, mesh), tmp_path / "a", specs, mesh)

    def read(mesh):
        own = dist.shard(tree, specs, mesh)
        same(dist.load(tmp_path / "a", empty(own), specs, mesh), own)

    run_ranks(meshes[0] | sizes, write)
    for other in meshes:
        run_ranks(other, read)
    assert os.listdir(tmp_path) == ["a"]


def trained(mesh):
    """Params and AdamW's state after a step that is the same on every mesh, and their specs."""
    cfg = dist.parallel(BLOCK, RULES, mesh)
    specs = dist.specs_of(chain, cfg)
    params = chain.init(cfg, key=KEY)
    adamw = AdamWConfig()
    grads = tree_map(lambda p: None if p is None else p.sin(), params)
    params, state = adamw_update(params, grads, adamw_init(params, adamw), adamw)
    return {"params": params, "state": state}, {f"*.{path}": spec for path, spec in specs.items()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_run_goes_on_on_another_mesh_and_in_one_process(tmp_path):
    """tp 4 and one process load the params and state of dp 2 x tp 2; torch's own load reads them too, and ours reads torch's."""

    def write(mesh):
        tree, specs = trained(mesh)
        dist.save(tree, tmp_path / "ours", specs, mesh)

    def read(folder):
        def read(mesh):
            tree, specs = trained(mesh)
            same(dist.load(folder, empty(tree), specs, mesh), tree)

        return read

    run_ranks({"dp": 2, "tp": 2}, write)
    run_ranks({"dp": 1, "tp": 4}, read(tmp_path / "ours"))
    whole, _ = trained(ONE)
    same(dist.load(tmp_path / "ours", empty(whole), {}, ONE), whole)
    named = {path: t for path, t in paths(whole).items() if t is not None}
    steps = named.pop("state.step")  # each leaf's step, by its path
    named |= {f"state.step.{path}": t for path, t in zip(elements(whole)["state.step"], steps.unbind(), strict=True)}
    into = {path: torch.empty_like(t) for path, t in named.items()}
    dcp.load(into, checkpoint_id=tmp_path / "ours", no_dist=True)
    same(into, named)
    dcp.save(named, checkpoint_id=tmp_path / "theirs", no_dist=True)
    run_ranks({"dp": 1, "tp": 2}, read(tmp_path / "theirs"))


def test_stages_of_a_pipeline_write_their_own_leaves(tmp_path):
    """A leaf of two stages (a tied embedding) is written once."""
    leaves = {"0": torch.randn(4, 2), "1": torch.randn(2, 6), "tied": torch.randn(8)}
    specs = {"tied": Spec("tp", 0)}
    of_stage = lambda mesh: {path: leaves[path] for path in (str(mesh["pp"].rank), "tied")}  # noqa: E731

    def write(mesh):
        dist.save(dist.shard(of_stage(mesh), specs, mesh), tmp_path / "a", specs, mesh)

    def read(mesh):
        own = dist.shard(of_stage(mesh), specs, mesh)
        same(dist.load(tmp_path / "a", empty(own), specs, mesh), own)

    run_ranks({"pp": 2, "dp": 2, "tp": 2}, write)
    run_ranks({"pp": 2, "dp": 1, "tp": 4}, read)
    same(dist.load(tmp_path / "a", empty(leaves), {}, ONE), leaves)


def test_no_shard_goes_in_as_if_all_had_it(tmp_path):
    """Whichever leaf's spec is forgotten, every rank raises, and nothing is written."""

    def write(mesh):
        cfg = dist.parallel(BLOCK, RULES, mesh)
        params, specs, heard = chain.init(cfg, key=KEY), dist.specs_of(chain, cfg), {}
        for path in specs:
            with pytest.raises(CheckpointError) as raised:
                dist.save(params, tmp_path / "a", {**specs, path: Spec()}, mesh)
            heard[path] = str(raised.value)
        return heard

    for heard in run_ranks({"dp": 2, "tp": 2}, write):
        assert len(heard) == 6
        for path, said in heard.items():
            wanted = f"save: {path} must be the same on ranks 0 and 1, or sharded by an axis in its spec, got other values"
            assert said == f"{wanted} (its spec is {Spec()})"
    assert os.listdir(tmp_path) == []


def test_ranks_that_have_other_things_raise_on_all(tmp_path):
    trees = {
        "save: tree must be of the same leaves on ranks 0 and 2, got b on one of them": lambda r: (
            {"a": 1, "b": 1} if r == 2 else {"a": 1}
        ),
        "save: a must be of one shape and dtype, with one spec, on ranks 0 and 1, "
        "got float32[4] by Spec()"
        " and float32[1] by Spec()": lambda r: {"a": 4 if r != 1 else 1},
        "save: a must be a dense tensor with values, got float32[1] on meta (on rank 3)": lambda r: {"a": 1},
    }

    def write(mesh):
        heard = []
        for said, tree in trees.items():
            device = "meta" if "meta" in said and mesh.rank == 3 else "cpu"
            tree = {path: torch.ones(n, device=device) for path, n in tree(mesh.rank).items()}
            with pytest.raises(CheckpointError) as raised:
                dist.save(tree, tmp_path / "a", {}, mesh)
            heard.append(str(raised.value))
        return heard

    for rank, heard in enumerate(run_ranks({"dp": 2, "tp": 2}, write)):
        assert heard == [said.removesuffix(" (on rank 3)") if rank == 3 else said for said in trees]
    assert os.listdir(tmp_path) == []


def test_old_files_stay_if_writing_fails(tmp_path, monkeypatch):
    tree, specs = {"a": torch.arange(8.0)}, {"a": Spec("tp", 0)}

    def write(mesh, scale=1):
        dist.save(dist.shard({"a": scale * tree["a"]}, specs, mesh), tmp_path / "a", specs, mesh)

    def failing(mesh):
        with pytest.raises(OSError, match="no space is left"):
            write(mesh, 2)

    run_ranks({"tp": 2}, write)
    for name in ("write_data", "finish"):
        with monkeypatch.context() as patch:
            real = getattr(dcp.FileSystemWriter, name)

            def full(self, given, *rest, real=real, name=name):
                if name == "finish" or given.storage_data.prefix == "__1_":
                    raise OSError("no space is left")
                return real(self, given, *rest)

            patch.setattr(dcp.FileSystemWriter, name, full)
            run_ranks({"tp": 2}, failing)
        assert os.listdir(tmp_path) == ["a"]
        same(dist.load(tmp_path / "a", empty(tree), {}, ONE), tree)
    run_ranks({"tp": 2}, lambda mesh: write(mesh, 3))
    assert os.listdir(tmp_path) == ["a"]
    same(dist.load(tmp_path / "a", empty(tree), {}, ONE), {"a": 3 * tree["a"]})


def test_a_mismatch_raises_on_every_rank(tmp_path):
    tree, folder = {"w": torch.ones(4, 6), "b": torch.ones(4)}, tmp_path / "a"
    dist.save(tree, folder, {}, ONE)
    bad = {
        "extra: b": {"w": torch.ones(4, 6)},
        "missing: c float32[2]": {**tree, "c": torch.ones(2)},
        "mis-shaped: w [4, 8], got [4, 6]": {**tree, "w": torch.ones(4, 4)},
        "mis-typed: b bfloat16, got float32": {**tree, "b": torch.ones(4).bfloat16()},
    }

    def read(mesh):
        for said, like in bad.items():
            specs = {"w": Spec("tp", 1)} if "shaped" in said else {}
            with pytest.raises(CheckpointError) as raised:
                dist.load(folder, like, specs, mesh)
            assert str(raised.value).startswith(f"load: {folder} must hold exactly the leaves of like, got\n  {said}")
        with pytest.raises(FileNotFoundError, match=r"^load: path must be the folder of a checkpoint, got .*no such"):
            dist.load(tmp_path / "no such", tree, {}, mesh)

    run_ranks({"tp": 2}, read)
    with pytest.raises(FileNotFoundError, match=r"^save: path must be in an existing folder, got .*no such"):
        dist.save(tree, tmp_path / "no such" / "a", {}, ONE)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    chunks = metadata.state_dict_metadata["w"].chunks
    chunks[0] = dataclasses.replace(chunks[0], sizes=torch.Size((4, 5)))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"^load: w must be complete, with 24 values, got 20"):
        dist.load(folder, tree, {}, ONE)
