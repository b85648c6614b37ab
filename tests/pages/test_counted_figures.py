"""Figures in tables of pages that a count gives again: the table is made anew, and the page has its numbers."""

import re
from pathlib import Path

import pytest
import torch

from funcops import Needs, RepeatConfig, chain, optim, random, repeat, report, with_policy
from funcops.engine.trees import WithExtras, nbytes
from funcops.lora import adapter, lora_init, lora_needs, with_lora
from funcops.low_precision import Fp8Block, Fp8Current, Fp8Delayed, quantize_params, recipe_init, with_recipe
from funcops.models.blocks import block_config

DOCS = Path(__file__).resolve().parents[2] / "docs"
MIB = 2**20
PAGE = DOCS / "low-precision-in-depth.md"


def table(page, head):
    """The cells of a table's rows, by their first cell; `head`: its first line."""
    (found,) = re.findall(rf"^{re.escape(head)}\n\|[-:| ]+\n((?:\|.*\n)+)", (DOCS / page).read_text(), re.M)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in found.splitlines()]
    return {name: cells for name, *cells in rows}


def layers(n, *sizes):
    """A `repeat` of n Llama blocks and its x of 256 tokens."""
    body = block_config(*sizes)
    return RepeatConfig(chain, body, n), lambda dtype: WithExtras(
        torch.ones(1, 256, sizes[0], dtype=dtype), {"positions": torch.arange(256)}
    )


def kept(op, params, x, cfg, needs):
    return f"{report(op.fwd(params, x, cfg, needs=needs)[1], params, x).kept_bytes / MIB:.2f}"


def test_what_adapters_save():
    """The page on fine-tuning: 4 Llama blocks of width 256, rank 8 on all linears, float32."""
    base, x = layers(4, 256, 4, 704)
    full = repeat.init(base, key=random.key(0))
    cfg = with_lora(base, 8, ("*",), alpha=16.0)
    params, needs = lora_init(full, cfg, key=random.key(1)), lora_needs(cfg)
    optimiser = optim.AdamWConfig(lr=1e-3)
    cells = {name: [] for name in ("gradients", "AdamW's state", "default", "minimal")}
    for tree, one, wanted in ((full, base, Needs(x=False)), (params, cfg, needs)):
        given = x(torch.float32)
        y, residuals = repeat.fwd(tree, given, one, needs=wanted)
        gradients = repeat.bwd(residuals, torch.ones_like(y), one)[0]
        learned = adapter(tree, cfg) if one is cfg else tree
        cells["gradients"].append(nbytes(gradients) / MIB)
        cells["AdamW's state"].append(nbytes(optim.adamw_init(learned, optimiser)) / MIB)
        for name, op in (("default", repeat), ("minimal", with_policy(repeat, "minimal"))):
            cells[name].append(float(kept(op, tree, given, one, wanted)))
    said = table("fine-tuning.md", "| | all weights learn | LoRA |")
    for name, figures in cells.items():
        (row,) = [row for row in said if name in row]
        assert said[row] == [f"{figure:.1f}" for figure in figures], name


@pytest.mark.parametrize("name", ["bfloat16", "Fp8Block()", "Fp8Current()", "Fp8Delayed()", 'Fp8Block(keep="input")'])
def test_what_recipes_keep(name):
    """The page on low precision: two Llama blocks of width 128, by recipe and policy."""
    base, x = layers(2, 128, 2, 384, 1)
    recipe = None if name == "bfloat16" else eval(name, dict(Fp8Block=Fp8Block, Fp8Current=Fp8Current, Fp8Delayed=Fp8Delayed))
    cfg = base if recipe is None else with_recipe(base, recipe)
    params = repeat.init(base, key=random.key(0), dtype=torch.bfloat16)
    if recipe is not None:
        state = (recipe_init(cfg, params),) if isinstance(recipe, Fp8Delayed) else ()
        params = quantize_params(params, cfg, *state)
    found = [kept(op, params, x(torch.bfloat16), cfg, Needs(x=False)) for op in (repeat, with_policy(repeat, "save_all"))]
    said = table("low-precision-in-depth.md", '| | default | `"save_all"` |')
    (row,) = [row for row in said if row.startswith(f"`{name}`") or row == name]
    assert said[row] == found, name


def test_how_large_a_working_tree_is():
    base, _ = layers(2, 128, 2, 384, 1)
    params = repeat.init(base, key=random.key(0), dtype=torch.bfloat16)
    cfg = with_recipe(base, Fp8Block())
    sizes = [nbytes(tree) / MIB for tree in (params, quantize_params(params, cfg), quantize_params(params, cfg, columns=False))]
    (said,) = re.findall(
        r"working tree takes ([\d.]+) MiB in bfloat16 and ([\d.]+) in FP8.*?the latter: ([\d.]+) MiB", PAGE.read_text(), re.S
    )
    assert said == tuple(f"{size:.2f}" for size in sizes)
