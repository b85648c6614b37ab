import torch
from hypothesis import strategies as st

from funcops import UnpermuteConfig, unpermute, unpermute_fwd
from funcops.testing import Case, Error


def reference(params, x, cfg):
    rows, place = x
    return rows[place.long()].sum(-2)


def case(tokens, width, choices):
    def x(d):
        count = torch.Size((*tokens, choices)).numel()
        place = torch.randperm(count, generator=d.generator, device="cpu").view(*tokens, choices)
        return d.randn(count, width), place.to(torch.int32)

    return Case(op=unpermute, cfg=UnpermuteConfig(), x=x, reference=reference, name=f"unpermute-{tokens}-{width}-{choices}")


CASES = [case((2, 5), 6, 2), case((7,), 5, 3), case((9,), 16, 8), case((0,), 3, 2), case((), 3, 1), case((5,), 0, 2)]


@st.composite
def drawn(draw):
    tokens = tuple(draw(st.lists(st.integers(0, 4), max_size=2)))
    return case(tokens, draw(st.integers(0, 4)), draw(st.integers(1, 3)))


ROWS, PLACE = torch.ones(6, 4), torch.arange(6, dtype=torch.int32).view(3, 2)
ERRORS = [
    Error(
        call=lambda: unpermute_fwd(None, (ROWS[:5], PLACE), UnpermuteConfig()),
        match="unpermute_fwd: x.0 (rows) must be [6, D], a row for each place, got [5, 4]",
    ),
    Error(
        call=lambda: unpermute_fwd(None, (ROWS, PLACE.long()), UnpermuteConfig()),
        match="unpermute_fwd: x.1 (place) must be int32, got int64",
        error=TypeError,
    ),
    Error(call=lambda: unpermute_fwd(None, (ROWS, PLACE + 1), UnpermuteConfig()), match="", error=IndexError),
]
