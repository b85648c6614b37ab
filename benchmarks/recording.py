"""The cost of a recording: of a digest of one tensor, and of a training step with digests over the same step without.

Rows "digest" are of contiguous tensors on the CPU. A step is the forward and backward of a decoder of two layers; both sides take
turns, and the ratio is of their medians. Times are the process's CPU times, which other work on the machine changes least.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

import torch

from benchmarks.measure import Row, interleaved
from funcops import RopeConfig, chain, random, recording, value_and_grad
from funcops.adapters.recording.digest import digest
from funcops.models import DecoderConfig, decoder, decoder_x

WIDTH, TOKENS, SIZES = 512, 2048, (1_000, 1 << 20)


def run(width: int = WIDTH, tokens: int = TOKENS, rounds: int = 5) -> Iterator[Row]:
    """The rows, which are printed as they come."""
    for numel in SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            t = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
            samples = interleaved({"digest": lambda t=t: digest(t)}, rounds=4 * rounds, calls=3, cpu=True)
            yield Row(
                "recording",
                f"digest of {numel:,} {dtype}".replace("torch.", ""),
                "funcops",
                "time",
                median(samples["digest"]),
                "us",
            )
    sizes = DecoderConfig(
        vocab=1024,
        dim=width,
        layers=2,
        heads=8,
        kv_heads=8,
        head_size=width // 8,
        hidden=4 * width,
        context=tokens,
        rope=RopeConfig(width // 8),
    )
    model = decoder(sizes, loss=True)
    params = chain.init(model, key=random.key(0))
    ids = torch.randint(0, sizes.vocab, (1, tokens), generator=torch.Generator().manual_seed(1))
    x = decoder_x(sizes, ids, torch.float32, labels=ids.roll(-1, 1))
    values: list[int] = []

    def plain() -> Any:
        return value_and_grad(chain)(params, x, model)

    def recorded() -> None:
        with recording() as found:
            plain()
        values.append(len(found))

    samples = interleaved({"plain": plain, "recorded": recorded}, rounds=rounds, calls=1, cpu=True)
    case = f"step of width {width}, {tokens:,} tokens"
    for name, times in samples.items():
        yield Row("recording", case, name, "time", median(times) / 1e3, "ms")
    yield Row("recording", case, "recorded", "values", values[-1], "")
    yield Row("recording", case, "recorded over plain", "ratio", median(samples["recorded"]) / median(samples["plain"]), "")
