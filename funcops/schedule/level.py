"""`level`: a policy for each stage of a pipeline, so that its ranks hold about as many bytes as each other."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from funcops.engine.compose.chain import ChainConfig
from funcops.engine.errors import fail, in_html, on_screen, require, require_number, require_type
from funcops.schedule.actions import Schedule
from funcops.schedule.choices import Choice
from funcops.schedule.delay import Delaying
from funcops.schedule.draw import draw_held
from funcops.schedule.moved import refuse
from funcops.schedule.simulate import ROUNDING, Costs, Model, Network, Simulated, shown_bytes, simulate
from funcops.schedule.stage import check_staged

COMBINATIONS = 4096  # of the choices of a rank's stages, of which no more are tried
SIMULATED = 4  # levels, the highest that are even enough
BUDGETS = 8  # for a schedule's wgrads


@dataclasses.dataclass(frozen=True, repr=False)
class Leveled:
    """`picked`: the choice of each stage. `before` and `after`: the step simulated with the first choice of every stage, and with
    the picked ones; their `held` are the bytes of each rank over time. `recomputing`: for each rank, the time of a step in which it
    computes again what its policies do not keep."""

    picked: tuple[Choice, ...]
    before: Simulated
    after: Simulated
    recomputing: tuple[float, ...]

    @property
    def schedule(self) -> Schedule:
        """The schedule to run with the policies."""
        return self.after.schedule

    @property
    def ratio(self) -> float:
        """The largest peak of a rank over the mean of all."""
        return _ratio(self.after.peak_bytes)

    @property
    def exposed(self) -> float:
        """The time by which the step is longer: recomputation that waiting does not hide. Below 0 if moved wgrads save more."""
        return self.after.time - self.before.time

    def staged(self, cfg: ChainConfig) -> ChainConfig:
        """Return the chain with each stage's op under its policy, for `run` and `Pipeline`; params, results and gradients are
        the same as without. Raises `ValueError` for a chain of another number of stages."""
        check_staged("Leveled.staged", cfg, len(self.picked))
        steps = [dataclasses.replace(step, op=one.op(step.op)) for step, one in zip(cfg.steps, self.picked, strict=True)]
        return dataclasses.replace(cfg, steps=tuple(steps))

    def draw(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Return matplotlib's figure of the bytes that each rank holds over time, before and after, and write it to `path` if
        given. Raises `ImportError` without matplotlib (the extra `examples`)."""
        return draw_held({"before": self.before, "after": self.after}, path)

    def __repr__(self) -> str:
        return on_screen(str(self))

    def _repr_html_(self) -> str:
        return in_html(repr(self))

    def __str__(self) -> str:
        stages: dict[int, list[str]] = {}
        for stage, rank in sorted(self.after.schedule.rank_of.items()):
            stages.setdefault(rank, []).append(f"{stage}: {self.picked[stage].name}")
        before, more = _ratio(self.before.peak_bytes), self.exposed / self.before.time if self.before.time else 0.0
        lines = [
            f"{self.schedule.name}: largest peak over mean {before:.2f} -> {self.ratio:.2f}, "
            f"time per step {self.before.time:g} -> {self.after.time:g} ({100 * more:+.1f} %)",
            f"{'':9} {'peak before':>12} {'peak after':>12} {'recomputing':>12}  stages",
        ]
        rows = zip(self.before.peak_bytes, self.after.peak_bytes, self.recomputing, strict=True)
        for rank, (plain, peak, again) in enumerate(rows):
            said = "; ".join(stages.get(rank, []))
            lines.append(f"rank {rank:<4} {shown_bytes(plain):>12} {shown_bytes(peak):>12} {again:>12g}  {said}")
        return "\n".join(lines)


def _ratio(peaks: Sequence[float]) -> float:
    """The largest over the mean."""
    return max(peaks) * len(peaks) / sum(peaks) if any(peaks) else 1.0


def level(
    schedule: Schedule,
    choices: Sequence[Sequence[Choice]],
    costs: Costs | Sequence[Costs] | None = None,
    network: Network | None = None,
    *,
    most: float = 1.1,
) -> Leveled:
    r"""Pick a choice for each stage, so that the largest peak of a rank is at most `most` times the mean of all ranks' peaks.

    Rank r holds at most $\max_t \sum_s n_s(t)\, b_s + w_s(t)\, p_s$ bytes: after its action t, $n_s$ microbatches of its stage s
    are between forward and dgrad, with residuals of $b_s$ bytes each, and $w_s$ between dgrad and wgrad, with pendings of $p_s$.
    The schedule alone gives the numbers: in 1F1B on p ranks, $n_r \le p - r$. For a level L each rank takes the choices that add
    least work and stay within L. The highest four levels that are even enough are simulated, the shortest step is returned, and of
    equally short ones the one with the lowest level. No policy makes a pending smaller, so if the schedule has wgrads apart from
    dgrads (and no pairs), `delay_w` also places them within several budgets: run the plan's `schedule`, not the given one.

    `choices`: for each stage, the stage as it is and then its policies, as `stage_choices` lists them. `costs`: the times and
    `output_bytes` of the stages as they are; their other bytes are not read, as each choice has its own. A choice's `extra` is
    added to the time of dgrad. A rank of several stages tries at most 4,096 combinations, of evenly spaced choices if there are
    more.

    Raises `ValueError` for another number of stages, and if no choices are as even as `most`, with the ratio that was reached and
    the rank that holds too much.

    >>> from funcops.schedule import Choice, level, one_f_one_b
    >>> own = [Choice(f"{again} of 16 layers again", None, again / 48, 1 - again / 16) for again in range(16)]
    >>> found = level(one_f_one_b(4, 16), [own] * 4)
    >>> [choice.name.split()[0] for choice in found.picked], round(found.ratio, 2)
    (['10', '8', '4', '0'], 1.09)
    >>> found.before.peak_bytes, found.after.peak_bytes
    ((4.0, 3.0, 2.0, 1.0), (1.5, 1.5, 1.5, 1.0))
    >>> found.before.time, found.after.time, found.exposed
    (57.0, 66.625, 9.625)
    """
    require_type("level", "schedule", schedule, Schedule)
    require_type("level", "choices", choices, tuple, list)
    require(len(choices) == schedule.stages, "level", "choices", f"of {schedule.stages} stages", len(choices))
    for stage, own in enumerate(choices):
        require_type("level", f"choices.{stage}", own, tuple, list)
        require(bool(own), "level", f"choices.{stage}", "at least one Choice", "none")
        for one in own:
            require_type("level", f"choices.{stage}", one, Choice)
    require_number("level", 1, most=most)
    Model.of(schedule, costs, network, "level")  # raises for costs that do not fit
    given = [costs or Costs()] * schedule.stages if costs is None or isinstance(costs, Costs) else list(costs)
    plain = [own[0].costs(cost) for own, cost in zip(choices, given, strict=True)]
    refuse("level", [own.moved for own in given])
    before, found, reached = simulate(schedule, plain, network), list[Leveled](), list[_Plan]()
    for made in (schedule, *_delayed(before, plain, network)):
        fronts = _fronts(made, choices, given)
        levels = sorted({one.peak for front in fronts for one in front}, reverse=True)
        plans = [plan for plan in (_within(fronts, highest) for highest in levels) if plan is not None]
        even = [plan for plan in plans if _evenness(plan) <= most * (1 + ROUNDING)]
        found += [_simulated(made, choices, given, network, plan, before) for plan in even[:SIMULATED]]
        reached += plans
    if not found:
        _fail_uneven(schedule, min(reached, key=_evenness), most)
    shortest = min(one.after.time for one in found) * (1 + ROUNDING)
    return min([one for one in found if one.after.time <= shortest], key=lambda one: max(one.after.peak_bytes))


def _delayed(before: Simulated, costs: Sequence[Costs], network: Network | None) -> Iterator[Schedule]:
    """The schedule with its wgrads moved, within budgets between the lowest and the highest peak; none if it has no wgrads apart
    from dgrads, or pairs, which would be split."""
    schedule, low, high = before.schedule, min(before.peak_bytes), max(before.peak_bytes)
    if schedule.together or not any(action.kind == "W" for actions in schedule.ranks for action in actions):
        return
    seen, delaying = {schedule.ranks}, Delaying(before, Model.of(schedule, costs, network, "level"))
    for i in range(BUDGETS):
        budget = low + (high - low) * i / BUDGETS
        try:
            made = delaying.within(budget)
        except ValueError:  # the budget is too small for a rank
            continue
        if made.ranks not in seen:
            seen.add(made.ranks)
            yield made


class _Own(NamedTuple):
    """Choices of a rank's stages: their numbers by stage, the rank's peak bytes, and the time of recomputation in a step."""

    picked: dict[int, int]
    peak: float
    again: float


_Plan = list[_Own]  # by rank


def _fronts(schedule: Schedule, choices: Sequence[Sequence[Choice]], costs: Sequence[Costs]) -> list[list[_Own]]:
    """For each rank the choices of its stages of which no others hold less and add no more work, from the highest peak on."""
    stages: list[list[int]] = [[] for _ in schedule.ranks]
    for stage, rank in sorted(schedule.rank_of.items()):
        stages[rank].append(stage)
    return [_front(schedule, rank, own, choices, costs) for rank, own in enumerate(stages)]


def _front(
    schedule: Schedule, rank: int, stages: list[int], choices: Sequence[Sequence[Choice]], costs: Sequence[Costs]
) -> list[_Own]:
    alive = _alive(schedule, rank, stages)
    most = max(2, int(COMBINATIONS ** (1 / max(1, len(stages))) + ROUNDING))
    numbers = list(itertools.product(*[_spaced(len(choices[stage]), most) for stage in stages]))
    owns = [[choices[stage][i] for stage, i in zip(stages, picked, strict=True)] for picked in numbers]
    nbytes = [[size for one in own for size in (one.residual_bytes, one.pending_bytes)] for own in owns]
    peaks = (torch.tensor(nbytes, dtype=torch.float64) @ torch.tensor(alive, dtype=torch.float64).T).amax(1).tolist()
    times = [[one.time(costs[stage]) for one, stage in zip(own, stages, strict=True)] for own in owns]
    found = [
        _Own(dict(zip(stages, picked, strict=True)), peak, schedule.microbatches * sum(again))
        for picked, peak, again in zip(numbers, peaks, times, strict=True)
    ]
    front: list[_Own] = []
    for one in sorted(found, key=lambda one: (one.again, one.peak)):
        if not front or one.peak < front[-1].peak:
            front.append(one)
    return front


def _alive(schedule: Schedule, rank: int, stages: list[int]) -> list[tuple[int, ...]]:
    """The numbers of residuals and pendings of each stage that a rank holds at the times at which it may hold most."""
    at = {stage: 2 * i for i, stage in enumerate(stages)}
    counts, seen = [0] * (2 * len(stages)), dict[tuple[int, ...], None]()
    actions = schedule.ranks[rank]
    for (stage, kind, _), following in itertools.zip_longest(actions, actions[1:]):
        i = at[stage]
        counts[i] += {"F": 1, "I": -1, "W": 0, "B": -1}[kind]
        counts[i + 1] += {"F": 0, "I": 1, "W": -1, "B": 0}[kind]
        if following is None or following.kind != "F":  # else more is held after the next action
            seen[tuple(counts)] = None
    most: list[tuple[int, ...]] = []
    for one in sorted(seen, key=sum, reverse=True):  # what holds as much of each has a larger sum
        if not any([all(map(operator.le, one, more)) for more in most]):
            most.append(one)
    return most


def _spaced(count: int, most: int) -> list[int]:
    """At most so many of the first `count` numbers, the first and the last among them."""
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)}) if count > most else list(range(count))


def _evenness(plan: _Plan) -> float:
    return _ratio([one.peak for one in plan])


def _within(fronts: list[list[_Own]], highest: float) -> _Plan | None:
    """The choices of each rank that add least work and stay within a level; None if a rank has none."""
    found = [next((one for one in front if one.peak <= highest), None) for front in fronts]
    return None if None in found else [one for one in found if one is not None]


def _simulated(
    schedule: Schedule,
    choices: Sequence[Sequence[Choice]],
    costs: Sequence[Costs],
    network: Network | None,
    plan: _Plan,
    before: Simulated,
) -> Leveled:
    numbers = {stage: i for one in plan for stage, i in one.picked.items()}
    picked = tuple(own[numbers[stage]] for stage, own in enumerate(choices))
    after = simulate(schedule, [one.costs(cost) for one, cost in zip(picked, costs, strict=True)], network)
    return Leveled(picked, before, after, tuple(one.again for one in plan))


def _fail_uneven(schedule: Schedule, plan: _Plan, most: float) -> NoReturn:
    peaks = [one.peak for one in plan]
    high, low = peaks.index(max(peaks)), peaks.index(min(peaks))
    held = f"rank {high} holds {shown_bytes(peaks[high])} and rank {low} {shown_bytes(peaks[low])}"
    stages = ", ".join(map(str, plan[high].picked))
    reached = math.ceil(100 * _ratio(peaks)) / 100
    remedy = f"give stage {stages} choices that keep less, or more of them, or pass most={reached:g}"
    wanted = f"such that the largest peak of a rank of {schedule.name} is at most {most:g} times the mean"
    fail("level", "choices", wanted, f"{_ratio(peaks):.2f} times at best, where {held}: {remedy}")
