"""The time of a layer's experts, and their messages between ranks. See `funcops.schedule.mixture` for the routing."""

from __future__ import annotations

import math
from typing import NamedTuple

from funcops.schedule.collectives import Collective
from funcops.schedule.decoder import Decoder
from funcops.schedule.gpus import GPU
from funcops.schedule.mixture import COUNT, INDEX, WEIGHT


class ExpertTimes(NamedTuple):
    """Seconds of a layer's experts and its router; `up`: of the experts' first product, forward."""

    forward: float
    dgrad: float
    wgrad: float
    up: float


def expert_times(model: Decoder, gpu: GPU, tokens: int, ep: int) -> ExpertTimes:
    """The times for `tokens` of each rank: grouped products of E/n experts, of as many rows each, and rows that are moved: read and
    written to be sent, and to be summed by token."""
    mixture = model.mixture
    if mixture is None:
        return ExpertTimes(0.0, 0.0, 0.0, 0.0)
    own, h, low = mixture.experts // ep, model.hidden, bool(model.low)
    rows = math.ceil(tokens * mixture.choices / own)
    sizes = [(one.n, one.k) for one in model.expert_products]
    forwards = [gpu.product(rows, n, k, low=low, groups=own) for n, k in sizes]
    dgrads = [gpu.product(rows, k, n, low=low, groups=own) for n, k in sizes]
    wgrads = [gpu.product(n, k, rows, 8, low=low, groups=own) for n, k in sizes]  # float32 sums, read and written
    sent = mixture.ranks(ep) if ep > 1 else 0.0
    moved = gpu.moved(2 * h * tokens * (mixture.choices + 1 + 4 * sent))
    count = mixture.experts
    router = [gpu.product(*shape) for shape in ((tokens, count, h), (tokens, h, count), (count, h, tokens))]
    forward, dgrad, wgrad = (sum(products) + one for products, one in zip((forwards, dgrads, wgrads), router, strict=True))
    return ExpertTimes(forward + moved, dgrad + moved, wgrad, forwards[0])


def of_experts(model: Decoder, gpu: GPU, count: int, tokens: int, ep: int, recompute: str) -> list[Collective]:
    """The messages of `parallel_experts` in `count` layers: each token with its weights and indices to the ranks of its experts,
    and the results back; in the backward dy there, and the gradients of weights and x back during the experts' wgrad. In low
    precision they are steps, which send codes and scales if the recipe allows, and wait for the gradients."""
    mixture = model.mixture
    if mixture is None or ep == 1 or not count:
        return []
    rows, k = mixture.ranks(ep) * tokens * ep, mixture.choices  # the rows of all ranks

    def sent(nbytes: float, during: str = "F", under: float = 0.0) -> Collective:
        return Collective("all_to_all", "ep", nbytes, under, during, count)

    x, weights, indices = 2.0 * model.hidden * rows, float(WEIGHT * k) * rows, float(INDEX * k) * rows
    codes = None if model.recipe is None else model.recipe.takes_codes
    given = [x] if codes is None else [rows * nbytes for nbytes in codes.nbytes(1, model.hidden)]
    forward = [float(COUNT * ep * ep), weights, *given, indices, x]
    found = [sent(nbytes) for nbytes in forward]
    if recompute == "block":
        found += [sent(nbytes, "I") for nbytes in forward]
    when, under = ("I", 0.0) if model.low else ("W", expert_times(model, gpu, tokens, ep).wgrad)
    found.append(sent(x, "I"))
    return found + [sent(nbytes, when, under * nbytes / (x + weights)) for nbytes in (weights, x)]
