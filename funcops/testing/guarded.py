"""The law Guarded: wherever residuals and pending go, they give the gradients of the forward that made them, or raise."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor

from funcops.engine.contract.schema import Saved
from funcops.engine.errors import FLOATS, StaleResidualError
from funcops.engine.residuals.donate import donate
from funcops.engine.residuals.pack_unpack import pack, unpack
from funcops.engine.residuals.policy import Offload
from funcops.engine.trees import at, dense, flatten, leaves, paths, put, replace, tensors, tree_map, tree_map_tensors, unflatten
from funcops.testing.case import Case
from funcops.testing.checks import same_bits


def _replaced(tree: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """Replace every tensor, one after the other."""
    for path, leaf in paths(tree).items():
        tree = put(tree, path, fn(leaf)) if isinstance(leaf, Tensor) else tree
    return tree


def _rebuilt(tree: Any) -> Any:
    found, spec = flatten(tree)
    return unflatten(spec, found)


def _rebuilt_by_torch(tree: Any) -> Any:
    found, spec = torch_pytree.tree_flatten(tree)
    return torch_pytree.tree_unflatten(found, spec)


def _put(tree: Any) -> Any:
    for path, leaf in paths(tree).items():
        tree = put(tree, path, leaf)
    return tree


def _saved_and_loaded(tree: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


MOVES: dict[str, Callable[[Any], Any]] = {  # a leaf stays the same object, unless `pack` copies it
    "tree_map": lambda tree: tree_map(lambda t: t, tree),
    "replace": lambda tree: tree.copy() if type(tree) is dict else replace(tree) if hasattr(tree, "fields") else copy.copy(tree),
    "put": _put,
    "flatten": _rebuilt,
    "torch's flatten": _rebuilt_by_torch,
    "copy.copy": copy.copy,
    "pack": lambda tree: unpack(pack(tree, Offload())),
    "detach": lambda tree: tree_map_tensors(torch.detach, tree),  # another object, the same memory
    "donate": lambda tree: donate(tree_map(lambda t: t, tree)),
}


def _cast_back(tree: Any) -> Any:
    """Cast every tensor to a dtype that holds its values, and back."""
    there = tree_map_tensors(lambda t: t.to(torch.complex128 if t.dtype is torch.float64 else torch.float64), tree)
    return tree_map_tensors(lambda t, like: (t.real if t.is_complex() else t).to(like.dtype, copy=True), there, tree)


COPIES: dict[str, Callable[[Any], Any]] = {
    "clone": lambda tree: tree_map_tensors(torch.clone, tree),
    "times one": lambda tree: tree_map_tensors(lambda t: t * 1 if t.dtype in FLOATS else t.clone(), tree),
    "a cast there and back": _cast_back,
    "replace by clones": lambda tree: _replaced(tree, torch.clone),
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda tree: pickle.loads(pickle.dumps(tree)),
    "torch.save": _saved_and_loaded,
}
HALVES: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {  # of a copy; others may write between them
    "flatten": (flatten, lambda found, spec: unflatten(spec, found)),
    "torch's flatten": (torch_pytree.tree_flatten, torch_pytree.tree_unflatten),
}
UNPICKLED = (pickle.PicklingError, AttributeError)  # for a class or a config that no module holds by name


class _Waiting:
    """Residuals or a pending, which of them, and how to run the backward that they wait for."""

    def __init__(self, kind: str, tree: Any, run: Callable[[Any], Any]) -> None:
        self.kind, self.tree, self.run = kind, tree, run


def _forward(case: Case, params: Any, x: Any, dy: Any) -> list[_Waiting]:
    op, cfg = case.op, case.cfg
    _, residuals = op.fwd(params, x, cfg)
    found = [_Waiting("residuals", residuals, lambda kept: op.bwd(kept, dy, cfg))]
    for kind, kept in (("pending", residuals), ("pending of donated residuals", donate(tree_map(lambda t: t, residuals)))):
        pending = op.dgrad(kept, dy, cfg)[1]
        if pending is not None:
            found.append(_Waiting(kind, pending, lambda pending: op.wgrad(pending, cfg)))
    return found


def _moved(one: _Waiting, moves: dict[str, Callable[[Any], Any]]) -> dict[str, Any]:
    found = {}
    for name, move in moves.items():
        try:
            found[name] = move(one.tree)
        except UNPICKLED:
            if name not in ("pickle", "torch.save"):
                raise
    return found


def law_guarded(case: Case, dtype: torch.dtype) -> None:
    """Residuals and pending that are moved, copied or given away give the same bits. They raise after a write to a tensor that they
    share with others, before the move or after it; and, by name, if they lack a tensor that the backward reads."""
    if dtype is not case.dtypes[0]:
        return
    params, x = case.make(dtype)
    y, residuals = case.op.fwd(params, x, case.cfg)
    generator = torch.Generator().manual_seed(7)
    floats = tree_map(lambda t: t if t is not None and t.is_floating_point() else None, dense(y))
    dy = tree_map_tensors(lambda t: torch.randn(t.shape, generator=generator).to(t), floats)
    for one in _forward(case, params, x, dy):
        want = one.run(one.tree)
        for name, tree in _moved(one, MOVES | COPIES).items():
            same_bits(one.run(tree), want, f"{one.kind} moved by {name}")
        _missing(one)
        _remade(one)
    shared = {id(t) for one in _forward(case, params, x, dy) for t in tensors(one.tree)}
    for i, (path, t) in enumerate(paths({"params": params, "x": x, "dy": dy}).items()):
        if id(t) in shared:
            _write(case, params, x, dy, i, path)


def _write(case: Case, params: Any, x: Any, dy: Any, i: int, path: str) -> None:
    """Write to one input between the forward and the backward, which must notice it if the two share that tensor."""
    given = tree_map_tensors(torch.clone, {"params": params, "x": x, "dy": dy})
    leaf = leaves(given)[i]
    made = _forward(case, given["params"], given["x"], given["dy"])
    held = [one for one in made if any([t is leaf for t in tensors(one.tree)])]
    copies = {name: copied for name, copied in COPIES.items() if name != "torch.save"}  # torch.save pickles
    rows = [(one, one.run(one.tree), _moved(one, MOVES), _moved(one, copies)) for one in held]
    halves = [{name: take(one.tree) for name, (take, _) in HALVES.items()} for one in held]
    pairs = list(itertools.permutations(_SHARE + _COPY, 2))
    drawn = random.Random(f"{case} {path}").sample(pairs, DRAWN)
    between = [{pair: (MOVES | COPIES)[pair[0]](one.tree) for pair in drawn} for one in held]
    leaf.add_(0)
    for (one, want, moved, copied), taken, first in zip(rows, halves, between, strict=True):
        what = f"{one.kind} after a write to {path}"
        _stale(one.run, one.tree, what)
        for name, tree in moved.items():
            if name in ("donate", "detach") or any([t is leaf for t in tensors(tree)]):
                _stale(one.run, tree, f"{what}, moved by {name} before")
        for name, tree in copied.items():
            same_bits(one.run(tree), want, f"{what}, copied by {name} before")
            place = [t is leaf for t in tensors(one.tree)].index(True)
            tensors(tree)[place].add_(0)
            _stale(one.run, tree, f"{what}, and to its copy by {name}")
        for name in [name for name in (*moved, *copied) if name != "replace by clones"]:  # these set new fields on purpose
            _stale(_then((MOVES | COPIES)[name], one.run), one.tree, f"{what}, moved by {name} since")
        for name, (found, spec) in taken.items():
            again = HALVES[name][1](tree_map_tensors(torch.clone, found), spec)
            _stale(one.run, again, f"{what}, between {name} and a copy of its leaves")
        for (a, b), tree in first.items():
            move = (MOVES | COPIES)[b]
            if a in _SHARE:
                _stale(_then(move, one.run), tree, f"{what}, moved by {a} before and by {b} since")
            else:
                same_bits(one.run(move(tree)), want, f"{what}, copied by {a} before and moved by {b} since")
            _stale(_then((MOVES | COPIES)[a], _then(move, one.run)), one.tree, f"{what}, moved by {a} and by {b} since")


_SHARE = ("tree_map", "replace", "flatten", "torch's flatten", "detach", "copy.copy")
_COPY = ("clone", "times one", "a cast there and back", "copy.deepcopy")
DRAWN = 2  # pairs of moves, for each input that is written to


def _then(move: Callable[[Any], Any], run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda tree: run(move(tree))


def _missing(one: _Waiting) -> None:
    """Check that a tensor replaced by None raises an error that names it, wherever the tree goes then."""
    for path, leaf in paths(one.tree).items():
        for name in ("tree_map", "copy.copy", "donate") if isinstance(leaf, Tensor) else ():
            try:
                one.run(MOVES[name](put(one.tree, path, None)))
            except Exception as error:
                named = any([part in str(error) for part in path.split(".")])
                said = isinstance(error, (TypeError, ValueError)) and named and "must be" in str(error) and "got None" in str(error)
                assert said, f"{one.kind} without {path}: {error!r} does not say what must be there"
            else:
                raise AssertionError(f"{one.kind} without {path}, moved by {name}, went through without an error")


def _cast(t: Tensor) -> Tensor:
    if not t.is_floating_point():
        return t.to(torch.int16)  # an index, offsets, codes: none of them is a float
    return t.to(torch.float32 if t.dtype is torch.float64 else torch.float64)


REMADE: dict[str, Callable[[Tensor], Any]] = {
    "of another shape": lambda t: t.new_zeros((*t.shape[:-1], t.shape[-1] + 1) if t.dim() else (1,)),
    "of a dimension more": lambda t: t.unsqueeze(0),
    "of another dtype": _cast,
    "on another device": lambda t: t.to("meta"),
    "a number": lambda t: 1.0,
    "an empty list": lambda t: [],
}


def _moved_whole(tree: Any, path: str) -> bool:
    """Whether all of the node that holds this path is on one device: a pending, which holds its dy, then is what it was, there."""
    while not isinstance(tree, Saved):
        tree, path = at(tree, path.partition(".")[0]), path.partition(".")[2]
    return len({t.device for t in tensors(tree)}) == 1


def _remade(one: _Waiting) -> None:
    """Check that a tensor replaced by one that the backward cannot read raises an error with the saved and the given tensor."""
    for path, leaf in paths(one.tree).items():
        for name, change in REMADE.items() if isinstance(leaf, Tensor) else ():
            made = put(one.tree, path, change(leaf))
            if name == "on another device" and one.kind != "residuals" and _moved_whole(made, path):
                continue
            try:
                one.run(made)
            except Exception as error:
                said = isinstance(error, (TypeError, ValueError)) and "must be" in str(error) and "got" in str(error)
                assert said, f"{one.kind} with {path} {name}: {error!r} does not say what must be there"
            else:
                raise AssertionError(f"{one.kind} with {path} {name} went through without an error")


def _stale(run: Callable[[Any], Any], tree: Any, what: str) -> None:
    try:
        run(tree)
    except StaleResidualError as error:
        assert "must be as the" in str(error) and "got" in str(error), (
            f"{what}: {str(error)!r} does not say both what must be and what came"
        )
    else:
        raise AssertionError(f"{what}: went through without an error")
