"""Files import only from layers above their own, and confined imports stay confined."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = (
    "errors",
    "backend",
    "trees",
    "random",
    "contract",
    "residuals",
    "program",
    "compose",
    "kernels",
    "formats",
    "ops",
    "fused",
    "memory",
    "low_precision",
    "optim",
    "precision",
    "checkpoint",
    "lora",
    "distributed",
    "dist",
    "models",
    "schedule",
    "adapters",
    "nn",
    "graphs",
    "testing",
)
ANYWHERE = ("testing",)
SUMS = ("funcops.compose.add", "funcops.compose.fork")  # the ops to which a skip is lowered, which a program takes apart


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def wrong(package):
    """Every import that points downwards or leaves its confinement."""
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).parts[0].removesuffix(".py")
        if name in ("__init__", *ANYWHERE):
            continue
        for target in imports(path):
            top = target.split(".")
            if name == "program" and target.startswith(SUMS):
                continue
            if top[0] == "funcops" and len(top) > 1 and top[1] in LAYERS and LAYERS.index(top[1]) > LAYERS.index(name):
                yield f"{name} imports {target}"
            if top[0] == "triton" and name not in ("kernels", "backend"):
                yield f"{name} imports {target}"
            if top[0] == "optree" and name != "trees":
                yield f"{name} imports {target}"
            if name == "adapters":
                continue
            if target.startswith("torch.autograd") or target.startswith("torch.nn.modules") or target == "torch.nn.Module":
                yield f"{name} imports {target}"
        if "os.environ" in path.read_text() and path.relative_to(package) != Path("backend/select.py"):
            yield f"{path.name} reads os.environ"


def rooms():
    """Folders and files of the package, without caches that a checkout of another revision left behind."""
    return {path.relative_to(ROOT / "funcops").parts[0].removesuffix(".py") for path in (ROOT / "funcops").rglob("*.py")} - {
        "__init__"
    }


def test_the_map_for_contributors_has_every_layer_in_order():
    (table,) = re.findall(r"^\| where \| what it is \|\n\|.*\n((?:\|.*\n)+)", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    assert tuple(name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])) == LAYERS
    assert rooms() == set(LAYERS)


@pytest.mark.slow
def test_layers_of_the_package():
    assert rooms() <= set(LAYERS)
    assert list(wrong(ROOT / "funcops")) == []


def test_one_file_reads_versions():
    """So that there is a single guard for whatever depends on a version."""
    readers = {p.name for p in (ROOT / "funcops").rglob("*.py") if re.search(r"\._version\b", p.read_text())}
    assert readers == {"versions.py"}


def test_a_violation_is_caught(tmp_path):
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "bad.py").write_text("from funcops.memory.fit import fit\nimport optree\nimport triton\n")
    (tmp_path / "errors.py").write_text("import os\nfrom funcops import trees\nos.environ['X']\n")
    found = list(wrong(tmp_path))
    assert "ops imports funcops.memory.fit" in found and "ops imports optree" in found and "ops imports triton" in found
    assert "errors imports funcops.trees" in found and "errors.py reads os.environ" in found


def test_pre_commit_checks_as_make_check_does():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    check = re.search(r"^check: .*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)[1]
    asked = re.findall(r"\$\(PY\) -m (.*?)(?: \.)?$", check, re.M)
    assert re.findall(r"entry: \.venv/bin/python -m (.*?)(?: --force-exclude)?$", hooks, re.M) == asked and len(asked) == 3
    assert hooks.count("language: system") == 3 and hooks.count("repo:") == hooks.count("repo: local")
