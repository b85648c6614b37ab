"""The public names, by group, as Markdown pages from which mkdocstrings makes the reference. Most names are found, not listed here:
the groups come from `help(funcops)`, an operator's names from its file's `__all__`, and the names of a room (`funcops.optim` and so
on) from its imports. `AUTHORS` lists the names for writing ops, as their modules have other names too."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import funcops
from docs import examples

ROOMS = ("adapters.pipelining", *funcops._ROOMS)  # the first is not imported by funcops: it needs torch.distributed
AUTHORS = {
    "funcops.contract.op": ("make_op", "config", "OpConfig", "forward", "init_of", "dgrad_of", "wgrad_of", "recompute_of"),
    "funcops.contract.schema": ("Residuals", "Pending", "saved", "DGRAD", "WGRAD", "RECOMPUTE"),
    "funcops.contract.accumulators": ("accumulate",),
    "funcops.errors": ("check", "FLOATS"),
}
GROUP = re.compile(r"^(?: {4})?(\w[\w ]*?)(?: {2,}|$)")


@dataclass(frozen=True)
class Section:
    """`home` is the module whose docstring opens the section, or None; `names` are dotted public names."""

    title: str
    home: str | None
    names: tuple[str, ...]


@dataclass(frozen=True)
class Page:
    title: str
    path: str
    opening: str
    sections: tuple[Section, ...]


def pages() -> list[Page]:
    groups = [Page(title, _path(title), "", tuple(_sections(names))) for title, names in _groups()]
    return [*(page for page in groups if page.sections), _authors(), *map(_room, ROOMS)]


def _authors() -> Page:
    names = [f"{module}.{name}" for module, found in AUTHORS.items() for name in found]
    return Page("For authors of ops", "reference/authors.md", "", tuple(Section(name, None, (name,)) for name in names))


def public() -> list[str]:
    """Every public name, dotted, once."""
    return list(dict.fromkeys(name for page in pages() for section in page.sections for name in section.names))


def _path(title: str) -> str:
    return f"reference/{re.sub(r'[^a-z0-9]+', '-', title.lower())}.md"


def _groups() -> Iterator[tuple[str, list[str]]]:
    """(title, names) for each titled line of `help(funcops)`, with the names of the further indented lines below it."""
    title, names = "", []
    for line in inspect.getdoc(funcops).split("Operators:", 1)[1].splitlines()[2:]:
        found = GROUP.match(line)
        if found and not line.startswith("     "):
            yield title, names
            title, names = found[1], []
            line = line[found.end() :]
        names += [word for word in re.findall(r"\w+", line) if hasattr(funcops, word)]
    yield title, names


def _sections(names: list[str]) -> Iterator[Section]:
    """One section for each operator with all public names of its file; operators of one file share a section."""
    files: dict[str, list[str]] = {}
    for name in names:
        value = getattr(funcops, name)
        if not isinstance(value, types.ModuleType):
            files.setdefault(_home(value) if isinstance(value, funcops.Op) else "", []).append(name)
    own = [name for home in files if home for name in importlib.import_module(home).__all__]
    for home, ops in files.items():
        if home:
            members = importlib.import_module(home).__all__
            yield Section(", ".join(ops), home, tuple(f"funcops.{name}" for name in sorted(members, key=_order)))
    for name in files.get("", []):
        if name not in own:
            yield Section(name, None, (f"funcops.{name}",))


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
    """The page of a room; its operators have their own sections, as the package's do."""
    home = f"funcops.{name}"
    names, files = exported(home), {}
    module = importlib.import_module(home)
    for word in names:
        value = getattr(module, word)
        if isinstance(value, funcops.Op) and hasattr(importlib.import_module(_home(value)), "__all__"):
            files.setdefault(_home(value), []).append(word)
    of_ops = {word for file in files for word in importlib.import_module(file).__all__}
    alone = [Section(word, None, (f"{home}.{word}",)) for word in names if word not in of_ops]
    ops = [
        Section(
            ", ".join(words),
            file,
            tuple(f"{home}.{n}" for n in sorted(importlib.import_module(file).__all__, key=_order) if hasattr(module, n)),
        )
        for file, words in files.items()
    ]
    return Page(home, f"reference/{re.sub('[_.]', '-', name)}.md", home, (*alone, *ops))


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


# Markdown


def markdown(page: Page) -> str:
    lines = [f"# {page.title}", "", *(_docstring(page.opening) if page.opening else [])]
    for section in page.sections:
        if section.home:
            ops = [value for value in map(value_of, section.names) if isinstance(value, funcops.Op)]
            lines += [f"## {section.title}", "", *_docstring(section.home), *_in_use(*ops, *(op.fwd for op in ops))]
        level = 3 if section.home else 2
        lines += [line for name in section.names for line in _entry(name, level)]
    return "\n".join(lines)


def _in_use(*values: Any) -> list[str]:
    """Links to the pages whose code names one of these values."""
    found = dict.fromkeys(path for value in values for path in examples.uses(value))
    links = [f"[{title}](../{'index.md' if path == 'README.md' else path.removeprefix('docs/')})" for path, title in _titles(found)]
    return [f"In use: {', '.join(links)}.", ""] if links else []


def _titles(paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    for path in paths:
        yield path, (examples.ROOT / path).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def _entry(name: str, level: int) -> list[str]:
    """The lines for one name. If a module has the same name, as with `funcops.report`, the name is looked up where it is defined,
    but shown as itself. A name outside of an operator's section also lists the pages that use it."""
    found, anchor = defined(name), []
    if found != name:
        anchor = [f'<a id="{name}"></a>', ""]
    options = [
        f"      heading_level: {level}",
        *([f"      heading: {name}", f"      toc_label: {name.rpartition('.')[2]}"] if anchor else []),
    ]
    return [*anchor, f"::: {found}", "    options:", *options, "", *(_in_use(value_of(name)) if level == 2 else [])]


def value_of(name: str) -> Any:
    home, _, word = name.rpartition(".")
    return getattr(importlib.import_module(home), word)


def defined(name: str) -> str:
    """The dotted name, or the dotted name of the definition if a module on the way has the same name."""
    value, word = value_of(name), name.rpartition(".")[2]
    home = _home(value) if isinstance(value, funcops.Op) else getattr(value, "__module__", None) or ""
    taken = name in sys.modules or home.rpartition(".")[2] == word
    return f"{home}.{word}" if taken and home.startswith("funcops") else name


def _docstring(module: str) -> list[str]:
    return [
        f"::: {module}",
        "    options:",
        "      members: false",
        "      show_root_heading: false",
        "      show_root_toc_entry: false",
        "",
    ]


def index() -> str:
    """Every name, on one page, by group."""
    lines = ["# Reference", "", "Every public name, from the docstrings of the package.", "", "| group | names |", "|---|---|"]
    for page in pages():
        links = ", ".join(
            f"[`{name.rpartition('.')[2]}`]({page.path.partition('/')[2]}#{name})"
            for section in page.sections
            for name in section.names
            if not section.home or isinstance(value_of(name), funcops.Op)
        )
        lines.append(f"| [{page.title}]({page.path.partition('/')[2]}) | {links} |")
    return "\n".join(lines) + "\n"
