import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from tally import TallyConfig, routed, routed_reference, tally

from funcops import (
    AddConfig,
    ChainConfig,
    DropoutConfig,
    ForkConfig,
    GLUConfig,
    LinearConfig,
    ParallelConfig,
    RMSNormConfig,
    Step,
    WithExtras,
    add,
    chain,
    chain_fwd,
    dropout,
    fork,
    glu,
    linear,
    parallel,
    rms_norm,
)
from funcops.testing import Case, Error


def mlp(dim, hidden):
    return ChainConfig(
        steps=(
            Step("norm", rms_norm, RMSNormConfig(dim, eps=0.1)),
            Step("up", linear, LinearConfig(dim, 2 * hidden, bias=False)),
            Step("act", glu, GLUConfig(kind="swiglu", gate="first")),
            Step("down", linear, LinearConfig(hidden, dim)),
        )
    )


def mlp_reference(params, x, cfg):
    n = F.rms_norm(x, x.shape[-1:], params["norm"].weight, 0.1)
    gate, up = F.linear(n, params["up"].weight).chunk(2, -1)
    return F.linear(F.silu(gate) * up, params["down"].weight, params["down"].bias)


def case(rows, dim, hidden, **options):
    return Case(
        op=chain,
        cfg=mlp(dim, hidden),
        x=lambda d: d.randn(*rows, dim),
        reference=mlp_reference,
        name=f"chain-mlp-{rows}-{dim}-{hidden}",
        **options,
    )


def apart(dim, hidden):
    """`mlp` with a weight each for gate and up."""
    branches = tuple(Step(name, linear, LinearConfig(dim, hidden, bias=False)) for name in ("gate", "up"))
    return ChainConfig(
        steps=(
            Step("norm", rms_norm, RMSNormConfig(dim, eps=0.1)),
            Step("project", parallel, ParallelConfig(branches=branches)),
            Step("act", glu, GLUConfig(kind="swiglu", paired=True)),
            Step("down", linear, LinearConfig(hidden, dim)),
        )
    )


def apart_reference(params, x, cfg):
    n = F.rms_norm(x, x.shape[-1:], params["norm"].weight, 0.1)
    gate, up = (F.linear(n, params["project"][name].weight) for name in ("gate", "up"))
    return F.linear(F.silu(gate) * up, params["down"].weight, params["down"].bias)


EXTRAS = ChainConfig(
    steps=(
        Step("split", fork, ForkConfig(), gives=("stream",)),
        Step("a", linear, LinearConfig(3, 3)),
        Step("join", add, AddConfig(), takes=("stream",)),
        Step("more", add, AddConfig(), takes=("given",)),
        Step("again", add, AddConfig(), takes=("stream",)),
        Step("drop", dropout, DropoutConfig(0.0), takes=("key",)),
    ),
    extras=("given", "key"),
)


def outputs_case(rows, dim):
    return Case(
        op=chain,
        cfg=routed(dim),
        x=lambda d: d.randn(*rows, dim),
        reference=lambda p, x, cfg: routed_reference(p, x),
        name=f"chain-outputs-{rows}-{dim}",
    )


TIED = ChainConfig(
    steps=(Step("a", linear, LinearConfig(3, 3)), Step("b", linear, LinearConfig(3, 3))), ties={"b.weight": "a.weight"}
)


def tied_reference(params, x, cfg):
    w = params["a"].weight
    return F.linear(F.linear(x, w, params["a"].bias), w, params["b"].bias)


CASES = [
    case((2, 5), 8, 6),
    # 2^15 elements, from which on rules hold on the CPU; one reads x of the GLU in place of the recipe, which may then be missing
    case((64, 64), 8, 6, exempt=("guarded",)),
    case((0,), 4, 3),
    case((), 3, 1),
    Case(op=chain, cfg=apart(5, 4), x=lambda d: d.randn(2, 3, 5), reference=apart_reference, name="chain-apart"),
    Case(op=chain, cfg=apart(8, 8), x=lambda d: d.randn(4096, 8), reference=apart_reference, name="chain-apart-4096"),
    Case(
        op=chain,
        cfg=EXTRAS,
        x=lambda d: WithExtras(d.randn(2, 3), {"given": d.randn(2, 3), "key": d.key()}),
        reference=lambda p, x, cfg: F.linear(x.main, p["a"].weight, p["a"].bias) + 2 * x.main + x.extras["given"],
        name="chain-extras",
    ),
    outputs_case((2, 4), 3),
    Case(op=chain, cfg=TIED, x=lambda d: d.randn(4, 3), reference=tied_reference, name="chain-tied"),
]


@st.composite
def drawn(draw):
    rows, dim = tuple(draw(st.lists(st.integers(0, 4), max_size=2))), draw(st.integers(1, 6))
    return outputs_case(rows, dim) if draw(st.booleans()) else case(rows, dim, draw(st.integers(1, 6)))


LIN = LinearConfig(3, 3)
PARAMS = chain.init(TIED, key=None, device="meta")
TALLY = Step("t", tally, TallyConfig(3), gives=("load", "loss"))
LOSS = torch.tensor(1.0)


def bwd(dy, outputs=("load", "loss")):
    cfg = ChainConfig(steps=(TALLY,), outputs=outputs)
    return chain.bwd(chain.fwd(chain.init(cfg), torch.ones(2, 3), cfg)[1], dy, cfg)


ERRORS = [
    Error(call=lambda: ChainConfig(steps=()), match="ChainConfig: steps must be at least one Step"),
    Error(
        call=lambda: ChainConfig(steps=(Step("a", linear, LIN), Step("a", linear, LIN))),
        match="ChainConfig: steps must be uniquely named",
    ),
    Error(
        call=lambda: ChainConfig(steps=(Step("a", add, AddConfig(), takes=("skp",)),)),
        match="ChainConfig: takes of step 'a' must be names made before it ([]), got 'skp'",
    ),
    Error(
        call=lambda: ChainConfig(steps=(Step("a", fork, ForkConfig(), gives=("s",)),)),
        match="ChainConfig: every extra must be taken by a later step, got unused ['s']",
    ),
    Error(
        call=lambda: ChainConfig(steps=(Step("a", linear, LIN),), extras=("s",)),
        match="ChainConfig: every extra must be taken by a later step, got unused ['s']",
    ),
    Error(
        call=lambda: ChainConfig(steps=(Step("a", linear, LIN),), ties={"a.weight": "b.weight"}),
        match="ChainConfig: ties must be paths among a.weight, a.bias, got 'b.weight'",
    ),
    Error(
        call=lambda: ChainConfig(steps=(TALLY,), outputs=("load", "lost")),
        match="ChainConfig: outputs must be names that steps give (['load', 'loss']), got 'lost'",
    ),
    Error(
        call=lambda: ChainConfig(steps=EXTRAS.steps, extras=EXTRAS.extras, outputs=("given",)),
        match="ChainConfig: outputs must be names that steps give (['stream']), got 'given'",
    ),
    Error(
        call=lambda: ChainConfig(steps=(TALLY,), outputs=("load", "loss", "load")),
        match="ChainConfig: outputs must be different names, got ('load', 'loss', 'load')",
    ),
    Error(
        call=lambda: ChainConfig(steps=(TALLY,), outputs=("load",)),
        match="ChainConfig: every extra must be taken by a later step, or be one of outputs, got unused ['loss']",
    ),
    Error(
        call=lambda: ChainConfig(steps=(TALLY,), outputs="load"), match="ChainConfig: outputs must be a tuple of names, got 'load'"
    ),
    Error(
        call=lambda: ChainConfig(steps=(TALLY, Step("b", chain, routed(3))), outputs=("load", "loss")),
        match="ChainConfig: gives of step 'b' must be a new name, got 'load', made by step 't'",
    ),
    Error(
        call=lambda: Step("b", chain, routed(3), gives=("one",)),
        match="Step 'b': gives must be () or a name for each of its outputs ('load', 'loss', 'logits'), got ('one',)",
    ),
    Error(
        call=lambda: Step("b", chain, TIED, gives=("one",)),
        match="Step 'b': gives must be () (the config names no outputs), got ('one',)",
    ),
    Error(
        call=lambda: Step("b", tally, TallyConfig(3), gives=("one", "one")),
        match="Step 'b': gives must be different names, got ('one', 'one')",
    ),
    Error(
        call=lambda: bwd(torch.ones(2, 3)),
        match="chain_bwd: dy must be WithExtras with extras load, loss, as y is (None for zero), got float32[2, 3]",
        error=TypeError,
    ),
    Error(
        call=lambda: bwd(WithExtras(torch.ones(2, 3), {"loss": LOSS})),
        match="chain_bwd: dy.extras must be load, loss, as in y (None for zero), got missing ['load'], extra []",
    ),
    Error(
        call=lambda: bwd(WithExtras(None, {"load": None, "loss": LOSS, "z": None})),
        match="chain_bwd: dy.extras must be load, loss, as in y (None for zero), got missing [], extra ['z']",
    ),
    Error(
        call=lambda: bwd(WithExtras(None, {"load": torch.ones(3), "loss": None})),
        match="t: tally_dgrad: dy.1 must be None (load is of integers, which have no gradient), got float32[3]",
    ),
    Error(
        call=lambda: bwd(WithExtras(None, {"load": torch.ones(3, dtype=torch.int32), "loss": None})),
        match="chain_bwd: dy.extras.load must be",
        error=TypeError,
    ),
    Error(call=lambda: Step("a", linear, RMSNormConfig(3)), match="Step 'a': cfg must be LinearConfig", error=TypeError),
    Error(call=lambda: Step("not a name", linear, LIN), match="Step: name must be an identifier"),
    Error(
        call=lambda: chain_fwd({"a": None}, torch.ones(2, 3), TIED),
        match="chain_fwd: params must be a dict by step name: a, b, got missing ['b'], extra []: a step without params has None",
    ),
    Error(call=lambda: chain_fwd({"a": 1, "b": 2, "c": 3}, torch.ones(2, 3), TIED), match="got missing [], extra ['c']"),
    Error(
        call=lambda: chain_fwd({s.name: None for s in EXTRAS.steps}, torch.ones(2, 3), EXTRAS),
        match="chain_fwd: x must be WithExtras with extras ['given', 'key']",
        error=TypeError,
    ),
]
