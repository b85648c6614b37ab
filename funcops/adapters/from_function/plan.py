"""Which products of a traced graph to compute again, so that what is kept fits into a number of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import fx

from funcops.adapters.from_function.cut import Cut, Cutter, cheap, maker, nbytes
from funcops.adapters.from_function.joint import draws
from funcops.engine.residuals.policy import Recompute


class Plan(NamedTuple):
    """The names of the tensors to compute again, the bytes that are kept then, and the floating-point operations of what is
    computed again, as a share of a forward and backward."""

    names: tuple[str, ...]
    kept_bytes: int
    extra: float


def plans(cutter: Cutter, asked: Sequence[bool], budget: int, flops: Callable[[Any, Any, Any, Any], int]) -> Iterator[Plan]:
    """Keep all products; compute all again; and, by bisection, the fewest that fit, in the order of operations per byte."""

    def cost(node: fx.Node) -> int:
        value = [n.meta.get("val") if isinstance(n, fx.Node) else n for n in node.args]
        return flops(node.target, value, node.kwargs, node.meta.get("val"))

    def tried(count: int) -> Plan:
        free = dear[:count]
        cut = cutter.cut(asked, {node: Recompute() for node in free})
        again = {n for n in cut.second | cut.third if n in cutter.first and not cheap(n)}
        names = tuple([cutter.names[node] for node in free if maker(node) in again])
        return Plan(names, kept_bytes(cutter, cut), sum(map(cost, again)) / whole)

    own = [node for node in cutter.named() if not cheap(maker(node)) and not draws(maker(node))]
    base = cutter.cut(asked, {})
    whole = max(1, sum([cost(node) for node in cutter.first | base.second | base.third]))
    dear = sorted(own, key=lambda node: cost(maker(node)) / max(1, nbytes(node) or 0))
    fewest, most = 0, len(dear)
    found = [tried(fewest), tried(most)]
    while most - fewest > 1 and found[0].kept_bytes > budget:  # fewer bytes are kept, the more may be computed again
        middle = (fewest + most) // 2
        found.append(tried(middle))
        fewest, most = (fewest, middle) if found[-1].kept_bytes <= budget else (middle, most)
    yield from {plan.names: plan for plan in found}.values()


def kept_bytes(cutter: Cutter, cut: Cut) -> int:
    """The bytes that a cut keeps beside the params, and beside x if the caller holds it."""
    given = cutter.leaves if cutter.held else cutter.leaves[: cutter.params]
    return sum([nbytes(node) or 0 for node in cut.kept if node not in given])
