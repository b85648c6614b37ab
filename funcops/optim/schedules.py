"""Learning rates as functions of the step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from funcops.engine.errors import require, require_count, require_number


def warmup_cosine(step: int | Tensor, *, peak: float, warmup: int, total: int, final: float = 0.0) -> Any:
    """The learning rate of update s = `step`, counted from 0 (SGDR's cosine, arXiv:1608.03983, after a linear warm-up):

        s < warmup:  peak (s + 1) / warmup
        s < total:   final + (peak - final) (1 + cos(pi (s - warmup) / (total - warmup))) / 2        then: final

    A tensor `step` (any shape) gives float32 of the same shape, without a host sync. Raises `ValueError` unless
    0 <= warmup <= total.

    >>> from funcops.optim import warmup_cosine
    >>> [round(warmup_cosine(s, peak=1.0, warmup=2, total=6), 3) for s in range(7)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    where = "warmup_cosine"
    require_number(where, 0, peak=peak, final=final)
    require_count(where, 0, warmup=warmup, total=total)
    if not isinstance(step, Tensor):
        require_number(where, 0, step=step)
    require(0 <= warmup <= total, "warmup_cosine", "warmup", f"from 0 to total ({total})", warmup)
    up, down = max(warmup, 1), max(total - warmup, 1)
    if isinstance(step, Tensor):
        s = step.to(torch.float32)
        fall = final + (peak - final) * 0.5 * (1.0 + torch.cos(math.pi * (s - warmup) / down))
        return torch.where(s < warmup, peak * (s + 1.0) / up, torch.where(s >= total, final, fall))
    if step < warmup:
        return peak * (step + 1.0) / up
    return final if step >= total else final + (peak - final) * 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / down))
