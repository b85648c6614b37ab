"""The public names, by group, as Markdown pages from which mkdocstrings makes the reference: a page for each operator, a page for
the other names of a group. Most names are found, not listed here: the groups come from `help(funcops)` and from the docstrings of
its rooms, an operator's names from its file's `__all__`, and the names of a room (`funcops.optim` and so on) from its imports.
`AUTHORS` lists the names for writing ops, as their modules have other names too."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import funcops

ROOMS = ("adapters.pipelining", *funcops._ROOMS)  # the first is not imported by funcops: it needs torch.distributed
AUTHORS = {
    "funcops.contract": (
        *("ByConfig", "make_op", "config", "OpConfig", "forward", "init_of", "dgrad_of", "wgrad_of", "recompute_of"),
        *("Residuals", "Pending", "Inputs", "saved", "DGRAD", "WGRAD", "RECOMPUTE", "accumulate", "check", "FLOATS"),
    )
}
GROUP = re.compile(r"^(?: {4})?(\w[\w ]*?)(?: {2,}|$)")
DOCSTRINGS = {"funcops.dist": "funcops.distributed"}  # `funcops.dist` is the name of what is told there


@dataclass(frozen=True)
class Page:
    """`home` is the module whose docstring opens the page, or ""; `names` are dotted public names; `parts` are the pages below it
    in the navigation; `ops` are the operators whose page it is."""

    title: str
    path: str
    home: str
    names: tuple[str, ...]
    parts: tuple[Page, ...] = ()
    ops: tuple[str, ...] = ()


def sections() -> dict[str, list[Page]]:
    """The pages in the order of the navigation; the pages of its operators are parts of a group, its groups of a module."""
    listed = inspect.getdoc(funcops).split("Operators:", 1)[1]
    groups = [_group("funcops", title, words, "reference") for title, words in _groups(listed)]
    return {
        "Operators": [page for page in groups if page.parts],
        "Functions": [*(page for page in groups if page.names and not page.parts), _authors()],
        "Modules": [_room(name) for name in ROOMS],
    }


def pages() -> list[Page]:
    """All pages, each before its parts."""
    return [page for found in sections().values() for page in _flat(found)]


def _flat(found: Any) -> Iterator[Page]:
    for page in found:
        yield page
        yield from _flat(page.parts)


def _authors() -> Page:
    names = tuple(f"{module}.{name}" for module, found in AUTHORS.items() for name in found)
    return Page("For authors of ops", "reference/authors.md", "", names)


def public() -> list[str]:
    """Every public name, dotted, once."""
    return list(dict.fromkeys(name for page in pages() for name in page.names))


def places() -> dict[str, str]:
    """The page of each public name, by the name."""
    return {name: page.path for page in pages() for name in page.names}


def _file(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower())


def _groups(text: str) -> Iterator[tuple[str, list[str]]]:
    """(title, words) for each titled line of a list of groups, with the words of the further indented lines below it."""
    title, words = "", []
    for line in text.splitlines():
        found = GROUP.match(line)
        if found and not line.startswith("     "):
            yield title, words
            title, words = found[1], []
            line = line[found.end() :]
        words += re.findall(r"\w+", line)
    yield title, words


def _group(module: str, title: str, words: list[str], folder: str) -> Page:
    """The page of the names among `words` that are not of an operator's file, with a page for each such file."""
    room, files, others = importlib.import_module(module), {}, []
    for word in dict.fromkeys(word for word in words if hasattr(room, word)):
        value = getattr(room, word)
        if isinstance(value, funcops.Op) and hasattr(importlib.import_module(_home(value)), "__all__"):
            files.setdefault(_home(value), []).append(word)
        elif not isinstance(value, types.ModuleType):
            others.append(word)
    path = f"{folder}/{_file(title)}".removesuffix("/")
    ops = tuple(_op(module, home, found, path) for home, found in files.items())
    own = {name.rpartition(".")[2] for page in ops for name in page.names}
    names = tuple(f"{module}.{word}" for word in others if word not in own)
    return Page(title[:1].upper() + title[1:], _path(path, ops), "", names, ops)


def _path(path: str, parts: tuple[Page, ...]) -> str:
    """A page with parts is the index of their folder, which the navigation shows as one entry."""
    return f"{path}/index.md" if parts else f"{path}.md"


def _op(module: str, home: str, words: list[str], folder: str) -> Page:
    """The page of one operator's file: all its public names that `module` has."""
    room = importlib.import_module(module)
    members = sorted(importlib.import_module(home).__all__, key=_order)
    names = tuple(f"{module}.{name}" for name in members if hasattr(room, name))
    return Page(", ".join(words), f"{folder}/{words[0]}.md", home, names, ops=tuple(f"{module}.{word}" for word in words))


def _home(op: funcops.Op) -> str:
    return op.fwd.__module__


ORDER = "_init", "_fwd", "_bwd", "_dgrad", "_wgrad", "Params", "Residuals", "Pending"


def is_part(name: str) -> bool:
    """Whether the name is a config, a function or a tree of an op."""
    return name.endswith(("Config", *ORDER))


def _order(name: str) -> int:
    """A sort key: the op, its config, the functions in the order in which they run, then params, residuals and pending."""
    ends = [i for i, end in enumerate(ORDER) if name.endswith(end)]
    return ends[0] + 2 if ends else int(is_part(name))


def _room(name: str) -> Page:
    """The page of a room; the groups of its docstring are its parts, if it has groups that name all of it."""
    home, folder = f"funcops.{name}", f"reference/{re.sub('[_.]', '-', name)}"
    names, opening = exported(home), DOCSTRINGS.get(home, importlib.import_module(home).__name__)
    groups = list(_groups(inspect.getdoc(importlib.import_module(opening))))[1:]
    if {word for _, words in groups for word in words} >= {word for word in names if not is_part(word)}:
        parts = tuple(_group(home, title, words, folder) for title, words in groups)
        return Page(home, _path(folder, parts), opening, (), parts)
    whole = _group(home, "", names, folder)
    return Page(home, _path(folder, whole.parts), opening, whole.names, whole.parts)


def exported(name: str) -> list[str]:
    """The names in `__all__`; without it the names imported `as` themselves or by a star, and own functions and classes. No
    modules."""
    module = importlib.import_module(name)
    found = list(getattr(module, "__all__", ()))
    if not found:
        for node in ast.parse(Path(module.__file__).read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                found += exported(node.module)
            elif isinstance(node, ast.ImportFrom):
                found += [alias.name for alias in node.names if alias.asname == alias.name]
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name[0] != "_":
                found.append(node.name)
    return [word for word in dict.fromkeys(found) if not isinstance(getattr(module, word), types.ModuleType)]


def value_of(name: str) -> Any:
    home, _, word = name.rpartition(".")
    return getattr(importlib.import_module(home), word)
