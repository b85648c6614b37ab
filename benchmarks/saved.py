"""The bytes that autograd saves in a forward, by storage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def saved_by_autograd(module: nn.Module, data: Tensor) -> int:
    """The bytes of the storages that a forward of x, which requires grad, saves."""
    return saved_by(module, lambda: module(data.clone().requires_grad_()))


def saved_by(module: nn.Module, forward: Callable[[], Any], shared: Sequence[Tensor] = ()) -> int:
    """The bytes of the storages that a call saves, without the module's params and tables, and without `shared` ones."""
    storages: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = forward()
    held = [*module.parameters(), *(value for part in module.modules() for value in vars(part).values()), *shared]
    tables = {t.untyped_storage()._cdata for t in held if isinstance(t, Tensor)}
    kept = sum([size for storage, size in storages.items() if storage not in tables])
    del y
    return kept
