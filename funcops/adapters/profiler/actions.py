"""A schedule's actions in a profile: when each ran, and when the simulator says that it would, from what actions mostly took.

A trace names the stage and the half of each operator or kernel, but not its microbatch. All microbatches of a stage run the same
operators, and a rank runs its actions in turn: so the operators of a half, in time, are as many equal parts as there are
microbatches.
"""

from __future__ import annotations

import os
import statistics
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from funcops.adapters.profiler.trace import Span
from funcops.engine.compose.chain import ChainConfig
from funcops.engine.errors import fail, require, require_type
from funcops.schedule import Action, Costs, Schedule, Simulated, draw, simulate

HALVES = {"fwd": "F", "dgrad": "I", "wgrad": "W", "bwd": "B"}


class ScheduleTimes(NamedTuple):
    """The last call's actions as they `ran`, and the schedule as `simulate` has it with `costs`, the medians of each stage's times;
    in seconds from the first action on, without bytes."""

    ran: Simulated
    predicted: Simulated
    costs: tuple[Costs, ...]

    def draw(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Return matplotlib's figure of both, one above the other on one axis of time, and write it to `path` if given. Raises
        `ImportError` without matplotlib (the extra `examples`)."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("ScheduleTimes.draw needs matplotlib: pip install matplotlib") from error
        figure = Figure(figsize=(12, 2.8 + 0.8 * len(self.ran.starts)), layout="constrained")
        panels = figure.subplots(2, 1)
        for axes, name, one in zip(panels, ("measured", "predicted"), (self.ran, self.predicted), strict=True):
            draw(one, ax=axes, unit="seconds", title=f"{one.schedule.name}, {name}: {1e3 * one.time:.3f} ms")
            axes.set_xlim(0, max(self.ran.time, self.predicted.time))
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure


def times_of(spans: Sequence[Span], calls: int, schedule: Schedule, cfg: ChainConfig) -> ScheduleTimes:
    """The times of a schedule's actions in a profile of so many calls. See `Profile.of_schedule`."""
    where = "Profile.of_schedule"
    require_type(where, "schedule", schedule, Schedule)
    require_type(where, "cfg", cfg, ChainConfig)
    require(len(cfg.steps) == schedule.stages, where, "cfg", f"a chain of {schedule.stages} steps, its stages", len(cfg.steps))
    found: dict[Action, list[tuple[float, float]]] = {}
    for stage, step in enumerate(cfg.steps):
        own = [action for action in schedule.ranks[schedule.rank_of[stage]] if action.stage == stage]
        spans_of = [span for span in spans if span[0].path == step.name or span[0].path.startswith(f"{step.name}.")]
        for kind, parts in _by_kind(where, step.name, own, spans_of).items():
            actions = [action for action in own if action.kind == kind]
            size = max(1, len(parts) // (calls * len(actions)))
            chunks = [parts[i : i + size] for i in range(0, len(parts), size)]
            if len(chunks) != calls * len(actions) or any([_names(chunk) != _names(chunks[0]) for chunk in chunks]):
                expected = f"the same operators for each of its {len(actions)} {kind} in each of {calls} calls"
                remedy = "pass accumulators (into), which its first W would make, and capture in named_steps()"
                fail(where, f"stage {step.name!r}", expected, f"{len(parts)} in all, not alike: {remedy}")
            for i, chunk in enumerate(chunks):
                found.setdefault(actions[i % len(actions)], []).append((min(s[1] for s in chunk), max(s[2] for s in chunk)))
    return _both(schedule, found)


def _names(spans: Sequence[Span]) -> list[str]:
    """The names of operators, in any order: one and what it calls may begin at the same time, as far as a trace tells."""
    return sorted([name for *_, name in spans])


def _by_kind(where: str, name: str, actions: Sequence[Action], spans: Sequence[Span]) -> dict[str, list[Span]]:
    """The spans of a stage in time, by the kind of its actions. What is recomputed belongs to the half that comes next."""
    kinds = {action.kind for action in actions}
    if kinds > {"F", "B"}:
        fail(
            where,
            f"stage {name!r}",
            "of whole backwards (B), or of I and W alone, which a trace can tell apart",
            "some of each: make each B an I and a W",
        )
    found: dict[str, list[Span]] = {kind: [] for kind in sorted(kinds)}
    following = "B" if "B" in kinds else "I"
    for span in sorted(spans, key=lambda span: (span[1], -span[2]), reverse=True):
        kind = HALVES.get(span[0].half, following)
        if kind != "F":
            kind = following = "B" if "B" in kinds else kind
        found[kind].append(span)
    return {kind: parts[::-1] for kind, parts in found.items()}


def _both(schedule: Schedule, found: dict[Action, list[tuple[float, float]]]) -> ScheduleTimes:
    first = min(spans[-1][0] for spans in found.values())
    last = {action: (spans[-1][0] - first, spans[-1][1] - first) for action, spans in found.items()}
    starts, ends = (tuple(array("d", [last[a][i] for a in actions]) for actions in schedule.ranks) for i in range(2))
    nothing, zeros = (0.0,) * len(schedule.ranks), tuple(array("d", bytes(8 * len(actions))) for actions in schedule.ranks)
    ran = Simulated(schedule, starts, ends, max(end for _, end in last.values()), nothing, zeros, nothing, nothing)

    def median(stage: int, kind: str) -> float:
        times = [end - start for action, spans in found.items() if action[:2] == (stage, kind) for start, end in spans]
        return statistics.median(times) if times else 0.0

    def cost(stage: int) -> Costs:
        dgrad = median(stage, "I") + median(stage, "B")  # a stage has one of the two
        return Costs(median(stage, "F"), dgrad, median(stage, "W"), residual_bytes=0.0, pending_bytes=0.0)

    costs = tuple(map(cost, range(schedule.stages)))
    return ScheduleTimes(ran, simulate(schedule, costs), costs)
