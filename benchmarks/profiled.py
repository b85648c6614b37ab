"""The kernels of a step on a GPU: the time and the launches of each, summed by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.autograd import DeviceType

from benchmarks.measure import Row

STEPS, LISTED = 3, 30


def profiled(bench: str, case: str, steps: Mapping[str, Callable[[], Any]]) -> Iterator[Row]:
    """For each step the time and the number of launches of its costliest kernels, of the rest, and of all, in one step."""
    for name, step in steps.items():
        step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            for _ in range(STEPS):
                step()
        events = [e for e in found.key_averages() if e.device_type is not DeviceType.CPU]  # not the runtime's calls
        kernels = [(e.key, e.self_device_time_total / STEPS, e.count / STEPS) for e in events]
        yield from _rows(bench, case, name, sorted(kernels, key=lambda kernel: -kernel[1]))


def _rows(bench: str, case: str, name: str, kernels: list[tuple[str, float, float]]) -> Iterator[Row]:
    listed, rest = kernels[:LISTED], kernels[LISTED:]
    for kernel, us, launches in (*listed, _sum("other kernels", rest), _sum("all kernels", kernels)):
        yield Row(bench, case, name, f"{kernel[:100]}: time", us, "us")
        yield Row(bench, case, name, f"{kernel[:100]}: launches", launches, "")


def _sum(name: str, kernels: list[tuple[str, float, float]]) -> tuple[str, float, float]:
    return name, sum(us for _, us, _ in kernels), sum(launches for *_, launches in kernels)
