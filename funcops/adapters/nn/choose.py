"""Selection of a model's modules by `only=` and `skip=` of `from_torch`."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from funcops.engine.errors import describe, fail


class Chosen:
    """The modules that patterns match. A pattern is a class, or a glob for a module's path, for the end of the path after a dot, or
    for the name of its class. It matches a module with all its submodules."""

    def __init__(self, where: str, name: str, given: Any, model: nn.Module, others: tuple[str, ...]) -> None:
        """`others`: paths of other things than modules, such as a loss function. Raises `TypeError` for an invalid pattern,
        `ValueError` for a pattern without a match."""
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
        """Whether a path, or a module around it, is chosen."""
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
