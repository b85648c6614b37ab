"""The rates of `bench kernels` as a picture."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

from funcops.bench.measure import machine


def draw(path: str, rows: Sequence[Any]) -> None:
    """Horizontal bars: a group for each kernel and shape, a bar for each provider; the share of a copy's rate, or of cuBLAS."""
    if importlib.util.find_spec("matplotlib") is None:  # no reason to lose what was measured
        print(f"bench kernels: {path} is not drawn: matplotlib is not installed", file=sys.stderr)
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    labels = list(dict.fromkeys(f"{row.kernel} {row.shape} {row.dtype}" for row in rows))
    providers = [name for name in dict.fromkeys(row.provider for row in rows) if name != "cublas"]
    figure, axes = plt.subplots(figsize=(9, 1.5 + 0.16 * len(labels) * len(providers)), layout="constrained")
    thick = 0.8 / max(1, len(providers))
    for i, provider in enumerate(providers):
        found = {
            labels.index(f"{row.kernel} {row.shape} {row.dtype}"): row.of_cublas if row.tflop_per_s > 0 else row.of_copy
            for row in rows
            if row.provider == provider
        }
        places = [place + (i - (len(providers) - 1) / 2) * thick for place in found]
        axes.barh(places, [100 * share for share in found.values()], thick, label=provider)
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.set_ylim(max(1, len(labels)) - 0.5, -0.5)
    axes.tick_params(top=True, labeltop=True)  # the picture is as long as the list
    axes.set_xlabel("percent of a copy's rate (matrix products: of cuBLAS)")
    axes.axvline(100, color="grey", linewidth=0.8)
    axes.set_title(f"bench kernels on {machine()['device']}", fontsize=9)
    if providers:  # above the bars, of which none is hidden then
        figure.legend(fontsize=7, loc="outside upper center", ncols=len(providers), frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
