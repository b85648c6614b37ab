"""`profile` and the names of steps of traced ops: the paths of modules, as operators that hooks on them count."""

from collections import Counter

import pytest
import torch
from own_models import CFG, draw, made
from test_batched_traces import ones
from test_traced_compiled import Compiled, same
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from funcops import (
    Needs,
    Policy,
    Recompute,
    batch_wgrads,
    chain,
    named_scope,
    named_steps,
    op_from_module,
    op_from_torch,
    profile,
    remat,
    report,
    stages_from_module,
    with_policy,
)
from funcops.engine.backend import scopes
from funcops.engine.backend.scopes import Label

PRODUCTS = {"mm", "addmm", "bmm", "convolution", "convolution_backward"}


class ByStep(TorchDispatchMode):
    """Counts products by the label that runs; or by the module, whose paths a list has."""

    runs = True

    def __init__(self, stack=None):
        super().__init__()
        self.stack, self.found = stack, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.partition("::")[2] in PRODUCTS:
            self.found[scopes.label() if self.stack is None else Label(self.stack[-1], "fwd")] += 1
        return func(*args, **(kwargs or {}))


def eager(module, x):
    """The products of a module's forward by its path."""
    stack, hooks = [""], []
    for path, part in module.named_modules():
        hooks.append(part.register_forward_pre_hook(lambda part, args, path=path: stack.append(path)))
        hooks.append(part.register_forward_hook(lambda part, args, y: stack.pop() and None))
    with ByStep(stack) as counted:
        module(**x) if isinstance(x, dict) else module(*x) if isinstance(x, tuple) else module(x)
    for hook in hooks:
        hook.remove()
    return counted.found


@pytest.mark.parametrize("name", ["mlp", "block", "language", "language, logits", "conv", "shared parts", "recurrent", "encoder"])
def test_each_half_has_the_paths_of_modules(name):
    module, x = made(name)
    op, params = op_from_module(module, x)
    want = eager(*made(name))
    y, residuals = op.fwd(params, x, CFG)
    dy = ones(y)
    with named_steps(), ByStep() as counted:
        op.fwd(params, x, CFG)
        pending = op.dgrad(residuals, dy, CFG)[1]
        op.wgrad(pending, CFG)
        op.bwd(residuals, dy, CFG)
    found = counted.found
    assert {label: n for label, n in found.items() if label.half == "fwd"} == want
    linear = {path for path, part in module.named_modules() if isinstance(part, (nn.Linear, nn.Conv2d))}
    for path in linear & {label.path for label in want}:  # what runs twice has two
        times, first = want[Label(path, "fwd")], found[Label(path, "dgrad")]
        assert found[Label(path, "wgrad")] == times and first in (times - (path in ("first", "qkv", "block.qkv")), times), path
        assert found[Label(path, "bwd")] in (first + times, times), path  # one call of a convolution has both
    assert {label.half for label in found} <= {"fwd", "dgrad", "wgrad", "bwd"}, "no product is computed again"
    assert scopes.label() == Label()


@pytest.mark.parametrize("name", ["mlp", "block", "language", "conv", "dropout"])
def test_the_same_bits_and_nothing_outside_of_the_block(name):
    module, x = made(name)
    op, params = op_from_module(module, x)

    def step(params, x):
        torch.manual_seed(0)
        y, residuals = op.fwd(params, x, CFG)
        dx, pending = op.dgrad(residuals, ones(y), CFG)
        return y, dx, op.wgrad(pending, CFG), *op.bwd(residuals, ones(y), CFG)

    want, own = step(params, x), op.fwd(params, x, CFG)[1].traced
    every = [own, *[other for (make, _), other in own.others.items() if make == "without"]]  # of the new values of buffers
    assert not any("with_paths" in dict(one.others) for one in every), "no graph has scopes"
    with named_steps():
        assert same(step(params, x), want)
    assert sum(len([make for make, _ in one.others if make == "with_paths"]) for one in every) == 4
    found = profile(step, params, x)
    _, residuals = op.fwd(params, x, CFG)
    assert sum(row.kept for row in found.rows) == report(residuals, (params, x)).kept_bytes
    assert {row.path for row in found.rows if row.kept} <= {path for path, _ in module.named_modules()}
    assert same(step(params, x), want)


def decoder():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(3)], nn.Linear(6, 2)).double()


@pytest.mark.parametrize("change", [None, remat], ids=["plain", "remat"])
def test_paths_stand_below_the_steps_of_a_chain(change):
    cfg, params = stages_from_module(decoder(), draw(4, 6), ["1", "3"])
    op = chain if change is None else change(chain)

    def step(params, x):
        y, residuals = op.fwd(params, x, cfg)
        dx, pending = op.dgrad(residuals, ones(y), cfg)
        return dx, batch_wgrads(op, [pending], cfg)

    found = profile(step, params, draw(4, 6))
    rows = {(row.path, row.half) for row in found.rows}
    assert {("s0.0.0", "fwd"), ("s1.1.0", "fwd"), ("s1.2.0", "dgrad"), ("s2.3", "dgrad"), ("s1.1.0", "wgrad")} <= rows
    assert (("s1.2.0", "recompute") in rows) == (change is remat)
    _, residuals = op.fwd(params, draw(4, 6), cfg)
    kept = {row.path: row.kept for row in found.rows if row.kept}
    assert sum(kept.values()) == report(residuals, (params, residuals["s0"].kept["x"])).kept_bytes if change is None else not kept
    assert change is remat or set(kept) == {"s0.0.0", "s1", "s1.1.0", "s1.2.0", "s2"}, "x of a later stage has no module"


def test_what_a_rule_computes_again_is_named_so():
    module, x = made("mlp")
    op, params = op_from_module(module, x)
    lean = with_policy(op, Policy({"kept.up.*": Recompute()}))
    with named_steps(), ByStep() as counted:
        y, residuals = lean.fwd(params, x, CFG)
        lean.bwd(residuals, ones(y), CFG)
    assert counted.found[Label("up", "recompute")] == 1 and counted.found[Label("up", "fwd")] == 1


def test_a_function_has_the_name_of_the_scope_around_it():
    op = op_from_torch(lambda params, x, cfg: (x @ x).tanh(), name="squared")
    x, needs = draw(4, 4), Needs(x=True, params=False)
    op.fwd(None, x, CFG, needs=needs)
    with named_steps(), ByStep() as counted, named_scope("mine"):
        y, residuals = op.fwd(None, x, CFG, needs=needs)
        op.bwd(residuals, y, CFG)
    assert counted.found == {Label("mine", "fwd"): 1, Label("mine", "bwd"): 2}


@pytest.mark.parametrize("half", ["fwd", "dgrad"])
def test_an_error_in_a_graph_leaves_its_scopes(half):
    class Stop(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func._schema.name.partition("::")[2] in ("addmm", "mm"):
                raise MemoryError
            return func(*args, **(kwargs or {}))

    module, x = made("mlp")
    op, params = op_from_module(module, x)
    y, residuals = op.fwd(params, x, CFG)
    with named_steps(), named_scope("mine"):
        with pytest.raises(MemoryError), Stop():
            op.fwd(params, x, CFG) if half == "fwd" else op.dgrad(residuals, y, CFG)
        assert scopes.label() == Label("mine")


@pytest.mark.parametrize("name", ["mlp", "conv"])
def test_compiled(name):
    module, x = made(name)
    op, params = op_from_module(module, x)

    def step(params, x):
        y, residuals = op.fwd(params, x, CFG)
        dx, pending = op.dgrad(residuals, dy, CFG)
        return y, dx, op.wgrad(pending, CFG)

    dy = ones(op.fwd(params, x, CFG)[0])
    want = step(params, x)
    compiled = Compiled(step)
    assert same(compiled(params, x), want)
    found = profile(compiled, params, x, calls=1)
    path = "up" if name == "mlp" else "second"
    assert {(path, "fwd"), (path, "dgrad"), (path, "wgrad")} <= {(row.path, row.half) for row in found.rows}
    assert same(compiled(params, x), want) and compiled.graphs <= 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GPT-2", "Qwen3-MoE", "ResNet", "T5"])
def test_whole_models(name):
    from test_models_as_ops import model_of, result

    model, batch = model_of(name)
    op, params = op_from_module(model, batch, output=result)

    def step(params):
        loss, residuals = op.fwd(params, batch, CFG, needs=Needs(x=False, params=True))
        return op.bwd(residuals, ones(loss), CFG)

    found = profile(step, params, calls=1)
    paths = {path for path, part in model.named_modules() if isinstance(part, (nn.Linear, nn.Conv2d))}
    shown = {row.path for row in found.rows if row.half == "bwd"}
    assert len(paths & shown) >= 0.9 * len(paths)
    backward = [row for row in found.rows if row.half in ("bwd", "recompute")]
    assert sum(row.launches for row in backward if row.path) >= 0.9 * sum(row.launches for row in backward)
