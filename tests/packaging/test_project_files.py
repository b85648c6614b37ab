"""The citation, the forms for issues, the roadmap and what a report of a mistake needs."""

import os
import re
import runpy
from pathlib import Path

import pytest
import torch
import yaml

import funcops

ROOT = Path(__file__).resolve().parents[2]
CITATION = yaml.load((ROOT / "CITATION.cff").read_text(), yaml.BaseLoader)
FORMS = {
    path.name: yaml.load(path.read_text(), yaml.BaseLoader) for path in sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
}
FIELDS = set(  # of the Citation File Format 1.2.0
    "abstract authors cff-version commit contact date-released doi identifiers keywords license license-url message "
    "preferred-citation references repository repository-artifact repository-code title type url version".split()
)
KINDS = {"textarea", "input", "dropdown", "checkboxes", "markdown"}


def faults_of_citation(said):
    """The faults for which the Citation File Format 1.2.0 refuses a file, as far as these fields go."""
    found = [f"missing: {name}" for name in ("authors", "cff-version", "message", "title") if not said.get(name)]
    found += [f"unknown: {name}" for name in sorted(said.keys() - FIELDS)]
    found += ["cff-version"] * (said.get("cff-version") != "1.2.0") + ["type"] * (said.get("type") not in ("software", "dataset"))
    found += ["date-released"] * (not re.fullmatch(r"\d{4}-[01]\d-[0-3]\d", said.get("date-released", "")))
    found += [
        f"author: {one}" for one in said.get("authors", ()) if not {"name"} <= one.keys() <= {"name", "website", "date-start"}
    ]
    return found


def test_the_citation_has_the_fields_of_its_format():
    assert faults_of_citation(CITATION) == []
    project = (ROOT / "pyproject.toml").read_text()
    assert (
        f'license = "{CITATION["license"]}"' in project
        and f'authors = [{{ name = "{CITATION["authors"][0]["name"]}" }}]' in project
    )
    assert [one["name"] for one in CITATION["authors"]] == re.findall(r"Copyright \d+ (.*)", (ROOT / "LICENSE").read_text())


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"title": ""}, "missing: title"),
        ({"released": "2026"}, "unknown: released"),
        ({"type": "program"}, "type"),
        ({"date-released": "30.11.2026"}, "date-released"),
        ({"authors": [{"given-names": "A", "affiliation": "B"}]}, "author: {'given-names': 'A', 'affiliation': 'B'}"),
        ({"cff-version": "1.1.0"}, "cff-version"),
    ],
)
def test_a_wrong_citation_is_found(change, found):
    assert faults_of_citation(CITATION | change) == [found]


def test_a_form_asks_for_what_an_answer_needs():
    assert len(FORMS) == 3
    for name, form in FORMS.items():
        assert {"name", "description", "body"} <= form.keys() <= {"name", "description", "labels", "body", "title"}, name
        asked = [part for part in form["body"] if part["type"] != "markdown"]
        names = [part["id"] for part in asked]
        assert {part["type"] for part in form["body"]} <= KINDS and len(set(names)) == len(names), name
        assert all(part["attributes"].get("label") or part["type"] == "markdown" for part in form["body"]), name
        assert [part["id"] for part in asked if part.get("validations", {}).get("required") == "true"][:1] == names[:1], name
    of = {name: {part.get("id"): part["attributes"] for part in form["body"]} for name, form in FORMS.items()}
    for name in ("1-bug.yml", "2-wrong-number.yml"):
        assert "python -m funcops.testing" in of[name]["environment"]["label"]
    assert "compare" in of["2-wrong-number.yml"]["compare"]["label"]


def test_the_commands_of_the_forms_run():
    """Python in backquotes is run, a step inside of each block: the names that a form gives exist."""
    texts = "\n".join((ROOT / ".github/ISSUE_TEMPLATE" / name).read_text() for name in FORMS)
    quoted = re.findall(r"`((?:with |print\()[^`]*)`", texts)
    assert len(quoted) >= 4
    cfg = funcops.ChainConfig((funcops.Step("up", funcops.linear, funcops.LinearConfig(2, 2)),))
    params = funcops.chain.init(cfg, key=funcops.random.key(0))
    scope = {"funcops": funcops, "step": lambda: funcops.chain.fwd(params, torch.ones(1, 2), cfg)}
    for text in quoted:
        exec(f"{text.rstrip(':')}: step()" if text.startswith("with ") else text, scope)


def test_a_report_names_versions_and_device_and_no_value_of_a_variable(monkeypatch, capsys):
    for name in [name for name in os.environ if name.startswith(("FUNCOPS_", "TRITON_", "TORCH", "PYTORCH_", "CUDA"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FUNCOPS_GEMM", "auto")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/secret/place")
    runpy.run_module("funcops.testing", run_name="__main__")
    out = capsys.readouterr().out
    said = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert {"python", "system", "optree", "device", "backend"} <= said.keys()
    assert said["funcops"] == funcops.__version__ and said["torch"].startswith(torch.__version__.partition("+")[0])
    assert said["variables"] == "FUNCOPS_GEMM, TRITON_CACHE_DIR" and "secret" not in out


def test_the_roadmap_has_ten_lines_and_says_what_no_device_has_confirmed():
    text = (ROOT / "docs" / "roadmap.md").read_text()
    assert re.findall(r"^(\d+)\. ", text, re.M) == [str(i) for i in range(1, 11)]
    assert {"benchmarks/unconfirmed.md", "cards.md", "training-is-decoding.md"} <= set(re.findall(r"\]\(([^)#]+)", text))


def test_pages_speak_of_the_index_first():
    """No page says that the package is not there, and the README names the checkout behind it."""
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        assert not re.search(r"not (yet )?on (a|the) package index|pip install -e \.(?!\[)", path.read_text()), path.name
    install = (ROOT / "README.md").read_text().split("\n## Install\n")[1].split("\n## ")[0]
    assert 0 < install.index("pip install funcops") < install.index("checkout")


@pytest.mark.parametrize("target", ["train", "test"])
def test_the_main_job_and_the_tests_run_from_a_fresh_clone_with_one_command(target):
    """`make` alone sets up what each needs: its environment is a prerequisite, which pip makes."""
    block = re.search(
        r"^From a fresh clone, each with one command:\n\n```bash\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M
    )[1]
    assert re.search(rf"^make {target} ", block, re.M)
    makefile = (ROOT / "Makefile").read_text()
    (needed,) = re.findall(rf"^{target}: \$\(VENV\)/(\.\w+)$", makefile, re.M)
    assert re.search(rf"^\$\(VENV\)/\{needed}: \$\(VENV\)/\.made .*\n(?:\t.*\n)*?\t\$\(PIP\) -e ", makefile, re.M)
