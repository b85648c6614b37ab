"""The files that a run writes: checkpoint, metrics.csv, loss.png; with experts load.csv and load.png; with --watch watch.csv and
watch.svg."""

from __future__ import annotations

import codecs
import csv
import itertools
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops import chain, dist
from funcops.checkpoint import CheckpointError, load, read_metadata, save
from funcops.optim import AdamWConfig, adamw_init, dequantize_state, quantize_state
from funcops.trees import tensors, tree_map_tensors
from lm.model import model
from lm.ranks import Ranks
from lm.step import State
from lm.watched import Seen, picture

ONE, MANY = "checkpoint.safetensors", "checkpoint"  # what one process writes, and several
RUN = ("step", "settings", "rows")
LATER = {"optimizer": "adamw"}  # flags that older checkpoints lack, and their values there


class RunError(Exception):
    """The results of a run cannot be written or read; the message is one line."""


class Row(NamedTuple):
    step: int
    loss: float
    val_loss: float | None
    lr: float
    norm: float
    seconds: float
    load: list[list[int]] | None = None  # by layer and expert: how many of the step's choices it got


def holds_run(folder: Path) -> bool:
    """Whether a folder has a checkpoint: one process's file, or the folder that several processes write."""
    return (folder / ONE).exists() or dist.is_saved(folder / MANY)


def save_run(folder: Path, params: Any, state: State, step: int, rows: list[Row], settings: dict[str, Any], ranks: Ranks) -> None:
    """Write checkpoint and metrics, each whole or not at all. Each rank writes its own part of the checkpoint; all must call it."""
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"step": str(step), "settings": json.dumps(settings, sort_keys=True), "rows": json.dumps(rows)}
    if ranks.alone:
        save(_kept(params, state), folder / ONE, metadata=metadata)
        if dist.is_saved(folder / MANY):
            shutil.rmtree(folder / MANY, ignore_errors=True)
    else:
        tree, specs = ranks.kept(params, state.optimiser)
        said = {name: ranks.of_first(text) for name, text in metadata.items()}
        dist.save({**tree, "scales": state.scales, "run": said}, folder / MANY, specs, ranks.mesh)
    if not ranks.first:
        return
    if not ranks.alone:
        (folder / ONE).unlink(missing_ok=True)
    _write(folder / "metrics.csv", Row._fields[:-1], [row[:-1] for row in rows])
    if rows and rows[-1].load is not None:
        counts = [(row.step, i, *layer) for row in rows for i, layer in enumerate(row.load or ())]
        _write(folder / "load.csv", ("step", "layer", *(f"expert{e}" for e in range(len(counts[0]) - 2))), counts)


def _write(path: Path, names: Any, rows: Any) -> None:
    partial = path.with_name(f"{path.name}.tmp")
    with partial.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows(rows)
    os.replace(partial, path)


def load_run(
    folder: Path, params: Any, state: State, settings: dict[str, Any], ranks: Ranks, device: Any
) -> tuple[Any, State, int, list[Row]]:
    """This rank's params and state on a device, from the shapes of `params` and `state`, the number of steps done, and the rows so
    far. Raises `RunError` that names a setting that differs, or a file that is not a run's checkpoint. All ranks must call it."""
    one, many = folder / ONE, folder / MANY
    of_one = one.exists() and not (dist.is_saved(many) and _newer(many, one))
    path = one if of_one else many
    try:
        metadata = read_metadata(path) if of_one else _metadata_of(path)
        before, rows, step = json.loads(metadata["settings"]), json.loads(metadata["rows"]), int(metadata["step"])
        _check_settings(before, settings)
        small = settings["eight_bit_state"] == "True"
        params, state = _loaded_of_one(path, params, state, ranks, small) if of_one else _loaded(path, params, state, ranks)
        params, optimiser = tree_map_tensors(lambda t: t.to(device), (params, state.optimiser))
        rows = [Row(*row) for row in rows]
    except (CheckpointError, OSError, KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"--resume: expected a checkpoint of this program, got {str(path)!r} ({_one_line(error)})") from error
    return params, state._replace(optimiser=optimiser), step, rows


def _newer(many: Path, one: Path) -> bool:
    """Whether the folder is newer: a run that is killed between writing one and deleting the other leaves both. By the index, which
    a deletion that was killed has not changed; if the folder is missing, by a killed save's, which `dist.load` reads."""
    indices = [many / ".metadata"] if many.exists() else many.parent.glob(f".{many.name}.*.part/.metadata")
    return max((one.stat().st_mtime_ns for one in indices), default=0) > one.stat().st_mtime_ns


def _metadata_of(path: Path) -> dict[str, str]:
    """The step, settings and rows in the folder of several processes, without its tensors."""
    found = dist.load_values(path)
    return {name: str(found[f"run.{name}"]) for name in RUN}


def _loaded(path: Path, params: Any, state: State, ranks: Ranks) -> tuple[Any, State]:
    """This rank's parts from the folder of several processes."""
    like, specs = ranks.kept(params, state.optimiser)
    like = {**like, "scales": state.scales, "run": dict.fromkeys(RUN, "")}
    found = dist.load(path, like, specs, ranks.mesh)
    params, optimiser = ranks.unkept(found)
    return params, State(optimiser, found["scales"])


def _loaded_of_one(path: Path, params: Any, state: State, ranks: Ranks, small: bool) -> tuple[Any, State]:
    """This rank's parts from one process's file, which is read whole."""
    if ranks.alone:
        kept = load(path, _kept(params, state))
        return kept["params"], State(kept["state"], kept["scales"])
    like = chain.init(model(ranks.decoder), device="meta", dtype=tensors(params)[0].dtype)
    means = adamw_init(like, AdamWConfig())
    kept = load(path, _kept(like, State(quantize_state(means) if small else means, state.scales)))
    own = ranks.own_state(dequantize_state(kept["state"]))
    return ranks.own(kept["params"]), State(quantize_state(own) if small else own, kept["scales"])


def _kept(params: Any, state: State) -> dict[str, Any]:
    return {"params": params, "state": state.optimiser, "scales": state.scales}


def _check_settings(before: dict[str, Any], settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        if (then := before.get(name, LATER.get(name))) != value:
            flag = "--" + name.replace("_", "-")
            hint = " (the learning rate falls until the last step; to stop earlier give --stop-at)" if name == "steps" else ""
            raise RunError(f"--resume: expected {flag} as in the checkpoint, {then!r}, got {value!r}{hint}")


def check_writable(folder: Path) -> None:
    """Make the folder and write a file there, so that a long run cannot fail to write its results at the end."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RunError(f"--out: expected a folder that can be written to, got {str(folder)!r} ({_one_line(error)})") from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def plot(folder: Path, rows: list[Row], baseline: float) -> None:
    """Draw loss.png: training and held-out loss in nats per byte, with the trigram table's; nothing without a finite loss."""
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
    _draw(figure, folder / "loss.png")


def plot_seen(folder: Path, seen: list[Seen]) -> None:
    """Write watch.csv and draw watch.svg: the values of the watched steps so far."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "watch.csv", Seen._fields, seen)
    _draw(picture(seen), folder / "watch.svg")


def seen_before(folder: Path, done: int) -> list[Seen]:
    """The values of the watched steps among the first `done` ones, as watch.csv has them; none without it."""
    if not (folder / "watch.csv").exists():
        return []
    try:
        with (folder / "watch.csv").open(newline="") as file:
            rows = [Seen(int(row["step"]), row["what"], row["where"], float(row["value"])) for row in csv.DictReader(file)]
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise RunError(f"--resume: expected watch.csv of this program, got {str(folder)!r} ({_one_line(error)})") from error
    return [row for row in rows if row.step <= done]


def _draw(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    partial = path.with_name(f"{path.name}.tmp")
    try:
        figure.savefig(partial, dpi=140, format=path.suffix[1:])
        os.replace(partial, path)
    finally:
        pyplot.close(figure)
        partial.unlink(missing_ok=True)


def shares(rows: list[Row]) -> Tensor:
    """The share of each expert in the choices of these steps, by layer and expert; 1 is an even share."""
    load = torch.tensor([row.load for row in rows], dtype=torch.float64).sum(0)
    return load / load.mean(1, keepdim=True)


def plot_load(folder: Path, rows: list[Row], most: int = 120) -> None:
    """Draw load.png: for each layer the share of each expert over time, in at most `most` columns; nothing without experts."""
    rows = [row for row in rows if row.load is not None]
    if not rows:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    width = -(-len(rows) // most)
    drawn = torch.stack([shares(rows[i : i + width]) for i in range(0, len(rows), width)], -1)  # [layers, experts, columns]
    layers, experts, _ = drawn.shape
    figure, axes = pyplot.subplots(layers, 1, figsize=(7, 0.8 + 1.3 * layers), layout="constrained", sharex=True, squeeze=False)
    for i, axis in enumerate(axes[:, 0]):
        edges = rows[0].step - 0.5, rows[-1].step + 0.5, experts - 0.5, -0.5
        shown = axis.imshow(drawn[i].tolist(), aspect="auto", interpolation="nearest", cmap="RdBu_r", vmin=0, vmax=2, extent=edges)
        axis.set(ylabel=f"layer {i}\nexpert")
    axes[-1, 0].set(xlabel="step")
    axes[0, 0].set(title="Load of the experts")
    figure.colorbar(shown, ax=axes[:, 0], label="of an even share", extend="max")
    _draw(figure, folder / "load.png")


def texts(drawn: Iterable[Tensor]) -> Iterator[str]:
    """Pieces of text from a stream of bytes, each as soon as it is complete; bytes that are invalid UTF-8 or cannot be printed are
    written as escapes, such as \\x00."""
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    for end, byte in itertools.chain(((False, bytes([int(t)])) for t in drawn), [(True, b"")]):
        text = decoder.decode(byte, end)
        yield "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def text_of(ids: Tensor) -> str:
    """The text of bytes, as `texts` writes it."""
    return "".join(texts(ids))
