"""Each group of `grouped_qlinear` is `qlinear` of its rows: the same codes and, if sums are exact, the same results, bit for
bit."""

from functools import partial

import pytest
import torch

from funcops import GroupedQLinearConfig, backend, random, report
from funcops.engine.contract.op import config
from funcops.engine.trees import leaves
from funcops.graphs import check_capturable
from funcops.library.formats import QWeight, quantize_sides, stacked
from funcops.library.formats.scaled import Scaled
from funcops.library.kernels.routing import gather_rows, sort_by_expert
from funcops.library.ops.grouped_linear import GroupedLinearParams
from funcops.library.ops.grouped_qlinear import grouped_qlinear
from funcops.library.ops.linear import LinearParams
from funcops.library.ops.qlinear import QLinearConfig, qlinear
from funcops.low_precision import MXFP8, NVFP4, Format, Fp8Block, Fp8Current, Fp8Delayed, Recipe
from funcops.testing.tolerances import assert_close

IN, OUT, COUNTS, BEHIND = 32, 64, (5, 0, 133, 1, 20), 3
KEYS = random.split(random.key(5), len(COUNTS))
RECIPES = [
    Fp8Block(),
    Fp8Block(keep="col", bwd="e5m2"),
    Fp8Block(keep="input"),
    Fp8Block(keep="input", wgrad="high"),
    Fp8Block(scales="float32", keep="col"),
    Fp8Current(),
    Fp8Current(pow2=True, keep="col"),
    Fp8Delayed(),
    MXFP8(emulate=True),
    NVFP4(stochastic=False, emulate=True),
    NVFP4(keep="input", hadamard=False, stochastic=True, emulate=True),
    NVFP4(stochastic=True, emulate=True),
]


def given(recipe, gathered):
    g = torch.Generator().manual_seed(0)
    rows, groups = sum(COUNTS) + BEHIND, len(COUNTS)
    w, b = (torch.randn(*size, generator=g).bfloat16() for size in ((groups, OUT, IN), (groups, OUT)))
    if gathered:
        chosen = torch.randint(0, groups + 1, (rows // 2, 2), generator=g, dtype=torch.int32)
        order, token, offsets, place = sort_by_expert(chosen, groups)
        x = torch.randn(rows // 2, IN, generator=g).bfloat16()
        return w, b, (x, offsets, order, place), x[token.long()], offsets
    x = (torch.randn(rows, IN, generator=g) * torch.logspace(-3, 2, rows).unsqueeze(1)).bfloat16()
    offsets = torch.tensor([0, *COUNTS]).cumsum(0).to(torch.int32)
    return w, b, (x, offsets), x, offsets


def weights(w, recipe):
    """The weights stacked, and one by one: unchanged, or as in a working tree."""
    if recipe.delayed:
        scale = 2.0 ** torch.arange(-1, 3 * len(w) - 1).reshape(-1, 3).float().clamp(max=6)
        return Scaled(w, scale, None), [Scaled(*pair, None) for pair in zip(w, scale, strict=True)]
    if not recipe.stochastic:
        return w, list(w)
    each = [QWeight(*quantize_sides(one, recipe.w), key) for one, key in zip(w, KEYS, strict=True)]
    return QWeight(stacked([q.row for q in each]), stacked([q.col for q in each]), KEYS), each


@pytest.mark.parametrize("gathered", [False, True], ids=["rows", "gathered"])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_group_is_a_quantised_linear_layer_of_its_rows(recipe, gathered):
    w, b, x, rows, offsets = given(recipe, gathered)
    dy = torch.randn(len(rows), OUT, generator=torch.Generator().manual_seed(1)).bfloat16()
    together, each = weights(w, recipe)
    cfg, op = GroupedQLinearConfig(len(w), IN, OUT, recipe, gathered=gathered), grouped_qlinear
    y, residuals = op.fwd(GroupedLinearParams(together, b), x, cfg)
    (dx, *_), pending = op.dgrad(residuals, dy, cfg)
    found = op.wgrad(pending, cfg)
    whole, at = torch.zeros_like(rows), offsets.tolist()
    for e, one in enumerate(each):
        own = slice(at[e], at[e + 1])
        alone, one_cfg = qlinear, QLinearConfig(IN, OUT, recipe)
        y_e, kept = alone.fwd(LinearParams(one, b[e]), rows[own], one_cfg)
        whole[own], waiting = alone.dgrad(kept, dy[own], one_cfg)
        wanted = alone.wgrad(waiting, one_cfg)
        assert torch.equal(y[own], y_e)
        dw, wanted_dw = found.weight, wanted.weight
        if recipe.delayed:
            assert torch.equal(dw.scale[e].view(torch.int32), wanted_dw.scale.view(torch.int32))
            dw, wanted_dw = dw.value, wanted_dw.value
        assert torch.equal(dw[e], wanted_dw)
        assert torch.equal(found.bias[e], wanted.bias)
    assert torch.equal(dx, gather_rows(whole, x[3], None) if gathered else whole)  # of rows of no group 0
    assert not y[at[-1] :].any()


def both(recipe, params, x, dy):
    """y, dx and dparams."""
    cfg = GroupedQLinearConfig(len(COUNTS), IN, OUT, recipe)
    y, residuals = grouped_qlinear.fwd(params, x, cfg)
    dparams, dx = grouped_qlinear.bwd(residuals, dy, cfg)
    return y, dx[0], dparams


@pytest.mark.parametrize("name", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize("recipe", [Fp8Block(keep="col"), Fp8Current(), NVFP4(stochastic=False, emulate=True)], ids=str)
def test_a_graph_can_hold_every_half(recipe, name):
    """A replay with other groups has the function's bits."""
    w, b, x, rows, _ = given(recipe, False)
    with backend(name):
        assert check_capturable(partial(both, recipe), GroupedLinearParams(w, b), x, torch.randn_like(rows @ w[0].mT)) == []


@pytest.mark.parametrize(
    "recipe", [Fp8Block(bwd="e5m2"), Fp8Current(), MXFP8(emulate=True), NVFP4(stochastic=False, emulate=True)], ids=str
)
def test_both_implementations_agree(recipe):
    w, b, (x, offsets), rows, _ = given(recipe, False)
    params, dy = GroupedLinearParams(w.float(), b.float()), torch.randn(len(rows), OUT)
    found = []
    for name in ("torch", "triton"):
        with backend(name):
            found.append(both(recipe, params, (x.float(), offsets), dy))
    for a, c in zip(*map(leaves, found), strict=True):
        assert_close(a, c, dtype=torch.float32)


@pytest.mark.parametrize(("recipe", "least"), [(Fp8Block(), IN + 4), (Fp8Current(), IN + 4), (Fp8Block(keep="input"), 0)], ids=str)
def test_bytes_kept_of_gathered_rows(recipe, least):
    """Codes and scales of the given x if blocks are within rows; of each gathered row if each group has a scale."""
    w, b, x, rows, _ = given(recipe, True)
    cfg, params = GroupedQLinearConfig(len(w), IN, OUT, recipe, gathered=True), GroupedLinearParams(w, b)
    _, residuals = grouped_qlinear.fwd(params, x, cfg)
    of = len(rows) if recipe.x.whole else len(x[0])
    assert report(residuals, params, x).kept_bytes == of * least


@config
class OneScale(Recipe):
    """A scale for each group, and a dy that is rounded stochastically."""

    stochastic = True
    keep: str = "input"
    emulate: bool = True

    def __post_init__(self):
        self.settle(*[Format("e4m3", (0, 0), "float32")] * 3)


def test_dx_and_dw_read_one_rounded_dy_where_a_group_has_one_scale():
    w, b, x, rows, offsets = given(OneScale(), False)
    together, each = weights(w, OneScale())
    cfg, dy = GroupedQLinearConfig(len(w), IN, OUT, OneScale()), torch.randn(len(rows), OUT).bfloat16()
    (dx, _), pending = grouped_qlinear.dgrad(grouped_qlinear.fwd(GroupedLinearParams(together, b), x, cfg)[1], dy, cfg)
    rounded, at = pending.dy.dequantize().float(), offsets.tolist()
    for e, one in enumerate(each):
        own = slice(at[e], at[e + 1])
        wanted = rounded[own] @ one.col.dequantize().float()
        assert (dx[own] - wanted).norm() <= 0.005 * wanted.norm()  # of dy rounded anew 0.05


def test_groups_without_rows_have_no_say():
    """In delayed scaling an empty group's amaxes of x and dy are 0, and rows behind the last group count nowhere."""
    recipe = Fp8Delayed()
    w, b, (x, offsets), rows, _ = given(recipe, False)
    x[-BEHIND:] = 1e4
    together, _ = weights(w, recipe)
    dparams = both(recipe, GroupedLinearParams(together, b), (x, offsets), torch.ones(len(rows), OUT).bfloat16())[2]
    amaxes = dparams.weight.scale.view(torch.float32)
    assert (amaxes[:, 1] > 0).all() and not amaxes[1, [0, 2]].any() and amaxes.max() < 1e3


@pytest.mark.parametrize(("first", "last"), [(0, 33), (-1, 16), (16, 40)])
def test_groups_beyond_the_columns_are_refused(first, last):
    from funcops.library.kernels.grouped_scaled import grouped_scaled_wgrad

    codes, scales = torch.zeros(4, 32, dtype=torch.uint8), torch.ones(4, 2, dtype=torch.uint8)
    starts, ends = torch.tensor([first, 32], dtype=torch.int32), torch.tensor([last], dtype=torch.int32)
    args = codes, scales, None, codes, scales, None, starts, ends, "e4m3", "e4m3", 16, "e8m0", 32, torch.float32
    said = rf"grouped_scaled_wgrad: starts, ends must be within the 32 columns, got \({first}, {last}\)"
    with pytest.raises(ValueError, match=said):
        grouped_scaled_wgrad.kernel.torch_impl(*args)


def test_large_tiles_are_for_large_groups_of_aligned_rows(monkeypatch):
    """On a device that multiplies codes; elsewhere they are decoded."""
    from funcops.library.kernels.triton import grouped_scaled as module

    few, large = module.FEW_ROWS, module.LARGE
    tile = lambda cols, rows, *widths: module._tile(large, cols, rows, 2, *widths)  # noqa: E731
    assert tile(0, 1000, 256, 256) is module.DECODED and tile(128, 1000, 256, 256) is module.FOREIGN
    monkeypatch.setattr(module, "native", lambda: True)
    assert tile(0, 2 * few + 1, few + 16, few + 16) is large and tile(128, 2 * few + 1, few + 16, few + 16) is module.BLOCKS
    for rows, widths in ((2 * few, (few + 16, few + 16)), (2 * few + 1, (few, few + 16)), (2 * few + 1, (few + 16, few + 24))):
        assert tile(0, rows, *widths) is tile(128, rows, *widths) is module.SMALL
    assert tile(16, 1000, 256, 256) is tile(32, 1000, 256, 256) is module.DECODED


def test_no_rows_have_products_without_a_launch(monkeypatch):
    from funcops.library.kernels.grouped_scaled import grouped_scaled_mm

    empty, w = torch.empty(0, 32, dtype=torch.uint8), torch.zeros(2, 8, 32, dtype=torch.uint8)
    scales = torch.empty(0, 1, dtype=torch.uint8), torch.ones(2, 8, 1, dtype=torch.uint8)
    offsets = torch.zeros(3, dtype=torch.int32)
    how = "e4m3", 32, "e4m3", 1, 32, "e8m0", 32, torch.bfloat16
    monkeypatch.setattr("funcops.library.kernels.triton.grouped_scaled._launch_product", None)
    with backend("triton"):
        y = grouped_scaled_mm(empty, scales[0], None, w, scales[1], None, None, None, offsets, None, *how)
    assert y.shape == (0, 8) and y.dtype is torch.bfloat16
