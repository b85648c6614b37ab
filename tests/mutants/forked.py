"""A plugin of pytest for `drawn.py`: which test runs which line, and faults planted in forks of a process that collected all tests.

`MEASURE` names a file: the tests run once under coverage, a context each. `FAULTS` names a file of faults (JSON lines: file, text
and tests of each): tests run in forks only, a fork a fault, in which the functions that the fault changes have its code. A fork
costs no import and no collection. What a fork cannot have, code that ran when the module was imported, is said to need a process of
its own.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import json
import linecache
import os
import resource
import signal
import time
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

HANGS = 300  # seconds after which a fork that waits has noticed its fault; the tests chosen take a tenth
MEMORY = 12 << 30  # bytes of a fork
OWN_PROCESS = "needs a process of its own"


class Measure:
    def __init__(self, out: str) -> None:
        import coverage

        self.out = out
        self.seconds: dict[str, float] = {}
        self.coverage = coverage.Coverage(data_file=f"{out}.lines", source=[str(Path("funcops").resolve())], config_file=False)
        self.coverage.start()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        self.coverage.switch_context(item.nodeid)
        start = time.process_time()
        yield
        self.seconds[item.nodeid] = time.process_time() - start

    def pytest_sessionfinish(self) -> None:
        self.coverage.switch_context("afterwards")
        self.coverage.stop()
        self.coverage.save()
        Path(f"{self.out}.seconds").write_text(json.dumps(self.seconds))


def leaves(code: CodeType) -> tuple:
    """A code object's own instructions and names, without nested code."""
    constants = tuple((type(c), repr(c)) for c in code.co_consts if not isinstance(c, CodeType))
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars


def by_place(code: CodeType) -> dict[tuple[str, int, int], CodeType]:
    """All code objects of a file, by the names around them, their first line, and their number among equal ones."""
    found: dict[tuple[str, int, int], CodeType] = {}
    pending = [("", code)]
    while pending:
        around, one = pending.pop()
        nth = 0
        while (around, one.co_firstlineno, nth) in found:
            nth += 1
        found[around, one.co_firstlineno, nth] = one
        pending += [(f"{around}.{c.co_name}", c) for c in reversed(one.co_consts) if isinstance(c, CodeType)]
    return found


class Forked:
    def __init__(self, faults: str) -> None:
        self.faults = faults
        self.functions: dict[str, list[FunctionType]] = {}
        self.failed = ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self) -> None:  # before conftest.py hides them from the collector
        self.find()

    def find(self) -> None:
        """Add the functions that the collector knows, and that are not yet known by their files."""
        found: dict[str, list[FunctionType]] = {}
        for one in gc.get_objects():
            if type(one) is FunctionType:  # not by asking the object, which may warn
                found.setdefault(one.__code__.co_filename, []).append(one)
        self.functions = found | self.functions

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    def plant(self, file: str, text: str) -> bool:
        """Give the live functions of a file the fault's code; return whether that is the whole fault."""
        path = Path(file).resolve()
        mine = by_place(compile(path.read_text(), str(path), "exec", dont_inherit=True))
        theirs = by_place(compile(text, str(path), "exec", dont_inherit=True))
        if str(path) not in self.functions:  # a file of kernels, which the first launch imports
            importlib.import_module(".".join(Path(file).with_suffix("").parts))
            self.find()
        functions = self.functions.get(str(path), [])
        linecache.cache[str(path)] = (len(text), None, text.splitlines(keepends=True), str(path))  # Triton reads kernels
        other = {key for key in mine.keys() & theirs.keys() if leaves(mine[key]) != leaves(theirs[key])}
        if any(not mine[key].co_flags & inspect.CO_OPTIMIZED for key in other) or not other:
            return False
        swapped = set()
        for key in mine.keys() & theirs.keys():
            code = theirs[key]
            if code != mine[key] and code.co_flags & inspect.CO_OPTIMIZED:
                for one in functions:
                    if one.__code__ == mine[key]:
                        one.__code__ = code
                        swapped.add(key[0])
        return all(any(key[0] == around or key[0].startswith(f"{around}.") for around in swapped) for key in other)

    def run(self, items: list[pytest.Item], cpu: float) -> None:
        """In the fork: run tests until one fails, none is left, or the allowed work is done."""
        start = time.process_time()
        for i, item in enumerate(items):
            if time.process_time() - start > cpu:
                break
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=items[i + 1] if i + 1 < len(items) else None)
            if self.failed:
                break

    def fork(self, items: list[pytest.Item], cpu: float, file: str = "", text: str = "") -> tuple[str, str]:
        """The outcome, and the test that failed."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.setsid()
                signal.alarm(HANGS)
                resource.setrlimit(resource.RLIMIT_CPU, (int(10 * cpu) + 100,) * 2)
                resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
                said = ""
                if text and not self.plant(file, text):
                    said = OWN_PROCESS
                else:
                    self.run(items, cpu)
                    said = f"failed {self.failed}" if self.failed else "passed"
                os.write(writer, said.encode())
            except BaseException as e:  # noqa: B036  a fork never returns
                os.write(writer, f"failed {type(e).__name__} outside of a test".encode())
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            os.waitpid(child, 0)
            try:
                os.killpg(child, signal.SIGKILL)
            except ProcessLookupError:
                pass
            outcome, _, test = pipe.read().partition(" ")
        if not outcome:
            return "failed", "the process ended"
        return (OWN_PROCESS, "") if outcome == "needs" else (outcome, test)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        sound: dict[str, bool] = {}
        with open(self.faults) as source, open(f"{self.faults}.out", "w") as out:
            for line in source:
                fault = json.loads(line)
                chosen = [items[name] for name in fault["tests"] if name in items]
                start = time.monotonic()
                while True:
                    outcome, test = self.fork(chosen, fault["cpu"], fault["file"], fault["text"])
                    if outcome == "failed" and test in items:
                        if test not in sound:  # the same test in a fork without a fault
                            sound[test] = self.fork([items[test]], fault["cpu"])[0] == "passed"
                        if not sound[test]:
                            chosen.remove(items[test])
                            continue
                    break
                answer = {"index": fault["index"], "outcome": outcome, "test": test, "ran": len(chosen)}
                out.write(json.dumps(answer | {"seconds": time.monotonic() - start}) + "\n")
                out.flush()
        return True


def pytest_configure(config: Any) -> None:
    if "MEASURE" in os.environ:
        config.pluginmanager.register(Measure(os.environ["MEASURE"]))
    if "FAULTS" in os.environ:
        config.pluginmanager.register(Forked(os.environ["FAULTS"]))
