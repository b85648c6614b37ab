"""Rows, tables and interleaved timing, which the benches share."""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.rows import write_whole

ROOT = Path(__file__).resolve().parents[1]


class BenchError(Exception):
    """A bench cannot run here; the message says why."""


class NoDevice(BenchError):
    """A bench needs a GPU, and this machine lacks one."""


class Row(NamedTuple):
    bench: str
    case: str
    provider: str
    metric: str
    value: float | None  # None: the machine does not say
    unit: str


def interleaved(functions: dict[str, Callable[[], Any]], *, rounds: int, calls: int, cpu: bool = False) -> dict[str, list[float]]:
    """Microseconds per call, one sample per round, the functions taking turns; `cpu`: count only this process's CPU time."""
    clock = time.process_time if cpu else time.perf_counter
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for fn in functions.values():
        for _ in range(calls // 4 + 1):
            fn()
    for _ in range(rounds):
        for name, fn in functions.items():
            start = clock()
            for _ in range(calls):
                fn()
            samples[name].append((clock() - start) / calls * 1e6)
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


def print_table(rows: Sequence[Any]) -> None:
    """Print named tuples of one kind, a line for each, under their fields' names."""
    if not rows:
        return
    lines = [rows[0]._fields, *([_text(value) for value in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    numbers = [isinstance(value, (int, float)) for value in rows[0]]
    for line in lines:
        cells = [c.rjust(w) if n else c.ljust(w) for c, w, n in zip(line, widths, numbers, strict=True)]
        print("  ".join(cells).rstrip())


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) >= 0.01 or value == 0 else f"{value:.2e}"
    return str(value)


def machine() -> dict[str, Any]:
    """The machine and the versions that the figures were measured with."""
    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "optree", "liger_kernel"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {**found, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "revision": revision()}


def revision() -> str:
    """The commit that is measured, with a "+" if files differ from it; $FUNCOPS_REVISION, where git is missing."""
    if given := os.environ.get("FUNCOPS_REVISION"):
        return given

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write_json(path: str, rows: Sequence[Any], about: dict[str, Any] | None = None) -> None:
    """Write the rows with the machine that they were measured on: this one, unless it is known already."""
    lines = ",\n".join("  " + json.dumps(row._asdict()) for row in rows)
    write_whole(path, f'{{"machine": {json.dumps(about or machine())},\n "rows": [\n{lines}\n]}}\n')


def write_csv(path: str, rows: Sequence[Any]) -> None:
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(rows[0]._fields if rows else [])
    writer.writerows(rows)
    write_whole(path, file.getvalue())


def interval(ratios: list[float], draws: int = 10000) -> tuple[float, float, float]:
    """The median and its 95 % bootstrap interval."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(draws))
    return statistics.median(ratios), medians[round(0.025 * draws)], medians[round(0.975 * draws) - 1]
