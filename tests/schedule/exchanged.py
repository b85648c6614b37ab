"""A message each way between two ranks, of leaves of any kind."""

import random
from typing import Any, NamedTuple

import torch

from funcops.adapters.pipelining.messages import Messages
from funcops.schedule import Action
from funcops.schedule.exchange import Exchange

LEAVES = [
    ((3, 2), torch.float32),
    ((), torch.float64),
    ((0, 4), torch.float32),
    ((2, 1, 3), torch.bfloat16),
    ((4,), torch.int64),
    ((1,), torch.bool),
    ((5,), torch.int8),
    ((2,), torch.float16),
    ((7,), torch.float8_e4m3fn),
]
FORWARD, BACKWARD = Action(0, "F", 0), Action(1, "I", 0)


class Exchanged(NamedTuple):
    """The values that rank 0 sends and the gradients that rank 1 sends back; whether gradients go back at all; whether both go in
    one batch."""

    values: tuple[Any, ...]
    gradients: tuple[Any, ...]
    back: bool
    together: bool


def exchanged(rng: random.Random) -> Exchanged:
    generator = torch.Generator().manual_seed(rng.randrange(1000))
    likes = rng.choices(LEAVES, k=rng.randint(0, 5))
    values, gradients = ([(torch.randn(s, generator=generator) * 3).to(dtype) for s, dtype in likes] for _ in range(2))
    given = tuple(t if t.is_floating_point() and rng.random() < 0.7 else None for t in gradients)
    return Exchanged(tuple(values), given, rng.random() < 0.7, rng.random() < 0.5)


def exchange(rank: int, drawn: Exchanged) -> Any:
    """Run the exchange on one rank; return what it receives."""
    nothing = (torch.empty(2),)
    messages = Messages((nothing, drawn.values, nothing), (False, drawn.back, True), torch.device("cpu"), None)
    own, other = (FORWARD, BACKWARD) if rank == 0 else (BACKWARD, FORWARD)
    messages.put(own, drawn.values if rank == 0 else drawn.gradients)
    if drawn.together:
        messages.start(Exchange(1 - rank, (own,), (other,)))
    else:
        for sender in range(2):
            messages.start(Exchange(1 - rank, (own,), ()) if rank == sender else Exchange(1 - rank, (), (other,)))
    taken, _ = messages.take(other)
    messages.finish()
    return taken


def check_exchanged(rank: int, drawn: Exchanged, found: Any) -> None:
    """Check what the rank received."""
    wanted = (
        drawn.values
        if rank
        else [
            None if not drawn.back or not like.is_floating_point() else torch.zeros_like(like) if t is None else t
            for t, like in zip(drawn.gradients, drawn.values, strict=True)
        ]
    )
    for got, want in zip(found, wanted, strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            assert got.dtype == want.dtype and torch.equal(got.double(), want.double())
