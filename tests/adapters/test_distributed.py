"""Data parallelism of modules on two Gloo processes: the same parameters as one process gets."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("two_processes.py")


MODES = ("ddp", "ddp-delayed", "fsdp", "fsdp-delayed")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """What each of two processes prints of all modes: to import torch takes longer than a mode."""
    folder, running = tmp_path_factory.mktemp("two"), []
    for rank in range(2):
        with open(folder / f"out{rank}", "w") as out:
            command = [sys.executable, "-W", "ignore", str(SCRIPT), ",".join(MODES), str(rank), str(folder / "store")]
            running.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=600) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    texts = [(folder / f"out{rank}").read_text() for rank in range(2)]
    assert codes == [0, 0], texts
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_two_processes_match_one(mode, texts):
    for text in texts:
        (line,) = (line for line in text.splitlines() if line.startswith(f"{mode} "))
        error, curve, moved = map(float, line.split()[1:])
        assert error < 1e-10 and curve < 1e-12 < moved, text
