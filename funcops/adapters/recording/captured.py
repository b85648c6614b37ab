"""Recordings of CUDA graphs. What the steps of a captured function tell is digested in the graph itself, in memory that each replay
writes anew, and a recording around a replay takes it from there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from funcops.adapters.recording.recorded import taker
from funcops.adapters.recording.taken import Digests
from funcops.engine.backend import notes
from funcops.engine.errors import fail


class ToldByGraph(Digests):
    """Values that a graph tells at each replay: about each, and the device of its digest."""

    devices: tuple[torch.device, ...] = ()

    def __call__(self, found: list[notes.Told], kept: Any) -> None:
        for told in found:
            self.take(told)

    def end(self) -> None:
        """Bring the digests together, as the last work of the capture."""
        self.memory = self.stacked()
        self.devices = tuple([words.device for words in self.words])
        self.words.clear()

    def check(self) -> None:
        """Raise, before a replay, if the recording around it asks for what the graph does not tell."""
        to = taker()
        if to.stops:
            got = "True around a replay, which does not stop: read first_nonfinite, or call the function itself"
            fail("recording", "stop_at_nonfinite", "False for a CUDA graph", got, RuntimeError)
        if to.layouts.shapes != self.layouts.shapes:
            fail("recording", "like", "as in the recording around the graph's capture", "other recordings", RuntimeError)

    def tell(self) -> None:
        """Give the recording of this thread what a replay computed."""
        to = taker()
        rows = {device: iter(memory.clone()) for device, memory in self.memory.items()}
        for about, device in zip(self.about, self.devices, strict=True):
            to.note(about, next(rows[device]))


@contextmanager
def told_by_graph() -> Iterator[ToldByGraph | None]:
    """A block that captures a CUDA graph in this thread, which tells what the steps in it tell; None outside of a recording."""
    made = ToldByGraph(taker().layouts) if notes.takers else None
    before, notes.thread.captured = notes.thread.captured, () if made is None else (made,)
    try:
        yield made
    finally:
        notes.thread.captured = before


def recorded(tells: bool) -> bool:
    """Whether a recording is around a replay. Raises `RuntimeError` if the graph was captured without one, and tells nothing."""
    if notes.takers and not tells:
        got = "one captured outside of it, which tells nothing: capture it in one, too, or call the function itself"
        fail("recording", "a graph", "one that was captured in a recording", got, RuntimeError)
    return bool(notes.takers)
