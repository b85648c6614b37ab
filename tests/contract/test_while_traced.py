"""Ops compute and refuse the same while the code takes it that a compiler traces it."""

import pytest
import torch
from law_cases import CASES
from pretend_compiler import pretended_compiler
from torch.profiler import ProfilerActivity

from funcops import (
    ChainConfig,
    LinearConfig,
    Needs,
    RepeatConfig,
    Step,
    batch_wgrads,
    chain,
    checking,
    delayed_wgrad,
    linear,
    named_scope,
    named_steps,
    nn,
    random,
    repeat,
)
from funcops.adapters.autocast import outside
from funcops.adapters.nn import module
from funcops.engine.contract.checking import asked
from funcops.engine.contract.marks import Moved
from funcops.engine.contract.needs import sub_mask
from funcops.engine.contract.trace_safe_cache import equal
from funcops.engine.trees import put, same_structure, static, tensors, tree, tree_map_tensors
from funcops.testing.checks import float_like, same_bits
from funcops.testing.tolerances import assert_close

LAYER = LinearConfig(4, 4)
DEEP = ChainConfig(
    steps=(Step("a", linear, LAYER), Step("r", repeat, RepeatConfig(chain, ChainConfig(steps=(Step("up", linear, LAYER),)), 2)))
)


def deep():
    """Params, an x and residuals of `DEEP`."""
    params, x = chain.init(DEEP, key=random.key(0)), torch.randn(3, 4)
    return params, x, chain.fwd(params, x, DEEP)[1]


def step(case, params, x, dy):
    y, residuals = case.op.fwd(params, x, case.cfg)
    dparams, dx = case.op.bwd(residuals, dy, case.cfg)
    into = tree_map_tensors(torch.ones_like, dparams)
    return y, dparams, dx, case.op.bwd(residuals, dy, case.cfg, into=into)[0] if case.op.wgrad else None


@pytest.mark.parametrize("case", {case.op: (case, dtype) for case, dtype in CASES[::-1]}.values(), ids=lambda case: case[0].op.name)
def test_every_op_computes_the_same(case):
    case, dtype = case
    params, x = case.make(dtype)
    dy = float_like(case.op.fwd(params, x, case.cfg)[0], seed=1)
    want = step(case, params, x, dy)
    with pretended_compiler():
        got = step(case, params, x, dy)
    assert_close(got, want, dtype=dtype)


def refused(run):
    try:
        run()
    except (TypeError, ValueError) as error:
        return type(error), str(error)
    raise AssertionError("nothing was refused")


REFUSED = {
    "x of the first step": lambda p, x, kept: chain.fwd(p, x[:, :3], DEEP),
    "a shape deep inside": lambda p, x, kept: chain.fwd(put(p, "r.1.up.weight", torch.ones(4, 5)), x, DEEP),
    "a type deep inside": lambda p, x, kept: chain.fwd(put(p, "r.1.up.weight", 3.0), x, DEEP),
    "dy": lambda p, x, kept: chain.bwd(kept, torch.ones(3, 7), DEEP),
    "an accumulator": lambda p, x, kept: chain.bwd(kept, x, DEEP, into=put(p, "r.1.up.weight", torch.ones(4, 5))),
    "no accumulator": lambda p, x, kept: chain.bwd(kept, x, DEEP, into=put(p, "r.1.up.weight", None)),
    "a step too many": lambda p, x, kept: chain.bwd(kept, x, DEEP, into={**p, "b": p["a"]}),
    "an accumulator of a layer": lambda p, x, kept: linear.bwd(kept["a"], x, LAYER, into=put(p["a"], "weight", torch.ones(4, 5))),
    "no accumulator of a layer": lambda p, x, kept: linear.bwd(kept["a"], x, LAYER, into=put(p["a"], "weight", None)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_are_the_same(name):
    given = deep()
    want = refused(lambda: REFUSED[name](*given))
    with pretended_compiler():
        assert refused(lambda: REFUSED[name](*given)) == want


class Odd(Exception):
    pass


@pytest.mark.parametrize("error", [Odd("mine"), KeyError("mine"), UnicodeError("mine")], ids=repr)
def test_an_error_of_another_type_goes_through_as_it_is(error):
    def fails(*given, **options):
        raise error

    params, x, _ = deep()
    failing = linear._replace(fwd=fails)
    cfg = ChainConfig(steps=(Step("a", failing, LAYER),))
    with pretended_compiler(), pytest.raises(type(error), match="^'?mine'?$") as caught:
        chain.fwd({"a": params["a"]}, x, cfg)
    assert caught.value is error


@tree
class Static:
    """A tree without leaves."""

    by: int = static()


SAME = ({"a": (1, 2), "b": None}, {"a": (3, 4), "b": torch.ones(1)})
OTHER = {
    "a key": (SAME[0], {"a": (3, 4), "c": None}),
    "a key more": (SAME[0], {**SAME[1], "c": None}),
    "a class": (SAME[0], {"a": [3, 4], "b": None}),
    "a length": (SAME[0], {"a": (3, 4, 5), "b": None}),
    "a static field": tuple(Static(by=i) for i in (1, 2)),
    "a leaf": (SAME[0], {"a": (3, (4,)), "b": None}),
}


def test_trees_of_one_structure_are_alike():
    with pretended_compiler():
        assert same_structure(*SAME)


@pytest.mark.parametrize("name", OTHER)
def test_trees_that_differ_are_not_alike(name):
    with pretended_compiler():
        assert not same_structure(*OTHER[name]) and not same_structure(*OTHER[name][::-1])


def test_configs_are_compared_by_their_values():
    with pretended_compiler():
        assert equal(LinearConfig(4, 4), LAYER) and not equal(LAYER, LinearConfig(4, 5)) and not equal(LAYER, 3) and equal(3, 3)


def test_weight_gradients_are_joined():
    params, x, _ = deep()
    pendings = [linear.dgrad(linear.fwd(params["a"], x * i, LAYER)[1], x, LAYER)[1] for i in (1, 2)]
    want = batch_wgrads(linear, pendings, LAYER)
    with pretended_compiler():
        assert_close(batch_wgrads(linear, [*pendings, None], LAYER), want, dtype=torch.float32)


def test_a_mask_has_the_same_parts():
    with pretended_compiler():
        assert sub_mask(("a.b", "a.c", "d"), "a") == ("b", "c") and sub_mask(("d",), "d") is True and sub_mask(True, "a") is True
        assert sub_mask(("a",), "d") is False


def test_a_node_made_from_another_takes_no_marks_along():
    _, x, kept = deep()
    with pretended_compiler():
        assert Moved.of(kept["a"]).value is None
    assert Moved.of(kept["a"]).value is not None


@pytest.mark.parametrize("needs", [Needs.ALL, Needs(x=False), Needs(params=["0.weight"])], ids=repr)
def test_layers_of_a_repeat_keep_the_same(needs):
    cfg = RepeatConfig(linear, LAYER, times=2)
    params, x = repeat.init(cfg, key=random.key(0)), torch.randn(3, 4)
    want = repeat.fwd(params, x, cfg, needs=needs)[1]
    with pretended_compiler():
        got = repeat.fwd(params, x, cfg, needs=needs)[1]
    assert [one.needs for one in got.values()] == [one.needs for one in want.values()]
    same_bits(tensors(got), tensors(want), "residuals")


def of_a_module(net, x):
    net.zero_grad()
    y = net(x)
    y.sum().backward()
    return y, [p.grad.clone() for p in net.parameters()]


def test_a_module_has_the_same_gradients_also_of_a_shared_weight():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    x = torch.randn(3, 4, requires_grad=True)
    want = of_a_module(net, x)
    with pretended_compiler():
        got = of_a_module(net, x)
    assert_close(got, want, dtype=torch.float32)


def test_a_node_that_is_traced_gets_no_tensor_twice(monkeypatch):
    got = []
    monkeypatch.setattr(module, "run", lambda op, params, x, cfg: got.extend(tensors((params, x))))
    shared, x = torch.ones(4, 4), torch.ones(3, 4)
    with pretended_compiler():
        module.run_op(chain, {"a": shared, "b": shared}, (x, shared), DEEP)
    assert len({id(t) for t in got}) == 4 and got[0] is shared and got[2] is x
    assert [t.data_ptr() for t in got] == [t.data_ptr() for t in (shared, shared, x, shared)]


def test_weight_gradients_are_not_delayed():
    layer = nn.Linear(4, 4)
    said = "delayed_wgrad: the forward must run outside of torch.compile, got a compiled one"
    with pretended_compiler(), delayed_wgrad(), pytest.raises(RuntimeError, match=f"^{said}$"):
        layer(torch.ones(3, 4))


def test_steps_are_named_by_marks():
    """A mark is an instant, which an operator of its own writes."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as found, named_steps(), pretended_compiler():
        with named_scope("optimizer"), named_scope("up", "fwd"):
            torch.ones(2)
    said = [event.name for event in found.events() if event.name.startswith("scope ")]
    assert said == ["scope begins: optimizer", "scope begins: optimizer.up: fwd", "scope ends", "scope ends"]


def test_a_region_without_autocast_is_one_of_torch():
    with torch.autocast("cpu", torch.bfloat16), pretended_compiler():
        region = outside("cpu")
        assert type(region) is torch.autocast
        with region:
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")


def test_calls_are_not_checked():
    with checking(), pretended_compiler():
        assert not asked()
        with torch.autocast("cpu", torch.bfloat16):
            assert asked()
