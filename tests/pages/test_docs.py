"""Every python block of the docs runs, in order, the blocks of a page sharing their names; so do all doctests."""

import doctest
import importlib
import linecache
import os
import pkgutil
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import funcops

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
MODULES = sorted(m.name for m in pkgutil.walk_packages(funcops.__path__, "funcops.") if not m.name.endswith("__main__"))


@pytest.mark.turns("page", every=3)
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_code_blocks_run(page, monkeypatch, capsys):
    """And print the text of the page's `text` blocks."""
    module = types.ModuleType("page_" + re.sub(r"\W", "_", page.stem))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names = module.__dict__
    torch.manual_seed(0)  # what a page draws without a generator must not differ from run to run
    text = page.read_text()
    if "import triton" in text:
        pytest.importorskip("triton")
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.S | re.M):
        lines = "\n" * text.count("\n", 0, block.start(1))  # so that a traceback, and Triton, find its source in the page
        exec(compile(lines + block[1], str(page), "exec", dont_inherit=True), names)
    printed = capsys.readouterr().out
    for shown in re.findall(r"^```text\n(.*?)^```", text, re.S | re.M):
        assert shown in printed, shown


PROGRAMS = [(page, program) for page in PAGES for program in re.findall(r"<<'END'\n(.*?)^END", page.read_text(), re.S | re.M)]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "program"), PROGRAMS, ids=[page.name for page, _ in PROGRAMS])
def test_shell_programs_run(page, program):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-"], input=program, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout, done.stderr


def test_there_are_pages():
    assert {"README.md", "CONTRIBUTING.md", "your-own-op.md"} <= {p.name for p in PAGES}


@pytest.mark.turns("name", every=2)
@pytest.mark.parametrize("name", MODULES)
def test_doctests(name, monkeypatch):
    """Each as a reader would paste it, with only its own imports."""
    monkeypatch.setattr(linecache, "checkcache", lambda *_: None)  # for each docstring it looks at every file that was ever shown
    module, runner = importlib.import_module(name), doctest.DocTestRunner()
    for session in doctest.DocTestFinder().find(module, name, globs={"__name__": "__main__"}):
        if session.name.endswith(".__doc__"):
            continue  # a class whose instances have texts of their own: found once as the class already
        torch.manual_seed(0)
        runner.run(session)
    assert runner.failures == 0
    written = re.findall(r"^ *>>> ", Path(module.__file__).read_text(encoding="utf-8"), re.M)
    assert runner.tries == len(written)  # doctest looks neither into what another file's decorator made nor into functions
