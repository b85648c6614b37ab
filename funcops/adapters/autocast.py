"""Autocast does not reach into an op: its dtype is that of its inputs."""

from __future__ import annotations

from typing import Any

import torch

from funcops.trees import tensors


def without_autocast(tree: Any) -> torch.autocast:
    """A region without autocast on the device of a tree's first tensor."""
    return torch.autocast(next(t.device.type for t in tensors(tree)), enabled=False)
