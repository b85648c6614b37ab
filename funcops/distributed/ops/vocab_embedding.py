"""Embedding with rows sharded over an axis.

    y = sum over r of (w_r[ids - r V/n] if rank r has that row, else 0)        dw_r = sum of dy over the positions of its ids

r: a rank of the axis, of n. ids: [*] int64, the same on all ranks; w_r: [V/n, D]; y, dy: [*, D]. dx is None.
With sequence parallelism y is sharded along its first dimension: a rank has 1/n of it, from a sum that is scattered, and 1/n of dy,
which is gathered. Without, y and dy are the same on all ranks. Either way the gradient of w_r is complete, and 0 for padding_idx.
All ranks but one add zeros to a row of y, so that y has the bits of the plain op.

Kept: ids, an alias. The weight gradient gathers dy when it runs, which a schedule can hide.
An id outside [0, V) raises `IndexError` on the CPU; on CUDA it is a device-side assertion, as in PyTorch.

>>> import torch
>>> from funcops import EmbeddingParams, dist
>>> from funcops.testing import run_ranks
>>> def each(mesh):
...     cfg = dist.VocabEmbeddingConfig(4, 1, axis=mesh["tp"])
...     params = EmbeddingParams(torch.tensor([[0.0], [10.0]]) + 20 * mesh["tp"].rank)
...     y, residuals = dist.vocab_embedding_fwd(params, torch.tensor([3, 0]), cfg)
...     return y, dist.vocab_embedding_bwd(residuals, torch.ones(1, 1), cfg)[0].weight.flatten()
...
>>> run_ranks({"tp": 2}, each)
[(tensor([[30.]]), tensor([1., 0.])), (tensor([[0.]]), tensor([0., 1.]))]
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, ClassVar

import torch
from torch import Tensor

from funcops.distributed import comm
from funcops.distributed.checks import check_divides, check_tensor, require_axis, require_shares
from funcops.distributed.init import init_part
from funcops.distributed.mesh import Axis
from funcops.distributed.ops._vocab import own_rows_of
from funcops.distributed.specs import Spec
from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import both_halves, config, dgrad_of, forward, init_of, make_op, wgrad_of
from funcops.engine.contract.schema import WGRAD, Pending, Residuals, saved, static
from funcops.engine.errors import FLOATS, describe, fail, require
from funcops.library.kernels import embedding as kernels
from funcops.library.ops._ids import check_ids
from funcops.library.ops.embedding import (
    EmbeddingConfig,
    EmbeddingParams,
    check_embedding_into,
    embedding_gradients,
    embedding_init,
)

__all__ = ["VocabEmbeddingConfig", "VocabEmbeddingPending", "VocabEmbeddingResiduals"]
__all__ += ["vocab_embedding", "vocab_embedding_bwd", "vocab_embedding_dgrad"]
__all__ += ["vocab_embedding_fwd", "vocab_embedding_init", "vocab_embedding_wgrad"]


@config
class VocabEmbeddingConfig(OpConfig):
    """`num_embeddings` (V) of all ranks, a multiple of the size of `axis`, and `dim` (D); the row `padding_idx` of the whole w gets
    no gradient. `sequence_parallel`: y is sharded along its first dimension."""

    num_embeddings: int = field(kw_only=False)
    dim: int = field(kw_only=False)
    axis: Axis
    padding_idx: int | None = None
    sequence_parallel: bool = True

    def __post_init__(self) -> None:
        where, pad = "VocabEmbeddingConfig", self.padding_idx
        require(self.num_embeddings >= 1, where, "num_embeddings", "at least 1", self.num_embeddings)
        require(self.dim >= 1, where, "dim", "at least 1", self.dim)
        require_axis(where, self.axis)
        require_shares(where, "num_embeddings", self.num_embeddings, self.axis)
        right = pad is None or 0 <= pad < self.num_embeddings
        require(right, where, "padding_idx", f"None or in 0..{self.num_embeddings - 1}", pad)
        rows = self.num_embeddings // self.axis.size
        place = -1 if pad is None else pad - self.axis.rank * rows
        object.__setattr__(self, "weight_shape", (rows, self.dim))
        object.__setattr__(self, "skipped", place if 0 <= place < rows else -1)

    weight_shape: ClassVar[tuple[int, int]]  # of this rank's part
    skipped: ClassVar[int]  # the row of padding_idx in it, or -1

    @property
    def specs(self) -> dict[str, Spec]:
        """The specs of the sharded params, by path."""
        return {"weight": Spec(self.axis.name, 0)}

    def widths(self, width: int | None) -> tuple[int | None, int | None]:
        return None, self.dim


class VocabEmbeddingResiduals(Residuals, static=("dtype",)):
    ids: Tensor = saved("[*]", alias="x", needed_by=WGRAD)
    y_shape: torch.Size = static()


class VocabEmbeddingPending(Pending):
    ids: Tensor = saved("[*]", alias="residuals.ids", needed_by=WGRAD)
    dy: Tensor = saved("[*, D]", alias="dy", needed_by=WGRAD)


@init_of(VocabEmbeddingConfig)
def vocab_embedding_init(
    cfg: VocabEmbeddingConfig, *, key: Tensor | None = None, device: Any = None, dtype: torch.dtype | None = None
) -> EmbeddingParams:
    """This rank's rows of the params that `embedding_init` draws with the same key, on every mesh."""
    plain = EmbeddingConfig(cfg.num_embeddings, cfg.dim, padding_idx=cfg.padding_idx)
    return init_part(cfg, lambda: embedding_init(plain, key=key, device=device, dtype=dtype))  # type: ignore[no-any-return]


@forward(VocabEmbeddingConfig, EmbeddingParams)
def vocab_embedding_fwd(
    params: EmbeddingParams, x: Tensor, cfg: VocabEmbeddingConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, VocabEmbeddingResiduals | None]:
    """`y = w[ids]`. x: ids [n m, *] -> y: [m, *, D] (without `sequence_parallel`: [*] -> [*, D]).

    Raises `ValueError` or `TypeError` for a wrong shape, dtype or device."""
    where, axis, weight = "vocab_embedding_fwd", cfg.axis, params.weight
    check_tensor(where, "x", x, (...,), torch.int64)
    check_tensor(where, "params.weight", weight, cfg.weight_shape, FLOATS, x)
    check_ids(where, "x", x, axis.size * cfg.weight_shape[0] - 1)
    if axis.size == 1:
        y = kernels.embedding_fwd(weight, x)
    else:
        if cfg.sequence_parallel:
            if not x.dim():
                fail(where, "x", "[m, ...], as its first dim is sharded", describe(x))
            check_divides(where, "x", x, 0, axis)
        rows, elsewhere = own_rows_of(x, cfg.weight_shape[0], axis)
        part = kernels.embedding_fwd(weight, rows).masked_fill_(elsewhere.unsqueeze(-1), 0.0)
        y = comm.scatter_sum(part, axis) if cfg.sequence_parallel else comm.sum_over(part, axis)
    return y, VocabEmbeddingResiduals.keep(cfg, needs, ids=x, y_shape=y.shape, dtype=y.dtype)


@dgrad_of(VocabEmbeddingResiduals)
def vocab_embedding_dgrad(
    residuals: VocabEmbeddingResiduals, dy: Tensor, cfg: VocabEmbeddingConfig
) -> tuple[None, VocabEmbeddingPending | None]:
    """dx is None; the pending weight gradient holds ids and this rank's dy, both aliases."""
    check_tensor("vocab_embedding_dgrad", "dy", dy, residuals.y_shape, residuals.dtype, residuals.ids)
    return None, VocabEmbeddingPending.keep(cfg, residuals.needs, ids=residuals.ids, dy=dy)


@wgrad_of(VocabEmbeddingPending, EmbeddingParams)
def vocab_embedding_wgrad(
    pending: VocabEmbeddingPending, cfg: VocabEmbeddingConfig, *, into: EmbeddingParams | None = None
) -> EmbeddingParams:
    """Gathers dy, then sums its rows by id. dw_r: [V/n, D]; added to `into` if given."""
    where, dy, ids, rows, skipped = "vocab_embedding_wgrad", pending.dy, pending.ids, cfg.weight_shape[0], cfg.skipped
    if into is not None:  # before anything is sent
        check_embedding_into(where, dy, rows, into)
    if cfg.axis.size > 1:
        ids = own_rows_of(ids, rows, cfg.axis, skipped)[0]
        dy = comm.gather(dy, cfg.axis) if cfg.sequence_parallel else dy
    return embedding_gradients(where, dy, ids, rows, skipped, into)


vocab_embedding = make_op(
    "vocab_embedding",
    VocabEmbeddingConfig,
    init=vocab_embedding_init,
    fwd=vocab_embedding_fwd,
    dgrad=vocab_embedding_dgrad,
    wgrad=vocab_embedding_wgrad,
)
vocab_embedding_bwd = both_halves(vocab_embedding, vocab_embedding_dgrad, vocab_embedding_wgrad)
