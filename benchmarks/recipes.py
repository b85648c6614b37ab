"""Low-precision recipes on this GPU: a linear layer and a Llama block, forward and backward, taking turns with bfloat16.

The working tree is made before, as for all microbatches but the first. Times are the device's, by replays of a CUDA graph.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from benchmarks.device import CudaTimer
from benchmarks.measure import NoDevice
from funcops import LinearConfig, RopeConfig, WithExtras, chain, linear, qlinear, random, rope_table
from funcops.engine.errors import short
from funcops.low_precision import Fp8Block, Fp8Current, Fp8Delayed, quantize_params, recipe_init, with_recipe
from funcops.models.blocks import Sizes, block_config

RECIPES = Fp8Current(), Fp8Current(keep="col"), Fp8Delayed(), Fp8Block(), Fp8Block(keep="col")
PROVIDERS = short(torch.bfloat16), *(f"{type(recipe).__name__}, keep={recipe.keep}" for recipe in RECIPES)
LAYERS = (8192, 4096, 4096), (16384, 4096, 14336), (16384, 8192, 28672)  # tokens, in_features, out_features
BLOCK = Sizes(dim=4096, heads=32, kv_heads=8, hidden=14336, context=4096, batch=2)


class Measured(NamedTuple):
    """A row of results. `speedup`: over bfloat16, in the same rounds."""

    what: str
    provider: str
    device_us: float
    speedup: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", help="only cases whose names contain this: linear, block")


def run(only: str = "") -> Iterator[Measured]:
    if not torch.cuda.is_available():
        raise NoDevice("bench recipes: no CUDA device here")
    timer = CudaTimer()
    for what, make in cases().items():
        yield from _turns(timer, what, only, make)


def cases() -> dict[str, Callable[[], dict[str, Callable[[], Any]]]]:
    """The layers and the block that are measured, by name."""
    layers = {"linear {}x{} to {}".format(*sizes): functools.partial(_linears, *sizes) for sizes in LAYERS}
    return {**layers, f"block {BLOCK.dim}, {BLOCK.hidden} hidden, {BLOCK.batch * BLOCK.context} tokens": _blocks}


def _turns(timer: CudaTimer, what: str, only: str, make: Callable[[], dict[str, Callable[[], Any]]]) -> Iterator[Measured]:
    if only not in what:
        return
    times = timer.device_us({name: timer.replay([call]) for name, call in make().items()}, rounds=9)
    for name, us in times.items():
        yield Measured(what, name, us, times["bfloat16"] / us)


def _linears(tokens: int, inner: int, outer: int) -> dict[str, Callable[[], Any]]:
    cfg = LinearConfig(inner, outer, bias=False)
    return _by_recipe(linear, cfg, _randn(tokens, inner), _randn(tokens, outer))


def _blocks() -> dict[str, Callable[[], Any]]:
    cfg = block_config(BLOCK.dim, BLOCK.heads, BLOCK.hidden, BLOCK.kv_heads)
    x, dy = (_randn(BLOCK.batch, BLOCK.context, BLOCK.dim) for _ in range(2))
    table = rope_table(torch.arange(BLOCK.context, device="cuda"), RopeConfig(BLOCK.dim // BLOCK.heads))
    return _by_recipe(chain, cfg, WithExtras(x, {"positions": table}), dy)


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _by_recipe(op: Any, cfg: Any, x: Any, dy: torch.Tensor) -> dict[str, Callable[[], Any]]:
    params = op.init(cfg, key=random.key(0), device="cuda", dtype=torch.bfloat16)
    made = {PROVIDERS[0]: _both(op, params, cfg, x, dy)}
    for name, recipe in zip(PROVIDERS[1:], RECIPES, strict=True):
        one, low = qlinear if op is linear else op, with_recipe(cfg, recipe)
        work = quantize_params(params, low, recipe_init(low, params) if recipe.delayed else None)
        made[name] = _both(one, work, low, x, dy)
    return made


def _both(op: Any, params: Any, cfg: Any, x: Any, dy: torch.Tensor) -> Callable[[], Any]:
    def call() -> Any:
        _, residuals = op.fwd(params, x, cfg)
        return op.bwd(residuals, dy, cfg)

    return call
