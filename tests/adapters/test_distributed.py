"""Data parallelism of modules on two Gloo processes: the same parameters as one process gets."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("two_processes.py")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "ddp-delayed", "fsdp", "fsdp-delayed"])
def test_two_processes_match_one(mode, tmp_path):
    results, running = [], []
    for rank in range(2):
        with open(tmp_path / f"out{rank}", "w") as out:
            command = [sys.executable, "-W", "ignore", str(SCRIPT), mode, str(rank), str(tmp_path / "store")]
            running.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=150) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
        results = [(tmp_path / f"out{rank}").read_text() for rank in range(2)]
    assert codes == [0, 0], results
    for text in results:
        error, curve, moved = map(float, text.split()[-3:])
        assert error < 1e-10 and curve < 1e-12 < moved, text
