"""The check of an x of several tensors."""

from __future__ import annotations

from typing import Any

from funcops.engine.errors import describe, fail


def require_tuple(where: str, x: Any, *names: str) -> Any:
    """Check that x is a tuple with a part for each name, and return it."""
    if not isinstance(x, tuple) or len(x) != len(names):
        fail(where, "x", f"a tuple ({', '.join(names)})", describe(x), TypeError)
    return x
