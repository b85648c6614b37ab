"""Rows and a page that list what no GPU has run in its present form.

    python -m benchmarks unconfirmed --page docs/benchmarks/unconfirmed.md
    python -m benchmarks unconfirmed --rows --results FOLDER      also rows of benches, of one device

A launch of a kernel is known by its fingerprint: a hash of the kernel's source and of all that it is specialised on. `aot.csv` has
all launches; each result of a device names the launches that it ran. A smoke check is known by a hash of its source, a gpu test by
its name.
"""

from __future__ import annotations

import argparse
import ast
import csv
import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.rows import rows_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "benchmarks"
TARGET = "sm_90"
HEAD = """# What no GPU has confirmed

This page is for reference. `python -m benchmarks unconfirmed` writes it from the results in this folder, and a test compares them.
Every kernel here compiles for an H100, and gives PyTorch's results in Triton's interpreter ([how](../kernels-without-a-gpu.md)).
No GPU has run these launches, checks and tests in their present form.

"""


class Unconfirmed(NamedTuple):
    """`missing` of `all` launches of a kernel; one of one for a check, a test or a row."""

    kind: str
    name: str
    missing: int
    all: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--page", metavar="FILE", help="also write the page")
    parser.add_argument("--rows", action="store_true", help="also the rows of benches that the folder, of one device, lacks")
    parser.add_argument("--results", metavar="FOLDER", default=str(RESULTS), help="of a device's files (default: docs/benchmarks)")


def run(page: str | None = None, results: str = str(RESULTS), rows: bool = False) -> list[Unconfirmed]:
    folder = Path(results)
    found = [*of_kernels(folder, RESULTS / "aot.csv"), *of_checks(folder), *of_tests(folder)]
    if rows:
        from benchmarks.unmeasured import lacking  # which imports the benches

        found += [Unconfirmed(f"row of {file}", name, 1, 1) for file, name in lacking(folder)]
    if page is not None:
        Path(page).write_text(page_of(found))
    return found


def rows_in(folder: Path, *names: str) -> Iterator[dict[str, Any]]:
    """The rows of the files of these names, in the folder and in each device's folder below it."""
    for name in names:
        for file in sorted(folder.rglob(name)):
            yield from rows_of(file)


def of_kernels(folder: Path, every: Path) -> list[Unconfirmed]:
    ran: set[str] = set()
    for row in rows_in(folder, "kernels.json", "smoke.jsonl", "gpu-tests.jsonl"):
        if not row.get("note", "").startswith("failed") and row.get("status", "passed") == "passed":
            ran |= set(row.get("launches", "").split())
    with every.open(newline="") as file:
        launches = {(row["kernel"], row["hash"]) for row in csv.DictReader(file) if row["target"] == TARGET}
    of = Counter(kernel for kernel, _ in launches)
    missing = Counter(kernel for kernel, found in launches if found not in ran)
    return [Unconfirmed("kernel", kernel, missing[kernel], of[kernel]) for kernel in sorted(missing)]


def of_checks(folder: Path) -> list[Unconfirmed]:
    passed = {(row["check"], row.get("source")) for row in rows_in(folder, "smoke.jsonl") if row["status"] == "passed"}
    now = sources_of_checks()
    return [Unconfirmed("smoke check", name, 1, 1) for name, source in sorted(now.items()) if (name, source) not in passed]


def sources_of_checks() -> dict[str, str]:
    """A hash of the source of each smoke check, by name."""
    files = [ROOT / "tests" / "smoke" / name for name in ("checks.py", "graph_checks.py", "model_checks.py", "repeat_checks.py")]
    return {name: source for file in files for name, source in sources(file.read_text(), "check").items()}


def of_tests(folder: Path) -> list[Unconfirmed]:
    passed = {row["test"].partition("[")[0] for row in rows_in(folder, "gpu-tests.jsonl") if row["status"] == "passed"}
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    now = {f"{path.relative_to(ROOT).as_posix()}::{name}" for path in files for name in of_gpu(path)}
    return [Unconfirmed("test", name, 1, 1) for name in sorted(now - passed)]


def of_gpu(path: Path) -> list[str]:
    """The functions that are marked gpu, or all, if the file is marked."""
    text = path.read_text()
    if not re.search(r"\bmark\.gpu\b", text):
        return []
    every = re.search(r"^pytestmark = .*\bmark\.gpu\b", text, re.M) is not None
    found = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return [node.name for node in found if every or any("mark.gpu" in ast.unparse(one) for one in node.decorator_list)]


def sources(text: str, decorator: str) -> dict[str, str]:
    """A hash of the source of each decorated function, by name. Comments and docstrings do not count."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and any(
            ast.unparse(one).partition("(")[0] == decorator for one in node.decorator_list
        ):
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:]
            found[node.name] = hashlib.sha256(ast.unparse(node).encode()).hexdigest()[:12]
    return found


def page_of(rows: list[Unconfirmed]) -> str:
    """The page: kernels by the number of launches, then names of checks and tests."""
    kernels = [row for row in rows if row.kind == "kernel"]
    lines = [HEAD, "## Launches of kernels\n\n", "| kernel | launches | not run |\n|---|--:|--:|\n"]
    lines += [f"| `{row.name}` | {row.all} | {row.missing} |\n" for row in kernels]
    for kind, title in (("smoke check", "Smoke checks"), ("test", "Tests marked gpu")):
        names = [row.name for row in rows if row.kind == kind]
        lines.append(f"\n## {title}\n\n" + ("".join(f"- `{name}`\n" for name in names) or "None.\n"))
    return "".join(lines)
