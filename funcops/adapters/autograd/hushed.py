"""Hooks of parameters whose gradient is delayed: autograd calls a leaf's hooks also where a backward gives it no gradient."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from funcops.engine.contract.versions import version


class _IfGiven:
    """A hook that is called only where autograd has a gradient; `after`: it has been accumulated then."""

    def __init__(self, hook: Any, after: bool) -> None:
        self.hook, self.after = hook, after
        self.before: tuple[int, Any] = 0, None

    def __call__(self, given: Any) -> Any:
        there = self.before != _mark(given) if self.after else given is not None
        return self.hook(given) if there else None


def _mark(parameter: Tensor) -> tuple[int, Any]:
    """A value that changes whenever a gradient is accumulated."""
    grad = parameter.grad
    return (0, None) if grad is None else (id(grad), version(grad))


def _hooks(parameter: Tensor) -> list[Any]:
    """The hooks on a parameter's gradient, and those after it is accumulated, by key."""
    return [getattr(parameter, name, None) or {} for name in ("_backward_hooks", "_post_accumulate_grad_hooks")]


def hush(parameters: Iterable[Tensor]) -> None:
    """Let hooks fire only for gradients that the backward which runs gives these parameters, until `unhush`."""
    for parameter in parameters:
        for after, hooks in enumerate(_hooks(parameter)):
            for key, hook in hooks.items():
                hooks[key] = hook = hook if type(hook) is _IfGiven else _IfGiven(hook, bool(after))
                hook.before = _mark(parameter)


def unhush(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        for hooks in _hooks(parameter):
            hooks.update({key: hook.hook for key, hook in hooks.items() if type(hook) is _IfGiven})
