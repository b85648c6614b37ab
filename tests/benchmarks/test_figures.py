"""The page of all figures is what the committed files say, and the first page's claims are within its ranges."""

import json
import re

import pytest

from benchmarks.figures import COMMITTED, figures, text


def test_the_committed_page_is_of_these_files():
    assert (COMMITTED / "figures.md").read_text() == text(), (
        "`python -m benchmarks figures --page docs/benchmarks/figures.md` mends it"
    )


def test_every_file_with_a_rival_has_a_row():
    found = list(figures())
    assert len(found) > 20
    named = {figure.command.split()[0] for figure in found}
    assert named >= {"decode", "graph", "kernels", "memory", "overhead", "recipes", "residuals", "schedule", "step", "swapped"}


def test_a_ratio_is_ours_over_the_best_of_the_others():
    rows = json.loads((COMMITTED / "cpu-residuals.json").read_text())["rows"]
    kept = {row["provider"]: row["value"] for row in rows if row["case"] == "llama block" and row["metric"] == "kept"}
    ours = min(value for provider, value in kept.items() if provider.startswith("funcops"))
    theirs = min(value for provider, value in kept.items() if not provider.startswith("funcops"))
    (residuals,) = [figure for figure in figures() if figure.what == "residuals: kept"]
    assert residuals.ratios["llama block"] == pytest.approx(ours / theirs)


def test_the_changelog_gives_ranges_of_low_precision_and_not_its_best():
    changelog = (COMMITTED.parents[1] / "CHANGELOG.md").read_text()
    said = re.search(
        r"linear layer takes ([\d.]+) to ([\d.]+) of its time in bfloat16, a\s+Llama block ([\d.]+) to ([\d.]+)", changelog
    )
    h100 = {one.what.split()[0]: one.ratios.values() for one in figures() if one.command == "recipes" and "H100" in one.machine}
    wanted = [f"{pick(h100[kind]):.2f}" for kind in ("linear", "blocks") for pick in (min, max)]
    assert list(said.groups()) == wanted
