"""`with_policy(op, policy)`: an op with its residuals handled by a policy, whatever the op consists of."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from funcops.engine.backend import tracing
from funcops.engine.compose.chain import ChainConfig, chain
from funcops.engine.compose.joints import joint_of
from funcops.engine.contract.configs import OpConfig, require_config
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import Op, wrap
from funcops.engine.contract.schema import Saved
from funcops.engine.contract.trace_safe_cache import reading, remember
from funcops.engine.contract.walk import Inside, Part, rewrite
from funcops.engine.errors import describe, fail, few, join_path, one_of, require, require_type, short
from funcops.engine.program import compiled_programs
from funcops.engine.program.lower import lower
from funcops.engine.residuals.forms import Packed, has_form, one_form_each
from funcops.engine.residuals.policy import POLICIES, Action, Compress, Drop, Offload, Policy, Recompute, Save
from funcops.engine.trees import paths
from funcops.memory.away import Away
from funcops.memory.layers import any_layer, laid_out
from funcops.memory.packing import packed
from funcops.memory.parts import (
    Kept,
    has_parts,
    keeps_inside,
    kept_fields,
    kept_paths,
    two_forms,
    waiting_fields,
    what_is_kept,
    within,
)
from funcops.memory.remat import remat
from funcops.memory.rerun import Ways, rerun, ways_of


def with_policy(op: Op, policy: Policy | str) -> Op:
    """The op, its residuals handled by `policy`: a `Policy`, or the name of one in `funcops.POLICIES`.

    Config, params, y, dx and dparams are the op's own. Fields are packed after each step's forward and unpacked before its
    backward; a tensor that several fields hold is packed once. Raises `ValueError` for an unknown name; at the first use of a
    config, for a rule that matches no path there, changes nothing, gives one tensor two forms, or recomputes what no step can
    recompute; and at the first forward for a codec that makes nothing smaller there. Optional rules, such as a preset's, are
    skipped instead.

    >>> import torch
    >>> from funcops import LinearConfig, RepeatConfig, linear, random, repeat, report, with_policy
    >>> cfg = RepeatConfig(linear, LinearConfig(64, 64), times=4)
    >>> params, x = repeat.init(cfg, key=random.key(0)), torch.ones(8, 64)
    >>> for policy in ("save_all", "offload_block_inputs", "compress_fp8"):
    ...     print(policy, report(with_policy(repeat, policy).fwd(params, x, cfg)[1], params, x).kept_bytes)
    ...
    save_all 6144
    offload_block_inputs 6144
    compress_fp8 2080
    """
    require_type("with_policy", "op", op, Op)
    if isinstance(policy, str):
        require(policy in POLICIES, "with_policy", "policy", f"a Policy or {one_of(POLICIES, policy)}", repr(policy))
        policy = POLICIES[policy]
    require_type("with_policy", "policy", policy, Policy)

    return _with_policy(op, policy)


_names: dict[tuple[str, Any], str] = {}
_numbers = itertools.count()
_traced: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()  # `inner_of` of the ops below, by number


def under_policy(cfg: Any, number: str) -> str:
    """The name in the module `compiled_programs` of the op and config under a policy, as `program_while_tracing` has one for a
    program: a compiler cannot trace how a policy is resolved."""
    key = number, cfg
    if key not in _names:
        with reading():
            setattr(compiled_programs, f"policy_{len(_names)}", _traced[number](cfg))
        _names[key] = f"policy_{len(_names)}"
    return _names[key]


under_policy._dynamo_marked_constant = True  # type: ignore[attr-defined]
OpConfig.under_policy = under_policy  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=256)
def _with_policy(op: Op, policy: Policy) -> Op:
    memo: dict[Any, tuple[Op, Any, _Unseen]] = {}
    packs = any(isinstance(action, Compress | Offload) for _, action in policy.rules)

    def inner_of(cfg: Any) -> tuple[Op, Any, _Unseen]:
        """The op and config under the policy, and the rules that no run has yet confirmed to make a tensor smaller."""
        if torch.compiler.is_dynamo_compiling():
            id(cfg)  # the tracer guards on it: a method that gives a constant has no guard on its object
            return getattr(compiled_programs, cfg.under_policy(number))  # type: ignore[no-any-return]
        found = memo.get(cfg)
        if found is None:
            require_config(op.name, cfg, op.config)
            made = *resolved(op, cfg, policy), _Unseen.of(op, cfg, policy)
            for pattern, action in policy.rules:
                place = getattr(action, "place", action)
                if isinstance(place, Away):
                    place.check("with_policy", f"rules at {pattern!r}")
            found = remember(memo, cfg, made)
        return found

    def resolved_for(cfg: Any) -> tuple[Op, Any]:
        return inner_of(cfg)[:2]

    number = str(next(_numbers))  # a text: of two numbers at one place of the code a compiler makes a symbol
    _traced[number] = inner_of

    def init(cfg: Any, *, key: Any = None, device: Any = None, dtype: Any = None) -> Any:
        params = op.init(cfg, key=key, device=device, dtype=dtype)
        inner_of(cfg)  # raises for a rule that does not apply
        return params

    def fwd(params: Any, x: Any, cfg: Any, *, needs: Needs = Needs.ALL) -> Any:
        inner, inner_cfg, unseen = inner_of(cfg)
        if not packs:
            return inner.fwd(params, x, inner_cfg, needs=needs)
        with one_form_each():
            y, residuals = inner.fwd(params, x, inner_cfg, needs=needs)
        if unseen.kept and not tracing():
            unseen.kept[:] = [rule for rule in unseen.kept if not _makes_smaller(policy, rule, kept_fields(residuals))]
        return y, residuals

    def bwd(residuals: Any, dy: Any, cfg: Any, *, into: Any = None) -> Any:
        inner, inner_cfg, _ = inner_of(cfg)
        return inner.bwd(residuals, dy, inner_cfg, into=into)

    def dgrad(residuals: Any, dy: Any, cfg: Any) -> Any:
        inner, inner_cfg, unseen = inner_of(cfg)
        dx, pending = inner.dgrad(residuals, dy, inner_cfg)
        if unseen.waits and not tracing():
            fields = [(path, value) for path, value in kept_fields(pending) if any_layer(path) in unseen.paths]
            unseen.waits[:] = [rule for rule in unseen.waits if not _makes_smaller(policy, rule, fields, True)]
        return dx, pending

    def wgrad(pending: Any, cfg: Any, *, into: Any = None) -> Any:
        inner, inner_cfg, _ = inner_of(cfg)
        return inner.wgrad(pending, inner_cfg, into=into)

    def products(pending: Any, cfg: Any, *, into: Any) -> Any:
        inner, inner_cfg, _ = inner_of(cfg)
        return inner.products(pending, inner_cfg, into=into)

    fwd.resolved_for = resolved_for  # type: ignore[attr-defined]  # for `explain`
    functions = dict(init=init, fwd=fwd, bwd=bwd, dgrad=dgrad, wgrad=wgrad, products=products)
    return wrap(op, (with_policy, (op, policy)), recomputable="", keeps=Saved, **functions)


def resolved(op: Op, cfg: Any, policy: Policy) -> tuple[Op, Any]:
    """The op and config that follow the policy. Raises `ValueError` for a rule that cannot be applied."""
    cfg = laid_out(op, cfg, policy)
    if policy.optional:
        left: frozenset[str] = frozenset()  # the fields to which no rule applies
        while torn := list(two_forms(*(found := _applied(op, cfg, policy, left)))):
            left |= {field for _, forms in torn for field in forms}
        return found
    known = {kept.path: kept for kept in kept_paths(op, cfg)}
    for i, (pattern, _) in enumerate(policy.rules):
        if not any([policy.applies(i, kept.path, kept.waits) for kept in known.values()]):  # a compiler cannot trace difflib
            near = ", ".join(difflib.get_close_matches(pattern, known, 4, 0.0))
            got = f"{pattern!r}, nearest {near} ({len(known)} in all: report(residuals) lists them)"
            fail("with_policy", "rules", "globs over the paths of cfg", got)
    found = _applied(op, cfg, policy)
    for tensor, forms in two_forms(*found):
        said = ", ".join(f"{action} for {field}" for field, action in forms.items() if action is not None)
        wanted = f"the same for each field that holds {tensor} ({', '.join(forms)})"
        fail("with_policy", "rules", wanted, f"{said}{'' if all(forms.values()) else ' only'}")
    for i, (pattern, action) in enumerate(policy.rules):
        if _same_without(op, cfg, policy, i, found):
            why = _why_nothing_changes(known, policy, i)
            fail("with_policy", f"rules at {pattern!r}", "one that changes what is kept", f"{action}, without effect: {why}")
    return found


class _Unseen(NamedTuple):
    """Compress rules that a forward (`kept`) or a dgrad (`waits`) must confirm; `paths`: the fields that only a pending has."""

    kept: list[int]
    waits: list[int]
    paths: frozenset[str]

    @staticmethod
    def of(op: Op, cfg: Any, policy: Policy) -> _Unseen:
        rules = [] if policy.optional else [i for i, (_, action) in enumerate(policy.rules) if isinstance(action, Compress)]
        # every layer has the same fields, whatever the rules of each
        paths = frozenset([any_layer(kept.path) for kept in kept_paths(op, cfg) if kept.waits]) if rules else frozenset()
        waits = [i for i in rules if any(policy.applies(i, path, True) for path in paths)]
        return _Unseen([i for i in rules if i not in waits], waits, paths)


def _makes_smaller(policy: Policy, rule: int, fields: Iterable[tuple[str, Any]], waits: bool = False) -> bool:
    """Whether the rule compresses one of the fields. Raises `ValueError` if it leaves all fields that it matches unchanged."""
    values = [value for path, value in fields if policy.rule_for(path, waits) == rule and value is not None]
    forms = [one for value in values for one in paths(value, is_leaf=has_form).values()]
    packed = any(type(one) is Packed and isinstance(one.action, Compress) for one in forms)  # not only moved
    if values and not packed:
        pattern, action = policy.rules[rule]
        moved = [f"{short(one.dtype)}{list(one.shape)}" if type(one) is Packed else describe(one) for one in forms]
        kinds = ", ".join(dict.fromkeys(moved))
        fail("with_policy", f"rules at {pattern!r}", "for tensors that it makes smaller", f"{action} for {kinds}")
    return packed


def _applied(op: Op, cfg: Any, policy: Policy, left: frozenset[str] = frozenset()) -> tuple[Op, Any]:
    offload = None if policy.blocks == "residuals" else policy.blocks == "offloaded"
    if offload is not None and not any(part.cfg.times for part in within(op, cfg) if has_parts(part.op, part.cfg)):
        return remat(op, offload), cfg
    return rewrite(cfg, _Rules(policy, offload, left, ways=ways_of(op, cfg, policy)), op=op)


def _same_without(op: Op, cfg: Any, policy: Policy, rule: int, found: tuple[Op, Any]) -> bool:
    less = dataclasses.replace(policy, rules=policy.rules[:rule] + policy.rules[rule + 1 :])
    try:
        return what_is_kept(*_applied(op, cfg, less)) == what_is_kept(*found)
    except ValueError:  # the other rules need it
        return False


def _why_nothing_changes(known: dict[str, Kept], policy: Policy, rule: int) -> str:
    pattern, action = policy.rules[rule]
    matched = [kept for kept in known.values() if policy.applies(rule, kept.path, kept.waits)]
    decided = [kept.path for kept in matched if policy.rule_for(kept.path, kept.waits) == rule]
    fields = [path for path in decided if known[path].field is not None]
    if not decided:
        return "later rules decide for all paths that it matches"
    if not fields and isinstance(action, Compress | Drop):
        below = [path for path, kept in known.items() if path.startswith(f"{decided[0]}.") and kept.field is not None]
        return f"a step itself takes only Save, Recompute and Offload; the fields of {decided[0]} are {few(below) or '(no fields)'}"
    if fields and all(field.of_params for path in fields if (field := known[path].field) is not None):
        return f"{', '.join(fields)} is a parameter, which takes no extra memory"
    if policy.blocks != "residuals" and (layers := [layer for path in decided if (layer := _layer_around(path))]):
        return f"each layer keeps its inputs, as blocks={policy.blocks!r} says: Save or Offload of {layers[0]} itself keeps more"
    return f"what is kept of {', '.join(decided)} is the same without it"


def _layer_around(path: str) -> str:
    """The layer of a repeat in which a step or field is, the outermost; "" outside of repeats, and for a layer itself."""
    parts = any_layer(path).split(".")
    return ".".join(path.split(".")[: parts.index("*") + 1]) if "*" in parts[:-1] else ""


@dataclasses.dataclass(frozen=True)
class _Rules:
    """The function that `rewrite` calls for every part; it returns the part's op and config under the policy. If `offload` is not
    None, a repeat's body keeps only its inputs. `left_out`: the fields that an enclosing chain recomputes; `joined`: the paths of
    two steps that run as one; `around`: the path of the enclosing combinator, which is also the path of a part without a name.
    `ways`: the steps that run again for others, and those others."""

    policy: Policy
    offload: bool | None = None
    left_out: frozenset[str] = frozenset()
    joined: tuple[str, ...] = ()
    around: str = ""
    ways: Ways = dataclasses.field(default_factory=dict)

    def __call__(self, part: Part) -> tuple[Op, Any] | Inside:
        path, op, cfg, _ = part
        if path in self.joined:  # they have no residuals of their own
            return op, cfg
        action = self.policy.action(path) if path != self.around else None
        whole = isinstance(action, Recompute) and keeps_inside(op, cfg)
        policy = Policy(outputs=self.policy.outputs) if whole else self.policy  # no rule reaches inside
        if not has_parts(op, cfg):
            op = rerun(op, self.ways[path]) if path in self.ways else op
            return _leaf(op, cfg, path, policy, whole, self.left_out), cfg
        if cfg.times is not None and self.offload is not None:
            return Inside(dataclasses.replace(self, around=path)._layer)
        inside, changes, joints = dataclasses.replace(self, policy=policy, around=path, joined=()), dict[str, Any](), list[str]()
        inside = dataclasses.replace(inside, ways={}) if whole else inside
        if (own := cfg.as_chain) is not None:
            changes["recompute"], absent, joints = _outputs(own, path, policy, inside.ways)
            changes["joined"] = joined = (*own.joined, *(name for name in joints if name not in own.joined))
            pair = tuple(join_path(path, name) for name in _joined(own, joined))
            inside = dataclasses.replace(inside, left_out=self.left_out | absent, joined=pair)

        def finish(op: Op, cfg: Any) -> tuple[Op, Any]:
            return (remat(op) if whole else op), cfg.as_run()

        return Inside(inside, lambda _: changes, finish)

    def _layer(self, body: Part) -> tuple[Op, Any] | Inside:
        """A layer that keeps only its inputs, unless a rule for the whole layer says what else."""
        if isinstance(self.policy.action(body.path), Save | Offload):
            return dataclasses.replace(self, offload=None)(body)
        return remat(body.op, bool(self.offload)), body.cfg


def _joined(cfg: ChainConfig, losses: tuple[str, ...]) -> list[str]:
    """The names of the steps that run as one with others."""
    names = list(cfg.names)
    found = [(names.index(loss) + 1, joint_of(cfg.steps, loss)) for loss in losses]
    return [name for end, joint in found if not isinstance(joint, str) for name in names[end - joint[0] : end]]


def _leaf(op: Op, cfg: Any, path: str, policy: Policy, rerun: bool, left_out: frozenset[str]) -> Op:
    fields = {name: field for name, field in op.fields(cfg).items() if not field.of_params}
    chosen = {name: policy.action(join_path(path, name)) for name in fields if join_path(path, name) not in left_out}
    if rerun or any(isinstance(action, Recompute) and not fields[name].of_x for name, action in chosen.items()):
        return remat(op)
    if op.named is not None and policy.rules:
        op = op.named.under(path, policy)
    waits = {name: policy.action(join_path(path, name), True) for name in waiting_fields(op, cfg)}
    for name in [name for name, action in waits.items() if isinstance(action, Recompute)]:
        fail("with_policy", "rules", f"without Recompute for {join_path(path, name)}, an input of the backward", "one")
    actions, late = (
        tuple([(name, action) for name, action in found.items() if isinstance(action, Drop | Compress | Offload)])
        for found in (chosen, waits)
    )
    return packed(op, actions, late) if actions or late else op


def _outputs(cfg: ChainConfig, path: str, policy: Policy, ways: Ways) -> tuple[tuple[str, ...], frozenset[str], list[str]]:
    """The steps of a chain whose outputs it recomputes (all steps of the policy's kind, unless a rule keeps the fields that hold
    the output, and steps for which a rule says Recompute, but for the fields that steps run again for by `ways`); the fields that
    are therefore not kept; and the steps that must be joined to the previous step for it."""
    found, absent, joints = [], [], []
    for before, step in zip(cfg.steps, cfg.steps[1:], strict=False):
        kind = policy.outputs == "recomputable" or (policy.outputs == "norms" and before.op.recomputable == "norm")
        recomputed = _recomputed_fields(cfg, before.name)
        again = ways[at].fields if (at := join_path(path, step.name)) in ways else ()
        fields = [join_path(path, p) for p in recomputed or _inputs(step) if p not in [f"{step.name}.{name}" for name in again]]
        actions = [policy.action(field) for field in fields]
        asked = any(isinstance(action, Recompute) for action in actions)
        if asked and not recomputed:
            joint = joint_of(cfg.steps, step.name)
            if not isinstance(joint, str):
                joints.append(step.name)
                absent += fields
            elif not policy.optional:
                at = join_path(path, step.name)
                fail("with_policy", "rules", f"without Recompute for the x of {at} ({joint})", "one")
        elif asked or (kind and recomputed and not _kept_by_rule(policy, actions)):
            found.append(before.name)
            absent += fields
    return tuple(found), frozenset(absent), joints


def _kept_by_rule(policy: Policy, actions: list[Action | None]) -> bool:
    """Whether rules for the fields that hold an output keep it; an optional rule does so only by Save."""
    wanted = Save if policy.optional else Save | Compress | Offload
    return any(isinstance(action, wanted) for action in actions) or (
        not policy.optional and all(isinstance(action, Drop) for action in actions)
    )


def _inputs(step: Any) -> list[str]:
    """The paths of the fields that alias a step's main input."""
    return [join_path(step.name, name) for name, field in step.op.fields(step.cfg).items() if field.alias in ("x", "x.0")]


@functools.lru_cache(maxsize=1024)
def _recomputed_fields(cfg: ChainConfig, name: str) -> list[str]:
    """The paths of the fields that a chain need not keep if it recomputes the output of that step."""
    calls = lower(chain, dataclasses.replace(cfg, recompute=True), Needs.ALL).calls
    recomputed = [call for call in calls if call.recomputed_by is not None and call.recomputed_by.path == name]
    return [join_path(call.path, field) for call in recomputed for field in call.fields]
