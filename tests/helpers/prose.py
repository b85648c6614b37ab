"""Counts what makes prose hard to read: docstrings that begin with a fragment, and phrases that have a plain word.

python tests/helpers/prose.py funcops/library/kernels docs/models.md     lists them, with file and line
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FRAGMENT = re.compile(r"(Of|What|Those|That|By|Where|As)\b")
BANNED = {
    "what is asked for": "the requested gradients",
    "what comes of it": "results",
    "there (is|are) none": "does not exist, is missing",
    "that there (is|are) not": "does not exist, is missing",
    "as (y|it|they|x|he) (was|were)": "with y's shape, dtype and device",
    "shared out": "sharded",
    "(is|are|was|were|be|can be|not) had\\b": "is available, is computed, is known",
    "had again": "recomputed",
    "put away": "offloaded",
    "must be something": "must ask for at least one ...",
    "(is|are|was|were) none\\b": "is not a ..., is missing",
    "(is|are|was|were) no [a-z]": "is not a ..., has no ...",
    "those of": "X's ..., or name the noun",
    "that of": "X's ..., or name the noun",
}
PHRASES = re.compile(r"\b(" + "|".join(BANNED).replace(" ", r"\s+") + r")")
# what a file must have for one of these to be found: in its source a space may be the seam of two strings or lines of a comment
MAY_HOLD = re.compile(r"\b(" + "|".join(BANNED).replace(" ", r"[\s\"'#rf\\]+") + r")|\"\"\"\s*" + FRAGMENT.pattern)


class Found(NamedTuple):
    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)) and (doc := ast.get_docstring(node)):
            yield node.body[0].lineno, doc


def fragments(path: Path) -> list[Found]:
    return [Found(path, line, doc.splitlines()[0]) for line, doc in docstrings(path) if FRAGMENT.match(doc)]


def _said(path: Path) -> Iterator[tuple[int, str]]:
    """A page whole, without its code; of a program its strings and comments, a run of comment lines as one text."""
    text = path.read_text()
    if path.suffix != ".py":
        yield 1, re.sub(r"^```.*?^```", lambda found: "\n" * found[0].count("\n"), text, flags=re.S | re.M)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    for hit in re.finditer(r"(?:^|[^\"'\n])#( .*(?:\n *# .*)*)", text, re.M):
        yield text.count("\n", 0, hit.start(1)) + 1, hit[1].replace("#", " ")


def banned(path: Path) -> list[Found]:
    return [
        Found(path, line + text.count("\n", 0, hit.start()), " ".join(hit[0].split()))
        for line, text in _said(path)
        for hit in PHRASES.finditer(text)
    ]


def files(*names: str) -> Iterator[Path]:
    for name in names:
        path = ROOT / name
        yield from sorted(p for p in path.rglob("*") if p.suffix in (".py", ".md")) if path.is_dir() else [path]


def found(path: Path) -> list[Found]:
    if path.suffix == ".py" and not MAY_HOLD.search(path.read_text()):  # a syntax tree takes twenty times as long
        return []
    return (fragments(path) if path.suffix == ".py" else []) + banned(path)


if __name__ == "__main__":
    for path in files(*sys.argv[1:]):
        for each in found(path):
            print(each._replace(path=each.path.relative_to(ROOT)))
