"""Projection and cross entropy in chunks, with classes sharded over an axis: only the logits of one chunk exist at a time.

    l_r = x w_r^T        loss: as in vocab_cross_entropy        dx = sum over r of dl_r w_r        dw_r = dl_r^T x

r: a rank of the axis, of n. x is `(x, labels)`. w_r, dw_r: [V/n, I]; labels: [*] int64, of all rows and the same on all ranks, as
is y; one float dtype. With sequence parallelism x is sharded along its first dimension: a rank has 1/n of it, gathers the whole,
and gets 1/n of dx, whose sum is scattered. Without, x and dx are the same on all ranks. dw_r is complete either way.

For the losses the ranks gather four floats a row (three without label smoothing), once, after the last chunk. Kept: x and w_r and
labels, aliases, and logsumexp, two numbers: 8 bytes a row. dgrad and wgrad each gather x and recompute the logits, a chunk of
classes at a time, and bwd does so once, as in `linear_cross_entropy`. With `gradient="forward"` the forward gathers those floats
after every chunk, and keeps dx and dw_r instead.

>>> import torch
>>> from funcops import LinearCrossEntropyParams, dist
>>> from funcops.testing import run_ranks
>>> def each(mesh):
...     cfg = dist.VocabLinearCrossEntropyConfig(1, 8, axis=mesh["tp"])
...     params, labels = LinearCrossEntropyParams(torch.zeros(4, 1)), torch.tensor([0, 5])
...     loss, residuals = dist.vocab_linear_cross_entropy_fwd(params, (torch.ones(1, 1), labels), cfg)
...     dparams, (dx, _) = dist.vocab_linear_cross_entropy_bwd(residuals, torch.ones(()), cfg)
...     return loss, dx.shape, dparams.weight[0]
...
>>> run_ranks({"tp": 2}, each)
[(tensor(2.0794), torch.Size([1, 1]), tensor([-0.3750])), (tensor(2.0794), torch.Size([1, 1]), tensor([0.1250]))]
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, ClassVar

import torch
from torch import Tensor

from funcops.distributed import comm
from funcops.distributed.checks import check_tensor, require_axis, require_shares
from funcops.distributed.init import init_part
from funcops.distributed.mesh import Axis
from funcops.distributed.ops._vocab import losses_of_rows, parts_of_rows
from funcops.distributed.ops.column_linear import ColumnLinearConfig, column_linear
from funcops.distributed.ops.vocab_cross_entropy import VocabCrossEntropyConfig, vocab_cross_entropy
from funcops.distributed.specs import Spec
from funcops.engine.compose.joints import register_joint
from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import bwd_of, config, dgrad_of, forward, init_of, make_op, wgrad_of
from funcops.engine.contract.schema import DGRAD, WGRAD, Inputs, Residuals, saved
from funcops.library.fused.linear_cross_entropy import for_linear_params, made_by
from funcops.library.ops._ids import check_ids
from funcops.library.ops._loss import Slopes, check_options, check_pair, reduce_losses
from funcops.library.ops.linear_cross_entropy import (
    LinearCrossEntropyConfig,
    LinearCrossEntropyGradients,
    LinearCrossEntropyParams,
    LinearCrossEntropyPending,
    LossesOf,
    Write,
    bwd_by,
    check_cap,
    check_gradient,
    check_sizes,
    dgrad_by,
    entropy_of,
    gradients_kept,
    kept_by,
    linear_cross_entropy_init,
    logits_of,
    loss_gradients,
    losses_of_chunks,
    wgrad_by,
    with_gradients,
)
from funcops.library.ops.softcap import softcap

__all__ = ["VocabLinearCrossEntropyConfig", "VocabLinearCrossEntropyPending", "VocabLinearCrossEntropyResiduals"]
__all__ += ["vocab_linear_cross_entropy", "vocab_linear_cross_entropy_bwd", "vocab_linear_cross_entropy_dgrad"]
__all__ += ["vocab_linear_cross_entropy_fwd", "vocab_linear_cross_entropy_init", "vocab_linear_cross_entropy_wgrad"]


@config
class VocabLinearCrossEntropyConfig(OpConfig):
    """`in_features` (I) and `vocab` (V) of all ranks, a multiple of the size of `axis`. `sequence_parallel`: x is sharded along
    its first dimension. `chunk_bytes` bounds the logits that exist at a time on a rank, counted in float32. `gradient` and
    `entropy` as in `LinearCrossEntropyConfig`."""

    in_features: int = field(kw_only=False)
    vocab: int = field(kw_only=False)
    axis: Axis
    label_smoothing: float = 0.0
    ignore_index: int = -100
    z_loss: float = 0.0
    reduction: str = "mean"
    softcap: float | None = None
    sequence_parallel: bool = True
    chunk_bytes: int = 128 * 2**20
    gradient: str = "backward"
    entropy: bool = False

    def __post_init__(self) -> None:
        where = "VocabLinearCrossEntropyConfig"
        require_axis(where, self.axis)
        check_options(self, where)
        check_cap(where, self.softcap)
        check_sizes(self, where)
        check_gradient(where, self.gradient, self.reduction)
        require_shares(where, "vocab", self.vocab, self.axis)
        own = LinearCrossEntropyConfig(
            self.in_features,
            self.vocab // self.axis.size,
            label_smoothing=self.label_smoothing,
            ignore_index=self.ignore_index,
            z_loss=self.z_loss,
            reduction=self.reduction,
            softcap=self.softcap,
            chunk_bytes=self.chunk_bytes,
            gradient=self.gradient,
            entropy=self.entropy,
        )
        object.__setattr__(self, "own", own)

    own: ClassVar[LinearCrossEntropyConfig]  # of this rank's classes alone

    @property
    def specs(self) -> dict[str, Spec]:
        """The specs of the sharded params, by path."""
        return {"weight": Spec(self.axis.name, 0)}

    def widths(self, width: int | None) -> tuple[int | None, int | None]:
        return self.in_features, None


class VocabLinearCrossEntropyResiduals(Residuals, static=("inputs",)):
    x: Tensor = saved("[*, I]", alias="x.0", needed_by=DGRAD | WGRAD, of=("x.0", "params"))
    labels: Tensor = saved("[*]", alias="x.1", needed_by=DGRAD | WGRAD, of=("x.0", "params"))
    weight: Tensor = saved("[V/n, I]", alias="params.weight", needed_by=DGRAD | WGRAD, of=("x.0", "params"))
    logsumexp: Tensor = saved("[*, 2]", needed_by=DGRAD | WGRAD, of=("x.0", "params"))
    count: Tensor | None = saved("[]", needed_by=DGRAD | WGRAD, of=("x.0", "params"))
    entropy: Tensor | None = saved("[*]", alias="y.1", needed_by=DGRAD | WGRAD, of=("x.0", "params"))


class VocabLinearCrossEntropyPending(LinearCrossEntropyPending):
    """The fields of `LinearCrossEntropyPending`, of this rank's classes: weight and dw [V/n, I]."""


KEPT = kept_by(VocabLinearCrossEntropyConfig, VocabLinearCrossEntropyResiduals)


@init_of(VocabLinearCrossEntropyConfig)
def vocab_linear_cross_entropy_init(
    cfg: VocabLinearCrossEntropyConfig, *, key: Tensor | None = None, device: Any = None, dtype: torch.dtype | None = None
) -> LinearCrossEntropyParams:
    """This rank's rows of the params that `linear_cross_entropy_init` draws with the same key, on every mesh."""
    plain = LinearCrossEntropyConfig(cfg.in_features, cfg.vocab)
    return init_part(cfg, lambda: linear_cross_entropy_init(plain, key=key, device=device, dtype=dtype))  # type: ignore[no-any-return]


@forward(VocabLinearCrossEntropyConfig, LinearCrossEntropyParams)
def vocab_linear_cross_entropy_fwd(
    params: LinearCrossEntropyParams, x: tuple[Tensor, Tensor], cfg: VocabLinearCrossEntropyConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, VocabLinearCrossEntropyResiduals | LinearCrossEntropyGradients | None]:
    """x: `(x, labels)`, x: [m, *, I] and labels: [n m, *] (without `sequence_parallel`: [*, I] and [*]) -> y.

    Raises `ValueError` or `TypeError` for a wrong shape, dtype or device."""
    where, own = "vocab_linear_cross_entropy_fwd", cfg.own
    t, labels = check_pair(where, x, cfg.in_features, "x", cfg.axis.size if cfg.sequence_parallel else 1)
    check_tensor(where, "x.0 (x)", t, (...,))
    check_ids(where, "x.1 (labels)", labels, cfg.axis.size * own.vocab - 1, but=cfg.ignore_index)
    weight = params.weight
    check_tensor(where, "params.weight", weight, (own.vocab, own.in_features), t.dtype, t)
    rows, flat = _rows(t, cfg), labels.reshape(-1)
    if cfg.gradient == "forward":
        losses, dx, dw = with_gradients(rows, flat, weight, own, needs, _losses_of(cfg), cfg.axis.rank * own.vocab, cfg.vocab)
        y, count = reduce_losses(losses, labels, cfg)
        return y, gradients_kept(cfg, needs, None if dx is None else _summed(dx, labels, cfg), dw, count, x)
    if cfg.axis.size == 1:
        losses, lse, *others = losses_of_chunks(rows, flat, weight, own)
    else:
        parts = [parts_of_rows(logits_of(rows[c], weight, cfg.softcap), flat[c], cfg) for c in own.row_chunks(rows.shape[0])]
        whole = losses_of_rows(torch.cat(parts, 1), flat, cfg) if parts else losses_of_chunks(rows, flat, weight, own)
        losses, lse, *others = whole
    y, count = reduce_losses(losses.reshape(labels.shape), labels, cfg)
    lse, entropy = lse.reshape(*labels.shape, 2), others[0].reshape(labels.shape) if cfg.entropy else None
    kept = VocabLinearCrossEntropyResiduals.keep(
        cfg, needs, x=t, labels=labels, weight=weight, logsumexp=lse, count=count, entropy=entropy, inputs=Inputs.of(x)
    )
    found: Any = (y, entropy) if cfg.entropy else y
    return found, kept


def _rows(x: Tensor, cfg: VocabLinearCrossEntropyConfig) -> Tensor:
    """The whole x, as [N, I]."""
    return (comm.gather(x, cfg.axis) if cfg.sequence_parallel else x).reshape(-1, cfg.in_features)


def _gradients(kept: Any, slopes: Slopes, cfg: VocabLinearCrossEntropyConfig, dx: bool, dw: Write | None) -> Tensor | None:
    """dx, if requested, in the shape of x; `dw` is called with this rank's classes only."""
    own, rows = cfg.own, _rows(kept.x, cfg)
    first = cfg.axis.rank * own.vocab
    of_entropy = entropy_of(kept, slopes[1])
    part = loss_gradients(rows, kept.labels, kept.logsumexp, kept.weight, slopes[0], own, dx, dw, first, cfg.vocab, of_entropy)
    if not dx:
        return None
    return _summed(rows.new_zeros(rows.shape) if part is None else part, kept.labels, cfg)  # None: without rows


def _losses_of(cfg: VocabLinearCrossEntropyConfig) -> LossesOf | None:
    """Losses and logsumexp of a chunk's rows over the classes of all ranks."""
    if cfg.axis.size == 1:
        return None
    return lambda logits, labels: losses_of_rows(parts_of_rows(logits, labels, cfg), labels, cfg)[:2]  # type: ignore[return-value]


def _summed(part: Tensor, labels: Tensor, cfg: VocabLinearCrossEntropyConfig) -> Tensor:
    """dx from this rank's part of every row."""
    shaped = part.reshape(*labels.shape, cfg.in_features)
    return comm.scatter_sum(shaped, cfg.axis) if cfg.sequence_parallel else comm.sum_over(shaped, cfg.axis)


@dgrad_of(KEPT)
def vocab_linear_cross_entropy_dgrad(
    residuals: VocabLinearCrossEntropyResiduals | LinearCrossEntropyGradients, dy: Any, cfg: VocabLinearCrossEntropyConfig
) -> tuple[tuple[Tensor, None], VocabLinearCrossEntropyPending | None]:
    """`(dx, None)`, and the pending weight gradient."""
    return dgrad_by(_gradients, "vocab_linear_cross_entropy_dgrad", residuals, dy, cfg, VocabLinearCrossEntropyPending)


@wgrad_of(VocabLinearCrossEntropyPending, LinearCrossEntropyParams)
def vocab_linear_cross_entropy_wgrad(
    pending: VocabLinearCrossEntropyPending, cfg: VocabLinearCrossEntropyConfig, *, into: LinearCrossEntropyParams | None = None
) -> LinearCrossEntropyParams:
    """Gathers x, then dw_r: [V/n, I], a chunk of classes at a time; added to `into` if given."""
    return wgrad_by(_gradients, "vocab_linear_cross_entropy_wgrad", pending, cfg, into)


@bwd_of(KEPT, LinearCrossEntropyParams)
def vocab_linear_cross_entropy_bwd(
    residuals: VocabLinearCrossEntropyResiduals | LinearCrossEntropyGradients,
    dy: Any,
    cfg: VocabLinearCrossEntropyConfig,
    *,
    into: LinearCrossEntropyParams | None = None,
) -> tuple[LinearCrossEntropyParams, tuple[Tensor, None]]:
    """The whole backward, which gathers x and computes the logits once for both halves. Returns `(dparams, (dx, None))`."""
    where, pending = "vocab_linear_cross_entropy_bwd", VocabLinearCrossEntropyPending
    return bwd_by(_gradients, where, residuals, dy, cfg, into, pending)


vocab_linear_cross_entropy = make_op(
    "vocab_linear_cross_entropy",
    VocabLinearCrossEntropyConfig,
    init=vocab_linear_cross_entropy_init,
    fwd=vocab_linear_cross_entropy_fwd,
    dgrad=vocab_linear_cross_entropy_dgrad,
    wgrad=vocab_linear_cross_entropy_wgrad,
    bwd=vocab_linear_cross_entropy_bwd,
)


def _config(head: ColumnLinearConfig, loss: VocabCrossEntropyConfig, **options: Any) -> VocabLinearCrossEntropyConfig:
    options |= {"axis": loss.axis, "sequence_parallel": head.sequence_parallel}
    return VocabLinearCrossEntropyConfig(head.in_features, head.out_features, **options)


vocab_head_loss = for_linear_params(vocab_linear_cross_entropy)
for _ops in ((column_linear, vocab_cross_entropy), (column_linear, softcap, vocab_cross_entropy)):
    register_joint(_ops, made_by(vocab_head_loss, _config))
