"""Matrix products of a linear layer, fused with the steps around them: one launch each, one more if the inner dim is split."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from funcops.library.kernels import fused_linear as declared
from funcops.library.kernels.pins import launched
from funcops.library.kernels.triton.common import contiguous
from funcops.library.kernels.triton.matmul import Epilogue, columns_of, multiply, rows_of
from funcops.library.kernels.triton.pinned_products import product_of_rows


@declared.fused_linear_fwd.triton
def fused_linear_fwd(
    x: Tensor, w: Tensor, b: Optional[Tensor], residual: Optional[Tensor], kind: str, scale: float, keep: bool
) -> tuple[Tensor, Optional[Tensor]]:
    y = x.new_empty(*x.shape[:-1], w.shape[0])
    z = torch.empty_like(y) if keep else None
    if y.numel():
        mode = "keep" if keep else ""
        multiply(rows_of(x), columns_of(w), y, Epilogue(contiguous(b), z, mode, kind, contiguous(residual), scale))
    return y, z


@declared.fused_linear_dgrad.triton
def fused_linear_dgrad(dy: Tensor, w: Tensor, z: Optional[Tensor], kind: str, scale: float) -> Tensor:
    dx = dy.new_empty(*dy.shape[:-1], w.shape[1])
    if dx.numel():
        mode = "derivative" if kind else ""
        multiply(rows_of(dy), rows_of(w), dx, Epilogue(z=contiguous(z) if kind else None, mode=mode, kind=kind, scale=scale))
    return dx


@declared.fused_linear_dgrad_add.triton
def fused_linear_dgrad_add(dy: Tensor, w: Tensor, scale: float, add: Tensor) -> Tensor:
    dx = torch.empty_like(add, memory_format=torch.contiguous_format)
    if dx.numel():
        multiply(rows_of(dy), rows_of(w), dx, Epilogue(add=add.contiguous(), scale=scale))
    return dx


@declared.fused_linear_dgrad_into.triton
def fused_linear_dgrad_into(dy: Tensor, w: Tensor, scale: float, into: Tensor) -> None:
    if into.numel():
        multiply(rows_of(dy), rows_of(w), into, Epilogue(add=into, scale=scale))


@launched(declared.fused_linear_dgrad_into)
def _pinned_dgrad_into(dy: Tensor, w: Tensor, scale: float, into: Tensor) -> None:
    product_of_rows(dy, rows_of(w), Epilogue(add=into, scale=scale), into)
    torch.autograd.graph.increment_version(into)


@launched(declared.fused_linear_wgrad)
@declared.fused_linear_wgrad.triton
def fused_linear_wgrad(dy: Tensor, x: Tensor, scale: float, bias: bool) -> tuple[Tensor, Optional[Tensor]]:
    dw = dy.new_empty(dy.shape[-1], x.shape[-1])
    db = dy.new_empty(dy.shape[-1]) if bias else None
    if dw.numel():
        multiply(columns_of(dy), rows_of(x), dw, Epilogue(scale=scale, sums=db))
    return dw, db


@launched(declared.fused_linear_wgrad_into)
@declared.fused_linear_wgrad_into.triton
def fused_linear_wgrad_into(dy: Tensor, x: Tensor, scale: float, dw: Tensor, db: Optional[Tensor]) -> None:
    if dw.numel():
        multiply(columns_of(dy), rows_of(x), dw, Epilogue(add=dw, scale=scale, sums=db))
