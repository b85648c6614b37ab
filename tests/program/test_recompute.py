"""Recomputation in turn: a y whose x is recomputed itself, and so on back to a tensor that is kept."""

import dataclasses
import weakref

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from policy_cases import same
from torch.nn import functional as F

from funcops import (
    ActivationConfig,
    ChainConfig,
    GLUConfig,
    L2NormConfig,
    LayerNormConfig,
    LinearConfig,
    Needs,
    ParallelConfig,
    Policy,
    Recompute,
    RMSNormConfig,
    ScaleConfig,
    SkipConfig,
    SoftcapConfig,
    Step,
    activation,
    batch_wgrads,
    chain,
    dist,
    donate,
    explain,
    fit,
    glu,
    l2_norm,
    layer_norm,
    linear,
    parallel,
    random,
    report,
    rms_norm,
    scale,
    skip,
    softcap,
    with_policy,
)
from funcops.distributed import comm
from funcops.engine.backend import backend
from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.op import config, dgrad_of, forward, make_op, recompute_of
from funcops.engine.contract.schema import NO_GRADIENT, RECOMPUTE, Residuals, saved
from funcops.engine.errors import StaleResidualError
from funcops.engine.trees import leaves, tensors, tree_map_tensors
from funcops.library.kernels import linear as linear_kernels
from funcops.library.kernels import norm as norm_kernels
from funcops.testing import run_ranks
from funcops.testing.checks import float_like

D, ROWS = 6, 5


@config
class TwiceConfig(OpConfig):
    """x beside itself: as a gather of two equal ranks. `counts`: whether each recomputation is noted in `RAN`."""

    counts: bool = False


class TwiceResiduals(Residuals):
    x: torch.Tensor = saved("[*]", alias="x", needed_by=RECOMPUTE)


RAN: list[str] = []


@forward(TwiceConfig)
def twice_fwd(params, x, cfg, *, needs=Needs.ALL):
    return torch.cat([x, x], -1), TwiceResiduals.keep(cfg, needs, x=x)


@recompute_of(TwiceResiduals)
def twice_recompute(residuals, cfg):
    RAN.append("twice")
    return torch.cat([residuals.x, residuals.x], -1)


@dgrad_of(TwiceResiduals)
def twice_dgrad(residuals, dy, cfg):
    return (sum(dy.chunk(2, -1)) if residuals.needs.x else NO_GRADIENT), None


twice = make_op(
    "twice", TwiceConfig, fwd=twice_fwd, dgrad=twice_dgrad, recomputable="elementwise", recompute=twice_recompute, view=False
)

bare = make_op(  # its functions are plain: make_op decorates them
    "bare",
    TwiceConfig,
    fwd=lambda params, x, cfg, *, needs=Needs.ALL: twice_fwd(params, x, cfg, needs=needs),
    dgrad=twice_dgrad,
    recomputable="elementwise",
    recompute=lambda residuals, cfg: twice_recompute(residuals, cfg),
    view=False,
)

# By word: the step of an input of that width, the width of its y, whether its y is recomputed, and y in plain torch.
WORDS = {
    "rms": (lambda w: (rms_norm, RMSNormConfig(w)), 1, True, lambda p, x: F.rms_norm(x, x.shape[-1:], p.weight, 1e-6)),
    "ln": (lambda w: (layer_norm, LayerNormConfig(w)), 1, True, lambda p, x: F.layer_norm(x, x.shape[-1:], p.weight, p.bias, 1e-5)),
    "l2": (lambda w: (l2_norm, L2NormConfig(w)), 1, True, lambda p, x: x * (x.square().sum(-1, True) + 1e-6).rsqrt()),
    "gelu": (lambda w: (activation, ActivationConfig("gelu")), 1, True, lambda p, x: F.gelu(x)),
    "cap": (lambda w: (softcap, SoftcapConfig(3.0)), 1, True, lambda p, x: 3.0 * torch.tanh(x / 3.0)),
    "glu": (lambda w: (glu, GLUConfig(kind="glu", gate="second")), 0.5, True, lambda p, x: F.glu(x)),
    "twice": (lambda w: (twice, TwiceConfig()), 2, True, lambda p, x: torch.cat([x, x], -1)),
    "bare": (lambda w: (bare, TwiceConfig()), 2, True, lambda p, x: torch.cat([x, x], -1)),
    "scale": (lambda w: (scale, ScaleConfig(0.5)), 1, False, lambda p, x: 0.5 * x),
    "linear": (lambda w: (linear, LinearConfig(w, w)), 1, False, lambda p, x: F.linear(x, p.weight, p.bias)),
}


def made(words, **options):
    """A chain of the steps of these words. A glu and a twice come in pairs, so that the width stays small."""
    width, steps = D, []
    for i, word in enumerate(words):
        steps.append(Step(f"{word}_{i}", *WORDS[word][0](width)))
        width = int(width * WORDS[word][1])
    return ChainConfig(steps=tuple(steps), **options)


def plainly(params, x, cfg):
    for step in cfg.steps:
        x = WORDS[step.name.partition("_")[0]][3](params[step.name], x)
    return x


def kept_by_hand(params, x, words):
    """The bytes that are kept, by a count from the end: an x that a step reads in its backward, or to recompute a y that is read,
    unless it is recomputed itself; and the statistics of norms."""
    cfg, sizes = made(words), []
    for i in range(len(words) + 1):
        sizes.append(plainly(params, x, dataclasses.replace(cfg, steps=cfg.steps[:i])).nbytes if i else 0)
    statistics = {"rms": 1, "ln": 2, "l2": 1}
    total, read = 0, False
    for i in range(len(words))[::-1]:
        word = words[i]
        read = read if word in ("twice", "bare") else word != "scale"  # the x of this step
        again = i > 0 and WORDS[words[i - 1]][2]
        total += sizes[i] * (read and not again) + statistics.get(word, 0) * ROWS * x.element_size()
        read = read and again
    return total


words = st.lists(st.sampled_from([*WORDS, "twice glu", "linear"]), min_size=1, max_size=8).map(lambda ws: " ".join(ws).split())
masks = st.sampled_from([Needs.ALL, Needs(x=False), Needs(params=False), "last", "first"])


def valid(ws):
    width = D
    for word in ws:
        if word == "glu" and width % 2:
            return False
        width = int(width * WORDS[word][1])
    return 2 <= width <= 48


def mask_of(needs, cfg):
    names = [step.name for step in cfg.steps if step.op is linear]
    if isinstance(needs, str):
        return Needs(x=False, params=names[-1:] if needs == "last" else names[:1]) if names else Needs.ALL
    return needs


def gradients(op, params, x, cfg, needs, dy):
    """The gradients of a whole backward, of two halves, and of a weight gradient that comes late, all trees given away."""
    _, kept = op.fwd(params, x, cfg, needs=needs)
    whole = op.bwd(kept, dy, cfg)
    dx, pending = op.dgrad(kept, dy, cfg)
    late_dx, late = op.dgrad(donate(op.fwd(params, x, cfg, needs=needs)[1]), dy, cfg)
    late = donate(late)
    op.bwd(donate(kept), dy, cfg)
    return whole, (op.wgrad(pending, cfg), dx), (op.wgrad(late, cfg), late_dx)


@settings(max_examples=30, deadline=None)
@example(ws=["rms", "twice", "linear"], needs=Needs.ALL, fuse=True)
@example(ws=["rms", "bare", "linear"], needs=Needs.ALL, fuse=True)
@example(ws=["rms", "gelu", "twice", "glu", "ln", "linear", "cap", "linear"], needs=Needs(x=False), fuse=True)
@given(ws=words.filter(valid), needs=masks, fuse=st.booleans())
def test_drawn_chains_equal_autograd(ws, needs, fuse):
    cfg = made(ws, fuse=fuse)
    needs = mask_of(needs, cfg)
    params = chain.init(cfg, key=random.key(1), dtype=torch.float64)
    x = torch.randn(ROWS, D, dtype=torch.float64)
    own, its_x = tree_map_tensors(lambda t: t.clone().requires_grad_(), params), x.clone().requires_grad_()
    want_y = plainly(own, its_x, cfg)
    dy = torch.randn_like(want_y)
    want_y.backward(dy)
    y, kept = chain.fwd(params, x, cfg, needs=needs)
    torch.testing.assert_close(y, want_y.detach(), atol=1e-11, rtol=1e-9)
    if needs is Needs.ALL:
        assert report(kept, params, x).kept_bytes == kept_by_hand(params, x, ws)
    everything = dataclasses.replace(cfg, recompute=False)
    if kept is None:  # no gradient is requested of these steps
        return
    plain = chain.bwd(chain.fwd(params, x, everything, needs=needs)[1], dy, everything)
    for dparams, dx in gradients(chain, params, x, cfg, needs, dy):
        assert same((dparams, dx), plain), "the bits of a chain that keeps everything"
        for found, leaf in zip(leaves((dparams, dx)), leaves((own, its_x)), strict=True):
            if found is not None:
                torch.testing.assert_close(found, leaf.grad, atol=1e-11, rtol=1e-9)
    if needs is Needs.ALL:
        joined = batch_wgrads(chain, [chain.dgrad(kept, dy, cfg)[1] for _ in range(2)], cfg)
        for found, leaf in zip(tensors(joined), tensors(own), strict=True):
            torch.testing.assert_close(found, 2.0 * leaf.grad, atol=1e-11, rtol=1e-9)


def nested(first, second):
    """A recomputed step before a parallel and a skip, whose own first steps are recomputed, too."""
    inner = made([second, "linear"])
    pair = ParallelConfig(branches=(Step("a", chain, inner), Step("b", linear, LinearConfig(D, D))))
    return ChainConfig(
        steps=(
            Step("first", *WORDS[first][0](D)),
            Step("second", *WORDS[second][0](D)),
            Step("body", skip, SkipConfig(chain, inner)),
            Step("third", *WORDS[first][0](D)),
            Step("both", parallel, pair),
            Step("joined", glu, GLUConfig(kind="swiglu", paired=True)),
            Step("down", linear, LinearConfig(D, D)),
        )
    )


PAIRS = [("rms", "gelu"), ("gelu", "ln"), ("cap", "rms")]
CHOICES = [None, "recompute_norms", "recompute_elementwise", "rules"]
SLOW = [(pair, policy) for pair in PAIRS for policy in CHOICES][1:]


@pytest.mark.turns("pair", "policy", "name", every=2)
@pytest.mark.parametrize(
    ("pair", "policy", "name"),
    [(pair, policy, "torch") for pair in PAIRS for policy in CHOICES]
    + [(PAIRS[0], None, "triton"), *[pytest.param(*one, "triton", marks=pytest.mark.slow) for one in SLOW]],
)
def test_across_skips_and_parallels(pair, policy, name):
    cfg = nested(*pair)
    first = f"{pair[1]}_0"
    rules = Policy({"second.x": Recompute(), f"body.{first}.x": Recompute()}, outputs="none")
    op = chain if policy is None else with_policy(chain, rules if policy == "rules" else policy)
    params, x, dy = chain.init(cfg, key=random.key(0)), torch.randn(7, D), torch.randn(7, D)
    keeps = with_policy(chain, "save_all")
    for needs in (Needs.ALL, Needs(x=False), Needs(params=False), Needs(x=False, params=["down"])):
        with backend(name):
            want = keeps.bwd(keeps.fwd(params, x, cfg, needs=needs)[1], dy, cfg)
            for found in gradients(op, params, x, cfg, needs, dy):
                for a, b in zip(leaves(found), leaves(want), strict=True):
                    assert (a is None and b is None) or torch.allclose(a, b, atol=1e-5, rtol=1e-4)
                    assert name == "triton" or a is None or torch.equal(a, b)


def test_kept_bytes_of_policies():
    """Each policy keeps what `fit` says that it keeps, and less the more it recomputes."""
    cfg = made(["linear", "rms", "gelu", "twice", "linear"])
    params, x = chain.init(cfg, key=random.key(0)), torch.randn(7, D)
    for one in fit(chain, cfg, x, 10**9).tried:
        kept = with_policy(chain, one.policy).fwd(params, x, cfg)[1]
        assert report(kept, params, x).kept_bytes == one.kept_bytes, one.name
    sizes = [
        report(with_policy(chain, p).fwd(params, x, cfg)[1], params, x).kept_bytes for p in ("save_all", "recompute_elementwise")
    ]
    row = 4 * 7 * D
    assert sizes == [row + 4 * 7 + row + 2 * row, row + 4 * 7], "the linear's y and the statistics stay; two ys and a wide one go"


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("readers", ["one", "three"])
def test_each_y_is_recomputed_once_in_each_half(readers, name, monkeypatch):
    norms = []
    kernel = norm_kernels.rms_norm_recompute
    monkeypatch.setattr(norm_kernels, "rms_norm_recompute", lambda *args: norms.append(1) or kernel(*args))
    branches = tuple(Step(n, linear, LinearConfig(2 * D, D, bias=False)) for n in "qkv")
    last = (
        Step("up", linear, LinearConfig(2 * D, D)) if readers == "one" else Step("qkv", parallel, ParallelConfig(branches=branches))
    )
    steps = (Step("norm", rms_norm, RMSNormConfig(D)), Step("act", activation, ActivationConfig("silu")))
    cfg = ChainConfig(steps=(*steps, Step("twice", twice, TwiceConfig()), last))
    params, x = chain.init(cfg, key=random.key(0)), torch.randn(7, D)
    with backend(name):
        y, kept = chain.fwd(params, x, cfg)
        assert report(kept, params, x).kept_bytes == 4 * 7, "the statistics of the norm"
        for half in ("bwd", "dgrad", "wgrad"):
            norms.clear()
            RAN.clear()
            if half == "wgrad":
                chain.wgrad(pending, cfg)  # noqa: F821
            else:
                _, pending = getattr(chain, half)(kept, y, cfg)
            # the dgrad of the activation reads the norm's y; no dgrad reads the gathered one
            assert (len(norms), len(RAN)) == {"bwd": (1, 1), "dgrad": (1, 0), "wgrad": (1, 1)}[half], half


def test_what_y_was_recomputed_from_is_gone_when_weights_read_y(monkeypatch):
    """The norm's y, from which the activation's is computed, is freed before the product of the linear layer behind them."""
    made, alive = [], []
    norm, product = norm_kernels.rms_norm_recompute, linear_kernels.linear_wgrad

    def recompute(*args):
        y = norm(*args)
        made.append(weakref.ref(y))
        return y

    def wgrad(*args):
        alive.append([ref() is not None for ref in made])
        return product(*args)

    monkeypatch.setattr(norm_kernels, "rms_norm_recompute", recompute)
    monkeypatch.setattr(linear_kernels, "linear_wgrad", wgrad)
    steps = Step("norm", rms_norm, RMSNormConfig(D)), Step("act", activation, ActivationConfig("silu"))
    cfg = ChainConfig(steps=(*steps, Step("up", linear, LinearConfig(D, D))))
    params, x = chain.init(cfg, key=random.key(0)), torch.randn(7, D)
    y, kept = chain.fwd(params, x, cfg)
    _, pending = chain.dgrad(kept, y, cfg)
    made.clear()
    chain.wgrad(pending, cfg)
    assert alive == [[False]]


def gathered_recompute(residuals, cfg):
    return comm.gather(residuals.x, cfg.axis, cfg.dim)


def test_a_gather_behind_a_norm_keeps_no_more_than_a_column_layer():
    """Beside the norm's statistics both keep nothing: the norm's y is recomputed, then gathered again. y and all gradients have the
    same bits."""

    class Kept(Residuals, static=("shape", "dtype")):
        x: torch.Tensor = saved("[*]", alias="x", needed_by=RECOMPUTE)

    @forward(dist.GatherConfig)
    def gathered_fwd(params, x, cfg, *, needs=Needs.ALL):
        y = comm.gather(x, cfg.axis, cfg.dim)
        return y, Kept.keep(cfg, needs, x=x, shape=y.shape, dtype=y.dtype)

    @dgrad_of(Kept)
    def gathered_dgrad(residuals, dy, cfg):
        return comm.scatter_sum(dy, cfg.axis, cfg.dim) if residuals.needs.x else NO_GRADIENT, None

    again = recompute_of(Kept)(gathered_recompute)
    gathered = make_op(
        "gathered", dist.GatherConfig, fwd=gathered_fwd, dgrad=gathered_dgrad, recomputable="elementwise", recompute=again
    )

    def each(mesh):
        tp, norm = mesh["tp"], Step("norm", rms_norm, RMSNormConfig(D))
        by_parts = (norm, Step("g", gathered, dist.GatherConfig(tp)), Step("up", linear, LinearConfig(D, 4)))
        whole = (norm, Step("up", dist.column_linear, dist.ColumnLinearConfig(D, 8, axis=tp)))
        found, x, dy = [], float_like(torch.empty(4, D), 1 + tp.rank), float_like(torch.empty(8, 4), 3 + tp.rank)
        for cfg in (ChainConfig(steps=whole), ChainConfig(steps=by_parts)):
            params = chain.init(ChainConfig(steps=whole), key=random.key(0)) | ({"g": None} if cfg.steps == by_parts else {})
            y, kept = chain.fwd(params, x, cfg)
            trees = [y, *gradients(chain, params, x, cfg, Needs.ALL, dy)]
            found.append((report(kept, params, x).kept_bytes, tensors(trees)))
        return found

    for (size, want), (own_size, got) in run_ranks({"tp": 2}, each):
        assert size == own_size == 16 and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_write_to_what_the_first_is_recomputed_from_is_named():
    cfg = made(["rms", "gelu", "linear"])
    params, x = chain.init(cfg, key=random.key(0)), torch.randn(7, D)
    y, kept = chain.fwd(params, x, cfg)
    _, pending = chain.dgrad(kept, y, cfg)
    assert pending["gelu_1()"].x is None and pending["rms_0()"].x is x and pending["linear_2"].x is None
    x.add_(1.0)
    for call in (lambda: chain.bwd(kept, y, cfg), lambda: chain.dgrad(kept, y, cfg), lambda: chain.wgrad(pending, cfg)):
        with pytest.raises(StaleResidualError, match=r"^rms_0: rms_norm_recompute: residuals.x must be .* recompute=False"):
            call()


def test_the_rows_recompute_in_turn():
    rows = explain(made(["rms", "gelu", "linear"]), device_type="cpu", rows=True).rows[""]["backward"]
    kinds = [(row.kind, row.path) for row in rows if "recompute" in row.kind or row.kind == "call"]
    assert kinds == [
        ("recompute unchecked", "rms_0"),
        ("call", "gelu_1"),
        ("call", "linear_2"),
        ("call", "gelu_1"),
        ("call", "rms_0"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("ws", [["rms", "gelu", "linear"], ["linear", "ln", "twice", "glu", "linear"]], ids=" ".join)
def test_compiles(ws):
    cfg = made(ws)
    params, x = chain.init(cfg, key=random.key(0)), torch.randn(7, D)

    def call(params, x):
        y, kept = chain.fwd(params, x, cfg)
        return y, chain.bwd(kept, y, cfg)

    found = torch.compile(call, fullgraph=True, backend="aot_eager")(params, x)
    for a, b in zip(tensors(found), tensors(call(params, x)), strict=True):
        torch.testing.assert_close(a, b)
