"""Each link of `docs/the-engine.md` to a name leads to the line that defines it."""

import re

import engine_links
import pytest
from engine_links import PAGE, ROOT, Link

TEXT = PAGE.read_text()
LINKS = engine_links.links(TEXT)


def astray(found):
    """The links to a line that defines another name, or nothing."""
    for link in found:
        lines, name = (ROOT / link.path).read_text().splitlines(), link.name.rpartition(".")[2]
        line = lines[link.line - 1] if link.line <= len(lines) else ""
        if not re.match(rf"\s*((def|class) {name}\b|{name}(: | = |, ))", line):
            yield link


def test_each_name_is_on_the_line_of_its_link():
    assert len(LINKS) > 50 and not list(astray(LINKS)), "run python tests/helpers/engine_links.py"
    assert engine_links.refreshed(TEXT) == TEXT


def test_every_link_to_a_line_names_what_is_there():
    assert TEXT.count(".py#L") == len(LINKS)
    files = re.findall(r"\]\(\.\./([\w/.-]+)\)", TEXT)
    assert files and all((ROOT / path).exists() for path in files)


def test_a_stale_number_is_found_and_mended():
    link = LINKS[0]
    stale = TEXT.replace(f"{link.path}#L{link.line})", f"{link.path}#L{link.line + 3})", 1)
    assert list(astray(engine_links.links(stale))) == [link._replace(line=link.line + 3)]
    assert list(astray([link._replace(line=10**6)]))
    assert engine_links.refreshed(stale) == TEXT


def test_a_name_that_is_gone_is_named():
    with pytest.raises(ValueError, match=r"gone must be defined in tests/helpers/engine_links.py, got no such name"):
        engine_links.refreshed("see [`gone`](../tests/helpers/engine_links.py#L1)")


def test_names_of_modules_and_classes_are_found():
    source = "A, B = 1, 2\n\n\n@call\nclass C:\n    d: int = 3\n\n    def f(self):\n        g = 1\n\n\ndef f(): ...\n\n\nA = 4\n"
    assert engine_links.lines_of(source) == {"A": 1, "B": 1, "C": 5, "C.d": 6, "C.f": 8, "f": 12}
    assert engine_links.links("[`f`](../a/b.py#L7) [g](../a/b.py#L8)") == [Link("f", "a/b.py", 7)]
