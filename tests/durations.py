"""How long the tests of the second tier take: `python tests/durations.py REPORT...` writes `tests/durations.csv`.

A report is pytest's `--junitxml`. Of a function the table has the mean of its cases, if that is at least as much as a test takes
that it does not have (`drawn_part.py`); functions that no report has keep their row.
"""

import csv
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "helpers"))

import drawn_part


def seconds_of(report):
    """The seconds of each case in a report, by test function."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is None:
            module, name = case.get("classname", "").replace(".", "/"), case.get("name", "").partition("[")[0]
            found.setdefault(f"{module}.py::{name}", []).append(float(case.get("time", "0")))
    return found


def main(reports, table=drawn_part.TABLE):
    found = drawn_part.durations(table) if table.exists() else {}
    cases = {}
    for report in reports:
        for function, seconds in seconds_of(report).items():
            cases.setdefault(function, []).extend(seconds)
    found |= {function: sum(seconds) / len(seconds) for function, seconds in cases.items()}
    with open(table, "w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["function", "seconds"])
        rows.writerows([function, f"{seconds:.1f}"] for function, seconds in sorted(found.items()) if seconds >= drawn_part.CHEAP)


if __name__ == "__main__":
    main([Path(one) for one in sys.argv[1:]])
