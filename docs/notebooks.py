"""Runs the notebooks of examples/notebooks and makes pages from them. They are committed without output; a page shows a fresh
run's."""

from __future__ import annotations

import base64
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import nbformat
from nbclient import NotebookClient

SECONDS = 300  # the time limit of a cell


class Shown(NamedTuple):
    """A page's Markdown, and its pictures by file name."""

    markdown: str
    pictures: dict[str, bytes]


def executed(path: Path) -> Any:
    """The notebook with the output of its cells, run in a process of its own that starts in its folder. Raises nbclient's
    `CellExecutionError` if a cell raises, `ValueError` if a cell warns or was committed with output."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in _code(notebook):
        if cell.outputs or cell.execution_count is not None:
            raise ValueError(f"{path.name}: cells must be kept without output, got output in {cell.id}")
    with tempfile.TemporaryDirectory() as home:
        env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}  # as a reader would run it
        client = NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": str(path.parent)}})
        manager = client.create_kernel_manager()
        manager.transport, manager.ip = "ipc", f"{home}/kernel"  # files that only this user can open, instead of ports
        client.execute(env={**env, "IPYTHONDIR": home, "OMP_NUM_THREADS": "1"})
    for cell in _code(notebook):
        for output in cell.outputs:
            if output.output_type == "stream" and output.name == "stderr":
                raise ValueError(f"{path.name}: cells must say nothing on stderr, got of {cell.id}: {output.text}")
    return notebook


def _code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def all_executed(paths: list[Path]) -> list[Any]:
    """All notebooks, run two at a time; results in the order given."""
    with mock.patch.dict(os.environ, {"PYDEVD_DISABLE_FILE_VALIDATION": "1"}), ThreadPoolExecutor(2) as two:
        return list(two.map(executed, paths))


def page(notebook: Any, name: str) -> Shown:
    """The notebook as Markdown, its pictures named after `name`."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    heading = ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            heading = next((line.lstrip("# ") for line in cell.source.splitlines() if line.startswith("#")), heading)
            parts.append(cell.source)
            continue
        parts.append(fenced(cell.source, "python"))
        for output in cell.outputs:
            data = {"text/plain": output.text} if output.output_type == "stream" else output.data
            if "image/png" in data:
                picture = f"{name}-{len(pictures) + 1}.png"
                pictures[picture] = base64.b64decode(data["image/png"])
                parts.append(f"![{heading}, drawn]({picture})")
            elif "text/html" in data:
                parts.append(f'<div class="given">{"".join(data["text/html"].splitlines())}</div>')
            else:
                parts.append(fenced(data["text/plain"], "text"))
    return Shown("\n\n".join(parts) + "\n", pictures)


def fenced(text: str, language: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"
