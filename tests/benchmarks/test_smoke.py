"""The smoke run, rehearsed without a device: its code, its lines and how it ends."""

import contextlib
import json
import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

HERE = Path(__file__).parents[1] / "smoke"
sys.path.insert(0, str(HERE))

import checks  # noqa: E402
import gpu_tests  # noqa: E402
import needs  # noqa: E402
import repeat_checks  # noqa: E402
import run as smoke  # noqa: E402
from law_cases import CASES, sums_codes  # noqa: E402
from lines import Lines  # noqa: E402
from pretend_cuda import pretended  # noqa: E402
from tiny_kernel_calls import tiny  # noqa: E402

from benchmarks import graph, kernels, recipes, step  # noqa: E402
from benchmarks.__main__ import main as bench  # noqa: E402
from benchmarks.launches import Listed  # noqa: E402
from benchmarks.rows import lines_of  # noqa: E402
from benchmarks.unconfirmed import sources_of_checks  # noqa: E402
from funcops.models.blocks import Sizes  # noqa: E402

ROOT = Path(__file__).parents[2]
SMALL = Sizes(dim=16, layers=1, heads=2, kv_heads=1, hidden=24, vocab=16, context=4, batch=1)

smoke.entered()
SLOW = "modules_train_by_autograd_and_compiled", "attention_of_codes_gives_the_same_bits_again_and_again"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
        for name in checks.CHECKS
        if name not in checks.DEVICE_ONLY
    ],
)
def test_checks_run_on_the_cpu(name):
    measured = checks.CHECKS[name](checks.SmokeDevice("cpu"))
    json.dumps(measured, default=str)


def test_few_checks_need_a_device():
    assert len(checks.CHECKS) >= 20 and len(checks.DEVICE_ONLY) <= 7


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(checks.DEVICE_ONLY))
def test_device_only_checks_run_on_a_pretended_device(name, monkeypatch):
    monkeypatch.setattr(checks.SmokeDevice, "real", False)
    monkeypatch.setattr(checks.SmokeDevice, "size", lambda on, full, small: small)
    with pretended(monkeypatch, "triton"):
        found = smoke.one(name)
    assert found["status"] == "passed" and found["device"] == "pretended", found


BENCHES = {
    "kernels": ["--only", "rms_norm_fwd", "--seconds", "60"],
    "graph": ["--dtype", "float32"],
    "step": ["--device", "cuda", "--profile"],
    "recipes": [],
}
LAST = {"kernels": "torch", "graph": "funcops graphed, packed", "step": "funcops, graphed", "recipes": "Fp8Block, keep=col"}


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHES)
def test_benches_of_a_device_run_on_a_pretended_one(name, monkeypatch, tmp_path, capsys):
    two = tiny(torch.bfloat16)[:2]
    for module, changes in (
        (
            kernels,
            dict(
                measured_families=lambda: (lambda make: iter(two),),
                listed=lambda dtype: [Listed(0, call.name, call.shape, "abc") for call in two],
                MOST_COPIES=1,
                COLD_BYTES=0,
                measured_copy_rate=lambda _: 1e9,
            ),
        ),
        (graph, dict(SMALL=SMALL, ROUNDS=2, CALLS=1)),
        (step, dict(LARGE=SMALL, LARGE_ROUNDS=4)),
        (recipes, dict(LAYERS=((4, 32, 16),), BLOCK=SMALL)),
    ):
        for attribute, value in changes.items():
            monkeypatch.setattr(module, attribute, value)
    with pretended(monkeypatch, "torch"):  # `bench kernels` runs ours where it must
        bench([name, "--if-device", *BENCHES[name], "--json", str(tmp_path / "rows.json")])
    found = json.loads((tmp_path / "rows.json").read_text())
    assert found["machine"]["device"] == "pretended" and "no device" not in capsys.readouterr().out
    notes = [row.get("note", "") for row in found["rows"]]
    providers = {row["provider"] for row in found["rows"]}
    assert not [note for note in notes if "failed" in note] and LAST[name] in providers


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("asked", [[], ["--opt-in"]], ids=str)
def test_without_a_device_every_check_reports_it(asked, tmp_path, capsys):
    assert smoke.main([*asked, "--json", str(tmp_path / "a" / "found.jsonl")]) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = [name for name in checks.CHECKS if (name in checks.OPT_IN) == bool(asked)]
    assert [(one["check"], one["status"]) for one in said] == [(name, "no device") for name in names]
    assert [json.loads(line) for line in (tmp_path / "a" / "found.jsonl").read_text().splitlines()] == said


def test_checks_that_have_not_passed_as_they_are_come_first(tmp_path):
    now, (a, b, c, d) = sources_of_checks(), list(checks.CHECKS)[:4]
    for name, status, source in ((a, "passed", now[a]), (b, "passed", "of another form"), (c, "failed", now[c])):
        Lines(tmp_path / "found.jsonl").add({"check": name, "status": status, "source": source})
    assert smoke.unpassed_first([a, b, c, d], Lines(tmp_path / "found.jsonl")) == [b, c, d, a]


def test_a_run_of_a_kernel_that_differs_is_found():
    """And a result that is not finite."""
    results = iter(map(torch.tensor, (0.0, 0.0, 0.0, 1.0, math.nan, math.nan)))
    call = SimpleNamespace(kernel=lambda: next(results), name="a kernel", shape="3", args=())
    for well in (True, False, False):
        with pytest.raises(AssertionError, match="differ, or are not finite") if not well else contextlib.nullcontext():
            repeat_checks.again_and_again(checks.SmokeDevice("cpu"), [call], call.kernel)


def test_a_process_that_dies_has_a_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "run.py").write_text("import os; os._exit(7)")
    monkeypatch.setattr(smoke, "HERE", tmp_path)
    now = time.monotonic()
    assert smoke.report((smoke.apart("any", until) for until in (now + 600, now)), Lines(None)) == 1
    killed, late = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert killed["status"] == "failed" and "exit code 7" in killed["why"] and late["status"] == "out of time"


@pytest.mark.parametrize(
    ("has", "said"),
    [
        ({}, []),
        ({"optree": None}, ["optree>=0.13 (not installed)"]),
        ({"torch": "2.9.1+cu128"}, ["torch>=2.11 (got 2.9.1+cu128)"]),
        ({"torch": "2.13.0a0+git", "triton": "3.6.0", "optree": ""}, []),
        ({"triton": None, "pytest": None}, ["triton>=3.6 (not installed)", "pytest (not installed)"]),
    ],
    ids=str,
)
def test_missing_packages_are_named_first(has, said, monkeypatch, capsys):
    real = needs.had
    monkeypatch.setattr(needs, "had", lambda name: has.get(name, real(name)) if name in has else real(name))
    assert needs.missing((*needs.NEEDED, *needs.TESTS)) == said
    of_tests = [one for one in said if one.startswith("pytest")]
    for main, code in ((needs.main, 2 if said != of_tests else 0), (lambda: smoke.main(["--only", "no such"]), 2)):
        if said != of_tests:
            assert main() == code and all(one in capsys.readouterr().err for one in said if one not in of_tests)
    if said:
        assert gpu_tests.main([]) == 2 and said[0] in capsys.readouterr().err


def test_a_python_that_is_too_old_is_named(monkeypatch):
    monkeypatch.setattr(needs.sys, "version_info", (3, 9, 1))
    assert needs.missing(())[0].startswith("python>=3.10 (got ")


def test_what_was_not_run_replaces_no_result(tmp_path):
    """Without a device, or for want of time. The last result counts, and earlier ones of other names stay."""
    file = tmp_path / "found.jsonl"
    steps = [("no device", "no device"), ("out of time", "no device"), ("passed", "passed"), ("no device", "passed")]
    for status, kept in (*steps, ("failed", "failed"), ("out of time", "failed"), ("passed", "passed")):
        lines = Lines(file)
        lines.add({"check": "a", "status": status})
        assert {name: line["status"] for name, line in lines_of(file).items()} == {"a": kept}
    with file.open("a") as out:
        out.write('{"check": "b", "stat')  # its process was killed
    Lines(file).add({"check": "c", "status": "passed"})
    assert list(lines_of(file)) == ["a", "c"] and len(file.read_text().splitlines()) == 2
    Lines(None).add({"check": "a", "status": "passed"})


OUTCOMES = [
    ("call", "passed", None, "passed"),
    ("setup", "passed", None, None),
    ("call", "failed", "boom", "failed"),
    ("setup", "failed", "boom", "failed"),
    ("teardown", "passed", None, None),
    ("teardown", "failed", "boom", "failed"),
    ("setup", "skipped", ("f", 1, "Skipped: no device: needs one"), "no device"),
    ("setup", "skipped", ("f", 1, "Skipped: out of time"), "out of time"),
    ("call", "skipped", ("f", 1, "Skipped: no fp8"), "skipped"),
]


@pytest.mark.parametrize(("when", "outcome", "why", "status"), OUTCOMES, ids=str)
def test_a_gpu_test_has_its_line(when, outcome, why, status, tmp_path):
    report = SimpleNamespace(
        when=when,
        outcome=outcome,
        longrepr=why,
        nodeid="a::b",
        duration=1.234,
        passed=outcome == "passed",
        failed=outcome == "failed",
        skipped=outcome == "skipped",
        user_properties=[("launches", "abc")] if when == "call" else [],
    )
    gpu_tests._Report(tmp_path / "t.jsonl").pytest_runtest_logreport(report)
    found = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert [one["status"] for one in found] == ([] if status is None else [status])
    assert not found or ("why" in found[0]) == (status in ("failed", "skipped"))
    assert not found or ("launches" in found[0]) == (when == "call")


def test_no_gpu_test_starts_after_its_time(monkeypatch):
    item = SimpleNamespace(config=SimpleNamespace(getoption=lambda _: 5.0))
    monkeypatch.setattr(gpu_tests.time, "time", lambda: 4.0)
    gpu_tests.pytest_runtest_setup(item)
    monkeypatch.setattr(gpu_tests.time, "time", lambda: 6.0)
    with pytest.raises(pytest.skip.Exception, match="out of time"):
        gpu_tests.pytest_runtest_setup(item)


def test_a_check_that_fails_says_why(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setitem(checks.CHECKS, "broken", lambda on: 1 / 0)
    assert smoke.one("broken")["why"] == "ZeroDivisionError: division by zero"
    monkeypatch.setitem(checks.CHECKS, "well", lambda on: {"us": 1.5})
    assert smoke.one("well") | {"torch": "", "triton": ""} == {
        "status": "passed",
        "measured": {"us": 1.5},
        "device": "none",
        "source": "",
        "launches": "",
        "torch": "",
        "triton": "",
    }


@pytest.mark.parametrize("many", [False, True], ids=["one process", "many"])
def test_gpu_tests_run_without_plugins_that_warn_of_many_processes(many, monkeypatch):
    """pytest-benchmark warns when it is configured under xdist, and warnings are errors."""
    said: list[str] = []
    monkeypatch.setattr(gpu_tests, "missing", lambda _: [])
    monkeypatch.setattr(gpu_tests.importlib.util, "find_spec", lambda _: many)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: many)
    monkeypatch.setattr(gpu_tests.subprocess, "run", lambda command, **_: said.extend(command) or SimpleNamespace(returncode=3))
    assert gpu_tests.main(["--jobs", "2", "-x"]) == 3
    pairs = set(zip(said, said[1:], strict=False))
    assert ("-p", "no:benchmark") in pairs and ("-m", "gpu") in pairs and said[-1] == "-x"
    assert (("-n", "2") in pairs) is many


@pytest.mark.parametrize("workers", [1, 2, 3, 16])
@pytest.mark.parametrize("seed", range(8))
def test_every_process_starts_with_tests_that_have_not_passed(workers, seed):
    """pytest-xdist gives each process an equal part of the list."""
    draw = random.Random(seed)
    items = list(range(draw.randint(1, 60)))
    passed = [draw.random() < draw.choice([0.0, 0.3, 0.9]) for _ in items]
    found = gpu_tests.in_order(items, passed, workers)
    assert sorted(found) == items
    sizes = [len(items[worker::workers]) for worker in range(workers)]
    starts = [sum(sizes[:worker]) for worker in range(workers)]
    for start, size in zip(starts, sizes, strict=True):
        done = [passed[item] for item in found[start : start + size]]
        assert done == sorted(done), "what has passed comes last"
    lacking = [sum(not passed[item] for item in found[start : start + size]) for start, size in zip(starts, sizes, strict=True)]
    assert max(lacking) - min(lacking) <= 1


def test_a_passed_test_names_the_launches_that_it_made_first():
    plugin, given = gpu_tests._Launches(), []
    plugin.pytest_runtest_makereport(
        None, SimpleNamespace(when="setup", excinfo=SystemExit())
    )  # the first is skipped before its set-up
    plugin.found = {"a"}

    def run(*launches, error=None):
        item = SimpleNamespace(user_properties=[])
        plugin.pytest_runtest_setup()
        plugin.found |= set(launches)
        for when, raised in (("setup", None), ("call", error), ("teardown", None)):
            plugin.pytest_runtest_makereport(item, SimpleNamespace(when=when, excinfo=raised))
        assert len(item.user_properties) < 2
        given.append(dict(item.user_properties).get("launches", ""))

    run("c", "b", "a")
    run("b")
    run("d", error=RuntimeError("wrong"))
    run("d", "e")
    assert given == ["b c", "", "", "e"], "a launch that first fails counts for no test"


@pytest.mark.slow
def test_launches_of_a_session_reach_its_lines(tmp_path):
    """In processes of pytest-xdist, too, whose reports the first process is told."""
    (tmp_path / "test_two.py").write_text(
        "import torch, benchmarks.launches\nfrom smoke_launches import found\n"
        "def test_one(): found.add('abc')\ndef test_two(): found.add('def')\n"
    )
    (tmp_path / "smoke_launches.py").write_text(
        "import contextlib, torch, benchmarks.launches\nfound = set()\ntorch.cuda.is_available = lambda: True\n"
        "benchmarks.launches.fingerprints = lambda: contextlib.nullcontext(found)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    plugins = [
        "-p",
        "smoke_launches",
        "-p",
        "tests.smoke.gpu_tests",
        "-p",
        "no:cacheprovider",
        "-n",
        "2",
        "--rootdir",
        str(tmp_path),
    ]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, f"--lines={tmp_path / 'lines.jsonl'}", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert {line["test"].partition("::")[2]: line["launches"] for line in lines} == {"test_one": "abc", "test_two": "def"}


def test_gpu_tests_name_a_missing_pytest():
    program = "import sys; sys.modules['pytest'] = None; sys.argv = ['gpu_tests']; import gpu_tests; sys.exit(gpu_tests.main([]))"
    hidden = "import importlib.metadata as m, needs; needs.had = lambda name: None if name == 'pytest' else '99'; "
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests" / "smoke")))}
    done = subprocess.run([sys.executable, "-c", hidden + program], env=env, capture_output=True, text=True)
    assert done.returncode == 2 and "lacks pytest" in done.stderr, done.stderr


def test_a_check_that_passes_names_its_launches(monkeypatch):
    monkeypatch.setattr("benchmarks.launches.fingerprints", lambda: contextlib.nullcontext({"b", "a"}))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "pretended")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    name = next(iter(checks.CHECKS))
    monkeypatch.setitem(checks.CHECKS, name, lambda device: {"us": 1.0})
    found = smoke.one(name)
    assert (found["status"], found["launches"]) == ("passed", "a b") and len(found["source"]) == 12


def test_products_of_codes_are_known_by_their_recipe():
    """Their sums keep fewer bits on a device, whatever the op is called."""
    found = {case.op.name for case, _ in CASES if sums_codes(case)}
    assert {"qlinear", "grouped_qlinear", "expert_steps"} <= found and not found & {
        "linear",
        "grouped_linear",
        "quantize",
        "qkv_split",
    }
