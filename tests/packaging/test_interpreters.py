"""`make interpreters` says which names a Python lacks, and why it does not run the tests."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import interpreters
import pytest

LACKING = [
    ("from typing import nothing_here", ["f.py:1: no typing.nothing_here"]),
    ("from typing import Any, nothing_here as x", ["f.py:1: no typing.nothing_here"]),
    ("import enum\n\nenum.Nothing", ["f.py:3: no enum.Nothing"]),
    ("import os.path as p\np.nothing(1)", ["f.py:2: no os.path.nothing"]),
    ("import os.path\nos.nothing", ["f.py:2: no os.nothing"]),
    ("import os.nothing", ["f.py:1: no os.nothing"]),
    ("def f():\n    from nowhere.at import all", ["f.py:2: no nowhere.at.all"]),
    ("def f(:", ["f.py:1: invalid syntax"]),
    ("class A:\n    import enum\n    b = enum.B, enum.Enum", ["f.py:3: no enum.B"]),
]
ENOUGH = [
    "from __future__ import annotations",
    "import concurrent.futures\nconcurrent.futures.wait",
    "from concurrent import futures",
    "from os.path import *",
    "import torch\ntorch.nothing",
    "from torch import nothing",
    "from . import nothing",
    "enum = 3\nenum.nothing",
    "try:\n    import nowhere\nexcept ImportError:\n    import os as nowhere",
    "import sys\nif sys.version_info >= (3, 99):\n    from enum import Nothing\nelse:\n    Nothing = 1",
]


@pytest.mark.parametrize(("text", "said"), [*LACKING, *((text, []) for text in ENOUGH)], ids=repr)
def test_names_that_a_python_lacks_are_found(text, said):
    assert interpreters.missing("f.py", text, sys.stdlib_module_names | {"nowhere"}) == said


def test_the_versions_equal_the_metadata():
    assert interpreters.VERSIONS[0] == "3.10" and len(interpreters.VERSIONS) >= 4
    assert f'requires-python = ">={interpreters.VERSIONS[0]}"' in interpreters.PROJECT


WHEEL = "torch-2.13.0-cp310-cp310-manylinux_2_28_x86_64.whl"
SMALL = [
    "Collecting torch>=2.11",
    f"  Downloading {WHEEL} (187.3 MB)",
    "Processing /home/nvidia-x/numpy.whl",
    "Looking in nvidia-x",
]
LARGE = {
    "cached": [f"  Using cached {WHEEL} (526.6 MB)"],
    "metadata": [f"  Downloading {WHEEL}.metadata (29 kB)", "Collecting nvidia-cudnn-cu13==9.20.0.48 (from torch>=2.11)"],
    "a link": ["Processing /opt/wheels/nvidia_cublas-13.1.1.3-py3-none-manylinux_2_27_x86_64.whl (from torch>=2.11)"],
    "larger": [f"  Downloading {WHEEL} (1.2 GB)"],
}


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("of", ["", *LARGE])
def test_downloads_of_gigabytes_stop(tmp_path, monkeypatch, cuda, of):
    """pip and its children are stopped at the line that names them, before they download or install anything."""
    commands, stops = [], bool(of) and not cuda
    start, (end, into) = interpreters.subprocess.Popen, os.pipe()
    says = "\n".join([*SMALL, *LARGE.get(of, [])])
    own = f"import os, time; print({says!r}, flush=True); time.sleep({30 if stops else 0}); os.write({into}, b'installed')"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {own!r}], close_fds=False)"

    def popen(command, **more):
        commands.append(command)
        return start([sys.executable, "-S", "-c", program if "pip" in command else ""], close_fds=False, **more)

    os.set_inheritable(into, True)
    monkeypatch.setattr(interpreters.subprocess, "Popen", popen)
    if stops:
        with pytest.raises(interpreters.NotTried, match="torch comes for CUDA here, gigabytes of it .*; --cuda installs it"):
            interpreters._install("3.99", "python3.99", tmp_path, cuda)
    else:
        interpreters._install("3.99", "python3.99", tmp_path, cuda)
    os.close(into)
    with open(end, "rb") as pipe:
        assert pipe.read() == (b"" if stops else b"installed")
    venv, pip = commands
    assert "venv" in venv and str(tmp_path / "3.99") in venv and str(tmp_path / "3.99/bin/python") in pip
    assert {"torch>=2.11", "pytest"} < set(pip)


def test_a_failure_of_pip_is_reported():
    for said, want in (("x\nERROR: No matching distribution\ny", "ERROR: No matching distribution"), ("No module named pip", None)):
        with pytest.raises(interpreters.NotTried, match=f"^{want or said}$"):
            interpreters._run(sys.executable, "-S", "-c", f"print({said!r}); raise SystemExit(1)")


@pytest.mark.parametrize(
    ("halves", "status"),
    [
        ([(True, True)], 0),
        ([(True, True), (True, False)], 0),
        ([(True, False), (True, False)], 1),  # none ran the tests
        ([(True, True), (False, True)], 1),
        ([(False, False), (True, True)], 1),
    ],
)
def test_the_exit_status(monkeypatch, capsys, halves, status):
    monkeypatch.setattr(interpreters, "VERSIONS", [str(i) for i in range(len(halves))])
    monkeypatch.setattr(interpreters, "found", dict)
    monkeypatch.setattr(interpreters, "tried", lambda version, *_: (*halves[int(version)], "said"))
    assert interpreters.main([]) == status
    assert capsys.readouterr().out.splitlines() == [f"Python {i}: said" for i in range(len(halves))]


@pytest.mark.parametrize("every", [False, True], ids=["ends", "every"])
@pytest.mark.parametrize("version", interpreters.VERSIONS)
def test_what_lies_between_is_only_read_unless_asked(monkeypatch, version, every):
    def run(command, **_):
        return subprocess.CompletedProcess(command, 0, "9 files read\n" if "--read" in command else "8 passed\n")

    made = []
    monkeypatch.setattr(interpreters, "environment", lambda version, *_: made.append(version) or "another")
    monkeypatch.setattr(interpreters.subprocess, "run", run)
    args = argparse.Namespace(every=every, envs=Path("envs"), cuda=False)
    passed, ran, line = interpreters.tried(version, "another", frozenset(), args)
    ends = version in (interpreters.VERSIONS[0], interpreters.VERSIONS[-1])
    assert passed and ran is (every or ends) and made == [version] * ran
    assert "9 files read" in line and ("8 passed" in line) is ran


def test_a_missing_python_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert interpreters.tried("3.99", None, frozenset(), argparse.Namespace()) == (True, False, "none on this machine")
    (own,) = interpreters.found().items()
    assert own == (f"{sys.version_info[0]}.{sys.version_info[1]}", (sys.executable, sys.stdlib_module_names))


def test_a_package_on_pythonpath_does_not_count_as_installed(monkeypatch, tmp_path):
    """pip would find a checkout's metadata there, and not install a wheel of that version."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    interpreters._run(sys.executable, "-S", "-c", f"import sys; raise SystemExit({str(tmp_path)!r} in sys.path)")
