"""Shared memory: what a program may have on the device at hand, and how many tiles a pipeline holds there.

A kernel that may need much declares it: `launcher(kernel, shared=need)`, where `need(arguments, stages, memory)` returns bytes, at
least as many as the compiler takes. A launch has the most stages whose need is within the device's limit, and a kernel with a
choice of tiles takes the largest that is, by the same function. So a choice depends on how much memory a device has, not on which
device it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from triton import knobs
from triton.runtime import driver

__all__ = ["HOPPER", "Need", "SharedMemory", "shared_memory"]


class SharedMemory(NamedTuple):
    """`limit`: the bytes that a program may have. `copies`: whether loads can go there while a program computes. `feeds`: whether
    matrices are multiplied out of it meanwhile, too (wgmma, tcgen05), so that no tile of a pipeline is free for a load."""

    limit: int
    copies: bool
    feeds: bool

    def tiles(self, stages: int) -> int:
        """How many tiles of each factor of a product are held at a time."""
        return stages if self.feeds else max(1, stages - 1)


Need = Callable[[dict[str, Any], int, SharedMemory], int]
IN_INTERPRETER = bool(knobs.runtime.interpret)
HOPPER = SharedMemory(232_448, True, True)  # whose choices the interpreter makes


def shared_memory() -> SharedMemory:
    """The shared memory of the current device; in the interpreter, an H100's."""
    if IN_INTERPRETER:
        return HOPPER
    active = driver.active
    return _of_device(active.get_current_device(), active)


@functools.lru_cache(maxsize=64)
def _of_device(device: int, active: Any) -> SharedMemory:
    target = active.get_current_target()
    limit = active.utils.get_device_properties(device)["max_shared_mem"]
    cuda = target.backend == "cuda"
    return SharedMemory(limit, cuda, cuda and 90 <= target.arch < 120)
