"""`latent_split` with sharded heads: the part of a key that all heads share is whole on every rank, its gradient a sum over them.

    kv_h = (own_h, v_h)        k_h = (shared, own_h)        for a rank's N/n heads
    d shared = sum over ranks of the sum over their h of dk_h's first part        the rest as in `latent_split`

With `sequence_parallel` shared [m, *, 1, S] has a rank's own rows, and q, kv, dy [n m, *, N/n, ...] the rows of all ranks: shared
is gathered, and d shared scattered. Without, all ranks have the same rows, and d shared is summed. Any float dtype. Kept: nothing.

>>> import torch
>>> from funcops import dist
>>> from funcops.testing import run_ranks
>>> def each(mesh):
...     cfg = dist.ParallelLatentSplitConfig(2, shared=1, own=3, value=4, axis=mesh["tp"])
...     x = torch.zeros(2, 1, 4), torch.zeros(2, 1, 7), torch.ones(1, 1, 1)
...     (q, k, v), residuals = dist.parallel_latent_split_fwd(None, x, cfg)
...     return k.shape, dist.parallel_latent_split_bwd(residuals, (None, k, None), cfg)[1][2].flatten()
...
>>> run_ranks({"tp": 2}, each)[0]
(torch.Size([2, 1, 4]), tensor([2.]))
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from torch import Tensor

from funcops.distributed import comm
from funcops.distributed.checks import check_tensor, require_axis, require_shares
from funcops.distributed.mesh import Axis
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config, dgrad_of, forward, make_op, no_params
from funcops.engine.contract.schema import DGRAD, Inputs, Residuals, saved
from funcops.engine.errors import FLOATS
from funcops.library.ops._tuples import require_tuple
from funcops.library.ops.latent_split import LatentSplitConfig, latent_split

__all__ = ["ParallelLatentSplitConfig", "ParallelLatentSplitResiduals"]
__all__ += ["parallel_latent_split", "parallel_latent_split_bwd", "parallel_latent_split_dgrad"]
__all__ += ["parallel_latent_split_fwd", "parallel_latent_split_init", "parallel_latent_split_wgrad"]


@config
class ParallelLatentSplitConfig(LatentSplitConfig):
    """The fields of `LatentSplitConfig`, with all heads; `axis`: the axis that shards them; `sequence_parallel`: whether it also
    shards the rows of shared."""

    axis: Axis
    sequence_parallel: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_axis("ParallelLatentSplitConfig", self.axis)
        require_shares("ParallelLatentSplitConfig", "heads", self.heads, self.axis)
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(LatentSplitConfig)}
        object.__setattr__(self, "local", LatentSplitConfig(**fields | {"heads": self.heads // self.axis.size}))

    local: ClassVar[LatentSplitConfig]  # a rank's

    @property
    def reruns(self) -> bool:  # type: ignore[override]
        return not self.sequence_parallel  # else the forward gathers shared


class ParallelLatentSplitResiduals(Residuals, static=("inputs",)):
    body: Any = saved("{of latent_split}", needed_by=DGRAD, tree=True)  # no tensor


@forward(ParallelLatentSplitConfig)
def parallel_latent_split_fwd(
    params: None, x: tuple[Tensor, Tensor, Tensor], cfg: ParallelLatentSplitConfig, *, needs: Needs = Needs.ALL
) -> tuple[tuple[Tensor, Tensor, Tensor], ParallelLatentSplitResiduals | None]:
    """x: `(q, kv, shared)` -> `(q, k, v)` of this rank's heads. Raises `ValueError` or `TypeError` for a wrong shape, dtype or
    device."""
    where = "parallel_latent_split_fwd"
    q, kv, shared = require_tuple(where, x, "q", "kv", "shared")
    check_tensor(where, "x.0 (q)", q, (..., cfg.local.heads, cfg.shared + cfg.own), FLOATS)
    check_tensor(where, "x.1 (kv)", kv, (*q.shape[:-1], cfg.own + cfg.value), q.dtype, q)
    rows = q.shape[0] // cfg.axis.size if cfg.sequence_parallel and q.dim() > 2 else q.shape[0]
    check_tensor(where, "x.2 (shared)", shared, (rows, *q.shape[1:-2], 1, cfg.shared), q.dtype, q)
    whole = comm.gather(shared, cfg.axis) if cfg.sequence_parallel else shared
    y, body = latent_split.fwd(None, (q, kv, whole), cfg.local, needs=needs)
    return y, ParallelLatentSplitResiduals.keep(cfg, needs, body=body, inputs=Inputs.of(x))


@dgrad_of(ParallelLatentSplitResiduals)
def parallel_latent_split_dgrad(
    residuals: ParallelLatentSplitResiduals, dy: Any, cfg: ParallelLatentSplitConfig
) -> tuple[Any, None]:
    """dy: `(dq, dk, dv)`, None for zero -> `(dq, dkv, dshared)`. No params, so pending is None."""
    dq, dkv, dshared = latent_split.dgrad(residuals.body, dy, cfg.local)[0]
    if dshared is not None:
        dshared = (comm.scatter_sum if cfg.sequence_parallel else comm.sum_over)(dshared, cfg.axis)
    return residuals.inputs.make((dq, dkv, dshared)), None


parallel_latent_split = make_op(
    "parallel_latent_split", ParallelLatentSplitConfig, fwd=parallel_latent_split_fwd, dgrad=parallel_latent_split_dgrad
)
parallel_latent_split_init, parallel_latent_split_bwd, parallel_latent_split_wgrad = no_params(
    parallel_latent_split, parallel_latent_split_dgrad
)
