"""Sampling of the next token: the likeliest, or one drawn by Philox from a key."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops.engine import random
from funcops.engine.backend.declare import readable
from funcops.engine.contract.configs import config
from funcops.engine.errors import FLOATS, check, fail, require, require_number, require_type
from funcops.library.kernels.cross_entropy import cross_entropy_fwd
from funcops.library.kernels.entropy import entropy_fwd
from funcops.library.kernels.pins import pinning_where_served
from funcops.library.ops._ids import check_ids

__all__ = ["Sampled", "SamplingConfig", "log_probabilities", "sample"]


@config
class SamplingConfig:
    """`temperature`: divides logits; 0, the default, takes the likeliest. `top_k`: keep only the k likeliest. `top_p`: of those
    keep the fewest likeliest that together have a probability of p (arXiv:1904.09751). `min_p`: keep tokens at least min_p
    times as likely as the likeliest (arXiv:2407.01082). `repetition_penalty`: before all that, divides positive logits of tokens
    that have occurred, and multiplies negative ones (arXiv:1909.05858). Among equals the lower id goes first.
    Raises `ValueError` for a value out of range, and for `top_k`, `top_p` or `min_p` at temperature 0, where they have no effect.

    >>> from funcops.models import SamplingConfig
    >>> SamplingConfig(temperature=0.8, top_p=0.9)
    SamplingConfig(temperature=0.8, top_p=0.9)
    >>> SamplingConfig(temperature=-1.0)
    Traceback (most recent call last):
        ...
    ValueError: SamplingConfig: temperature must be at least 0, got -1.0
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        where = "SamplingConfig"
        require_number(where, 0, temperature=self.temperature)
        require(self.top_k is None or self.top_k >= 1, where, "top_k", "None or at least 1", self.top_k)
        require(self.top_p is None or 0 < self.top_p <= 1, where, "top_p", "None, or above 0 and at most 1", self.top_p)
        require(self.min_p is None or 0 <= self.min_p <= 1, where, "min_p", "None, or from 0 to 1", self.min_p)
        require_number(where, 0, repetition_penalty=self.repetition_penalty)
        require(self.repetition_penalty > 0, where, "repetition_penalty", "above 0", self.repetition_penalty)
        for name in () if self.temperature > 0 else ("top_k", "top_p", "min_p"):
            if (value := getattr(self, name)) is not None:
                fail(where, name, "None at temperature 0, which takes the likeliest token: set temperature=1.0", value)


class Sampled(NamedTuple):
    """Tokens [B], int64, and the logarithms of their probabilities [B], float32 (float64 for float64), as `generate` yields them;
    if asked for, also the model's `entropy` [B] before a token, and the `choices` [B, T, R, K] of the R routers for the tokens that
    the model took since the last one: the prompt's with the first, then one; -1 for padding, and for a row that has ended.

    >>> import torch
    >>> from funcops.models import Sampled, log_probabilities
    >>> tokens = torch.tensor([0, 3])
    >>> Sampled(tokens, log_probabilities(torch.zeros(2, 4), tokens)).log_probabilities
    tensor([-1.3863, -1.3863])
    """

    tokens: Tensor
    log_probabilities: Tensor
    entropy: Tensor | None = None
    choices: Tensor | None = None


def log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    """The logarithms of the probabilities of tokens [*] by the softmax of logits [*, V], which nothing divides or filters: [*],
    float32 (float64 for float64). They are the losses of `cross_entropy` with reduction="none", with the other sign, bit for bit:
    so what a sampler saves, a trainer's loss can be compared with (on Triton, unless rows of logits fill lines of 128 bytes, one of
    `with_invariant`).
    Raises `ValueError` or `TypeError` for a wrong shape or dtype, `IndexError` on the CPU for a token outside of the vocabulary.

    >>> import torch
    >>> from funcops.models import log_probabilities
    >>> log_probabilities(torch.zeros(2, 4), torch.tensor([0, 3]))
    tensor([-1.3863, -1.3863])
    """
    where = "log_probabilities"
    check(where, "logits", logits, (...,), FLOATS)
    if logits.dim() < 1 or logits.shape[-1] == 0:
        fail(where, "logits", "[*, V]", list(logits.shape))
    check(where, "tokens", tokens, tuple(logits.shape[:-1]), torch.int64, logits)
    check_ids(where, "tokens", tokens, logits.shape[-1] - 1)
    return _by_rows(cross_entropy_fwd, logits, tokens)[0].neg()


def _by_rows(kernel: Any, logits: Tensor, tokens: Tensor) -> list[Tensor]:
    """The results of a kernel of losses, in the shape of tokens."""
    rows, of_rows = logits.reshape(-1, logits.shape[-1]), tokens.reshape(-1)
    if len(rows) == 1:  # one row alone torch adds up in parts, by threads
        rows, of_rows = rows.expand(2, -1), of_rows.expand(2)
    # a row's bits do not depend on its place, but for entropies on Triton
    with pinning_where_served(rows) if kernel is cross_entropy_fwd or rows.is_cpu else nullcontext():
        found = kernel(rows, of_rows, 0.0, -100, 0.0)
    return [t[: tokens.numel()].view(*tokens.shape, *t.shape[1:]) for t in found]


def sampled(logits: Tensor, tokens: Tensor, entropy: bool) -> Sampled:
    """The values that `generate` yields with tokens drawn from logits [B, V], in one pass over these."""
    losses, _, *entropies = _by_rows(entropy_fwd if entropy else cross_entropy_fwd, logits, tokens)
    return Sampled(tokens, losses.neg(), *entropies)


def sample(logits: Tensor, key: Tensor | None, cfg: SamplingConfig, seen: Tensor | None = None) -> Tensor:
    """Draw a token for each row of logits [B, V] -> [B], int64, by one uniform number from `key`: the first token whose cumulated
    probability is above it. At temperature 0 the key is not used, and may be None. Logits of inf share all the probability of their
    row. `seen` [B, V], bool: the tokens that a repetition penalty applies to.

    Raises `ValueError` or `TypeError` for a wrong shape or dtype, or without a key; on the CPU also for a NaN, and for a row of
    -inf alone. On a device, which the call does not wait for, or under recording, a NaN counts as -inf, and the tokens of a row
    of -inf alone are equally likely.

    >>> import torch
    >>> from funcops import random
    >>> from funcops.models import SamplingConfig, sample
    >>> logits = torch.tensor([[0.0, 3.0, 3.0]])
    >>> sample(logits, None, SamplingConfig()), sample(logits, random.key(0), SamplingConfig(temperature=1.0, top_k=1))
    (tensor([1]), tensor([1]))
    """
    where = "sample"
    require_type(where, "cfg", cfg, SamplingConfig)
    check(where, "logits", logits, (...,), FLOATS)
    if logits.dim() != 2 or logits.shape[1] == 0:
        fail(where, "logits", "[B, V]", list(logits.shape))
    if cfg.temperature > 0 or key is not None:
        random.check_key(where, key)
        check(where, "key", key, (2,), torch.int64, logits)
    if seen is not None or cfg.repetition_penalty != 1:
        check(where, "seen", seen, tuple(logits.shape), torch.bool, logits)
    u = None if key is None else random.uniform(key, (logits.shape[0], 1), dtype=torch.float64)
    return drawn(where, logits, u, cfg, seen)


def drawn(where: str, logits: Tensor, u: Tensor | None, cfg: SamplingConfig, seen: Tensor | None) -> Tensor:
    """`sample` with the uniform numbers u [B, 1], float64."""
    logits = logits.masked_fill(_checked_nan(where, logits), -torch.inf)
    if seen is not None and cfg.repetition_penalty != 1:
        logits, penalty = logits.to(torch.float64), cfg.repetition_penalty
        logits = torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
    if cfg.temperature == 0:
        return logits.argmax(1)
    assert u is not None
    p, order = torch.softmax(_below_highest(logits.to(torch.float64)) / cfg.temperature, 1), None
    if cfg.min_p is not None:
        unlikely = p < cfg.min_p * p.amax(1, keepdim=True)
    if cfg.top_k is not None or cfg.top_p is not None:
        p, order = torch.sort(p, dim=1, descending=True, stable=True)
        before = p.cumsum(1) - p
        if cfg.top_k is not None and cfg.top_k < p.shape[1]:
            p = p.masked_fill(torch.arange(p.shape[1], device=p.device) >= cfg.top_k, 0.0)
        if cfg.top_p is not None:
            mass = p.sum(1, keepdim=True)
            p = p.masked_fill(before >= cfg.top_p * mass, 0.0)
    if cfg.min_p is not None:  # of the probabilities before the other filters, which only scale what they keep
        p = p.masked_fill(unlikely if order is None else unlikely.gather(1, order), 0.0)
    total = p.cumsum(1)
    whole = total[:, -1:].contiguous()
    place = torch.searchsorted(total, u * whole, right=True)
    last = torch.searchsorted(total, whole)  # the last token that has any probability
    place = torch.minimum(place, last)
    return (place if order is None else order.gather(1, place)).squeeze(1)


def _checked_nan(where: str, logits: Tensor) -> Tensor:
    """The mask of NaNs. On the CPU a NaN raises, and so does a row of -inf alone."""
    nan = logits.isnan()
    if readable(logits) and logits.shape[0]:
        require(not nan.any(), where, "logits", "without NaN", f"one in row {int(nan.any(1).int().argmax())}")
        none = (logits == -torch.inf).all(1)
        got = f"-inf alone in row {int(none.int().argmax())}"
        require(not none.any(), where, "logits", "above -inf for some token of each row", got)
    return nan


def _below_highest(logits: Tensor) -> Tensor:
    """Subtract the highest logit of each row, so that no temperature overflows: 0 for the highest, even if it is inf or -inf."""
    highest = logits.amax(1, keepdim=True)
    return torch.where(logits == highest, 0.0, logits - highest)
