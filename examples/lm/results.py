"""What a run leaves behind: checkpoint, metrics.csv, loss.png."""

from __future__ import annotations

import csv
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from funcops.checkpoint import CheckpointError, load, read_metadata, save
from lm.step import State


class RunError(Exception):
    """The results of a run cannot be written, or not be read back; one line says why."""


class Row(NamedTuple):
    step: int
    loss: float
    val_loss: float | None
    lr: float
    norm: float
    seconds: float


def save_run(folder: Path, params: Any, state: State, step: int, rows: list[Row], settings: dict[str, Any]) -> None:
    """Checkpoint and metrics, each written whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"step": str(step), "settings": json.dumps(settings, sort_keys=True), "rows": json.dumps(rows)}
    save(_kept(params, state), folder / "checkpoint.safetensors", metadata=metadata)
    partial = folder / "metrics.csv.tmp"
    with partial.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Row._fields)
        writer.writerows(rows)
    os.replace(partial, folder / "metrics.csv")


def load_run(folder: Path, params: Any, state: State, settings: dict[str, Any]) -> tuple[Any, State, int, list[Row]]:
    """Params, state, the number of steps done, and the rows so far. `RunError` names a setting that differs, or a file that is no
    checkpoint of a run."""
    path = folder / "checkpoint.safetensors"
    try:
        metadata = read_metadata(path)
        before, rows, step = json.loads(metadata["settings"]), json.loads(metadata["rows"]), int(metadata["step"])
        _check_settings(before, settings)
        kept = load(path, _kept(params, state))
    except (CheckpointError, OSError, KeyError, ValueError) as error:
        raise RunError(f"--resume: expected a checkpoint of this program, got {str(path)!r} ({_one_line(error)})") from error
    return kept["params"], State(kept["state"], kept["scales"]), step, [Row(*row) for row in rows]


def _kept(params: Any, state: State) -> dict[str, Any]:
    return {"params": params, "state": state.optimiser, "scales": state.scales}


def _check_settings(before: dict[str, Any], settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        if before.get(name) != value:
            flag = "--" + name.replace("_", "-")
            hint = " (the learning rate falls until the last step; to stop earlier give --stop-at)" if name == "steps" else ""
            raise RunError(f"--resume: expected {flag} as in the checkpoint, {before.get(name)!r}, got {value!r}{hint}")


def check_writable(folder: Path) -> None:
    """Make the folder and write a file there, so that a long run does not end without a place for its results."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RunError(f"--out: expected a folder that can be written to, got {str(folder)!r} ({_one_line(error)})") from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def plot(folder: Path, rows: list[Row], baseline: float) -> None:
    """loss.png: training and held-out loss in nats per byte, with the trigram table's;
    nothing where there is no finite loss yet."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    finite = [row for row in rows if math.isfinite(row.loss)]
    if not finite:
        return
    held_out = [row for row in finite if row.val_loss is not None and math.isfinite(row.val_loss)]
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    dots = "." if len(finite) == 1 else ""
    axes.plot([r.step for r in finite], [r.loss for r in finite], dots + "-", linewidth=0.7, alpha=0.6, label="training batch")
    if held_out:
        axes.plot([r.step for r in held_out], [r.val_loss for r in held_out], "o-", label="held-out text")
    axes.axhline(baseline, linestyle="--", color="gray", label=f"trigram table, {baseline:.2f}")
    axes.set(xlabel="step", ylabel="loss, nats per byte", title="Training of the language model")
    axes.grid(alpha=0.3)
    axes.legend()
    partial = folder / "loss.png.tmp"
    try:
        figure.savefig(partial, dpi=140, format="png")
        os.replace(partial, folder / "loss.png")
    finally:
        pyplot.close(figure)
        partial.unlink(missing_ok=True)


def text_of(ids: Tensor) -> str:
    """Bytes as text; what is no UTF-8 or cannot be printed is written as an escape, such as \\x00."""
    text = bytes(ids.tolist()).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
