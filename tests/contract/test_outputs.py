"""Outputs of chains by name: nested in every way, with wrong gradients, and in everything else that handles them."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tally import TallyConfig, routed, routed_reference, tally
from torch import nn

from funcops import (
    AddConfig,
    ChainConfig,
    CrossEntropyConfig,
    ForkConfig,
    LinearConfig,
    Needs,
    ParallelConfig,
    Policy,
    Recompute,
    RepeatConfig,
    RMSNormConfig,
    SkipConfig,
    Step,
    WithExtras,
    add,
    chain,
    cross_entropy,
    differentiable,
    explain,
    fork,
    graphs,
    linear,
    parallel,
    random,
    remat,
    repeat,
    report,
    rms_norm,
    skip,
    value_and_grad,
    with_policy,
)
from funcops.adapters.flatten import flatten, unflatten
from funcops.engine.backend import backend
from funcops.engine.trees import leaves, paths, tensors, tree_map, tree_map_tensors
from funcops.testing.checks import float_like, same_bits
from funcops.testing.tolerances import assert_close

D = 4
EXACT = ("save_all", "recompute_norms", "minimal", "offload_block_inputs")
NAMES = ("load", "loss", "logits")


def named(cfg, names=None):
    """A chain of a part that gives outputs, under other names if these are given, and a part that gives none."""
    op = skip if type(cfg) is SkipConfig else repeat if type(cfg) is RepeatConfig else chain
    steps = (Step("inner", op, cfg, gives=names or ()), Step("after", rms_norm, RMSNormConfig(D)))
    return ChainConfig(steps=steps, outputs=names or cfg.outputs)


@st.composite
def nested(draw):
    """An op and a config with outputs, and their reference in plain torch."""
    op, cfg, plain = chain, routed(D), routed_reference
    for depth in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(("skip", "repeat", "stacked", "chain", "parallel", "remat", *EXACT)))
        op, cfg, plain = wrapped(kind, op, cfg, plain, depth)
    return op, cfg, plain


def wrapped(kind, op, cfg, plain, depth):
    if kind == "skip":
        return skip, SkipConfig(op, cfg), lambda p, x: moved(plain(p, x), lambda main: main + x)
    if kind in ("repeat", "stacked"):
        return repeat, RepeatConfig(op, cfg, 2, stacked=kind == "stacked"), lambda p, x: layers(plain, p, x)
    if kind == "chain":
        other = tuple(f"{name}_{depth}" for name in cfg.outputs)
        steps = (Step("a", op, cfg), Step("b", op, cfg, gives=other), Step("c", rms_norm, RMSNormConfig(D)))
        return chain, ChainConfig(steps=steps, outputs=(*other, *cfg.outputs)), lambda p, x: both(plain, p, x, other)
    if kind == "parallel":  # of two branches, whose sum goes on
        branches = ParallelConfig(branches=(Step("one", op, cfg), Step("two", linear, LinearConfig(D, D))))
        steps = (Step("p", parallel, branches), Step("sum", add, AddConfig()))
        return chain, ChainConfig(steps=steps, outputs=cfg.outputs), lambda p, x: beside(plain, p, x)
    return (remat(op) if kind == "remat" else with_policy(op, kind)), cfg, plain


def moved(y, change):
    return WithExtras(change(y.main), y.extras)


def layers(plain, params, x):
    found = []
    for i in range(2):
        own = params[i] if isinstance(params, tuple) else tree_map(lambda t, i=i: None if t is None else t[i], params)
        y = plain(own, x)
        x = y.main
        found.append(y.extras)
    return WithExtras(x, {name: torch.stack([one[name] for one in found]) for name in found[0]})


def both(plain, params, x, names):
    a = plain(params["a"], x)
    b = plain(params["b"], a.main)
    main = torch.nn.functional.rms_norm(b.main, (D,), params["c"].weight, 1e-6)
    return WithExtras(main, {**dict(zip(names, b.extras.values(), strict=True)), **a.extras})


def beside(plain, params, x):
    own = params["p"]["two"]
    return moved(plain(params["p"]["one"], x), lambda main: main + torch.nn.functional.linear(x, own.weight, own.bias))


@settings(max_examples=40)
@given(model=nested(), parts=st.sets(st.sampled_from(("main", *NAMES)), min_size=1), seed=st.integers(0, 99))
def test_gradients_of_outputs_are_autograds(model, parts, seed):
    """Under any nesting, with any parts of dy, whole and in halves."""
    op, cfg, plain = model
    params, x = op.init(cfg, key=random.key(seed), dtype=torch.float64), torch.randn(3, D, dtype=torch.float64)
    y, kept = op.fwd(params, x, cfg)
    asked, given = tree_map_tensors(lambda t: t.clone().requires_grad_(), (params, x))
    want = plain(asked, given)
    assert list(y.extras) == list(cfg.outputs)
    assert_close(y, tree_map_tensors(torch.detach, want), dtype=torch.float64)
    dy = float_like(y, seed)
    dy = WithExtras(
        dy.main if "main" in parts else None, {n: d if n.partition("_")[0] in parts else None for n, d in dy.extras.items()}
    )
    found = op.bwd(kept, dy, cfg)
    dx, pending = op.dgrad(kept, dy, cfg)
    same_bits(found, (op.wgrad(pending, cfg), dx), "halves")
    pairs = [(o, d) for o, d in zip(leaves(want), leaves(dy), strict=True) if d is not None]
    inputs = tensors((asked, given))
    sought = torch.autograd.grad([o for o, _ in pairs], inputs, [d for _, d in pairs], allow_unused=True) if pairs else ()
    got = [g for t, g in zip(leaves((params, x)), leaves(found), strict=True) if t is not None]
    zeros = [torch.zeros_like(t) for t in inputs]
    filled = [[z if g is None else g for g, z in zip(gs, zeros, strict=True)] for gs in (got, sought or zeros)]
    assert_close(*filled, dtype=torch.float64)


MOE = RepeatConfig(skip, SkipConfig(chain, routed(D)), 3)


def test_outputs_of_layers_leave_a_model_stacked_and_none_is_zero():
    cfg = named(MOE)
    params, x = chain.init(cfg, key=random.key(0)), torch.randn(5, D)
    y, kept = chain.fwd(params, x, cfg)
    assert y.extras["load"].shape == (3, D) and y.extras["load"].dtype is torch.int32 and y.extras["loss"].shape == (3,)
    dy = torch.randn(5, D)
    none = chain.bwd(kept, WithExtras(dy, dict.fromkeys(NAMES)), cfg)
    zero = chain.bwd(kept, WithExtras(dy, {**float_like(y, 0).extras, "loss": torch.zeros(3), "logits": torch.zeros(3, 5, D)}), cfg)
    assert_close(none, zero, dtype=torch.float32)
    nothing = chain.bwd(kept, None, cfg)
    assert tensors(nothing) == []
    same_bits(chain.bwd(kept, WithExtras(None, dict.fromkeys(NAMES)), cfg), nothing, "a dy of nothing but None")


def test_a_program_says_who_gives_its_outputs():
    assert "output    loss: given by s" in str(explain(named(MOE, ("l", "loss", "o")))).replace("inner", "s")
    shown = str(explain(SkipConfig(chain, routed(D))))
    assert "output    load: given by tally" in shown and "output    logits: given by both" in shown
    cfg = routed(D)
    params, x = chain.init(cfg, key=random.key(0)), torch.randn(5, D)
    y, kept = chain.fwd(params, x, cfg)
    assert report(kept, params, (x, y)).kept_bytes < report(kept, params, x).kept_bytes, (
        "an output that is kept is the caller's too"
    )


STREAM = ChainConfig(
    steps=(
        Step("in", fork, ForkConfig(), gives=("stream",)),
        Step("up", linear, LinearConfig(D, D)),
        Step("join", add, AddConfig(), takes=("stream",)),
        Step("split", fork, ForkConfig(), gives=("sum",)),
        Step("norm", rms_norm, RMSNormConfig(D)),
        Step("end", add, AddConfig(), takes=("sum",)),
    ),
    outputs=("sum", "stream"),
)


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_outputs_that_a_fused_kernel_reads_and_gives(name):
    """The sum and the norm are one kernel, and the caller's dys add to its gradients."""
    params, x = chain.init(STREAM, key=random.key(0)), torch.randn(5, D)
    asked = tree_map_tensors(lambda t: t.requires_grad_(), (params, x))
    plain = dataclasses.replace(STREAM, fuse=False)
    want = differentiable(chain)(*asked, plain)
    dy = float_like(want, 0)
    sought = torch.autograd.grad(leaves(want), tensors(asked), leaves(dy))
    params, x = tree_map_tensors(torch.detach, asked)
    with backend(name):
        y, kept = chain.fwd(params, x, STREAM)
        got = chain.bwd(kept, dy, STREAM)
        assert_close((y, tensors(got)), (tree_map_tensors(torch.detach, want), list(sought)), dtype=torch.float32)
        for what, wrong in (("stream", torch.ones(1, D)), ("sum", torch.ones(D)), ("stream", torch.ones(5, D).double())):
            into = tree_map_tensors(torch.zeros_like, params)
            bad = WithExtras(dy.main, {**dy.extras, what: wrong})
            for call in (lambda bad=bad: chain.bwd(kept, bad, STREAM), lambda bad=bad: chain.dgrad(kept, bad, STREAM)):
                with pytest.raises(
                    (ValueError, TypeError), match=r"dy.* must be .*float32\[5, 4\]|must be \[5, 4\]|must be .*float32"
                ):
                    call()
            with pytest.raises((ValueError, TypeError), match="must be"):
                chain.bwd(kept, bad, STREAM, into=into)
            assert not any(t.any() for t in tensors(into)), "a wrong part of dy is refused before anything is added"


def test_wrong_gradients_of_stacked_outputs():
    params, x = repeat.init(MOE, key=random.key(0)), torch.randn(5, D)
    y, kept = repeat.fwd(params, x, MOE)
    dy = float_like(y, 0)

    def raises(match, error=ValueError, **parts):
        into = tree_map_tensors(torch.zeros_like, params)
        with pytest.raises(error, match=match):
            repeat.bwd(kept, WithExtras(dy.main, {**dy.extras, **parts}), MOE, into=into)
        assert not any(t.any() for t in tensors(into))

    raises(r"dy.extras.loss must be \[3, ...\], a part for each layer, got float32\[2\]", loss=torch.ones(2))
    raises(r"dy.extras.loss must be \[3, ...\], a part for each layer, got float32\[\]", loss=torch.ones(()))
    raises(r"tally: tally_dgrad: dy.2 must be \[\], got \[2\]", loss=torch.ones(3, 2))
    raises(r"tally: tally_dgrad: dy.1 must be None", load=torch.ones(3, D))
    raises(r"dy.extras.load must be", TypeError, load=torch.ones(3, D, dtype=torch.int32))
    raises(r"dy.extras must be load, loss, logits.*missing \[\], extra \['more'\]", more=None)


@pytest.mark.parametrize(
    ("second", "error", "match"),
    [
        ((torch.ones(3), torch.ones(3)), TypeError, "a tensor, to be stacked, got tuple"),
        (torch.ones(2), ValueError, r"float32\[3\], as in the first layer, got float32\[2\]"),
        (torch.ones(3).double(), ValueError, r"float32\[3\], as in the first layer, got float64\[3\]"),
    ],
    ids=["pair", "shape", "dtype"],
)
def test_outputs_that_cannot_be_stacked(second, error, match):
    loads = iter([torch.ones(3), second])
    odd = tally._replace(fwd=lambda params, x, cfg, needs=Needs.ALL: ((x, next(loads), x.sum()), None))
    names = ("load", "loss")
    cfg = RepeatConfig(chain, ChainConfig(steps=(Step("t", odd, TallyConfig(D), gives=names),), outputs=names), 2)
    with pytest.raises(error, match=f"^1: repeat_fwd: y.extras.load must be {match}"):
        repeat.fwd(repeat.init(cfg), torch.ones(2, D), cfg)


def test_outputs_beside_two_steps_that_are_joined():
    """The logits are recomputed, and the loss of a router is an output."""
    steps = (
        Step("moe", repeat, MOE),
        Step("head", linear, LinearConfig(D, 7, bias=False)),
        Step("loss", cross_entropy, CrossEntropyConfig(), takes=("labels",)),
    )
    cfg = ChainConfig(steps=steps, extras=("labels",), outputs=("logits", "load", "loss"))
    params = chain.init(cfg, key=random.key(0), dtype=torch.float64)
    x = WithExtras(torch.randn(5, D, dtype=torch.float64), {"labels": torch.arange(5)})
    joined = with_policy(chain, Policy({"loss.logits": Recompute()}))
    (y, kept), (want, plain) = joined.fwd(params, x, cfg), chain.fwd(params, x, cfg)
    dy = float_like(y, 0)
    assert list(y.extras) == list(cfg.outputs) and not any("logits" in path for path in paths(kept))
    got = y, joined.bwd(kept, dy, cfg)
    assert_close(got, (want, chain.bwd(plain, dy, cfg)), dtype=torch.float64)


def test_value_and_grad_adds_outputs_to_the_loss():
    last = (Step("moe", repeat, MOE), Step("end", tally, TallyConfig(D), gives=("count", "size")))
    cfg = ChainConfig(steps=(*last, Step("sum", linear, LinearConfig(D, 1, bias=False))), outputs=(*NAMES, "count", "size"))
    params, x = chain.init(cfg, key=random.key(0), dtype=torch.float64), torch.randn(1, D, dtype=torch.float64)
    asked = tree_map_tensors(lambda t: t.requires_grad_(), params)
    y = differentiable(chain)(asked, x, cfg)
    want = torch.autograd.grad(y.main.sum() + y.extras["loss"].sum() + y.extras["size"], tensors(asked))
    params = tree_map_tensors(torch.detach, asked)
    got, dparams = value_and_grad(chain, losses=("loss", "size"))(params, x, cfg)
    assert_close((got, tensors(dparams)), (tree_map_tensors(torch.detach, y), list(want)), dtype=torch.float64)
    plain = value_and_grad(chain)(params, x, cfg)[1]
    assert not torch.equal(plain["sum"].weight, torch.zeros(1, D)) and not torch.equal(tensors(plain)[0], tensors(dparams)[0])
    with pytest.raises(ValueError, match=r"value_and_grad: losses must be names among the outputs \(load, .*\), got \['lost'\]"):
        value_and_grad(chain, losses=("lost",))(params, x, cfg)
    with pytest.raises(ValueError, match=r"value_and_grad: losses must be names of float outputs, got 'load', int32\[3, 4\]"):
        value_and_grad(chain, losses=("load",))(params, x, cfg)
    with pytest.raises(ValueError, match=r"value_and_grad: y.main must be one number, got float64\[2, 1\]"):
        value_and_grad(chain)(params, torch.randn(2, D, dtype=torch.float64), cfg)
    with pytest.raises(ValueError, match=r"value_and_grad: losses must be names among the outputs \(none\), got \['loss'\]"):
        value_and_grad(linear, losses=("loss",))(
            linear.init(LinearConfig(D, 1), key=random.key(0)), torch.ones(1, D), LinearConfig(D, 1)
        )


class Routed(nn.Module):
    """A module that a user might write around a model with outputs."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg, params = cfg, chain.init(cfg, key=random.key(0))
        own = []
        self.shape = flatten(params, own)
        self.own = nn.ParameterList(own)

    def forward(self, x):
        y = differentiable(chain)(unflatten(self.shape, list(self.own)), x, self.cfg)
        return y.main, y.extras["loss"], y.extras["load"]


def of_module(module, x):
    x = x.clone().requires_grad_()
    main, loss, load = module(x)
    module.zero_grad()
    (main.square().sum() + loss.sum()).backward()
    return [main.detach(), loss.detach(), load, x.grad, *[p.grad.clone() for p in module.parameters()]]


def test_a_module_with_outputs_captured():
    module, x = Routed(named(MOE)), torch.randn(5, D)
    want = of_module(module, x)
    captured = graphs.make_graphed_callables(module, (x.clone().requires_grad_(),))
    same_bits(of_module(captured, x), want, "replayed")


@pytest.mark.slow
def test_a_module_with_outputs_compiled():
    module, x = Routed(named(MOE)), torch.randn(5, D)
    want = of_module(module, x)
    module.compile(fullgraph=True, backend="aot_eager")
    assert_close(of_module(module, x), want, dtype=torch.float32)
