"""Projection and cross entropy in chunks of rows, so that the full logits never exist.

    l = x w^T        loss: as in cross_entropy        dx = dl w        dw = dl^T x

x is `(x, labels)`. x, dx: [*, I]; labels: [*] int64; w, dw: [V, I]; one float dtype; y: a float32 scalar (float64 for
float64), or [*] with reduction "none". The forward goes by chunks of rows. The backward goes by chunks of classes, so that
every row of dw is one sum; it keeps a float32 dx meanwhile. Kept: x, w and labels, aliases, and logsumexp: 4 bytes a row;
each half of the backward, and the whole one once, recomputes the logits of a chunk at a time. arXiv:2411.09009, Liger-Kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from funcops import random
from funcops.accumulators import check_into, takes_sums
from funcops.backend import wide
from funcops.errors import check, require
from funcops.kernels import cross_entropy as kernels
from funcops.kernels import fused_linear
from funcops.kernels import linear as linear_kernels
from funcops.needs import Needs
from funcops.op import bwd_of, config, dgrad_of, forward, init_of, make_op, wgrad_of
from funcops.ops._loss import check_options, check_pair, reduce_losses, row_gradient
from funcops.schema import DGRAD, WGRAD, Inputs, Pending, Residuals, saved
from funcops.trees import leaf, tree

__all__ = [
    "LinearCrossEntropyConfig",
    "LinearCrossEntropyParams",
    "LinearCrossEntropyPending",
    "LinearCrossEntropyResiduals",
    "linear_cross_entropy",
    "linear_cross_entropy_bwd",
    "linear_cross_entropy_dgrad",
    "linear_cross_entropy_fwd",
    "linear_cross_entropy_init",
    "linear_cross_entropy_wgrad",
]


@config
class LinearCrossEntropyConfig:
    """`in_features` (I) and `vocab` (V); `chunk_bytes` bounds the logits that exist at a time, as if in float32."""

    in_features: int = field(kw_only=False)
    vocab: int = field(kw_only=False)
    label_smoothing: float = 0.0
    ignore_index: int = -100
    z_loss: float = 0.0
    reduction: str = "mean"
    chunk_bytes: int = 128 * 2**20

    def __post_init__(self) -> None:
        for name in ("in_features", "vocab", "chunk_bytes"):
            value = getattr(self, name)
            require(isinstance(value, int) and value >= 1, "LinearCrossEntropyConfig", name, "at least 1", value)
        check_options(self, "LinearCrossEntropyConfig")

    def row_chunks(self, rows: int) -> Iterator[slice]:
        """Slices of rows; their number depends on the sizes alone."""
        size = max(1, self.chunk_bytes // (4 * self.vocab))
        return (slice(start, start + size) for start in range(0, rows, size))

    def class_chunks(self, rows: int) -> Iterator[slice]:
        """Slices of classes, of a multiple of 128 where they are as large."""
        size = max(1, self.chunk_bytes // (4 * max(1, rows)))
        size = size - size % 128 if size > 128 else size
        return (slice(start, start + size) for start in range(0, self.vocab, size))

    def widths(self, width: int | None) -> tuple[int | None, int | None]:
        return self.in_features, None


@tree
class LinearCrossEntropyParams:
    weight: Tensor = leaf("[V, I]")


class LinearCrossEntropyResiduals(Residuals, static=("inputs",)):
    x: Tensor = saved("[*, I]", alias="x.0", needed_by=DGRAD | WGRAD, of=("x.0", "params"))
    labels: Tensor = saved("[*]", alias="x.1", needed_by=DGRAD | WGRAD, of=("x.0", "params"))
    weight: Tensor = saved("[V, I]", alias="params.weight", needed_by=DGRAD | WGRAD, of=("x.0", "params"))
    logsumexp: Tensor = saved("[*]", needed_by=DGRAD | WGRAD, of=("x.0", "params"), recompute_from=("x", "weight"))
    count: Tensor | None = saved("[]", needed_by=DGRAD | WGRAD, of=("x.0", "params"), recompute_from=("labels",))


class LinearCrossEntropyPending(Pending):
    x: Tensor = saved("[*, I]", alias="residuals.x", needed_by=WGRAD)
    labels: Tensor = saved("[*]", alias="residuals.labels", needed_by=WGRAD)
    weight: Tensor = saved("[V, I]", alias="residuals.weight", needed_by=WGRAD)
    logsumexp: Tensor = saved("[*]", alias="residuals.logsumexp", needed_by=WGRAD)
    dloss: Tensor = saved("[*] or []", alias="dy", needed_by=WGRAD)


@init_of(LinearCrossEntropyConfig)
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
) -> tuple[Tensor, LinearCrossEntropyResiduals | None]:
    """x: `(x, labels)` -> y. Raises `ValueError` or `TypeError` for a wrong shape, dtype or device."""
    t, labels = check_pair("linear_cross_entropy_fwd", x, cfg.in_features, "x")
    weight = params.weight
    check("linear_cross_entropy_fwd", "params.weight", weight, (cfg.vocab, cfg.in_features), t.dtype, t)
    rows, flat = t.reshape(-1, cfg.in_features), labels.reshape(-1)
    found = [
        kernels.cross_entropy_fwd(
            linear_kernels.linear_fwd(rows[c], weight, None), flat[c], cfg.label_smoothing, cfg.ignore_index, cfg.z_loss
        )
        for c in cfg.row_chunks(rows.shape[0])
    ]
    losses, lse = (_joined([f[i] for f in found], labels, t) for i in range(2))
    y, count = reduce_losses(losses, labels, cfg)
    kept = LinearCrossEntropyResiduals.keep(
        cfg, needs, x=t, labels=labels, weight=weight, logsumexp=lse, count=count, inputs=Inputs.of(x)
    )
    return y, kept


def _joined(parts: list[Tensor], labels: Tensor, like: Tensor) -> Tensor:
    if not parts:
        return torch.empty(labels.shape, dtype=wide(like.dtype), device=like.device)
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(labels.shape)


def _gradients(
    kept: Any, dloss: Tensor, cfg: LinearCrossEntropyConfig, dx: bool, dw: Callable[[slice, Tensor, Tensor], None] | None
) -> Tensor | None:
    """The gradient of the logits, a chunk of classes at a time: `dw(classes, dlogits, rows of x)` is called with each, and the
    result is dx [N, I], where wanted, summed over them in the wide dtype."""
    rows, labels, lse = kept.x.reshape(-1, cfg.in_features), kept.labels.reshape(-1), kept.logsumexp.reshape(-1)
    chunks, total = list(cfg.class_chunks(rows.shape[0])), None
    for c in chunks:
        weight = kept.weight[c]
        d = linear_kernels.linear_fwd(rows, weight, None)
        kernels.cross_entropy_bwd_owned(
            dloss.reshape(-1) if dloss.dim() else dloss, d, labels, lse, cfg.label_smoothing, cfg.ignore_index, cfg.z_loss,
            c.start, cfg.vocab,
        )  # fmt: skip
        if dw is not None:
            dw(c, d, rows)
        if dx and len(chunks) == 1:
            total = linear_kernels.linear_dgrad(d, weight)
        elif dx:
            total = rows.new_zeros(rows.shape, dtype=wide(rows.dtype)) if total is None else total
            fused_linear.fused_linear_dgrad_into(d, weight, 1.0, total)
    return None if total is None else total.to(rows.dtype).reshape(kept.x.shape)


@dgrad_of(LinearCrossEntropyResiduals)
def linear_cross_entropy_dgrad(
    residuals: LinearCrossEntropyResiduals, dy: Tensor, cfg: LinearCrossEntropyConfig
) -> tuple[tuple[Tensor, None], LinearCrossEntropyPending | None]:
    """`(dx, None)`, and the pending weight gradient."""
    if residuals.x is None:
        return residuals.nothing(), None
    dloss = _dloss("linear_cross_entropy_dgrad", residuals, dy, cfg)
    dx = _gradients(residuals, dloss, cfg, True, None) if residuals.needs.input(0) else None
    pending = LinearCrossEntropyPending.keep(
        cfg,
        residuals.needs,
        x=residuals.x,
        labels=residuals.labels,
        weight=residuals.weight,
        logsumexp=residuals.logsumexp,
        dloss=dloss,
    )
    return residuals.inputs.make((dx, None)), pending


def _dloss(where: str, residuals: LinearCrossEntropyResiduals, dy: Tensor, cfg: LinearCrossEntropyConfig) -> Tensor:
    return row_gradient(where, dy, residuals.labels, residuals.x.dtype, residuals.count, cfg)


@wgrad_of(LinearCrossEntropyPending, LinearCrossEntropyParams)
def linear_cross_entropy_wgrad(
    pending: LinearCrossEntropyPending, cfg: LinearCrossEntropyConfig, *, into: LinearCrossEntropyParams | None = None
) -> LinearCrossEntropyParams:
    """dw: [V, I], a chunk of classes at a time; added to `into` where that is given."""
    dparams, dw = _weight_gradient("linear_cross_entropy_wgrad", pending.weight, into)
    _gradients(pending, pending.dloss, cfg, False, dw)
    return dparams


@bwd_of(LinearCrossEntropyResiduals, LinearCrossEntropyParams)
def linear_cross_entropy_bwd(
    residuals: LinearCrossEntropyResiduals,
    dy: Tensor,
    cfg: LinearCrossEntropyConfig,
    *,
    into: LinearCrossEntropyParams | None = None,
) -> tuple[LinearCrossEntropyParams, tuple[Tensor, None]]:
    """The whole backward, which computes the logits once for both halves. Returns `(dparams, (dx, None))`."""
    where, needs, dw = "linear_cross_entropy_bwd", residuals.needs, None
    dparams: Any = into or LinearCrossEntropyParams()  # type: ignore[call-arg]
    if residuals.x is None:
        return dparams, residuals.nothing()
    dloss = _dloss(where, residuals, dy, cfg)
    if needs.params:
        dparams, dw = _weight_gradient(where, residuals.weight, into)
    return dparams, residuals.inputs.make((_gradients(residuals, dloss, cfg, needs.input(0), dw), None))


def _weight_gradient(
    where: str, weight: Tensor, into: LinearCrossEntropyParams | None
) -> tuple[LinearCrossEntropyParams, Callable[[slice, Tensor, Tensor], None]]:
    """dparams, and what writes a chunk of classes to it: into fresh memory, or added to `into`."""
    if into is None:
        fresh = torch.empty_like(weight, memory_format=torch.contiguous_format)

        def write(classes: slice, d: Tensor, rows: Tensor) -> None:
            fresh[classes] = linear_kernels.linear_wgrad(d, rows, False)[0]

        return LinearCrossEntropyParams(fresh), write
    check_into(where, into, LinearCrossEntropyParams(weight))
    total = into.weight

    def add(classes: slice, d: Tensor, rows: Tensor) -> None:
        if takes_sums(total, weight.dtype):
            fused_linear.fused_linear_wgrad_into(d, rows, 1.0, total[classes], None)
        else:
            total[classes] += linear_kernels.linear_wgrad(d, rows, False)[0]

    return into, add


linear_cross_entropy = make_op(
    "linear_cross_entropy",
    LinearCrossEntropyConfig,
    init=linear_cross_entropy_init,
    fwd=linear_cross_entropy_fwd,
    dgrad=linear_cross_entropy_dgrad,
    wgrad=linear_cross_entropy_wgrad,
    bwd=linear_cross_entropy_bwd,
)
