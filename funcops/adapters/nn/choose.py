"""`only=` and `skip=` of `from_torch`: which modules of a model."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from funcops.errors import describe, fail


class Chosen:
    """Modules that patterns find. A pattern is a class, or a glob for a module's path, for the end of it after a dot, or for the
    name of its class. It finds a module and all that is in it."""

    def __init__(self, where: str, name: str, given: Any, model: nn.Module, others: tuple[str, ...]) -> None:
        """`others`: paths that are no module's, as that of a loss function. Raises `TypeError` for what is no pattern, `ValueError`
        for a pattern that finds nothing."""
        patterns = given if isinstance(given, (list, tuple, set, frozenset)) else [given]
        self.paths: set[str] = set()
        for pattern in patterns:
            if not isinstance(pattern, (str, type)):
                fail(where, name, "globs of paths, names of classes, or classes", describe(pattern), TypeError)
            found = {path for path, module in model.named_modules(remove_duplicate=False) if _matches(pattern, path, module)}
            found |= {path for path in others if isinstance(pattern, str) and _of_path(pattern, path)}
            if not found:
                shown = pattern.__name__ if isinstance(pattern, type) else repr(pattern)
                fail(where, name, "patterns that each find a module of the model", shown)
            self.paths |= found

    def __contains__(self, path: str) -> bool:
        """Whether a path is chosen, or is in a module that is."""
        while path not in self.paths:
            if not path:
                return False
            path = path.rpartition(".")[0]
        return True


def _matches(pattern: str | type, path: str, module: nn.Module) -> bool:
    if isinstance(pattern, type):
        return isinstance(module, pattern)
    return _of_path(pattern, path) or fnmatchcase(type(module).__name__, pattern)


def _of_path(pattern: str, path: str) -> bool:
    return (pattern != "" and fnmatchcase(path, pattern)) or fnmatchcase(path, f"*.{pattern}")
