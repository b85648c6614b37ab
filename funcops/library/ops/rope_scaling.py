"""Rope for longer sequences than a model was trained on: the frequencies f_i of its pairs, i < R/2, and a factor of the table.

    plain     f_i = theta^(-2i / R)                                        factor 1, as for all but yarn and longrope
    linear    f_i / factor                                                 (arXiv:2306.15595)
    dynamic   theta times (factor s - factor + 1)^(R / (R - 2)),           s = length / original_context, at least 1
    yarn      (1 - r_i) f_i + r_i f_i / factor, r_i a ramp from 0 to 1     (arXiv:2309.00071)
              between the pairs that rotate beta_fast and beta_slow times within the original context
    longrope  f_i / short_factor_i, or long_factor_i beyond the original context       (arXiv:2402.13753)
    llama3    f_i where the wave is short, f_i / factor where it is long, between them a mean of both

The arithmetic follows `transformers.modeling_rope_utils` operation by operation, so that tables are equal to Hugging Face's. That
module measures the length of a sequence; here the config states it, so that passes over chunks rotate like one over the whole.
"""

from __future__ import annotations

import math
from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from funcops.engine.contract.configs import config
from funcops.engine.errors import require
from funcops.library.kernels.rope import frequencies as plain_frequencies
from funcops.library.kernels.rope import powers

__all__ = ["DynamicScaling", "LinearScaling", "Llama3Scaling", "LongRopeScaling", "YarnScaling"]


def check_factor(where: str, factor: float) -> None:
    require(1 <= factor < math.inf, where, "factor", "at least 1, and finite", factor)


def check_positive(where: str, cfg: Any, *names: str) -> None:
    for name in names:
        value = getattr(cfg, name)
        require(value is None or 0 < value < math.inf, where, name, "above 0, and finite", value)


@config
class LinearScaling:
    """Divide all frequencies by `factor`, as if positions were closer together.

    >>> import torch
    >>> from funcops import LinearScaling, RopeConfig, rope_table
    >>> cfg = RopeConfig(4, scaling=LinearScaling(2.0))
    >>> rope_table(torch.tensor([4]), cfg).equal(rope_table(torch.tensor([2]), RopeConfig(4)))
    True
    """

    factor: float = field(kw_only=False)

    def __post_init__(self) -> None:
        check_factor("LinearScaling", self.factor)

    def frequencies(self, theta: float, size: int, dtype: torch.dtype, device: Any) -> Tensor:
        return plain_frequencies(theta, size, dtype, device) / self.factor

    def table_factor(self) -> float:
        return 1.0


@config
class DynamicScaling:
    """Increase theta with `length`, the longest sequence that will occur, if it exceeds `original_context` (by default nothing
    changes).

    >>> import torch
    >>> from funcops import DynamicScaling
    >>> scaling = DynamicScaling(2.0, original_context=1024, length=2048)
    >>> scaling.frequencies(100.0, 4, torch.float32, None) * torch.tensor([1.0, 10.0])
    tensor([1.0000, 0.3333])
    """

    factor: float = field(kw_only=False)
    original_context: int
    length: int | None = None

    def __post_init__(self) -> None:
        check_factor("DynamicScaling", self.factor)
        check_positive("DynamicScaling", self, "original_context", "length")

    def frequencies(self, theta: float, size: int, dtype: torch.dtype, device: Any) -> Tensor:
        longest = max(self.length or 0, self.original_context)
        if longest == self.original_context:  # the factor is 1, which the difference below may miss by rounding
            return plain_frequencies(theta, size, dtype, device)
        theta = theta * (self.factor * longest / self.original_context - (self.factor - 1)) ** (size / (size - 2))
        return plain_frequencies(theta, size, dtype, device)

    def table_factor(self) -> float:
        return 1.0


@config
class YarnScaling:
    """Divide the frequencies of slow pairs by `factor`, and keep fast ones. The table's factor is `attention_factor`, by default
    1 + 0.1 ln(factor), or with both `mscale` and `mscale_all_dim` (DeepSeek) the quotient of 1 + 0.1 m ln(factor) for the two.
    `truncate`: the ramp begins and ends at whole pairs (GPT-OSS: False).

    >>> import torch
    >>> from funcops import YarnScaling
    >>> scaling = YarnScaling(4.0, original_context=64, truncate=False)
    >>> times_plain = scaling.frequencies(10000.0, 8, torch.float32, None) * torch.tensor([1.0, 10.0, 100.0, 1000.0])
    >>> times_plain, round(scaling.table_factor(), 4)
    (tensor([1.0000, 0.2560, 0.2500, 0.2500]), 1.1386)
    """

    factor: float = field(kw_only=False)
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        check_factor("YarnScaling", self.factor)
        check_positive(
            "YarnScaling", self, "original_context", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"
        )
        require(self.beta_slow >= 1e-30, "YarnScaling", "beta_slow", "at least 1e-30", self.beta_slow)
        fast = self.beta_fast >= self.beta_slow
        require(fast, "YarnScaling", "beta_fast", f"at least beta_slow ({self.beta_slow})", self.beta_fast)

    def _pair_that_turns(self, times: float, theta: float, size: int) -> float:
        """The index of the pair that rotates so many times within the original context."""
        return size * math.log(self.original_context / (times * 2 * math.pi)) / (2 * math.log(theta))

    def frequencies(self, theta: float, size: int, dtype: torch.dtype, device: Any) -> Tensor:
        low, high = (self._pair_that_turns(times, theta, size) for times in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        high = high + 0.001 if high == low else high
        ramp = ((torch.arange(size // 2, dtype=dtype, device=device) - low) / (high - low)).clamp(0, 1)
        of_pairs, kept = powers(theta, size, dtype, device), 1 - ramp
        return 1.0 / (self.factor * of_pairs) * (1 - kept) + 1.0 / of_pairs * kept

    def _grown(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0

    def table_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is not None and self.mscale_all_dim is not None:
            return self._grown(self.mscale) / self._grown(self.mscale_all_dim)
        return self._grown(1.0)


@config
class LongRopeScaling:
    """Divide each pair's frequency by its `long_factor` if `length`, the longest sequence that will occur, exceeds
    `original_context`, else by its `short_factor` (default). The table's factor is `attention_factor`, by default
    sqrt(1 + ln(factor) / ln(original_context)), with `factor` the ratio of the new context to the original one.

    >>> import torch
    >>> from funcops import LongRopeScaling
    >>> scaling = LongRopeScaling(short_factor=(1.0, 1.0), long_factor=(2.0, 4.0), original_context=16, factor=4.0, length=64)
    >>> scaling.frequencies(100.0, 4, torch.float32, None) * torch.tensor([1.0, 10.0]), round(scaling.table_factor(), 4)
    (tensor([0.5000, 0.2500]), 1.2247)
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_context: int
    factor: float
    length: int | None = None
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        check_factor("LongRopeScaling", self.factor)
        check_positive("LongRopeScaling", self, "length", "attention_factor")
        at_least = self.original_context >= 2
        require(at_least, "LongRopeScaling", "original_context", "at least 2", self.original_context)
        for name in ("short_factor", "long_factor"):
            each = getattr(self, name)
            right = isinstance(each, tuple) and all(type(f) in (int, float) and 0 < f < math.inf for f in each)
            require(right, "LongRopeScaling", name, "a tuple of numbers above 0", each)
        same = len(self.short_factor) == len(self.long_factor)
        require(same, "LongRopeScaling", "long_factor", f"of {len(self.short_factor)} numbers", len(self.long_factor))

    def frequencies(self, theta: float, size: int, dtype: torch.dtype, device: Any) -> Tensor:
        divisors = self.long_factor if (self.length or 0) > self.original_context else self.short_factor
        # filled in on the device, as copying a list would wait for it
        of_pairs = torch.stack([torch.scalar_tensor(d, dtype=dtype, device=device) for d in divisors])
        return 1.0 / (of_pairs * powers(theta, size, dtype, device))

    def table_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_context))


@config
class Llama3Scaling:
    """Keep waves of up to original_context / high_freq_factor positions, and stretch by `factor` those beyond
    original_context / low_freq_factor.

    >>> import torch
    >>> from funcops import Llama3Scaling
    >>> scaling = Llama3Scaling(8.0, original_context=64)
    >>> scaling.frequencies(10000.0, 4, torch.float32, None) * torch.tensor([1.0, 100.0])
    tensor([1.0000, 0.1250])
    """

    factor: float = field(kw_only=False)
    original_context: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        check_factor("Llama3Scaling", self.factor)
        check_positive("Llama3Scaling", self, "original_context", "low_freq_factor", "high_freq_factor")
        above = self.high_freq_factor > self.low_freq_factor
        require(
            above, "Llama3Scaling", "high_freq_factor", f"above low_freq_factor ({self.low_freq_factor})", self.high_freq_factor
        )

    def frequencies(self, theta: float, size: int, dtype: torch.dtype, device: Any) -> Tensor:
        plain, context = plain_frequencies(theta, size, dtype, device), self.original_context
        wave, longest = 2 * math.pi / plain, context / self.low_freq_factor
        stretched = torch.where(wave > longest, plain / self.factor, plain)
        part = (context / wave - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        between = (1 - part) * stretched / self.factor + part * stretched
        return torch.where((wave < context / self.high_freq_factor) | (wave > longest), stretched, between)

    def table_factor(self) -> float:
        return 1.0


Scaling = LinearScaling | DynamicScaling | YarnScaling | LongRopeScaling | Llama3Scaling
SCALINGS = (LinearScaling, DynamicScaling, YarnScaling, LongRopeScaling, Llama3Scaling)
