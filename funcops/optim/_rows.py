"""From trees to rows of tensors, one row a tree, and back: what every optimiser here does before and after its update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from funcops.backend import tracing
from funcops.errors import FLOATS, GradModeError, describe, fail, short
from funcops.optim._reader import lists_of
from funcops.trees import leaves, paths, tree_map, with_leaves

T = TypeVar("T")


def open_trees(
    where: str, trees: tuple[Any, ...], names: tuple[str, ...], decay: Any, in_place: bool
) -> tuple[list[Sequence[Tensor]], list[bool], list[bool] | None]:
    """After all checks: each tree's tensors where there is a gradient, then whether each of params' tensors has one,
    and their decay flags (None: decay everything)."""
    lists = lists_of(where, trees, names)
    params, grads = lists[0], lists[1]
    kept = [row for row in zip(*lists, strict=True) if row[1] is not None]
    rows: list[Sequence[Tensor]] = list(zip(*kept, strict=True)) if kept else [() for _ in lists]
    if not _right(rows):
        _explain(where, trees, names)
    if not in_place and torch.is_grad_enabled() and any([p.requires_grad for p in rows[0]]):
        raise GradModeError(
            f"{where}: params must be tensors that do not require grad, got some that do, in grad mode. Pass in_place=True "
            "to update leaves of autograd, or call under torch.no_grad()"
        )
    wanted = [g is not None for p, g in zip(params, grads, strict=True) if p is not None]
    if decay is None:
        return rows, wanted, None
    (_, flags) = lists_of(where, (trees[0], decay), ("params", "decay"))
    decayed = [flag for flag, g in zip(flags, grads, strict=True) if g is not None]
    if not all([flag is True or flag is False for flag in decayed]):
        bad = next(flag for flag in decayed if flag is not True and flag is not False)
        fail(where, "decay", "a tree of bools", describe(bad), TypeError)
    return rows, wanted, decayed


def _right(rows: list[Sequence[Tensor]]) -> bool:
    """Whether params, gradients and state agree in shapes, dtypes and devices. A few list comparisons: this is the
    launch path."""
    try:
        params, grads, *state = rows
        shapes, dtypes, devices = _traits(params)
        for row in state:
            if _traits(row) != (shapes, dtypes, devices):
                return False
        if not all([dtype in FLOATS for dtype in dtypes]):
            return False
        grad_shapes, grad_dtypes, grad_devices = _traits(grads)
        if grad_shapes != shapes or grad_devices != devices:
            return False
        if grad_dtypes == dtypes:
            return True
        return all([_fits(g, p) for g, p in zip(grads, params, strict=True)])
    except AttributeError:
        return False


def _traits(row: Sequence[Tensor]) -> tuple[list[Any], list[Any], list[Any]]:
    return [t.shape for t in row], [t.dtype for t in row], [t.device for t in row]


def _fits(grad: Tensor, param: Tensor) -> bool:
    if grad.device != param.device:
        return False
    return grad.dtype is param.dtype or (grad.dtype in FLOATS and grad.element_size() < param.element_size())


def _explain(where: str, trees: tuple[Any, ...], names: tuple[str, ...]) -> None:
    found = [paths(tree) for tree in trees]
    for path, g in found[1].items():
        if g is None:
            continue
        p = found[0][path]
        if not isinstance(p, Tensor):
            fail(where, f"grads.{path}", f"None, as params.{path} is no tensor", describe(g), TypeError)
        for name, leaves_ in zip(names, found, strict=False):
            t, at = leaves_[path], f"{name}.{path}" if path else name
            if not isinstance(t, Tensor) or t.dtype not in FLOATS:
                fail(where, at, "a float tensor", describe(t), TypeError)
            if t.shape != p.shape:
                fail(where, at, str(list(p.shape)), list(t.shape))
            if t.device != p.device:
                fail(where, at, f"on device {p.device}", t.device)
            if name == "grads" and not _fits(t, p):
                fail(where, at, f"{short(p.dtype)} or a narrower dtype", short(t.dtype), TypeError)
            if name.startswith("state") and t.dtype is not p.dtype:
                fail(where, at, short(p.dtype), short(t.dtype), TypeError)


def check_params(where: str, params: Any) -> list[Tensor]:
    seen: dict[int, str] = {}
    given = []
    for path, p in paths(params).items():
        if p is None:
            continue
        if not isinstance(p, Tensor) or p.dtype not in FLOATS:
            fail(where, f"params.{path}", "a float tensor or None", describe(p), TypeError)
        if id(p) in seen:
            fail(
                where,
                f"params.{path}",
                "a tensor of its own",
                f"the tensor at {seen[id(p)]}, which would be updated twice",
            )
        seen[id(p)] = path
        given.append(p)
    return given


def zeros_like(params: Any) -> Any:
    return tree_map(lambda p: None if p is None else torch.zeros_like(p, requires_grad=False), params)


def like(grads: Sequence[Tensor], params: Sequence[Tensor]) -> Sequence[Tensor]:
    """Contiguous gradients in the dtype of their params, as a fused op takes them."""
    dtype = params[0].dtype
    for g in grads:
        if g.dtype is not dtype or not g.is_contiguous():
            return [g.to(dtype).contiguous() for g in grads]
    return grads


def fusable(rows: list[Sequence[Tensor]]) -> bool:
    """Whether the fused op serves. It has no functional form that traces, and it walks memory, whatever the strides."""
    return not tracing() and all([all(map(Tensor.is_contiguous, row)) for i, row in enumerate(rows) if i != 1])


def groups(rows: Sequence[Sequence[Tensor]], decayed: list[bool] | None) -> list[tuple[torch.device, bool, Any]]:
    """The rows by device, dtype and decay flag of the params."""
    params = rows[0]
    if not params:
        return []
    if decayed is None:
        _, dtypes, devices = _traits(params)
        if dtypes.count(dtypes[0]) == len(dtypes) and devices.count(devices[0]) == len(devices):
            return [(devices[0], True, rows)]
        decayed = [True] * len(params)
    found: dict[Any, list[int]] = {}
    for i, (p, decays) in enumerate(zip(params, decayed, strict=True)):
        found.setdefault((p.device, p.dtype, decays), []).append(i)
    if len(found) == 1:
        return [(key[0], key[2], rows) for key in found]
    return [(key[0], key[2], [[row[i] for i in at] for row in rows]) for key, at in found.items()]


def copied(rows: list[Sequence[Tensor]]) -> list[Sequence[Tensor]]:
    """Fresh tensors for all but the gradients."""
    return [row if i == 1 or not row else [t.clone() for t in row] for i, row in enumerate(rows)]


def changed(trees: tuple[Any, ...], rows: list[Sequence[Tensor]]) -> list[tuple[Any, Any, Any]]:
    """Each tree but the gradients, with the places where there was one, and the tensors to put there."""
    places = leaves(trees[1])
    return [(tree, places, values) for i, (tree, values) in enumerate(zip(trees, rows, strict=True)) if i != 1]


def rebuilt(tree: T, places: Sequence[Any], values: Sequence[Any]) -> T:
    """The tree with `values`, in order, at the leaves where `places` is not None."""
    new = iter(values)
    old = leaves(tree)
    return with_leaves(tree, [a if place is None else next(new) for a, place in zip(old, places, strict=True)])
