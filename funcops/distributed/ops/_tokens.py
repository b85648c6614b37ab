"""Tokens sent to the ranks of their experts and back: shared by `dispatch`, `combine` and `parallel_experts`.

A rank sends n C rows, and receives n C rows. Of its T tokens, the ones with an expert on rank r are in rows r C to (r + 1) C, in
the order of the tokens. `place` [T, n] is the row of each token for each rank, or n C if it is not sent there: a zero row after the
last. All sizes follow from T alone, and all numbers stay on the device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from funcops.distributed import comm
from funcops.distributed.mesh import Axis
from funcops.kernels.routing import check_row_count, gather_rows


def row_count(tokens: int, capacity: float | None, axis: Axis) -> int:
    """n C: how many rows are sent, and received."""
    return axis.size * (tokens if capacity is None else math.ceil(capacity * tokens))


def send_rows(indices: Tensor, experts: int, capacity: float | None, axis: Axis) -> Tensor:
    """The row [T, n] of each token for each rank, from indices [T, K]. An index outside [0, E] raises `IndexError` on the CPU."""
    tokens, n, device = indices.shape[0], axis.size, indices.device
    rows = row_count(tokens, capacity, axis)
    ranks = torch.arange(experts + 1, device=device) // (experts // n)  # n for a dropped choice
    at = ranks.index_select(0, indices.reshape(-1)).view(indices.shape)
    goes = torch.zeros(tokens, n + 1, dtype=torch.int64, device=device).scatter_(1, at, 1)[:, :n]
    slot = goes.cumsum(0) - 1
    first = torch.arange(n, device=device) * (rows // n)
    return torch.where((goes > 0) & (slot < rows // n), first + slot, rows).to(torch.int32)


def token_of(place: Tensor, rows: int) -> Tensor:
    """[rows]: the token in each row, T for an unused row: the inverse of place [T, *]."""
    tokens, choices = place.shape
    numbers = torch.arange(tokens, device=place.device).unsqueeze(1).expand(tokens, choices)
    token = torch.full((rows + 1,), tokens, device=place.device)
    return token.scatter_(0, place.reshape(-1).to(torch.int64), numbers.reshape(-1))[:-1]


def start(rows: Tensor, token: Tensor, axis: Axis) -> Tensor:
    """[T, D] -> [n C, D], in flight: the rows that all ranks send to this rank."""
    return comm.start_all_to_all(_padded(rows).index_select(0, token), axis)


def arrived(rows: Tensor, place: Tensor, axis: Axis) -> Tensor:
    """[n C, D], in flight -> [T, D]: the sum of a token's rows, in the order of its places."""
    return gather_rows(_padded(comm.wait(rows, axis)), place, None)


def dispatched(
    where: str, x: tuple[Tensor, Tensor, Tensor], experts: int, capacity: float | None, axis: Axis
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(weights [n C, K], rows [n C, H], indices [n C, K], place [T, n]) for a checked `(weights, x, indices)`."""
    weights, tokens, indices = [t.reshape(-1, t.shape[-1]) for t in x]
    indices = indices.to(torch.int32)
    rows = row_count(tokens.shape[0], capacity, axis)
    check_row_count(where, "x, sent to all ranks,", rows)
    place = send_rows(indices, experts, capacity, axis)
    token = token_of(place, rows)
    sent = start(weights, token, axis), start(tokens, token, axis), _start_indices(indices, token, experts, axis)
    own_weights, own_rows, own_indices = [comm.wait(t, axis) for t in sent]
    return own_weights, own_rows, own_indices, place


def _start_indices(indices: Tensor, token: Tensor, experts: int, axis: Axis) -> Tensor:
    """[T, K] -> [n C, K], in flight: experts by their number on the receiving rank, E/n for experts of other ranks."""
    n, own = axis.size, experts // axis.size
    sent = _padded(indices, experts).index_select(0, token).view(n, -1, indices.shape[1])
    sent = sent - torch.arange(n, dtype=torch.int32, device=indices.device).view(n, 1, 1) * own
    return comm.start_all_to_all(torch.where((sent >= 0) & (sent < own), sent, own).flatten(0, 1), axis)


def _padded(rows: Tensor, value: float = 0) -> Tensor:
    """Rows with one more after the last, for tokens and rows without a partner."""
    return torch.cat((rows, rows.new_full((1, rows.shape[1]), value)))
