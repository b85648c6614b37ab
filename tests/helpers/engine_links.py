"""The links of `docs/the-engine.md` to the lines that define names, as [`make_op`](../funcops/engine/contract/op.py#L190).

python tests/helpers/engine_links.py      writes the present line numbers into the page
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "the-engine.md"
LINK = re.compile(r"\[`([\w.]+)`\]\(\.\./([\w/]+\.py)#L(\d+)\)")


class Link(NamedTuple):
    """A name, the file that defines it, and the number of the line that the page says."""

    name: str
    path: str
    line: int


def links(text: str) -> list[Link]:
    return [Link(name, path, int(line)) for name, path, line in LINK.findall(text)]


def defined(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, int]]:
    """The names that a module and its classes define, a class's own as `Class.name`, each with its line."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield inside + node.name, node.lineno
            if isinstance(node, ast.ClassDef):
                yield from defined(node, f"{inside}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield from ((inside + one.id, one.lineno) for one in ast.walk(target) if isinstance(one, ast.Name))


def lines_of(source: str) -> dict[str, int]:
    """The line of each name, the first one if several define it."""
    return dict(reversed(list(defined(ast.parse(source)))))


@functools.cache
def lines_in(path: str) -> dict[str, int]:
    return lines_of((ROOT / path).read_text())


def refreshed(text: str) -> str:
    """The text with the present line of each name. Raises `ValueError` for a name that its file does not define."""

    def line(found: re.Match[str]) -> str:
        name, path, _ = found.groups()
        if name not in lines_in(path):
            raise ValueError(f"docs/the-engine.md: {name} must be defined in {path}, got no such name")
        return f"[`{name}`](../{path}#L{lines_in(path)[name]})"

    return LINK.sub(line, text)


if __name__ == "__main__":
    PAGE.write_text(refreshed(PAGE.read_text()))
