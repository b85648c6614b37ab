"""skip: y = x + body(x).

    dx = dy + body_dx(dy)

Transparent in trees: params, residuals and pending are the body's own. Nothing is kept for the sum.
"""

from __future__ import annotations

from typing import Any, ClassVar

from funcops.compose.step import Replace, WithExtras, add, check_body, extras_of, keys_of, needs_of
from funcops.errors import describe, fail
from funcops.needs import Needs, sub_mask
from funcops.op import Op, config, make_op, positional


@config
class SkipConfig:
    """The body: an op and its config. Its extras are passed through."""

    op: Op = positional()
    cfg: Any = positional()

    def __post_init__(self) -> None:
        check_body("SkipConfig", self.op, self.cfg)
        object.__setattr__(self, "extras", extras_of(self.cfg))
        object.__setattr__(self, "keys", keys_of(self.cfg))
        object.__setattr__(self, "entries", ((None, self.op, self.cfg),))

    def with_parts(self, replace: Replace) -> SkipConfig:
        """The config with `replace(None, op, cfg)` for the body: a skip adds no name to its paths."""
        op, cfg = replace(None, self.op, self.cfg)
        return SkipConfig(op=op, cfg=cfg)

    entries: ClassVar[tuple[tuple[Any, Op, Any], ...]]  # whose input x is: name, op, cfg
    extras: ClassVar[tuple[str, ...]]
    keys: ClassVar[tuple[str, ...]]


def _check_cfg(where: str, cfg: Any) -> None:
    if type(cfg) is not SkipConfig:
        fail(where, "cfg", "SkipConfig", describe(cfg), TypeError)


def skip_init(cfg: SkipConfig, *, key: Any = None, device: Any = None, dtype: Any = None) -> Any:
    """The body's params."""
    _check_cfg("skip_init", cfg)
    return cfg.op.init(cfg.cfg, key=key, device=device, dtype=dtype)


def skip_fwd(params: Any, x: Any, cfg: SkipConfig, *, needs: Needs = Needs.ALL) -> tuple[Any, Any]:
    """`y = x + body(x)`. x: a tensor that the body maps to its own shape, in `WithExtras` where the body has extras."""
    if type(cfg) is not SkipConfig:
        _check_cfg("skip_fwd", cfg)
    branch, residuals = cfg.op.fwd(params, x, cfg.cfg, needs=needs)
    main = x.main if type(x) is WithExtras else x
    if branch.shape != main.shape or branch.dtype is not main.dtype:
        fail("skip_fwd", "body(x)", f"like x, {describe(main)}", describe(branch))
    return main + branch, residuals


def skip_dgrad(residuals: Any, dy: Any, cfg: SkipConfig) -> tuple[Any, Any]:
    """`dx = dy + body_dx(dy)`, and the body's pending."""
    _check_cfg("skip_dgrad", cfg)
    wanted = _wants_main(residuals, cfg)
    dx, pending = cfg.op.dgrad(residuals, dy, cfg.cfg)
    return _sum(dx, dy, wanted), pending


def skip_wgrad(pending: Any, cfg: SkipConfig, *, into: Any = None) -> Any:
    """The body's weight gradients."""
    _check_cfg("skip_wgrad", cfg)
    return cfg.op.wgrad(pending, cfg.cfg, into=into)


def skip_bwd(residuals: Any, dy: Any, cfg: SkipConfig, *, into: Any = None) -> tuple[Any, Any]:
    """The whole backward. Returns `(dparams, dx)`."""
    _check_cfg("skip_bwd", cfg)
    wanted = _wants_main(residuals, cfg)
    dparams, dx = cfg.op.bwd(residuals, dy, cfg.cfg, into=into)
    return dparams, _sum(dx, dy, wanted)


def _wants_main(residuals: Any, cfg: SkipConfig) -> bool:
    mask = needs_of(residuals).x
    if mask is True:
        return True
    return bool(sub_mask(mask, "main") if cfg.extras else mask)


def _sum(dx: Any, dy: Any, wanted: bool) -> Any:
    if not wanted:
        return dx
    return WithExtras(add(dy, dx.main), dx.extras) if type(dx) is WithExtras else add(dy, dx)


skip: Op = make_op("skip", SkipConfig, init=skip_init, fwd=skip_fwd, dgrad=skip_dgrad, wgrad=skip_wgrad, bwd=skip_bwd)
