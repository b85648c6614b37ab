"""Gradients of an op without autograd, as JAX users write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from funcops.errors import describe, fail, require_flag, require_type
from funcops.needs import Needs
from funcops.op import Op
from funcops.residuals import donate
from funcops.trees import leaves, nothing_like, with_leaves


def value_and_grad(op: Op, *, x: bool = False, has_aux: bool = False) -> Callable[..., Any]:
    """`run(params, x, cfg) -> (y, dparams)` for an op that gives a scalar, such as a model with its loss; with `x` it is
    `(y, (dparams, dx))`. The residuals are given away, so memory falls as the backward walks.

    With `has_aux` y is a tuple `(loss, *aux)`, of which loss alone is differentiated; y comes back whole, as from
    `jax.value_and_grad`. Raises `ValueError` where y, or loss, is not one number, `TypeError` where y must be a tuple and is not.
    """
    require_type("value_and_grad", "op", op, Op)
    require_flag("value_and_grad", x=x, has_aux=has_aux)
    both, needs = x, Needs(x=x)

    def run(params: Any, x: Any, cfg: Any) -> Any:
        y, residuals = op.fwd(params, x, cfg, needs=needs)
        loss = y
        if has_aux:
            require_type("value_and_grad", "y", y, tuple)
            loss = y[0]
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            fail("value_and_grad", "y.0" if has_aux else "y", "one number", describe(loss))
        dy: Any = torch.ones_like(loss)
        if has_aux:
            dy = with_leaves(y, [dy, *leaves(nothing_like(y))[1:]])
        dparams, dx = op.bwd(donate(residuals), dy, cfg)
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
