"""Schedules from the literature, one stage a rank."""

from __future__ import annotations

from funcops.engine.errors import require
from funcops.schedule.actions import Action, Schedule, is_count


def check_sizes(where: str, ranks: int, microbatches: int) -> None:
    for name, value in (("ranks", ranks), ("microbatches", microbatches)):
        require(is_count(value, 1), where, name, "at least 1", repr(value))


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards. Bubble (p - 1) / (m + p - 1); keeps m microbatches. arXiv:1811.06965. Raises
    `ValueError` for fewer than one rank or microbatch.

    >>> from funcops.schedule import gpipe
    >>> gpipe(2, 2).to_csv().splitlines()
    ['0F0,0F1,0B0,0B1', '1F0,1F1,1B0,1B1']
    """
    check_sizes("gpipe", ranks, microbatches)
    return Schedule("gpipe", tuple(tuple(Action(r, k, m) for k in "FB" for m in range(microbatches)) for r in range(ranks)))


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Once rank r has p - r microbatches in flight, it runs one backward for each forward. The bubble is GPipe's; rank r keeps
    min(p - r, m). PipeDream-Flush, arXiv:2006.09503. Raises `ValueError` for fewer than one rank or microbatch.

    >>> from funcops.schedule import one_f_one_b, simulate
    >>> one_f_one_b(2, 3).to_csv().splitlines()
    ['0F0,0F1,0B0,0F2,0B1,0B2', '1F0,1B0,1F1,1B1,1F2,1B2']
    >>> simulate(one_f_one_b(2, 3)).peak_bytes
    (2.0, 1.0)
    """
    check_sizes("one_f_one_b", ranks, microbatches)
    return Schedule("one_f_one_b", tuple(_one_f_one_b(r, ranks - r, microbatches) for r in range(ranks)))


def _one_f_one_b(stage: int, in_flight: int, microbatches: int) -> tuple[Action, ...]:
    ahead = min(in_flight, microbatches)
    actions = [Action(stage, "F", m) for m in range(ahead)]
    for m in range(microbatches):
        actions.append(Action(stage, "B", m))
        if m + ahead < microbatches:
            actions.append(Action(stage, "F", m + ahead))
    return tuple(actions)


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B with delayed weight gradients: rank r has as many microbatches in flight as in 1F1B, and delays each weight gradient by
    r dgrads. Every rank keeps at most p. At m >= p each rank's idle time is (p - 1) max(F, I, F + I - W), and at most (p - 1)
    max(I, F + I - W) of it is spent waiting between its first and its last action. arXiv:2401.10241. Raises `ValueError` for fewer
    than one rank or microbatch.

    >>> from funcops.schedule import one_f_one_b, simulate, zb_h1
    >>> simulate(one_f_one_b(2, 4)).idle, simulate(zb_h1(2, 4)).idle
    ((3.0, 3.0), (1.0, 1.0))
    """
    check_sizes("zb_h1", ranks, microbatches)
    return Schedule("zb_h1", tuple(_delayed(r, ranks - r, r, microbatches) for r in range(ranks)))


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """1F1B whose weight gradients wait twice as long: rank r has 2 (p - r) - 1 microbatches in flight. A rank keeps up to 2 p - 1.
    At m >= 2 p - 1 it waits at most (p - 1) max(0, I - F, F + I - 2 W) between its first and its last action, 0 at equal times. Its
    idle time is (p - 1) max(F, I - F, F + I - 2 W): ranks begin and end one after another, (p - 1) F in all, which is lost if all
    wait for the optimiser together. arXiv:2401.10241. Raises `ValueError` for fewer than one rank or microbatch.

    >>> from funcops.schedule import simulate, zb_h1, zb_h2
    >>> simulate(zb_h1(2, 4)).peak_bytes, simulate(zb_h2(2, 4)).peak_bytes
    ((2.0, 2.0), (3.0, 3.0))
    >>> simulate(zb_h1(2, 4)).waiting, simulate(zb_h2(2, 4)).waiting, simulate(zb_h2(2, 4)).idle
    ((1.0, 0.0), (0.0, 0.0), (1.0, 1.0))
    """
    check_sizes("zb_h2", ranks, microbatches)
    return Schedule("zb_h2", tuple(_delayed(r, 2 * (ranks - r) - 1, 2 * r, microbatches) for r in range(ranks)))


def _delayed(stage: int, in_flight: int, put_off: int, microbatches: int) -> tuple[Action, ...]:
    """1F1B with dgrads instead of the backwards, and each weight gradient `put_off` dgrads later."""
    ahead = min(in_flight, microbatches)
    actions = [Action(stage, "F", m) for m in range(ahead)]
    done = 0
    for m in range(microbatches):
        actions.append(Action(stage, "I", m))
        if m >= put_off:
            actions.append(Action(stage, "W", done))
            done += 1
        if m + ahead < microbatches:
            actions.append(Action(stage, "F", m + ahead))
    return (*actions, *(Action(stage, "W", m) for m in range(done, microbatches)))
