"""Reports: shares, differences, and the picture."""

import itertools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from funcops import (
    Compress,
    LinearConfig,
    Needs,
    RepeatConfig,
    WithExtras,
    chain,
    diff,
    linear,
    pack,
    random,
    repeat,
    report,
    with_policy,
)
from funcops.contract import DGRAD, Residuals, saved
from funcops.engine.residuals.report import Row, merged
from funcops.engine.trees import leaf, static, tree
from funcops.models.blocks import block_config, mlp_config

CFG = mlp_config(16, 24)


def reports():
    params, x = chain.init(CFG, key=random.key(0)), torch.randn(8, 16)
    return [report(with_policy(chain, p).fwd(params, x, CFG)[1], params, x) for p in ("save_all", "recompute_elementwise")]


def test_bytes_per_token_need_a_number_of_tokens():
    """Positions may be shared by the rows of a batch: of the extras alone no number is known."""
    cfg, x = block_config(16, 2, 24), WithExtras(torch.randn(2, 8, 16), {"positions": torch.arange(8)})
    params = chain.init(cfg, key=random.key(0))
    _, residuals = chain.fwd(params, x, cfg)
    whole, extras = report(residuals, params, x), report(residuals, params, x.extras)
    assert whole.tokens == 16 and extras.tokens is None and "per token" not in str(extras)
    assert report(residuals, params, x.extras, tokens=16).tokens == 16


def test_shares_add_up():
    everything, _ = reports()
    assert abs(sum(map(everything.share, everything.rows)) - 1) < 1e-9
    assert "share" in str(everything) and "%" in everything._repr_html_()
    assert report(None).share is not None and "kept 0 bytes" in str(report(None))


def test_residuals_in_a_users_dict_are_reported_as_a_chains():
    cfg = LinearConfig(3, 2)
    params, x = linear.init(cfg, key=random.key(0)), torch.randn(4, 3)
    kept = linear.fwd(params, x, cfg)[1]
    found = report({"up": kept, "inner": {"again": kept, "nothing": None}}, params)
    assert [(row.path, row.bytes) for row in found.rows] == [
        (f"{name}.{field}", size) for name, size in (("up", 48), ("inner.again", 0)) for field, size in (("x", size), ("weight", 0))
    ]
    for wrong, where, got in [
        ({"up": {"act": x}}, "residuals.up.act", r"float32\[4, 3\]"),
        ({}, "residuals", "dict"),
        ([kept], "residuals", "list"),
    ]:
        with pytest.raises(TypeError, match=f"^report: {where} must be residuals or pending of an op, got {got}$"):
            report(wrong)


def test_a_difference_names_tensors_no_longer_kept():
    before, after = reports()
    found = diff(before, after)
    assert {c.path: (c.before, c.after) for c in found} == {"up.x": (8 * 16 * 4, 0), "down.x": (8 * 24 * 4, 0)}
    assert str(found).endswith("-1.25 KiB in all") and str(found).startswith("down.x")
    assert diff(before, before) == [] and str(diff(before, before)) == "+0 bytes in all"


def test_the_picture_is_written(tmp_path):
    everything, _ = reports()
    figure = everything.plot(str(tmp_path / "kept.png"))
    assert (tmp_path / "kept.png").stat().st_size > 5000
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["norm", "up", "act", "down"]
    assert axes.get_xlabel() == "KiB kept for the backward" and axes.get_title()
    width = sum(bar.get_width() for bar in axes.patches) * 2**10
    assert abs(width - everything.kept_bytes) < 1
    everything.plot(str(tmp_path / "kept.svg"), depth=2)
    assert (tmp_path / "kept.svg").read_text().startswith("<?xml")


SAME = st.tuples(
    st.sampled_from(["norm.x", "act.0.x"]), st.integers(0, 2), st.sampled_from(["", "{}.norm.y", "params.{}.w", "0.x", "x.main"])
)


def expanded(text):
    """The paths that a path with ranges stands for."""
    parts = [[str(i) for i in range(int(a), int(b) + 1)] for a, b in re.findall(r"(\d+)-(\d+)", text)]
    form = re.sub(r"\d+-\d+", "{}", text)
    return [form.format(*numbers) for numbers in itertools.product(*parts)]


@settings(max_examples=150)
@given(st.lists(st.lists(SAME, max_size=3, unique_by=lambda row: row[0]), max_size=5), st.integers(1, 3))
def test_equal_layers_are_one_row_and_nothing_is_lost(layers, times):
    rows = [
        Row(f"{outer}.{i}.{path}", (size,), "float32", 4 * size, owner.format(f"{outer}.{i}"), "dgrad")
        for outer in range(times)
        for i, layer in enumerate(layers)
        for path, size, owner in layer
    ]
    shown = merged(rows)
    assert sorted(path for one in shown for path in expanded(one.row.path)) == sorted(row.path for row in rows)
    assert sum(one.times for one in shown) == len(rows) and sum(one.row.bytes for one in shown) == sum(row.bytes for row in rows)
    by_path = {row.path: row for row in rows}
    for one in shown:
        of = [by_path[path] for path in expanded(one.row.path)]
        assert len({(row.shape, row.bytes) for row in of}) == 1 and {row.alias_of for row in of} == set(expanded(one.row.alias_of))
    assert len(shown) <= len({(i, *layer) for i, each in enumerate(layers) for layer in each})


def test_a_report_of_many_layers_is_one_screen():
    cfg = RepeatConfig(chain, CFG, 64)
    params, x = repeat.init(cfg, key=random.key(0)), torch.randn(2, 16)
    kept = repeat.fwd(params, x, cfg)[1]
    short, whole = report(kept, params, x), report(kept, params, x, expand=True)
    assert short.rows == whole.rows and str(whole).count("\n") == len(whole.rows) + 1 and str(short).count("\n") < 20
    assert "0-63.norm.rstd (x 64)" in str(short) and "0-63.norm.rstd (x 64)" in short._repr_html_()
    assert str(short).splitlines()[-1] == str(whole).splitlines()[-1]


def test_a_difference_has_the_paths_of_both_sides():
    cfg, x = LinearConfig(3, 2), torch.randn(4, 3)
    kept = linear.fwd(linear.init(cfg, key=random.key(0)), x, cfg)[1]
    before, after = report({"a": kept, "b": None}), report({"a": None, "b": kept})
    changes = {change.path: (change.before, change.after) for change in diff(before, after)}
    assert changes["a.x"] == (48, 0) and changes["b.x"] == (0, 48)


def test_a_tree_with_a_field_named_form_is_no_packed_tensor():
    @tree
    class Shaped:
        values: torch.Tensor = leaf("[*]")
        form: str = static("round")

    class ShapedResiduals(Residuals):
        x: Shaped = saved("{*}", needed_by=DGRAD, tree=True)

    cfg = LinearConfig(2, 2)
    kept = ShapedResiduals.keep(cfg, Needs.ALL, x=Shaped(torch.ones(4, 128)))
    assert [row.path for row in report(kept).rows] == ["x.values"]
    assert report(pack(kept, Compress("fp8"))).kept_bytes < report(kept).kept_bytes
