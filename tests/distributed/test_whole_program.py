"""The whole program of docs/parallel-in-depth.md under torchrun: a rank that is killed, and one process, give the same weights."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from funcops import LinearConfig, dist, linear
from funcops.optim import AdamWConfig, adamw_init

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "parallel-in-depth.md").read_text()
(PROGRAM,) = re.findall(r"^### A whole program\n.*?^```python\n(.*?)^```", PAGE, re.S | re.M)
KILLED = """
    if saved["step"] == 17 and mesh.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), 9)
"""
RESUMED = """
    Path(os.environ["RUN"], f"from step {saved['step']}").touch()
"""


def weight(folder, program, *command):
    (folder / "train.py").write_text(program)
    env = os.environ | {"RUN": str(folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command, folder / "train.py"], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and "step 40" in done.stdout, done.stderr
    params = linear.init(LinearConfig(8, 1), device="meta")
    like = {"params": params, "state": adamw_init(params, AdamWConfig()), "step": 0}
    return done.stderr, dist.load(folder / "last", like, {}, dist.Mesh.of({"dp": 1}, "cpu"))["params"].weight


@pytest.mark.slow
def test_the_whole_program_goes_on_after_a_rank_was_killed(tmp_path):
    alone, together = tmp_path / "alone", tmp_path / "together"
    alone.mkdir(), together.mkdir()
    _, wanted = weight(alone, PROGRAM)
    saved, loaded = "    dist.save(saved, run, {}, mesh)\n", "    saved = dist.load(run, saved, {}, mesh)\n"
    assert saved in PROGRAM and loaded in PROGRAM
    # a start from the beginning would give the same weights
    killed = PROGRAM.replace(saved, saved + KILLED).replace(loaded, loaded + RESUMED)
    said, got = weight(together, killed, *"-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 1".split())
    assert "Signal 9" in said or "SIGKILL" in said or "exitcode: -9" in said, said
    assert [path.name for path in together.glob("from step *")] == ["from step 17"]
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
