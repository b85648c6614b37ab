"""The rings by deletion: a copy of the engine alone, and of engine and library, in a process that cannot see the rest."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FACES = ("__init__.py", "trees.py", "random.py", "fused.py", "contract.py")
COPIED = {"engine": ("engine", "testing"), "engine and library": ("engine", "library", "testing", *FACES)}
# An editable install would find what the copy lacks; its finder says so in its class's name or its module's.
ALONE = """
import sys
sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in f"{type(one)} {one}".lower()]
sys.path[:] = [path for path in sys.path if not path.startswith(CHECKOUT) or "site-packages" in path]
sys.path.insert(0, COPY)
import importlib.util
import funcops
assert funcops.__file__.startswith(COPY), funcops.__file__
there = [name for name in ROOMS if importlib.util.find_spec("funcops." + name)]
assert not there, there
"""


def alone(tmp_path, rooms, code, *arguments):
    """Run code, or pytest with arguments, where only these folders of the package are."""
    package = tmp_path / "funcops"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for name in rooms:
        if (ROOT / "funcops" / name).is_file():
            shutil.copy(ROOT / "funcops" / name, package / name)
        else:
            shutil.copytree(ROOT / "funcops" / name, package / name, ignore=shutil.ignore_patterns("__pycache__"))
    every = {path.stem for path in (ROOT / "funcops").iterdir() if path.name not in ("__pycache__", "__init__.py", "py.typed")}
    names = {"CHECKOUT": str(ROOT), "COPY": str(tmp_path), "ROOMS": sorted(every - {Path(name).stem for name in rooms})}
    source = "".join(f"{name} = {value!r}\n" for name, value in names.items()) + ALONE + code
    done = subprocess.run([sys.executable, "-c", source, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def test_the_engine_runs_alone(tmp_path):
    """With two operators of a user's, and under the laws, which `funcops.testing` takes from the engine alone."""
    shutil.copytree(ROOT / "tests" / "engine" / "alone", tmp_path / "alone", ignore=shutil.ignore_patterns("__pycache__"))
    code = "import pytest\nsys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-p', 'no:logging', sys.argv[1]]))"
    said = alone(tmp_path, COPIED["engine"], code, str(tmp_path / "alone"))
    assert "94 passed" in said, said


def test_the_engine_alone_names_the_codecs_that_it_has(tmp_path):
    code = """
from funcops.engine.residuals.policy import Compress
try:
    Compress("fp8")
except ValueError as error:
    print(error)
"""
    assert alone(tmp_path, COPIED["engine"], code) == "Compress: codec must be one of bf16, got 'fp8'\n"


LAWS = """
import importlib, torch
from funcops.testing import LAWS
sys.path.insert(0, COPY + "/helpers")
refused, ran = [], 0
for path in sorted(importlib.import_module("pathlib").Path(COPY, "cases").glob("*.py")):
    spec = importlib.util.spec_from_file_location("cases_" + path.stem, path)
    cases = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(cases)
    except ModuleNotFoundError as error:
        refused.append(f"{path.stem}: {error.name}")
        continue
    case = cases.CASES[0]
    for law in ("right", "split", "mirror", "pure"):
        if law not in case.exempt:
            LAWS[law](case, case.dtypes[0])
            ran += 1
print(ran, refused)
"""


def test_engine_and_library_run_alone(tmp_path):
    """Each op under four laws over its first case, behind the package's own `__init__`, which imports extensions at first use."""
    for name in ("cases", "helpers"):
        shutil.copytree(ROOT / "tests" / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    ran, refused = alone(tmp_path, COPIED["engine and library"], LAWS).split(" ", 1)
    assert int(ran) > 170 and refused == "[]\n"
