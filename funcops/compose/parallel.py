"""parallel: one input, several bodies.

    y = (body_1(x), body_2(x), ...)        dx = sum of the bodies' dx

Params, residuals and pending are dicts by branch name; y is a tuple in the order of the branches. A branch that is a
combinator gets those of the extras that it asks for.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from funcops.backend import wants_triton
from funcops.compose.into import check_into_tree
from funcops.compose.plan import SIBLINGS_BACKWARD, SIBLINGS_FORWARD, planned_for, registry_version
from funcops.compose.siblings import Branch, Siblings, backward_siblings, find, forward_siblings, taken_apart
from funcops.compose.step import (
    Nested,
    Replace,
    Step,
    WithExtras,
    add,
    init_parts,
    live_inputs,
    nested,
    part,
    run_backward,
    split_x,
)
from funcops.compose.widths import Width, follow, inside
from funcops.errors import describe, fail, in_step, require, require_type
from funcops.memo import remember
from funcops.needs import Needs
from funcops.op import Op, config, dgrad_of, forward, init_of, make_op
from funcops.schema import open_node


@config
class ParallelConfig:
    """`branches`: named bodies, without `gives`; a branch's `takes` come from the caller's extras. `fuse`: the first steps of the
    branches go to one kernel where `funcops.explain` says so."""

    branches: tuple[Step, ...]
    fuse: bool = True

    def __post_init__(self) -> None:
        require_type("ParallelConfig", "branches", self.branches, tuple)
        require(len(self.branches) > 0, "ParallelConfig", "branches", "at least one Step", "none")
        for branch in self.branches:
            require_type("ParallelConfig", "branches", branch, Step)
            require(not branch.gives, "ParallelConfig", f"gives of branch {branch.name!r}", "()", branch.gives)
        names = [branch.name for branch in self.branches]
        require(len(set(names)) == len(names), "ParallelConfig", "branches", "uniquely named", names)
        object.__setattr__(self, "entries", tuple((b.name, b.op, b.cfg) for b in self.branches))
        object.__setattr__(self, "names", dict.fromkeys(names))
        object.__setattr__(self, "extras", tuple(dict.fromkeys(n for b in self.branches for n in b.names)))
        object.__setattr__(self, "keys", tuple(dict.fromkeys(k for b in self.branches for k in b.keys)))
        object.__setattr__(self, "branch_needs", {})
        object.__setattr__(self, "apart", tuple(map(taken_apart, self.branches)))
        object.__setattr__(self, "plans", {})
        needs_of_branches(self, Needs.ALL)
        needs_of_branches(self, Needs.NONE)
        self.follow("ParallelConfig", "", None)

    def follow(self, where: str, path: str, width: Width | None) -> None:
        """See `funcops.compose.widths`: y is a tuple, which has none."""
        for branch in self.branches:
            follow(where, inside(path, branch.name), branch.cfg, width)

    def with_parts(self, replace: Replace) -> ParallelConfig:
        """The config with `replace(name, op, cfg)` for each branch's op and config."""
        return ParallelConfig(branches=tuple(b.with_op(*replace(b.name, b.op, b.cfg)) for b in self.branches), fuse=self.fuse)

    names: ClassVar[dict[str, None]]
    entries: ClassVar[tuple[tuple[Any, Op, Any], ...]]  # whose input x is: name, op, cfg
    extras: ClassVar[tuple[str, ...]]
    keys: ClassVar[tuple[str, ...]]
    branch_needs: ClassVar[dict[Needs, tuple[Needs, ...]]]
    apart: ClassVar[tuple[Branch | None, ...]]
    plans: ClassVar[dict[Any, Siblings | None]]


@nested("residuals")
class ParallelResiduals(Nested):
    """Residuals of the branches by name."""

    __slots__ = ()


@nested("pending")
class ParallelPending(Nested):
    """Pending weight gradients of the branches by name."""

    __slots__ = ()


def needs_of_branches(cfg: ParallelConfig, needs: Needs) -> tuple[Needs, ...]:
    if needs not in cfg.branch_needs:
        live = live_inputs(needs.x, cfg.extras)
        return remember(cfg.branch_needs, needs, tuple(branch.needs(live, needs.params) for branch in cfg.branches))
    return cfg.branch_needs[needs]


def siblings_of(cfg: ParallelConfig, needs: Needs, phase: str, device_type: str, dtype: torch.dtype) -> Siblings | None:
    """The branches as siblings whose first steps go to one kernel; found once for what that depends on."""
    key = needs, phase, device_type, dtype, registry_version()
    if key not in cfg.plans:
        found = find(cfg.apart, needs_of_branches(cfg, needs), phase, device_type, dtype)[0] if cfg.fuse else None
        return remember(cfg.plans, key, found)
    return cfg.plans[key]


def _check_names(where: str, what: str, tree: Any, cfg: ParallelConfig) -> None:
    if not isinstance(tree, dict) or (list(tree) != list(cfg.names) and tree.keys() != cfg.names.keys()):
        got = list(tree) if isinstance(tree, dict) else describe(tree)
        fail(where, what, f"a dict by branch name: {', '.join(cfg.names)}", got)


@init_of(ParallelConfig)
def parallel_init(cfg: ParallelConfig, *, key: Any = None, device: Any = None, dtype: Any = None) -> dict[str, Any]:
    """Params of every branch by name, each from a key of its own."""
    return init_parts(cfg.branches, key, device, dtype)


@forward(ParallelConfig, dict)
def parallel_fwd(params: dict[str, Any], x: Any, cfg: ParallelConfig, *, needs: Needs = Needs.ALL) -> tuple[tuple[Any, ...], Any]:
    """`y = (body_1(x), ...)`. x: what every body takes, in `WithExtras` where one of them has extras."""
    _check_names("parallel_fwd", "params", params, cfg)
    main, extras = split_x("parallel_fwd", x, cfg)
    kept = ParallelResiduals(cfg=cfg, needs=needs)
    if type(main) is Tensor and wants_triton(main):
        siblings = siblings_of(cfg, needs, SIBLINGS_FORWARD, "cuda", main.dtype)
        found = NotImplemented if siblings is None else forward_siblings(siblings, params, main, extras, kept)
        if found is not NotImplemented:
            return found, kept if needs else None
    outputs, name = [], ""
    try:
        for branch, wanted in zip(cfg.branches, needs_of_branches(cfg, needs)):  # noqa: B905 (one each by construction)
            name = branch.name
            branch_x = branch.x(main, extras) if branch.names else main
            y, kept[name] = branch.op.fwd(params[name], branch_x, branch.cfg, needs=wanted)
            outputs.append(y)
    except Exception as error:
        in_step(error, name)
        raise
    return tuple(outputs), kept if needs else None


def _walk(where: str, node: Any, dy: Any, cfg: ParallelConfig, sums: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
    """The branches in order. Returns dx and by branch: dparams, added to `sums` where there is one; without `sums`, pending."""
    if not isinstance(dy, tuple) or len(dy) != len(cfg.branches):
        fail(where, "dy", f"a tuple of {len(cfg.branches)} (None for zero)", describe(dy), TypeError)
    dmain = None
    gradients: dict[str, Any] = {}
    results: dict[str, Any] = dict(cfg.names)
    whole = sums is not None
    siblings = _siblings_for(cfg, node.needs, dy)
    if siblings is not None:
        dmain, results = backward_siblings(siblings, node, dy, gradients, sums, where)
    name = ""
    try:
        for branch, d_y in zip(cfg.branches, dy, strict=True) if siblings is None else ():
            name = branch.name
            kept = part(node, name) if node.donated else node[name]
            dx, results[name] = run_backward(branch.op, branch.cfg, kept, d_y, whole, sums[name] if sums else None)
            dx = branch.split(dx, gradients) if branch.names else dx
            dmain = dx if dmain is None else add(dmain, dx)
    except Exception as error:
        in_step(error, name)
        raise
    if cfg.extras:
        return WithExtras(dmain, {name: gradients.get(name) for name in cfg.extras}), results
    return dmain, results


def _siblings_for(cfg: ParallelConfig, needs: Needs, dy: tuple[Any, ...]) -> Siblings | None:
    device_type = planned_for(dy[0])
    if device_type is None or not cfg.fuse or None in cfg.apart:
        return None
    return siblings_of(cfg, needs, SIBLINGS_BACKWARD, device_type, dy[0].dtype)


@dgrad_of(ParallelResiduals)
def parallel_dgrad(residuals: Any, dy: tuple[Any, ...], cfg: ParallelConfig) -> tuple[Any, Any]:
    """dx, the sum over the branches, and the pending weight gradients by branch. A part of dy may be None (zero)."""
    needs = residuals.needs
    dx, waiting = _walk("parallel_dgrad", residuals, dy, cfg, None)
    empty = all(p is None for p in waiting.values())
    return dx, None if empty else ParallelPending(waiting, cfg=cfg, needs=needs)


def parallel_wgrad(pending: Any, cfg: ParallelConfig, *, into: Any = None) -> dict[str, Any]:
    """The weight gradients of all branches; added to `into` where that is given."""
    if type(cfg) is not ParallelConfig:
        fail("parallel_wgrad", "cfg", "ParallelConfig", describe(cfg), TypeError)
    node = None if pending is None else open_node("parallel_wgrad", pending, ParallelPending, cfg)
    sums = _accumulators("parallel_wgrad", into, node, cfg)
    found, name = {}, ""
    try:
        for b in cfg.branches:
            name = b.name
            found[name] = b.op.wgrad(None if node is None else part(node, name), b.cfg, into=sums[name])
    except Exception as error:
        in_step(error, name)
        raise
    if node is not None and node is not pending:
        node.empty()
    return found if into is None else into


def parallel_bwd(residuals: Any, dy: Any, cfg: ParallelConfig, *, into: Any = None) -> tuple[dict[str, Any], Any]:
    """The whole backward, a branch at a time. Returns `(dparams, dx)`."""
    node = open_node("parallel_bwd", residuals, ParallelResiduals, cfg)
    dy = (None,) * len(cfg.branches) if dy is None else dy
    dx, found = _walk("parallel_bwd", node, dy, cfg, _accumulators("parallel_bwd", into, node, cfg, dy))
    if node is not residuals:
        node.empty()
    return found if into is None else into, dx


def _accumulators(where: str, into: Any, node: Any, cfg: ParallelConfig, dy: Any = None) -> dict[str, Any]:
    if into is None:
        return cfg.names
    _check_names(where, "into", into, cfg)
    check_into_tree(where, into, parallel, cfg, node, dy, several=dy is not None)
    return into


parallel: Op = make_op(
    "parallel", ParallelConfig, init=parallel_init, fwd=parallel_fwd, dgrad=parallel_dgrad, wgrad=parallel_wgrad, bwd=parallel_bwd
)
