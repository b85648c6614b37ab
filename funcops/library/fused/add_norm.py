"""The sum of a residual stream and the norm that reads it: one kernel forward, and one backward, which adds the stream's gradient.

Steps: an add, a fork that gives the stream, and an RMSNorm or LayerNorm over the last dimension; in the forward, optionally a
dropout before them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from funcops.engine.compose.add import add, add_kept
from funcops.engine.compose.fork import fork, fork_kept
from funcops.engine.program.rules import BACKWARD, FORWARD, Rule, Saving, Window, register_fusion
from funcops.engine.program.values import add as summed
from funcops.library.fused.matchers import alike, alone, is_key, joins, readers_wait
from funcops.library.kernels import add_norm as kernels
from funcops.library.ops.dropout import dropout, dropout_kept
from funcops.library.ops.layer_norm import LayerNormPending, layer_norm, layer_norm_kept
from funcops.library.ops.rms_norm import RMSNormPending, rms_norm, rms_norm_kept


def _match_forward(window: Window) -> int | str | None:
    drop = window.calls[0]
    if not joins(drop, dropout) or not drop.cfg.train or drop.cfg.p in (0.0, 1.0):
        return _match(window)
    size = _match(window._replace(calls=window.calls[1:]))
    return size + 1 if isinstance(size, int) else size


def _match(window: Window) -> int | str | None:
    if len(window.calls) < 3:
        return None
    join, split, norm = window.calls[:3]
    if not joins(join, add) or split.op is not fork or len(split.gives) != 1 or split.takes:
        return None
    if not alone(norm, rms_norm) and not alone(norm, layer_norm):
        return None
    if window.dtype is torch.float64:
        return "float64 runs on torch"
    return 3 if len(norm.cfg.dim) == 1 else "the norm goes over several dimensions"


def _match_backward(window: Window) -> int | str | None:
    size = _match(window)
    if size != 3:
        return size
    return 3 if all(needs.x for needs in window.needs[:3]) else "no gradient is asked of its input"


def _run(calls: Any, params: Any, main: Any, values: dict[int, Any]) -> Any:
    *dropped, join, split, norm = calls
    residual, cfg, w, b = values[join.takes[0]], norm.cfg, params[-1].weight, getattr(params[-1], "bias", None)
    key: Any = values[dropped[0].takes[0]] if dropped else None
    if cfg.bias != (b is not None) or not alike(main, residual, w, *([b] if b is not None else [])):
        return NotImplemented
    sizes = [main.shape[-1:], w.shape, cfg.dim if b is None else b.shape]
    if main.shape != residual.shape or any([tuple(size) != cfg.dim for size in sizes]):
        return NotImplemented
    if dropped and not is_key(key, main):
        return NotImplemented
    drawn, how = (key, dropped[0].cfg.p) if dropped else (), (cfg.eps, cfg.zero_centered_gamma)
    if norm.op is rms_norm:
        fwd = kernels.dropout_add_rms_norm_fwd if dropped else kernels.add_rms_norm_fwd
        y, stream, rstd = fwd(main, residual, w, *drawn, *how)
        node: Any = rms_norm_kept(cfg, norm.kept, stream, params[-1], rstd)
    else:
        fwd = kernels.dropout_add_layer_norm_fwd if dropped else kernels.add_layer_norm_fwd
        y, stream, mean, rstd = fwd(main, residual, w, b, *drawn, *how)
        node = layer_norm_kept(cfg, norm.kept, stream, params[-1], mean, rstd)
    values[split.gives[0]] = stream
    first = [dropout_kept(call.cfg, call.kept, (main, key)) for call in dropped]
    return y, [*first, add_kept(join.cfg, join.kept, (main, residual)), fork_kept(split.cfg, split.kept, stream), node]


def _run_backward(calls: Any, kept: list[Any], dy: Any, gradients: dict[int, Any], recomputed: bool = False) -> Any:
    join, split, norm = calls
    node = kept[2]
    dstream = gradients.get(split.gives[0])
    if dstream is None or not alike(dy, dstream, node.x) or not dy.shape == dstream.shape == node.x.shape:
        return NotImplemented
    gradients.pop(split.gives[0])
    dx, pending = norm_gradient(norm, node, dy, dstream, gradients if recomputed else None)
    residual = join.takes[0]
    if join.needs.input(1):
        gradients[residual] = summed(gradients.get(residual), dx)
    return dx if join.needs.input(0) else None, [None, None, pending]


def match_recomputed(match: Any) -> Any:
    """Restrict `match` to windows where only weight gradients read the norm's y, and y was not saved."""

    def found(window: Window) -> int | str | None:
        size = match(window)
        return size if isinstance(size, int) and readers_wait(window.calls[size - 1]) else None

    return found


def norm_gradient(norm: Any, node: Any, dy: Any, dstream: Any, recomputed: dict[int, Any] | None = None) -> tuple[Any, Any]:
    """Return a norm's dx plus its stream's gradient, and the norm's pending; put the recomputed y into `recomputed`."""
    cfg = norm.cfg
    shared = (dy, dstream, node.x, node.weight)
    if norm.op is rms_norm:
        wanted = bool(node.needs.params)
        if recomputed is not None:
            dx, recomputed[norm.out], parts = kernels.add_rms_norm_bwd_recompute(
                *shared, node.rstd, cfg.zero_centered_gamma, wanted
            )
        else:
            dx, parts = kernels.add_rms_norm_bwd(*shared, node.rstd, cfg.zero_centered_gamma, True, wanted)
        pending = RMSNormPending.keep(cfg, node.needs, parts=parts, weight_dtype=node.weight_dtype)
    else:
        wants = node.needs.param("weight"), cfg.bias and node.needs.param("bias")
        how = node.mean, node.rstd, cfg.zero_centered_gamma
        if recomputed is not None:
            dx, recomputed[norm.out], dw, db = kernels.add_layer_norm_bwd_recompute(*shared, node.bias, *how, *wants)
        else:
            dx, dw, db = kernels.add_layer_norm_bwd(*shared, *how, True, *wants)
        pending = LayerNormPending.keep(cfg, node.needs, dw_parts=dw, db_parts=db, weight_dtype=node.weight_dtype)
    return dx, pending


def _saves(window: Window) -> Saving:
    """The norm does not read the sum, and the dropout's output is neither written nor read."""
    return Saving(1, 1) if len(window.calls) == 3 else Saving(3, 2)


rule = register_fusion(Rule("add + norm", FORWARD, _match_forward, _run, _saves))
# the norm's gradient is neither written nor read
backward_rule = register_fusion(Rule("add + norm", BACKWARD, _match_backward, _run_backward, Saving(2, 1)))
recompute_rule = register_fusion(
    Rule(
        "add + norm, recomputed",
        BACKWARD,
        match_recomputed(_match_backward),
        functools.partial(_run_backward, recomputed=True),
        Saving(3, 2),
        whole=True,
        recompute=True,
    )
)
