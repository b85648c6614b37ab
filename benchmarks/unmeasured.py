"""The rows that the files of a device lack, of the benches that run on a device. `unconfirmed --rows` lists them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks import graph, recipes, step
from benchmarks.kernel_calls import Maker, kernel_calls, measured_families
from benchmarks.rows import rows_of


def lacking(folder: Path) -> Iterator[tuple[str, str]]:
    """The file and the name of each row without a figure: one that failed has none either."""
    for file, names in wanted().items():
        found = {name for row in rows_of(folder / file) if not row.get("note", "").startswith("failed") for name in _names(row)}
        yield from ((file, name) for name in names if name not in found)


@functools.cache
def wanted() -> dict[str, list[str]]:
    """All rows by file: a call of a kernel, a provider of a step, and its profile."""
    calls = kernel_calls(Maker("meta", torch.bfloat16), measured_families())
    return {
        "kernels.json": list(dict.fromkeys(f"{call.name} {call.shape}" for call in calls)),
        "step-cuda.json": [f"{name}{what}" for name in step.EAGER for what in ("", ", profile")],
        "step-compiled.json": [*step.COMPILED],
        "graph.json": [*graph.PROVIDERS],
        "recipes.json": [f"{what}, {provider}" for what in recipes.cases() for provider in recipes.PROVIDERS],
    }


def _names(row: dict[str, str]) -> list[str]:
    if "kernel" in row:
        return [f"{row['kernel']} {row['shape']}"] if row["provider"] == "funcops" else []
    if "what" in row:
        return [f"{row['what']}, {row['provider']}"]
    return [row["provider"] + (", profile" if row["metric"] == "host until return" else "")]
