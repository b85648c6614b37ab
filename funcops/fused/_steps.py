"""What the rules look for in a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcops.compose.step import Step
from funcops.errors import FLOATS
from funcops.op import Op


def alone(step: Step, op: Op) -> bool:
    """A step of this op that takes and gives nothing but main."""
    return step.op is op and not step.names and not step.gives


def joins(step: Step, op: Op) -> bool:
    """A step of this op that takes one extra and gives none."""
    return step.op is op and len(step.names) == 1 and not step.gives


def alike(*given: Any) -> bool:
    """Tensors of one float dtype on one device, none of which autograd would record: what the steps themselves ask for."""
    first, recording = given[0], torch.is_grad_enabled()
    if not isinstance(first, Tensor) or first.dtype not in FLOATS:
        return False
    dtype, device = first.dtype, first.device
    return all(
        [isinstance(t, Tensor) and t.dtype is dtype and t.device == device and not (recording and t.requires_grad) for t in given]
    )
