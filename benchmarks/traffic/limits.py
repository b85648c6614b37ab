"""The limits that a row of the table must keep, and the reasons why some rows exceed them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

MOVED, WIDE, PER_BYTE = 1.05, 0.95, 6.0


class Reason(NamedTuple):
    """Why the rows of these kernels and shapes, both regular expressions, exceed a limit: "moved", "wide", "instructions" or
    "spills"."""

    kernel: str
    shape: str
    limit: str
    words: str

    def fits(self, row: Any, limit: str) -> bool:
        return limit == self.limit and bool(re.fullmatch(self.kernel, row.kernel) and re.search(self.shape, row.shape))


REASONS = (
    Reason(
        "quantize_heads",
        "",
        "moved",
        "a program reads the rows that share a scale for their amax, and again for their codes: 32 KB in blocks, out of the cache; "
        "a whole head does not fit there",
    ),
    Reason("nf4_dequantize", "", "wide", "8 bytes of codes a thread, which make 16 elements; more would take registers, not time"),
    Reason(
        "slot_attention_fwd",
        "latents",
        "moved",
        "128 heads are two programs of 64 rows, side by side: the second finds the latents in the L2 cache",
    ),
    Reason("slot_attention_fwd", "latents", "instructions", "each number that is read is multiplied by 128 rows, twice"),
    Reason(
        "adamw",
        "one pass",
        "wide",
        "4 numbers a thread, 8 bytes of 16-bit ones: with 16 bytes of each shared memory moves them, for 117 registers, not 32",
    ),
    Reason(
        "cross_entropy",
        "",
        "moved",
        "loss and gradient are two calls, each of which reads the logits: no loss waits for a gradient",
    ),
    Reason(
        "cross_entropy_with_gradient",
        "x128256$",
        "moved",
        "a row of 256 KB is more than a program's share of the cache: its gradient reads it again",
    ),
    Reason(
        "cross_entropy_with_gradient",
        "",
        "wide",
        "two lines, each of which calls a kernel: the few numbers of a row count as often as the loads of its logits",
    ),
    Reason(
        "((rms|layer|l2|add_rms|add_layer)_norm_bwd|add_(rms|layer)_norm_bwd_recompute)",
        "x32768$",
        "moved",
        "rows of 64 KB leave no registers, and their two sums take a pass of their own; who keeps them spills 8 to 648 bytes a "
        "thread. Rows loaded twice instead: on an H100 230 us where these take 235, and with a mean 564 where these take 237",
    ),
    Reason(
        "add_layer_norm_bwd_recompute",
        "x16384$",
        "moved",
        "rows of 32 KB with sums for weight and bias leave no registers: x and dy are loaded again, not all from the cache",
    ),
    Reason(
        "dropout_add_(rms|layer)_norm_fwd",
        "x(4099|16384|32768)$",
        "moved",
        "the dropout of long rows, and of rows that words of four do not fit, is a kernel of its own, and so is its sum",
    ),
    Reason("dropout_bwd_sums", "", "moved", "partial sums of the bias's gradient, in float32"),
    Reason(
        "(rms_norm|layer_norm|activation)_quantize",
        "",
        "instructions",
        "codes are half the bytes of y: the steps of an element, and those that encode it, come to fewer bytes",
    ),
    Reason(
        "coded_glu_fwd",
        "",
        "instructions",
        "codes are half the bytes of x: the steps of an element, and those that decode it, come to fewer bytes",
    ),
    Reason(
        "quantize_(row|col|both|groups)",
        "^e2m1",
        "instructions",
        "codes of 4 bits are made by steps on bits, since sm_90, for which this is counted, has no instruction for them",
    ),
    Reason(
        "quantize_both",
        "0x0",
        "moved",
        "codes of square tiles are transposed by a second launch: Triton 3.6 stores a tile both ways wrongly",
    ),
    Reason(
        "group_amax|quantize_groups(_scaled)?",
        "gathered",
        "moved",
        "a token's row is read for each of its two groups, which lie apart; a gathered copy would be written and read besides",
    ),
    Reason("quantize_(col|both)", "^e2m1", "wide", "a column's codes in a tile are 32 bytes, 8 for each of 4 threads"),
    Reason(
        "quantize_(col|both)", "e8m0", "instructions", "a scale for each 32 elements down a column, which lie with many threads"
    ),
    Reason("retile", "", "instructions", "of 2 bytes an element, which is decoded, multiplied twice, and encoded"),
    Reason("softmax_fwd", "long rows", "instructions", "an exponential in each of two passes: of 128 KB no results are kept"),
    Reason(
        "causal_conv1d_bwd",
        "",
        "wide",
        "a thread has four channels, with W of x and of g of each in registers; of eight they would fill them",
    ),
    Reason("causal_conv1d_bwd", "", "instructions", "a number is in W products of z, W of dx and W of dw"),
    Reason("causal_conv1d_fwd", "", "instructions", "a number is in W products, beside the sigmoid of its sum"),
    Reason(
        "route_fwd",
        "",
        "instructions",
        "the K best of a row are found one by one, in registers: K passes over it, of two instructions; before them a sigmoid's "
        "five, the order of float32 scores, and the two best of each group",
    ),
    Reason("route_bwd", "", "instructions", "a row's K gradients come to their places by K comparisons of each"),
    Reason("route_(fwd|bwd)", "", "wide", "K weights, indices and gradients of a token, which are fewer than a program's threads"),
    Reason(
        "(bias_)?activation_fwd|softcap_fwd",
        "^(tanh )?8192x4096$",
        "instructions",
        "beside the exponential a series, which keeps the digits of small inputs: on an H200 37 to 44 us where relu takes 34 to 36",
    ),
    Reason(
        "bias_activation_fwd",
        "^gelu_tanh 8192x4096",
        "instructions",
        "beside the exponential a cube and a quotient; without a bias, whose place a program finds once, it is almost as many",
    ),
    Reason(
        "(add_)?layer_norm_bwd",
        "x16384$",
        "moved",
        "two partial sums of 128 programs, one for each multiprocessor, in float32: each program has 32 rows",
    ),
    Reason("_fold_in", "", "wide", "two numbers of 64 bits: a launch is all that it takes"),
)


def missed(row: Any, peers: Iterable[Any]) -> list[str]:
    """The limits that a row of ours exceeds; `peers`: the other libraries' rows for the same call."""
    counted = [peer for peer in peers if not peer.why]
    beyond = {
        "moved": not row.ratio <= MOVED,  # nan, which was not counted, fails
        "wide": not row.wide >= WIDE,
        "instructions": not row.per_byte <= PER_BYTE,
        "spills": row.spills > max((peer.spills for peer in counted if peer.provider == "liger"), default=0),
    }
    return [limit for limit, holds in beyond.items() if holds]


def why(row: Any, peers: Iterable[Any]) -> str:
    """The reasons for the limits that the row exceeds, as far as there are any."""
    found = [next((reason.words for reason in REASONS if reason.fits(row, limit)), "") for limit in missed(row, peers)]
    return "; ".join(filter(None, found))
