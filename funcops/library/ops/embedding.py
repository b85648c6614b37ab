"""Embedding.

    y = w[ids]        dw_v = sum of dy over the positions where ids = v        (0 for padding_idx)

ids: [*] int64; w, dw: [V, D]; y, dy: [*, D]. dx is None: ids carry no gradient. Kept: ids, an alias.
An id outside [0, V) raises `IndexError` on the CPU; on CUDA it is a device-side assertion, as in PyTorch.

>>> import torch
>>> from funcops import EmbeddingConfig, EmbeddingParams, embedding_bwd, embedding_fwd
>>> cfg, params = EmbeddingConfig(3, 1), EmbeddingParams(torch.tensor([[0.0], [10.0], [20.0]]))
>>> y, residuals = embedding_fwd(params, torch.tensor([2, 2, 0]), cfg)
>>> y.flatten(), embedding_bwd(residuals, torch.ones(3, 1), cfg)[0].weight.flatten()
(tensor([20., 20.,  0.]), tensor([1., 0., 2.]))
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from funcops.engine import random
from funcops.engine.contract.accumulators import accumulate, check_into, takes_sums
from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import both_halves, config, dgrad_of, forward, init_of, make_op, wgrad_of
from funcops.engine.contract.schema import WGRAD, Pending, Residuals, saved
from funcops.engine.errors import FLOATS, check, require
from funcops.engine.trees import leaf, tree
from funcops.library.kernels import embedding as kernels
from funcops.library.ops._ids import check_ids

__all__ = ["EmbeddingConfig", "EmbeddingParams", "EmbeddingPending", "EmbeddingResiduals"]
__all__ += ["embedding", "embedding_bwd", "embedding_dgrad", "embedding_fwd", "embedding_init", "embedding_wgrad"]


@config
class EmbeddingConfig(OpConfig):
    """`num_embeddings` (V) and `dim` (D); the row `padding_idx` gets no gradient."""

    num_embeddings: int = field(kw_only=False)
    dim: int = field(kw_only=False)
    padding_idx: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_embeddings", "dim"):
            value = getattr(self, name)
            require(isinstance(value, int) and value >= 1, "EmbeddingConfig", name, "at least 1", value)
        pad = self.padding_idx
        right = pad is None or 0 <= pad < self.num_embeddings
        require(right, "EmbeddingConfig", "padding_idx", f"None or in 0..{self.num_embeddings - 1}", pad)

    def widths(self, width: int | None) -> tuple[int | None, int | None]:
        return None, self.dim


@tree
class EmbeddingParams:
    weight: Tensor = leaf("[V, D]")


class EmbeddingResiduals(Residuals, static=("dtype",)):
    ids: Tensor = saved("[*]", alias="x", needed_by=WGRAD)


class EmbeddingPending(Pending):
    ids: Tensor = saved("[*]", alias="residuals.ids", needed_by=WGRAD)
    dy: Tensor = saved("[*, D]", alias="dy", needed_by=WGRAD)


@init_of(EmbeddingConfig)
def embedding_init(
    cfg: EmbeddingConfig, *, key: Tensor | None = None, device: Any = None, dtype: torch.dtype | None = None
) -> EmbeddingParams:
    """Standard normal, as torch.nn.Embedding draws it, zero at padding_idx."""
    weight = random.normal(key, (cfg.num_embeddings, cfg.dim), dtype=dtype, device=device)
    if cfg.padding_idx is not None:
        weight[cfg.padding_idx] = 0
    return EmbeddingParams(weight)


@forward(EmbeddingConfig, EmbeddingParams)
def embedding_fwd(
    params: EmbeddingParams, x: Tensor, cfg: EmbeddingConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, EmbeddingResiduals | None]:
    """`y = w[ids]`. x: ids [*] -> y: [*, D]. Raises `ValueError` or `TypeError` for a wrong shape, dtype or device."""
    weight = params.weight
    check("embedding_fwd", "x", x, (...,), torch.int64)
    check("embedding_fwd", "params.weight", weight, (cfg.num_embeddings, cfg.dim), FLOATS, x)
    check_ids("embedding_fwd", "x", x, cfg.num_embeddings - 1)
    return kernels.embedding_fwd(weight, x), EmbeddingResiduals.keep(cfg, needs, ids=x, dtype=weight.dtype)


@dgrad_of(EmbeddingResiduals)
def embedding_dgrad(residuals: EmbeddingResiduals, dy: Tensor, cfg: EmbeddingConfig) -> tuple[None, EmbeddingPending | None]:
    """dx is None; the pending weight gradient holds ids and dy, both aliases."""
    ids = residuals.ids
    check("embedding_dgrad", "dy", dy, (..., cfg.dim) if ids is None else (*ids.shape, cfg.dim), residuals.dtype)
    return None, EmbeddingPending.keep(cfg, residuals.needs, ids=ids, dy=dy)


@wgrad_of(EmbeddingPending, EmbeddingParams)
def embedding_wgrad(pending: EmbeddingPending, cfg: EmbeddingConfig, *, into: EmbeddingParams | None = None) -> EmbeddingParams:
    """dw: [V, D]; added to `into` if given. If `into` is as wide as the sums, they are added unrounded, and only to the rows of
    these ids."""
    pad = -1 if cfg.padding_idx is None else cfg.padding_idx
    dy, ids = pending.dy, pending.ids
    if into is not None:
        check_embedding_into("embedding_wgrad", dy, cfg.num_embeddings, into)
    return embedding_gradients("embedding_wgrad", dy, ids, cfg.num_embeddings, pad, into)


def check_embedding_into(where: str, dy: Tensor, vocab: int, into: EmbeddingParams) -> None:
    check_into(where, into, EmbeddingParams(dy.new_empty(()).expand(vocab, dy.shape[-1])))


def embedding_gradients(where: str, dy: Tensor, ids: Tensor, vocab: int, pad: int, into: EmbeddingParams | None) -> EmbeddingParams:
    """dw for all ids but `pad`; added to `into`, which the caller has checked."""
    if into is not None and takes_sums(into.weight, dy.dtype):
        kernels.embedding_wgrad_into(dy, ids, pad, into.weight)
        return into
    return accumulate(where, EmbeddingParams(kernels.embedding_wgrad(dy, ids, vocab, pad)), into)


embedding = make_op(
    "embedding", EmbeddingConfig, init=embedding_init, fwd=embedding_fwd, dgrad=embedding_dgrad, wgrad=embedding_wgrad, mixes=""
)
embedding_bwd = both_halves(embedding, embedding_dgrad, embedding_wgrad)
