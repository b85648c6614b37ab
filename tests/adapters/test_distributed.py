"""Data parallelism of modules on two Gloo processes: the same parameters as one process gets."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("two_processes.py")
ROOT = SCRIPT.parents[2]


MODES = ("ddp", "ddp-delayed", "fsdp", "fsdp-delayed", "fsdp-recipe")
MODES += ("ddp-whole", "ddp-unused-whole", "fsdp-root-whole", "fsdp-blocks-whole", "fsdp-nested-whole")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """The output of each of two processes, which run all modes: importing torch takes longer than a mode."""
    folder = tmp_path_factory.mktemp("two")
    command = [sys.executable, "-W", "ignore", str(SCRIPT), ",".join(MODES), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    texts = [(folder / f"rank{rank}{suffix}").read_text() for rank in range(2) for suffix in (".out", ".err")]
    assert json.loads(done.stdout) == {"rank0": 0, "rank1": 0}, texts
    return texts[::2]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_two_processes_match_one(mode, texts):
    for text in texts:
        (line,) = (line for line in text.splitlines() if line.startswith(f"{mode} "))
        error, curve, moved = map(float, line.split()[1:])
        assert error < 1e-10 and curve < 1e-12 < moved, text
