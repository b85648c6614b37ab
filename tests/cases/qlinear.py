import torch
from hypothesis import strategies as st

from funcops.library.formats import QWeight, quantize_sides, quantize_tensor
from funcops.library.formats.recipes import MXFP8, NVFP4, Fp8Block, Fp8Current, Fp8Delayed
from funcops.library.formats.scaled import Scaled
from funcops.library.kernels import quantize as kernels
from funcops.library.ops.linear import LinearParams
from funcops.library.ops.qlinear import QLinearConfig, qlinear, qlinear_fwd
from funcops.testing import Case, Draw, Error


class Products(torch.autograd.Function):
    """The three products of decoded operands in float64, with straight-through gradients."""

    @staticmethod
    def forward(ctx, x, w, recipe, scale):
        def q(t, format, side, which):
            """A decoded operand; for "col" the transposed tensor, as the product sees it."""
            if scale is None:
                made = quantize_tensor(t, format, side=side, hadamard=recipe.hadamard and side == "col" and which != 1)
                return kernels.dequantize(*made.args, *format.args(), made.width, torch.float64)
            largest, kind = (57344.0, torch.float8_e5m2) if format.element == "e5m2" else (448.0, torch.float8_e4m3fn)
            codes = (t.float() * scale[which]).clamp(-largest, largest).to(kind)
            decoded = codes.double() * (1.0 / scale[which]).double()
            return decoded if side == "row" else decoded.reshape(-1, t.shape[-1]).mT

        ctx.q, ctx.recipe, ctx.scaled = q, recipe, scale is not None
        ctx.save_for_backward(x, w)
        return q(x, recipe.x, "row", 0) @ q(w, recipe.w, "row", 1).mT

    @staticmethod
    def backward(ctx, dy):
        (x, w), q, recipe = ctx.saved_tensors, ctx.q, ctx.recipe
        dx = q(dy, recipe.dy, "row", 2) @ q(w, recipe.w, "col", 1).mT
        rows, inner = dy.reshape(-1, dy.shape[-1]).mT, x.reshape(-1, x.shape[-1]).mT
        if recipe.wgrad == "low":
            rows, inner = q(dy, recipe.dy, "col", 2), q(x, recipe.x, "col", 0)
        amaxes = (
            torch.stack([t.abs().max() if t.numel() else t.new_zeros(()) for t in (x, w, dy)]).float().view(torch.int32)
            if ctx.scaled
            else None
        )  # as bits
        return dx, rows @ inner.mT, None, None if amaxes is None else amaxes.to(x.dtype)


def reference(params, x, cfg):
    weight, scale = (params.weight.value, params.weight.scale) if cfg.recipe.delayed else (params.weight, None)
    y = Products.apply(x, weight, cfg.recipe, scale)
    return y if params.bias is None else y + params.bias


# straight-through gradients differ from a step function's; a float32 scale is not a weight, and its gradient is an amax
EXEMPT = ("finite_differences",)
# amaxes join by their maximum, not by a sum; and their path is inside the weight's
OF_SCALES = ("split", "mirror", "frugal")


def working(i, o, recipe, bias, columns):
    """Params whose weight is already quantised; in the reference it is the decoded codes."""

    def params(d):
        row, col = quantize_sides(d.randn(o, i), recipe.w)
        return LinearParams(QWeight(row, col if columns else None, None), d.randn(o) if bias else None)

    return params


def scaled(i, o, bias):
    """Params of delayed scaling with scales other than 1; in the gradient amaxes are in their slots."""
    return lambda d: LinearParams(Scaled(d.randn(o, i), torch.tensor([4.0, 0.5, 32.0]), None), d.randn(o) if bias else None)


def case(rows, i, o, recipe, bias=True, columns=None):
    return Case(
        params=scaled(i, o, bias) if recipe.delayed else None if columns is None else working(i, o, recipe, bias, columns),
        op=qlinear,
        cfg=QLinearConfig(i, o, recipe, bias=bias),
        x=lambda d: d.randn(*rows, i),
        reference=reference,
        exempt=EXEMPT + (OF_SCALES if recipe.delayed else ()),
        name=f"qlinear-{rows}-{i}-{o}-{type(recipe).__name__}-{recipe.keep}-{bias}-{columns}",
    )


CASES = [
    case((2, 5), 69, 3, Fp8Block()),
    case((130,), 3, 129, Fp8Block(keep="col", bwd="e5m2")),
    case((0,), 4, 3, Fp8Block()),
    case((3,), 5, 4, Fp8Block(keep="input", wgrad="high"), bias=False),
    case((2, 5), 9, 3, Fp8Current()),
    case((0,), 3, 4, Fp8Delayed()),
    case((5, 7), 32, 16, NVFP4(stochastic=False, emulate=True)),
    case((4,), 32, 32, MXFP8(keep="input", emulate=True), columns=True),
    case((3, 2), 32, 32, MXFP8(keep="row", emulate=True), columns=True),
    case((3, 2), 9, 5, Fp8Delayed()),
    case((3, 2), 32, 16, NVFP4(stochastic=False, row_scaled=True, four_over_six="all", w_tile=(1, 16))),
]

RECIPES = [
    Fp8Block(),
    Fp8Block(keep="col"),
    Fp8Block(keep="input"),
    Fp8Block(keep="input", wgrad="high"),
    Fp8Current(),
    MXFP8(),
    NVFP4(stochastic=False),
    NVFP4(stochastic=False, row_scaled=True, four_over_six="all", w_tile=(1, 16)),
    Fp8Block(x_tile=(128, 128), w_tile=(1, 128), amax_epsilon=0.5),
    MXFP8(scaling_mode="floor", w_tile=(32, 32)),
]


@st.composite
def drawn(draw):
    recipe = draw(st.sampled_from(RECIPES))
    rows = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    i, o = (draw(st.integers(1, 9)) * recipe.multiple for _ in range(2))
    return case(rows, i, o, recipe, draw(st.booleans()))


def _call(cfg=None, x=None, weight=None, bias=None):
    d = Draw(torch.float32)
    params = LinearParams(d.randn(3, 4) if weight is None else weight, d.randn(3) if bias is None else bias)
    return lambda: qlinear_fwd(params, d.randn(2, 4) if x is None else x, cfg or QLinearConfig(4, 3, Fp8Block()))


ERRORS = [
    Error(call=_call(x=torch.ones(2, 5)), match="qlinear_fwd: x must be [..., 4], got [2, 5]"),
    Error(call=_call(weight=torch.ones(4, 3)), match="qlinear_fwd: params.weight must be [3, 4], got [4, 3]"),
    Error(call=lambda: QLinearConfig(33, 32, MXFP8()), match="QLinearConfig: in_features must be a multiple of 32 (MXFP8), got 33"),
    Error(call=lambda: QLinearConfig(4, 3, "fp8"), match="QLinearConfig: recipe must be a recipe, such as", error=TypeError),
    Error(call=lambda: Fp8Block(fwd="e4m4"), match="Fp8Block: fwd must be one of e4m3, e5m2 (did you mean e4m3?), got 'e4m4'"),
    Error(call=lambda: NVFP4(keep="row"), match="NVFP4: keep must be 'input' or 'col', as codes by rows would be rounded"),
    Error(call=lambda: Fp8Block(wgrad="high"), match="Fp8Block: keep must be 'input' where wgrad is 'high', got 'row'"),
    Error(
        call=_call(cfg=QLinearConfig(4, 3, Fp8Delayed())),
        match="qlinear_fwd: params.weight must be a Scaled weight, from quantize_params(params, cfg, state)",
        error=TypeError,
    ),
    Error(
        call=_call(weight=Scaled(torch.ones(3, 4), torch.ones(3), None)),
        match="qlinear_fwd: params.weight must be without scales of its own (the recipe is Fp8Block)",
        error=TypeError,
    ),
    Error(
        call=_call(weight=quantize_tensor(torch.ones(3, 4), Fp8Block().w)),
        match="qlinear_fwd: params.weight must be a tensor [3, 4], got QTensor",
        error=TypeError,
    ),
    *[
        Error(call=lambda recipe=recipe, given=given: recipe(**given), match=match)
        for recipe, given, match in (
            (Fp8Block, {"scales": "e8m0"}, "Fp8Block: scales must be 'pow2' or 'float32', got 'e8m0'"),
            (Fp8Block, {"keep": "both"}, "Fp8Block: keep must be one of input, row, col, got 'both'"),
            (Fp8Block, {"wgrad": "mid"}, "Fp8Block: wgrad must be one of low, high, got 'mid'"),
            (Fp8Current, {"fwd": "e4m4"}, "Fp8Current: fwd must be one of e4m3, e5m2 (did you mean e4m3?), got 'e4m4'"),
            (Fp8Delayed, {"bwd": "e2m1"}, "Fp8Delayed: bwd must be one of e4m3, e5m2, got 'e2m1'"),
            (Fp8Delayed, {"history": 0}, "Fp8Delayed: history must be at least 1, got 0"),
            (Fp8Delayed, {"keep": "input"}, "Fp8Delayed: keep must be 'row' or 'col' (an amax is measured once), got 'input'"),
            (MXFP8, {"fwd": "e2m1"}, "MXFP8: fwd must be one of e4m3, e5m2, got 'e2m1'"),
        )
    ],
]
