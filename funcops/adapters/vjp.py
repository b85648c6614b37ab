"""Gradients of an op without autograd, as JAX users write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from funcops.errors import describe, fail, require_type
from funcops.needs import Needs
from funcops.op import Op
from funcops.residuals import donate


def value_and_grad(op: Op, *, x: bool = False) -> Callable[..., Any]:
    """`run(params, x, cfg) -> (y, dparams)` for an op that gives a scalar, such as a model with its loss; with `x` it is
    `(y, (dparams, dx))`. The residuals are given away, so memory falls as the backward walks.

    Raises `ValueError` where y is not one number.
    """
    require_type("value_and_grad", "op", op, Op)
    both, needs = x, Needs(x=x)

    def run(params: Any, x: Any, cfg: Any) -> Any:
        y, residuals = op.fwd(params, x, cfg, needs=needs)
        if not isinstance(y, Tensor) or y.numel() != 1:
            fail("value_and_grad", "y", "one number", describe(y))
        dparams, dx = op.bwd(donate(residuals), torch.ones_like(y), cfg)
        return y, (dparams, dx) if both else dparams

    return run


def vjp(op: Op, params: Any, x: Any, cfg: Any, *, needs: Needs = Needs.ALL) -> tuple[Any, Callable[[Any], tuple[Any, Any]]]:
    """`(y, pullback)`, where `pullback(dy)` is `(dparams, dx)` and may be called again: it holds the residuals.

    As `jax.vjp`, of both params and x.
    """
    require_type("vjp", "op", op, Op)
    y, residuals = op.fwd(params, x, cfg, needs=needs)

    def pullback(dy: Any) -> tuple[Any, Any]:
        return op.bwd(residuals, dy, cfg)  # type: ignore[no-any-return]

    return y, pullback
