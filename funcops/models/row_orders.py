"""The orders of rows in which checkpoints store params."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from funcops.models.decoder import DecoderConfig


def row_order(kind: str, count: int, parts: int, cfg: DecoderConfig) -> Tensor | None:
    """The row of the tensors for each of `count` rows of params, which are `parts` leaves one below the other; None if the order is
    the same. `kind`: `Rule.order`."""
    rows = torch.arange(count)
    if kind == "evens_first":
        return torch.cat((rows[::2], rows[1::2]))
    if kind == "turning_first":
        assert cfg.latent is not None
        return rows.view(cfg.heads, -1).roll(cfg.latent.rope_size, 1).flatten()
    if kind == "by_head":
        return torch.cat([part.flatten() for part in rows.view(cfg.heads, -1).chunk(parts, 1)])
    if kind == "by_key_head":
        assert cfg.linear is not None
        of = cfg.linear
        values = of.values // of.key_heads
        sizes = [of.key_size, of.key_size, values, values] if parts == 4 else [of.value_heads // of.key_heads] * parts
        return torch.cat([part.flatten() for part in rows.view(of.key_heads, -1).split(sizes, 1)])
    return None
