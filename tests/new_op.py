"""Begin an operator: copies `softcap`, an operator of every part without params, under another name.

    python tests/new_op.py square          makes the files below, and tells what to change in them

It makes kernels/NAME.py, kernels/triton/NAME.py and ops/NAME.py in funcops/library, and tests/cases/NAME.py, adds the lines that
name the operator, and writes the tables of kernels and of defaults anew (a minute). `make test` passes at once, as the copy still
computes y = c tanh(x / c): put your own math, and your own reference in the cases, in its place.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = ("funcops/library/kernels/{}.py", "funcops/library/kernels/triton/{}.py", "funcops/library/ops/{}.py", "tests/cases/{}.py")
OLD, GROUP, WIDTH, INDENT = "softcap", "    pointwise        ", 110, " " * 21
NEXT = """Now put your operator in the place of the copied one:
  1. the formula and the kernel: {0} and {1}
  2. the math, the config, what is kept, an example: {2}
  3. the reference, shapes, bad calls: {3}
  4. make aot traffic, which write the tables of registers and of bytes; make gpu, if there is a GPU
  5. make test: the laws say what is missing
CONTRIBUTING.md says what an operator with params needs besides."""


def camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def begin(name: str, root: Path = ROOT) -> list[Path]:
    """Make the files of the operator `name`. Raises `ValueError` for a name that is taken or has other characters."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        raise ValueError(f"new_op: name must be words in lower case joined by _, got {name!r}")
    made = [root / file.format(name) for file in FILES]
    if taken := [path for path in made if path.exists()]:
        raise ValueError(f"new_op: name must be a new one, got {name!r}, which has {taken[0].relative_to(root)}")
    for file, path in zip(FILES, made, strict=True):
        path.write_text(renamed((root / file.format(OLD)).read_text(), name))
    edit(root / "funcops/__init__.py", lambda text: listed(imported(text, name), name))
    edit(root / "docs/operators.md", lambda text: text.replace(f"`{OLD}` |", f"`{OLD}`, `{name}` |", 1))
    edit(root / "benchmarks/kernel_calls.py", lambda text: called(text, name))
    edit(root / "tests/kernels/test_formulas.py", lambda text: copied(text, name, f'        "{OLD}_', f'        "{OLD}_bwd",'))
    edit(root / "benchmarks/traffic/limits.py", lambda text: text.replace(f"{OLD}_fwd", f"{OLD}_fwd|{name}_fwd", 1))
    return made


def write_tables(root: Path = ROOT) -> None:
    """Write the tables in which a test looks up the new kernels and defaults."""
    results = root / "docs" / "benchmarks"
    tables = [f"-m benchmarks {name} --changed {results}/{name}.csv --csv {results}/{name}.csv" for name in ("aot", "traffic")]
    tables += [f"-m benchmarks cards --page {root}/docs/cards.md", f"-m benchmarks unconfirmed --page {results}/unconfirmed.md"]
    tables += ["tests/contract/test_promised_defaults.py"]
    path = os.pathsep.join([str(root), str(root / "tests" / "helpers")])
    for table in tables:
        env = {key: value for key, value in os.environ.items() if not key.startswith("TRITON")} | {"PYTHONPATH": path}
        done = subprocess.run([sys.executable, *table.split()], cwd=root, env=env, stdout=subprocess.DEVNULL)
        if done.returncode:
            raise ValueError(f"new_op: python {table} ended with {done.returncode}")


def renamed(text: str, name: str) -> str:
    return re.sub(rf"\b{OLD}", name, text.replace(camel(OLD), camel(name)))


def edit(path: Path, change: Callable[[str], str]) -> None:
    text = path.read_text()
    changed = change(text)
    if changed == text:
        raise ValueError(f"new_op: {path} has no line of {OLD} to begin from")
    path.write_text(changed)


def imported(text: str, name: str) -> str:
    """The text of the package's face with the import of the operator, among its sorted lines."""
    lines = text.splitlines(keepends=True)
    new = f"    from funcops.library.ops.{name} import *\n"
    at = next(i for i, line in enumerate(lines) if line.startswith("    from funcops.library.ops.") and line > new)
    return "".join([*lines[:at], new, *lines[at:]])


def listed(text: str, name: str) -> str:
    """The text with the name at the end of its group in the help."""
    start = text.index(GROUP) + len(GROUP)
    end = start + re.search(r"\n(?! {21})", text[start:]).start()  # type: ignore[union-attr]
    words = [*re.split(r",\s+", text[start:end]), name]
    lines = [""]
    for i, word in enumerate(words):
        part = word + ("," if i < len(words) - 1 else "")
        if len(INDENT) + len(lines[-1]) + len(part) + 1 > WIDTH:
            lines.append("")
        lines[-1] += " " * bool(lines[-1]) + part
    return text[:start] + f"\n{INDENT}".join(lines) + text[end:]


def called(text: str, name: str) -> str:
    """The samples with a call of each of the operator's kernels, after the copied one's."""
    text = copied(text, name, f"{OLD}.{OLD}_", f"{OLD}.{OLD}_bwd")
    (block,) = [found for found in re.findall(r"(?:^    \w+,\n)+", text, re.M) if f"    {OLD},\n" in found]  # of imports, sorted
    return text.replace(block, "".join(sorted([*block.splitlines(keepends=True), f"    {name},\n"])), 1)


def copied(text: str, name: str, start: str, last: str) -> str:
    """The text with its lines that have `start` once more, under the new name, after the line that has `last`."""
    lines = text.splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if last in line)
    return "".join([*lines[: at + 1], *(renamed(line, name) for line in lines if start in line), *lines[at + 1 :]])


def main(argv: list[str]) -> int:
    if len(argv) != 1 or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if argv and argv[0] in ("-h", "--help") else 2
    try:
        made = begin(argv[0])
        write_tables()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(NEXT.format(*(path.relative_to(ROOT) for path in (made[0], made[1], made[2], made[3]))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
