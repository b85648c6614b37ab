"""`--watch`: values that a step returns beside its loss, norms by layer, updates over weights, gradient noise, and rounding; and
their picture over the steps."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops import WithExtras, donate
from funcops.logs import gradient_noise, logs_init, param_logs, split_logs, total_norm, with_logs
from funcops.low_precision import gradients_like, quantize_params, rounding_logs, split_amaxes, weight_rounding
from funcops.optim import global_norm, update_ratios
from lm.model import main_of
from lm.step import NEEDS, Settings, inputs

PARTS = (4, 3, 2, 1)  # into how many microbatches the rows are divided, for the noise of their gradients
BLOCKS = "blocks.*"
ROUNDING = ("error", "underflow", "saturated", "amax")
NOISE, UPDATE = "noise scale", "update over weight"
TICKS = 20  # on an axis of steps
PANELS = {UPDATE: "log", "error": "log", "underflow": "linear", "saturated": "linear", "amax": "log"}  # by path, each with its axis


class Seen(NamedTuple):
    """One value of a step: `what` it is, and `where`: a path, with the operand before it if it is of a rounding."""

    step: int
    what: str
    where: str
    value: float


def watched(
    step: int, before: Any, after: Any, x: Tensor, labels: Tensor, s: Settings, scales: Any, key: Tensor | None
) -> list[Seen]:
    """The values of a step that made the params `after` of `before`: its rows run once more, in microbatches, with logs."""
    parts = next(n for n in PARTS if len(x) % n == 0)
    tied = bool(s.model.ties)
    asked = {} if tied else param_logs(s.model)
    asked[BLOCKS] = (*asked.get(BLOCKS, ()), "dx_norm", "y_norm")
    low = rounding_logs(s.model) if s.recipe is not None else {}
    asked |= {path: (*asked.get(path, ()), *names) for path, names in low.items()}
    cfg = with_logs(s.model, asked, runs=parts)
    compute = quantize_params(before, s.model, scales, dtype=s.dtype, key=key)
    work = logs_init(compute, cfg)
    sums = gradients_like(work, torch.promote_types(s.dtype, torch.float32), NEEDS)
    for rows, wanted in zip(x.chunk(parts), labels.chunk(parts), strict=True):
        y, residuals = s.op.fwd(work, inputs(work, rows, wanted, s), cfg, needs=NEEDS)
        dy: Any = torch.full_like(main_of(y), 1 / parts)
        dy = WithExtras(dy, dict.fromkeys(y.extras)) if isinstance(y, WithExtras) else dy
        s.op.bwd(donate(residuals), dy, cfg, into=sums)
    grads, logs = split_logs(sums, cfg)
    found = [(name, path, value) for name in ("y_norm", "dx_norm") for path, value in _by_layer(BLOCKS, logs[BLOCKS][name], "mean")]
    found += [(UPDATE, path, t) for path, t in update_ratios(before, after).items()]
    if parts > 1 and not tied:
        each = total_norm(logs, cfg) * parts  # each is of the gradient times 1 / parts
        whole, rows_each = global_norm(split_amaxes(grads)[0]), len(x) // parts
        noise, signal = (noises := gradient_noise(each, whole, batch_small=rows_each, batch_big=len(x)))
        found += [("noise", "", noise), ("signal", "", signal), (NOISE, "", noises.scale)]
    for path, names in low.items():
        for operand, what in (name.rsplit("_", 1) for name in names):
            found += [(what, f"{operand} {one}", t) for one, t in _by_layer(path, logs[path][f"{operand}_{what}"], "amax")]
    for path, of in (weight_rounding(before, compute) if low else {}).items():
        found += [(what, f"w {path}", getattr(of, what).amax()) for what in ROUNDING]
    return [Seen(step, what, where, float(value)) for what, where, value in found]


def _by_layer(path: str, value: Tensor, over_runs: str) -> list[tuple[str, Tensor]]:
    """The values [*layers, runs], each with the path of its layer."""
    value = getattr(value, over_runs)(-1) if value.dim() > path.count("*") else value
    if "*" not in path:
        return [(path, value)]
    return [one for i, of in enumerate(value) for one in _by_layer(path.replace("*", str(i), 1), of, over_runs)]


def lines(seen: list[Seen]) -> list[str]:
    """The values of a step in words."""
    by = {what: {one.where: one.value for one in seen if one.what == what} for what in dict.fromkeys(one.what for one in seen)}
    blocks = {name: " ".join(f"{value:.2g}" for value in by[name].values()) for name in ("y_norm", "dx_norm")}
    said = [f"|y| of each block {blocks['y_norm']}; |dx| {blocks['dx_norm']}"]
    most = max(by[UPDATE], key=lambda path: by[UPDATE][path])
    said.append(f"largest update over weight {by[UPDATE][most]:.2g}, of {most}")
    if NOISE in by:
        said.append(f"gradient noise {by['noise']['']:.3g}, signal {by['signal']['']:.3g}: noise scale {by[NOISE]['']:.3g} windows")
    for what in ("x", "w", "dy") if "error" in by else ():
        # x is q, k and v of attention, and rows of experts
        own = [where for where in by["error"] if (kind := where.split()[0]) == what or (what == "x" and kind not in ("w", "dy"))]
        worst = max(own, key=lambda where: by["error"][where])
        error, under, over = (by[name][worst] for name in ROUNDING[:3])
        said.append(f"largest rounding error of {worst.replace(' ', ', ', 1)}: {error:.2%}, {under:.2%} to 0, {over:.2%} clipped")
    return said


def picture(seen: list[Seen]) -> Any:
    """Updates over weights, and in a recipe each number of rounding, by path over the steps, and the noise scale of gradients."""
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.figure import Figure

    steps = sorted({one.step for one in seen})
    every = -(-len(steps) // TICKS)
    tables = {what: _table([one for one in seen if one.what == what], steps) for what in PANELS}
    shown = {what: table for what, table in tables.items() if table[0]}
    heights = [1.2, *(0.5 + 0.11 * len(wheres) for wheres, _ in shown.values())]
    figure: Any = Figure(figsize=(9, 1 + sum(heights)), layout="constrained")
    axes = figure.subplots(len(heights), 1, height_ratios=heights)
    scale = [one for one in seen if one.what == NOISE and one.value > 0 and math.isfinite(one.value)]
    line = axes[0] if shown else axes
    line.plot([one.step for one in scale], [one.value for one in scale], ".-")
    line.set(ylabel=NOISE, yscale="log" if scale else "linear", xlim=(steps[0] - 0.5, steps[-1] + 0.5))
    for axis, (what, (wheres, values)) in zip(axes[1:], shown.items(), strict=True):
        positive = [v for row in values for v in row if v > 0 and math.isfinite(v)]
        logarithmic = PANELS[what] == "log" and positive
        norm = LogNorm(min(positive), 1.01 * max(positive)) if logarithmic else Normalize(0, max(positive, default=1.0))
        image = axis.imshow(values, aspect="auto", interpolation="nearest", norm=norm)
        axis.set_yticks(range(len(wheres)), wheres, fontsize=4)
        axis.set_xticks(range(0, len(steps), every), steps[::every], fontsize=6)
        axis.set_title(what, fontsize=8, loc="left")
        figure.colorbar(image, ax=axis)
    axes[-1].set_xlabel("step")
    return figure


def _table(own: list[Seen], steps: list[int]) -> tuple[list[str], list[list[float]]]:
    """The paths, and for each its values by step, NaN where it has none."""
    known = {(one.where, one.step): one.value for one in own}
    wheres = list(dict.fromkeys(one.where for one in own))
    return wheres, [[known.get((where, step), math.nan) for step in steps] for where in wheres]
