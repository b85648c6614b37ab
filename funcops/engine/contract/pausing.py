"""Functions that pause while communication is in flight, so that something else may run meanwhile.

An author writes the beginning of a function: it starts communication and returns `Flying(then)`, where `then()` waits for it and
goes on, to a result or to the next `Flying`. `landed` makes of that what the op's function returns, `pausing` a generator that
yields at each `Flying`; `take_turns` runs several such generators side by side.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable
from types import GeneratorType
from typing import Any, NamedTuple

from funcops.engine.contract.functions import dgrad_of, forward

__all__ = ["Flying", "Pauses", "Pausing", "landed", "pausing", "take_turns", "without_params"]

Pauses = Generator[None, None, Any]


class Flying(NamedTuple):
    """Communication in flight. `then()` waits for it and goes on."""

    then: Callable[[], Any]


class Pausing(NamedTuple):
    """The functions of an op as generators, which yield wherever communication that they started is in flight, and return what the
    op's own functions return."""

    fwd: Callable[..., Any]
    dgrad: Callable[..., Any]
    bwd: Callable[..., Any]


def landed(found: Any) -> Any:
    """The result of a function that may have returned communication in flight."""
    while type(found) is Flying:
        found = found.then()
    return found


def pausing(begin: Callable[..., Any]) -> Callable[..., Pauses]:
    """The generator function of a function that may return communication in flight."""

    @functools.wraps(begin)
    def run(*args: Any, **options: Any) -> Pauses:
        found = begin(*args, **options)
        while type(found) is Flying:
            yield
            found = found.then()
        return found

    return run


def without_params(name: str, config: type, residuals: Any, fwd: Any, dgrad: Any) -> Pausing:
    """`Pausing` of an op without params, from the beginnings of its fwd and dgrad, which are checked as the op's own are."""
    checked: Any = dgrad_of(residuals, f"{name}_dgrad")(dgrad)
    checked.alone = True  # as `make_op` says of the op's own: it computes only dx
    back = pausing(checked)

    def bwd(residuals: Any, dy: Any, cfg: Any, *, into: Any = None) -> Pauses:
        # not decorated: `back` opens and checks the residuals
        return None, (yield from back(residuals, dy, cfg))[0]

    return Pausing(pausing(forward(config, name=f"{name}_fwd")(fwd)), back, bwd)


def ran(found: Any) -> Pauses:
    """The result of a function that pauses, or of one that does not."""
    return (yield from found) if type(found) is GeneratorType else found


def take_turns(parts: Iterable[Pauses]) -> list[Any]:
    """The results of generators that run side by side: each in turn up to its next pause, in their order, until all have ended. So
    what one has in flight is waited for after the turns of all others, and all ranks start their communication in one order."""
    waiting = dict(enumerate(parts))
    found = [None for _ in waiting]
    while waiting:
        # a list, as parts that have ended leave the dict during their turn
        for i, part in list(waiting.items()):
            try:
                next(part)
            except StopIteration as end:
                found[i] = end.value
                del waiting[i]
    return found
