"""Gradients that refuse to be differentiated: an op has first derivatives alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def first_order(where: str, gradients: Any) -> Any:
    """The gradients of a backward under `create_graph=True`, each with a `grad_fn` that raises `RuntimeError`: what is computed of
    them (a penalty on a gradient) would otherwise have none, in silence. torch's `once_differentiable` refuses only where a
    cotangent requires grad."""
    if type(gradients) is not tuple:
        return first_order(where, (gradients,))
    message = f"{where}: a gradient must be differentiated no further (an op has first derivatives alone), got a second backward"
    raising: Any = torch._C._functions.DelayedError(message.encode(), len(gradients))  # type: ignore[attr-defined]
    with torch.enable_grad():
        found = raising(*[_asking(g) if isinstance(g, Tensor) else None for g in gradients])
    return found if isinstance(found, tuple) else (found,)


def _asking(g: Tensor) -> Tensor:
    return g.detach().requires_grad_()
