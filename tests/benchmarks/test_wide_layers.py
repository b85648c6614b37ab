"""The benchmark of layers to leave wide, on a tiny decoder, and its committed figures."""

import csv
import dataclasses
import re

import pytest
from committed import COMMITTED

from benchmarks import wide_layers
from funcops import RopeConfig, chain
from funcops.low_precision import Fp8Block
from funcops.models import decoder


def rows():
    with (COMMITTED / "wide-layers.csv").open() as file:
        found = {}
        for row in csv.DictReader(file):
            found.setdefault((row["recipe"], row["steps"]), {})[row["wide"]] = row
    return found


def test_the_choice_beats_the_first_and_last_layers_with_no_more_weights():
    found = rows()
    assert {steps for _, steps in found} == {"0", "200"} and len(found) == 2 * len(wide_layers.RECIPES)
    for each in found.values():
        choice, ends, none = each["leave_wide"], each["first and last layers"], each["none"]
        assert 0 == int(none["weights"]) < int(choice["weights"]) <= int(ends["weights"])
        assert float(choice["error"]) < float(ends["error"]) < float(none["error"])
        assert float(choice["ratio_to_ends"]) == pytest.approx(float(choice["error"]) / float(ends["error"]))


def test_pages_have_the_errors_of_the_file():
    found, docs = rows(), COMMITTED.parent
    ratios = [float(each["leave_wide"]["ratio_to_ends"]) for each in found.values()]
    less = f"{100 * (1 - max(ratios)):.0f} to {100 * (1 - min(ratios)):.0f} % less error"
    assert less in (docs / "low-precision.md").read_text()
    (table,) = re.findall(
        r"^\| \| all layers in the recipe .*\n\|.*\n((?:\|.*\n)+)", (docs / "low-precision-in-depth.md").read_text(), re.M
    )
    assert len(table.splitlines()) == len(wide_layers.RECIPES)
    for line in table.splitlines():
        name, *errors = (cell.strip() for cell in line.strip("|").split("|"))
        each = found[name.strip("`()"), "200"]
        assert errors == [f"{float(each[wide]['error']):.3f}" for wide in ("none", "first and last layers", "leave_wide")]


@pytest.mark.slow
def test_a_choice_is_measured_by_steps(monkeypatch):
    """A tiny decoder of four layers: errors are measured in steps with the choice, on batches that it did not see."""
    sizes = dict(dim=32, layers=4, heads=2, kv_heads=2, head_size=16, hidden=32, context=16, rope=RopeConfig(16))
    tiny = dataclasses.replace(wide_layers.SIZES, **sizes)
    for name, value in (("SIZES", tiny), ("LAYERS", 4), ("ROWS", 2), ("ENDS", ("blocks0.*", "blocks3.*"))):
        monkeypatch.setattr(wide_layers, name, value)
    cfg, text = wide_layers.apart(decoder(tiny, loss=True)), wide_layers.source()
    params = wide_layers.initial(cfg)
    batches = [wide_layers.batch(text, i) for i in range(2)]
    none, ends, choice = wide_layers.compared(cfg, params, batches, Fp8Block(), 0)
    assert [row.wide for row in (none, ends, choice)] == ["none", "first and last layers", "leave_wide"]
    a_layer = sum(t.numel() for name, t in _weights(params["blocks0"]))
    assert none.weights == 0 and ends.weights == 2 * a_layer and 0 < choice.weights <= ends.weights
    assert 0 < choice.error < none.error < 0.2 and ends.error < none.error and ends.ratio_to_ends == 1
    assert none.error == wide_layers.error(cfg, params, batches[1], Fp8Block(), ("head",))
    assert {name.partition(".")[0] for name, _ in _weights(chain.init(cfg, device="meta"))} >= {"blocks0", "blocks3", "head"}


def _weights(params):
    from funcops.engine.trees import paths

    return [(path, t) for path, t in paths(params).items() if t is not None and t.dim() == 2]
