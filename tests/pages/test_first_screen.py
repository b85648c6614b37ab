"""The bytes of README's first screen: each is counted again, on the decomposition that its column names.

A cell of the table is a model or a peak, and what runs it (`benchmarks.first_page`). The slow ones import Transformers, PEFT and
torch_remat (0.2.2 was tried).
"""

import functools
import re
from pathlib import Path

import pytest
from committed import committed

from benchmarks import first_page
from funcops import chain, remat

TEXT = (Path(__file__).resolve().parents[2] / "README.md").read_text()
COLUMNS = {
    "funcops": "funcops",
    "PyTorch on a GPU": "autograd, as on a GPU",
    "compiled": "torch.compile",
    "PyTorch on a CPU": "autograd",
    "Transformers": "transformers",
    "torch_remat": "torch_remat",
}
ROWS = {  # the beginning of a row: the case of the committed file
    "GB kept by the 32 blocks of Llama 3 8B": "blocks of Llama 3 8B, 8192 tokens",
    "GB kept by the 48 blocks of GPT-2 XL": "blocks of GPT-2 XL, dropout, 8192 tokens",
    "GB kept by the blocks of Llama 3 8B, frozen": "frozen blocks of Llama 3 8B, LoRA, 8192 tokens",
    "MiB at the peak of a forward": "4 llama blocks, 8192 tokens, bfloat16",
    "MiB at the peak if": "3 llama blocks, 1024 tokens, float32",
}
SPLIT = {"autograd": "torch's split of torch.nn", "autograd, as on a GPU": "torch's split of torch.nn, as on a GPU"}


def cells():
    """{(case, provider): figure} of the table."""
    (head, body) = re.search(r"^\| \| (funcops .*torch_remat) \|\n\|.*\n((?:\|.*\n)+)", TEXT, re.M).groups()
    columns = [COLUMNS[name] for name in head.split(" | ")]
    found = {}
    for line in body.splitlines():
        what, *figures = (cell.strip() for cell in line.removeprefix("| ").removesuffix(" |").split("|"))
        (case,) = [case for begins, case in ROWS.items() if what.startswith(begins)]
        found |= {(case, provider): figure for provider, figure in zip(columns, figures, strict=True) if figure}
    return found


def providers_of(case, provider):
    return SPLIT.get(provider, provider) if case.startswith("3 llama") else provider


CELLS = cells()


def test_its_bytes_are_committed_ones():
    known = {(case, provider): value for (case, provider, _), value in committed("cpu-first_page").items()}
    assert len(CELLS) == 26 and {case for case, _ in CELLS} == set(ROWS.values())
    for (case, provider), figure in CELLS.items():
        digits = len(figure.partition(".")[2])
        assert figure == f"{known[case, providers_of(case, provider)]:.{digits}f}", (case, provider)


def test_figures_in_bold_are_in_the_table():
    in_bold = re.findall(r"\*\*([\d.]+)\*\*", TEXT)
    assert len(in_bold) == 6 and set(in_bold) <= set(CELLS.values())


@functools.cache
def peaks():
    return {(row.case, row.provider): row.value for row in (*first_page.peaks(), *first_page.split_peaks())}


@pytest.mark.slow
@pytest.mark.parametrize(("case", "provider"), CELLS)
def test_its_bytes_are_counted_again(case, provider):
    if provider in ("transformers", "torch_remat"):
        pytest.importorskip(provider)
    if "LoRA" in case and provider != "funcops":
        pytest.importorskip("peft")
    if "llama blocks" in case:
        found = peaks()[case, providers_of(case, provider)]
    else:
        found = first_page.row(case.removesuffix(", 8192 tokens"), provider).value
    digits = len(CELLS[case, provider].partition(".")[2])
    assert CELLS[case, provider] == f"{found:.{digits}f}"


def test_blocks_that_run_twice_keep_their_inputs():
    model = first_page.MODELS["blocks of Llama 3 8B"]
    kept = first_page.of_funcops(model, remat(chain))
    assert kept == 2 * first_page.TOKENS * model.width
    assert f"Llama 3 8B keeps {model.layers * first_page.WHOLE / first_page.TOKENS * kept / 1e9:.1f} GB" in TEXT


def test_torch_remat_is_where_the_page_says():
    """It is level, but for dropout and at the peak, where it is above."""
    both = {
        case: (float(CELLS[case, "funcops"]), float(CELLS[case, "torch_remat"])) for case, name in CELLS if name == "torch_remat"
    }
    assert len(both) == 4
    for case, (ours, other) in both.items():
        assert ours < other if "dropout" in case or "4 llama" in case else ours == other, case
