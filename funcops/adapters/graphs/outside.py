"""Writes to tensors that a function reads from outside, such as the weights of a module in its closure: found, and undone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from funcops.adapters.graphs.faults import flat_tensors


class Undone(TorchDispatchMode):
    """Undoes, at its end, what operators wrote to tensors that were there before. `own` may be written to: their writes stay."""

    runs = True

    def __init__(self, own: list[Tensor]) -> None:
        super().__init__()
        self.own = {_storage(t) for t in own}
        self.alive: list[Tensor] = []  # so that no storage's address is used twice
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema.arguments
        if any(one.alias_info is not None and one.alias_info.is_write for one in schema):
            given = dict(zip([one.name for one in schema], args, strict=False)) | kwargs
            written = [given.get(one.name) for one in schema if one.alias_info is not None and one.alias_info.is_write]
            for t in flat_tensors([written]):
                self._remember(t)
        there = {_storage(t) for t in flat_tensors([args, kwargs])}
        out = func(*args, **kwargs)
        for t in flat_tensors([out]):
            if _storage(t) not in there:  # not a view of an argument
                self.own.add(_storage(t))
                self.alive.append(t)
        return out

    def _remember(self, t: Tensor) -> None:
        if _storage(t) not in self.own and _storage(t) not in self.before:
            whole = torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage())  # t may be a view of a part
            self.before[_storage(t)] = whole, whole.clone()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        with torch.no_grad():
            for whole, before in self.before.values():
                whole.copy_(before)


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata
