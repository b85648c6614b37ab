"""The programs of examples/, run in this process: to import torch anew takes longer than what most of the tests ask of them."""

import contextlib
import functools
import importlib
import io
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def main_of(program):
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        return importlib.import_module(program.removesuffix(".py")).main
    finally:
        sys.path.remove(str(ROOT / "examples"))


def run(program, *flags, code=0):
    """The output of a program, on either stream, which must end with `code`."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            ended = main_of(program)([str(flag) for flag in flags])
        except SystemExit as end:
            ended = end.code
            if isinstance(ended, str):  # as Python itself would
                print(ended)
                ended = 1
    assert (ended or 0) == code, said.getvalue()
    return said.getvalue()


def check_picture(path):
    """There, wide enough, and not of one colour: neither as a whole nor in either half."""
    image = pytest.importorskip("matplotlib.image").imread(path)[..., :3]
    assert image.shape[0] >= 150 and image.shape[1] >= 400
    for half in (image[:, : image.shape[1] // 2], image[:, image.shape[1] // 2 :]):
        ink = (half < 0.9).any(-1).mean()
        assert 0.005 < ink < 0.98, f"{path}: {ink:.1%} of a half is not white"
