"""The experts of a mixture as a chain of steps, which can be replaced and inspected; `experts` does the same in one op.

    order, place = the choices sorted by expert      z = x[token] up_e^T      a = s f(g) l of z = (g, l)      y = sum of a down_e^T

With weights_on="input" a step "weigh" multiplies the rows of z by s, in place of a's.

Params have the same paths as in `experts`, `up.weight` to `down.bias`, so that each loads the other's checkpoints. It keeps the
same bytes: z, two int32 a row, and offsets, as the GLU's output is recomputed.
"""

from __future__ import annotations

from typing import Any

from funcops.compose.chain import ChainConfig
from funcops.compose.step import Step
from funcops.errors import require_type
from funcops.ops.experts import ExpertsConfig
from funcops.ops.glu import GLUConfig, glu
from funcops.ops.grouped_linear import GroupedLinearConfig, grouped_linear
from funcops.ops.permute import PermuteConfig, permute
from funcops.ops.row_scale import RowScaleConfig, row_scale
from funcops.ops.unpermute import UnpermuteConfig, unpermute

__all__ = ["plain_experts"]


def plain_experts(cfg: ExpertsConfig) -> ChainConfig:
    """The chain that computes `experts` of `cfg`: x is `WithExtras(weights, {"tokens": x, "indices": indices})`, y: [*, H].
    Params: `up` and `down`, each `GroupedLinearParams`. Fused, it runs the kernels of `experts`. Raises `TypeError` unless `cfg` is
    an `ExpertsConfig`.

    >>> import torch
    >>> from funcops import ExpertsConfig, WithExtras, chain, random
    >>> from funcops.models import plain_experts
    >>> cfg = plain_experts(ExpertsConfig(4, dim=8, hidden=16))
    >>> params = chain.init(cfg, key=random.key(0))
    >>> indices = torch.tensor([[0, 2], [2, 3], [1, 2]], dtype=torch.int32)
    >>> y, residuals = chain.fwd(params, WithExtras(torch.rand(3, 2), {"tokens": torch.ones(3, 8), "indices": indices}), cfg)
    >>> [step.name for step in cfg.steps], residuals["act"].x.shape
    (['sort', 'up', 'act', 'down', 'combine'], torch.Size([6, 32]))
    """
    require_type("plain_experts", "cfg", cfg, ExpertsConfig)
    rows, numbers = ("offsets", "order", "place"), ("order", "weights")
    up = GroupedLinearConfig(cfg.experts, cfg.dim, 2 * cfg.hidden, bias=cfg.bias, gathered=True)
    before = cfg.weights_on == "input"
    how: dict[str, Any] = dict(scaled=not before, gathered=not before, limit=cfg.limit, alpha=cfg.alpha, offset=cfg.offset)
    act = GLUConfig(kind=cfg.kind, gate="first", **how)
    weigh = Step("weigh", row_scale, RowScaleConfig(gathered=True), takes=numbers[::-1])
    down = GroupedLinearConfig(cfg.experts, cfg.hidden, cfg.dim, bias=cfg.bias, weighted=cfg.bias)
    steps = (
        Step("sort", permute, PermuteConfig(cfg.experts, gathered=True), takes=("tokens", "indices"), gives=("weights", *rows)),
        Step("up", grouped_linear, up, takes=rows),
        *((weigh, Step("act", glu, act)) if before else (Step("act", glu, act, takes=numbers[::-1]),)),
        Step("down", grouped_linear, down, takes=("offsets", *numbers) if cfg.bias else ("offsets",)),
        Step("combine", unpermute, UnpermuteConfig(), takes=("place",)),
    )
    return ChainConfig(steps=steps, extras=("tokens", "indices"))
