"""The site as `make docs` built it, read without a browser: what a visitor without scripts, and without a network, would miss.

    python tests/built_site.py [FOLDER]       a line for each fault; exit status 1 where there is one

Every public name is on its page, and each example of its docstring; every link and picture leads to a file of the site, and to a
place in it where it names one; nothing is fetched from elsewhere. No signature is wider than a page, no table shows the backslash
of an escaped bar, and pages take the width of a screen. The site's search lists the right page first for each query of
`FIRST`; where Node.js is missing, this is not tried, and said.
"""

from __future__ import annotations

import doctest
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
FETCHED = {"img": "src", "script": "src", "iframe": "src", "source": "src", "link": "href"}
NOT_FETCHED = {"canonical", "prev", "next", "edit"}  # relations of <link> that a browser loads nothing for
SILENT = {"script", "style", "template"}
WIDEST = 90  # characters of a line of a signature, beside the navigation and the table of contents
GRID = re.compile(r"\.md-grid\s*\{[^}]*?max-width:\s*([\d.]+)(\w+|%)")
FIRST = {  # the page that the site's search is to list first
    "LinearConfig": "reference/layers/linear.html",
    "linear_fwd": "reference/layers/linear.html",
    "column_linear": "reference/dist/layers/column_linear.html",
    "dgrad": "words.html",
    "wgrad": "words.html",
    "gradient checkpointing": "policies-and-budgets.html",
    "activation memory": "policies-and-budgets.html",
    "zero bubble": "write-your-own-backward-schedule.html",
    "1F1B": "write-your-own-backward-schedule.html",
    "FP8 training": "low-precision.html",
    "LoRA": "fine-tuning.html",
    "CUDA graph": "capturing-a-training-step.html",
    "FSDP": "data-parallel.html",
    "torchrun": "data-parallel.html",
    "load torch weights": "coming-from-pytorch.html",
    "measure kept bytes": "inside-an-existing-model.html",
}


class Wanted(NamedTuple):
    """The ids that a page must have, and texts that must be on it."""

    ids: Sequence[str] = ()
    texts: Sequence[str] = ()


class Page(HTMLParser):
    """The ids and links of a page, the files that it fetches, the words that it shows without a script, the code of its tables and
    its signatures."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.words: list[str] = []
        self.inside: list[str] = []
        self.path: list[str] = []  # the open elements among those that are read apart
        self.codes: list[str] = []
        self.signatures: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        self.ids.update(filter(None, (given.get("id"), given.get("name") if tag == "a" else None)))
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if FETCHED.get(tag) in given and given.get("rel") not in NOT_FETCHED:
            self.fetched.append(given[FETCHED[tag]])
        if tag in SILENT:
            self.inside.append(tag)
        if "doc-signature" in given.get("class", "").split():
            self.path.append("signature")
            self.signatures.append("")
        elif tag in ("td", "code") and "signature" not in self.path:
            self.path.append(tag)
            self.codes += [""] if self.path[-2:] == ["td", "code"] else []

    def handle_endtag(self, tag: str) -> None:
        if self.inside and self.inside[-1] == tag:
            self.inside.pop()
        if self.path and self.path[-1] == {"pre": "signature"}.get(tag, tag):
            self.path.pop()

    def handle_data(self, data: str) -> None:
        if not self.inside:
            self.words.append(data)
        if self.path[-1:] == ["signature"]:
            self.signatures[-1] += data
        elif self.path[-2:] == ["td", "code"]:
            self.codes[-1] += data


def faults(site: Path, wanted: dict[str, Wanted]) -> list[str]:
    """The faults of the site, a line each; `wanted` is keyed by the page's path."""
    pages = {path.relative_to(site).as_posix(): Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found = [f"{at}: expected a page, got none" for at in wanted if at not in pages]
    for at, page in pages.items():
        own, words = wanted.get(at, Wanted()), "".join(page.words)
        found += [f"{at}: expected {name}, got no such id" for name in own.ids if name not in page.ids]
        found += [f"{at}: expected {text!r} to be read there, got it nowhere" for text in own.texts if text not in words]
        if not words.strip():
            found.append(f"{at}: expected words without a script, got none")
        found += [f"{at}: expected a bar in a table, got `{code}`" for code in page.codes if "\\|" in code]
        cut = [line for one in page.signatures if "(" in one for line in one.splitlines() if len(line) > WIDEST]
        found += [f"{at}: expected a signature of at most {WIDEST} characters a line, got {line!r}" for line in cut]
        found += [f"{at}: expected all of it in the site, got {url}" for url in page.fetched if urlsplit(url).netloc]
        if at != "404.html":  # which is shown in the place of any page, and so names others from the root of a server
            found += [fault for url in page.links + page.fetched if (fault := dead(site, at, url, pages))]
    style = site / "extra.css"
    width = GRID.search(style.read_text(encoding="utf-8")) if style.is_file() else None
    if style.is_file() and not (width and width[2] == "%" and float(width[1]) >= 90):
        found.append(f"extra.css: expected .md-grid to take at least 90 % of a screen, got {width and width[1] + width[2]}")
    return found if pages else [f"{site}: expected pages, got none"]


def dead(site: Path, at: str, url: str, pages: dict[str, Page]) -> str | None:
    """The fault of a link from the page at `at`, if the link leads into the site and is broken."""
    parts = urlsplit(url)
    if parts.scheme or parts.netloc:
        return None
    target = os.path.normpath(os.path.join(os.path.dirname(at), unquote(parts.path))) if parts.path else at
    if target == ".":
        target = "index.html"
    if not (site / target).is_file():
        return f"{at}: expected a file of the site at {url}, got none"
    there = pages.get(target)
    if there and parts.fragment and parts.fragment != "__top" and unquote(parts.fragment) not in there.ids:
        return f"{at}: expected a place in {target} at {url}, got none"
    return None


def misled(site: Path, first: dict[str, str]) -> list[str]:
    """A line for each query for which the site's own search, run by Node.js, lists another page first."""
    script = ROOT / "tests" / "site_search.js"
    done = subprocess.run(["node", script, site], input="\n".join(first), capture_output=True, text=True, check=True)
    listed = [[place.partition("#")[0] for place in json.loads(line)] for line in done.stdout.splitlines()]
    found = [(query, wanted, got[:1]) for (query, wanted), got in zip(first.items(), listed, strict=True)]
    return [f"search for {query!r}: expected {wanted} first, got {got}" for query, wanted, got in found if got != [wanted]]


def shown(names: Sequence[str], homes: Sequence[str], value_of: Any) -> Iterator[str]:
    """The examples in the docstrings of these names and of the modules that open their sections: input and output."""
    of = [value for value in map(value_of, names) if inspect.isfunction(value) or inspect.isclass(value)]
    for value in (*map(importlib.import_module, homes), *of):
        for example in doctest.DocTestParser().get_examples(inspect.getdoc(value) or ""):
            yield ">>> " + example.source.splitlines()[0]
            yield example.want


def main(argv: list[str]) -> int:
    sys.path.insert(0, str(ROOT))
    from docs import reference

    wanted = {}
    for page in reference.pages():
        texts = shown(page.names, [page.home] if page.home else [], reference.value_of)
        wanted[str(Path(page.path).with_suffix(".html"))] = Wanted(page.names, list(texts))
    site = Path(argv[0]) if argv else ROOT / "site"
    found = faults(site, wanted)
    if shutil.which("node"):
        found += misled(site, FIRST)
    else:
        print("node is not installed: the search of the site was not tried")
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
