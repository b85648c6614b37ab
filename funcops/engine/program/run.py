"""The helpers that the functions of a program call besides ops: checks, errors with the path of their step, and parts of trees."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor

from funcops.engine.backend import notes, scopes
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import Op
from funcops.engine.contract.schema import Donated, Saved, open_node
from funcops.engine.errors import FLOATS, check, describe, fail, in_step
from funcops.engine.program.lower import Call
from funcops.engine.program.rules import Rule
from funcops.engine.program.values import add
from funcops.engine.residuals.donate import donate as donate  # programs call it as run.donate, and `part` so, too
from funcops.engine.residuals.nested import needs_of
from funcops.engine.residuals.nested import part as part
from funcops.engine.trees import WithExtras, at, put

__all__ = ["check_names", "filled", "taken_apart", "tied"]


def in_path(error: Exception, path: str) -> None:
    if path:
        in_step(error, path)


def check_names(where: str, what: str, tree: Any, cfg: Any) -> None:
    """Raise unless a tree is a dict with the names of the config's parts."""
    names, noun = cfg.names, cfg.part
    if not isinstance(tree, dict):
        fail(where, what, f"a dict by {noun} name: {', '.join(names)}", describe(tree), TypeError)
    if tree.keys() != names.keys():
        missing, extra = sorted(names.keys() - tree.keys()), sorted(tree.keys() - names.keys())
        none = f": a {noun} without params has None" if missing else ""
        fail(where, what, f"a dict by {noun} name: {', '.join(names)}", f"missing {missing}, extra {extra}{none}")


def unlike(x: Tensor, branch: Any) -> NoReturn:
    """Raise, as the body of a skip gave something other than a tensor like x."""
    fail("skip_fwd", "body(x)", f"like x, {describe(x)}", describe(branch))
    raise AssertionError


def tied(where: str, tree: Any, ties: Iterable[tuple[str, str]], name: str = "params") -> Any:
    """The tree with each tied path holding its source's leaf; `name` is the tree's argument."""
    for path, source in ties:
        if at(tree, path) is not None:
            fail(where, f"{name}.{path}", f"None (it is tied to {source})", describe(at(tree, path)))
        tree = put(tree, path, at(tree, source))
    return tree


def collected(dparams: Any, ties: Iterable[tuple[str, str]]) -> Any:
    """dparams with the gradient at each tied path added to its source's."""
    for path, source in ties:
        total = add(at(dparams, source), at(dparams, path))
        dparams = put(put(dparams, source, total), path, None)
        if scopes.on == scopes.NOTED:
            notes.tell([(source.rpartition(".")[0], "wgrad", f"tied.{source.rpartition('.')[2]}", total)])
    return dparams


def parts_of(dy: Any, like: Any) -> Any:
    """The gradients of the parts of a tuple, nested as `like` is; None for zero."""
    if not isinstance(like, tuple):
        return dy
    if dy is not None and (not isinstance(dy, tuple) or len(dy) != len(like)):
        fail("parallel_bwd", "dy", f"a tuple of {len(like)} (None for zero)", describe(dy), TypeError)
    return tuple([parts_of(d, one) for d, one in zip(dy or (None,) * len(like), like, strict=True)])


def taken_apart(where: str, dy: Any, names: tuple[str, ...]) -> tuple[Any, ...]:
    """The gradients of y's main value and of its named outputs, in order, None for zero."""
    if dy is None:
        return (None,) * (1 + len(names))
    if type(dy) is not WithExtras or not isinstance(dy.extras, dict):
        fail(where, "dy", f"WithExtras with extras {', '.join(names)}, as y is (None for zero)", describe(dy), TypeError)
    if dy.extras.keys() != set(names):
        missing, extra = sorted(set(names) - dy.extras.keys()), sorted(dy.extras.keys() - set(names))
        fail(where, "dy.extras", f"{', '.join(names)}, as in y (None for zero)", f"missing {missing}, extra {extra}")
    found = [dy.extras[name] for name in names]
    for name, gradient in zip(names, found, strict=True):
        if gradient is not None:
            check(where, f"dy.extras.{name}", gradient, (...,), FLOATS)
    return dy.main, *found


def meet(where: str, name: str, dy: Any, gradient: Any) -> None:
    """Raise unless the gradient of an output is like the gradient from its readers inside."""
    if isinstance(dy, Tensor) and isinstance(gradient, Tensor) and (dy.shape != gradient.shape or dy.dtype != gradient.dtype):
        fail(where, f"dy.extras.{name}", f"{describe(gradient)}, as the output is", describe(dy))


def scope_of(where: str, parent: Any, name: Any, cls: Any, cfg: Any) -> Any:
    """The residuals of a chain or parallel inside another; given away if the outer ones were."""
    return open_node(where, part(parent, name), cls, cfg)


def opened(where: str, parent: Any, name: Any, cls: Any, cfg: Any) -> Any:
    """The pending of a chain or parallel inside another, or None."""
    node = part(parent, name)
    return None if node is None else open_node(where, node, cls, cfg)


def pending_of(cls: Any, parts: dict[Any, Any], cfg: Any, needs: Needs) -> Any:
    """The pending of a scope; None if no part has one."""
    for waiting in parts.values():
        if waiting is not None:
            # a step without a pending stays, as None; a recipe that nobody reads does not
            return cls({k: v for k, v in parts.items() if v is not None or k in cfg.names}, cfg=cfg, needs=needs)
    return None


def recipe_of(name: Any) -> str:
    """The name in a pending of the residuals from which the y of that step is recomputed."""
    # the name of a step is an identifier, so it never has brackets
    return f"{name}()"


_ONLY = Needs(x=False, params=False).with_recompute()


def recipe(op: Op, node: Any) -> Any:
    """The part of an op's residuals from which its y is recomputed."""
    if node is None:
        return None
    # the new node would mark stale tensors as fresh
    if not node.fresh():
        node.complain(f"{op.name}_recompute")
    return type(node).keep(node.cfg, _ONLY, **{name: getattr(node, name) for name in node.names})


def recomputed(compute: Any, pending: Any, name: Any, cfg: Any, fields: tuple[str, ...] = (), x: Any = None) -> Any:
    """The y of a step, recomputed from the recipe in the pending of its scope, which is dropped if the pending was given away. The
    recomputed `x` is put into `fields` before."""
    key = recipe_of(name)
    node = None if pending is None else pending.get(key)
    if node is None:
        return None
    y = recomputed_from(compute, node, fields, x, cfg) if fields else compute(node, cfg)
    if pending.donated:
        pending[key] = None
        node.empty()  # it may be held elsewhere
    return y


def recomputed_from(compute: Any, node: Any, fields: tuple[str, ...], x: Any, cfg: Any) -> Any:
    """A y recomputed from residuals that lack x: in a copy of them, x is in these fields."""
    return compute(filled(node, fields, x, needs_of(node)), cfg)


def filled(node: Any, fields: tuple[str, ...], value: Any, needs: Needs) -> Any:
    """Residuals or pending with the recomputed value in these fields, or with each field's own in a dict; a copy, unless they were
    given away."""
    if not isinstance(node, (Saved, Donated)):
        return node  # which the op refuses
    made = node._node if type(node) is Donated else node.twin()
    object.__setattr__(made, "needs", needs)
    made.set(**{name: value[name] if type(value) is dict else value for name in fields if name in made.fields})
    return node if type(node) is Donated else made


def completed(pending: Any, value: Any, needs: Needs) -> Any:
    """A pending with the recomputed x in the fields that its dgrad left out: none, if no gradient needs it, or if what the pending
    holds was made of x."""
    node = pending._node if type(pending) is Donated else pending
    if not isinstance(node, Saved):
        return pending
    lacks = [name for name in node.needs.drop if name in node.fields and node.fields[name].wanted(needs)]
    return filled(pending, tuple(lacks), value, needs)


def forward_piece(rule: Rule, calls: tuple[Call, ...], params: tuple[Any, ...], main: Any, values: dict[int, Any]) -> Any:
    """The result of the rule, or NotImplemented: then the calls run one by one."""
    for call, own in zip(calls, params, strict=True):
        # the op's own function refuses params of another class, and names them
        if call.place is not None and type(own) is not call.op.params:
            return NotImplemented
    return _answer(rule, rule.run(calls, params, main, values), "y, residuals", calls)


def _answer(rule: Rule, found: Any, wanted: str, calls: tuple[Call, ...]) -> Any:
    """The result of a rule, which must be a pair with a part for each call."""
    if found is not NotImplemented and (type(found) is not tuple or len(found) != 2 or len(found[1]) != len(calls)):
        got = f"a pair with {len(found[1])}" if type(found) is tuple and len(found) == 2 else describe(found)
        pair = f"({wanted} of each of {len(calls)} calls), or NotImplemented"
        fail(f"rule {rule.name!r}", "the result of run", pair, got, TypeError)
    return found


def backward_piece(
    rule: Rule,
    calls: tuple[Call, ...],
    trees: dict[int, Any],
    dy: Any,
    gradients: dict[int, Any],
    where: str,
    ys: dict[int, Any] | None = None,
) -> Any:
    """The result of the rule for the dgrads, or NotImplemented; donated residuals are dropped. Errors get their step's path. `ys`:
    the recomputed ys that the dgrads read, by the number of their call."""
    # a rule runs all of its calls, while the calls one by one leave out what gets no gradient
    if dy is None or (type(dy) is tuple and any([d is None for d in dy])):
        return NotImplemented
    kept: list[Any] = []
    for call in calls:
        place = call.place
        kept.append(None if place is None or place.scope is None else trees[place.scope.index][place.name])
        if kept[-1] is None and place is not None:
            return NotImplemented
    path: str | None = None
    try:
        for i, call in enumerate(calls):
            if call.place is not None:
                path = call.path
                kept[i] = _read(call, kept[i], where, ys, rule.settle is not None, dy)
        path = None
        found = _answer(rule, rule.run(calls, kept, dy, gradients), "dx, pending", calls)
    except Exception as error:
        in_path(error, joined(calls) if path is None else path)
        raise
    # only now: what the rule refused, the calls read one by one
    if found is not NotImplemented:
        for call in calls:
            place = call.place
            if place is not None and (tree := trees[place.scope.index]).donated:  # type: ignore[union-attr]
                tree[place.name].empty()  # it may be held elsewhere
                tree[place.name] = None
    return found


def wgrads(rule: Rule, calls: tuple[Call, ...], pendings: tuple[Any, ...], into: tuple[Any, ...], products: Any = None) -> Any:
    """The weight gradients of calls together, or put as products into a list; or NotImplemented: then one by one."""
    if torch.compiler.is_dynamo_compiling():
        return NotImplemented
    nodes = [p._node if type(p) is Donated else p for p in pendings]
    for call, node in zip(calls, nodes, strict=True):  # the op's own function refuses what it must
        if type(node) is not call.op.pending or node.cfg is not call.cfg or not node.fresh():
            return NotImplemented
    # joint gradients are results, and leave no products to be joined later
    found = NotImplemented if rule.wgrads is None or products is not None else rule.wgrads(calls, nodes, into)
    if found is NotImplemented and rule.shared is not None:
        found = _of_shared(calls, rule.shared(calls, nodes, into), into, products)
    # the cells are spent only now: what the rule refused, the ops' own functions take
    if found is not NotImplemented:
        for call, cell in zip(calls, pendings, strict=True):
            if type(cell) is Donated:
                cell.take(f"{call.op.name}_wgrad")
    return found


def _of_shared(calls: tuple[Call, ...], nodes: Any, into: tuple[Any, ...], products: Any) -> Any:
    if nodes is NotImplemented:
        return nodes
    given = zip(calls, nodes, into, strict=True)
    if products is None:
        return tuple([call.op.wgrad(node, call.cfg, into=sums) for call, node, sums in given])
    products += [one for call, node, sums in given for one in call.op.products(node, call.cfg, into=sums)]
    return (None,) * len(calls)


def joined(calls: Iterable[Call]) -> str:
    """The path of calls that run as one: all their paths, joined by +."""
    return "+".join(dict.fromkeys([call.path for call in calls if call.place is not None]))


def _read(call: Call, node: Any, where: str, ys: dict[int, Any] | None, reads: bool, dy: Any) -> Any:
    """The residuals of a call, after every check; with the recomputed fields, if its dgrad or the rule reads them."""
    node = open_node(where, node, call.residuals, call.cfg, dy=dy)
    if ys is None or call.recomputed_by is None or not (reads or call.recomputed_in_dgrad):
        return node
    return filled(node, call.fields, ys[call.recomputed_by.index], call.kept)
