"""A row for each card that `bench aot` compiles for, with what it runs and what it does not; and a page of them.

    python -m benchmarks cards --page docs/cards.md

The builds are in the committed table (`docs/benchmarks/aot.csv`). All else is asked of the code, by a stub of the card's
driver: whose the products are, which recipes are refused, and what a step of a standard model launches. Nothing is compiled.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from triton import knobs
from triton.runtime import driver

from benchmarks.aot import read
from benchmarks.measure import BenchError
from benchmarks.standard_models import MODELS, step
from funcops.engine.backend import backend, gemm
from funcops.engine.backend.launch import Launched, planned_launches
from funcops.library.formats.recipes import MXFP8, NVFP4, Fp8Block, Fp8Current, Recipe
from funcops.library.kernels.triton import scaled_mm, scaled_ways
from funcops.library.kernels.triton.matmul import device_facts, left_to_library
from funcops.testing.aot import TARGETS, Build, name_of, stubbed
from funcops.testing.fingerprint import fingerprint

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "benchmarks" / "aot.csv"
CARDS = {
    "sm_80": "A100, A30",
    "sm_86": "RTX 30, A10, A40, RTX A6000",
    "sm_89": "RTX 40, L4, L40S",
    "sm_90": "H100, H200",
    "sm_100": "B200, GB200",
    "sm_120": "RTX 50, RTX PRO Blackwell",
    "gfx942": "MI300, MI325",
    "gfx950": "MI350, MI355",
}
CONFIRMED = "sm_90"  # the devices of docs/benchmarks
RECIPES = {"FP8, a scale a tensor": Fp8Current(), "FP8 blocks": Fp8Block(), "MXFP8": MXFP8(), "NVFP4": NVFP4(stochastic=False)}
FAMILIES = {"none": "bare", "fused": "with bias and activation", "added": "with an added tensor"}
HEAD = """# Which card runs what

This page is for reference. `python -m benchmarks cards` writes it from [the table of all builds](benchmarks/README.md) and from
what the code chooses on each card, and a test compares them.

Every kernel compiles for every card below, in every configuration, within the shared memory that a program may have there. Tiles
and stages are chosen by how much that is, so a card that is not in the table gets those that it holds. Only an H100 and an H200
have run anything ([what they have not](benchmarks/unconfirmed.md)); the other cards are known by compiled code alone.

"""
TAIL = """
Products of 16 bits are by the library (cuBLAS, hipBLAS) except where "ours" is said; `gemm("triton")` asks for ours. For codes,
"library" is CUDA's too, and needs a torch of CUDA 12.9 or later; "ours" is a Triton kernel; "refused" raises before anything is
computed, and runs with `emulate=True`, by decoded operands. On sm_89 the library has no product of e5m2 by e5m2, so recipes with
`fwd="e5m2"` are refused there. `gemm("cublas")` asks for the library where it runs and no device has confirmed it: on sm_100 and
sm_120 for a scale a tensor, MXFP8 and NVFP4. Grouped products of codes are ours on every card, by decoding where it lacks the
format. Attention without a bias is torch's: flash or memory-efficient, cuDNN's by request. A build that spills keeps some of its
registers in memory, and is slower for it. A step of a model has the launches of one layer, forward and backward, once with the
library's products and once with ours; for Llama and Qwen3-MoE also of embedding, head and loss.

Cards that are not compiled for here: RTX 20 and older (sm_75) have no units for bfloat16. Jetson (sm_87, sm_110), B300 (sm_103) and
DGX Spark (sm_121) get the tiles that their shared memory holds; B300 and DGX Spark have the library's ways of sm_100 and sm_120.
"""


class Card(NamedTuple):
    """`shared`: the most bytes of a build, and of a launch of a model's step; `products` and `recipes`: whose each is."""

    target: str
    limit: int
    builds: int
    shared: int
    spilling: int
    models: dict[str, int]
    products: dict[str, str]
    recipes: dict[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--page", metavar="FILE", help="also write the page")


def run(page: str | None = None) -> list[Card]:
    if knobs.runtime.interpret:
        raise BenchError("bench cards: TRITON_INTERPRET is set, and the interpreter plans for no card; unset it")
    table = read(str(TABLE))
    found = [card_of(target, [build for build in table if build.target == target]) for target in TARGETS]
    if page is not None:
        Path(page).write_text(page_of(found))
    return found


def card_of(target: str, builds: list[Build]) -> Card:
    with on(target):
        products = {name: _whose(family) for family, name in FAMILIES.items()}
        recipes = {name: _multiplies(target, recipe) for name, recipe in RECIPES.items()}
    models = {model: max(shared_of(launches(target, model), target, builds)) for model in MODELS}
    spilling = sum(build.spills > 0 for build in builds)
    return Card(
        target, TARGETS[target].shared_limit, len(builds), max(b.shared for b in builds), spilling, models, products, recipes
    )


@contextmanager
def on(target: str) -> Iterator[None]:
    """A card, with a torch that has its library's products of codes."""
    with stubbed(TARGETS[target].gpu), mock.patch.object(scaled_ways, "SERVED", TARGETS[target].gpu.backend == "cuda"):
        yield


def _whose(family: str) -> str:
    """Who multiplies matrices in bfloat16."""
    ours = not left_to_library(family, torch.bfloat16, 4096, 4096) and device_facts().descriptors
    return "ours" if ours else "library"


def _multiplies(target: str, recipe: Recipe) -> str:
    """Who multiplies x by w in a recipe."""
    gpu, active = TARGETS[target].gpu, driver.active
    if gpu.backend != "cuda" or (gpu.arch // 10, gpu.arch % 10) < recipe.capability:
        return "refused"
    elements, tiles = (recipe.x.element, recipe.w.element), (recipe.x.tile, recipe.w.tile)
    device = active.get_current_device()
    if scaled_mm._library_serves(recipe.x.kind, elements, tiles, device, active):
        return "library"
    chosen = scaled_mm._chosen(recipe.x.kind, *elements, tiles[0][1], tiles[1][1], False, device, active)
    return "refused" if chosen is None else "ours"


def launches(target: str, model: str) -> list[Launched]:
    """The launches of a model's step on a card: with the products as a user runs them, and all by our kernels."""
    with on(target), planned_launches() as found, backend("triton"):
        for provider in ("auto", "triton"):
            with gemm(provider):
                step(model)
    return found


def shared_of(launched: list[Launched], target: str, builds: list[Build]) -> list[int]:
    """The bytes of shared memory of each launch, as the compiler counted them."""
    known = {build.hash: build.shared for build in builds}
    hashes = [fingerprint(one, target) for one in launched]
    lacking = {name_of(one.kernel) for one, found in zip(launched, hashes, strict=True) if found not in known}
    if lacking:
        raise BenchError(
            f"bench cards: {TABLE.name} lacks builds of {', '.join(sorted(lacking))} for {target}: `make aot` adds them"
        )
    return [known[found] for found in hashes]


def page_of(found: list[Card]) -> str:
    kilo = lambda n: f"{n / 1024:.0f}"  # noqa: E731
    lines = ["| target | cards | KB a program may have | builds | the most KB of one | that spill |", "|---|---|--:|--:|--:|--:|"]
    for card in found:
        sizes = f"{kilo(card.limit)} | {card.builds:,} | {kilo(card.shared)} | {card.spilling}"
        lines.append(f"| {card.target} | {CARDS[card.target]} | {sizes} |")
    lines += ["", f"| products | {' | '.join(card.target for card in found)} |", "|---|" + "---|" * len(found)]
    for kind, names in (("products", FAMILIES.values()), ("recipes", RECIPES)):
        for name in names:
            what = f"bfloat16, {name}" if kind == "products" else name
            lines.append(f"| {what} | {' | '.join(getattr(card, kind)[name] for card in found)} |")
    lines += [
        "",
        f"| the most KB of a step's launches | {' | '.join(card.target for card in found)} |",
        "|---|" + "--:|" * len(found),
    ]
    lines += [f"| {model} | {' | '.join(kilo(card.models[model]) for card in found)} |" for model in MODELS]
    return HEAD + "\n".join(lines) + "\n" + TAIL
