"""Which layers of a decoder to leave wide: the choice of `quantization_report(..., total=True)`, against the first and last layers,
with as many weights wide.

A byte-level decoder, its layers steps of their own, is trained for some steps on the standard library's sources, in float32. The
choice is made on one batch of other text. Then the error of the gradients of all params is measured by steps with each choice, on
further batches. The head is wide throughout.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops import ChainConfig, RopeConfig, WithExtras, chain, donate, quantization_report, random
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.walk import matches
from funcops.engine.trees import tensors, tree_map_with_path
from funcops.low_precision import NVFP4, Fp8Block, Fp8Current, Recipe, begin_step, with_recipe
from funcops.models import DecoderConfig, decoder, decoder_x
from funcops.optim import AdamWConfig, adamw_init, adamw_update

LAYERS, ROWS = 6, 8
SIZES = DecoderConfig(
    vocab=256, dim=96, layers=LAYERS, heads=3, kv_heads=3, head_size=32, hidden=256, context=64, rope=RopeConfig(32)
)
RECIPES = NVFP4(), Fp8Block(), Fp8Current()
ENDS = ("blocks0.*", f"blocks{LAYERS - 1}.*")


class Measured(NamedTuple):
    """A row of results. `error`: of the gradients, relative, in norm, the mean over batches that the choice did not see."""

    recipe: str
    steps: int
    wide: str
    weights: int
    error: float
    ratio_to_ends: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 200], help="training steps before the choice (default: 0 200)")
    parser.add_argument("--batches", type=int, default=8, help="batches on which errors are measured (default: %(default)s)")


def run(steps: Sequence[int] = (0, 200), batches: int = 8) -> Iterator[Measured]:
    cfg, text = apart(decoder(SIZES, loss=True)), source()
    params, done = initial(cfg), 0
    state = adamw_init(params, AdamWConfig())
    for count in steps:
        for number in range(done, count):
            loss, residuals = chain.fwd(params, batch(text[: -len(text) // 10], number), cfg, needs=Needs(x=False))
            grads, _ = chain.bwd(donate(residuals), torch.ones_like(loss), cfg)
            params, state = adamw_update(params, grads, state, AdamWConfig(), lr=2e-3)
        done = count
        held_out = [batch(text[-len(text) // 10 :], i) for i in range(batches + 1)]
        for recipe in RECIPES:
            yield from compared(cfg, params, held_out, recipe, count)


def compared(cfg: ChainConfig, params: Any, batches: list[WithExtras], recipe: Recipe, steps: int) -> Iterator[Measured]:
    found = quantization_report(params, batches[0], cfg, recipe, total=True)
    sizes = {row.step: row.shape[0] * row.shape[1] for row in found.rows if row.step != "head"}
    ends = sum([size for step, size in sizes.items() if matches(step, ENDS)])
    choice = found.leave_wide(weights=ends, skip=("head",))
    skips = {"none": ("head",), "first and last layers": ("head", *ENDS), "leave_wide": choice.skip}
    errors = {name: statistics.fmean([error(cfg, params, x, recipe, skip) for x in batches[1:]]) for name, skip in skips.items()}
    for name, skip in skips.items():
        wide = sum([size for step, size in sizes.items() if matches(step, skip)])
        yield Measured(type(recipe).__name__, steps, name, wide, errors[name], errors[name] / errors["first and last layers"])


def error(cfg: ChainConfig, params: Any, x: WithExtras, recipe: Recipe, skip: Sequence[str]) -> float:
    """The relative error of the gradients of a step with the recipe, in norm."""
    low = with_recipe(cfg, recipe, skip=skip)
    work, _ = begin_step(params, low, {}, dtype=torch.float32, key=random.key(1))
    found, wide = (tensors(gradients(one, p, x)) for one, p in ((low, work), (cfg, params)))
    return float(torch.cat([(a - b).flatten() for a, b in zip(found, wide, strict=True)]).norm()) / float(
        torch.cat([t.flatten() for t in wide]).norm()
    )


def gradients(cfg: ChainConfig, params: Any, x: WithExtras) -> Any:
    loss, residuals = chain.fwd(params, x, cfg, needs=Needs(x=False))
    return chain.bwd(donate(residuals), torch.ones_like(loss), cfg)[0]


def apart(cfg: ChainConfig) -> ChainConfig:
    """The decoder with each layer a step of its own, blocks0, blocks1, ..."""
    i = [step.name for step in cfg.steps].index("blocks")
    blocks = cfg.steps[i]
    layers = [dataclasses.replace(blocks, name=f"blocks{n}", op=blocks.cfg.op, cfg=blocks.cfg.cfg) for n in range(LAYERS)]
    return dataclasses.replace(cfg, steps=(*cfg.steps[:i], *layers, *cfg.steps[i + 1 :]))


def initial(cfg: ChainConfig) -> Any:
    """Normal matrices of variance 1 / fan_in, those that write into the stream divided by sqrt(2 layers), as in train_lm.py."""

    def draw(path: str, t: Tensor | None) -> Tensor | None:
        if t is None or t.dim() < 2:
            return t
        std = 0.5 if path == "embed.weight" else t.shape[-1] ** -0.5
        std *= (2 * LAYERS) ** -0.5 if path.endswith(("out.weight", "down.weight")) else 1.0
        return random.normal(random.fold_in(random.key(0), random.path_id(path)), tuple(t.shape), std=std)

    return tree_map_with_path(draw, chain.init(cfg, key=random.key(0), dtype=torch.float32))


def source() -> Tensor:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"\0".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def batch(text: Tensor, number: int) -> WithExtras:
    """Batch of this number, from random places of the text."""
    starts = torch.randint(len(text) - SIZES.context, (ROWS,), generator=torch.Generator().manual_seed(number))
    rows = text[starts[:, None] + torch.arange(SIZES.context + 1)].long()
    return decoder_x(SIZES, rows[:, :-1], torch.float32, labels=rows[:, 1:].contiguous())
