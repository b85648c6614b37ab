"""The ops on two Gloo processes give the same as threads, on real groups, and in one graph."""

import json
import subprocess
import sys
from pathlib import Path

import drawn_messages
import gone_rank
import pytest
import torch

from funcops import dist

SCRIPT = Path(__file__).with_name("two_ranks.py")
ROOT = SCRIPT.parents[2]
FAULT = (
    "handshake: collective 0 over axis 'tp' must be the same on all ranks, got all_gather of float32[2, 6] on rank 0, "
    "all_gather of float32[3, 6] on rank 1"
)


@pytest.mark.slow
def test_two_processes_are_two_threads(tmp_path):
    done = subprocess.run([sys.executable, "-W", "ignore", str(SCRIPT), str(tmp_path)], capture_output=True, text=True, timeout=600)
    texts = [(tmp_path / f"rank{rank}{suffix}").read_text() for rank in range(2) for suffix in (".out", ".err")]
    assert done.returncode == 0 and json.loads(done.stdout) == {"rank0": 0, "rank1": 0}, (done.stderr, texts)
    for rank, text in enumerate(texts[::2]):
        said = dict(line.split("| ", 1) for line in text.splitlines() if "| " in line)
        assert max(float(said.pop(how)) for how in ("traced", "traced ops", "traced sums", "compiled")) < 1e-14
        assert said == {
            "wrong product": "Mesh.of: sizes must be of product 2, the number of processes, got dp 2 x tp 2 = 4",
            "place": f"{rank} {rank} ",
            "ops": "True",
            "dtypes": "True",
            "steps": "True",
            "sums": "True",
            "handshake": "5",  # x, y; dy, x again, dx
            "checkpoint": "True",
            "disagreement": str((FAULT, True)),
            "drawn": "[25, 25]",
            "refused": str(sorted(drawn_messages.unordered(None, 0, torch.ones(2)))),
            "finish": "[0.0, 1.0]",
            "in flight": "{'one': {1}, 'two': {2}}",  # Gloo's threads corrupt the heap with two of a group
        }
    whole = {"w": torch.arange(24.0).reshape(4, 6), "b": torch.arange(6)}
    found = dist.load(tmp_path / "checkpoint", whole, {}, dist.Mesh.of({"dp": 1, "tp": 1}))
    assert all(torch.equal(found[name], t) for name, t in whole.items())


PATHS = {"sums": "a to b: ", "backend's sums": "a to b: ", "shards": "a to b: ", "layer": "weight to bias: "}


@pytest.mark.slow
def test_a_rank_that_is_gone_is_told_by_collective_axis_and_path(tmp_path):
    script = SCRIPT.with_name("gone_rank.py")
    done = subprocess.run([sys.executable, "-W", "ignore", str(script), str(tmp_path)], capture_output=True, text=True, timeout=600)
    out, err = ((tmp_path / f"rank0{suffix}").read_text() for suffix in (".out", ".err"))
    assert done.returncode == 0 and json.loads(done.stdout) == {"rank0": 0, "rank1": 0}, (done.stderr, err)
    said = dict(line.split("| ", 1) for line in out.splitlines() if "| " in line)
    assert said.keys() == {*gone_rank.KINDS, "handshake"}, (out, err)
    of_kind = {"shift": "all_to_all", "max": "all_reduce", "two": "all_reduce", "finish": "all_gather", "shards": "all_gather"}
    of_kind |= {"sums": "all_to_all", "backend's sums": "all_reduce", "layer": "all_gather", "handshake": "all_gather"}
    for name, text in said.items():
        start = f"{PATHS.get(name, '')}{of_kind.get(name, name)} over axis 'tp' of 2 must be called by all its ranks, got no answer"
        assert text.startswith(start), (name, text)
        assert "look for the first error among the ranks" in text and "dist.handshake" in text and "timeout=" in text
