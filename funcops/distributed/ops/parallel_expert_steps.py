"""Experts that are sharded over an axis, as the steps of `parallel_experts`, some of them replaced, for example by steps in low
precision:

    there    dispatch: a token, with its weights, to each rank that has one of its experts
    ...      the steps of `plain_experts`, for the rows that came and this rank's E/n experts
    back     combine: the sum of the ranks' results for a token

x, y and params are as in `parallel_experts`, residuals and pending as in the chain. The rows of an expert are in the order of the
ranks and of their tokens, as in one process that has all tokens: codes are the same.

Where `up` takes codes (`OpConfig.takes_codes`: `Fp8Block`, whose scales are within a row, and whose dw reads codes by rows), tokens
are sent as these: all results keep their bits. Other recipes need x itself there, for a scale of all rows of an expert or for
blocks along them, and get it. Backward x's dtype is sent: dx is a sum, and of dy dw's operand has blocks along rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from funcops.distributed.init import init_part
from funcops.distributed.mesh import Axis
from funcops.distributed.ops.combine import CombineConfig, combine
from funcops.distributed.ops.dispatch import DispatchConfig, dispatch
from funcops.distributed.ops.parallel_experts import ParallelExpertsConfig, parallel_experts
from funcops.distributed.specs import Spec
from funcops.engine.compose.chain import ChainConfig
from funcops.engine.compose.step import Step
from funcops.engine.contract.configs import fields_of
from funcops.engine.contract.op import Op, config, init_of
from funcops.engine.contract.walk import Part, rewrite
from funcops.engine.errors import require
from funcops.engine.trees import paths
from funcops.library.ops.expert_steps import BY_STEPS, EXTRAS, ExpertStepsConfig, expert_steps_init, plain_experts, steps_op

SENT = "rows", "chosen", "sent", "sizes"


@config
class ParallelExpertStepsConfig(ExpertStepsConfig):
    """`cfg`: the chain of a rank's steps; `axis`: the axis that shards the experts."""

    axis: Axis

    def __post_init__(self) -> None:
        super().__post_init__()
        first, up = self.cfg.steps[0], next(step.cfg for step in self.cfg.steps if step.name == "up")
        if first.cfg.format != up.takes_codes:
            sent = dataclasses.replace(first, cfg=dataclasses.replace(first.cfg, format=up.takes_codes))
            object.__setattr__(self, "cfg", dataclasses.replace(self.cfg, steps=(sent, *self.cfg.steps[1:])))

    @property
    def specs(self) -> dict[str, Spec]:
        """The specs of the params, which are all sharded, by path."""
        return {path: Spec(self.axis.name, 0) for path, t in paths(self.abstract()).items() if t is not None}


def _times(cfg: ChainConfig, factor: Callable[[int], int]) -> ChainConfig:
    """The chain for another number of experts."""

    def of(part: Part) -> Any:
        if part.composite or "experts" not in fields_of(part.cfg):
            return None
        return part.op, dataclasses.replace(part.cfg, experts=factor(part.cfg.experts))

    return rewrite(cfg, of)[1]  # type: ignore[no-any-return]


def sharded_steps(cfg: ChainConfig, axis: Axis, capacity: float | None = None) -> ParallelExpertStepsConfig:
    """The config of a rank, from the chain of one process. Raises `ValueError` if the ranks do not divide the experts."""
    sort = cfg.steps[0]
    own = Step("there", dispatch, DispatchConfig(sort.cfg.experts, axis=axis, capacity=capacity), takes=EXTRAS, gives=SENT)
    inner = _times(cfg, lambda experts: experts // axis.size).steps
    back = Step("back", combine, CombineConfig(axis), takes=SENT[2:])
    return ParallelExpertStepsConfig(
        dataclasses.replace(cfg, steps=(own, dataclasses.replace(inner[0], takes=SENT[:2]), *inner[1:], back)), axis=axis
    )


@init_of(ParallelExpertStepsConfig)
def parallel_expert_steps_init(cfg: ParallelExpertStepsConfig, *, key: Any = None, device: Any = None, dtype: Any = None) -> Any:
    """This rank's part of the params that `expert_steps` draws with the same key, on every mesh."""
    whole = ExpertStepsConfig(_times(cfg.cfg, lambda experts: experts * cfg.axis.size))
    return init_part(cfg, lambda: expert_steps_init(whole, key=key, device=device, dtype=dtype))


parallel_expert_steps = steps_op("parallel_expert_steps", ParallelExpertStepsConfig, parallel_expert_steps_init)


def _of(cfg: ParallelExpertsConfig) -> tuple[Op, Op, ExpertStepsConfig]:
    wanted = "'experts' with a recipe or adapters, whose steps have no gather of all three inputs"
    require(cfg.shards == "experts", "ParallelExpertsConfig", "shards", wanted, repr(cfg.shards))
    whole = plain_experts(dataclasses.replace(cfg.own, experts=cfg.experts))
    return parallel_experts, parallel_expert_steps, sharded_steps(whole, cfg.axis, cfg.capacity)


BY_STEPS[ParallelExpertsConfig] = _of
