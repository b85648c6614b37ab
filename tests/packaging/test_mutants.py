"""The faults of `make mutants` still fit the code, and its runner tells a fault that is noticed from one that is not."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from mutants import draw, drawn, run

ROOT = Path(__file__).resolve().parents[2]
FAULTS = run.load()


@cache
def text(file):
    return (ROOT / file).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("source", sorted({fault.source for fault in FAULTS}))
def test_faults_fit_the_code(source):
    """Each can be planted, is valid Python, and names existing tests."""
    for fault in FAULTS:
        if fault.source == source:
            planted = fault.planted(text(fault.file))
            assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(text(fault.file))), f"{fault} changes nothing"
            assert fault.tests, fault
            options = [i for i, one in enumerate(fault.tests) if one == "-k"]
            names = [one for i, one in enumerate(fault.tests) if i not in options and i - 1 not in options]
            for name in names:
                file, _, test = name.partition("::")
                function = re.escape(test.partition("[")[0])
                assert (ROOT / file).exists() and (not test or re.search(rf"^def {function}\(", text(file), re.M)), (
                    f"{fault}: {name}"
                )


def test_no_fault_is_counted_twice():
    assert [key for key, n in Counter((f.file, f.before, f.after) for f in FAULTS).items() if n > 1] == []


TREE = """A = (1, 2)


def f(x=1):
    for a, b in zip(x, x, strict=True):
        pass
    return a
"""


@pytest.mark.parametrize("line, before", [(1, True), (4, True), (5, True), (6, False), (7, True)])
def test_a_fault_that_an_import_runs_meets_the_tests_of_all_modules(line, before, tmp_path, monkeypatch):
    """And so does one in what such a test reads, and one that no test runs; else the tests of its line come first."""
    (tmp_path / "a.py").write_text(TREE)
    monkeypatch.setattr(run, "ROOT", tmp_path)
    measured, every = object.__new__(drawn.Measured), [f"{name}::test" for name in drawn.WHOLE]
    measured.seconds = dict.fromkeys(["of_5", "of_6", *every], 0.1)
    measured.lines = {"a.py": {5: ["of_5"], 6: ["of_6"]}}
    chosen = measured.chosen(draw.Drawn("a.py", line, line, "constant", "", "", ""), drawn.around(TREE, line))
    assert chosen[:3] == every if before else chosen[0] == "of_6"
    assert set(chosen) >= {"of_5", "of_6"}, "tests of its function or file"


def small(folder, monkeypatch):
    """A checkout with one function and a test of it, for the runner."""
    (folder / "funcops").mkdir(parents=True)
    (folder / "funcops" / "__init__.py").write_text("def twice(x):\n    return x * 2\n")
    right = "def test_twice():\n    assert funcops.twice(2) == 4\n"
    wrong = "def test_wrong():\n    assert funcops.twice(1) == 3\n"
    (folder / "test_it.py").write_text(f"import funcops\n\n\n{right}\n\n{wrong}")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu\n    slow\n")
    monkeypatch.setattr(run, "ROOT", folder)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def fault(after, test="test_twice", **more):
    return run.Fault("core", "funcops/__init__.py", "x * 2", after, (f"test_it.py::{test}",), **more)


@pytest.mark.slow
def test_the_runner_tells_them_apart(tmp_path, monkeypatch, capsys):
    small(tmp_path / "tree", monkeypatch)
    cases = [
        (fault("x * 3"), run.NOTICED),
        (fault("x + 2"), run.SURVIVED),
        (fault("x * 4"), run.NOTICED),  # of the same size, within the second: old byte code would hide it
        (fault("2 * x", equivalent="a product commutes"), run.EQUIVALENT),
        (fault("x * 5", "test_wrong"), run.BROKEN),
    ]
    monkeypatch.setattr(run, "load", lambda: [one for one, _ in cases])
    (tmp_path / "out").mkdir()
    runner = run.Runner(tmp_path / "out", 1, 600)
    try:
        found = {one: state for one, state, _ in run.judge(runner, run.chosen("funcops/*"))}
    finally:
        runner.stop()
    assert found == dict(cases)
    assert (tmp_path / "tree" / "funcops" / "__init__.py").read_text() == "def twice(x):\n    return x * 2\n"
    monkeypatch.setattr(run, "judge", lambda runner, faults, sure: iter([(one, state, 1.0) for one, state in cases]))
    assert run.main(["--jobs", "1", "--share", "0.9"]) == 1
    said = capsys.readouterr().out
    assert "funcops/__init__.py:2: x * 2 -> x * 3" in said and "2 of 4 noticed, 50.0%; 1 equivalent" in said
    assert run.main(["--jobs", "1", "--share", "0.5"]) == 0
    assert run.main(["--list", "--only", "other"]) == 0 and not run.chosen("other")


def test_a_fault_that_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"core.toml: funcops/__init__.py: must occur once, got 2: 'x \* 2'"):
        fault("x").planted("x * 2 + x * 2")


SMALL = '''"""Words: a == b."""
from typing import TYPE_CHECKING
__all__ = ["f"]
__all__ += ["g"]
Alias = dict[str, "Alias"] | None
if TYPE_CHECKING:
    from math import pi
WIDTH = 16

def f(a: int | None, b: "int" = 2) -> int | str:
    """More words, 1 + 1."""
    if a < b and not b:
        raise ValueError(f"{a + 1} words" + str(a - 1))
    total = a
    total += b * 3
    g(total)
    return {True: -a}[a is not None]
'''
CHANGES = {
    "16 -> 17",
    "16 -> 15",
    "2 -> 3",
    "2 -> 1",
    "a < b -> a <= b",
    "a < b -> a >= b",
    "not b -> b",
    "a < b and (not b) -> a < b or not b",
    "b * 3 -> b / 3",
    "3 -> 4",
    "3 -> 2",
    "total += b * 3 -> total -= b * 3",
    "True -> False",
    "-a -> a",
    "a is not None -> a is None",
    "a < b and (not b) -> not (a < b and (not b))",
}


@pytest.mark.slow
def test_every_change_of_a_program_can_be_drawn_and_no_other(tmp_path):
    """Not of its words, its annotations, nor of what a checker of types alone reads; a line stays where it was."""
    (tmp_path / "funcops").mkdir()
    (tmp_path / "funcops" / "small.py").write_text(SMALL)
    drawn = [one for seed in range(150) for one in draw.draw(tmp_path, 7, seed)]
    assert {f"{one.was} -> {one.becomes}" for one in drawn if one.kind != "dropped"} == CHANGES
    assert {one.was.partition("(")[0] for one in drawn if one.kind == "dropped"} == {"raise ValueError", "total += b * 3", "g"}
    for one in drawn:
        assert ast.dump(ast.parse(one.text)) != ast.dump(ast.parse(SMALL)) and one.text.count("\n") == SMALL.count("\n")
        changed = [i for i, (a, b) in enumerate(zip(SMALL.split("\n"), one.text.split("\n"), strict=True), 1) if a != b]
        assert len(changed) == 1 and one.line <= changed[0] <= one.last
    assert draw.draw(tmp_path, 7, 3) == draw.draw(tmp_path, 7, 3) != draw.draw(tmp_path, 7, 4)
    with pytest.raises(ValueError, match="draw: funcops must have 99 lines that can be changed, got 7"):
        draw.draw(tmp_path, 99, 0)
