"""The picture of `Comparison.plot`: the error of every value by its place in the run, the forward upwards, the backward
downwards."""

from __future__ import annotations

import math
import os
from typing import Any

from funcops.engine.errors import require_type

COLOURS = {"fwd": "#4878cf", "recompute": "#b47cc7", "dgrad": "#d65f5f", "wgrad": "#6acc65", "update": "#8c613c"}
LABELS = 40


def plot(found: Any, path: str | os.PathLike[str] | None) -> Any:
    """See `Comparison.plot`."""
    if path is not None:
        require_type("Comparison.plot", "path", path, str, os.PathLike)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Comparison.plot needs matplotlib: pip install matplotlib") from error
    heights, ticks = _heights(found.matched)
    errors = [one.error for one in found.matched if one.error and math.isfinite(one.error)] or [1e-6]
    least, most = min(errors) / 10, 10 * max(errors)  # drawn for equal bits, and for what is not finite
    figure: Any = Figure(figsize=(8, min(20, 2 + 0.16 * len(ticks))), layout="constrained")
    axes = figure.add_subplot()
    for half in dict.fromkeys(one.a.half for one in found.matched):
        own = [(one, y) for one, y in zip(found.matched, heights, strict=True) if one.a.half == half]
        xs = [min(max(one.error, least), most) for one, _ in own]
        axes.plot(xs, [y for _, y in own], "o", markersize=3, label=half or "no half", color=COLOURS.get(half, "grey"))
    if found.first is not None:
        y = heights[found.matched.index(found.first)]
        axes.axhline(y, color="black", linewidth=0.6, linestyle=":")
        axes.annotate(f"first: {found.first.place}", (least, y), fontsize=8, va="bottom")
    axes.set_xscale("log")
    axes.set_xlabel("relative error (at the left edge: equal bits)")
    every = max(1, -(-len(ticks) // LABELS))
    axes.set_yticks([y for y, _ in ticks[::every]], [name for _, name in ticks[::every]], fontsize=7)
    axes.margins(y=0.01)
    figure.legend(fontsize=8, frameon=False, loc="outside upper center", ncols=6)
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


def _heights(matched: list[Any]) -> tuple[list[float], list[tuple[float, str]]]:
    """The height of each value, which is the depth of its step, and the heights with names. Steps of the forward are in its order;
    others, such as an update, above them."""
    order: dict[str, int] = {}
    for one in sorted(matched, key=lambda one: one.a.half != "fwd"):
        order.setdefault(one.a.path, len(order))
    return [float(order[one.a.path]) for one in matched], [(float(y), path or "(no step)") for path, y in order.items()]
