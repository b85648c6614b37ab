"""The range of ids: tokens, labels, positions, experts."""

from __future__ import annotations

import torch
from torch import Tensor

from funcops.engine.backend.declare import readable
from funcops.engine.errors import fail

INDICES = (torch.int32, torch.int64)  # the dtypes of indices of experts: a router's, and torch.topk's


def check_ids(where: str, name: str, ids: Tensor, most: int, *, but: int | None = None) -> None:
    """Raise `IndexError` for an id that is below 0 or above `most`, unless it is `but`, if the host may read them (`readable`)."""
    if not readable(ids) or not ids.numel():
        return
    least, largest = torch.aminmax(ids)
    if least >= 0 and largest <= most:
        return
    outside = (ids < 0) | (ids > most)
    if but is not None:
        outside = outside & (ids != but)
    if outside.any():
        other = "" if but is None else f", or {but}"
        fail(where, name, f"ids from 0 to {most}{other}", int(ids[outside][0]), IndexError)
