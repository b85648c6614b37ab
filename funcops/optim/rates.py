"""Learning rates: the warm-up and cosine schedule, and checks of what is given as one."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from funcops.errors import describe, require, require_type


def warmup_cosine(step: int | Tensor, *, peak: float, warmup: int, total: int, final: float = 0.0) -> Any:
    """Learning rate of update `step` (from 0): linear up to `peak` at the last of `warmup` steps, then half a cosine down
    to `final`, which it is from step `total` on. A tensor step gives a float32 tensor, without a host sync.

    >>> [round(warmup_cosine(s, peak=1.0, warmup=2, total=6), 3) for s in range(7)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    require(0 <= warmup <= total, "warmup_cosine", "warmup", f"from 0 to total ({total})", warmup)
    up, down = max(warmup, 1), max(total - warmup, 1)
    if isinstance(step, Tensor):
        s = step.to(torch.float32)
        fall = final + (peak - final) * 0.5 * (1.0 + torch.cos(math.pi * (s - warmup) / down))
        return torch.where(s < warmup, peak * (s + 1.0) / up, torch.where(s >= total, final, fall))
    if step < warmup:
        return peak * (step + 1.0) / up
    return final if step >= total else final + (peak - final) * 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / down))


def not_negative(where: str, **given: float) -> None:
    for name, value in given.items():
        require_type(where, name, value, float, int)
        require(math.isfinite(value) and value >= 0, where, name, "finite and not negative", value)


def check_rate(where: str, lr: Any) -> Any:
    if isinstance(lr, Tensor):
        require(
            lr.numel() == 1 and lr.is_floating_point(),
            where,
            "lr",
            "a number or a float tensor of one element",
            describe(lr),
        )
        return lr.reshape(())
    require_type(where, "lr", lr, float, int)
    return float(lr)


def on_device(rate: Any, device: torch.device) -> Any:
    """The rate where the fused op can read it: a host number serves every device."""
    return rate.to(device) if isinstance(rate, Tensor) and not rate.is_cpu and rate.device != device else rate
