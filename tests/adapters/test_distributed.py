"""Data parallelism of modules on two Gloo processes: the same parameters as one process gets."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("two_processes.py")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "ddp-delayed", "fsdp"])
def test_two_processes_match_one(mode, tmp_path):
    command = [sys.executable, "-W", "ignore", str(SCRIPT), mode]
    running = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for process in running:
        out, err = process.communicate(timeout=180)
        assert process.returncode == 0, err
        error, curve, moved = map(float, out.split())
        assert error < 1e-10 and curve < 1e-12 < moved, out
