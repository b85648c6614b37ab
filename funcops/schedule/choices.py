"""`stage_choices`: policies for each stage of a chain, with the bytes that a microbatch keeps under them and their extra work."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from funcops.engine.compose.chain import ChainConfig, chain
from funcops.engine.compose.step import check_body, split_x
from funcops.engine.contract.needs import Needs, check_needs
from funcops.engine.contract.op import Op
from funcops.engine.errors import describe, require_count, require_dtype, require_number, require_type
from funcops.engine.program.run import tied
from funcops.engine.program.values import abstract_params
from funcops.engine.residuals.policy import Policy
from funcops.engine.trees import fake, paths, tree_map_tensors
from funcops.library.formats.working import working_like
from funcops.memory.fit import Fitted, fit
from funcops.memory.ledger import Ledger
from funcops.memory.policy import with_policy
from funcops.schedule.simulate import Costs
from funcops.schedule.stage import check_staged

MOST = 1 << 62  # bytes, for a fit without a limit


@dataclasses.dataclass(frozen=True)
class Choice:
    """A policy that a stage may have, None for none; `extra`: the work that it adds to the stage's dgrad, as a share of its
    forward, dgrad and wgrad; bytes of the residuals and of the pending of one microbatch, as in `Costs`.

    >>> from funcops.schedule import Choice
    >>> Choice("each layer again", "minimal", extra=0.33, residual_bytes=0.1).pending_bytes
    1.0
    """

    name: str
    policy: Policy | str | None = None
    extra: float = 0.0
    residual_bytes: float = 1.0
    pending_bytes: float = 1.0

    def __post_init__(self) -> None:
        require_type("Choice", "name", self.name, str)
        if self.policy is not None:
            require_type("Choice", "policy", self.policy, Policy, str)
            with_policy(chain, self.policy)  # raises for an unknown name
        require_number("Choice", 0, extra=self.extra, residual_bytes=self.residual_bytes, pending_bytes=self.pending_bytes)

    def op(self, op: Op) -> Op:
        """Return the op under the policy."""
        return op if self.policy is None else with_policy(op, self.policy)

    def time(self, costs: Costs) -> float:
        """The time that it adds to the dgrad of a stage with these costs."""
        return self.extra * (costs.forward + costs.dgrad + costs.wgrad)

    def costs(self, costs: Costs) -> Costs:
        """Return a stage's costs under the policy, from its costs as it is."""
        more, pair = self.time(costs), costs.together
        costs = dataclasses.replace(costs, residual_bytes=self.residual_bytes, pending_bytes=self.pending_bytes)
        return dataclasses.replace(costs, dgrad=costs.dgrad + more, together=None if pair is None else pair + more)


PLAIN = Choice("as it is")


def stage_choices(
    cfg: ChainConfig, x: Any, *, dtype: torch.dtype | None = None, needs: Needs = Needs.ALL, count: int = 16
) -> tuple[tuple[Choice, ...], ...]:
    """List the choices of each stage of a staged chain, for `level`: first no policy, then what `fit` picks within each of `count`
    budgets, evenly spaced below the bytes of the stage as it is down to the least that `fit` finds. A stage with a `repeat` may so
    recompute its first layers only, as many as a budget asks for.

    Bytes are counted as in `run`: net of params, and of the chain's own x. Nothing is computed: forwards and dgrads are traced on
    shapes. `x`: one microbatch, of which only shapes and dtypes are read; `dtype`: the dtype of params, by default torch's.
    `needs`: the gradients that are asked of the chain. Raises `ValueError` or `TypeError` for a chain whose steps are not stages,
    and for an x that does not fit it.

    >>> import torch
    >>> from funcops import ChainConfig, LinearConfig, RepeatConfig, RMSNormConfig, Step, chain, linear, repeat, rms_norm
    >>> from funcops.schedule import stage_choices
    >>> up, down = LinearConfig(64, 256, bias=False), LinearConfig(256, 64, bias=False)
    >>> layer = ChainConfig(steps=(Step("norm", rms_norm, RMSNormConfig(64)), Step("up", linear, up), Step("down", linear, down)))
    >>> stage = RepeatConfig(chain, layer, 4)
    >>> cfg = ChainConfig(steps=(Step("bottom", repeat, stage), Step("top", repeat, stage)))
    >>> for choice in stage_choices(cfg, torch.empty(100, 64), count=2)[1]:
    ...     print(choice.name, choice.residual_bytes, round(choice.extra, 2))
    ...
    as it is 513600 0.0
    recompute *.norm 512000 0.0
    recompute 0-1, 2-3.norm 307200 0.17
    minimal 102400 0.33
    """
    check_body("stage_choices", chain, cfg)
    check_staged("stage_choices", cfg, len(cfg.steps))
    require_dtype("stage_choices", dtype)
    require_count("stage_choices", count=count)
    dtype, memo, found = dtype or torch.get_default_dtype(), dict[Any, tuple[Choice, ...]](), list[tuple[Choice, ...]]()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        main, extras = split_x("stage_choices", tree_map_tensors(fake, x), cfg)
        work = working_like(chain, cfg, tree_map_tensors(lambda t: fake(t, dtype), abstract_params(chain, cfg)))
        check_needs("stage_choices", needs, work, x)
        params, held = tied("stage_choices", work, cfg.ties), (main, extras)
        for i, (step, own) in enumerate(zip(cfg.steps, cfg.needs_of_steps(needs), strict=True)):
            given = step.x(main, extras)
            key = step.op, step.cfg, own, i == 0, tuple((path, describe(t)) for path, t in paths(given).items())
            if key not in memo:
                memo[key] = _of_stage(_Stage(step.op, step.cfg, params[step.name], given, held, own, dtype), count)
            found.append(memo[key])
            main, _ = step.split_y(step.op.fwd(params[step.name], given, step.cfg, needs=Needs.NONE)[0])
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class _Stage:
    """A stage and the values without data that it takes; `held`: what the caller of the whole chain holds."""

    op: Op
    cfg: Any
    params: Any
    x: Any
    held: Any
    needs: Needs
    dtype: torch.dtype

    def under(self, choice: Choice) -> Choice:
        """The choice with the bytes that it keeps."""
        op = choice.op(self.op)
        y, residuals = op.fwd(self.params, self.x, self.cfg, needs=self.needs)
        kept = self._net(residuals)
        dy = tree_map_tensors(lambda t: torch.ones_like(t) if t.is_floating_point() else None, y)
        pending = None if residuals is None else op.dgrad(residuals, dy, self.cfg)[1]
        return dataclasses.replace(choice, residual_bytes=kept, pending_bytes=self._net(pending))

    def fitted(self, budget: int) -> Fitted:
        dtype = None if self.op.named else self.dtype
        return fit(self.op, self.cfg, self.x, budget, dtype=dtype, needs=self.needs)

    def _net(self, tree: Any) -> int:
        ledger = Ledger(self.params, self.held)
        ledger.keep("measured", tree)
        return ledger.nbytes


def _of_stage(stage: _Stage, count: int) -> tuple[Choice, ...]:
    """The choices of a stage, each of which keeps less than those before."""
    found = [stage.under(PLAIN)]
    if not stage.needs.any or not found[0].residual_bytes:
        return tuple(found)
    tried = stage.fitted(MOST).tried
    free = min(one.kept_bytes for one in tried if one.extra_flops == tried[0].extra_flops)
    least = min(one.kept_bytes for one in tried)
    picked = [stage.fitted(max(1, free - (free - least) * i // count)).picked for i in range(count + 1)]
    for one in dict.fromkeys(picked):
        choice = stage.under(Choice(one.name, one.policy, one.extra_flops))
        if choice.residual_bytes < found[-1].residual_bytes:
            found.append(choice)
    return tuple(found)
