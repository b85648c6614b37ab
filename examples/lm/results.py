"""What a run leaves behind: checkpoint, metrics.csv, loss.png."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from funcops.checkpoint import load, read_metadata, save
from funcops.optim import AdamWState


class Row(NamedTuple):
    step: int
    loss: float
    val_loss: float | None
    lr: float
    norm: float
    seconds: float


def save_run(folder: Path, params: Any, state: AdamWState, step: int, rows: list[Row], settings: dict[str, Any]) -> None:
    """Checkpoint and metrics, each written whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"step": str(step), "settings": json.dumps(settings, sort_keys=True), "rows": json.dumps(rows)}
    save({"params": params, "state": state}, folder / "checkpoint.safetensors", metadata=metadata)
    partial = folder / "metrics.csv.tmp"
    with partial.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Row._fields)
        writer.writerows(rows)
    os.replace(partial, folder / "metrics.csv")


def load_run(folder: Path, params: Any, state: AdamWState, settings: dict[str, Any]) -> tuple[Any, AdamWState, int, list[Row]]:
    """Params, state, the number of steps done, and the rows so far; `SystemExit` names a setting that differs."""
    path = folder / "checkpoint.safetensors"
    metadata = read_metadata(path)
    before = json.loads(metadata["settings"])
    for name, value in settings.items():
        if before.get(name) != value:
            raise SystemExit(f"--resume: expected {name} as in the checkpoint, {before.get(name)!r}, got {value!r}")
    kept = load(path, {"params": params, "state": state})
    return kept["params"], kept["state"], int(metadata["step"]), [Row(*row) for row in json.loads(metadata["rows"])]


def plot(folder: Path, rows: list[Row], baseline: float) -> None:
    """loss.png: training and validation loss in nats per byte, with the trigram table's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    steps = [row.step for row in rows]
    axes.plot(steps, [row.loss for row in rows], linewidth=0.7, alpha=0.6, label="training batch")
    held_out = [row for row in rows if row.val_loss is not None]
    axes.plot([r.step for r in held_out], [r.val_loss for r in held_out], "o-", label="held-out files")
    axes.axhline(baseline, linestyle="--", color="gray", label=f"trigram table, {baseline:.2f}")
    axes.set(xlabel="step", ylabel="nats per byte", ylim=(0.9, max(baseline * 2, 3.0)))
    axes.legend()
    figure.savefig(folder / "loss.png", dpi=140)
    pyplot.close(figure)


def text_of(ids: Tensor) -> str:
    return bytes(ids.tolist()).decode("utf-8", "replace")
