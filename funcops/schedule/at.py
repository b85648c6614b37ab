"""`At(rank, axis)`, the place of a rule whose tensors lie in the memory of another rank between forward and backward."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor

from funcops.distributed import Axis
from funcops.engine.errors import require, require_count, require_type
from funcops.memory.away import Away
from funcops.schedule.lend import Guest, line_to


@dataclasses.dataclass(frozen=True)
class At(Away):
    """Keep the tensor (for a step, every tensor that it keeps) in the host's memory of another rank along an axis, which lends it
    by `lend`, until the backward has read it. The bits are the same. `Compress(codec) | At(rank, axis)` keeps codes there.

    `rank`: the position on the axis. A thread sends a copy while the forward goes on, at most four tensors behind it, and fetches
    it before the backward, for a layer of a repeat while the layer after it runs its backward. `report(residuals).places` counts
    the bytes as `rank 1 of pp`, and `Lent.held` at the rank that has them. They are freed there when the residuals are used up or
    dropped, or this process ends. A pickle or a deep copy has the bytes.

    Raises `ValueError` for a rank that is not on the axis; at a policy's first use for the own rank; in a forward if the ranks do
    not lend memory, and for a tensor under a compiler or a capture. `OSError`, by the path of the tensor, the rank and the remedy,
    is raised by the next forward or backward if that rank has too little room left, is gone, does not answer, or has closed.

    >>> from funcops import Compress
    >>> from funcops.dist import Mesh
    >>> from funcops.schedule import At
    >>> Compress("fp8") | At(3, Mesh.abstract({"pp": 4}, rank=0)["pp"])
    Compress(codec='fp8') | At(rank=3, axis=Axis(name='pp', size=4, rank=0, group='pp[0:4:1]'))
    """

    rank: int
    axis: Axis
    once: ClassVar[str] = "send the tensor"

    def __post_init__(self) -> None:
        require_type("At", "axis", self.axis, Axis)
        require_count("At", 0, rank=self.rank)
        require(self.rank < self.axis.size, "At", "rank", f"below {self.axis.size}, on {self.axis}", self.rank)

    @property
    def where(self) -> str:
        return f"rank {self.rank} of {self.axis.name}"

    def check(self, where: str, name: str) -> None:
        """Raise `ValueError` for this rank itself."""
        wanted = f"for another rank than this one of {self.axis} (Save() keeps a tensor here)"
        require(self.rank != self.axis.rank, where, name, wanted, f"rank {self.rank}")

    def keep(self, t: Tensor, like: Tensor) -> Guest:
        self.check("At", "rank")
        return Guest(line_to(self.axis, self.rank), t, like)
