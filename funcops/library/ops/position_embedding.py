"""Learned position embedding, added to x.

    y = x + w[positions]        dx = dy        dw_p = sum of dy over the rows at position p

x, y, dy, dx: [*, T, D]; w, dw: [P, D], of x's float dtype, `EmbeddingParams`; positions: [T] or [*, T], int64, without a gradient.
x is `(x, positions)`. Kept: positions, an alias. dx is dy itself. A position outside [0, P) raises `IndexError` on the CPU; on CUDA
it is a device-side assertion, as in PyTorch.

>>> import torch
>>> from funcops import EmbeddingParams, PositionEmbeddingConfig, position_embedding_bwd, position_embedding_fwd
>>> cfg, params = PositionEmbeddingConfig(3, 1), EmbeddingParams(torch.tensor([[0.0], [10.0], [20.0]]))
>>> y, residuals = position_embedding_fwd(params, (torch.ones(2, 1), torch.tensor([2, 1])), cfg)
>>> y.flatten(), position_embedding_bwd(residuals, torch.ones(2, 1), cfg)[0].weight.flatten()
(tensor([21., 11.]), tensor([0., 1., 1.]))
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from funcops.engine import random
from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import both_halves, config, dgrad_of, forward, init_of, make_op, wgrad_of
from funcops.engine.contract.schema import WGRAD, Inputs, Pending, Residuals, saved
from funcops.engine.errors import check, check_rows, fail, require
from funcops.library.kernels import embedding as kernels
from funcops.library.kernels import pointwise
from funcops.library.ops._ids import check_ids
from funcops.library.ops._tuples import require_tuple
from funcops.library.ops.embedding import EmbeddingParams, check_embedding_into, embedding_gradients

__all__ = ["PositionEmbeddingConfig", "PositionEmbeddingPending", "PositionEmbeddingResiduals"]
__all__ += ["position_embedding", "position_embedding_bwd", "position_embedding_dgrad"]
__all__ += ["position_embedding_fwd", "position_embedding_init", "position_embedding_wgrad"]


@config
class PositionEmbeddingConfig(OpConfig):
    """`positions` (P), the number of positions, and `dim` (D)."""

    positions: int = field(kw_only=False)
    dim: int = field(kw_only=False)

    def __post_init__(self) -> None:
        for name in ("positions", "dim"):
            require(getattr(self, name) >= 1, "PositionEmbeddingConfig", name, "at least 1", getattr(self, name))

    def widths(self, width: int | None) -> tuple[int | None, int | None]:
        return self.dim, self.dim


class PositionEmbeddingResiduals(Residuals, static=("inputs", "shape", "dtype")):
    positions: Tensor = saved("[T] or [*, T]", alias="x.1", needed_by=WGRAD)


class PositionEmbeddingPending(Pending):
    positions: Tensor = saved("[T] or [*, T]", alias="residuals.positions", needed_by=WGRAD)
    dy: Tensor = saved("[*, T, D]", alias="dy", needed_by=WGRAD)


@init_of(PositionEmbeddingConfig)
def position_embedding_init(
    cfg: PositionEmbeddingConfig, *, key: Tensor | None = None, device: Any = None, dtype: torch.dtype | None = None
) -> EmbeddingParams:
    """Standard normal, as embedding draws it."""
    return EmbeddingParams(random.normal(key, (cfg.positions, cfg.dim), dtype=dtype, device=device))


@forward(PositionEmbeddingConfig, EmbeddingParams)
def position_embedding_fwd(
    params: EmbeddingParams, x: tuple[Tensor, Tensor], cfg: PositionEmbeddingConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, PositionEmbeddingResiduals | None]:
    """x: `(x, positions)` -> y: [*, T, D]. Raises `ValueError` or `TypeError` for a wrong shape, dtype or device."""
    t, positions = require_tuple("position_embedding_fwd", x, "x", "positions")
    check_rows("position_embedding_fwd", "x.0", t, cfg.dim)
    if t.dim() < 2:
        fail("position_embedding_fwd", "x.0", f"[..., T, {cfg.dim}]", list(t.shape))
    rows = t.shape[-2:-1] if getattr(positions, "ndim", 1) <= 1 else t.shape[:-1]
    check("position_embedding_fwd", "x.1 (positions)", positions, rows, torch.int64, t)
    check("position_embedding_fwd", "params.weight", params.weight, (cfg.positions, cfg.dim), t.dtype, t)
    check_ids("position_embedding_fwd", "x.1 (positions)", positions, cfg.positions - 1)
    y = pointwise.add(t, kernels.embedding_fwd(params.weight, positions))
    kept = PositionEmbeddingResiduals.keep(cfg, needs, positions=positions, inputs=Inputs.of(x), shape=t.shape, dtype=t.dtype)
    return y, kept


@dgrad_of(PositionEmbeddingResiduals)
def position_embedding_dgrad(
    residuals: PositionEmbeddingResiduals, dy: Tensor, cfg: PositionEmbeddingConfig
) -> tuple[tuple[Tensor, None], PositionEmbeddingPending | None]:
    """`(dy, None)`; the pending weight gradient holds positions and dy, both aliases."""
    check("position_embedding_dgrad", "dy", dy, residuals.shape, residuals.dtype, residuals.positions)
    needs = residuals.needs
    pending = PositionEmbeddingPending.keep(cfg, needs, positions=residuals.positions, dy=dy)
    return residuals.inputs.make((dy, None)) if needs.input(0) else residuals.nothing(), pending


@wgrad_of(PositionEmbeddingPending, EmbeddingParams)
def position_embedding_wgrad(
    pending: PositionEmbeddingPending, cfg: PositionEmbeddingConfig, *, into: EmbeddingParams | None = None
) -> EmbeddingParams:
    """dw: [P, D]; added to `into` if given, as in embedding."""
    dy, positions = pending.dy, pending.positions
    if into is not None:
        check_embedding_into("position_embedding_wgrad", dy, cfg.positions, into)
    ids = positions.expand(dy.shape[:-1])
    return embedding_gradients("position_embedding_wgrad", dy, ids, cfg.positions, -1, into)


position_embedding = make_op(
    "position_embedding",
    PositionEmbeddingConfig,
    init=position_embedding_init,
    fwd=position_embedding_fwd,
    dgrad=position_embedding_dgrad,
    wgrad=position_embedding_wgrad,
    mixes="",
)
position_embedding_bwd = both_halves(position_embedding, position_embedding_dgrad, position_embedding_wgrad)
