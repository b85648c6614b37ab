"""What is published, tried as a stranger would: a wheel and a source archive, installed with each Python that the machine has.

    python tests/release.py       a line for each; exit status 1 where one of them fails, or where none was tried

With each Python, in an environment where the wheel and its dependencies are alone: every module imports without extras, the
README's snippet and `python -m funcops.bench residuals` run, and, once pytest is there, the first tests of the source archive
pass against the installed wheel. Where pip would install torch for CUDA a Python is not tried without `--cuda`, and the line says
so.
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
from pathlib import Path

import interpreters

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
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:  # a bench may count with numpy; nothing else may need an extra
        assert name.startswith("funcops.bench.") and error.name in {EXTRAS}, f"{{name}} imports {{error.name}}"
print(funcops.__version__, len(names))
"""


# What is said of the version


def disagreements(version: str, root: Path = ROOT) -> list[str]:
    """Where else the version stands, and is another one: the topmost heading of the changelog, and the citation."""
    top = re.search(r"^## (.*)$", (root / "CHANGELOG.md").read_text(), re.M)
    cited = re.search(r'^version: "?([^"\n]*)"?$', (root / "CITATION.cff").read_text(), re.M)
    said = {"CHANGELOG.md": top and top[1], "CITATION.cff": cited and cited[1]}
    return [f"{where} must say {version}, got {got}" for where, got in said.items() if got != version]


# Building


def run(*command: object, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, env=env)
    assert done.returncode == 0, f"{command[0]} {command[1]} ...\n{done.stdout}{done.stderr}"
    return done.stdout


def archives(folder: Path) -> tuple[Path, Path]:
    """The wheel and the source archive, in the folder: of a copy of what git knows or would add, and nothing else."""
    tree = folder / "tree"
    for name in filter(None, run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tree / name)
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
    """What to say of it. Raises `NotTried` where torch cannot be had, `AssertionError` with what a failed program said."""
    inside = interpreters.clean(version, python, envs)
    interpreters.put(version, envs, cuda, str(wheel))
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "TRITON"))}
    said = run(inside, "-I", "-c", IMPORTS, cwd=envs, env=env).split()
    snippet = re.search(r"^```python\n(.*?)^```", (tree / "README.md").read_text(), re.S | re.M)
    assert snippet is not None, "README.md must have a snippet"
    assert "kept" in run(inside, "-I", "-c", snippet[1], cwd=envs, env=env)
    table = run(inside, "-I", "-m", "funcops.bench", "residuals", cwd=envs, env=env)
    interpreters.put(version, envs, cuda, *interpreters.NEEDED)
    tests = run(inside, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_tiny.py", cwd=tree, env=env)
    return (
        f"funcops {said[0]}; {said[1]} modules import; the README's snippet runs; bench residuals prints {len(table.splitlines())} "
        f"lines; tests/test_tiny.py: {tests.strip().splitlines()[-1]}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", action="store_true", help="install torch for CUDA where pip has no other")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "built").mkdir()
        wheel, source = archives(folder / "built")
        print(f"{wheel.name} {wheel.stat().st_size:,} bytes, {source.name} {source.stat().st_size:,}", flush=True)
        wrong = disagreements(wheel.name.split("-")[1])
        (folder / "source").mkdir()
        tree, count = unpacked(source, folder / "source"), 0
        for version, (python, _) in sorted(interpreters.found().items(), key=lambda item: int(item[0].split(".")[1])):
            try:
                said, count = tried(version, python, wheel, tree, folder / "envs", args.cuda), count + 1
            except interpreters.NotTried as reason:
                said = f"not tried: {reason}"
            except AssertionError as error:
                said = str(error)
                wrong.append(f"Python {version} failed")
            print(f"Python {version}: {said}", flush=True)
            shutil.rmtree(folder / "envs" / version, ignore_errors=True)  # a gigabyte each
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong or not count else 0


if __name__ == "__main__":
    sys.exit(main())
