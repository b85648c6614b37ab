"""A self-check on this machine: whether a model's log-probabilities have the same bits in any batch and in decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcops.engine import random
from funcops.engine.compose.chain import ChainConfig, chain
from funcops.engine.contract.needs import Needs
from funcops.engine.errors import fail, require_count, require_type
from funcops.engine.trees import WithExtras, at, leaves, stands_for_one
from funcops.library.ops.embedding import EmbeddingParams
from funcops.models.cache import cache_init
from funcops.models.decode import decode
from funcops.models.decoder import decoder_x, without_loss
from funcops.models.decoder_config import DecoderConfig
from funcops.models.sampling import log_probabilities

__all__ = ["check_invariant"]


def check_invariant(params: Any, cfg: DecoderConfig, model: ChainConfig, *, tokens: int = 160, key: Tensor | None = None) -> int:
    """Check that this machine gives a sequence's tokens the same bits whatever else is in the batch, as libraries of torch decide
    how products are summed: run it once with the params, threads and versions of a run. `model`: `with_invariant(decoder(cfg))`, or
    what else `decode` takes.

    A drawn sequence of `tokens` is computed alone, before others, with padding behind it, as a prefix, and by `decode` in chunks
    and one by one, alone and beside others. Returns how many log-probabilities were compared; gradients of its embeddings count,
    too, where the head has a weight of its own. Raises `RuntimeError` that names the first comparison and position that differ,
    which `funcops.recording` and `funcops.compare` trace to a step; `ValueError` or `TypeError` for what `decode` refuses.

    >>> from funcops import RopeConfig, chain, random
    >>> from funcops.invariant import with_invariant
    >>> from funcops.models import DecoderConfig, check_invariant, decoder
    >>> sizes = dict(vocab=300, dim=32, layers=2, heads=4, kv_heads=2, head_size=8, hidden=48, context=64)
    >>> cfg = DecoderConfig(**sizes, rope=RopeConfig(8))
    >>> model = with_invariant(decoder(cfg))
    >>> check_invariant(chain.init(model, key=random.key(0)), cfg, model, tokens=40) > 200
    True
    """
    where = "check_invariant"
    require_type(where, "cfg", cfg, DecoderConfig)
    require_type(where, "model", model, ChainConfig)
    require_count(where, 2, tokens=tokens)
    tokens, params = min(tokens, cfg.context), without_loss(params)
    drawn = random.uniform(random.key(0) if key is None else key, (4, 2 * tokens))
    table = leaves(at(params, "embed"), is_leaf=stands_for_one)[0]
    if not stands_for_one(table):
        require_type(where, "params.embed", table, Tensor)
    ids = (drawn * cfg.vocab).long()[:, : min(2 * tokens, cfg.context)].to(table.device)
    own = _Own(where, params, cfg, model, ids[1, :tokens], table.dtype)
    for name, rows, row in (("before others", ids[1:], 0), ("behind others", ids[:2], 1), ("with padding behind it", ids[1:2], 0)):
        own.same(f"of a sequence {name}", own.forward(rows)[row, :tokens])
    part = max(2, tokens // 2)
    own.same("of a prefix", own.forward(ids[1:2, :part])[0])
    for chunk in (tokens, max(1, tokens // 3), 1):
        for rows, row in ((ids[1:2, :tokens], 0), (ids[:3, :tokens], 1)):
            own.same(f"by decode of {len(rows)} sequences in chunks of {chunk}", own.decoded(rows, chunk)[row])
    own.same_gradients(ids[:3, :tokens])
    return own.compared


class _Own:
    """A sequence, and its log-probabilities alone, which others are compared with."""

    def __init__(self, where: str, params: Any, cfg: DecoderConfig, model: ChainConfig, ids: Tensor, dtype: torch.dtype) -> None:
        self.where, self.params, self.cfg, self.model, self.compared = where, params, cfg, model, 0
        self.ids, self.dtype = ids, dtype
        self.alone = self._of(self.forward(ids[None])[0])

    def _of(self, logits: Tensor) -> Tensor:
        return log_probabilities(logits[:-1], self.ids[1 : len(logits)])

    def same(self, name: str, logits: Tensor) -> None:
        self._equal(f"log-probabilities {name}", self._of(logits), self.alone[: len(logits) - 1])

    def _equal(self, name: str, got: Tensor, wanted: Tensor) -> None:
        other = (got != wanted).flatten(1).any(1) if got.dim() > 1 else got != wanted
        if other.any():
            first, count = int(other.int().argmax()), int(other.sum())
            said = f"{count} of {len(other)} others, the first at position {first}"
            fail(self.where, name, "the bits that the sequence has alone (is model with_invariant(...)?)", said, RuntimeError)
        self.compared += len(other)

    def forward(self, ids: Tensor) -> Tensor:
        y, _ = chain.fwd(self.params, decoder_x(self.cfg, ids, self.dtype), self.model, needs=Needs.NONE)
        logits: Tensor = y.main if type(y) is WithExtras else y
        return logits

    def decoded(self, ids: Tensor, chunk: int) -> Tensor:
        cache = cache_init(self.cfg, len(ids), context=ids.shape[1], chunk=chunk, dtype=self.dtype, device=ids.device)
        found = []
        for part in ids.split(cache.chunk, 1):
            logits, cache = decode(self.params, cache, part, self.cfg, model=self.model)
            found.append(logits)
        return torch.cat(found, 1)

    def same_gradients(self, ids: Tensor) -> None:
        """Compare the gradients of the sequence's embeddings, which are rows of the table's gradient if each id occurs once."""
        if self.cfg.tied or type(at(self.params, "embed")) is not EmbeddingParams or ids.numel() > self.cfg.vocab:
            return
        ids = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
        wanted, got = (self._table_gradient(rows)[ids[1]] for rows in (ids[1:2], ids))
        self._equal("gradients of a sequence between others", got, wanted)

    def _table_gradient(self, ids: Tensor) -> Tensor:
        y, residuals = chain.fwd(self.params, decoder_x(self.cfg, ids, self.dtype), self.model)
        main = y.main if type(y) is WithExtras else y
        classes = torch.arange(self.cfg.vocab, device=ids.device)
        slopes = torch.sin(classes + ids.unsqueeze(-1)).to(main.dtype)  # by token: the same in any batch
        dy = WithExtras(slopes, dict.fromkeys(y.extras)) if type(y) is WithExtras else slopes
        gradient: Tensor = chain.bwd(residuals, dy, self.model)[0]["embed"].weight
        return gradient
