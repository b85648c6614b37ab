"""`without_params` and `with_params`: residuals without the weights that they alias, for a backward later or elsewhere.

A leaf of residuals is a param if it is a leaf of the params, or a view inside one, by the storage that both share: so this serves
every op, whatever it is made of.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from funcops.engine.errors import describe, differing, fail, join_path, require_flag, require_type, stale
from funcops.engine.residuals.forms import Layout
from funcops.engine.trees import paths, stands_for_one, tree_map_with_path

T = TypeVar("T")


class Noted(NamedTuple):
    """The form of a param when it was left out, and a digest of its values or None."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    digest: str | None


class LeftOut(str):
    """The path of a param, in its place in residuals. `params`: the form of every param, by path; `view`: where in that param the
    tensor was, and in which dtype, if it was not the param itself."""

    params: dict[str, Noted]
    view: tuple[Layout, torch.dtype] | None

    @staticmethod
    def of(path: str, params: dict[str, Noted], view: tuple[Layout, torch.dtype] | None) -> LeftOut:
        made = LeftOut(path)
        made.params, made.view = params, view
        return made

    def __reduce__(self) -> Any:
        return LeftOut.of, (str(self), self.params, self.view)

    def __repr__(self) -> str:
        return f"{join_path('params', self)}, left out by without_params: with_params(kept, params) puts it back"

    holds_nothing = True  # for a checkpoint, which saves the tensors


def without_params(kept: T, params: Any, *, digest: bool = False) -> T:
    """Residuals, or a pending, without the params that they alias, to be pickled, saved or sent without the weights.

    `params`: the tree that the forward was given. Each leaf of `kept` that is a leaf of `params`, or a view inside one, becomes the
    path of that leaf; all else stays as it is, the aliases of x and what the op made of a weight itself (such as codes) too.
    `digest`: also note a hash of each param's values, which takes a pass over them, and copies them to the host.

    A backward of the result raises `TypeError`, which names its first leaf without a tensor: `with_params` puts the params back.
    Raises `StaleResidualError` if a tensor was written to since the forward, `DonatedError` if `kept` was given away, and
    `ValueError` if `params` lacks a field that is a param by its declaration.

    >>> import torch
    >>> from funcops import LinearConfig, linear, random, with_params, without_params
    >>> cfg, x = LinearConfig(64, 64), torch.ones(2, 64)
    >>> params = linear.init(cfg, key=random.key(0))
    >>> y, residuals = linear.fwd(params, x, cfg)
    >>> small = without_params(residuals, params)
    >>> small.weight
    params.weight, left out by without_params: with_params(kept, params) puts it back
    >>> dparams, dx = linear.bwd(with_params(small, params), y, cfg)
    >>> dx.shape
    torch.Size([2, 64])
    """
    require_flag("without_params", digest=digest)
    _check_fresh("without_params", kept)
    given = _given("without_params", params)
    noted = {path: Noted(tuple(t.shape), t.dtype, t.stride(), _digest(t) if digest else None) for path, t in given.items()}
    # a weight in codes is one param; its tensors are known one by one, too, for an op that keeps some of them
    nodes = {path: node for path, node in paths(params, is_leaf=stands_for_one).items() if node is not None}
    same = {id(t): path for path, t in (*given.items(), *nodes.items())}
    inside: dict[int, list[str]] = {}
    for path, t in given.items():
        inside.setdefault(_storage(t), []).append(path)

    def left_out(_: str, t: Any) -> Any:
        if id(t) in same and t is not None:
            return LeftOut.of(same[id(t)], noted, None)
        if not isinstance(t, Tensor):
            return t
        holders = [path for path in inside.get(_storage(t), ()) if _lies_in(t, given[path])]
        if not holders:
            return t
        of = given[holders[0]]
        layout = Layout(tuple(t.shape), t.stride(), int(t.storage_offset() - of.storage_offset()))
        whole = layout == Layout(tuple(of.shape), of.stride(), 0) and t.dtype is of.dtype
        return LeftOut.of(holders[0], noted, None if whole else (layout, t.dtype))

    made: T = tree_map_with_path(left_out, kept, is_leaf=lambda node: id(node) in same)
    _check_declared(made, "")
    return made


def with_params(kept: T, params: Any) -> T:
    """The residuals or pending that `without_params` was given, with these params in their places.

    `params` must have a tensor at every path that they had then, of the same shape and dtype, and nothing else; of a noted digest
    the same values. Without a digest the values are the caller's to keep: a backward with others gives other gradients. In the
    process of the forward, a write to the same tensors since then raises `StaleResidualError` in the backward, as ever.

    Raises `ValueError`, which names the first such path, for a missing or an extra leaf, another shape or other values, `TypeError`
    for another dtype, and `StaleResidualError` if another tensor of `kept` was written to since.

    >>> import torch
    >>> from funcops import LinearConfig, SkipConfig, linear, random, skip, with_params, without_params
    >>> cfg, x = SkipConfig(linear, LinearConfig(64, 64)), torch.ones(2, 64)
    >>> params = skip.init(cfg, key=random.key(0))
    >>> y, residuals = skip.fwd(params, x, cfg)
    >>> small = without_params(residuals, params, digest=True)
    >>> dparams, dx = skip.bwd(with_params(small, params), y, cfg)
    >>> with_params(small, skip.init(cfg, key=random.key(1)))
    Traceback (most recent call last):
        ...
    ValueError: with_params: params.weight must be the values of the forward (by their digest), got others
    """
    _check_fresh("with_params", kept, left_out=True)
    given = _given("with_params", params)
    nodes = {**paths(params, is_leaf=stands_for_one), **given}
    checked: list[dict[str, Noted]] = []

    def put_back(_: str, leaf: Any) -> Any:
        if not isinstance(leaf, LeftOut):
            return leaf
        if not any(one is leaf.params for one in checked):
            _check_params(leaf.params, given)
            checked.append(leaf.params)
        return nodes[leaf] if leaf.view is None else _placed(given[leaf], leaf.params[leaf], *leaf.view)

    made: T = tree_map_with_path(put_back, kept)
    return made


def _given(where: str, params: Any) -> dict[str, Tensor]:
    """The tensors of params, by path."""
    found = {path: t for path, t in paths(params).items() if t is not None}
    for path, t in found.items():
        require_type(where, join_path("params", path), t, Tensor)
    return found


def _check_params(noted: dict[str, Noted], given: dict[str, Tensor]) -> None:
    if noted.keys() != given.keys():
        fail("with_params", "params", "a tree with the leaves of the forward's params", differing(given, noted))
    for path, was in noted.items():
        t, name = given[path], join_path("params", path)
        if t.dtype is not was.dtype:
            fail("with_params", name, f"{str(was.dtype).removeprefix('torch.')}{list(was.shape)}", describe(t), TypeError)
        if tuple(t.shape) != was.shape:
            fail("with_params", name, f"{str(was.dtype).removeprefix('torch.')}{list(was.shape)}", describe(t))
        if was.digest is not None and _digest(t) != was.digest:
            fail("with_params", name, "the values of the forward (by their digest)", "others")


def _placed(t: Tensor, was: Noted, layout: Layout, dtype: torch.dtype) -> Tensor:
    """The view of a param that the residuals had."""
    if t.stride() != was.stride:  # of a tensor with other strides, such as one from a file, the view is a copy's
        t = t.new_empty_strided(was.shape, was.stride).copy_(t)
    t = t.view(dtype)
    return t.as_strided(layout.shape, layout.stride, t.storage_offset() + layout.offset)


def _storage(t: Tensor) -> int:
    """The identity of a tensor's storage; of a wrapper, which has none, its own."""
    try:
        return t.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return id(t)


def _lies_in(t: Tensor, param: Tensor) -> bool:
    """Whether the elements of `t` are some of the param's, of one size."""
    first, last = _span(t)
    begin, end = _span(param)
    return t.numel() > 0 and begin <= first and last <= end and t.element_size() == param.element_size()


def _span(t: Tensor) -> tuple[int, int]:
    """The first and the last place in the storage."""
    first = int(t.storage_offset())
    return first, first + sum([(size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)])


def _digest(t: Tensor) -> str:
    # by bytes, as NaN does not equal itself
    return hashlib.sha256(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def _check_fresh(where: str, kept: Any, left_out: bool = False) -> None:
    """Raise unless `kept` has nodes, and all are fresh, apart from what was left out: a copy of a stale one would look fresh."""
    nodes = []

    def check(value: Any) -> bool:
        if getattr(type(value), "complain", None) is not None:
            nodes.append(value)
        return False

    # `check` sees every node on the way down, and takes none for a leaf
    paths(kept, is_leaf=check)
    if kept is not None and not nodes:
        fail(where, "kept", "residuals or pending of an op", describe(kept), TypeError)
    for node in [node for node in nodes if not node.fresh()]:
        if not left_out:
            node.complain(where)
        elif (path := getattr(node, "stale", lambda: None)()) is not None:
            stale(where, f"{node.kind}.{path}", hint="Run the forward again")


def _check_declared(kept: Any, path: str) -> None:
    """Raise if a field that is declared to be a param still has a tensor."""
    for name, field in getattr(kept, "fields", {}).items():
        if field.of_params:
            for inner, t in paths(getattr(kept, name)).items():
                if isinstance(t, Tensor):
                    here = join_path(join_path(path, name), inner)
                    fail("without_params", f"kept.{here}", "a leaf of params, as the forward was given it", describe(t))
    if isinstance(kept, dict) and not hasattr(kept, "fields"):
        for name, part in kept.items():
            _check_declared(part, join_path(path, name))
