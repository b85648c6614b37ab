"""Siblings: the first steps of a parallel's branches run in one kernel where they should, with the same numbers."""

from types import SimpleNamespace

import pytest
import torch
from fusion_cases import MAKERS, D, made
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launches import Operators

from funcops import (
    ActivationConfig,
    ChainConfig,
    LinearConfig,
    LinearParams,
    Needs,
    ParallelConfig,
    QLinearConfig,
    ReshapeConfig,
    RopeConfig,
    Step,
    WithExtras,
    activation,
    chain,
    donate,
    explain,
    fused,
    linear,
    parallel,
    plan,
    qlinear,
    random,
    reshape,
    rope,
)
from funcops.engine.backend import backend, gemm
from funcops.engine.program import rules
from funcops.engine.trees import leaves, paths, replace, tensors, tree_map
from funcops.library.fused import siblings
from funcops.library.kernels import sibling_linear
from funcops.low_precision import Fp8Block
from funcops.testing import LAWS, Case
from funcops.testing.laws import float_like
from funcops.testing.tolerances import assert_close


def heads_of(count, size, biased, theta=None):
    """A projection to heads, which are rotated with `theta`."""
    steps = [
        Step("proj", linear, LinearConfig(D, count * size, bias=biased)),
        Step("heads", reshape, ReshapeConfig((count * size,), (count, size))),
    ]
    if theta is None:
        return "chain", chain, ChainConfig(steps=tuple(steps))
    turn = Step("rope", rope, RopeConfig(size, theta=theta), takes=("positions",))
    return "chain", chain, ChainConfig(steps=(*steps, turn), extras=("positions",))


BRANCHES = {
    "q": heads_of(4, 2, False, 100.0),
    "k": heads_of(2, 2, True, 100.0),
    "v": heads_of(2, 2, False),
    "k_other": heads_of(2, 2, False, 99.0),
    "v_wide": heads_of(2, 4, True),
    "v_more": heads_of(4, 2, True),
    "linear": ("linear", linear, LinearConfig(D, 4, bias=False)),
    "linear_b": ("linear", linear, LinearConfig(D, 5)),
    "heads": ("chain", chain, ChainConfig(steps=(MAKERS["linear_b"]("proj"), Step("heads", reshape, ReshapeConfig((D,), (2, 3)))))),
    "mlp": ("chain", chain, made("linear_b gelu linear")),
    "glu": ("chain", chain, made("wide glu linear_b")),
    "rms": ("chain", chain, made("linear rms linear")),
    "one": ("chain", chain, made("linear_b")),
    "drop": ("chain", chain, made("linear drop add")),
    "frozen": ("chain", chain, made("linear gelu", fuse=False)),
    "gelu": ("activation", activation, ActivationConfig("silu")),
    "given": ("chain", chain, made("add linear")),
}


ROWS = 1 << 14  # of so many on the CPU, too, rules have enough elements


def side_by_side(words, **options):
    steps = [Step(f"b{i}", *BRANCHES[word][1:]) for i, word in enumerate(words.split())]
    return ParallelConfig(branches=tuple(steps), **options)


SIBLINGS = [
    ("linear linear", True),
    ("linear linear_b heads", True),
    ("one mlp", True),
    ("mlp drop glu", True),
    ("rms heads", True),
    ("linear", False),
    ("linear gelu", False),
    ("linear frozen", False),
    ("linear given", False),
    ("linear linear linear linear", False),
]


@pytest.mark.parametrize(("words", "joined"), SIBLINGS, ids=[row[0] for row in SIBLINGS])
def test_siblings_are_as_written_down(words, joined):
    paths_of = [f"b{i}" for i in range(len(words.split()))]

    def found(half, device_type="cuda"):
        lines = getattr(plan(side_by_side(words), device_type=device_type, dtype=torch.float32), half)
        return [
            [path.partition(".")[0] for path in line.paths] for line in lines if line.rule and line.rule.name == "sibling linears"
        ]

    assert found("forward") == found("backward") == found("backward", "cpu") == ([paths_of] if joined else [])
    assert found("forward", "cpu") == []
    assert "sibling" not in str(explain(side_by_side(words, fuse=False)))
    frozen_x = Needs(x=["extras.key", "extras.given"]) if "drop" in words else Needs(x=False)
    assert "backward  b0 + " not in str(explain(side_by_side(words), frozen_x))


@pytest.mark.parametrize("words", ["linear linear_b", "linear linear_b heads"])
def test_each_product_for_dx_is_added_to_the_one_before(words):
    """The gradients of the branches are never added up by an operator of their own."""
    cfg = side_by_side(words)
    y, kept = parallel.fwd(parallel.init(cfg, key=random.key(0)), torch.ones(ROWS, D), cfg)
    dy, ran = tuple(torch.ones_like(part) for part in y), []
    with Operators(ran):
        parallel.bwd(kept, dy, cfg)
    assert ran.count("addmm") == len(words.split()) - 1 and "add" not in ran


@pytest.mark.parametrize("order", [1, -1])
def test_siblings_that_sum_dx_in_different_ways_say_so(order):
    """A layer in low precision sums products of codes, and a plain one products of x."""
    low = Step("low", qlinear, QLinearConfig(D, 4, Fp8Block(keep="input")))
    text = str(explain(ParallelConfig(branches=(low, Step("plain", linear, LinearConfig(D, 4)))[::order])))
    first = ("low", "plain")[::order][0]
    assert f"not sibling linears at {first} (siblings backward): they sum dx in different ways" in text


def test_too_many_siblings_say_so():
    text = str(explain(side_by_side("linear linear linear linear")))
    assert "not sibling linears at b0 (siblings forward): more than 3 branches" in text


def beside(cfg, dtype, needs, donated=False, split=False, into=False):
    params = parallel.init(cfg, key=random.key(0), dtype=dtype)
    x, dy = float_like(torch.empty(5, D, dtype=dtype), 1), None
    extras = {"given": float_like(x, 2), "key": random.key(7), "positions": torch.arange(5)}
    whole = WithExtras(x, {n: extras[n] for n in cfg.extras}) if cfg.extras else x
    y, kept = parallel.fwd(params, whole, cfg, needs=needs)
    if kept is None:
        return y, None, None, None
    names, dy = sorted(paths(kept)), tuple(float_like(part, 3 + i) for i, part in enumerate(y))
    if split:
        dx, pending = parallel.dgrad(donate(kept) if donated else kept, dy, cfg)
        return y, parallel.wgrad(pending, cfg), dx, names
    sums = tree_map(lambda p: None if p is None else torch.ones_like(p), params) if into else None
    dparams, dx = parallel.bwd(donate(kept) if donated else kept, dy, cfg, into=sums)
    return y, dparams, dx, names


@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("name", ["torch", "triton"])
@given(st.lists(st.sampled_from(list(BRANCHES)), min_size=2, max_size=4).map(" ".join), st.data())
def test_drawn_siblings_under_drawn_masks(monkeypatch, name, words, data):
    monkeypatch.setattr(rules, "FEW", 0)
    cfg = side_by_side(words)
    every = [path for path, t in paths(parallel.init(cfg, device="meta")).items() if t is not None]
    params = data.draw(st.one_of(st.booleans(), st.lists(st.sampled_from(every), unique=True) if every else st.just(False)))
    mains = [["main"], ["main", *(f"extras.{n}" for n in cfg.extras if n == "given")], False] if cfg.extras else [True, False]
    needs = Needs(x=data.draw(st.sampled_from(mains)), params=params)
    try:
        want = beside(side_by_side(words, fuse=False), torch.float32, needs)
    except ValueError:  # drawn branches that do not take the same x
        return
    with backend(name):
        got = beside(cfg, torch.float32, needs)
        others = [beside(cfg, torch.float32, needs, *flags) for flags in ((True,), (False, True), (True, True))]
        total = beside(cfg, torch.float32, needs, into=True)
    assert got[3] == want[3], "a fusion keeps what the steps keep"
    assert_close(got[:3], want[:3], dtype=torch.float32, length=1024)
    for other in others:
        assert all((s is None and t is None) or torch.equal(s, t) for s, t in zip(leaves(other[:3]), leaves(got[:3]), strict=True))
    if got[1] is not None:
        one_more = tree_map(lambda s, g: s - 1 if g is not None else None, total[1], got[1])
        assert_close(one_more, got[1], dtype=torch.float32, length=4096)


JOINED = [
    ("q k v", "q, k and v", "q, k and v"),
    ("q q v_more", "q, k and v", "q, k and v"),
    ("v k v", "sibling linears", "sibling linears"),
    ("v_more v v", "sibling linears", "q, k and v"),
    ("v v v", "sibling linears", "q, k and v"),
    ("q k_other v", "sibling linears", "sibling linears"),
    ("q k v_wide", "sibling linears", "sibling linears"),
    ("q k k", "sibling linears", "sibling linears"),
    ("q k v_more", "sibling linears", "sibling linears"),
    ("q k", "sibling linears", "sibling linears"),
    ("q k linear", "sibling linears", "sibling linears"),
]


@pytest.mark.parametrize(("words", "forward", "backward"), JOINED, ids=[row[0] for row in JOINED])
def test_queries_keys_and_values_are_as_written_down(words, forward, backward):
    found = plan(side_by_side(words))
    assert [line.rule.name for line in found.forward if line.rule] == [forward]
    assert [line.rule.name for line in found.backward if line.rule] == [backward]


@pytest.mark.parametrize("words", [row[0] for row in JOINED if row[2] == "q, k and v"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.turns("dtype")
def test_queries_keys_and_values(words, dtype, monkeypatch):
    cfg, ran, product = side_by_side(words), [], fused.qkv.joined_linear_dgrad
    monkeypatch.setattr(fused.qkv, "joined_linear_dgrad", lambda *given: ran.append(1) or product(*given))
    for params in (True, ["b0.proj.weight", "b2.proj.weight"]):
        needs = Needs(x=["main"] if cfg.extras else True, params=params)
        want = beside(side_by_side(words, fuse=False), dtype, needs)
        with backend("triton"):
            got = beside(cfg, dtype, needs, donated=True)
            halves_of, total = beside(cfg, dtype, needs, donated=True, split=True), beside(cfg, dtype, needs, into=True)
        assert got[3] == want[3], "a fusion keeps what the steps keep"
        assert_close(got[:3], want[:3], dtype=dtype, length=1024)
        assert all(
            (s is None and t is None) or torch.equal(s, t) for s, t in zip(leaves(halves_of[:3]), leaves(got[:3]), strict=True)
        )
        one_more = tree_map(lambda s, g: s - 1 if g is not None else None, total[1], got[1])
        assert_close(one_more, got[1], dtype=dtype, length=4096)
    assert len(ran) == 6


def below_each_other(params):
    """The params, the weights of q, k and v as parts of one tensor."""
    names = ("b0", "b1", "b2")
    whole = torch.cat([params[name]["proj"].weight for name in names])
    parts = whole.split([params[name]["proj"].weight.shape[0] for name in names])
    return whole, {n: {**params[n], "proj": replace(params[n]["proj"], weight=w)} for n, w in zip(names, parts, strict=True)}


@pytest.mark.turns("product")
@pytest.mark.parametrize("product", ["triton", "cublas"])
def test_weights_that_lie_below_each_other_are_not_copied(product, monkeypatch):
    """Every result has the bits of weights apart, also after a step that writes to the weights in place."""
    cfg = side_by_side("q k v")
    params, x = parallel.init(cfg, key=random.key(0)), WithExtras(torch.randn(64, D), {"positions": torch.arange(64)})
    whole, beneath = below_each_other(params)
    copied, cat = [], torch.cat
    with backend("triton"), gemm(product):
        for _ in range(2):
            found = []
            for weights, copies in ((params, 1), (beneath, 0)):
                y, kept = parallel.fwd(weights, x, cfg)
                with monkeypatch.context() as patch:
                    patch.setattr(torch, "cat", lambda t, *a: (copied.append([tuple(s.shape) for s in t]), cat(t, *a))[1])
                    found.append((y, *parallel.bwd(kept, y, cfg)))
                assert copied.count([(8, D), (4, D), (4, D)]) == copies, copied
                copied.clear()
            assert all(torch.equal(a, b) for a, b in zip(tensors(found[0]), tensors(found[1]), strict=True))
            whole.mul_(0.5)
            params = tree_map(lambda t: None if t is None else t.clone(), beneath)


def test_only_weights_in_order_and_without_a_gap_are_one_view():
    whole = torch.randn(32, D)
    a, b, c = whole.split([16, 8, 8])
    view = sibling_linear.joined(a, b, c)
    assert view.data_ptr() == whole.data_ptr() and torch.equal(view, whole)
    half = torch.nn.Parameter(b)
    with torch.no_grad():
        assert sibling_linear.joined(half, c).data_ptr() == b.data_ptr()
    below = half.detach().requires_grad_(), c.detach().requires_grad_()
    assert all(g.eq(1).all() for g in torch.autograd.grad(sibling_linear.joined(*below).sum(), below))
    row = whole[:1].as_strided((1, D), (3 * D, 1))  # contiguous, as one row may have any stride
    assert torch.equal(sibling_linear.joined(row, whole[1:9]), whole[:9])
    wide = torch.randn(32, 2 * D)
    for parts in ((b, a), (a, c), (a, b.clone()), (a, b, c[:4], c[:4]), wide[:, :D].split([16, 16]), (a, whole.clone()[16:])):
        made = sibling_linear.joined(*parts)
        assert torch.equal(made, torch.cat(parts)) and made.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()
    mapped = torch.vmap(lambda w: sibling_linear.joined(w[:2], w[2:]))(torch.stack([a, a + 1]))
    assert torch.equal(mapped, torch.stack([a, a + 1]))


def test_weights_of_queries_keys_and_values_get_one_product(monkeypatch):
    """Also if they wait; but one product each if they are added to accumulators, or their pendings were copied separately."""
    ran, product = [], fused.qkv.linear_wgrad
    monkeypatch.setattr(fused.qkv, "linear_wgrad", lambda dy, *given: ran.append(dy.shape[-1]) or product(dy, *given))
    cfg = side_by_side("q k v")
    needs = Needs(x=["main"])
    with backend("triton"):
        for flags, count in (((), 1), ((False, True), 1), ((True, True), 1), ((False, False, True), 0)):
            beside(cfg, torch.float32, needs, *flags)
            assert ran == [16] * count
            ran.clear()
        params, x = parallel.init(cfg, key=random.key(0)), WithExtras(torch.randn(5, D), {"positions": torch.arange(5)})
        y, kept = parallel.fwd(params, x, cfg)
        _, pending = parallel.dgrad(kept, y, cfg)
        want = parallel.wgrad(pending, cfg)
        for name in ("b0", "b1", "b2"):
            own = pending[name]["proj"]
            pending[name]["proj"] = replace(own, dy=own.dy.clone())
        assert_close(parallel.wgrad(pending, cfg), want, dtype=torch.float32, length=5)
    assert ran == [16]


@pytest.mark.parametrize("frozen", ["linear_b_0", "linear_2"])
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_a_frozen_branch_gets_no_gradient_and_keeps_nothing(monkeypatch, name, frozen):
    monkeypatch.setattr(rules, "FEW", 0)
    names = ["linear_b_0.weight", "linear_b_0.bias", "linear_2.weight"]
    asked = [f"{branch}.{n}" for branch in ("b0", "b1") for n in names if not n.startswith(frozen)]
    with backend(name):
        _, dparams, dx, kept = beside(side_by_side("mlp mlp"), torch.float32, Needs(params=asked))
        _, want, _, want_kept = beside(side_by_side("mlp mlp", fuse=False), torch.float32, Needs(params=asked))
    assert [t is None for t in leaves(dparams)] == [t is None for t in leaves(want)] and dx is not None
    assert {path for path, t in paths(dparams).items() if t is not None} == set(asked)
    assert kept == want_kept


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_siblings_refuse_as_the_ops_alone(monkeypatch, name):
    monkeypatch.setattr(rules, "FEW", 0)
    cfg = side_by_side("linear_b heads linear")

    def x(d):
        return d.randn(5, D)

    with backend(name):
        LAWS["loud"](Case(op=parallel, cfg=cfg, x=x, reference=None, name="siblings"), torch.float32)


def test_queries_keys_and_values_refuse_as_the_ops_alone():
    def x(d):
        return WithExtras(d.randn(5, D), {"positions": torch.arange(5)})

    with backend("triton"):
        LAWS["loud"](Case(op=parallel, cfg=side_by_side("q k v"), x=x, reference=None, name="q, k and v"), torch.float32)


NARROW = QLinearConfig(16, 16, Fp8Block())
FITTING = {  # a layer, the shape of an accumulator of its weight, and whether it can take the gradient
    "linear": (linear, LinearConfig(16, 16), (16, 16), True),
    "linear, another width": (linear, LinearConfig(16, 16), (16, 17), False),
    "qlinear": (qlinear, NARROW, (16, 16), True),
    "qlinear, another width": (qlinear, NARROW, (16, 17), False),
}


@pytest.mark.parametrize("name", FITTING)
def test_siblings_leave_accumulators_that_do_not_fit_to_the_ops(name):
    op, cfg, shape, fits = FITTING[name]
    x = torch.ones(2, 16)
    y, residuals = op.fwd(op.init(cfg, key=random.key(0), dtype=torch.float32), x, cfg)
    pending, into = op.dgrad(residuals, y, cfg)[1], LinearParams(torch.zeros(shape), torch.zeros(16))
    assert siblings.takes(SimpleNamespace(op=op, cfg=cfg), pending, pending.x, into) is fits
    assert not siblings.takes(SimpleNamespace(op=op, cfg=cfg), pending, pending.x, {"weight": into.weight})
