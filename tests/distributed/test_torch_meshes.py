"""Meshes of torch's own groups, and checkpoints that go between `funcops.dist` and DTensors, on four processes."""

import functools
from datetime import timedelta

import pytest
import torch
import torch.distributed as torch_dist
import torch.distributed.checkpoint as dcp
from forked import codes

from funcops import LinearConfig, dist, linear, random
from funcops.distributed import Mesh, comm
from funcops.distributed.mesh import _world_timeout


def started(folder, number, count=4):
    torch_dist.init_process_group("gloo", f"file://{folder / 'store'}", rank=number, world_size=count)


def summed(mesh, name):
    return comm.sum_over(torch.tensor([10.0 ** torch_dist.get_rank()]), mesh[name]).item()


def of_torch(folder, number):
    """A DeviceMesh of all processes, and of a part; groups by name; their timeouts."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    started(folder, number)
    whole = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
    mesh = Mesh.of(whole)
    assert mesh.sizes == {"dp": 2, "cp": 1, "tp": 2} and mesh.rank == number and mesh.device == "cpu"
    assert summed(mesh, "tp") == (11.0 if number < 2 else 1100.0) and summed(mesh, "dp") == (101.0, 1010.0)[number % 2]
    part = Mesh.of(whole["tp"], timeout=timedelta(seconds=9))
    assert part.sizes == {"tp": 2} and part["tp"] == mesh["tp"]
    assert whole.get_group("tp")._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=9)
    low, high = torch_dist.new_group([0, 1]), torch_dist.new_group([2, 3])
    own = low if number < 2 else high
    named = Mesh.of({"rows": own}, "cpu")
    assert named["rows"].rank == number % 2 and summed(named, "rows") == (11.0 if number < 2 else 1100.0)
    assert named["rows"].process_group() is own and Mesh.of({"all": torch_dist.group.WORLD})["all"].size == 4
    half = DeviceMesh("cpu", [1, 3], mesh_dim_names=("tp",))
    if number % 2:
        assert summed(Mesh.of(half), "tp") == 1010.0
    else:
        with pytest.raises(ValueError, match=r"^Mesh.of: sizes must be a DeviceMesh that this process is in"):
            Mesh.of(half)
    with pytest.raises(ValueError, match=r"^Mesh.of: sizes must be a DeviceMesh whose dims have names"):
        Mesh.of(DeviceMesh("cpu", [0, 1, 2, 3]))
    with pytest.raises(TypeError, match=r"^Mesh.of: sizes\['tp'\] must be ProcessGroup, got 2"):
        Mesh.of({"dp": own, "tp": 2})
    assert _world_timeout("cpu") > timedelta(minutes=1)


@pytest.mark.slow
def test_a_mesh_of_groups_that_exist(tmp_path):
    ended = codes({f"rank{i}": functools.partial(of_torch, tmp_path, i) for i in range(4)}, tmp_path)
    assert set(ended.values()) == {0}, [file.read_text() for file in tmp_path.glob("*.err")]


CFG = LinearConfig(6, 10)


def with_fsdp(folder, number):
    """FSDP2's DTensors, of 10 rows over four ranks, read what `dist.save` wrote on tp 2 x dp 2, and the other way round."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    started(folder, number)
    whole = linear.init(CFG, key=random.key(0))
    mesh, specs = Mesh.of({"dp": 2, "tp": 2}, "cpu"), {"weight": dist.Spec("tp", 0), "bias": dist.Spec("tp", 0)}
    own = dist.shard({"weight": whole.weight, "bias": whole.bias}, specs, mesh)
    dist.save(own, folder / "ours", specs, mesh)
    module = fully_shard(torch.nn.Linear(6, 10), mesh=init_device_mesh("cpu", (4,)))
    state = module.state_dict()
    assert all(isinstance(t, DTensor) for t in state.values())
    dcp.load(state, checkpoint_id=folder / "ours")
    assert torch.equal(state["weight"].full_tensor(), whole.weight) and torch.equal(state["bias"].full_tensor(), whole.bias)
    dcp.save(state, checkpoint_id=folder / "theirs")
    found = dist.load(folder / "theirs", own, specs, mesh)
    assert torch.equal(found["weight"], own["weight"]) and torch.equal(found["bias"], own["bias"])
    flat = Mesh.of({"dp": 4}, "cpu")
    shards = dist.own_shards({"weight": whole.weight, "bias": whole.bias}, flat["dp"])
    by = dist.fsdp_specs({"weight": whole.weight, "bias": whole.bias}, {}, flat)
    found = dist.load(folder / "theirs", shards, by, flat)  # 10 rows, which four ranks do not divide
    assert all(torch.equal(found[name], shards[name]) for name in shards)


@pytest.mark.slow
def test_checkpoints_go_between_dist_and_fsdp2(tmp_path):
    ended = codes({f"rank{i}": functools.partial(with_fsdp, tmp_path, i) for i in range(4)}, tmp_path)
    assert set(ended.values()) == {0}, [file.read_text() for file in tmp_path.glob("*.err")]
