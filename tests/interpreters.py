"""Each Python that the metadata promises, where the machine has it: what of the standard library we use, and tests/test_tiny.py.

    python tests/interpreters.py              a line for each; exit status 1 where one of them fails, or where none ran the tests
    pythonX.Y tests/interpreters.py --read    reads the sources with that Python: it must parse them, and have the names they use

Most of the work is torch. Where pip would install a build for CUDA, gigabytes of it, the tests are not tried without `--cuda`,
and the line says so.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text()
VERSIONS = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
NEEDED = ("pytest", "hypothesis", "numpy", "setuptools")  # what tests/conftest.py and torch import, beside the dependencies
IMPORT_ALL = """
import importlib, pkgutil, funcops
for module in pkgutil.walk_packages(funcops.__path__, "funcops."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
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
    """(line, module, name): what is imported from modules, and what is read of the modules that are imported as they are."""
    inside = {id(node) for top in ast.walk(tree) if _has_another_way(top) for node in ast.walk(top)}
    nodes = [node for node in ast.walk(tree) if id(node) not in inside]
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
    """What a command prints; None if there is none such, or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def interpreter(version: str) -> str | None:
    """One that answers: the Python that runs this, `pythonX.Y` on PATH, or one of pyenv's. A shim on PATH may answer nothing."""
    root = said("pyenv", "root")
    kept = sorted(Path(root, "versions").glob(f"{version}*/bin/python"), reverse=True) if root else []
    for candidate in (sys.executable, shutil.which(f"python{version}"), *map(str, kept)):
        if candidate and said(candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])") == version:
            return candidate
    return None


class NotTried(Exception):
    pass


def environment(version: str, python: str, envs: Path, cuda: bool) -> str:
    """The Python of an environment that has what the tests import: this one, one that was made before, or a new one."""
    inside = str(envs / version / "bin" / "python")
    if python == sys.executable or said(inside, "-c", "import torch, optree, pytest, hypothesis") is not None:
        return python if python == sys.executable else inside
    _run(python, "-m", "venv", "--clear", str(envs / version))
    listed = re.search(r"^dependencies = \[\n(.*?)^\]", PROJECT, re.S | re.M)
    assert listed is not None
    wanted = [*re.findall(r'^    "(.*)",$', listed[1], re.M), *NEEDED]
    pip = (inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", "constraints.txt", *wanted)
    planned = [item["metadata"]["name"] for item in json.loads(_run(*pip, "--dry-run", "--report", "-"))["install"]]
    nvidia = [name for name in planned if name.startswith("nvidia-")]
    if nvidia and not cuda:
        raise NotTried(f"torch comes with {len(nvidia)} packages for CUDA here, gigabytes of them; --cuda installs them")
    _run(*pip)
    return inside


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise NotTried(([line for line in done.stderr.splitlines() if "ERROR" in line] or [done.stderr or done.stdout])[-1].strip())
    return done.stdout


def tried(version: str, stdlib: frozenset[str], args: argparse.Namespace) -> tuple[bool, bool, str]:
    """Whether nothing failed, whether the tests ran, and what to say."""
    python = interpreter(version)
    if python is None:
        return True, False, "none on this machine"
    half = subprocess.run([python, __file__, "--read", *sorted(stdlib)], capture_output=True, text=True, cwd=ROOT)
    if half.returncode:
        return False, False, half.stdout + half.stderr
    try:
        inside = environment(version, python, args.envs, args.cuda)
    except NotTried as reason:
        return True, False, f"{half.stdout.strip()}; the tests are not tried: {reason}"
    for command in (("-c", IMPORT_ALL), ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_tiny.py")):
        done = subprocess.run([inside, *command], capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            return False, True, done.stdout + done.stderr
    return True, True, f"{half.stdout.strip()}; every module imports; tests/test_tiny.py: {done.stdout.strip().splitlines()[-1]}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--read", nargs="*", metavar="MODULE", help="only read the sources; modules that are of a standard library")
    parser.add_argument("--cuda", action="store_true", help="install torch for CUDA where pip has no other")
    parser.add_argument(
        "--envs", type=Path, default=ROOT / ".interpreters", help="where environments are kept (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    if args.read is not None:
        return read(sys.stdlib_module_names | frozenset(args.read))
    found = filter(None, map(interpreter, VERSIONS))
    stdlib = frozenset(
        name for python in found for name in (said(python, "-c", "import sys; print(*sys.stdlib_module_names)") or "").split()
    )
    good, ran = True, False
    for version in VERSIONS:
        passed, tests, line = tried(version, stdlib, args)
        good, ran = good and passed, ran or tests
        print(f"Python {version}: {line.strip()}", flush=True)
    return 0 if good and ran else 1


if __name__ == "__main__":
    sys.exit(main())
