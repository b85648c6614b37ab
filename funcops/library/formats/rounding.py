"""The errors of rounding a tensor to a format, as numbers that stay on its device."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from funcops.library.formats.qtensor import QTensor

LARGEST = {"e4m3": 0x7E, "e5m2": 0x7B, "e2m1": 0x77}  # the code of the largest element


class Rounding(NamedTuple):
    """Each [] in float32. `amax`: the largest |t|. `underflow`: the share of nonzero elements that become 0, among all.
    `saturated`: the share of elements that are clipped to the largest code of their tile. `error`: |q - t| / |t| in norm, 0 for
    a t of zeros.

    >>> import torch
    >>> from funcops.low_precision import Format, Rounding, quantize_tensor
    >>> from funcops.library.formats.rounding import rounding
    >>> t = torch.tensor([[1.0, 0.0, 1e-6, 448.0]])
    >>> found = rounding(t, quantize_tensor(t, Format("e4m3")))
    >>> isinstance(found, Rounding), found.amax, found.underflow, found.saturated
    (True, tensor(448.), tensor(0.2500), tensor(0.))
    """

    amax: Tensor
    underflow: Tensor
    saturated: Tensor
    error: Tensor


def rounding(t: Tensor, q: QTensor, count: Tensor | None = None) -> Rounding:
    """Compare t with its codes q. `count`: the number of the first rows, if the others are in no group and do not count."""
    wide, value, among = t.float(), q.dequantize(torch.float32), t.numel()
    if not among:
        return Rounding(*[wide.new_zeros(()) for _ in Rounding._fields])
    if count is not None:
        counts = (torch.arange(len(t), device=t.device) < count)[:, None]
        wide, value = (torch.where(counts, one, 0.0) for one in (wide, value))
        among = (counts.sum() * t.shape[1]).clamp(min=1)  # type: ignore[assignment]
    size, largest = wide.abs(), dataclasses.replace(q, codes=torch.full_like(q.codes, LARGEST[q.format.element]))
    zeros = (value == 0) & (size > 0)
    clipped = size > largest.dequantize(torch.float32) * (1 + 2**-10)  # not an element that rounds up to the largest
    off, norm = (torch.linalg.vector_norm(one) for one in (value - wide, size))
    error = torch.where(off == 0, off, off / norm)
    return Rounding(size.amax(), zeros.float().sum() / among, clipped.float().sum() / among, error)
