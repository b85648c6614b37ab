"""Two steps of a chain as one op that keeps less: a fusion that changes what is kept, so it runs only where a policy asks for it.

Unlike a rule of a plan, which leaves residuals as they are, a `Joint` recomputes what its first step gave, a part at a time, and
holds on every device. Params and gradients keep the structure of the two steps.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from funcops.compose.chain import ChainConfig, chain
from funcops.compose.step import Step
from funcops.contract.needs import Needs
from funcops.contract.op import Op, wrap
from funcops.contract.schema import Saved
from funcops.program.run import check_names


class Joint(NamedTuple):
    """`refuses(cfg, cfg)`: why not, or None. `made(cfg, cfg)`: the op that does both and its config. `join`: its params of those
    of the two steps; `part`: the reverse, of gradients."""

    first: Op
    second: Op
    refuses: Callable[[Any, Any], str | None]
    made: Callable[[Any, Any], tuple[Op, Any]]
    join: Callable[[Any, Any], Any]
    part: Callable[[Any], tuple[Any, Any]]


_joints: dict[tuple[Op, Op], Joint] = {}


def register_joint(joint: Joint) -> Joint:
    _joints[joint.first, joint.second] = joint
    return joint


def joint_of(before: Step, step: Step) -> Joint | str:
    """What may run the two steps as one, or why nothing may."""
    joint = _joints.get((before.op, step.op))
    if joint is None or before.names or before.gives or step.gives:
        return f"step {before.name!r} cannot give it again"
    return joint.refuses(before.cfg, step.cfg) or joint


@functools.lru_cache(maxsize=256)
def join_steps(cfg: ChainConfig, second: str) -> tuple[Op, ChainConfig]:
    """The chain, its step `second` joined with the one before. The op's config is still `cfg`."""
    at = [step.name for step in cfg.steps].index(second)
    a, b = cfg.steps[at - 1], cfg.steps[at]
    joint = joint_of(a, b)
    assert isinstance(joint, Joint)
    name = f"{a.name}_{b.name}"
    op, op_cfg = joint.made(a.cfg, b.cfg)
    steps = (*cfg.steps[: at - 1], Step(name=name, op=op, cfg=op_cfg, takes=b.takes), *cfg.steps[at + 1 :])
    recompute = cfg.recompute if isinstance(cfg.recompute, bool) else tuple(n for n in cfg.recompute if n not in (a.name, b.name))
    ties = tuple((_renamed(path, a.name, name), _renamed(source, a.name, name)) for path, source in cfg.ties)
    inner = dataclasses.replace(cfg, steps=steps, recompute=recompute, ties=ties)
    return _as_two(joint, a.name, b.name, name, inner, (_joined_op, (cfg, second))), cfg


def _joined_op(cfg: ChainConfig, second: str) -> Op:
    return join_steps(cfg, second)[0]


def _renamed(path: str, old: str, new: str) -> str:
    head, dot, rest = path.partition(".")
    return f"{new}{dot}{rest}" if head == old else path


def _as_two(joint: Joint, a: str, b: str, name: str, inner: ChainConfig, made_by: Any) -> Op:
    """`chain` on `inner`, with the params tree of the two steps."""

    def join(where: str, what: str, tree: Any, cfg: ChainConfig) -> Any:
        check_names(where, what, tree, cfg)
        return {n: joint.join(tree[a], tree[b]) if n == name else tree[n] for n in inner.names}

    def part(tree: Any, cfg: ChainConfig) -> Any:
        found = dict(zip((a, b), joint.part(tree[name]), strict=True))
        return {n: found[n] if n in found else tree[n] for n in cfg.names}

    def fwd(params: Any, x: Any, cfg: ChainConfig, *, needs: Needs = Needs.ALL) -> tuple[Any, Any]:
        mask = needs.params
        if isinstance(mask, tuple):
            needs = Needs(x=needs.x, params=[_renamed(path, a, name) for path in mask])
        return chain.fwd(join("chain_fwd", "params", params, cfg), x, inner, needs=needs)

    def dgrad(residuals: Any, dy: Any, cfg: ChainConfig) -> tuple[Any, Any]:
        return chain.dgrad(residuals, dy, inner)

    def wgrad(pending: Any, cfg: ChainConfig, *, into: Any = None) -> Any:
        given = None if into is None else join("chain_wgrad", "into", into, cfg)
        found = chain.wgrad(pending, inner, into=given)
        return part(found, cfg) if into is None else into

    def bwd(residuals: Any, dy: Any, cfg: ChainConfig, *, into: Any = None) -> tuple[Any, Any]:
        given = None if into is None else join("chain_bwd", "into", into, cfg)
        found, dx = chain.bwd(residuals, dy, inner, into=given)
        return (part(found, cfg) if into is None else into), dx

    def products(pending: Any, cfg: ChainConfig, *, into: Any) -> Any:
        return chain.products(pending, inner, into=join("chain_wgrad", "into", into, cfg))

    return wrap(chain, made_by, fwd=fwd, dgrad=dgrad, wgrad=wgrad, bwd=bwd, products=products, residuals=Saved)
