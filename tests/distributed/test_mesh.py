"""Meshes and axes as plain data."""

import copy
import functools
import itertools
import math
import pickle
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from forked import codes
from hypothesis import given
from hypothesis import strategies as st

from funcops.distributed import Axis, GatherConfig, Mesh, comm


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
    from types import SimpleNamespace

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
