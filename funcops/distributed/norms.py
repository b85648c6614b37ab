"""Norms of sharded trees, and flags and faults that all ranks must know."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from funcops.distributed import comm
from funcops.distributed.buckets import float_leaves
from funcops.distributed.checks import check_tensor
from funcops.distributed.data import axes_by_path, axes_of
from funcops.distributed.handshake import known_to_all
from funcops.distributed.mesh import Axis, Mesh
from funcops.distributed.specs import Spec
from funcops.engine.errors import check, fail, require_device, require_type

_NONE: Mapping[str, tuple[Axis, ...]] = {}


def global_norm(
    tree: Any, over: Axis | tuple[Axis, ...], parts: Mapping[str, tuple[Axis, ...]] = _NONE, *, device: Any = "cpu"
) -> Tensor:
    """sqrt(sum of g^2) of a tree of which each rank has a part: [], float64, the same on all ranks.

    over: the axes along which ranks have different leaves, or different elements of all leaves: of ZeRO's shards, of pipeline
    stages. parts: by dotted path, further axes along which ranks have different elements of that leaf (tensor parallelism). A leaf
    that is the same on all ranks of an axis counts once. device: the device of the sum on a rank without any gradient.

        grads, norm = clip_by_global_norm(grads, 1.0, norm=dist.global_norm(grads, (pp, dp), {"up.weight": (tp,)}))

    No host sync. Raises `TypeError` for a leaf that is neither a float tensor nor None, `ValueError` for a missing path.

    >>> import torch
    >>> from funcops import dist
    >>> from funcops.testing import run_ranks
    >>> run_ranks({"dp": 2}, lambda mesh: dist.global_norm({"w": torch.tensor([3.0 + mesh["dp"].rank])}, mesh["dp"]))
    [tensor(5., dtype=torch.float64), tensor(5., dtype=torch.float64)]
    """
    where = "global_norm"
    require_device(where, device)
    found = float_leaves(where, "tree", tree)
    if isinstance(over, Mapping):
        fail(where, "over", "axes, or () (specs go into parts=dist.part_axes(tree, specs, mesh))", "a dict", TypeError)
    shared = axes_of(where, over)
    require_type(where, "parts", parts, Mapping)
    own = axes_by_path(where, found, parts, "parts")
    given = {path: t for path, t in found.items() if t is not None}
    groups: dict[tuple[Axis, ...], list[Tensor]] = {(): []}
    for path, t in given.items():
        groups.setdefault(tuple([axis for axis in own.get(path, ()) if axis not in shared]), []).append(t)
    device = next(iter(given.values())).device if given else torch.device(device)
    with torch.no_grad():
        sums = {axes: _squares(ts, device) for axes, ts in groups.items()}
        for axis in dict.fromkeys([axis for axes in groups for axis in axes]):
            sums = _over(axis, sums)
        total = functools.reduce(lambda s, axis: comm.sum_over(s, axis), shared, sums[()])
        return total.sqrt()


def _over(axis: Axis, sums: dict[tuple[Axis, ...], Tensor]) -> dict[tuple[Axis, ...], Tensor]:
    """The sums of squares, after the sums of leaves that `axis` shards are summed over it."""
    apart = [axes for axes in sums if axis in axes]
    summed = comm.sum_over(torch.stack([sums[axes] for axes in apart]), axis)
    left = {axes: t for axes, t in sums.items() if axis not in axes}
    for axes, t in zip(apart, summed, strict=True):
        rest = tuple([one for one in axes if one != axis])
        left[rest] = left[rest] + t if rest in left else t
    return left


def _squares(ts: list[Tensor], device: torch.device) -> Tensor:
    """The sum of squares, in float64, as it has twice the exponent of a norm."""
    if not ts:
        return torch.zeros((), dtype=torch.float64, device=device)
    dtype = torch.float64 if any([t.dtype is torch.float64 for t in ts]) else torch.float32
    norms = torch._foreach_norm(ts, 2, dtype=dtype)
    return torch.stack([n.to(device) for n in norms]).double().square().sum()


def amaxes_over(
    amaxes: Mapping[str, Tensor], over: Axis | tuple[Axis, ...], *, specs: Mapping[str, Spec] | None = None
) -> dict[str, Tensor]:
    """The maximum of each amax over all ranks of these axes, with which all of them update the state of delayed scaling. `amaxes`:
    float32, not negative, by path, as from `split_amaxes`; {} is not sent. One communication per axis. NaN counts as the largest.
    `specs`: from `specs_of`, needed for experts over ranks, whose amaxes are not joined over the axis that shards them: each rank
    has other experts.

        grads, state = end_step(main_grad, cfg, state, over_ranks=partial(dist.amaxes_over, over=(dp, tp)))

    Raises `TypeError` or `ValueError` unless amaxes is a mapping to float32 tensors.

    >>> import torch
    >>> from funcops import dist
    >>> from funcops.testing import run_ranks
    >>> run_ranks({"dp": 2}, lambda mesh: dist.amaxes_over({"up": torch.tensor([1.0 + mesh["dp"].rank])}, mesh["dp"]))
    [{'up': tensor([2.])}, {'up': tensor([2.])}]
    """
    require_type("amaxes_over", "amaxes", amaxes, Mapping)
    require_type("amaxes_over", "specs", specs, Mapping, type(None))
    axes = axes_of("amaxes_over", over)
    for path, t in amaxes.items():
        check_tensor("amaxes_over", f"amaxes[{path!r}]", t, (...,), torch.float32)
    if not amaxes or not axes:
        return dict(amaxes)
    found, known = dict(amaxes), specs or {}
    for axis in axes:
        joined = {path: t for path, t in found.items() if not (path in known and _shards_groups(known[path], axis, t))}
        if joined:
            # abs for the sign of a NaN: 0 / 0 has one on x86. Amaxes of our kernels, which leave NaN out, do without.
            flat = comm.largest(torch.cat([t.reshape(-1) for t in joined.values()]).abs(), axis)
            parts = flat.split([t.numel() for t in joined.values()])
            found |= {path: part.view(t.shape) for (path, t), part in zip(joined.items(), parts, strict=True)}
    return found


def _shards_groups(spec: Spec, axis: Axis, amaxes: Tensor) -> bool:
    """Whether the axis shards a dimension that the amaxes have, too: ranks have different groups."""
    return spec.axis == axis.name and spec.dim < amaxes.dim() - 1


def all_ranks(ok: Tensor, over: Axis | tuple[Axis, ...]) -> Tensor:
    """Whether `ok`, a 0-d bool, holds on all ranks of these axes: the same on each of them. No host sync. Flags are summed, as a
    maximum may drop a NaN.

        ok = dist.all_ranks(all_finite(grads), (dp, tp))
        params, state = select_step(ok, new, old)

    Raises `ValueError` or `TypeError` unless `ok` is a 0-d bool tensor.

    >>> import torch
    >>> from funcops import dist
    >>> from funcops.testing import run_ranks
    >>> run_ranks({"dp": 2}, lambda mesh: dist.all_ranks(torch.tensor(mesh["dp"].rank == 0), mesh["dp"]))
    [tensor(False), tensor(False)]
    """
    check("all_ranks", "ok", ok, (), torch.bool)
    axes = axes_of("all_ranks", over)
    return functools.reduce(lambda s, axis: comm.sum_over(s, axis), axes, (~ok).to(torch.float32)) == 0


def raise_on_all_ranks(fault: str | None, mesh: Mesh) -> None:
    """Raise `RuntimeError` on every rank of the mesh, with the fault, if one of them has a fault; do nothing if all have None. All
    ranks must call it, and it waits for them.

        dist.raise_on_all_ranks(nonfinite(grads), mesh)     # the path of a leaf with a NaN

    >>> from funcops import dist
    >>> from funcops.testing import run_ranks
    >>> def each(mesh):
    ...     try:
    ...         dist.raise_on_all_ranks("head.weight" if mesh.rank == 1 else None, mesh)
    ...     except RuntimeError as error:
    ...         return str(error)
    ...
    >>> run_ranks({"dp": 2}, each)[0]
    'raise_on_all_ranks: no rank must have a fault, got rank 1: head.weight'
    """
    require_type("raise_on_all_ranks", "fault", fault, str, type(None))
    require_type("raise_on_all_ranks", "mesh", mesh, Mesh)
    said = known_to_all("" if not fault else f"rank {mesh.rank}: {fault}", mesh)
    if said:
        raise RuntimeError(f"raise_on_all_ranks: no rank must have a fault, got {said}")
