"""Gradients of an op without autograd, as JAX users write them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor

from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import Op, takes_op
from funcops.engine.contract.signatures import C, HasFwd, P, R, Run, X, Y
from funcops.engine.errors import describe, fail, require, require_flag, require_type
from funcops.engine.residuals.donate import donate
from funcops.engine.trees import WithExtras, leaves, nothing_like, with_leaves

__all__ = ["check_losses", "sum_gradient", "value_and_grad", "vjp"]


@overload
def value_and_grad(
    op: HasFwd[P, X, C, Y, R], *, x: Literal[False] = ..., has_aux: bool = ..., losses: tuple[str, ...] = ..., needs: Needs = ...
) -> Run[P, X, C, tuple[Y, P]]: ...
@overload
def value_and_grad(
    op: HasFwd[P, X, C, Y, R], *, x: Literal[True], has_aux: bool = ..., losses: tuple[str, ...] = ..., needs: Needs = ...
) -> Run[P, X, C, tuple[Y, tuple[P, X]]]: ...
@overload
def value_and_grad(
    op: HasFwd[P, X, C, Y, R], *, x: bool, has_aux: bool = ..., losses: tuple[str, ...] = ..., needs: Needs = ...
) -> Run[P, X, C, tuple[Y, Any]]: ...
@takes_op
def value_and_grad(
    op: Any, *, x: bool = False, has_aux: bool = False, losses: tuple[str, ...] = (), needs: Needs = Needs.ALL
) -> Callable[..., Any]:
    """Return `run(params, x, cfg) -> (y, dparams)` for an op whose y is a scalar, such as a model with its loss; with `x` the
    result is `(y, (dparams, dx))`. The residuals are given away, so memory falls during the backward.

    With `has_aux` y is a tuple `(loss, *aux)`, of which only loss is differentiated; the whole y is returned, as by
    `jax.value_and_grad`. If the config has outputs, y is `WithExtras(loss, outputs)`, and the loss plus the sums of the outputs
    named in `losses` is differentiated; the whole y is returned, too. `needs`: the requested gradients, by default all; frozen
    params get None and keep nothing, with `needs=lora_needs(cfg)`. The gradient of x is returned only with `x`.

    Raises `ValueError` if y, or loss, is not one number, for `losses` that are not names of float outputs, and for `x` with needs
    without a gradient of x; `TypeError` if y must be a tuple and is not.

    >>> import torch
    >>> from funcops import CrossEntropyConfig, cross_entropy, value_and_grad
    >>> logits, labels = torch.zeros(1, 4), torch.tensor([3])
    >>> loss, (dparams, (dlogits, _)) = value_and_grad(cross_entropy, x=True)(None, (logits, labels), CrossEntropyConfig())
    >>> loss, dlogits
    (tensor(1.3863), tensor([[ 0.2500,  0.2500,  0.2500, -0.7500]]))
    """
    require_flag("value_and_grad", x=x, has_aux=has_aux)
    check_losses("value_and_grad", losses)
    require_type("value_and_grad", "needs", needs, Needs)
    require(not x or bool(needs.x), "value_and_grad", "needs", "with gradients of x, as x=True returns them", needs)
    # `run` has an x of its own; and without dx nothing is kept for it
    both, needs = x, needs if x else Needs(x=False, params=needs.params)

    def run(params: Any, x: Any, cfg: Any) -> Any:
        y, residuals = op.fwd(params, x, cfg, needs=needs)
        named = type(y) is WithExtras and not has_aux
        loss, outputs = (y.main, y.extras) if named else (y, {})
        if has_aux:
            require_type("value_and_grad", "y", y, tuple)
            loss = y[0]
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"{describe(loss)}: end the chain with a loss, or call vjp with a dy"
            fail("value_and_grad", "y.0" if has_aux else "y.main" if named else "y", "one number", got)
        check_losses("value_and_grad", losses, outputs)
        dy: Any = torch.ones_like(loss)
        if has_aux:
            # None for the others is zero, and y may be a named tuple, whose form dy has
            dy = with_leaves(y, [dy, *leaves(nothing_like(y))[1:]])
        if named:
            given = {name: sum_gradient("value_and_grad", name, t) if name in losses else None for name, t in outputs.items()}
            dy = WithExtras(dy, given)
        dparams, dx = op.bwd(donate(residuals), dy, cfg)
        return y, (dparams, dx) if both else dparams

    return run


def check_losses(where: str, losses: Any, outputs: Iterable[str] | None = None) -> None:
    """Raise unless `losses` is a tuple of names, all in `outputs` if these are known."""
    right = isinstance(losses, tuple) and all([isinstance(name, str) for name in losses])
    require(right, where, "losses", "a tuple of names", repr(losses))
    if outputs is not None:
        unknown = [name for name in losses if name not in outputs]
        require(not unknown, where, "losses", f"names among the outputs ({', '.join(outputs) or 'none'})", unknown)


def sum_gradient(where: str, name: str, output: Any, each: float = 1.0) -> Tensor:
    """The gradient of an output whose sum, times `each`, is added to a loss."""
    if not isinstance(output, Tensor) or not output.is_floating_point():  # in every step: no text is made for a right one
        fail(where, "losses", "names of float outputs", f"{name!r}, {describe(output)}")
    return torch.full_like(output, each)


@takes_op
def vjp(
    op: HasFwd[P, X, C, Y, R], params: P, x: X, cfg: C, *, needs: Needs = Needs.ALL
) -> tuple[Y, Callable[[Y | None], tuple[P, X]]]:
    """Return `(y, pullback)`; `pullback(dy)` returns `(dparams, dx)` and may be called several times, as it holds the residuals.

    Like `jax.vjp`, for both params and x. Raises `TypeError` unless `op` is an op, and what its forward raises.

    >>> import torch
    >>> from funcops import ScaleConfig, scale, vjp
    >>> y, pullback = vjp(scale, None, torch.ones(2), ScaleConfig(3.0))
    >>> y, pullback(torch.tensor([1.0, 0.0]))
    (tensor([3., 3.]), (None, tensor([3., 0.])))
    """
    bwd = cast(Op, op).bwd
    y, residuals = op.fwd(params, x, cfg, needs=needs)

    def pullback(dy: Y | None) -> tuple[P, X]:
        return bwd(residuals, dy, cfg)

    return y, pullback
