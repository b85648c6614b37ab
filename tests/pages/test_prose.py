"""Prose in the rooms that have been read through by these rules: no docstring begins with a fragment, no banned phrase."""

import prose
import pytest

READ = [
    *(f"funcops/{room}" for room in ("formats", "fused", "kernels", "lora", "low_precision", "models", "program")),
    *("funcops/schedule", "funcops/testing", "README.md", "CONTRIBUTING.md", "docs", "benchmarks", "examples"),
]


@pytest.mark.parametrize("name", READ)
def test_prose_is_plain(name):
    found = [one for path in prose.files(name) for one in prose.found(path)]
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
