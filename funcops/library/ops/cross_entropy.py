"""Cross entropy from logits.

    lse = log sum_v exp(l_v)        loss = lse - (1 - s) l_label - s mean_v(l_v) + z lse^2
    dl = dloss ((1 + 2 z lse) softmax(l) - (1 - s) onehot(label) - s / V)

s: label_smoothing; z: z_loss. Rows with label ignore_index have loss and gradient 0 and do not count in the mean.
x is `(logits, labels)`. logits, dl: [*, V] of one float dtype; labels: [*] int64; y: a float32 scalar (float64 for
float64), or [*] with reduction "none". Kept: logits and labels, aliases, and lse as two
numbers, max_v l_v and log sum_v exp(l_v - max): 8 bytes a row; no probabilities. Their rounded sum would lose digits of the second.
The mean over no rows is nan, with gradient 0, as in PyTorch.

With `entropy`, for `reduction="none"`, y is `(loss, H)`, of one pass over the logits, and dy `(dloss, dH)`; H is kept, too, as it
is:

    H = -sum_v p_v log p_v, p = softmax(l)        dl = the above - dH p (log p + H)

>>> import torch
>>> from funcops import CrossEntropyConfig, cross_entropy_bwd, cross_entropy_fwd
>>> y, residuals = cross_entropy_fwd(None, (torch.zeros(1, 2), torch.tensor([0])), CrossEntropyConfig())
>>> y, cross_entropy_bwd(residuals, torch.tensor(1.0), CrossEntropyConfig())[1][0]
(tensor(0.6931), tensor([[-0.5000,  0.5000]]))
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config, dgrad_of, forward, make_op, no_params
from funcops.engine.contract.schema import DGRAD, Inputs, Residuals, saved
from funcops.library.kernels import cross_entropy as kernels
from funcops.library.kernels.entropy import entropy_bwd, entropy_fwd
from funcops.library.ops._ids import check_ids
from funcops.library.ops._loss import check_options, check_pair, reduce_losses, slopes_of

__all__ = ["CrossEntropyConfig", "CrossEntropyResiduals"]
__all__ += ["cross_entropy", "cross_entropy_bwd", "cross_entropy_dgrad"]
__all__ += ["cross_entropy_fwd", "cross_entropy_init", "cross_entropy_wgrad"]


@config
class CrossEntropyConfig(OpConfig):
    """`reduction`: "mean" (over the rows that count), "sum" or "none"; `entropy`: whether y has each row's entropy, too."""

    label_smoothing: float = 0.0
    ignore_index: int = -100
    z_loss: float = 0.0
    reduction: str = "mean"
    entropy: bool = False

    def __post_init__(self) -> None:
        check_options(self, "CrossEntropyConfig")


class CrossEntropyResiduals(Residuals, static=("inputs",)):
    logits: Tensor = saved("[*, V]", alias="x.0", needed_by=DGRAD, of=("x.0",))
    labels: Tensor = saved("[*]", alias="x.1", needed_by=DGRAD, of=("x.0",))
    logsumexp: Tensor = saved("[*, 2]", needed_by=DGRAD, of=("x.0",))
    count: Tensor | None = saved("[]", needed_by=DGRAD, of=("x.0",))
    entropy: Tensor | None = saved("[*]", alias="y.1", needed_by=DGRAD, of=("x.0",))


@forward(CrossEntropyConfig)
def cross_entropy_fwd(
    params: None, x: tuple[Tensor, Tensor], cfg: CrossEntropyConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, CrossEntropyResiduals | None]:
    """x: `(logits, labels)` -> y. Raises `ValueError` or `TypeError` for a wrong shape, dtype or device; on the CPU `IndexError`
    for a label outside [0, V) other than ignore_index."""
    logits, labels = check_pair("cross_entropy_fwd", x, None, "logits")
    check_ids("cross_entropy_fwd", "x.1 (labels)", labels, logits.shape[-1] - 1, but=cfg.ignore_index)
    rows = logits.reshape(-1, logits.shape[-1])
    forward = entropy_fwd if cfg.entropy else kernels.cross_entropy_fwd
    losses, lse, *others = forward(rows, labels.reshape(-1), cfg.label_smoothing, cfg.ignore_index, cfg.z_loss)
    y, count = reduce_losses(losses.reshape(labels.shape), labels, cfg)
    own = others[0].reshape(labels.shape) if cfg.entropy else None
    lse = lse.reshape(*labels.shape, 2)
    kept = CrossEntropyResiduals.keep(
        cfg, needs, logits=logits, labels=labels, logsumexp=lse, count=count, entropy=own, inputs=Inputs.of(x)
    )
    found: Any = (y, own) if cfg.entropy else y
    return found, kept


@dgrad_of(CrossEntropyResiduals)
def cross_entropy_dgrad(residuals: CrossEntropyResiduals, dy: Any, cfg: CrossEntropyConfig) -> tuple[tuple[Tensor, None], None]:
    """`(dlogits, None)`. No params, so pending is None."""
    if not residuals.needs.input(0):
        return residuals.nothing(), None
    logits, labels = residuals.logits, residuals.labels
    dloss, dentropy = slopes_of("cross_entropy_dgrad", dy, labels, logits.dtype, residuals.count, cfg)
    slope, rows = dloss.reshape(-1) if dloss.dim() else dloss, logits.reshape(-1, logits.shape[-1])
    of_row, options = (labels.reshape(-1), residuals.logsumexp.reshape(-1, 2)), (cfg.label_smoothing, cfg.ignore_index, cfg.z_loss)
    if dentropy is None:
        d = kernels.cross_entropy_bwd(slope, rows, *of_row, *options)
    else:
        assert residuals.entropy is not None
        d = entropy_bwd(slope, dentropy.reshape(-1), rows, *of_row, residuals.entropy.reshape(-1), *options)
    return residuals.inputs.make((d.reshape(logits.shape), None)), None


cross_entropy = make_op(
    "cross_entropy",
    CrossEntropyConfig,
    fwd=cross_entropy_fwd,
    dgrad=cross_entropy_dgrad,
    mixes=lambda cfg: "the mean over all rows, by whose number gradients are divided" if cfg.reduction == "mean" else "",
)
cross_entropy_init, cross_entropy_bwd, cross_entropy_wgrad = no_params(cross_entropy, cross_entropy_dgrad)
