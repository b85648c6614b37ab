"""A drawn part of the tests.

`-p drawn_part --part 20 --seed TEXT` runs the tests of one file of twenty, chosen by its name and the seed: the other files are not
even imported.

`-p drawn_part --slow-seconds 300 --seed TEXT` runs, of the tests marked slow, as many as take so many seconds of one core by the
table of durations, beside all the others that are chosen. Half of the time goes to files that changed in the last two days, where a
fault is likelier. Either half makes parts that take as long, of which the seed draws one: so a run takes as long whatever is drawn,
and a test of a minute has its turn as often as one of a second.

`python tests/helpers/drawn_part.py REPORT...` writes the table from reports of pytest (`--junitxml`). Of a function it has the mean
of its cases, if that is at least as much as a test takes that it does not have, or if its cases together take longer; functions
that no report has keep their row.
"""

import csv
import hashlib
import heapq
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).resolve().with_name("durations.csv")
CHEAP = 0.2  # seconds of a test whose function the table does not have
MANY = 0.3  # seconds of all cases of a function, each cheap, that the table has all the same


def pytest_addoption(parser):
    parser.addoption("--part", type=int, default=1, help="run the tests of one of so many files")
    parser.addoption("--slow-seconds", type=float, default=0.0, help="of the slow tests, as many as take so long by the table")
    parser.addoption("--seed", default="", help="which")


def drawn(text):
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def chosen(name, part, seed):
    """The choice depends only on the test's name and the seed, so it is the same in every process."""
    return drawn(f"{seed} {name}") % part == 0


def durations(table=TABLE):
    """The seconds of a case, by test function."""
    with open(table, newline="") as file:
        return {row["function"]: float(row["seconds"]) for row in csv.DictReader(file)}


def parts(names, seconds, known):
    """The names in as few parts as take at most about `seconds` each: the longest first, each into the part with least so far."""
    costs = {name: known.get(name.partition("[")[0], CHEAP) for name in names}
    found = [(0.0, i, []) for i in range(max(1, -int(-sum(costs.values()) // seconds)))]
    for name in sorted(names, key=lambda name: (-costs[name], name)):
        cost, i, part = found[0]
        part.append(name)
        heapq.heapreplace(found, (cost + costs[name], i, part))
    return [part for _, _, part in sorted(found, key=lambda one: one[1])]


def dear(names, known, seconds, of_a_file):
    """The cases that are left out so that no function takes more than `seconds`, and no file more than `of_a_file`, by the table.
    Cases that stay lie evenly among them. In a file that takes longer every function has fewer cases, down to one; if that is too
    much still, its dearest functions are left out."""
    files = {}
    for name in names:
        function = name.partition("[")[0]
        files.setdefault(name.partition("::")[0], {}).setdefault(function, []).append(name)
    out = set()
    for functions in files.values():
        for part in (1, 2, 4, 8, 1000):
            counts = {function: _count(cases, known.get(function), seconds / part) for function, cases in functions.items()}
            costs = sorted([(known.get(function, 0.0) * count, function) for function, count in counts.items()])
            if sum(cost for cost, _ in costs) <= of_a_file:
                break
        spent = 0.0
        for cost, function in costs:
            cases, count = functions[function], counts[function]
            fits = not spent or spent + cost <= of_a_file
            out |= set(cases) - ({cases[i * len(cases) // count] for i in range(count)} if fits else set())
            spent += cost
    return out


def _count(cases, each, seconds):
    return min(len(cases), max(1, int(seconds / each))) if each else len(cases)


def changed_lately(since="2 days"):
    """The files of tests that the last commits changed; an empty set without a history."""
    command = ["git", "log", f"--since={since} ago", "--name-only", "--format=", "--", "tests"]
    try:
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return set()
    return set(said.stdout.split())


def slow_part(names, seconds, seed, known, changed):
    """The part of the slow tests that the seed draws."""
    young = [name for name in names if name.partition("::")[0] in changed]
    first = _one_of(parts(young, seconds / 2, known), seed)
    left = sorted(set(names) - set(first))
    return {*first, *_one_of(parts(left, seconds / 2 if first else seconds, known), seed)}


def _one_of(found, seed):
    return found[drawn(seed) % len(found)]


def pytest_ignore_collect(collection_path, config):
    part, seed = config.getoption("--part"), config.getoption("--seed")
    if part > 1 and collection_path.name.startswith("test_"):
        return None if chosen(str(collection_path.relative_to(ROOT)), part, seed) else True
    return None


@pytest.hookimpl(trylast=True)  # once every test has its marks, and what `-m` leaves out is gone
def pytest_collection_modifyitems(config, items):
    seconds, seed = config.getoption("--slow-seconds"), config.getoption("--seed")
    slow = [item.nodeid for item in items if item.get_closest_marker("slow")]
    if seconds and slow:
        left_out = set(slow) - slow_part(slow, seconds, seed, durations(), changed_lately())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]


def seconds_of(report):
    """The seconds of each case in a report, by test function."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is None:
            module, name = case.get("classname", "").replace(".", "/"), case.get("name", "").partition("[")[0]
            found.setdefault(f"{module}.py::{name}", []).append(float(case.get("time", "0")))
    return found


def main(reports, table=TABLE):
    found = durations(table) if table.exists() else {}
    cases = {}
    for report in reports:
        for function, seconds in seconds_of(report).items():
            cases.setdefault(function, []).extend(seconds)
    for function, seconds in cases.items():
        found.pop(function, None)
        if (mean := sum(seconds) / len(seconds)) >= CHEAP or sum(seconds) >= MANY:
            found[function] = mean
    with open(table, "w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["function", "seconds"])
        rows.writerows([function, f"{seconds:.2g}"] for function, seconds in sorted(found.items()))


if __name__ == "__main__":
    main([Path(one) for one in sys.argv[1:]])
