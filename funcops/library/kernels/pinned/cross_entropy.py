"""The losses of rows, of which torch adds up one alone in parts, by threads."""

from __future__ import annotations

from torch import Tensor

from funcops.library.kernels.cross_entropy import cross_entropy_bwd_owned, cross_entropy_fwd, cross_entropy_with_gradient
from funcops.library.kernels.pins import Pins, pinned


@pinned(cross_entropy_fwd)
def _pinned_fwd(
    pins: Pins, logits: Tensor, labels: Tensor, smoothing: float, ignore_index: int, z_loss: float
) -> tuple[Tensor, Tensor]:
    alone = len(logits) == 1
    rows, of_rows = (t.expand(2, *t.shape[1:]) if alone else t for t in (logits, labels))
    losses, lse = cross_entropy_fwd.kernel.torch_impl(rows, of_rows, smoothing, ignore_index, z_loss)
    return (losses[:1], lse[:1]) if alone else (losses, lse)


@pinned(cross_entropy_with_gradient)
def _pinned_with_gradient(
    pins: Pins, dloss: Tensor, logits: Tensor, labels: Tensor, smoothing: float, ignore_index: int, z_loss: float
) -> Tensor:
    losses, lse = _pinned_fwd(pins, logits, labels, smoothing, ignore_index, z_loss)
    cross_entropy_bwd_owned.kernel.torch_impl(dloss, logits, labels, lse, smoothing, ignore_index, z_loss, 0, logits.shape[-1])
    return losses
