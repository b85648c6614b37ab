import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from tally import TallyConfig, routed, routed_reference, tallied, tally

from funcops import LinearConfig, ParallelConfig, Step, WithExtras, chain, linear, parallel, parallel_fwd
from funcops.testing import Case, Error


def case(rows, dim, outs):
    cfg = ParallelConfig(branches=tuple(Step(f"b{i}", linear, LinearConfig(dim, o)) for i, o in enumerate(outs)))

    def reference(params, x, cfg):
        return tuple(F.linear(x, p.weight, p.bias) for p in params.values())

    return Case(op=parallel, cfg=cfg, x=lambda d: d.randn(*rows, dim), reference=reference, name=f"parallel-{rows}-{dim}-{outs}")


def outputs_case(rows, dim):
    """Three branches: a chain with outputs, an op with `gives` under other names, and an op with neither."""
    chained, plain = Step("chained", chain, routed(dim)), Step("plain", linear, LinearConfig(dim, 2))
    given = Step("given", tally, TallyConfig(dim), gives=("load_of_given", "loss_of_given"))

    def reference(params, x, cfg):
        y, (z, load, loss) = routed_reference(params["chained"], x), tallied(x, params["given"].weight)
        mains = y.main, z, F.linear(x, params["plain"].weight, params["plain"].bias)
        return WithExtras(mains, {**y.extras, "load_of_given": load, "loss_of_given": loss})

    cfg = ParallelConfig(branches=(chained, given, plain))
    return Case(op=parallel, cfg=cfg, x=lambda d: d.randn(*rows, dim), reference=reference, name=f"parallel-outputs-{rows}-{dim}")


CASES = [case((2, 5), 7, (3, 2, 1)), case((0,), 3, (2,)), case((), 1, (1, 1)), outputs_case((2, 4), 3)]


@st.composite
def drawn(draw):
    rows = tuple(draw(st.lists(st.integers(0, 4), max_size=2)))
    if draw(st.booleans()):
        return outputs_case(rows, draw(st.integers(1, 6)))
    return case(rows, draw(st.integers(1, 6)), draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))


TWO = ParallelConfig(branches=(Step("a", linear, LinearConfig(2, 2)), Step("b", linear, LinearConfig(2, 2))))
ERRORS = [
    Error(
        call=lambda: ParallelConfig(branches=tuple(Step(name, chain, routed(2)) for name in "ab")),
        match="ParallelConfig: gives of branch 'b' must be a new name, got 'load', given by branch 'a'",
    ),
    Error(call=lambda: ParallelConfig(branches=()), match="ParallelConfig: branches must be at least one Step"),
    Error(
        call=lambda: parallel_fwd({"a": None}, torch.ones(2), TWO),
        match="parallel_fwd: params must be a dict by branch name: a, b, got missing ['b'], extra []",
    ),
]
