"""Low-rank embedding, as a LoRA adapter adds it to an embedding.

    y = c a^T[ids] b^T

    t = c dy b        da_v = sum of t over the positions where ids = v        db = c dy^T a^T[ids], summed over positions

ids: [*] int64; y, dy: [*, D]; a: [R, V]; b: [D, R]; both of one float dtype. dx is None. Kept: ids and b, aliases, and
c a^T[ids]: [*, R]. Source: LoRA, arXiv 2106.09685; initialisation as in PEFT (peft/tuners/lora/layer.py).

>>> import torch
>>> from funcops import random
>>> from funcops.library.ops.low_rank_embedding import LowRankEmbeddingConfig, low_rank_embedding
>>> cfg = LowRankEmbeddingConfig(8, 4, 2)
>>> params = low_rank_embedding.init(cfg, key=random.key(0))
>>> y, residuals = low_rank_embedding.fwd(params, torch.tensor([3, 7, 3]), cfg)
>>> y.abs().sum(), residuals.u.shape
(tensor(0.), torch.Size([3, 2]))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcops.engine import random
from funcops.engine.contract.accumulators import accumulate, takes_sums
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import Op, config, dgrad_of, forward, init_of, make_op, wgrad_of
from funcops.engine.contract.schema import NO_GRADIENT, WGRAD, Pending, Residuals, saved, static
from funcops.engine.errors import FLOATS, check, require
from funcops.library.kernels import embedding as kernels
from funcops.library.kernels import linear as products
from funcops.library.kernels import pointwise
from funcops.library.ops._ids import check_ids
from funcops.library.ops.dropout import MASK
from funcops.library.ops.embedding import EmbeddingConfig
from funcops.library.ops.linear import LinearParams, linear_gradients
from funcops.library.ops.low_rank import ADAPTERS, Adapter, LowRankConfig, LowRankParams, check_low_rank_into


@config
class LowRankEmbeddingConfig(LowRankConfig):
    """`in_features` (V), `out_features` (D), `rank` and `scale` of `LowRankConfig`, without dropout; the column `padding_idx` of a
    gets no gradient."""

    padding_idx: int | None = None

    by_ids = True

    def __post_init__(self) -> None:
        super().__post_init__()
        where, pad = "LowRankEmbeddingConfig", self.padding_idx
        require(self.dropout == 0.0, where, "dropout", "0 (ids cannot be dropped)", self.dropout)
        right = pad is None or 0 <= pad < self.in_features
        require(right, where, "padding_idx", f"None or in 0..{self.in_features - 1}", pad)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return self.in_features, self.out_features

    def change(self, a: Tensor, b: Tensor) -> Tensor:
        return super().change(a, b).mT

    def widths(self, width: int | None) -> tuple[int | None, int | None]:
        return None, self.out_features


class LowRankEmbeddingResiduals(Residuals, static=("dtype",)):
    ids: Tensor = saved("[*]", alias="x", needed_by=WGRAD, of=("params.a",))
    u: Tensor = saved("[*, R]", needed_by=WGRAD, of=("params.b",))
    b: Tensor = saved("[D, R]", alias="params.b", needed_by=WGRAD, of=("params.a",))
    y_shape: torch.Size = static()


class LowRankEmbeddingPending(Pending):
    ids: Tensor = saved("[*]", alias="residuals.ids", needed_by=WGRAD, of=("params.a",))
    t: Tensor = saved("[*, R]", needed_by=WGRAD, of=("params.a",))
    dy: Tensor = saved("[*, D]", alias="dy", needed_by=WGRAD, of=("params.b",))
    u: Tensor = saved("[*, R]", alias="residuals.u", needed_by=WGRAD, of=("params.b",))


@init_of(LowRankEmbeddingConfig)
def low_rank_embedding_init(
    cfg: LowRankEmbeddingConfig, *, key: Tensor | None = None, device: Any = None, dtype: torch.dtype | None = None
) -> LowRankParams:
    """b is standard normal; a is zero, and so is y."""
    b = random.normal(key, (cfg.out_features, cfg.rank), dtype=dtype, device=device)
    at = device if device is not None else b.device if key is None else key.device
    return LowRankParams(torch.zeros(cfg.rank, cfg.in_features, dtype=b.dtype, device=at), b)


@forward(LowRankEmbeddingConfig, LowRankParams)
def low_rank_embedding_fwd(
    params: LowRankParams, x: Tensor, cfg: LowRankEmbeddingConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, LowRankEmbeddingResiduals | None]:
    """`y = c a^T[ids] b^T`. x: ids [*] -> y: [*, D]. Raises `ValueError` or `TypeError` for a wrong shape, dtype or device."""
    where, (a, b), shapes = "low_rank_embedding_fwd", (params.a, params.b), cfg.shapes
    check(where, "x", x, (...,), torch.int64)
    check(where, "params.a", a, shapes["a"], FLOATS, x)
    check(where, "params.b", b, shapes["b"], a.dtype, x)
    check_ids(where, "x", x, cfg.in_features - 1)
    u = pointwise.scale(kernels.embedding_fwd(a.t(), x), cfg.scale)
    y = products.linear_fwd(u, b, None)
    return y, LowRankEmbeddingResiduals.keep(cfg, needs, ids=x, u=u, b=b, y_shape=y.shape, dtype=y.dtype)


@dgrad_of(LowRankEmbeddingResiduals)
def low_rank_embedding_dgrad(
    residuals: LowRankEmbeddingResiduals, dy: Tensor, cfg: LowRankEmbeddingConfig
) -> tuple[None, LowRankEmbeddingPending | None]:
    """dx is None. dy: [*, D] -> the pending weight gradients: ids, t, dy and u, of which t is new."""
    r = residuals
    check("low_rank_embedding_dgrad", "dy", dy, r.y_shape, r.dtype, r.u if r.b is None else r.b)
    t = NO_GRADIENT if r.b is None else pointwise.scale(products.linear_dgrad(dy, r.b), cfg.scale)
    return None, LowRankEmbeddingPending.keep(cfg, r.needs, ids=r.ids, t=t, dy=dy, u=r.u)


@wgrad_of(LowRankEmbeddingPending, LowRankParams)
def low_rank_embedding_wgrad(
    pending: LowRankEmbeddingPending, cfg: LowRankEmbeddingConfig, *, into: LowRankParams | None = None
) -> LowRankParams:
    """`da_v`, the sum of t by id, and `db = dy^T u`; added to `into` if given."""
    where, p, made = "low_rank_embedding_wgrad", pending, LowRankParams(NO_GRADIENT, NO_GRADIENT)
    if into is not None:
        check_low_rank_into(where, p, cfg, into)
    if p.u is not None:
        made.b = linear_gradients(where, p.dy, p.u, False, None if into is None else LinearParams(into.b, None)).weight
    if p.t is not None:
        pad = -1 if cfg.padding_idx is None else cfg.padding_idx
        unrounded = into is not None and takes_sums(into.a, p.t.dtype)
        t = p.t.to(into.a.dtype) if into is not None and unrounded else p.t
        da = LowRankParams(kernels.embedding_wgrad(t, p.ids, cfg.in_features, pad).t().contiguous(), NO_GRADIENT)
        made.a = accumulate(where, da, None if into is None else LowRankParams(into.a, NO_GRADIENT)).a
    return made if into is None else into


low_rank_embedding = make_op(
    "low_rank_embedding",
    LowRankEmbeddingConfig,
    init=low_rank_embedding_init,
    fwd=low_rank_embedding_fwd,
    dgrad=low_rank_embedding_dgrad,
    wgrad=low_rank_embedding_wgrad,
    mixes=lambda cfg: MASK if cfg.dropout else "",
)


def _beside(cfg: EmbeddingConfig, rank: int, scale: float, dropout: float) -> tuple[Op, LowRankConfig]:
    return low_rank_embedding, LowRankEmbeddingConfig(cfg.num_embeddings, cfg.dim, rank, scale=scale, padding_idx=cfg.padding_idx)


ADAPTERS[EmbeddingConfig] = Adapter(_beside, "embedding")
