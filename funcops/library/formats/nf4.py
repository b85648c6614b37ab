"""Weights in NF4, as data: the format of QLoRA's frozen weights."""

from __future__ import annotations

import torch
from torch import Tensor

from funcops.engine.contract.marks import counts_writes
from funcops.engine.contract.op import config
from funcops.engine.errors import FLOATS, check, require
from funcops.engine.trees import leaf, replace, stands_in, static, tree
from funcops.library.kernels import nf4 as kernels


@config
class NF4:
    """4 bits an element, on 16 levels that share out a normal distribution equally, with a float32 scale for each 64 neighbours of
    a row: 0.5625 bytes an element. `double`: the scales in 8 bits (double quantisation): 0.516 bytes an element. Codes and scales
    are bitsandbytes'. For weights that get no gradient. Source: QLoRA, arXiv 2305.14314.

    >>> import torch
    >>> from funcops.low_precision import NF4, quantize_weight
    >>> quantize_weight(torch.tensor([[1.0, 0.5, -2.0, 0.0]]), NF4()).dequantize()
    tensor([[ 0.8814,  0.4922, -2.0000,  0.0000]])
    """

    double: bool = False

    @property
    def name(self) -> str:
        """The format as a text."""
        return "nf4 1x64 double" if self.double else "nf4 1x64 float32"


@stands_in
@counts_writes
@tree
class NF4Tensor:
    """A tensor [*, K] in NF4: a tree node that counts as the one leaf that it stands for; its gradient is dense.

    `codes`: two elements a byte. `absmax`: the scales, in 8 bits if `largest` and `mean` are there (see `library.kernels.nf4`).

    >>> import torch
    >>> from funcops.low_precision import NF4, NF4Tensor, quantize_weight
    >>> w = quantize_weight(torch.ones(8, 128), NF4(double=True))
    >>> isinstance(w, NF4Tensor), w.shape, w.codes.shape, w.absmax.dtype
    (True, torch.Size([8, 128]), torch.Size([8, 64]), torch.uint8)
    """

    codes: Tensor = leaf("uint8")
    absmax: Tensor = leaf("[*, K / 64]")
    largest: Tensor | None = leaf("[*, N / 256]")
    mean: Tensor | None = leaf("[*, 1]")
    width: int = static()
    dtype: torch.dtype = static()

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.codes.shape[:-1], self.width))

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def format(self) -> NF4:
        return NF4(double=self.largest is not None)

    def zero_gradient(self, dtype: torch.dtype | None = None) -> Tensor:
        """Zeros to accumulate the gradient in, which is dense."""
        return self.codes.new_zeros(self.shape, dtype=dtype or self.dtype)

    def cast(self, dtype: torch.dtype) -> NF4Tensor:
        """The same codes and scales, to be decoded to `dtype`."""
        return self if dtype is self.dtype else replace(self, dtype=dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor [*, K], rounded once to `dtype` (by default its own)."""
        scales = self.absmax
        if self.largest is not None and self.mean is not None:
            scales = kernels.unnested(scales, self.largest, self.mean)
        return kernels.nf4_dequantize(self.codes, scales, self.width, dtype or self.dtype)  # type: ignore[no-any-return]


def nf4_tensor(where: str, weight: Tensor, format: NF4) -> NF4Tensor:
    """A weight [*, O, I] in NF4; each of several matrices has scales of its own."""
    check(where, "weight", weight, (...,), FLOATS)
    require(weight.dim() >= 2, where, "weight", "a matrix [O, I], or several", list(weight.shape))
    codes, absmax = kernels.nf4_quantize(weight)
    scales, largest, mean = kernels.nested(absmax) if format.double else (absmax, None, None)
    return NF4Tensor(codes, scales, largest, mean, width=weight.shape[-1], dtype=weight.dtype)
