"""The experts of a mixture as a chain of steps, which can be replaced and inspected; `experts` does the same in one op.

    order, place = the choices sorted by expert      z = x[token] up_e^T      a = s f(g) l of z = (g, l)      y = sum of a down_e^T

With weights_on="input" a step "weigh" multiplies the rows of z by s, in place of a's.

Params have the same paths as in `experts`, `up.weight` to `down.bias`, so that each loads the other's checkpoints. It keeps the
same bytes: z, two int32 a row, and offsets, as the GLU's output is recomputed.

`expert_steps` is for such a chain with some steps replaced, for example by steps in low precision: x, y and params are as in
`experts`, residuals and pending as in the chain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import field
from typing import Any

from funcops.engine.compose.chain import ChainConfig, chain
from funcops.engine.compose.pausing import LOWERED
from funcops.engine.compose.step import Step, WithExtras
from funcops.engine.contract.configs import Composite, Replace
from funcops.engine.contract.needs import Needs, check_needs
from funcops.engine.contract.op import Op, config, init_of, make_op
from funcops.engine.contract.pausing import Pauses, Pausing
from funcops.engine.contract.walk import remade
from funcops.engine.errors import describe, fail, require_type
from funcops.library.ops._tuples import require_tuple
from funcops.library.ops.experts import ExpertsConfig, ExpertsParams, experts
from funcops.library.ops.glu import glu
from funcops.library.ops.grouped_linear import grouped_linear
from funcops.library.ops.permute import PermuteConfig, permute
from funcops.library.ops.row_scale import RowScaleConfig, row_scale
from funcops.library.ops.unpermute import UnpermuteConfig, unpermute

EXTRAS = "tokens", "indices"


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
    rows, numbers, before = ("offsets", "order", "place"), ("weights", "order"), cfg.weights_on == "input"
    steps = (
        Step("sort", permute, PermuteConfig(cfg.experts, gathered=True), takes=EXTRAS, gives=("weights", *rows)),
        Step("up", grouped_linear, cfg.up, takes=rows),
        *([Step("weigh", row_scale, RowScaleConfig(gathered=True), takes=numbers)] if before else []),
        Step("act", glu, cfg.act, takes=() if before else numbers),
        Step("down", grouped_linear, cfg.down, takes=("offsets", "order", "weights") if cfg.bias else ("offsets",)),
        Step("combine", unpermute, UnpermuteConfig(), takes=("place",)),
    )
    return ChainConfig(steps=steps, extras=EXTRAS)


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

    @property
    def as_chain(self) -> ChainConfig:  # type: ignore[override]
        return self.cfg

    def needs_of_chain(self, needs: Needs) -> Needs:
        labels = ("main", *[f"extras.{name}" for name in EXTRAS])
        wanted = [label for i, label in enumerate(labels) if needs.input(i)]
        return Needs(x=True if len(wanted) == len(labels) else wanted, params=needs.params)

    def abstract(self) -> Any:
        """See `funcops.engine.program.values.abstract_params`."""
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


def _sums(where: str, into: Any, cfg: ExpertStepsConfig) -> Any:
    """The accumulators of the chain."""
    require_type(where, "cfg", cfg, ExpertStepsConfig)
    return None if into is None else _by_name(where, "into", into, cfg)


@init_of(ExpertStepsConfig)
def expert_steps_init(cfg: ExpertStepsConfig, *, key: Any = None, device: Any = None, dtype: Any = None) -> ExpertsParams:
    """The params of both layers."""
    return _named(chain.init(cfg.cfg, key=key, device=device, dtype=dtype))


def expert_steps_fwd(params: ExpertsParams, x: Any, cfg: ExpertStepsConfig, *, needs: Needs = Needs.ALL) -> tuple[Any, Any]:
    """x: `(weights, x, indices)` -> y: [*, H]. Raises as the steps do."""
    own, given, wanted = _of_chain(params, x, cfg, needs)
    return chain.fwd(own, given, cfg.cfg, needs=wanted)


def _of_chain(params: ExpertsParams, x: Any, cfg: ExpertStepsConfig, needs: Needs) -> tuple[Any, Any, Needs]:
    """The params, the x and the needs of the chain."""
    where = "expert_steps_fwd"
    require_type(where, "cfg", cfg, ExpertStepsConfig)
    own, (weights, tokens, indices) = _by_name(where, "params", params, cfg), require_tuple(where, x, "weights", "x", "indices")
    if needs is not Needs.ALL:
        check_needs(where, needs, params, x)
        needs = cfg.needs_of_chain(needs)
    return own, WithExtras(weights, {"tokens": tokens, "indices": indices}), needs


def _as_parts(dx: Any) -> Any:
    return (dx.main, *[dx.extras[name] for name in EXTRAS]) if type(dx) is WithExtras else (None, None, None)


def expert_steps_dgrad(residuals: Any, dy: Any, cfg: ExpertStepsConfig) -> tuple[Any, Any]:
    """dy: [*, H] -> `(d weights, dx, None)`, and the steps' pending."""
    require_type("expert_steps_dgrad", "cfg", cfg, ExpertStepsConfig)
    dx, pending = chain.dgrad(residuals, dy, cfg.cfg)
    return _as_parts(dx), pending


def expert_steps_wgrad(pending: Any, cfg: ExpertStepsConfig, *, into: Any = None) -> ExpertsParams:
    """The weight gradients of both layers; added to `into` if given."""
    sums = _sums("expert_steps_wgrad", into, cfg)
    return _named(chain.wgrad(pending, cfg.cfg, into=sums))


def expert_steps_bwd(residuals: Any, dy: Any, cfg: ExpertStepsConfig, *, into: Any = None) -> tuple[ExpertsParams, Any]:
    """The whole backward. Returns `(dparams, dx)`."""
    sums = _sums("expert_steps_bwd", into, cfg)
    dparams, dx = chain.bwd(residuals, dy, cfg.cfg, into=sums)
    return _named(dparams), _as_parts(dx)


def _products(pending: Any, cfg: ExpertStepsConfig, *, into: Any) -> list[Any]:
    sums = _sums("expert_steps_wgrad", into, cfg)
    return chain.products(pending, cfg.cfg, into=sums)  # type: ignore[no-any-return]


def _pausing_fwd(params: ExpertsParams, x: Any, cfg: ExpertStepsConfig, *, needs: Needs = Needs.ALL) -> Pauses:
    own, given, wanted = _of_chain(params, x, cfg, needs)
    return (yield from LOWERED.fwd(own, given, cfg.cfg, needs=wanted))


def _pausing_dgrad(residuals: Any, dy: Any, cfg: ExpertStepsConfig) -> Pauses:
    dx, pending = yield from LOWERED.dgrad(residuals, dy, cfg.cfg)
    return _as_parts(dx), pending


def _pausing_bwd(residuals: Any, dy: Any, cfg: ExpertStepsConfig, *, into: Any = None) -> Pauses:
    dparams, dx = yield from LOWERED.bwd(residuals, dy, cfg.cfg, into=_sums("expert_steps_bwd", into, cfg))
    return _named(dparams), _as_parts(dx)


def steps_op(name: str, config: type, init: Any) -> Op:
    """An op whose config is an `ExpertStepsConfig`."""
    halves: Any = dict(dgrad=expert_steps_dgrad, wgrad=expert_steps_wgrad, bwd=expert_steps_bwd, products=_products)
    pauses = Pausing(_pausing_fwd, _pausing_dgrad, _pausing_bwd)
    return make_op(name, config, init=init, fwd=expert_steps_fwd, pausing=pauses, **halves)


expert_steps = steps_op("expert_steps", ExpertStepsConfig, expert_steps_init)
BY_STEPS: dict[type, Callable[[Any], tuple[Op, Op, ExpertStepsConfig]]] = {}
"""By the class of a config with `linear_parts`: its op, and the op and config that do the same in steps. The file of each such op
enters it."""
BY_STEPS[ExpertsConfig] = lambda cfg: (experts, expert_steps, ExpertStepsConfig(plain_experts(cfg)))


def by_steps(where: str, op: Op | None, cfg: Any) -> tuple[Op, ExpertStepsConfig]:
    """The op and config that replace an op with `linear_parts`, or an op made from it. Raises `ValueError` for any other op."""
    source, becomes, made = BY_STEPS[type(cfg)](cfg)
    return remade(where, op or source, source, becomes), made
