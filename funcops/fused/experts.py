"""The steps of `plain_experts` in the kernels of `experts`: one for the first product and the gated unit, and backward one for the
input gradients of the second product and the unit, which reads dy by index, so that rows of dy are never materialised.

Steps: a permute that moves nothing, a grouped linear, a scaled GLU, a grouped linear and an unpermute; both halves.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from funcops.compose.plain_experts import plain_experts
from funcops.contract.needs import Needs
from funcops.contract.schema import Inputs
from funcops.contract.trace_safe_cache import remember
from funcops.fused.matchers import alike
from funcops.ops.experts import (
    ExpertsConfig,
    ExpertsParams,
    ExpertsResiduals,
    check_experts_params,
    check_experts_x,
    experts_dgrad,
    products,
)
from funcops.ops.glu import GLUConfig, scaled_glu_kept
from funcops.ops.grouped_linear import GroupedLinearConfig, GroupedLinearPending, grouped_linear_kept
from funcops.ops.permute import permute, sorted_kept
from funcops.ops.unpermute import unpermute_kept
from funcops.program.rules import BACKWARD, FORWARD, Rule, Saving, Window, register_fusion
from funcops.program.values import add

STEPS = 5
_configs: dict[Any, ExpertsConfig] = {}  # by the configs of the steps
_needs: dict[Any, Needs] = {}


def _config(calls: Any) -> ExpertsConfig:
    """The config of the `experts` op that the calls' `plain_experts` chain would be made from."""
    up, act, down = (call.cfg for call in calls[1:4])
    key = up, act, down
    if key not in _configs:
        gated = dict(kind=act.kind, limit=act.limit, alpha=act.alpha, offset=act.offset)
        return remember(_configs, key, ExpertsConfig(up.experts, up.in_features, down.in_features, bias=up.bias, **gated))
    return _configs[key]


def _match(window: Window) -> int | str | None:
    calls = window.calls[:STEPS]
    if len(calls) < STEPS or calls[0].op is not permute or not calls[0].cfg.gathered:
        return None
    kinds = GroupedLinearConfig, GLUConfig, GroupedLinearConfig
    if not all(type(call.cfg) is kind for call, kind in zip(calls[1:], kinds, strict=False)):
        return None
    if window.dtype is torch.float64:
        return "float64 runs on torch"
    named = dict(zip(("tokens", "indices", "weights", "offsets", "order", "place"), calls[0].takes + calls[0].gives, strict=True))
    for call, step in zip(calls, plain_experts(_config(calls)).steps, strict=True):
        if call.op is not step.op or call.cfg != step.cfg:
            return f"{call.path} is not as plain_experts makes it"
        if call.takes != tuple(named[name] for name in step.takes):
            return f"{call.path} takes something else than plain_experts gives it"
    return STEPS


def _match_backward(window: Window) -> int | str | None:
    size = _match(window)
    if size == STEPS and not all(needs.x for needs in window.needs[:STEPS]):
        return "no gradient is asked of its input"
    return size


def _run(calls: Any, params: Any, main: Any, values: dict[int, Any]) -> Any:
    sort, up, act, down, combine = calls
    cfg, own = _config(calls), ExpertsParams(params[1], params[3])
    x = main, values[sort.takes[0]], values[sort.takes[1]]
    try:
        check_experts_x("experts_fwd", x, cfg.dim, cfg.experts)
        check_experts_params("experts_fwd", own, cfg, x[1])
    except (TypeError, ValueError):
        return NotImplemented
    weights, tokens, indices = x
    y, z, scaled, order, offsets, place = products(own, x, cfg)
    place = place.view(indices.shape)
    values.update(zip(sort.gives, (weights, offsets, order, place), strict=True))
    of_down = (scaled, offsets, order, weights) if cfg.bias else (scaled, offsets)
    return y, [
        sorted_kept(sort.cfg, sort.kept, x),
        grouped_linear_kept(up.cfg, up.kept, own.up, (tokens, offsets, order, place), z.shape),
        scaled_glu_kept(act.cfg, act.kept, (z, weights, order)),
        grouped_linear_kept(down.cfg, down.kept, own.down, of_down, torch.Size((z.shape[0], cfg.dim))),
        unpermute_kept(combine.cfg, combine.kept, (y, place), y),
    ]


def _asked(calls: Any, recomputed: bool) -> Needs:
    """The requested gradients of the steps together."""
    sort, up, _, down, _ = (call.needs for call in calls)
    key = sort, up, down, recomputed
    if key not in _needs:
        x = [str(i) for i in (0, 1) if sort.input(i)]
        params = [f"up.{name}" for name in ("weight", "bias") if up.param(name)] + ["down.weight"] * recomputed
        return remember(_needs, key, Needs(x=x, params=params))
    return _needs[key]


def _fits(cfg: ExpertsConfig, kept: list[Any], dy: Any) -> bool:
    """Whether the residuals have the dtypes and shapes of these steps, since a caller may have edited them."""
    _, up, act, down, combine = kept
    z, order, place, offsets, like = act.x, act.order, combine.place, down.offsets, act.scales_like
    if not alike(dy, z, up.weight, down.weight, *([down.bias] if cfg.bias else [])):
        return False
    if any([not isinstance(t, Tensor) or t.dtype is not torch.int32 or t.device != dy.device for t in (order, place, offsets)]):
        return False
    if act.scales is not None and (not isinstance(act.scales, Tensor) or (act.scales.shape, act.scales.dtype) != like):
        return False
    rows, experts = place.numel(), cfg.experts
    shapes = [tuple(t.shape) for t in (z, order, offsets, up.weight, down.weight)]
    wanted = [(rows, 2 * cfg.hidden), (rows,), (experts + 1,), (experts, *cfg.up.weight_shape), (experts, *cfg.down.weight_shape)]
    return shapes == wanted and dy.shape == combine.shape and like[0] == place.shape


def _run_backward(calls: Any, kept: list[Any], dy: Any, gradients: dict[int, Any], whole: bool) -> Any:
    cfg = _config(calls)
    sort, up, act, down, _ = calls
    elsewhere = gradients.get(sort.gives[0])  # gradient of the weights, if calls outside the rule read them from the first step
    if not _fits(cfg, kept, dy) or (elsewhere is not None and (elsewhere.shape, elsewhere.dtype) != kept[2].scales_like):
        return NotImplemented
    of_up, of_act, of_down, combine = kept[1:]
    order, offsets, place, choices = of_act.order, of_down.offsets, combine.place, combine.place.shape[-1]
    recomputed = whole and down.recomputed_by is act and of_down.needs.param("weight")
    chosen = torch.searchsorted(offsets[1:], place, right=True, out_int32=True) if cfg.bias else None
    node = ExpertsResiduals.keep(
        cfg,
        _asked(calls, recomputed),
        x=of_up.x,
        weights=of_act.scales,
        indices=chosen,
        up=of_up.weight,
        down=of_down.weight,
        down_bias=of_down.bias,
        z=of_act.x,
        order=order,
        place=place.reshape(-1, choices),
        offsets=offsets,
        inputs=Inputs.of((0, 0, 0)),
        shape=dy.shape,
        dtype=dy.dtype,
        weights_dtype=of_act.scales_like[1],
        choices=choices,
    )
    (d_weights, dx, _), pending = experts_dgrad(node, dy, cfg)
    keep = functools.partial(GroupedLinearPending.keep, offsets=offsets, choices=choices)
    dz, scaled = (None, None) if pending is None else (pending.dz, pending.scaled)
    if sort.needs.input(1):
        gradients[sort.takes[0]] = add(gradients.get(sort.takes[0]), dx)
    gradients.pop(sort.gives[0], None)
    first = keep(up.cfg, of_up.needs, x=of_up.x, dy=dz, order=of_up.order)
    needs, x = (down.needs, scaled) if recomputed else (of_down.needs, of_down.x)
    numbers = dict(weights=of_down.weights, weights_order=of_down.weights_order)
    second = keep(down.cfg, needs, x=x, dy=dy, dy_order=order, **numbers)
    return add(elsewhere, d_weights) if sort.needs.input(0) else None, [None, first, None, second, None]


# the unit does not read z or gather weights
rule = register_fusion(Rule("experts", FORWARD, _match, _run, Saving(1, 2)))
# the rows of dy and the gradient of what `down` reads are neither written nor read, and z is read once
backward_rule, recompute_rule = (
    register_fusion(Rule(name, BACKWARD, _match_backward, functools.partial(_run_backward, whole=whole), saves, whole=whole))
    for name, whole, saves in (("experts", False, Saving(4, 5)), ("experts, recomputed", True, Saving(5, 6)))
)
