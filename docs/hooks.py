"""Hooks that MkDocs calls while it builds the site. They add pages that are elsewhere in the repository or are generated, fix links
to them, and convert plain-text docstrings to Markdown.

The start page is the README with its results first, so that the two cannot differ.
"""

from __future__ import annotations

import functools
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

from docs import entries, reference  # noqa: E402

# the path in the site of each page that is outside docs/
MOVED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "tests/README.md": "how/tests.md",
    "funcops/engine/program/README.md": "how/program.md",
    "funcops/engine/residuals/README.md": "how/residuals.md",
    "funcops/adapters/README.md": "how/adapters.md",
    "examples/notebooks/residual_microscope.ipynb": "notebooks/residual_microscope.md",
    "examples/notebooks/schedule_lab.ipynb": "notebooks/schedule_lab.md",
    "examples/notebooks/fp8_error_map.ipynb": "notebooks/fp8_error_map.md",
}
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")
COLUMNS = re.compile(r"\S {3,}\S|^ {8,}\S")
CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.S | re.M)


# words that a reader searches for and that a page tells under another name; they count before all other words
SEARCHED = {
    "words.md": ("dgrad", "wgrad"),
    "write-your-own-backward-schedule.md": ("zero bubble", "ZB-H1", "1F1B", "delayed wgrad", "pipeline"),
    "policies-and-budgets.md": ("gradient checkpointing", "activation checkpointing", "remat", "activation memory"),
    "fine-tuning.md": ("LoRA", "QLoRA", "PEFT", "adapters"),
    "low-precision.md": ("FP8 training", "FP8 layer", "MXFP8", "NVFP4", "quantization"),
    "data-parallel.md": ("FSDP", "DDP", "ZeRO", "torchrun"),
    "parallel.md": ("tensor parallel", "sequence parallel", "Megatron"),
    "mixture-of-experts.md": ("MoE", "expert parallel"),
    "capturing-a-training-step.md": ("CUDA graph",),
    "mixed-precision.md": ("bfloat16", "master weights", "main_grad", "loss scaling"),
    "inside-an-existing-model.md": ("nn.Module", "autograd", "torch.compile", "measure kept bytes"),
    "coming-from-pytorch.md": ("load torch weights", "from_state_dict"),
    "reading-a-step.md": ("profiler", "trace"),
    "my-loss-is-wrong.md": ("recording", "debug", "NaN"),
}


def on_config(config: Any) -> Any:
    """Put the pages of the reference into the navigation, after its index."""
    (section,) = [entry for entry in config["nav"] if "Reference" in entry]
    section["Reference"] += [{title: _navigation(pages)} for title, pages in reference.sections().items()]
    return config


def _navigation(pages: Any) -> list[Any]:
    return [{page.title: [page.path, *_navigation(page.parts)] if page.parts else page.path} for page in pages]


def on_files(files: Any, config: Any) -> Any:
    for source, target in MOVED.items():
        if not source.endswith(".ipynb"):
            text = (ROOT / source).read_text(encoding="utf-8")
            files.append(File.generated(config, target, content=placed(text, source, target)))
    for file in of_notebooks(config):
        files.append(file)
    for path in sorted((ROOT / "examples").rglob("*.py")):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), content=path.read_text(encoding="utf-8")))
    for path in sorted(linked_sources()):
        files.append(File.generated(config, path, content=(ROOT / path).read_text(encoding="utf-8")))
    for page in reference.pages():
        files.append(File.generated(config, page.path, content=entries.markdown(page)))
    files.append(File.generated(config, "reference/index.md", content=entries.index()))
    return files


def linked_sources() -> set[str]:
    """The files of source that pages link to, by their paths in the repository, except examples, which are all in the site."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")]
    found = {posixpath.normpath(f"docs/{link[1]}") for text in texts for link in LINK.finditer(CODE.sub("", text))}
    return {path for path in found if path.endswith(".py") and not path.startswith("examples/")}


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
    page.meta |= {"tags": list(SEARCHED.get(at, ())), "description": description(markdown)}
    if at == "index.md":
        page.meta["hide"] = ["navigation"]  # it would list only the start page
    if at.startswith("reference/"):
        return markdown
    return linked(markdown if at in MOVED.values() else placed(markdown, f"docs/{at}", at), at)


def description(markdown: str) -> str | None:
    """The first sentence of a page, without its markup."""
    for block in markdown.split("\n\n"):
        if re.match(r"[A-Z`]", block):
            text = " ".join(re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", block).split())
            return re.split(r"(?<=[.])\s", text)[0]
    return None


def linked(markdown: str, at: str) -> str:
    """The text of the page at `at`; in rows of tables each public name of `funcops` links to its reference."""
    places = {name.removeprefix("funcops."): (name, path) for name, path in reference.places().items()}

    def link(code: re.Match[str]) -> str:
        name, path = places.get(code[1].removeprefix("funcops."), ("", ""))
        return f"[{code[0]}]({posixpath.relpath(path, posixpath.dirname(at) or '.')}#{name})" if path else code[0]

    def row(line: re.Match[str]) -> str:
        plain = re.sub(
            r"`[^`\n]+`", lambda code: code[0].replace("\\|", "|"), line[0]
        )  # GitHub needs the backslash, and MkDocs shows it
        return re.sub(r"(?<!\[)`([\w.]+)`(?!\])", link, plain)

    outside = re.split(r"(^```.*?^```)", markdown, flags=re.S | re.M)  # odd parts are blocks of code
    return "".join(part if i % 2 else re.sub(r"^\|.*\|$", row, part, flags=re.M) for i, part in enumerate(outside))


def placed(text: str, source: str, target: str) -> str:
    """The text of a page at `source` in the repository, with its relative links rewritten for `target` in the site. A file of
    source has no places there, as it is plain text: a link to one of its lines leads to the file."""

    told = told_at()

    def moved(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[1]))
        inside = MOVED.get(path) or (not link[2] and told.get(path)) or (path[5:] if path.startswith("docs/") else path)
        place = "" if inside.endswith(".py") else link[2] or ""
        return f"]({posixpath.relpath(inside, posixpath.dirname(target) or '.')}{place})"

    kept: list[str] = []
    hidden = CODE.sub(lambda code: kept.append(code[0]) or f"\0{len(kept) - 1}\0", text)
    return re.sub(r"\0(\d+)\0", lambda at: kept[int(at[1])], LINK.sub(moved, hidden))


@functools.cache
def told_at() -> dict[str, str]:
    """The pages of the reference that a module's docstring opens, by the module's file. A link to the file, which a checkout has,
    leads to the page, which only the site has; a link to a line of it leads to the source."""
    homes = {page.home: page.path for page in reference.pages() if page.home and not page.ops} | {"funcops": "reference/index.md"}
    files = {home: importlib.import_module(home).__file__ or "" for home in homes}
    return {posixpath.relpath(Path(files[home]).as_posix(), ROOT.as_posix()): path for home, path in homes.items()}


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
        """Hide the `make_op` call of an op that has no page of its own."""
        if str(attr.value).startswith("make_op("):
            attr.value, attr.annotation = None, "Op"


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
        elif sum(bool(COLUMNS.search(line)) for line in block.splitlines()) > 1:  # columns stay columns
            block = textwrap.indent(block, "    ")
        elif not block.startswith("    "):
            block = "".join(part if part.startswith("`") else _escaped(part) for part in re.split(r"(`[^`]*`)", block))
        blocks.append(block)
    return "\n\n".join(blocks)


def _escaped(text: str) -> str:
    text = re.sub(r"(?<!^)([*_<])", r"\\\1", text, flags=re.S)
    return re.sub(r"\n( {4,})(?=\S)", lambda at: "\n\n" + at[1], text, count=1)  # an indented block below a line of text
