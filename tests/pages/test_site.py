"""The site: every page is in its navigation, every public name in its reference, and each of these says what it does and raises,
and has an example.
`make docs` builds it, and reads what was built (`built_site.py`)."""

import ast
import dataclasses
import importlib.util
import inspect
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import built_site
import pytest

import funcops
from docs import entries, examples, reference

ROOT = Path(__file__).resolve().parents[2]
NAVIGATION = set(re.findall(r": (\S+\.md)$|- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
NAVIGATION = {first or second for first, second in NAVIGATION}
NAMES = reference.public()
FUNCTIONS = [name for name in NAMES if inspect.isfunction(reference.value_of(name))]
CLASSES = [name for name in NAMES if inspect.isclass(reference.value_of(name))]


def moved():
    """The site's paths of pages outside docs/, read from the text of docs/hooks.py, as that imports MkDocs."""
    tree = ast.parse((ROOT / "docs" / "hooks.py").read_text())
    (table,) = [node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MOVED"]
    return ast.literal_eval(table)


def test_the_navigation_has_every_page_and_no_other():
    own = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert all((ROOT / name).is_file() for name in moved())
    assert NAVIGATION == own | set(moved().values()) | {"reference/index.md"}  # docs/hooks.py adds the other pages of the reference


def path_of_learning(nav):
    """The pages under Learn, in order."""
    return re.findall(r"^      - .*: (\S+\.md)$", nav.split("  - Learn:", 1)[1].split("\n  - ", 1)[0], re.M)


def astray(pages, texts):
    """The faulty pages of a path: too long, or without what one can do at the end, or without the page before or next."""
    found = {}
    for before, page, after in zip([None, *pages[:-1]], pages, [*pages[1:], None], strict=True):
        text = texts[page]
        opening = re.match(r"# .+\n\n\*\*At its end\*\* you can (?:.+\n)+\n\*\*Before it:\*\* (.+)\n", text)
        closing = re.search(r"\n\*\*Next:\*\* (.+)\n\Z", text)
        # a model that is there may be brought to any page: what comes before it is only of use
        leads = opening and (before is None or before in opening[1] or page == "inside-an-existing-model.md")
        if not leads or not closing or (after and after not in closing[1]):
            found[page] = "says neither what comes before nor next"
        elif len(text.split()) > MOST_WORDS:
            found[page] = f"has {len(text.split())} words"
    return found


LEARN = path_of_learning((ROOT / "mkdocs.yml").read_text())
MOST_WORDS = 1550  # ten minutes, code included


def test_the_path_of_learning_leads_from_page_to_page():
    texts = {page: (ROOT / "docs" / page).read_text() for page in LEARN}
    assert len(LEARN) == 15 and not astray(LEARN, texts)
    assert re.findall(r"^\d+\. .*?\]\((\S+?\.md)\)", (ROOT / "docs" / "contents.md").read_text(), re.M) == LEARN
    turned = LEARN[:3] + LEARN[4:] + LEARN[3:4]
    assert set(astray(turned, texts)) >= {LEARN[2], LEARN[3], LEARN[4]}
    page = LEARN[5]
    assert set(astray(LEARN, texts | {page: texts[page].replace("**At its end**", "")})) == {page}
    assert set(astray(LEARN, texts | {page: texts[page].replace("\n## ", "\n" + "word " * MOST_WORDS + "\n## ", 1)})) == {page}


def test_the_contents_list_every_page():
    named = re.findall(r"\]\((\S+?\.md)\)", (ROOT / "docs" / "contents.md").read_text())
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"contents.md"} - set(named) == set()
    assert all((ROOT / "docs" / name).exists() for name in named)


def test_the_first_page_has_few_links():
    """A reader of it has not chosen a page yet."""
    links = re.findall(r"\]\(([^)\s]+\.md)[^)\s]*\)", (ROOT / "README.md").read_text())
    assert 5 < len(links) <= 16, links


def test_the_reference_has_every_public_name():
    for module, names in {
        "funcops": set(dir(funcops)) - set(funcops._ROOMS) - {"__version__"},
        "funcops.optim": {
            name for name in dir(funcops.optim) if name.startswith(("adamw_", "sgd_", "muon_", "ema_", "AdamW", "SGD", "Muon"))
        },
        "funcops.low_precision": set(funcops.low_precision.__all__),
    }.items():
        assert not {f"{module}.{name}" for name in names} - set(NAMES), module
    ops = {name for name, value in vars(funcops).items() if isinstance(value, funcops.Op)}
    assert not {f"funcops.{op}_{part}" for op in ops for part in ("init", "fwd", "bwd", "dgrad", "wgrad")} - set(NAMES)
    assert len(NAMES) == len(set(NAMES)) > 700


def means(cls):
    """Whether a class has a description: in words, or in the shapes of its leaves, if every field has one."""
    own = cls.__dict__.get("__doc__") or ""
    if own and not own.startswith(f"{cls.__name__}("):  # what a dataclass writes if it has no docstring
        return True
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    fields = [node for node in tree.body[0].body if isinstance(node, ast.AnnAssign)]
    return bool(fields) and all(
        node.value is not None and re.match(r"(leaf|saved|static)\(", ast.unparse(node.value)) for node in fields
    )


def raises(function):
    """The first call or statement of a function that raises."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))):
        called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        if isinstance(node, ast.Raise) or called == "fail" or called.startswith(("check", "require")):
            return ast.unparse(node)
    return None


def silent(names):
    """Functions that raise without saying so. `Op` says once what a backward raises, where it describes dy."""
    backward = tuple(f"{op}_{part}" for op in OPS for part in ("bwd", "dgrad", "wgrad"))
    found = {name: raises(reference.value_of(name)) for name in names if name.rpartition(".")[2] not in backward}
    return {name: said for name, said in found.items() if said and "rais" not in reference.value_of(name).__doc__.lower()}


OPS = [name.rpartition(".")[2] for name in NAMES if isinstance(reference.value_of(name), funcops.Op)]


def test_every_public_function_and_class_has_a_docstring():
    assert not [name for name in FUNCTIONS if not reference.value_of(name).__doc__]
    assert not [name for name in CLASSES if not means(reference.value_of(name))]
    assert len(FUNCTIONS) > 400 and len(CLASSES) > 150


def test_functions_that_raise_say_so():
    assert silent(FUNCTIONS) == {}
    assert "Raises" in funcops.Op.__doc__


@pytest.mark.parametrize("home", sorted(page.home for page in reference.pages() if page.ops))
def test_an_op_has_its_math_or_meaning_and_shapes(home):
    """In the docstring of its file, which opens its section: a formula or words for it, the shapes and dtypes of x and y, and what
    is kept. What a forward raises, it says itself."""
    module = importlib.import_module(home)
    text = inspect.getdoc(module).partition(">>>")[0]
    assert len(text.split()) > 15 and re.search(r"\[.*\]|shape", text) and re.search(r"dtype|float|int64", text), home
    assert re.search(r"\b[Kk](eep|ept)\b", text), home
    assert all(
        "aises" in vars(module)[name].__doc__ or "As `" in vars(module)[name].__doc__
        for name in module.__all__
        if name[-4:] == "_fwd"
    )


def of_an_op(name, opening, beside):
    """Whether the session that opens an op's section shows it; its parts share that session, other names have one in the same
    file."""
    value = reference.value_of(name)
    if isinstance(value, funcops.Op):
        return bool({id(value), id(value.fwd)} & opening)
    return reference.is_part(name) or id(value) in beside


def alone(name, page):
    """Whether a session of its own file, a session of a page or, for a constant, a session beside it shows a name."""
    value = reference.value_of(name)
    home = getattr(value, "__module__", None)
    homes = [home] if home else [getattr(reference.value_of(n), "__module__", None) for n in page.names]
    return bool(examples.uses(value)) or any(id(value) in examples.in_module(one) for one in {*homes, page.home} if one)


def test_an_example_shows_every_name():
    """Examples are in docstrings and on pages; all of them run (tests/pages/test_docs.py)."""
    missing = []
    for page in reference.pages():
        if page.ops:
            opening = examples.shown([examples.session(importlib.import_module(page.home))])
            beside = examples.in_module(page.home)
            missing += [name for name in page.names if not of_an_op(name, opening, beside)]
        else:
            missing += [name for name in page.names if not alone(name, page)]
    assert missing == []


def test_every_operator_has_a_page_of_its_own():
    """With its math, a table of its config's fields and one of its residuals; a group lists its operators."""
    pages = {op: page for page in reference.pages() for op in page.ops}
    assert len(pages) > 65 and {name for name in NAMES if isinstance(reference.value_of(name), funcops.Op)} == set(pages)
    for op, page in pages.items():
        text = entries.markdown(page)
        assert f'<a id="{op}"></a>' in text and f"::: {page.home}\n" in text, op
        for name in page.names:
            cls = reference.value_of(name)
            if inspect.isclass(cls) and name.endswith("Config"):
                shown = {one.name for one in dataclasses.fields(cls) if one.name[0] != "_"}
                rows = set(re.findall(r"^\| `(\w+)` \|", "\n".join(entries.fields(cls)), re.M))
                assert rows == shown, name
    listed = [entries.markdown(page) for page in reference.pages() if any(part.ops for part in page.parts)]
    assert all(any(f"[`{page.title}`](" in text for text in listed) for page in pages.values())


def test_residuals_are_shown_as_they_are_kept():
    assert list(entries.fields(funcops.LinearResiduals))[2:5] == [
        "| `x` | [*, I] | `x` itself | wgrad |",
        "| `weight` | [O, I] | `params.weight` itself | dgrad |",
        "| `y_shape` |  | a value, no tensor |  |",
    ]


@pytest.mark.parametrize(
    ("code", "shows"),
    [
        ("from funcops import dist\ndist.load(path)", {"dist.load", "dist"}),
        ("from funcops import dist\nimport torch\ntorch.load(path)", set()),
        ("import funcops as F\nF.linear.fwd(params, x, cfg)", {"linear"}),
        ("import torch, funcops\nfuncops.dist.gather_start(x, axis)", {"dist", "dist.gather_start", "dist.InFlight"}),
        ("from funcops import linear", set()),
        ("from funcops.checkpoint import load as read\nread(path)", {"checkpoint.load"}),
    ],
)
def test_an_example_shows_what_it_names_and_what_that_gives(code, shows):
    found = examples.shown([code])
    public = {"dist": funcops.dist, "linear": funcops.linear, "checkpoint.load": funcops.checkpoint.load}
    public |= {f"dist.{name}": getattr(funcops.dist, name) for name in ("load", "gather_start", "InFlight", "finish")}
    assert {name for name, value in public.items() if id(value) in found} == shows


def test_the_checks_find_missing_words():
    class Bare:
        x: int = 3

    class Said:
        "A sentence."

    def quiet(x):
        """Halves."""
        if x < 0:
            raise ValueError(x)

    assert not means(Bare) and means(Said) and raises(quiet) and not raises(moved)


PAGE = '<p id="a">words</p><a href="{0}">there</a><img src="{1}">'
FAULTY = {
    "b.html": "index.html: expected a file of the site at b.html, got none",
    "a.html#b": "index.html: expected a place in a.html at a.html#b, got none",
    "#b": "index.html: expected a place in index.html at #b, got none",
}


@pytest.mark.parametrize("link", ["a.html#a", "#a", "https://elsewhere.org/b", *FAULTY])
def test_a_link_of_the_site_that_leads_nowhere_is_seen(link, tmp_path):
    (tmp_path / "index.html").write_text(PAGE.format(link, "a.png"))
    (tmp_path / "a.html").write_text(PAGE.format("index.html", "./a.png"))
    (tmp_path / "a.png").write_bytes(b"")
    wanted = {"index.html": built_site.Wanted(["a"], ["words"])}
    assert built_site.faults(tmp_path, wanted) == ([FAULTY[link]] if link in FAULTY else [])


SIGNATURE = '<div class="doc-signature highlight"><pre><code>{}</code></pre></div>'
TABLE = "<table><tr><td><code>{}</code></td></tr></table>"


@pytest.mark.parametrize(
    ("page", "style", "fault"),
    [
        (SIGNATURE.format("f(x,<span>\n    y)</span>"), ".md-grid { max-width: 95% }", None),
        (SIGNATURE.format("f(" + "x" * 90), "", "index.html: expected a signature of at most 90 characters a line, got 'f(xx"),
        (TABLE.format("Tensor | None"), ".a { b: c }\n.md-grid {\n  color: red;\n  max-width: 96%;\n}", None),
        (TABLE.format("Tensor \\| None"), "", "index.html: expected a bar in a table, got `Tensor \\| None`"),
        ("words", ".md-grid { max-width: 80rem }", "extra.css: expected .md-grid to take at least 90 % of a screen, got 80rem"),
        ("words", ".md-grid { color: red }", "extra.css: expected .md-grid to take at least 90 % of a screen, got None"),
    ],
)
def test_what_a_page_cuts_off_or_wastes_is_seen(page, style, fault, tmp_path):
    (tmp_path / "index.html").write_text(page)
    (tmp_path / "extra.css").write_text(style or ".md-grid { max-width: 96% }")
    found = built_site.faults(tmp_path, {})
    assert [one[: len(fault)] for one in found] == [fault] if fault else not found


def test_a_link_of_a_page_leads_to_a_file_of_the_checkout():
    """A page that only the site has is not there: a link to a module leads to its page of the reference (docs/hooks.py)."""
    link = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")
    pages = [ROOT / name for name in moved() if name.endswith(".md")] + list((ROOT / "docs").rglob("*.md"))
    texts = {page: re.sub(r"^```.*?^```|`[^`\n]+`", "", page.read_text(), flags=re.S | re.M) for page in pages}
    missing = [f"{page.name}: {to}" for page, text in texts.items() for to in link.findall(text) if not (page.parent / to).exists()]
    assert not missing


def test_faults_of_a_page_of_the_site_are_found(tmp_path):
    (tmp_path / "index.html").write_text("<script src='https://elsewhere.org/x.js'>words()</script><img src='b.png'>")
    assert built_site.faults(tmp_path, {"index.html": built_site.Wanted(["a"], ["words"]), "c.html": built_site.Wanted()}) == [
        "c.html: expected a page, got none",
        "index.html: expected a, got no such id",
        "index.html: expected 'words' to be read there, got it nowhere",
        "index.html: expected words without a script, got none",
        "index.html: expected all of it in the site, got https://elsewhere.org/x.js",
        "index.html: expected a file of the site at b.png, got none",
    ]
    assert built_site.faults(tmp_path / "none", {}) == [f"{tmp_path / 'none'}: expected pages, got none"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="MkDocs is of the extra docs")
def test_the_command_that_builds_it_fails_at_a_link_to_nowhere(tmp_path):
    """The flags come from `make docs`."""
    (flags,) = re.findall(r"-m mkdocs (build .*) \$\(ARGS\)", (ROOT / "Makefile").read_text())
    (tmp_path / "docs").mkdir()
    (tmp_path / "mkdocs.yml").write_text("site_name: small\n")
    for text, code in (("[here](index.md)", 0), ("[nowhere](other.md)", 1)):
        (tmp_path / "docs" / "index.md").write_text(text)
        done = subprocess.run([sys.executable, "-m", "mkdocs", *flags.split()], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr
