"""Digests of what steps tell, each with what is known of its value beforehand."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from funcops.adapters.recording.digest import digest
from funcops.adapters.recording.parts import Layouts
from funcops.engine.backend import notes
from funcops.engine.errors import short


class Digests:
    """Values in the order in which they are told: about each, and its digest on its device."""

    def __init__(self, layouts: Layouts) -> None:
        self.layouts = layouts
        self.about: list[Any] = []
        self.words: list[Tensor] = []
        self.last: Any = (lambda: None), None, None  # the last value, weakly; its memory, if it is a dx; its digest

    def take(self, told: notes.Told) -> None:
        """Note the digest of a value, after its parts."""
        key, value = (told.path, told.half, told.name), told.value
        for part, cut in self.layouts.parts(key, value):
            self.note((*key, part, tuple(cut.shape), short(value.dtype), told.ran), digest(cut))
        self.note((*key, "", tuple(value.shape), short(value.dtype), told.ran), self._of(told))

    def note(self, about: Any, words: Tensor) -> None:
        self.about.append(about)
        self.words.append(words)

    def stacked(self) -> dict[torch.device, Tensor]:
        """The digests on each device as one tensor."""
        devices = {words.device for words in self.words}
        return {device: torch.stack([words for words in self.words if words.device == device]) for device in devices}

    def _of(self, told: notes.Told) -> Tensor:
        """The digest of a value. What a call is given is often the dx or sum that was told before it: then that one's digest."""
        value = told.value
        memory = (value.data_ptr(), value.numel(), value.dtype) if value.is_contiguous() else None
        last, where, words = self.last
        # while that tensor lives, its memory is nobody else's, and nothing ran since
        if not told.name.startswith("dy") or memory is None or where != memory or last() is None:
            words = digest(value)
        self.last = weakref.ref(value), memory if told.name.startswith(("dx", "sum")) else None, words
        return words
