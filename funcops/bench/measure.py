"""Rows, interleaved timing, and the Llama block that the benches share."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcops import (
    AttentionConfig,
    ChainConfig,
    GLUConfig,
    LinearConfig,
    ParallelConfig,
    ReshapeConfig,
    RMSNormConfig,
    RopeConfig,
    SkipConfig,
    Step,
    attention,
    chain,
    glu,
    linear,
    parallel,
    reshape,
    rms_norm,
    rope,
    skip,
)


@dataclasses.dataclass(frozen=True)
class Row:
    bench: str
    case: str
    provider: str
    metric: str
    value: float
    unit: str


def interleaved(functions: dict[str, Callable[[], Any]], *, rounds: int, calls: int) -> dict[str, list[float]]:
    """Microseconds a call, a sample a round, the functions taking turns."""
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for fn in functions.values():
        for _ in range(calls // 4 + 1):
            fn()
    for _ in range(rounds):
        for name, fn in functions.items():
            start = time.perf_counter()
            for _ in range(calls):
                fn()
            samples[name].append((time.perf_counter() - start) / calls * 1e6)
    return samples


def summary(bench: str, case: str, samples: dict[str, list[float]], ours: str, unit: str = "us") -> list[Row]:
    """Medians, quartile spreads, and the ratio of ours to the fastest other, paired by round."""
    rows = []
    for name, values in samples.items():
        low, middle, high = statistics.quantiles(values, n=4)
        rows.append(Row(bench, case, name, "median", middle, unit))
        rows.append(Row(bench, case, name, "quartile spread", high - low, unit))
    others = {name: statistics.median(v) for name, v in samples.items() if name != ours}
    rival = min(others, key=lambda name: others[name])
    ratios = [a / b for a, b in zip(samples[ours], samples[rival], strict=True)]
    rows.append(Row(bench, case, ours, f"ratio to {rival}", statistics.median(ratios), ""))
    return rows


def mlp_config(dim: int, hidden: int) -> ChainConfig:
    return ChainConfig(
        steps=(
            Step("norm", rms_norm, RMSNormConfig(dim, eps=1e-5)),
            Step("up", linear, LinearConfig(dim, 2 * hidden, bias=False)),
            Step("act", glu, GLUConfig(kind="swiglu", gate="first")),
            Step("down", linear, LinearConfig(hidden, dim, bias=False)),
        )
    )


def block_config(dim: int, heads: int, hidden: int) -> ChainConfig:
    """A Llama block; positions are an extra."""
    size = dim // heads

    def projection(turned: bool) -> ChainConfig:
        steps = (
            Step("proj", linear, LinearConfig(dim, dim, bias=False)),
            Step("heads", reshape, ReshapeConfig((dim,), (heads, size))),
            Step("rope", rope, RopeConfig(size), takes=("positions",)),
        )
        return ChainConfig(steps=steps if turned else steps[:2], extras=("positions",) if turned else ())

    branches = tuple(Step(name, chain, projection(name != "v")) for name in "qkv")
    attn = ChainConfig(
        steps=(
            Step("norm", rms_norm, RMSNormConfig(dim, eps=1e-5)),
            Step("qkv", parallel, ParallelConfig(branches=branches)),
            Step("mix", attention, AttentionConfig(causal=True)),
            Step("merge", reshape, ReshapeConfig((heads, size), (dim,))),
            Step("out", linear, LinearConfig(dim, dim, bias=False)),
        ),
        extras=("positions",),
    )
    steps = (Step("attn", skip, SkipConfig(chain, attn)), Step("mlp", skip, SkipConfig(chain, mlp_config(dim, hidden))))
    return ChainConfig(steps=steps, extras=("positions",))


class PlainMLP(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class PlainBlock(nn.Module):
    """The same block in torch.nn, its rotation tables made once."""

    def __init__(self, dim: int, heads: int, hidden: int, length: int) -> None:
        super().__init__()
        self.size = dim // heads
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.mlp = PlainMLP(dim, hidden)
        angle = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, self.size, 2) / self.size)
        self.cos, self.sin = angle.cos()[:, None], angle.sin()[:, None]

    def turn(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        q, k, v = (p(n).unflatten(-1, (-1, self.size)) for p in (self.q, self.k, self.v))
        q, k, v = self.turn(q).transpose(1, 2), self.turn(k).transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)
