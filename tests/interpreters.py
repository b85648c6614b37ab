"""Each Python that the metadata promises, where the machine has it: what of the standard library we use, and tests/test_tiny.py.

    python tests/interpreters.py              a line for each; exit status 1 where one of them fails, or where none ran the tests.
                                              Each reads the sources; this one, the oldest and the newest run the tests, too
    python tests/interpreters.py --every      each runs the tests
    pythonX.Y tests/interpreters.py --read    reads the sources with that Python: it must parse them, and have the names they use

Most of the work is torch. Where pip would install a build for CUDA, gigabytes of it, the tests are not tried without `--cuda`,
and the line says so.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text()
VERSIONS = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
NEEDED = ("pytest", "hypothesis", "numpy", "setuptools")  # what tests/conftest.py and torch import, beside the dependencies
LARGE = 400  # megabytes: torch's wheel for the CPU has less than 250, the one for CUDA more than 500
ALL = """
import importlib, pkgutil, pytest, sys, funcops
for module in pkgutil.walk_packages(funcops.__path__, "funcops."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests/test_tiny.py"]))
"""


# Reading


def missing(where: str, text: str, stdlib: frozenset[str] = sys.stdlib_module_names) -> list[str]:
    """`file:line: ...` if this Python cannot parse the file, and for each name of the standard library that it lacks. What stands
    in a `try`, or under a test of `sys.version_info`, has another way."""
    try:
        tree = ast.parse(text, where)
    except SyntaxError as error:
        return [f"{where}:{error.lineno}: {error.msg}"]
    names = [name for name in _names(tree) if name[1].split(".")[0] in stdlib - {"__future__"}]
    return [f"{where}:{line}: no {'.'.join(filter(None, name))}" for line, *name in names if not _has(*name)]


def _names(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """(line, module, name): names imported from modules, and attributes read from modules that are imported whole."""
    nodes = [tree]
    for node in nodes:  # which grows
        nodes += [child for child in ast.iter_child_nodes(node) if not _has_another_way(child)]
    modules: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                modules[alias.asname or alias.name.split(".")[0]] = alias.name if alias.asname else alias.name.split(".")[0]
                yield node.lineno, alias.name, ""
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from ((node.lineno, node.module, alias.name) for alias in node.names)
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield node.lineno, modules[node.value.id], node.attr


def _has_another_way(node: ast.AST) -> bool:
    return isinstance(node, ast.Try) or (isinstance(node, ast.If) and "version_info" in ast.unparse(node.test))


def _has(module: str, name: str) -> bool:
    try:
        home = importlib.import_module(module)
        if name and name != "*" and not hasattr(home, name):
            importlib.import_module(f"{module}.{name}")
    except ImportError:
        return False
    return True


def read(stdlib: frozenset[str]) -> int:
    files = [path for folder in ("funcops", "examples", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
    wrong = [line for path in files for line in missing(str(path.relative_to(ROOT)), path.read_text(), stdlib)]
    print("\n".join(wrong) if wrong else f"{len(files)} files read")
    return bool(wrong)


# Running


def said(*command: str) -> str | None:
    """A command's output; None if the command is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def found() -> dict[str, tuple[str, frozenset[str]]]:
    """For each version a Python that answers, and the names of its standard library: the Python that runs this, `pythonX.Y` on
    PATH, or one of pyenv's. A shim on PATH may answer nothing."""
    root = said("pyenv", "root")
    answers = {}
    for version in VERSIONS:
        kept = sorted(Path(root, "versions").glob(f"{version}*/bin/python"), reverse=True) if root else []
        for candidate in filter(None, (sys.executable, shutil.which(f"python{version}"), *map(str, kept))):
            answer = said(candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2], *sys.stdlib_module_names)") or ""
            if answer.split(" ")[0] == version:
                answers[version] = candidate, frozenset(answer.split(" ")[1:])
                break
    return answers


class NotTried(Exception):
    pass


def environment(version: str, python: str, envs: Path, cuda: bool) -> str:
    """The Python of an environment with the tests' packages: this one, an earlier one, or a new one."""
    inside = str(envs / version / "bin" / "python")
    if python == sys.executable or said(inside, "-c", "import torch, optree, pytest, hypothesis") is not None:
        return python if python == sys.executable else inside
    _install(version, python, envs, cuda)
    return inside


def _install(version: str, python: str, envs: Path, cuda: bool) -> None:
    listed = re.search(r"^dependencies = \[\n(.*?)^\]", PROJECT, re.S | re.M)
    assert listed is not None
    clean(version, python, envs)
    put(version, envs, cuda, *re.findall(r'^    "(.*)",$', listed[1], re.M), *NEEDED)


def clean(version: str, python: str, envs: Path) -> str:
    """The Python of a new, empty environment, without pip: this Python's pip installs there."""
    _run(python, "-m", "venv", "--clear", "--without-pip", str(envs / version))
    return str(envs / version / "bin" / "python")


def put(version: str, envs: Path, cuda: bool, *wanted: str, constraints: Path | str = "constraints.txt") -> None:
    """Install packages with their dependencies into an environment; raises `NotTried` if torch would come for CUDA."""
    inside = str(envs / version / "bin" / "python")
    pip = (sys.executable, "-m", "pip", "--python", inside, "install", "--disable-pip-version-check", "--progress-bar", "off")
    _run(*pip, "--no-compile", "-c", str(constraints), *wanted, stop=None if cuda else gigabytes)  # most is not imported


def gigabytes(line: str) -> str | None:
    """The reason to stop at this line of pip's, if it names a package for CUDA or a large wheel, whose size it gives. pip installs
    nothing before it has all packages, and names these before it downloads most of them."""
    at = re.match(
        r"\s*(?:Collecting|Processing|Downloading|Using cached) (?:\S*/)?([^/\s]+)(?:$|\s+(?:\(([\d.]+) (MB|GB)\))?)", line
    )
    if at is None:
        return None
    name, size, unit = at.groups()
    large = size is not None and float(size) * (1000 if unit == "GB" else 1) > LARGE
    if large or re.match("nvidia[-_]", name):
        return f"torch comes for CUDA here, gigabytes of it ({name}{f', {size} {unit}' if size else ''}); --cuda installs it"
    return None


def _run(*command: str, stop: Callable[[str], str | None] | None = None) -> None:
    """Run a command until a line gives a reason to stop."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        start_new_session=True,
        env={**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, "PIP_QUIET": "0"},  # which pip takes for installed
    )
    assert process.stdout is not None
    lines = []
    with process:
        for line in process.stdout:
            lines.append(line.strip())
            reason = stop(line) if stop else None
            if reason:
                os.killpg(process.pid, signal.SIGKILL)  # pip for another Python is a process of its own
                raise NotTried(reason)
    if process.returncode:
        raise NotTried(([line for line in lines if "ERROR" in line] or lines or [f"{command[:3]} failed"])[-1])


def tried(version: str, python: str | None, stdlib: frozenset[str], args: argparse.Namespace) -> tuple[bool, bool, str]:
    """Whether nothing failed, whether the tests ran, and a sentence about it."""
    if python is None:
        return True, False, "none on this machine"
    half = subprocess.run([python, __file__, "--read", *sorted(stdlib)], capture_output=True, text=True, cwd=ROOT)
    if half.returncode:
        return False, False, half.stdout + half.stderr
    if not (args.every or python == sys.executable or version in (VERSIONS[0], VERSIONS[-1])):
        return True, False, f"{half.stdout.strip()}; the tests are tried by --every"  # what those between lack, reading finds
    try:
        inside = environment(version, python, args.envs, args.cuda)
    except NotTried as reason:
        return True, False, f"{half.stdout.strip()}; the tests are not tried: {reason}"
    done = subprocess.run([inside, "-c", ALL], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        return False, True, done.stdout + done.stderr
    return True, True, f"{half.stdout.strip()}; every module imports; tests/test_tiny.py: {done.stdout.strip().splitlines()[-1]}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--read", nargs="*", metavar="MODULE", help="only read the sources; modules that are of a standard library")
    parser.add_argument("--every", action="store_true", help="run the tests with each Python")
    parser.add_argument("--cuda", action="store_true", help="install torch for CUDA where pip has no other")
    parser.add_argument(
        "--envs", type=Path, default=ROOT / ".interpreters", help="where environments are kept (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    if args.read is not None:
        return read(sys.stdlib_module_names | frozenset(args.read))
    pythons = found()
    stdlib = frozenset(name for _, names in pythons.values() for name in names)
    good, ran = True, False
    with ThreadPoolExecutor(2) as two:
        results = two.map(lambda version: tried(version, pythons.get(version, (None,))[0], stdlib, args), VERSIONS)
        for version, (passed, tests, line) in zip(VERSIONS, results, strict=True):
            good, ran = good and passed, ran or tests
            print(f"Python {version}: {line.strip()}", flush=True)
    return 0 if good and ran else 1


if __name__ == "__main__":
    sys.exit(main())
