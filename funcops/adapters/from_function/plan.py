"""Which products of a traced graph to compute again, so that what is kept fits into a number of bytes; and a run of it that keeps
little."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from funcops.adapters.from_function.calls import find_calls
from funcops.adapters.from_function.cut import Cut, Cutter, args_again, base_of, cheap, maker, nbytes
from funcops.adapters.from_function.joint import draws
from funcops.engine.residuals.policy import Action, Recompute, Save


class Plan(NamedTuple):
    """The actions for tensors by name, the bytes that are kept then, and the floating-point operations of what is computed again,
    as a share of a forward and backward."""

    actions: dict[str, Action]
    kept_bytes: int
    extra: float


def plans(cutter: Cutter, asked: Sequence[bool], budget: int, flops: Callable[[Any, Any, Any, Any], int]) -> list[Plan]:
    """Keep all products; compute all again; and, by bisection, the fewest that fit, in the order of operations per byte. A layer is
    computed again from its own input, so that a backward holds one at a time; only if that is too much, two are, or four, from the
    input of the first."""

    def cost(node: fx.Node) -> int:
        value = [n.meta.get("val") if isinstance(n, fx.Node) else n for n in node.args]
        return flops(node.target, value, node.kwargs, node.meta.get("val"))

    def tried(count: int, fixed: frozenset[fx.Node] = frozenset()) -> Plan:
        actions: dict[fx.Node, Action] = {node: Recompute() for node in dear[:count] if node not in fixed}
        kept = cutter.cut(asked, actions, fixed).kept
        actions |= {node: Save() for node in kept if node in fixed}
        cut = cutter.cut(asked, actions)
        again = {n for n in cut.second | cut.third if n in cutter.first and not cheap(n)}
        said = {cutter.names[n]: action for n, action in actions.items() if action == Save() or maker(n) in again}
        return Plan(said, kept_bytes(cutter, cut), sum(map(cost, again)) / whole)

    own, necks = _choices(cutter)
    base = cutter.cut(asked, {})
    whole = max(1, sum([cost(node) for node in cutter.first | base.second | base.third]))
    dear = sorted(own, key=lambda node: cost(maker(node)) / max(1, nbytes(node) or 0))
    found = [tried(0), tried(len(dear))]
    step = 1
    while not any([plan.kept_bytes <= budget for plan in found if plan is not found[1]]) and step <= 2 * len(necks) + 1:
        fixed = frozenset(necks[step - 1 :: step])
        fewest, most = 0, len(dear)
        found.append(tried(most, fixed))
        fits = found[-1].kept_bytes <= budget
        while fits and most - fewest > 1:  # fewer bytes are kept, the more may be computed again
            middle = (fewest + most) // 2
            found.append(tried(middle, fixed))
            fewest, most = (fewest, middle) if found[-1].kept_bytes <= budget else (middle, most)
        step *= 2
    return found


def run_once(cutter: Cutter, asked: Sequence[bool], leaves: Sequence[Tensor], dys: Sequence[Tensor]) -> None:
    """Find the fastest call of each node, in a run in which each layer is computed again from its own input."""
    own, necks = _choices(cutter)
    cut = cutter.cut(asked, {node: Recompute() for node in own if node not in necks}, frozenset(necks))
    values: dict[fx.Node, Any] = dict(zip(cutter.leaves, leaves, strict=True))
    kept = {*cut.kept, *cutter.leaves}
    with torch.no_grad():
        find_calls(cutter.root, cutter.in_order(cutter.first, cutter.leaves, cutter.ys), values, kept)
        given = [*cut.kept, *[leaf for leaf in cutter.leaves if leaf not in cut.kept], *cutter.dys]
        values.update(zip(cutter.dys, dys, strict=True))
        find_calls(cutter.root, cutter.in_order(cut.second | cut.third, given, [*cut.dx, *cut.dparams]), values, (), args_again)


def _choices(cutter: Cutter) -> tuple[list[fx.Node], list[fx.Node]]:
    """The products and what else is dear, and the necks."""
    known = cutter.named()
    own = [node for node in known if not cheap(maker(node)) and not draws(maker(node))]
    return own, [node for node in _necks(cutter) if node in known]


def _necks(cutter: Cutter) -> list[fx.Node]:
    """The tensors on which alone, beside params and what is computed from either x or params, all later values depend."""
    order = [node for node in cutter.order if node in cutter.first]
    of_x, of_params = set(cutter.leaves[cutter.params :]), set(cutter.leaves[: cutter.params])
    last: dict[fx.Node, int] = {}
    for i, node in enumerate(order):
        for found in (of_x, of_params):
            if not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        for read in node.all_input_nodes:
            last[base_of(read)] = i
    live, necks = set[fx.Node](), set[fx.Node]()
    for i, node in enumerate(order):
        live = {n for n in live if last[n] > i}
        whole = base_of(node) is node and nbytes(node) is not None  # neither a view nor a tuple
        if whole and node in of_x and node in of_params and last.get(node, 0) > i:
            live.add(node)
        necks |= live if len(live) == 1 else set()
    return [node for node in order if node in necks]


def kept_bytes(cutter: Cutter, cut: Cut) -> int:
    """The bytes that a cut keeps beside the params, and beside x if the caller holds it."""
    given = cutter.leaves if cutter.held else cutter.leaves[: cutter.params]
    return sum([nbytes(node) or 0 for node in cut.kept if node not in given])
