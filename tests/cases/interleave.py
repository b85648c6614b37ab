import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from tally import routed, routed_reference

from funcops import (
    AddConfig,
    BMMConfig,
    ChainConfig,
    DropoutConfig,
    InterleaveConfig,
    LinearConfig,
    Step,
    WithExtras,
    add,
    bmm,
    chain,
    dropout,
    interleave,
    linear,
    random,
)
from funcops.testing import Case, Error


def case(rows, dim, microbatches=2):
    return Case(
        op=interleave,
        cfg=InterleaveConfig(linear, LinearConfig(dim, dim + 1), microbatches),
        x=lambda d: d.randn(*rows, dim),
        reference=lambda params, x, cfg: F.linear(x, params.weight, params.bias),
        name=f"interleave-{rows}-{dim}-{microbatches}",
    )


def given_reference(params, x, cfg):
    h = F.linear(x.main, params["a"].weight, params["a"].bias)
    return h + x.extras["row"] + torch.cat([x.extras["whole"]] * cfg.microbatches)


GIVEN = ChainConfig(
    steps=(
        Step("a", linear, LinearConfig(3, 3)),
        Step("join", add, AddConfig(), takes=("row",)),
        Step("again", add, AddConfig(), takes=("whole",)),
    ),
    extras=("row", "whole"),
)


def outputs_reference(params, x, cfg):
    found = [routed_reference(params, one) for one in x.chunk(cfg.microbatches)]
    return WithExtras(
        torch.cat([y.main for y in found]), {name: torch.stack([y.extras[name] for y in found]) for name in cfg.outputs}
    )


def outputs_case(rows, dim, microbatches=2):
    return Case(
        op=interleave,
        cfg=InterleaveConfig(chain, routed(dim), microbatches),
        x=lambda d: d.randn(*rows, dim),
        reference=outputs_reference,
        name=f"interleave-outputs-{rows}-{dim}-{microbatches}",
    )


CASES = [
    case((4, 5), 7),
    case((6,), 3, 3),
    case((0,), 3),
    case((1,), 1, 1),
    Case(
        op=interleave,
        cfg=InterleaveConfig(chain, GIVEN, 2, by_rows=("row",)),
        x=lambda d: WithExtras(d.randn(4, 3), {"row": d.randn(4, 3), "whole": d.randn(2, 3)}),
        reference=given_reference,
        name="interleave-extras",
    ),
    outputs_case((4, 3), 3),
]


@st.composite
def drawn(draw):
    microbatches = draw(st.integers(1, 3))
    rows = (microbatches * draw(st.integers(0, 2)), *draw(st.lists(st.integers(0, 4), max_size=1)))
    make = outputs_case if draw(st.booleans()) else case
    return make(rows, draw(st.integers(1, 6)), microbatches)


CFG = InterleaveConfig(linear, LinearConfig(2, 2))
PARAMS = interleave.init(CFG, key=random.key(0))
MIXING = InterleaveConfig(bmm, BMMConfig())
ERRORS = [
    Error(
        call=lambda: InterleaveConfig(linear, LinearConfig(2, 2), 0),
        match="InterleaveConfig: microbatches must be at least 1, got 0",
    ),
    Error(
        call=lambda: InterleaveConfig(dropout, DropoutConfig(0.5)),
        match="InterleaveConfig: op must be one without a random key (put it in a chain), got dropout",
    ),
    Error(
        call=lambda: InterleaveConfig(chain, GIVEN, by_rows=("rows",)),
        match="InterleaveConfig: by_rows must be names of extras that are not keys (row, whole), got ('rows',)",
    ),
    Error(
        call=lambda: interleave.fwd(PARAMS, torch.ones(3, 2), CFG),
        match="interleave_fwd: x must be of one number of rows, which 2 microbatches divide (pad the batch",
    ),
    Error(
        call=lambda: interleave.fwd(None, (torch.ones(4, 2), torch.ones(4, 2)), MIXING),
        match="interleave_fwd: x must be with rows before its positions, which bmm mixes (add a dimension",
    ),
    Error(
        call=lambda: interleave.fwd(PARAMS, torch.tensor(1.0), CFG),
        match="interleave_fwd: x must be tensors of at least one dimension, which has the rows, got float32",
        error=TypeError,
    ),
    Error(
        call=lambda: interleave.bwd(interleave.fwd(PARAMS, torch.ones(4, 2), CFG)[1], torch.ones(3, 2), CFG),
        match="interleave_bwd: dy must be of one number of rows, which 2 microbatches divide",
    ),
]
