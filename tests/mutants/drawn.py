"""Draws faults over the whole package by a seed, and says which of them the first tier notices.

    python tests/mutants/drawn.py --drawn 300 --seed 0

One run of the first tier under coverage, kept in `--measured`, tells which tests run which line. A fault then meets the tests that
run its lines, the cheapest of each function first, then tests of its function and of its file, until one fails or `--cpu` seconds
of work are done: in a fork of a process that has collected all tests (`forked.py`), and where that is not enough, in a process of
its own which imports the planted file. What survives is written to `--out`; with a reason, or with the test that now notices it,
it belongs into `drawn.toml` beside the other faults, and one that is there as equivalent is not run again. Needs the package
coverage.
"""

from __future__ import annotations

import argparse
import ast
import collections
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mutants import draw, run

FIRST_TIER = ["-q", "-p", "no:cacheprovider", "--ignore", "tests/opinfo", "-m", "not gpu and not slow"]
MOST, FILES = 600, 12  # tests a fault, and their files where a process collects them
# What these read is made by imports, or is the source itself: no test's lines tell that.
WHOLE = ("tests/contract/test_promised_defaults.py", "tests/kernels/test_tiles.py", "tests/test_house.py::test_only_these")
SOURCE = ("strict=True", "frozen=True")
FORK, PROCESS = "fork", "process"


class Measured:
    """Which tests run a line, and how long each takes."""

    def __init__(self, path: str) -> None:
        from coverage import CoverageData

        self.data = CoverageData(f"{path}.lines")
        self.data.read()
        self.seconds: dict[str, float] = json.loads(Path(f"{path}.seconds").read_text())
        self.files = {re.sub(r"^.*/(?=funcops/)", "", name): name for name in self.data.measured_files()}
        self.lines: dict[str, dict[int, list[str]]] = {}

    def tests(self, file: str, lines: Iterable[int]) -> set[str]:
        if file not in self.lines:
            name = self.files.get(file)
            self.lines[file] = self.data.contexts_by_lineno(name) if name else {}
        return {test for line in lines for test in self.lines[file].get(line, ()) if test in self.seconds}

    def cheapest(self, tests: set[str]) -> list[str]:
        """The cheapest case of every test function, then the next of each."""
        cases: dict[str, list[str]] = {}
        for test in sorted(tests, key=lambda test: (self.seconds[test], test)):
            cases.setdefault(test.partition("[")[0], []).append(test)
        return [test for _, _, test in sorted((i, self.seconds[t], t) for of in cases.values() for i, t in enumerate(of))]

    def chosen(self, fault: draw.Drawn, function: tuple[int, int]) -> list[str]:
        """The tests of the fault's lines first, then of its function, then of its file; before them, of a line that an import runs,
        which is in no function or which no test runs, and of one that a test reads, the tests of all modules."""
        file = fault.file
        self.tests(file, ())
        steps = [range(fault.line, fault.last + 1), range(function[0], function[1] + 1), self.lines[file]]
        found = dict[str, None]()
        line = "".join((run.ROOT / file).read_text().splitlines()[fault.line - 1 : fault.last])
        if function[0] == fault.line or not self.tests(file, steps[0]) or any(text in line for text in SOURCE):
            found.update(dict.fromkeys(test for test in self.seconds if test.startswith(WHOLE)))
        for lines in steps:
            found.update(dict.fromkeys(self.cheapest(self.tests(file, lines))))
        return list(found)[:MOST]


def around(text: str, line: int) -> tuple[int, int]:
    """The lines of the innermost function or class around one."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    found = [(n.lineno, n.end_lineno or n.lineno) for n in ast.walk(ast.parse(text)) if isinstance(n, kinds)]
    return max((one for one in found if one[0] <= line <= one[1]), default=(line, line))


def measure(tree: run.Tree, out: str) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "mutants.forked", *FIRST_TIER]
    code = subprocess.run(command, cwd=tree.folder, env=environment(tree) | {"MEASURE": str(Path(out).resolve())}).returncode
    if code:
        raise SystemExit(f"drawn: the first tier must pass without a fault, got exit code {code}")


def environment(tree: run.Tree) -> dict[str, str]:
    path = os.pathsep.join([str(tree.folder), str(tree.folder / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return tree.env | {"PYTHONPATH": path}


def in_forks(tree: run.Tree, tasks: Sequence[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """The outcome of each fault, as they end."""
    path = tree.folder / "faults.jsonl"
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    answers = Path(f"{path}.out")
    answers.write_text("")
    command = [sys.executable, "-m", "pytest", "-p", "mutants.forked", *FIRST_TIER]
    silent, env = subprocess.DEVNULL, environment(tree) | {"FAULTS": str(path)}
    with subprocess.Popen(command, cwd=tree.folder, env=env, stdout=silent, stderr=silent) as process, open(answers) as said:
        rest, count = "", 0
        while True:
            ended = process.poll() is not None
            *lines, rest = (rest + said.read()).split("\n")
            yield from map(json.loads, lines)
            count += len(lines)
            if ended and not lines:
                break
            if not lines:
                time.sleep(0.5)
    if count < len(tasks):
        raise SystemExit(f"drawn: pytest must judge {len(tasks)} faults in forks, got {count}, and exit code {process.returncode}")


def in_a_process(tree: run.Tree, fault: draw.Drawn, tests: Sequence[str], cpu: float, seconds: dict[str, float]) -> dict[str, Any]:
    """The same in a fresh process that imports the planted file, with the tests that fit into the allowed work."""
    chosen: list[str] = []
    for test in tests:
        with_it = [*chosen, test]
        if sum(seconds[one] for one in with_it) <= cpu and len({one.partition("::")[0] for one in with_it}) <= FILES:
            chosen = with_it
    start, path = time.monotonic(), tree.folder / fault.file
    text = path.read_text()
    try:
        tree.write(path, fault.text)
        failed = failing(tree, chosen)
        tree.write(path, text)
        while failed in chosen and failing(tree, [failed]):  # it fails by itself, without a fault too
            chosen.remove(failed)
            tree.write(path, fault.text)
            failed = failing(tree, chosen)
            tree.write(path, text)
    finally:
        tree.write(path, text)
    answer = {"outcome": "failed" if failed else "passed", "test": failed, "ran": len(chosen)}
    return answer | {"seconds": time.monotonic() - start}


def failing(tree: run.Tree, tests: Sequence[str]) -> str:
    """The first test that fails in a process of its own, or how the process ended; "" if all pass."""
    chosen = list(tests)
    while chosen:
        command = [sys.executable, "-m", "pytest", "-x", "--tb=no", *FIRST_TIER, *chosen]
        try:
            ran = subprocess.run(command, cwd=tree.folder, env=environment(tree), capture_output=True, text=True, timeout=600)
        except subprocess.TimeoutExpired:
            return "no end"
        absent = set(re.findall(r"^ERROR: not found: .*?(tests/.*)$", ran.stdout + ran.stderr, re.M)) & set(chosen)
        if not absent:  # of a fault a test may get another name
            failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - |$)", ran.stdout, re.M)
            return "" if ran.returncode == 0 else failed[1] if failed else f"exit code {ran.returncode}"
        chosen = [test for test in chosen if test not in absent]
    return ""


def known(faults: Sequence[draw.Drawn]) -> dict[int, str]:
    """The reasons of the faults that are listed as equivalent."""
    listed = [one for one in run.load() if one.equivalent]
    found = {}
    for i, fault in enumerate(faults):
        text = (run.ROOT / fault.file).read_text()
        for one in listed:
            if one.file == fault.file and ast.dump(ast.parse(one.planted(text))) == ast.dump(ast.parse(fault.text)):
                found[i] = one.equivalent
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--drawn", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", type=float, default=20, help="seconds of work a fault")
    parser.add_argument("--measured", help="what an earlier run measured of the first tier; made where it is not there")
    parser.add_argument("--out", default="drawn.jsonl", help="where each fault and what became of it is written")
    parser.add_argument("--share", type=float, default=0.95, help="of the faults that are not equivalent which must be noticed")
    parser.add_argument("--again", action="store_true", help="of those in --out run what survived, and leave the rest as it is")
    parser.add_argument("--list", action="store_true", help="print the faults, run nothing")
    args: Any = parser.parse_args(argv)
    faults = draw.draw(run.ROOT, args.drawn, args.seed)
    if args.list:
        print(*faults, sep="\n")
        return 0
    out = Path(args.out)
    answers = {i: {"outcome": "equivalent", "test": why} for i, why in known(faults).items()}
    if args.again:
        before = {one["fault"]: one for one in map(json.loads, out.read_text().splitlines())}
        answers |= {i: before[str(f)] for i, f in enumerate(faults) if str(f) in before and i not in answers}
        answers = {i: one for i, one in answers.items() if one["outcome"] != "passed" or one["how"] == FORK}
    with tempfile.TemporaryDirectory(prefix="drawn-") as folder:
        tree = run.Tree(Path(folder))
        measured = args.measured or str(Path(folder) / "first")
        if not Path(f"{measured}.seconds").exists():
            measure(tree, measured)
        judge(tree, faults, answers, Measured(measured), args.cpu, out)
    return 0 if print_totals(faults, answers) >= args.share else 1


def judge(
    tree: run.Tree, faults: Sequence[draw.Drawn], answers: dict[int, dict[str, Any]], measured: Measured, cpu: float, out: Path
) -> None:
    """Add the outcome of each fault to the answers and, as they end, to a file."""
    texts = {fault.file: (run.ROOT / fault.file).read_text() for fault in faults}
    todo = [i for i in range(len(faults)) if answers.get(i, {}).get("outcome") not in ("failed", "equivalent")]
    tests = {i: measured.chosen(faults[i], around(texts[faults[i].file], faults[i].line)) for i in todo}
    forked = [i for i in todo if i not in answers]
    tasks = [{"index": i, "file": faults[i].file, "text": faults[i].text, "tests": tests[i], "cpu": cpu} for i in forked]
    with open(out, "w") as said:

        def write(i: int, how: str, answer: dict[str, Any]) -> None:
            answers[i] = {"fault": str(faults[i]), "how": how} | answer
            said.write(json.dumps(answers[i]) + "\n")
            said.flush()
            print(f"{answer['outcome'][:10]:10} {how:8} {faults[i]}  {answer['test']}"[:200], flush=True)

        for i, answer in list(answers.items()):
            write(i, "before", answer)
        for answer in in_forks(tree, tasks) if tasks else ():
            write(answer.pop("index"), FORK, answer)
        for i in sorted(todo, key=lambda i: answers.get(i, {}).get("outcome") == "passed"):
            if answers.get(i, {}).get("outcome") != "failed":
                write(i, PROCESS, in_a_process(tree, faults[i], tests[i], cpu, measured.seconds))


def print_totals(faults: Sequence[draw.Drawn], answers: dict[int, dict[str, Any]]) -> float:
    """Print the counts by kind; return the noticed share of faults that are not equivalent."""
    states = {"failed": run.NOTICED, "passed": run.SURVIVED, "equivalent": run.EQUIVALENT}
    kinds: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for i, answer in answers.items():
        kinds[faults[i].kind][states[answer["outcome"]]] += 1
    return run.print_totals(kinds)


if __name__ == "__main__":
    sys.exit(main())
