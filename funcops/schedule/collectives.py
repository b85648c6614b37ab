"""The costs of communication: collectives as data, and the time that they take on an axis of a mesh.

The alpha-beta model, for n ranks, latency a, bandwidth b and B bytes of the whole tensor:

    all_gather, reduce_scatter   (n - 1)(a + B / (n b))                 all_to_all   (n - 1)(a + B / (n^2 b))
    all_reduce                   the two together, or a tree's 2 log2(n) a + 2 B / b if that is less
    p2p                          a + B / b

Only the exposed time counts: max(0, time - hidden_under).
"""

from __future__ import annotations

import dataclasses
import math

from funcops.engine.errors import fail, require, require_count, require_number, require_type

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "p2p")
WHEN = ("F", "I", "W", "step")


@dataclasses.dataclass(frozen=True)
class Collective:
    """Communication of a stage on an axis of the mesh. `nbytes`: the size of the whole tensor, of which each rank has or gets a
    part; `hidden_under`: the time of other work that it overlaps with, in the unit of the costs; `during`: the forward, dgrad or
    wgrad of each microbatch, or once a "step", after the stage's last action; `times`: the number of such collectives, each of
    which overlaps with work of its own.

    >>> from funcops.schedule import Collective, Costs, Link, Network, gpipe, simulate
    >>> network = Network(axes=(Link("tp", 2, bandwidth=10.0),))
    >>> gather = Collective("all_gather", "tp", nbytes=20.0)
    >>> simulate(gpipe(1, 1)).time, simulate(gpipe(1, 1), Costs(collectives=(gather,)), network).time
    (3.0, 4.0)
    """

    kind: str
    axis: str
    nbytes: float
    hidden_under: float = 0.0
    during: str = "F"
    times: int = 1

    def __post_init__(self) -> None:
        for name, known in (("kind", COLLECTIVES), ("during", WHEN)):
            value = getattr(self, name)
            require_type("Collective", name, value, str)
            require(value in known, "Collective", name, " or ".join(known), repr(value))
        require_type("Collective", "axis", self.axis, str)
        require(self.axis != "", "Collective", "axis", "the name of an axis", repr(self.axis))
        require_number("Collective", 0, nbytes=self.nbytes)
        require_number("Collective", 0, finite=False, hidden_under=self.hidden_under)
        require_count("Collective", times=self.times)


@dataclasses.dataclass(frozen=True)
class Link:
    """An axis of a mesh as a network link: its number of ranks, the latency of a message and the bytes per time of each rank.

    >>> from funcops.schedule import Link
    >>> Link("tp", size=4, latency=0.5, bandwidth=10.0).time("all_gather", 40.0)
    4.5
    """

    axis: str
    size: int
    latency: float = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        require_type("Link", "axis", self.axis, str)
        require(self.axis != "", "Link", "axis", "the name of an axis", repr(self.axis))
        require_count("Link", size=self.size)
        require_number("Link", 0, latency=self.latency)
        require_number("Link", 0, finite=False, bandwidth=self.bandwidth)
        require(self.bandwidth > 0, "Link", "bandwidth", "above 0", self.bandwidth)

    def time(self, kind: str, nbytes: float) -> float:
        """The time of one collective of `nbytes`. Raises `ValueError` for a kind that is not one of `all_gather`, `reduce_scatter`,
        `all_reduce`, `all_to_all`, `p2p`."""
        require(kind in COLLECTIVES, "Link.time", "kind", " or ".join(COLLECTIVES), repr(kind))
        require_number("Link.time", 0, nbytes=nbytes)
        return self._time(kind, nbytes)

    def _time(self, kind: str, nbytes: float) -> float:
        n, latency, whole = self.size, self.latency, nbytes / self.bandwidth
        if n == 1:
            return 0.0
        if kind == "p2p":
            return latency + whole
        if kind == "all_to_all":
            return (n - 1) * (latency + whole / n**2)
        ring = (n - 1) * (latency + whole / n)
        if kind == "all_reduce":
            return min(2 * ring, 2 * math.ceil(math.log2(n)) * latency + 2 * whole)
        return ring


def exposed(where: str, collectives: tuple[Collective, ...], links: dict[str, Link]) -> dict[str, float]:
    """The exposed time of the collectives, by `during`. Raises `ValueError` for an axis without a link."""
    found = dict.fromkeys(WHEN, 0.0)
    for i, one in enumerate(collectives):
        link = links.get(one.axis)
        if link is None:
            known = f"an axis of the network, {' or '.join(links)}" if links else "an axis of the network, which has none"
            fail(where, f"costs.collectives.{i}.axis", known, repr(one.axis))
        found[one.during] += one.times * max(0.0, link._time(one.kind, one.nbytes) - one.hidden_under)
    return found
