"""Conditions on calls and tensors that several rules check."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcops.contract.op import Op
from funcops.errors import FLOATS
from funcops.kernels.triton.gemm_table import choose
from funcops.program.lower import Call


def alone(call: Call, op: Op) -> bool:
    """Whether the call is of this op, and takes and gives nothing but main."""
    return call.op is op and not call.takes and not call.gives


def joins(call: Call, op: Op) -> bool:
    """Whether the call is of this op, takes one extra and gives none."""
    return call.op is op and len(call.takes) == 1 and not call.gives


def by_library(family: str, dtype: torch.dtype, columns: int) -> bool:
    """Whether torch's kernel computes a product of many rows with such an epilogue, followed by one for the epilogue."""
    return choose(family, dtype, 1 << 20, columns, True).library


def alike(*given: Any) -> bool:
    """Whether all are tensors of one float dtype on one device that autograd would not record, as the calls themselves require."""
    first, recording = given[0], torch.is_grad_enabled()
    if not isinstance(first, Tensor) or first.dtype not in FLOATS:
        return False
    dtype, device = first.dtype, first.device
    return all(
        [isinstance(t, Tensor) and t.dtype is dtype and t.device == device and not (recording and t.requires_grad) for t in given]
    )


def is_key(key: Any, like: Tensor) -> bool:
    """Whether `key` is a random key on the device of `like`."""
    return isinstance(key, Tensor) and key.dtype is torch.int64 and key.shape == (2,) and key.device == like.device
