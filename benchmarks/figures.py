"""`python -m benchmarks figures --page FILE`: every measured comparison, by the file that holds it, with its best and worst case.

A ratio is the best of funcops' figures over the best of the others' in the same case: below 1 funcops took less time, or kept fewer
bytes.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COMMITTED = ROOT / "docs" / "benchmarks"
COMMANDS = {  # that wrote a file, if its name does not say it
    "h200/kernels": "kernels --changed",
    "h200/mixture": "step --device cuda --mixture",
    "h200/recipes": "recipes",
    "h200/step-compiled": "step --device cuda --part compiled",
    "h200/step-cuda": "step --device cuda --profile",
    "step-cuda": "step --device cuda",
}
LESS = ("median", "kept", "peak", "bytes", "time", "live", "held", "CPU")  # of a metric in which less is better
HEAD = """# All figures

This page is for reference. Each row is a comparison in a committed file of [these results](README.md), written by
`python -m benchmarks figures --page`. A ratio is the best of funcops' figures (eager or graphed, say) over the best of the others'
in the same case and run: below 1 funcops takes less time, or keeps fewer bytes. Where the worst is above 1, the other one is
quicker or smaller there: use it if that case is yours.

| what | command | machine | cases | best | median | worst |
|---|---|---|--:|---|--:|---|
"""


class Figure(NamedTuple):
    """The ratios of one metric in one file, by case."""

    what: str
    command: str
    machine: str
    ratios: dict[str, float]

    def row(self) -> str:
        ordered = sorted(self.ratios.items(), key=lambda pair: pair[1])
        (best, low), (worst, high) = ordered[0], ordered[-1]
        middle = statistics.median(self.ratios.values())
        cells = (self.what, f"`python -m benchmarks {self.command}`", self.machine, str(len(ordered)))
        return f"| {' | '.join(cells)} | {low:.2f} ({best}) | {middle:.2f} | {high:.2f} ({worst}) |"


def add_arguments(parser: Any) -> None:
    parser.add_argument("--page", metavar="FILE", help="write the page there")


def run(page: str | None = None) -> list[Any]:
    if page:
        Path(page).write_text(text())
    return []


def text() -> str:
    return HEAD + "\n".join(figure.row() for figure in figures()) + "\n"


def figures() -> Iterator[Figure]:
    for path in sorted(COMMITTED.rglob("*.json")):
        data = json.loads(path.read_text())
        name = path.relative_to(COMMITTED).with_suffix("").as_posix()
        of = data["machine"]
        machine = of["device"] if of["device"] != "CPU" else f"{of['cores']} CPU cores"
        command = COMMANDS.get(name, name.removeprefix("cpu-"))
        for what, ratios in sorted(_compared(data["rows"])):
            yield Figure(what, command, machine, ratios)


def _compared(rows: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, float]]]:
    """The ratios of a file by what was measured."""
    first = rows[0]
    if "speedup" in first:
        yield from _recipes(rows)
        return
    of_kernel = "kernel" in first
    cases: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for row in rows:
        metric = "time of a kernel" if of_kernel else row["metric"]
        case = f"{row['kernel']} {row['shape']}" if of_kernel else row["case"]
        value = row["device_us"] if of_kernel else row["value"]
        # the kernels of a step differ between providers: only their sum is compared
        one_of_many = metric.endswith(": time") and metric != "all kernels: time"
        less = of_kernel or (any(word in metric for word in LESS) and not one_of_many)
        if less and isinstance(value, float) and math.isfinite(value) and value > 0:
            cases[metric, case][row["provider"]] = value
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for (metric, case), values in cases.items():
        ours = [value for provider, value in values.items() if provider.startswith("funcops")]
        theirs = [value for provider, value in values.items() if not provider.startswith("funcops")]
        if ours and theirs:
            name = metric if of_kernel else f"{first['bench']}: {metric}"
            found[name][case.replace("|", "/")] = min(ours) / min(theirs)
    yield from found.items()


def _recipes(rows: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, float]]]:
    """The times of layers in low precision over bfloat16's."""
    kinds: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row["provider"] != "bfloat16":
            kind = "linear layers" if row["what"].startswith("linear") else "blocks"
            kinds[f"{kind} in low precision: time over bfloat16"][f"{row['what']}, {row['provider']}"] = 1 / row["speedup"]
    yield from kinds.items()
