"""The parts of an op to which a policy applies, and which of their fields hold the same tensor."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from funcops.engine.compose.chain import chain
from funcops.engine.contract.configs import Composite
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import Op
from funcops.engine.contract.schema import Field, Saved
from funcops.engine.contract.walk import Part, nested, steps
from funcops.engine.errors import join_path
from funcops.engine.program.lower import Call, Lowered, lower
from funcops.engine.residuals.policy import Action, Drop
from funcops.memory.packing import packed
from funcops.memory.remat import is_remat


def has_parts(op: Op, cfg: Any) -> bool:
    """Whether a policy applies to parts of the op. An op made by `remat` or `with_policy` is not changed inside."""
    return isinstance(cfg, Composite) and not hasattr(op.fwd, "made_by")


class LeafPart(NamedTuple):
    """A part without parts, and the call that runs it, if it is in the program of `root`. `whole`: whether its program's x is the
    whole op's."""

    path: str
    op: Op
    cfg: Any
    whole: bool
    program: Lowered | None = None
    call: Call | None = None
    root: Part | None = None

    def dropped(self, needs: Needs = Needs.ALL) -> tuple[str, ...]:
        """The fields that are not kept if these gradients are asked of its root, or of itself without one: another call recomputes
        them, or only a recomputation of y that never runs reads them."""
        call = self.called(needs)
        recomputed, kept = (call.fields, call.kept) if call else ((), needs)
        fields = self.op.fields(self.cfg).items()
        return tuple([name for name, field in fields if name in recomputed or not field.wanted(kept)])

    def called(self, needs: Needs) -> Call | None:
        """The call that runs it if these gradients are asked of its root."""
        return self.root and _program(self.root, needs)[1][self.path]


@functools.lru_cache(maxsize=256)
def _program(root: Part, needs: Needs) -> tuple[Lowered, dict[str, Call]]:
    """The program of a combinator, and its calls by path."""
    program = lower(root.op, root.cfg, needs)
    return program, {join_path(root.path, call.path): call for call in program.calls if call.place is not None}


def leaves_of(op: Op, cfg: Any) -> Iterator[LeafPart]:
    """The ops that an op consists of, in the order of the forward; a repeat's body once, for all gradients."""
    roots: dict[str, Part] = {}
    for part, around in nested(cfg, op=op, stop=lambda part: not has_parts(part.op, part.cfg)):
        in_program = bool(around) and (around[-1].op.lower is not None or around[-1].cfg.as_chain is not None)
        if not has_parts(part.op, part.cfg):
            whole = all(one.op.lower is not None for one in around)
            if in_program:
                root = roots[next(one.path for one in reversed(around) if one.path in roots)]
                program, calls = _program(root, Needs.ALL)
                call = calls[part.path]
                yield LeafPart(part.path, call.op, call.cfg, whole, program, call, root)
            else:
                yield LeafPart(part.path, part.op, part.cfg, whole)
        elif part.op.lower is None and part.cfg.as_chain is not None:
            roots[part.path] = Part(part.path, chain, part.cfg.as_chain)
        elif part.op.lower is not None and not in_program:
            roots[part.path] = part


def within(op: Op, cfg: Any, path: str = "") -> Iterator[Part]:
    """The parts that a policy reaches, the whole first."""
    return (part for part, _ in nested(cfg, op=op, path=path, stop=lambda part: not has_parts(part.op, part.cfg)))


class Kept(NamedTuple):
    """The path of a step, or of a field that it keeps. `waits`: the field is only in its pending."""

    path: str
    field: Field | None = None
    waits: bool = False


def kept_paths(op: Op, cfg: Any, path: str = "") -> Iterator[Kept]:
    """The paths of the steps and of the fields that they keep; a repeat's layers are `*`."""
    for here, own, inner, _ in within(op, cfg, path):
        if here:
            yield Kept(here)
        if not has_parts(own, inner):
            yield from (Kept(join_path(here, name), field) for name, field in own.fields(inner).items())
            yield from (Kept(join_path(here, name), field, True) for name, field in waiting_fields(own, inner).items())
            if own.named is not None:
                of = own.fields(inner)
                yield from (Kept(join_path(here, name), of[name.partition(".")[0]]) for name in own.named.known(inner))


def waiting_fields(op: Op, cfg: Any) -> dict[str, Field]:
    """The fields of an op's pending that its residuals lack."""
    kept = op.fields(cfg)
    return {name: field for name, field in getattr(op.pending, "fields", {}).items() if name not in kept}


class Holder(NamedTuple):
    """A field and its action. `value`: the value of a program that it holds, or None for a tensor of its own. `given`: whether it
    holds an input of the whole op."""

    path: str
    action: Action | None
    given: bool
    program: Lowered | None = None
    value: int | None = None


def actions_of(op: Op, late: bool = False) -> dict[str, Action]:
    """The actions for the saved fields of a packed op; if `late`, for the fields of its pending alone."""
    made_by: Any = getattr(op.fwd, "made_by", (None, None))
    return dict(made_by[1][1 + late]) if made_by[0] is packed else {}


def holders(op: Op, cfg: Any) -> Iterator[Holder]:
    """The fields of all parts, except params and fields that are recomputed or dropped."""
    for leaf in leaves_of(op, cfg):
        actions = actions_of(leaf.op)
        for name, field, value in _values(leaf):
            action = actions.get(name)
            if not isinstance(action, Drop):
                given = (leaf.program.main, *leaf.program.extras.values()) if leaf.program else ()
                of_x = value in given if leaf.program else field.of_x
                yield Holder(join_path(leaf.path, name), action, leaf.whole and of_x, leaf.program, value)
        for name, action in leaf.op.named.kept(leaf.cfg).items() if leaf.op.named is not None else ():
            yield Holder(join_path(leaf.path, name), action, False)


def _values(leaf: LeafPart) -> Iterator[tuple[str, Field, int | None]]:
    """The fields of a part, and the values that they hold: None for a tensor of its own, or an element of a tuple that is one
    value."""
    fields = {name: field for name, field in leaf.op.fields(leaf.cfg).items() if not field.of_params and name not in leaf.dropped()}
    if leaf.call is None or leaf.program is None:
        yield from ((name, field, None) for name, field in fields.items())
        return
    viewed = leaf.program.origin | {
        out: call.main for call in leaf.program.calls if call.op.view for out in (call.out, *call.gives)
    }
    x = (leaf.call.main, *leaf.call.takes) if leaf.call.takes else leaf.call.main
    parts: tuple[Any, ...] | None = x if isinstance(x, tuple) else None
    alone = parts is None and any(field.alias == "x" for field in leaf.op.fields(leaf.cfg).values())  # a tensor, without parts
    for name, field in fields.items():
        part = (field.alias or "").partition(".")[2] if field.of_x else ""
        if is_remat(leaf.op):
            held: tuple[Any, ...] = (x,) if parts is None else parts
        elif part and (alone or (parts is not None and int(part) >= len(parts))):  # an element that x lacks under this config
            held = ()
        elif field.of_x:
            held = (x if not part else None if parts is None else parts[int(part)],)
        else:
            held = (leaf.call.out if field.alias == "y" else None,)
        for value in held:
            while value is not None and not isinstance(value, tuple) and value in viewed:
                value = viewed[value]
            yield name, field, None if isinstance(value, tuple) else value


def keeps_inside(op: Op, cfg: Any) -> bool:
    """Whether an op keeps anything but its inputs."""
    return any(not holder.given for holder in holders(op, cfg))


def what_is_kept(op: Op, cfg: Any) -> set[tuple[str, Action | None]]:
    """The fields of all parts with their actions, and the fields that only a pending has if they have an action."""
    return {(holder.path, holder.action) for holder in holders(op, cfg)} | set(_waiting(op, cfg))


def _waiting(op: Op, cfg: Any) -> Iterator[tuple[str, Action | None]]:
    for part in steps(cfg, op=op):  # for a remat, too: its pending is its parts' pending
        yield from ((join_path(part.path, name), action) for name, action in actions_of(part.op, late=True).items())


def two_forms(op: Op, cfg: Any) -> Iterator[tuple[str, dict[str, Action | None]]]:
    """The tensors that fields hold in more than one form: the tensor's name, and the action of each of these fields."""
    tensors: dict[Any, list[Holder]] = {}
    for holder in holders(op, cfg):
        if holder.value is not None:
            tensors.setdefault((id(holder.program), holder.value), []).append(holder)
    for (_, value), found in tensors.items():
        if len({holder.action for holder in found}) > 1:
            calls = found[0].program.calls if found[0].program else ()
            writer = next((call for call in calls if value in (call.out, *call.gives)), None)
            yield f"the output of {writer.path}" if writer else "the input", {one.path: one.action for one in found}


def kept_fields(residuals: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of residuals or pending and their values, by path."""
    if isinstance(residuals, Saved):
        for name in residuals.fields:
            here, value = join_path(path, name), getattr(residuals, name)
            yield here, value
            yield from ((join_path(here, inner), one) for inner, one in value.items()) if type(value) is dict else ()
    elif residuals is not None:
        for name, part in residuals.items():
            yield from kept_fields(part, join_path(path, name))
