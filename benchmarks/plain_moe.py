"""A mixture of experts in plain PyTorch, under autograd: every expert computes every token. It shares no code with funcops.

T tokens of width H, E experts of hidden size I; each token goes to K of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Router(NamedTuple):
    """How the K of E experts are chosen; the fields have the names of `funcops.RouteConfig`."""

    experts: int
    top_k: int
    score: str = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    aux: float = 0.0
    z: float = 0.0


def routed(logits: Tensor, bias: Tensor | None, by: Router) -> tuple[Tensor, Tensor, Tensor]:
    """From logits [T, E] compute the weight of each expert for each token [T, E], 0 if it was not chosen; how often each was chosen
    [E]; and the loss."""
    scores = logits.softmax(-1) if by.score == "softmax" else logits.sigmoid()
    choice = scores.detach() if bias is None else scores.detach() + bias
    if by.groups > 1:
        best = choice.unflatten(-1, (by.groups, -1)).topk(2).values.sum(-1).topk(by.top_groups).indices
        inside = torch.zeros_like(choice[:, : by.groups]).scatter(1, best, 1.0).repeat_interleave(by.experts // by.groups, 1)
        choice = choice.masked_fill(inside == 0, float("-inf"))
    chosen = torch.zeros_like(choice).scatter(1, choice.topk(by.top_k).indices, 1.0)
    weights = scores * chosen
    if by.normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    counts, tokens = chosen.sum(0), max(1, len(logits))
    share = scores / scores.sum(-1, keepdim=True)
    loss = by.aux * by.experts / (by.top_k * tokens**2) * (counts * share.sum(0)).sum()
    return weights * by.scale, counts, loss + by.z * logits.logsumexp(-1).square().sum() / tokens


def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """SwiGLU: up [2I, H], the gate's rows first, down [H, I]."""
    gate, linear = F.linear(x, up).chunk(2, -1)
    return F.linear(F.silu(gate) * linear, down)


def mixture(x: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """x: [T, H], weights: [T, E], up: [E, 2I, H], down: [E, H, I] -> [T, H]."""
    total = torch.zeros_like(x)
    for e in range(len(up)):
        total = total + weights[:, e, None] * mlp(x, up[e], down[e])
    return total


class Weights(nn.Module):
    """A matrix for each expert."""

    def __init__(self, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))


class Experts(nn.Module):
    def __init__(self, experts: int, dim: int, hidden: int):
        super().__init__()
        self.up, self.down = Weights(experts, 2 * hidden, dim), Weights(experts, dim, hidden)


class Mixture(nn.Module):
    """Replaces `benchmarks.plain.MLP`, including its norm; `bias` is a buffer, `load` and `loss` come from the last call."""

    def __init__(self, norm: nn.Module, dim: int, hidden: int, shared: int, by: Router):
        super().__init__()
        self.norm, self.by = norm, by
        self.gate = nn.Linear(dim, by.experts, bias=False)
        self.route: Any = nn.Module()
        self.route.register_buffer("bias", torch.zeros(by.experts))
        self.experts = Experts(by.experts, dim, hidden)
        self.shared: Any = None
        if shared:
            self.shared = nn.Module()
            self.shared.up, self.shared.down = nn.Linear(dim, 2 * shared, bias=False), nn.Linear(shared, dim, bias=False)
        self.load: Tensor | None = None
        self.loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, -2)
        weights, self.load, self.loss = routed(self.gate(rows), self.route.bias, self.by)
        y = mixture(rows, weights, self.experts.up.weight, self.experts.down.weight)
        if self.shared is not None:
            y = y + mlp(rows, self.shared.up.weight, self.shared.down.weight)
        return y.view_as(x)
