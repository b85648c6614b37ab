"""Accumulators of a combinator: all of them are checked before the first of its parts adds to one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from funcops.engine.backend import tracing
from funcops.engine.contract.accumulators import check_accumulator, check_apart, check_width
from funcops.engine.contract.configs import Composite, shapes
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import Op
from funcops.engine.contract.schema import Donated, Saved
from funcops.engine.errors import FLOATS, check, fail, in_step
from funcops.engine.program.values import abstract_params
from funcops.engine.residuals.nested import Nested
from funcops.engine.trees import WithExtras, fake, paths, stands_for_one, structure, tensors, tree_map_tensors

__all__ = ["check_into_tree"]

_dtypes: dict[Any, dict[str, torch.dtype]] = {}  # dtypes of gradients by path, by all that they depend on
_fitting: set[Any] = set()  # forms of dys and residuals that every part accepted
MOST_FITTING = 1024  # a batch of another length has another form, so the set may not grow without end


def check_into_tree(where: str, into: Any, op: Op, cfg: Any, node: Any, dy: Any = None) -> None:
    """Check, before anything is added, that every gradient to come has a float accumulator with its shape and device, at least as
    wide, and with memory of its own; and that all parts can read the residuals or pending. `dy`: if node holds residuals. Each of
    several parts of dy goes to another part of the op, and the first would add before the last has checked its own."""
    several = isinstance(dy, (tuple, WithExtras))
    parts = _given(dy)
    if several:
        first = next(iter(tensors(parts)), None)
        for path, t in paths(parts).items():
            if t is not None:
                check(where, f"dy.{path}", t, (...,), FLOATS, first)
    want, have = _shapes(op, cfg), paths(into)
    if want.keys() != have.keys():
        found = paths(into, is_leaf=stands_for_one)  # of a node beside whose value are amaxes, these are for their op to check
        have = {path: getattr(t, "value", t) if stands_for_one(t) else t for path, t in found.items()}
    if want.keys() != have.keys():
        wrong = sorted(want.keys() ^ have.keys())
        fail(where, "into", f"a tree with the paths of params: {', '.join(want)}", f"a difference at {', '.join(wrong)}")
    needs, kept = (Needs.NONE, []) if node is None else (node.needs, list(_tensors(where, node)))
    device, given = kept[0].device if kept else None, {}
    for path, shape in want.items():
        # a param without a gradient needs no accumulator, but one that is given must fit
        if shape is not None and (have[path] is not None or needs.param(path)):
            given[path] = have[path]
            check_accumulator(where, path, have[path], shape, device)
    check_apart(where, given)
    kept += [] if dy is None else tensors(parts)
    widest = max([t.element_size() for t in kept if t.is_floating_point()], default=0)
    # float16 and bfloat16 are equally wide, and neither holds the other's values
    narrow = {t.dtype for t in given.values() if t.element_size() <= 2} - {t.dtype for t in kept}
    # residuals without a dy: no gradient will come, and none can be computed to ask for its dtype
    known = node is not None and (node.kind == "pending" or dy is not None)
    if known and (narrow or any([t.element_size() < widest for t in given.values()])) and not tracing():
        for path, dtype in _gradient_dtypes(op, cfg, node, dy, kept).items():
            if path in given:
                check_width(where, path, given[path], dtype)
    # a dy that is one tensor is checked by the op that reads it, before it adds
    if several and node is not None and not tracing():
        _check_all(op, cfg, node, dy, kept)


def _shapes(op: Op, cfg: Any) -> dict[str, tuple[int, ...] | None]:
    """The shapes of params by path; None for a param without a gradient."""
    if not torch.compiler.is_dynamo_compiling():
        # cached by `functools.lru_cache`, of which a tracer would warn
        params = abstract_params(op, cfg)
    elif isinstance(cfg, Composite):
        id(cfg)  # the tracer guards on it
        return dict(cfg.gradient_shapes())
    else:
        params = op.init(cfg, key=None, device="meta")
    return shapes(params)


def _given(dy: Any) -> Any:
    """dy without the extras that are None: torch 2.11 cannot trace the flattening of a dict that has no tensor."""
    if type(dy) is not WithExtras:
        return dy
    extras = {name: part for name, part in dy.extras.items() if part is not None}
    return WithExtras(dy.main, extras) if extras else {"main": dy.main}


def _check_all(op: Op, cfg: Any, node: Any, dy: Any, kept: list[Tensor]) -> None:
    """Let every part check its dy, in a run without data, unless these shapes and dtypes have passed before."""
    key = op, cfg, node.needs, structure(dy), tuple([(t.shape, t.dtype) for t in kept])
    if key in _fitting:
        return
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            op.bwd(tree_map_tensors(fake, node), tree_map_tensors(fake, dy), cfg)
    except (ValueError, TypeError):
        raise
    except Exception:  # a user's op that reads values has no such run
        return
    if len(_fitting) >= MOST_FITTING:
        _fitting.clear()
    _fitting.add(key)


def _tensors(where: str, node: Any) -> Iterator[Tensor]:
    """The tensors of residuals or pending, after a check of every part's staleness."""
    # looked at in its cell, which the backward will take
    node = node._node if type(node) is Donated else node
    if isinstance(node, Tensor):
        yield node
    elif isinstance(node, Nested):
        if not node.fresh():
            node.complain(where)
        for name, child in node.items():
            try:
                yield from _tensors(where, child)
            except Exception as error:
                in_step(error, name)
                raise
    elif isinstance(node, Saved):
        if not node.fresh():
            node.complain(where)
        for name in node.fields:
            yield from _tensors(where, getattr(node, name))


def _gradient_dtypes(op: Op, cfg: Any, node: Any, dy: Any, kept: list[Tensor]) -> dict[str, torch.dtype]:
    """The dtypes of gradients by path, from a run without data: rare, as most accumulators are as wide as all saved tensors."""
    key = op, cfg, node.needs, node.kind, tuple([t.dtype for t in kept])
    if key not in _dtypes:
        with FakeTensorMode(allow_non_fake_inputs=True):
            faked, d_y = tree_map_tensors(fake, node), tree_map_tensors(fake, dy)
            found = op.wgrad(faked, cfg) if node.kind == "pending" else op.bwd(faked, d_y, cfg)[0]
        _dtypes[key] = {path: t.dtype for path, t in paths(found).items() if isinstance(t, Tensor)}
    return _dtypes[key]
