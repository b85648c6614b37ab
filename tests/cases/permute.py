import torch
from hypothesis import strategies as st

from funcops import PermuteConfig, permute, permute_dgrad, permute_fwd
from funcops.testing import Case, Error


def reference(params, x, cfg):
    t, indices = x
    experts, choices = indices.flatten().tolist(), indices.shape[-1]
    order = sorted(range(len(experts)), key=lambda row: experts[row])
    flat = t.reshape(len(experts) // choices, t.shape[-1])
    parts = [flat[row // choices] * (experts[row] < cfg.experts) for row in order]
    rows = torch.stack(parts) if parts else flat[:0]
    offsets = torch.tensor([sum(e < i for e in experts) for i in range(cfg.experts + 1)], dtype=torch.int32)
    place = torch.tensor([order.index(row) for row in range(len(order))], dtype=torch.int32).view(indices.shape)
    return rows, offsets, place


def case(rows, width, experts, choices, used=None):
    """`used`: the experts that are chosen; E is a dropped choice."""

    def x(d):
        few = torch.tensor(list(range(experts)) if used is None else used, device="cpu")
        picks = few[d.integers(0, len(few), *rows, choices)]
        return d.randn(*rows, width), picks.to(torch.int32)

    return Case(
        op=permute,
        cfg=PermuteConfig(experts),
        casts=True,
        x=x,
        reference=reference,
        free=() if rows else ("x.0", "x.1"),  # one token may have any width and number of choices
        name=f"permute-{list(rows)}-{width}-{experts}-{choices}-{used}",
    )


def ordered(params, x, cfg):
    """The reference for choices of experts: x, weights, offsets, the order of rows, and each row's place."""
    weights, t, indices = x
    _, offsets, place = reference(None, (t, indices), cfg)
    order = torch.empty_like(place.flatten())
    for choice, row in enumerate(place.flatten().tolist()):
        order[row] = choice
    return t * 1, weights * 1, offsets, order, place


def gathered(rows, width, experts, choices, wide=False):
    def x(d):
        weights = d.rand(*rows, choices)
        indices = d.integers(0, experts + 1, *rows, choices).to(torch.int32)
        return weights.float() if wide and d.dtype.itemsize == 2 else weights, d.randn(*rows, width), indices

    return Case(
        op=permute,
        cfg=PermuteConfig(experts, gathered=True),
        casts=True,
        x=x,
        reference=ordered,
        name=f"permute-gathered-{list(rows)}-{width}-{experts}-{choices}-{wide}",
    )


CASES = [
    gathered((2, 5), 3, 4, 2, wide=True),
    gathered((0,), 3, 4, 2),
    case((2, 5), 6, 4, 2),
    case((9,), 5, 6, 3, used=(1, 2, 4, 6)),  # the first, a middle and the last are empty, and some are dropped
    case((7,), 16, 4, 2, used=(2,)),
    case((3,), 4, 2, 1, used=(2,)),
    case((0,), 3, 4, 2),
    case((), 3, 1, 1),
    case((5,), 0, 2, 2),
    case((2,), 3, 64, 8),
    case((3,), 2, 64, 2, used=(0, 63)),
    case((4,), 3, 64, 1),
    case((4,), 3, 4, 1, used=(3,)),
]


@st.composite
def drawn(draw):
    experts = draw(st.integers(1, 5))
    used = draw(st.lists(st.integers(0, experts), min_size=1, max_size=3))
    rows = tuple(draw(st.lists(st.integers(0, 4), max_size=2)))
    if draw(st.booleans()):
        return gathered(rows, draw(st.integers(0, 4)), experts, draw(st.integers(1, 3)), draw(st.booleans()))
    return case(rows, draw(st.integers(0, 4)), experts, draw(st.integers(1, 3)), used)


X, TOP, TO_TWO = torch.ones(3, 4), torch.zeros(3, 2, dtype=torch.int32), PermuteConfig(2)
ERRORS = [
    Error(
        call=lambda: permute_fwd(None, (X[:1].expand(2**30, -1), TOP[:1, :1].expand(2**30, 2)), TO_TWO),
        match="permute_fwd: x.1 (indices) must be of at most 2147418112 rows, got 2147483648",
    ),
    Error(
        call=lambda: permute_fwd(None, (X[:, :2], TOP), PermuteConfig(2, gathered=True)),
        match="permute_fwd: x must be a tuple (weights, x, indices)",
        error=TypeError,
    ),
    Error(
        call=lambda: permute_fwd(None, (X[:2, :2], X, TOP), PermuteConfig(2, gathered=True)),
        match="permute_fwd: x.0 (weights) must be [3, 'K'], K at least 1, one row per token of x.1, got [2, 2]",
    ),
    Error(
        call=lambda: permute_dgrad(
            permute_fwd(None, (X[:, :2], X, TOP), PermuteConfig(2, gathered=True))[1],
            (X, X, None, None, None),
            PermuteConfig(2, gathered=True),
        ),
        match="permute_dgrad: dy.1 (d weights) must be [3, 2], got [3, 4]",
    ),
    Error(call=lambda: PermuteConfig(0), match="PermuteConfig: experts must be at least 1, got 0"),
    Error(call=lambda: permute_fwd(None, X, TO_TWO), match="permute_fwd: x must be a tuple (x, indices)", error=TypeError),
    Error(call=lambda: permute_fwd(None, (X[:2], TOP), TO_TWO), match="permute_fwd: x.0 must be [3, D], one row per token of x.1"),
    Error(call=lambda: permute_fwd(None, (X, TOP + 3), TO_TWO), match="", error=IndexError),
    Error(call=lambda: permute_fwd(None, (X, TOP[:, :0]), TO_TWO), match="permute_fwd: x.1 (indices) must be [..., K], K at least"),
    Error(
        call=lambda: permute_dgrad(permute_fwd(None, (X, TOP), TO_TWO)[1], X, TO_TWO),
        match="permute_dgrad: dy must be a tuple (drows, None, None), got float32[3, 4]",
        error=TypeError,
    ),
    Error(
        call=lambda: permute_fwd(None, (X[:, :2], X, TOP + 3), PermuteConfig(2, gathered=True)),
        match="permute_fwd: x.2 (indices) must be ids from 0 to 2, got",
        error=IndexError,
    ),
    Error(
        call=lambda: permute_dgrad(permute_fwd(None, (X, TOP), TO_TWO)[1], (X, None, None), TO_TWO),
        match="permute_dgrad: dy.0 must be [6, 4], got [3, 4]",
    ),
    Error(
        call=lambda: permute_dgrad(permute_fwd(None, (X, TOP), TO_TWO)[1], (None, X, None), TO_TWO),
        match="permute_dgrad: dy.1 must be None (offsets are integers, without a gradient), got float32[3, 4]",
        error=TypeError,
    ),
    Error(
        call=lambda: permute_dgrad(
            permute_fwd(None, (X[:, :2], X, TOP), PermuteConfig(2, gathered=True))[1],
            (None, None, None, X, None),
            PermuteConfig(2, gathered=True),
        ),
        match="permute_dgrad: dy.3 must be None (order are integers, without a gradient), got float32[3, 4]",
        error=TypeError,
    ),
]
