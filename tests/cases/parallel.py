import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from funcops import LinearConfig, ParallelConfig, Step, linear, parallel, parallel_fwd
from funcops.testing import Case, Error


def case(rows, dim, outs):
    cfg = ParallelConfig(branches=tuple(Step(f"b{i}", linear, LinearConfig(dim, o)) for i, o in enumerate(outs)))

    def reference(params, x, cfg):
        return tuple(F.linear(x, p.weight, p.bias) for p in params.values())

    return Case(op=parallel, cfg=cfg, x=lambda d: d.randn(*rows, dim), reference=reference, name=f"parallel-{rows}-{dim}-{outs}")


CASES = [case((2, 5), 7, (3, 2, 1)), case((0,), 3, (2,)), case((), 1, (1, 1))]


@st.composite
def drawn(draw):
    rows = tuple(draw(st.lists(st.integers(0, 4), max_size=2)))
    return case(rows, draw(st.integers(1, 6)), draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))


TWO = ParallelConfig(branches=(Step("a", linear, LinearConfig(2, 2)), Step("b", linear, LinearConfig(2, 2))))
ERRORS = [
    Error(call=lambda: ParallelConfig(branches=()), match="ParallelConfig: branches must be at least one Step"),
    Error(
        call=lambda: parallel_fwd({"a": None}, torch.ones(2), TWO),
        match="parallel_fwd: params must be a dict by branch name: a, b, got missing ['b'], extra []",
    ),
]
