"""Every measured figure of README, CHANGELOG and the pages is a row of a committed file, or a test counts it again.

docs/benchmarks/claims.toml says for each where it comes from.
"""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "docs" / "benchmarks"
PAGES = ["README.md", "CHANGELOG.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
UNIT = r"(?:ms|us|s|[kMG]i?B|TFLOP|tokens a second|times|seconds|minutes)\b|%"
FIGURE = re.compile(rf"(?<![\w.\-/:])(?:\d[\d,]*\.\d+(?!\.\d)|\d[\d,]*(?=\s?(?:{UNIT})))(?!\w)")
NAMES = re.compile(  # of versions, papers and models, which have figures in them
    r"(?:torch|Python|CUDA|arXiv|until|Triton|Llama|Qwen|T5) (?:before |from )?\d[\d.]*(?:(?: to |, | and | or )\d+(?:\.\d+)*)*|"
    r"^3\.10 to 3\.13|arXiv[: ][\d.]+"
)
PREDICT = "funcops.schedule.predict"  # the provider of predicted steps
OF_VERSIONS = {"docs/versions.md"}  # a table of versions


def claims():
    tomllib = pytest.importorskip("tomllib")
    return tomllib.loads((COMMITTED / "claims.toml").read_text())["claim"]


def figures_of(page):
    """(line, its figures) of the prose and the tables of a page."""
    text = (ROOT / page).read_text()
    text = re.sub(r"^```.*?^```", lambda code: "\n" * code[0].count("\n"), text, flags=re.S | re.M)
    for line in text.splitlines():
        plain = re.sub(r"`[^`\n]*`|\]\([^)]*\)", "", line)
        found = FIGURE.findall(NAMES.sub("", plain))
        if found and page not in OF_VERSIONS:
            yield line, found


def claims_of(page, line):
    text = line.strip()
    return [one for one in claims() if one["page"] == page and any(part in text for part in one["line"])]


def values(row):
    """The values that a row of a committed file has."""
    file, _, place = row.partition(": ")
    if file.endswith(".csv"):
        lines = [line for line in (COMMITTED / file).read_text().splitlines() if place in line]
        assert lines, row
        return [float(cell) for line in lines for cell in line.split(",") if re.fullmatch(r"\d+(?:\.\d+)?", cell)]
    case, provider, metric = place.split(" | ")
    rows = json.loads((COMMITTED / f"{file}.json").read_text())["rows"]
    found = [one["value"] for one in rows if (one["case"], one["provider"], one["metric"]) == (case, provider, metric)]
    assert found, row
    return found


def says(figure, value):
    """Whether a figure is a value, in its unit or in thousands, at the digits that it has."""
    digits = len(figure.partition(".")[2])
    return any(f"{value / scale:.{digits}f}" == figure.replace(",", "") for scale in (1, 1e3, 1e6))


pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="the file is TOML, which Python reads from 3.11 on")


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_has_a_source(page):
    for line, found in figures_of(page):
        sources = claims_of(page, line)
        assert sources, f"{page}: {found} in {line.strip()!r} needs an entry in docs/benchmarks/claims.toml"
        rows = [value for one in sources for row in one.get("rows", ()) for value in values(row)]
        if rows and not any({"tests", "because"} & set(one) for one in sources):
            for figure in found:
                assert any(says(figure, value) for value in rows), f"{page}: {figure} of {line.strip()!r} is in none of the rows"


def test_every_entry_is_used_and_its_tests_exist():
    used = [(page, line) for page in PAGES for line, _ in figures_of(page)]
    for one in claims():
        assert len({"rows", "tests", "because"} & set(one)) == 1, one
        for part in one["line"]:
            assert any(page == one["page"] and part in line for page, line in used), (one["page"], part)
        for test in one.get("tests", ()):
            file, _, name = test.partition("::")
            assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.M), test


def test_a_figure_without_a_source_is_seen():
    """The names of versions, papers and models have digits that are not figures."""
    assert FIGURE.findall("keeps 23.1 bytes, 0.72 of 8,192 tokens, 12 % less in 40 ms") == ["23.1", "0.72", "12", "40"]
    for text in ("torch 2.11 to 2.15", "until 0.4", "arXiv 2509.25149", "Llama 3.2 1B", "Python 3.10, 3.12 and 3.13"):
        assert not FIGURE.findall(NAMES.sub("", text)), text
    assert says("27.2", 27212.0) and says("2,050", 2050.4) and not says("27.3", 27212.0)


def test_the_page_on_a_block_subtracts_its_own_totals():
    """The totals are outputs of its code, which runs as a test."""
    text = (ROOT / "docs" / "a-transformer-block-step-by-step.md").read_text()
    totals = [float(total) for total in re.findall(r"kept ([\d.]+) MiB in", text)]
    assert f"{max(totals) - min(totals):.2f} MiB less are kept" in text


def test_the_rows_of_what_a_block_keeps_add_up():
    text = (ROOT / "docs" / "what-a-block-keeps.md").read_text()
    (table,) = re.findall(r"^\| path \| what it is .*\n\|.*\n((?:\|.*\n)+)", text, re.M)
    total = sum(float(line.strip("|").split("|")[-1]) for line in table.splitlines())
    (kept,) = values("cpu-residuals: llama block | funcops | kept")
    assert total == pytest.approx(kept, abs=0.005)


def test_the_page_on_existing_models_has_the_ratios_of_the_file():
    text = (ROOT / "docs" / "inside-an-existing-model.md").read_text()
    rows = json.loads((COMMITTED / "cpu-swapped.json").read_text())["rows"]
    models_of = [row for row in rows if not row["case"].endswith((" with dropout", " alone"))]
    ratio = {(row["case"].replace(",", "").split()[0], row["metric"]): row["value"] for row in models_of}
    named = {"Gemma 3": "Gemma3", "Qwen 3": "Qwen3", "Qwen 2": "Qwen2", "GPT-2": "GPT2", "OLMo 2": "Olmo2", "OLMo 3": "Olmo3"}
    named |= {"HunYuan": "HunYuanDenseV1", "Starcoder 2": "Starcoder2", "GPT-NeoX": "GPTNeoX", "BERT": "Bert"}
    (table,) = re.findall(r"^\| \| bytes kept, to torch's .*\n\|.*\n((?:\|.*\n)+)", text, re.M)
    seen = []
    for line in table.splitlines():
        models, kept, times = ([cell.strip() for cell in part.split(",")] for part in line.strip("|").split("|"))
        for model, time in zip(models, times, strict=True):
            name = named.get(model, model)
            seen.append(ratio[name, "bytes, ratio to torch"])
            assert kept == [f"{seen[-1]:.2f}"] and time == f"{ratio[name, 'CPU time, ratio to torch']:.2f}", model
    every = [value for (_, metric), value in ratio.items() if metric.startswith("bytes, ratio")]
    assert (
        seen[0] == min(every)
        and seen[-1] == pytest.approx(max(every), abs=0.001)
        and f"Models of {len(every)} architectures" in text
    )
    (slow,) = [row["value"] for row in rows if "dropout" in row["case"] and row["metric"].startswith("CPU time, ratio")]
    assert f"takes {slow:.2f} of the time" in text


def test_the_table_of_plans_has_the_predictions_of_the_file():
    text = (ROOT / "docs" / "planning.md").read_text()
    (table,) = re.findall(r"^\| step \| published .*\n\|.*\n((?:\|.*\n)+)", text, re.M)
    for line in table.splitlines():
        name, *said = (cell.strip() for cell in line.strip("|").split("|"))
        (wanted,), (found,) = (values(f"cpu-schedule: {name} | {who} | seconds per step") for who in ("published", PREDICT))
        assert said == [f"{wanted:.2f} s", f"{found:.2f} s", f"{100 * (found / wanted - 1):+.1f} %"], name
    assert len(table.splitlines()) == 7


def test_the_page_on_planning_has_the_errors_of_tables_that_nothing_was_fitted_to():
    from benchmarks import published

    text = re.sub(r"\s+", " ", (ROOT / "docs" / "planning.md").read_text())
    errors = [100 * row.error() for row in published.HELD_OUT]
    assert f"is up to {-min(errors):.1f} % shorter and up to {max(errors):.1f} % longer than the published one" in text
    said = [published.ratio_of_recomputing(row) for row, _ in published.RECOMPUTED]
    ratios = [seconds / row.seconds for row, seconds in published.RECOMPUTED]
    assert f"take {min(ratios):.2f} to {max(ratios):.2f} times as long" in text
    assert f"say {min(said):.2f} to {max(said):.2f}" in text


def test_losses_are_as_near_as_the_page_on_loops_says():
    text = (ROOT / "docs" / "functional-training-loops.md").read_text()
    said = re.search(r"are within ([\d.]+) % of the losses without a recipe, with `nvfp4` within (\d+) %", text)
    lines = [line.split(",") for line in (COMMITTED / "low-precision.csv").read_text().splitlines()]
    found = [(line[0] == "nvfp4", float(line[lines[0].index("ratio to none")])) for line in lines[1:]]
    most = {in_4_bits: 100 * (max([ratio for one, ratio in found if one is in_4_bits]) - 1) for in_4_bits in (False, True)}
    assert f"{most[True]:.0f}" == said[2] and f"{most[False] + 0.05:.1f}" == said[1]


def test_the_errors_of_compressing_policies_are_bounds_of_their_test():
    bounds = re.search(
        r'\{"compress_fp8": 0\.0(\d), "compress_int8": 0\.0(\d)\}', (ROOT / "tests/memory/test_policy.py").read_text()
    )
    text = (ROOT / "docs" / "policies-and-budgets.md").read_text()
    assert re.findall(r"^\| `compress_\w+` \|.*within (\d) % in norm", text, re.M) == list(bounds.groups())
