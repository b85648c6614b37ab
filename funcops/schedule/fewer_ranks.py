"""`fold`: a schedule of many ranks on fewer."""

from __future__ import annotations

from collections.abc import Sequence

from funcops.engine.errors import require, require_count, require_type
from funcops.schedule.actions import Schedule
from funcops.schedule.simulate import Costs, Network, simulate


def fold(schedule: Schedule, ranks: int, costs: Costs | Sequence[Costs] | None = None, network: Network | None = None) -> Schedule:
    """Return the schedule with neighbouring ranks merged: of its n ranks, the n / `ranks` from r n / `ranks` on become rank r,
    which runs their actions in the order of the times at which `simulate` starts them; pairs are split. Raises `ValueError` if
    `ranks` does not divide n.

    >>> from funcops.schedule import fold, gpipe
    >>> fold(gpipe(4, 2), 2).rank_of
    {0: 0, 1: 0, 2: 1, 3: 1}
    """
    require_type("fold", "schedule", schedule, Schedule)
    count = len(schedule.ranks)
    require_count("fold", ranks=ranks)
    require(count % ranks == 0, "fold", "ranks", f"a divisor of {count}", ranks)
    slots, size = simulate(schedule, costs, network).slots, count // ranks
    made = []
    for rank in range(ranks):
        own = [slot for of in slots[rank * size : rank * size + size] for slot in of]
        made.append(tuple(slot.action for slot in sorted(own, key=lambda slot: (slot.start, slot.end))))
    return Schedule(f"{schedule.name} on {ranks}", tuple(made))
