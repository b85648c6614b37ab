"""Which implementation runs: by the tensor's device, or by `backend("torch" | "triton")`, or by FUNCOPS_BACKEND."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from funcops.errors import require

BACKENDS = ("torch", "triton")


def _checked(name: str | None, where: str) -> str | None:
    require(name is None or name in BACKENDS, where, "name", "'torch' or 'triton'", repr(name))
    return name


_forced: str | None = _checked(os.environ.get("FUNCOPS_BACKEND") or None, "FUNCOPS_BACKEND")


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Run every kernel in the block on one implementation. It changes speed and rounding, never meaning."""
    global _forced
    before, _forced = _forced, _checked(name, "backend")
    try:
        yield
    finally:
        _forced = before


def forced() -> str | None:
    return _forced


def wants_triton(first: Tensor) -> bool:
    return first.is_cuda if _forced is None else _forced == "triton"
