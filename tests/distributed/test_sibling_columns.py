"""Column layers of one x gather it once."""

import collections

import pytest
import torch
from tiers import drawn

from funcops import WithExtras, chain, dist, explain, random
from funcops.low_precision import Fp8Block, gradients_like, quantize_params, recipe_init, with_recipe
from funcops.models.blocks import block_config
from funcops.program import rules
from funcops.testing import run_ranks
from funcops.testing.checks import same_bits
from funcops.trees import paths

RULES = {"*.qkv.*.proj": "column", "*.out": "row", "*.up": "column", "*.down": "row"}
BLOCK = block_config(256, 4, 256, 4)
ROWS, TOKENS = 32, 8  # of two ranks each has enough elements for a rule on a CPU
D = torch.float64


def given(mesh, recipe):
    """The block of this rank, its working tree, x and dy."""
    cfg = dist.parallel(BLOCK if recipe is None else with_recipe(BLOCK, recipe), RULES, mesh, overlap="bulk")
    params = chain.init(cfg, key=random.key(0), dtype=D)
    work = params if recipe is None else quantize_params(params, cfg, recipe_init(cfg, params), dtype=D)
    draw = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(ROWS, TOKENS, 256, dtype=D, generator=draw).chunk(2)[mesh.rank] for _ in range(2))
    return cfg, work, x, dy


def step(cfg, work, x, dy, way):
    """y, dparams and dx: at once, in halves, or added to accumulators."""
    y, residuals = chain.fwd(work, WithExtras(x, {"positions": torch.arange(TOKENS, device=x.device)}), cfg)
    into = gradients_like(work, D) if way == "into" else None
    if way == "whole":
        dparams, dx = chain.bwd(residuals, dy, cfg)
        return y, dparams, dx.main
    dx, pending = chain.dgrad(residuals, dy, cfg)
    return y, chain.wgrad(pending, cfg, into=into), dx.main


@pytest.mark.parametrize(("recipe", "way"), drawn((None, Fp8Block(), Fp8Block(keep="input")), ("whole", "halves", "into")))
def test_siblings_gather_once(recipe, way, monkeypatch):
    """y and gradients of the siblings' weights have the bits of layers one by one; dx is a sum in another order."""

    def run(mesh):
        cfg, *trees = given(mesh, recipe)
        sent = collections.Counter(one.op for one in dist.record(lambda *trees: step(cfg, *trees, way), *trees).sent)
        return step(cfg, *trees, way), sent, cfg

    together = run_ranks({"tp": 2}, run)
    monkeypatch.setattr(rules, "_rules", [rule for rule in rules._rules if "sibling" not in rule.phase])
    monkeypatch.setattr(rules, "changes", rules.changes)
    rules.changes.append(None)  # programs are made anew
    apart = run_ranks({"tp": 2}, run)
    monkeypatch.undo()
    rules.changes.append(None)
    for ((y, dparams, dx), sent, cfg), ((want, wanted, dx_apart), sent_apart, _) in zip(together, apart, strict=True):
        each = 1 if recipe is None else 2  # codes, and their scales
        assert (
            sent_apart["all_gather"] - sent["all_gather"] == 4 * each and sent_apart["reduce_scatter"] - sent["reduce_scatter"] == 2
        )
        assert str(explain(cfg, device_type="cpu", dtype=D)).count("sibling linears") == 2
        same_bits(y, want, "y")
        torch.testing.assert_close(dx, dx_apart, rtol=0, atol=1e-13)
        for path, t in paths(dparams).items():
            if t is not None and path.endswith("proj.weight"):
                same_bits(t, paths(wanted)[path], path)
            elif t is not None:
                torch.testing.assert_close(t, paths(wanted)[path], rtol=1e-12, atol=1e-11, msg=path)
