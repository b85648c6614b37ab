"""Messages between ranks, by `torch.distributed.batch_isend_irecv`, and an all-gather of small numbers."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from funcops.schedule.actions import Action
from funcops.schedule.exchange import Exchange

Values = tuple[Any, ...]  # the leaves of the boundary of two stages: tensors, and None without a gradient


class Started(NamedTuple):
    """A message in flight, from or to `peer`: its leaves, and the handles to wait for."""

    values: Values
    works: Sequence[Any]
    peer: int


class Messages:
    """The messages that this rank sends and receives. `boundaries[s]`: examples of the input leaves of stage s; `gradients[s]`:
    whether their gradients are sent back. The examples give shapes and dtypes, so that only values are sent.

    A started message is kept until it is waited for, because a backend may still read it. `into`: memory in which messages are
    received; others get new memory."""

    def __init__(self, boundaries: Sequence[Values], gradients: Sequence[bool], device: torch.device, group: Any) -> None:
        self.boundaries, self.gradients, self.device, self.group = boundaries, gradients, device, group
        self.into: Mapping[Action, Values] = {}
        self.lost: int | None = None  # the rank whose message did not come, or that did not take one
        self._given: dict[Action, Values] = {}
        self._sent: dict[Action, Started] = {}
        self._coming: dict[Action, Started] = {}

    def put(self, message: Action, values: Values) -> None:
        """Store the leaves of a message until its exchange starts."""
        self._given[message] = values

    def start(self, exchange: Exchange) -> None:
        """Start all messages of an exchange in one batch."""
        batch: list[tuple[dict[Action, Started], Action, Values, Any]] = [
            *((self._sent, one, self._leaves(one, self._given.pop(one)), dist.isend) for one in exchange.sends),
            *((self._coming, one, self.into.get(one) or self.memory(one), dist.irecv) for one in exchange.receives),
        ]
        peer = {"group": self.group, "group_peer": exchange.peer}
        ops = [[dist.P2POp(op, t, **peer) for t in values if t is not None and t.numel()] for *_, values, op in batch]
        count = sum(map(len, ops))
        with self._with(exchange.peer):
            works = dist.batch_isend_irecv(list(itertools.chain(*ops))) if count else []
        left = iter(works)
        for (into, message, values, _), own in zip(batch, ops, strict=True):
            # if the backend returns one handle for a batch, each of its messages waits for the whole batch
            waits = list(itertools.islice(left, len(own))) if len(works) == count else works
            into[message] = Started(values, waits, exchange.peer)

    def take(self, message: Action) -> tuple[Values, bool]:
        """Wait for a message. Returns its leaves, and whether any tensor was sent."""
        started = self._coming.pop(message)
        self._wait(started)
        return started.values, bool(started.works)

    def forget(self, messages: Sequence[Action]) -> None:
        """Wait until these messages are sent, and drop them."""
        for message in messages:
            self._wait(self._sent[message])
            del self._sent[message]

    def finish(self) -> None:
        """Wait for all messages that were sent."""
        self.forget(tuple(self._sent))

    def _wait(self, started: Started) -> None:
        with self._with(started.peer):
            for work in started.works:
                work.wait()

    @contextlib.contextmanager
    def _with(self, peer: int) -> Iterator[None]:
        """Note the peer if a call of the backend raises."""
        try:
            yield
        except RuntimeError:
            self.lost = peer
            raise

    def memory(self, message: Action) -> Values:
        """New memory for the leaves of a message that are sent; None for others."""
        return tuple(None if t is None else self._empty(t) for t in self._sent_like(message))

    def _leaves(self, message: Action, given: Values) -> Values:
        """The leaves of a message that are sent, taken from `given`. A None gradient is sent as zeros."""
        pairs = zip(given, self._sent_like(message), strict=True)
        return tuple(None if like is None else torch.zeros_like(self._empty(like)) if t is None else t for t, like in pairs)

    def _sent_like(self, message: Action) -> Values:
        """Examples of the leaves of a message that are sent; None for others."""
        forward = message.kind == "F"
        examples = self.boundaries[message.stage + 1 if forward else message.stage]
        return tuple(t if forward or (self.gradients[message.stage] and t.is_floating_point()) else None for t in examples)

    def _empty(self, example: Tensor) -> Tensor:
        return torch.empty(example.shape, dtype=example.dtype, device=self.device)


def from_all(numbers: Sequence[int], device: torch.device, group: Any) -> list[list[int]]:
    """Gather `numbers`, of the same length on every rank of the group, by a small all-reduce and a host sync."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    found = torch.zeros(size, len(numbers), dtype=torch.int64, device=device)
    found[rank] = torch.tensor(numbers, dtype=torch.int64, device=device)
    dist.all_reduce(found, group=group)
    rows: list[list[int]] = found.tolist()
    return rows
