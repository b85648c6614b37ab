"""Which public names an example shows: the code of a docstring or a page is read, and what it names is looked up."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.S | re.M)


def session(text: str | None) -> str:
    """What the `>>>` lines of a docstring say."""
    return "".join(example.source for example in doctest.DocTestParser().get_examples(text or ""))


def named(code: str, known: Any = MappingProxyType({})) -> Iterator[Any]:
    """The values of funcops that code names beyond its imports, each dotted name with what it is a part of. `known`: what names
    mean that the code does not import."""
    tree = ast.parse(code)
    means = dict(known)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            means |= {a.asname or a.name.partition(".")[0]: _module(a.name, whole=bool(a.asname)) for a in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "funcops":
            module = importlib.import_module(node.module)
            means |= {a.asname or a.name: getattr(module, a.name) for a in node.names}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)):
            found = _value(node, means)
            if found is not None:
                yield found


def _module(name: str, whole: bool) -> Any:
    if name.partition(".")[0] != "funcops":
        return None
    module = importlib.import_module(name)
    return module if whole else sys.modules["funcops"]


def _value(node: ast.expr, means: dict[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return means.get(node.id)
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, means), node.attr, None)
    return None


@functools.cache
def pages() -> dict[str, frozenset[int]]:
    """By the path of a page: the `id` of each value that its code names. Values live as long as the package."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {
        path.relative_to(ROOT).as_posix(): frozenset(map(id, named("\n".join(BLOCK.findall(path.read_text(encoding="utf-8"))))))
        for path in found
    }


@functools.cache
def of_module(name: str) -> frozenset[int]:
    """What the sessions of a module's docstring, and of those of its functions and classes, name."""
    module = importlib.import_module(name)
    own = [value for value in vars(module).values() if getattr(value, "__module__", None) == name]
    texts = [module.__doc__, *(inspect.unwrap(value).__doc__ for value in own if callable(value))]
    return frozenset(id(value) for text in texts for value in named(session(text), vars(module)))
