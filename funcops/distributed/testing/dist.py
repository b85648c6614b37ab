"""`check_dist`: checks an op of several ranks against plain PyTorch on whole tensors, and by the laws that only ranks can break."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from funcops.distributed.mesh import Axis, Mesh
from funcops.distributed.testing.ranks import run_ranks
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import Op
from funcops.engine.errors import (
    describe,
    fail,
    join_path,
    require,
    require_callable,
    require_count,
    require_flag,
    require_number,
    require_type,
)
from funcops.engine.residuals.donate import donate
from funcops.engine.trees import leaves, nbytes, paths, tensors, tree_map, tree_map_tensors, with_leaves
from funcops.testing.case import Draw
from funcops.testing.checks import float_like, same_bits


@dataclasses.dataclass(frozen=True)
class Placed:
    """How the ranks of an axis hold one tensor.

    shard(dim)   each has a part along `dim`, and that part of the gradient
    invariant    all have the same tensor, and the same gradient
    replicate    all have the same tensor, but use it differently: each has a partial sum of the gradient
    partial      each has a partial sum; the gradient is the same on all
    """

    kind: str
    dim: int = 0

    def __post_init__(self) -> None:
        require(self.kind in _GRADIENT, "Placed", "kind", " or ".join(map(repr, _GRADIENT)), repr(self.kind))
        require_type("Placed", "dim", self.dim, int)

    @property
    def gradient(self) -> Placed:
        return Placed(_GRADIENT[self.kind], self.dim)

    def split(self, whole: Tensor, n: int) -> list[Tensor]:
        """Split a tensor into those that n ranks hold, each in memory of its own."""
        if self.kind == "shard":
            if whole.shape[self.dim] % n:
                fail("check_dist", "a tensor", f"of a size along dimension {self.dim} that {n} divides", list(whole.shape))
            return (
                [part.clone(memory_format=torch.contiguous_format) for part in whole.chunk(n, self.dim)]
                if n > 1
                else [whole.clone()]
            )
        if self.kind == "partial":
            parts = [float_like(whole, 100 + i) for i in range(n - 1)]
            return [*parts, functools.reduce(torch.sub, parts, whole.clone())]
        return [whole.clone() for _ in range(n)]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Join the ranks' tensors to the whole. Raises `AssertionError` if tensors that must be the same on all ranks differ."""
        if self.kind == "shard":
            return torch.cat(list(parts), self.dim)
        if self.kind == "partial":
            return functools.reduce(torch.add, parts)
        for i, part in enumerate(parts[1:]):
            assert torch.equal(part, parts[0]), f"rank {i + 1} has other bits than rank 0 in a tensor that is {self.kind}"
        return parts[0]


_GRADIENT = {"shard": "shard", "invariant": "invariant", "replicate": "partial", "partial": "replicate"}
SHARD, INVARIANT, REPLICATE, PARTIAL = (Placed(kind) for kind in _GRADIENT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistCase:
    """`cfg(axis)` is the op's config on an axis; `x(draw)` and `params(draw)` make whole tensors; `reference(params, x, n)` is
    plain differentiable PyTorch for y on n ranks. The placements of x, y and params are trees of their structure, with a `Placed`
    for each tensor. `twin(axis)`: another config that must give the same bits. `near(axis)`: a config that must give the same
    within the tolerance, such as sums in another order. `buffers`: a rank saves more than its part of the bytes that one rank
    saves, because its buffers have room for all that may arrive."""

    cfg: Callable[[Axis], Any]
    x: Callable[[Draw], Any]
    reference: Callable[..., Any]
    placed_x: Any
    placed_y: Any
    params: Callable[[Draw], Any] | None = None
    placed_params: Any = None
    twin: Callable[[Axis], Any] | None = None
    near: Callable[[Axis], Any] | None = None
    buffers: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        require_callable("DistCase", cfg=self.cfg, x=self.x, reference=self.reference)
        for name in ("params", "twin", "near"):
            if getattr(self, name) is not None:
                require_callable("DistCase", **{name: getattr(self, name)})
        require_flag("DistCase", buffers=self.buffers)
        require_type("DistCase", "name", self.name, str)

    def __str__(self) -> str:
        return self.name


def check_dist(
    op: Op, cases: Sequence[DistCase] | DistCase, *, sizes: tuple[int, ...] = (1, 2, 4, 8), tolerance: float = 1e-12
) -> None:
    """Run an op on axes of these sizes, the ranks as threads, in float64, and check it against the reference on whole tensors: y,
    dx and dparams are within `tolerance` of their largest value; `bwd` = `dgrad` then `wgrad`, donated, into accumulators, under
    needs, and of `twin`, bit for bit; each rank is within `tolerance` of `near`; tensors that must be the same on all ranks have
    the same bits; x, y and params are saved as the very same objects, in 1/n of their bytes if all are sharded; nothing is left in
    flight. Raises `AssertionError` with the case and the number of ranks.

    >>> from funcops import dist
    >>> from funcops.testing import DistCase, Placed, check_dist
    >>> case = DistCase(
    ...     cfg=dist.GatherConfig, x=lambda draw: draw.randn(8, 3), reference=lambda params, x, n: 1.0 * x,
    ...     placed_x=Placed("shard"), placed_y=Placed("replicate"),
    ... )
    >>> check_dist(dist.gather, case, sizes=(2,))
    """
    require_type("check_dist", "op", op, Op)
    given = [cases] if isinstance(cases, DistCase) else cases
    right = isinstance(given, (list, tuple)) and all(isinstance(case, DistCase) for case in given)
    require(right, "check_dist", "cases", "a DistCase, or a list of them", describe(cases))
    require(isinstance(sizes, tuple) and bool(sizes), "check_dist", "sizes", "a tuple of at least one size", describe(sizes))
    for n in sizes:
        require_count("check_dist", size=n)
    require_number("check_dist", 0.0, tolerance=tolerance)
    for case in given:
        single = _bytes_of_one(op, case)
        for n in sizes:
            try:
                _check(op, case, n, single, tolerance)
            except Exception as error:
                raise AssertionError(f"{op.name} {case}, {n} ranks: {type(error).__name__}: {error}") from error


def _make(case: DistCase) -> tuple[Any, Any]:
    draw = Draw(torch.float64)
    return None if case.params is None else case.params(draw), case.x(draw)


def _bytes_of_one(op: Op, case: DistCase) -> int:
    (axis,) = Mesh.abstract({"tp": 1}, 0).axes
    return nbytes(op.fwd(*_make(case), case.cfg(axis))[1])


def _reference(case: DistCase, params: Any, x: Any, n: int) -> tuple[Any, Any, Any]:
    """Compute y, dy and (dparams, dx) of whole tensors by the reference."""
    params, x = tree_map_tensors(lambda t: t.clone().requires_grad_(t.is_floating_point()), (params, x))
    y = case.reference(params, x, n)
    dy = float_like(tree_map_tensors(torch.detach, y), 7)
    wanted = [t for t in tensors((params, x)) if t.requires_grad]
    pairs = [(t, g) for t, g in zip(leaves(y), leaves(dy), strict=True) if g is not None]  # integers have no gradient
    found = iter(torch.autograd.grad([t for t, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
    gradients = tree_map(lambda t: next(found) if isinstance(t, Tensor) and t.requires_grad else None, (params, x))
    return tree_map_tensors(torch.detach, y), dy, gradients


def _split(tree: Any, placed: Any, n: int, gradient: bool = False) -> list[Any]:
    """Split a tree into the trees of n ranks."""
    pairs = list(zip(leaves(tree), _placements(tree, placed), strict=True))
    parts = [(p.gradient if gradient else p).split(t, n) if isinstance(t, Tensor) else [t] * n for t, p in pairs]
    return [with_leaves(tree, [part[rank] for part in parts]) for rank in range(n)]


def _join(trees: list[Any], placed: Any, gradient: bool = False) -> Any:
    columns = list(zip(*map(leaves, trees), strict=True))
    pairs = zip(columns, _placements(trees[0], placed), strict=True)
    return with_leaves(trees[0], [(p.gradient if gradient else p).join(c) if isinstance(c[0], Tensor) else c[0] for c, p in pairs])


def _placements(tree: Any, placed: Any) -> list[Any]:
    found = leaves(placed)
    each = ", ".join(paths(tree)) or "its tensor alone"
    require(len(found) == len(leaves(tree)), "DistCase", "placements", f"one for each of {each}", len(found))
    return found


def _check(op: Op, case: DistCase, n: int, single: int, tolerance: float) -> None:
    params, x = _make(case)
    y, dy, (dparams, dx) = _reference(case, params, x, n)
    given = list(
        zip(_split(params, case.placed_params, n), _split(x, case.placed_x, n), _split(dy, case.placed_y, n, True), strict=True)
    )
    found = run_ranks({"tp": n}, lambda mesh: _on_rank(op, case, mesh, *given[mesh.rank], tolerance))
    ys, dparamss, dxs, kept = (list(column) for column in zip(*found, strict=True))
    _close(_join(ys, case.placed_y), y, tolerance, "y")
    _close(_join(dxs, case.placed_x, True), dx, tolerance, "dx")
    if params is not None:
        _close(_join(dparamss, case.placed_params, True), dparams, tolerance, "dparams")
    shared = all(p is None or p.kind == "shard" for p in (*leaves(case.placed_x), *leaves(case.placed_params)))
    for nbytes_of_rank in () if case.buffers else kept:
        assert nbytes_of_rank * n == single if shared else nbytes_of_rank <= single, (
            f"{nbytes_of_rank} bytes kept, {single} by one rank"
        )


def _on_rank(op: Op, case: DistCase, mesh: Mesh, params: Any, x: Any, dy: Any, tolerance: float) -> Any:
    """Return y, dparams, dx and the bytes saved by this rank; check all bitwise laws on the way."""
    cfg = case.cfg(mesh["tp"])
    before = tree_map_tensors(torch.clone, (params, x, dy))
    y, residuals = op.fwd(params, x, cfg)
    same = {id(t) for t in tensors((params, x, y))}
    for path, t in paths(residuals).items():
        assert t is None or id(t) in same or not op.fields(cfg)[path.partition(".")[0]].alias, f"{path} kept as another tensor"
    both = op.bwd(residuals, dy, cfg)
    dx, pending = op.dgrad(residuals, dy, cfg)
    same_bits((op.wgrad(pending, cfg), dx), both, "dgrad and wgrad")
    same_bits(op.bwd(donate(op.fwd(params, x, cfg)[1]), dy, cfg), both, "donated bwd")
    if params is not None:
        into, other = (tree_map(lambda g: None if g is None else torch.ones_like(g), both[0]) for _ in range(2))
        op.bwd(residuals, dy, cfg, into=into)
        op.wgrad(pending, cfg, into=other)
        same_bits(into, other, "into through bwd and through wgrad")
    if case.twin is not None:
        twin = case.twin(mesh["tp"])
        y2, kept = op.fwd(params, x, twin)
        same_bits((y2, op.bwd(kept, dy, twin)), (y, both), "the twin")
    if case.near is not None:
        near = case.near(mesh["tp"])
        y2, kept = op.fwd(params, x, near)
        _close((y, both), (y2, op.bwd(kept, dy, near)), tolerance, "the near one")
    for needs in (Needs(x=True, params=False), Needs(x=False, params=True)) if params is not None else ():
        kept = op.fwd(params, x, cfg, needs=needs)[1]
        got = op.bwd(kept, dy, cfg)
        want = (both[0], tree_map(lambda _: None, both[1])) if needs.params else (tree_map(lambda _: None, both[0]), both[1])
        same_bits(got, want, f"gradients under {needs}")
    same_bits((params, x, dy), before, "arguments")
    return y, both[0], both[1], nbytes(residuals)


def _close(got: Any, want: Any, tolerance: float, what: str) -> None:
    for (path, g), w in zip(paths(got).items(), leaves(want), strict=True):
        if g is None and w is None:
            continue
        name = join_path(what, path)
        assert g is not None and w is not None and g.shape == w.shape, f"{name}: {g} instead of {w}"
        allowed = tolerance * (1 + (float(w.abs().max()) if w.numel() else 0.0))
        error = float((g - w).abs().max()) if w.numel() else 0.0
        assert error <= allowed, f"{name} differs by {error:.2e}, more than {allowed:.2e}"
