"""`packed`: an op of which fields wait in another form: compressed, in the host's memory, or not at all.

They are packed right after the forward and unpacked before the half of the backward that reads them, unless that reads them as they
are; what only wgrad reads goes packed through dgrad into the pending. What is in the pending alone, such as dy, is packed right
after dgrad, also by a backward in one go: that is dgrad then wgrad, bit for bit.
"""

from __future__ import annotations

import functools
from typing import Any

from funcops.contract.needs import Needs
from funcops.contract.op import Op, wrap
from funcops.contract.schema import DGRAD, RECOMPUTE, WGRAD, Donated, Phase, Saved, open_node
from funcops.errors import require
from funcops.residuals.forms import from_form, in_blocks, to_form
from funcops.residuals.policy import Action, Drop

Actions = tuple[tuple[str, Action], ...]  # by field


@functools.lru_cache(maxsize=256)
def packed(op: Op, actions: Actions) -> Op:
    """The op with an action for some fields of its residuals and of its pending. Its config is the op's own, and so are its params
    and dx."""
    late = {name: action for name, action in actions if name not in op.fields()}  # of the pending alone

    def fwd(params: Any, x: Any, cfg: Any, *, needs: Needs = Needs.ALL) -> tuple[Any, Any]:
        y, node = op.fwd(params, x, cfg, needs=needs)
        if node is not None:
            values = {name: (getattr(node, name), action) for name, action in actions if name not in late}
            node.set(**{name: to_form(value, action) for name, (value, action) in values.items() if value is not None})
        return y, node

    opened = functools.partial(_opened, actions)

    def dgrad(residuals: Any, dy: Any, cfg: Any) -> tuple[Any, Any]:
        before = residuals._node if type(residuals) is Donated else residuals
        forms = {name: getattr(before, name, None) for name, _ in actions}
        node, plain = opened(f"{op.name}_dgrad", residuals, op.residuals, cfg, DGRAD)
        dx, waiting = op.dgrad(node, dy, cfg)
        if isinstance(waiting, Saved):
            same = {n: f for n, f in forms.items() if n in waiting.fields and getattr(waiting, n) is plain.get(n, f)}
            waits = {n: to_form(t, a) for n, a in late.items() if (t := getattr(waiting, n)) is not None}
            waiting = waiting.copy(**same, **waits)
        return dx, waiting

    def plain(pending: Any, cfg: Any) -> Any:
        if pending is None or op.pending is None:
            return pending
        return opened(f"{op.name}_wgrad", pending, op.pending, cfg, WGRAD)[0]

    def wgrad(pending: Any, cfg: Any, *, into: Any = None) -> Any:
        return op.wgrad(plain(pending, cfg), cfg, into=into)

    def products(pending: Any, cfg: Any, *, into: Any) -> Any:
        if late:  # what is joined waits for all others, unpacked
            wgrad(pending, cfg, into=into)
            return []
        return op.products(plain(pending, cfg), cfg, into=into)

    def bwd(residuals: Any, dy: Any, cfg: Any, *, into: Any = None) -> tuple[Any, Any]:
        if late:
            dx, waiting = dgrad(residuals, dy, cfg)
            return wgrad(waiting, cfg, into=into), dx
        return op.bwd(opened(f"{op.name}_bwd", residuals, op.residuals, cfg, DGRAD | WGRAD)[0], dy, cfg, into=into)

    def recompute(residuals: Any, cfg: Any) -> Any:
        return op.recompute(opened(f"{op.name}_recompute", residuals, op.residuals, cfg, RECOMPUTE)[0], cfg)

    changes = {"recompute": recompute, "fwd": fwd, "dgrad": dgrad, "wgrad": wgrad, "products": products, "bwd": bwd}
    return wrap(op, (packed, (op, actions)), **(changes if op.recompute else changes | {"recompute": None}))


def _opened(actions: Actions, where: str, kept: Any, cls: Any, cfg: Any, phase: Phase) -> tuple[Any, dict[str, Any]]:
    """A node of its own with what this phase reads unpacked, and these fields."""
    node = open_node(where, kept, cls, cfg)
    read = {name: action for name, action in actions if name in node.fields and phase & node.fields[name].needed_by}
    for name, action in read.items():
        missed = isinstance(action, Drop) and node.fields[name].wanted(node.needs)
        require(not missed, where, f"{node.kind}.{name}", "kept, as this half of the backward reads it", "dropped (policy)")
    kept_as = {name: getattr(node, name) for name in read}
    plain = {name: t if node.fields[name].blocks and in_blocks(t) else from_form(t) for name, t in kept_as.items()}
    filled = node.copy(**plain)
    if node is not kept:
        node.empty()
    return filled, plain
