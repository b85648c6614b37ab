"""Import paths of modules that have moved: the old ones lead to the same modules, and say where these are now."""

import importlib
import inspect
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import funcops
from funcops.contract.moved import GONE, MOVED, new_path

ROOT = Path(__file__).resolve().parents[2]
RANKS = [
    f"funcops.dist.{'.'.join(path.relative_to(ROOT / 'funcops' / 'distributed').with_suffix('').parts)}"
    for path in sorted((ROOT / "funcops" / "distributed").rglob("*.py"))
    if path.stem != "__init__"
]


@pytest.mark.parametrize("old", [*MOVED, *RANKS])
def test_an_old_path_is_the_module_at_the_new_one(old, monkeypatch):
    monkeypatch.delitem(sys.modules, old, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(old.rpartition(".")[0])
    above, _, last = old.rpartition(".")
    own, module = getattr(sys.modules[above], last, None), importlib.import_module(new_path(old))
    spec, rooms = (
        module.__spec__,
        [(room, dict(vars(room))) for room in (funcops, funcops.dist, funcops.distributed, funcops.models)],
    )
    with pytest.warns(DeprecationWarning, match=f"^{old} is now {new_path(old)}; the old path goes in version 0.4$"):
        assert importlib.import_module(old) is module
    assert module.__spec__ is spec and module.__name__ == new_path(old)
    for room, names in rooms:  # an import binds the last name in the module above it: none of the public face's
        assert all(getattr(room, name) is value for name, value in names.items())
    if old in MOVED:
        assert getattr(sys.modules[above], last) is (own if inspect.isfunction(own) else module)


@pytest.mark.parametrize("name", ["funcops.dist.no_such", "funcops.no_such", "funcops.opp"])
def test_a_path_that_never_was_is_not_found(name):
    with pytest.raises(ModuleNotFoundError, match=name):
        importlib.import_module(name)


@pytest.mark.parametrize("name", GONE)
def test_a_removed_name_says_where_it_went(name):
    with pytest.raises(ModuleNotFoundError, match="python -m benchmarks"):
        importlib.import_module(name)


@pytest.mark.slow
def test_the_benchmarks_are_a_command_of_the_checkout():
    for name, said in (("funcops.bench", "python -m benchmarks"), ("benchmarks", "usage: python -m benchmarks")):
        run = subprocess.run([sys.executable, "-m", name, "--help"], cwd=ROOT, capture_output=True, text=True)
        assert (run.returncode == 0) == (name == "benchmarks") and said in run.stdout + run.stderr
