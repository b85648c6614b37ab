"""`experts` as the steps of `plain_experts`, some of them replaced, for example by steps in low precision: x, y and params are as
in `experts`, residuals and pending as in the chain."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import field
from typing import Any

from funcops.compose.chain import ChainConfig, chain
from funcops.compose.plain_experts import plain_experts
from funcops.compose.step import Step, WithExtras
from funcops.contract.configs import Composite, Replace
from funcops.contract.needs import Needs, check_needs
from funcops.contract.op import Op, config, init_of, make_op
from funcops.contract.walk import remade
from funcops.errors import describe, fail, require_type
from funcops.ops._tuples import require_tuple
from funcops.ops.experts import ExpertsConfig, ExpertsParams, experts

EXTRAS = "tokens", "indices"


@config
class ExpertStepsConfig(Composite):
    """`cfg`: the chain of the steps."""

    cfg: ChainConfig = field(kw_only=False)

    def __post_init__(self) -> None:
        require_type("ExpertStepsConfig", "cfg", self.cfg, ChainConfig)
        names = {step.name for step in self.cfg.steps}
        if self.cfg.extras != EXTRAS or self.cfg.outputs or not {"up", "down"} <= names:
            fail("ExpertStepsConfig", "cfg", "a chain as plain_experts makes it", f"one of steps {', '.join(names)}")

    @property
    def members(self) -> tuple[Step, ...]:  # type: ignore[override]
        return self.cfg.steps

    def abstract(self) -> Any:
        """See `funcops.program.values.abstract_params`."""
        return _named(self.cfg.abstract())

    def with_parts(self, replace: Replace, **changes: Any) -> ExpertStepsConfig:
        """The config with `replace(name, op, cfg)` for each step; the steps' paths have no further name."""
        return dataclasses.replace(self, cfg=self.cfg.with_parts(replace, **changes))


def _named(by_name: dict[str, Any]) -> ExpertsParams:
    return ExpertsParams(by_name["up"], by_name["down"])


def _by_name(where: str, what: str, params: Any, cfg: ExpertStepsConfig) -> dict[str, Any]:
    if type(params) is not ExpertsParams:
        fail(where, what, "ExpertsParams", describe(params), TypeError)
    return {step.name: getattr(params, step.name, None) for step in cfg.cfg.steps}


@init_of(ExpertStepsConfig)
def expert_steps_init(cfg: ExpertStepsConfig, *, key: Any = None, device: Any = None, dtype: Any = None) -> ExpertsParams:
    """The params of both layers."""
    return _named(chain.init(cfg.cfg, key=key, device=device, dtype=dtype))


def expert_steps_fwd(params: ExpertsParams, x: Any, cfg: ExpertStepsConfig, *, needs: Needs = Needs.ALL) -> tuple[Any, Any]:
    """x: `(weights, x, indices)` -> y: [*, H]. Raises as the steps do."""
    where = "expert_steps_fwd"
    require_type(where, "cfg", cfg, ExpertStepsConfig)
    own, (weights, tokens, indices) = _by_name(where, "params", params, cfg), require_tuple(where, x, "weights", "x", "indices")
    if needs is not Needs.ALL:
        check_needs(where, needs, params, x)
        labels = ("main", *[f"extras.{name}" for name in EXTRAS])
        wanted = [label for i, label in enumerate(labels) if needs.input(i)]
        needs = Needs(x=True if len(wanted) == len(labels) else wanted, params=needs.params)
    return chain.fwd(own, WithExtras(weights, {"tokens": tokens, "indices": indices}), cfg.cfg, needs=needs)


def _as_parts(dx: Any) -> Any:
    return (dx.main, *[dx.extras[name] for name in EXTRAS]) if type(dx) is WithExtras else (None, None, None)


def expert_steps_dgrad(residuals: Any, dy: Any, cfg: ExpertStepsConfig) -> tuple[Any, Any]:
    """dy: [*, H] -> `(d weights, dx, None)`, and the steps' pending."""
    require_type("expert_steps_dgrad", "cfg", cfg, ExpertStepsConfig)
    dx, pending = chain.dgrad(residuals, dy, cfg.cfg)
    return _as_parts(dx), pending


def expert_steps_wgrad(pending: Any, cfg: ExpertStepsConfig, *, into: Any = None) -> ExpertsParams:
    """The weight gradients of both layers; added to `into` if given."""
    where = "expert_steps_wgrad"
    require_type(where, "cfg", cfg, ExpertStepsConfig)
    sums = None if into is None else _by_name(where, "into", into, cfg)
    return _named(chain.wgrad(pending, cfg.cfg, into=sums))


def expert_steps_bwd(residuals: Any, dy: Any, cfg: ExpertStepsConfig, *, into: Any = None) -> tuple[ExpertsParams, Any]:
    """The whole backward. Returns `(dparams, dx)`."""
    where = "expert_steps_bwd"
    require_type(where, "cfg", cfg, ExpertStepsConfig)
    sums = None if into is None else _by_name(where, "into", into, cfg)
    dparams, dx = chain.bwd(residuals, dy, cfg.cfg, into=sums)
    return _named(dparams), _as_parts(dx)


def _products(pending: Any, cfg: ExpertStepsConfig, *, into: Any) -> list[Any]:
    where = "expert_steps_wgrad"
    require_type(where, "cfg", cfg, ExpertStepsConfig)
    return chain.products(pending, cfg.cfg, into=None if into is None else _by_name(where, "into", into, cfg))  # type: ignore[no-any-return]


def steps_op(name: str, config: type, init: Any) -> Op:
    """An op whose config is an `ExpertStepsConfig`."""
    halves: Any = dict(dgrad=expert_steps_dgrad, wgrad=expert_steps_wgrad, bwd=expert_steps_bwd, products=_products)
    return make_op(name, config, init=init, fwd=expert_steps_fwd, **halves)


expert_steps = steps_op("expert_steps", ExpertStepsConfig, expert_steps_init)
BY_STEPS: dict[type, Callable[[Any], tuple[Op, Op, ExpertStepsConfig]]] = {}
"""By the class of a config with `linear_parts`: its op, and the op and config that do the same in steps. The file of each such op
enters it."""
BY_STEPS[ExpertsConfig] = lambda cfg: (experts, expert_steps, ExpertStepsConfig(plain_experts(cfg)))


def by_steps(where: str, op: Op | None, cfg: Any) -> tuple[Op, ExpertStepsConfig]:
    """The op and config that replace an op with `linear_parts`, or an op made from it. Raises `ValueError` for any other op."""
    source, becomes, made = BY_STEPS[type(cfg)](cfg)
    return remade(where, op or source, source, becomes), made
