"""The kernel bench's samples and measurement, with the host's clock and tiny sizes where there is no GPU."""

import csv
import json
import math
import subprocess
import sys
import time

import pytest
import torch
from tiny_samples import names, tiny

from funcops.backend import backend
from funcops.bench import kernels
from funcops.bench.device import Replay
from funcops.bench.liger import COLUMNS, write_liger_csv
from funcops.bench.measure import write_csv, write_json
from funcops.bench.plot import draw
from funcops.testing.tolerances import FACTOR, ROUNDOFF

pytest.importorskip("triton")


class HostTimer:
    """As CudaTimer, on the host."""

    stream = None

    def replay(self, calls):
        return Replay(lambda: [call() for call in calls], len(calls), captured=False)

    def device_us(self, replays, rounds=1):
        return {name: self.host_us(one.run) / one.calls for name, one in replays.items()}

    def host_us(self, call):
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6

    def memory_mib(self, call):
        return 0.0, 0.0


def measured(sample, dtype, providers=("funcops",)):
    torch.manual_seed(0)
    with backend("triton"):
        return list(kernels.measure(sample, dtype, providers, HostTimer(), 1e9))


KERNELS = [name.rpartition("-")[0] for name in names()]


def samples_in_turn():
    """Every sample in one dtype, in turn; in the first tier the first of a kernel."""
    for i, name in enumerate(names()):
        yield pytest.param(i, id=name, marks=pytest.mark.slow if KERNELS[i] in KERNELS[:i] else ())


@pytest.mark.parametrize("i", list(samples_in_turn()))
def test_every_sample_measures(i, monkeypatch):
    monkeypatch.setattr(kernels, "MOST_COPIES", 1)
    dtype = (torch.bfloat16, torch.float32)[i % 2]
    (row,) = measured(tiny(dtype)[i], dtype)
    assert row.note == "not captured" and row.device_us > 0 and row.gb_per_s > 0
    assert row.error < FACTOR[dtype] * ROUNDOFF[dtype]


def test_rivals_that_fail_are_named_and_the_rest_goes_on(monkeypatch):
    monkeypatch.setattr(kernels, "MOST_COPIES", 1)
    sample = next(s for s in tiny(torch.float32) if s.name == "rms_norm_bwd")

    def broken(*args):
        raise RuntimeError("no such case")

    monkeypatch.setattr(kernels, "liger_call", lambda sample: broken)
    rows = measured(sample, torch.float32, ("funcops", "torch", "liger"))
    assert [row.provider for row in rows] == ["liger", "funcops", "torch"]
    assert rows[0].note == "failed: RuntimeError: no such case" and math.isnan(rows[0].device_us)


def test_what_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "MOST_COPIES", 1)
    rows = measured(tiny(torch.float32)[0], torch.float32, ("funcops", "torch"))
    write_json(tmp_path / "k.json", rows)
    write_csv(tmp_path / "k.csv", rows)
    write_liger_csv(tmp_path / "l.csv", rows)
    draw(tmp_path / "k.png", rows)
    found = json.loads((tmp_path / "k.json").read_text())
    assert found["rows"][0]["kernel"] == "rms_norm_fwd" and found["machine"]["torch"] == torch.__version__
    for name, header in (("k.csv", kernels.Measured._fields), ("l.csv", COLUMNS)):
        with open(tmp_path / name) as file:
            lines = list(csv.reader(file))
        assert lines[0] == list(header) and len(lines) == 3
    assert (tmp_path / "k.png").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    command = [sys.executable, "-m", "funcops.bench", "kernels"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 2 and "no CUDA device" in found.stderr
