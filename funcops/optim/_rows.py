"""Conversion of trees to rows of tensors, one row per tree, and back: the common part of every optimiser."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from funcops.engine.backend import scopes, tracing, wide
from funcops.engine.backend.notes import note
from funcops.engine.contract.accumulators import check_apart
from funcops.engine.errors import FLOATS, GradModeError, check, describe, fail, join_path, require, require_type
from funcops.engine.trees import flatten, leaves, paths, same_structure, structure, tree_map, unflatten
from funcops.optim._walk import only_leaves, rows_of

T = TypeVar("T")
Row = Sequence[Tensor]
Kind = tuple[torch.device, torch.dtype]
_FLOATS = set(FLOATS)


class Opened(NamedTuple):
    """The tensors of params, grads and state at the leaves with a gradient; the device and dtype of each such param, and whether it
    is decayed; whether each tensor of params has a gradient; and all leaves of the trees, in the order of params."""

    rows: list[Row]
    kinds: list[Kind]
    decayed: list[bool]
    has_grad: list[bool]
    lists: list[list[Any]]

    def rebuilt(self, params: T, *which: int) -> list[T]:
        """A tree like params for each row asked for, with what was in the place of a leaf without a gradient."""
        spec, made = structure(params), []
        for i in which:
            new = iter(self.rows[i])
            made.append(unflatten(spec, [a if g is None else next(new) for a, g in zip(self.lists[i], self.lists[1], strict=True)]))
        return made


def open_trees(where: str, trees: dict[str, Any], decay: Any, in_place: bool) -> Opened:
    """Check `trees` (params, grads, state by name) and return rows to write to: copies unless `in_place`."""
    lists = lists_of(where, trees if decay is None else {**trees, "decay": decay})
    kept = [row for row in zip(*lists, strict=True) if row[1] is not None]
    rows: list[Any] = list(zip(*kept, strict=True)) if kept else [()] * len(lists)
    decayed: list[Any] = [True] * len(kept) if decay is None else list(rows.pop())
    if not set(map(type, decayed)) <= {bool}:
        path, flag = next((k, v) for k, v in paths(decay).items() if not isinstance(v, bool))
        fail(where, join_path("decay", path), "a bool", describe(flag), TypeError)
    devices, dtypes = _traits_of_params(*rows) or _explain(where, trees)
    if not in_place:
        if torch.is_grad_enabled() and any([p.requires_grad for p in rows[0]]):
            raise GradModeError(
                f"{where}: params must be tensors that do not require grad, got some that do, in grad mode. Pass "
                "in_place=True to update leaves of autograd, or call under torch.no_grad()"
            )
        with torch.no_grad():
            rows = [row if i == 1 else _clones(row) for i, row in enumerate(rows)]
    has_grad = [g is not None for p, g in zip(lists[0], lists[1], strict=True) if p is not None]
    return Opened(rows, list(zip(devices, dtypes, strict=True)), decayed, has_grad, lists)


def _clones(row: Row) -> Row:
    """Copies of tensors. Those that fill one memory together, as `pack_qkv` lays weights, do so again."""
    if tracing() or not any([t.storage_offset() for t in row]):
        return [t.clone() for t in row]
    together: dict[int, list[Tensor]] = {}
    memory: dict[int, Any] = {}
    for t in filter(_has_memory, row):
        together.setdefault(t.untyped_storage()._cdata, []).append(t)
    for own in [own for own in together.values() if len(own) > 1]:
        own.sort(key=Tensor.storage_offset)
        ends = [0, *itertools.accumulate([t.nbytes for t in own])]
        fill = ends.pop() == own[0].untyped_storage().nbytes() and all([t.is_contiguous() for t in own])
        if fill and ends == [t.storage_offset() * t.itemsize for t in own]:
            memory |= dict.fromkeys(map(id, own), own[0].untyped_storage().clone())
    made: list[Tensor] = []
    for t in row:
        whole = memory.get(id(t))
        made.append(t.clone() if whole is None else t.new_empty(0).set_(whole, t.storage_offset(), t.shape, t.stride()))
    return made


def _has_memory(t: Any) -> bool:
    return type(t) in (Tensor, torch.nn.Parameter) and not is_functorch_wrapped_tensor(t)


def open_into(where: str, params: Any, grads: Any, into: Any) -> list[Tensor]:
    """Check `into`, a tree like params of tensors to write the new params to, and return those at the leaves with a gradient."""
    every = zip(*lists_of(where, {"params": params, "grads": grads, "into": into}), strict=True)
    kept = [(p, w) for p, g, w in every if g is not None]
    right = all([isinstance(w, Tensor) and w.shape == p.shape and w.device == p.device for p, w in kept])
    found = paths(into)
    written = {path: found[path] for path, g in paths(grads).items() if g is not None}
    if not right or not all([_fits(w.dtype, p.dtype) for p, w in kept]):
        of_params = paths(params)
        for path, w in written.items():
            p = of_params[path]
            check(where, join_path("into", path), w, tuple(p.shape), tuple(d for d in FLOATS if _fits(d, p.dtype)), p)
    read = paths({"params": params, "grads": grads}) if written else {}
    read = {path: t for path, t in read.items() if t is not None and _has_memory(t)}
    # a write would go to two params, or change a param or a gradient that the caller keeps
    check_apart(where, {path: w for path, w in written.items() if _has_memory(w)}, reads=read)
    return [w for _, w in kept]


def lists_of(where: str, trees: dict[str, Any]) -> list[list[Any]]:
    """The leaves of trees, all of which must have the structure of the first, in the order of the first: dicts of any kind pair by
    key. The error names the paths that differ."""
    rows = rows_of(*trees.values())
    if rows is not None:
        return rows
    (first, wanted), *others = trees.items()
    if not tracing():
        found, spec = flatten(wanted)
        try:  # flattening by a known structure is three times as fast as finding one
            lists = [found, *[spec.flatten_up_to(other) for _, other in others]]
        except ValueError:
            lists = [[...]]  # the loop below says what differs
        if only_leaves(lists):
            return lists
    for name, other in others:
        if not same_structure(wanted, other):
            have, got = paths(wanted), paths(other)
            sides = {"without": [k for k in have if k not in got], "with extra": [k for k in got if k not in have]}
            said = [f"{side} {', '.join(which)}" for side, which in sides.items() if which]
            said = said or [f"other containers, {describe(other)} for {describe(wanted)}"]
            fail(where, name, f"a tree like {first}", "one " + " and ".join(said))
    return [leaves(tree) for tree in trees.values()]


def _traits_of_params(params: Row, grads: Row, *state: Row) -> tuple[list[Any], list[Any]] | None:
    """The devices and dtypes of params, or None if a shape, dtype or device is wrong. Compares whole lists, because this is on the
    launch path."""
    try:
        shapes, devices, dtypes = wanted = _traits(params)
        given = _traits(grads)
        fit = given == wanted or (given[:2] == (shapes, devices) and all(map(_fits, given[2], dtypes)))
        right = fit and all([_traits(row) == wanted for row in state]) and set(dtypes) <= _FLOATS
        return (devices, dtypes) if right else None
    except AttributeError:
        return None


def _traits(row: Row) -> tuple[list[Any], list[Any], list[Any]]:
    return [t.shape for t in row], [t.device for t in row], [t.dtype for t in row]


def _fits(grad: torch.dtype, param: torch.dtype) -> bool:
    return grad is param or (grad in FLOATS and grad.itemsize < param.itemsize)


def _explain(where: str, trees: dict[str, Any]) -> NoReturn:
    (params, grads, *state) = [(name, paths(tree)) for name, tree in trees.items()]
    with torch.no_grad():
        for path, g in grads[1].items():
            if g is None:
                continue
            p = params[1][path]
            if not isinstance(p, Tensor):
                fail(where, join_path("grads", path), f"None, because params.{path} is not a tensor", describe(g), TypeError)
            check(where, join_path("params", path), p, (...,), FLOATS)
            check(where, join_path("grads", path), g, tuple(p.shape), tuple(d for d in FLOATS if _fits(d, p.dtype)), p)
            for name, found in state:
                check(where, join_path(name, path), found[path], tuple(p.shape), p.dtype, p)
    fail(where, "grads", "tensors that agree with params and state", describe(trees["grads"]))


def own_tensors(where: str, params: Any, name: str = "params") -> list[Tensor]:
    """The tensors of a tree like params. Raises for other leaves, and for memory at two paths."""
    given = {path: p for path, p in paths(params).items() if p is not None}
    for path, p in given.items():
        if not isinstance(p, Tensor) or p.dtype not in FLOATS:
            fail(where, join_path(name, path), "a float tensor or None", describe(p), TypeError)
    check_apart(where, {path: p for path, p in given.items() if _has_memory(p)}, name)  # it would be updated twice
    return list(given.values())


def zeros_like(params: Any) -> Any:
    return tree_map(lambda p: None if p is None else torch.zeros_like(p, requires_grad=False), params)


def in_wide_dtype(step: Callable[..., None], *rows: Sequence[Tensor]) -> None:
    """Run `step(*rows)`, which writes to all rows but the second, the gradients, with the wide dtype of the params, and round what
    it has written once, as a fused kernel does."""
    dtype = wide(rows[0][0].dtype)
    if rows[0][0].dtype is dtype:
        return step(*rows)
    exact = [[t.to(dtype) for t in row] for row in rows]
    step(*exact)
    torch._foreach_copy_([t for row in (rows[0], *rows[2:]) for t in row], [t for row in (exact[0], *exact[2:]) for t in row])


def walkable(rows: list[Row]) -> tuple[list[Row], list[tuple[Tensor, Tensor]]]:
    """The rows with a contiguous copy of each tensor that is not contiguous, because the fused ops ignore strides; and the pairs
    (tensor, copy) to be written back. Gradients stay unchanged."""
    if all([t.is_contiguous() for i, row in enumerate(rows) for t in row if i != 1]):
        return rows, []
    dense = [row if i == 1 else [t.contiguous() for t in row] for i, row in enumerate(rows)]
    pairs = [pair for row, copies in zip(rows, dense, strict=True) for pair in zip(row, copies, strict=True)]
    return dense, [(t, copy) for t, copy in pairs if not t.is_contiguous() and t is not copy]


def not_negative(where: str, **given: Any) -> None:
    for name, value in given.items():
        require_type(where, name, value, float, int)
        require(math.isfinite(value) and value >= 0, where, name, "finite and not negative", value)


def check_rate(where: str, lr: Any) -> Any:
    """The learning rate as a number or a 0-d tensor."""
    if isinstance(lr, Tensor):
        right = lr.numel() == 1 and lr.is_floating_point()
        require(right, where, "lr", "a number or a float tensor of one element", describe(lr))
        return lr.reshape(())
    not_negative(where, lr=lr)
    return float(lr)


def check_factor(where: str, factor: Any) -> None:
    if isinstance(factor, Tensor):
        check(where, "factor", factor, (), FLOATS)
    elif factor is not None:
        not_negative(where, factor=factor)


def as_tensor(factor: Any, device: torch.device) -> Tensor | None:
    """The factor of gradients on a device; a number without a copy from the host, which a capture refuses."""
    if factor is None or isinstance(factor, Tensor):
        return None if factor is None else factor.to(device)
    return torch.full((), factor, dtype=torch.float64, device=device)


def on_device(rate: Any, device: torch.device) -> Any:
    """The rate on `device`, where the fused op can read it; a number or a tensor on the CPU serves every device."""
    return rate.to(device) if isinstance(rate, Tensor) and not rate.is_cpu and rate.device != device else rate


def exact_rate(rate: Any, device: torch.device) -> Any:
    """The rate on `device`, a tensor as float64: what is computed of it before it meets params, as 1 - lr weight_decay, would
    otherwise be rounded to its own dtype, which may be narrower than theirs."""
    return rate.to(device, torch.float64) if isinstance(rate, Tensor) else rate


def told(params: T) -> T:
    """The params that an update made, which a recording is told by path, in the half "update" of the scope around."""
    if scopes.on == scopes.NOTED:
        with scopes.named_scope("", "update"):
            note(params=params)
    return params
