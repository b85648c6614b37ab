"""Plain matrix products of a linear layer, if the table does not leave them to cuBLAS."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from funcops.library.kernels import linear as declared
from funcops.library.kernels.pins import launched
from funcops.library.kernels.triton.common import contiguous
from funcops.library.kernels.triton.matmul import PLAIN, Epilogue, columns_of, left_to_library, matmul, rows_of, sum_rows
from funcops.library.kernels.triton.pinned_products import product_of_rows


@declared.linear_fwd.triton
def linear_fwd(x: Tensor, w: Tensor, b: Optional[Tensor]) -> Tensor:
    rows = x.numel() // max(1, x.shape[-1])
    if left_to_library("none", x.dtype, rows, w.shape[0]):
        return declared.linear_fwd.kernel.torch_impl(x, w, b)  # type: ignore[no-any-return]
    y = x.new_empty(*x.shape[:-1], w.shape[0])
    if y.numel():
        matmul(rows_of(x), columns_of(w), y, Epilogue(bias=contiguous(b)))
    return y


@declared.linear_dgrad.triton
def linear_dgrad(dy: Tensor, w: Tensor) -> Tensor:
    rows = dy.numel() // max(1, dy.shape[-1])
    if left_to_library("none", dy.dtype, rows, w.shape[1]):
        return declared.linear_dgrad.kernel.torch_impl(dy, w)  # type: ignore[no-any-return]
    dx = dy.new_empty(*dy.shape[:-1], w.shape[1])
    if dx.numel():
        matmul(rows_of(dy), rows_of(w), dx, PLAIN)
    return dx


@launched(declared.linear_wgrad)
@declared.linear_wgrad.triton
def linear_wgrad(dy: Tensor, x: Optional[Tensor], bias: bool) -> tuple[Optional[Tensor], Optional[Tensor]]:
    if x is None or left_to_library("none", dy.dtype, dy.shape[-1], x.shape[-1]):
        rows, db = dy.reshape(-1, dy.shape[-1]), dy.new_empty(dy.shape[-1]) if bias else None
        if db is not None:
            sum_rows(rows, db, False)
        return None if x is None else torch.mm(rows.mT, x.reshape(-1, x.shape[-1])), db
    dw = dy.new_empty(dy.shape[-1], x.shape[-1])
    db = dy.new_empty(dy.shape[-1]) if bias else None
    if dw.numel():
        matmul(columns_of(dy), rows_of(x), dw, Epilogue(sums=db) if bias else PLAIN)
    return dw, db


@declared.linear_bwd.triton
def linear_bwd(dy: Tensor, x: Optional[Tensor], w: Tensor, bias: bool) -> tuple[Tensor, Optional[Tensor], Optional[Tensor]]:
    return linear_dgrad(dy, w), *linear_wgrad(dy, x, bias)


@launched(declared.linear_fwd)
def _pinned_fwd(x: Tensor, w: Tensor, b: Optional[Tensor]) -> Tensor:
    return product_of_rows(x, columns_of(w), Epilogue(bias=contiguous(b)))


@launched(declared.linear_dgrad)
def _pinned_dgrad(dy: Tensor, w: Tensor) -> Tensor:
    return product_of_rows(dy, rows_of(w), PLAIN)


@launched(declared.linear_bwd)
def _pinned_bwd(dy: Tensor, x: Optional[Tensor], w: Tensor, bias: bool) -> tuple[Tensor, Optional[Tensor], Optional[Tensor]]:
    return _pinned_dgrad(dy, w), *linear_wgrad(dy, x, bias)
