"""The version is defined once, and equal wherever it is repeated; checks before a release fail where they should."""

import re
import subprocess
import sys
import zipfile

import pytest
import release

import funcops


def test_the_version_is_the_same_everywhere():
    assert release.disagreements(funcops.__version__) == []


@pytest.mark.parametrize("name", ["CHANGELOG.md", "CITATION.cff"])
def test_another_version_is_noticed(tmp_path, name):
    for file in ("CHANGELOG.md", "CITATION.cff"):
        text = (release.ROOT / file).read_text()
        (tmp_path / file).write_text(text.replace(funcops.__version__, "9.8.7") if file == name else text)
    assert release.disagreements(funcops.__version__, tmp_path) == [f"{name} must say {funcops.__version__}, got 9.8.7"]


@pytest.mark.slow
def test_a_checkout_does_not_count_as_an_install(tmp_path):
    """This process imports the package from the checkout: the checks must see the wheel's."""
    done = subprocess.run([sys.executable, "-c", release.IMPORTS], cwd=release.ROOT, capture_output=True, text=True)
    assert done.returncode and "is not what was installed" in done.stderr


@pytest.mark.parametrize(
    ("outcome", "status"), [("good", 0), (AssertionError("it broke"), 1), (None, 1)], ids=["good", "bad", "none"]
)
def test_the_exit_status(monkeypatch, capsys, tmp_path, outcome, status):
    """One Python is good, failed or not tried; only a good one exits with 0."""
    wheel, source = tmp_path / f"funcops-{funcops.__version__}-py3-none-any.whl", tmp_path / "source"
    for path in (wheel, source):
        path.write_text("")

    def tried(*_):
        if outcome == "good":
            return outcome
        raise outcome or release.interpreters.NotTried("too large")

    monkeypatch.setattr(release, "archives", lambda folder, address: (wheel, source))
    monkeypatch.setattr(release, "unpacked", lambda *_: tmp_path)
    monkeypatch.setattr(release.interpreters, "found", lambda: {"3.11": ("python", frozenset())})
    monkeypatch.setattr(release, "tried", tried)
    assert release.main([]) == status
    said = {"good": "Python 3.11: good", None: "Python 3.11: not tried: too large"}.get(outcome, "Python 3.11 failed")
    assert said in capsys.readouterr().out


def test_a_requested_python_is_tried_alone(monkeypatch):
    there = {version: (f"python{version}", frozenset()) for version in ("3.9", "3.11", "3.10")}
    monkeypatch.setattr(release.interpreters, "found", lambda: there)
    assert list(release.chosen([])) == ["3.9", "3.10", "3.11"]
    assert release.chosen(["3.10"]) == {"3.10": "python3.10"}
    with pytest.raises(ValueError, match="--python: expected one of 3.9, 3.11, 3.10, as on this machine, got 3.12"):
        release.chosen(["3.10", "3.12"])


ADDRESS = "https://example.org/owner/funcops"


def test_what_an_index_shows_leads_to_the_repository():
    """No link of the README that an index shows is relative, and each leads to a file of the repository."""
    text = release.addressed((release.ROOT / "README.md").read_text(), ADDRESS)
    links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M))
    assert len(links) > 10 and all(link.startswith(("https://", "#")) for link in links)
    there = [link.removeprefix(f"{ADDRESS}/").split("/", 2) for link in links if link.startswith(ADDRESS)]
    assert {kind for kind, _, _ in there} == {"blob", "raw"}
    for kind, branch, path in there:
        assert branch == "main" and (release.ROOT / path.partition("#")[0]).exists(), path
        assert (kind == "raw") == path.endswith(".svg")
    assert release.addressed("[a](https://b.org) [c](#d) ![e [f]](g/h.svg)", ADDRESS) == (
        f"[a](https://b.org) [c](#d) ![e [f]]({ADDRESS}/raw/main/g/h.svg)"
    )


@pytest.mark.slow
def test_the_archives_of_an_address_have_its_links(tmp_path):
    wheel, source = release.archives(tmp_path, ADDRESS)
    with zipfile.ZipFile(wheel) as file:
        (name,) = [name for name in file.namelist() if name.endswith("METADATA")]
        said = file.read(name).decode()
    found = re.findall(r"^Project-URL: (\w+), (\S+)$", said, re.M)
    assert dict(found)["Source"] == ADDRESS and {"Homepage", "Documentation", "Changelog", "Issues"} <= dict(found).keys()
    assert f"({ADDRESS}/raw/main/docs/what-blocks-keep.svg)" in said and "](docs/" not in said and source.exists()
