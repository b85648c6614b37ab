"""Rules of a policy, and `fit`, for the tensors that `op_from_module` keeps, by the paths of modules."""

import pytest
import torch
from own_models import CFG, Block, draw, made
from products import Products
from torch import nn

from benchmarks.memory import peak_of
from funcops import (
    ChainConfig,
    Compress,
    Drop,
    Needs,
    Offload,
    Policy,
    Recompute,
    RepeatConfig,
    Save,
    ScaleConfig,
    Step,
    WithExtras,
    chain,
    donate,
    fit,
    op_from_module,
    repeat,
    report,
    scale,
    with_policy,
)
from funcops.engine.trees import tensors

LOSSLESS = {
    "block": [
        ({"*.mlp.up.addmm": Recompute()}, 1),
        ({"*.mlp.*": Recompute(), "*.qkv.*": Recompute()}, 2),  # what `mlp` reads is kept, so that only `up` runs again
        ({"kept.*": Recompute()}, 4),  # down is not read by the backward
        ({"*.input": Save()}, 0),
        ({"*.mlp.*": Save(), "*.qkv.addmm": Offload()}, 0),
        ({"*.mlp.up.*": Save(), "*.qkv.*": Recompute()}, 1),
    ],
    "language": [({"*.mlp.up.addmm": Recompute()}, 1), ({"kept.*": Recompute()}, 6)],
    "conv": [({"*.convolution": Recompute(), "*.norm.input": Recompute()}, 2), ({"*.norm.native_batch_norm0": Save()}, 0)],
}
DRAWN = [(name, i) for name, rules in LOSSLESS.items() for i in range(len(rules))]


def passed(op, params, x):
    """The bytes kept, the products of the backward, and the gradients."""
    y, residuals = op.fwd(params, x, CFG)
    dy = WithExtras(torch.ones_like(y.main), dict.fromkeys(y.extras)) if isinstance(y, WithExtras) else y
    with Products() as products:
        dx, pending = op.dgrad(residuals, dy, CFG)
        dparams = op.wgrad(pending, CFG)
    assert all(torch.equal(a, b) for a, b in zip(tensors(op.bwd(residuals, dy, CFG)), tensors((dparams, dx)), strict=True))
    return report(residuals, params, x).kept_bytes, products.count, (y, dparams, dx)


@pytest.mark.parametrize(("name", "number"), DRAWN)
def test_lossless_rules_change_no_bit(name, number):
    rules, again = LOSSLESS[name][number]
    op, params = op_from_module(*made(name))
    x = made(name)[1]
    before, products, wanted = passed(op, params, x)
    kept, more, found = passed(with_policy(op, Policy(rules)), params, x)
    assert all(torch.equal(a, b) for a, b in zip(tensors(found), tensors(wanted), strict=True))
    assert more == products + again, "each product is computed again at most once"
    assert kept < before if again else kept >= before
    assert passed(op, params, x)[:2] == (before, products), "the op itself is as before"


def test_the_form_of_what_is_kept():
    op, params = op_from_module(*made("block"))
    x = draw(2, 32, 6)
    lean = with_policy(op, Policy({"*.mlp.up.addmm": Compress("bf16")}))
    before, _, (_, wanted, _) = passed(op, params, x)
    kept, _, (_, found, _) = passed(lean, params, x)
    assert kept == before - 2 * 32 * 12 * 6, "two bytes in place of eight"
    assert not torch.equal(found["mlp.up.weight"], wanted["mlp.up.weight"])
    assert torch.allclose(found["mlp.up.weight"], wanted["mlp.up.weight"], rtol=0.05, atol=0.05)
    assert all(torch.equal(found[n], wanted[n]) for n in ("mlp.down.bias",))
    page = str(report(lean.fwd(params, x, CFG)[1], params, x))
    assert "kept.mlp.up.addmm" in page and "bf16" in page


def test_a_dropped_tensor_is_asked_for_by_the_half_that_reads_it():
    op, params = op_from_module(*made("mlp"))
    x = made("mlp")[1]
    lean = with_policy(op, Policy({"*.up.addmm": Drop()}))
    y, residuals = lean.fwd(params, x, CFG)
    text = "Mlp_dgrad: residuals.kept.up.addmm must be kept, because this half of the backward reads it, got dropped"
    with pytest.raises(ValueError, match=text):
        lean.dgrad(residuals, y, CFG)
    only = Needs(x=False, params=["down.bias"])
    y, residuals = lean.fwd(params, x, CFG, needs=only)
    assert torch.equal(lean.bwd(residuals, y, CFG)[0]["down.bias"], (2 * y).sum((0, 1)))


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ({"*.nowhere": Recompute()}, r"got '\*.nowhere', nearest .* \(\d+ in all: report\(residuals\) lists them\)"),
        ({"kept.params.mlp.up.weight": Compress("bf16")}, "globs over the paths of cfg"),
        ({"*.mlp.gt": Recompute()}, "one that changes what is kept, got Recompute.* is the same without it"),
        ({"*.mlp.up.addmm": Recompute(), "*.mlp.*": Save()}, "later rules decide for all paths that it matches"),
    ],
)
def test_rules_that_do_nothing_are_refused(rules, text):
    op, params = op_from_module(*made("block"))
    with pytest.raises(ValueError, match=text):
        with_policy(op, Policy(rules)).fwd(params, made("block")[1], CFG)


def test_rules_below_a_chain_and_a_repeat():
    module, x = made("block")
    op, params = op_from_module(module, x)
    cfg = RepeatConfig(chain, ChainConfig(steps=(Step("block", op, CFG), Step("half", scale, ScaleConfig(0.5)))), times=3)
    every = ({"block": params, "half": None},) * 3
    y, residuals = repeat.fwd(every, x, cfg)
    wanted = repeat.bwd(residuals, y, cfg)
    before = report(residuals, every, x).kept_bytes
    lean = with_policy(repeat, Policy({"*.block.kept.mlp.*": Recompute()}))
    y, residuals = lean.fwd(every, x, cfg)
    assert report(residuals, every, x).kept_bytes == before - 3 * x.shape[0] * x.shape[1] * 12 * 8
    assert all(torch.equal(a, b) for a, b in zip(tensors(lean.bwd(residuals, y, cfg)), tensors(wanted), strict=True))


@pytest.mark.parametrize("name", ["block", "language", "conv", "dropout"])
def test_fit_finds_products_to_compute_again_within_the_bytes(name):
    op, params = op_from_module(*made(name))
    x = made(name)[1]
    seeded = torch.get_rng_state()
    before, products, wanted = passed(op, params, x)
    least = min(one.kept_bytes for one in fit(op, CFG, x, before).tried)
    works, torn = [], range(least, before + 1, max(1, (before - least) // 5))
    for budget in (*torn[bool(not least) :], before):
        fitted = fit(op, CFG, x, budget)
        torch.set_rng_state(seeded)
        kept, more, found = passed(fitted.op, params, x)
        assert all(torch.equal(a, b) for a, b in zip(tensors(found), tensors(wanted), strict=True))
        assert kept == fitted.picked.kept_bytes <= budget and (fitted.picked.extra_flops > 0) == (more > products)
        works.append(fitted.picked.extra_flops)
    assert works[0] == max(works) > 0 == works[-1] or least == before
    with pytest.raises(ValueError, match="fit: dtype must be None, as a module's params have their own, got torch.float32"):
        fit(op, CFG, x, before, dtype=torch.float32)
    if least:
        with pytest.raises(ValueError, match=f"fit: budget must be at least {least:,} bytes"):
            fit(op, CFG, x, least - 1)


def test_rules_hold_for_other_shapes_needs_and_modes():
    module, x = made("block")
    op, params = op_from_module(module, x)
    lean = with_policy(op, Policy({"*.mlp.up.addmm": Recompute()}))
    lean.fwd(params, x, CFG)
    for given in (draw(1, 7, 6), draw(0, 5, 6)):
        for needs in (Needs.ALL, Needs(x=False), Needs(params=["mlp.up.weight"])):
            y, plain = op.fwd(params, given, CFG, needs=needs)
            again, residuals = lean.fwd(params, given, CFG, needs=needs)
            kept = [report(one, params, given).kept_bytes for one in (residuals, plain)]
            assert torch.equal(y, again) and kept[0] <= kept[1] and "mlp.up.addmm" not in residuals.kept
            got, wanted = lean.bwd(residuals, y, CFG), op.bwd(plain, y, CFG)
            assert all(torch.equal(a, b) for a, b in zip(tensors(got), tensors(wanted), strict=True))


def test_fit_computes_a_layer_again_from_its_own_input():
    """So that a backward holds one at a time; from the input of the one before, only if the inputs of all are too much."""
    module, x = nn.Sequential(*[Block() for _ in range(8)]).double(), draw(16, 16, 6)
    op, params = op_from_module(module, x)
    y, _ = op.fwd(params, x, CFG)

    def peak(op):
        return peak_of(lambda: op.bwd(donate(op.fwd(params, x, CFG)[1]), y, CFG))

    inputs = 16 * x.nbytes  # of the attention and the mlp of each block
    saved, half = fit(op, CFG, x, inputs), fit(op, CFG, x, inputs // 2)
    assert inputs // 2 < saved.picked.kept_bytes <= inputs and half.picked.kept_bytes <= inputs // 2
    assert peak(saved.op) < 0.5 * peak(op) and peak(half.op) < 0.6 * peak(op)
    nothing = with_policy(op, min(half.tried, key=lambda one: one.kept_bytes).policy)
    assert peak(nothing) > 0.8 * peak(op), "or all of them are held at once"
