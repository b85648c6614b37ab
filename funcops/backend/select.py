"""Which implementation runs: by the tensor's device, or by `backend("torch" | "triton")`, or by FUNCOPS_BACKEND; and which
matrix products: by the table, or by `gemm("auto" | "cublas" | "triton")`, or by FUNCOPS_GEMM."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from funcops.errors import require

BACKENDS = ("torch", "triton")
PROVIDERS = ("auto", "cublas", "triton", "specialised")


def _checked(name: str | None, where: str, among: tuple[str, ...] = BACKENDS) -> str | None:
    require(name is None or name in among, where, "name", " or ".join(map(repr, among)), repr(name))
    return name


_forced: str | None = _checked(os.environ.get("FUNCOPS_BACKEND") or None, "FUNCOPS_BACKEND")
_gemm: str | None = _checked(os.environ.get("FUNCOPS_GEMM") or None, "FUNCOPS_GEMM", PROVIDERS)


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Run every kernel in the block on one implementation. It changes speed and rounding, never meaning."""
    global _forced
    before, _forced = _forced, _checked(name, "backend")
    try:
        yield
    finally:
        _forced = before


@contextmanager
def gemm(name: str) -> Iterator[None]:
    """Run bare matrix products in the block by cuBLAS, by our Triton kernels, or ("auto", the default) by the table of
    `funcops/kernels/triton/gemm_table.py`. Inside `backend("triton")` the default is "triton". With "specialised" all
    products that can go to our kernel with specialised warps: a candidate, to be measured."""
    global _gemm
    before, _gemm = _gemm, _checked(name, "gemm", PROVIDERS)
    try:
        yield
    finally:
        _gemm = before


def gemm_provider() -> str:
    return _gemm or ("auto" if _forced is None else "triton")


def forced() -> str | None:
    return _forced


def wants_triton(first: Tensor) -> bool:
    return first.is_cuda if _forced is None else _forced == "triton"
