"""The tests marked gpu, of the files that have them, in many processes; first those that do not pass in FILE.

    python tests/smoke/gpu_tests.py [--json FILE] [--jobs N] [--seconds S] [PYTEST'S ARGUMENTS]

A line of JSON each as it ends: `passed`, `failed`, `skipped`, `out of time`, or `no device`; with the fingerprints of the kernels
that it is the first to launch. Exits as pytest does, with 2 where a package is missing. The file is pytest's plugin, too.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Set
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [folder for folder in (str(ROOT), str(HERE)) if folder not in sys.path]

from lines import NO_DEVICE, OUT_OF_TIME, Lines  # noqa: E402
from needs import NEEDED, TESTS, missing, refuse  # noqa: E402

from benchmarks.rows import lines_of  # noqa: E402


def files() -> list[str]:
    """The test files that use the mark `gpu`."""
    marked = re.compile(r"\bmark\.gpu\b")
    found = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if marked.search(path.read_text())]
    return [str(path.relative_to(ROOT)) for path in found]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write a line for each test to this file")
    parser.add_argument("--jobs", type=int, default=min(16, os.cpu_count() or 1), help="processes (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=140.0, help="start no test after this (default: %(default)s)")
    args, others = parser.parse_known_args(argv)
    if lacking := missing((*NEEDED, *TESTS)):
        return refuse("gpu tests", lacking)
    import torch

    many = args.jobs > 1 and torch.cuda.is_available() and importlib.util.find_spec("xdist")
    spread = ["-n", str(args.jobs), "--dist", "worksteal"] if many else []
    told = [f"--until={time.time() + args.seconds}", *([] if args.json is None else [f"--lines={args.json.resolve()}"])]
    # pytest-benchmark warns of many processes before any test, and the cache would be written to this checkout
    plugins = ["-p", "no:benchmark", "-p", "no:cacheprovider", "-p", "tests.smoke.gpu_tests"]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *plugins, *spread, *told, *files(), *others]
    return subprocess.run(command, cwd=ROOT).returncode


# The plugin


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--until", type=float, default=float("inf"), help="the time after which no test starts")
    parser.addoption(
        "--lines", type=Path, default=None, help="write a line of JSON for each test to this file, and start with those not passed"
    )


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(_Launches())
    if not hasattr(config, "workerinput"):  # of many processes the first is told of all results
        config.pluginmanager.register(_Report(config.getoption("--lines")))


def pytest_runtest_setup(item: Any) -> None:
    import pytest

    if time.time() > item.config.getoption("--until"):
        pytest.skip(OUT_OF_TIME)


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    if config.getoption("--lines") is not None:
        passed = {name for name, line in lines_of(config.getoption("--lines")).items() if line["status"] == "passed"}
        workers = getattr(config, "workerinput", {}).get("workercount", 1)
        items[:] = in_order(items, [item.nodeid in passed for item in items], workers)


def in_order(items: list[Any], passed: list[bool], workers: int) -> list[Any]:
    """The tests, so that each of the workers, to which equal parts of the list go, starts with those that have not passed."""
    first = [item for item, done in zip(items, passed, strict=True) if not done]
    later = [item for item, done in zip(items, passed, strict=True) if done]
    dealt = [(first + later)[worker::workers] for worker in range(workers)]
    return [item for part in dealt for item in part]


class _Launches:
    """Notes the launches that a passed test is the first of its process to make."""

    found: Set[str] = frozenset()
    before: Set[str] = frozenset()  # the test; one that is skipped has no set-up of its own

    def pytest_sessionstart(self) -> None:
        import torch

        self.block = contextlib.ExitStack()
        if torch.cuda.is_available():
            from benchmarks.launches import fingerprints

            self.found = self.block.enter_context(fingerprints())

    def pytest_sessionfinish(self) -> None:
        self.block.close()

    def pytest_runtest_setup(self) -> None:
        self.before = set(self.found)

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        new = self.found - self.before
        if call.when == "call" and call.excinfo is None and new:
            item.user_properties.append(("launches", " ".join(sorted(new))))


class _Report:
    def __init__(self, file: Path | None) -> None:
        self.lines = Lines(file)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            if report.when != "teardown" or report.failed:
                self.lines.add(line_of(report))


def line_of(report: Any) -> dict[str, Any]:
    found = {"test": report.nodeid, "status": report.outcome, "seconds": round(report.duration, 2), **dict(report.user_properties)}
    if report.skipped:
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        why = why.removeprefix("Skipped: ")
        known = next((status for status in (NO_DEVICE, OUT_OF_TIME) if why.startswith(status)), "skipped")
        return {**found, "status": known, **({"why": why} if known == "skipped" else {})}
    return found if report.passed else {**found, "why": str(report.longrepr)[-2000:]}


if __name__ == "__main__":
    sys.exit(main())
