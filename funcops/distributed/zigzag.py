"""Zigzag sharding of a causal sequence over an axis: of 2n chunks, rank r has the r-th from the front and the r-th from the back,
so that all ranks see the same number of keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcops.distributed.mesh import Axis
from funcops.engine.errors import describe, fail, require, require_count, require_device, require_type


def zigzag(t: Tensor, axis: Axis, dim: int = 1) -> Tensor:
    """[..., T, ...] -> [..., T/n, ...]: this rank's chunks r and 2n - 1 - r of a sequence along `dim`; on one rank t itself.

    Shard everything that belongs to positions in the same way: ids, labels, masks. Raises `ValueError` if 2n does not divide T.

    >>> import torch
    >>> from funcops.dist import Mesh, zigzag
    >>> positions = torch.arange(8).reshape(1, 8)
    >>> [zigzag(positions, Mesh.abstract({"cp": 2}, rank)["cp"]) for rank in (0, 1)]
    [tensor([[0, 1, 6, 7]]), tensor([[2, 3, 4, 5]])]
    """
    at = _checked("zigzag", t, axis, dim)
    if axis.size == 1:
        return t
    chunks = t.chunk(2 * axis.size, at)
    return torch.cat((chunks[axis.rank], chunks[-1 - axis.rank]), at)


def unzigzag(t: Tensor, axis: Axis, dim: int = 1) -> Tensor:
    """The whole sequence in its own order, from the concatenated `zigzag` parts of all ranks, as a gather returns them.

    >>> import torch
    >>> from funcops.dist import Mesh, unzigzag
    >>> unzigzag(torch.tensor([[0, 1, 6, 7, 2, 3, 4, 5]]), Mesh.abstract({"cp": 2}, 0)["cp"])
    tensor([[0, 1, 2, 3, 4, 5, 6, 7]])
    """
    at, n = _checked("unzigzag", t, axis, dim), axis.size
    if n == 1:
        return t
    chunks = t.chunk(2 * n, at)
    return torch.cat((*chunks[::2], *chunks[::-2]), at)


def rezigzag(t: Tensor, axis: Axis, dim: int = 1) -> Tensor:
    """The `zigzag` parts of all ranks, concatenated: the inverse of `unzigzag`."""
    at, n = _checked("rezigzag", t, axis, dim), axis.size
    chunks = t.chunk(2 * n, at)
    return torch.cat([chunks[i] for r in range(n) for i in (r, -1 - r)], at) if n > 1 else t


def zigzag_positions(length: int, axis: Axis, device: Any = None) -> Tensor:
    """[T/n] int64: this rank's positions in a sequence of `length` T, for `rope`. Raises `ValueError` for a length
    that does not divide into two chunks a rank, `TypeError` unless `axis` is an `Axis`.

    >>> from funcops.dist import Mesh, zigzag_positions
    >>> zigzag_positions(8, Mesh.abstract({"cp": 2}, rank=1)["cp"])
    tensor([2, 3, 4, 5])
    """
    require_count("zigzag_positions", 0, length=length)
    require_type("zigzag_positions", "axis", axis, Axis)
    require(length % _chunks(axis) == 0, "zigzag_positions", "length", f"a multiple of {_chunks(axis)} ({axis})", length)
    require_device("zigzag_positions", device)
    return zigzag(torch.arange(length, device=device), axis, 0)


def _chunks(axis: Axis) -> int:
    return 2 * axis.size if axis.size > 1 else 1


def _checked(where: str, t: Any, axis: Any, dim: Any) -> int:
    require_type(where, "axis", axis, Axis)
    require_type(where, "dim", dim, int)
    require_type(where, "t", t, Tensor)
    if not -t.dim() <= dim < t.dim():
        fail(where, "t", f"of more dimensions (dim is {dim})", describe(t))
    if t.shape[dim] % _chunks(axis):
        fail(where, "t", f"of a multiple of {_chunks(axis)} along dimension {dim} ({axis})", describe(t))
    return dim % t.dim()
