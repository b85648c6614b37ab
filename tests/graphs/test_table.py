"""Every test named in the docs' table of torch's features exists."""

import contextlib
import importlib
import inspect
import re
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


def torchs_names():
    """The public names of torch's graphs in the installed version: methods, arguments, functions, annotations."""
    yield from (name for name in dir(torch.cuda.CUDAGraph) if not name.startswith("_"))
    yield from [name for name in inspect.signature(torch.cuda.graph.__init__).parameters if name not in ("self", "cuda_graph")]
    module = torch.cuda.graphs
    yield from (n for n, v in vars(module).items() if n[0] != "_" and getattr(v, "__module__", "").startswith("torch.cuda"))
    with contextlib.suppress(ImportError):
        yield from importlib.import_module("torch.cuda.graph_annotations").__all__


def test_no_name_of_torch_is_missing_from_the_table():
    text = (ROOT / "docs" / "graphs-in-depth.md").read_text().split("## torch's features, one by one")[1]
    said = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", text))))
    assert set(torchs_names()) - {"CUDAGraph"} <= said
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.split("\n") if line.startswith("|")]
    assert len(rows) > 30 and all(len(row) == 4 and (row[1] or row[2]) for row in rows), "no row is silent"


def test_the_tests_of_the_table_exist():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "graphs-in-depth.md").read_text()))
    there = {
        name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    assert len(named) > 15 and named <= there
