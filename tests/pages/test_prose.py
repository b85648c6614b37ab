"""Prose is plain, in the package, the pages and the tests: no docstring begins with a fragment, no banned phrase."""

import prose
import pytest

READ = ("funcops", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docs", "benchmarks", "examples", "tests")
QUOTES = {"tests/helpers/prose.py", "tests/pages/test_prose.py"}  # the rules, and what breaks them


@pytest.mark.parametrize("name", READ)
def test_prose_is_plain(name):
    read = [path for path in prose.files(name) if path.relative_to(prose.ROOT).as_posix() not in QUOTES]
    found = [one for path in read for one in prose.found(path)]
    assert not found, "\n".join(map(str, found))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('def f():\n    """What it gives."""\n', ["What it gives."]),
        ('def f():\n    """Return x, as y\n    was."""\n', ["as y was"]),
        ('def f():\n    """Return x."""  # those of\n    # x that is\n    # none\n', ["is none", "those of"]),
        ('def f():\n    """Return x."""\n    raise ValueError("x is no tensor")\n', ["is no t"]),
        ('def f():\n    """Return x: whether it is not None."""\n    return x is None\n', []),
    ],
)
def test_hard_prose_is_found(tmp_path, text, said):
    path = tmp_path / "module.py"
    path.write_text(text)
    assert sorted(one.text for one in prose.found(path)) == said
