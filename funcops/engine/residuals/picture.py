"""Reports as pictures. They need matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from funcops.engine.errors import sized

__all__ = ["grouped_bars"]


def stacked_bars(rows: Sequence[Any], title: str, path: str | None, depth: int) -> Any:
    """Horizontal bars: one per step, with a segment for each field that it keeps, in the unit that fits the longest bar."""
    bars: dict[str, dict[str, int]] = {}
    for row in rows:
        if row.bytes:
            names = row.path.split(".")
            step, field = ".".join(names[:depth]), ".".join(names[depth:]) or names[-1]
            parts = bars.setdefault(step, {})
            parts[field] = parts.get(field, 0) + row.bytes
    figure = _figure("Report.plot", 0.5 * max(1, len(bars)))
    axes = figure.add_subplot()
    colours = {field: f"C{i % 10}" for i, field in enumerate(dict.fromkeys(f for parts in bars.values() for f in parts))}
    most = max([sum(parts.values()) for parts in bars.values()], default=0)
    small: dict[str, Any] = {}  # fields whose segments are too short for their names
    one, unit = (most / sized(most)[0] if most else 1), sized(most)[1]
    for place, parts in enumerate(bars.values()):
        left = 0.0
        for field, size in sorted(parts.items(), key=lambda item: -item[1]):
            width = size / one
            bar = axes.barh(place, width, left=left, color=colours[field], label=field, edgecolor="white")
            if size <= 0.06 * most:
                small.setdefault(field, bar)
            else:
                axes.text(left + width / 2, place, field, ha="center", va="center", fontsize=9)
            left += width
    if small:
        axes.legend(small.values(), list(small), fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return _done(figure, list(bars), f"{unit} kept for the backward", title, path)


def grouped_bars(bars: Mapping[str, Mapping[str, float]], label: str, title: str, path: str | None, where: str) -> Any:
    """Grouped horizontal bars: a group per row, with a bar for each of its values."""
    figure = _figure(where, 0.4 * max(1, len(bars)))
    axes = figure.add_subplot()
    names = list(dict.fromkeys(name for group in bars.values() for name in group))
    height = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        places = [place + (i - (len(names) - 1) / 2) * height for place in range(len(bars))]
        axes.barh(places, [group[name] for group in bars.values()], height=height, color=f"C{i % 10}", label=name)
    axes.legend(fontsize=7)
    return _done(figure, list(bars), label, title, path)


def _figure(where: str, height: float) -> Any:
    try:
        # not pyplot, which keeps every figure, and picks a backend for screens
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{where} needs matplotlib: pip install matplotlib") from error
    return Figure(figsize=(8, 1.2 + height))


def _done(figure: Any, rows: list[str], label: str, title: str, path: str | None) -> Any:
    """Label the figure, and write it to `path` unless that is None."""
    (axes,) = figure.axes
    axes.set_yticks(range(len(rows)), rows)
    # bars count from below, and the first step belongs on top
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.set_title(title, fontsize=10)
    figure.tight_layout()
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure
