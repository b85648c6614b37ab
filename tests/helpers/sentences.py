"""Pages whose sentences are each held by a test."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def sentences(text):
    """The rows of tables, but for their heads, and the sentences of a page, without its code and headings."""
    lines = re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M).splitlines()
    heads = {i - 1 for i, line in enumerate(lines) if line.startswith("|-")}
    rows = [line for i, line in enumerate(lines) if line.startswith("| ") and i not in heads]
    prose = " ".join(line for line in lines if not line.startswith(("|", "#")))
    return [*rows, *re.split(r"(?<=[.:]) (?=[A-Z`[*])", re.sub(r"\s+", " ", prose).strip())]


def holders(held):
    """The holders of the sentences: functions, and tests of other files by `FILE::NAME`."""
    return [one for each in held.values() for one in (each if isinstance(each, tuple) else (each,))]


def check_held(said, held):
    """Each sentence begins with one key of `held`, each key begins one sentence, and each test that is named exists."""
    odd = [one for one in said if sum(one.startswith(key) for key in held) != 1]
    assert not odd, odd
    odd = [key for key in held if sum(one.startswith(key) for one in said) != 1]
    assert not odd, odd
    for named in (one for one in holders(held) if isinstance(one, str)):
        file, _, test = named.partition("::")
        assert f"\ndef {test}(" in (ROOT / file).read_text(), named


def checks(held, slow=()):
    """The functions among the holders, each once, as cases of a test; those in `slow` are of the second tier."""
    found = dict.fromkeys(one for one in holders(held) if callable(one))
    return [pytest.param(one, id=one.__name__, marks=pytest.mark.slow if one in slow else ()) for one in found]
