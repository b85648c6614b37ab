"""A drawn part of the tests.

`-p drawn_part --part 10 --seed TEXT` runs one of ten, chosen by each test's name and the seed. `--seconds 300` in place of `--part`
makes parts that take at most so many seconds of one core each, by the table of durations, and runs the one that the seed draws: so
it takes as long whatever is drawn, and a test of a minute has its turn as often as one of a second.

`python tests/helpers/drawn_part.py REPORT...` writes the table from reports of pytest (`--junitxml`). Of a function it has the mean
of its cases, if that is at least as much as a test takes that it does not have; functions that no report has keep their row.
"""

import csv
import hashlib
import heapq
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

TABLE = Path(__file__).resolve().with_name("durations.csv")
CHEAP = 0.2  # seconds of a test whose function the table does not have


def pytest_addoption(parser):
    parser.addoption("--part", type=int, default=1, help="run one of so many tests")
    parser.addoption("--seconds", type=float, default=0.0, help="run as many tests as take so long, by the table of durations")
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


def pytest_collection_modifyitems(config, items):
    part, seed, seconds = (config.getoption(name) for name in ("--part", "--seed", "--seconds"))
    names = [item.nodeid for item in items]
    if seconds:
        every = parts(names, seconds, durations())
        mine = set(every[drawn(seed) % len(every)])
    else:
        mine = {name for name in names if chosen(name, part, seed)}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in mine])
    items[:] = [item for item in items if item.nodeid in mine]


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
    found |= {function: sum(seconds) / len(seconds) for function, seconds in cases.items()}
    with open(table, "w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["function", "seconds"])
        rows.writerows([function, f"{seconds:.1f}"] for function, seconds in sorted(found.items()) if seconds >= CHEAP)


if __name__ == "__main__":
    main([Path(one) for one in sys.argv[1:]])
