"""Running a piece of a plan: several steps by one rule, or one after another where the rule will not have their inputs."""

from __future__ import annotations

from typing import Any, NamedTuple

from funcops.compose.again import Dropped
from funcops.compose.plan import Piece
from funcops.compose.step import Step, part, run_backward
from funcops.errors import in_step
from funcops.needs import Needs
from funcops.schema import open_node


class Planned(NamedTuple):
    """A piece with what a chain knows of its steps: their needs, and what each leaves out."""

    piece: Piece
    needs: tuple[Needs, ...]
    left_out: tuple[Dropped | None, ...]


def forward_piece(planned: Planned, params: dict[str, Any], main: Any, extras: dict[str, Any], kept: Any) -> Any:
    """main after the piece; the residuals go into `kept`, a given name into `extras`."""
    steps, rule = planned.piece.steps, planned.piece.rule
    found: Any = NotImplemented
    name = ""
    try:
        if rule is not None and all([type(params[step.name]) is step.op.params for step in steps]):
            found = rule.run(steps, [params[step.name] for step in steps], main, extras, planned.needs)
        if found is NotImplemented:
            nodes = []
            for step, wanted in zip(steps, planned.needs, strict=True):
                name = step.name
                main, node = forward_step(step, params, main, extras, wanted)
                nodes.append(node)
        else:
            main, nodes = found
        for step, node, left_out in zip(steps, nodes, planned.left_out, strict=True):
            kept[step.name] = node
            if left_out is not None and node is not None:
                left_out.cut(node, kept, params[left_out.producer.name])
    except Exception as error:
        in_step(error, name or _joined(steps))
        raise
    return main


def _joined(steps: tuple[Step, ...]) -> str:
    """The name of steps that run as one: all of theirs."""
    return "+".join([step.name for step in steps])


def forward_step(step: Step, params: dict[str, Any], main: Any, extras: dict[str, Any], needs: Needs) -> tuple[Any, Any]:
    main, node = step.op.fwd(params[step.name], step.x(main, extras) if step.names else main, step.cfg, needs=needs)
    if step.gives:
        extras.update(zip(step.gives, main[1:], strict=True))
        main = main[0]
    return main, node


def backward_piece(
    planned: Planned, node: Any, dy: Any, gradients: dict[str, Any], results: dict[str, Any], sums: Any, where: str
) -> Any:
    """dy of what comes before the piece; its steps' dparams, or without `sums` their pendings, go into `results`."""
    steps, rule = planned.piece.steps, planned.piece.rule
    found: Any = NotImplemented
    name = ""
    try:
        ready = rule is not None and dy is not None and (sums is not None or not rule.whole)
        if ready and all([node[step.name] is not None for step in steps]):
            kept = []
            for i, step in enumerate(steps):
                name = step.name
                kept.append(_read(planned, i, node, where))
            name = ""
            found = rule.run(steps, kept, dy, gradients)  # type: ignore[union-attr]
            kept.clear()  # so that their memory is free for the weight gradients
        if found is NotImplemented:
            for i in reversed(range(len(steps))):
                name = steps[i].name
                dy = backward_step(steps[i], planned.left_out[i], node, dy, gradients, results, sums, where)
            return dy
        dy, pendings = found
        recipes = [_recipe(left_out, node) for left_out in planned.left_out]
        if node.donated:  # all of them, before the first weight gradient takes memory
            node.update(dict.fromkeys([step.name for step in steps]))
        if rule.whole:  # type: ignore[union-attr]
            recipes = [None] * len(steps)
        rows = list(zip(steps, planned.left_out, pendings, recipes, strict=True))
        for step, left_out, waiting, recipe in rows[::-1]:
            name = step.name
            if sums is None:
                results[name] = waiting
                if recipe is not None and waiting is not None:
                    results[left_out.key] = recipe if node.donated else recipe.twin()  # type: ignore[union-attr]
                continue
            if recipe is not None and waiting is not None:
                waiting = left_out.fill(where, waiting, left_out.value(where, recipe))  # type: ignore[union-attr]
            results[name] = step.op.wgrad(waiting, step.cfg, into=sums[name])
    except Exception as error:
        in_step(error, name or _joined(steps))
        raise
    return dy


def _read(planned: Planned, i: int, node: Any, where: str) -> Any:
    """The residuals of a step, after every check, with what it left out where its dgrad reads that."""
    left_out, step = planned.left_out[i], planned.piece.steps[i]
    kept = open_node(where, node[step.name], step.op.residuals, step.cfg)
    if left_out is not None and left_out.in_dgrad and left_out.key in node:
        return left_out.fill(where, kept, left_out.value(where, node[left_out.key]))
    return kept


def _recipe(left_out: Dropped | None, node: Any) -> Any:
    if left_out is None or left_out.key not in node:
        return None
    recipe = node[left_out.key]
    if node.donated:
        node[left_out.key] = None
    return recipe


def backward_step(
    step: Step, left_out: Dropped | None, node: Any, dy: Any, gradients: dict[str, Any], results: dict[str, Any], sums: Any,
    where: str,
) -> Any:  # fmt: skip
    """As `backward_piece`, for one step."""
    name, whole = step.name, sums is not None
    if step.gives:
        dy = (dy, *[gradients.pop(given, None) for given in step.gives])
        dy = None if all(d is None for d in dy) else dy
    kept = part(node, name) if node.donated else node[name]
    into = sums[name] if sums else None
    recipe = _recipe(left_out, node)
    if left_out is not None and recipe is not None:
        if whole or left_out.in_dgrad:
            kept = left_out.fill(where, kept, left_out.value(where, recipe))
        dy, results[name] = run_backward(step.op, step.cfg, kept, dy, whole, into)
        if not whole and results[name] is not None:
            results[name] = left_out.emptied(results[name])
            results[left_out.key] = recipe if node.donated else recipe.twin()
    else:
        dy, results[name] = run_backward(step.op, step.cfg, kept, dy, whole, into)
    return step.split(dy, gradients) if step.names else dy
