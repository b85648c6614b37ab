"""The logarithm of a decay that is learned and depends on x, for each head (Mamba2, arXiv:2405.21060; Gated DeltaNet).

    g = -exp(a_log) softplus(x + dt_bias)
    dx = -dg exp(a_log) sigmoid(x + dt_bias)        d a_log = sum over rows of dg g        d dt_bias = sum over rows of dx

x, dx: [*, H], a number for each head; a_log, dt_bias: [H], of x's dtype or float32; g, dg: [*, H], at most 0, in float32 (float64
for float64) so that sums of them are exact enough to be exponents. Kept: x, a_log and dt_bias, aliases: no bytes of their own.
dgrad returns the gradients of the params as partial sums. Computed by torch on every device: x has a number for a whole head.

>>> import torch
>>> from funcops import LogDecayConfig, LogDecayParams, log_decay_fwd
>>> params = LogDecayParams(torch.zeros(2), torch.tensor([-torch.inf, 30.0]))
>>> y, residuals = log_decay_fwd(params, torch.zeros(1, 2), LogDecayConfig(2))
>>> y
tensor([[ -0., -30.]])
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from funcops.engine import random
from funcops.engine.backend import wide
from funcops.engine.contract.accumulators import accumulate
from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import both_halves, config, dgrad_of, forward, init_of, make_op, wgrad_of
from funcops.engine.contract.schema import DGRAD, WGRAD, Pending, Residuals, saved, static
from funcops.engine.errors import FLOATS, check, require_count
from funcops.engine.trees import leaf, tree
from funcops.library.kernels import log_decay as kernels
from funcops.library.ops._norm import finish

__all__ = ["LogDecayConfig", "LogDecayParams", "LogDecayPending", "LogDecayResiduals"]
__all__ += ["log_decay", "log_decay_bwd", "log_decay_dgrad", "log_decay_fwd", "log_decay_init", "log_decay_wgrad"]


@config
class LogDecayConfig(OpConfig):
    """`heads` (H)."""

    heads: int = field(kw_only=False)

    def __post_init__(self) -> None:
        require_count("LogDecayConfig", heads=self.heads)

    def widths(self, width: int | None) -> tuple[int | None, int | None]:
        return self.heads, self.heads


@tree
class LogDecayParams:
    a_log: Tensor = leaf("[H]")
    dt_bias: Tensor = leaf("[H]")


class LogDecayResiduals(Residuals):
    x: Tensor = saved("[*, H]", alias="x", needed_by=DGRAD, of=("x", "params"))
    a_log: Tensor = saved("[H]", alias="params.a_log", needed_by=DGRAD, of=("x", "params"))
    dt_bias: Tensor = saved("[H]", alias="params.dt_bias", needed_by=DGRAD, of=("x", "params"))


class LogDecayPending(Pending):  # float32 (float64 for float64)
    of_log: Tensor | None = saved("[P, H]", needed_by=WGRAD, of=("params.a_log",))
    of_bias: Tensor | None = saved("[P, H]", needed_by=WGRAD, of=("params.dt_bias",))
    dtypes: tuple[torch.dtype, torch.dtype] = static()  # of both params


@init_of(LogDecayConfig)
def log_decay_init(
    cfg: LogDecayConfig, *, key: Tensor | None = None, device: Any = None, dtype: torch.dtype | None = None
) -> LogDecayParams:
    """exp(a_log) uniform in [0.01, 16], and dt_bias of ones, as Qwen3-Next draws them."""
    drawn = random.uniform(key, (cfg.heads,), low=0.01, high=16.0, dtype=dtype, device=device)
    return LogDecayParams(drawn.log(), torch.ones(cfg.heads, dtype=dtype, device=device))


@forward(LogDecayConfig, LogDecayParams)
def log_decay_fwd(
    params: LogDecayParams, x: Tensor, cfg: LogDecayConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, LogDecayResiduals | None]:
    """x: [*, H] -> g: [*, H], in the wide dtype. Raises `ValueError` or `TypeError` for a wrong shape, dtype or device."""
    where, a_log, dt_bias = "log_decay_fwd", params.a_log, params.dt_bias
    check(where, "x", x, (..., cfg.heads), FLOATS)
    either = tuple(dict.fromkeys((x.dtype, wide(x.dtype))))
    for name, t in (("a_log", a_log), ("dt_bias", dt_bias)):
        check(where, f"params.{name}", t, (cfg.heads,), either, x)
    return kernels.log_decay_fwd(x, a_log, dt_bias), LogDecayResiduals.keep(cfg, needs, x=x, a_log=a_log, dt_bias=dt_bias)


@dgrad_of(LogDecayResiduals)
def log_decay_dgrad(residuals: LogDecayResiduals, dy: Tensor, cfg: LogDecayConfig) -> tuple[Tensor, LogDecayPending | None]:
    """dx: [*, H], and the pending sums for the params."""
    x, a_log, dt_bias, needs = residuals.x, residuals.a_log, residuals.dt_bias, residuals.needs
    if not needs.of_gradients.any:
        return None, None  # type: ignore[return-value]
    check("log_decay_dgrad", "dy", dy, x.shape, wide(x.dtype), x)
    wanted = bool(needs.x), needs.param("a_log"), needs.param("dt_bias")
    dx, of_log, of_bias = kernels.log_decay_bwd(dy, x, a_log, dt_bias, *wanted)
    dtypes = a_log.dtype, dt_bias.dtype
    return dx, LogDecayPending.keep(cfg, needs, of_log=of_log, of_bias=of_bias, dtypes=dtypes)


@wgrad_of(LogDecayPending, LogDecayParams)
def log_decay_wgrad(pending: LogDecayPending, cfg: LogDecayConfig, *, into: LogDecayParams | None = None) -> LogDecayParams:
    """The gradients of a_log and dt_bias, in their dtypes; added to `into` if given, in float32 if `into` is."""
    target = into or LogDecayParams(None, None)  # type: ignore[arg-type]
    pairs = zip((pending.of_log, pending.of_bias), pending.dtypes, (target.a_log, target.dt_bias), strict=True)
    a_log, dt_bias = [finish(parts, (cfg.heads,), dtype, held) for parts, dtype, held in pairs]
    return accumulate("log_decay_wgrad", LogDecayParams(a_log, dt_bias), into)  # type: ignore[arg-type]


log_decay = make_op(
    "log_decay", LogDecayConfig, init=log_decay_init, fwd=log_decay_fwd, dgrad=log_decay_dgrad, wgrad=log_decay_wgrad
)
log_decay_bwd = both_halves(log_decay, log_decay_dgrad, log_decay_wgrad)
