"""Fusion plans: which steps become which kernel, which nearly do, and that results stay the same."""

import dataclasses
import itertools

import pytest
import torch
from fusion_cases import MAKERS, PAIRED, D, made
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from funcops import (
    ActivationConfig,
    AddConfig,
    ChainConfig,
    DropoutConfig,
    LinearConfig,
    Needs,
    RepeatConfig,
    SkipConfig,
    Step,
    WithExtras,
    activation,
    add,
    chain,
    donate,
    dropout,
    explain,
    fused,
    linear,
    plan,
    random,
    register_fusion,
    rms_norm,
    scale,
    skip,
    unregister_fusion,
    with_policy,
)
from funcops.engine.backend import backend
from funcops.engine.program import rules
from funcops.engine.program.rules import FORWARD, Rule
from funcops.engine.trees import leaves, paths, replace, tensors, tree_map
from funcops.models.blocks import gpt2_block_config, mlp_config
from funcops.testing import LAWS, Case
from funcops.testing.laws import float_like
from funcops.testing.tolerances import assert_close

pytest.importorskip("triton")


def halves(words, needs=Needs.ALL, dtype=torch.bfloat16, device="cuda", **options):
    """The fused pieces of each half, as words joined by plus signs."""
    found = plan(made(words, **options), needs, device, dtype)
    return [" ".join("+".join(path.rpartition("_")[0] for path in line.paths) for line in half if line.rule) for half in found[:2]]


TABLE = [
    ("linear", "", ""),
    ("linear gelu", "linear+gelu", ""),
    ("linear_b gelu", "linear_b+gelu", "linear_b+gelu"),
    ("linear bias", "linear+bias", ""),
    ("linear bias silu", "linear+bias+silu", "bias+silu"),
    ("linear bias gelu add", "linear+bias+gelu+add", "bias+gelu"),
    ("linear_b bias", "", ""),
    ("linear add", "linear+add", ""),
    ("linear_b add", "linear_b+add", ""),
    ("linear scale", "linear+scale", ""),
    ("linear_b scale", "", ""),
    ("linear scale add", "linear+scale+add", ""),
    ("linear scale gelu add", "linear+scale+gelu+add", ""),
    ("linear gelu scale", "linear+gelu", ""),
    ("linear add gelu", "linear+add", ""),
    ("linear rms", "", ""),
    ("linear fork gelu", "", ""),
    ("gelu linear", "", "gelu+linear"),
    ("scale linear_b", "", "scale+linear_b"),
    ("bias linear", "", ""),
    ("bias gelu", "", "bias+gelu"),
    ("bias gelu linear", "", "bias+gelu"),
    ("rms linear gelu linear", "linear+gelu", "gelu+linear"),
    ("gelu linear add", "linear+add", "gelu+linear"),
    ("linear gelu linear_b silu", "linear+gelu linear_b+silu", "gelu+linear_b+silu"),
    ("linear_b drop", "", "linear_b+drop"),
    ("linear drop", "", ""),
    ("linear_b drop_off", "", ""),
    ("linear_b gelu linear_b drop add", "linear_b+gelu drop+add", "linear_b+gelu+linear_b+drop"),
    ("linear_b drop linear silu linear_b", "linear+silu", "linear_b+drop+linear+silu+linear_b"),
    ("drop add", "drop+add", ""),
    ("bias drop add", "bias+drop+add", ""),
    ("linear bias drop add", "linear+bias drop+add", ""),
    ("linear drop add", "drop+add", ""),
    ("drop_0 add", "", ""),
    ("drop_off add", "", ""),
    ("drop gelu add", "", ""),
    ("add fork rms", "add+fork+rms", "add+fork+rms"),
    ("add fork ln linear", "add+fork+ln linear+end", "add+fork+ln"),
    ("drop add fork ln", "drop+add+fork+ln", "add+fork+ln"),
    ("linear_b drop add fork rms linear", "drop+add+fork+rms linear+end", "linear_b+drop add+fork+rms"),
    ("linear bias drop add fork ln_plain", "linear+bias drop+add+fork+ln_plain", "add+fork+ln_plain"),
    ("drop_off add fork rms", "add+fork+rms", "add+fork+rms"),
    ("add rms", "", ""),
    ("fork rms", "", "fork+rms"),
    ("fork ln linear", "linear+end", "fork+ln"),
    ("fork linear_b", "linear_b+end", "fork+linear_b"),
    ("fork bias linear", "linear+end", ""),
    ("add fork gelu rms", "", ""),
    ("linear add fork rms", "add+fork+rms", "add+fork+rms"),
    (
        "linear gelu add fork ln linear_b silu linear",
        "linear+gelu+add linear_b+silu linear+end",
        "add+fork+ln linear_b+silu+linear",
    ),
]


@pytest.mark.parametrize(("words", "forward", "backward"), TABLE, ids=[row[0] for row in TABLE])
def test_plans_are_as_written_down(words, forward, backward):
    assert halves(words) == [forward, backward]
    assert halves(words, dtype=torch.float64) == ["", ""]
    assert halves(words, device="cpu") == ["", ""]
    assert halves(words, fuse=False) == ["", ""]


def test_needs_that_forbid_a_fusion():
    first = Needs(x=False)
    assert halves("gelu linear gelu linear", needs=first) == ["linear+gelu", "gelu+linear"]
    assert halves("gelu linear", needs=first) == ["", ""]
    assert "no gradient is asked of its input" in str(plan(made("gelu linear"), first))
    assert halves("linear gelu", needs=Needs.NONE) == ["linear+gelu", ""]
    assert halves("bias gelu", needs=Needs.NONE) == ["bias+gelu", ""]
    assert "not bias + activation at bias_0 (forward): the activation keeps the sum" in str(explain(made("bias gelu")))
    assert halves("bias gelu", needs=first) == ["", "bias+gelu"]
    frozen = Needs(params=["linear_1.weight"])
    assert halves("gelu linear gelu linear", needs=frozen) == ["linear+gelu", "gelu+linear gelu+linear"]


@pytest.mark.parametrize(
    ("words", "dtype", "reason"),
    [
        ("linear_b scale", torch.float32, "not linear + epilogue at linear_b_0 (forward): the linear's bias is scaled too"),
        ("linear gelu", torch.float64, "not linear + epilogue at linear_0 (forward): float64 runs on torch"),
        ("drop_off add", torch.float32, "not dropout + add at drop_off_0 (forward): nothing is drawn"),
    ],
)
def test_near_misses_say_why(words, dtype, reason):
    assert reason in str(explain(made(words), dtype=dtype))


@pytest.mark.parametrize("wrong", [{"needs": {}}, {"device_type": 3}, {"device_type": "no such"}, {"dtype": torch.int64}], ids=str)
@pytest.mark.parametrize("asked", [explain, plan])
def test_an_error_names_the_function_that_was_called(asked, wrong):
    (name,) = wrong
    with pytest.raises((TypeError, ValueError), match=f"^{asked.__name__}: {'device' if name == 'device_type' else name}"):
        asked(made("bias gelu"), **wrong)


def test_explain_shows_inner_chains_as_one_program():
    text = str(explain(gpt2_block_config(64, 4, 96, 0.1)))
    assert "forward   mlp.up + mlp.act: linear + epilogue" in text
    assert "backward  mlp.up + mlp.act + mlp.down + mlp.drop: bias gradients, recomputed, saves 3 passes and 3 launches" in text
    assert "backward  attn.add + mlp.fork + mlp.norm: add + norm, recomputed, saves 3 passes and 2 launches" in text


@pytest.mark.parametrize("words", ["bias gelu", "gelu linear gelu linear"])
@pytest.mark.parametrize("needs", [Needs.ALL, Needs(x=False), Needs(params=False), Needs.NONE], ids=str)
def test_the_body_of_a_repeat_is_shown_for_all_gradients_or_for_none(words, needs):
    body = made(words)
    shown = explain(RepeatConfig(chain, body, times=2), needs).plans["*"]
    assert str(shown) == str(plan(body, needs and Needs.ALL))


@pytest.mark.parametrize("asked", [["main"], ["main", "extras.given"], True], ids=str)
def test_bias_gradients_are_fused_whether_or_not_what_is_added_gets_one(asked):
    """Nor does the key of a dropout."""
    layer = LinearConfig(64, 64)
    steps = [Step("up", linear, layer), Step("more", add, AddConfig(), takes=("given",))]
    steps += [Step("act", activation, ActivationConfig("gelu")), Step("down", linear, layer)]
    steps += [Step("drop", dropout, DropoutConfig(0.1), takes=("key",)), Step("out", linear, layer)]
    cfg = ChainConfig(steps=tuple(steps), extras=("given", "key"))
    text = str(explain(cfg, needs=Needs(x=asked), device_type="cuda"))
    assert "backward  up + more + act + down + drop: bias gradients, recomputed, saves 4 passes and 4 launches" in text


def test_explain_shows_the_rows_of_both_ways():
    """With the calls one by one, in case the rule declines; each local is released after its last reader."""
    shown = explain(made("bias gelu"), rows=True)
    text = str(shown)
    assert "    choice(out0)\n      if:" in text and "release(G0)" in text and "rows of the backward" in text
    assert "rows of the" not in str(explain(made("bias gelu")))

    def left(rows, known=()):
        """The locals after these rows; none is read before it is written or after it is released."""
        known = set(known)
        for row in rows:
            own = {name for name in row.reads if name[-1].isdigit()}
            assert own <= known, row
            ends = [left(block, known) for block in (row.then, row.otherwise) if block]
            known = (set.intersection(*ends) if ends else known) | set(row.writes)
            known -= own if row.kind == "release" else set()
        return known

    for rows in (*explain(gpt2_block_config(64, 4, 96, 0.1), rows=True).rows[""].values(), *shown.rows[""].values()):
        assert rows[-1].kind.startswith("return") and left(rows)


def run(cfg, dtype, needs=Needs.ALL, donated=False, split=False, op=chain):
    params = chain.init(cfg, key=random.key(0), dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    for t in tensors(params):
        t.copy_(torch.randn(t.shape, generator=generator) * 0.5)
    x, other = (torch.randn(5, D, generator=generator).to(dtype) for _ in range(2))
    extras = {"given": other, "key": random.key(7)}
    whole = WithExtras(x, {n: extras[n] for n in cfg.extras}) if cfg.extras else x
    y, kept = op.fwd(params, whole, cfg, needs=needs)
    if kept is None:
        return y, None, None, None
    names = sorted(paths(kept))
    dy = float_like(y, 3)
    if split:
        dx, pending = op.dgrad(kept, dy, cfg)
        return y, op.wgrad(pending, cfg), dx, names
    dparams, dx = op.bwd(donate(kept) if donated else kept, dy, cfg)
    return y, dparams, dx, names


ON_CPU = [
    ("wide glu linear", "glu"),
    ("wide glu linear_b gelu", "glu"),
    ("wide glu_clamped linear", ""),
    ("wide glu gelu", ""),
    ("wide glu fork linear", ""),
    ("gelu linear", ""),
]


@pytest.mark.parametrize(("words", "backward"), ON_CPU, ids=[row[0] for row in ON_CPU])
def test_plans_on_the_cpu(words, backward):
    assert halves(words, device="cpu", dtype=torch.float32) == ["", backward]
    assert halves(words, device="cpu", recompute=False) == ["", ""]
    assert halves(words, device="cpu", fuse=False) == ["", ""]
    assert halves(words, device="cpu", needs=Needs(params=False)) == ["", ""]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_fusion_on_the_cpu_gives_the_same_bits(monkeypatch, dtype):
    ran = []
    kernel = fused.recomputed_glu.glu_bwd_recompute
    monkeypatch.setattr(fused.recomputed_glu, "glu_bwd_recompute", lambda *args: ran.append(1) or kernel(*args))
    cfg = made("rms wide glu linear_b wide glu linear")
    want = run(dataclasses.replace(cfg, fuse=False), dtype)
    assert not ran
    monkeypatch.setattr(rules, "FEW", 0)
    for donated in (False, True):
        got = run(cfg, dtype, donated=donated)
        assert got[3] == want[3]
        assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(leaves(got[:3]), leaves(want[:3]), strict=True))
    assert len(ran) == 4
    assert len(leaves(run(cfg, dtype, split=True))) and len(ran) == 4, "halves run step by step"


@pytest.mark.turns("name", "dtype", every=2)
@pytest.mark.parametrize(
    ("name", "dtype"), [("torch", torch.float64), *itertools.product(("torch", "triton"), (torch.float32, torch.bfloat16))], ids=str
)
@pytest.mark.parametrize(
    ("needs", "times"), [(Needs.ALL, 2), (Needs(x=False), 2), (Needs(params=("linear_6.weight",)), 1), (Needs(params=False), 0)]
)
def test_a_recomputed_pair_has_the_same_bits(monkeypatch, needs, times, dtype, name):
    """One kernel writes over dy what two kernels compute."""
    ran, kernel = [], fused.recomputed_glu.glu_pair_bwd_recompute
    monkeypatch.setattr(fused.recomputed_glu, "glu_pair_bwd_recompute", lambda *args: ran.append(1) or kernel(*args))
    monkeypatch.setattr(rules, "FEW", 0)
    cfg = made("rms twin paired linear_b twin paired linear", PAIRED)
    with backend(name):
        found = [run(cfg, dtype, needs, donated) for donated in (False, True)]
        assert len(ran) == 2 * times
        unregister_fusion(fused.recomputed_glu.rule)
        try:
            want = run(cfg, dtype, needs)
        finally:
            register_fusion(fused.recomputed_glu.rule)
    assert len(ran) == 2 * times
    for got in found:
        assert got[3] == want[3]
        assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(leaves(got[:3]), leaves(want[:3]), strict=True))


def compare(words, dtype, needs=Needs.ALL, **options):
    cfg = made(words, **options)
    want = run(dataclasses.replace(cfg, fuse=False), dtype, needs)
    with backend("triton"):
        got = run(cfg, dtype, needs)
        halves_of = run(cfg, dtype, needs, split=True)
        given_away = run(cfg, dtype, needs, donated=True)
    assert got[3] == want[3], "a fusion keeps what the steps keep"
    # each unfused step rounds where a fused one does not: as many roundings as steps
    for g, w in zip(got[:3], want[:3], strict=True):
        assert_close(g, w, dtype=dtype, length=64 * len(cfg.steps) ** 2)
    for a in (halves_of, given_away):
        assert all((s is None and t is None) or torch.equal(s, t) for s, t in zip(leaves(a[:3]), leaves(got[:3]), strict=True))


@pytest.mark.turns("words", every=2)
@pytest.mark.parametrize("words", [pytest.param(row[0], marks=pytest.mark.slow if i % 2 else ()) for i, row in enumerate(TABLE)])
def test_fused_is_unfused(words):
    compare(words, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "words",
    [
        "linear bias gelu add",
        "gelu linear_b",
        "bias drop add",
        "bias silu",
        "add fork ln linear",
        "add fork rms",
        "drop add fork ln",
    ],
)
def test_fused_is_unfused_in_16_bits(words, dtype):
    compare(words, dtype)


def test_the_fused_kernels_run(monkeypatch):
    ran = []
    with backend("triton"):  # an implementation is imported when it is first called
        run(made("add fork ln"), torch.float32)

    def counted(module, name):
        kernel = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: ran.append(name) or kernel(*args))

    counted(fused.linear_epilogue, "fused_linear_fwd")
    counted(fused.dropout_add, "dropout_add")
    counted(fused.linear_dgrad, "fused_linear_dgrad")
    counted(fused.add_norm.kernels, "add_layer_norm_fwd")
    counted(fused.add_norm.kernels, "add_layer_norm_bwd")
    counted(fused.add_norm.kernels, "dropout_add_layer_norm_fwd")
    with backend("triton"):
        run(made("linear gelu linear drop add fork ln", recompute=False), torch.float32)
    assert ran == ["fused_linear_fwd", "dropout_add_layer_norm_fwd", "add_layer_norm_bwd", "fused_linear_dgrad"]
    ran.clear()
    with backend("triton"):
        run(made("linear_b drop add gelu"), torch.float32)
    assert ran == ["dropout_add"]
    ran.clear()
    with backend("triton"):
        run(made("add fork ln gelu linear", recompute=("ln_2",)), torch.float32)
    assert ran == ["add_layer_norm_fwd", "fused_linear_fwd", "fused_linear_dgrad", "add_layer_norm_bwd"]
    ran.clear()
    run(made("add fork ln gelu linear"), torch.float32)
    assert ran == []


SKIPS = {
    "llama mlp": SkipConfig(chain, mlp_config(D, 4)),
    "gpt-2 block": SkipConfig(chain, gpt2_block_config(D, 1, 4, 0.3)),
    "one linear": SkipConfig(chain, made("linear_b")),
    "frozen": SkipConfig(chain, dataclasses.replace(mlp_config(D, 4), fuse=False)),
}


@pytest.mark.turns("needs", "name", every=2)
@pytest.mark.parametrize("needs", [Needs.ALL, Needs(x=False), Needs(params=False)], ids=str)
@pytest.mark.parametrize("name", SKIPS)
def test_a_skip_is_planned_with_its_body(name, needs):
    cfg = SKIPS[name]
    fused = [line for half in plan(cfg, needs)[:2] for line in half if line.rule]
    assert bool(fused) == (name != "frozen")
    params = skip.init(cfg, key=random.key(0))
    data, dy = torch.randn(2, 3, D), torch.randn(2, 3, D)
    x = WithExtras(data, {"key": random.key(1)}) if cfg.extras else data
    found = []
    for implementation in ("torch", "triton"):
        with backend(implementation):
            y, kept = skip.fwd(params, x, cfg, needs=needs)
            names = sorted(paths(kept))
            whole = skip.bwd(kept, dy, cfg)
            dx, pending = skip.dgrad(kept, dy, cfg)
            halves_of = skip.wgrad(pending, cfg), dx
            into = tree_map(lambda g: None if g is None else torch.ones_like(g), whole[0])
            total, _ = skip.bwd(donate(kept), dy, cfg, into=into)
        assert total is into
        assert all((s is None and t is None) or torch.equal(s, t) for s, t in zip(leaves(whole), leaves(halves_of), strict=True))
        found.append((y, whole, total, names))
    assert_close(found[1][:3], found[0][:3], dtype=torch.float32, length=4096)
    assert found[0][3] == found[1][3], "residuals are the body's own"


def test_the_plan_of_a_skip():
    text = str(explain(SKIPS["llama mlp"], Needs.ALL))
    assert "forward   down + add: linear + epilogue" in text
    assert "backward  fork + norm: fork + norm, recomputed, saves 3 passes and 2 launches" in text


def chains():
    words = [word for word in MAKERS if word not in ("wide", "glu", "glu_clamped")] + ["wide glu", "wide glu_clamped"]
    return st.lists(st.sampled_from(words), min_size=1, max_size=7).map(" ".join)


@pytest.mark.slow
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(chains(), st.data())
def test_drawn_chains_under_drawn_masks(words, data):
    cfg = made(words)
    every = [path for path, t in paths(chain.init(cfg, device="meta")).items() if t is not None]
    params = data.draw(st.one_of(st.booleans(), st.lists(st.sampled_from(every), unique=True) if every else st.just(False)))
    x = data.draw(st.one_of(st.booleans(), st.just(["main"]) if cfg.extras else st.just(True)))
    if x is True and cfg.extras:
        x = ["main", *(f"extras.{n}" for n in cfg.extras if n != "key")]
    compare(words, torch.float32, Needs(x=x, params=params))


def test_a_policy_and_a_plan_do_not_know_of_each_other():
    cfg = made("rms linear gelu linear_b add")
    want = run(dataclasses.replace(cfg, fuse=False), torch.float32)
    for policy in ("save_all", "recompute_norms", "minimal"):
        with backend("triton"):
            got = run(cfg, torch.float32, op=with_policy(chain, policy))
        assert_close(got[:3], want[:3], dtype=torch.float32, length=1024)


def test_a_mismatch_raises_as_in_the_steps():
    cfg = made("linear add")
    params = chain.init(cfg, key=random.key(0))
    bad = WithExtras(torch.randn(5, D), {"given": torch.randn(4, D)})
    with backend("triton"), pytest.raises(ValueError, match=r"add_fwd: x.1 must be \[5, 6\]"):
        chain.fwd(params, bad, cfg)


LOUD = [
    "linear_b gelu",
    "linear add",
    "linear bias silu add",
    "linear scale",
    "bias drop add",
    "add fork ln",
    "drop add fork rms",
    "linear_b gelu linear",
    "linear scale linear",
    "bias gelu",
    "fork ln",
    "fork linear_b",
]


@pytest.mark.parametrize("words", LOUD)
def test_every_bad_call_raises_by_name_where_steps_are_fused(words):
    cfg = made(words)

    def x(d):
        extras = {"given": d.randn(5, D), "key": d.key()}
        return WithExtras(d.randn(5, D), {n: extras[n] for n in cfg.extras}) if cfg.extras else d.randn(5, D)

    with backend("triton"):
        LAWS["loud"](Case(op=chain, cfg=cfg, x=x, reference=None, name=words), torch.float32)


@pytest.mark.parametrize("words", ["linear_b gelu", "linear add"])
def test_a_bias_that_should_not_be_or_is_missing_is_refused(words):
    cfg = made(words)
    params, x = chain.init(cfg, key=random.key(0)), torch.randn(5, D)
    name = cfg.steps[0].name
    bias_now = None if cfg.steps[0].cfg.bias else torch.ones(D)
    wrong = {**params, name: replace(params[name], bias=bias_now)}
    given_x = WithExtras(x, {"given": x}) if cfg.extras else x
    with backend("triton"), pytest.raises((ValueError, TypeError), match="linear_fwd: params.bias must be"):
        chain.fwd(wrong, given_x, cfg)


@pytest.mark.parametrize("words", ["gelu linear", "bias gelu", "fork ln", "add fork rms"])
def test_edited_residuals_are_checked_where_dgrads_are_fused(words):
    cfg = made(words)
    params, x, dy = chain.init(cfg, key=random.key(0)), torch.randn(5, D), torch.randn(5, D)
    given_x = WithExtras(x, {"given": x}) if cfg.extras else x
    with backend("triton"):
        _, kept = chain.fwd(params, given_x, cfg)
        holder = next(s.name for s in cfg.steps if getattr(kept[s.name], "x", None) is not None)
        kept[holder] = replace(kept[holder], x=torch.randn(4, D))
        with pytest.raises(ValueError, match=r"residuals\.x must be float32\[5, 6\], as the forward kept it, got float32\[4, 6\]"):
            chain.bwd(kept, dy, cfg)
        kept[holder] = 3.0
        with pytest.raises(TypeError, match="must be"):
            chain.bwd(kept, dy, cfg)


def test_users_add_rules():
    ran = []

    def match(window):
        return 2 if [call.op for call in window.calls[:2]] == [scale, scale] else None

    def run_both(calls, params, main, values):
        ran.append([call.path for call in calls])
        return NotImplemented

    rule = register_fusion(Rule("scale + scale", FORWARD, match, run_both))
    try:
        assert halves("scale scale scale") == ["scale+scale", ""]
        with pytest.raises(ValueError, match="register_fusion: rule must be of a new name, got 'scale . scale'"):
            register_fusion(rule)
        compare("scale scale gelu", torch.float32)
        assert ran and ran[0] == ["scale_0", "scale_1"]
    finally:
        unregister_fusion(rule)
    with pytest.raises(ValueError, match="unregister_fusion: rule must be one that is registered, got 'scale . scale'"):
        unregister_fusion(rule)
    assert halves("scale scale scale") == ["", ""]
    with pytest.raises(TypeError, match="register_fusion: rule must be"):
        register_fusion("scale")
    with pytest.raises(ValueError, match="Rule: phase must be one of forward, backward"):
        Rule("a", "sideways", match, run_both)
    with pytest.raises(ValueError, match="Rule: whole must be True with settle, .* got False"):
        Rule("a", "backward", match, run_both, settle=run_both)


@pytest.mark.parametrize("library", [True, False])
def test_a_reader_by_the_library_saves_nothing(library, monkeypatch):
    """If the library would do a product's sum as a call of its own, the fork's gradient is written as without the rule."""
    from types import SimpleNamespace

    from funcops.library.fused import fork

    monkeypatch.setattr(fork, "by_library", lambda *_: library)
    for reader, none in ((linear, library), (rms_norm, False)):
        calls = SimpleNamespace(op=None), SimpleNamespace(op=reader, cfg=SimpleNamespace(weight_shape=(8, 8)))
        saved = fork._saves(SimpleNamespace(calls=calls, dtype=torch.float32))
        assert (saved == fork.Saving()) == none, (reader.name, saved)
