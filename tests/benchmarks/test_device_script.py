"""The script that runs on a device: its limits, its stages, its folders; and that a run that is killed loses no result."""

import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
SMOKE = ROOT / "tests" / "smoke"
sys.path.insert(0, str(SMOKE))

import gpu_tests  # noqa: E402
import results  # noqa: E402
import run as smoke  # noqa: E402
from lines import NOT_RUN, Lines  # noqa: E402

from benchmarks import kernels, step, unmeasured  # noqa: E402
from benchmarks.__main__ import main as bench  # noqa: E402
from benchmarks.kernel_calls import Maker, kernel_calls  # noqa: E402
from benchmarks.measure import write_json  # noqa: E402
from benchmarks.rows import lines_of, rows_of  # noqa: E402
from benchmarks.unconfirmed import of_tests  # noqa: E402

LIMITS = {"first": 490, "second": 215}  # seconds: both, with two starts, are fifteen minutes
OWN = 4  # at least so many seconds of a stage's limit are beyond its own

# stand-ins for timeout and Python: each command is noted, one is out of time, and one fails
TIMEOUT = r"""#!/usr/bin/env bash
[ "$1" = --kill-after ] && shift 2
limit=$1; shift
echo "$limit $*" >>"$NOTED"
case "$*" in *results.py*) echo "$OUT/device" ;; *benchmarks\ graph*) echo "a row"; exit 124 ;; *gpu_tests*) exit 1 ;; esac
"""


def script(tmp_path, *calls, **env):
    """Run the script with these stand-ins; return the commands with their limits, and what it says."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "timeout").write_text(TIMEOUT)
    (tmp_path / "bin" / "timeout").chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    given = {**os.environ, "PATH": path, "OUT": str(tmp_path / "out"), "NOTED": str(tmp_path / "noted"), "PYTHON": "python", **env}
    done = subprocess.run(["bash", str(SMOKE / "on_device.sh"), *calls], env=given, capture_output=True, text=True)
    noted = (tmp_path / "noted").read_text().splitlines() if (tmp_path / "noted").exists() else []
    return [(int(limit), command) for limit, _, command in (line.partition(" ") for line in noted)], done


@pytest.mark.parametrize("call", LIMITS)
def test_a_call_fits_into_its_seconds(call, tmp_path):
    """A stage's own limit leaves it time to start and to end within the script's."""
    noted, _ = script(tmp_path, call)
    wheels = 0 if any("pip install" in command for _, command in noted) else 10
    assert sum(limit for limit, _ in noted) + wheels <= LIMITS[call]
    own = {int(command.split("--seconds ")[1].split()[0]): limit for limit, command in noted if "--seconds " in command}
    assert len(own) >= 3 and all(seconds + (2 if limit < 30 else OWN) <= limit for seconds, limit in own.items())
    (slower := tmp_path / "slower").mkdir()
    assert script(slower, call, SLOWER="3")[0][0][0] == 3 * noted[0][0]


def test_no_stage_keeps_the_next_from_running(tmp_path):
    noted, done = script(tmp_path)
    assert done.returncode == 1
    stages = [line.removeprefix("== ").partition(":")[0] for line in done.stdout.splitlines() if " of " in line and "== " in line]
    first = ["smoke", "kernels", "step", "step-compiled", "graph", "gpu-tests", "opt-in"]
    second = ["gpu-tests", "kernels", "step-again", "recipes"]
    assert [name for name in stages if name not in ("wheels", "needs")] == [*first, *second, "unconfirmed"]
    summary = done.stdout.split("results are in ")[1].splitlines()
    assert summary[0] == str(tmp_path / "out" / "device") and len(summary) == 1 + len(stages)
    assert [line.partition(",")[0] for line in summary if ": done" not in line][1:] == [
        "graph: out of time",
        "gpu-tests: failed",
        "gpu-tests: failed",
    ]
    assert "a row" in (tmp_path / "out" / "logs" / "graph.log").read_text() and "a row" in done.stdout
    files = [command.partition("--json ")[2].partition(" ")[0] for _, command in noted if "--json " in command]
    assert all(file.startswith(f"{tmp_path / 'out' / 'device'}/") for file in files) and len(files) == len(first + second)


def test_another_call_is_refused(tmp_path):
    _, done = script(tmp_path, "third")
    assert done.returncode == 2 and "first or second, got third" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_make_gpu_ends_without_a_device(tmp_path):
    """Every check, test and row is named as not run."""
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKEOVERRIDES")}  # set by the make that runs the tests
    command = ["make", "gpu", f"PYTHON={sys.executable}", f"OUT={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, env={**env, "SLOWER": "10"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert said[0]["device"] == "no device" and said[0]["missing"] == []
    assert {one["check"] for one in said[1:] if "check" in one} == set(smoke.entered())
    benches = ["kernels", "step", "step", "graph", "kernels", "step", "recipes"]
    assert [one["bench"] for one in said if "bench" in one] == benches
    tests = lines_of(tmp_path / "no-device" / "gpu-tests.jsonl")
    assert {name.partition("::")[0] for name in tests} == set(gpu_tests.files())
    assert {one["status"] for one in (*said[1:], *tests.values())} == {"no device"}
    named = [" ".join(line.split()) for line in done.stdout.splitlines()]
    rows = [f"row of {file} {' '.join(name.split())} 1 1" for file, names in unmeasured.wanted().items() for name in names]
    assert len(rows) > 400 and set(rows) <= set(named)
    assert {f"test {row.name} 1 1" for row in of_tests(tmp_path)} <= set(named)


NAMES = {
    "NVIDIA H200": "h200",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA GeForce RTX 4090": "geforce-rtx-4090",
    "NVIDIA A100-SXM4-80GB": "a100-sxm4",
    "no device": "no-device",
    "../x": "x",
    "": "unknown",
}


@pytest.mark.parametrize("device", NAMES)
def test_a_device_has_a_folder_of_its_name(device):
    assert results.name_of(device) == NAMES[device]


@pytest.mark.parametrize("device", ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA B200"])
def test_a_run_begins_with_the_results_of_its_device(device, tmp_path):
    """And with no other's; what an earlier run left there stays."""
    out = tmp_path / "out"
    folder = results.seeded(out, device)
    committed = {"NVIDIA H200": results.COMMITTED / "h200", "NVIDIA H100 80GB HBM3": results.COMMITTED}.get(device)
    assert [file.name for file in sorted(out.iterdir())] == [folder.name]
    want = {} if committed is None else {name: (committed / name).read_text() for name in results.SEEDS}
    assert {file.name: file.read_text() for file in folder.iterdir()} == want
    (folder / "smoke.jsonl").write_text("")
    assert results.seeded(out, device) == folder and (folder / "smoke.jsonl").read_text() == ""


def test_rows_that_a_file_lacks_are_named(tmp_path):
    every = [(file, name) for file, names in unmeasured.wanted().items() for name in names]
    assert list(unmeasured.lacking(tmp_path)) == every and len(set(every)) == len(every)
    call = next(kernel_calls(Maker("meta", torch.bfloat16)))
    row = kernels.Measured(call.name, call.shape, "bfloat16", "funcops", *kernels.NOT_MEASURED, note="")
    write_json(tmp_path / "kernels.json", [row])
    assert list(unmeasured.lacking(tmp_path)) == [one for one in every if one != ("kernels.json", f"{call.name} {call.shape}")]
    write_json(tmp_path / "kernels.json", [row._replace(note="failed: memory"), row._replace(provider="torch")])
    write_json(tmp_path / "step-cuda.json", [step.Row("step", "bfloat16, cuda", "funcops", "median", 1.0, "ms")])
    assert set(every) - set(unmeasured.lacking(tmp_path)) == {("step-cuda.json", "funcops")}


# Kills


def killed(write, after, delay):
    """Run `write(report)` in a process that is killed a little after so many reports; return all reports."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, of which the child uses none
        child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            write(lambda name: os.write(writer, f"{name}\n".encode()))
        os._exit(0)
    os.close(writer)
    with open(reader) as said:
        reports = [line for _, line in zip(range(after), said, strict=False)]
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return [line.strip() for line in (*reports, *said)]


CALLS = [f"kernel {i}" for i in range(12)]
PROVIDERS = "funcops", "torch", "liger"


def a_pretended_bench(monkeypatch, measured, report):
    """`bench kernels` without a device: a call is reported when its rows are written, which is when the next is asked for."""

    def family(make):
        for name in CALLS:
            time.sleep(2e-4)
            yield SimpleNamespace(name=name, shape="8")
            report(name)

    def measure(call, *_):
        measured.append(call.name)
        return [kernels.Measured(call.name, "8", "bfloat16", by, *kernels.NOT_MEASURED, note="") for by in PROVIDERS]

    for name, value in dict(is_available=lambda: True, get_device_name=lambda: "pretended", empty_cache=lambda: None).items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name, value in dict(
        CudaTimer=lambda: None, Maker=lambda *_: None, measured_copy_rate=lambda _: 1.0, measure=measure
    ).items():
        monkeypatch.setattr(kernels, name, value)
    monkeypatch.setattr(kernels, "measured_families", lambda: [family])
    monkeypatch.setattr(kernels, "listed", lambda dtype: [kernels.Listed(0, name, "8", f"of {name}") for name in CALLS])


@pytest.mark.parametrize("seed", range(10))
def test_a_killed_benchmark_loses_no_row_and_is_continued(seed, tmp_path, monkeypatch):
    """Neither its own nor those that it began with; calls that have rows are not measured again."""
    draw, file, measured = random.Random(seed), tmp_path / "kernels.json", []
    command = ["kernels", "--json", str(file), "--changed", str(file)]
    a_pretended_bench(monkeypatch, measured, lambda name: None)
    earlier = draw.sample(CALLS, 3)
    rows = [
        kernels.Measured(name, "8", "bfloat16", by, *kernels.NOT_MEASURED, "", f"of {name}") for name in earlier for by in PROVIDERS
    ]
    write_json(file, rows)

    def write(report):
        a_pretended_bench(monkeypatch, [], report)
        bench(command)

    reports = killed(write, draw.randrange(10), draw.random() * 2e-3)
    kept = {name: [row["provider"] for row in rows_of(file) if row["kernel"] == name] for name in CALLS}
    assert all(kept[name] == list(PROVIDERS) for name in (*reports, *earlier))
    assert all(found in ([], list(PROVIDERS)) for found in kept.values()), "a call's rows come together"
    bench(command)
    assert measured == [name for name in CALLS if not kept[name]]
    assert sorted((row["kernel"], row["provider"]) for row in rows_of(file)) == sorted((a, b) for a in CALLS for b in PROVIDERS)


@pytest.mark.parametrize("seed", range(10))
def test_killed_checks_and_tests_lose_no_line(seed, tmp_path):
    draw, file = random.Random(seed), tmp_path / "lines.jsonl"
    drawn = {name: draw.choice(["passed", "failed", *NOT_RUN]) for name in CALLS}
    earlier = {name: draw.choice(["passed", "failed"]) for name in draw.sample(CALLS, 5)}
    for name, status in earlier.items():
        Lines(file).add({"check": name, "status": status})

    def results(report):
        for name, status in drawn.items():
            yield {"check": name, "status": status}
            report(name)  # which `smoke.report` has written, as it asks for the next

    reports = killed(lambda report: smoke.report(results(report), Lines(file)), draw.randrange(13), draw.random() * 1e-3)
    found = {name: line["status"] for name, line in lines_of(file).items()}
    for name in CALLS:
        wanted = earlier.get(name) if drawn[name] in NOT_RUN and name in earlier else drawn[name]
        assert found.get(name) in ([wanted] if name in reports else [wanted, earlier.get(name)]), name


def test_a_row_of_a_step_is_in_its_file_before_it_is_printed(tmp_path, monkeypatch):
    file, said = tmp_path / "step.json", []
    rows = [step.Row("step", "case", name, "median", value, "ms") for name, value in (("funcops", 1.0), ("torch eager", None))]
    one = SimpleNamespace(eager=lambda: iter(rows), compiled=lambda *_: iter(()), known=set(), compilation=0.0)
    monkeypatch.setattr(step, "Measured", lambda *_: one)
    monkeypatch.setattr(step, "say", lambda line: said.append((line, len(rows_of(file)))))
    bench(["step", "--json", str(file)])
    assert said[0] == ("case: funcops, median: 1.000 ms", 1) and ("case: torch eager, median: unknown ms", 2) in said


@pytest.mark.parametrize("whole", [True, False])
def test_a_file_is_replaced_in_one_step(whole, tmp_path, monkeypatch):
    """A process that dies while it writes leaves the old file."""
    file = tmp_path / "rows.json"
    write_json(file, [step.Row("a", "b", "c", "d", 1.0, "")])
    before = file.read_text()

    def dies(self, text):
        self.open("w").write(text[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", dies) if not whole else None
    with contextlib.suppress(KeyboardInterrupt):
        write_json(file, [step.Row("a", "b", "c", "d", math.pi, "")])
    assert (file.read_text() == before) == (not whole) and rows_of(file)
