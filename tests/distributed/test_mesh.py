"""Meshes and axes as plain data."""

import copy
import functools
import itertools
import math
import pickle
import re
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from forked import codes
from hypothesis import given
from hypothesis import strategies as st

from funcops.distributed import Axis, GatherConfig, Mesh, comm
from funcops.distributed.mesh import _world_timeout


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_an_abstract_mesh_is_a_grid_of_ranks(counts):
    """Rank r stands at the r-th place of the grid, the last axis fastest, and its peers differ from it along one axis."""
    sizes = dict(zip("abcd", counts, strict=False))
    places = list(itertools.product(*map(range, counts)))
    meshes = [Mesh.abstract(sizes, rank) for rank in range(len(places))]
    for rank, (mesh, place) in enumerate(zip(meshes, places, strict=True)):
        assert (mesh.rank, mesh.size, mesh.sizes) == (rank, math.prod(counts), sizes)
        for at, axis in enumerate(mesh.axes):
            members = [other for other, p in enumerate(places) if p[:at] + p[at + 1 :] == place[:at] + place[at + 1 :]]
            assert (axis.rank, mesh.peers(axis)) == (place[at], members) and mesh[axis.name] is axis
            assert {meshes[other].axes[at].group for other in members} == {axis.group}
    groups = {axis.group: (axis.name, *mesh.peers(axis)) for mesh in meshes for axis in mesh.axes if axis.size > 1}
    assert len(set(groups.values())) == len(groups)
    assert all(not axis.group for mesh in meshes for axis in mesh.axes if axis.size == 1)


def test_axes_and_meshes_are_values():
    mesh = Mesh.abstract({"dp": 2, "tp": 2}, 3)
    assert mesh == Mesh.abstract({"dp": 2, "tp": 2}, 3) != Mesh.abstract({"dp": 2, "tp": 2}, 2)
    assert {mesh["tp"]: 1}[Axis("tp", 2, 1, "tp[2:4:1]")] == 1
    assert mesh["tp"] != mesh["dp"] and str(mesh["tp"]) == "axis 'tp' of 2"
    for made in (copy.deepcopy(mesh), pickle.loads(pickle.dumps(mesh))):
        assert made == mesh and hash(made) == hash(mesh)
    assert GatherConfig(mesh["tp"]) == GatherConfig(pickle.loads(pickle.dumps(mesh["tp"]))) != GatherConfig(mesh["dp"])


def test_a_mesh_of_one_process_needs_no_group():
    mesh = Mesh.of({"dp": 1, "tp": 1})
    assert mesh.sizes == {"dp": 1, "tp": 1} and mesh.rank == 0 and not torch.distributed.is_initialized()


BAD = {
    "Mesh.of: sizes must be of product 1, the number of processes, got dp 2 x tp 4 = 8": lambda: Mesh.of({"dp": 2, "tp": 4}),
    "Mesh.of: sizes['tp'] must be at least 1, got 0": lambda: Mesh.of({"tp": 0}),
    "Mesh.of: sizes['tp'] must be int, got 1.0": lambda: Mesh.of({"tp": 1.0}),
    "Mesh.of: sizes['tp'] must be int, got '1'": lambda: Mesh.of({"tp": "1"}),
    "Mesh.abstract: sizes['tp'] must be int, got 2.0": lambda: Mesh.abstract({"dp": 2, "tp": 2.0}, 0),
    "Mesh.of: sizes must be Mapping, got 4": lambda: Mesh.of(4),
    "Mesh.of: device must be a device type, such as 'cuda', got 'toaster'": lambda: Mesh.of({"tp": 1}, "toaster"),
    "Mesh.of: timeout must be timedelta or NoneType, got 5": lambda: Mesh.of({"tp": 1}, timeout=5),
    "Mesh.of: timeout must be above 0 seconds, got 0:00:00": lambda: Mesh.of({"tp": 1}, timeout=timedelta(0)),
    "Mesh.abstract: rank must be below 8, the product of the sizes, got 8": lambda: Mesh.abstract({"dp": 2, "tp": 4}, 8),
    "Mesh.abstract: rank must be at least 0, got -1": lambda: Mesh.abstract({"dp": 2, "tp": 4}, -1),
    "Mesh.abstract: rank must be int or SymInt, got 0.5": lambda: Mesh.abstract({"dp": 2, "tp": 4}, 0.5),
    "Mesh.abstract: sizes must be by names of axes, got 3": lambda: Mesh.abstract({3: 4}, 0),
    "Mesh: axis must be one of dp, tp, got 'cp'": lambda: Mesh.abstract({"dp": 2, "tp": 4}, 0)["cp"],
    "Mesh: axes must be of different names, got a, a": lambda: Mesh(axes=(Axis("a", 1, 0), Axis("a", 1, 0))),
    "Mesh.peers: axis must be an axis of the mesh (axis 'dp' of 2), got axis 'tp' of 3": lambda: Mesh.abstract({"dp": 2}, 0).peers(
        Axis("tp", 3, 0, "x")
    ),
    "Mesh.peers: axis must be Axis, got 'dp'": lambda: Mesh.abstract({"dp": 2}, 0).peers("dp"),
    "Mesh.of: device must be str, got 3": lambda: Mesh.of({"tp": 1}, 3),
    "Axis: rank must be from 0 to 3, got 4": lambda: Axis("tp", 4, 4, "x"),
    "Axis: group must be the name of a process group, got ''": lambda: Axis("tp", 4, 0),
    "Axis.process_group: axis must be of a mesh of processes, and of several ranks, got axis 'tp' of 1": lambda: Mesh.of({"tp": 1})[
        "tp"
    ].process_group(),
    "Axis: size must be int, got True": lambda: Axis("tp", True, 0),
}


@pytest.mark.parametrize("said", BAD)
def test_bad_meshes(said):
    with pytest.raises((ValueError, TypeError, RuntimeError)) as raised:
        BAD[said]()
    assert said in str(raised.value)


def test_a_wrong_product_raises_before_a_group_is_made(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(ValueError, match="sizes must be of product 6, the number of processes, got tp 4 = 4"):
        Mesh.of({"tp": 4})
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("sizes", [{"dp": 1, "tp": 4}, {"dp": 2, "cp": 1, "tp": 2}, {"pp": 1, "dp": 4, "tp": 1}])
def test_an_axis_of_one_rank_has_no_group(sizes, monkeypatch):
    """Every other axis has a group of its own, in the order of the sizes."""
    from torch.distributed import device_mesh

    def made(kind, counts, mesh_dim_names):
        assert dict(zip(mesh_dim_names, counts, strict=True)) == {name: n for name, n in sizes.items() if n > 1}
        ranks = {name: i for i, name in enumerate(mesh_dim_names)}
        groups = {name: SimpleNamespace(group_name=f"group of {name}", set_timeout=waits.append) for name in mesh_dim_names}
        return SimpleNamespace(get_local_rank=ranks.__getitem__, get_group=groups.__getitem__)

    monkeypatch.setattr(device_mesh, "init_device_mesh", made)
    monkeypatch.setattr("funcops.distributed.mesh._world", lambda: 4)
    waits, wide = [], [name for name, n in sizes.items() if n > 1]
    mesh = Mesh.of(sizes, timeout=timedelta(seconds=7))
    assert waits == [timedelta(seconds=7)] * len(wide)
    assert [(axis.name, axis.size) for axis in mesh.axes] == list(sizes.items())
    for axis in mesh.axes:
        own = axis.name in wide
        assert axis == (
            Axis(axis.name, axis.size, wide.index(axis.name), f"group of {axis.name}") if own else Axis(axis.name, 1, 0)
        )


GONE = timedelta(seconds=60)  # the most that the rank that sends nothing waits for the others to give up


def gives_up(folder, named, number):
    """The last of four ranks sends nothing; the two that share an axis with it give up after the timeout."""
    given = {} if named else {"timeout": timedelta(seconds=3)}
    dist.init_process_group("gloo", f"file://{folder / 'store'}", rank=number, world_size=4, **given)
    mesh = Mesh.of({"dp": 2, "tp": 2}, "cpu", timeout=timedelta(seconds=3) if named else None)
    if number == 3:
        began = time.monotonic()
        while len(list(folder.glob("gave_up*"))) < 2 and time.monotonic() - began < GONE.total_seconds():
            time.sleep(0.05)
        return
    axis = {0: None, 1: "dp", 2: "tp"}[number]
    if axis is not None:
        with pytest.raises(RuntimeError, match="Timed out waiting"):
            comm.sum_over(torch.ones(2), mesh[axis])
        (folder / f"gave_up{number}").touch()


@pytest.mark.slow
@pytest.mark.parametrize("named", [False, True], ids=["of init_process_group", "of the mesh"])
def test_a_rank_waits_along_an_axis_no_longer_than_it_was_told(named, tmp_path):
    ended = codes({f"rank{i}": functools.partial(gives_up, tmp_path, named, i) for i in range(4)}, tmp_path)
    assert set(ended.values()) == {0}, [file.read_text() for file in tmp_path.glob("*.err")]


def test_a_group_beside_a_size_is_refused():
    with pytest.raises(TypeError, match=r"^Mesh.of: sizes\['tp'\] must be ProcessGroup, got 2"):
        Mesh.of({"dp": dist.ProcessGroup(0, 1), "tp": 2})


class Named(dist.ProcessGroup):
    group_name = "mine"


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2), (2, 3)])
def test_an_axis_of_a_group_that_exists(rank, size):
    axis = Axis("dp", 1, 0) if size == 1 else Axis("dp", size, rank, "mine")
    assert Mesh.of({"dp": Named(rank, size)}, "cpu") == Mesh(axes=(axis,))


@pytest.fixture
def rank_two_of_four():
    """This process as one of four whose messages torch fakes."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4, timeout=timedelta(seconds=11))
    yield
    dist.destroy_process_group()


def waits(name):
    return dist.distributed_c10d._resolve_process_group(name)._get_backend(torch.device("cpu")).options._timeout


def test_a_mesh_of_torch_is_one_of_ours(rank_two_of_four):
    """With the device type of the DeviceMesh, its groups and their timeouts, unless told otherwise."""
    from torch.distributed.device_mesh import DeviceMesh

    given = DeviceMesh("cpu", [[[0], [1]], [[2], [3]]], mesh_dim_names=("dp", "tp", "one"))
    names = [given.get_group(name).group_name for name in ("dp", "tp")]
    mesh = Mesh.of(given)
    assert mesh == Mesh(axes=(Axis("dp", 2, 1, names[0]), Axis("tp", 2, 0, names[1]), Axis("one", 1, 0))) and mesh.rank == 2
    assert Mesh.of(given, "meta") == Mesh(axes=mesh.axes, device="meta")
    with pytest.raises(ValueError, match=r"^Mesh.of: sizes must be a DeviceMesh whose dims have names \(mesh_dim_names\), got Dev"):
        Mesh.of(DeviceMesh("cpu", [0, 1, 2, 3]))
    with pytest.raises(ValueError, match=r"^Mesh.of: sizes must be a DeviceMesh that this process is in, got Dev"):
        Mesh.of(DeviceMesh("cpu", [1, 3], mesh_dim_names=("tp",)))


def test_groups_of_a_mesh_wait_as_long_as_the_world():
    """Or as long as told, and then a given group does too."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=11))
    try:
        world, group = dist.group.WORLD, dist.new_group([0], timeout=timedelta(seconds=5))
        assert _world_timeout("cpu") == timedelta(seconds=11)
        assert Mesh.of({"dp": world, "tp": group}, "cpu").axes == (Axis("dp", 1, 0), Axis("tp", 1, 0))
        assert [waits(one.group_name) for one in (world, group)] == [timedelta(seconds=11), timedelta(seconds=5)]
        Mesh.of({"tp": group}, "cpu", timeout=timedelta(seconds=3))
        assert [waits(one.group_name) for one in (world, group)] == [timedelta(seconds=11), timedelta(seconds=3)]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({3: dist.ProcessGroup(0, 2)}, ValueError, "Mesh.of: sizes must be by names of axes, got 3"),
        ({"a b": dist.ProcessGroup(0, 2)}, ValueError, "Mesh.of: sizes must be by names of axes, got 'a b'"),
        ({"tp": dist.ProcessGroup(-1, 2)}, ValueError, "Mesh.of: sizes['tp'] must be a group that this process is in, got "),
        ({"dp": dist.ProcessGroup(0, 2), "tp": None}, TypeError, "Mesh.of: sizes['tp'] must be ProcessGroup, got None"),
    ],
)
def test_bad_groups_of_axes(given, error, said):
    with pytest.raises(error, match="^" + re.escape(said)):
        Mesh.of(given)


def test_a_mesh_that_is_made_waits_as_long_as_the_world(monkeypatch, rank_two_of_four):
    monkeypatch.setattr("funcops.distributed.mesh._world_timeout", lambda kind: {"cpu": timedelta(seconds=9)}[kind])
    told = []
    monkeypatch.setattr(dist.ProcessGroup, "set_timeout", lambda group, time: told.append(time))
    mesh = Mesh.of({"dp": 2, "tp": 2}, "cpu")
    assert told == [timedelta(seconds=9)] * 2 and [axis.rank for axis in mesh.axes] == [1, 0]


ALONE = Axis("tp", 1, 0)


def test_collectives_of_one_rank_give_back_what_they_get():
    x = torch.arange(4.0)
    for call in (comm.largest, comm.start_gather, comm.start_scatter_sum, comm.start_sum, comm.start_all_to_all, comm.gather):
        assert call(x, ALONE) is x
    assert comm.start_shift(x, ALONE, 1).tolist() == [x.tolist()]


def test_a_collective_over_an_abstract_mesh_is_refused():
    """Unless nothing is sent: values on the meta device only take their shapes."""
    tp = Mesh.abstract({"tp": 2}, 0)["tp"]
    said = (
        "dist: axis must be of a mesh of processes (Mesh.of, or funcops.testing.run_ranks for threads), "
        "got axis 'tp' of 2 of Mesh.abstract, which is traced and not run"
    )
    with pytest.raises(RuntimeError, match="^" + re.escape(said)):
        comm.start_sum(torch.ones(2), tp)
    assert comm.start_gather(torch.ones(2, device="meta"), tp).shape == (4,)


SAID = ["Connection closed", "Connection reset", "Connection refused", "Broken pipe", "wait timeout", "Timed out", "unreachable"]


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("name", ["all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "all_reduce"])
def test_a_rank_that_does_not_answer_is_told(said, name, monkeypatch):
    """With the collective's name, its axis, and what to look for; the backend's error is the cause, and any other error stays."""

    def fails(*args):
        raise RuntimeError(f" {said}\n")

    fails.__name__ = name
    monkeypatch.setattr(comm, "ops", SimpleNamespace(**{name: fails}))
    calls = dict(
        all_gather_into_tensor=comm.start_gather,
        reduce_scatter_tensor=comm.start_scatter_sum,
        all_to_all_single=comm.start_all_to_all,
        all_reduce=comm.start_sum,
    )
    short = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter", "all_to_all_single": "all_to_all"}
    start = f"{short.get(name, name)} over axis 'tp' of 2 must be called by all its ranks, got no answer on rank 1 of it ({said})"
    with pytest.raises(RuntimeError, match="^" + re.escape(start)) as raised:
        calls[name](torch.ones(2), Axis("tp", 2, 1, "mine"))
    assert str(raised.value.__cause__) == f" {said}\n" and str(raised.value).endswith("Mesh.of(..., timeout=)")
    said = "no kernel"
    with pytest.raises(RuntimeError, match="^ no kernel\n$"):
        calls[name](torch.ones(2), Axis("tp", 2, 1, "mine"))


def test_a_torch_without_distributed_has_a_mesh_of_one_process(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    assert Mesh.of({"dp": 1, "tp": 1}).sizes == {"dp": 1, "tp": 1}
    with pytest.raises(ValueError, match=r"^Mesh\.of: sizes must be of product 1, the number of processes, got dp 2 = 2: start it"):
        Mesh.of({"dp": 2})
