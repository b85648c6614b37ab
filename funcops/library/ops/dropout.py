"""Dropout by counter-based bits.

    y = x * m / (1 - p)        dx = dy * m / (1 - p)        m_i = [bits_i(key) >= p 2^32]

x is `(x, key)`. x, y, dy, dx: [*] of one float dtype; key: int64[2], see funcops.random. Kept: the key, an alias, from
which the backward redraws the bits. With p = 0 or train=False, y is x itself; with p = 1, zeros. JMLR 15 (2014) 1929.

>>> import torch
>>> from funcops import DropoutConfig, dropout_bwd, dropout_fwd, random
>>> cfg, key = DropoutConfig(0.5), random.key(0)
>>> y, residuals = dropout_fwd(None, (torch.ones(6), key), cfg)
>>> y, residuals.key is key
(tensor([0., 2., 2., 2., 2., 0.]), True)
>>> dx, of_the_key = dropout_bwd(residuals, torch.ones(6), cfg)[1]
>>> dx.equal(y), of_the_key
(True, None)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from funcops.engine import random
from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config, dgrad_of, forward, make_op, no_params, same_width
from funcops.engine.contract.schema import DGRAD, Inputs, Residuals, saved
from funcops.engine.errors import FLOATS, check, describe, fail, not_a_tuple, require
from funcops.library.kernels import pointwise as kernels

__all__ = ["DropoutConfig", "DropoutResiduals"]
__all__ += ["dropout", "dropout_bwd", "dropout_dgrad", "dropout_fwd", "dropout_init", "dropout_wgrad"]

MASK = "the mask of an element, drawn by its place among all of x"  # see `Op.mixes`


@config
class DropoutConfig(OpConfig):
    """`p`: the probability of zero, in [0, 1]; `train=False` is the identity."""

    widths = same_width
    featurewise = True
    draws_mask = True

    p: float = field(kw_only=False)
    train: bool = True

    def __post_init__(self) -> None:
        require(0.0 <= self.p <= 1.0, "DropoutConfig", "p", "in [0, 1]", self.p)


class DropoutResiduals(Residuals, static=("inputs", "shape", "dtype")):
    key: Tensor = saved("[2]", alias="x.1", needed_by=DGRAD)


def dropout_kept(cfg: DropoutConfig, needs: Needs, x: tuple[Tensor, Tensor]) -> DropoutResiduals | None:
    return DropoutResiduals.keep(cfg, needs, key=x[1], inputs=Inputs.of(x), shape=x[0].shape, dtype=x[0].dtype)


@forward(DropoutConfig)
def dropout_fwd(
    params: None, x: tuple[Tensor, Tensor], cfg: DropoutConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, DropoutResiduals | None]:
    """x: `(x, key)` -> y: [*]. Raises `ValueError` or `TypeError` for a wrong shape, dtype or key."""
    if not isinstance(x, tuple) or len(x) != 2:
        not_a_tuple("dropout_fwd", x, "x", "key")
    t, key = x
    check("dropout_fwd", "x.0", t, (...,), FLOATS)
    check("dropout_fwd", "x.1 (the key)", key, (2,), torch.int64, t)
    return _apply(t, key, cfg), dropout_kept(cfg, needs, x)


def _apply(t: Tensor, key: Tensor, cfg: DropoutConfig) -> Tensor:
    if not cfg.train or cfg.p == 0.0:
        return t
    return torch.zeros_like(t) if cfg.p == 1.0 else kernels.dropout(t, key, cfg.p)


def sharded_mask(t: Tensor, key: Tensor, p: float, shared: tuple[Any, ...]) -> Tensor:
    """Dropout of a rank's part of a tensor, by the mask of the whole: `shared` says how it is sharded (`funcops.dist.Shared`)."""
    shared = tuple([one for one in shared if one.axis.size > 1])
    if not shared:
        return kernels.dropout(t, key, p)  # type: ignore[no-any-return]
    return t * (random.bits_of(key, *in_whole(t.shape, shared)) >= round(p * 2**32)) * (1.0 / (1.0 - p))


def check_shared(where: str, t: Tensor, shared: tuple[Any, ...]) -> None:
    """Check that a rank's part `x.0` has the dimensions that are sharded."""
    for one in shared:
        if not -t.dim() <= one.dim < t.dim():
            fail(where, "x.0", f"of more dimensions (cfg.shared has one of {one.dim})", describe(t))
        if one.zigzag and t.shape[one.dim] % 2:
            fail(where, "x.0", f"of an even size along dimension {one.dim} (zigzag)", describe(t))


def in_whole(own: Sequence[int], shared: tuple[Any, ...]) -> tuple[list[int], list[Any]]:
    """The shape of the whole of which a rank's part has the shape `own`, and the part's ranges along each dimension."""
    shape = list(own)
    for one in shared:
        shape[one.dim] *= one.axis.size
    ranges: list[Any] = [((0, n),) for n in shape]
    for one in shared:
        ranges[one.dim] = one.of(ranges[one.dim])
    return shape, ranges


@dgrad_of(DropoutResiduals)
def dropout_dgrad(residuals: DropoutResiduals, dy: Any, cfg: DropoutConfig) -> tuple[tuple[Tensor, None], None]:
    """`(dx, None)`. No params, so pending is None."""
    check("dropout_dgrad", "dy", dy, residuals.shape, residuals.dtype, residuals.key)
    dx = _apply(dy, residuals.key, cfg) if residuals.needs.input(0) else None
    return residuals.inputs.make((dx, None)), None


dropout = make_op(
    "dropout",
    DropoutConfig,
    fwd=dropout_fwd,
    dgrad=dropout_dgrad,
    keyed=True,
    mixes=lambda cfg: MASK if cfg.p and cfg.train else "",
)
dropout_init, dropout_bwd, dropout_wgrad = no_params(dropout, dropout_dgrad)
