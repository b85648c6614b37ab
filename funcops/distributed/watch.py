"""Which ranks a step can tell apart: meshes that note along which axes a rank's position has been read."""

from __future__ import annotations

from typing import Any

from funcops.distributed.mesh import Axis, Mesh


class Watch:
    """The axes whose `rank` has been read, in any run so far, and the meshes of these runs. What a run reads may come from a cache
    that an earlier run filled, so a rank counts as equal to an earlier one only along all axes that any run has read."""

    def __init__(self) -> None:
        read: dict[str, None] = {}

        class Watched(Axis):
            """An axis that notes when its `rank` is read; comparing it and hashing it, as caches do, reads nothing."""

            def __getattribute__(self, name: str) -> Any:
                if name == "rank":
                    read[object.__getattribute__(self, "name")] = None
                return object.__getattribute__(self, name)

            def __eq__(self, other: object) -> bool:
                return type(other) is Watched and other._all() == self._all()

            def __hash__(self) -> int:
                return hash(self._all())

            def _all(self) -> tuple[Any, ...]:
                return tuple([object.__getattribute__(self, name) for name in ("name", "size", "rank", "group")])

        self.read, self.axis, self.runs, self.known = read, Watched, list[Mesh](), dict[Any, Mesh]()
        self.keyed_by = 0  # how many axes make a key of `known`

    def mesh(self, mesh: Mesh) -> Mesh:
        """The mesh with axes that are watched, for a run on it."""
        self.runs.append(mesh)
        before = dict(self.read)
        axes = tuple([self.axis(axis.name, axis.size, axis.rank, axis.group) for axis in mesh.axes])
        made = Mesh(axes=axes, device=mesh.device)
        self.read.clear()  # of what the checks of a new axis have read
        self.read.update(before)
        return made

    def equal(self, mesh: Mesh) -> Mesh | None:
        """The mesh of an earlier run whose rank no run can tell from this one's, or None."""
        if self.keyed_by != len(self.read):
            self.keyed_by, self.known = len(self.read), {self._key(run): run for run in reversed(self.runs)}
        elif self.runs:
            self.known.setdefault(self._key(self.runs[-1]), self.runs[-1])
        return self.known.get(self._key(mesh))

    def _key(self, mesh: Mesh) -> tuple[tuple[str, int], ...]:
        return tuple([(axis.name, axis.rank) for axis in mesh.axes if axis.name in self.read])
