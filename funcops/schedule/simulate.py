"""`simulate`: a schedule's times and peak bytes per rank, from the cost of each action."""

from __future__ import annotations

import dataclasses
import functools
import math
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from funcops.engine.errors import in_html, on_screen, require, require_count, require_number, require_type, size_of
from funcops.schedule.actions import KINDS, Action, Schedule
from funcops.schedule.collectives import Collective, Link, exposed
from funcops.schedule.moved import Moved, waits, with_guests

ROUNDING = 1e-9  # sums of one schedule's costs that differ by less, relatively, differ by their order


@dataclasses.dataclass(frozen=True)
class Costs:
    """The costs of one microbatch on one stage. Times, in any unit; `together`: of a forward and a backward side by side, None for
    their sum. Bytes of the residuals, which a forward saves; of the pending, which replaces them from dgrad to wgrad; and of y,
    which goes to the next stage (its gradient comes back).

    A pending is not a part of the residuals: for each layer with weights it holds x and dy, where the residuals held x alone, so it
    is mostly the larger of the two (1.1 to 2 times the residuals in the MLPs and transformer blocks that were measured; `measure`
    tells you for yours). The default, 1.0 of each, is the papers' unit: a microbatch that waits. A stage of a schedule with two
    stages a rank (`zb_v`, `dualpipe_v`) is half as large: to compare it with 1F1B, give half of each cost.

    `collectives`: their exposed time on the network's axes is added to the times, except to `together`. `moved`: residuals at other
    ranks, beside `residual_bytes`.

    >>> from funcops.schedule import Costs, gpipe, simulate
    >>> simulate(gpipe(1, 2), Costs(forward=1.0, dgrad=1.5, wgrad=0.5)).time
    6.0
    """

    forward: float = 1.0
    dgrad: float = 1.0
    wgrad: float = 1.0
    together: float | None = None
    residual_bytes: float = 1.0
    pending_bytes: float = 1.0
    output_bytes: float = 0.0
    collectives: tuple[Collective, ...] = ()
    moved: tuple[Moved, ...] = ()

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if name != "together" or value is not None}
        require_type("Costs", "collectives", given.pop("collectives"), tuple)
        for i, one in enumerate(self.collectives):
            require_type("Costs", f"collectives.{i}", one, Collective)
        require_type("Costs", "moved", given.pop("moved"), tuple)
        for i, there in enumerate(self.moved):
            require_type("Costs", f"moved.{i}", there, Moved)
        require_number("Costs", 0, **given)

    def resolved(self, where: str, links: dict[str, Link]) -> tuple[Costs, float]:
        """Return the same costs with the collectives' exposed time added to the times, and the time exposed once a step."""
        more = exposed(where, self.collectives, links)
        times: dict[str, Any] = {
            "forward": self.forward + more["F"],
            "dgrad": self.dgrad + more["I"],
            "wgrad": self.wgrad + more["W"],
        }
        return dataclasses.replace(self, **times, collectives=()), more["step"]

    def later(self, time: float) -> Costs:
        """Return the same costs, with a dgrad that waits."""
        pair = None if self.together is None else self.together + time
        return dataclasses.replace(self, dgrad=self.dgrad + time, together=pair)

    def time(self, kind: str) -> float:
        return {"F": self.forward, "I": self.dgrad, "W": self.wgrad, "B": self.dgrad + self.wgrad}[kind]


@dataclasses.dataclass(frozen=True)
class Network:
    """The time from rank to rank: `latency` + bytes / `bandwidth`; between ranks of one node of `ranks_per_node`, with the `near_`
    fields. `axes`: the links between the GPUs that one rank of the schedule stands for, and to its replicas, for the costs'
    collectives.

    >>> from funcops.schedule import Costs, Network, gpipe, simulate
    >>> far = Network(latency=0.5, bandwidth=100.0)
    >>> simulate(gpipe(2, 1)).time, simulate(gpipe(2, 1), Costs(output_bytes=50.0), far).time
    (6.0, 8.0)
    """

    latency: float = 0.0
    bandwidth: float = math.inf
    ranks_per_node: int = 1
    near_latency: float = 0.0
    near_bandwidth: float = math.inf
    axes: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        require_number("Network", 0, latency=self.latency, near_latency=self.near_latency)
        require_number("Network", 0, finite=False, bandwidth=self.bandwidth, near_bandwidth=self.near_bandwidth)
        require_count("Network", ranks_per_node=self.ranks_per_node)
        for name in ("bandwidth", "near_bandwidth"):
            require(getattr(self, name) > 0, "Network", name, "above 0", getattr(self, name))
        require_type("Network", "axes", self.axes, tuple)
        for i, link in enumerate(self.axes):
            require_type("Network", f"axes.{i}", link, Link)
        names = [link.axis for link in self.axes]
        require(len(set(names)) == len(names), "Network", "axes", "a link for each axis once", ", ".join(names))

    def time(self, sender: int, receiver: int, nbytes: float) -> float:
        if sender == receiver:
            return 0.0
        if sender // self.ranks_per_node == receiver // self.ranks_per_node:
            return self.near_latency + nbytes / self.near_bandwidth
        return self.latency + nbytes / self.bandwidth


class Model(NamedTuple):
    """For each stage: the costs, with the exposed time of collectives and of moved bytes added; the time of a message to the next
    stage; the communication time exposed once a step; and the time of a dgrad that waits for moved bytes."""

    costs: tuple[Costs, ...]
    send: tuple[float, ...]
    after: tuple[float, ...]
    waits: tuple[float, ...]

    @staticmethod
    def of(schedule: Schedule, costs: Costs | Sequence[Costs] | None, network: Network | None, where: str) -> Model:
        """Resolve the costs of a schedule's stages. Raises for costs of another number of stages, and for collectives on an axis
        that the network lacks."""
        if costs is not None:
            require_type(where, "costs", costs, Costs, tuple, list)
        if network is not None:
            require_type(where, "network", network, Network)
        one_for_all = costs is None or isinstance(costs, Costs)
        given: Any = [costs or Costs()] * schedule.stages if one_for_all else list(costs)  # type: ignore[arg-type]
        for one in given:
            require_type(where, "costs", one, Costs)
        require(len(given) == schedule.stages, where, "costs", f"one Costs, or {schedule.stages}, one a stage", len(given))
        owner, net = schedule.rank_of, network or Network()
        send = [net.time(owner[s], owner[s + 1], given[s].output_bytes) for s in range(schedule.stages - 1)]
        late = waits(where, schedule, [own.moved for own in given], net.time)
        if any(late):
            given = [one.later(time) for one, time in zip(given, late, strict=True)]
        if all(not one.collectives for one in given):
            return Model(tuple(given), (*send, 0.0), (0.0,) * len(given), tuple(late))
        links = {link.axis: link for link in net.axes}
        found = {one: one.resolved(where, links) for one in set(given)}
        return Model(tuple(found[one][0] for one in given), (*send, 0.0), tuple(found[one][1] for one in given), tuple(late))


class TimedAction(NamedTuple):
    action: Action
    start: float
    end: float


@dataclasses.dataclass(frozen=True, repr=False)
class Simulated:
    """The times at which each action of each rank starts and ends, in the order of the schedule; the time of the step, with the
    communication exposed after a rank's last action; the most bytes of residuals and pendings that each rank holds, and `held`, the
    bytes that it holds after each of its actions, both with what it keeps for others; `moved_bytes`, what each rank sends to others
    to keep, which comes back; and `exposed`, the time that its dgrads wait for that."""

    schedule: Schedule
    starts: tuple[array[float], ...]
    ends: tuple[array[float], ...]
    time: float
    peak_bytes: tuple[float, ...]
    held: tuple[array[float], ...]
    moved_bytes: tuple[float, ...]
    exposed: tuple[float, ...]

    @functools.cached_property
    def slots(self) -> tuple[tuple[TimedAction, ...], ...]:
        """The actions of each rank with their times."""
        rows = zip(self.schedule.ranks, self.starts, self.ends, strict=True)
        return tuple(tuple(map(TimedAction, actions, starts, ends)) for actions, starts, ends in rows)

    @functools.cached_property
    def busy(self) -> tuple[float, ...]:
        """The time in which a rank works, by rank; a pair side by side counts once."""
        return tuple(map(self._busy, range(len(self.starts))))

    def _busy(self, rank: int) -> float:
        starts, ends, actions, pairs = self.starts[rank], self.ends[rank], self.schedule.ranks[rank], self.schedule.together
        if not pairs:
            return sum(ends) - sum(starts)
        return sum(end - start for action, start, end in zip(actions, starts, ends, strict=True) if action not in pairs)

    @property
    def idle(self) -> tuple[float, ...]:
        """The time of the step in which a rank does nothing, by rank."""
        return tuple(self._rounded(self.time - busy) for busy in self.busy)

    @property
    def waiting(self) -> tuple[float, ...]:
        """The time in which a rank waits between its first and its last action, by rank. If ranks may go on with the next step
        before others end this one, this is all the time that is lost."""
        rows = zip(self.starts, self.ends, self.busy, strict=True)
        return tuple(self._rounded(ends[-1] - starts[0] - busy) if starts else 0.0 for starts, ends, busy in rows)

    def _rounded(self, difference: float) -> float:
        """The difference, or 0 if it is only rounding from the order of sums."""
        return difference if abs(difference) > ROUNDING * self.time else 0.0

    @property
    def bubble(self) -> float:
        """The idle fraction of all ranks' time."""
        return sum(self.idle) / (self.time * len(self.starts)) if self.time else 0.0

    def __repr__(self) -> str:
        rows = zip(self.busy, self.idle, self.peak_bytes, strict=True)
        ranks = [f"rank {i:<4} {busy:>12g} {idle:>12g} {shown_bytes(peak):>12}" for i, (busy, idle, peak) in enumerate(rows)]
        head = f"{self.schedule.name}: {self.time:g} per step, {100 * self.bubble:.1f} % idle"
        return on_screen("\n".join([head, f"{'':9} {'busy':>12} {'idle':>12} {'peak bytes':>12}", *ranks]))

    def _repr_html_(self) -> str:
        return in_html(repr(self))

    def __str__(self) -> str:
        return self.said()

    def said(self, unit: str = "") -> str:
        """Return a one-line summary, with the time in `unit`: of a step, and the longest wait of a rank between its first and its
        last action, which is all that is lost if ranks may go on with the next step."""
        peaks = [shown_bytes(peak) for peak in self.peak_bytes]
        shown = ", ".join(peaks if len(peaks) <= 16 else [*peaks[:8], "...", *peaks[-8:]])
        time = f"{self.time:g} {unit}".rstrip()
        idle = f", waiting inside the step: {max(self.waiting):g}" if any(self.waiting) else ", no rank waits inside the step"
        moved = f", {shown_bytes(sum(self.moved_bytes))} to other ranks and back, exposed {sum(self.exposed):g}"
        said = f"{self.schedule.name}: {time} per step, {100 * self.bubble:.1f} % idle{idle}, peak bytes by rank: {shown}"
        return said + (moved if any(self.moved_bytes) else "")


def shown_bytes(nbytes: float) -> str:
    """Format bytes with a unit, small numbers without: if costs are not measured, a microbatch counts as one byte."""
    return size_of(nbytes) if nbytes >= 1024 else f"{nbytes:g}"


def simulate(schedule: Schedule, costs: Costs | Sequence[Costs] | None = None, network: Network | None = None) -> Simulated:
    """Simulate the schedule: every action starts as soon as its rank is free and its inputs have arrived. `costs`: one for every
    stage, or one each.

    Raises `ValueError` for costs of another number of stages, and for collectives on an axis that `network` lacks.

    >>> from funcops.schedule import gpipe, simulate
    >>> found = simulate(gpipe(2, 4))
    >>> found.time, found.bubble, found.peak_bytes
    (15.0, 0.2, (4.0, 4.0))
    """
    require_type("simulate", "schedule", schedule, Schedule)
    model = Model.of(schedule, costs, network, "simulate")
    count, ranks, together = schedule.microbatches, range(len(schedule.ranks)), schedule.together
    forward, dgrad = (array("d", bytes(8 * schedule.stages * count)) for _ in range(2))  # when each output reaches the next stage
    times = {kind: [c.time(kind) for c in model.costs] for kind in KINDS}
    kept = {"F": [c.residual_bytes for c in model.costs], "I": [c.pending_bytes - c.residual_bytes for c in model.costs]}
    freed = {"W": [c.pending_bytes for c in model.costs], "B": [c.residual_bytes for c in model.costs]}
    free, held, peak = ([0.0] * len(ranks) for _ in range(3))
    starts, ends, after = ([array("d") for _ in ranks] for _ in range(3))
    send, last = model.send, schedule.stages - 1
    for rank, action in schedule.order():
        stage, kind, m = action
        start, index = free[rank], stage * count + m
        if kind == "F":
            if stage and forward[index - count] > start:
                start = forward[index - count]
            end = start + times[kind][stage]
            forward[index] = end + send[stage]
        elif kind == "W":
            end = start + times[kind][stage]
        else:
            arrival = dgrad[index + count] if stage < last else 0.0
            if together and action in together:
                start, end = _side_by_side(schedule, model, rank, action, arrival, starts, ends, forward)
            else:
                start = max(start, arrival)
                end = start + times[kind][stage]
            dgrad[index] = end + (send[stage - 1] if stage else 0.0)
        starts[rank].append(start)
        ends[rank].append(end)
        free[rank] = end
        if kind in kept:
            held[rank] += kept[kind][stage]
            if held[rank] > peak[rank]:
                peak[rank] = held[rank]
        else:
            held[rank] -= freed[kind][stage]
        after[rank].append(held[rank])
    for stage, rank in schedule.rank_of.items():
        free[rank] += model.after[stage]
    peaks, bytes_after = tuple(peak), tuple(after)
    moved, late = [0.0] * len(ranks), [0.0] * len(ranks)
    for stage, rank in schedule.rank_of.items():
        moved[rank] += count * sum([one.nbytes for one in model.costs[stage].moved])
        late[rank] += count * model.waits[stage]
    if any(moved):
        peaks, bytes_after = with_guests(schedule, [own.moved for own in model.costs], ends, after)
    return Simulated(schedule, tuple(starts), tuple(ends), max(free), peaks, bytes_after, tuple(moved), tuple(late))


def _side_by_side(
    schedule: Schedule,
    model: Model,
    rank: int,
    action: Action,
    arrival: float,
    starts: list[array[float]],
    ends: list[array[float]],
    forward: array[float],
) -> tuple[float, float]:
    """The times of a backward whose gradient arrives at `arrival`. The forward right before it is moved to the same times: both
    begin when both can, and end together."""
    before = schedule.ranks[rank][len(starts[rank]) - 1]
    own = model.costs[action.stage]
    time = own.together if own.together is not None else model.costs[before.stage].forward + own.time(action.kind)
    start = max(starts[rank][-1], arrival)
    starts[rank][-1], ends[rank][-1] = start, start + time
    forward[before.stage * schedule.microbatches + before.microbatch] = start + time + model.send[before.stage]
    return start, start + time
