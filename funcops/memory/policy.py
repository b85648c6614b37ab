"""`with_policy(op, policy)`: an op that keeps what the policy says, whatever the op is built of."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from funcops.compose.chain import ChainConfig, chain
from funcops.compose.repeat import RepeatConfig
from funcops.errors import fail, require, require_type
from funcops.memo import remember
from funcops.memory.forms import packed
from funcops.memory.joint import joined, joint_of
from funcops.memory.remat import remat
from funcops.needs import Needs
from funcops.op import Op, wrap
from funcops.program.lower import lower
from funcops.program.values import parts_of
from funcops.residuals.policy import POLICIES, Policy, Recompute, Save
from funcops.schema import Saved


def with_policy(op: Op, policy: Policy | str) -> Op:
    """The op, its residuals handled by `policy`: a `Policy`, or the name of one in `funcops.POLICIES`.

    Config, params, y, dx and dparams are the op's own. Packing follows each step's forward and unpacking precedes its
    backward. Raises `ValueError` for an unknown name, and, when it first meets a config, for a rule that matches no path there
    or asks to recompute what no step can give again.

        frugal = with_policy(chain, "minimal")
        y, residuals = frugal.fwd(params, x, cfg)
    """
    require_type("with_policy", "op", op, Op)
    if isinstance(policy, str):
        require(policy in POLICIES, "with_policy", "policy", f"a Policy or one of {', '.join(POLICIES)}", repr(policy))
        policy = POLICIES[policy]
    require_type("with_policy", "policy", policy, Policy)

    return _with_policy(op, policy)


@functools.lru_cache(maxsize=256)
def _with_policy(op: Op, policy: Policy) -> Op:
    memo: dict[Any, tuple[Op, Any]] = {}

    def resolved(cfg: Any) -> tuple[Op, Any]:
        found = memo.get(cfg)
        if found is None:
            if type(cfg) is not op.config:
                fail(op.name, "cfg", op.config.__name__, type(cfg).__name__, TypeError)
            found = remember(memo, cfg, _apply(op, cfg, policy))
        return found

    def init(cfg: Any, *, key: Any = None, device: Any = None, dtype: Any = None) -> Any:
        params = op.init(cfg, key=key, device=device, dtype=dtype)
        resolved(cfg)  # here, so that a compiler finds it done
        return params

    def fwd(params: Any, x: Any, cfg: Any, *, needs: Needs = Needs.ALL) -> Any:
        inner, inner_cfg = resolved(cfg)
        return inner.fwd(params, x, inner_cfg, needs=needs)

    def bwd(residuals: Any, dy: Any, cfg: Any, *, into: Any = None) -> Any:
        inner, inner_cfg = resolved(cfg)
        return inner.bwd(residuals, dy, inner_cfg, into=into)

    def dgrad(residuals: Any, dy: Any, cfg: Any) -> Any:
        inner, inner_cfg = resolved(cfg)
        return inner.dgrad(residuals, dy, inner_cfg)

    def wgrad(pending: Any, cfg: Any, *, into: Any = None) -> Any:
        inner, inner_cfg = resolved(cfg)
        return inner.wgrad(pending, inner_cfg, into=into)

    def products(pending: Any, cfg: Any, *, into: Any) -> Any:
        inner, inner_cfg = resolved(cfg)
        return inner.products(pending, inner_cfg, into=into)

    functions = dict(init=init, fwd=fwd, bwd=bwd, dgrad=dgrad, wgrad=wgrad, products=products)
    return wrap(op, (with_policy, (op, policy)), cheap="", residuals=Saved, **functions)


def serves(op: Op, cfg: Any, policy: Policy) -> bool:
    """Whether `with_policy` takes the policy for this config."""
    try:
        _apply(op, cfg, policy)
    except ValueError:
        return False
    return True


def _apply(op: Op, cfg: Any, policy: Policy) -> tuple[Op, Any]:
    known = list(dict.fromkeys(residual_paths(op, cfg)))
    for pattern, _ in policy.rules if policy not in POLICIES.values() else ():  # a preset is for every op
        matched = any(Policy({pattern: Recompute()}).action(path) for path in known)
        require(matched, "with_policy", "rules", f"globs over {', '.join(known)}", repr(pattern))
    if policy.blocks == "residuals":
        return _rewritten(op, cfg, "", policy)
    offload = policy.blocks == "offloaded"
    if not any(_repeats(op, cfg)):
        return remat(op, offload), cfg
    return _rewritten(op, cfg, "", policy, offload)


def _rewritten(
    op: Op, cfg: Any, path: str, policy: Policy, offload: bool | None = None, left_out: frozenset[str] = frozenset(),
    named: bool = True,
) -> tuple[Op, Any]:  # fmt: skip
    """The op and config at `path`, as the policy has them; with `offload` not None a repeat's body keeps its inputs alone.
    `left_out`: the fields that a chain around computes again; `named`: whether the path is its own, not that of a skip around."""
    action = policy.action(path) if path and named else None
    if not hasattr(cfg, "with_parts"):
        return _leaf(op, path, policy, action, left_out), cfg
    if type(cfg) is RepeatConfig and offload is not None:
        return op, cfg.with_parts(lambda name, body, inner: (remat(body, offload), inner))

    changes: dict[str, Any] = {}
    joints: list[str] = []
    if type(cfg) is ChainConfig:
        changes["recompute"], absent, joints = _outputs(cfg, path, policy)
        left_out = left_out | absent

    def replace(name: Any, inner: Op, inner_cfg: Any) -> tuple[Op, Any]:
        return _rewritten(inner, inner_cfg, _joined(path, name), policy, offload, left_out, name is not None)

    cfg = cfg.with_parts(replace, **changes)
    require(len(joints) <= 1, "with_policy", "rules", "one loss of a chain to compute the logits of again", f"{joints}")
    if joints:
        op, cfg = joined(cfg, joints[0])
    return (remat(op) if isinstance(action, Recompute) else op), cfg


def _leaf(op: Op, path: str, policy: Policy, action: Any, left_out: frozenset[str]) -> Op:
    if isinstance(action, Recompute):
        return remat(op)
    fields = {name: field for name, field in op.fields().items() if _joined(path, name) not in left_out}
    chosen = {name: policy.action(_joined(path, name)) for name in fields}
    again = [n for n, a in chosen.items() if isinstance(a, Recompute) and fields[n].alias not in ("x", "x.0")]
    if again:
        return remat(op)
    actions = tuple(
        (name, action)
        for name, action in chosen.items()
        if action is not None and not isinstance(action, Recompute) and not (fields[name].alias or "").startswith("params")
    )
    return packed(op, actions) if actions else op


def _outputs(cfg: ChainConfig, path: str, policy: Policy) -> tuple[tuple[str, ...], frozenset[str], list[str]]:
    """The steps of a chain whose outputs it computes again, those of the policy's kind unless a rule says Save and others where
    a rule says Recompute or names the fields; the fields that therefore are not kept; and the steps that are joined with the one
    before for it."""
    found, absent, joints = [], [], []
    for before, step in zip(cfg.steps, cfg.steps[1:], strict=False):
        kind = policy.outputs == "cheap" or (policy.outputs == "norms" and before.op.cheap == "norm")
        again = _again_fields(cfg, before.name)
        fields = [_joined(path, p) for p in again or _inputs(step)]
        actions = [policy.action(field) for field in fields]
        asked = [isinstance(action, Recompute) for action in actions]
        if any(asked) and not again:
            joint = joint_of(before, step)
            if isinstance(joint, str):
                at = _joined(path, step.name)
                fail("with_policy", "rules", f"without Recompute for the x of {at} ({joint})", "one")
            joints.append(step.name)
            absent += fields
        elif not any(asked) and (named := [field for field in fields if policy.names(field)]):
            wanted = f"one for each field that holds the output of {_joined(path, before.name)} ({', '.join(fields)})"
            require(len(named) == len(fields), "with_policy", "rules", wanted, f"one for {', '.join(named)} alone")
        elif any(asked) or (kind and again and not any(isinstance(a, Save) for a in actions)):
            found.append(before.name)
            absent += fields
    return tuple(found), frozenset(absent), joints


def residual_paths(op: Op, cfg: Any, path: str = "") -> Iterator[str]:
    """The paths of steps, and of the fields that they keep; a repeat's layers are `*`."""
    if path:
        yield path
    if not hasattr(cfg, "with_parts"):
        yield from (_joined(path, name) for name in op.fields())
        return
    for name, inner, inner_cfg in parts_of(cfg):
        yield from residual_paths(inner, inner_cfg, _joined(path, name))


def _inputs(step: Any) -> list[str]:
    """The paths of the fields that alias a step's main input."""
    return [f"{step.name}.{name}" for name, field in step.op.fields().items() if field.alias in ("x", "x.0")]


@functools.lru_cache(maxsize=1024)
def _again_fields(cfg: ChainConfig, name: str) -> list[str]:
    """The paths of the fields that a chain need not keep where it computes the output of that step again."""
    calls = lower(chain, dataclasses.replace(cfg, recompute=(name,)), Needs.ALL).calls
    return [f"{call.path}.{field}" for call in calls for field in call.fields if call.again is not None and call.again.path == name]


def _repeats(op: Op, cfg: Any) -> Iterator[bool]:
    if hasattr(cfg, "with_parts"):
        yield type(cfg) is RepeatConfig
        for _, inner, inner_cfg in parts_of(cfg):
            yield from _repeats(inner, inner_cfg)


def _joined(path: str, name: Any) -> str:
    return path if name is None else f"{path}.{name}" if path else str(name)


def part_paths(op: Op, cfg: Any) -> list[str]:
    """The parts of a repeat's body, or of the op itself where it has no repeat."""
    found = [path for path, _ in _steps(op, cfg, "")]
    inside = [path for path in found if path.rpartition(".")[0].endswith("*")]
    return inside or [path for path in found if "." not in path]


def _steps(op: Op, cfg: Any, path: str) -> Iterator[tuple[str, Op]]:
    if hasattr(cfg, "with_parts"):
        for name, inner, inner_cfg in parts_of(cfg):
            if name is not None:
                yield _joined(path, name), inner
            yield from _steps(inner, inner_cfg, _joined(path, name))
