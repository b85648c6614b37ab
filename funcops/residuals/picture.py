"""A report as a picture. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from funcops.errors import sized


def stacked_bars(rows: Sequence[Any], title: str, path: str | None, depth: int) -> Any:
    """Horizontal bars: one for each step, a part of it for each field that it keeps, in the unit that fits the longest."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Report.plot needs matplotlib: pip install matplotlib") from error
    bars: dict[str, dict[str, int]] = {}
    for row in rows:
        if row.bytes:
            names = row.path.split(".")
            step, field = ".".join(names[:depth]), ".".join(names[depth:]) or names[-1]
            parts = bars.setdefault(step, {})
            parts[field] = parts.get(field, 0) + row.bytes
    figure = Figure(figsize=(9, 1.2 + 0.5 * max(1, len(bars))))
    axes = figure.add_subplot()
    colours = {field: f"C{i % 10}" for i, field in enumerate(dict.fromkeys(f for parts in bars.values() for f in parts))}
    most = max([sum(parts.values()) for parts in bars.values()], default=0)
    small: dict[str, Any] = {}  # what has no room for its name
    one, unit = (most / sized(most)[0] if most else 1), sized(most)[1]
    for place, parts in enumerate(bars.values()):
        left = 0.0
        for field, size in sorted(parts.items(), key=lambda item: -item[1]):
            width = size / one
            bar = axes.barh(place, width, left=left, color=colours[field], label=field, edgecolor="white")
            if size <= 0.06 * most:
                small.setdefault(field, bar)
            else:
                axes.text(left + width / 2, place, field, ha="center", va="center", fontsize=7)
            left += width
    axes.set_yticks(range(len(bars)), list(bars))
    axes.invert_yaxis()
    axes.set_xlabel(f"{unit} kept for the backward")
    axes.set_title(title, fontsize=8)
    if small:
        axes.legend(small.values(), list(small), fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.tight_layout()
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure
