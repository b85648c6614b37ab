"""The check of an x that is several tensors."""

from __future__ import annotations

from typing import Any

from funcops.errors import describe, fail


def require_tuple(where: str, x: Any, *names: str) -> Any:
    """x, after the check that it is a tuple of as many parts as there are names."""
    if not isinstance(x, tuple) or len(x) != len(names):
        fail(where, "x", f"a tuple ({', '.join(names)})", describe(x), TypeError)
    return x
