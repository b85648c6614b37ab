"""A linear layer, an optional cap, and the cross entropy of its output, in chunks: the logits are never whole in memory, and are
recomputed.

Applies if a chain's config says so (`joined`), or a policy recomputes the loss's logits.
"""

from __future__ import annotations

from typing import Any

from funcops.engine.compose.joints import Made, register_joint
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import Op, bwd_of, forward, init_of, make_op, wgrad_of
from funcops.library.ops.cross_entropy import CrossEntropyConfig, cross_entropy
from funcops.library.ops.linear import LinearConfig, LinearParams, linear
from funcops.library.ops.linear_cross_entropy import LinearCrossEntropyConfig, LinearCrossEntropyParams, linear_cross_entropy
from funcops.library.ops.softcap import softcap


def for_linear_params(op: Op) -> Op:
    """The cross entropy of a projection, with the params of a linear layer without a bias."""

    @init_of(op.config)
    def init(cfg: Any, *, key: Any = None, device: Any = None, dtype: Any = None) -> LinearParams:
        return LinearParams(op.init(cfg, key=key, device=device, dtype=dtype).weight, None)

    @forward(op.config, LinearParams)
    def fwd(params: LinearParams, x: Any, cfg: Any, *, needs: Needs = Needs.ALL) -> Any:
        return op.fwd(LinearCrossEntropyParams(params.weight), x, cfg, needs=needs)

    @wgrad_of(op.pending, LinearParams)
    def wgrad(pending: Any, cfg: Any, *, into: Any = None) -> LinearParams:
        found = op.wgrad(pending, cfg, into=None if into is None else LinearCrossEntropyParams(into.weight))
        return LinearParams(found.weight, None) if into is None else into

    @bwd_of(op.keeps, LinearParams)
    def bwd(residuals: Any, dy: Any, cfg: Any, *, into: Any = None) -> tuple[LinearParams, Any]:
        found, dx = op.bwd(residuals, dy, cfg, into=None if into is None else LinearCrossEntropyParams(into.weight))
        return (LinearParams(found.weight, None) if into is None else into), dx

    return make_op(op.name, op.config, init=init, fwd=fwd, dgrad=op.dgrad, wgrad=wgrad, bwd=bwd, mixes=op.mixes)


def made_by(op: Op, make: Any) -> Any:
    """The function for `register_joint`: `make(head, loss, **options)` makes the config of `op`."""

    def made(head: Any, *others: Any) -> Made:
        *caps, loss = others
        if head.bias:
            return "the linear has a bias"
        options = {name: getattr(loss, name) for name in ("label_smoothing", "ignore_index", "z_loss", "reduction", "entropy")}
        return op, make(head, loss, softcap=caps[0].cap if caps else None, **options)

    return made


head_loss = for_linear_params(linear_cross_entropy)


def _config(head: LinearConfig, loss: CrossEntropyConfig, **options: Any) -> LinearCrossEntropyConfig:
    return LinearCrossEntropyConfig(head.in_features, head.out_features, **options)


for _ops in ((linear, cross_entropy), (linear, softcap, cross_entropy)):
    register_joint(_ops, made_by(head_loss, _config))
