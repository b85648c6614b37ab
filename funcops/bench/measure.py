"""Rows and interleaved timing, which the benches share."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Row:
    bench: str
    case: str
    provider: str
    metric: str
    value: float
    unit: str


def interleaved(functions: dict[str, Callable[[], Any]], *, rounds: int, calls: int) -> dict[str, list[float]]:
    """Microseconds a call, a sample a round, the functions taking turns."""
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for fn in functions.values():
        for _ in range(calls // 4 + 1):
            fn()
    for _ in range(rounds):
        for name, fn in functions.items():
            start = time.perf_counter()
            for _ in range(calls):
                fn()
            samples[name].append((time.perf_counter() - start) / calls * 1e6)
    return samples


def summary(bench: str, case: str, samples: dict[str, list[float]], ours: str, unit: str = "us") -> list[Row]:
    """Medians, quartile spreads, and the ratio of ours to the fastest other, paired by round."""
    rows = []
    for name, values in samples.items():
        low, middle, high = statistics.quantiles(values, n=4)
        rows.append(Row(bench, case, name, "median", middle, unit))
        rows.append(Row(bench, case, name, "quartile spread", high - low, unit))
    others = {name: statistics.median(v) for name, v in samples.items() if name != ours}
    rival = min(others, key=lambda name: others[name])
    ratios = [a / b for a, b in zip(samples[ours], samples[rival], strict=True)]
    rows.append(Row(bench, case, ours, f"ratio to {rival}", statistics.median(ratios), ""))
    return rows
