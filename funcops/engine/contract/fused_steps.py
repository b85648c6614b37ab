"""Steps of torch's fused optimisers, which write to parameters without counting the write."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = ["watch"]

# by id, as tensors are compared by their elements; weakly, as a parameter may be dropped
_watched: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


def watch(parameters: Iterable[Tensor]) -> None:
    """Count each later write of a fused optimiser to these parameters, of which something was made that must not outlive it."""
    _listen()
    _watched.update({id(p): p for p in parameters})


# one hook in the process, and none before there is something to watch
@functools.cache
def _listen() -> Any:
    return register_optimizer_step_post_hook(_count)


def _count(optimiser: torch.optim.Optimizer, *_: Any) -> None:
    fused: list[Tensor] = [p for group in optimiser.param_groups if group.get("fused") for p in group["params"]]
    # an id may be another tensor's by now; a parameter without a gradient is not written to
    written = [p for p in fused if p.grad is not None and _watched.get(id(p)) is p]
    if written:
        torch.autograd.graph.increment_version(written)
