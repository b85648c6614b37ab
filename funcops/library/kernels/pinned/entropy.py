"""The losses and entropies of rows, of which torch adds up one alone in parts, by threads."""

from __future__ import annotations

from torch import Tensor

from funcops.library.kernels.entropy import entropy_fwd
from funcops.library.kernels.pins import Pins, pinned


@pinned(entropy_fwd)
def _pinned_fwd(
    pins: Pins, logits: Tensor, labels: Tensor, smoothing: float, ignore_index: int, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    alone = len(logits) == 1
    rows, of_rows = (t.expand(2, *t.shape[1:]) if alone else t for t in (logits, labels))
    losses, lse, entropies = entropy_fwd.kernel.torch_impl(rows, of_rows, smoothing, ignore_index, z_loss)
    return (losses[:1], lse[:1], entropies[:1]) if alone else (losses, lse, entropies)
