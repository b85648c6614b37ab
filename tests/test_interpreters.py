"""What `make interpreters` says of a Python: which names it lacks, and why the tests are not tried with it."""

import argparse
import json
import sys

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


def test_the_versions_are_those_of_the_metadata():
    assert interpreters.VERSIONS[0] == "3.10" and len(interpreters.VERSIONS) >= 4
    assert f'requires-python = ">={interpreters.VERSIONS[0]}"' in interpreters.PROJECT


@pytest.mark.parametrize(("cuda", "installs"), [(False, False), (True, True)])
@pytest.mark.parametrize("planned", [["torch"], ["torch", "nvidia-cublas", "nvidia-nccl-cu13"]], ids=len)
def test_gigabytes_are_asked_for(tmp_path, monkeypatch, cuda, installs, planned):
    commands = []

    def run(*command):
        commands.append(command)
        return json.dumps({"install": [{"metadata": {"name": name}} for name in planned]})

    monkeypatch.setattr(interpreters, "_run", run)
    if installs or len(planned) == 1:
        assert interpreters.environment("3.99", "python3.99", tmp_path, cuda) == str(tmp_path / "3.99/bin/python")
    else:
        with pytest.raises(interpreters.NotTried, match="2 packages for CUDA here, gigabytes of them; --cuda installs them"):
            interpreters.environment("3.99", "python3.99", tmp_path, cuda)
    assert any("install" in one and "--dry-run" not in one for one in commands) == (installs or len(planned) == 1)
    assert all("torch>=2.11" in one and "pytest" in one for one in commands if "install" in one)


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
    monkeypatch.setattr(interpreters, "interpreter", lambda version: None)
    monkeypatch.setattr(interpreters, "tried", lambda version, stdlib, args: (*halves[int(version)], "said"))
    assert interpreters.main([]) == status
    assert capsys.readouterr().out.splitlines() == [f"Python {i}: said" for i in range(len(halves))]


def test_a_python_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert interpreters.tried("3.99", frozenset(), argparse.Namespace()) == (True, False, "none on this machine")
    assert interpreters.interpreter(f"{sys.version_info[0]}.{sys.version_info[1]}") == sys.executable
