"""A norm, GLU or activation before a linear layer in low precision writes codes and scales instead of its y.

Steps: a norm, GLU or activation, and a qlinear that saves x by rows, in tiles of one row.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from funcops.engine.contract.op import Op
from funcops.engine.errors import FLOATS
from funcops.engine.program.rules import FORWARD, Rule, Saving, Window, register_fusion
from funcops.library.formats import QTensor, by_tiles
from funcops.library.formats.scaled import Scaled
from funcops.library.fused.matchers import alike, alone
from funcops.library.kernels import quantize_after as kernels
from funcops.library.kernels.activation import ACTIVATIONS
from funcops.library.kernels.glu import GATES
from funcops.library.ops.activation import activation, activation_kept
from funcops.library.ops.glu import glu, glu_kept
from funcops.library.ops.layer_norm import layer_norm, layer_norm_kept
from funcops.library.ops.linear import LinearParams
from funcops.library.ops.qlinear import qlinear
from funcops.library.ops.rms_norm import rms_norm, rms_norm_kept

NORMS = (rms_norm, layer_norm)


def _fits(call: Any, params: Any, like: Any) -> bool:
    """Whether the call takes these params; if not, the call itself raises the error."""
    if type(params) is not LinearParams or not isinstance(like, Tensor) or like.dtype not in FLOATS:
        return False
    if isinstance(params.weight, Scaled):
        return False
    try:
        qlinear.layer.check(params, like, call.cfg)
    except (ValueError, TypeError, RuntimeError):
        return False
    return True


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
    y, residuals = qlinear.layer.from_prepared((row, row, None), params[1], reader.cfg, reader.kept)
    return y, [node, residuals]


def _made(maker: Any, params: Any, x: Tensor, format: Any, width: int) -> Any:
    """Return the first call's y in low precision, and its residuals."""
    cfg, (element, _, cols, kind) = maker.cfg, format.how()
    how = element, cols, kind, format.amax_epsilon
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


# y is neither written nor read
rule = register_fusion(Rule("quantised output", FORWARD, _match, _run, Saving(2, 1)))
