"""All to all: a tensor sharded along one dimension becomes sharded along another.

    y = part r of x of rank 0, 1, ... n - 1, along cat        dx = part r of dy of rank 0, 1, ... n - 1, along split

r: this rank. x, dx: [*]; y, dy: the same with 1/n of the size along `split` and n times that along `cat`; any float
dtype. Kept: nothing. The backward is the op itself, with `split` and `cat` exchanged.

>>> import torch
>>> from funcops import dist
>>> from funcops.testing import run_ranks
>>> def each(mesh):
...     cfg = dist.AllToAllConfig(mesh["tp"], split=0, cat=1)
...     x = torch.tensor([[1.0], [2.0]]) + 10 * mesh["tp"].rank
...     y, residuals = dist.all_to_all_fwd(None, x, cfg)
...     return y, dist.all_to_all_bwd(residuals, y, cfg)[1].equal(x)
...
>>> run_ranks({"tp": 2}, each)
[(tensor([[ 1., 11.]]), True), (tensor([[ 2., 12.]]), True)]
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

from torch import Tensor

from funcops.distributed import comm
from funcops.distributed.checks import check_divides, check_part, check_tensor, require_axis
from funcops.distributed.mesh import Axis
from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config, dgrad_of, forward, make_op, no_params
from funcops.engine.contract.schema import NO_GRADIENT, Residuals
from funcops.engine.errors import describe, require

__all__ = ["AllToAllConfig", "AllToAllResiduals"]
__all__ += ["all_to_all", "all_to_all_bwd", "all_to_all_dgrad", "all_to_all_fwd", "all_to_all_init", "all_to_all_wgrad"]


@config
class AllToAllConfig(OpConfig):
    """`axis` of n ranks; `split`: the sharded dimension of y; `cat`: the sharded dimension of x."""

    axis: Axis = field(kw_only=False)
    split: int = 0
    cat: int = -1

    def __post_init__(self) -> None:
        require_axis("AllToAllConfig", self.axis)
        require(self.split != self.cat, "AllToAllConfig", "cat", "another dimension than split", self.cat)

    def widths(self, width: int | None) -> tuple[int | None, int | None]:
        if not width or -1 not in (self.split, self.cat):
            return None, None
        return None, width // self.axis.size if self.split == -1 else width * self.axis.size


class AllToAllResiduals(Residuals, static=("shape", "dtype")):
    """No tensor, only the shape and dtype of dy."""


@forward(AllToAllConfig)
def all_to_all_fwd(
    params: None, x: Tensor, cfg: AllToAllConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, AllToAllResiduals | None]:
    """x: [..., n a, ..., b, ...] -> y: [..., a, ..., n b, ...]. Raises `ValueError` or `TypeError` for an x whose size the
    axis does not divide, or that is not a float tensor."""
    split, cat = (check_part("all_to_all_fwd", "x", x, dim) for dim in (cfg.split, cfg.cat))
    require(split != cat, "all_to_all_fwd", "x", "of more dimensions (cfg.split and cfg.cat are one)", describe(x))
    check_divides("all_to_all_fwd", "x", x, split, cfg.axis)
    y = comm.all_to_all(x, cfg.axis, split, cat)
    return y, AllToAllResiduals.keep(cfg, needs, shape=y.shape, dtype=y.dtype)


@dgrad_of(AllToAllResiduals)
def all_to_all_dgrad(residuals: AllToAllResiduals, dy: Any, cfg: AllToAllConfig) -> tuple[Tensor, None]:
    """The parts of dy, sent back. No params, so pending is None."""
    check_tensor("all_to_all_dgrad", "dy", dy, residuals.shape, residuals.dtype)
    return comm.all_to_all(dy, cfg.axis, cfg.cat % dy.dim(), cfg.split % dy.dim()) if residuals.needs.x else NO_GRADIENT, None


all_to_all = make_op("all_to_all", AllToAllConfig, fwd=all_to_all_fwd, dgrad=all_to_all_dgrad, view=True)
all_to_all_init, all_to_all_bwd, all_to_all_wgrad = no_params(all_to_all, all_to_all_dgrad)
