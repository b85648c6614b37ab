"""The notebooks of examples/notebooks are committed without output, and run as a reader would run them."""

import json
from pathlib import Path

import pytest
from programs import check_picture

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
SAID = {  # of each, what its last cells print, and how many pictures it draws
    "fp8_error_map": (("nvfp4", "left out: blocks."), 2),
    "residual_microscope": (("+32.00 KiB in all", "offload_block_inputs     321.50 KiB        11.4%      the same bits"), 1),
    "schedule_lab": (("rank 1 must be able to go on at 1B0", "largest relative error of a gradient: "), 6),
}


def code(path):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def test_they_are_kept_without_output():
    assert {path.stem for path in NOTEBOOKS} == set(SAID)
    assert not [path.stem for path in NOTEBOOKS for cell in code(path) if cell["outputs"] or cell["execution_count"] is not None]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs(path, tmp_path):
    from docs import notebooks

    shown = notebooks.page(notebooks.executed(path), path.stem)
    words, count = SAID[path.stem]
    assert all(word in shown.markdown for word in words) and len(shown.pictures) == count
    for name, picture in shown.pictures.items():
        assert f"]({name})" in shown.markdown
        (tmp_path / name).write_bytes(picture)
        check_picture(tmp_path / name)
    assert shown.markdown.count("```python") == len(code(path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cell", "error"),
    [("1 / 0", "division by zero"), ("import warnings; warnings.warn('old')", "cells must say nothing on stderr, got of a: .*old")],
)
def test_a_cell_that_raises_or_warns_is_an_error(cell, error, tmp_path):
    from docs import notebooks

    with pytest.raises(Exception, match=error):
        notebooks.executed(written(tmp_path, {"source": cell}))


def test_output_that_is_kept_is_an_error(tmp_path):
    notebooks = pytest.importorskip("docs.notebooks")
    with pytest.raises(ValueError, match="cells must be kept without output, got output in a"):
        notebooks.executed(written(tmp_path, {"source": "1", "execution_count": 1}))


def written(folder, cell):
    whole = {"cell_type": "code", "id": "a", "metadata": {}, "execution_count": None, "outputs": []} | cell
    path = folder / "small.ipynb"
    path.write_text(json.dumps({"cells": [whole], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return path
