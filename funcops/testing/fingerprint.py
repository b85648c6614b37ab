"""A hash of all that a compiled kernel depends on but the compiler: its source, the source of its helpers, and its launch.

Comments, docstrings, layout and the position in a file do not count: the source is read as a syntax tree.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any

from funcops.engine.backend.launch import Launched

__all__ = ["fingerprint", "source_of"]


def fingerprint(launched: Launched, target: str) -> str:
    """The hash of a launched kernel for a target: twelve hexadecimal digits."""
    said = "\n".join([*source_of(launched.kernel), repr(launched.key), target])
    return hashlib.sha256(said.encode()).hexdigest()[:12]


@functools.cache
def source_of(kernel: Any) -> tuple[str, ...]:
    """The source of a kernel and of every helper that it reaches, and the globals that they read, each once, with its name."""
    found: dict[str, str] = {}
    _collect(kernel.fn, found)
    return tuple(f"{name}: {text}" for name, text in found.items())


def _collect(function: FunctionType, found: dict[str, str]) -> None:
    home = function.__module__.replace("funcops.library.", "funcops.")  # in which ring a file is does not change its kernels
    name = f"{home}.{function.__qualname__}"
    if name in found:
        return
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    (definition,) = tree.body
    assert isinstance(definition, ast.FunctionDef)
    if ast.get_docstring(definition) is not None:
        # a function may have no more than its docstring
        definition.body = definition.body[1:] or [ast.Pass()]
    found[name] = ast.unparse(tree)
    outside = inspect.getclosurevars(function)
    names = {**outside.globals, **outside.nonlocals}  # by name alone, so `t.T` counts as reading a global T, if there is one
    # a local with the name of a global does not read it
    names = {name: value for name, value in names.items() if name not in function.__code__.co_varnames}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)):
            for value in _value_of(node, names):
                _collect_value(f"{name} reads {ast.unparse(node)}", value, found)


def _value_of(node: ast.expr, names: Mapping[str, Any]) -> list[Any]:
    """The value of a name, or a dotted name, outside the function, as a list of at most one. Triton's own names have no value here:
    the compiler's version covers them."""
    if isinstance(node, ast.Name):
        values = [names[node.id]] if node.id in names else []
    elif isinstance(node, ast.Attribute):
        values = [getattr(base, node.attr) for base in _value_of(node.value, names) if hasattr(base, node.attr)]
    else:
        values = []
    return [value for value in values if not _is_tritons(value)]


def _is_tritons(value: Any) -> bool:
    value = getattr(value, "fn", value)
    named = value.__name__ if isinstance(value, ModuleType) else value.__module__ if isinstance(value, (FunctionType, type)) else ""
    return named.split(".")[0] == "triton"


def _collect_value(what: str, value: Any, found: dict[str, str]) -> None:
    helper = getattr(value, "fn", value)
    if isinstance(helper, FunctionType):
        _collect(helper, found)
    elif not isinstance(value, ModuleType):
        found[what] = repr(value)
