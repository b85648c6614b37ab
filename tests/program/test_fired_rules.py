"""The rules that fire on the blocks of GPT-2 and Llama under tensor parallelism, recipes and adapters, and the launches of each
half, beside the plain block."""

from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from launches import launches

from funcops import RopeConfig, WithExtras, chain, dist, donate, plan, rope_table
from funcops.distributed.ops import sharded_dropout
from funcops.library.kernels import pointwise
from funcops.lora import with_lora
from funcops.low_precision import Fp8Block, Fp8Current, with_recipe
from funcops.models.blocks import block_config, gpt2_block_config

BATCH, LENGTH = 4, 2048
BLOCKS = {"GPT-2": gpt2_block_config(768, 12, 3072, 0.1), "Llama": block_config(4096, 32, 11264, 8)}
ROLES = {"*.qkv.*.proj": "column", "*.out": "row", "*.up": "column", "*.down": "row"}
RECIPES = {"block": Fp8Block(), "input": Fp8Block(keep="input"), "current": Fp8Current()}
SHORT = {
    "add + norm": "add+norm",
    "add + norm, recomputed": "add+norm",
    "bias gradients, recomputed": "bias",
    "bias gradients, recomputed for readers": "bias",
    "dropout + add": "dropout",
    "fork + norm, recomputed": "fork",
    "fork + reader": "fork",
    "linear + epilogue": "epilogue",
    "q, k and v": "qkv",
    "quantised output": "quantised",
    "recomputed GLU": "glu",
    "sibling linears": "siblings",
    "sibling linears, x once": "siblings",
}


class Row(NamedTuple):
    """The rules that fire in each half, and its launches, collectives among them (a start and a wait each)."""

    forward: str
    backward: str
    launches: tuple[int, int]


FOUR, SIX = (" ".join(["epilogue"] * n) for n in (4, 6))  # of each layer and its adapter's y
TABLE = {
    ("GPT-2", "plain"): Row("add+norm dropout epilogue siblings", "add+norm bias bias fork qkv", (15, 23)),
    ("GPT-2", "tp"): Row("add+norm dropout epilogue siblings", "add+norm bias bias fork qkv", (21, 27)),
    ("GPT-2", "tp + sp"): Row("add+norm epilogue siblings", "add+norm bias fork qkv", (27, 35)),
    ("GPT-2", "block"): Row("dropout dropout quantised quantised siblings", "add+norm bias bias fork", (29, 52)),
    ("GPT-2", "input"): Row("dropout dropout siblings", "add+norm bias bias fork siblings", (30, 50)),
    ("GPT-2", "current"): Row("dropout dropout siblings", "add+norm bias bias fork", (50, 82)),
    ("GPT-2", "tp + block"): Row("add+norm dropout siblings", "add+norm bias bias fork siblings", (35, 56)),
    ("GPT-2", "tp + input"): Row("add+norm dropout siblings", "add+norm bias bias fork siblings", (35, 56)),
    ("GPT-2", "tp + current"): Row("add+norm dropout siblings", "add+norm bias bias fork siblings", (71, 106)),
    ("GPT-2", "tp + sp + block"): Row("add+norm siblings", "add+norm bias fork siblings", (49, 82)),
    ("GPT-2", "tp + sp + input"): Row("add+norm siblings", "add+norm bias fork siblings", (49, 78)),
    ("GPT-2", "lora"): Row(f"add+norm dropout {SIX}", "add+norm bias bias bias fork qkv", (33, 59)),
    ("GPT-2", "block + lora"): Row("add+norm dropout siblings", "add+norm bias bias bias fork", (55, 88)),
    ("GPT-2", "input + lora"): Row("add+norm dropout siblings", "add+norm bias bias bias fork siblings", (55, 86)),
    ("GPT-2", "tp + lora"): Row(f"add+norm dropout {FOUR}", "add+norm bias bias bias fork qkv", (45, 71)),
    ("GPT-2", "tp + sp + block + lora"): Row("add+norm siblings", "add+norm bias fork siblings", (85, 138)),
    ("GPT-2", "tp + sp + lora"): Row("add+norm epilogue siblings", "add+norm bias fork qkv", (62, 91)),
    ("Llama", "plain"): Row("epilogue epilogue qkv", "add+norm fork glu qkv", (11, 16)),
    ("Llama", "tp"): Row("add+norm qkv", "add+norm fork glu qkv", (16, 20)),
    ("Llama", "tp + sp"): Row("add+norm qkv", "add+norm fork glu qkv", (20, 28)),
    ("Llama", "block"): Row("qkv quantised quantised", "add+norm fork", (21, 40)),
    ("Llama", "input"): Row("add+norm qkv", "add+norm fork glu siblings", (22, 38)),
    ("Llama", "current"): Row("add+norm qkv", "add+norm fork", (42, 70)),
    ("Llama", "tp + block"): Row("add+norm qkv", "add+norm fork siblings", (26, 44)),
    ("Llama", "tp + input"): Row("add+norm qkv", "add+norm fork glu siblings", (26, 44)),
    ("Llama", "tp + current"): Row("add+norm qkv", "add+norm fork siblings", (62, 94)),
    ("Llama", "tp + sp + block"): Row("add+norm qkv", "add+norm fork siblings", (38, 70)),
    ("Llama", "tp + sp + input"): Row("add+norm qkv", "add+norm fork glu siblings", (38, 66)),
    ("Llama", "lora"): Row(f"add+norm {SIX}", "add+norm fork glu qkv", (31, 52)),
    ("Llama", "block + lora"): Row("add+norm qkv", "add+norm fork glu", (46, 76)),
    ("Llama", "input + lora"): Row("add+norm qkv", "add+norm fork glu siblings", (46, 74)),
    ("Llama", "tp + lora"): Row(f"add+norm {FOUR}", "add+norm fork glu qkv", (41, 64)),
    ("Llama", "tp + sp + block + lora"): Row("add+norm qkv", "add+norm fork glu siblings", (74, 126)),
    ("Llama", "tp + sp + lora"): Row("add+norm epilogue qkv", "add+norm fork glu qkv", (55, 84)),
}


def variant(block, name):
    """The block under `name`: a recipe, adapters, and ranks with or without sequence parallelism."""
    cfg, words = BLOCKS[block], name.split(" + ")
    for word in words:
        if word in RECIPES:
            cfg = with_recipe(cfg, RECIPES[word])
        elif word == "lora":
            cfg = with_lora(cfg, 8, ("*",))
    if "tp" in words:
        cfg = dist.parallel(cfg, ROLES, dist.Mesh.abstract({"tp": 2}, 0), sequence_parallel="sp" in words)
    return cfg


def fired(lines):
    return " ".join(sorted(SHORT[line.rule.name] for line in lines if line.rule))


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def counted(block, name, cfg, monkeypatch):
    """The launches of both halves, on meta tensors."""
    monkeypatch.setattr(sharded_dropout, "_apply", lambda t, key, cfg: pointwise.dropout(t, key, cfg.p))
    params = chain.init(cfg, device="meta", dtype=torch.bfloat16)
    rows = BATCH // 2 if "sp" in name.split(" + ") else BATCH
    if block == "GPT-2":
        x = WithExtras(meta(rows, LENGTH, 768), {"key": meta(2, dtype=torch.int64)})
    else:
        table = rope_table(meta(LENGTH, dtype=torch.int64), RopeConfig(128))
        x = WithExtras(meta(rows, LENGTH, 4096), {"positions": table})
    with launches(monkeypatch) as forward:
        y, kept = chain.fwd(params, x, cfg)
    dy = torch.empty_like(y)
    with launches(monkeypatch) as backward:
        chain.bwd(donate(kept), dy, cfg)
    return forward, backward


@pytest.mark.turns("block", "name", every=2)
@pytest.mark.parametrize(("block", "name"), TABLE, ids=" ".join)
def test_rules_and_launches_are_as_written_down(block, name, monkeypatch):
    cfg = variant(block, name)
    found = plan(cfg)
    forward, backward = counted(block, name, cfg, monkeypatch)
    got = Row(fired(found.forward), fired(found.backward), (len(forward), len(backward)))
    assert got == TABLE[block, name], f"write it down: {got}\nforward {forward}\nbackward {backward}"
