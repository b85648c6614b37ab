"""Column layers of one x send it once, and in a whole backward under their products."""

import collections

import pytest
import torch
from launches import launches
from tiers import drawn
from torch.utils._python_dispatch import TorchDispatchMode

from funcops import Needs, WithExtras, chain, dist, explain, random
from funcops.distributed import Mesh
from funcops.engine.program import rules
from funcops.engine.trees import paths, tree_map_tensors
from funcops.low_precision import Fp8Block, gradients_like, quantize_params, recipe_init, with_recipe
from funcops.models.blocks import block_config
from funcops.testing import run_ranks
from funcops.testing.checks import same_bits

RULES = {"*.qkv.*.proj": "column", "*.out": "row", "*.up": "column", "*.down": "row"}
BLOCK = block_config(256, 4, 256, 4)
ROWS, TOKENS = 32, 8  # of two ranks each has enough elements for a rule on a CPU
D = torch.float64


def given(mesh, recipe, overlap="bulk"):
    """The block of this rank, its working tree, x and dy."""
    cfg = dist.parallel(BLOCK if recipe is None else with_recipe(BLOCK, recipe), RULES, mesh, overlap=overlap)
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


KINDS = ((None, "bulk"), (None, "ring"), (None, "none"), (Fp8Block(), "bulk"), (Fp8Block(keep="input"), "bulk"))


@pytest.mark.turns("kind", "way", every=8)
@pytest.mark.parametrize(("kind", "way"), drawn(KINDS, ("whole", "halves", "into")))
def test_siblings_send_x_once(kind, way, monkeypatch):
    """y and gradients of the siblings' weights have the bits of layers one by one; dx is a sum in another order."""
    recipe, overlap = kind

    def run(mesh):
        cfg, *trees = given(mesh, recipe, overlap)
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
        fewer = {"all_gather": 2, "all_to_all": 4} if overlap == "ring" else {"all_gather": 4 * each, "reduce_scatter": 2}
        assert sent_apart - sent == collections.Counter(fewer) and not sent - sent_apart
        rows = str(explain(cfg, device_type="cpu", dtype=D)).splitlines()
        assert sum("sibling linears" in row and "not sibling linears" not in row for row in rows) == 2
        same_bits(y, want, "y")
        torch.testing.assert_close(dx, dx_apart, rtol=0, atol=1e-13)
        for path, t in paths(dparams).items():
            if t is not None and path.endswith("proj.weight"):
                same_bits(t, paths(wanted)[path], path)
            elif t is not None:
                torch.testing.assert_close(t, paths(wanted)[path], rtol=1e-12, atol=1e-11, msg=path)


NAMES = {
    "all_gather_into_tensor": "gather",
    "reduce_scatter_tensor": "scatter",
    "all_to_all_single": "shift",
    "wait_tensor": "wait",
}
NAMES |= {"wait_tensor": "wait"} | dict.fromkeys(("mm", "bmm", "addmm", "scaled_mm"), "product")


class Order(TorchDispatchMode):
    """Collectives, waits and products, in order; for a wait, what it waits for."""

    def __init__(self):
        super().__init__()
        self.found, self.sent = [], []

    def __torch_dispatch__(self, fn, types, args=(), kwargs=None):
        y = fn(*args, **(kwargs or {}))
        name = NAMES.get(fn.__name__.partition(".")[0])
        if name == "wait":
            name += next(f" {kind}" for kind, t in self.sent if t is args[0])
        elif name in ("gather", "scatter", "shift"):
            self.sent.append((name, y))
        self.found += [name] * (name is not None)
        return y


OF_CODES = "gather gather product product product scatter wait gather wait gather product product product wait scatter"
ORDERS = {
    (None, "none"): "product product product scatter wait scatter gather wait gather product product product",
    (None, "bulk"): "gather product product product scatter wait gather product product product wait scatter",
    (None, "ring"): "gather product product product shift product product product wait shift wait gather product product product",
    (Fp8Block(), "bulk"): OF_CODES,
    (Fp8Block(keep="input"), "bulk"): OF_CODES,
}


@pytest.mark.parametrize("kind", ORDERS)
def test_siblings_send_under_their_products(kind):
    """In a whole backward x is in flight during the products for dx, even an x that is recomputed, and dx during those for dw. A
    ring sends x once for all, each part during the products of another."""
    cfg, work, x, dy = given(Mesh.abstract({"tp": 2}, 0), *kind)
    work, x, dy, positions = tree_map_tensors(lambda t: t.to("meta"), (work, x, dy, torch.arange(TOKENS)))
    with Order() as forward:
        _, residuals = chain.fwd(work, WithExtras(x, {"positions": positions}), cfg)
    with Order() as backward:
        chain.bwd(residuals, dy, cfg)
    assert " ".join(backward.found).endswith(ORDERS[kind])
    if kind[1] == "ring":
        first = "shift product product product wait shift product product product"
        assert " ".join(forward.found).startswith(first)


DX_ALONE = {
    "bulk": "product product product scatter wait scatter",
    "ring": "product product product shift product product product wait shift",
}


@pytest.mark.parametrize("overlap", DX_ALONE)
def test_siblings_without_gradients_of_weights_send_dx_alone(overlap):
    """Frozen weights need no x from the other ranks."""
    cfg, work, x, dy = given(Mesh.abstract({"tp": 2}, 0), None, overlap)
    work, x, dy, positions = tree_map_tensors(lambda t: t.to("meta"), (work, x, dy, torch.arange(TOKENS)))
    _, residuals = chain.fwd(work, WithExtras(x, {"positions": positions}), cfg, needs=Needs(params=False))
    with Order() as backward:
        chain.bwd(residuals, dy, cfg)
    assert " ".join(backward.found).endswith(DX_ALONE[overlap])


def test_queries_keys_and_values_send_under_their_products_too(monkeypatch):
    """The rule of a device turns all three back at once: x is on its way until dx is."""
    cfg, *trees = given(Mesh.abstract({"tp": 2}, 0), None)
    meta = lambda t: t.to("meta", torch.bfloat16 if t.is_floating_point() else None)  # noqa: E731
    work, x, dy, positions = tree_map_tensors(meta, (*trees, torch.arange(TOKENS)))
    with launches(monkeypatch):
        _, residuals = chain.fwd(work, WithExtras(x, {"positions": positions}), cfg)
    with launches(monkeypatch) as found:
        chain.bwd(residuals, dy, cfg)
    sends = ("all_gather_into_tensor", "reduce_scatter_tensor", "wait_tensor", "qkv_split.move", "matmul", "mm")
    order = "all_gather_into_tensor qkv_split.move matmul reduce_scatter_tensor wait_tensor wait_tensor mm"
    assert " ".join(name for name in found if name in sends).endswith(order)
