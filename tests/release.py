"""Tries the wheel and the source archive as a stranger would: installed in new environments, without the checkout.

    python tests/release.py                    a line for each Python of the metadata with the torch of constraints.txt, then for
                                               this Python with the oldest packages that the metadata admits, and with the newest
                                               torch; exit status 1 unless each of them was tried and passed
    python tests/release.py --here             this Python alone; --python 3.12: another; --torch oldest: that row, newest: that one
    python tests/release.py --build dist --address https://github.com/OWNER/funcops --tag v0.3.0
                                               only build the archives, into dist: their README's links and picture, and
                                               [project.urls], lead to that repository, and the tag must be of their version
    python tests/release.py --archives dist    try what is there

In each environment the wheel and its dependencies are alone: every module imports without extras, each Python block of the README
prints what stands below it, and `python -m benchmarks figures`, from the source archive, writes its page; once pytest is there, the
first tests of that archive pass against the installed wheel. In the end the source archive is installed in its place: it must bring
the same files, and the README's first block runs again. Where pip would install torch for CUDA, as it does on Linux unless
it finds a build for the CPU, an environment is not tried without `--cuda`, and the line says so.
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
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import interpreters
import newest
from helpers import checkout

ROOT = Path(__file__).resolve().parents[1]
HERE = ".".join(map(str, sys.version_info[:2]))
OLDEST, NEWEST = "oldest", "newest"
BESIDE = {"": "", OLDEST: " with the oldest packages", NEWEST: " with the newest torch"}
EXTRAS = ("matplotlib", "safetensors", "numpy", "tqdm", "pytest", "transformers")
IMPORTS = f"""
import importlib, importlib.metadata, importlib.util, pathlib, pkgutil, sys, funcops
home = pathlib.Path(funcops.__file__)
assert home.is_relative_to(sys.prefix), f"{{home}} is not what was installed"
for absent in {EXTRAS}:
    assert importlib.util.find_spec(absent) is None, f"{{absent}} is installed: this would not show who imports it"
names = [m.name for m in pkgutil.walk_packages(funcops.__path__, "funcops.") if not m.name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
there = [name for name in ("torch", "triton", "optree") if importlib.util.find_spec(name)]
beside = [f"{{name}} {{importlib.metadata.version(name)}}" for name in there]
print(f"funcops {{funcops.__version__}} beside {{', '.join(beside)}}: {{len(names)}} modules import")
"""
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.S | re.M)


# What is said of the version


def disagreements(version: str, root: Path = ROOT, tag: str = "") -> list[str]:
    """The places that give another version: the topmost heading of the changelog that has one, the citation, and the tag, if there
    is one. Changelog and citation also give one date."""
    top = re.search(r"^## (\d\S*)(?: \((.*)\))?$", (root / "CHANGELOG.md").read_text(), re.M)
    cited = dict(re.findall(r'^(version|date-released): "?([^"\n]*)"?$', (root / "CITATION.cff").read_text(), re.M))
    said = {"CHANGELOG.md": top and top[1], "CITATION.cff": cited.get("version")} | (
        {"the tag": tag.removeprefix("v")} if tag else {}
    )
    found = [f"{where} must say {version}, got {got}" for where, got in said.items() if got != version]
    if top and top[2] != cited.get("date-released"):
        found.append(f"CITATION.cff must say {top[2]}, as CHANGELOG.md does, got {cited.get('date-released')}")
    return found


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


def archives(folder: Path, address: str = "") -> None:
    """Put the wheel and the source archive into the folder, built from a copy of the checkout. With an `address`, their links
    lead there."""
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        checkout.copy(tree)
        if address:
            (tree / "README.md").write_text(addressed((tree / "README.md").read_text(), address))
            with (tree / "pyproject.toml").open("a") as file:
                file.write(urls(address))
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder.absolute(), cwd=tree)


def both(folder: Path) -> tuple[Path, Path]:
    """The wheel and the source archive in a folder, which holds one of each and nothing else."""
    files = sorted(folder.absolute().iterdir())
    if [path.name.endswith(end) for path, end in zip(files, (".whl", ".tar.gz"), strict=False)] != [True, True] or len(files) > 2:
        raise ValueError(f"{folder} must hold a wheel and a source archive alone, got {', '.join(path.name for path in files)}")
    return files[0], files[1]


# Trying


@dataclass(frozen=True)
class Row:
    """An environment to try: a Python, and which torch stands beside the wheel: constraints.txt's, the oldest, or the newest."""

    version: str
    torch: str = ""

    def __str__(self) -> str:
        return f"Python {self.version}{BESIDE[self.torch]}"


def chosen(pythons: list[str], torches: list[str]) -> list[Row]:
    """The rows that were asked for, or all. A Python that is asked for must be one of the metadata."""
    for version in pythons:
        if version not in interpreters.VERSIONS:
            raise ValueError(f"--python must be one of {', '.join(interpreters.VERSIONS)}, as in the metadata, got {version}")
    if pythons or torches:
        return [Row(version, torch) for version in pythons or [HERE] for torch in torches or [""]]
    return [*map(Row, interpreters.VERSIONS), Row(HERE, OLDEST), Row(HERE, NEWEST)]


def least(wheel: Path) -> list[str]:
    """The lower bounds of the wheel's metadata, as pins."""
    with zipfile.ZipFile(wheel) as file:
        (name,) = [name for name in file.namelist() if name.endswith(".dist-info/METADATA")]
        needed = re.findall(r"^Requires-Dist: (?!.*extra ==)(.*)$", file.read(name).decode(), re.M)
    bounds = [re.fullmatch(r"([\w-]+)>=([\d.]+)(;.*)?", line) for line in needed]
    assert all(bounds) and bounds, f"each dependency must have a lower bound alone, got {needed}"
    return [f"{bound[1]}=={bound[2]}{bound[3] or ''}" for bound in bounds if bound]


def pins(row: Row, inside: str, wheel: Path) -> str:
    """The constraints of a row."""
    if row.torch == NEWEST:
        return newest.constraints(newest.newest(inside))
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    if row.torch == OLDEST:
        bounds = least(wheel)
        names = "|".join(re.split("==", bound)[0] for bound in bounds)
        lines = [*(line for line in lines if not re.match(rf"({names})\b", line)), *bounds]
    return "\n".join([*lines, ""])


def installed(home: Path) -> dict[str, bytes]:
    """The files of the installed package, and what is said of it."""
    (site,) = home.glob("lib/python*/site-packages")
    files = [path for path in (site / "funcops").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {path.relative_to(site).as_posix(): path.read_bytes() for path in [*files, *site.glob("funcops-*.dist-info/METADATA")]}


def unpacked(source: Path, folder: Path) -> Path:
    """The tree of the source archive, without the package: its tests see the wheel."""
    with tarfile.open(source) as file:
        file.extractall(folder, **({"filter": "data"} if sys.version_info >= (3, 12) else {}))
    (tree,) = folder.iterdir()
    shutil.rmtree(tree / "funcops")
    return tree


def tried(row: Row, python: str, wheel: Path, source: Path, tree: Path, envs: Path, cuda: bool) -> str:
    """Try one environment and return a sentence about it. Raises `NotTried` if torch is not available for it, `AssertionError` with
    a failed program's output."""
    key = f"{row.version}-{row.torch or 'pinned'}"
    inside = interpreters.clean(key, python, envs)
    constraints = envs / f"{key}.txt"
    constraints.write_text(pins(row, inside, wheel))

    def put(*wanted: str) -> None:
        interpreters.put(key, envs, cuda, *wanted, constraints=constraints)

    put(str(wheel))
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "TRITON"))}
    said = run(inside, "-I", "-c", IMPORTS, cwd=envs, env=env).strip()
    blocks = BLOCK.findall((tree / "README.md").read_text())
    for block, text in blocks:
        printed = run(inside, "-I", "-c", block, cwd=envs, env=env)
        assert printed == text, f"this block of README.md must print what stands below it:\n{block}it printed:\n{printed}"
    assert len([text for _, text in blocks if text]) >= 2, (
        "README.md must have a block for each of its two doors, and what it prints"
    )
    page = envs / f"{key}.md"  # by the benchmarks, which a wheel does not hold
    run(inside, "-m", "benchmarks", "figures", "--page", page, cwd=tree, env=env)
    assert page.read_text() == (tree / "docs/benchmarks/figures.md").read_text(), (
        "bench figures must write docs/benchmarks/figures.md"
    )
    put(*interpreters.NEEDED)
    tests = run(inside, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_tiny.py", cwd=tree, env=env)
    of_wheel = installed(envs / key)
    put("--no-deps", "--force-reinstall", str(source))
    differ = {name for name, _ in of_wheel.items() ^ installed(envs / key).items()}
    assert not differ, f"{source.name} must install the files of {wheel.name}, got others: {', '.join(sorted(differ))}"
    run(inside, "-I", "-c", blocks[0][0], cwd=envs, env=env)
    return (
        f"{said}; {len(blocks)} blocks of the README print what it says; bench figures writes its page; "
        f"tests/test_tiny.py: {tests.strip().splitlines()[-1]}; the source archive installs the same {len(of_wheel)} files"
    )


def outcome(row: Row, python: str | None, wheel: Path, source: Path, tree: Path, envs: Path, cuda: bool) -> tuple[str, str]:
    """The fault of it, or "", and a sentence about it."""
    try:
        if python is None:
            raise interpreters.NotTried("none on this machine")
        return "", tried(row, python, wheel, source, tree, envs, cuda)
    except (interpreters.NotTried, newest.TryLaterError) as reason:
        return f"{row} was not tried", f"not tried: {reason}"
    except (AssertionError, SystemExit) as error:  # pip's own faults end `newest`
        return f"{row} failed", str(error)
    finally:
        shutil.rmtree(envs / f"{row.version}-{row.torch or 'pinned'}", ignore_errors=True)  # gigabytes each


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cuda", action="store_true", help="install torch for CUDA where pip has no other: 3 GB to fetch, 6 on the disk"
    )
    parser.add_argument("--python", action="append", default=[], metavar="X.Y", help="only this one; may be given again")
    parser.add_argument("--here", action="append_const", dest="python", const=HERE, help="only the one that runs this")
    parser.add_argument("--torch", action="append", default=[], choices=(OLDEST, NEWEST), help="only with this one")
    parser.add_argument("--address", default="", metavar="URL", help="the repository's address, for links in what an index shows")
    parser.add_argument("--tag", default="", metavar="vX.Y.Z", help="the tag, which must be of the version")
    parser.add_argument("--build", type=Path, metavar="FOLDER", help="only build the archives, into a folder")
    parser.add_argument("--archives", type=Path, metavar="FOLDER", help="try the archives of a folder")
    args = parser.parse_args(argv)
    try:
        args.rows = chosen(args.python, args.torch)
    except ValueError as error:
        parser.error(str(error))
    if args.build and args.build.is_dir() and any(args.build.iterdir()):
        parser.error(f"--build must be a new or an empty folder, got {args.build}, which holds files")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parsed(argv)
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as two:
        folder = Path(name)
        built = args.archives or args.build or folder / "built"
        if not args.archives:
            archives(built, args.address.rstrip("/"))
        wheel, source = both(built)
        print(f"{wheel.name} {wheel.stat().st_size:,} bytes, {source.name} {source.stat().st_size:,}", flush=True)
        wrong = disagreements(wheel.name.split("-")[1], tag=args.tag)
        if not args.build:
            tree = unpacked(source, folder / "source")
            there = {version: python for version, (python, _) in interpreters.found().items()}
            rest = wheel, source, tree, folder / "envs", args.cuda
            found = two.map(lambda row: outcome(row, there.get(row.version), *rest), args.rows)
            for row, (fault, said) in zip(args.rows, found, strict=True):
                wrong += [fault] if fault else []
                print(f"{row}: {said}", flush=True)
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
