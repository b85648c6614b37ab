"""Notes for a forward that runs again, of what it read beside its arguments: the second run reads nothing anew.

`remat` runs a forward in a `first_run` block, keeps the notes that are made in it, and runs it again in a `second_run` block of
these notes. An op whose forward reads more than its arguments asks for its `note`; no other op knows of this.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from funcops.engine.errors import fail

__all__ = ["first_run", "note", "second_run"]

N = TypeVar("N")


class Note(NamedTuple):
    owner: Any
    content: Any

    def __deepcopy__(self, memo: Any) -> Note:
        return self  # a copy of residuals is run again by the same owner

    def __reduce__(self) -> Any:  # its owner would be another one there
        got = f"residuals of {self.owner} (keep what it keeps: no remat, no Recompute)"
        fail("remat", "pickled residuals", "of operators whose forward reads its arguments alone", got, TypeError)


class _Thread(threading.local):
    """`made`: the notes of the innermost first run; `given`: a second run's notes that no forward has taken."""

    # of the class, so that every thread begins without notes
    made: list[Note] | None = None
    given: list[Note] | None = None


_thread = _Thread()


used = False  # an op that makes notes sets it: until then a compiler traces nothing of this


# no `contextmanager`, which opens only once: a forward with pauses enters its block anew at every turn
class _Run:
    """A block with other notes in its thread."""

    made: Any
    given: Any

    def __enter__(self) -> Any:
        # stays None while no op makes notes: such a block changes nothing, so it restores nothing
        self._before: Any = None
        if used:
            self._before = _thread.made, _thread.given
            self._set()
        return self.made

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            _thread.made, _thread.given = self._before

    def _set(self) -> None: ...


class first_run(_Run):
    """A block around a forward that will run again; it gives the list of the notes."""

    def __init__(self) -> None:
        self.made = []

    def _set(self) -> None:
        _thread.made = self.made  # inside of another forward's second run it takes notes from there


class second_run(_Run):
    """A block around the second run of a forward that made these notes."""

    def __init__(self, notes: Iterable[Note]) -> None:
        self.made, self.given = None, list(notes)

    def _set(self) -> None:
        _thread.made, _thread.given = None, self.given


def note(owner: Any, make: Callable[[], N]) -> N | None:
    """The note of a forward of `owner`: a new one in a first run, in a second run the one that it made in the first, in the order
    of the calls; None if the forward runs once."""
    made, given = _thread.made, _thread.given
    if made is None and given is None:
        return None
    if given is None:
        found = Note(owner, make())
    else:
        at = next((i for i, one in enumerate(given) if one.owner is owner), None)
        if at is None:
            got = f"another call of {owner} (under torch.compile, leave the function that calls it out with torch.compiler.disable)"
            fail("remat", "the second run of a forward", "of the calls of the first one", got, RuntimeError)
        # taken out: a second call of the same owner finds its second note
        found = given.pop(at)
    # also in a second run: a remat inside of another keeps the note for its own
    if made is not None:
        made.append(found)
    return found.content  # type: ignore[no-any-return]
