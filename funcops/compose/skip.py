"""skip: y = x + body(x).

    dx = dy + body_dx(dy)

Transparent in trees: params, residuals and pending are the body's own. Nothing is kept for the sum. Where Triton runs, a skip of a
chain is planned with it, as fork, body, add: so the sums may go into its first and last kernels.
"""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Any, ClassVar

from torch import Tensor

from funcops.backend import wants_triton
from funcops.compose.chain import ChainConfig, ChainResiduals, chain, needs_of_steps
from funcops.compose.step import Replace, Step, WithExtras, add, check_body, extras_of, keys_of, needs_of
from funcops.compose.widths import Width, follow, wanted
from funcops.errors import describe, fail
from funcops.needs import Needs, sub_mask
from funcops.op import Op, config, init_of, make_op
from funcops.ops.add import AddConfig, AddResiduals
from funcops.ops.add import add as add_op
from funcops.ops.fork import ForkConfig, ForkResiduals, fork
from funcops.schema import Inputs, open_node


@config
class SkipConfig:
    """The body: an op and its config. Its extras are passed through."""

    op: Op = field(kw_only=False)
    cfg: Any = field(kw_only=False)

    def __post_init__(self) -> None:
        check_body("SkipConfig", self.op, self.cfg)
        object.__setattr__(self, "extras", extras_of(self.cfg))
        object.__setattr__(self, "keys", keys_of(self.cfg))
        object.__setattr__(self, "entries", ((None, self.op, self.cfg),))
        self.follow("SkipConfig", "", None)
        object.__setattr__(self, "unrolled", _unrolled(self.cfg) if self.op is chain and self.cfg.fuse else None)

    def with_parts(self, replace: Replace) -> SkipConfig:
        """The config with `replace(None, op, cfg)` for the body: a skip adds no name to its paths."""
        op, cfg = replace(None, self.op, self.cfg)
        return SkipConfig(op=op, cfg=cfg)

    def follow(self, where: str, path: str, width: Width | None) -> Width | None:
        """See `funcops.compose.widths`: the body gives what it takes."""
        first = wanted(self.cfg)
        before = width if width is not None or first is None else Width(first, path)
        after = follow(where, path, self.cfg, before)
        if before is not None and after is not None and after.size != before.size:
            name = f"body of skip {path!r}" if path else "the body"
            fail(where, name, f"one that gives [..., {before.size}], as its x is", f"[..., {after.size}] of step {after.of!r}")
        return before or after

    entries: ClassVar[tuple[tuple[Any, Op, Any], ...]]  # whose input x is: name, op, cfg
    unrolled: ClassVar[ChainConfig | None]  # the skip of a chain as a chain
    extras: ClassVar[tuple[str, ...]]
    keys: ClassVar[tuple[str, ...]]


IN, OUT, STREAM = "skip_in", "skip_out", "skip_stream"


def _unrolled(body: ChainConfig) -> ChainConfig | None:
    if {IN, OUT} & body.names.keys() or STREAM in body.extras:
        return None
    first, last = (
        Step(name=IN, op=fork, cfg=ForkConfig(), gives=(STREAM,)),
        Step(name=OUT, op=add_op, cfg=AddConfig(), takes=(STREAM,)),
    )
    return dataclasses.replace(body, steps=(first, *body.steps, last))


def _planned(cfg: SkipConfig, t: Any) -> ChainConfig | None:
    """The chain to run on tensors like t in place of the skip, where there is one."""
    return cfg.unrolled if cfg.unrolled is not None and type(t) is Tensor and wants_triton(t) else None


def _rolled(node: Any, cfg: SkipConfig) -> Any:
    """Residuals or pending of the chain in its place as those of the body."""
    if node is not None:
        node.pop(IN, None)
        node.pop(OUT, None)
        node.cfg = cfg.cfg
    return node


def _unrolled_residuals(where: str, residuals: Any, dy: Tensor, cfg: SkipConfig, steps: ChainConfig) -> Any:
    """The body's residuals as those of the chain in its place; an own node, its parts given away if they were."""
    node = open_node(where, residuals, ChainResiduals, cfg.cfg)
    wanted, statics = needs_of_steps(steps, node.needs), {"shape": dy.shape, "dtype": dy.dtype}
    given: Any = ForkResiduals
    summed: Any = AddResiduals
    first = given.keep(steps.steps[0].cfg, wanted[0], **statics)
    last = summed.keep(steps.steps[-1].cfg, wanted[-1], inputs=Inputs.of((dy, dy)), **statics)
    made = ChainResiduals({IN: first, **node, OUT: last}, cfg=steps, needs=node.needs)
    made.donated = node.donated
    if node.donated:
        node.empty()
    return made


def _check_cfg(where: str, cfg: Any) -> None:
    if type(cfg) is not SkipConfig:
        fail(where, "cfg", "SkipConfig", describe(cfg), TypeError)


@init_of(SkipConfig)
def skip_init(cfg: SkipConfig, *, key: Any = None, device: Any = None, dtype: Any = None) -> Any:
    """The body's params."""
    return cfg.op.init(cfg.cfg, key=key, device=device, dtype=dtype)


def skip_fwd(params: Any, x: Any, cfg: SkipConfig, *, needs: Needs = Needs.ALL) -> tuple[Any, Any]:
    """`y = x + body(x)`. x: a tensor that the body maps to its own shape, in `WithExtras` where the body has extras."""
    if type(cfg) is not SkipConfig:
        _check_cfg("skip_fwd", cfg)
    main = x.main if type(x) is WithExtras else x
    steps = _planned(cfg, main)
    if steps is not None and isinstance(params, dict):
        y, residuals = chain.fwd({IN: None, **params, OUT: None}, x, steps, needs=needs)
        return y, _rolled(residuals, cfg)
    branch, residuals = cfg.op.fwd(params, x, cfg.cfg, needs=needs)
    if branch.shape != main.shape or branch.dtype is not main.dtype:
        fail("skip_fwd", "body(x)", f"like x, {describe(main)}", describe(branch))
    return main + branch, residuals


def skip_dgrad(residuals: Any, dy: Any, cfg: SkipConfig) -> tuple[Any, Any]:
    """`dx = dy + body_dx(dy)`, and the body's pending."""
    _check_cfg("skip_dgrad", cfg)
    steps = _planned(cfg, dy)
    if steps is not None:
        dx, pending = chain.dgrad(_unrolled_residuals("skip_dgrad", residuals, dy, cfg, steps), dy, steps)
        return dx, _rolled(pending, cfg)
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
    steps = _planned(cfg, dy)
    if steps is not None:
        sums = {IN: None, **into, OUT: None} if isinstance(into, dict) else into
        dparams, dx = chain.bwd(_unrolled_residuals("skip_bwd", residuals, dy, cfg, steps), dy, steps, into=sums)
        return {name: dparams[name] for name in cfg.cfg.names} if into is None else into, dx
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
