"""The kernels of a step on a GPU: the time and the launches of each, summed by name; time in no kernel, the host's, and clocks."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.autograd import DeviceType

from benchmarks.measure import Row

STEPS, LISTED, WARM = 3, 30, 1.0
ASKED = {"SM clock": ("clocks.sm", "MHz"), "power": ("power.draw", "W")}


def profiled(bench: str, case: str, steps: Mapping[str, Callable[[], Any]]) -> Iterator[Row]:
    """For each step the time and the number of launches of its costliest kernels, of the rest, and of all, in one step; a step's
    share of the span from the first kernel to the last, and of the gaps in it, in which no kernel runs; and the host's time until a
    step returns. A second of steps comes first; the clock and the power are read while steps run, before and after."""
    for name, step in steps.items():
        before = during(step, WARM)
        host = _until_return(step)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            for _ in range(STEPS):
                step()
                torch.cuda.synchronize()
        after = during(step)
        events = [e for e in found.key_averages() if e.device_type is not DeviceType.CPU]  # not the runtime's calls
        kernels = [(e.key, e.self_device_time_total / STEPS, e.count / STEPS) for e in events]
        yield from _rows(bench, case, name, sorted(kernels, key=lambda kernel: -kernel[1]))
        span, gaps = span_and_gaps([(e.time_range.start, e.time_range.end) for e in found.events() if _ran(e)])
        yield Row(bench, case, name, "span of kernels", span / STEPS / 1e3, "ms")
        yield Row(bench, case, name, "gaps between kernels", gaps / STEPS / 1e3, "ms")
        yield Row(bench, case, name, "host until return", host * 1e3, "ms")
        for what, (_, unit) in ASKED.items():
            for when, given in (("before", before), ("after", after)):
                yield Row(bench, case, name, f"{what} {when}", given.get(what), unit)


def _ran(event: Any) -> bool:
    return event.device_type is not DeviceType.CPU


def span_and_gaps(ran: list[tuple[float, float]]) -> tuple[float, float]:
    """The time from the first start to the last end, and the part of it in which nothing ran. Kernels may overlap."""
    if not ran:
        return 0.0, 0.0
    first = end = min(start for start, _ in ran)
    gaps = 0.0
    for start, stop in sorted(ran):
        gaps, end = gaps + max(0.0, start - end), max(end, stop)
    return end - first, gaps


def _until_return(step: Callable[[], Any]) -> float:
    """Seconds until a step returns whose device has nothing else to do: the least of a few."""
    found = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        found.append(time.perf_counter() - began)
    torch.cuda.synchronize()
    return min(found)


def during(step: Callable[[], Any], seconds: float = 0.0) -> dict[str, float]:
    """Run steps for so long, and until nvidia-smi, started after that, has said the clock and the power of the first GPU. What it
    does not say is absent."""
    began, asked = time.monotonic(), None
    while asked is None or asked.poll() is None:
        step()
        torch.cuda.synchronize()
        if asked is None and time.monotonic() >= began + seconds:
            fields = ",".join(field for field, _ in ASKED.values())
            command = ["nvidia-smi", "--id=0", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
            try:
                asked = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            except OSError:
                return {}
    said, _ = asked.communicate()
    pairs = zip(ASKED, said.strip().split(","), strict=False)  # nothing, or an error, has other fields
    return {what: float(value) for what, value in pairs if value.strip().replace(".", "", 1).isdigit()}


def _rows(bench: str, case: str, name: str, kernels: list[tuple[str, float, float]]) -> Iterator[Row]:
    listed, rest = kernels[:LISTED], kernels[LISTED:]
    for kernel, us, launches in (*listed, _sum("other kernels", rest), _sum("all kernels", kernels)):
        yield Row(bench, case, name, f"{kernel[:100]}: time", us, "us")
        yield Row(bench, case, name, f"{kernel[:100]}: launches", launches, "")


def _sum(name: str, kernels: list[tuple[str, float, float]]) -> tuple[str, float, float]:
    return name, sum(us for _, us, _ in kernels), sum(launches for *_, launches in kernels)
