"""The layers of a repeat: the sum that ends one runs with the norm that begins the next, and what starts before a layer's turn."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from launches import launches

from funcops import (
    ActivationConfig,
    ChainConfig,
    DropoutConfig,
    LinearConfig,
    Needs,
    Policy,
    Recompute,
    RepeatConfig,
    RopeConfig,
    Save,
    SkipConfig,
    Step,
    WithExtras,
    activation,
    chain,
    dist,
    donate,
    dropout,
    explain,
    linear,
    random,
    remat,
    repeat,
    report,
    rope_table,
    skip,
    trees,
    with_policy,
)
from funcops.engine.backend import backend
from funcops.engine.compose.layers import needs_of_layers
from funcops.engine.program.programs import forwards
from funcops.engine.program.turns import turns
from funcops.models.blocks import block_config, gpt2_block_config, mlp_config
from funcops.testing.tolerances import assert_close

D, T = 16, 2
LLAMA, GPT2 = block_config(D, 2, 24), gpt2_block_config(D, 2, 24, 0.0)


def like_x(body, x):
    """x with the extras of a body."""
    extras = {"positions": lambda: rope_table(torch.arange(T), RopeConfig(D // 2)), "key": lambda: random.key(3)}
    return WithExtras(x, {name: extras[name]() for name in body.extras}) if body.extras else x


@pytest.fixture
def apart(monkeypatch):
    """A function that runs another with each layer by itself."""

    def run(fn, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr("funcops.engine.compose.repeat.forwards", lambda *_: None)
            return fn(*arguments)

    return run


def step(cfg, needs, op=repeat, into=None, dtype=torch.float32, edit=None):
    """y, the residuals, dparams and dx."""
    params, g = trees.cast(repeat.init(cfg, key=random.key(0)), dtype), torch.Generator().manual_seed(1)
    x, dy = (torch.randn(1, T, D, generator=g).to(dtype) for _ in range(2))
    given = trees.tree_map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, like_x(cfg.cfg, x))
    y, kept = op.fwd(params, given, cfg, needs=needs)
    if edit is not None:
        edit(kept)
    sums = None if into is None else trees.tree_map_tensors(torch.zeros_like, params)
    return y, kept, *(op.bwd(kept, dy, cfg, into=sums) if kept is not None else (None, None))


def same(one, other):
    a, b = trees.leaves(one), trees.leaves(other)
    assert len(a) == len(b) > 0
    for s, t in zip(a, b, strict=True):
        assert (s is None and t is None) or torch.equal(s, t)


def joined(cfg, needs=Needs.ALL):
    params = repeat.init(cfg, key=random.key(0))
    layers = params if isinstance(params, tuple) else [{}] * cfg.times
    return forwards(cfg.of_layer, needs_of_layers(cfg, needs), layers, torch.ones(1, T, D)) is not None


NEEDS = {
    "an MLP": Needs.ALL,
    "all": Needs.ALL,
    "no x": Needs(x=False),
    "one param": Needs(x=False, params=("1.mlp.norm.weight",)),
    "the last layer": Needs(x=False, params=("2",)),
    "nothing": Needs.NONE,
}


MLP = SkipConfig(chain, mlp_config(D, 24))
CASES = {
    "an MLP": (MLP, False),
    "all": (LLAMA, False),
    "no x": (GPT2, True),
    "one param": (LLAMA, False),
    "the last layer": (GPT2, False),
    "nothing": (LLAMA, True),
}


@pytest.mark.parametrize("needs", [needs if needs == "an MLP" else pytest.param(needs, marks=pytest.mark.slow) for needs in NEEDS])
def test_fused_layers_have_the_bits_and_residuals_of_layers_apart(needs, apart):
    """In float32 also the sum in the norm's kernel has the bits of a sum; in float64 nothing is fused."""
    (body, stacked), needs = CASES[needs], NEEDS[needs]
    cfg = RepeatConfig(skip if body is MLP else chain, body, times=3, stacked=stacked)
    with backend("triton"):
        assert joined(cfg, needs)
        found, wanted = step(cfg, needs), apart(step, cfg, needs)
    same([found[0], found[2:]], [wanted[0], wanted[2:]])
    if needs:
        assert [row.path for row in report(found[1]).rows] == [row.path for row in report(wanted[1]).rows]
        same(found[1], wanted[1])
        assert report(found[1]).kept_bytes == report(wanted[1]).kept_bytes
    exact = step(cfg, needs, dtype=torch.float64)
    assert_close([found[0], found[2:]], [exact[0], exact[2:]], dtype=torch.float32)


def test_layers_that_keep_different_tensors_are_joined(apart):
    """Layers with rules of their own pass on the addends of their sums as equal layers do, unless one runs again."""
    body = RepeatConfig(skip, MLP, times=4)
    policies = [Policy({"1": Save(), "2.up.x": Save()}), Policy({"1": Recompute()})]
    for policy, alike in zip(policies, (True, False), strict=True):
        op = with_policy(repeat, policy)
        cfg = op.fwd.resolved_for(body)[1]
        with backend("triton"):
            assert joined(cfg) is alike and len(cfg.bodies) == 3 - (not alike)
            found, wanted = step(body, Needs.ALL, op=op), apart(step, body, Needs.ALL, op)
        same([found[0], found[1], found[2:]], [wanted[0], wanted[1], wanted[2:]])


@pytest.mark.slow
def test_residuals_of_a_layer_can_be_edited(apart):
    """The first norm's x is the sum, which its layer alone keeps: with zeros in its place the layer's gradients are other ones."""

    def edit(kept):
        own = kept[1]["attn"]["norm"]
        kept[1]["attn"]["norm"] = trees.replace(own, x=torch.zeros_like(own.x))

    cfg = RepeatConfig(chain, LLAMA, times=3)
    with backend("triton"):
        plain, found = step(cfg, Needs.ALL), step(cfg, Needs.ALL, edit=edit)
        same(found[2:], apart(lambda: step(cfg, Needs.ALL, edit=edit))[2:])
    assert torch.equal(found[2][2]["mlp"]["up"].weight, plain[2][2]["mlp"]["up"].weight)
    assert not torch.equal(found[2][1]["attn"]["norm"].weight, plain[2][1]["attn"]["norm"].weight)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["into", "policy", "offload", "remat"])
def test_other_features_meet_fused_layers(how, apart):
    """A policy of fields leaves the norm and the sum as they are; a body that is wrapped as a whole runs by itself."""
    op, cfg = repeat, RepeatConfig(chain, LLAMA, times=3)
    if how == "remat":
        cfg = dataclasses.replace(cfg, op=remat(chain))
    elif how in ("policy", "offload"):
        op = with_policy(repeat, "minimal" if how == "policy" else "offload_block_inputs")
    with backend("triton"):
        assert joined(cfg) == (how != "remat")
        found, wanted = step(cfg, Needs.ALL, op, how == "into" or None), apart(step, cfg, Needs.ALL, op, how == "into" or None)
    same([found[0], found[2:]], [wanted[0], wanted[2:]])
    assert report(found[1]).kept_bytes == report(wanted[1]).kept_bytes


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("body", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_each_layer_after_the_first_saves_a_launch(body, monkeypatch):
    """Forward. Backward the norm's kernel has added the gradient of the stream in any case, and a sum has no kernel."""
    counts = []
    for times in (1, 2, 3, 5):
        cfg = RepeatConfig(chain, body, times=times)
        params, x = repeat.init(cfg, device="meta", dtype=torch.bfloat16), meta(2, 2048, D)
        extras = {"positions": rope_table(meta(2048, dtype=torch.int64), RopeConfig(D // 2)), "key": meta(2, dtype=torch.int64)}
        given = WithExtras(x, {name: extras[name] for name in body.extras}) if body.extras else x
        with launches(monkeypatch) as forward:
            y, kept = repeat.fwd(params, given, cfg)
        with launches(monkeypatch) as backward:
            repeat.bwd(donate(kept), torch.empty_like(y), cfg)
        counts.append((times, len(forward) + times - 1, len(backward)))
    _, forward, backward = counts[0]
    assert counts == [(times, times * forward, times * backward) for times, _, _ in counts]


def test_an_epilogue_that_saves_as_much_stays():
    """A wide product adds the residual by itself; and after a dropout the sum is made with it."""
    for body in (block_config(4096, 32, 11008, 8), gpt2_block_config(D, 2, 24, 0.1)):
        lines = explain(RepeatConfig(chain, body, times=2)).plans["*"].forward
        assert lines[0].calls[0].op.name == "fork", lines[0]
    lines = explain(RepeatConfig(chain, LLAMA, times=2)).plans["*"].forward
    assert str(lines[0]) == "mlp.add + attn.fork + attn.norm: add + norm, saves 1 pass and 1 launch"
    assert str(lines[-1]) == "mlp.down: linear"
    assert explain(RepeatConfig(chain, LLAMA, times=1)).plans["*"].forward[0].calls[0].op.name == "fork"


def test_a_layer_empties_the_addends_that_it_is_given():
    """So that neither is held by its caller while the layer runs."""
    cfg = RepeatConfig(chain, LLAMA, times=3)
    layers, x = repeat.init(cfg, key=random.key(0)), torch.ones(1, T, D)
    with backend("triton"):
        first, between, last = forwards(cfg.of_layer, needs_of_layers(cfg, Needs.ALL), layers, x)
        extras = like_x(LLAMA, x).extras
        addends, _ = first(layers[0], x, extras)
        assert type(addends) is list and len(addends) == 2
        more, _ = between(layers[1], addends, extras)
        assert not addends and len(more) == 2
        y, _ = last(layers[2], more, extras)
    assert not more and y.shape == x.shape


def test_an_unlike_branch_is_an_error_of_its_own_layer():
    """The sum is made in the next layer, but checked where its addends are made."""
    calls = []

    def fwd(params, x, cfg, *, needs=Needs.ALL):
        calls.append(x)
        y, kept = activation.fwd(params, x, cfg, needs=needs)
        return (y.double() if len(calls) == 2 else y), kept

    inner = mlp_config(D, 24)
    body = dataclasses.replace(inner, steps=(*inner.steps, Step("last", activation._replace(fwd=fwd), ActivationConfig("relu"))))
    cfg = RepeatConfig(skip, SkipConfig(chain, body), times=3)
    params = repeat.init(cfg, key=random.key(0))
    with backend("triton"):
        assert joined(cfg)
        with pytest.raises(ValueError, match=r"body\(x\) must be like x, float32\[1, 2, 16\], got float64") as error:
            repeat.fwd(params, torch.ones(1, T, D), cfg)
    assert "1" in str(error.value).partition(":")[0], error.value
    assert len(calls) == 2


def test_bad_params_raise_what_they_raise_in_a_layer_by_itself(apart):
    cfg = RepeatConfig(chain, LLAMA, times=2)
    params, x = repeat.init(cfg, key=random.key(0)), like_x(LLAMA, torch.ones(1, T, D))
    for bad in ((params[0], None), (params[0], {"attn": params[1]["attn"]}), (params[0], {**params[1], "mlp": 3})):
        texts = []
        for run in (apart, lambda fn, *arguments: fn(*arguments)):
            with backend("triton"), pytest.raises((TypeError, ValueError)) as error:
                run(repeat.fwd, bad, x, cfg)
            texts.append(str(error.value))
        assert texts[0] == texts[1]
    with torch.autocast("cpu"), backend("triton"), pytest.raises(RuntimeError, match="chain_fwd.*autocast"):
        repeat.fwd(params, x, cfg)


ORDERS = {
    "plain": (False, (), "run 0, run 1, run 2"),
    "ahead": (True, (), "start 0, wait 0, start 1, run 0, wait 1, start 2, run 1, wait 2, run 2"),
    "sums": (False, ("settle",), "run 0, run 1, settle 0, run 2, settle 1, settle 2"),
    "two sums": (
        True,
        ("advance", "settle"),
        "start 0, wait 0, start 1, run 0, wait 1, start 2, run 1, advance 0, wait 2, run 2, advance 1, settle 0, advance 2, "
        "settle 1, settle 2",
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_what_a_layer_reads_starts_a_layer_ahead(name):
    starts, late, wanted = ORDERS[name]
    assert ", ".join(f"{kind} {i}" for kind, i in turns(range(3), starts, late)) == wanted
    swapped = [f"{kind} {2 - i}" for kind, i in turns(range(3)[::-1], starts, late)]
    assert ", ".join(swapped) == wanted


def test_sums_of_a_chain_go_on_under_the_steps_before():
    """They do as a repeat's do: each has the backwards of two steps to arrive in."""
    steps = tuple(Step(f"up{i}", linear, LinearConfig(8, 8)) for i in range(3))
    summed = dist.data_parallel(ChainConfig(steps=steps), dist.Mesh.abstract({"dp": 2}, 0)["dp"])
    rows = explain(summed, rows=True).rows[""]["backward"]
    kinds = [row.kind for row in rows if row.kind in ("begun bwd", "advance sums", "settle sums")]
    bwd, go, end = "begun bwd", "advance sums", "settle sums"
    assert kinds == [bwd, bwd, go, bwd, end, go, end, go, end]


AHEAD = {
    "forward": ("begin a, begin b, begun fwd a, begin c, begun fwd b, begun fwd c"),
    "backward": ("begin backward c, begin backward b, begun bwd c, begin backward a, begun bwd b, begun bwd a"),
}


@pytest.mark.parametrize("half", AHEAD)
def test_params_of_a_chain_are_gathered_during_the_step_before_that_computes_much(half):
    """A gather does not hide behind an activation, and no step is gathered earlier, so few whole weights are kept at once."""
    a, b, c = (Step(name, linear, LinearConfig(8, 8)) for name in "abc")
    cfg = ChainConfig(steps=(a, Step("act", activation, ActivationConfig("silu")), b, c))
    sharded = dist.zero3(cfg, dist.Mesh.abstract({"dp": 2}, 0)["dp"])
    rows = [row for row in explain(sharded, rows=True).rows[""][half] if row.kind.startswith("beg")]
    assert ", ".join(f"{row.kind} {row.path}" for row in rows) == AHEAD[half]


def test_rows_of_gathered_layers_are_explained():
    """A layer's params are gathered during the layer before; a sum of gradients goes on after the next two layers."""
    body = ChainConfig(steps=(Step("a", linear, LinearConfig(8, 8)),))
    cfg = ChainConfig(steps=(Step("blocks", repeat, RepeatConfig(chain, body, 3)),))
    sharded = dist.zero3(cfg, dist.Mesh.abstract({"dp": 2}, 0)["dp"])
    text, plain = (str(explain(one, rows=True)) for one in (sharded, cfg))
    text = text.rpartition("blocks\n")[2]
    said = {half: text.partition(f"  rows of the {half}\n")[2].split("  rows")[0].split() for half in ("forward", "backward")}
    turn = lambda row: [f"{row.partition(' ')[0]}(layer", f"{row.partition(' ')[2]})"]  # noqa: E731
    forward = "start 0, wait 0, start 1, run 0, wait 1, start 2, run 1, wait 2, run 2"
    backward = (
        "start 2, wait 2, start 1, run 2, wait 1, start 0, run 1, advance 2, wait 0, run 0, advance 1, settle 2, "
        "advance 0, settle 1, settle 0"
    )
    for half, want in (("forward", forward), ("backward", backward)):
        assert said[half] == [word for row in want.split(", ") for word in turn(row)]
    assert "wait(layer" not in plain


def test_extras_are_found_by_name_in_any_order():
    steps = tuple(Step(name, dropout, DropoutConfig(0.5), takes=(name,)) for name in "ab")
    cfg, keys = ChainConfig(steps=steps, extras=("a", "b")), {"a": random.key(1), "b": random.key(2)}
    x = torch.randn(8, D)
    one, other = (chain.fwd(chain.init(cfg), WithExtras(x, {name: keys[name] for name in names}), cfg)[0] for names in ("ab", "ba"))
    assert torch.equal(one, other)


def test_sums_of_the_weight_gradients_of_layers_are_in_flight_during_others():
    """In the half by itself, as in the whole backward: the last layer's alone is exposed."""
    body = ChainConfig(steps=(Step("a", linear, LinearConfig(8, 8)),))
    cfg = ChainConfig(steps=(Step("blocks", repeat, RepeatConfig(chain, body, 3)),))
    summed = dist.data_parallel(cfg, dist.Mesh.abstract({"dp": 2}, 0)["dp"])
    params, x = chain.init(summed, device="meta"), torch.ones(4, 8, device="meta")

    def half(params, x):
        y, kept = chain.fwd(params, x, summed)
        return chain.wgrad(chain.dgrad(kept, y, summed)[1], summed)

    found = dist.record(half, params, x)
    assert (len(found.sent), len(found.exposed)) == (6, 3)  # two messages a sum, three of which meet products
