"""Ops made from modules under the laws of every op, but for those that the module itself breaks."""

import copy

import pytest
import torch
from own_models import CFG, MODELS

from funcops import WithExtras, op_from_module
from funcops.engine.trees import tree_map_tensors
from funcops.testing import LAWS
from funcops.testing.case import Case

LOSS = {"language": lambda out: out["loss"]}
TWICE = "its backward is five halves of the right one"
DRAWS = "it draws other numbers at every call"
BUFFERS = "torch has no gradient of a running mean, nor buffers in another dtype"
EXEMPT = {
    "custom function": {"finite_differences": TWICE, "loud": "one of its arguments may have any dtype"},
    "dropout": dict.fromkeys(("pure", "split", "frugal", "right", "finite_differences", "traceable", "edges", "compiles"), DRAWS),
    "conv": {"right": BUFFERS, "finite_differences": BUFFERS},
}
NAMES = ["mlp", "language", "dropout", "block", "conv", "custom function", "recurrent", "encoder"]

# a trace of fewer gradients would run other kernels, so there is one for all needs
FIRST = {("recurrent", "frugal"), ("encoder", "frugal"), ("language", "edges"), ("conv", "loud"), ("encoder", "loud")}


def case_of(name):
    torch.manual_seed(0)
    build, example = MODELS[name]
    module, x, output = build().double(), example(), LOSS.get(name, lambda out: out)
    op, params = op_from_module(module, x, output=output)

    def reference(params, x, cfg):
        again = copy.deepcopy(module)
        args = x if isinstance(x, tuple) else () if isinstance(x, dict) else (x,)
        y = output(torch.func.functional_call(again, params, args, x if isinstance(x, dict) else {}))
        before = dict(module.named_buffers())
        new = {n: b for n, b in again.named_buffers() if not torch.equal(b, before[n])}
        return WithExtras(y, new) if new else y

    def drawn(tree):
        return lambda draw: tree_map_tensors(lambda t: t.to(draw.dtype, copy=True) if t.is_floating_point() else t.clone(), tree)

    return Case(op=op, cfg=CFG, x=drawn(x), reference=reference, params=drawn(params), name=name)


def laws():
    for name in NAMES:
        for law in LAWS:
            if law not in EXEMPT.get(name, {}):
                yield pytest.param(name, law, marks=() if name == "mlp" or (name, law) in FIRST else pytest.mark.slow)


@pytest.mark.parametrize(("name", "law"), list(laws()))
def test_law(name, law):
    LAWS[law](case_of(name), torch.float64)


@pytest.mark.parametrize("name", ["mlp", "language", "encoder"])
def test_right_in_float32(name):
    LAWS["right"](case_of(name), torch.float32)
