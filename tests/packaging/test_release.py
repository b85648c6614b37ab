"""The version is defined once, and equal wherever it is repeated; checks before a release fail where they should."""

import re
import subprocess
import sys
import types
import zipfile

import pytest
import release

import funcops


def test_the_version_is_the_same_everywhere():
    assert release.disagreements(funcops.__version__) == []


@pytest.mark.parametrize("name", ["CHANGELOG.md", "CITATION.cff"])
def test_another_version_or_date_is_noticed(tmp_path, name):
    texts = {file: (release.ROOT / file).read_text() for file in ("CHANGELOG.md", "CITATION.cff")}
    ((date,),) = [re.findall(rf"^## {funcops.__version__} \((\d{{4}}-\d\d-\d\d)\)$", texts["CHANGELOG.md"], re.M)]

    def said(old, new):
        for file, text in texts.items():
            (tmp_path / file).write_text(text.replace(old, new) if file == name else text)
        return release.disagreements(funcops.__version__, tmp_path)

    assert said(funcops.__version__, "9.8.7") == [f"{name} must say {funcops.__version__}, got 9.8.7"]
    (line,) = said(date, "2001-02-03")
    assert line.startswith("CITATION.cff must say 2") and date in line and "2001-02-03" in line
    assert said(date, date) == []


def test_what_is_unreleased_stands_above_the_version():
    headings = re.findall(r"^## (.*)$", (release.ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] == "Unreleased" and headings[1].startswith(f"{funcops.__version__} (")


def test_a_tag_of_another_version_is_noticed():
    assert release.disagreements(funcops.__version__, tag=f"v{funcops.__version__}") == []
    assert release.disagreements(funcops.__version__, tag="v9.8.7") == [f"the tag must say {funcops.__version__}, got 9.8.7"]


@pytest.mark.slow
def test_a_checkout_does_not_count_as_an_install(tmp_path):
    """This process imports the package from the checkout: the checks must see the wheel's."""
    done = subprocess.run([sys.executable, "-c", release.IMPORTS], cwd=release.ROOT, capture_output=True, text=True)
    assert done.returncode and "is not what was installed" in done.stderr


ALL = [release.Row(version) for version in release.interpreters.VERSIONS]
OTHERS = [release.Row(release.HERE, release.OLDEST), release.Row(release.HERE, release.NEWEST)]
FAULTS = {  # what an environment raises -> the words after it
    "bad": (AssertionError("it broke"), "failed"),
    "none": (release.interpreters.NotTried("too large"), "was not tried"),
    "later": (release.newest.TryLaterError("index: pip"), "was not tried"),
    "pip": (SystemExit("they conflict"), "failed"),
}


@pytest.fixture
def dist(tmp_path):
    """A folder with the names of both archives."""
    folder = tmp_path / "dist"
    folder.mkdir()
    for end in ("-py3-none-any.whl", ".tar.gz"):
        (folder / f"funcops-{funcops.__version__}{end}").write_text("")
    return folder


@pytest.fixture
def tries(monkeypatch, tmp_path):
    """The rows that are tried, of which none installs anything; `tries.faults` has what a row raises."""
    rows, faults = [], {}

    def tried(row, *_):
        rows.append(row)
        if row in faults:
            raise faults[row]
        return "good"

    monkeypatch.setattr(release, "unpacked", lambda *_: tmp_path)
    monkeypatch.setattr(release.interpreters, "found", lambda: {row.version: ("python", frozenset()) for row in ALL})
    monkeypatch.setattr(release, "tried", tried)
    return types.SimpleNamespace(rows=rows, faults=faults)


def test_every_python_and_the_oldest_and_the_newest_torch_are_tried(tries, dist, capsys):
    assert release.main(["--archives", str(dist)]) == 0
    assert set(tries.rows) == {*ALL, *OTHERS} and len(tries.rows) == len(ALL) + 2
    assert [f"{row}: good" in capsys.readouterr().out for row in ALL[:1]] == [True]


@pytest.mark.parametrize("fault", FAULTS)
def test_one_environment_that_fails_or_is_not_tried_fails_the_check(tries, dist, capsys, fault):
    raised, said = FAULTS[fault]
    for row in (ALL[1], OTHERS[1]):
        tries.faults.clear()
        tries.faults[row] = raised
        assert release.main(["--archives", str(dist)]) == 1
        assert capsys.readouterr().out.splitlines()[-1] == f"{row} {said}"


def test_a_python_that_is_missing_fails_the_check(tries, dist, monkeypatch, capsys):
    monkeypatch.setattr(release.interpreters, "found", lambda: {row.version: ("python", frozenset()) for row in ALL[1:]})
    assert release.main(["--archives", str(dist)]) == 1
    assert f"{ALL[0]}: not tried: none on this machine" in capsys.readouterr().out


def test_requested_environments_are_tried_alone():
    assert release.chosen([], []) == [*ALL, *OTHERS]
    assert release.chosen(["3.10"], []) == [release.Row("3.10")] and release.chosen([], ["oldest"]) == OTHERS[:1]
    assert release.chosen(["3.12"], ["oldest", "newest"]) == [release.Row("3.12", "oldest"), release.Row("3.12", "newest")]
    assert release.parsed(["--here"]).rows == [release.Row(release.HERE)]
    with pytest.raises(ValueError, match="--python must be one of 3.10, .*, as in the metadata, got 3.9"):
        release.chosen(["3.10", "3.9"], [])


def test_a_folder_must_hold_the_two_archives_alone(dist, capsys):
    assert [path.suffix for path in release.both(dist)] == [".whl", ".gz"]
    with pytest.raises(SystemExit):
        release.parsed(["--build", str(dist)])  # which would mix two builds
    assert "must be a new or an empty folder" in capsys.readouterr().err
    (dist / "z.txt").write_text("")
    with pytest.raises(ValueError, match="must hold a wheel and a source archive alone, got .*z.txt"):
        release.both(dist)
    for path in [dist / "z.txt", next(dist.glob("*.whl"))]:
        path.unlink()
    with pytest.raises(ValueError, match="alone, got funcops-.*tar.gz"):
        release.both(dist)


def of_wheel(path, *needed):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("funcops-1.dist-info/METADATA", "".join(f"Requires-Dist: {line}\n" for line in needed))
    return path


def test_the_oldest_packages_are_the_bounds_of_the_metadata(tmp_path):
    wheel = of_wheel(tmp_path / "a.whl", "torch>=2.11", 'triton>=3.6; sys_platform == "linux"', 'pytest; extra == "test"')
    assert release.least(wheel) == ["torch==2.11", 'triton==3.6; sys_platform == "linux"']
    pins = release.pins(OTHERS[0], "python", wheel).splitlines()
    committed = (release.ROOT / "constraints.txt").read_text().splitlines()
    assert pins[-2:] == release.least(wheel) and [line for line in committed if line not in pins and "==" in line] == [
        line for line in committed if line.startswith(("torch==", "triton=="))
    ]
    assert release.pins(ALL[0], "python", wheel).splitlines() == committed
    with pytest.raises(AssertionError, match="must have a lower bound alone, got .'torch>=2.11,<3'."):
        release.least(of_wheel(tmp_path / "b.whl", "torch>=2.11,<3"))


def test_the_newest_torch_is_the_one_that_pip_finds(monkeypatch, tmp_path):
    monkeypatch.setattr(release.newest, "newest", lambda inside: {"python": "9.8"}[inside])
    assert "torch==9.8" in release.pins(OTHERS[1], "python", tmp_path).splitlines()


def test_each_of_the_two_doors_of_the_readme_says_what_it_prints():
    blocks = release.BLOCK.findall((release.ROOT / "README.md").read_text())
    assert len([text for _, text in blocks if text]) == 2 and "from_torch" in blocks[0][0]


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
    release.archives(tmp_path, ADDRESS)
    wheel, _ = release.both(tmp_path)
    with zipfile.ZipFile(wheel) as file:
        (name,) = [name for name in file.namelist() if name.endswith("METADATA")]
        said = file.read(name).decode()
    found = re.findall(r"^Project-URL: (\w+), (\S+)$", said, re.M)
    assert dict(found)["Source"] == ADDRESS and {"Homepage", "Documentation", "Changelog", "Issues"} <= dict(found).keys()
    assert f"({ADDRESS}/raw/main/docs/what-blocks-keep.svg)" in said and "](docs/" not in said
