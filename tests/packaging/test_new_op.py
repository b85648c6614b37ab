"""`tests/new_op.py` begins an operator whose tests pass at once."""

import os
import subprocess
import sys

import checkout
import new_op
import pytest
import release

CHECKED = [  # a test of everything that asks for a line, a table row or a sample of each operator
    "tests/test_laws.py",
    "tests/pages/test_site.py",
    "tests/pages/test_public.py",
    "tests/kernels/test_formulas.py",
    "tests/contract/test_promised_defaults.py",
    "tests/contract/test_wrong_values.py",
    "tests/benchmarks/test_traffic.py",
    "tests/benchmarks/test_unconfirmed.py",
    "tests/backend/test_aot.py",
    "tests/program/test_program.py",
    "tests/test_house.py",
]


@pytest.mark.slow
def test_a_new_operator_passes_at_once(tmp_path):
    checkout.copy(tmp_path)
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")} | {"PYTHONPATH": str(tmp_path)}
    release.run(sys.executable, "tests/new_op.py", "square", cwd=tmp_path, env=env)
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(tmp_path / "tests" / "helpers")])}  # where pytest looks for plugins
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "of_one_operator", "--operator", "square"]
    command += ["-m", "not gpu and not slow", *CHECKED]  # the second tier has the cases of other operators itself
    done = subprocess.run(command, cwd=tmp_path, env=env | path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
    linted = subprocess.run([sys.executable, "-m", "ruff", "check", "."], cwd=tmp_path, capture_output=True, text=True)
    assert linted.returncode == 0 or "No module named ruff" in linted.stderr, linted.stdout


@pytest.mark.parametrize("name", ["", "Square", "a-b", "1a", "a__b", "_a", "softcap", "linear"])
def test_a_wrong_name_changes_nothing(name, capsys):
    before = {path: (new_op.ROOT / path).stat().st_mtime_ns for path in checkout.files()}
    assert new_op.main([name]) == 2
    assert "new_op: name must be" in capsys.readouterr().err
    assert new_op.main([]) == 2 and "python tests/new_op.py square" in capsys.readouterr().out
    assert {path: (new_op.ROOT / path).stat().st_mtime_ns for path in checkout.files()} == before
