"""Attention with a window, forward and backward, with rows of one length and of twice that: the cost of a row stays the same."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from benchmarks.measure import Row, interleaved
from funcops import AttentionConfig, attention_bwd, attention_fwd

LENGTHS, WINDOW, HEADS, KV_HEADS, SIZE = (4096, 8192), 256, 4, 2, 64


def run() -> list[Row]:
    short, long = LENGTHS
    functions = {f"T = {t}": _step(t, WINDOW) for t in LENGTHS} | {f"T = {short}, no window": _step(short, None)}
    samples = interleaved(functions, rounds=10, calls=1)
    case = f"window {WINDOW}, {HEADS} heads of {SIZE}, float32"
    rows = [Row("window", case, name, "median", statistics.median(values) / 1e3, "ms") for name, values in samples.items()]
    for name, of in ((f"T = {long}", f"T = {short}"), (f"T = {short}, no window", f"T = {short}")):
        ratio = statistics.median(a / b for a, b in zip(samples[name], samples[of], strict=True))
        rows.append(Row("window", case, name, f"ratio to {of}", ratio, ""))
    return rows


def _step(length: int, window: int | None) -> Callable[[], None]:
    q, k, v = (torch.randn(1, length, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
    cfg = AttentionConfig(causal=True, window=window)

    def step() -> None:
        y, kept = attention_fwd(None, (q, k, v), cfg)
        attention_bwd(kept, y, cfg)

    return step
