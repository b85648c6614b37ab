"""The values of a torch.nn module's parts, by the module's path: told by hooks, as programs do for their steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from funcops.engine.backend import notes, scopes


@contextmanager
def told_by_hooks(module: torch.nn.Module) -> Iterator[None]:
    """A block in which every part of a module tells its y, its dy and dx, and the gradients of its own parameters; of a part that
    gives neither a tensor nor a tuple, torch's hooks see no dy and dx."""
    handles: list[Any] = []
    try:
        for path, part in module.named_modules():
            handles += [part.register_forward_hook(_forward(path)), part.register_full_backward_hook(_backward(path))]
            for name, parameter in part.named_parameters(recurse=False):
                if parameter.requires_grad:
                    handles.append(parameter.register_hook(_gradient(path, name)))
        with warnings.catch_warnings():
            # torch warns where no input of a part requires a gradient: then it has no dx
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            # and where a part gives an object of its own, whose parts tell their gradients
            warnings.filterwarnings("ignore", message="For backward hooks to be called")
            yield
    finally:
        for handle in handles:
            handle.remove()


def _tell(path: str, half: str, *items: tuple[str, Any]) -> None:
    with torch.no_grad(), scopes.named_scope(path, half):
        notes.tell([(None, "fwd" if name == "y" else half, name, _detached(value)) for name, value in items])


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, (tuple, list)):
        return value[0].detach() if len(value) == 1 and isinstance(value[0], torch.Tensor) else [_detached(v) for v in value]
    if isinstance(value, dict):
        return {name: _detached(v) for name, v in value.items()}
    return None


def _forward(path: str) -> Any:
    return lambda module, args, y: _tell(path, "fwd", ("y", y))


def _backward(path: str) -> Any:
    return lambda module, dx, dy: _tell(path, "dgrad", ("dy", dy), ("dx", dx))


def _gradient(path: str, name: str) -> Any:
    return lambda gradient: _tell(path, "wgrad", (f"dparams.{name}", gradient))
