"""`with_invariant`: the config of a model whose rows have the same bits whatever else is in the batch."""

from __future__ import annotations

import dataclasses
from typing import Any

from funcops.engine.compose.chain import ChainConfig, chain
from funcops.engine.contract.configs import require_config
from funcops.invariant.pinned import PinnedConfig, pinned, require_apart
from funcops.library.kernels.pins import Pins, check_pins

__all__ = ["with_invariant"]


def with_invariant(cfg: Any, *, rows: int = 128, queries: int = 128) -> ChainConfig:
    """Return the config of a chain whose steps run in blocks of constant sizes, so that a row's y and dx have the same bits
    whatever else is in the batch: the number of other rows, their values, padding, documents packed beside it and, with causal
    attention, what comes after a position, how a prompt is cut into chunks, and the cache that holds the keys.

    `rows`: of a product at a time; more are faster in training, fewer in decoding. `queries`: of attention at a time. Sizes change
    the bits: training and decoding must have the same. Params, and their paths, stay. Each step runs as one call of its own, and no
    rule of fusion runs inside. Apply it after other rewrites. It promises this on the CPU, in one process, for one version of torch
    and one number of threads, and nothing of gradients of params, which are sums over all rows. On a device Triton's kernels keep
    to it by design, whatever `rows` and `queries` are; none has confirmed the bits (`funcops.models.check_invariant` tries it).

    Raises `TypeError` for another config than a chain's; `ValueError` for sizes that are not served and, by its path, for a part
    that lets rows depend on each other: a mean over rows, losses of a router, a capacity, dropout, scores with a softcap or a bias,
    and every op whose author has not said that it does not (`make_op(..., mixes=...)`).

    >>> import torch
    >>> from funcops import ChainConfig, LinearConfig, RMSNormConfig, Step, chain, linear, random, rms_norm
    >>> from funcops.invariant import with_invariant
    >>> model = ChainConfig(steps=(Step("norm", rms_norm, RMSNormConfig(300)), Step("up", linear, LinearConfig(300, 40))))
    >>> cfg, x = with_invariant(model), torch.randn(20, 300)
    >>> params = chain.init(cfg, key=random.key(0))
    >>> torch.equal(chain.fwd(params, x, cfg)[0][3], chain.fwd(params, x[3:4], cfg)[0][0])
    True
    """
    require_config("with_invariant", cfg, ChainConfig)
    check_pins("with_invariant", Pins(rows, queries))
    require_apart("with_invariant", chain, cfg)
    steps = [step.with_op(pinned, PinnedConfig(step.op, step.cfg, rows=rows, queries=queries)) for step in cfg.as_run().steps]
    return dataclasses.replace(cfg, steps=tuple(steps), joined=())
