"""Autocast does not reach into an op: its dtype is that of its inputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from funcops.errors import fail
from funcops.trees import tensors


def without_autocast(tree: Any) -> torch.autocast:
    """A region without autocast on the device of a tree's first tensor."""
    return torch.autocast(next(t.device.type for t in tensors(tree)), enabled=False)


def refuse_autocast(where: str, given: Iterable[Tensor | None]) -> None:
    """Raise `RuntimeError` in a region where autocast is on for the device of one of these tensors."""
    if torch._C._is_any_autocast_enabled():
        for device in {t.device.type for t in given if t is not None}:
            if torch.is_autocast_enabled(device):
                fail(
                    where,
                    "the call",
                    "outside of torch.autocast (funcops.trees.cast gives params and x a dtype)",
                    f"autocast on {device}",
                    RuntimeError,
                )
