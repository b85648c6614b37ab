"""The first steps of a parallel's branches, where they read the same x and one kernel can run them all.

A branch is a step, or a chain whose first step takes x alone: then the first step is run with those of the other branches, and
the rest as a chain of its own. Residuals and pending are put together as the branch would have kept them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from funcops.compose.chain import ChainConfig, ChainPending, ChainResiduals, chain, needs_of_steps
from funcops.compose.plan import Rule, Window, find_siblings
from funcops.compose.step import Step, add, has_params, live_inputs, part, run_backward
from funcops.errors import in_step
from funcops.needs import Mask, Needs
from funcops.schema import open_node


class Branch(NamedTuple):
    """A branch as its first step and the chain of the others, if there are others."""

    step: Step
    head: Step
    rest: ChainConfig | None

    @property
    def whole(self) -> bool:
        """Whether the branch is its head."""
        return self.head is self.step


def taken_apart(step: Step) -> Branch | None:
    """The branch, if its first step reads x alone."""
    cfg = step.cfg
    if step.op is not chain:
        return None if step.names else Branch(step, step, None)
    head, others = cfg.steps[0], cfg.steps[1:]
    if head.names or head.gives or cfg.ties or not cfg.fuse:
        return None
    recompute = cfg.recompute if isinstance(cfg.recompute, bool) else tuple(n for n in cfg.recompute if n != head.name)
    if others and cfg.dropped[1] is not None:
        return None
    return Branch(step, head, dataclasses.replace(cfg, steps=others, recompute=recompute) if others else None)


class Siblings(NamedTuple):
    """Branches whose first steps one rule runs, and what each part of them needs."""

    rule: Rule
    branches: tuple[Branch, ...]
    needs: tuple[Needs, ...]  # of the branches
    head_needs: tuple[Needs, ...]
    rest_needs: tuple[Needs, ...]


def find(branches: tuple[Branch | None, ...], needs: tuple[Needs, ...], phase: str, device_type: str, dtype: torch.dtype) -> Any:
    """The `Siblings` of a phase; or None; and with None the near misses."""
    if len(branches) < 2 or None in branches:
        return None, []
    parts = [_split_needs(branch, own) for branch, own in zip(branches, needs, strict=True)]  # type: ignore[arg-type]
    heads = tuple(branch.head for branch in branches if branch is not None)
    head_needs = tuple(head for head, _ in parts)
    rule, misses = find_siblings(Window(heads, head_needs, dtype, (False,) * len(heads)), phase, device_type)
    if rule is None:
        return None, misses
    return Siblings(rule, branches, needs, head_needs, tuple(rest for _, rest in parts)), []  # type: ignore[arg-type]


def _split_needs(branch: Branch, needs: Needs) -> tuple[Needs, Needs]:
    if branch.whole:
        return needs, Needs.NONE
    cfg = branch.step.cfg
    head = needs_of_steps(cfg, needs)[0]
    if branch.rest is None:
        return head, Needs.NONE
    live: dict[str, Mask] = {**live_inputs(needs.x, cfg.extras), "": bool(head)}
    names = ("", *cfg.extras)
    labels = ["main", *(f"extras.{n}" for n in cfg.extras)]
    wanted = [label for label, name in zip(labels, names, strict=True) if live[name]]
    x: Any = True if len(wanted) == len(labels) else wanted if cfg.extras else False
    params = needs.params
    if isinstance(params, tuple):
        params = tuple(p for p in params if p.partition(".")[0] != branch.head.name)
    elif not any(has_params(s.op, s.cfg) for s in branch.rest.steps):
        params = False
    return head, Needs(x=x, params=params)


def forward_siblings(found: Siblings, params: dict[str, Any], main: Any, extras: dict[str, Any], kept: Any) -> Any:
    """The y of every branch, their residuals put into `kept`; NotImplemented where the rule will not have the inputs."""
    own = [params[b.step.name] if b.whole else _child(params[b.step.name], b) for b in found.branches]
    if any(p is NotImplemented for p in own):
        return NotImplemented
    heads = found.rule.run([b.head for b in found.branches], own, main, found.head_needs)
    if heads is NotImplemented:
        return NotImplemented
    outputs = []
    for branch, (y, node), needs, rest_needs in zip(found.branches, heads, found.needs, found.rest_needs, strict=True):
        name = branch.step.name
        if branch.whole:
            kept[name] = node
        else:
            nodes = dict.fromkeys(branch.step.cfg.names)
            nodes[branch.head.name] = node
            if branch.rest is not None:
                others = {step.name: params[name][step.name] for step in branch.rest.steps}
                x = branch.step.x(y, extras) if branch.step.names else y
                y, rest = _inside(branch, chain.fwd, others, x, branch.rest, needs=rest_needs)
                nodes.update(rest or {})
            kept[name] = ChainResiduals(nodes, cfg=branch.step.cfg, needs=needs) if needs else None
        outputs.append(y)
    return tuple(outputs)


def _inside(branch: Branch, run: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """`run(...)`, whose errors name the branch."""
    try:
        return run(*args, **options)
    except Exception as error:
        in_step(error, branch.step.name)
        raise


def _child(params: Any, branch: Branch) -> Any:
    names = branch.step.cfg.names
    if not isinstance(params, dict) or params.keys() != names.keys():
        return NotImplemented  # the branch itself says what is wrong
    return params[branch.head.name]


class _Opened(NamedTuple):
    """A branch half way through its backward: the residuals of its head, the gradient of the head's y, and what its other
    steps gave, by step."""

    node: Any
    dy: Any
    results: dict[str, Any]


def backward_siblings(
    found: Siblings, node: Any, dy: tuple[Any, ...], gradients: dict[str, Any], sums: dict[str, Any] | None, where: str
) -> tuple[Any, dict[str, Any]]:
    """dmain and, by branch, dparams or (without `sums`) pending."""
    intos = [sums[b.step.name] if sums else None for b in found.branches]
    opened = [
        _inside(branch, _open, branch, needs, part(node, branch.step.name), d, gradients, sums is not None, into, where)
        for branch, needs, d, into in zip(found.branches, found.rest_needs, dy, intos, strict=True)
    ]
    dmain, waiting = _heads(found.rule, found.branches, opened)
    results = {}
    for branch, one, left, needs, into in zip(found.branches, opened, waiting, found.needs, intos, strict=True):
        head, name, names = branch.head, branch.step.name, getattr(branch.step.cfg, "names", {})
        if sums is not None:
            own = into if branch.whole or into is None else into[head.name]
            left = _inside(branch, _in_head, branch, head.op.wgrad, left, head.cfg, into=own)
        if branch.whole:
            results[name] = left
            continue
        parts = {**names, **one.results, head.name: left}
        if sums is not None:
            results[name] = parts if into is None else into
        else:
            empty = all(p is None for p in parts.values())
            results[name] = None if empty else ChainPending(parts, cfg=branch.step.cfg, needs=needs)
    return dmain, results


def _open(
    branch: Branch, rest_needs: Needs, kept: Any, dy: Any, gradients: dict[str, Any], whole: bool, into: Any, where: str
) -> _Opened:
    head, cfg = branch.head, branch.step.cfg
    if kept is None:
        if branch.whole or not whole:
            return _Opened(None, None, {})
        return _Opened(None, None, {s.name: s.op.wgrad(None, s.cfg, into=into and into[s.name]) for s in cfg.steps[1:]})
    results: Any = {}
    if not branch.whole:
        node = open_node(where, kept, ChainResiduals, cfg)
        if branch.rest is not None:
            others = {name: one for name, one in node.items() if name != head.name}
            rest = ChainResiduals(others, cfg=branch.rest, needs=rest_needs) if rest_needs else None
            if rest is not None:
                rest.donated = node.donated
            rest_into = None if into is None else {name: into[name] for name in branch.rest.names}
            dy, results = run_backward(chain, branch.rest, rest, dy, whole, rest_into)
            dy = branch.step.split(dy, gradients) if branch.step.names else dy
        kept = part(node, head.name)
    if kept is not None:
        kept = _in_head(branch, open_node, where, kept, head.op.residuals, head.cfg)
    return _Opened(kept, dy, results or {})


def _in_head(branch: Branch, run: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """`run(...)`, whose errors name the first step of a branch that has more."""
    return run(*args, **options) if branch.whole else _inside(Branch(branch.head, branch.head, None), run, *args, **options)


def _heads(rule: Rule, branches: tuple[Branch, ...], opened: list[_Opened]) -> tuple[Any, Any]:
    """dmain and the pendings of the first steps: by the rule, or one by one."""
    steps = [branch.head for branch in branches]
    if all([one.node is not None and one.dy is not None for one in opened]):
        found = rule.run(steps, [one.node for one in opened], [one.dy for one in opened])
        if found is not NotImplemented:
            return found
    pairs = [
        _inside(branch, _in_head, branch, run_backward, branch.head.op, branch.head.cfg, one.node, one.dy, False, None)
        for branch, one in zip(branches, opened, strict=True)
    ]
    return functools.reduce(add, [dx for dx, _ in pairs]), [waiting for _, waiting in pairs]
