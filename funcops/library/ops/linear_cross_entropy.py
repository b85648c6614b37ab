"""Projection and cross entropy in chunks of rows, so that the full logits never exist.

    l = x w^T        loss: as in cross_entropy        dx = dl w        dw = dl^T x

With `softcap` c the logits are c tanh(l / c), and their gradient times 1 - tanh(l / c)^2 is dl (Gemma 2).

x is `(x, labels)`. x, dx: [*, I]; labels: [*] int64; w, dw: [V, I]; one float dtype; y: a float32 scalar (float64 for
float64), or [*] with reduction "none". The forward goes by chunks of rows. The backward goes by chunks of classes, so that
every row of dw is one sum; it keeps a float32 dx meanwhile. Kept: x, w and labels, aliases, and logsumexp as in cross_entropy,
two numbers: 8 bytes a row. dgrad and wgrad each recompute the logits, a chunk at a time; bwd recomputes them once. With `entropy`
y is `(loss, H)`, as in cross_entropy, and H is kept.

With `gradient="forward"` the forward makes dx and dw of the sum of the losses, a chunk of rows at a time, and keeps them, [*, I]
and [V, I], instead; the backward multiplies them by dy, or by dy over the number of labels. That is three products of 2 I V
operations a row instead of four, and one kernel that reads the logits once and writes their gradient over them. Every chunk reads
and writes the float32 sum of dw: 8 I V bytes, which at 700 TFLOP/s and 3 TB/s take a quarter of a product's time in chunks of
4,096 rows (`chunk_bytes` 16,384 V), and as long as a product in chunks of 900.
arXiv:2411.09009, Liger-Kernel.

>>> import torch
>>> from funcops import LinearCrossEntropyConfig, LinearCrossEntropyParams, linear_cross_entropy_bwd, linear_cross_entropy_fwd
>>> cfg, params = LinearCrossEntropyConfig(3, 8), LinearCrossEntropyParams(torch.zeros(8, 3))
>>> loss, residuals = linear_cross_entropy_fwd(params, (torch.ones(2, 3), torch.tensor([0, 5])), cfg)
>>> loss, residuals.logsumexp.sum(-1)
(tensor(2.0794), tensor([2.0794, 2.0794]))
>>> dparams, (dx, _) = linear_cross_entropy_bwd(residuals, torch.ones(()), cfg)
>>> dparams.weight[0], dx.shape
(tensor([-0.3750, -0.3750, -0.3750]), torch.Size([2, 3]))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from funcops.engine import random
from funcops.engine.backend import wide
from funcops.engine.contract.accumulators import accumulate, check_into, takes_sums
from funcops.engine.contract.by_config import ByConfig
from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import bwd_of, config, dgrad_of, forward, init_of, make_op, wgrad_of
from funcops.engine.contract.schema import DGRAD, NO_GRADIENT, WGRAD, Inputs, Pending, Residuals, saved
from funcops.engine.errors import check, require
from funcops.engine.trees import leaf, tree
from funcops.library.kernels import cross_entropy as kernels
from funcops.library.kernels import fused_linear, row_scale
from funcops.library.kernels import linear as linear_kernels
from funcops.library.kernels import softcap as cap_kernels
from funcops.library.kernels.entropy import entropy_bwd_owned, entropy_fwd
from funcops.library.kernels.pins import nominal_rows
from funcops.library.ops._ids import check_ids
from funcops.library.ops._loss import Slopes, check_options, check_pair, reduce_losses, slopes_of

__all__ = ["LinearCrossEntropyConfig", "LinearCrossEntropyParams", "LinearCrossEntropyPending", "LinearCrossEntropyResiduals"]
__all__ += ["linear_cross_entropy", "linear_cross_entropy_bwd", "linear_cross_entropy_dgrad"]
__all__ += ["linear_cross_entropy_fwd", "linear_cross_entropy_init", "linear_cross_entropy_wgrad"]


def check_sizes(cfg: Any, where: str) -> None:
    for name in ("in_features", "vocab", "chunk_bytes"):
        value = getattr(cfg, name)
        require(isinstance(value, int) and value >= 1, where, name, "at least 1", value)


def check_cap(where: str, cap: float | None) -> None:
    require(cap is None or 0 < cap < math.inf, where, "softcap", "None, or above 0, and finite", cap)


def check_gradient(where: str, gradient: Any, reduction: str) -> None:
    allowed = ("backward",) if reduction == "none" else ("backward", "forward")
    said = " or ".join(map(repr, allowed)) + " (a dy for each row comes too late)" * (len(allowed) == 1)
    require(gradient in allowed, where, "gradient", said, repr(gradient))


@config
class LinearCrossEntropyConfig(OpConfig):
    """`in_features` (I) and `vocab` (V); `softcap` keeps logits within ±c; `chunk_bytes` bounds the logits that exist at a time,
    counted in float32. `entropy`: whether y has each row's entropy, too. `gradient`: whether the "backward" computes the gradients,
    or the "forward", which does so only where some are needed, for a `reduction` to one number."""

    in_features: int = field(kw_only=False)
    vocab: int = field(kw_only=False)
    label_smoothing: float = 0.0
    ignore_index: int = -100
    z_loss: float = 0.0
    reduction: str = "mean"
    softcap: float | None = None
    chunk_bytes: int = 128 * 2**20
    gradient: str = "backward"
    entropy: bool = False

    def __post_init__(self) -> None:
        where = "LinearCrossEntropyConfig"
        check_sizes(self, where)
        check_options(self, where)
        check_cap(where, self.softcap)
        check_gradient(where, self.gradient, self.reduction)

    def _of_a_logit(self) -> int:
        """The bytes per logit; with a cap, also for the capped logit and its gradient."""
        return 4 if self.softcap is None else 12

    def row_chunks(self, rows: int) -> Iterator[slice]:
        """Slices of rows; their number depends only on the sizes."""
        size = max(1, self.chunk_bytes // (self._of_a_logit() * self.vocab))
        return (slice(start, start + size) for start in range(0, rows, size))

    def class_chunks(self, rows: int) -> Iterator[slice]:
        """Slices of classes; above 128 classes, of a multiple of 128."""
        size = max(1, self.chunk_bytes // (self._of_a_logit() * max(1, rows)))
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
    logsumexp: Tensor = saved("[*, 2]", needed_by=DGRAD | WGRAD, of=("x.0", "params"))
    count: Tensor | None = saved("[]", needed_by=DGRAD | WGRAD, of=("x.0", "params"))
    entropy: Tensor | None = saved("[*]", alias="y.1", needed_by=DGRAD | WGRAD, of=("x.0", "params"))


class LinearCrossEntropyGradients(Residuals, static=("inputs", "dtype")):
    """The residuals with `gradient="forward"`: the gradients of the sum of the losses; for float16 dw is float32."""

    dx: Tensor = saved("[*, I]", needed_by=DGRAD, of=("x.0",))
    dw: Tensor = saved("[V, I]", needed_by=WGRAD, of=("params",))
    count: Tensor | None = saved("[]", needed_by=DGRAD | WGRAD, of=("x.0", "params"))


class LinearCrossEntropyPending(Pending, static=("dtype",)):
    x: Tensor | None = saved("[*, I]", alias="residuals.x", needed_by=WGRAD)
    labels: Tensor | None = saved("[*]", alias="residuals.labels", needed_by=WGRAD)
    weight: Any = saved("[V, I]", alias="residuals.weight", needed_by=WGRAD)
    logsumexp: Tensor | None = saved("[*, 2]", alias="residuals.logsumexp", needed_by=WGRAD)
    dloss: Tensor = saved("[*] or []", alias="dy", needed_by=WGRAD)
    dw: Tensor | None = saved("[V, I]", alias="residuals.dw", needed_by=WGRAD)
    entropy: Tensor | None = saved("[*]", alias="residuals.entropy", needed_by=WGRAD)
    dentropy: Tensor | None = saved("[*]", alias="dy", needed_by=WGRAD)


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
    params: LinearCrossEntropyParams, x: tuple[Tensor, Tensor], cfg: LinearCrossEntropyConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, LinearCrossEntropyResiduals | LinearCrossEntropyGradients | None]:
    """x: `(x, labels)` -> y. Raises `ValueError` or `TypeError` for a wrong shape, dtype or device."""
    t, labels = check_pair("linear_cross_entropy_fwd", x, cfg.in_features, "x")
    check_ids("linear_cross_entropy_fwd", "x.1 (labels)", labels, cfg.vocab - 1, but=cfg.ignore_index)
    weight = params.weight
    check("linear_cross_entropy_fwd", "params.weight", weight, (cfg.vocab, cfg.in_features), t.dtype, t)
    rows, flat = t.reshape(-1, cfg.in_features), labels.reshape(-1)
    if cfg.gradient == "forward":
        losses, dx, dw = with_gradients(rows, flat, weight, cfg, needs)
        y, count = reduce_losses(losses, labels, cfg)
        return y, gradients_kept(cfg, needs, None if dx is None else dx.reshape(t.shape), dw, count, x)
    losses, lse, *others = losses_of_chunks(rows, flat, weight, cfg)
    y, count = reduce_losses(losses.reshape(labels.shape), labels, cfg)
    lse, own = lse.reshape(*labels.shape, 2), others[0].reshape(labels.shape) if cfg.entropy else None
    kept = LinearCrossEntropyResiduals.keep(
        cfg, needs, x=t, labels=labels, weight=weight, logsumexp=lse, count=count, entropy=own, inputs=Inputs.of(x)
    )
    found: Any = (y, own) if cfg.entropy else y
    return found, kept


LossesOf = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # losses [N] and logsumexp [N, 2] of logits and labels


def with_gradients(
    rows: Tensor,
    labels: Tensor,
    weight: Tensor,
    cfg: LinearCrossEntropyConfig,
    needs: Needs,
    losses_of: LossesOf | None = None,
    first: int = 0,
    vocab: int | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Losses [N], and the gradients of their sum, dx [N, I] and dw [V, I], if needed, a chunk of rows at a time. The weight has
    `cfg.vocab` of `vocab` classes, from `first` on."""
    options, dtype = (cfg.label_smoothing, cfg.ignore_index, cfg.z_loss), wide(rows.dtype)
    dx, dw = needs.input(0), bool(needs.params)
    losses, found = rows.new_empty(rows.shape[0], dtype=dtype), torch.empty_like(rows) if dx else None
    dloss, total = rows.new_ones((), dtype=dtype), None
    kept = dtype if weight.dtype is torch.float16 else weight.dtype  # the sum over many rows may be beyond float16's range
    chunks = list(cfg.row_chunks(rows.shape[0]))
    for c in chunks:
        logits = linear_kernels.linear_fwd(rows[c], weight, None)
        d = logits if cfg.softcap is None else cap_kernels.softcap_fwd(logits, cfg.softcap)
        if (dx or dw) and losses_of is None:
            losses[c] = kernels.cross_entropy_with_gradient(dloss, d, labels[c], *options)
        else:
            losses[c], lse = kernels.cross_entropy_fwd(d, labels[c], *options) if losses_of is None else losses_of(d, labels[c])
            if not (dx or dw):
                continue
            kernels.cross_entropy_bwd_owned(dloss, d, labels[c], lse, *options, first, vocab or cfg.vocab)
        if cfg.softcap is not None:
            d = cap_kernels.softcap_bwd(d, logits, cfg.softcap)
        if found is not None:
            found[c] = linear_kernels.linear_dgrad(d, weight)
        if dw and len(chunks) == 1:
            total = linear_kernels.linear_wgrad(d, rows, False)[0]
        elif dw:
            total = weight.new_zeros(weight.shape, dtype=dtype) if total is None else total
            fused_linear.fused_linear_wgrad_into(d, rows[c], 1.0, total, None)
    if dw and total is None:
        total = torch.zeros_like(weight)
    return losses, found, None if total is None else total.to(kept)


def gradients_kept(cfg: Any, needs: Needs, dx: Tensor | None, dw: Tensor | None, count: Tensor | None, x: Any) -> Any:
    """The residuals with the gradients of the sum of the losses, and their number, if y is the mean."""
    given = dict(dx=dx, dw=dw, count=count, inputs=Inputs.of(x), dtype=x[0].dtype)
    return LinearCrossEntropyGradients.keep(cfg, needs, **given)


def losses_of_chunks(rows: Tensor, labels: Tensor, weight: Tensor, cfg: LinearCrossEntropyConfig) -> tuple[Tensor, ...]:
    """Compute losses [N], logsumexp [N, 2] and, if the config asks for them, entropies [N], a chunk of rows at a time."""
    options, forward = (
        (cfg.label_smoothing, cfg.ignore_index, cfg.z_loss),
        entropy_fwd if cfg.entropy else kernels.cross_entropy_fwd,
    )
    chunks = cfg.row_chunks(rows.shape[0]) if len(rows) else [slice(0, 0)]
    found = [forward(logits_of(rows[c], weight, cfg.softcap), labels[c], *options) for c in chunks]
    return found[0] if len(found) == 1 else tuple([torch.cat(parts) for parts in zip(*found, strict=True)])


def logits_of(rows: Tensor, weight: Tensor, cap: float | None) -> Tensor:
    logits = linear_kernels.linear_fwd(rows, weight, None)
    return logits if cap is None else cap_kernels.softcap_fwd(logits, cap)


Write = Callable[[slice, Tensor, Tensor], None]
Gradients = Callable[[Any, Slopes, Any, bool, Write | None], Tensor | None]  # `_gradients`, of residuals or a pending


def loss_gradients(
    rows: Tensor,
    labels: Tensor,
    lse: Tensor,
    weight: Tensor,
    dloss: Tensor,
    cfg: LinearCrossEntropyConfig,
    dx: bool,
    dw: Write | None,
    first: int = 0,
    vocab: int | None = None,
    of_entropy: tuple[Tensor, Tensor] | None = None,
) -> Tensor | None:
    """Compute the gradient of the logits, a chunk of classes at a time; call `dw(classes, dlogits, rows)` with each, and return dx
    [N, I], if requested, summed in the wide dtype. The weight has `cfg.vocab` of `vocab` classes, from `first` on. `of_entropy`:
    dentropy and entropies [N]."""
    options = cfg.label_smoothing, cfg.ignore_index, cfg.z_loss
    labels, lse, dloss = labels.reshape(-1), lse.reshape(-1, 2), dloss.reshape(-1) if dloss.dim() else dloss
    chunks, total = list(cfg.class_chunks(nominal_rows(rows.shape[0]))), None
    for c in chunks:
        part = weight[c]
        logits = linear_kernels.linear_fwd(rows, part, None)
        d = logits if cfg.softcap is None else cap_kernels.softcap_fwd(logits, cfg.softcap)
        at = first + c.start, vocab or cfg.vocab
        if of_entropy is None:
            kernels.cross_entropy_bwd_owned(dloss, d, labels, lse, *options, *at)
        else:
            entropy_bwd_owned(dloss, of_entropy[0], d, labels, lse, of_entropy[1], *options, *at)
        if cfg.softcap is not None:
            d = cap_kernels.softcap_bwd(d, logits, cfg.softcap)
        if dw is not None:
            dw(c, d, rows)
        if dx and len(chunks) == 1:
            total = linear_kernels.linear_dgrad(d, part)
        elif dx:
            total = rows.new_zeros(rows.shape, dtype=wide(rows.dtype)) if total is None else total
            fused_linear.fused_linear_dgrad_into(d, part, 1.0, total)
    return None if total is None else total.to(rows.dtype)


def _gradients(kept: Any, slopes: Slopes, cfg: LinearCrossEntropyConfig, dx: bool, dw: Write | None) -> Tensor | None:
    rows, of_entropy = kept.x.reshape(-1, cfg.in_features), entropy_of(kept, slopes[1])
    found = loss_gradients(rows, kept.labels, kept.logsumexp, kept.weight, slopes[0], cfg, dx, dw, of_entropy=of_entropy)
    return None if found is None else found.reshape(kept.x.shape)


def entropy_of(kept: Any, dentropy: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """dentropy and the entropies, [N] each, of residuals or a pending."""
    return None if dentropy is None else (dentropy.reshape(-1), kept.entropy.reshape(-1))


def kept_by(config: type, residuals: type) -> ByConfig:
    """The class of the residuals of a loss whose config has a `gradient`."""
    classes = residuals, LinearCrossEntropyGradients
    return ByConfig(config, lambda cfg: classes[cfg.gradient == "forward"], classes)


KEPT = kept_by(LinearCrossEntropyConfig, LinearCrossEntropyResiduals)


@dgrad_of(KEPT)
def linear_cross_entropy_dgrad(
    residuals: LinearCrossEntropyResiduals | LinearCrossEntropyGradients, dy: Any, cfg: LinearCrossEntropyConfig
) -> tuple[tuple[Tensor, None], LinearCrossEntropyPending | None]:
    """`(dx, None)`, and the pending weight gradient."""
    return dgrad_by(_gradients, "linear_cross_entropy_dgrad", residuals, dy, cfg, LinearCrossEntropyPending)


def dgrad_by(gradients: Gradients, where: str, residuals: Any, dy: Any, cfg: Any, pending: Any) -> tuple[tuple[Tensor, None], Any]:
    """The dgrad of the loss that has these `gradients`."""
    if isinstance(residuals, LinearCrossEntropyGradients):
        check(where, "dy", dy, (), wide(residuals.dtype), residuals.dw if residuals.dx is None else residuals.dx)
        factor = dy if residuals.count is None else dy / residuals.count.clamp(min=1)
        given: dict[str, Any] = dict.fromkeys(pending.names) | {"dloss": factor, "dw": residuals.dw, "dtype": residuals.dtype}
        own = NO_GRADIENT if residuals.dx is None else _times(residuals.dx, factor)
        return residuals.inputs.make((own, None)), pending.keep(cfg, residuals.needs, **given)
    if residuals.x is None:
        return residuals.nothing(), None
    slopes = slopes_of(where, dy, residuals.labels, residuals.x.dtype, residuals.count, cfg)
    dx = gradients(residuals, slopes, cfg, True, None) if residuals.needs.input(0) else None
    kept = {name: getattr(residuals, name, None) for name in pending.names if name not in ("dloss", "dentropy", "dtype")}
    kept |= dict(zip(("dloss", "dentropy"), slopes, strict=True))
    return residuals.inputs.make((dx, None)), pending.keep(cfg, residuals.needs, **kept, dtype=residuals.x.dtype)


def _times(t: Tensor, factor: Tensor) -> Tensor:
    """The product with a wide factor, rounded once."""
    return row_scale.row_scale_fwd(t, factor.expand(*t.shape[:-1], 1), False)


@wgrad_of(LinearCrossEntropyPending, LinearCrossEntropyParams)
def linear_cross_entropy_wgrad(
    pending: LinearCrossEntropyPending, cfg: LinearCrossEntropyConfig, *, into: LinearCrossEntropyParams | None = None
) -> LinearCrossEntropyParams:
    """dw: [V, I], a chunk of classes at a time; added to `into` if given."""
    return wgrad_by(_gradients, "linear_cross_entropy_wgrad", pending, cfg, into)


def wgrad_by(
    gradients: Gradients, where: str, pending: Any, cfg: Any, into: LinearCrossEntropyParams | None
) -> LinearCrossEntropyParams:
    """The wgrad of the loss that has these `gradients`."""
    if pending.dw is not None:
        return accumulate(where, LinearCrossEntropyParams(_times(pending.dw, pending.dloss).to(pending.dtype)), into)
    dparams, dw = weight_gradient(where, pending.weight, into)
    gradients(pending, (pending.dloss, pending.dentropy), cfg, False, dw)
    return dparams


@bwd_of(KEPT, LinearCrossEntropyParams)
def linear_cross_entropy_bwd(
    residuals: LinearCrossEntropyResiduals | LinearCrossEntropyGradients,
    dy: Any,
    cfg: LinearCrossEntropyConfig,
    *,
    into: LinearCrossEntropyParams | None = None,
) -> tuple[LinearCrossEntropyParams, tuple[Tensor, None]]:
    """The whole backward, which computes the logits once for both halves. Returns `(dparams, (dx, None))`."""
    return bwd_by(_gradients, "linear_cross_entropy_bwd", residuals, dy, cfg, into, LinearCrossEntropyPending)


def bwd_by(
    gradients: Gradients, where: str, residuals: Any, dy: Any, cfg: Any, into: LinearCrossEntropyParams | None, pending: Any
) -> tuple[LinearCrossEntropyParams, tuple[Tensor, None]]:
    """The whole backward of the loss that has these `gradients`, which it calls once."""
    needs, dw = residuals.needs, None
    dparams: Any = into or LinearCrossEntropyParams()  # type: ignore[call-arg]
    if isinstance(residuals, LinearCrossEntropyGradients):
        dx, waiting = dgrad_by(gradients, where, residuals, dy, cfg, pending)
        return dparams if waiting is None else wgrad_by(gradients, where, waiting, cfg, into), dx
    if residuals.x is None:
        return dparams, residuals.nothing()
    slopes = slopes_of(where, dy, residuals.labels, residuals.x.dtype, residuals.count, cfg)
    if needs.params:
        dparams, dw = weight_gradient(where, residuals.weight, into)
    return dparams, residuals.inputs.make((gradients(residuals, slopes, cfg, needs.input(0), dw), None))


def weight_gradient(where: str, weight: Tensor, into: LinearCrossEntropyParams | None) -> tuple[LinearCrossEntropyParams, Write]:
    """dparams, and the function that writes a chunk of classes to it: to new memory, or added to `into`."""
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
    mixes=lambda cfg: "the mean over all rows, by whose number gradients are divided" if cfg.reduction == "mean" else "",
)
