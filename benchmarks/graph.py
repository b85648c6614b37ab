"""A training step of a small decoder on a GPU: eager, as one CUDA graph, and by torch's own means. The model is small, so that the
launches take most of the time.

Every provider trains the same weights on the same batch: forward, backward, clipping, AdamW.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import NoDevice, Row
from benchmarks.plain import PlainLlama, plain_name
from benchmarks.settings import BETAS, CLIP, DECAY, LR, Step
from benchmarks.step import torch_step
from funcops import RopeConfig, WithExtras, chain, donate, rope_table
from funcops.adapters.graphs import graphed
from funcops.contract.needs import Needs
from funcops.models.blocks import Sizes, decoder_config
from funcops.optim import AdamWConfig, adamw_init, adamw_update, clip_by_global_norm
from funcops.trees import cast, tree_map_with_path

SMALL = Sizes(dim=256, layers=4, heads=4, kv_heads=4, hidden=768, vocab=512, context=128, batch=4)
ROUNDS, CALLS = 20, 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")


def run(dtype: str) -> list[Row]:
    if not torch.cuda.is_available():
        raise NoDevice("a CUDA device is needed: what a graph saves is launches")
    return _timed(steps(SMALL, getattr(torch, dtype), "cuda"), f"small decoder, {dtype}")


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
    return {
        "funcops eager": _ours(sizes, module, x, labels, dtype, captured=False),
        "funcops graphed": _ours(sizes, module, x, labels, dtype, captured=True),
        "torch eager": torch_step(module, x, labels, dtype),
        "torch.compile, reduce-overhead": torch_step(module, x, labels, dtype, compiled=True, mode="reduce-overhead"),
    }


def _ours(sizes: Sizes, plain: PlainLlama, x: Tensor, labels: Tensor, dtype: torch.dtype, captured: bool) -> Step:
    cfg, adamw = decoder_config(sizes), AdamWConfig(lr=LR, betas=BETAS, weight_decay=DECAY)
    weights = {name: t.detach().clone() for name, t in plain.named_parameters()}
    params = tree_map_with_path(
        lambda path, t: None if t is None else weights[plain_name(path)], chain.init(cfg, key=None, device="meta")
    )
    state = adamw_init(params, adamw)
    table = rope_table(torch.arange(sizes.context, device=x.device), RopeConfig(sizes.dim // sizes.heads))

    def step(params: Any, state: Any, x: Tensor, labels: Tensor, table: Tensor) -> Any:
        given = WithExtras(x, {"positions": table, "labels": labels})
        loss, residuals = chain.fwd(cast(params, dtype), given, cfg, needs=Needs(x=False))
        grads, _ = chain.bwd(donate(residuals), torch.ones_like(loss), cfg)
        grads, _ = clip_by_global_norm(cast(grads, torch.float32), CLIP, in_place=True)
        return adamw_update(params, grads, state, adamw, in_place=True), loss

    inputs = {"0": "donated", "1": "donated"}
    fn = graphed(step, params, state, x, labels, table, inputs=inputs) if captured else step

    def call() -> Tensor:
        loss: Tensor = fn(params, state, x, labels, table)[1]
        return loss

    return call


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
    eager = samples["funcops eager"]
    ratios = {name: statistics.median(a / b for a, b in zip(values, eager, strict=True)) for name, values in samples.items()}
    return rows + [
        Row("graph", case, name, "ratio to funcops eager", ratio, "") for name, ratio in ratios.items() if name != "funcops eager"
    ]
