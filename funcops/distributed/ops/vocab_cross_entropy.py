"""Cross entropy from logits with classes sharded over an axis.

    lse = log sum over r of exp(lse_r)        loss = lse - (1 - s) l_label - s mean_v(l_v) + z lse^2
    dl_r = dloss ((1 + 2 z lse) exp(l_r - lse) - (1 - s) onehot_r(label) - s / V)

r: a rank of the axis, of n; s: label_smoothing; z: z_loss. x is `(logits, labels)`. logits, dl_r: [*, V/n], of the classes from
r V/n on, of one float dtype; labels: [*] int64, the same on all ranks, as is y: a float32 scalar (float64 for float64), or [*] with
reduction "none". Rows with label ignore_index have loss and gradient 0 and do not count in the mean.

The ranks communicate once, in the forward: they gather four floats a row, lse_r, which is two numbers, as in `cross_entropy`, the
label's logit if rank r has it, and mean_r (three without smoothing). All then have the same bits. The gradient needs no
communication. Kept: logits and labels, aliases, and lse, two numbers: 8 bytes a row; no probabilities.

>>> import torch
>>> from funcops import dist
>>> from funcops.testing import run_ranks
>>> def each(mesh):
...     cfg = dist.VocabCrossEntropyConfig(mesh["tp"])
...     loss, residuals = dist.vocab_cross_entropy_fwd(None, (torch.zeros(1, 2), torch.tensor([3])), cfg)
...     dlogits, _ = dist.vocab_cross_entropy_bwd(residuals, torch.ones(()), cfg)[1]
...     return loss, dlogits
...
>>> run_ranks({"tp": 2}, each)
[(tensor(1.3863), tensor([[0.2500, 0.2500]])), (tensor(1.3863), tensor([[ 0.2500, -0.7500]]))]
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

from torch import Tensor

from funcops.distributed.checks import check_tensor, require_axis
from funcops.distributed.mesh import Axis
from funcops.distributed.ops._vocab import losses_of_rows, parts_of_rows
from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config, dgrad_of, forward, make_op, no_params
from funcops.engine.contract.schema import DGRAD, Inputs, Residuals, saved
from funcops.library.kernels import cross_entropy as kernels
from funcops.library.kernels.entropy import entropy_bwd, entropy_fwd
from funcops.library.ops._ids import check_ids
from funcops.library.ops._loss import check_options, check_pair, reduce_losses, slopes_of

__all__ = ["VocabCrossEntropyConfig", "VocabCrossEntropyResiduals"]
__all__ += ["vocab_cross_entropy", "vocab_cross_entropy_bwd", "vocab_cross_entropy_dgrad"]
__all__ += ["vocab_cross_entropy_fwd", "vocab_cross_entropy_init", "vocab_cross_entropy_wgrad"]


@config
class VocabCrossEntropyConfig(OpConfig):
    """`axis`: the axis that shards the classes. `reduction`: "mean" (over the rows that count), "sum" or "none".
    `entropy` as in `CrossEntropyConfig`."""

    axis: Axis = field(kw_only=False)
    label_smoothing: float = 0.0
    ignore_index: int = -100
    z_loss: float = 0.0
    reduction: str = "mean"
    entropy: bool = False

    def __post_init__(self) -> None:
        require_axis("VocabCrossEntropyConfig", self.axis)
        check_options(self, "VocabCrossEntropyConfig")


class VocabCrossEntropyResiduals(Residuals, static=("inputs",)):
    logits: Tensor = saved("[*, V/n]", alias="x.0", needed_by=DGRAD, of=("x.0",))
    labels: Tensor = saved("[*]", alias="x.1", needed_by=DGRAD, of=("x.0",))
    logsumexp: Tensor = saved("[*, 2]", needed_by=DGRAD, of=("x.0",))
    count: Tensor | None = saved("[]", needed_by=DGRAD, of=("x.0",))
    entropy: Tensor | None = saved("[*]", alias="y.1", needed_by=DGRAD, of=("x.0",))


@forward(VocabCrossEntropyConfig)
def vocab_cross_entropy_fwd(
    params: None, x: tuple[Tensor, Tensor], cfg: VocabCrossEntropyConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, VocabCrossEntropyResiduals | None]:
    """x: `(logits, labels)` -> y. Raises `ValueError` or `TypeError` for a wrong shape, dtype or device; on the CPU `IndexError`
    for a label outside [0, V) other than ignore_index."""
    logits, labels = check_pair("vocab_cross_entropy_fwd", x, None, "logits")
    check_tensor("vocab_cross_entropy_fwd", "x.0 (logits)", logits, (...,))
    most = cfg.axis.size * logits.shape[-1] - 1
    check_ids("vocab_cross_entropy_fwd", "x.1 (labels)", labels, most, but=cfg.ignore_index)
    rows, flat = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    if cfg.axis.size == 1:
        forward = entropy_fwd if cfg.entropy else kernels.cross_entropy_fwd
        losses, lse, *others = forward(rows, flat, cfg.label_smoothing, cfg.ignore_index, cfg.z_loss)
    else:
        losses, lse, *others = losses_of_rows(parts_of_rows(rows, flat, cfg), flat, cfg)
    y, count = reduce_losses(losses.reshape(labels.shape), labels, cfg)
    lse, own = lse.reshape(*labels.shape, 2), others[0].reshape(labels.shape) if cfg.entropy else None
    kept = VocabCrossEntropyResiduals.keep(
        cfg, needs, logits=logits, labels=labels, logsumexp=lse, count=count, entropy=own, inputs=Inputs.of(x)
    )
    found: Any = (y, own) if cfg.entropy else y
    return found, kept


@dgrad_of(VocabCrossEntropyResiduals)
def vocab_cross_entropy_dgrad(
    residuals: VocabCrossEntropyResiduals, dy: Any, cfg: VocabCrossEntropyConfig
) -> tuple[tuple[Tensor, None], None]:
    """`(dlogits, None)`, for this rank's classes. No params, so pending is None."""
    if not residuals.needs.input(0):
        return residuals.nothing(), None
    logits, labels, axis = residuals.logits, residuals.labels, cfg.axis
    dloss, dentropy = slopes_of("vocab_cross_entropy_dgrad", dy, labels, logits.dtype, residuals.count, cfg)
    classes = logits.shape[-1]
    slope, rows = dloss.reshape(-1) if dloss.dim() else dloss, logits.reshape(-1, classes)
    of_row = labels.reshape(-1), residuals.logsumexp.reshape(-1, 2)
    options = cfg.label_smoothing, cfg.ignore_index, cfg.z_loss, axis.rank * classes, axis.size * classes
    if dentropy is None:
        d = kernels.cross_entropy_bwd(slope, rows, *of_row, *options)
    else:
        assert residuals.entropy is not None
        d = entropy_bwd(slope, dentropy.reshape(-1), rows, *of_row, residuals.entropy.reshape(-1), *options)
    return residuals.inputs.make((d.reshape(logits.shape), None)), None


vocab_cross_entropy = make_op(
    "vocab_cross_entropy", VocabCrossEntropyConfig, fwd=vocab_cross_entropy_fwd, dgrad=vocab_cross_entropy_dgrad
)
vocab_cross_entropy_init, vocab_cross_entropy_bwd, vocab_cross_entropy_wgrad = no_params(
    vocab_cross_entropy, vocab_cross_entropy_dgrad
)
