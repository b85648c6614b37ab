"""Projection and cross entropy in chunks of rows, so that the full logits never exist.

    l = x w^T        loss: as in cross_entropy        dx = dl w        dw = dl^T x

x is `(x, labels)`. x, dx: [*, I]; labels: [*] int64; w, dw: [V, I]; one float dtype; y: a float32 scalar (float64 for
float64), or [*] with reduction "none". A chunk's logits and their float32 copy fill at most `chunk_bytes`. Kept: x, w and
labels, aliases, and logsumexp: 4 bytes a row; both halves of the backward recompute the logits of a chunk at a time.
arXiv:2411.09009, Liger-Kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from funcops import random
from funcops.errors import check, require
from funcops.kernels import cross_entropy as kernels
from funcops.kernels import linear as linear_kernels
from funcops.needs import Needs
from funcops.op import accumulate, config, dgrad_of, forward, make_op, positional, wgrad_of
from funcops.ops._loss import check_options, check_pair, reduce_losses, row_gradient
from funcops.schema import DGRAD, WGRAD, Inputs, pending, residuals, saved, static
from funcops.trees import leaf, tree


@config
class LinearCrossEntropyConfig:
    """`in_features` (I) and `vocab` (V); `chunk_bytes` bounds the logits that exist at a time."""

    in_features: int = positional()
    vocab: int = positional()
    label_smoothing: float = 0.0
    ignore_index: int = -100
    z_loss: float = 0.0
    reduction: str = "mean"
    chunk_bytes: int = 64 * 2**20

    def __post_init__(self) -> None:
        for name in ("in_features", "vocab", "chunk_bytes"):
            value = getattr(self, name)
            require(isinstance(value, int) and value >= 1, "LinearCrossEntropyConfig", name, "at least 1", value)
        check_options(self, "LinearCrossEntropyConfig")

    def chunks(self, rows: int) -> Iterator[slice]:
        """Slices of rows; their number depends on the sizes alone."""
        size = max(1, self.chunk_bytes // (8 * self.vocab))
        return (slice(start, start + size) for start in range(0, rows, size))


@tree
class LinearCrossEntropyParams:
    weight: Tensor = leaf("[V, I]")


@residuals
class LinearCrossEntropyResiduals:
    x: Tensor = saved("[*, I]", alias="x.0", needed_by=DGRAD | WGRAD, of=("x.0", "params"))
    labels: Tensor = saved("[*]", alias="x.1", needed_by=DGRAD | WGRAD, of=("x.0", "params"))
    weight: Tensor = saved("[V, I]", alias="params.weight", needed_by=DGRAD | WGRAD, of=("x.0", "params"))
    logsumexp: Tensor = saved(
        "[*]", needed_by=DGRAD | WGRAD, of=("x.0", "params"), recompute_from=("x", "weight")
    )
    count: Tensor | None = saved(
        "[]", needed_by=DGRAD | WGRAD, of=("x.0", "params"), recompute_from=("labels",)
    )
    inputs: Any = static()


@pending
class LinearCrossEntropyPending:
    x: Tensor = saved("[*, I]", alias="residuals.x", needed_by=WGRAD)
    labels: Tensor = saved("[*]", alias="residuals.labels", needed_by=WGRAD)
    weight: Tensor = saved("[V, I]", alias="residuals.weight", needed_by=WGRAD)
    logsumexp: Tensor = saved("[*]", alias="residuals.logsumexp", needed_by=WGRAD)
    dloss: Tensor = saved("[*] or []", needed_by=WGRAD)


def linear_cross_entropy_init(
    cfg: LinearCrossEntropyConfig, *, key: Tensor | None = None, device: Any = None, dtype: torch.dtype | None = None
) -> LinearCrossEntropyParams:
    """Weight uniform in ±1/sqrt(I), as torch.nn.Linear draws it."""
    bound = cfg.in_features**-0.5
    shape = (cfg.vocab, cfg.in_features)
    return LinearCrossEntropyParams(random.uniform(key, shape, low=-bound, high=bound, dtype=dtype, device=device))


@forward(LinearCrossEntropyConfig, LinearCrossEntropyParams)
def linear_cross_entropy_fwd(
    params: LinearCrossEntropyParams,
    x: tuple[Tensor, Tensor],
    cfg: LinearCrossEntropyConfig,
    *,
    needs: Needs = Needs.ALL,
) -> tuple[Tensor, Any]:
    """x: `(x, labels)` -> y. Raises `ValueError` or `TypeError` for a wrong shape, dtype or device."""
    t, labels = check_pair("linear_cross_entropy_fwd", x, cfg.in_features, "x")
    weight = params.weight
    check("linear_cross_entropy_fwd", "params.weight", weight, (cfg.vocab, cfg.in_features), t.dtype, t)
    rows, flat = t.reshape(-1, cfg.in_features), labels.reshape(-1)
    found = [
        kernels.cross_entropy_fwd(
            linear_kernels.linear_fwd(rows[c], weight, None), flat[c], cfg.label_smoothing, cfg.ignore_index, cfg.z_loss
        )
        for c in cfg.chunks(rows.shape[0])
    ]
    losses, lse = (_joined([f[i] for f in found], labels, t) for i in range(2))
    y, count = reduce_losses(losses, labels, cfg)
    kept = LinearCrossEntropyResiduals.keep(
        cfg, needs, x=t, labels=labels, weight=weight, logsumexp=lse, count=count, inputs=Inputs.of(x)
    )
    return y, kept


def _joined(parts: list[Tensor], labels: Tensor, like: Tensor) -> Tensor:
    if not parts:
        return torch.empty(labels.shape, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(labels.shape)


def _dlogits(kept: Any, dloss: Tensor, cfg: LinearCrossEntropyConfig) -> Iterator[tuple[Tensor, Tensor]]:
    """By chunk: the rows of x and the gradient of their logits."""
    rows, labels, lse = kept.x.reshape(-1, cfg.in_features), kept.labels.reshape(-1), kept.logsumexp.reshape(-1)
    d = dloss.reshape(-1) if dloss.dim() else dloss
    for c in cfg.chunks(rows.shape[0]):
        logits = linear_kernels.linear_fwd(rows[c], kept.weight, None)
        options = (cfg.label_smoothing, cfg.ignore_index, cfg.z_loss)
        yield rows[c], kernels.cross_entropy_bwd(d[c] if d.dim() else d, logits, labels[c], lse[c], *options)


@dgrad_of(LinearCrossEntropyResiduals)
def linear_cross_entropy_dgrad(residuals: Any, dy: Tensor, cfg: LinearCrossEntropyConfig) -> tuple[Any, Any]:
    """`(dx, None)`, and the pending weight gradient."""
    needs, x = residuals.needs, residuals.x
    if x is None:
        return residuals.nothing(), None
    dloss = row_gradient("linear_cross_entropy_dgrad", dy, residuals.labels, x.dtype, residuals.count, cfg)
    dx = None
    if needs.input(0):
        parts = [linear_kernels.linear_dgrad(d, residuals.weight) for _, d in _dlogits(residuals, dloss, cfg)]
        dx = torch.cat(parts).reshape(x.shape) if parts else torch.zeros_like(x)
    pending = LinearCrossEntropyPending.keep(
        cfg,
        needs,
        x=x,
        labels=residuals.labels,
        weight=residuals.weight,
        logsumexp=residuals.logsumexp,
        dloss=dloss,
    )
    return residuals.inputs.make((dx, None)), pending


@wgrad_of(LinearCrossEntropyPending, LinearCrossEntropyParams)
def linear_cross_entropy_wgrad(
    pending: Any, cfg: LinearCrossEntropyConfig, *, into: LinearCrossEntropyParams | None = None
) -> LinearCrossEntropyParams:
    """dw: [V, I], summed over the chunks in order; added to `into` where that is given."""
    dw = None
    for rows, d in _dlogits(pending, pending.dloss, cfg):
        part, _ = linear_kernels.linear_wgrad(d, rows, False)
        dw = part if dw is None else dw.add_(part)
    if dw is None:
        dw = torch.zeros_like(pending.weight)
    return accumulate("linear_cross_entropy_wgrad", LinearCrossEntropyParams(dw), into)


linear_cross_entropy = make_op(
    "linear_cross_entropy",
    LinearCrossEntropyConfig,
    init=linear_cross_entropy_init,
    fwd=linear_cross_entropy_fwd,
    dgrad=linear_cross_entropy_dgrad,
    wgrad=linear_cross_entropy_wgrad,
)
linear_cross_entropy_bwd = linear_cross_entropy.bwd
