"""A decoder's experts as a planner sees them: how many ranks get a token, and what is kept.

Routing is taken to be even: each expert gets as many tokens, and any K experts of a token are as likely. Of E experts, E/n on each
of n ranks, a token has none on a given rank with probability q = C(E - E/n, K) / C(E, K); it is sent to n (1 - q) ranks, its own
included. A rank receives as many rows as it sends, and computes K rows for each of its own tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from funcops.engine.errors import require, require_count

WEIGHT, INDEX, COUNT = 4, 4, 8  # bytes that are sent: a weight in float32, an index in int32, and a count in int64


@dataclasses.dataclass(frozen=True)
class Mixture:
    """The experts of each layer of a `Decoder`, whose `ffn` is the hidden size of one of them: `experts` of them, of which a token
    has `choices`; `shared`: the hidden size of an MLP that every token goes through besides, 0 for none.

    >>> from funcops.schedule import Mixture
    >>> mixture = Mixture(experts=64, choices=2)
    >>> f"{mixture.ranks(1):.2f}, {mixture.ranks(8):.2f}, {mixture.ranks(64):.2f}"
    '1.00, 1.89, 2.00'
    """

    experts: int
    choices: int
    shared: int = 0

    def __post_init__(self) -> None:
        require_count("Mixture", experts=self.experts, choices=self.choices)
        require_count("Mixture", 0, shared=self.shared)
        require(self.choices <= self.experts, "Mixture", "choices", f"at most experts {self.experts}", self.choices)

    def ranks(self, ep: int) -> float:
        """To how many of `ep` ranks a token is sent on average, its own included. Raises `ValueError` unless `ep` divides the
        number of experts."""
        require_count("Mixture.ranks", ep=ep)
        require(self.experts % ep == 0, "Mixture.ranks", "ep", f"a divisor of experts {self.experts}", ep)
        return _ranks(self.experts, self.choices, ep)

    def kept(self, hidden: int, up: int, ep: int) -> float:
        """The bytes that the experts and the router of a layer save per token, in 16 bits: with experts on several ranks also the
        rows that came, whose choices of other ranks' experts have rows too. `up`: the width of the experts' first product."""
        k = self.choices
        router = 2 * hidden + (WEIGHT + INDEX) * k
        if ep == 1:
            return router + k * (2 * up + 8)
        return router + 4 * ep + self.ranks(ep) * (2 * hidden + WEIGHT * k + k * (2 * up + 8))


@functools.lru_cache(maxsize=4096)
def _ranks(experts: int, choices: int, ep: int) -> float:
    others = experts - experts // ep
    return ep * (1.0 - math.comb(others, choices) / math.comb(experts, choices))
