"""pinned: an op whose rows have the same bits whatever else is in the batch.

    y = body(x)        dx, dparams: the body's

in blocks of constant sizes (`library.kernels.pins`): `rows` rows of a product at a time, `queries` of attention. A row's y and
dx, bit for bit, then depend on that row alone and, of attention, on the positions before it: not on the number of rows, the others'
values, padding, or a cache. Gradients of params are sums over all rows, and as pure as the body's, but not that. x, y, dx and
params have the shapes and dtypes of the body's. Kept: the body's residuals, at `body`, with the config, by which the backward runs
as the forward did.

>>> import torch
>>> from funcops import LinearConfig, linear, random
>>> from funcops.invariant import PinnedConfig, pinned
>>> cfg, x = PinnedConfig(linear, LinearConfig(300, 50)), torch.randn(20, 300)
>>> params = pinned.init(cfg, key=random.key(0))
>>> y, residuals = pinned.fwd(params, x, cfg)
>>> torch.equal(y[7], pinned.fwd(params, x[7:8], cfg)[0][0])
True
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, ClassVar

from funcops.engine.compose.step import AroundBody, check_body, note
from funcops.engine.contract.configs import require_config
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import Op, config, init_of, make_op
from funcops.engine.contract.schema import open_node
from funcops.engine.errors import fail
from funcops.engine.program.values import abstract_params
from funcops.engine.residuals.donate import donate
from funcops.engine.residuals.nested import nested
from funcops.library.kernels.pins import Pins, check_pins, pinning
from funcops.library.ops._mixing import mixing

__all__ = ["PinnedConfig", "PinnedPending", "PinnedResiduals"]
__all__ += ["pinned", "pinned_bwd", "pinned_dgrad", "pinned_fwd", "pinned_init", "pinned_wgrad"]


@config
class PinnedConfig(AroundBody):
    """The body (an op and its config), and the sizes of blocks: `rows` of a product, and `queries`, 32, 64, 96 or 128, of
    attention. Sizes change the bits: training and decoding must have the same. Raises `ValueError` for other sizes, and for a part
    of the body that mixes rows (`Op.mixes`), by its path."""

    op: Op = field(kw_only=False)
    cfg: Any = field(kw_only=False)
    rows: int = 128
    queries: int = 128

    def __post_init__(self) -> None:
        check_body("PinnedConfig", self.op, self.cfg)
        note(self, pins=Pins(self.rows, self.queries))
        check_pins("PinnedConfig", self.pins)
        require_apart("PinnedConfig", self.op, self.cfg)
        note(self, extras=self.cfg.extras, outputs=self.cfg.outputs, keys=self.cfg.keys, takes_also=self.cfg.takes_also)

    pins: ClassVar[Pins]

    def abstract(self) -> Any:
        """See `funcops.engine.program.values.abstract_params`."""
        return abstract_params(self.op, self.cfg)


def require_apart(where: str, op: Op, cfg: Any) -> None:
    """Raise `ValueError` for the first part whose rows depend on others, or whose author has not said that they do not."""
    for part, mixes in mixing(op, cfg):
        name = f"step {part.path!r}" if part.path else "the op"
        if mixes is None:
            fail(where, name, "an op that says what its rows depend on, make_op(..., mixes=...)", f"{part.op.name}, which does not")
        fail(where, name, "one whose rows depend on no others", f"{part.op.name}, with {mixes}")


PinnedResiduals, PinnedPending = nested("Pinned", "a pinned op: of its `body`", __name__)


@init_of(PinnedConfig)
def pinned_init(cfg: PinnedConfig, *, key: Any = None, device: Any = None, dtype: Any = None) -> Any:
    """The body's params."""
    return cfg.op.init(cfg.cfg, key=key, device=device, dtype=dtype)


def pinned_fwd(params: Any, x: Any, cfg: PinnedConfig, *, needs: Needs = Needs.ALL) -> tuple[Any, Any]:
    """The body's y. Raises `ValueError` on a device by torch's kernels, under a tracer, for a kernel of Triton that is not marked
    for the mode, and whatever the body raises."""
    require_config("pinned_fwd", cfg, PinnedConfig)
    with pinning(cfg.pins):
        y, residuals = cfg.op.fwd(params, x, cfg.cfg, needs=needs)
    return y, None if residuals is None else PinnedResiduals({"body": residuals}, cfg=cfg, needs=needs)


def _body(node: Any) -> Any:
    """The body's residuals or pending, donated if these were, which then let go of it."""
    child = node["body"]
    if not node.donated or child is None:
        return child
    node["body"] = None
    return donate(child)


def pinned_dgrad(residuals: Any, dy: Any, cfg: PinnedConfig) -> tuple[Any, Any]:
    """The body's dx, in the blocks of the forward."""
    require_config("pinned_dgrad", cfg, PinnedConfig)
    node = open_node("pinned_dgrad", residuals, PinnedResiduals, cfg)
    with pinning(cfg.pins):
        dx, pending = cfg.op.dgrad(_body(node), dy, cfg.cfg)
    return dx, None if pending is None else PinnedPending({"body": pending}, cfg=cfg, needs=node.needs)


def pinned_wgrad(pending: Any, cfg: PinnedConfig, *, into: Any = None) -> Any:
    """The body's weight gradients; added to `into` if given."""
    require_config("pinned_wgrad", cfg, PinnedConfig)
    node = None if pending is None else open_node("pinned_wgrad", pending, PinnedPending, cfg)
    with pinning(cfg.pins):
        return cfg.op.wgrad(None if node is None else _body(node), cfg.cfg, into=into)


def pinned_bwd(residuals: Any, dy: Any, cfg: PinnedConfig, *, into: Any = None) -> tuple[Any, Any]:
    """The whole backward. Returns `(dparams, dx)`."""
    require_config("pinned_bwd", cfg, PinnedConfig)
    node = open_node("pinned_bwd", residuals, PinnedResiduals, cfg)
    with pinning(cfg.pins):
        return cfg.op.bwd(_body(node), dy, cfg.cfg, into=into)


pinned = make_op(
    "pinned",
    PinnedConfig,
    init=pinned_init,
    fwd=pinned_fwd,
    dgrad=pinned_dgrad,
    wgrad=pinned_wgrad,
    bwd=pinned_bwd,
    keyed=lambda cfg: cfg.op.keyed_by(cfg.cfg),
    mixes="",
)
