"""`help(op)`: the page of an operator instead of the class's."""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

ANNOTATION = re.compile(r"(: |-> )'([^']*)'")  # which is a string, as the package's annotations are
FUNCTIONS = ("init", "fwd", "bwd", "dgrad", "wgrad")


class PageOf(str):
    """The `__doc__` of a class whose instances have texts of their own: itself of the class, `page(instance)` of an instance."""

    page: Any

    def __new__(cls, text: str, page: Any) -> PageOf:
        made = super().__new__(cls, text)
        made.page = page
        return made

    def __get__(self, instance: Any, owner: type) -> str:
        return str(self) if instance is None else self.page(instance)


def page(op: Any) -> str:
    """The docstring of the file of an op, its config, its functions with their signatures, and how to take gradients."""
    home = sys.modules.get(str(getattr(op.fwd, "__module__", "")))
    # an op made from another, as by remat, has functions in a file that is not about it
    found = inspect.getdoc(home) if home is not None and getattr(home, op.name, None) is op else None
    lines = [found or f"The op {op.name}.", "", _call(op.config.__name__, op.config)]
    if about := inspect.getdoc(op.config):
        lines += ["    " + line for line in about.splitlines()]
    lines.append("")
    for part in FUNCTIONS:
        lines += _function(f"{op.name}.{part}", getattr(op, part))
    lines += [f"Gradients in one call: funcops.vjp({op.name}, params, x, cfg) and funcops.value_and_grad({op.name}).", ""]
    return "\n".join(lines)


def _function(name: str, function: Any) -> list[str]:
    about = (inspect.getdoc(function) or "").partition("\n\n")[0]
    return [_call(name, function), *("    " + line for line in about.splitlines()), ""]


def _call(name: str, function: Any) -> str:
    try:
        return name + ANNOTATION.sub(r"\1\2", str(inspect.signature(function)))
    except (TypeError, ValueError):  # Python may know no signature of what is written in C
        return f"{name}(...)"
