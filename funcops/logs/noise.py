"""The gradient noise scale, from the gradients of a step's microbatches (McCandlish et al. 2018, arXiv 1812.06162, appendix A.1).

    |G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b)        S = (|G_b|^2 - |G_B|^2) / (1 / b - 1 / B)        B_noise = S / |G|^2

G_b is the gradient of the mean loss of b examples, G_B of B, the whole batch; |G|^2 and S, the sum of the variances of an example's
gradient, are unbiased. Below B_noise a larger batch saves steps, above it saves few.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops.engine.compose.chain import ChainConfig
from funcops.engine.contract.walk import nested
from funcops.engine.errors import FLOATS, check, describe, fail, require, require_count, require_type
from funcops.engine.program.values import has_params
from funcops.logs.rewrite import places_of, repeats


class Noise(NamedTuple):
    """`noise`: S, `signal`: |G|^2, [] each. Both vary much from step to step: average each over steps, and divide the averages.

    >>> import torch
    >>> from funcops.logs import Noise
    >>> found = Noise(torch.tensor(8.0), torch.tensor(2.0))
    >>> found.scale
    tensor(4.)
    """

    noise: Tensor
    signal: Tensor

    @property
    def scale(self) -> Tensor:
        """B_noise, in examples. Of one step alone it may be negative."""
        return self.noise / self.signal


def gradient_noise(small: Tensor, big: Tensor, *, batch_small: int, batch_big: int) -> Noise:
    """Return the noise and the signal of a step's gradients. `small`: the norms [M] of the gradients of its microbatches, each of
    the mean loss of `batch_small` examples; `big`: the norm [] of the gradient of the mean loss of all, `batch_big` examples.
    Examples are drawn independently: sequences, not tokens.

    No host sync. Raises `ValueError` or `TypeError` for norms of other shapes, and unless `batch_big` is the larger.

    >>> import torch
    >>> from funcops.logs import gradient_noise
    >>> gradient_noise(torch.tensor([3.0, 3.0]), torch.tensor(2.0), batch_small=1, batch_big=2)
    Noise(noise=tensor(10.), signal=tensor(-1.))
    """
    where = "gradient_noise"
    require_count(where, batch_small=batch_small, batch_big=batch_big)
    require(batch_big > batch_small, where, "batch_big", f"more than batch_small, {batch_small}", batch_big)
    check(where, "small", small, (...,), FLOATS)
    require(small.dim() == 1, where, "small", "[M]", describe(small))
    check(where, "big", big, (), FLOATS, small)
    of_small, of_big = small.square().mean(), big.square()
    signal = (batch_big * of_big - batch_small * of_small) / (batch_big - batch_small)
    return Noise((of_small - of_big) / (1 / batch_small - 1 / batch_big), signal)


def param_logs(cfg: Any) -> dict[str, tuple[str, ...]]:
    """Return the logs, for `with_logs`, that have each param of a chain in one `dw_norm`: of its steps, and of the layers of its
    repeats. `total_norm` joins them. Raises `TypeError` for another config, `ValueError` for a chain with ties, as the norm of a
    sum is not known from its terms.

    >>> from funcops import ChainConfig, LinearConfig, RepeatConfig, ScaleConfig, Step, linear, repeat, scale
    >>> from funcops.logs import param_logs
    >>> steps = Step("up", linear, LinearConfig(2, 2)), Step("layers", repeat, RepeatConfig(linear, LinearConfig(2, 2), 3))
    >>> param_logs(ChainConfig(steps=(*steps, Step("double", scale, ScaleConfig(2.0)))))
    {'up': ('dw_norm',), 'layers.*': ('dw_norm',)}
    """
    require_type("param_logs", "cfg", cfg, ChainConfig)
    if cfg.ties:
        fail("param_logs", "cfg", "a chain without ties", f"ties of {', '.join(path for path, _ in cfg.ties)}")
    every = [part for part, _ in nested(cfg, stop=lambda part: bool(part.path) and not repeats(part))]
    found = [part.path for part in every[1:] if not repeats(part) and has_params(part.op, part.cfg)]
    require(bool(found), "param_logs", "cfg", "a chain with params", describe(cfg))
    return {path: ("dw_norm",) for path in found}


def total_norm(logs: Mapping[str, Mapping[str, Tensor]], cfg: Any) -> Tensor:
    """The norm of all gradients whose `dw_norm` is in `logs`, from `split_logs(..., cfg)`: [], or [runs] for more than one. Raises
    `ValueError` without one.

    >>> import torch
    >>> from funcops import ChainConfig, LinearConfig, RepeatConfig, Step, linear, repeat
    >>> from funcops.logs import param_logs, total_norm, with_logs
    >>> steps = Step("up", linear, LinearConfig(2, 2)), Step("layers", repeat, RepeatConfig(linear, LinearConfig(2, 2), 2))
    >>> model = ChainConfig(steps=steps)
    >>> cfg = with_logs(model, param_logs(model))
    >>> total_norm({"up": {"dw_norm": torch.tensor(3.0)}, "layers.*": {"dw_norm": torch.tensor([0.0, 4.0])}}, cfg)
    tensor(5.)
    """
    require_type("total_norm", "logs", logs, Mapping)
    runs = {place.key: place.cfg.runs for place in places_of("total_norm", cfg)}
    found = {path: named["dw_norm"] for path, named in logs.items() if path in runs and "dw_norm" in named}
    require(bool(found), "total_norm", "logs", "logs of cfg with a dw_norm, as of param_logs", describe(logs))
    for path, t in found.items():
        check("total_norm", f"logs[{path!r}]['dw_norm']", t, (...,), FLOATS)
    found = {path: t.square() for path, t in found.items()}
    each = [t.sum() if runs[path] == 1 else t.reshape(-1, runs[path]).sum(0) for path, t in found.items()]
    return torch.stack(each).sum(0).sqrt()
