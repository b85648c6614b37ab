"""Quantised linear layers: siblings quantise and save their shared x once; and a norm, GLU or activation before such a layer writes
codes and scales instead of its y.

Steps: the first of each of two or more branches of a parallel, qlinear with one recipe; or a norm, GLU or activation, and a qlinear
that saves x by rows, in tiles of one row.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from funcops.contract.op import Op
from funcops.errors import FLOATS
from funcops.formats import QTensor, by_tiles
from funcops.formats.scaled import Scaled
from funcops.fused.matchers import alike, alone
from funcops.kernels import quantize_after as kernels
from funcops.kernels.activation import ACTIVATIONS
from funcops.kernels.glu import GATES
from funcops.ops.activation import activation, activation_kept
from funcops.ops.glu import glu, glu_kept
from funcops.ops.layer_norm import layer_norm, layer_norm_kept
from funcops.ops.linear import LinearParams
from funcops.ops.qlinear import check_params, operands, qlinear, qlinear_of
from funcops.ops.rms_norm import rms_norm, rms_norm_kept
from funcops.program.rules import FORWARD, SIBLINGS_FORWARD, Rule, Saving, Window, register_fusion

NORMS = (rms_norm, layer_norm)


def _match_siblings(window: Window) -> tuple[int, ...] | str | None:
    """Cover the branches with the most common recipe; the other branches run by themselves."""
    low = [call.cfg.recipe if alone(call, qlinear) else None for call in window.calls]
    asked = [recipe for recipe in low if recipe is not None]
    if len(asked) < 2:
        return None
    coded = [recipe for recipe in asked if recipe.keep != "input"]
    if not coded:
        return "each saves x itself"
    shared = [recipe for recipe in coded if not recipe.delayed]
    recipe = max(shared, key=shared.count, default=None)  # of equal counts the first
    if recipe is None or shared.count(recipe) < 2:
        return "recipes differ" if shared else "each has a scale of its own"
    return tuple([int(one == recipe) for one in low])


def _fits(call: Any, params: Any, like: Any) -> bool:
    """Whether the call takes these params; if not, the call itself raises the error."""
    if type(params) is not LinearParams or not isinstance(like, Tensor) or like.dtype not in FLOATS:
        return False
    if isinstance(params.weight, Scaled):
        return False
    try:
        check_params("qlinear_fwd", params, like, call.cfg)
    except (ValueError, TypeError, RuntimeError):
        return False
    return True


def _run_siblings(calls: Any, params: Any, x: Any, values: dict[int, Any]) -> Any:
    fits = all(_fits(call, p, x) for call, p in zip(calls, params, strict=True))
    if not fits or not alike(x) or x.dim() < 1 or any(x.shape[-1] != call.cfg.in_features for call in calls):
        return NotImplemented
    wanting = next((call for call in calls if call.kept.param("weight")), calls[0])
    row, kept = operands(x, calls[0].cfg.recipe, wanting.kept)
    made = [qlinear_of(row, kept, p, call.cfg, call.kept) for call, p in zip(calls, params, strict=True)]
    return tuple([y for y, _ in made]), [node for _, node in made]


def _match(window: Window) -> int | str | None:
    if len(window.calls) < 2:
        return None
    maker, reader = window.calls[:2]
    if not alone(reader, qlinear) or not any(alone(maker, op) for op in (*NORMS, glu, activation)):
        return None
    why = _cannot(maker.op, maker.cfg)
    if why:
        return why
    recipe = reader.cfg.recipe
    if recipe.keep == "input":
        return "the linear saves x itself"
    if recipe.keep != "row" or recipe.x.tile[0] != 1 or recipe.x.tile[1] == 0 or recipe.x.scales == "e4m3":
        return "the linear quantises columns, or whole tensors"
    return 2


def _cannot(op: Op, cfg: Any) -> str:
    if op in NORMS:
        return "the norm goes over several dimensions" if len(cfg.dim) != 1 else ""
    if op is glu and (cfg.scaled or cfg.paired):
        return "the GLU has two inputs"
    return "" if cfg.kind in (GATES if op is glu else ACTIVATIONS) else f"{cfg.kind} has no such kernel"


def _run(calls: Any, params: Any, main: Any, values: dict[int, Any]) -> Any:
    maker, reader = calls
    if not _fits(reader, params[1], main) or not alike(main) or main.dim() < 1:
        return NotImplemented
    made = _made(maker, params[0], main, reader.cfg.recipe.x, reader.cfg.in_features)
    if made is NotImplemented:
        return made
    row, node = made
    y, residuals = qlinear_of(row, row, params[1], reader.cfg, reader.kept)
    return y, [node, residuals]


def _made(maker: Any, params: Any, x: Tensor, format: Any, width: int) -> Any:
    """Return the first call's y in low precision, and its residuals."""
    cfg, how = maker.cfg, (format.element, format.tile[1], format.scales)
    if x.shape[-1] != (2 * width if maker.op is glu else width):
        return NotImplemented
    if maker.op in NORMS:
        w, b = params.weight, getattr(params, "bias", None)
        if not alike(x, w, *([] if b is None else [b])) or w.shape != cfg.dim or cfg.dim != (width,):
            return NotImplemented
        if cfg.bias != (b is not None) or (b is not None and b.shape != cfg.dim):
            return NotImplemented
        if maker.op is rms_norm:
            codes, scales, rstd = kernels.rms_norm_quantize(x, w, cfg.eps, cfg.zero_centered_gamma, *how)
            node: Any = rms_norm_kept(cfg, maker.kept, x, params, rstd)
        else:
            codes, scales, mean, rstd = kernels.layer_norm_quantize(x, w, b, cfg.eps, cfg.zero_centered_gamma, *how)
            node = layer_norm_kept(cfg, maker.kept, x, params, mean, rstd)
    elif maker.op is glu:
        codes, scales = kernels.glu_quantize(x, cfg.kind, cfg.first, *how)
        node = glu_kept(cfg, maker.kept, x)
    else:
        codes, scales = kernels.activation_quantize(x, cfg.kind, *how)
        node = activation_kept(cfg, maker.kept, x)
    scales = by_tiles(scales, format)
    return QTensor(codes, scales, None, format=format, shape=codes.shape, dtype=x.dtype, side="row", hadamard=False), node


def _saves(window: Window) -> Saving:
    """All siblings but one neither read x nor write codes."""
    return Saving(2 * len(window.calls) - 2, len(window.calls) - 1)


siblings_rule = register_fusion(Rule("sibling qlinears", SIBLINGS_FORWARD, _match_siblings, _run_siblings, _saves, on_cpu=True))
# y is neither written nor read
rule = register_fusion(Rule("quantised output", FORWARD, _match, _run, Saving(2, 1)))
