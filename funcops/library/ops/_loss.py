"""Options and the reduction over rows, shared by both cross entropies."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from funcops.engine.backend import wide
from funcops.engine.errors import check, describe, fail, not_a_tuple, require, require_flag

Slopes = tuple[Tensor, Tensor | None]  # dloss and dentropy
REDUCTIONS = ("mean", "sum", "none")


def check_options(cfg: Any, where: str) -> None:
    require(0.0 <= cfg.label_smoothing < 1.0, where, "label_smoothing", "in [0, 1)", cfg.label_smoothing)
    require(0.0 <= cfg.z_loss < math.inf, where, "z_loss", "at least 0, and finite", cfg.z_loss)
    require(cfg.reduction in REDUCTIONS, where, "reduction", "'mean', 'sum' or 'none'", repr(cfg.reduction))
    require_flag(where, entropy=cfg.entropy)
    require(
        not cfg.entropy or cfg.reduction == "none",
        where,
        "reduction",
        "'none' with entropy, as each row has its own",
        cfg.reduction,
    )


def check_pair(where: str, x: Any, last: int | None, first: str, times: int = 1) -> tuple[Tensor, Tensor]:
    """Check and return x: `(floats [*, last], labels [*])`, with `times` as many rows of labels along the first dimension."""
    if not isinstance(x, tuple) or len(x) != 2:
        not_a_tuple(where, x, first, "labels")
    t, labels = x
    check(where, f"x.0 ({first})", t, (...,) if last is None else (..., last))
    if t.dim() < 1 or not t.is_floating_point():
        fail(where, f"x.0 ({first})", "floats [..., V]", describe(t))
    rows = t.shape[:-1]
    if times != 1:
        if not rows:
            fail(where, f"x.0 ({first})", f"[m, ..., {t.shape[-1]}], as its first dim is sharded", describe(t))
        rows = (times * rows[0], *rows[1:])  # type: ignore[assignment]
    check(where, "x.1 (labels)", labels, rows, torch.int64, t)
    return t, labels


def reduce_losses(losses: Tensor, labels: Tensor, cfg: Any) -> tuple[Tensor, Tensor | None]:
    """Return y and, for the mean, the number of rows that count (0-d). The mean over no rows is nan, as in PyTorch."""
    if cfg.reduction == "none":
        return losses, None
    total = losses.sum()
    if cfg.reduction == "sum":
        return total, None
    count = (labels != cfg.ignore_index).sum().to(losses.dtype)
    return total / count, count


def row_gradient(where: str, dy: Tensor, labels: Tensor, dtype: torch.dtype, count: Tensor | None, cfg: Any) -> Tensor:
    """Compute dloss from dy: one number per row [*], or one for all rows (0-d)."""
    shape = tuple(labels.shape) if cfg.reduction == "none" else ()
    check(where, "dy", dy, shape, wide(dtype), labels)
    return dy if count is None else dy / count.clamp(min=1)


def slopes_of(where: str, dy: Any, labels: Tensor, dtype: torch.dtype, count: Tensor | None, cfg: Any) -> Slopes:
    """dloss, as `row_gradient` has it, and dentropy [*], None for a zero and where the config asks for no entropy."""
    if not cfg.entropy:
        return row_gradient(where, dy, labels, dtype, count, cfg), None
    if not isinstance(dy, tuple) or len(dy) != 2:
        fail(where, "dy", "a tuple (dloss, dentropy), as cfg.entropy says", describe(dy), TypeError)
    for name, part in zip(("dy.0 (dloss)", "dy.1 (dentropy)"), dy, strict=True):
        if part is not None:
            check(where, name, part, tuple(labels.shape), wide(dtype), labels)
    dloss, dentropy = dy
    return torch.zeros(labels.shape, dtype=wide(dtype), device=labels.device) if dloss is None else dloss, dentropy
