"""`packed`: an op that keeps some of its fields compressed, in the host's memory, or not at all.

Fields are packed right after the forward and unpacked before the half of the backward that reads them, unless it reads the packed
form; a field that only wgrad reads passes through dgrad into the pending still packed. A field that only the pending has, such as
dy, is packed right after dgrad. A full backward packs it too: it equals dgrad then wgrad, bit for bit.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from funcops.engine.contract.by_config import class_by
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import Op, wrap
from funcops.engine.contract.schema import DGRAD, RECOMPUTE, WGRAD, Donated, Phase, Saved, open_node
from funcops.engine.errors import in_step, require
from funcops.engine.residuals.forms import Packed, block_of, from_form, to_form
from funcops.engine.residuals.policy import Action, Compress, Drop
from funcops.memory.away import let_go

Actions = tuple[tuple[str, Action], ...]  # by field


@functools.lru_cache(maxsize=256)
def packed(op: Op, actions: Actions, late: Actions = ()) -> Op:
    """The op with an action for some fields of its residuals, and `late` ones for fields of its pending alone. Its config, params
    and dx are the op's own."""

    def fwd(params: Any, x: Any, cfg: Any, *, needs: Needs = Needs.ALL) -> tuple[Any, Any]:
        y, node = op.fwd(params, x, cfg, needs=needs)
        if node is not None:
            values = {name: (getattr(node, name), action) for name, action in actions}
            node.set(**{name: to_place(name, value, action) for name, (value, action) in values.items() if value is not None})
        return y, node

    every = (*actions, *late)
    opened = functools.partial(_opened, every)

    def dgrad(residuals: Any, dy: Any, cfg: Any) -> tuple[Any, Any]:
        before = residuals._node if type(residuals) is Donated else residuals
        forms = {name: getattr(before, name, None) for name, _ in every}
        node, plain = opened(f"{op.name}_dgrad", residuals, op.keeps, cfg, DGRAD, dy)
        dx, waiting = op.dgrad(node, dy, cfg)
        if isinstance(waiting, Saved):
            same = {n: f for n, f in forms.items() if n in waiting.fields and getattr(waiting, n) is plain.get(n, f)}
            waits = {n: to_place(n, t, a) for n, a in late if (t := getattr(waiting, n)) is not None}
            let_go([form for n, form in same.items() if n not in plain])
            waiting = waiting.copy(**same, **waits)
        return dx, waiting

    def plain(pending: Any, cfg: Any) -> Any:
        if pending is None or op.pending is None:
            return pending
        return opened(f"{op.name}_wgrad", pending, op.pending, cfg, WGRAD)[0]

    def wgrad(pending: Any, cfg: Any, *, into: Any = None) -> Any:
        return op.wgrad(plain(pending, cfg), cfg, into=into)

    def products(pending: Any, cfg: Any, *, into: Any) -> Any:
        if late:  # products that wait to be joined would be unpacked: do not join
            wgrad(pending, cfg, into=into)
            return []
        return op.products(plain(pending, cfg), cfg, into=into)

    def bwd(residuals: Any, dy: Any, cfg: Any, *, into: Any = None) -> tuple[Any, Any]:
        if late:
            dx, waiting = dgrad(residuals, dy, cfg)
            return wgrad(waiting, cfg, into=into), dx
        return op.bwd(opened(f"{op.name}_bwd", residuals, op.keeps, cfg, DGRAD | WGRAD, dy)[0], dy, cfg, into=into)

    def recompute(residuals: Any, cfg: Any) -> Any:
        return op.recompute(opened(f"{op.name}_recompute", residuals, op.keeps, cfg, RECOMPUTE)[0], cfg)

    changes = {
        "named": op.named,
        "again": op.again,
        "recompute": recompute,
        "fwd": fwd,
        "dgrad": dgrad,
        "wgrad": wgrad,
        "products": products,
        "bwd": bwd,
    }
    return wrap(op, (packed, (op, actions, late)), **(changes if op.recompute else changes | {"recompute": None}))


def to_place(name: str, t: Any, action: Action) -> Any:
    """`to_form` of a field; an error of a place has the field's name before it."""
    try:
        return to_form(t, action)
    except (OSError, TypeError, ValueError) as error:  # of a place: the chain around puts the path of the step before the name
        in_step(error, name)
        raise


def from_place(name: str, form: Any) -> Any:
    """`from_form` of a field."""
    try:
        return from_form(form)
    except (OSError, TypeError, ValueError) as error:
        in_step(error, name)
        raise


def _in_blocks(value: Any) -> bool:
    """Whether `value` is a whole tensor as codes with one scale per block, which a kernel can read without `from_form`: see
    `block_of`."""
    whole = type(value) is Packed and isinstance(value.action, Compress) and value.view is None
    return whole and isinstance(value.parts[0], Tensor) and block_of(value) > 0


def _opened(
    actions: Actions, where: str, kept: Any, declared: Any, cfg: Any, phase: Phase, dy: Any = None
) -> tuple[Any, dict[str, Any]]:
    """A copy of a node with the fields that this phase reads unpacked, and these fields."""
    node = open_node(where, kept, class_by(where, declared, cfg), cfg, dy=dy)
    read = {name: action for name, action in actions if name in node.fields and phase & node.fields[name].needed_by}
    for name, action in read.items():
        missed = isinstance(action, Drop) and node.fields[name].wanted(node.needs)
        require(not missed, where, f"{node.kind}.{name}", "kept, because this half of the backward reads it", "dropped (policy)")
    kept_as = {name: getattr(node, name) for name in read}
    plain = {name: t if node.fields[name].blocks and _in_blocks(t) else from_place(name, t) for name, t in kept_as.items()}
    return node.copy(**plain), plain
