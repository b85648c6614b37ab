"""Which public names an example shows: the code of docstrings and pages is parsed, and its names are looked up, so that
`dist.load` is not taken for `torch.load`. tests/pages/test_docs.py checks that the code runs."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import funcops

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.S | re.M)


def session(value: Any) -> str:
    """The source of the `>>>` lines in the docstring of a module, a class or a function."""
    text = inspect.unwrap(value).__doc__ if callable(value) else value.__doc__
    return "".join(example.source for example in doctest.DocTestParser().get_examples(text or ""))


def named(code: str) -> Iterator[Any]:
    """The values of funcops that code names outside of its imports; for a dotted name also the values that it is a part of."""
    tree, means = ast.parse(code), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in (alias for alias in node.names if alias.name.partition(".")[0] == "funcops"):
                module = importlib.import_module(name.name)
                means[name.asname or "funcops"] = module if name.asname else funcops
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "funcops":
            module = importlib.import_module(node.module)
            means |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
    for node in ast.walk(tree):
        found = _value(node, means)
        if found is not None:
            yield found


def _value(node: ast.AST, means: dict[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return means.get(node.id)
    return getattr(_value(node.value, means), node.attr, None) if isinstance(node, ast.Attribute) else None


def shown(code: Iterable[str]) -> frozenset[int]:
    """The `id` of each value that is named, and of each class in the return annotation of a named function. An id stays valid for
    values that the package itself names, as these are never freed."""
    values = [value for text in code for value in named(text)]
    return frozenset(map(id, [*values, *(given for value in values if inspect.isfunction(value) for given in _returned(value))]))


def _returned(function: Any) -> Iterator[type]:
    module = vars(sys.modules[function.__module__]) if function.__module__ else {}  # functions written at run time have no module
    words = re.findall(r"\w+", str(getattr(function, "__annotations__", {}).get("return", "")))
    return (module[word] for word in words if isinstance(module.get(word), type))


@functools.cache
def in_module(name: str) -> frozenset[int]:
    """The values that the docstrings of a module and of its functions and classes show."""
    module = importlib.import_module(name)
    own = [value for value in vars(module).values() if callable(value) and getattr(value, "__module__", None) == name]
    return shown(map(session, (module, *own)))


@functools.cache
def in_pages() -> dict[str, frozenset[int]]:
    """The values that the code blocks of each page show, by the page's path."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {
        path.relative_to(ROOT).as_posix(): shown(["\n".join(BLOCK.findall(path.read_text(encoding="utf-8")))]) for path in paths
    }


def uses(value: Any) -> list[str]:
    """The pages whose code names the value."""
    return [path for path, values in in_pages().items() if id(value) in values]
