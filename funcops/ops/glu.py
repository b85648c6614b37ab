"""Gated linear unit.

    y = f(gate) * linear        d gate = dy * linear * f'(gate)        d linear = dy * f(gate)

gate and linear are the halves of x; which half is the gate is said in the config (torch.nn.functional.glu gates with the
second, most SwiGLU models with the first). f: glu sigmoid, reglu relu, squared_reglu relu^2, geglu gelu (erf), geglu_tanh,
quick_geglu x sigmoid(1.702 x), swiglu silu. clamped_swiglu (GPT-OSS): g = min(gate, limit), l = clamp(linear, ±limit),
y = g sigmoid(alpha g) (l + offset). With `scaled`, x is `(x, scales)` and y is multiplied by scales row by row;
d scales = sum over H of dy times the unscaled y.

x, dx: [*, 2H]; y, dy: [*, H]; scales, d scales: [*]; one float dtype. Kept: x and scales, aliases: no bytes of their own.
arXiv:2002.05202.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from funcops.errors import FLOATS, check, describe, fail, require
from funcops.kernels import glu as kernels
from funcops.needs import Needs
from funcops.op import config, dgrad_of, forward, make_op
from funcops.schema import DGRAD, Inputs, residuals, saved, static

KINDS = (*kernels.GATES, "clamped_swiglu")


@config
class GLUConfig:
    """`kind` and `gate` ("first" or "second" half) must be given; limit, alpha and offset are those of clamped_swiglu."""

    kind: str
    gate: str
    scaled: bool = False
    limit: float = 7.0
    alpha: float = 1.702
    offset: float = 1.0

    def __post_init__(self) -> None:
        require(self.kind in KINDS, "GLUConfig", "kind", f"one of {', '.join(KINDS)}", repr(self.kind))
        require(self.gate in ("first", "second"), "GLUConfig", "gate", "'first' or 'second'", repr(self.gate))
        require(self.limit > 0, "GLUConfig", "limit", "above 0", self.limit)
        object.__setattr__(self, "first", self.gate == "first")

    first: ClassVar[bool]  # whether the gate is the first half


@residuals
class GLUResiduals:
    x: Tensor = saved("[*, 2H]", alias="x", needed_by=DGRAD)
    scales: Tensor | None = saved("[*]", alias="x.1", needed_by=DGRAD, of=("x.0",))
    inputs: Any = static()


def _split(x: Any) -> tuple[Tensor, Tensor | None]:
    if not isinstance(x, tuple) or len(x) != 2:
        fail("glu_fwd", "x", "a tuple (x, scales), as cfg.scaled says", describe(x), TypeError)
    return x[0], x[1]


@forward(GLUConfig)
def glu_fwd(params: None, x: Any, cfg: GLUConfig, *, needs: Needs = Needs.ALL) -> tuple[Tensor, Any]:
    """`y = f(gate) * linear`. x: [*, 2H], or `(x, scales)` -> y: [*, H]. Raises `ValueError` or `TypeError`."""
    t, scales = _split(x) if cfg.scaled else (x, None)
    check("glu_fwd", "x", t, (...,), FLOATS)
    if t.dim() < 1 or t.shape[-1] % 2 != 0:
        fail("glu_fwd", "x", "[..., 2H], of even last size", list(t.shape))
    if cfg.scaled:
        check("glu_fwd", "scales", scales, t.shape[:-1], t.dtype, t)
    first = cfg.first
    if cfg.kind == "clamped_swiglu":
        y = kernels.clamped_swiglu_fwd(t, scales, first, cfg.limit, cfg.alpha, cfg.offset)
    else:
        y = kernels.glu_fwd(t, scales, cfg.kind, first)
    return y, GLUResiduals.keep(cfg, needs, x=t, scales=scales, inputs=Inputs.of(x) if cfg.scaled else None)


@dgrad_of(GLUResiduals)
def glu_dgrad(residuals: Any, dy: Tensor, cfg: GLUConfig) -> tuple[Any, None]:
    """dx: [*, 2H], or `(dx, dscales)`. There is no weight gradient: pending is None."""
    x, scales, needs = residuals.x, residuals.scales, residuals.needs
    if not needs.x:
        return residuals.nothing(), None
    check("glu_dgrad", "dy", dy, (*x.shape[:-1], x.shape[-1] // 2), x.dtype, x)
    wanted = (needs.input(0), needs.input(1)) if cfg.scaled else (True, False)
    first = cfg.first
    if cfg.kind == "clamped_swiglu":
        found = kernels.clamped_swiglu_bwd(dy, x, scales, first, cfg.limit, cfg.alpha, cfg.offset, *wanted)
    else:
        found = kernels.glu_bwd(dy, x, scales, cfg.kind, first, *wanted)
    return residuals.inputs.make(found) if cfg.scaled else found[0], None


glu = make_op("glu", GLUConfig, fwd=glu_fwd, dgrad=glu_dgrad, cheap="elementwise")
glu_init, glu_bwd, glu_wgrad = glu.init, glu.bwd, glu.wgrad
