"""The experts of a mixture of experts: each token passes through the K experts chosen for it.

    y_t = sum over k of w_tk down_e f(up_e x_t)        e = indices[t, k];  f: a gated linear unit, whose gate is the first I rows

Rows are sorted by expert: row n is one choice of a token, s_n its weight.

    z = x[token] up_e^T        a = f(g) l of z = (g, l)        y = sum over k of (s a down_e^T)[place[:, k]]
    da = dy[token] down_e      ds = rowsum(da a), d weights = ds[place]      dz = s (da l f'(g), da f(g))
    dx = sum over k of (dz up_e)[place[:, k]]      d up_e = dz^T x[token]      d down_e = dy[token]^T (s a)

With weights_on="input" (Llama 4) the weight is applied before up, y_t = sum over k of down_e f(w_tk up_e x_t), without biases:

    z = x[token] up_e^T        a = f(g) l of s z = (g, l)        y = sum over k of (a down_e^T)[place[:, k]]
    d(s z) = (da l f'(g), da f(g))        ds = rowsum(d(s z) z)        dz = s d(s z)        d down_e = dy[token]^T a

A bias of up is added to z; a bias of down is multiplied by s, which adds dy[token] . bias_e to ds. As the weight is applied before
down, neither down's output nor its gradient is kept by row: besides inputs and params only z, [N, 2I] for N = T K rows, order and
place, 8 bytes a row, and offsets are kept. x is not copied by row. Sums over k have a fixed order. On CUDA no value is read on the
host, and a token's bits do not depend on the experts of other tokens.

x is `(weights, x, indices)`: weights [*, K], of x's dtype or the wide one (float32; float64 for float64); x, y, dy: [*, H];
indices [*, K], int32 or int64, from 0 to E: E is a dropped choice, which adds nothing and whose weight has gradient 0.
up: [E, 2I, H], gate rows first, down: [E, H, I], biases [E, 2I], [E, H] or None; one float dtype. arXiv:2512.14080;
TransformerEngine's GroupedMLP. `funcops.models.plain_experts` does the same in steps.

>>> import torch
>>> from funcops import ExpertsConfig, experts, random
>>> cfg = ExpertsConfig(4, 8, 16)
>>> params, x = experts.init(cfg, key=random.key(0)), torch.ones(3, 8)
>>> weights, indices = torch.full((3, 2), 0.5), torch.tensor([[0, 1], [0, 1], [2, 1]], dtype=torch.int32)
>>> y, residuals = experts.fwd(params, (weights, x, indices), cfg)
>>> residuals.z.shape, residuals.offsets
(torch.Size([6, 32]), tensor([0, 2, 5, 6, 6], dtype=torch.int32))
>>> dparams, (dweights, dx, _) = experts.bwd(residuals, torch.ones_like(y), cfg)
>>> dweights.shape, dparams.up.weight[3].abs().sum()
(torch.Size([3, 2]), tensor(0.))
"""

from __future__ import annotations

import functools
from dataclasses import field
from typing import Any, ClassVar

import torch
from torch import Tensor

from funcops.engine import random
from funcops.engine.backend import wide
from funcops.engine.contract.accumulators import check_into
from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs, sub_mask
from funcops.engine.contract.op import both_halves, config, dgrad_of, forward, init_of, make_op, wgrad_of
from funcops.engine.contract.schema import DGRAD, NO_GRADIENT, WGRAD, Inputs, Pending, Residuals, saved, static
from funcops.engine.errors import FLOATS, check, describe, fail, not_a_tuple, require
from funcops.engine.trees import tree
from funcops.library.kernels import experts as kernels
from funcops.library.kernels.grouped import grouped_product
from funcops.library.kernels.routing import check_row_count, gather_rows, of_rows, sort_by_expert
from funcops.library.ops._ids import INDICES, check_ids
from funcops.library.ops.glu import GLUConfig
from funcops.library.ops.grouped_linear import (
    GroupedLinearConfig,
    GroupedLinearParams,
    GroupedLinearPending,
    grouped_linear_init,
    grouped_linear_products,
    grouped_linear_wgrad,
)
from funcops.library.ops.grouped_wgrads import GroupedProduct

__all__ = ["ExpertsConfig", "ExpertsParams", "ExpertsPending", "ExpertsResiduals"]
__all__ += ["experts", "experts_bwd", "experts_dgrad", "experts_fwd", "experts_init", "experts_wgrad"]


@config
class ExpertsConfig(OpConfig):
    """`experts` (E), `dim` (H) and `hidden` (I), each at least 1; `kind`, with limit, alpha and offset, as in `GLUConfig`, but not
    paired (GPT-OSS: "clamped_swiglu" with bias); `bias` adds a bias to up and to down; `weights_on`: whether the routing weights
    multiply an expert's "output" or its "input"."""

    experts: int = field(kw_only=False)
    dim: int = field(kw_only=False)
    hidden: int = field(kw_only=False)
    kind: str = "swiglu"
    bias: bool = False
    limit: float = 7.0
    alpha: float = 1.702
    offset: float = 1.0
    weights_on: str = "output"

    def __post_init__(self) -> None:
        where = type(self).__name__
        require(self.weights_on in ("output", "input"), where, "weights_on", "'output' or 'input'", repr(self.weights_on))
        require(not (self.bias and self.weights_on == "input"), where, "bias", "False with weights_on='input'", self.bias)
        for name in ("experts", "dim", "hidden"):
            require(getattr(self, name) >= 1, where, name, "at least 1", getattr(self, name))
        before = self.weights_on == "input"
        how: dict[str, Any] = dict(limit=self.limit, alpha=self.alpha, offset=self.offset)
        try:
            act = GLUConfig(kind=self.kind, gate="first", scaled=not before, gathered=not before, **how)
        except ValueError as error:
            raise ValueError(str(error).replace("GLUConfig", where)) from None
        up = GroupedLinearConfig(self.experts, self.dim, 2 * self.hidden, bias=self.bias, gathered=True)
        down = GroupedLinearConfig(self.experts, self.hidden, self.dim, bias=self.bias, weighted=self.bias)
        for name, value in dict(up=up, act=act, down=down, gated=(self.kind, *how.values(), before)).items():
            object.__setattr__(self, name, value)

    linear_parts = "up", "down"
    linear_weights = "up.weight", "down.weight"
    up: ClassVar[GroupedLinearConfig]
    act: ClassVar[GLUConfig]
    down: ClassVar[GroupedLinearConfig]
    gated: ClassVar[tuple[str, float, float, float, bool]]

    def widths(self, width: int | None) -> tuple[int | None, int | None]:
        return None, self.dim


@tree
class ExpertsParams:
    """The params of both linear layers, stacked by expert: up.weight [E, 2I, H], down.weight [E, H, I], and biases [E, 2I], [E, H]
    or None."""

    up: GroupedLinearParams
    down: GroupedLinearParams

    @staticmethod
    def without(cfg: ExpertsConfig) -> ExpertsParams:
        """Gradients that are all None."""
        return ExpertsParams(GroupedLinearParams(None, None), GroupedLinearParams(None, None))


OF_DZ = "x.1", "params.up.weight", "params.up.bias"
OF_ALL = "x.0", *OF_DZ, "params.down.weight", "params.down.bias"


class ExpertsResiduals(Residuals, static=("inputs", "shape", "dtype")):
    x: Tensor = saved("[*, H]", alias="x.1", needed_by=WGRAD, of=("params.up.weight",))
    weights: Tensor = saved("[*, K]", alias="x.0", needed_by=DGRAD | WGRAD, of=OF_ALL[1:])
    numbers: Tensor | None = saved("[*, K]", alias="x.0", needed_by=DGRAD, of=("x.0",))  # the weights, if they multiply the input
    indices: Tensor | None = saved("[*, K]", alias="x.2", needed_by=DGRAD, of=("x.0",))  # if down has a bias
    up: Tensor = saved("[E, 2I, H]", alias="params.up.weight", needed_by=DGRAD, of=("x.1",))
    down: Tensor = saved("[E, H, I]", alias="params.down.weight", needed_by=DGRAD, of=OF_ALL[:-2])
    down_bias: Tensor | None = saved("[E, H]", alias="params.down.bias", needed_by=DGRAD, of=("x.0",))
    z: Tensor = saved("[N, 2I]", needed_by=DGRAD, of=OF_ALL[:-1])
    order: Tensor = saved("[N]", needed_by=DGRAD | WGRAD, of=OF_ALL)
    place: Tensor = saved("[T, K]", needed_by=DGRAD, of=("x.0", "x.1"))
    offsets: Tensor = saved("[E + 1]", needed_by=DGRAD | WGRAD, of=OF_ALL)
    weights_dtype: torch.dtype = static()
    choices: int = static()  # K


class ExpertsPending(Pending):
    x: Tensor = saved("[*, H]", alias="residuals.x", needed_by=WGRAD, of=("params.up.weight",))
    dz: Tensor = saved("[N, 2I]", needed_by=WGRAD, of=OF_DZ[1:])
    dy: Tensor = saved("[*, H]", alias="dy", needed_by=WGRAD, of=OF_ALL[-2:])
    scaled: Tensor = saved("[N, I]", needed_by=WGRAD, of=("params.down.weight",))  # s a
    weights: Tensor | None = saved("[*, K]", alias="residuals.weights", needed_by=WGRAD, of=("params.down.bias",))
    order: Tensor = saved("[N]", alias="residuals.order", needed_by=WGRAD, of=("params.up.weight", *OF_ALL[-2:]))
    offsets: Tensor = saved("[E + 1]", alias="residuals.offsets", needed_by=WGRAD)
    choices: int = static()  # K


@init_of(ExpertsConfig)
def experts_init(
    cfg: ExpertsConfig, *, key: Tensor | None = None, device: Any = None, dtype: torch.dtype | None = None
) -> ExpertsParams:
    """Each expert's two layers as torch.nn.Linear draws them."""
    keys = random.split(key, 2)
    up = grouped_linear_init(cfg.up, key=keys[0], device=device, dtype=dtype)
    return ExpertsParams(up, grouped_linear_init(cfg.down, key=keys[1], device=device, dtype=dtype))


def check_experts_params(where: str, params: ExpertsParams, cfg: ExpertsConfig, like: Tensor) -> None:
    for name, layer in (("up", cfg.up), ("down", cfg.down)):
        own = getattr(params, name)
        if type(own) is not GroupedLinearParams:
            fail(where, f"params.{name}", "GroupedLinearParams", describe(own), TypeError)
        check(where, f"params.{name}.weight", own.weight, (cfg.experts, *layer.weight_shape), like.dtype, like)
        if cfg.bias:
            check(where, f"params.{name}.bias", own.bias, (cfg.experts, layer.out_features), like.dtype, like)
        elif own.bias is not None:
            require(False, where, f"params.{name}.bias", "None (cfg.bias is False)", "a tensor")


def check_experts_x(where: str, x: Any, dim: int | str, experts: int) -> None:
    if not isinstance(x, tuple) or len(x) != 3:
        not_a_tuple(where, x, "weights", "x", "indices")
    weights, tokens, indices = x
    check(where, "x.1 (x)", tokens, (..., dim), FLOATS)
    check(where, "x.0 (weights)", weights, (...,), tuple({tokens.dtype: 0, wide(tokens.dtype): 0}), tokens)
    if weights.shape[:-1] != tokens.shape[:-1] or weights.dim() < 1 or not 1 <= weights.shape[-1] <= experts:
        wanted = f"{[*tokens.shape[:-1], 'K']}, K in 1..{experts} (the experts)"
        fail(where, "x.0 (weights)", wanted, list(weights.shape))
    check(where, "x.2 (indices)", indices, weights.shape, INDICES, tokens)
    check_row_count(where, "x.2 (indices)", indices.numel())
    check_ids(where, "x.2 (indices)", indices, experts)


def _rows(t: Tensor) -> Tensor:
    return t.reshape(-1, t.shape[-1])


@forward(ExpertsConfig, ExpertsParams)
def experts_fwd(
    params: ExpertsParams, x: tuple[Tensor, Tensor, Tensor], cfg: ExpertsConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, ExpertsResiduals | None]:
    """The weighted sum of each token's experts. x: `(weights, x, indices)` -> y: [*, H]. Raises `ValueError` or `TypeError` for a
    wrong shape, dtype or device, and on the CPU `IndexError` for an index outside 0..E."""
    check_experts_x("experts_fwd", x, cfg.dim, cfg.experts)
    check_experts_params("experts_fwd", params, cfg, x[1])
    return computed(params, x, cfg, needs)


def computed(
    params: ExpertsParams, x: tuple[Tensor, Tensor, Tensor], cfg: ExpertsConfig, needs: Needs
) -> tuple[Tensor, ExpertsResiduals | None]:
    """`experts_fwd` for checked params and x, with any number of choices."""
    y, z, _, order, offsets, place = products(params, x, cfg)
    weights, tokens, indices = x
    kept = ExpertsResiduals.keep(
        cfg,
        needs,
        x=tokens,
        weights=weights,
        numbers=weights if cfg.weights_on == "input" else None,
        indices=indices if cfg.bias else None,
        up=params.up.weight,
        down=params.down.weight,
        down_bias=params.down.bias,
        z=z,
        order=order,
        place=place,
        offsets=offsets,
        inputs=Inputs.of(x),
        shape=tokens.shape,
        dtype=tokens.dtype,
        weights_dtype=weights.dtype,
        choices=weights.shape[-1],
    )
    return y, kept


def products(params: ExpertsParams, x: tuple[Tensor, Tensor, Tensor], cfg: ExpertsConfig) -> tuple[Tensor, ...]:
    """Compute y, z, the input of down, order, offsets and place [T, K]."""
    weights, tokens, indices = x
    up, down = params.up, params.down
    order, _, offsets, place = sort_by_expert(_rows(indices), cfg.experts)
    z, scaled = kernels.experts_up(_rows(tokens), up.weight, up.bias, _rows(weights), order, offsets, *cfg.gated)
    s = of_rows(weights, order) if cfg.bias else None
    y = gather_rows(grouped_product(scaled, down.weight, down.bias, offsets, None, 1, s, True), place, None).view(tokens.shape)
    return y, z, scaled, order, offsets, place


@dgrad_of(ExpertsResiduals)
def experts_dgrad(
    residuals: ExpertsResiduals, dy: Tensor, cfg: ExpertsConfig
) -> tuple[tuple[Tensor | None, Tensor | None, None], ExpertsPending | None]:
    """`(d weights, dx, None)`, and the pending weight gradients. dy: [*, H]."""
    r, needs = residuals, residuals.needs
    check("experts_dgrad", "dy", dy, r.shape, r.dtype, r.order)
    of_up = needs.param("up.weight") or (cfg.bias and needs.param("up.bias"))
    of_weights, of_x, recomputed = needs.input(0), needs.input(1), needs.param("down.weight")
    dx = dz = d_weights = scaled = None
    if of_up or of_x or of_weights or recomputed:
        indices = None if r.indices is None else _rows(r.indices)
        weights = r.numbers if r.weights is None else r.weights  # on the output, their gradient reads only their shape and dtype
        weights = r.place.new_empty(r.place.shape, dtype=r.weights_dtype) if weights is None else _rows(weights)
        rows = weights, r.order, r.offsets, r.place, r.down_bias, indices
        asked = of_up or of_x, of_weights, recomputed
        dz, d_weights, scaled = kernels.experts_dgrad(_rows(dy), r.down, r.z, *rows, *cfg.gated, *asked)
    if of_x:
        dx = gather_rows(grouped_product(dz, r.up, None, r.offsets, None, 1, None, False), r.place, None).view(r.shape)
    pending = ExpertsPending.keep(
        cfg,
        needs,
        x=r.x,
        dz=dz,
        dy=dy,
        scaled=scaled,
        weights=r.weights if cfg.bias else None,
        order=r.order,
        offsets=r.offsets,
        choices=r.choices,
    )
    return r.inputs.make((None if d_weights is None else d_weights.view((*r.shape[:-1], r.choices)), dx, None)), pending


@wgrad_of(ExpertsPending, ExpertsParams)
def experts_wgrad(pending: ExpertsPending, cfg: ExpertsConfig, *, into: ExpertsParams | None = None) -> ExpertsParams:
    """`d up_e = dz^T x[token]`, `d down_e = dy[token]^T (s a)`, and for biases the sums of dz and of s dy[token]; 0 for an expert
    that no token chose. Added to `into` if given."""
    if into is not None:
        check_experts_into("experts_wgrad", pending, cfg, into)
    sums = (None, None) if into is None else (into.up, into.down)
    made = [grouped_linear_wgrad(*one, into=own) for one, own in zip(_layers(pending, cfg), sums, strict=True)]
    return ExpertsParams(*made) if into is None else into


def experts_products(pending: ExpertsPending, cfg: ExpertsConfig, *, into: ExpertsParams) -> list[GroupedProduct]:
    """The gradients of both layers as products to run later. A bias's gradient alone is added at once."""
    check_experts_into("experts_wgrad", pending, cfg, into)
    layers = zip(_layers(pending, cfg), (into.up, into.down), strict=True)
    return [product for (p, layer), own in layers if p is not None for product in grouped_linear_products(p, layer, into=own)]


def _layers(p: ExpertsPending, cfg: ExpertsConfig) -> list[tuple[GroupedLinearPending | None, GroupedLinearConfig]]:
    """The pending and the config of the up and the down layer, as of `grouped_linear`."""
    masks = [sub_mask(p.needs.params, name) if cfg.bias else p.needs.param(f"{name}.weight") for name in cfg.linear_parts]
    up, down = (Needs(params=mask) for mask in masks)
    keep = functools.partial(GroupedLinearPending.keep, offsets=p.offsets, choices=p.choices)
    of_up = keep(cfg.up, up, x=p.x, dy=p.dz, order=p.order)
    of_down = keep(cfg.down, down, x=p.scaled, dy=p.dy, dy_order=p.order, weights=p.weights, weights_order=p.order)
    return [(of_up, cfg.up), (of_down, cfg.down)]


def check_experts_into(where: str, pending: ExpertsPending, cfg: ExpertsConfig, into: ExpertsParams) -> None:
    """Check `into`, before anything is added or sent."""
    check_into(where, into, ExpertsParams(*[_wanted(*one) for one in _layers(pending, cfg)]))


def _wanted(p: GroupedLinearPending | None, layer: GroupedLinearConfig) -> GroupedLinearParams:
    """Gradients of the shapes and dtypes that accumulators must have."""
    if p is None:
        return GroupedLinearParams(None, None)
    shape = p.dy.new_empty(()).expand(layer.experts, *layer.weight_shape)
    bias = layer.bias and p.needs.param("bias")
    return GroupedLinearParams(NO_GRADIENT if p.x is None else shape, shape[..., 0] if bias else None)


experts = make_op(
    "experts",
    ExpertsConfig,
    init=experts_init,
    fwd=experts_fwd,
    dgrad=experts_dgrad,
    wgrad=experts_wgrad,
    products=experts_products,
    mixes="",
)
experts_bwd = both_halves(experts, experts_dgrad, experts_wgrad)
