"""A training step of a small decoder on a GPU: eager, as one CUDA graph, and by torch's own means. The model is small, so that the
launches take most of the time.

Every provider trains the same weights on the same batch: forward, backward, clipping, AdamW, as in `bench step`; "packed" has the
weights of q, k and v in one memory (`pack_qkv`).
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Iterator

import torch

from benchmarks.measure import NoDevice, Row
from benchmarks.plain import PlainLlama
from benchmarks.settings import Step, runs
from benchmarks.step import funcops_step, torch_step
from funcops.models.blocks import Sizes

SMALL = Sizes(dim=256, layers=4, heads=4, kv_heads=4, hidden=768, vocab=512, context=128, batch=4)
ROUNDS, CALLS = 20, 10
BASE, COMPILED = "funcops eager", "torch.compile, reduce-overhead"
PROVIDERS = BASE, "funcops eager, packed", "funcops graphed", "funcops graphed, packed", "torch eager", COMPILED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")


def run(dtype: str) -> Iterator[list[Row]]:
    """The rows of each group: steps without a compiler come first, as a compilation takes most of the time."""
    if not torch.cuda.is_available():
        raise NoDevice("a CUDA device is needed: what a graph saves is launches")
    of, case = steps(SMALL, getattr(torch, dtype), "cuda"), f"small decoder, {dtype}"
    yield _timed({name: step for name, step in of.items() if name != COMPILED and runs(name, step, _say)}, case)
    if runs(COMPILED, of[COMPILED], _say):
        yield [row for row in _timed({name: of[name] for name in (BASE, COMPILED)}, case) if row.provider == COMPILED]


def _say(line: str) -> None:
    print(f"bench graph: {line}", file=sys.stderr, flush=True)


def steps(sizes: Sizes, dtype: torch.dtype, device: str) -> dict[str, Step]:
    """The providers' steps, each on its own copy of the same weights."""
    torch.manual_seed(0)
    module = PlainLlama(
        dim=sizes.dim,
        n_layers=sizes.layers,
        n_heads=sizes.heads,
        n_kv_heads=sizes.kv_heads,
        hidden=sizes.hidden,
        context=sizes.context,
        vocab=sizes.vocab,
    ).to(device)
    x, labels = torch.randint(0, sizes.vocab, (2, sizes.batch, sizes.context), device=device)
    ours = functools.partial(funcops_step, sizes, module, x, labels, dtype)
    made = (
        ours(),
        ours(packed=True),
        ours(captured=True),
        ours(packed=True, captured=True),
        torch_step(module, x, labels, dtype),
        torch_step(module, x, labels, dtype, compiled=True, mode="reduce-overhead"),
    )
    return dict(zip(PROVIDERS, made, strict=True))


def _timed(functions: dict[str, Step], case: str) -> list[Row]:
    """Milliseconds per step, the providers taking turns; each turn begins and ends with a wait for the device."""
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for round_ in range(ROUNDS + 3):
        for name, fn in functions.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                fn()
            torch.cuda.synchronize()
            if round_ >= 3:
                samples[name].append((time.perf_counter() - start) / CALLS * 1e3)
    rows = [Row("graph", case, name, "median step", statistics.median(values), "ms") for name, values in samples.items()]
    ratios = {
        name: statistics.median(a / b for a, b in zip(values, samples[BASE], strict=True)) for name, values in samples.items()
    }
    return rows + [Row("graph", case, name, f"ratio to {BASE}", ratio, "") for name, ratio in ratios.items() if name != BASE]
