"""Drawn chains, skips, parallels and repeats of recomputable steps under drawn rules: the halves of a backward, donated or not,
have the bits of the whole one, and of an op that keeps everything."""

from random import Random

import pytest
import torch
from policy_cases import same

from funcops import (
    POLICIES,
    ActivationConfig,
    AddConfig,
    BiasConfig,
    CastConfig,
    CausalConv1dConfig,
    ChainConfig,
    Compress,
    DropoutConfig,
    GLUConfig,
    L2NormConfig,
    LayerNormConfig,
    LinearConfig,
    Needs,
    Offload,
    ParallelConfig,
    Policy,
    QLinearConfig,
    Recompute,
    RepeatConfig,
    RMSNormConfig,
    Save,
    ScaleConfig,
    SkipConfig,
    SoftcapConfig,
    SoftmaxConfig,
    Step,
    WithExtras,
    activation,
    add,
    batch_wgrads,
    bias,
    cast,
    causal_conv1d,
    chain,
    donate,
    dropout,
    glu,
    l2_norm,
    layer_norm,
    linear,
    parallel,
    qlinear,
    random,
    remat,
    repeat,
    rms_norm,
    scale,
    skip,
    softcap,
    softmax,
    with_policy,
)
from funcops.engine.trees import paths, tree_map_tensors
from funcops.low_precision import NF4, Format, Fp8Current, quantize_weights, weight_only

D = 8
WORDS = [
    (rms_norm, RMSNormConfig(D)),
    (layer_norm, LayerNormConfig(D)),
    (l2_norm, L2NormConfig(D)),
    (activation, ActivationConfig("gelu")),
    (activation, ActivationConfig("relu")),
    (softcap, SoftcapConfig(3.0)),
    (glu, GLUConfig(kind="glu", gate="first")),
    (dropout, DropoutConfig(0.3)),
    (scale, ScaleConfig(0.5)),
    (cast, CastConfig(torch.float64)),
    (bias, BiasConfig(D)),
    (causal_conv1d, CausalConv1dConfig(D)),
    (softmax, SoftmaxConfig()),
    (linear, LinearConfig(D, D)),
    (qlinear, QLinearConfig(D, D, recipe=Fp8Current())),
    (remat(linear), LinearConfig(D, D)),
    (remat(rms_norm), RMSNormConfig(D)),
    (remat(activation), ActivationConfig("silu")),
    (remat(qlinear), QLinearConfig(D, D, recipe=Fp8Current())),
]


def body(draw, steps, depth=1, keys=True):
    """A chain over [*, D]; at `depth` 0 without combinators, without `keys` without dropouts."""
    made = []
    for i in range(steps):
        kind = draw.choice(["skip", "repeat", "parallel", *["step"] * 7]) if depth else "step"
        if kind == "parallel":
            branches = [Step(name, chain, body(draw, draw.randint(1, 3), 0, False)) for name in "ab"]
            made += [Step(f"p{i}", parallel, ParallelConfig(branches=tuple(branches))), Step(f"sum{i}", add, AddConfig())]
        elif kind == "step":
            op, cfg = draw.choice([one for one in WORDS if keys or one[0] is not dropout])
            made += [Step(f"up{i}", linear, LinearConfig(D, 2 * D))] * (op is glu)
            made.append(Step(f"s{i}", op, cfg, takes=("key",) * (op is dropout)))
        else:
            inner = body(draw, draw.randint(1, 3), 0, keys)
            made.append(
                Step(f"s{i}", skip, SkipConfig(chain, inner), takes=inner.extras)
                if kind == "skip"
                else Step(f"r{i}", repeat, RepeatConfig(chain, inner, 2), takes=inner.extras)
            )
    return ChainConfig(steps=tuple(made), extras=("key",) * any("key" in step.takes for step in made))


def policy_of(draw, known):
    """A named policy or drawn rules, and whether it rounds nothing."""
    if draw.random() < 0.25:
        name = draw.choice(list(POLICIES))
        return name, not name.startswith("compress")
    actions = [Recompute()] * 3 + [Save(), Offload(), Compress("bf16")]
    rules = {draw.choice(known): draw.choice(actions) for _ in range(draw.randint(1, 4))}
    return Policy(rules, optional=draw.random() < 0.7), not any(isinstance(action, Compress) for action in rules.values())


def needs_of(draw, params, extras):
    found = [path for path, t in paths(params).items() if t is not None]
    drawn = draw.choice([True, True, False, tuple(draw.sample(found, draw.randint(1, len(found)))) if found else True])
    x = draw.choice([True, True, False])
    return Needs(x=("main",) if x and extras and draw.random() < 0.5 else x, params=drawn)


def check_halves(op, params, x, cfg, needs, dy, want=None):
    """Whole and split backwards, given away or not, have the same bits, and add the same to accumulators. Returns whether there
    was anything to compute."""
    kept = op.fwd(params, x, cfg, needs=needs)[1]
    if kept is None:
        return False
    whole = op.bwd(kept, dy, cfg)
    assert want is None or same(whole, want)
    dx, pending = op.dgrad(kept, dy, cfg)
    again = op.dgrad(kept, dy, cfg)[1]
    assert same((op.wgrad(pending, cfg), dx), whole)
    ones = tree_map_tensors(torch.ones_like, whole[0])
    into = [tree_map_tensors(torch.clone, ones) for _ in range(2)]
    assert same(op.wgrad(pending, cfg, into=into[0]), op.bwd(kept, dy, cfg, into=into[1])[0])
    if pending is not None:
        batch_wgrads(op, [pending, again], cfg)
    dx, pending = op.dgrad(donate(kept), dy, cfg)
    assert same((op.wgrad(donate(pending), cfg), dx), whole)
    assert same(op.bwd(donate(op.fwd(params, x, cfg, needs=needs)[1]), dy, cfg), whole)
    return True


def check_drawn(seed):
    """Returns whether a drawn chain ran: some rules are refused, and some needs ask for nothing."""
    draw, numbers = Random(seed), torch.Generator().manual_seed(seed)
    cfg = body(draw, draw.randint(2, 5))
    rand = lambda shape: torch.randn(shape, generator=numbers, dtype=torch.float64)  # noqa: E731
    params = tree_map_tensors(lambda t: t + 0.1 * rand(t.shape), chain.init(cfg, key=random.key(1), dtype=torch.float64))
    x, dy = rand((2, 5, D)), rand((2, 5, D))
    x = WithExtras(x, {"key": random.key(7)}) if cfg.extras else x
    needs, plain = needs_of(draw, params, cfg.extras), with_policy(chain, "save_all")
    y, kept = plain.fwd(params, x, cfg, needs=needs)
    fields = [path for path, t in paths(chain.fwd(params, x, cfg)[1]).items() if isinstance(t, torch.Tensor)]
    policy, exact = policy_of(draw, sorted({step.name for step in cfg.steps}.union(*[(p, p.rpartition(".")[0]) for p in fields])))
    op = with_policy(chain, policy)
    try:
        assert same(op.fwd(params, x, cfg, needs=needs)[0], y)
    except ValueError as error:
        assert str(error).startswith("with_policy:")
        return False
    return check_halves(op, params, x, cfg, needs, dy, plain.bwd(kept, dy, cfg) if exact and kept is not None else None)


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 100), marks=pytest.mark.slow)], ids=str)
def test_halves_have_the_bits_of_the_whole(seeds):
    assert sum(check_drawn(seed) for seed in seeds) > len(seeds) // 2


RECOMPUTED = [(op, cfg) for op, cfg in WORDS if op.recompute is not None]


@pytest.mark.turns("first", "second", every=40)
@pytest.mark.parametrize("first", [i for i, (op, _) in enumerate(WORDS) if op.recompute is not None and op is not glu])
@pytest.mark.parametrize("second", [i for i, (op, _) in enumerate(WORDS) if op not in (glu, dropout)])
def test_a_step_that_is_run_again_behind_one_that_is_recomputed(first, second):
    lin = (linear, LinearConfig(D, D))
    made = ChainConfig(steps=(Step("a", *lin), Step("f", *WORDS[first]), Step("n", *WORDS[second]), Step("l", *lin)))
    params = chain.init(made, key=random.key(0), dtype=torch.float64)
    x, dy = (random.normal(random.key(i), (3, 4, D), dtype=torch.float64) for i in (1, 2))
    plain = with_policy(chain, "save_all")
    want = plain.bwd(plain.fwd(params, x, made)[1], dy, made)
    again, copied = {"f": Recompute(), "n": Recompute()}, {"n.*": Offload()}
    for rules, needs in (({"n": Recompute()}, Needs.ALL), (again, Needs(x=False, params=("a.bias", "l"))), (copied, Needs.ALL)):
        run = with_policy(chain, Policy(rules, optional=True))
        assert check_halves(run, params, x, made, needs, dy, want if needs is Needs.ALL else None)


@pytest.mark.turns("format", "first")
@pytest.mark.parametrize("format", [NF4(), Format("e4m3", (1, 32), "e8m0")], ids=str)
@pytest.mark.parametrize(
    "first", [(rms_norm, RMSNormConfig(64)), (activation, ActivationConfig("gelu"))], ids=lambda one: one[0].name
)
def test_a_weight_in_a_format_behind_a_step_that_is_recomputed(format, first):
    steps = Step("a", linear, LinearConfig(64, 64)), Step("f", *first), Step("n", weight_only(linear, format), LinearConfig(64, 64))
    made = ChainConfig(steps=(*steps, Step("g", *first), Step("l", linear, LinearConfig(64, 64))))
    params = quantize_weights(chain.init(made, key=random.key(0)), made)
    x, dy = (random.normal(random.key(i), (3, 64)) for i in (1, 2))
    plain = with_policy(chain, "save_all")
    for needs in (Needs(params=("n.bias", "l")), Needs(params=False), Needs(x=False, params=("a", "l"))):
        want = plain.bwd(plain.fwd(params, x, made, needs=needs)[1], dy, made)
        for op in (chain, with_policy(chain, Policy({"n": Recompute()}, optional=True))):
            assert check_halves(op, params, x, made, needs, dy, want)
