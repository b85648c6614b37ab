"""Hooks that MkDocs calls while it builds the site. They add pages that are elsewhere in the repository or are generated, fix links
to them, and convert plain-text docstrings to Markdown.

The start page is the README with its results first, so that the two cannot differ.
"""

from __future__ import annotations

import importlib
import inspect
import posixpath
import re
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import notebooks  # noqa: E402
import reference  # noqa: E402

# the path in the site of each page that is outside docs/
MOVED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "tests/README.md": "how/tests.md",
    "funcops/program/README.md": "how/program.md",
    "funcops/residuals/README.md": "how/residuals.md",
    "funcops/adapters/README.md": "how/adapters.md",
    "examples/notebooks/residual_microscope.ipynb": "notebooks/residual_microscope.md",
    "examples/notebooks/schedule_lab.ipynb": "notebooks/schedule_lab.md",
    "examples/notebooks/fp8_error_map.ipynb": "notebooks/fp8_error_map.md",
}
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.S | re.M)


def on_files(files: Any, config: Any) -> Any:
    for source, target in MOVED.items():
        if not source.endswith(".ipynb"):
            text = (ROOT / source).read_text(encoding="utf-8")
            files.append(File.generated(config, target, content=placed(text, source, target)))
    for file in of_notebooks(config):
        files.append(file)
    for path in sorted((ROOT / "examples").rglob("*.py")):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), content=path.read_text(encoding="utf-8")))
    for page in reference.pages():
        files.append(File.generated(config, page.path, content=reference.markdown(page)))
    files.append(File.generated(config, "reference/index.md", content=reference.index()))
    return files


def of_notebooks(config: Any) -> Iterator[File]:
    """Each notebook unchanged, the page with the output of its cells, which are run now, and the pictures of that page."""
    sources = [source for source in MOVED if source.endswith(".ipynb")]
    for source, run in zip(sources, notebooks.all_executed([ROOT / source for source in sources]), strict=True):
        target = MOVED[source]
        shown = notebooks.page(run, Path(target).stem)
        yield File.generated(config, source, content=(ROOT / source).read_text(encoding="utf-8"))
        itself = posixpath.relpath(source, posixpath.dirname(target))
        whence = f"\nThis page is [a notebook]({itself}), run when the site was built.\n"
        yield File.generated(config, target, content=placed(shown.markdown, source, target) + whence)
        for name, picture in shown.pictures.items():
            yield File.generated(config, posixpath.join(posixpath.dirname(source), name), content=picture)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    at = page.file.src_uri
    if at == "index.md":
        page.meta["hide"] = ["navigation"]  # it would list only the start page
    if at in MOVED.values() or at.startswith("reference/"):
        return markdown
    return placed(markdown, f"docs/{at}", at)


def placed(text: str, source: str, target: str) -> str:
    """The text of a page at `source` in the repository, with its relative links rewritten for `target` in the site."""

    def moved(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[1]))
        inside = MOVED.get(path) or (path[5:] if path.startswith("docs/") else path)
        return f"]({posixpath.relpath(inside, posixpath.dirname(target) or '.')}{link[2] or ''})"

    kept: list[str] = []
    hidden = CODE.sub(lambda code: kept.append(code[0]) or f"\0{len(kept) - 1}\0", text)
    return re.sub(r"\0(\d+)\0", lambda at: kept[int(at[1])], LINK.sub(moved, hidden))


class Plain(griffe.Extension):
    """Converts plain-text docstrings: indented blocks stay verbatim, `>>>` lines become sessions, and a `*` in a shape is
    escaped."""

    def on_module_members(self, *, mod: griffe.Module, **_: Any) -> None:
        """Add the public names of a module that calls create at run time, which griffe cannot see in the source."""
        if mod.exports is None and "__all__" not in mod.members:
            return
        module = importlib.import_module(mod.path)
        for name in set(getattr(module, "__all__", ())) - set(mod.members):
            value = getattr(module, name)
            if getattr(value, "__module__", None) == mod.path or isinstance(value, (type, types.FunctionType)):
                mod.set_member(name, made(name, value))

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = plain(obj.docstring.value)

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Hide the `make_op` call of an op, as its functions are shown below it, and a field's `field(...)` call."""
        if str(attr.value).startswith("make_op("):
            attr.value, attr.annotation = None, "Op"
        elif str(attr.value) == "field(kw_only=False)":
            attr.value = None

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Remove class attributes that a config computes from its fields."""
        for name in [name for name, member in cls.members.items() if member.is_attribute and member.labels == {"class-attribute"}]:
            if cls.members[name].docstring is None and not cls.members[name].value:
                cls.del_member(name)


def made(name: str, value: Any) -> griffe.Object:
    """A class or a function as griffe would have read it."""
    text = inspect.getdoc(value)
    docstring = griffe.Docstring(plain(text)) if text else None
    if isinstance(value, type):
        return griffe.Class(name, docstring=docstring)
    signature = inspect.signature(value)
    parameters = [
        griffe.Parameter(
            one.name,
            annotation=None if one.annotation is one.empty else one.annotation,
            kind=griffe.ParameterKind[one.kind.name.lower()],
            default=None if one.default is one.empty else repr(one.default),
        )
        for one in signature.parameters.values()
    ]
    returns = None if signature.return_annotation is signature.empty else signature.return_annotation
    return griffe.Function(name, parameters=griffe.Parameters(*parameters), returns=returns, docstring=docstring)


def plain(text: str) -> str:
    """The Markdown that shows a docstring as in the source."""
    blocks = []
    for block in re.split(r"\n{2,}", text):
        if block.lstrip().startswith(">>>"):
            block = f"```pycon\n{textwrap.dedent(block)}\n```"
        elif not block.startswith("    "):
            block = "".join(part if part.startswith("`") else _escaped(part) for part in re.split(r"(`[^`]*`)", block))
        blocks.append(block)
    return "\n\n".join(blocks)


def _escaped(text: str) -> str:
    text = re.sub(r"(?<!^)([*_<])", r"\\\1", text, flags=re.S)
    return re.sub(r"\n( {4,})(?=\S)", lambda at: "\n\n" + at[1], text, count=1)  # an indented block below a line of text
