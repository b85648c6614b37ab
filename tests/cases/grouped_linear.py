import torch
from hypothesis import strategies as st

from funcops import GroupedLinearConfig, grouped_linear, grouped_linear_fwd
from funcops.library.kernels.routing import sort_by_expert
from funcops.library.ops.grouped_linear import GroupedLinearParams
from funcops.testing import Case, Draw, Error


def reference(params, x, cfg):
    """One expert after the other, each on its own rows."""
    rows, offsets, order, last = (*x, None, None)[:4]
    rows = rows.reshape(-1, cfg.in_features)
    rows = rows[order.long() // last.shape[-1]] if cfg.gathered else rows
    scales = last.reshape(-1)[order.long(), None] if cfg.weighted else rows.new_ones(len(rows), 1)
    at, parts = offsets.tolist(), []
    for e in range(cfg.experts):
        own = rows[at[e] : at[e + 1]] @ params.weight[e].T
        parts.append(own + scales[at[e] : at[e + 1]] * params.bias[e] if cfg.bias else own)
    return torch.cat([*parts, rows.new_zeros(len(rows) - at[-1], cfg.out_features)])


def case(counts, i, o, behind=0, **options):
    """Experts with these numbers of rows, and rows behind the last."""
    cfg = GroupedLinearConfig(len(counts), i, o, **options)

    def x(d):
        offsets = torch.tensor([0, *counts], device="cpu").cumsum(0).to(torch.int32)
        return d.randn(sum(counts) + behind, i), offsets

    return Case(op=grouped_linear, cfg=cfg, x=x, reference=reference, name=f"grouped-{counts}-{behind}-{i}-{o}-{options}")


def weighted(counts, choices, i, o, behind=0, wide=False, **options):
    """Biases scaled by weights, for rows in another order than the weights."""
    cfg = GroupedLinearConfig(len(counts), i, o, weighted=True, **options)
    rows = sum(counts) + behind

    def x(d):
        offsets = torch.tensor([0, *counts], device="cpu").cumsum(0).to(torch.int32)
        weights = d.randn(rows // choices, choices)
        order = d.rand(rows).float().argsort().to(torch.int32)
        return d.randn(rows, i), offsets, order, weights.float() if wide and d.dtype.itemsize == 2 else weights

    name = f"grouped-weighted-{counts}-{behind}-{choices}-{i}-{o}-{wide}-{options}"
    return Case(op=grouped_linear, cfg=cfg, x=x, reference=reference, name=name)


def gathered(tokens, choices, experts, i, o, low=0, high=None, **options):
    """Choices of the experts from `low` to `high`; the number after the last expert is a dropped choice."""
    cfg = GroupedLinearConfig(experts, i, o, gathered=True, **options)

    def x(d):
        order, _, offsets, place = sort_by_expert(
            d.integers(low, experts if high is None else high, *tokens, choices).to(torch.int32).view(-1, choices), experts
        )
        return d.randn(*tokens, i), offsets, order, place.view(*tokens, choices)

    name = f"grouped-{tokens}x{choices}-of-{low}-{high}-{experts}-{i}-{o}-{options}"
    return Case(op=grouped_linear, cfg=cfg, x=x, reference=reference, name=name)


CASES = [
    case((3, 0, 2), 5, 3),
    case((0, 4, 0), 69, 3, behind=2, bias=False),
    case((0,), 4, 3, behind=3),
    case((0, 2, 1), 1, 5, stacked=False),
    case(tuple(3 * (e in (1, 62)) for e in range(64)), 3, 2),
    case((4,), 3, 2),
    weighted((3, 0, 2), 2, 5, 3, behind=1, wide=True),
    weighted((0, 3, 1), 1, 3, 2, stacked=False),
    gathered((2, 5), 2, 4, 5, 3),
    gathered((0,), 8, 4, 3, 2),
    gathered((7,), 8, 64, 3, 5, high=65, bias=False),
]


@st.composite
def drawn(draw):
    sizes, options = (draw(st.integers(1, 9)), draw(st.integers(1, 9))), dict(bias=draw(st.booleans()))
    if draw(st.booleans()):
        tokens = tuple(draw(st.lists(st.integers(0, 4), max_size=2)))
        experts = draw(st.integers(1, 5))
        low = draw(st.integers(0, experts))
        return gathered(tokens, draw(st.integers(1, 3)), experts, *sizes, low, draw(st.integers(low, experts)) + 1, **options)
    counts = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    if draw(st.booleans()):
        return weighted(tuple(counts), 1, *sizes, draw(st.integers(0, 3)), draw(st.booleans()), stacked=draw(st.booleans()))
    return case(tuple(counts), *sizes, draw(st.integers(0, 3)), stacked=draw(st.booleans()), **options)


def _call(cfg=None, x=None, weight=None, offsets=(0, 1, 2)):
    d = Draw(torch.float32)
    params = GroupedLinearParams(d.randn(2, 3, 4) if weight is None else weight, d.randn(2, 3))
    given = (torch.ones(2, 4), torch.tensor(offsets, dtype=torch.int32)) if x is None else x
    return lambda: grouped_linear_fwd(params, given, cfg or GroupedLinearConfig(2, 4, 3))


TWO = torch.tensor((0, 1, 2), dtype=torch.int32)
ROW = torch.ones(2, 3, 1)
GATHERED, WEIGHTED = (GroupedLinearConfig(2, 4, 3, **{name: True}) for name in ("gathered", "weighted"))


def _pending():
    y, residuals = _call()()
    return grouped_linear.dgrad(residuals, y, GroupedLinearConfig(2, 4, 3))[1]


ERRORS = [
    Error(
        call=_call(x=(torch.ones(1, 4).expand(2**31, 4), TWO)),
        match="grouped_linear_fwd: x.0 (rows) must be of at most 2147418112 rows, got 2147483648",
    ),
    Error(
        call=lambda: GroupedLinearConfig(2, 4, 3, bias=False, weighted=True),
        match="GroupedLinearConfig: weighted must be False without a bias or with gathered rows, got True",
    ),
    Error(
        call=_call(cfg=GroupedLinearConfig(2, 4, 3, weighted=True), x=(torch.ones(2, 4), TWO, TWO[:2], torch.ones(3, 1))),
        match="grouped_linear_fwd: x.3 (weights) must be 2 numbers, one for each row, got [3, 1]",
    ),
    Error(call=lambda: GroupedLinearConfig(0, 4, 3), match="GroupedLinearConfig: experts must be at least 1, got 0"),
    Error(call=_call(x=torch.ones(2, 4)), match="grouped_linear_fwd: x must be a tuple (rows, offsets)", error=TypeError),
    Error(call=_call(x=(torch.ones(2, 2, 4), TWO)), match="grouped_linear_fwd: x.0 (rows) must be [N, 4], got [2, 2, 4]"),
    Error(
        call=_call(x=(torch.ones(2, 4), TWO.long())),
        match="grouped_linear_fwd: x.1 (offsets) must be int32, got int64",
        error=TypeError,
    ),
    Error(call=_call(offsets=(0, 2, 3)), match="grouped_product: offsets must be ascending from 0 to at most 2"),
    Error(call=_call(offsets=(0, 2, 1)), match="grouped_product: offsets must be ascending from 0 to at most 2"),
    Error(call=_call(weight=torch.ones(2, 4, 3)), match="grouped_linear_fwd: params.weight must be [2, 3, 4], got [2, 4, 3]"),
    Error(
        call=_call(cfg=GroupedLinearConfig(2, 4, 3, stacked=False)),
        match="grouped_linear_fwd: params.weight must be a tuple of 2 tensors",
        error=TypeError,
    ),
    Error(
        call=_call(cfg=GroupedLinearConfig(2, 4, 3, gathered=True), x=(torch.ones(2, 4), TWO, TWO[:2], TWO[:2])),
        match="grouped_linear_fwd: x.3 (place) must be [2, 'K'], K at least 1, got [2]",
    ),
    *[
        Error(call=_call(cfg=cfg, x=(torch.ones(2, 4), TWO, *rest)), match=f"grouped_linear_fwd: {match}", error=error)
        for cfg, rest, match, error in (
            (GATHERED, (TWO[:2], TWO[:2, None].long()), "x.3 (place) must be int32, got int64", TypeError),
            (GATHERED, (TWO, TWO[:2, None]), "x.2 (order) must be [2], got [3]", ValueError),
            (WEIGHTED, (TWO[:2].long(), torch.ones(2, 1)), "x.2 (order) must be int32, got int64", TypeError),
            (WEIGHTED, (TWO[:2], TWO[:2]), "x.3 (weights) must be float32, got int32", TypeError),
        )
    ],
    Error(
        call=_call(cfg=GroupedLinearConfig(2, 4, 3, stacked=False), weight=(torch.ones(3, 4), torch.ones(4, 3))),
        match="grouped_linear_fwd: params.weight.1 must be [3, 4], got [4, 3]",
    ),
    Error(
        call=lambda: grouped_linear.products(_pending(), GroupedLinearConfig(2, 4, 3), into=GroupedLinearParams(ROW, ROW[..., 0])),
        match="grouped_linear_wgrad: into.weight must be [2, 3, 4], got [2, 3, 1]",
    ),
]
