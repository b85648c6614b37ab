"""Gated linear unit.

    y = f(gate) * linear        d gate = dy * linear * f'(gate)        d linear = dy * f(gate)

gate and linear are the halves of x; the config says which half is the gate (torch.nn.functional.glu gates with the
second, most SwiGLU models with the first). f: glu sigmoid, reglu relu, squared_reglu relu^2, geglu gelu (erf), geglu_tanh,
quick_geglu x sigmoid(1.702 x), swiglu silu. clamped_swiglu (GPT-OSS): g = min(gate, limit), l = clamp(linear, ±limit),
y = g sigmoid(alpha g) (l + offset). With `scaled`, x is `(x, scales)` and y is multiplied by scales row by row;
d scales = sum over H of dy times the unscaled y. With `gathered` as well, x is `(x, weights, order)` and the scale of row n is
weights.flat[order[n]], for rows sorted by expert (`permute`). With `paired`, x is two tensors, `(gate, linear)`.

x, dx: [*, 2H], or two of [*, H]; y, dy: [*, H]; scales, d scales: [*], of x's dtype or the wide one; all else of one float dtype.
Gathered: x [N, 2H], weights and d weights of N numbers, order [N], a permutation, int32. Kept: x, scales, weights and order,
aliases: no bytes of their own. arXiv:2002.05202.

>>> import torch
>>> from funcops import GLUConfig, glu_bwd, glu_fwd
>>> cfg = GLUConfig(kind="reglu", gate="first")
>>> y, residuals = glu_fwd(None, torch.tensor([2.0, 3.0]), cfg)
>>> y, glu_bwd(residuals, torch.ones(1), cfg)[1]
(tensor([6.]), tensor([3., 2.]))
"""

from __future__ import annotations

import math
from dataclasses import field
from typing import Any, ClassVar

import torch
from torch import Tensor

from funcops.engine.backend import wide
from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config, dgrad_of, forward, make_op, no_params, recompute_of
from funcops.engine.contract.schema import DGRAD, RECOMPUTE, Inputs, Residuals, saved, static
from funcops.engine.errors import FLOATS, check, fail, not_a_tuple, one_of, require
from funcops.engine.residuals.forms import Packed, block_of, from_form
from funcops.library.kernels import coded_glu
from funcops.library.kernels import glu as kernels
from funcops.library.kernels.routing import of_choices, of_rows

__all__ = ["GLUConfig", "GLUResiduals", "glu", "glu_bwd", "glu_dgrad", "glu_fwd", "glu_init", "glu_wgrad"]

KINDS = (*kernels.GATES, "clamped_swiglu")


@config
class GLUConfig(OpConfig):
    """`kind`: glu, reglu, squared_reglu, geglu, geglu_tanh, quick_geglu, swiglu or clamped_swiglu, to which limit, alpha and offset
    belong. `gate` ("first" or "second" half) must be given unless x is `paired`. `gathered`: the scales of a `scaled` GLU are
    gathered by an index."""

    kind: str = field(kw_only=False)
    gate: str = ""
    scaled: bool = False
    paired: bool = False
    gathered: bool = False
    limit: float = 7.0
    alpha: float = 1.702
    offset: float = 1.0

    def __post_init__(self) -> None:
        require(self.kind in KINDS, "GLUConfig", "kind", one_of(KINDS, self.kind), repr(self.kind))
        if self.paired:
            require(self.gate == "", "GLUConfig", "gate", "'' (x is paired: the gate comes first)", repr(self.gate))
            plain = not self.scaled and self.kind in kernels.GATES
            require(plain, "GLUConfig", "paired", "False for a scaled or clamped GLU", True)
        else:
            require(self.gate in ("first", "second"), "GLUConfig", "gate", "'first' or 'second'", repr(self.gate))
        require(self.scaled or not self.gathered, "GLUConfig", "gathered", "False for a GLU that is not scaled", True)
        require(self.limit > 0, "GLUConfig", "limit", "above 0", self.limit)
        for name in ("alpha", "offset"):
            require(math.isfinite(getattr(self, name)), "GLUConfig", name, "finite", getattr(self, name))
        object.__setattr__(self, "first", self.gate == "first")

    first: ClassVar[bool]  # whether the gate is the first half

    def widths(self, width: int | None) -> tuple[int | None, int | None]:
        return None, width if self.paired or width is None else width // 2

    def packed_parts(self, width: int) -> tuple[int, ...]:
        """The sizes of the parts side by side in x's last dimension; () if x is two tensors."""
        return () if self.paired else (width // 2, width // 2)


class GLUResiduals(Residuals, static=("inputs",)):
    x: Tensor = saved("[*, 2H]", alias="x", needed_by=DGRAD | RECOMPUTE, blocks=True)
    scales: Tensor | None = saved("[*], or [N]", alias="x.1", needed_by=DGRAD | RECOMPUTE, of=("x.0",))
    linear: Tensor | None = saved("[*, H]", alias="x.1", needed_by=DGRAD | RECOMPUTE)
    order: Any = saved("[*]", alias="x.2", needed_by=DGRAD | RECOMPUTE)
    scales_like: Any = static()  # the shape and dtype of scales


def _split(x: Any, *names: str) -> tuple[Tensor, ...]:
    if not isinstance(x, tuple) or len(x) != len(names):
        not_a_tuple("glu_fwd", x, *names, why=", as the config says")
    return x


def _pair(x: Any, cfg: GLUConfig, needs: Needs) -> tuple[Tensor, Any]:
    gate, linear = _split(x, "gate", "linear")
    check("glu_fwd", "x.0 (gate)", gate, (...,), FLOATS)
    check("glu_fwd", "x.1 (linear)", linear, gate.shape, gate.dtype, gate)
    if gate.dim() < 1:
        fail("glu_fwd", "x.0 (gate)", "[..., H]", list(gate.shape))
    kept: Any = GLUResiduals
    return kernels.glu_pair_fwd(gate, linear, cfg.kind), kept.keep(cfg, needs, x=gate, linear=linear, inputs=Inputs.of(x))


def glu_kept(cfg: GLUConfig, needs: Needs, x: Tensor) -> GLUResiduals | None:
    """Residuals for one tensor, gate and linear."""
    return GLUResiduals.keep(cfg, needs, x=x, scales=None, inputs=None)


def scaled_glu_kept(cfg: GLUConfig, needs: Needs, x: Any) -> GLUResiduals | None:
    """Residuals for one tensor and its scales, which may be gathered."""
    t, scales, order = x if len(x) == 3 else (*x, None)
    like = scales.shape, scales.dtype
    return GLUResiduals.keep(cfg, needs, x=t, scales=scales, order=order, scales_like=like, inputs=Inputs.of(x))


def _check_halves(t: Any) -> None:
    check("glu_fwd", "x", t, (...,), FLOATS)
    if t.dim() < 1 or t.shape[-1] % 2 != 0:
        fail("glu_fwd", "x", "[..., 2H], with an even last size", list(t.shape))


@forward(GLUConfig)
def glu_fwd(params: None, x: Any, cfg: GLUConfig, *, needs: Needs = Needs.ALL) -> tuple[Tensor, GLUResiduals | None]:
    """`y = f(gate) * linear`. x: [*, 2H], `(x, scales)`, `(x, weights, order)` or `(gate, linear)` -> y: [*, H]. Raises
    `ValueError` or `TypeError` for a wrong shape, dtype or device."""
    if cfg.paired:
        return _pair(x, cfg, needs)
    if not cfg.scaled:
        _check_halves(x)
        return _gated(x, None, cfg), glu_kept(cfg, needs, x)
    names = ("x", "weights", "order") if cfg.gathered else ("x", "scales")
    parts: Any = _split(x, *names)
    t, scales = parts[:2]
    _check_halves(t)
    dtypes = tuple({t.dtype: 0, wide(t.dtype): 0})
    check("glu_fwd", names[1], scales, (...,) if cfg.gathered else t.shape[:-1], dtypes, t)
    if cfg.gathered:
        rows = t.shape[:-1].numel()
        if scales.numel() != rows:
            fail("glu_fwd", "weights", f"{rows} numbers, one per row of x", list(scales.shape))
        check("glu_fwd", "order", parts[2], t.shape[:-1], torch.int32, t)
        scales = of_rows(scales, parts[2])
    return _gated(t, scales, cfg), scaled_glu_kept(cfg, needs, x)


def _gated(t: Tensor, scales: Tensor | None, cfg: GLUConfig) -> Tensor:
    if cfg.kind == "clamped_swiglu":
        return kernels.clamped_swiglu_fwd(t, scales, cfg.first, cfg.limit, cfg.alpha, cfg.offset)
    return kernels.glu_fwd(t, scales, cfg.kind, cfg.first)


@recompute_of(GLUResiduals)
def glu_recompute(residuals: GLUResiduals, cfg: GLUConfig) -> Tensor:
    """Recompute y, bit for bit."""
    x: Any = residuals.x
    if type(x) is Packed:
        if _reads(cfg):
            return coded_glu.coded_glu_fwd(*x.parts, block_of(x), cfg.kind, cfg.first, x.dtype)
        x = from_form(x)
    if cfg.paired:
        return kernels.glu_pair_fwd(x, residuals.linear, cfg.kind)
    scales: Any = residuals.scales
    return _gated(x, of_rows(scales, residuals.order) if cfg.gathered else scales, cfg)


def _reads(cfg: GLUConfig) -> bool:
    """Whether kernels exist that read an x in 8 bits."""
    return not cfg.scaled and not cfg.paired and cfg.kind in kernels.GATES


@dgrad_of(GLUResiduals)
def glu_dgrad(residuals: GLUResiduals, dy: Tensor, cfg: GLUConfig) -> tuple[Any, None]:
    """dx: [*, 2H], `(dx, dscales)` or `(dx, dweights, None)`. No params, so pending is None."""
    x, scales, needs = residuals.x, residuals.scales, residuals.needs
    if not needs.x:
        return residuals.nothing(), None
    if type(x) is Packed:
        if _reads(cfg):
            check("glu_dgrad", "dy", dy, (*x.shape[:-1], x.shape[-1] // 2), x.dtype, x.parts[0])
            return coded_glu.coded_glu_bwd(dy, *x.parts, block_of(x), cfg.kind, cfg.first), None
        x = from_form(x)
    if cfg.paired:
        check("glu_dgrad", "dy", dy, x.shape, x.dtype, x)
        pair = kernels.glu_pair_bwd(dy, x, residuals.linear, cfg.kind)
        return residuals.inputs.make(tuple([d if needs.input(i) else None for i, d in enumerate(pair)])), None
    check("glu_dgrad", "dy", dy, (*x.shape[:-1], x.shape[-1] // 2), x.dtype, x)
    wanted = (needs.input(0), needs.input(1)) if cfg.scaled else (True, False)
    first = cfg.first
    if wanted[1] and scales is None:  # the gradient of scales reads only their dtype
        scales = x.new_empty(x.shape[:-1], dtype=residuals.scales_like[1])
    elif scales is not None and residuals.order is not None:
        scales = of_rows(scales, residuals.order)
    if cfg.kind == "clamped_swiglu":
        found = kernels.clamped_swiglu_bwd(dy, x, scales, first, cfg.limit, cfg.alpha, cfg.offset, *wanted)
    else:
        found = kernels.glu_bwd(dy, x, scales, cfg.kind, first, *wanted)
    if not cfg.gathered:
        return residuals.inputs.make(found) if cfg.scaled else found[0], None
    dx, ds = found
    d_weights = None if ds is None else of_choices(ds, residuals.order, residuals.scales_like[0])
    return residuals.inputs.make((dx, d_weights, None)), None


glu = make_op("glu", GLUConfig, fwd=glu_fwd, dgrad=glu_dgrad, recomputable="elementwise", recompute=glu_recompute, mixes="")
glu_init, glu_bwd, glu_wgrad = no_params(glu, glu_dgrad)
