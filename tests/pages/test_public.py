"""The public names: every name that a page uses can be imported both ways, and a star import shadows nothing of the user's."""

import ast
import importlib
import re
import types
from pathlib import Path

import pytest

import funcops

ROOT = Path(__file__).resolve().parents[2]
TEXT = "\n".join(path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))))
DOTTED = sorted(set(re.findall(r"\bfuncops(?:\.[a-z_A-Z]\w*)+", TEXT)) - {"funcops.md"})
IMPORTED = sorted(
    (module, name.partition(" as ")[0].strip())
    for module, names in re.findall(r"^from (funcops[\w.]*) import \(?([^()\n]+|[^()]+)\)?$", TEXT, re.M)
    for name in names.split(",")
    if name.strip()
)


def test_the_pages_name_something():
    assert len(DOTTED) > 10 and len(IMPORTED) > 30


def test_the_page_of_operators_has_a_row_for_every_op():
    table = (ROOT / "docs" / "operators.md").read_text()
    named = set(re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))))
    assert named == {name for name in dir(funcops) if isinstance(getattr(funcops, name), funcops.Op)}


@pytest.mark.parametrize("dotted", DOTTED)
def test_a_dotted_name_is_a_module_or_an_attribute_of_one(dotted):
    home, _, name = dotted.rpartition(".")
    try:
        importlib.import_module(dotted)
    except ModuleNotFoundError:
        assert hasattr(importlib.import_module(home), name)


@pytest.mark.parametrize(("module", "name"), sorted(set(IMPORTED)))
def test_an_imported_name_exists(module, name):
    assert hasattr(importlib.import_module(module), name)


@pytest.mark.parametrize("name", ["nn", "graphs", "optim", "schedule", "precision", "testing", "checkpoint", "random", "trees"])
def test_a_room_imports_both_ways(name):
    module = importlib.import_module(f"funcops.{name}")
    assert getattr(funcops, name) is module
    public = [n for n in dir(module) if n[0] != "_"]
    for inner in ("adapters.nn", "adapters.graphs"):
        if inner.endswith(f".{name}"):
            home = importlib.import_module(f"funcops.{inner}")
            assert all(getattr(home, n) is getattr(module, n) for n in public)
    assert public


def test_a_star_import_gives_every_name_that_completion_lists():
    """The modules among them are the rooms alone: what the package imports for itself is not the user's."""
    scope = {}
    exec("from funcops import *", scope)
    del scope["__builtins__"]
    assert {*scope, "__version__"} == set(dir(funcops)) and len(set(funcops.__all__)) == len(funcops.__all__)
    assert all(value is getattr(funcops, name) for name, value in scope.items())
    modules = {name: value.__name__ for name, value in scope.items() if isinstance(value, types.ModuleType)}
    assert set(modules) == set(funcops._ROOMS) and all(home.startswith("funcops.") for home in modules.values())
    assert scope["random"].key(0).shape == (2,)


STARRED = [
    *("nn", "graphs", "optim", "low_precision", "logs", "lora", "precision", "checkpoint", "schedule", "random", "testing", "dist"),
    *("models", "library.formats", "engine.residuals", "contract", "adapters.pipelining"),
]


@pytest.mark.parametrize("room", STARRED)
def test_a_star_import_of_a_room_brings_its_public_names_alone(room):
    scope = {"torch": "mine", "peft": "mine", "Any": "mine", "report": "mine"}
    exec(f"from funcops.{room} import *", scope)
    module = importlib.import_module(f"funcops.{room}")
    assert scope["torch"] == scope["peft"] == scope["Any"] == "mine"
    brought = {name: value for name, value in scope.items() if value != "mine" and not name.startswith("__")}
    assert brought and all(getattr(module, name) is value for name, value in brought.items())
    homes = {getattr(value, "__module__", None) or "funcops." for value in brought.values()}
    assert not any(isinstance(value, types.ModuleType) for value in brought.values())
    assert all(home.startswith(("funcops.", "builtins", "torch")) for home in homes), homes


def test_the_face_has_a_name_for_each_concept():
    """An operator, its config, its functions, and their arguments and results."""
    rooms = {name for name, value in vars(funcops).items() if isinstance(value, types.ModuleType)}
    offered = {name for name in (*vars(funcops), *funcops._LATER) if name[0] != "_"} - rooms
    assert set(funcops.__all__) == offered | set(funcops._ROOMS)
    for op in (value for value in vars(funcops).values() if isinstance(value, funcops.Op)):
        assert op.name in funcops.__all__
        for part in ("init", "fwd", "bwd", "dgrad", "wgrad"):
            name = f"{op.name}_{part}"
            assert getattr(funcops, name).__name__ == name and name in funcops.__all__
        assert getattr(funcops, op.config.__name__) is op.config and op.config.__name__ in funcops.__all__
        home = importlib.import_module(type(op).__module__ if op.fwd is None else op.fwd.__module__)
        assert all(getattr(funcops, name) is getattr(home, name) for name in home.__all__)


def test_help_lists_every_name_by_group():
    """The text gives a pattern for an operator's functions; params, residuals and pendings come with their operator."""
    words = set(re.findall(r"\w+", funcops.__doc__))
    parts = ("Config", "Params", "Residuals", "Pending")
    ops = {name for name in funcops.__all__ if isinstance(getattr(funcops, name), funcops.Op)}
    functions = {f"{name}_{part}" for name in ops for part in ("init", "fwd", "bwd", "dgrad", "wgrad")}
    others = {name for name in funcops.__all__ if name not in functions and (not name.endswith(parts) or name == "TorchConfig")}
    assert not sorted((others - {"Op"}) - words), "names that help(funcops) does not list"
    assert max(map(len, funcops.__doc__.splitlines())) <= 110


@pytest.mark.slow
def test_every_error_of_the_package_can_be_caught_by_its_name():
    """Files are read, not imported: some need Triton."""
    classes = set()
    for path in (ROOT / "funcops").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name[0] != "_":
                module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                if any(re.search(r"(Error|Exception|Warning|Exit)$", ast.unparse(base)) for base in node.bases):
                    classes.add((module, node.name))
    assert len(classes) >= 8
    for module, name in classes:
        assert getattr(funcops, name, None) is getattr(importlib.import_module(module), name), name


def test_the_version_equals_the_metadata():
    assert re.fullmatch(r"\d+\.\d+\.\d+", funcops.__version__)
