"""Products of operands of which one is in 4 bits and the other in 8, with odd numbers of rows and of features: codes of 4 bits are
padded to whole bytes."""

import pytest
import torch

from funcops import GroupedQLinearConfig, QLinearConfig, batch_wgrads, grouped_qlinear, qlinear, random
from funcops.engine.contract.op import config
from funcops.library.ops.grouped_linear import GroupedLinearParams
from funcops.library.ops.linear import LinearParams
from funcops.low_precision import Format, Recipe, quantize_tensor

FORMATS = {
    "mxfp8": Format("e4m3", (1, 32), "e8m0"),
    "mxfp8 e5m2": Format("e5m2", (1, 32), "e8m0"),
    "mxfp4": Format("e2m1", (1, 32), "e8m0"),
    "mxfp4 square": Format("e2m1", (32, 32), "e8m0"),
    "nvfp4": Format("e2m1", (1, 16), "e4m3"),
    "blocks": Format("e4m3", (1, 128)),
    "tensor": Format("e5m2", (0, 0)),
    "rows": Format("e4m3", (1, 0), "float32"),
}
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 31, 33)
GROUPS = ((0, 3, 0), (1, 0, 2), (5, 1, 3), (31, 33, 0), (0, 0, 0))


@config
class Mixed(Recipe):
    """A format for each operand; scales of two kinds are decoded."""

    names: tuple[str, str, str] = ("mxfp8",) * 3
    keep: str = "input"
    wgrad: str = "low"
    emulate: bool = True

    def __post_init__(self):
        self.settle(*[FORMATS[name] for name in self.names])


def recipe_of(names, keep):
    """The recipe, with x's codes kept by rows only where they can be tiled anew."""
    made = Mixed(names=names)
    return Mixed(names=names, keep=keep) if keep != "row" or made.x.retiles else made


def close(found, wanted):
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def refused(x, dy):
    """The field for which groups refuse the formats: scales of two kinds, or that rows of two groups share, or of other tiles."""
    if x.kind != dy.kind:
        return "dy.scales"
    shared = [name for name, one in (("x", x), ("dy", dy)) if one.tile != (0, 0) and (one.tile[0] != 1 or not one.tile[1])]
    return f"{shared[0]}.tile" if shared else "dy_col.tile" if x.tile != dy.tile else ""


PAIRS = [(x, dy) for x in FORMATS for dy in FORMATS]


@pytest.mark.turns("x", "dy", every=32)
@pytest.mark.parametrize(("x", "dy"), PAIRS)
def test_rows(x, dy):
    first = PAIRS.index((x, dy))
    for i, keep in enumerate(("input", "col", "row")):
        recipe = recipe_of((x, x, dy), keep)
        for rows in (ROWS[(first + 4 * i) % len(ROWS)], 3):
            width = (33, 7)[i % 2]
            cfg = QLinearConfig(width, 2 * width - 5, recipe=recipe)
            params = qlinear.init(cfg, key=random.key(0), dtype=torch.float32)
            given = random.normal(random.key(rows), (rows, width))
            y, residuals = qlinear.fwd(params, given, cfg)
            gradient = random.normal(random.key(7), y.shape)
            dparams, dx = qlinear.bwd(residuals, gradient, cfg)
            dx_too, pending = qlinear.dgrad(residuals, gradient, cfg)
            assert torch.equal(dx, dx_too) and torch.equal(qlinear.wgrad(pending, cfg).weight, dparams.weight)
            sides = [quantize_tensor(params.weight, recipe.w, side=side).dequantize() for side in ("row", "col")]
            close(y, quantize_tensor(given, recipe.x).dequantize() @ sides[0].T + params.bias)
            close(dx, quantize_tensor(gradient, recipe.dy).dequantize() @ sides[1])
            turned = quantize_tensor(gradient, recipe.dy_col, side="col").dequantize().T
            if keep != "row":
                close(dparams.weight, turned @ quantize_tensor(given, recipe.x_col, side="col").dequantize())
            close(batch_wgrads(qlinear, [pending, pending], cfg).weight, 2.0 * dparams.weight)


@pytest.mark.turns("x", "dy", every=32)
@pytest.mark.parametrize(("x", "dy"), PAIRS)
def test_groups_are_layers_of_their_own(x, dy):
    recipe = Mixed(names=(x, x, dy), emulate=False) if FORMATS[x].kind == FORMATS[dy].kind else Mixed(names=(x, x, dy))
    width = 33 if recipe.w.tile[0] < 2 else 32
    if field := refused(FORMATS[x], FORMATS[dy]):
        with pytest.raises(ValueError, match=f"^GroupedQLinearConfig: recipe.{field} must be "):
            GroupedQLinearConfig(3, width, width, recipe=recipe)
        return
    cfg = GroupedQLinearConfig(3, width, width, recipe=recipe)
    params = grouped_qlinear.init(cfg, key=random.key(0), dtype=torch.float32)
    for sizes in GROUPS[PAIRS.index((x, dy)) % 5 :][:2]:
        offsets = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
        given, gradient = (random.normal(random.key(i), (sum(sizes), width)) for i in (1, 2))
        y, residuals = grouped_qlinear.fwd(params, (given, offsets), cfg)
        found, dx = grouped_qlinear.bwd(residuals, gradient, cfg)
        own = QLinearConfig(width, width, recipe=recipe)
        for e, (start, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
            one = LinearParams(params.weight[e], params.bias[e])
            want_y, kept = qlinear.fwd(one, given[start:end], own)
            want, want_dx = qlinear.bwd(kept, gradient[start:end], own)
            close(y[start:end], want_y)
            close(dx[0][start:end], want_dx)
            close(found.weight[e], want.weight)
            close(found.bias[e], want.bias)
    assert type(found) is GroupedLinearParams
