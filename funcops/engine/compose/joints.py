"""Steps of a chain that run as one op that keeps less: a fusion that changes the residuals, so a config or a policy selects it.

A fusion rule of a plan does not change residuals. A joint recomputes what its first step computes, one part at a time, on every
device. The chain's steps, params and gradients stay: the op runs under the name of the first step, and the others pass on its y.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from funcops.engine.compose.identity import IdentityConfig, identity
from funcops.engine.compose.step import Step
from funcops.engine.contract.op import Op

__all__ = ["Made", "joint_by_ops", "joint_of", "register_joint"]

Made = tuple[Op, Any] | str  # the op and its config, or the reason why the steps run one by one
LONGEST = 3  # a projection, a softcap and a loss

_joints: dict[tuple[Op, ...], Callable[..., Made]] = {}


def register_joint(ops: tuple[Op, ...], made: Callable[..., Made]) -> None:
    """`made(*cfgs)`: what runs steps with these ops as one: an op with the params of the first step, and its config."""
    _joints[ops] = made


def ends_joint(op: Op) -> bool:
    """Whether some joint ends with this op: a loss."""
    return any(ops[-1] is op for ops in _joints)


def joint_by_ops(ops: tuple[Op, ...], cfgs: Sequence[Any]) -> Made:
    """Make the op and config that run steps with these ops and configs as one."""
    made = _joints.get(ops)
    return made(*cfgs) if made is not None else f"step {ops[0].name!r} cannot recompute it"


def joint_of(steps: Sequence[Step], name: str) -> tuple[int, Step] | str:
    """The number of steps that end with step `name` and run as one, and that one; or the reason why they run one by one."""
    end = [step.name for step in steps].index(name) + 1
    for count in range(2, min(LONGEST, end) + 1):
        before, last = steps[end - count : end - 1], steps[end - 1]
        ops = (*(step.op for step in before), last.op)
        # the joint takes the extras of the last step only, and gives what that one gives
        if ops in _joints and not any(step.names or step.given for step in before):
            found = joint_by_ops(ops, (*(step.cfg for step in before), last.cfg))
            return found if isinstance(found, str) else (count, Step(before[0].name, *found, takes=last.takes, gives=last.gives))
    return f"step {steps[end - 2].name!r} cannot recompute it" if end > 1 else "no step is before it"


def joined_steps(steps: tuple[Step, ...], joined: Sequence[str]) -> tuple[Step, ...]:
    """The steps as they run, with the same names, if each step of `joined` runs as one with the steps before it where it can."""
    for name in joined:
        found = joint_of(steps, name)
        if not isinstance(found, str):
            count, one = found
            end = [step.name for step in steps].index(name) + 1
            # identities keep the names of the other steps, so that paths stay
            rest = tuple(Step(step.name, identity, IdentityConfig()) for step in steps[end - count + 1 : end])
            steps = (*steps[: end - count], one, *rest, *steps[end:])
    return steps
