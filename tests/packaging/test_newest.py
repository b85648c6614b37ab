"""`make newest` installs what it says, keeps what is there, and names what keeps it from running; no test asks an index."""

import collections
import json
import re
import subprocess
from pathlib import Path

import drawn_part
import newest
import pytest

Ran = collections.namedtuple("Ran", "returncode stdout stderr")
REPORT = json.dumps({"version": "1", "install": [{"metadata": {"name": "torch", "version": "2.15.0+cpu"}}]})
FAULTS = {  # pip's status and words, or what it raises -> the start of what is said
    "unreachable": (Ran(1, "", "WARNING: Retrying\nERROR: Max retries exceeded: Connection refused"), "index: pip"),
    "no such name": (Ran(1, "", "ERROR: Temporary failure in name resolution"), "index: pip"),
    "slow": (subprocess.TimeoutExpired("pip", 1), "index: pip install must end within"),
    "timed out": (Ran(2, "", "ERROR: Read timed out."), "index: pip"),
    "no such version": (Ran(1, "", "ERROR: No matching distribution found for torch==9"), "index: pip"),
    "full": (Ran(1, "", "ERROR: [Errno 28] No space left on device"), "disk: pip install ran out of room"),
}


@pytest.fixture
def pips(monkeypatch, tmp_path):
    """Every command that is run; `answer(command)` gives what pip returns, or raises it."""
    said = []

    def run(command, **options):
        said.append([str(part) for part in command])
        if "venv" in command:
            (tmp_path / "env" / "bin").mkdir(parents=True)
            (tmp_path / "env" / "bin" / "python").touch()
            (tmp_path / "env" / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
        outcome = pips.answer(said[-1]) if "pip" in command else Ran(0, "torch 2.15.0, Triton 3.9.0", "")
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def pips():
        return said

    pips.answer = lambda command: Ran(0, REPORT if "--report" in command else "", "")
    monkeypatch.setattr(newest.subprocess, "run", run)
    monkeypatch.setattr(newest.shutil, "disk_usage", lambda _: collections.namedtuple("Usage", "free")(pips.free))
    pips.free = 100e9
    return pips


def installs(pips):
    return [command for command in pips() if "install" in command and "--dry-run" not in command]


@pytest.mark.parametrize("asked, torch", [([], "2.15.0"), (["--torch", "2.11.0"], "2.11.0")])
def test_an_environment_is_made_once_for_a_version(pips, tmp_path, capsys, asked, torch):
    folder = tmp_path / "env"
    for _ in range(2):
        newest.main([str(folder), *asked])
    assert len(installs(pips)) == 1 and ".[test]" in installs(pips)[0]
    pins = (folder / "constraints.txt").read_text().splitlines()
    assert f"torch=={torch}" in pins and not [pin for pin in pins if pin.startswith("triton")]
    committed = set((newest.ROOT / "constraints.txt").read_text().splitlines())
    assert {pin.partition("==")[0] for pin in committed - set(pins)} == {"torch", "triton"}
    assert "Triton 3.9.0" in capsys.readouterr().out
    newest.main([str(folder), "--torch", "2.12.0"])
    assert len(installs(pips)) == 2  # another version is


def test_beside_another_environment_torch_alone_is_installed(pips, tmp_path):
    site = tmp_path / "other" / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    newest.main([str(tmp_path / "env"), "--beside", str(tmp_path / "other")])
    assert installs(pips)[0][-1] == "torch"
    assert (tmp_path / "env/lib/python3.11/site-packages/beside.pth").read_text() == f"{newest.ROOT}\n{site}\n"


@pytest.mark.parametrize("fails", ["--dry-run", "install"])
@pytest.mark.parametrize("fault", FAULTS)
def test_an_index_or_disk_that_fails_is_named_and_leaves_nothing_half_made(pips, tmp_path, capsys, fault, fails):
    good, (outcome, words) = pips.answer, FAULTS[fault]
    pips.answer = lambda command: (
        outcome if fails in command and (fails == "--dry-run") == ("--dry-run" in command) else good(command)
    )
    with pytest.raises(SystemExit) as ended:
        newest.main([str(tmp_path / "env")])
    assert ended.value.code == newest.TRY_LATER
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"newest: not run: {words}")
    pips.answer = good
    before = len(installs(pips))
    newest.main([str(tmp_path / "env")])
    assert len(installs(pips)) == before + 1  # the next attempt installs


def test_the_newest_torch_is_the_one_that_pip_would_install(pips, tmp_path):
    newest.main([str(tmp_path / "env")])
    asked = next(command for command in pips() if "--dry-run" in command)
    assert asked[-1] == "torch" and "--no-deps" in asked and "index" not in asked
    pips.answer = lambda command: Ran(0, "{}", "")
    with pytest.raises(SystemExit, match="75"):
        newest.main([str(tmp_path / "env")])


def test_a_short_disk_is_named_before_anything_is_made(pips, tmp_path, capsys):
    pips.free = 7.9e9
    with pytest.raises(SystemExit, match="75"):
        newest.main([str(tmp_path / "env"), "--torch", "2.11.0"])
    assert "must have 8 GB of room, got 7.9 GB" in capsys.readouterr().out and not pips()


def test_a_fault_of_pip_itself_ends_the_run(pips, tmp_path):
    pips.answer = lambda command: Ran(1, "", "ERROR: Cannot install torch and peft: they conflict")
    with pytest.raises(SystemExit, match="they conflict") as ended:
        newest.main([str(tmp_path / "env"), "--torch", "2.11.0"])
    assert ended.value.code != newest.TRY_LATER


def test_a_part_is_drawn_by_name_and_seed():
    names = [f"tests/test_a.py::test[{i}]" for i in range(2000)]
    parts = [{name for name in names if drawn_part.chosen(name, 10, seed)} for seed in ("a", "b")]
    assert all([120 < len(part) < 280 for part in parts]) and parts[0] != parts[1]
    assert {name for name in names if drawn_part.chosen(name, 1, "a")} == set(names)


def test_the_page_of_versions_has_what_is_installed_and_the_least_that_the_metadata_takes():
    root = Path(__file__).resolve().parents[2]
    rows = re.findall(r"^\| (\d[\d.]*) \| (\d[\d.]*) \|", (root / "docs" / "versions.md").read_text(), re.M)
    pinned = dict(re.findall(r"^(torch|triton)==([\d.]+)", (root / "constraints.txt").read_text(), re.M))
    least = re.findall(r'"(torch|triton)>=([\d.]+)', (root / "pyproject.toml").read_text())
    assert rows[0] == (pinned["torch"], pinned["triton"])
    for i, (_, version) in enumerate(least):
        assert min((row[i] for row in rows), key=lambda v: [int(n) for n in v.split(".")]).startswith(version)
