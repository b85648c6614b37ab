"""Matrix products of sorted rows, each group of rows with a matrix of its own.

    a [M, K]: the rows; or, with `index` [N] and `every`, row n is a[index[n] // every]
    offsets [E + 1], int32, from 0 on: rows offsets[e] to offsets[e + 1] of N are group e's; rows from offsets[E] on have no group
    w [E, O, I], b [E, O]: a matrix and a bias per group

For CPU tensors the bodies loop over the groups on the host. On CUDA they read no value on the host: they use torch's own grouped
product if it serves, else every group's product of all rows, from which each row selects its own. Offsets that do not ascend from 0
to at most N raise `ValueError` on the CPU; on CUDA they leave rows without a group unwritten.
"""

from __future__ import annotations

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from funcops.engine.backend import kernel, wide
from funcops.engine.errors import fail

_grouped_mm = getattr(F, "grouped_mm", None)
LEAST = (8, 0)  # the least device capability for torch's grouped product


@kernel(opaque=True, rows="pinned")
def grouped_product(
    a: Tensor,
    w: Tensor,
    b: Optional[Tensor],
    offsets: Tensor,
    index: Optional[Tensor],
    every: int,
    scales: Optional[Tensor],
    transposed: bool,
) -> Tensor:
    """y [N, O] = a w_e^T (`transposed`) or a w_e for row n's group e, + b_e, or + scales[n] b_e; 0 for a row without a group."""
    rows = a if index is None else gathered(a, index, every)
    product = by_groups if a.is_cpu else by_library if library_serves(rows, w) else by_masks
    y = product(rows, w.mT if transposed else w, offsets)
    return y if b is None else biased(y, b, scales, offsets)


@grouped_product.fake
def _grouped_product_fake(a: Tensor, w: Tensor, index: Optional[Tensor], transposed: bool) -> Tensor:
    return a.new_empty((a.shape[0] if index is None else index.shape[0], w.shape[1 if transposed else 2]))


def _grouped_product_flops(a: Tensor, w: Tensor, index: Optional[Tensor]) -> int:
    return 2 * len(a if index is None else index) * w.shape[1] * w.shape[2]


grouped_product.kernel.flops = _grouped_product_flops


@kernel(opaque=True, rows="each")
def grouped_wgrad(
    dy: Tensor,
    x: Optional[Tensor],
    offsets: Tensor,
    dy_index: Optional[Tensor],
    x_index: Optional[Tensor],
    every: int,
    scales: Optional[Tensor],
    bias: bool,
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    """dw_e = dy^T x (None without x) and db_e = sum of dy (times scales) over group e's rows, in dy's dtype; 0 if empty."""
    rows, inner = factors(dy, x, dy_index, x_index, every)
    dw = None
    if inner is not None:
        product = wgrad_by_groups if dy.is_cpu else wgrad_by_library if library_serves(rows, inner) else wgrad_by_masks
        dw = product(rows, inner, offsets)
    return dw, _sums(rows, offsets, scales).to(dy.dtype) if bias else None


@grouped_wgrad.fake
def _grouped_wgrad_fake(dy: Tensor, x: Optional[Tensor], offsets: Tensor, bias: bool) -> tuple[Optional[Tensor], Optional[Tensor]]:
    groups, outer = offsets.shape[0] - 1, dy.shape[-1]
    return None if x is None else dy.new_empty((groups, outer, x.shape[-1])), dy.new_empty((groups, outer)) if bias else None


@kernel(opaque=True, mutates=("dw", "db"), rows="each")
def grouped_wgrad_into(
    dy: Tensor,
    x: Optional[Tensor],
    offsets: Tensor,
    dy_index: Optional[Tensor],
    x_index: Optional[Tensor],
    every: int,
    scales: Optional[Tensor],
    dw: Optional[Tensor],
    db: Optional[Tensor],
) -> None:
    """Add `grouped_wgrad` to dw [E, O, I] and db [E, O], each if given: contiguous, in the wide dtype. Sums are not rounded before,
    except dw's on the CPU."""
    rows, inner = factors(dy, x, dy_index, x_index, every)
    if dw is not None and inner is not None:
        if dy.is_cpu:
            for e, first, last in groups_of(offsets, len(rows)):
                part, of_x = rows[first:last].mT, inner[first:last]
                dw[e].addmm_(part, of_x) if dw.dtype is dy.dtype else dw[e].add_(torch.mm(part, of_x))
        else:
            dw += (wgrad_by_library if library_serves(rows, inner) else wgrad_by_masks)(rows, inner, offsets)
    if db is not None:
        db += _sums(rows, offsets, scales)


def _grouped_wgrad_flops(dy: Tensor, x: Optional[Tensor], dy_index: Optional[Tensor]) -> int:
    return 0 if x is None else 2 * len(dy if dy_index is None else dy_index) * dy.shape[-1] * x.shape[-1]


grouped_wgrad.kernel.flops = grouped_wgrad_into.kernel.flops = _grouped_wgrad_flops  # x is None where only db is asked for


@grouped_wgrad_into.fake
def _grouped_wgrad_into_fake() -> None:
    return None


def gathered(a: Tensor, index: Tensor, every: int) -> Tensor:
    return a.index_select(0, index if every == 1 else index // every)


def groups_of(offsets: Tensor, rows: int) -> list[tuple[int, int, int]]:
    """(group, first row, end) of each group that has rows, as numbers on the host."""
    at = offsets.tolist()
    if at[0] != 0 or at[-1] > rows or any([a > b for a, b in zip(at, at[1:], strict=False)]):
        fail("grouped_product", "offsets", f"ascending from 0 to at most {rows} (the rows)", at)
    return [(e, a, b) for e, (a, b) in enumerate(zip(at, at[1:], strict=False)) if a < b]


def by_groups(rows: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """rows [N, K] w_e [E, K, O], one group after the other."""
    y, end = rows.new_empty((rows.shape[0], w.shape[2])), 0
    for e, first, end in groups_of(offsets, len(rows)):  # noqa: B007 (end is read after the loop)
        torch.mm(rows[first:end], w[e], out=y[first:end])
    y[end:] = 0
    return y


def wgrad_by_groups(rows: Tensor, inner: Tensor, offsets: Tensor) -> Tensor:
    dw = rows.new_zeros((offsets.shape[0] - 1, rows.shape[1], inner.shape[1]))
    for e, first, last in groups_of(offsets, len(rows)):
        torch.mm(rows[first:last].mT, inner[first:last], out=dw[e])
    return dw


def by_library(rows: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """`by_groups` by torch's grouped product, which leaves rows without a group unwritten: they are set to 0."""
    assert _grouped_mm is not None
    y = _grouped_mm(rows, w, offs=offsets[1:])
    return torch.where(group_of(offsets, len(rows)).unsqueeze(-1) < offsets.shape[0] - 1, y, 0.0)


def wgrad_by_library(rows: Tensor, inner: Tensor, offsets: Tensor) -> Tensor:
    assert _grouped_mm is not None
    dw = _grouped_mm(rows.mT, inner, offs=offsets[1:])
    return torch.where((offsets[1:] > offsets[:-1]).view(-1, 1, 1), dw, 0.0)  # some devices gave other values for empty groups


def library_serves(rows: Tensor, other: Tensor) -> bool:
    """Whether torch has a grouped product for these: bfloat16, rows of multiples of 16 bytes, a device that is new enough."""
    even = all([t.is_contiguous() and t.numel() > 0 and t.data_ptr() % 16 == 0 and t.shape[-1] % 8 == 0 for t in (rows, other)])
    even = even and other.shape[-2] % 8 == 0 if other.dim() == 3 else even
    served = _grouped_mm is not None and rows.dtype is torch.bfloat16 and torch.version.hip is None
    return even and served and not rows.is_meta and torch.cuda.get_device_capability(rows.device) >= LEAST


def by_masks(rows: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """`by_groups` from every group's product of all rows, so that no value is read on the host."""
    group = group_of(offsets, len(rows)).unsqueeze(-1)
    y = rows.new_zeros((rows.shape[0], w.shape[2]))
    for e in range(w.shape[0]):
        y = torch.where(group == e, rows @ w[e], y)
    return y


def wgrad_by_masks(rows: Tensor, inner: Tensor, offsets: Tensor) -> Tensor:
    group = group_of(offsets, len(rows)).unsqueeze(-1)
    parts = [torch.where(group == e, rows, 0.0).mT @ torch.where(group == e, inner, 0.0) for e in range(offsets.shape[0] - 1)]
    return torch.stack(parts)


def factors(
    dy: Tensor, x: Optional[Tensor], dy_index: Optional[Tensor], x_index: Optional[Tensor], every: int
) -> tuple[Tensor, Optional[Tensor]]:
    """The gathered rows of dy and x, which are summed over."""
    rows = dy if dy_index is None else gathered(dy, dy_index, every)
    return rows, x if x is None or x_index is None else gathered(x, x_index, every)


def group_of(offsets: Tensor, rows: int) -> Tensor:
    """The group of each row, [N]; E for a row without a group."""
    at = torch.arange(rows, dtype=offsets.dtype, device=offsets.device)
    return torch.searchsorted(offsets[1:].contiguous(), at, right=True)


def biased(y: Tensor, b: Tensor, scales: Optional[Tensor], offsets: Tensor) -> Tensor:
    """y + b_e, or y + scales b_e, for each row's group e; rounded once more."""
    each = _of_groups(b, offsets, len(y))
    return (y.to(wide(y.dtype)) + (each if scales is None else each * scales.unsqueeze(-1))).to(y.dtype)


def _of_groups(b: Tensor, offsets: Tensor, rows: int) -> Tensor:
    """The bias b_e of each row's group, [N, O] in the wide dtype; 0 for a row without a group."""
    padded = torch.cat((b, b.new_zeros((1, b.shape[1])))).to(wide(b.dtype))
    return padded.index_select(0, group_of(offsets, rows))


def _sums(rows: Tensor, offsets: Tensor, scales: Optional[Tensor]) -> Tensor:
    """The sum of each group's rows (times scales), [E, O] in the wide dtype."""
    dtype, groups = wide(rows.dtype), offsets.shape[0] - 1
    if rows.is_cpu and scales is None:
        total = rows.new_zeros((groups, rows.shape[1]), dtype=dtype)
        for e, first, last in groups_of(offsets, len(rows)):
            torch.sum(rows[first:last], 0, dtype=dtype, out=total[e])
        return total
    at = torch.arange(groups, device=offsets.device)
    onehot = (group_of(offsets, len(rows)) == at.unsqueeze(-1)).to(dtype)
    return (onehot if scales is None else onehot * scales) @ rows.to(dtype)
