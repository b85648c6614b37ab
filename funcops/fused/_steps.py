"""What the rules look for in a step."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from funcops.compose.step import Step
from funcops.op import Op


def alone(step: Step, op: Op) -> bool:
    """A step of this op that takes and gives nothing but main."""
    return step.op is op and not step.names and not step.gives


def joins(step: Step, op: Op) -> bool:
    """A step of this op that takes one extra and gives none."""
    return step.op is op and len(step.names) == 1 and not step.gives


def alike(*tensors: Any) -> bool:
    """Tensors of one dtype on one device."""
    first = tensors[0]
    return all([isinstance(t, Tensor) and t.dtype is first.dtype and t.device == first.device for t in tensors])
