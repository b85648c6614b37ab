"""Communication in flight, as a value.

    h = gather_start(x, axis)      # starts the communication
    ...                            # anything but a write to x
    whole = finish(h)              # once

An `InFlight` is a pytree node, not a tensor, so that no op takes it by mistake; only `finish` reads it. A `Ledger` keeps one as
it keeps a pending weight gradient, and names any that was never finished. On an axis of size 1 nothing is sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from torch import Tensor

from funcops.distributed import comm
from funcops.distributed.checks import check_divides, check_tensor
from funcops.distributed.mesh import Axis
from funcops.engine.contract.marks import Gone
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.schema import WGRAD, Pending, saved, static
from funcops.engine.errors import DonatedError, StaleResidualError, describe, fail, require_type, stale


class Flight(Pending):
    """Base of the nodes that `finish` takes."""

    __slots__ = ()
    kind = "in flight"

    def unused(self, where: str) -> None:
        if isinstance(self._marks, Gone):
            got = f"an {type(self).__name__} that was finished, or given away with donate()"
            raise DonatedError(f"{where}: h must be in flight, got {got}")

    if TYPE_CHECKING:

        def arrive(self, into: Any) -> Any:
            """Wait for the value, and return it."""


class InFlight(Flight):
    """The result of a `*_start`, for `finish`. `value` must not be read before; `source` is the x that is sent."""

    value: Tensor = saved("[*]", needed_by=WGRAD)
    source: Tensor = saved("[*]", alias="x", needed_by=WGRAD)
    what: str = static("")

    def arrive(self, into: Any) -> Tensor:
        if into is not None:
            fail("finish", "into", "None (only sums from reduce_start can be added)", describe(into), TypeError)
        value, axis = self.value, self.cfg
        self.empty()
        return comm.wait(value, axis)

    def complain(self, where: str) -> None:
        self.unused(where)
        written, by = self.stale(), f"{self.what}_start"
        if written is None:  # its leaves were mapped: what runs writes to those that it was started with
            fail(where, "h.source", f"as the {by} left it", "another tensor. Finish what was returned", StaleResidualError)
        hint = f"Finish the {self.what} first, or start it with a clone"
        stale(where, f"h.{written}", by=by, hint=hint, aliases="its x")


@overload
def finish(h: InFlight) -> Tensor: ...
@overload
def finish(h: Any, *, into: Any = None) -> Any: ...
def finish(h: Any, *, into: Any = None) -> Any:
    """Wait for the communication that a `*_start` began, and return its value. Raises `DonatedError` if it was finished before,
    `StaleResidualError` if x was written to since the start, as the received values are then undefined.

    `into`: the accumulators to which sums from `reduce_start` are added.

    >>> import torch
    >>> from funcops import dist
    >>> from funcops.testing import run_ranks
    >>> def each(mesh):
    ...     h = dist.sum_over_start(torch.ones(2), mesh["dp"])
    ...     meanwhile = torch.ones(2) * 10
    ...     return dist.finish(h) + meanwhile
    ...
    >>> run_ranks({"dp": 4}, each)[0]
    tensor([14., 14.])
    """
    if not isinstance(h, Flight):
        fail("finish", "h", "an InFlight, from gather_start or another *_start", describe(h), TypeError)
    if not h.fresh():
        h.complain("finish")
    return h.arrive(into)


def gather_start(x: Tensor, axis: Axis) -> InFlight:
    """[m, *] -> [n m, *]: the x of all ranks of the axis, one after the other.

    >>> import torch
    >>> from funcops import dist
    >>> from funcops.testing import run_ranks
    >>> def each(mesh):
    ...     return dist.finish(dist.gather_start(torch.tensor([mesh["tp"].rank]), mesh["tp"]))
    ...
    >>> run_ranks({"tp": 3}, each)[0]
    tensor([0, 1, 2])
    """
    _check("gather_start", x, axis, 1)
    return _started("gather", x, axis, comm.start_gather)


def scatter_sum_start(x: Tensor, axis: Axis) -> InFlight:
    """[n m, *] -> [m, *]: this rank's part of the sum of x over the axis. Raises `ValueError` if the axis does not divide
    the first dimension.

    >>> import torch
    >>> from funcops import dist
    >>> from funcops.testing import run_ranks
    >>> run_ranks({"tp": 2}, lambda mesh: dist.finish(dist.scatter_sum_start(torch.tensor([1.0, 5.0]), mesh["tp"])))
    [tensor([2.]), tensor([10.])]
    """
    _check("scatter_sum_start", x, axis, 1)
    check_divides("scatter_sum_start", "x", x, 0, axis)
    return _started("scatter_sum", x, axis, comm.start_scatter_sum)


def sum_over_start(x: Tensor, axis: Axis) -> InFlight:
    """The sum of x over the axis.

    >>> import torch
    >>> from funcops import dist
    >>> from funcops.testing import run_ranks
    >>> run_ranks({"tp": 2}, lambda mesh: dist.finish(dist.sum_over_start(torch.tensor([1.0, 5.0]), mesh["tp"])))
    [tensor([ 2., 10.]), tensor([ 2., 10.])]
    """
    _check("sum_over_start", x, axis)
    return _started("sum_over", x, axis, comm.start_sum)


def all_to_all_start(x: Tensor, axis: Axis) -> InFlight:
    """[n m, *] -> [n m, *]: part i goes to rank i of the axis, and becomes part `rank` there. Raises `ValueError` if the
    axis does not divide the first dimension.

    >>> import torch
    >>> from funcops import dist
    >>> from funcops.testing import run_ranks
    >>> def each(mesh):
    ...     return dist.finish(dist.all_to_all_start(torch.tensor([1.0, 2.0]) + 10 * mesh["tp"].rank, mesh["tp"]))
    ...
    >>> run_ranks({"tp": 2}, each)
    [tensor([ 1., 11.]), tensor([ 2., 12.])]
    """
    _check("all_to_all_start", x, axis, 1)
    check_divides("all_to_all_start", "x", x, 0, axis)
    return _started("all_to_all", x, axis, comm.start_all_to_all)


def _check(where: str, x: Any, axis: Any, dims: int = 0) -> None:
    require_type(where, "axis", axis, Axis)
    check_tensor(where, "x", x, (...,))
    if x.dim() < dims:
        fail(where, "x", f"of at least {dims} dimension", describe(x))


def _started(what: str, x: Tensor, axis: Axis, start: Any) -> InFlight:
    made: Any = InFlight.keep(axis, Needs.ALL, value=start(x, axis), source=x, what=what)
    return made  # type: ignore[no-any-return]
