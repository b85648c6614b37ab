"""parallel: one input, several bodies. `funcops.dist.parallel` is another thing: it rewrites a model.

    y = (body_1(x), body_2(x), ...)        dx = sum of the bodies' dx

x has the shape and dtype that each body takes. Kept: what the bodies keep. Params, residuals and pending are dicts by branch name;
y is a tuple in the order of the branches. A branch that is a combinator gets the extras that it names. The branches' further
outputs, by different names, are outputs: y is then `WithExtras((main_1, main_2, ...), {name: ...})`, and so is dy.

>>> import torch
>>> from funcops import ParallelConfig, ScaleConfig, Step, parallel, scale
>>> cfg = ParallelConfig(branches=(Step("a", scale, ScaleConfig(2.0)), Step("b", scale, ScaleConfig(10.0))))
>>> y, residuals = parallel.fwd(parallel.init(cfg), torch.ones(1), cfg)
>>> y, parallel.bwd(residuals, (torch.ones(1), torch.ones(1)), cfg)[1]
((tensor([2.]), tensor([10.])), tensor([12.]))
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from funcops.engine.compose.pausing import LOWERED
from funcops.engine.compose.step import Step, abstract_parts, init_parts, live_inputs, note, split_x
from funcops.engine.contract.configs import Composite, Replace, Width
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config, dgrad_of, forward, init_of, make_op
from funcops.engine.errors import join_path, require, require_type
from funcops.engine.program import programs
from funcops.engine.program.lower import Call, Extras, Lowered, Parts, Place, Value, calls_below
from funcops.engine.residuals.nested import nested

if TYPE_CHECKING:
    from funcops.engine.contract.op import TypedOp

__all__ = ["ParallelConfig", "ParallelPending", "ParallelResiduals"]
__all__ += ["parallel", "parallel_bwd", "parallel_dgrad", "parallel_fwd", "parallel_init", "parallel_wgrad"]


@config
class ParallelConfig(Composite):
    """`branches`: named bodies; a branch's `takes` come from the caller's extras, its `gives` go to the caller. `fuse`: the
    first steps of the branches may run in one kernel, which `funcops.explain` shows."""

    branches: tuple[Step, ...]
    fuse: bool = True

    def __post_init__(self) -> None:
        require_type("ParallelConfig", "branches", self.branches, tuple)
        require(len(self.branches) > 0, "ParallelConfig", "branches", "at least one Step", "none")
        for branch in self.branches:
            require_type("ParallelConfig", "branches", branch, Step)
        names = [branch.name for branch in self.branches]
        require(len(set(names)) == len(names), "ParallelConfig", "branches", "uniquely named", names)
        extras, keys = [n for b in self.branches for n in b.names], [k for b in self.branches for k in b.keys]
        _check_given(self.branches)
        note(self, outputs=tuple([name for branch in self.branches for name in branch.given]))
        # several branches may take one extra, which the caller gives once
        note(self, names=dict.fromkeys(names), extras=tuple(dict.fromkeys(extras)), keys=tuple(dict.fromkeys(keys)), programs={})
        self.follow("ParallelConfig", "", None)

    @property
    def members(self) -> tuple[Step, ...]:  # type: ignore[override]
        return self.branches

    @property
    def first_parts(self) -> tuple[Any, ...]:
        """The configs of the branches, whose x is this config's x."""
        return tuple(branch.cfg for branch in self.branches)

    def follow(self, where: str, path: str, width: Width | None) -> None:
        """See `OpConfig.follow`: y is a tuple, which has no width."""
        for branch in self.branches:
            branch.cfg.follow(where, join_path(path, branch.name), width)

    def abstract(self) -> Any:
        """See `funcops.engine.program.values.abstract_params`."""
        return abstract_parts(self.branches)

    def with_parts(self, replace: Replace, **changes: Any) -> ParallelConfig:
        """The config with `replace(name, op, cfg)` for each branch's op and config."""
        branches = tuple(b.with_op(*replace(b.name, b.op, b.cfg)) for b in self.branches)
        return dataclasses.replace(self, branches=branches, **changes)

    branching = True
    part: ClassVar[str] = "branch"  # what an error calls a part
    programs: ClassVar[dict[Any, Any]]


def _check_given(branches: tuple[Step, ...]) -> None:
    """Check that no name is given by two branches."""
    made: dict[str, str] = {}
    for branch in branches:
        for name in branch.given:
            where = f"gives of branch {branch.name!r}"
            require(name not in made, "ParallelConfig", where, "a new name", f"{name!r}, given by branch {made.get(name)!r}")
            made[name] = branch.name


ParallelResiduals, ParallelPending = nested("Parallel", "a parallel, by branch name", __name__)


def _lower(
    cfg: ParallelConfig, rows: Lowered, place: Place, needs: Needs, main: Value, given: Extras, recomputed_by: Call | None
) -> Parts:
    """The branches in order, forward and backward; their gradients of x are summed."""
    scope = rows.scope(place, "parallel", cfg, needs, (ParallelResiduals, ParallelPending))
    x, ends = rows.alias(main)
    extras, after = rows.aliases(given)
    live, mains, outputs, backs, first = live_inputs(needs.x, cfg.extras), [], [], [], len(rows.forward)
    for branch in cfg.branches:
        y, gives, own = rows.step(branch, scope, branch.needs(live, needs.params), x, extras, recomputed_by)
        mains.append(y)
        outputs += gives.values()
        backs.append(own)
    found = [_head(scope.parts.get(branch.name), x, rows) for branch in cfg.branches]
    heads = [head for head in found if head is not None]
    if cfg.fuse and len(heads) == len(cfg.branches) > 1:
        rows.siblings.append(tuple(heads))
        # a head in a scope of its branch may have an adapter beside it, after which heads run forward, before it backward
        if any(head.main != x for head in heads):
            rows.heads_last(heads, first)
            backs = _heads_first(backs, heads)
    return tuple(mains), tuple(outputs), [*(row for own in backs for row in own), *ends, *after]


def _head(part: Any, x: Value, rows: Lowered) -> Call | None:
    """The call of a branch that reads x: the only one, or the linear layer, which may have adapters beside it."""
    # by any name: inside a chain x has an alias
    readers = [call for call in calls_below(part) if rows.reads(call, x)] if part is not None else []
    found = readers if len(readers) == 1 else [call for call in readers if call.op.layer is not None]
    # siblings read nothing but the x that they share
    right = len(found) == 1 and found[0].fuse and not found[0].takes and not found[0].gives
    return found[0] if right else None


def _heads_first(backs: list[Any], heads: list[Any]) -> list[Any]:
    """The rows of each branch's backward, with what comes after its head at the end: siblings may run as one at the turn of the
    last head. Each sum still has its terms in the order of the branches."""
    cuts = [own.index(head) + 1 for own, head in zip(backs, heads, strict=True)]
    return [own[:cut] for own, cut in zip(backs, cuts, strict=True)] + [own[cut:] for own, cut in zip(backs, cuts, strict=True)]


@init_of(ParallelConfig)
def parallel_init(cfg: ParallelConfig, *, key: Any = None, device: Any = None, dtype: Any = None) -> dict[str, Any]:
    """Params of every branch by name, each from a key of its own."""
    return init_parts(cfg.branches, key, device, dtype)


@forward(ParallelConfig, dict)
def parallel_fwd(params: dict[str, Any], x: Any, cfg: ParallelConfig, *, needs: Needs = Needs.ALL) -> tuple[Any, Any]:
    """`y = (body_1(x), ...)`. x: the x of every body, in `WithExtras` if one of them has extras; y: in `WithExtras` if one has
    outputs. Raises `ValueError` or `TypeError` for extras that are not the config's, and whatever a branch raises."""
    main, extras = split_x("parallel_fwd", x, cfg)
    return programs.forward(parallel, cfg, needs, main)(params, main, extras)


@dgrad_of(ParallelResiduals)
def parallel_dgrad(residuals: Any, dy: Any, cfg: ParallelConfig) -> tuple[Any, Any]:
    """dx, the sum over the branches, and the pending weight gradients by branch. A part of dy may be None (zero)."""
    return programs.dgrad(parallel, residuals, dy, cfg)


def parallel_wgrad(pending: Any, cfg: ParallelConfig, *, into: Any = None) -> dict[str, Any]:
    """The weight gradients of all branches; added to `into` if given."""
    return programs.wgrad(parallel, ParallelPending, pending, cfg, into)


def _products(pending: Any, cfg: ParallelConfig, *, into: Any) -> list[Any]:
    return programs.wgrad(parallel, ParallelPending, pending, cfg, into, "products")  # type: ignore[no-any-return]


def parallel_bwd(residuals: Any, dy: Any, cfg: ParallelConfig, *, into: Any = None) -> tuple[dict[str, Any], Any]:
    """The whole backward, a branch at a time. Returns `(dparams, dx)`."""
    return programs.bwd(parallel, residuals, dy, cfg, into)


parallel: TypedOp[dict[str, Any], Any, ParallelConfig, Any, Any] = make_op(
    "parallel",
    ParallelConfig,
    init=parallel_init,
    fwd=parallel_fwd,
    dgrad=parallel_dgrad,
    wgrad=parallel_wgrad,
    bwd=parallel_bwd,
    lower=_lower,
    products=_products,
    pausing=LOWERED,
    mixes="",
)
programs.lowers(ParallelConfig, parallel)
