"""The rates of `bench kernels` as a picture."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.measure import machine

LINES, MARKERS = 56, "oDs^vP"  # lines in a column, and a mark for each provider


def draw(path: str, rows: Sequence[Any]) -> None:
    """Draw a line for each kernel and shape, in columns, with a mark for each provider: the share of a copy's rate, or of
    cuBLAS's."""
    if importlib.util.find_spec("matplotlib") is None:  # the measurements must not be lost
        print(f"bench kernels: {path} is not drawn: matplotlib is not installed", file=sys.stderr)
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    labels = list(dict.fromkeys(_label(row) for row in rows))
    columns = [labels[i : i + LINES] for i in range(0, len(labels), LINES)] or [[]]
    size = 7 * len(columns), 1.5 + 0.17 * len(columns[0])
    figure, panels = plt.subplots(1, len(columns), figsize=size, layout="constrained", sharex=True, squeeze=False)
    providers = [name for name in dict.fromkeys(row.provider for row in rows) if name != "cublas"]
    for axes, column in zip(panels[0], columns, strict=True):
        own = {label: place for place, label in enumerate(column)}
        for mark, provider in zip(MARKERS, providers, strict=False):
            found = [row for row in rows if row.provider == provider and _label(row) in own]
            shares = [100 * (row.of_cublas if row.tflop_per_s > 0 else row.of_copy) for row in found]
            axes.plot(shares, [own[_label(row)] for row in found], mark, markersize=4, alpha=0.8, label=provider)
        axes.set_yticks(range(len(column)), column, fontsize=7)
        axes.set_ylim(max(1, len(columns[0])) - 0.5, -0.5)
        axes.grid(axis="y", linewidth=0.3)
        axes.axvline(100, color="grey", linewidth=0.8)
        axes.set_xlabel("percent of a copy's rate (matrix products: of cuBLAS)", fontsize=8)
    figure.suptitle(f"bench kernels on {machine()['device']}", fontsize=10)
    if providers:  # above the marks, so that it hides none
        handles, names = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, names, fontsize=8, loc="outside upper right", ncols=len(providers), frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _label(row: Any) -> str:
    return f"{row.kernel} {row.shape} {row.dtype}"
