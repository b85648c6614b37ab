"""The pausing functions of combinators that are lowered to programs, and of a repeat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from funcops.engine.backend import scopes
from funcops.engine.compose.layers import accumulators, collected
from funcops.engine.compose.step import split_x
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import Op
from funcops.engine.contract.pausing import Pauses, Pausing, ran
from funcops.engine.contract.schema import open_node
from funcops.engine.errors import in_step
from funcops.engine.program import programs
from funcops.engine.program.turns import turns
from funcops.engine.residuals.nested import part

__all__ = ["LOWERED"]


def _fwd(params: Any, x: Any, cfg: Any, *, needs: Needs = Needs.ALL) -> Pauses:
    op = cfg.lowered_by
    main, extras = split_x(f"{op.name}_fwd", x, cfg)
    return (yield from ran(programs.forward(op, cfg, needs, main, pausing=True)(params, main, extras)))


def _dgrad(residuals: Any, dy: Any, cfg: Any) -> Pauses:
    return (yield from programs.pausing_dgrad(cfg.lowered_by, residuals, dy, cfg))


def _bwd(residuals: Any, dy: Any, cfg: Any, *, into: Any = None) -> Pauses:
    return (yield from programs.pausing_bwd(cfg.lowered_by, residuals, dy, cfg, into))


LOWERED = Pausing(_fwd, _dgrad, _bwd)


def _in_turn(
    order: Sequence[int], read: Callable[[int], Any], run: Callable[[int, Any], Pauses], bring: Callable[[int], Any] | None
) -> Pauses:
    """`funcops.engine.compose.layers.in_turn` with the pauses of a body that can pause, which has nothing to prefetch by itself."""
    found: list[Any] = [None for _ in order]
    i = order[0]
    try:
        for kind, i in turns(order, bring is not None):
            if kind == "start":
                bring(i)  # type: ignore[misc]
            elif kind == "run":
                own = run(i, read(i))
                # the layer's name is closed at each pause, as steps of another part run meanwhile
                found[i] = yield from scopes.resumed(str(i), "", own) if scopes.on else own
    except Exception as error:
        in_step(error, i)
        raise
    return found


# over layers: the call of a layer, what takes its result, what brings its offloaded tensors, what makes the results of all
Walk = tuple[Callable[[int, Any], Any], Callable[[Any], Any], Callable[[int], Any] | None, Callable[[list[Any]], Any]]


def _walked(order: Sequence[int], read: Callable[[int], Any], walk: Walk) -> Pauses:
    call, took, bring, end = walk

    def run(i: int, given: Any) -> Pauses:
        return took((yield from ran(call(i, given))))

    return end((yield from _in_turn(order, read, run, bring)))


def of_layers(forward: Any, backward: Any, residuals: type, pending: Any, repeat: Callable[[], Op]) -> Pausing:
    """The pausing functions of a repeat, from the beginnings of its walks over the layers; its own, if its body cannot pause."""

    # `repeat` is called late: that op is made with what this function returns
    def fwd(params: Any, x: Any, cfg: Any, *, needs: Needs = Needs.ALL) -> Pauses:
        if not cfg.pauses:
            return repeat().fwd(params, x, cfg, needs=needs)
        layers, walk = forward(params, x, cfg, needs, True)
        return (yield from _walked(range(cfg.times), lambda i: layers[i], walk))

    def back(where: str, kept: Any, dy: Any, cfg: Any, sums: Callable[[Any], Any]) -> Pauses:
        node = open_node(where, kept, residuals, cfg)
        dx, found = yield from _walked(range(cfg.times)[::-1], lambda i: part(node, i), backward(node, dy, cfg, sums(node), True))
        # with the node, as `kept` may be a cell, which does not tell its needs
        return dx, found, node

    def dgrad(kept: Any, dy: Any, cfg: Any) -> Pauses:
        if not cfg.pauses:
            return repeat().dgrad(kept, dy, cfg)
        dx, waiting, node = yield from back("repeat_dgrad", kept, dy, cfg, lambda node: None)
        return dx, pending(waiting, cfg, node.needs)

    def bwd(kept: Any, dy: Any, cfg: Any, *, into: Any = None) -> Pauses:
        if not cfg.pauses:
            return repeat().bwd(kept, dy, cfg, into=into)
        where = "repeat_bwd"
        dx, found, _ = yield from back(where, kept, dy, cfg, lambda node: accumulators(where, into, repeat(), cfg, node, dy))
        return collected(found, into, cfg), dx

    return Pausing(fwd, dgrad, bwd)
