"""The parts of an op that a policy reaches, and which of their fields hold one tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from funcops.memory.packing import packed
from funcops.memory.remat import RematResiduals
from funcops.needs import Needs
from funcops.op import Op
from funcops.program.lower import Call, Lowered, Value, lower
from funcops.program.values import parts_of
from funcops.residuals.policy import Action, Drop
from funcops.schema import Saved


def has_parts(op: Op, cfg: Any) -> bool:
    """Whether a policy reaches into the op. What is made of another op, by `remat` or `with_policy`, keeps what that says."""
    return hasattr(cfg, "with_parts") and not hasattr(op.fwd, "made_by")


def inner_path(path: str, name: Any) -> str:
    """That of a part; a part without a name has its combinator's."""
    return path if name is None else f"{path}.{name}" if path else str(name)


class Holder(NamedTuple):
    """A field of a part, and what becomes of it. It holds a value of a program, or (None) a tensor of the part's own; `given`:
    one that the whole is given."""

    path: str
    action: Action | None
    given: bool
    program: Lowered | None = None
    value: int | None = None


def holders(op: Op, cfg: Any, path: str = "", whole: bool = True) -> Iterator[Holder]:
    """The fields of all parts, but for params and what is computed again. `whole`: whether it is itself no part of a repeat."""
    if not has_parts(op, cfg):
        actions = actions_of(op)
        for name, field in op.fields().items():
            if not field.of_params and not isinstance(actions.get(name), Drop):
                yield Holder(inner_path(path, name), actions.get(name), whole and field.of_x)
        return
    if op.lower is None:
        for name, inner, inner_cfg in parts_of(cfg):
            yield from holders(inner, inner_cfg, inner_path(path, name), False)
        return
    program = lower(op, cfg, Needs.ALL)
    viewed = program.origin | {out: call.main for call in program.calls if call.op.view for out in (call.out, *call.gives)}
    given = (program.main, *program.extras.values()) if whole else ()

    for call in program.calls:
        here = inner_path(path, call.path or None)
        if has_parts(call.op, call.cfg):
            yield from holders(call.op, call.cfg, here, False)
        elif call.place is not None:
            for name, value, action in _held(call):
                while not isinstance(value, tuple) and value in viewed:
                    value = viewed[value]
                known = None if isinstance(value, tuple) else value
                yield Holder(inner_path(here, name), action, known in given, program, known)


def _held(call: Call) -> Iterator[tuple[str, Value, Action | None]]:
    """The fields of a call, the values that they hold (None for the op's own, and for a part of a value that is a tuple), and what
    becomes of them."""
    x = (call.main, *call.takes) if call.takes else call.main
    if call.op.residuals is RematResiduals:
        yield from (("x", value, None) for value in (x if isinstance(x, tuple) else (x,)))
        return
    actions, fields = actions_of(call.op), call.op.fields()
    alone = not isinstance(x, tuple) and any(field.alias == "x" for field in fields.values())  # x is a tensor, without parts
    for name, field in fields.items():
        part = (field.alias or "").partition(".")[2] if field.of_x else ""
        if not field.of_params and name not in call.fields and not isinstance(actions.get(name), Drop) and not (part and alone):
            value = x if field.of_x else call.out if field.alias == "y" else None
            if part:
                value = x[int(part)] if isinstance(x, tuple) else None
            yield name, value, actions.get(name)


def actions_of(op: Op) -> dict[str, Action]:
    """What becomes of the fields of an op that is packed."""
    made, args = getattr(op.fwd, "made_by", (None, ()))
    return dict(args[1]) if made is packed else {}


def keeps_inside(op: Op, cfg: Any) -> bool:
    """Whether an op keeps anything but what it is given."""
    return any(not holder.given for holder in holders(op, cfg))


def what_is_kept(op: Op, cfg: Any) -> set[tuple[str, Action | None]]:
    """The fields of all parts and what becomes of them."""
    return {(holder.path, holder.action) for holder in holders(op, cfg)}


def two_forms(op: Op, cfg: Any) -> Iterator[tuple[str, dict[str, Action | None]]]:
    """What fields hold in more than one form: which tensor, and the action for each of these fields."""
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
    """The fields of residuals by path, a repeat's layers written `*`, and what they hold."""
    if isinstance(residuals, Saved):
        yield from ((inner_path(path, name), getattr(residuals, name)) for name in residuals.fields)
    elif residuals is not None:
        for name, part in residuals.items():
            yield from kept_fields(part, inner_path(path, "*" if isinstance(name, int) else name))
