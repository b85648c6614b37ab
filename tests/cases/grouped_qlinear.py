import torch
from cases.experts import gated
from cases.qlinear import EXEMPT, OF_SCALES, Products
from hypothesis import strategies as st

import funcops
from funcops import ExpertsConfig, GroupedQLinearConfig, grouped_qlinear, grouped_qlinear_fwd, random
from funcops.engine.trees import replace
from funcops.library.formats import QWeight, quantize_sides, stacked
from funcops.library.formats.recipes import MXFP8, NVFP4, Fp8Block, Fp8Current, Fp8Delayed
from funcops.library.formats.scaled import Scaled
from funcops.library.kernels.routing import sort_by_expert
from funcops.library.ops.expert_steps import ExpertStepsConfig, expert_steps, plain_experts
from funcops.library.ops.grouped_linear import GroupedLinearParams
from funcops.testing import Case, Draw, Error


def reference(params, x, cfg):
    """One group after the other, each a quantised linear layer of its own."""
    rows, offsets, order, last = (*x, None, None)[:4]
    rows = rows.reshape(-1, cfg.in_features)
    rows = rows[(order // last.shape[-1]).long()] if cfg.gathered else rows
    s = last.reshape(-1)[order.long()].unsqueeze(-1) if cfg.weighted else torch.ones(len(rows), 1, dtype=rows.dtype)
    weight, scales = (params.weight.value, params.weight.scale) if cfg.recipe.delayed else (params.weight, [None] * cfg.experts)
    at, parts = offsets.tolist(), []
    for e in range(cfg.experts):
        own = rows[at[e] : at[e + 1]]
        y = Products.apply(own, weight[e], cfg.recipe, scales[e])
        parts.append(y + s[at[e] : at[e + 1]] * params.bias[e] if cfg.bias else y)
    return torch.cat([*parts, rows.new_zeros(len(rows) - at[-1], cfg.out_features)])


def prepared(cfg, columns):
    """Params whose weights are already quantised; in the reference they are the decoded codes."""

    def params(d):
        made = [quantize_sides(d.randn(cfg.out_features, cfg.in_features), cfg.recipe.w) for _ in range(cfg.experts)]
        row, col = (stacked(list(side)) for side in zip(*made, strict=True))
        return GroupedLinearParams(QWeight(row, col if columns else None, None), d.randn(cfg.experts, cfg.out_features))

    return params


def scaled(cfg):
    """Params of delayed scaling; in the gradient amaxes are in the slots of the scales."""

    def params(d):
        scales = torch.tensor([4.0, 0.5, 32.0]) * 2.0 ** torch.arange(cfg.experts).unsqueeze(1)
        return GroupedLinearParams(
            Scaled(d.randn(cfg.experts, cfg.out_features, cfg.in_features), scales, None),
            d.randn(cfg.experts, cfg.out_features) if cfg.bias else None,
        )

    return params


def _case(cfg, x, columns, name):
    return Case(
        params=scaled(cfg) if cfg.recipe.delayed else None if columns is None else prepared(cfg, columns),
        op=grouped_qlinear,
        cfg=cfg,
        x=x,
        reference=reference,
        exempt=EXEMPT + (OF_SCALES if cfg.recipe.delayed else ()),
        name=f"grouped-{name}-{cfg.in_features}-{cfg.out_features}-{type(cfg.recipe).__name__}-{cfg.recipe.keep}-{columns}",
    )


def case(counts, i, o, recipe, behind=0, columns=None, **options):
    """Groups with these numbers of rows, and rows behind the last."""

    def x(d):
        rows = sum(counts) + behind
        given = d.randn(rows, i), torch.tensor([0, *counts], device="cpu").cumsum(0).to(torch.int32)
        if "weighted" not in options:
            return given
        return *given, torch.arange(rows, dtype=torch.int32, device="cpu").flip(0), d.rand(rows, 1)

    return _case(GroupedQLinearConfig(len(counts), i, o, recipe, **options), x, columns, f"{counts}-{behind}-{options}")


def gathered(tokens, choices, experts, i, o, recipe, **options):
    """Choices of experts; the number of experts itself is a dropped choice."""

    def x(d):
        order, _, offsets, place = sort_by_expert(
            d.integers(0, experts + 1, *tokens, choices).to(torch.int32).view(-1, choices), experts
        )
        return d.randn(*tokens, i), offsets, order, place.view(*tokens, choices)

    cfg = GroupedQLinearConfig(experts, i, o, recipe, gathered=True, **options)
    return _case(cfg, x, None, f"{tokens}x{choices}-of-{experts}-{options}")


def of_steps(params, x, cfg):
    """`experts` as one expert after the other, each layer a quantised one; the weight is applied before down, as in the chain."""
    weights, tokens, indices = x
    of = {step.name: step.cfg for step in cfg.cfg.steps}
    flat, choices, rows = indices.reshape(-1).long(), indices.shape[-1], tokens.reshape(-1, tokens.shape[-1])
    total = torch.zeros_like(rows)
    for e in range(of["up"].experts):
        at = (flat == e).nonzero()[:, 0]
        z = Products.apply(rows[at // choices], params.up.weight[e], of["up"].recipe, None)
        a = gated(z, of["act"]) * weights.reshape(-1)[at].unsqueeze(-1)
        total = total.index_add(0, at // choices, Products.apply(a, params.down.weight[e], of["down"].recipe, None))
    return total.view_as(tokens)


def steps(recipe, count, h, i):
    """Only float64: in other dtypes values between the layers may be rounded to another code than in the reference. Frugal reads
    the needs of a chain's x, which differs here; `plain_experts` obeys it."""
    of = {"up": h, "down": i}

    def low(name, op, cfg):
        if name not in of:
            return op, cfg
        made = GroupedQLinearConfig(count, of[name], cfg.out_features, recipe, bias=False, gathered=cfg.gathered)
        return grouped_qlinear, made

    def x(d):
        indices = d.rand(2, 3, count + 1).argsort(-1)[..., :2].to(torch.int32)
        return d.rand(2, 3, 2), d.randn(2, 3, h), indices

    cfg = ExpertStepsConfig(plain_experts(ExpertsConfig(count, h, i)).with_parts(low))
    name = f"expert_steps-{count}-{h}-{i}-{type(recipe).__name__}"
    return Case(op=expert_steps, cfg=cfg, x=x, reference=of_steps, dtypes=(torch.float64,), exempt=(*EXEMPT, "frugal"), name=name)


CASES = [
    case((3, 0, 2), 69, 3, Fp8Block()),
    case((0, 130, 0), 3, 5, Fp8Block(keep="col", bwd="e5m2"), behind=2, bias=False),
    case((0,), 4, 3, Fp8Block(), behind=3),
    case((2, 1), 5, 4, Fp8Block(keep="input", wgrad="high"), bias=False),
    case((3, 0, 4), 9, 3, Fp8Current(), behind=1),
    case((4, 17), 32, 16, NVFP4(stochastic=False, emulate=True)),
    case((4, 0), 32, 32, MXFP8(keep="input", emulate=True), columns=True),
    case((4, 0, 2), 32, 32, MXFP8(keep="row", emulate=True), columns=True),
    case((3, 0, 2), 9, 5, Fp8Delayed()),
    case((2, 0, 1), 5, 3, Fp8Block(keep="col"), behind=1, weighted=True),
    gathered((2, 3), 2, 3, 5, 3, Fp8Block()),
    gathered((5,), 2, 4, 3, 5, Fp8Current(keep="col"), bias=False),
    steps(Fp8Block(), 3, 5, 4),
]
RECIPES = [Fp8Block(), Fp8Block(keep="col"), Fp8Block(keep="input"), Fp8Current(), MXFP8(), NVFP4(stochastic=False)]


@st.composite
def drawn(draw):
    recipe, bias = draw(st.sampled_from(RECIPES)), draw(st.booleans())
    i, o = (draw(st.integers(1, 4)) * recipe.multiple for _ in range(2))
    if draw(st.booleans()):
        tokens = tuple(draw(st.lists(st.integers(0, 4), max_size=2)))
        return gathered(tokens, draw(st.integers(1, 3)), draw(st.integers(1, 4)), i, o, recipe, bias=bias)
    counts = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    return case(tuple(counts), i, o, recipe, draw(st.integers(0, 3)), bias=bias)


TWO = torch.tensor((0, 1, 2), dtype=torch.int32)


def _call(x=None, weight=None, offsets=TWO, recipe=None):
    cfg, d = GroupedQLinearConfig(2, 4, 3, recipe or Fp8Block()), Draw(torch.float32)
    params = GroupedLinearParams(d.randn(2, 3, 4) if weight is None else weight, d.randn(2, 3))
    return lambda: grouped_qlinear_fwd(params, (torch.ones(2, 4) if x is None else x, offsets), cfg)


def _edited_pending():
    """A pending whose x has lost a row of its codes."""
    y, residuals = _call()()
    pending = grouped_qlinear.dgrad(residuals, y, GroupedQLinearConfig(2, 4, 3, Fp8Block()))[1]
    return pending.copy(x=replace(pending.x, codes=pending.x.codes[:1]))


def _dgrad_without_rounding(cfg):
    params = grouped_qlinear.init(cfg, key=random.key(0))
    params = funcops.low_precision.quantize_params(params, cfg, dtype=torch.float32, key=random.key(1))
    y, residuals = grouped_qlinear.fwd(params, (torch.ones(2, 16), TWO), cfg)
    return grouped_qlinear.dgrad(residuals.copy(rounding=None), y, cfg)


ERRORS = [
    Error(call=_call(x=torch.ones(2, 5)), match="grouped_qlinear_fwd: x.0 (rows) must be [..., 4], got [2, 5]"),
    Error(call=_call(offsets=TWO.long()), match="grouped_qlinear_fwd: x.1 (offsets) must be int32, got int64", error=TypeError),
    Error(call=_call(offsets=TWO + 1), match="grouped_product: offsets must be ascending from 0 to at most 2"),
    Error(call=_call(weight=torch.ones(3, 4)), match="grouped_qlinear_fwd: params.weight must be [2, 3, 4], got [3, 4]"),
    Error(
        call=_call(recipe=Fp8Delayed()),
        match="grouped_qlinear_fwd: params.weight must be a Scaled weight, from quantize_params(params, cfg, state)",
        error=TypeError,
    ),
    Error(
        call=_call(weight=Scaled(torch.ones(2, 3, 4), torch.ones(3), None), recipe=Fp8Delayed()),
        match="grouped_qlinear_fwd: params.weight.scale must be [2, 3], got [3]",
    ),
    Error(
        call=lambda: GroupedQLinearConfig(2, 32, 33, MXFP8()),
        match="GroupedQLinearConfig: out_features must be a multiple of 32 (MXFP8), got 33",
    ),
    Error(call=lambda: GroupedQLinearConfig(0, 4, 3, Fp8Block()), match="GroupedQLinearConfig: experts must be at least 1, got 0"),
    Error(
        call=lambda: grouped_qlinear.wgrad(_edited_pending(), GroupedQLinearConfig(2, 4, 3, Fp8Block())),
        match="grouped_qlinear_wgrad: pending.x.codes must be [2, 4], got [1, 4]",
    ),
    Error(
        call=lambda: _dgrad_without_rounding(GroupedQLinearConfig(2, 16, 16, NVFP4(stochastic=True))),
        match="grouped_qlinear_dgrad: residuals.rounding must be kept (the recipe rounds dy by it), got None",
    ),
]
