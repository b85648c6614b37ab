"""What a row of the table must hold, and why some do not."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

MOVED, NEAR_PEER, WIDE, PER_BYTE = 1.05, 0.01, 0.95, 6.0


class Reason(NamedTuple):
    """Why the rows of these kernels and shapes, both regular expressions, are beyond a limit: "moved", "wide", "instructions" or
    "spills"."""

    kernel: str
    shape: str
    limit: str
    words: str

    def fits(self, row: Any, limit: str) -> bool:
        return limit == self.limit and bool(re.fullmatch(self.kernel, row.kernel) and re.search(self.shape, row.shape))


REASONS = (
    Reason(
        "cross_entropy", "", "moved",
        "loss and gradient are two calls, each of which reads the logits: no loss waits for a gradient",
    ),
    Reason(
        "bias_activation_bwd", "^gelu_tanh", "instructions",
        "an exponential, a division and the derivative in float32 of two 16-bit numbers; under the 9.5 that an H100 has time for",
    ),
    Reason("add_layer_norm_bwd", "x16384", "spills", "24 bytes a thread; Liger's layer norm, which adds nothing, spills 240"),
    Reason(
        "(rms|layer|add_layer)_norm_fwd", "x256$", "wide",
        "weight, bias and statistics are up to an eighth of what is asked for in rows this short, "
        "and are read in narrower accesses",
    ),
)  # fmt: skip


def missed(row: Any, peers: Iterable[Any]) -> list[str]:
    """The limits that a row of ours is beyond; `peers`: the rows of others for the same call."""
    counted = [peer for peer in peers if not peer.why]
    best = min((peer.ratio for peer in counted), default=0.0)
    beyond = {
        "moved": not row.ratio <= max(MOVED, best + NEAR_PEER),  # what could not be counted is nan
        "wide": not row.wide >= WIDE,
        "instructions": not row.per_byte <= PER_BYTE,
        "spills": row.spills > max((peer.spills for peer in counted if peer.provider == "liger"), default=0),
    }
    return [limit for limit, holds in beyond.items() if holds]


def why(row: Any, peers: Iterable[Any]) -> str:
    """A sentence for each limit that the row is beyond and that has a reason."""
    found = [next((reason.words for reason in REASONS if reason.fits(row, limit)), "") for limit in missed(row, peers)]
    return "; ".join(filter(None, found))
