"""The cost of the same bits whatever else is in the batch: `with_invariant` against the same decoder without it, on the CPU.

Rows "forward and backward" are of a decoder of two layers, of width 256, on batches of two shapes; rows "a token" of `decode` with
a cache of 400 positions. Both sides take turns, and a ratio is the median over the turns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch

from benchmarks.measure import Row, interleaved
from funcops import RopeConfig, chain, donate, random, value_and_grad
from funcops.invariant import with_invariant
from funcops.models import DecoderConfig, cache_init, decode, decoder, decoder_x
from funcops.trees import tree_map_tensors

SIZES = dict(vocab=1000, dim=256, layers=2, heads=8, kv_heads=8, head_size=32, hidden=512, context=2048)
BATCHES, CACHED, DECODED = ((4, 512), (1, 2048)), 400, (1, 8)
BLOCKS = {"rows 128": dict(rows=128), "rows 512": dict(rows=512), "rows 32": dict(rows=32)}
OF_TRAINING, OF_DECODING = ("rows 128", "rows 512"), ("rows 128", "rows 32")


def run(rounds: int = 7, batches: tuple[tuple[int, int], ...] = BATCHES) -> Iterator[Row]:
    """The rows, which are printed as they come."""
    cfg = DecoderConfig(**SIZES, rope=RopeConfig(32))  # type: ignore[arg-type]
    for dtype in (torch.float32, torch.bfloat16):
        params = chain.init(decoder(cfg), key=random.key(0), dtype=dtype)
        name = str(dtype).removeprefix("torch.")
        for batch in batches:
            functions = {"free": _training(cfg, params, batch, None)}
            functions |= {name: _training(cfg, params, batch, BLOCKS[name]) for name in OF_TRAINING}
            yield from _rows(f"forward and backward, {batch[0]} x {batch[1]}, {name}", functions, rounds)
        for count in DECODED:
            functions = {"free": _decoding(cfg, params, count, None)}
            functions |= {name: _decoding(cfg, params, count, BLOCKS[name]) for name in OF_DECODING}
            yield from _rows(f"a token after {CACHED}, batch {count}, {name}", functions, 3 * rounds)


def _rows(case: str, functions: dict[str, Callable[[], Any]], rounds: int) -> Iterator[Row]:
    samples = interleaved(functions, rounds=rounds, calls=1, cpu=True)
    for name, times in samples.items():
        yield Row("invariant", case, name, "median", median(times) / 1e3, "ms")
    for name in list(samples)[1:]:
        ratio = median(a / b for a, b in zip(samples[name], samples["free"], strict=True))
        yield Row("invariant", case, name, "ratio to free", ratio, "")


def _training(cfg: DecoderConfig, params: Any, batch: tuple[int, int], blocks: Any) -> Callable[[], Any]:
    """A forward and backward to the sum of the losses; blocks of None: without the mode."""
    model = decoder(cfg, loss=True, reduction="sum")
    model = model if blocks is None else with_invariant(model, **blocks)
    ids = torch.randint(0, cfg.vocab, batch, generator=torch.Generator().manual_seed(1))
    x = decoder_x(cfg, ids, params["embed"].weight.dtype, labels=ids.roll(-1, 1))
    return functools.partial(value_and_grad(chain), {**params, "loss": None}, x, model)


def _decoding(cfg: DecoderConfig, params: Any, batch: int, blocks: Any) -> Callable[[], Any]:
    dtype, model = params["embed"].weight.dtype, decoder(cfg)
    model = model if blocks is None else with_invariant(model, **blocks)
    ids = torch.randint(0, cfg.vocab, (batch, CACHED), generator=torch.Generator().manual_seed(1))
    cache = cache_init(cfg, batch, context=512, chunk=CACHED, dtype=dtype)
    _, cache = decode(params, cache, ids, cfg, model=model)

    def token() -> None:
        mine = tree_map_tensors(torch.clone, cache)
        decode(params, donate(mine), ids[:, :1], cfg, model=model)

    return token
