"""The smoke run of a device, rehearsed where there is none: its code, its lines and how it ends."""

import json
import sys
import time
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent / "smoke"
sys.path.insert(0, str(HERE))

import checks  # noqa: E402
import run as smoke  # noqa: E402

pytest.importorskip("triton")


COMPILES = "modules_train_by_autograd_and_compiled"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == COMPILES else ())
        for name in checks.CHECKS
        if name not in checks.DEVICE_ONLY
    ],
)
def test_checks_run_on_the_cpu(name):
    measured = checks.CHECKS[name](checks.Place("cpu"))
    json.dumps(measured, default=str)


def test_what_runs_on_a_device_alone_is_little():
    assert len(checks.CHECKS) >= 20 and len(checks.DEVICE_ONLY) <= 7


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_device_every_check_says_so(tmp_path, capsys):
    assert smoke.main(["--json", str(tmp_path / "a" / "found.jsonl")]) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["check"], one["status"]) for one in said] == [(name, "no device") for name in checks.CHECKS]
    assert [json.loads(line) for line in (tmp_path / "a" / "found.jsonl").read_text().splitlines()] == said


def test_what_ends_a_process_has_its_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "run.py").write_text("import os; os._exit(7)")
    monkeypatch.setattr(smoke, "HERE", tmp_path)
    now = time.monotonic()
    assert smoke.report((smoke.apart("any", until) for until in (now + 600, now)), None) == 1
    killed, late = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert killed["status"] == "failed" and "exit code 7" in killed["why"] and late["status"] == "out of time"


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setattr(smoke, "NEEDED", ("torch", "no_such_package"))
    assert smoke.main([]) == 2
    assert "no_such_package" in capsys.readouterr().err


def test_a_check_that_fails_says_why(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setitem(checks.CHECKS, "broken", lambda on: 1 / 0)
    assert smoke.one("broken")["why"] == "ZeroDivisionError: division by zero"
    monkeypatch.setitem(checks.CHECKS, "well", lambda on: {"us": 1.5})
    assert smoke.one("well") | {"torch": "", "triton": ""} == {
        "status": "passed", "measured": {"us": 1.5}, "device": "none", "torch": "", "triton": "",
    }  # fmt: skip
