"""Draws a simulated step as usual, one row per rank and one box per action, or its bytes over time. Needs matplotlib."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from funcops.engine.errors import require, require_type
from funcops.schedule.actions import Schedule
from funcops.schedule.simulate import Simulated, simulate

ANY = "the unit of the costs"
COLOURS = {"F": "#8fb8de", "I": "#f2b880", "W": "#9fd8a4", "B": "#e8998d"}
NAMES = {"F": "forward", "I": "dgrad", "W": "wgrad", "B": "dgrad and wgrad"}
LABELLED = 2_000  # actions, above which boxes have no label
POINTS = 66  # the width of all boxes of a row, for each inch of the figure
WIDTHS = 10, 40  # inches: a figure is as wide as labels of most boxes need
SIZES = 5.0, 7.0  # of labels: a smaller one could not be read
MOST = 100_000


def draw(
    simulated: Simulated | Schedule,
    path: str | os.PathLike[str] | None = None,
    *,
    title: str | None = None,
    unit: str = ANY,
    ax: Any = None,
) -> Any:
    """Return matplotlib's figure, and write it to `path` (PNG, SVG, ...) if given. A `Schedule` is simulated with equal costs. A
    box is labelled with its microbatch, and if its rank has several stages with a letter for the stage, for whose later ones it is
    fainter, as the legend says; a figure is as wide as most labels need. `title` replaces the simulated step's summary; `unit`: the
    unit of time in the axis label and the title; `ax`: matplotlib's axes to draw in, by default of a new figure. Raises
    `ImportError` without matplotlib (the extra `examples`), `ValueError` for more than 100,000 actions, too many for a picture."""
    require_type("draw", "simulated", simulated, Simulated, Schedule)
    if isinstance(simulated, Schedule):
        simulated = simulate(simulated)
    if path is not None:
        require_type("draw", "path", path, str, os.PathLike)
    if title is not None:
        require_type("draw", "title", title, str)
    require_type("draw", "unit", unit, str)
    count = sum(map(len, simulated.starts))
    require(count <= MOST, "draw", "simulated", f"of at most {MOST:,} actions", f"{count:,}")
    try:
        from matplotlib.axes import Axes
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError("draw needs matplotlib: pip install matplotlib") from error
    ranks = len(simulated.slots)
    if ax is not None:
        require_type("draw", "ax", ax, Axes)
    groups = _groups(simulated)
    width = _width(simulated, len(groups) > 1) if count <= LABELLED and ax is None else WIDTHS[0]
    axes = ax or Figure(figsize=(width, 1.4 + 0.4 * ranks), layout="constrained").add_subplot()
    axes.set_xlim(0, simulated.time)
    for rank in range(ranks):
        _row(axes, simulated, rank, POINTS * width if count <= LABELLED else 0.0)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.invert_yaxis()
    axes.set_xlabel(f"time, in {unit}")
    axes.set_title(simulated.said("" if unit == ANY else unit) if title is None else title, fontsize=10)
    kinds = [kind for kind in NAMES if any(slot.action.kind == kind for slots in simulated.slots for slot in slots)]
    patches = [Patch(facecolor=COLOURS[kind], edgecolor="black", label=NAMES[kind]) for kind in kinds]
    for i, stages in enumerate(groups if len(groups) > 1 else ()):  # a single one has no shade
        said = f"{_letter(i)}: {_named(stages)}"
        patches.append(Patch(facecolor="grey", edgecolor="black", alpha=_shade(i, len(groups)), label=said))
    figure: Any = axes.get_figure()
    if ax is None:
        figure.legend(handles=patches, loc="outside lower center", ncols=min(6, len(patches)), fontsize=9, frameon=False)
    else:
        axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1, 1), fontsize=9, frameon=False)
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


def draw_held(steps: Mapping[str, Simulated], path: str | os.PathLike[str] | None = None) -> Any:
    """Return matplotlib's figure of the bytes that each rank holds over time, with a panel for each named step."""
    if path is not None:
        require_type("draw", "path", path, str, os.PathLike)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("draw needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(WIDTHS[0], 2.6 * len(steps)), layout="constrained")
    panels = figure.subplots(len(steps), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (name, step) in zip(panels, steps.items(), strict=True):
        for rank, (ends, held) in enumerate(zip(step.ends, step.held, strict=True)):
            axes.step([0.0, *ends], [0.0, *held], where="post", label=f"rank {rank}", linewidth=1)
        axes.set_title(f"{name}: {step.said()}", fontsize=9)
        axes.set_ylabel("bytes held")
    panels[-1].set_xlabel(f"time, in {ANY}")
    panels[0].legend(loc="upper right", fontsize=8, ncols=4)
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


def _groups(simulated: Simulated) -> list[list[int]]:
    """The first stages of all ranks, the second ones, and so on: each group has a shade."""
    owner: dict[int, list[int]] = {}
    for stage, rank in sorted(simulated.schedule.rank_of.items()):
        owner.setdefault(rank, []).append(stage)
    most = max(map(len, owner.values()))
    return [sorted(own[i] for own in owner.values() if i < len(own)) for i in range(most)]


def _shade(index: int, count: int) -> float:
    return 1.0 - 0.65 * index / (count - 1) if count > 1 else 1.0


def _letter(index: int) -> str:
    return chr(ord("a") + index % 26)


def _size(label: str, room: float) -> float:
    """The size of a label in a box that is so many points wide: a digit is 0.64 of its height wide."""
    return room / (0.7 * len(label))


def _width(simulated: Simulated, lettered: bool) -> float:
    """The inches in which nine of ten boxes have room for a label that can be read."""
    slots = [slot for slots in simulated.slots for slot in slots if slot.end > slot.start]
    if not slots:
        return WIDTHS[0]
    labels = [f"{slot.action.microbatch}{'a' * lettered}" for slot in slots]
    need = [SIZES[0] / _size(label, (slot.end - slot.start) / simulated.time) for label, slot in zip(labels, slots, strict=True)]
    return min(WIDTHS[1], max(WIDTHS[0], sorted(need)[9 * len(need) // 10] / POINTS))


def _named(stages: list[int]) -> str:
    whole = stages == list(range(stages[0], stages[-1] + 1)) and len(stages) > 2
    shown = f"{stages[0]} to {stages[-1]}" if whole else ", ".join(map(str, stages[:8])) + (", ..." if len(stages) > 8 else "")
    return f"stage {shown}" if len(stages) == 1 else f"stages {shown}"


def _row(axes: Any, simulated: Simulated, rank: int, points: float) -> None:
    """Draw a rank's boxes, which together are so many points wide; with labels, if that is not 0."""
    slots, pairs = simulated.slots[rank], simulated.schedule.together
    stages = sorted({slot.action.stage for slot in slots})
    for i, (action, start, end) in enumerate(slots):
        upper, lower = action in pairs, i + 1 < len(slots) and slots[i + 1].action in pairs  # a pair shares the row's height
        height = 0.45 if upper or lower else 0.9
        bottom = rank if upper else rank - 0.45
        shade = _shade(stages.index(action.stage), len(stages))
        axes.broken_barh(
            [(start, end - start)], (bottom, height), facecolor=COLOURS[action.kind], alpha=shade, edgecolor="black", linewidth=0.4
        )
        label = f"{action.microbatch}{_letter(stages.index(action.stage)) * (len(stages) > 1)}"
        size = min(SIZES[1], _size(label, points * (end - start) / simulated.time if simulated.time else 0.0))
        if size >= SIZES[0]:
            axes.text((start + end) / 2, bottom + height / 2, label, ha="center", va="center", fontsize=size)
