"""Device time, host time and memory of calls on a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from funcops.adapters.graphs.backend import DeviceBackend, Options
from funcops.engine.errors import CaptureError

Call = Callable[[], Any]
COLD_BYTES = 256 * 2**20  # rotating over this much leaves nothing in a level-2 cache of 50 to 126 MB
REPLAY_US, MOST_CALLS, MOST_COPIES = 2000.0, 64, 16


class Replay(NamedTuple):
    """A function that runs `calls` calls, and whether it is a CUDA graph. `held` keeps the calls alive, as a graph reads their
    arguments' memory but does not own it."""

    run: Call
    calls: int
    captured: bool
    held: Any = ()


class CudaTimer:
    """Measures median device times, the providers taking turns, all on one stream.

    Calls are captured in a CUDA graph, so that the host's time is not measured; a call that cannot be captured is timed
    eagerly. Each provider gets several calls on copies of the same arguments, so that no input is in the cache.
    """

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()

    def replay(self, calls: Sequence[Call]) -> Replay:
        with torch.cuda.stream(self.stream):
            for call in (*calls, *calls):
                call()
            times = 1 + int(REPLAY_US / max(1.0, self._event_us(calls) * len(calls)))
        order = (list(calls) * times)[: max(len(calls), MOST_CALLS)]

        def run() -> None:
            for call in order:
                call()

        try:
            graph, _ = DeviceBackend().capture(run, lambda _: [], None, Options(self.stream))
        except CaptureError:
            return Replay(run, len(order), captured=False)
        return Replay(graph.replay, len(order), captured=True, held=order)

    def device_us(self, replays: dict[str, Replay], rounds: int = 15) -> dict[str, float]:
        samples: dict[str, list[float]] = {name: [] for name in replays}
        with torch.cuda.stream(self.stream):
            for one in replays.values():
                one.run()
            for _ in range(rounds):
                for name, one in replays.items():
                    samples[name].append(self._event_us([one.run]) / one.calls)
        return {name: statistics.median(values) for name, values in samples.items()}

    def _event_us(self, calls: Sequence[Call]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / len(calls)

    def host_us(self, call: Call, rounds: int = 9, calls: int = 20) -> float:
        """The time until a call returns, while the device's queue is short."""
        samples = []
        for _ in range(rounds):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            samples.append((time.perf_counter() - start) / calls * 1e6)
        torch.cuda.synchronize()
        return statistics.median(samples)

    def memory_mib(self, call: Call) -> tuple[float, float]:
        """Peak MiB allocated during the call: the total, and the increase over the allocation before it."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        return peak / 2**20, (peak - before) / 2**20
