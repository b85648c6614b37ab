"""The workflow that releases: it runs commands of the Makefile, which are run here, and only its last job can publish. Nothing is
published or signed from here."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import checkout
import pytest
import release
import yaml

import funcops

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / ".github" / "workflows" / "release.yml").read_text()
FLOW = yaml.load(TEXT, yaml.BaseLoader)  # to which `on` is a word
JOBS = FLOW["jobs"]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.M)[1].split()
MATRIX = JOBS["check"]["strategy"]["matrix"]["include"]
GITHUB = {"GITHUB_SERVER_URL": "https://example.org", "GITHUB_REPOSITORY": "owner/funcops"}


def commands(job):
    return [step["run"] for step in JOBS[job]["steps"] if "run" in step]


def test_every_action_is_pinned_to_a_commit_whose_version_is_said():
    used = [step["uses"] for job in JOBS.values() for step in job["steps"] if "uses" in step]
    pinned = re.findall(r"uses: (\S+@[0-9a-f]{40}) # v\d+\.\d+\.\d+$", TEXT, re.M)
    assert sorted(used) == sorted(pinned) and len(used) >= 9
    assert len({name.partition("@")[0] for name in used}) == len(set(used))  # one version of each


def test_it_begins_with_the_tag_of_a_version_alone():
    assert FLOW["on"] == {"push": {"tags": ["v[0-9]+.[0-9]+.[0-9]+"]}}


def test_only_the_job_that_publishes_has_an_identity_and_it_runs_nothing_else():
    assert FLOW["permissions"] == {}
    rights = {name: job["permissions"] for name, job in JOBS.items()}
    assert rights.pop("publish") == {"id-token": "write"} and all(right == {"contents": "read"} for right in rights.values())
    last = JOBS["publish"]
    assert last["environment"] == "pypi" and not commands("publish")
    assert [step["uses"].partition("@")[0] for step in last["steps"]] == [
        "actions/download-artifact",
        "pypa/gh-action-pypi-publish",
    ]
    assert "secrets" not in TEXT and "password" not in TEXT
    for job in JOBS.values():
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"] == {"persist-credentials": "false"}


def test_what_is_published_was_built_once_and_all_that_can_fail_came_before():
    assert set(JOBS["publish"]["needs"]) == JOBS.keys() - {"publish"} and JOBS["check"]["needs"] == "build"
    assert all("if" not in job and "continue-on-error" not in job for job in JOBS.values())
    carried = [step["with"] for job in JOBS.values() for step in job["steps"] if "-artifact@" in step.get("uses", "")]
    assert [(one["name"], one["path"]) for one in carried] == [("dist", "dist/")] * 3


@pytest.mark.parametrize("job", JOBS)
def test_a_step_that_runs_is_a_command_of_the_makefile(job):
    for command in commands(job):
        program, *words = shlex.split(command)
        targets = [word for word in words if not word.startswith("ARGS=")]
        assert program == "make" and targets and set(targets) <= set(TARGETS), command
        assert "${{" not in command  # text of GitHub's would become a part of the program
    assert commands(job) or job == "publish"


def test_the_rows_are_those_that_release_check_tries():
    (command,) = commands("check")
    said = shlex.split(command)[-1].removeprefix("ARGS=")
    rows = []
    for one in MATRIX:
        args = release.parsed(said.replace("$ROW", one["row"]).split())
        assert args.archives == Path("dist") and args.cuda and not args.build
        (row,) = args.rows
        assert row.version == release.HERE  # the machine's own Python, which setup-python chooses
        rows.append(release.Row(one["python"], row.torch))
    assert rows[:-2] == release.chosen([], [])[:-2] and [row.torch for row in rows[-2:]] == [release.OLDEST, release.NEWEST]
    assert all(row.version in release.interpreters.VERSIONS for row in rows)
    assert JOBS["check"]["steps"][-1]["env"] == {"ROW": "${{ matrix.row }}"}


def ran(command, tree, python, **env):
    """Run a command in a tree whose environment has all that `make` would install, and this text of a shell for its Python."""
    (tree / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
    (tree / ".venv" / "bin" / "python").write_text(f"#!/bin/sh\n{python}\n")
    (tree / ".venv" / "bin" / "python").chmod(0o755)
    for name in (".made", ".build"):
        (tree / ".venv" / name).touch()
    outer = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")  # a make inside a make also prints its folder
    said = {key: value for key, value in os.environ.items() if key not in (*outer, "PYTHONPATH")} | GITHUB | env
    return subprocess.run(["bash", "-e", "-c", command], cwd=tree, env=said, capture_output=True, text=True)


@pytest.mark.slow
def test_the_build_step_makes_the_archives_of_the_tag(tmp_path):
    tree, this = tmp_path / "tree", f'exec {shlex.quote(sys.executable)} "$@"'
    checkout.copy(tree)
    (command,) = commands("build")
    done = ran(command, tree, this, GITHUB_REF_NAME=f"v{funcops.__version__}")
    assert done.returncode == 0, done.stdout + done.stderr
    wheel, source = release.both(tree / "dist")
    assert f"funcops-{funcops.__version__}" in wheel.name and source.stat().st_size > 1e6
    done = ran(f"rm -r dist; {command}", tree, this, GITHUB_REF_NAME="v9.8.7")
    assert done.returncode and f"the tag must say {funcops.__version__}, got 9.8.7" in done.stdout


@pytest.mark.parametrize("row", [one["row"] for one in MATRIX[-3:]])
def test_the_check_step_calls_the_script_with_its_row(tmp_path, row):
    """`make release-check` itself runs the rest: the script in an environment."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (command,) = commands("check")
    done = ran(command, tmp_path, 'printf "%s\\n" "$@"', ROW=row)
    assert done.stdout.splitlines()[-len(row.split()) - 4 :] == ["tests/release.py", "--archives", "dist", "--cuda", *row.split()]


def test_the_checks_and_tests_are_make_check_and_make_test():
    assert commands("test") == ["make check test"]
    for name in ("zizmor", "check-jsonschema"):
        assert f"$(VENV)/bin/{name} " in MAKEFILE.split("\ncheck: ")[1].split("\n\n")[0]


def test_the_file_says_that_it_has_published_nothing():
    assert "Nothing has been published or signed by this file yet." in TEXT.partition("\nname:")[0]
