"""The bytes that a call of a module keeps for its backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.random import fork_rng

from funcops.engine.errors import describe, fail
from funcops.engine.trees import tensors


def kept_bytes(module: nn.Module, *args: Any, **kwargs: Any) -> int:
    """The bytes that autograd keeps after `module(*args, **kwargs)`, for any module: compare a model before and after `from_torch`.

    Each storage counts once. Parameters, buffers and the tensors among the arguments exist anyway and do not count; an output that
    the backward reads does. The call runs once, in the module's mode; no gradient is computed, and the values of buffers (running
    means, say) and of torch's random generators are put back. Raises `TypeError` for a value that is not a module, and what the
    call raises.

    >>> import torch
    >>> from funcops import nn
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.GELU(), torch.nn.Linear(16, 8))
    >>> x = torch.ones(4096, 8)
    >>> before, replaced = nn.kept_bytes(model, x), nn.from_torch(model)
    >>> before, nn.kept_bytes(model, x)
    (819200, 294912)
    """
    if not isinstance(module, nn.Module):
        fail("kept_bytes", "module", "a torch.nn.Module", describe(module), TypeError)
    return bytes_of_call(module, lambda: module(*args, **kwargs), tensors((args, kwargs)))


def bytes_of_call(module: nn.Module, call: Callable[[], Any], held: Sequence[Tensor]) -> int:
    """`kept_bytes` of a call of a module, beside these tensors."""
    own = [*module.parameters(), *module.buffers(), *held]
    there = {_storage(t) for t in own}
    kept: dict[int, int] = {}
    seen: list[Tensor] = []  # so that no storage's address is used twice

    def pack(t: Tensor) -> Tensor:
        seen.append(t)
        if _storage(t) not in there:
            kept[_storage(t)] = t.untyped_storage().nbytes()
        return t

    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    with fork_rng({t.device.index for t in own if t.is_cuda}), saved_tensors_hooks(pack, lambda t: t):
        y = call()
    del y
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
    return sum(kept.values())


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata
