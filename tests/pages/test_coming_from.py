"""The pages for those who come from elsewhere: every name in a column "here" is there to be imported, with the arguments that
the page gives it, what is not here says why, and no row of the other library's names is lost."""

import importlib

import coming_from
import pytest
import torch
from coming_from import DOCS, NAMES, Row, fault, rows, theirs

PAGES = sorted(DOCS.glob("coming-from-*.md"))
NEWER = {"PipelineActivationLiveness", "PipelineStageInfo", "analyze_pipeline_activation_liveness"}  # of torch 2.15
PIPELINING = importlib.import_module("torch.distributed.pipelining")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_names_said_to_be_here_exist(page):
    found = list(rows(page.read_text()))
    wrong = {row.theirs: said for row in found if (said := fault(row))}
    assert not wrong and len(found) > 25


@pytest.mark.parametrize(("page", "section"), [(page, section) for page in NAMES for section in NAMES[page]])
def test_no_name_of_theirs_is_lost(page, section):
    assert not set(NAMES[page][section].split()) - set(theirs(page, (section,)))


def test_transformer_engines_tables_have_no_other_names():
    for section, names in coming_from.TRANSFORMER_ENGINE.items():
        others = {name for name in theirs("coming-from-transformer-engine.md", (section,)) if "=" not in name}
        assert others == set(names.split()), section


def test_the_names_of_torch_are_torchs():
    section = "torch.distributed.pipelining"
    pipelining = theirs("coming-from-pytorch.md", (section,))
    assert not set(PIPELINING.__all__) - set(pipelining)
    pipelining = [name for name in pipelining if name not in NEWER or hasattr(PIPELINING, name)]
    names = [f"{section}.{name}" for name in pipelining] + theirs("coming-from-pytorch.md")
    for name in [name for name in names if name.startswith("torch.")]:
        value, parts = torch, name.split(".")[1:]
        for i, part in enumerate(parts):
            value = getattr(value, part, None) or importlib.import_module(".".join(["torch", *parts[: i + 1]]))


@pytest.mark.parametrize(
    ("here", "why", "said"),
    [
        ("`lineer`", "", "lineer: No module named"),
        ("`linear`, `dist.columns`", "", "dist.columns: "),
        ("`LinearConfig(8, 8, biased=True)`", "", "takes no biased"),
        ('`GLUConfig(kind="swish", gate="first")`', "", "kind must be one of"),
        ("`LinearConfig.width`", "", "has no width"),
        ("`kernels.linear`", "", "is not public"),
        ("by hand", "", "names nothing here"),
        ("not here", "no need", "does not say why"),
    ],
)
def test_a_planted_fault_is_seen(here, why, said):
    assert said in fault(Row("", "`theirs`", here, why))
    text = f"| them | here | how it differs |\n|---|---|---|\n| `a` | `linear` | |\n| `theirs` | {here} | {why} |\n"
    first, second = rows(text)
    assert fault(first) is None and said in fault(second)
