"""The page of what no GPU has run holds everything that no file of a device names, and nothing else."""

import csv
import json
import random

import pytest

from benchmarks import measure
from benchmarks.unconfirmed import (
    RESULTS,
    Unconfirmed,
    of_checks,
    of_gpu,
    of_kernels,
    of_tests,
    page_of,
    run,
    sources,
    sources_of_checks,
)

MARK = "mark." + "gpu"  # in two words, so that this file is not taken for one of the device


def test_the_committed_page_is_of_these_files():
    assert (RESULTS / "unconfirmed.md").read_text() == page_of(run()), (
        "`python -m benchmarks unconfirmed --page docs/benchmarks/unconfirmed.md` mends it"
    )


def results(folder, draw):
    """Drawn launches of drawn kernels, and files of a device that name some of them; also what no file names."""
    launches = [(f"k{draw.randrange(5)}", f"hash{i}") for i in range(40)]
    with (folder / "aot.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["kernel", "target", "hash"])
        writer.writeheader()
        writer.writerows({"kernel": k, "target": target, "hash": h} for k, h in launches for target in ("sm_80", "sm_90"))
    devices = "", "one", "one/more"
    ran = {f"{device}/{name}".strip("/"): [] for device in devices for name in ("kernels.json", "smoke.jsonl", "gpu-tests.jsonl")}
    confirmed = set()
    for _, found in launches:
        where, good = draw.choice(list(ran)), draw.random() < 0.5
        status = {"note": "" if good else "failed: memory"} if "kernels" in where else {"status": "passed" if good else "failed"}
        ran[where].append({"launches": f"other {found}", **status})
        confirmed |= {found} if good else set()
    for name, lines in ran.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        rows, whole = "".join(json.dumps(line) + "\n" for line in lines), '{"machine": {}, "rows": ' + json.dumps(lines) + "}"
        (folder / name).write_text(whole if "kernels" in name else rows)
    return launches, confirmed


@pytest.mark.parametrize("seed", range(20))
def test_launches_that_no_device_ran_are_listed(seed, tmp_path):
    launches, confirmed = results(tmp_path, random.Random(seed))
    want = {}
    for kernel, found in launches:
        every, missing = want.get(kernel, (0, 0))
        want[kernel] = every + 1, missing + (found not in confirmed)
    listed = {row.name: (row.all, row.missing) for row in of_kernels(tmp_path, tmp_path / "aot.csv")}
    assert listed == {kernel: counts for kernel, counts in want.items() if counts[1]}


@pytest.mark.parametrize("status", ["passed", "failed", "no device"])
@pytest.mark.parametrize("changed", [False, True])
def test_checks_that_no_device_passed_are_listed(status, changed, tmp_path):
    now = sources_of_checks()
    name = sorted(now)[0]
    line = {"check": name, "status": status, "source": "another" if changed else now[name]}
    (tmp_path / "smoke.jsonl").write_text(json.dumps(line) + "\n")
    found = {row.name for row in of_checks(tmp_path)}
    assert found == set(now) - ({name} if status == "passed" and not changed else set())


def test_a_comment_changes_no_check_and_a_number_does():
    text = """
@check
def a(device):
    '''Doc.'''
    return 1

@check(device_only=True)
def b(device):
    return 2

def c(): pass
"""
    found = sources(text, "check")
    assert set(found) == {"a", "b"}
    assert sources(text.replace("Doc.", "Other.").replace("return 1", "return 1  # why"), "check") == found
    assert sources(text.replace("return 1", "return 3"), "check")["a"] != found["a"]


def test_tests_that_no_device_passed_are_listed(tmp_path):
    every = {row.name for row in of_tests(tmp_path)}
    name = sorted(every)[0]
    (tmp_path / "gpu-tests.jsonl").write_text(json.dumps({"test": f"{name}[1-x]", "status": "passed"}) + "\n")
    assert {row.name for row in of_tests(tmp_path)} == every - {name}


def test_marked_tests_are_found(tmp_path):
    file = tmp_path / "test_a.py"
    file.write_text(f"@pytest.{MARK}\ndef test_one(): pass\n\ndef test_two(): pass\n")
    assert of_gpu(file) == ["test_one"]
    file.write_text(f"pytestmark = pytest.{MARK}\n\ndef test_one(): pass\n\ndef test_two(): pass\n")
    assert of_gpu(file) == ["test_one", "test_two"]
    file.write_text("def test_one(): pass\n")
    assert of_gpu(file) == []


def test_a_page_names_all_rows():
    rows = [Unconfirmed("kernel", "norm.forward", 2, 5), Unconfirmed("smoke check", "a_check", 1, 1)]
    text = page_of(rows)
    assert "| `norm.forward` | 5 | 2 |" in text and "- `a_check`" in text and text.endswith("## Tests marked gpu\n\nNone.\n")


def test_figures_name_the_commit(monkeypatch, tmp_path):
    """With a + if a file differs from it."""
    monkeypatch.delenv("FUNCOPS_REVISION", raising=False)
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert measure.revision() == "unknown"

    def git(*words):
        measure.subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True, capture_output=True
        )

    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "a")
    clean = measure.revision()
    assert len(clean) == 12 and clean.isalnum()
    (tmp_path / "a").write_text("2")
    assert measure.revision() == clean + "+" == measure.machine()["revision"]
    monkeypatch.setenv("FUNCOPS_REVISION", "abc")
    assert measure.revision() == "abc"
