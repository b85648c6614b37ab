"""`--watch`: the values that a step returns beside its loss: norms by layer, updates over weights, gradient noise, and rounding."""

from __future__ import annotations

from typing import Any

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


def watched(before: Any, after: Any, x: Tensor, labels: Tensor, s: Settings, scales: Any, key: Tensor | None) -> list[str]:
    """Lines about a step that made the params `after` of `before`: its rows run once more, in microbatches, with logs."""
    parts = next(n for n in PARTS if len(x) % n == 0)
    tied = bool(s.model.ties)
    asked = {} if tied else param_logs(s.model)
    asked[BLOCKS] = (*asked.get(BLOCKS, ()), "dx_norm", "y_norm")
    low = s.recipe is not None
    cfg = with_logs(s.model, asked | (rounding_logs(s.model) if low else {}), runs=parts)
    compute = quantize_params(before, s.model, scales, dtype=s.dtype, key=key)
    work = logs_init(compute, cfg)
    sums = gradients_like(work, torch.promote_types(s.dtype, torch.float32), NEEDS)
    for rows, wanted in zip(x.chunk(parts), labels.chunk(parts), strict=True):
        y, residuals = s.op.fwd(work, inputs(work, rows, wanted, s), cfg, needs=NEEDS)
        dy: Any = torch.full_like(main_of(y), 1 / parts)
        dy = WithExtras(dy, dict.fromkeys(y.extras)) if isinstance(y, WithExtras) else dy
        s.op.bwd(donate(residuals), dy, cfg, into=sums)
    grads, logs = split_logs(sums, cfg)
    blocks = {name: " ".join(f"{one:.2g}" for one in logs[BLOCKS][name].mean(-1).tolist()) for name in ("y_norm", "dx_norm")}
    lines = [f"|y| of each block {blocks['y_norm']}; |dx| {blocks['dx_norm']}"]
    moved = {path: float(t) for path, t in update_ratios(before, after).items()}
    most = max(moved, key=lambda path: moved[path])
    lines.append(f"largest update over weight {moved[most]:.2g}, of {most}")
    if parts > 1 and not tied:
        each = total_norm(logs, cfg) * parts  # each is of the gradient times 1 / parts
        whole, rows_each = global_norm(split_amaxes(grads)[0]), len(x) // parts
        noise, signal = (found := gradient_noise(each, whole, batch_small=rows_each, batch_big=len(x)))
        lines.append(f"gradient noise {noise:.3g}, signal {signal:.3g}: noise scale {found.scale:.3g} windows")
    if low:
        lines += _rounding(logs, weight_rounding(before, compute))
    return lines


def _rounding(logs: Any, weights: Any) -> list[str]:
    """For x, w and dy the layer with the largest error, and the shares of it that vanish or are clipped."""
    operands = [(what, path, named) for path, named in logs.items() for what in ("x", "dy") if f"{what}_error" in named]
    found = [
        (what, path, *[float(named[f"{what}_{how}"].amax()) for how in ("error", "underflow", "saturated")])
        for what, path, named in operands
    ]
    for path, one in weights.items():
        found.append(("w", path, *[float(t.amax()) for t in (one.error, one.underflow, one.saturated)]))
    worst = [max([row for row in found if row[0] == what], key=lambda row: row[2]) for what in ("x", "w", "dy")]
    return [
        f"largest rounding error of {what}, {path}: {error:.2%}, {under:.2%} to 0, {over:.2%} clipped"
        for what, path, error, under, over in worst
    ]
