"""Dropout of a sharded x: each rank draws its part of the mask that one process draws for the whole.

    y = x * m / (1 - p)        dx = dy * m / (1 - p)        m_i = [bits_i(key) >= p 2^32],  i: the element's index in the whole x

x is `(x, key)`, the key the same on all ranks. x, y, dy, dx: [*] of one float dtype; key: int64[2]. Kept: the key, an alias, from
which the backward redraws the bits. Nothing is sent. For an x that is not sharded it is `dropout`.

>>> import torch
>>> from funcops import DropoutConfig, dist, dropout, random
>>> from funcops.testing import run_ranks
>>> key = random.key(0)
>>> def each(mesh):
...     cfg = dist.ShardedDropoutConfig(0.5, shared=(dist.Shared(0, mesh["tp"]),))
...     y, residuals = dist.sharded_dropout_fwd(None, (torch.ones(3), key), cfg)
...     return dist.sharded_dropout_bwd(residuals, torch.ones(3), cfg)[1][0]
...
>>> torch.cat(run_ranks({"tp": 2}, each)), dropout.fwd(None, (torch.ones(6), key), DropoutConfig(0.5))[0]
(tensor([0., 2., 2., 2., 2., 0.]), tensor([0., 2., 2., 2., 2., 0.]))
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from funcops.distributed.checks import check_tensor, require_axis
from funcops.distributed.mesh import Axis
from funcops.distributed.specs import Ranges, within
from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config, dgrad_of, forward, make_op, no_params, same_width
from funcops.engine.contract.schema import DGRAD, Inputs, Residuals, saved
from funcops.engine.errors import FLOATS, describe, not_a_tuple, require
from funcops.library.ops.dropout import check_shared, sharded_mask

__all__ = ["Shared", "ShardedDropoutConfig", "ShardedDropoutResiduals"]
__all__ += ["sharded_dropout", "sharded_dropout_bwd", "sharded_dropout_dgrad"]
__all__ += ["sharded_dropout_fwd", "sharded_dropout_init", "sharded_dropout_wgrad"]


@config
class Shared:
    """Dimension `dim` of a tensor is sharded over `axis`: rank r has part r of n, or (`zigzag`) parts r and 2n - 1 - r of 2n."""

    dim: int = field(kw_only=False)
    axis: Axis = field(kw_only=False)
    zigzag: bool = False

    def __post_init__(self) -> None:
        require_axis("Shared", self.axis)

    def of(self, ranges: Ranges) -> Ranges:
        """This rank's part of ranges along the dimension."""
        n, r = self.axis.size, self.axis.rank
        total = sum(length for _, length in ranges)
        if not self.zigzag:
            return within(ranges, r * (total // n), total // n)
        half = total // (2 * n)
        return (*within(ranges, r * half, half), *within(ranges, (2 * n - 1 - r) * half, half))


@config
class ShardedDropoutConfig(OpConfig):
    """The fields of `DropoutConfig`; `shared`: how x is sharded, outer axes of a dimension first."""

    widths = same_width
    featurewise = True

    p: float = field(kw_only=False)
    shared: tuple[Shared, ...]
    train: bool = True

    def __post_init__(self) -> None:
        require(0.0 <= self.p <= 1.0, "ShardedDropoutConfig", "p", "in [0, 1]", self.p)
        right = isinstance(self.shared, tuple) and all(type(one) is Shared for one in self.shared)
        require(right, "ShardedDropoutConfig", "shared", "a tuple of Shared", describe(self.shared))


class ShardedDropoutResiduals(Residuals, static=("inputs", "shape", "dtype")):
    key: Tensor = saved("[2]", alias="x.1", needed_by=DGRAD)


@forward(ShardedDropoutConfig)
def sharded_dropout_fwd(
    params: None, x: tuple[Tensor, Tensor], cfg: ShardedDropoutConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, ShardedDropoutResiduals | None]:
    """x: `(x, key)`, x this rank's part -> y: [*]. Raises `ValueError` or `TypeError` for a wrong shape, dtype or device, and
    unless x is a pair."""
    where = "sharded_dropout_fwd"
    if not isinstance(x, tuple) or len(x) != 2:
        not_a_tuple(where, x, "x", "key")
    t, key = x
    check_tensor(where, "x.0", t, (...,), FLOATS)
    check_tensor(where, "x.1 (the key)", key, (2,), torch.int64, t)
    check_shared(where, t, cfg.shared)
    residuals = ShardedDropoutResiduals.keep(cfg, needs, key=key, inputs=Inputs.of(x), shape=t.shape, dtype=t.dtype)
    return _apply(t, key, cfg), residuals


def _apply(t: Tensor, key: Tensor, cfg: ShardedDropoutConfig) -> Tensor:
    if not cfg.train or cfg.p == 0.0:
        return t
    if cfg.p == 1.0:
        return torch.zeros_like(t)
    return sharded_mask(t, key, cfg.p, cfg.shared)


@dgrad_of(ShardedDropoutResiduals)
def sharded_dropout_dgrad(
    residuals: ShardedDropoutResiduals, dy: Any, cfg: ShardedDropoutConfig
) -> tuple[tuple[Tensor, None], None]:
    """`(dx, None)`. No params, so pending is None."""
    check_tensor("sharded_dropout_dgrad", "dy", dy, residuals.shape, residuals.dtype, residuals.key)
    dx = _apply(dy, residuals.key, cfg) if residuals.needs.input(0) else None
    return residuals.inputs.make((dx, None)), None


sharded_dropout = make_op("sharded_dropout", ShardedDropoutConfig, fwd=sharded_dropout_fwd, dgrad=sharded_dropout_dgrad, keyed=True)
sharded_dropout_init, sharded_dropout_bwd, sharded_dropout_wgrad = no_params(sharded_dropout, sharded_dropout_dgrad)
