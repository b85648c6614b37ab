"""Parts of the second tier by the time that they take."""

import random
import types

import drawn_part
import pytest

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a.test_b" name="test_c[1]" time="1.0"/><testcase classname="tests.a.test_b" name="test_c[2]" time="4.0"/>
<testcase classname="tests.a.test_b" name="test_d" time="0.1"/>
<testcase classname="tests.a.test_b" name="test_e" time="9.0"><skipped/></testcase>
MANY
</testsuite></testsuites>"""


@pytest.mark.parametrize("seed", range(5))
def test_every_test_is_in_one_part_and_parts_take_the_same_time(seed):
    rng = random.Random(seed)
    known = {f"tests/test_a.py::test_{i}": rng.choice((0.3, 1.0, 12.0)) for i in range(90)}
    names = [f"{function}[{j}]" for function in known for j in range(rng.randint(0, 9))]
    names += [f"tests/test_b.py::test_{i}" for i in range(rng.randint(0, 200))]
    rng.shuffle(names)
    found = drawn_part.parts(names, 60.0, known)
    assert sorted(name for part in found for name in part) == sorted(names)
    loads = [sum(known.get(name.partition("[")[0], drawn_part.CHEAP) for name in part) for part in found]
    assert max(loads) - min(loads) <= 12.0 and sum(loads) / len(loads) <= 60.0 < sum(loads) / max(1, len(loads) - 1)
    assert drawn_part.parts(sorted(names), 60.0, known) == found


def test_parts_of_nothing_and_of_less_than_a_part():
    assert drawn_part.parts([], 60.0, {}) == [[]]
    assert drawn_part.parts(["a", "b"], 60.0, {}) == [["a", "b"]]


@pytest.mark.parametrize(("cost", "cases", "left"), [(0.5, 9, 4), (0.5, 4, 4), (3.0, 5, 1), (9.0, 1, 1), (None, 500, 500)])
def test_a_dear_function_has_so_many_seconds_of_the_first_tier(cost, cases, left):
    names = [f"tests/test_a.py::test_a[{i}]" for i in range(cases)]
    known = {} if cost is None else {"tests/test_a.py::test_a": cost}
    out = drawn_part.dear([*names, "tests/test_b.py::test_b"], known, 2.0, 9.0)
    kept = [i for i, name in enumerate(names) if name not in out]
    assert len(kept) == left and "tests/test_b.py::test_b" not in out
    assert max(b - a for a, b in zip(kept, [*kept[1:], cases], strict=True)) <= -(-cases // left), "evenly"


@pytest.mark.parametrize(("costs", "left"), [((1.0, 2.0, 4.0), "ab"), ((9.0, 8.0), "b"), ((0.0, 0.0, 5.0), "abc"), ((6.0,), "a")])
def test_a_dear_file_has_its_cheapest_functions_in_the_first_tier(costs, left):
    known = {f"tests/test_a.py::test_{name}": cost for name, cost in zip("abc", costs, strict=False) if cost}
    names = [f"tests/test_a.py::test_{name}" for name, _ in zip("abc", costs, strict=False)]
    out = drawn_part.dear([*names, "tests/test_b.py::test_b"], known, 9.0, 5.0)
    assert {name[-1] for name in names if name not in out} == {*left} and "tests/test_b.py::test_b" not in out


def test_functions_of_a_dear_file_have_fewer_cases_before_one_is_left_out():
    names = [f"tests/test_a.py::test_{name}[{i}]" for name in "abc" for i in range(8)]
    known = {f"tests/test_a.py::test_{name}": cost for name, cost in zip("abc", (0.1, 0.5, 2.0), strict=True)}
    left = lambda of_a_file: [  # noqa: E731
        sum(f"_{name}[" in one for one in {*names} - drawn_part.dear(names, known, 2.0, of_a_file)) for name in "abc"
    ]
    assert left(9.0) == [8, 4, 1] and left(4.0) == [8, 2, 1] and left(3.2) == [5, 1, 1] and left(1.0) == [1, 1, 0]


@pytest.mark.parametrize("seed", "abcdef")
def test_half_of_the_time_goes_to_what_changed_lately(seed):
    """If nothing or little did, the rest has more of it; every slow test has its turn by some seed."""
    known = {f"tests/test_{file}.py::test_a": 10.0 for file in "abc"}
    names = [f"{function}[{i}]" for function in known for i in range(20)]

    def of(file, changed):
        drawn = drawn_part.slow_part(names, 60.0, seed, known, changed)
        return len({name for name in drawn if name.startswith(f"tests/test_{file}.py")}), len(drawn)

    assert of("a", {"tests/test_a.py"})[0] >= 3 and of("a", {"tests/test_a.py"})[1] <= 6
    assert of("a", set())[1] == 6 == of("a", {"tests/test_z.py"})[1]
    seen = set().union(*(drawn_part.slow_part(names, 60.0, str(i), known, {"tests/test_a.py"}) for i in range(200)))
    assert seen == set(names)


def test_a_part_of_the_files_is_collected():
    """Each is drawn by its name; a file without tests is always read."""
    options = {"--part": 3, "--seed": "a"}
    config, root = types.SimpleNamespace(getoption=options.get), drawn_part.ROOT
    out = [drawn_part.pytest_ignore_collect(root / f"tests/test_{i}.py", config) for i in range(300)]
    assert 150 < out.count(True) < 250 and out.count(None) == 300 - out.count(True)
    assert drawn_part.pytest_ignore_collect(root / "tests/conftest.py", config) is None
    options["--part"] = 1
    assert {drawn_part.pytest_ignore_collect(root / f"tests/test_{i}.py", config) for i in range(300)} == {None}


def test_what_changed_lately_is_read_from_history():
    changed = drawn_part.changed_lately("100 years")
    assert changed == set() or "tests/test_tiny.py" in changed


def test_a_table_is_made_of_reports_and_keeps_what_they_lack(tmp_path):
    report, table = tmp_path / "report.xml", tmp_path / "durations.csv"
    many = [f'<testcase classname="tests.a.test_b" name="test_g[{i}]" time="0.02"/>' for i in range(100)]
    report.write_text(REPORT.replace("MANY", "\n".join(many)))
    table.write_text("function,seconds\ntests/a/test_b.py::test_c,7.0\ntests/a/test_b.py::test_f,3.0\n")
    drawn_part.main([report], table)
    file = "tests/a/test_b.py::test_"
    assert drawn_part.durations(table) == {f"{file}c": 2.5, f"{file}f": 3.0, f"{file}g": 0.02}


def test_the_table_knows_tests_that_exist():
    """A function that was renamed counts as a cheap one; its old row would stay."""
    root = drawn_part.TABLE.parents[2]
    texts = {}
    for function in drawn_part.durations():
        file, _, name = function.partition("::")
        text = texts.setdefault(file, (root / file).read_text())
        assert f"def {name}(" in text, function
