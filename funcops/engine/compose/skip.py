"""skip: y = x + body(x).

    dx = dy + body_dx(dy)

x, y, dy and dx have one shape and dtype, any that the body maps to itself. Transparent in trees: params, residuals and pending are
the body's own. Nothing is kept for the sum. Only main values are summed: the body's extras are passed in, and its outputs
passed on.

>>> import torch
>>> from funcops import ScaleConfig, SkipConfig, scale, skip
>>> cfg = SkipConfig(scale, ScaleConfig(2.0))
>>> y, residuals = skip.fwd(None, torch.ones(2), cfg)
>>> y, skip.bwd(residuals, torch.ones(2), cfg)[1]
(tensor([3., 3.]), tensor([3., 3.]))
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar

from funcops.engine.compose.add import AddConfig
from funcops.engine.compose.add import add as add_op
from funcops.engine.compose.fork import ForkConfig, fork
from funcops.engine.compose.pausing import LOWERED
from funcops.engine.compose.step import OneBody, check_body, note, split_x
from funcops.engine.contract.configs import Width, require_config
from funcops.engine.contract.needs import Needs, check_needs, sub_mask
from funcops.engine.contract.op import Op, config, init_of, make_op
from funcops.engine.errors import fail
from funcops.engine.program import programs
from funcops.engine.program.lower import Call, Extras, Lowered, Parts, Place, Value
from funcops.engine.program.values import abstract_params

if TYPE_CHECKING:
    from funcops.engine.contract.op import TypedOp

__all__ = ["SkipConfig", "skip", "skip_bwd", "skip_dgrad", "skip_fwd", "skip_init", "skip_wgrad"]


@config
class SkipConfig(OneBody):
    """The body: an op and its config. Its extras and outputs are passed through."""

    op: Op = field(kw_only=False)
    cfg: Any = field(kw_only=False)

    def __post_init__(self) -> None:
        check_body("SkipConfig", self.op, self.cfg)
        note(self, extras=self.cfg.extras, outputs=self.cfg.outputs, keys=self.cfg.keys, programs={})
        self.follow("SkipConfig", "", None)

    def abstract(self) -> Any:
        """See `funcops.engine.program.values.abstract_params`."""
        return abstract_params(self.op, self.cfg)

    def follow(self, where: str, path: str, width: Width | None) -> Width | None:
        """See `OpConfig.follow`: the body's y must have the width of its x."""
        first = self.cfg.wanted()
        before = width if width is not None or first is None else Width(first, path)
        after = self.cfg.follow(where, path, before)
        if before is not None and after is not None and after.size != before.size:
            name = f"body of skip {path!r}" if path else "the body"
            fail(where, name, f"one whose y is [..., {before.size}], as its x", f"[..., {after.size}] of step {after.of!r}")
        return before or after

    maps_to_itself = True
    programs: ClassVar[dict[Any, Any]]


def _lower(
    cfg: SkipConfig, rows: Lowered, place: Place, needs: Needs, main: Value, extras: Extras, recomputed_by: Call | None
) -> Parts:
    """A fork, the body, and the sum. Backward the body's gradient is added to dy."""
    # a skip has no flag of its own: its fork and its sum may be fused where the body may
    fuse, mask = cfg.cfg.fuse, needs.x
    wanted = mask is True or bool(sub_mask(mask, "main") if cfg.extras else mask)
    split = rows.call(fork, ForkConfig(), None, Needs(x=wanted, params=False), main, gives=1, fuse=fuse, path=place.path)
    branch, outputs, back = rows.body(cfg.op, cfg.cfg, place, needs, split.out, extras, recomputed_by, fuse=fuse)
    # dy goes into the body for its params, too, even if x needs no gradient
    asked = Needs(x=("0",) * needs.any + ("1",) * wanted, params=False)
    total = rows.call(add_op, AddConfig(), None, asked, branch, split.gives, fuse=fuse, path=place.path)
    return total.out, outputs, [total, *back, split]


@init_of(SkipConfig)
def skip_init(cfg: SkipConfig, *, key: Any = None, device: Any = None, dtype: Any = None) -> Any:
    """The body's params."""
    return cfg.op.init(cfg.cfg, key=key, device=device, dtype=dtype)


def skip_fwd(params: Any, x: Any, cfg: SkipConfig, *, needs: Needs = Needs.ALL) -> tuple[Any, Any]:
    """`y = x + body(x)`. x: a tensor that the body maps to its own shape, in `WithExtras` if the body has extras. Raises
    `ValueError` or `TypeError` as the body does, for needs that name a missing param, and for a body that changes the shape."""
    require_config("skip_fwd", cfg, SkipConfig)
    if needs is not Needs.ALL:
        check_needs("skip_fwd", needs, params, x)
    main, extras = split_x("skip_fwd", x, cfg)
    return programs.forward(skip, cfg, needs, main)(params, main, extras)


def skip_dgrad(residuals: Any, dy: Any, cfg: SkipConfig) -> tuple[Any, Any]:
    """`dx = dy + body_dx(dy)`, and the body's pending."""
    require_config("skip_dgrad", cfg, SkipConfig)
    return programs.dgrad(skip, residuals, dy, cfg)


def skip_wgrad(pending: Any, cfg: SkipConfig, *, into: Any = None) -> Any:
    """The body's weight gradients."""
    require_config("skip_wgrad", cfg, SkipConfig)
    # no program: the pending is the body's own, and a sum has no weights
    return cfg.op.wgrad(pending, cfg.cfg, into=into)


def skip_bwd(residuals: Any, dy: Any, cfg: SkipConfig, *, into: Any = None) -> tuple[Any, Any]:
    """The whole backward. Returns `(dparams, dx)`."""
    require_config("skip_bwd", cfg, SkipConfig)
    return programs.bwd(skip, residuals, dy, cfg, into)


def _products(pending: Any, cfg: SkipConfig, *, into: Any) -> list[Any]:
    require_config("skip_wgrad", cfg, SkipConfig)
    return cfg.op.products(pending, cfg.cfg, into=into)  # type: ignore[no-any-return]


skip: TypedOp[Any, Any, SkipConfig, Any, Any] = make_op(
    "skip",
    SkipConfig,
    init=skip_init,
    fwd=skip_fwd,
    dgrad=skip_dgrad,
    wgrad=skip_wgrad,
    bwd=skip_bwd,
    lower=_lower,
    products=_products,
    pausing=LOWERED,
    mixes="",
)
programs.lowers(SkipConfig, skip)
