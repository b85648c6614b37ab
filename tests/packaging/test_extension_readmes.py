"""The README of each extension says, file by file, what asks for it."""

import re
from pathlib import Path

import pytest
import test_rings

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [name for name in test_rings.EXTENSIONS if (ROOT / "funcops" / name).is_dir()]
TABLE = re.compile(r"^\| file \| what asks for it \|\n\|---\|---\|\n((?:\|.*\n)+)", re.M)
ROW = re.compile(r"\| `([\w/]+\.py)` \| (.+) \|")
LONGEST = 160  # characters of a reason


def faults(readme, files):
    """The faults of a README: files without one row, rows without a file or a short reason, and pages that do not exist."""
    tables = TABLE.findall(readme)
    if len(tables) != 1:
        return [f"{len(tables)} tables"]
    lines = tables[0].splitlines()
    rows = [ROW.fullmatch(line) for line in lines]
    named = [row[1] for row in rows if row]
    found = [f"not a row: {line}" for line, row in zip(lines, rows, strict=True) if not row]
    found += [f"no row: {name}" for name in sorted(set(files) - set(named))]
    found += [f"no file: {name}" for name in sorted(set(named) - set(files))]
    found += [f"two rows: {name}" for name in sorted(set(named)) if named.count(name) > 1]
    found += [f"no reason: {row[1]}" for row in rows if row and not row[2].strip()]
    found += [f"a long reason: {row[1]}" for row in rows if row and len(row[2]) > LONGEST]
    return found + [f"no page: {page}" for page in re.findall(r"`(docs/[^`]+)`", readme) if not (ROOT / page).is_file()]


def files_of(folder):
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*.py") if path.name != "__init__.py"]


@pytest.mark.parametrize("name", FOLDERS)
def test_each_file_has_one_reason(name):
    folder = ROOT / "funcops" / name
    assert faults((folder / "README.md").read_text(), files_of(folder)) == []


def test_the_folders_are_found():
    assert len(FOLDERS) >= 9 and "ops/gather.py" in files_of(ROOT / "funcops" / "distributed")


def test_a_wrong_table_is_found():
    head, files = "# x\n\n| file | what asks for it |\n|---|---|\n", ["a.py", "ops/b.py"]
    good = "| `a.py` | one |\n| `ops/b.py` | two |\n"
    assert faults(head + good, files) == []
    assert faults(head + good, [*files, "planted.py"]) == ["no row: planted.py"]
    assert faults(head + good, ["a.py"]) == ["no file: ops/b.py"]
    assert faults(head + good + "| `a.py` | one more |\n", files) == ["two rows: a.py"]
    assert faults(head + good.replace("one", "o" * 161), files) == ["a long reason: a.py"]
    assert faults(head + good.replace("one", " "), files) == ["no reason: a.py"]
    assert faults(head + good.replace("| one |", "|"), files)[0] == "not a row: | `a.py` |"
    assert faults(head + good.replace("one", "`docs/none.md`"), files) == ["no page: docs/none.md"]
    assert faults("# x\n", files) == ["0 tables"]
