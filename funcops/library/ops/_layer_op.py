"""The op of a linear layer, whose functions are the methods of its `LinearLayer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import bwd_of, dgrad_of, forward, init_of, make_op, wgrad_of
from funcops.engine.contract.signatures import BwdOf, C, DgradOf, Forward, G, InitOf, R, WgradOf
from funcops.library.ops.linear import LinearParams
from funcops.library.ops.linear_layer import LinearLayer

if TYPE_CHECKING:
    from funcops.engine.contract.op import TypedOp


def layer_op(
    kind: type[LinearLayer], name: str, config: type[C], residuals: type[R], pending: type[G], logs: Any = (), **docs: str
) -> tuple[
    TypedOp[LinearParams, Tensor, C, Tensor, R],
    InitOf[C, LinearParams],
    Forward[LinearParams, Tensor, C, Tensor, R],
    BwdOf[R, Tensor, C, LinearParams, Tensor],
    DgradOf[R, Tensor, C, tuple[Tensor, G | None]],
    WgradOf[G, C, LinearParams],
]:
    """The op, and its `init`, `fwd`, `bwd`, `dgrad` and `wgrad`, which check what they are given, and run the method of that name
    of a layer of this kind. `docs`: a docstring for each of them; without one for `bwd`, it is derived from its halves. `logs`:
    see `Op`."""
    layer: Any = kind(name, residuals, pending)

    def init(cfg: Any, *, key: Tensor | None = None, device: Any = None, dtype: torch.dtype | None = None) -> Any:
        return layer.init(cfg, key, device, dtype)

    def fwd(params: Any, x: Any, cfg: Any, *, needs: Needs = Needs.ALL) -> Any:
        return layer.fwd(params, x, cfg, needs)

    def bwd(residuals: Any, dy: Any, cfg: Any, *, into: Any = None) -> Any:
        return layer.bwd(residuals, dy, cfg, into)

    def dgrad(residuals: Any, dy: Any, cfg: Any, sums: Tensor | None = None) -> Any:
        return layer.dgrad(residuals, dy, cfg, sums)

    def wgrad(pending: Any, cfg: Any, *, into: Any = None) -> Any:
        return layer.wgrad(pending, cfg, into)

    types = dict(params="LinearParams", x="Tensor", dy="Tensor", cfg=config.__name__, into="LinearParams | None")
    types |= dict(residuals=residuals.__name__, pending=pending.__name__)
    results = dict(init="LinearParams", wgrad="LinearParams", bwd="tuple[LinearParams, Tensor]")
    results |= dict(fwd=f"tuple[Tensor, {residuals.__name__} | None]", dgrad=f"tuple[Tensor, {pending.__name__} | None]")
    for part, fn in dict(init=init, fwd=fwd, bwd=bwd, dgrad=dgrad, wgrad=wgrad).items():
        fn.__name__ = fn.__qualname__ = f"{name}_{part}"
        fn.__module__, fn.__doc__ = config.__module__, docs.get(part)
        fn.__annotations__ = {at: types.get(at, said) for at, said in fn.__annotations__.items()} | {"return": results[part]}
    keeps: Any = layer.keeps(config)
    op: Any = make_op(
        name,
        config,
        init=init_of(config)(init),
        fwd=forward(config, LinearParams)(fwd),
        dgrad=dgrad_of(keeps)(dgrad),
        wgrad=wgrad_of(pending, LinearParams)(wgrad),
        bwd=bwd_of(keeps, LinearParams)(bwd) if "bwd" in docs else None,
        products=layer.products,
        layer=layer,
        logs=logs,
    )
    return op, op.init, op.fwd, op.bwd, op.dgrad, op.wgrad
