"""examples/05_pipeline.py and examples/04_delayed_wgrad.py, run as a user would."""

import subprocess
import sys
from pathlib import Path

import pytest
from programs import check_picture, run

ROOT = Path(__file__).parents[2]
PIPELINE = "examples/05_pipeline.py"
SMALL = "--dim 16 --hidden 24 --context 16 --steps 6 --timeout 600".split()
USER = "0F0,2F0,0F1,2F1,2I1,0B1,2I0,0I0,0W0,2W1,2W0\n1F0,3F0,1F1,3F1,3B1,1I1,3I0,1I0,1W0,3W0,1W1\n"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes((ROOT / "LICENSE").read_bytes())
    return path


def apart(*command):
    """Run a program in a process of its own, since it starts others."""
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


FORKED = """
import functools, runpy, sys, torch.multiprocessing as processes
processes.spawn = functools.partial(processes.start_processes, start_method="fork")
sys.argv[:1], sys.path[0] = [], "examples"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_pipeline_matches_one_process(text, tmp_path):
    """Its ranks are forks, which need not import torch again."""
    flags = "--schedule", "zb_v", "--tied", "--plot", tmp_path / "plot.png"
    said = apart("-c", FORKED, PIPELINE, *SMALL, "--text", text, "--check", *flags)
    assert "largest relative error against one process: gradients" in said and "step 6: loss" in said
    check_picture(tmp_path / "plot.png")


@pytest.mark.slow
def test_a_schedule_of_ones_own(text, tmp_path):
    (tmp_path / "mine.csv").write_text(USER)
    flags = "--schedule", tmp_path / "mine.csv", "--microbatches", 2, "--plot", tmp_path / "plot.png"
    said = apart(PIPELINE, *SMALL, "--text", text, "--check", *flags)
    assert "mine: 4 stages, 2 microbatches, 2 processes" in said and "largest relative error" in said
    check_picture(tmp_path / "plot.png")


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (
            ["--schedule", "zbv"],
            "--schedule: expected one of gpipe, one_f_one_b, zb_h1, zb_h2, interleaved_1f1b, interleaved_zb, zb_v, dualpipe_v, "
            "or a CSV file, got 'zbv'",
        ),
        (["--batch", "6"], "--batch: expected a multiple of --microbatches 8, got 6"),
        (["--stages", "5"], "--stages: expected 2 to 4, as there are --layers 4, got 5"),
        (["--stages", "2"], "--stages: expected 4, two a rank, for zb_v, got 2"),
        (["--schedule", "interleaved_zb", "--stages", "3"], "--stages: expected a multiple of --ranks 2 for interleaved_zb, got 3"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_bad_flags_are_named(flags, error):
    assert error in " ".join(run("05_pipeline.py", *flags, code=2).split())


def test_delayed_wgrad(text, tmp_path):
    flags = "--microbatches 3 --context 16 --dim 16 --heads 2 --hidden 24 --layers 2 --repeats 2".split()
    said = run("04_delayed_wgrad.py", *flags, "--text", text, "--dtype", "float64", "--plot", tmp_path / "plot.png")
    rows = said.splitlines()[1:4]
    assert [row[:10].strip() for row in rows] == ["at once", "delayed", "batched"]
    assert all(float(row.split()[-1]) < 1e-12 for row in rows), "the same gradients"
    check_picture(tmp_path / "plot.png")
