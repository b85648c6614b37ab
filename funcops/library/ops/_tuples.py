"""The check of an x of several tensors."""

from __future__ import annotations

from typing import Any

from funcops.engine.errors import not_a_tuple


def require_tuple(where: str, x: Any, *names: str) -> Any:
    """Check that x is a tuple with a part for each name, and return it."""
    if not isinstance(x, tuple) or len(x) != len(names):
        not_a_tuple(where, x, *names)
    return x
