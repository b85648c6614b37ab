"""`rerun`: an op whose forward a program runs again from what the op keeps, for a later step that leaves its y out.

A policy puts it around each step on the way to a tensor that a rule tells to recompute: linear layers with what reshapes, rotates
and splits their outputs. Params, x, y and gradients are the op's own, and the second forward gives the bits of the first.
"""

from __future__ import annotations

import copyreg
import dataclasses
import functools
from typing import Any, NamedTuple

from torch import Tensor

from funcops.engine.compose.joints import joint_of
from funcops.engine.compose.step import Step
from funcops.engine.contract.by_config import ByConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import Op, bwd_of, dgrad_of, make_op, raw_of, recompute_of, wrap
from funcops.engine.contract.schema import RECOMPUTE, Field, Residuals, saved
from funcops.engine.contract.walk import Inside, Part, rewrite
from funcops.engine.errors import fail
from funcops.engine.program.lower import Call, Lowered
from funcops.engine.residuals.policy import Policy, Recompute
from funcops.memory.parts import LeafPart, kept_paths, leaves_of


class Way(NamedTuple):
    """The part of a step on the way: it leaves out the `fields` that others compute again, and computes its own y again by a second
    forward, if `parts` is the number of parts of its x, 0 for a tensor; with None, only if the op has a `recompute`."""

    fields: tuple[str, ...] = ()
    parts: int | None = None


Ways = dict[str, Way]  # by the path of the step


@functools.lru_cache(maxsize=256)
def rerun(op: Op, way: Way) -> Op:
    """The op as `way` says: with the same config, params, x, y and gradients."""
    kinds = op.keeps.classes if isinstance(op.keeps, ByConfig) else (op.keeps,)
    made = {cls: _class_of(cls, way, _has_params(op)) for cls in kinds}
    several = len(kinds) > 1
    keeps = ByConfig(op.config, lambda cfg: made[op.residuals_of(cfg)], tuple(made.values())) if several else made[kinds[0]]

    def fwd(params: Any, x: Any, cfg: Any, *, needs: Needs = Needs.ALL) -> tuple[Any, Any]:
        y, node = op.fwd(params, x, cfg, needs=needs)
        if node is None:
            return y, None
        cls = made[type(node)]
        given = {name: getattr(node, name) for name in node.names}
        # what the op itself would not keep of x
        given |= {n: _part(x, f.alias) for n, f in cls.fields.items() if f.of_x and f.recompute} if way.parts is not None else {}
        own = {"params": params} if "params" in cls.fields else {}
        return y, cls.keep(cfg, needs, **given, **own)

    def recompute(residuals: Any, cfg: Any) -> Any:
        parts = {field.alias: getattr(residuals, name) for name, field in residuals.fields.items() if field.of_x}
        x = tuple([parts[f"x.{i}"] for i in range(way.parts)]) if way.parts else parts["x"]
        return op.fwd(getattr(residuals, "params", None), x, cfg, needs=Needs.NONE)[0]

    again = raw_of(op.recompute) if way.parts is None else recompute
    dgrad = dgrad_of(keeps, f"{op.name}_dgrad")(_of_gradients(raw_of(op.dgrad)))
    changes: dict[str, Any] = {"dgrad": dgrad, "bwd": _bwd(op, keeps, dgrad)}
    changes["again"] = functools.partial(_left_out, way)
    if again is not None:
        changes["recompute"] = recompute_of(keeps, f"{op.name}_recompute")(again)
    return wrap(op, (rerun, (op, way)), fwd=fwd, keeps=keeps, **changes)


def _bwd(op: Op, keeps: Any, dgrad: Any) -> Any:
    raw = raw_of(op.bwd)
    if not isinstance(raw, tuple):
        return bwd_of(keeps, op.params, f"{op.name}_bwd")(_of_gradients(raw))
    halves: dict[str, Any] = dict(init=op.init, wgrad=op.wgrad) if _has_params(op) else {}
    return make_op(op.name, op.config, fwd=op.fwd, dgrad=dgrad, **halves).bwd


def _of_gradients(raw: Any) -> Any:
    """The function with residuals that lack what only the second forward reads: some ops compute the gradients for which they find
    the tensors."""

    def fn(residuals: Any, dy: Any, cfg: Any, **more: Any) -> Any:
        needs, fields = residuals.needs.of_gradients, residuals.fields
        lacks = [n for n, f in fields.items() if f.recompute and not f.wanted(needs) and getattr(residuals, n) is not None]
        if lacks:
            residuals = residuals.twin()
            residuals.set(**dict.fromkeys(lacks))
        return raw(residuals, dy, cfg, **more)

    return fn


def _has_params(op: Op) -> bool:
    return op.params is not type(None)


def _part(x: Any, alias: Any) -> Any:
    """The part of x with this alias; None if x has no such part."""
    if alias == "x" or not isinstance(x, tuple):
        return x if alias in ("x", "x.0") else None
    parts = (*x[0], *x[1:]) if type(x[0]) is tuple else x  # a chain gives a tuple and what is taken beside it
    at = int(alias[2:])
    return parts[at] if at < len(parts) else None


def _left_out(way: Way, call: Call, needs: Needs, rows: Lowered) -> list[tuple[str, Call, int | None]]:
    """See `Op.again`. A call whose scope keeps nothing, as no gradient is asked of it, cannot run again, so its y is kept."""
    own = call.op.fields(call.cfg)
    names = [n for n, f in own.items() if f.of_x and f.wanted(needs) and (n in way.fields or not f.of) and n not in call.fields]
    writers = {one.out: one for one in rows.calls if one.op.recompute is not None and one.needs.any and not one.gives}
    found = [(name, *part_of(call, own[name].alias)) for name in names]
    return [(n, writers[v], at) for n, one, at in found if type(one) is int and (v := rows.resolve(one)) in writers]


def part_of(call: Any, alias: Any) -> tuple[Any, int | None]:
    """The value in which the part of x with this alias is, or None; and the index of the part, if the value stands for a tuple."""
    at = int(alias[2:] or 0)
    if not isinstance(call.main, tuple):
        aliases = [f.alias or "" for f in call.op.fields(call.cfg).values() if f.of_x]
        # of a main that stands for a tuple no field is the whole
        width = 1 if "x" in aliases else 1 + max([0, *[int(one[2:]) for one in aliases]]) - len(call.takes)
        if width > 1 and at < width:
            return call.main, at
    values = (*(call.main if isinstance(call.main, tuple) else (call.main,)), *call.takes)
    return values[at] if at < len(values) else None, None


@functools.lru_cache(maxsize=256)
def _class_of(base: Any, way: Way, has_params: bool) -> Any:
    """The class of residuals with the fields of an op's own, and with what the forward reads beside them."""
    fields: dict[str, Field] = dict(base.fields)
    if way.parts is not None:
        fields |= {n: f._replace(needed_by=f.needed_by | RECOMPUTE, recompute=True) for n, f in fields.items() if f.of_x}
        for alias in sorted(_parts_of(way.parts) - {field.alias for field in fields.values()}):
            # no gradient reads it: it is left out, if what wrote it can run again
            name = "input" if alias in fields else alias.replace(".", "")
            fields[name] = saved("a part of x", alias=alias, needed_by=RECOMPUTE).metadata["saved"]
        if has_params:
            fields["params"] = saved("the op's", alias="params", needed_by=RECOMPUTE, tree=True).metadata["saved"]
    body: dict[str, Any] = {n: _declared(f) for n, f in fields.items() if base.fields.get(n) is not f}
    named = {"__module__": __name__, "__qualname__": base.__name__, "__annotations__": dict.fromkeys(body, Any)}
    made = type(base)(base.__name__, (base,), body | named)
    made.made_by = base, way, has_params
    return made


def _parts_of(parts: int) -> set[str]:
    return {f"x.{i}" for i in range(parts)} or {"x"}


def _declared(field: Field) -> Any:
    return dataclasses.field(default=None, metadata={"saved": field})


def _by_base(cls: Any) -> Any:
    """How a class of residuals is pickled: by its name, or by what made it here."""
    made_by = vars(cls).get("made_by")
    return cls.__qualname__ if made_by is None else (_class_of, made_by)


copyreg.pickle(type(Residuals), _by_base)  # type: ignore[arg-type]


def ways_of(op: Op, cfg: Any, policy: Policy) -> Ways:
    """The steps that run again, and those that read what they compute, as rules of the policy say: rules whose every path is a
    field with the y of a step that no chain recomputes by itself. Raises `ValueError` if a step on the way cannot run again."""
    rules = [i for i, (_, action) in enumerate(policy.rules) if isinstance(action, Recompute)]
    if not rules or policy.optional:
        return {}
    paths, ways = list(kept_paths(op, cfg)), Ways()
    leaves = {leaf.path: leaf for leaf in leaves_of(op, rewrite(cfg, _recomputing_all, op=op)[1])}
    by_call: dict[Any, LeafPart] = {leaf.call: leaf for leaf in leaves.values() if leaf.call is not None}
    for i in rules:
        matched = [kept for kept in paths if policy.rule_for(kept.path, kept.waits) == i]
        found = [(leaves.get(kept.path.rpartition(".")[0]), kept.path.rpartition(".")[2]) for kept in matched]
        if all([_may_leave_out(leaf, name) for leaf, name in found]):
            for leaf, name in found:
                assert leaf is not None
                _go_back(f"rules at {policy.rules[i][0]!r}", leaf, name, by_call, ways)
    return ways


def _recomputing_all(part: Part) -> Inside | None:
    return Inside(changes=lambda _: {"recompute": True} if part.cfg.as_chain is part.cfg else {}) if part.composite else None


def _may_leave_out(leaf: LeafPart | None, name: str) -> bool:
    """Whether a field of a step holds the y of another one, which no chain recomputes by itself, nor as one op with the step."""
    if leaf is None or leaf.call is None or raw_of(leaf.op.dgrad) is None:
        return False
    field = leaf.op.fields(leaf.cfg).get(name)
    if field is None or not field.of_x or name in leaf.call.fields:
        return False
    if part_of(leaf.call, field.alias)[1] is not None and not _always_there(leaf.op.residuals_of(leaf.cfg), name):
        return False  # no config says how many parts a step's tuple has
    writer = _writer(leaf, field.alias)
    if type(writer) is not Call:
        return False
    joint = joint_of([Step("y", writer.op, writer.cfg), Step("x", leaf.op, leaf.cfg)], "x")
    return isinstance(joint, str) and joint.endswith("cannot recompute it")  # not what keeps the two of a joint apart


def _always_there(kept: Any, name: str) -> bool:
    """Whether a class of residuals declares a field that no x lacks."""
    return next(f.type for f in dataclasses.fields(kept) if f.name == name) in ("Tensor", Tensor)


def _writer(leaf: LeafPart, alias: Any) -> Any:
    """The call that writes the part of a step's x with this alias; None for an input of the program."""
    program, (value, _) = leaf.program, part_of(leaf.call, alias)
    values = [program.resolve(value)] if type(value) is int else []  # type: ignore[union-attr]
    if values and values[0] in (program.main, *program.extras.values()):  # type: ignore[union-attr]
        return None
    return next((call for call in program.calls if call.out in values and call.place is not None), "another")  # type: ignore[union-attr]


def _go_back(where: str, leaf: LeafPart, name: str, by_call: dict[Any, LeafPart], ways: Ways) -> None:
    """Note that a step leaves out a field, and which steps run again for it."""
    ways[leaf.path] = _with_fields(ways.get(leaf.path, Way()), [name])
    todo = [_writer(leaf, leaf.op.fields(leaf.cfg)[name].alias)]
    while todo:
        writer = todo.pop()
        one = by_call.get(writer)
        if one is None or not _runs_again(one):
            stops = "what writes it" if one is None else f"{one.path} ({one.op.name})"
            fail("with_policy", where, f"without Recompute for the {name} of {leaf.path} ({stops} cannot run again)", "one")
        fields, known = one.op.fields(one.cfg), ways.get(one.path, Way())
        if one.op.recompute is not None:
            lacks = {n: f.alias for n, f in fields.items() if f.of_x and f.recompute and not f.wanted(Needs.ALL)}
            ways |= {one.path: _with_fields(known, list(lacks))} if lacks else {}
            needed = list(lacks.values())
        elif known.parts is None:
            ways[one.path] = known._replace(parts=_count(one))
            kept = [f.alias for f in fields.values() if f.of_x and f.wanted(Needs.ALL)]
            needed = [alias for alias in sorted(_parts_of(_count(one))) if alias not in kept]
        else:
            continue
        todo += [source for alias in needed if (source := _writer(one, alias)) is not None]


def _with_fields(way: Way, names: list[str]) -> Way:
    return way._replace(fields=tuple(dict.fromkeys((*way.fields, *names))))


def _count(leaf: LeafPart) -> int:
    """The number of parts of a step's x, 0 for a tensor."""
    main, takes = leaf.call.main, leaf.call.takes  # type: ignore[union-attr]
    return len(main) + len(takes) if isinstance(main, tuple) else len(takes) + bool(takes)


def _runs_again(leaf: LeafPart) -> bool:
    call = leaf.call
    given = call is None or call.gives or call.labels or raw_of(leaf.op.dgrad) is None
    return not given and (leaf.op.recompute is not None or leaf.cfg.reruns)
