"""The turns of equal layers in a row: what starts before a layer's turn, what waits until after it."""

from __future__ import annotations

from collections.abc import Sequence

from funcops.engine.contract.op import Prefetch
from funcops.engine.program.rows import Row

Turn = tuple[str, int]  # a kind of row, and the number of a layer


def turns(order: Sequence[int], starts: bool, late: tuple[str, ...] = ()) -> list[Turn]:
    """The rows of layers that run in this order. With `starts`, what a layer reads is started before the layer ahead of it runs,
    and waited for at its own turn. `late`: what happens to a layer's gradients in flight, a step after each layer behind it."""

    def landing(turn: int) -> list[Turn]:
        return [(step, order[turn - back]) for back, step in enumerate(late) if 0 <= turn - back < len(order)]

    found = [("start", order[0])] if starts else []
    for turn, i in enumerate(order):
        if starts:
            # started after this layer's has landed, so that one layer's is in flight at a time
            found += [("wait", i), *(("start", after) for after in order[turn + 1 : turn + 2])]
        found += [("run", i), *landing(turn - 1)]
    for turn in range(len(late)):
        found += landing(len(order) - 1 + turn)
    return found


def turns_of(ahead: Prefetch, times: int) -> dict[str, tuple[Row, ...]]:
    """The rows of the forward and of the whole backward of a repeat of layers that can prefetch, as `explain` shows them."""
    both = {"forward": (range(times), ()), "backward": (range(times)[::-1], ahead.late)}
    return {
        half: tuple(Row(kind, reads=(f"layer {i}",)) for kind, i in turns(order, True, steps))
        for half, (order, steps) in both.items()
    }
