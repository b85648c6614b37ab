"""The page that shows the table of meetings, docs/what-meets-what.md, written and read.

python tests/meetings/meeting_page.py              runs every cell, which takes minutes, and writes the page
python tests/meetings/meeting_page.py cp refused    runs the cells that have a feature of these names, and those that are refused

It ends with an error, and leaves the page as it is, if a cell is wrong.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from meeting_features import FEATURES
from meeting_table import TRIPLES, Verdict, pairs, verdict

PAGE = Path(__file__).resolve().parents[2] / "docs" / "what-meets-what.md"
Cells = Mapping[tuple[str, str], Verdict]

HEAD = """# What meets what

Each feature of funcops should work with each other one. This page is a table of all pairs of {features} features, made by a program
that builds every pair on a small decoder and checks it.

| cell | what it says |
|---|---|
| `+` | **works**: the loss and all gradients, gathered from all ranks, are the plain model's |
| a number | **refused**: building or calling it raises the error of this number, below |
| empty | **left out**: no model has both |

The plain model is a decoder of two layers in PyTorch under autograd, in float64; gradients agree to 1e-11 of their norm. A
model with a recipe agrees to 1e-11 with the same recipe on one process (over `cp` and `ep`, where tiles are of other tokens, as far
as rounding allows), and with the plain model as far as rounding allows. Where the pages promise equal bits (policies,
`fit`, `remat`, `donate`, delayed weight gradients, graphs), the model without the feature has the same bits. Ranks are
threads, two on each axis.

A pair is left out by one rule: both features answer the same question (two recipes, two choices of what is kept, two ways to hold
rows over tp), or one contains the other (`ep` is a mixture over ranks), or both call the backward: autograd and a pipeline do so
themselves, so that neither takes pendings or donated residuals from the caller. A pipeline's stages are compiled each by itself
(`schedule.compile_stages`).

Features are composed in one order: the model (window, mixture), its config on one process (packed rows, `remat`, adapters, a
recipe), the config of a rank (`dist.parallel`, then `dist.zero3`), what is kept (a policy or a budget), logs, the call of the step.
With logs each step returns values beside its gradients, a row for each microbatch; under autograd, which sums gradients, one row.

The mixture's router has no losses and no `capacity` here. With one of them and packed rows, `dist.parallel` over several ranks
of `cp` raises for the step `route`: ranks have different numbers of tokens that are not padding. `decode` and `generate` refuse
a `capacity`.

Two places of a policy have no rows here: they depend on what a step does, and not on the model. `Disk(folder)` and
`At(rank, axis)` work with halves, `donate`, several microbatches, pickles and `remat`. Features 23 and 24, graphs and
`torch.compile`, refuse them by name: a file would be written, or a tensor sent, once
([table](what-a-block-keeps.md#in-8-bits)).

Graphs are the CPU's here. On a device a graph that is captured in a recording computes its digests in each replay; around one
`recording(stop_at_nonfinite=True)` raises.

## The features

| | feature | how it is turned on |
|--:|---|---|
"""


def page(cells: Cells) -> str:
    """The page of these cells, which are all pairs."""
    refused = [cells[pair] for pair in pairs() if not cells[pair].works]
    numbers = {said: i for i, said in enumerate(dict.fromkeys(one.said for one in refused), 1)}
    names = list(FEATURES)
    lines = [f"| {i} | {f.title} | `{f.call}` |" for i, f in enumerate(FEATURES.values(), 1)]
    found = HEAD.format(features=len(names)) + "\n".join(lines)
    found += f"\n\n## All pairs\n\nOf {len(cells)} pairs {len(cells) - len(refused)} work and {len(refused)} are refused"
    found += f" ({100 * len(refused) / len(cells):.1f} %). {TRIPLES} drawn sets of three features are checked in the same way.\n\n"
    found += f"| | | {' | '.join(str(i) for i in range(1, len(names)))} |\n|--:|---|{':-:|' * (len(names) - 1)}\n"
    for i, row in enumerate(names):
        marks = [mark(cells.get((column, row)), numbers) for column in names[:i]]
        found += f"| {i + 1} | {FEATURES[row].title} | {' | '.join(marks + [''] * (len(names) - 1 - i))} |\n"
    found += "\n## What is refused\n\n"
    found += "".join(f"{i}. {escaped(said)}\n" for said, i in numbers.items())
    return found + "\n`python tests/meetings/meeting_page.py` makes this page again.\n"


def mark(cell: Verdict | None, numbers: Mapping[str, int]) -> str:
    return "" if cell is None else "+" if cell.works else str(numbers[cell.said])


def escaped(said: str) -> str:
    """The sentence as code, so that its stars and brackets stay."""
    return f"`{said}`"


def committed() -> dict[tuple[str, str], Verdict]:
    """The cells of the committed page."""
    text = PAGE.read_text()
    said = {number: sentence for number, sentence in re.findall(r"^(\d+)\. `(.+)`$", text, re.MULTILINE)}
    rows = [line.split("|")[3:-1] for line in text.partition("## All pairs")[2].splitlines() if re.match(r"\| \d+ \|", line)]
    found = {}
    for i, column in itertools.combinations(range(len(rows)), 2):
        a, b, cell = list(FEATURES)[i], list(FEATURES)[column], rows[column][i].strip()
        if cell:
            found[a, b] = Verdict(cell == "+", said.get(cell, ""))
    return found


def made(names: list[str]) -> dict[tuple[str, str], Verdict]:
    """Run every cell, or some. Raises `SystemExit` with the cells that are wrong."""
    found, wrong, before = {}, [], committed() if names else {}
    for pair in pairs():
        kept = before.get(pair)
        if kept is not None and not {*pair, *([] if kept.works else ["refused"])} & set(names):
            found[pair] = kept
            continue
        try:
            found[pair] = verdict(*pair)
        except AssertionError as error:
            wrong.append(f"{'-'.join(pair)}: {error}")
        print("-".join(pair), found.get(pair, "wrong"), flush=True)
    if wrong:
        raise SystemExit("\n".join(wrong))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    PAGE.write_text(page(made(sys.argv[1:])))
