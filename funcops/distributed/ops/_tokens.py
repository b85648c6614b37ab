"""Tokens sent to the ranks of their experts and back: shared by `dispatch`, `combine` and `parallel_experts`.

Of its T tokens, a rank sends the ones with an expert on rank r, in the order of the tokens, after the rows for the ranks before r.
`place` [T, n] is the row of each token for each rank, or the number of rows if it is not sent there: a zero row after the last.

Without a capacity the ranks first tell each other how many rows they send: `sizes` [2, n] int64, on the host, the rows for each
rank and from each. With one, or on one rank, `sizes` is None: there are C rows for each rank, the unused ones zero, so shapes
follow from T alone, and all numbers stay on the device. On the meta device, where no size is known, a rank sends and receives n T.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops.distributed import comm
from funcops.distributed.mesh import Axis
from funcops.engine.backend.declare import capturing, tracing
from funcops.engine.contract.pausing import Flying
from funcops.engine.errors import fail
from funcops.engine.trees import replace
from funcops.library.formats import Format, as_made, quantize_tensor
from funcops.library.kernels.routing import check_row_count, gather_rows


class Dispatched(NamedTuple):
    """The rows that a rank received, [R, *], and where its own tokens are."""

    weights: Tensor
    rows: Any  # a tensor, or a QTensor
    indices: Tensor
    place: Tensor
    sizes: Tensor | None


def row_count(tokens: int, capacity: float | None, axis: Axis) -> int:
    """n C: how many rows are sent, and received; without a capacity, at most."""
    return axis.size * (tokens if capacity is None else math.ceil(capacity * tokens))


def send_rows(indices: Tensor, experts: int, capacity: float | None, axis: Axis) -> Tensor:
    """The row [T, n] of each token for each rank, from indices [T, K], with C rows for each rank."""
    goes, n = _ranks_of(indices, experts, axis), axis.size
    rows = row_count(indices.shape[0], capacity, axis)
    slot = goes.cumsum(0) - 1
    first = torch.arange(n, device=indices.device) * (rows // n)
    return torch.where((goes > 0) & (slot < rows // n), first + slot, rows).to(torch.int32)


def send_counted(where: str, indices: Tensor, experts: int, axis: Axis) -> tuple[Tensor, Tensor]:
    """`place` and `sizes` without a capacity. Counts are in flight while places are computed; then the host reads them."""
    if (tracing() or capturing()) and not indices.is_meta:
        wanted = "given in a graph, and under torch.compile, make_fx and policies that trace (1.0 has room for all tokens)"
        fail(where, "capacity", wanted, None)
    goes = _ranks_of(indices, experts, axis)
    counts = goes.sum(0)
    came = comm.start_all_to_all(counts, axis)
    row = counts.cumsum(0) - counts + goes.cumsum(0) - 1
    place = torch.where(goes > 0, row, counts.sum()).to(torch.int32)
    sizes = torch.stack((counts, comm.wait(came, axis)))
    return place, sizes if sizes.is_meta else sizes.cpu()


def _ranks_of(indices: Tensor, experts: int, axis: Axis) -> Tensor:
    """[T, n]: 1 for a rank that has an expert of the token. An index outside [0, E] raises `IndexError` on the CPU."""
    tokens, n, device = indices.shape[0], axis.size, indices.device
    ranks = torch.arange(experts + 1, device=device) // (experts // n)  # n for a dropped choice
    at = ranks.index_select(0, indices.reshape(-1)).view(indices.shape)
    return torch.zeros(tokens, n + 1, dtype=torch.int64, device=device).scatter_(1, at, 1)[:, :n]


def rows_sent(place: Tensor, sizes: Tensor | None, capacity: float | None, axis: Axis) -> int:
    """How many rows this rank sends, from place [T, n]."""
    return row_count(place.shape[0], capacity, axis) if sizes is None or sizes.is_meta else sum(sizes[0].tolist())


def token_of(place: Tensor, rows: int) -> Tensor:
    """[rows]: the token in each row, T for an unused row: the inverse of place [T, *]."""
    tokens, choices = place.shape
    numbers = torch.arange(tokens, device=place.device).unsqueeze(1).expand(tokens, choices)
    token = torch.full((rows + 1,), tokens, device=place.device)
    return token.scatter_(0, place.reshape(-1).to(torch.int64), numbers.reshape(-1))[:-1]


def start(rows: Tensor, token: Tensor, axis: Axis, sizes: Tensor | None, most: int, pad: float = 0) -> Tensor:
    """[T, D] -> [R, D], in flight: the rows that all ranks send to this rank. `most`: R, where sizes are not known."""
    sent = _padded(rows, pad) if sizes is None else rows  # with sizes no row is unused
    return _start(sent.index_select(0, token), axis, sizes, most)


def start_back(rows: Tensor, place: Tensor, sizes: Tensor | None, axis: Axis) -> Tensor:
    """[R, D] -> the rows of this rank's tokens, in flight: `start` the other way."""
    return _start(rows, axis, None if sizes is None else sizes.flip(0), row_count(place.shape[0], None, axis))


def _start(rows: Tensor, axis: Axis, sizes: Tensor | None, most: int) -> Tensor:
    if sizes is None:
        return comm.start_all_to_all(rows, axis)
    sends, receives = ([rows.shape[0]], [most]) if sizes.is_meta else sizes.tolist()
    return comm.start_all_to_all(rows, axis, (sends, receives))


def in_flight(axis: Axis, then: Callable[[], Any]) -> Any:
    """Return `then` as communication in flight over the axis; on one rank call it at once."""
    return Flying(then) if axis.size > 1 else then()


def arrived(rows: Tensor, place: Tensor, axis: Axis) -> Tensor:
    """Rows in flight -> [T, D]: the sum of a token's rows, in the order of its places."""
    return gather_rows(_padded(comm.wait(rows, axis)), place, None)


def dispatched(
    where: str,
    x: tuple[Tensor, Tensor, Tensor],
    experts: int,
    capacity: float | None,
    axis: Axis,
    then: Callable[[Dispatched], Any],
    format: Format | None = None,
) -> Any:
    """Send the rows of a checked `(weights, x, indices)`, in codes of a format if it is given. `then` goes on with what the ranks
    sent to this one."""
    weights, tokens, indices = [t.reshape(-1, t.shape[-1]) for t in x]
    indices, own = indices.to(torch.int32), experts // axis.size
    check_row_count(where, "x, sent to all ranks,", row_count(tokens.shape[0], capacity, axis))
    sizes: Tensor | None = None
    if capacity is None and axis.size > 1:
        place, sizes = send_counted(where, indices, experts, axis)
    else:
        place = send_rows(indices, experts, capacity, axis)
    rows = rows_sent(place, sizes, capacity, axis)
    token = token_of(place, rows)
    low = None if format is None else quantize_tensor(tokens, format)
    parts = [(weights, 0), (tokens, 0), (indices, experts)]
    if low is not None:
        parts[1:2] = (low.codes, 0), (low.scales, int(low.scales.is_floating_point()))  # of zeros
    flying = [start(t, token, axis, sizes, rows, pad) for t, pad in parts]

    def came() -> Any:
        own_weights, own_rows, *scales, chosen = [comm.wait(t, axis) for t in flying]
        given: Any = own_rows
        if low is not None:
            shape = torch.Size((len(own_rows), low.shape[-1]))
            given = replace(low, codes=own_rows, scales=as_made(scales[0], low.format), shape=shape)
        chosen = chosen - comm.place(axis, chosen) * own  # experts by their number on this rank, E/n for experts of other ranks
        here = torch.where((chosen >= 0) & (chosen < own), chosen, own)
        return then(Dispatched(own_weights, given, here, place, sizes))

    return in_flight(axis, came)


def _padded(rows: Tensor, value: float = 0) -> Tensor:
    """Rows with one more after the last, for tokens and rows without a partner."""
    return torch.cat((rows, rows.new_full((1, rows.shape[1]), value)))
