"""Experts as a chain of steps: the laws, and the numbers, bytes and params of the `experts` op."""

import dataclasses
import re

import pytest
import torch
from cases import experts as of_experts

from funcops import (
    ExpertsConfig,
    LinearConfig,
    Needs,
    RouteConfig,
    WithExtras,
    chain,
    donate,
    experts,
    explain,
    fused,
    random,
    with_policy,
)
from funcops.checkpoint import load, save
from funcops.engine.backend import backend
from funcops.engine.residuals.report import report
from funcops.engine.trees import paths, replace, tree_map_tensors
from funcops.graphs import check_capturable
from funcops.library.ops.experts import ExpertsParams
from funcops.models import MoEConfig, moe, plain_experts
from funcops.testing import LAWS, Case
from funcops.testing.checks import same_bits
from funcops.testing.tolerances import assert_close


def as_experts(tree):
    return ExpertsParams(tree["up"], tree["down"])


def by_steps(params, cfg=of_experts.CASES[0].cfg):
    return {step.name: getattr(params, step.name, None) for step in plain_experts(cfg).steps}


def as_chain(given):
    weights, tokens, indices = given
    return WithExtras(weights, {"tokens": tokens, "indices": indices})


def steps_of(one):
    """The op's case as a case of its chain."""

    def reference(params, x, cfg):
        given = x.main, x.extras["tokens"], x.extras["indices"]
        return of_experts.reference(as_experts(params), given, one.cfg)

    return Case(op=chain, cfg=plain_experts(one.cfg), x=lambda d: as_chain(one.x(d)), reference=reference, name=one.name)


BIASED = next(one for one in of_experts.CASES if one.cfg.bias and one.cfg.kind == "clamped_swiglu")  # with dropped choices
BEFORE = next(one for one in of_experts.CASES if one.cfg.weights_on == "input")
EMPTY = next(one for one in of_experts.CASES if "experts-(0,)" in one.name)
FIRST_TIER = [(law, of_experts.CASES[0]) for law in ("split", "right", "frugal")] + [
    ("right", BIASED),
    ("right", BEFORE),
    ("split", EMPTY),
]


def rows_of_laws():
    """Every case under the laws in float64; the first case in bfloat16 and compiled, too."""
    for one in of_experts.CASES:
        for law in LAWS:
            slow = () if (law, one) in FIRST_TIER else pytest.mark.slow
            if one is of_experts.CASES[0] or law not in ("compiles", "traceable"):
                yield pytest.param(law, one, torch.float64, marks=slow)
            if one is of_experts.CASES[0] and law != "compiles":
                yield pytest.param(law, one, torch.bfloat16, marks=pytest.mark.slow)


@pytest.mark.parametrize(("law", "one", "dtype"), list(rows_of_laws()), ids=str)
def test_laws_of_the_chain(law, one, dtype):
    LAWS[law](steps_of(one), dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_chain_returns_and_keeps_what_the_op_does(dtype):
    for one in (of_experts.CASES[0], BIASED, BEFORE, EMPTY):
        params, given = one.make(dtype)
        cfg, apart = plain_experts(one.cfg), by_steps(params, one.cfg)
        y, kept = experts.fwd(params, given, one.cfg)
        found, kept_apart = chain.fwd(apart, as_chain(given), cfg)
        dparams, (d_weights, dx, _) = experts.bwd(kept, y, one.cfg)
        dparts, d_given = chain.bwd(kept_apart, y, cfg)
        got = found, as_experts(dparts), d_given.main, d_given.extras["tokens"]
        assert_close(got, (y, dparams, d_weights, dx), dtype=dtype, length=64)
        own = [report(r, p, x).kept_bytes for r, p, x in ((kept, params, given), (kept_apart, apart, as_chain(given)))]
        assert own[0] == own[1]


def test_params_have_the_paths_of_the_ops():
    cfg = ExpertsConfig(3, 4, 2, bias=True)
    shapes = [
        {path: t.shape for path, t in paths(op.init(of, key=random.key(0))).items() if t is not None}
        for op, of in ((experts, cfg), (chain, plain_experts(cfg)))
    ]
    assert shapes[0] == shapes[1]
    with pytest.raises(TypeError, match="plain_experts: cfg must be ExpertsConfig, got 3"):
        plain_experts(3)
    with pytest.raises(TypeError, match="^plain_experts: cfg must be ExpertsConfig, got LinearConfig$"):
        plain_experts(LinearConfig(4, 4))


ALIKE = {
    "all": (Needs.ALL, Needs.ALL),
    "frozen experts": (Needs(params=False), Needs(params=False)),
    "some": (Needs(x=["1"], params=["up.weight", "down.bias"]), Needs(x=["extras.tokens"], params=["up.weight", "down.bias"])),
    "weights": (Needs(x=["0"], params=["down.weight"]), Needs(x=["main"], params=["down.weight"])),
}


@pytest.fixture
def ran(monkeypatch):
    """The names of the op's own functions that the rule called."""
    found = []
    for name in ("products", "experts_dgrad"):
        own = getattr(fused.experts, name)
        monkeypatch.setattr(fused.experts, name, lambda *args, own=own, name=name: found.append(name) or own(*args))
    return found


@pytest.mark.turns("name")
@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=str)
@pytest.mark.parametrize("one", [of_experts.CASES[0], BIASED, EMPTY], ids=str)
def test_fused_the_chain_is_the_op_to_the_bit(ran, one, dtype, name):
    params, given = one.make(dtype)
    needs, masks = ALIKE[name]
    cfg, apart, x = plain_experts(one.cfg), by_steps(params), as_chain(given)
    with backend("triton"):
        y, kept = experts.fwd(params, given, one.cfg, needs=needs)
        dy = torch.randn_like(y)
        dparams, (d_weights, dx, _) = experts.bwd(kept, dy, one.cfg)
        found, of_steps = chain.fwd(apart, x, cfg, needs=masks)
        d_given, pending = chain.dgrad(of_steps, dy, cfg)
        halves = chain.wgrad(pending, cfg), d_given
        whole = chain.bwd(of_steps, dy, cfg)
        given_away = chain.bwd(donate(of_steps), dy, cfg)
    assert ran == ["products"] + ["experts_dgrad"] * 3
    _, unfused = chain.fwd(apart, x, dataclasses.replace(cfg, fuse=False), needs=masks)
    assert sorted(paths(unfused)) == sorted(paths(chain.fwd(apart, x, cfg, needs=masks)[1])), "a fusion keeps what the steps keep"
    for dparts, dx_of in (halves, whole, given_away):
        got = found, as_experts(dparts), dx_of.main, dx_of.extras["tokens"]
        same_bits(got, (y, dparams, d_weights, dx), name)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=str)
def test_fused_the_chain_with_weights_on_the_input_is_the_op(ran, dtype):
    """To the bit, but for dw of down in a narrow dtype: what down reads is recomputed from rows that the steps round."""
    params, given = BEFORE.make(dtype)
    cfg, apart, x = plain_experts(BEFORE.cfg), by_steps(params, BEFORE.cfg), as_chain(given)
    with backend("triton"):
        y, kept = experts.fwd(params, given, BEFORE.cfg)
        dy = torch.randn_like(y)
        dparams, (d_weights, dx, _) = experts.bwd(kept, dy, BEFORE.cfg)
        found, of_steps = chain.fwd(apart, x, cfg)
        d_given, pending = chain.dgrad(of_steps, dy, cfg)
        halves, (dparts, whole) = (chain.wgrad(pending, cfg), d_given), chain.bwd(of_steps, dy, cfg)
    assert ran == ["products"] + ["experts_dgrad"] * 2
    same_bits(halves, (dparts, whole), "the halves")
    same_bits((found, whole.main, whole.extras["tokens"], dparts["up"]), (y, d_weights, dx, dparams.up), "the op")
    assert_close(dparts["down"], dparams.down, dtype=dtype, length=64)
    _, unfused = chain.fwd(apart, x, dataclasses.replace(cfg, fuse=False))
    assert sorted(paths(unfused)) == sorted(paths(of_steps))
    own = [report(one, apart, x).kept_bytes for one in (of_steps, unfused)]
    assert own[0] == own[1] == report(kept, params, given).kept_bytes


def test_the_chain_with_weights_on_the_input_is_fused():
    cfg = plain_experts(BEFORE.cfg)
    line, text = "sort + up + weigh + act + down + combine: experts", str(explain(cfg))
    assert f"forward   {line}, saves 3 passes and 3 launches" in text
    assert f"backward  {line}, saves 7 passes and 6 launches" in text
    assert "not experts, recomputed at sort (backward): act reads rounded rows in the halves of the backward" in text
    kept = str(explain(dataclasses.replace(cfg, recompute=False)))
    assert "not experts at sort (forward): act keeps its input, which the kernel does not write" in kept
    change = {"up": {"bias": True}, "down": {"bias": True}}
    steps = [dataclasses.replace(step, cfg=dataclasses.replace(step.cfg, **change.get(step.name, {}))) for step in cfg.steps]
    biased = str(explain(dataclasses.replace(cfg, steps=tuple(steps))))
    assert "not experts at sort (forward): up has a bias, which experts with weights on the input lack" in biased


def test_a_fused_chain_keeps_the_fields_its_steps_need(ran):
    """Under every policy; accumulators get the same sums as from the op."""
    one = BIASED
    params, given = one.make(torch.float32)
    cfg, apart, x = plain_experts(one.cfg), by_steps(params), as_chain(given)
    sums = tree_map_tensors(torch.ones_like, params)
    with backend("triton"):
        y, kept = experts.fwd(params, given, one.cfg)
        dparams, _ = experts.bwd(kept, y, one.cfg, into=sums)
        for policy in ("save_all", "minimal", "compress_fp8"):
            op = with_policy(chain, policy)
            _, want = op.fwd(apart, x, dataclasses.replace(cfg, fuse=False))
            found, got = op.fwd(apart, x, cfg)
            same_bits(found, y, policy)
            names = [{path: t.shape for path, t in paths(r).items() if t is not None} for r in (got, want)]
            assert names[0] == names[1] and ("down.x" in names[0]) == (policy == "save_all")
            into = by_steps(tree_map_tensors(torch.ones_like, params))
            assert op.bwd(got, y, cfg, into=into)[0] is into
            if policy != "compress_fp8":
                same_bits(as_experts(into), dparams, policy)
    assert ran.count("products") == 3 and ran.count("experts_dgrad") == 2, "what is packed the steps unpack"


def changed(extras=("tokens", "indices"), **by_step):
    """The chain with changed fields of a step or of its config."""
    cfg = plain_experts(ExpertsConfig(3, 4, 2, bias=True))
    steps = []
    for step in cfg.steps:
        own = by_step.get(step.name, {})
        inner = dataclasses.replace(step.cfg, **{k: v for k, v in own.items() if k not in ("takes", "gives")})
        steps.append(dataclasses.replace(step, cfg=inner, **{k: v for k, v in own.items() if k in ("takes", "gives")}))
    return dataclasses.replace(cfg, steps=tuple(steps), extras=extras)


NEAR = {
    "up.bias": (changed(up={"bias": False}), "experts at sort (forward): down is not as plain_experts makes it"),
    "gate": (changed(act={"gate": "second"}), "experts at sort (forward): act is not as plain_experts makes it"),
    "apart": (changed(down={"stacked": False}), "experts at sort (backward): down is not as plain_experts makes it"),
    "place": (
        changed(combine={"takes": ("other",)}, extras=("tokens", "indices", "other")),
        "experts at sort (forward): combine takes something else than plain_experts gives it",
    ),
}


@pytest.mark.parametrize("name", NEAR)
def test_a_near_miss_of_the_chain_gives_the_reason(name):
    cfg, reason = NEAR[name]
    text = str(explain(cfg))
    assert f"not {reason}" in text and "+" not in text.replace("recomputed GLU", "")


def test_the_chain_is_fused():
    cfg = changed()
    line = "sort + up + act + down + combine: experts"
    assert f"forward   {line}, saves 1 pass and 2 launches" in str(explain(cfg))
    assert f"backward  {line}, recomputed, saves 5 passes and 6 launches" in str(explain(cfg))
    assert "float64 runs on torch" in str(explain(cfg, dtype=torch.float64)) and line not in str(explain(cfg, dtype=torch.float64))
    assert line not in str(explain(cfg, device_type="cpu")) and line not in str(explain(dataclasses.replace(cfg, fuse=False)))
    nothing = Needs(x=False, params=["down.weight"])
    assert "not experts at sort (backward): no gradient is asked of its input" in str(explain(cfg, nothing))
    assert f"forward   {line}" in str(explain(cfg, nothing))


FUSED_LAWS = "split", "pure", "mirror", "guarded", "traceable", "compiles"


@pytest.mark.parametrize("law", ["loud", *(pytest.param(law, marks=pytest.mark.slow) for law in FUSED_LAWS)])
def test_laws_where_the_chain_is_fused(law):
    with backend("triton"):
        LAWS[law](steps_of(BIASED), torch.float32)


EDITED = {
    "act.x": torch.ones(3, 6),
    "act.order": torch.zeros(3, dtype=torch.int32),
    "act.scales": torch.ones(2, 2),
    "down.offsets": torch.zeros(3, dtype=torch.int32),
    "down.weight": torch.ones(4, 3, 3),
    "up.weight": torch.ones(4, 3, 3),
    "combine.place": torch.zeros(3, 2, dtype=torch.int32),
}


def test_edited_residuals_are_not_for_the_fused_kernels(ran):
    one = of_experts.CASES[0]
    params, given = one.make(torch.float32)
    cfg = plain_experts(one.cfg)
    with backend("triton"):
        y, kept = chain.fwd(by_steps(params), as_chain(given), cfg)

        def fits(**edited):
            nodes = [replace(kept[step.name], **edited.get(step.name, {})) for step in cfg.steps]
            return fused.experts._fits(one.cfg, nodes, y)

        assert fits() and not fused.experts._fits(one.cfg, [kept[step.name] for step in cfg.steps], y[:1])
        for path, value in EDITED.items():
            step, _, field = path.partition(".")
            assert not fits(**{step: {field: value}}), path
        kept["act"] = replace(kept["act"], x=EDITED["act.x"])
        with pytest.raises(ValueError, match=r"act: .*: residuals\.x must be"):
            chain.bwd(kept, y, cfg)
    assert ran == ["products"]


def in_steps(cfg):
    """The block with its experts as steps."""
    return cfg.with_parts(lambda name, op, c: (chain, plain_experts(c)) if op is experts else (op, c))


def test_a_block_in_steps_is_the_block(tmp_path):
    """Its outputs, gradients and checkpoints; bit for bit if fused."""
    cfg = moe(MoEConfig(route=RouteConfig(4, 2, aux=0.1, z=0.01), experts=ExpertsConfig(4, 6, 3)))
    steps = in_steps(cfg)
    params, x = chain.init(cfg, key=random.key(0), dtype=torch.float32), torch.randn(7, 6)
    save(params, tmp_path / "params")
    apart = load(tmp_path / "params", chain.init(steps, key=random.key(1), dtype=torch.float32))
    assert apart["experts"].keys() == {"sort", "up", "act", "down", "combine"}
    dy = WithExtras(torch.randn(7, 6), {"load": None, "loss": torch.ones(())})
    with backend("triton"):
        y, kept = chain.fwd(params, x, cfg)
        (dparams, dx), (found, kept_apart) = chain.bwd(kept, dy, cfg), chain.fwd(apart, x, steps)
        dparts, dx_apart = chain.bwd(kept_apart, dy, steps)
    same_bits((found, dx_apart), (y, dx), "fused")
    same_bits(as_experts(dparts.pop("experts")), dparams.pop("experts"), "fused")
    same_bits(dparts, dparams, "fused")
    assert report(kept, params, x).kept_bytes == report(kept_apart, apart, x).kept_bytes
    line = "experts.sort + experts.up + experts.act + experts.down + experts.combine: experts"
    assert str(explain(steps)).count(line) == 2


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_a_graph_holds_the_chain_whatever_the_routing(implementation):
    one = BIASED
    params, given = one.make(torch.float32)
    cfg, apart = plain_experts(one.cfg), by_steps(params)

    def step(params, x, dy):
        y, kept = chain.fwd(params, x, cfg)
        dx, pending = chain.dgrad(kept, dy, cfg)
        return y, dx.main, chain.wgrad(pending, cfg)

    with backend(implementation):
        assert check_capturable(step, apart, as_chain(given), torch.randn_like(given[1])) == []


@pytest.mark.parametrize("one", [of_experts.CASES[0], BIASED], ids=str)
def test_weights_that_others_read_too_have_both_gradients(ran, one):
    params, given = one.make(torch.float32)
    cfg = dataclasses.replace(plain_experts(one.cfg), outputs=("weights",))
    with backend("triton"):
        y, kept = chain.fwd(by_steps(params), as_chain(given), cfg)
        assert torch.equal(y.extras["weights"], given[0])
        _, alone = chain.bwd(kept, WithExtras(y.main, {"weights": None}), cfg)
        _, both = chain.bwd(kept, WithExtras(y.main, {"weights": given[0]}), cfg)
        assert ran == ["products"] + ["experts_dgrad"] * 2
        assert_close(both.main, alone.main + given[0], dtype=torch.float32)
        with pytest.raises(ValueError, match="dy.extras.weights must be"):
            chain.bwd(kept, WithExtras(y.main, {"weights": given[0][:1]}), cfg)


@pytest.mark.parametrize("mask", [["up.weight"], ["down.weight"], ["up.weight", "down.weight"]], ids=" ".join)
def test_accumulators_are_of_the_layers_that_are_trained(mask):
    case = of_experts.CASES[0]
    params, x = case.make(torch.float64)

    def step(into=None):
        y, kept = experts.fwd(params, x, case.cfg, needs=Needs(x=False, params=mask))
        return experts.bwd(kept, torch.ones_like(y), case.cfg, into=into)[0]

    alone = step()
    assert set(mask) == {path for path, t in paths(alone).items() if t is not None}
    same_bits(step(tree_map_tensors(torch.zeros_like, alone)), alone, "into zeros")


def test_a_token_may_choose_every_expert():
    """K in 1..E, against the reference; one more is refused."""
    cfg = of_experts.CASES[0].cfg
    params, tokens = experts.init(cfg, key=random.key(0), dtype=torch.float64), torch.randn(5, cfg.dim, dtype=torch.float64)
    for k in range(1, cfg.experts + 2):
        weights, indices = torch.rand(5, k, dtype=torch.float64), torch.arange(5 * k).view(5, k) % cfg.experts
        if k > cfg.experts:
            with pytest.raises(ValueError, match=rf"K in 1..{cfg.experts} \(the experts\), got \[5, {k}\]"):
                experts.fwd(params, (weights, tokens, indices), cfg)
        else:
            y = experts.fwd(params, (weights, tokens, indices), cfg)[0]
            torch.testing.assert_close(y, of_experts.reference(params, (weights, tokens, indices), cfg))


GIVEN = torch.ones(5, 1), torch.ones(5, 4), torch.zeros(5, 1, dtype=torch.int32)
WRONG = {  # parts of params, and of x, that the fused kernel would read
    "sort: permute_fwd: x.2 (indices) must be int32 or int64, got int16": ({}, (*GIVEN[:2], GIVEN[2].short())),
    "sort: permute_fwd: x.0 (weights) must be [5, 'K'], K at least 1, one row per token of x.1, got [4, 1]": (
        {},
        (GIVEN[0][:4], *GIVEN[1:]),
    ),
    "up: grouped_linear_fwd: params.weight must be [2, 6, 4], got [2, 6, 5]": ({"up": torch.ones(2, 6, 5)}, GIVEN),
    "up: grouped_linear_fwd: params.weight must be float32, got float64": ({"up": torch.ones(2, 6, 4).double()}, GIVEN),
}


@pytest.mark.parametrize("said", WRONG)
def test_fused_experts_refuse_as_the_steps_alone(said):
    """The kernel leaves a wrong call to the steps, one of which raises by its own name."""
    pytest.importorskip("triton")
    weights, given = WRONG[said]
    cfg = plain_experts(ExpertsConfig(2, 4, 3))
    params = chain.init(cfg, key=random.key(0))
    params |= {name: replace(params[name], weight=weight) for name, weight in weights.items()}
    for name in ("torch", "triton"):
        with backend(name), pytest.raises((ValueError, TypeError), match=f"^{re.escape(said)}"):
            chain.fwd(params, as_chain(given), cfg)
