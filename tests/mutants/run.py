"""Plants faults in the library, one at a time, and says which of them the tests notice.

    python tests/mutants/run.py                          # all of tests/mutants/*.toml
    python tests/mutants/run.py --only 'funcops/optim/*' # or the name of a file of faults: --only core

A fault is an exact piece of a file's text, what stands there instead, and the tests that should notice:

    [[fault]]
    file = "benchmarks/measure.py"
    before = '''(time.perf_counter() - start) / calls'''    # must occur once
    after = '''(time.perf_counter() - start)'''
    tests = ["tests/bench/test_measure.py"]
    why = "not divided by calls"                            # optional
    equivalent = "..."                                      # optional: why no test can notice; it is not run

Each worker has a copy of the tree in a temporary folder, from which funcops is imported; the checkout is never written to. The
tests must pass without the fault. One that then fails, or does not end in time, has noticed it.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import fnmatch
import itertools
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from helpers import checkout

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings this one
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NO_TESTS = 5  # pytest's exit code where none was chosen
NOTICED, SURVIVED, EQUIVALENT, BROKEN = "noticed", "SURVIVED", "equivalent", "TESTS FAIL"


class Fault(NamedTuple):
    source: str  # the file of faults, without its ending
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    why: str = ""
    equivalent: str = ""

    @property
    def area(self) -> str:
        """The folder, or for a file at the top of the package its name."""
        return "/".join(Path(self.file).with_suffix("").parts[:2])

    def planted(self, text: str) -> str:
        """The file's text with the fault in it. Raises `ValueError` unless `before` occurs once."""
        if text.count(self.before) != 1:
            raise ValueError(f"{self.source}.toml: {self.file}: must occur once, got {text.count(self.before)}: {self.before!r}")
        return text.replace(self.before, self.after)

    def __str__(self) -> str:
        line = (ROOT / self.file).read_text().partition(self.before)[0].count("\n") + 1
        what = self.why or f"{' '.join(self.before.split())[:60]} -> {' '.join(self.after.split())[:60]}"
        return f"{self.file}:{line}: {what}"


def load(folder: Path = HERE) -> list[Fault]:
    """The faults of all files in the folder. Raises `TypeError` for an unknown key or a missing one."""
    found = []
    for path in sorted(folder.glob("*.toml")):
        for one in tomllib.loads(path.read_text())["fault"]:
            found.append(Fault(path.stem, **one | {"tests": tuple(one["tests"])}))
    return found


class Tree:
    """A copy of the checkout, without what git ignores."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._moments = folder, itertools.count(1)
        checkout.copy(folder, ROOT)
        self.env = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        found = subprocess.run(
            [sys.executable, "-c", "import funcops; print(funcops.__file__)"],
            cwd=folder,
            env=self.env,
            capture_output=True,
            text=True,
        )
        if not found.stdout.startswith(str(folder)):
            raise SystemExit(f"mutants: funcops must be imported from {folder}, got {found.stdout or found.stderr}")

    @contextlib.contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        path = self.folder / fault.file
        text = path.read_text()
        self.write(path, fault.planted(text))
        try:
            yield
        finally:
            self.write(path, text)

    def write(self, path: Path, text: str) -> None:
        path.write_text(text)
        moment = next(self._moments)  # byte code is told apart by size and second alone
        os.utime(path, (moment, moment))


class Runner:
    """Runs tests in copies of the tree, `jobs` at a time."""

    def __init__(self, folder: Path, jobs: int, timeout: float) -> None:
        self.timeout, self.stopped = timeout, threading.Event()
        self.pool = ThreadPoolExecutor(jobs)
        self.running: set[subprocess.Popen[bytes]] = set()
        self.trees: queue.Queue[Tree] = queue.Queue()
        for i in range(jobs):
            self.trees.put(Tree(folder / str(i)))

    def passes(self, tests: Sequence[str], fault: Fault | None = None) -> bool:
        """Whether the tests pass, in time, with the fault planted."""
        tree = self.trees.get()
        try:
            with tree.planted(fault) if fault else contextlib.nullcontext():
                return self._run(tree, tests) == 0
        finally:
            self.trees.put(tree)

    def _run(self, tree: Tree, tests: Sequence[str]) -> int | None:
        """Run the tests of the first tier among them, or all tests if none is in that tier."""
        code = self._pytest(tree, "not gpu and not slow", tests)
        return self._pytest(tree, "not gpu", tests) if code == NO_TESTS else code

    def _pytest(self, tree: Tree, marks: str, tests: Sequence[str]) -> int | None:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", marks, "-p", "no:cacheprovider", *tests]
        if self.stopped.is_set():
            return None
        process = subprocess.Popen(
            command, cwd=tree.folder, env=tree.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self.running.add(process)
        try:
            return process.wait(self.timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.running.discard(process)
            end(process)

    def stop(self) -> None:
        """End what runs, start nothing else."""
        self.stopped.set()
        self.pool.shutdown(wait=False, cancel_futures=True)
        for process in list(self.running):
            end(process)
        self.pool.shutdown()


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group of children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def judge(runner: Runner, faults: Sequence[Fault], sure: bool = False) -> Iterator[tuple[Fault, str, float]]:
    """Each fault and its outcome, with its seconds, as they end. `sure`: the tests are known to pass without the fault."""
    sets = sorted({fault.tests for fault in faults if not fault.equivalent and not sure})
    sound = {
        tests: runner.pool.submit(runner.passes, tests) for tests in sets
    }  # all begin before the first fault, so none waits for ever

    def one(fault: Fault) -> tuple[Fault, str, float]:
        if fault.equivalent or not (sure or sound[fault.tests].result()):
            return fault, EQUIVALENT if fault.equivalent else BROKEN, 0.0
        start = time.monotonic()
        state = SURVIVED if runner.passes(fault.tests, fault) else NOTICED
        return fault, state, time.monotonic() - start

    for future in as_completed([runner.pool.submit(one, fault) for fault in faults]):
        yield future.result()


def chosen(pattern: str) -> list[Fault]:
    return [fault for fault in load() if fnmatch.fnmatch(fault.file, pattern) or fnmatch.fnmatch(fault.source, pattern)]


def print_totals(states: dict[str, collections.Counter[str]]) -> float:
    """Print the counts by area; return the noticed share of the faults that ran."""
    total: collections.Counter[str] = collections.Counter()
    for area, counts in sorted(states.items()):
        total += counts
        print(f"{area:28}" + "".join(f"  {state} {n}" for state, n in sorted(counts.items())))
    ran = total[NOTICED] + total[SURVIVED] + total[BROKEN]
    share = total[NOTICED] / ran if ran else 1.0
    print(f"{total[NOTICED]} of {ran} noticed, {share:.1%}; {total[EQUIVALENT]} equivalent")
    return share


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", metavar="GLOB", default="*", help="faults in these files, or of these files of faults")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=600, help="seconds a fault; one that takes longer was noticed")
    parser.add_argument("--share", type=float, default=0.9, help="of the faults that must be noticed")
    parser.add_argument("--sure", action="store_true", help="the tests have just passed: do not run them without faults first")
    parser.add_argument("--list", action="store_true", help="print the faults, run nothing")
    args: Any = parser.parse_args(argv)
    faults = chosen(args.only)
    if args.list:
        for fault in faults:
            print(fault)
        return 0
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    states: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        runner = Runner(Path(folder), args.jobs, args.timeout)
        try:
            for fault, state, seconds in judge(runner, faults, args.sure):
                states[fault.area][state] += 1
                print(f"{state:10}  {seconds:4.0f} s  {fault}", flush=True)
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            return 130
        finally:
            runner.stop()
    return 0 if print_totals(states) >= args.share else 1


if __name__ == "__main__":
    sys.exit(main())
