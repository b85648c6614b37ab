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
        "(rms|layer|l2|add_rms)_norm_bwd", "x32768$", "moved",
        "rows of 64 KB leave no registers, and their two sums take a pass of their own; who keeps them spills 8 to 648 bytes a "
        "thread. Rows loaded twice instead: on an H100 230 us where these take 235, and with a mean 564 where these take 237",
    ),
    Reason(
        "(rms|layer|l2|add_rms)_norm_bwd", "x4099$", "moved",
        "of rows at odd addresses each element takes registers for itself and its address: over 4,096 their two sums take a pass "
        "of their own. Whole rows spill; on an H100 they and these take 182 and 193 us (rms), 174 and 202 (layer), "
        "232 and 229 (added to)",
    ),
    Reason(
        "(rms|layer|add_rms|add_layer)_norm_fwd", "x4099$", "wide",
        "rows go by 16 bytes; weight and bias, which lie otherwise to each row, by 16 bits, from the cache",
    ),
    Reason(
        ".*norm_bwd|row_sums|sum_parts", "x4099$", "wide",
        "each row begins at another odd address, apart from weight and partial sums; the others' accesses are as narrow",
    ),
    Reason("_fold_in", "", "wide", "two numbers of 64 bits: a launch is all that it takes"),
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
