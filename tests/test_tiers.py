"""The first tier has a test of every op and law, of every file of the adapters, and of every example.

What a test reaches is read off its code: the names that it, its fixtures and the helpers beside it use, and the strings.
"""

import ast
import fnmatch
import functools
import types
from pathlib import Path

import pytest
from tiers import COLLECTED

import funcops
from funcops.engine.contract.op import Op
from funcops.testing import LAWS

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def first(request):
    """The tests of the first tier."""
    items = request.config.stash[COLLECTED]
    second = set((ROOT / "tests" / "opinfo").rglob("test_*.py"))
    if {item.path for item in items} < set((ROOT / "tests").rglob("test_*.py")) - second:
        pytest.skip("only a part of the tests was collected")
    return [item for item in items if not any(item.get_closest_marker(mark) for mark in ("slow", "gpu"))]


@pytest.mark.slow
def test_every_op_is_held_to_every_law(first):
    held = set()
    for item in first:
        if item.path.name == "test_laws.py" and "case" in getattr(getattr(item, "callspec", None), "params", ()):
            law = item.callspec.params.get("law", item.originalname.removeprefix("test_"))
            case = item.callspec.params["case"]
            held |= {(case.op.name, law)} if law in LAWS else set()
    ops = {value.name for value in vars(funcops).values() if isinstance(value, Op)}
    assert len(ops) >= 24 and held >= {(op, law) for op in ops for law in LAWS}


def reached(function, seen):
    """The values that the function uses, strings included, and those that the helpers in its file use."""
    if id(function) in seen:
        return
    seen.add(id(function))
    codes, modules = [function.__code__], modules_of(function)
    while codes:
        code = codes.pop()
        codes += [value for value in code.co_consts if isinstance(value, types.CodeType)]
        yield from (value for value in code.co_consts if isinstance(value, str))
        for name in code.co_names:
            for value in (function.__globals__.get(name), *(vars(v).get(name) for v in modules)):
                yield from expanded(value, function.__module__, seen)


def modules_of(function):
    return [
        value for value in function.__globals__.values() if isinstance(value, types.ModuleType) and value.__name__[:7] == "funcops"
    ]


def expanded(value, home, seen):
    yield value
    if isinstance(value, functools.partial):
        yield from value.args
    elif isinstance(value, types.FunctionType) and value.__module__ == home:
        yield from reached(value, seen)


def all_reached(items):
    """All that the items' functions, each once, and their fixtures use."""
    seen = set()
    for item in items:
        yield from reached(item.function, seen)
        for definitions in item._fixtureinfo.name2fixturedefs.values():
            for definition in definitions:
                yield from reached(definition.func, seen)


def with_imports(files, root):
    """The files, and files under `root` that they import, directly or not."""
    names = {".".join(path.relative_to(root).with_suffix("").parts): path for path in root.rglob("*.py")}
    found, left = set(), list(files)
    while left:
        path = left.pop()
        if path in found or path.name == "__init__.py":
            continue
        found.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                asked = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                left += [names[name] for name in asked if name in names]
    return found


def missed_adapters(items):
    adapters = ROOT / "funcops" / "adapters"
    modules = {getattr(value, "__module__", None) or getattr(value, "__name__", None) for value in all_reached(items)}
    files = [ROOT / (str(name).replace(".", "/") + ".py") for name in modules if str(name).startswith("funcops.adapters.")]
    every = {path for path in adapters.rglob("*.py") if path.name != "__init__.py"}
    missed = every - with_imports([path for path in files if path.is_file()], ROOT)
    return {str(path.relative_to(adapters)) for path in missed}


@pytest.mark.slow
def test_every_adapter_is_reached(first):
    assert not missed_adapters(first)
    without = [item for item in first if item.path.parent.name != "schedule" and item.path.name != "test_delayed.py"]
    assert {"pipelining/pipeline.py", "autograd/delayed.py"} & missed_adapters(without), "what no test reaches is seen"


@pytest.mark.slow
def test_every_example_is_run(first):
    examples = ROOT / "examples"
    said = {value for value in all_reached(first) if isinstance(value, str)}
    programs = set(examples.glob("*.py"))
    assert programs and {path.name for path in programs} <= said
    every = {path for path in examples.rglob("*.py") if path.name != "__init__.py"}
    assert not every - with_imports(programs, examples)


def test_no_folder_of_tests_is_left_out(request):
    """Pytest's default list of folders to skip has names such as `dist`, which a folder of ours may have: its tests would silently
    not run."""
    patterns = request.config.getini("norecursedirs")
    folders = {
        part
        for file in (ROOT / "tests").rglob("test_*.py")
        for part in file.relative_to(ROOT).parent.parts
        if part != "__pycache__"
    }
    assert {"distributed", "adapters", "graphs"} <= folders
    assert {f: p for f in sorted(folders) for p in patterns if fnmatch.fnmatch(f, p)} == {}
    assert [name for name in (".git", ".venv", ".interpreters") if not any(fnmatch.fnmatch(name, p) for p in patterns)] == []
