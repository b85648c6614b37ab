"""Tries the wheel and the source archive as a stranger would: installed with each Python that the machine has.

    python tests/release.py                   a line for each; exit status 1 where one of them fails, or where none was tried
    python tests/release.py --here            of the Python that runs this alone; --python 3.11 of another
    python tests/release.py --address https://github.com/OWNER/funcops --out dist      keep the archives, for an index: their
                                              README's links and picture, and [project.urls], lead to that repository

With each Python, in an environment where the wheel and its dependencies are alone: every module imports without extras, the
README's snippets run, and so does `python -m benchmarks figures`, from the source archive; once pytest is there, the first tests
of that archive pass against the installed wheel. Where pip would install torch for CUDA a Python is not tried without `--cuda`, and
the line says so.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import interpreters
from helpers import checkout

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("matplotlib", "safetensors", "numpy", "tqdm", "pytest", "transformers")
IMPORTS = f"""
import importlib, importlib.util, pathlib, pkgutil, sys, funcops
home = pathlib.Path(funcops.__file__)
assert home.is_relative_to(sys.prefix), f"{{home}} is not what was installed"
for absent in {EXTRAS}:
    assert importlib.util.find_spec(absent) is None, f"{{absent}} is installed: this would not show who imports it"
names = [m.name for m in pkgutil.walk_packages(funcops.__path__, "funcops.") if not m.name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
print(funcops.__version__, len(names))
"""


# What is said of the version


def disagreements(version: str, root: Path = ROOT) -> list[str]:
    """The places that give another version: the topmost heading of the changelog, and the citation."""
    top = re.search(r"^## (.*)$", (root / "CHANGELOG.md").read_text(), re.M)
    cited = re.search(r'^version: "?([^"\n]*)"?$', (root / "CITATION.cff").read_text(), re.M)
    said = {"CHANGELOG.md": top and top[1], "CITATION.cff": cited and cited[1]}
    return [f"{where} must say {version}, got {got}" for where, got in said.items() if got != version]


# Building


def run(*command: object, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, env=env)
    assert done.returncode == 0, f"{command[0]} {command[1]} ...\n{done.stdout}{done.stderr}"
    return done.stdout


def addressed(readme: str, address: str) -> str:
    """The README for an index: relative links and pictures become absolute, as an index shows the text alone."""

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1] else "blob"
        return f"{link[1]}[{link[2]}]({address}/{kind}/main/{link[3]})"

    return re.sub(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#|mailto:)([^)\s]+)\)", absolute, readme)


def urls(address: str) -> str:
    """The table of a project's links."""
    places = {
        "Homepage": "",
        "Source": "",
        "Documentation": "/tree/main/docs",
        "Changelog": "/blob/main/CHANGELOG.md",
        "Issues": "/issues",
    }
    return "\n[project.urls]\n" + "".join(f'{name} = "{address}{path}"\n' for name, path in places.items())


def archives(folder: Path, address: str = "") -> tuple[Path, Path]:
    """The wheel and the source archive, in the folder, built from a copy of the checkout. With an `address`, their links
    lead there."""
    tree = folder / "tree"
    checkout.copy(tree)
    if address:
        (tree / "README.md").write_text(addressed((tree / "README.md").read_text(), address))
        with (tree / "pyproject.toml").open("a") as file:
            file.write(urls(address))
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, cwd=tree)
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, source


# Trying


def unpacked(source: Path, folder: Path) -> Path:
    """The tree of the source archive, without the package: its tests see the wheel."""
    with tarfile.open(source) as file:
        file.extractall(folder, **({"filter": "data"} if sys.version_info >= (3, 12) else {}))
    (tree,) = folder.iterdir()
    shutil.rmtree(tree / "funcops")
    return tree


def tried(version: str, python: str, wheel: Path, tree: Path, envs: Path, cuda: bool) -> str:
    """Try one Python and return a sentence about it. Raises `NotTried` if torch is not available for it, `AssertionError` with a
    failed program's output."""
    inside = interpreters.clean(version, python, envs)
    interpreters.put(version, envs, cuda, str(wheel))
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "TRITON"))}
    said = run(inside, "-I", "-c", IMPORTS, cwd=envs, env=env).split()
    snippets = re.findall(r"^```python\n(.*?)^```", (tree / "README.md").read_text(), re.S | re.M)
    printed = run(inside, "-I", "-c", "".join(snippets), cwd=envs, env=env)
    assert "kept" in printed, f"README.md must have a snippet that prints what is kept; its {len(snippets)} printed {printed!r}"
    table = run(inside, "-m", "benchmarks", "figures", cwd=tree, env=env)  # which a wheel does not hold
    interpreters.put(version, envs, cuda, *interpreters.NEEDED)
    tests = run(inside, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_tiny.py", cwd=tree, env=env)
    return (
        f"funcops {said[0]}; {said[1]} modules import; the README's snippets run; bench figures prints {len(table.splitlines())} "
        f"lines; tests/test_tiny.py: {tests.strip().splitlines()[-1]}"
    )


def outcome(version: str, python: str, wheel: Path, tree: Path, envs: Path, cuda: bool) -> tuple[bool, bool, str]:
    """Whether it failed, whether it was tried, and a sentence about it."""
    try:
        return False, True, tried(version, python, wheel, tree, envs, cuda)
    except interpreters.NotTried as reason:
        return False, False, f"not tried: {reason}"
    except AssertionError as error:
        return True, True, str(error)
    finally:
        shutil.rmtree(envs / version, ignore_errors=True)  # a gigabyte each


def chosen(asked: list[str]) -> dict[str, str]:
    """The machine's Pythons by version, oldest first, or the requested ones. Raises `ValueError` for one that is missing."""
    there = {version: python for version, (python, _) in interpreters.found().items()}
    for version in asked:
        if version not in there:
            raise ValueError(f"--python: expected one of {', '.join(there) or 'none'}, as on this machine, got {version}")
    return {version: there[version] for version in sorted(asked or there, key=lambda name: int(name.split(".")[1]))}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", action="store_true", help="install torch for CUDA where pip has no other")
    parser.add_argument("--python", action="append", default=[], metavar="X.Y", help="only this one; may be given again")
    this = [".".join(map(str, sys.version_info[:2]))]
    parser.add_argument("--here", action="store_const", dest="python", const=this, help="only the one that runs this")
    parser.add_argument("--address", default="", metavar="URL", help="the repository's address, for links in what an index shows")
    parser.add_argument("--out", metavar="FOLDER", help="keep the archives there")
    args = parser.parse_args(argv)
    try:
        pythons = chosen(args.python)
    except ValueError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as two:
        folder = Path(name)
        (folder / "built").mkdir()
        wheel, source = archives(folder / "built", args.address.rstrip("/"))
        if args.out:
            Path(args.out).mkdir(parents=True, exist_ok=True)
            for file in (wheel, source):
                shutil.copy(file, args.out)
        print(f"{wheel.name} {wheel.stat().st_size:,} bytes, {source.name} {source.stat().st_size:,}", flush=True)
        wrong = disagreements(wheel.name.split("-")[1])
        (folder / "source").mkdir()
        tree, count = unpacked(source, folder / "source"), 0
        rest = wheel, tree, folder / "envs", args.cuda
        found = two.map(lambda version: outcome(version, pythons[version], *rest), pythons)
        for version, (failed, ran, said) in zip(pythons, found, strict=True):
            wrong += [f"Python {version} failed"] if failed else []
            count += ran
            print(f"Python {version}: {said}", flush=True)
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong or not count else 0


if __name__ == "__main__":
    sys.exit(main())
