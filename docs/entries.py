"""The Markdown of a page of the reference, from which mkdocstrings makes its HTML: the docstring and signature of each name, the
fields of each class as one table, links to the pages that use it, and on the page of a group one line for each operator."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import posixpath
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import funcops
from docs import examples
from docs.reference import Page, is_part, sections, value_of
from funcops.engine.contract.schema import Phase, Saved

MOST_USES = 8  # links to pages that use a name; the path of learning comes first


def markdown(page: Page) -> str:
    lines = [f"# {page.title}", "", *(f'<a id="{op}"></a>' for op in page.ops), ""]
    lines += _opening(page) if page.home else []
    if page.ops:
        ops = [value_of(op) for op in page.ops]
        lines += [*_calls(page), *_in_use(page, *ops, *(op.fwd for op in ops))]
    lines += [line for name in page.names if name not in page.ops for line in _entry(page, name)]
    lines += _listed(page) if page.parts else []
    return "\n".join(lines)


def _opening(page: Page) -> list[str]:
    """The docstring of the page's module; of one whose groups are pages, its first paragraph, as a table lists them."""
    if page.ops or page.names or not page.parts:
        return _docstring(page.home)
    return [(inspect.getdoc(importlib.import_module(page.home)) or "").partition("\n\n")[0], ""]


def _calls(page: Page) -> Iterator[str]:
    up = posixpath.relpath("reference/ops-of-ops.md", posixpath.dirname(page.path))
    for name in page.ops:
        home, _, word = name.rpartition(".")
        yield f"`from {home} import {word}` gives the [Op]({up}#funcops.Op): `{word}.fwd` is `{word}_fwd`, and so on."
        yield ""


def _listed(page: Page) -> Iterator[str]:
    """A table of the parts of a page: an operator with the first sentence of its docstring, a group with its names."""
    if any(part.ops for part in page.parts):
        yield from ("## Operators", "", "| operator | what it is |", "|---|---|")
    else:
        yield from ("| group | names |", "|---|---|")
    here = posixpath.dirname(page.path)
    for part in page.parts:
        target = posixpath.relpath(part.path, here)
        if part.ops:
            yield f"| [`{part.title}`]({target}) | {cell(first_sentence(part.home))} |"
        else:
            yield f"| [{part.title}]({target}) | {', '.join(links_to([part], here))} |"
    yield ""


def first_sentence(module: str) -> str:
    text = " ".join((inspect.getdoc(importlib.import_module(module)) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.:])\s", text)[0].rstrip(":.")


def links_to(pages: Iterable[Page], here: str) -> Iterator[str]:
    """A link for each operator and each other name of these pages and their parts, seen from the folder `here`."""
    for page in pages:
        target = posixpath.relpath(page.path, here)
        for name in page.ops or page.names:
            yield f"[`{name.rpartition('.')[2]}`]({target}#{name})"
        yield from links_to(page.parts, here)


def _in_use(page: Page, *values: Any) -> list[str]:
    """Links to the pages whose code names one of these values."""
    found = sorted({path for value in values for path in examples.uses(value)}, key=_learned)
    here = posixpath.dirname(page.path)
    moved = {path: "index.md" if path == "README.md" else path.removeprefix("docs/") for path in found}
    links = [f"[{title}]({posixpath.relpath(moved[path], here)})" for path, title in _titles(found[:MOST_USES])]
    return ["", f"In use: {', '.join(links)}.", ""] if links else []


@functools.cache
def _path_of_learning() -> list[str]:
    """The pages of the site in the order of its navigation, which begins with the path of learning."""
    return [f"docs/{path}" for path in re.findall(r": (\S+\.md)$", (examples.ROOT / "mkdocs.yml").read_text(), re.M)]


def _learned(path: str) -> tuple[int, str]:
    order = _path_of_learning()
    return (order.index(path) if path in order else len(order)), path


def _titles(paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    for path in paths:
        yield path, (examples.ROOT / path).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def _entry(page: Page, name: str) -> list[str]:
    """The lines for one name. If a module has the same name, as with `funcops.report`, the name is looked up where it is defined,
    but shown as itself. A name outside of an operator's page also lists the pages that use it."""
    value, found, anchor = value_of(name), defined(name), []
    if found != name:
        anchor = [f'<a id="{name}"></a>', ""]
    options = {"heading_level": 2}
    if anchor:
        options |= {"heading": name, "toc_label": name.rpartition(".")[2]}
    table = list(fields(value)) if inspect.isclass(value) else []
    methods = list(_methods(value)) if table else []
    if table:
        options["members"] = False
    lines = [*anchor, *_directive(found, options), *table]
    for method in methods:
        lines += _directive(f"{found}.{method}", {"heading_level": 3, "show_root_full_path": False})
    return [*lines, *([] if page.ops or is_part(name) and page.home == "" else _in_use(page, value))]


def _directive(name: str, options: dict[str, Any]) -> list[str]:
    shown = (f"      {key}: {str(value).lower() if isinstance(value, bool) else value}" for key, value in options.items())
    return [f"::: {name}", "    options:", *shown, ""]


def _methods(cls: type) -> Iterator[str]:
    """The public methods that a class describes."""
    for name, value in vars(cls).items():
        function = getattr(value, "__func__", value)
        if name[0] != "_" and (inspect.isfunction(function) or isinstance(value, property)) and value.__doc__:
            if getattr(function, "__module__", cls.__module__) == cls.__module__:
                yield name


def fields(cls: type) -> Iterator[str]:
    """The fields of a dataclass or a named tuple as a table: their shapes and who reads them, or their types and defaults."""
    required = inspect.Parameter.empty
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        given = [(name, cls.__annotations__.get(name, ""), cls._field_defaults.get(name, required)) for name in cls._fields]
    elif dataclasses.is_dataclass(cls):
        shown = [one for one in dataclasses.fields(cls) if one.name[0] != "_"]
        if issubclass(cls, Saved):
            yield from _kept(shown)
            return
        if any(one.metadata.get("shape") for one in shown):
            rows = [(_code(one.name), one.metadata.get("shape") or "", _code(one.type)) for one in shown]
            yield from _table(("leaf", "shape", "type"), rows)
            return
        given = [(one.name, one.type, _default(one)) for one in shown]
    else:
        return
    yield from _table(("field", "type", "default"), [(_code(name), _code(kind), _value(value)) for name, kind, value in given])


def _default(one: Any) -> Any:
    if one.default is not dataclasses.MISSING:
        return one.default
    return inspect.Parameter.empty if one.default_factory is dataclasses.MISSING else one.default_factory()


def _kept(shown: Iterable[Any]) -> Iterator[str]:
    rows = []
    for one in shown:
        saved = one.metadata.get("saved")
        if saved is not None:
            phases = [name for phase, name in ((Phase.DGRAD, "dgrad"), (Phase.WGRAD, "wgrad")) if phase in saved.needed_by]
            kept = f"`{saved.alias}` itself" if saved.alias else "a tensor of its own"
            rows.append((_code(one.name), saved.shape, kept, ", ".join(phases)))
        elif one.metadata.get("static") and one.name not in ("cfg", "needs"):
            rows.append((_code(one.name), "", "a value, no tensor", ""))
    if rows:
        yield from _table(("field", "shape", "kept as", "read by"), rows)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    if rows:
        yield from (f"| {' | '.join(head)} |", "|" + "---|" * len(head))
        yield from (f"| {' | '.join(map(cell, row))} |" for row in rows)
        yield ""


def cell(text: str) -> str:
    """The text on one line; a bar outside of code is escaped, as it would end the cell."""
    return re.sub(r"`[^`]*`|(?<!\\)\|", lambda found: found[0] if len(found[0]) > 1 else r"\|", " ".join(text.split()))


def _code(value: Any) -> str:
    text = value if isinstance(value, str) else getattr(value, "__name__", str(value))
    return f"`{text}`" if text else ""


def _value(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return "required"
    text = " ".join((getattr(value, "__qualname__", None) or repr(value)).split())
    return _code(text if len(text) < 60 else f"{text[:57]}...")


def defined(name: str) -> str:
    """The dotted name, or the dotted name of the definition if a module on the way has the same name."""
    value, word = value_of(name), name.rpartition(".")[2]
    home = value.fwd.__module__ if isinstance(value, funcops.Op) else getattr(value, "__module__", None) or ""
    taken = name in sys.modules or home.rpartition(".")[2] == word
    return f"{home}.{word}" if taken and home.startswith("funcops") else name


def _docstring(module: str) -> list[str]:
    return _directive(module, {"members": False, "show_root_heading": False, "show_root_toc_entry": False})


def index() -> str:
    """Every name, on one page, by group."""
    lines = ["# Reference", "", "Every public name, from the docstrings of the package.", ""]
    for title, found in sections().items():
        lines += [f"## {title}", "", "| group | names |", "|---|---|"]
        for page in found:
            lines.append(
                f"| [{page.title}]({posixpath.relpath(page.path, 'reference')}) | {', '.join(links_to([page], 'reference'))} |"
            )
        lines.append("")
    return "\n".join(lines) + "\n"
