"""`Mesh` and `Axis`: which ranks communicate, as plain data.

    mesh = Mesh.of({"dp": 2, "tp": 4})                     # on torch.distributed, as torchrun starts it
    mesh = Mesh.abstract({"dp": 64, "tp": 8}, rank=4711)   # no process group: to trace, to check, to simulate
    cfg = ColumnLinearConfig(64, 256, axis=mesh["tp"])

Configs hold the `Axis`: static, hashable, with this rank's position on it. Nothing is registered anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field
from datetime import timedelta
from typing import Any

from funcops.engine.backend.select import launched
from funcops.engine.contract.op import config
from funcops.engine.errors import describe, fail, one_of, require, require_count, require_type


@config
class Axis:
    """One axis of a mesh as a rank sees it: its `size` n, this rank's position `rank` on it, and `group`, the name of
    torch.distributed's process group of the n ranks that differ only along it ("" if n is 1).

    >>> from funcops.dist import Axis, Mesh
    >>> axis = Mesh.abstract({"dp": 2, "tp": 4}, rank=6)["tp"]
    >>> isinstance(axis, Axis), axis.name, axis.size, axis.rank
    (True, 'tp', 4, 2)
    """

    name: str = field(kw_only=False)
    size: int = field(kw_only=False)
    rank: int = field(kw_only=False)
    group: str = field(kw_only=False, default="")

    def __post_init__(self) -> None:
        require(self.name.isidentifier(), "Axis", "name", "an identifier", repr(self.name))
        require(self.size >= 1, "Axis", "size", "at least 1", self.size)
        require(0 <= self.rank < self.size, "Axis", "rank", f"from 0 to {self.size - 1}", self.rank)
        require(bool(self.group) or self.size == 1, "Axis", "group", "the name of a process group", repr(self.group))

    def __str__(self) -> str:
        return f"axis {self.name!r} of {self.size}"

    def process_group(self) -> Any:
        """torch.distributed's process group, for other libraries. Raises `RuntimeError` on an axis of one rank and on an abstract
        mesh, which lack one."""
        try:
            from torch.distributed.distributed_c10d import _resolve_process_group

            return _resolve_process_group(self.group)  # type: ignore[arg-type]
        except (RuntimeError, ImportError):
            fail("Axis.process_group", "axis", "of a mesh of processes, and of several ranks", self, RuntimeError)


@config
class Mesh:
    """Ranks in a grid, the last axis the fastest. `mesh["tp"]` is an `Axis`; `rank` is this rank's number; `device` is the type of
    device on which its ranks compute.

    >>> from funcops.dist import Mesh
    >>> mesh = Mesh.abstract({"dp": 2, "tp": 4}, rank=6)
    >>> mesh.size, mesh.rank, mesh["dp"].rank, mesh["tp"].rank
    (8, 6, 1, 2)
    """

    axes: tuple[Axis, ...]
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not (isinstance(self.axes, tuple) and all(isinstance(axis, Axis) for axis in self.axes)):
            fail("Mesh", "axes", "a tuple of Axis", repr(self.axes))
        names = [axis.name for axis in self.axes]
        require(len(set(names)) == len(names), "Mesh", "axes", "of different names", ", ".join(names))
        _device("Mesh", self.device)

    @staticmethod
    def of(sizes: Any, device: str | None = None, timeout: timedelta | None = None) -> Mesh:
        """The mesh of the running processes. `sizes`: the number of ranks along each axis, by name; each axis of more than one rank
        gets a group, from torch's `init_device_mesh`. Or groups that exist: a `DeviceMesh` whose dims have names, also of a part
        of the processes, or torch's `ProcessGroup` of each axis, by name. `device`: by default the `DeviceMesh`'s, or "cuda" if
        there is a GPU, else "cpu". `timeout`: how long a rank waits for the others along an axis, by default the timeout of
        `init_process_group`, or the one that a given group has; the group of all processes gets it too, if an axis has them all.

        Raises `ValueError`, before any group is made, unless the product of the sizes is the number of processes, for groups that
        this process is not in, and unless the timeout is positive."""
        require_type("Mesh.of", "timeout", timeout, timedelta, type(None))
        require(timeout is None or timeout > timedelta(0), "Mesh.of", "timeout", "above 0 seconds", timeout)
        groups = _groups_of(sizes)
        if groups is not None:
            return _of_groups(groups, _device("Mesh.of", device or getattr(sizes, "device_type", None)), timeout)
        counts = _checked("Mesh.of", sizes)
        kind = _device("Mesh.of", device)
        world, product = _world(), math.prod(counts.values())
        if product != world:
            start = f": start it by torchrun --nproc-per-node {product}" if world == 1 else ""
            fail("Mesh.of", "sizes", f"of product {world}, the number of processes", f"{_product(counts)} = {product}{start}")
        wide = {name: n for name, n in counts.items() if n > 1}
        if not wide:
            return Mesh.abstract(counts, 0, kind)
        from torch.distributed.device_mesh import init_device_mesh

        made: Any = init_device_mesh(kind, tuple(wide.values()), mesh_dim_names=tuple(wide))
        for name in wide:  # torch's groups of a part of the processes have 30 minutes otherwise, whatever the world has
            made.get_group(name).set_timeout(timeout or _world_timeout(kind))
        axes = [
            Axis(name, n, made.get_local_rank(name), made.get_group(name).group_name) if n > 1 else Axis(name, n, 0)
            for name, n in counts.items()
        ]
        return Mesh(axes=tuple(axes), device=kind)

    @staticmethod
    def abstract(sizes: Mapping[str, int], rank: int, device: str = "cpu") -> Mesh:
        """The mesh as `rank` would see it, without any process: programs can be traced on it, but not run."""
        counts = _checked("Mesh.abstract", sizes)
        world = math.prod(counts.values())
        require_count("Mesh.abstract", 0, rank=rank)
        require(rank < world, "Mesh.abstract", "rank", f"below {world}, the product of the sizes", rank)
        axes, stride = [], world
        for name, n in counts.items():
            stride //= n
            place = rank // stride % n
            first = rank - place * stride
            group = f"{name}[{first}:{first + n * stride}:{stride}]" if n > 1 else ""
            axes.append(Axis(name, n, place, group))
        return Mesh(axes=tuple(axes), device=_device("Mesh.abstract", device))

    def __getitem__(self, name: str) -> Axis:
        for axis in self.axes:
            if axis.name == name:
                return axis
        fail("Mesh", "axis", one_of(self.sizes or ("(none)",), name), repr(name))

    @property
    def sizes(self) -> dict[str, int]:
        return {axis.name: axis.size for axis in self.axes}

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes.values())

    @property
    def rank(self) -> int:
        """This rank's number, from 0 to size - 1."""
        found = 0
        for axis in self.axes:
            found = found * axis.size + axis.rank
        return found

    def peers(self, axis: Axis) -> list[int]:
        """The numbers of the ranks along an axis of this mesh, including this rank's."""
        require_type("Mesh.peers", "axis", axis, Axis)
        require(axis in self.axes, "Mesh.peers", "axis", f"an axis of the mesh ({', '.join(map(str, self.axes))})", axis)
        stride = math.prod([other.size for other in self.axes[self.axes.index(axis) + 1 :]])
        return [self.rank + (place - axis.rank) * stride for place in range(axis.size)]


def _groups_of(given: Any) -> dict[str, Any] | None:
    """torch's group of each axis, by name, of a `DeviceMesh` or a mapping to `ProcessGroup`s; None for sizes."""
    import torch.distributed as dist

    if not dist.is_available():
        return None
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(given, DeviceMesh):
        names = given.mesh_dim_names
        require(names is not None, "Mesh.of", "sizes", "a DeviceMesh whose dims have names (mesh_dim_names)", given)
        require(given.get_coordinate() is not None, "Mesh.of", "sizes", "a DeviceMesh that this process is in", given)
        return {name: given.get_group(name) for name in names}  # type: ignore[union-attr]
    if not isinstance(given, Mapping) or not any(isinstance(one, dist.ProcessGroup) for one in given.values()):
        return None
    for name, one in given.items():
        require(isinstance(name, str) and name.isidentifier(), "Mesh.of", "sizes", "by names of axes", repr(name))
        require_type("Mesh.of", f"sizes[{name!r}]", one, dist.ProcessGroup)
        require(one.rank() >= 0, "Mesh.of", f"sizes[{name!r}]", "a group that this process is in", one)
    return dict(given)


def _of_groups(groups: Mapping[str, Any], device: str, timeout: timedelta | None) -> Mesh:
    axes = []
    for name, group in groups.items():
        n = group.size()
        axes.append(Axis(name, n, group.rank(), group.group_name) if n > 1 else Axis(name, 1, 0))
        if timeout is not None:
            group.set_timeout(timeout)
    return Mesh(axes=tuple(axes), device=device)


def _checked(where: str, sizes: Any) -> dict[str, int]:
    require_type(where, "sizes", sizes, Mapping)
    for name, n in sizes.items():
        require(isinstance(name, str) and name.isidentifier(), where, "sizes", "by names of axes", repr(name))
        require_type(where, f"sizes[{name!r}]", n, int)
        require(n >= 1, where, f"sizes[{name!r}]", "at least 1", n)
    return dict(sizes)


def _product(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {n}" for name, n in sizes.items()) or "no axes"


def _device(where: str, device: Any) -> str:
    import torch

    found = device if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    require_type(where, "device", found, str)
    try:
        return torch.device(found).type
    except RuntimeError:
        fail(where, "device", "a device type, such as 'cuda'", describe(device))


def _world_timeout(kind: str) -> timedelta:
    import torch

    world: Any = torch.distributed.group.WORLD
    return world._get_backend(torch.device(kind)).options._timeout  # type: ignore[no-any-return]


def _world() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else launched()
