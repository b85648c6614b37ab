"""The steps of `plain_experts` in the kernels of `experts`: one for the first product and the gated unit, and backward one for the
input gradients of the second product and the unit, which reads dy by index, so that rows of dy are never materialised.

Steps: a permute that moves nothing, a grouped linear, a multiplication of its rows by the weights if these are on the input, a GLU,
scaled by them if not, a grouped linear and an unpermute; both halves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from funcops.engine.contract.schema import Inputs
from funcops.engine.contract.trace_safe_cache import remember
from funcops.engine.program.rules import BACKWARD, FORWARD, Rule, Saving, Window, register_fusion
from funcops.engine.program.values import add
from funcops.library.fused.matchers import alike
from funcops.library.kernels.experts import experts_dgrad
from funcops.library.kernels.grouped import grouped_product
from funcops.library.kernels.routing import gather_rows
from funcops.library.ops.expert_steps import plain_experts
from funcops.library.ops.experts import ExpertsConfig, ExpertsParams, check_experts_params, check_experts_x, products
from funcops.library.ops.glu import GLUConfig, glu_kept, scaled_glu_kept
from funcops.library.ops.grouped_linear import GroupedLinearConfig, GroupedLinearPending, grouped_linear_kept
from funcops.library.ops.permute import permute, sorted_kept
from funcops.library.ops.row_scale import RowScaleConfig, RowScaleResiduals, row_scale
from funcops.library.ops.unpermute import unpermute_kept

STEPS = 5  # and one more with weights on the input
_configs: dict[Any, ExpertsConfig] = {}  # by the configs of the steps


def _config(calls: Any) -> ExpertsConfig:
    """The config of the `experts` op that the calls' `plain_experts` chain would be made from."""
    _, up, *weigh, act, down, _ = (call.cfg for call in calls)
    key = up, act, down, len(weigh)
    if key not in _configs:
        gated = dict(kind=act.kind, limit=act.limit, alpha=act.alpha, offset=act.offset)
        sizes = up.experts, up.in_features, down.in_features
        made = ExpertsConfig(*sizes, bias=up.bias, weights_on="input" if weigh else "output", **gated)
        return remember(_configs, key, made)
    return _configs[key]


def _match(window: Window) -> int | str | None:
    calls = window.calls
    if len(calls) < STEPS or calls[0].op is not permute or not calls[0].cfg.gathered:
        return None
    weighed = calls[2].op is row_scale
    size = STEPS + weighed
    kinds = GroupedLinearConfig, *[RowScaleConfig] * weighed, GLUConfig, GroupedLinearConfig
    if len(calls) < size or not all(type(call.cfg) is kind for call, kind in zip(calls[1:], kinds, strict=False)):
        return None
    if window.dtype is torch.float64:
        return "float64 runs on torch"
    if weighed and calls[1].cfg.bias:
        return f"{calls[1].path} has a bias, which experts with weights on the input lack"
    calls = calls[:size]
    named = dict(zip(("tokens", "indices", "weights", "offsets", "order", "place"), calls[0].takes + calls[0].gives, strict=True))
    for call, step in zip(calls, plain_experts(_config(calls)).steps, strict=True):
        if call.op is not step.op or call.cfg != step.cfg:
            return f"{call.path} is not as plain_experts makes it"
        if call.takes != tuple(named[name] for name in step.takes):
            return f"{call.path} takes something else than plain_experts gives it"
    return size


def _match_forward(window: Window) -> int | str | None:
    size = _match(window)
    if size == STEPS + 1 and (act := window.calls[3]).kept.any and act.recomputed_by is None:
        return f"{act.path} keeps its input, which the kernel does not write"
    return size


def _match_backward(window: Window) -> int | str | None:
    size = _match(window)
    if type(size) is int and not all(needs.x for needs in window.needs[:size]):
        return "no gradient is asked of its input"
    return size


def _match_whole(window: Window) -> int | str | None:
    size = _match_backward(window)
    if size == STEPS + 1:
        return f"{window.calls[3].path} reads rounded rows in the halves of the backward, which must have the same bits"
    return size


def _run(calls: Any, params: Any, main: Any, values: dict[int, Any]) -> Any:
    sort, up, *weigh, act, down, combine = calls
    cfg, own = _config(calls), ExpertsParams(params[1], params[-2])
    x = main, values[sort.takes[0]], values[sort.takes[1]]
    try:
        check_experts_x("experts_fwd", x, cfg.dim, cfg.experts)
        check_experts_params("experts_fwd", own, cfg, x[1])
    except (TypeError, ValueError):
        return NotImplemented
    weights, tokens, indices = x
    y, z, scaled, order, offsets, place = products(own, x, cfg)
    place, rows = place.view(indices.shape), (z, weights, order)
    values.update(zip(sort.gives, (weights, offsets, order, place), strict=True))
    of_down = (scaled, offsets, order, weights) if cfg.bias else (scaled, offsets)
    own_rows = dict(x=z, gate=weights, order=order, inputs=Inputs.of(rows), shape=z.shape, dtype=z.dtype)
    return y, [
        sorted_kept(sort.cfg, sort.kept, x),
        grouped_linear_kept(up.cfg, up.kept, own.up, (tokens, offsets, order, place), z.shape),
        *[RowScaleResiduals.keep(one.cfg, one.kept, **own_rows) for one in weigh],
        glu_kept(act.cfg, act.kept, z) if weigh else scaled_glu_kept(act.cfg, act.kept, rows),
        grouped_linear_kept(down.cfg, down.kept, own.down, of_down, torch.Size((z.shape[0], cfg.dim))),
        unpermute_kept(combine.cfg, combine.kept, (y, place), y),
    ]


def _rows(kept: list[Any]) -> tuple[Any, Any, Any, Any]:
    """z, order, the weights if they were kept, and their shape and dtype, from the step that multiplies by them."""
    _, _, *weigh, act, _, _ = kept
    if not weigh:
        return act.x, act.order, act.scales, act.scales_like
    weights = weigh[0].gate
    return weigh[0].x, weigh[0].order, weights, (weights.shape, weights.dtype) if isinstance(weights, Tensor) else (None, None)


def _fits(cfg: ExpertsConfig, kept: list[Any], dy: Any) -> bool:
    """Whether the residuals have the dtypes and shapes of these steps, since a caller may have edited them."""
    _, up, *_, down, combine = kept
    z, order, weights, like = _rows(kept)
    place, offsets = combine.place, down.offsets
    if not alike(dy, z, up.weight, down.weight, *([down.bias] if cfg.bias else [])):
        return False
    if any([not isinstance(t, Tensor) or t.dtype is not torch.int32 or t.device != dy.device for t in (order, place, offsets)]):
        return False
    if weights is not None and (not isinstance(weights, Tensor) or (weights.shape, weights.dtype) != like):
        return False
    rows, experts = place.numel(), cfg.experts
    shapes = [tuple(t.shape) for t in (z, order, offsets, up.weight, down.weight)]
    wanted = [(rows, 2 * cfg.hidden), (rows,), (experts + 1,), (experts, *cfg.up.weight_shape), (experts, *cfg.down.weight_shape)]
    return shapes == wanted and dy.shape == combine.shape and like[0] == place.shape


def _run_backward(calls: Any, kept: list[Any], dy: Any, gradients: dict[int, Any], whole: bool) -> Any:
    cfg = _config(calls)
    sort, up, *weigh, act, down, _ = calls
    _, of_up, *_, of_down, combine = kept
    z, order, weights, like = _rows(kept)
    elsewhere = gradients.get(sort.gives[0])  # gradient of the weights, if calls outside the rule read them from the first step
    if not _fits(cfg, kept, dy) or (elsewhere is not None and (elsewhere.shape, elsewhere.dtype) != like):
        return NotImplemented
    offsets, choices = of_down.offsets, combine.place.shape[-1]
    place, rows = combine.place.reshape(-1, choices), dy.reshape(-1, cfg.dim)
    of_weights, of_x = sort.needs.input(0), sort.needs.input(1)
    recomputed = whole and down.recomputed_by is act and of_down.needs.param("weight")
    weights = place.new_empty(place.shape, dtype=like[1]) if weights is None else weights.reshape(-1, choices)
    of_bias = cfg.bias and of_weights
    chosen = torch.searchsorted(offsets[1:], place, right=True, out_int32=True) if of_bias else None
    given = rows, of_down.weight, z, weights, order, offsets, place, of_down.bias if of_bias else None, chosen
    asked = of_x or up.needs.param("weight") or up.needs.param("bias"), of_weights, recomputed
    dz, d_weights, scaled = experts_dgrad(*given, *cfg.gated, *asked) if any(asked) else (None, None, None)
    if of_x:
        dx = gather_rows(grouped_product(dz, of_up.weight, None, offsets, None, 1, None, False), place, None).view(dy.shape)
        gradients[sort.takes[0]] = add(gradients.get(sort.takes[0]), dx)
    gradients.pop(sort.gives[0], None)
    keep = functools.partial(GroupedLinearPending.keep, offsets=offsets, choices=choices)
    first = keep(up.cfg, of_up.needs, x=of_up.x, dy=dz, order=of_up.order)
    needs, x = (down.needs, scaled) if recomputed else (of_down.needs, of_down.x)
    numbers = dict(weights=of_down.weights, weights_order=of_down.weights_order)
    second = keep(down.cfg, needs, x=x, dy=dy, dy_order=order, **numbers)
    dmain = add(elsewhere, d_weights.view(combine.place.shape)) if of_weights else None
    return dmain, [None, first, *[None for _ in weigh], None, second, None]


def _saving(plain: Saving, weighed: Saving) -> Callable[[Window], Saving]:
    return lambda window: plain if len(window.calls) == STEPS else weighed


# the unit does not read z or gather weights; rows are not multiplied by them in a pass of its own
rule = register_fusion(Rule("experts", FORWARD, _match_forward, _run, _saving(Saving(1, 2), Saving(3, 3))))
# the rows of dy and the gradient of what `down` reads are neither written nor read, and z is read once
_backward, _whole = (functools.partial(_run_backward, whole=whole) for whole in (False, True))
backward_rule = register_fusion(Rule("experts", BACKWARD, _match_backward, _backward, _saving(Saving(4, 5), Saving(7, 6))))
recompute_rule = register_fusion(Rule("experts, recomputed", BACKWARD, _match_whole, _whole, Saving(5, 6), whole=True))
