"""The rates of `bench kernels`, and the bytes of `bench residuals`, as pictures."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.measure import machine

LINES, MARKERS = 56, "oDs^vP"  # lines in a column, and a mark for each provider


def draw(path: str, rows: Sequence[Any]) -> None:
    """Draw a line for each kernel and shape, in columns, with a mark for each provider: the share of the yardstick's rate, or of
    cuBLAS's."""
    if not _can_draw("kernels", path):
        return
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
        axes.set_xlabel("percent of the best rate of a copy, scale or sum (matrix products: of cuBLAS)", fontsize=8)
    figure.suptitle(f"bench kernels on {machine()['device']}", fontsize=10)
    if providers:  # above the marks, so that it hides none
        handles, names = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, names, fontsize=8, loc="outside upper right", ncols=len(providers), frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


MODELS = {  # case: its name in two lines
    "blocks of Llama 3 8B, 8192 tokens": "Llama 3 8B",
    "blocks of GPT-2 XL, dropout, 8192 tokens": "GPT-2 XL,\nwith dropout",
    "frozen blocks of Llama 3 8B, LoRA, 8192 tokens": "Llama 3 8B,\nfrozen, LoRA",
}
KEPT = {  # provider: its name and colour
    "autograd": ("PyTorch on a CPU", "#d4d4d4"),
    "transformers": ("Transformers", "#b4b4b4"),
    "autograd, as on a GPU": ("PyTorch on a GPU", "#8a8a8a"),
    "torch.compile": ("torch.compile", "#6b6b6b"),
    "torch_remat": ("torch_remat", "#d9a441"),
    "funcops": ("funcops", "#3b7dd8"),
    "funcops, compress_fp8": ("funcops, kept in 8 bits", "#8fb8ec"),
}
LEGIBLE = "#808080"  # text on a white and on a dark page


def draw_kept(path: str, rows: Sequence[Any]) -> None:
    """Draw a group of bars for each model: the GB that its blocks keep with each provider, as text that can be searched, on no
    background."""
    if not _can_draw("first_page", path):
        return
    from matplotlib import pyplot as plt
    from matplotlib.figure import Figure

    found = {(row.case, row.provider): row.value for row in rows if row.metric == "kept"}
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "funcops", "font.size": 10}):
        figure = Figure(figsize=(7.6, 4.6), layout="constrained")
        axes, place, ticks = figure.add_subplot(), 0.0, []
        named: dict[str, Any] = {}
        for case in MODELS:
            first = place
            for provider, (name, colour) in KEPT.items():
                if (value := found.get((case, provider))) is not None:
                    named[name] = axes.barh(place, value, height=0.9, color=colour)
                    axes.text(value + 0.5, place, f"{value:.1f}", va="center", color=LEGIBLE)
                    place += 1
            ticks.append((first + place - 1) / 2)
            place += 0.8
        axes.set_yticks(ticks, list(MODELS.values()), color=LEGIBLE)
        axes.invert_yaxis()
        axes.set_xticks([])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title("GB that all blocks keep for the backward of 8,192 tokens (bfloat16)", fontsize=10, color=LEGIBLE)
        figure.legend(list(named.values()), list(named), frameon=False, labelcolor=LEGIBLE, loc="outside lower center", ncols=3)
        figure.savefig(path, transparent=True, metadata={"Date": None} if path.endswith(".svg") else None)


def _can_draw(bench: str, path: str) -> bool:
    if importlib.util.find_spec("matplotlib") is None:  # the measurements must not be lost
        print(f"bench {bench}: {path} is not drawn: matplotlib is not installed", file=sys.stderr)
        return False
    import matplotlib

    matplotlib.use("Agg")
    return True


def _label(row: Any) -> str:
    return f"{row.kernel} {row.shape} {row.dtype}"
