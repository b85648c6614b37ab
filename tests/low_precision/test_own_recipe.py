"""A recipe of one's own: what it must set, which formats go together, and which rows take them."""

import itertools

import numpy
import pytest
import torch

from funcops import ChainConfig, LinearConfig, QLinearConfig, Step, dist, linear, qlinear, random
from funcops import nn as fnn
from funcops.engine.backend import backend
from funcops.engine.contract.op import config
from funcops.library.formats.format import FORMATS
from funcops.library.ops.grouped_linear import GroupedLinearParams
from funcops.library.ops.grouped_qlinear import GroupedQLinearConfig, grouped_qlinear
from funcops.library.ops.linear import LinearParams
from funcops.library.ops.qlinear_wgrads import product
from funcops.low_precision import Format, Fp8Delayed, Recipe, quantize_params, quantize_tensor, with_recipe
from funcops.testing import run_ranks

KINDS = {  # by kind of scales: the element of x and dy, and the tiles of x, dy and of w
    "pow2": ("e4m3", (1, 128), (128, 128)),
    "float32": ("e4m3", (1, 128), (128, 128)),
    "e8m0": ("e4m3", (1, 32), (1, 32)),
    "e4m3": ("e2m1", (1, 16), (16, 16)),
}
ONE = {"pow2", "float32"}  # a power of two is a float32


@config
class Mine(Recipe):
    kinds: tuple = ("pow2", "pow2", "pow2")
    keep: str = "input"
    wgrad: str = "low"
    emulate: bool = True

    def __post_init__(self):
        x, w, dy = self.kinds
        self.settle(*[Format(KINDS[kind][0], KINDS[kind][1 + (at == 1)], kind) for at, kind in enumerate((x, w, dy))])


@pytest.mark.parametrize("kinds", list(itertools.product(KINDS, repeat=3)), ids="-".join)
def test_a_product_has_scales_of_one_kind_or_decoded_operands(kinds):
    if len(set(kinds)) > 1 and set(kinds) != ONE:
        refused = r"^Mine: (w|dy)\.scales must be of the kind of (x|w)'s, '\w+' \(or emulate=True, which .*\), got '\w+'$"
        with pytest.raises(ValueError, match=refused):
            Mine(kinds=kinds, emulate=False)
    recipe = Mine(kinds=kinds)
    plain = LinearConfig(128, 256, bias=False)
    cfg, params = QLinearConfig(128, 256, recipe, bias=False), linear.init(plain, key=random.key(0), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    x, dy = torch.randn(128, 128, generator=generator), torch.randn(128, 256, generator=generator)
    y, residuals = qlinear.fwd(quantize_params(params, cfg, dtype=torch.float32), x, cfg)
    rows, codes = quantize_tensor(x, recipe.x).dequantize(), quantize_tensor(params.weight, recipe.w).dequantize()
    torch.testing.assert_close(y, rows.float() @ codes.float().T, rtol=1e-5, atol=1e-5)
    _, dx = qlinear.bwd(residuals, dy, cfg)
    exact = dy @ params.weight
    assert (dx - exact).norm() < 0.3 * exact.norm()  # four-bit operands; scales read as another kind are off by 1 at least


MX, NV = Format("e4m3", (1, 32), "e8m0"), Format("e2m1", (1, 16), "e4m3")


@config
class Hybrid(Recipe):
    """A format for each operand and direction: y in one kind, dx and dw in another; or dw alone."""

    backward: Format = NV
    dx: bool = True
    keep: str = "col"
    wgrad: str = "low"
    hadamard: bool = False
    emulate: bool = False

    def __post_init__(self):
        back = self.backward
        self.settle(MX, MX, back if self.dx else MX, x_col=back, w_col=back if self.dx else MX, dy_col=back)


@config
class Turned(Recipe):
    """x by columns, of e5m2, is not made from x by rows, though its tiles could be."""

    keep: str = "row"

    def __post_init__(self):
        block = Format("e4m3", (1, 128))
        self.settle(block, Format("e4m3", (128, 128)), block, x_col=Format("e5m2", (1, 128)))


HYBRIDS = [
    Hybrid(),
    Hybrid(keep="input", hadamard=True),
    Hybrid(dx=False),
    Hybrid(backward=Format("e2m1", (16, 16), "e4m3")),
    Hybrid(backward=Format("e5m2", (0, 0), "float32"), keep="input"),
    Hybrid(backward=Format("e4m3", (1, 128))),
]


@pytest.mark.turns("name")
@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("recipe", HYBRIDS, ids=str)
def test_hybrids_have_a_format_for_each_direction(recipe, name):
    g = torch.Generator().manual_seed(0)
    x, dy = torch.randn(144, 128, generator=g), torch.randn(144, 256, generator=g)
    cfg = QLinearConfig(128, 256, recipe, bias=False)
    params = linear.init(LinearConfig(128, 256, bias=False), key=random.key(0), dtype=torch.float32)
    row = {n: quantize_tensor(t, getattr(recipe, n)) for n, t in (("x", x), ("w", params.weight), ("dy", dy))}
    col = {
        n: quantize_tensor(t, getattr(recipe, f"{n}_col"), side="col", hadamard=recipe.hadamard and n != "w")
        for n, t in (("x", x), ("w", params.weight), ("dy", dy))
    }
    assert row["x"].format.kind == "e8m0" and col["x"].format == recipe.backward
    row, col = ({n: q.dequantize().double() for n, q in of.items()} for of in (row, col))
    want = row["x"] @ row["w"].mT, row["dy"] @ col["w"], col["dy"].mT @ col["x"]
    for columns in (None, True, False):
        weights = params if columns is None else quantize_params(params, cfg, dtype=torch.float32, columns=columns)
        with backend(name), numpy.errstate(all="ignore"):
            y, residuals = qlinear.fwd(weights, x, cfg)
            dparams, dx = qlinear.bwd(residuals, dy, cfg)
        for got, one in zip((y, dx, dparams.weight), want, strict=True):
            torch.testing.assert_close(got.double(), one, rtol=1e-4, atol=3e-4)
    module = fnn.Linear(128, 256, bias=False, recipe=recipe)
    module.weight.data.copy_(params.weight)
    torch.testing.assert_close(module(x).double(), want[0], rtol=1e-4, atol=3e-4)


def test_what_hybrids_cannot_have():
    for fields in ({"keep": "row"}, {"wgrad": "high"}):
        with pytest.raises(ValueError, match=r"^Hybrid: keep must be 'input'"):
            Hybrid(**fields)
    assert Hybrid(wgrad="high", keep="input").x_col == NV
    with pytest.raises(
        ValueError, match=r"^Turned: keep must be 'input' or 'col', as codes by rows would be rounded a second time"
    ):
        Turned()

    class Later(Fp8Delayed):
        def __post_init__(self):
            whole = Format("e4m3", (0, 0), "float32")
            self.settle(whole, whole, whole, w_col=Format("e5m2", (0, 0), "float32"))

    with pytest.raises(ValueError, match=r"^Later: x_col, w_col, dy_col must be None with scales from earlier steps, got given$"):
        Later()
    with pytest.raises(TypeError, match=r"^Hybrid\.settle: x_col must be Format, got 'e4m3'$"):
        Hybrid(backward="e4m3", dx=False)
    q, p = quantize_tensor(torch.randn(4, 32), MX), quantize_tensor(torch.randn(8, 32), NV)
    for name in ("torch", "triton"):
        with backend(name):
            torch.testing.assert_close(product(q, p, torch.float32, True), q.dequantize() @ p.dequantize().mT)
    with (
        backend("triton"),
        pytest.raises(ValueError, match="^scaled_mm: emulate must be True for a product of e8m0 scales by e4m3"),
    ):
        product(q, p, torch.float32, False)


@config
class OfOne(Recipe):
    """One format for all operands; all other fields are the base's."""

    format: Format = Format("e4m3")

    def __post_init__(self):
        self.settle(self.format, self.format, self.format)


@config
class OfTwo(Recipe):
    wgrad: str = "low"

    def __post_init__(self):
        self.settle(Format("e4m3"), Format("e4m3", (128, 128)), Format("e5m2", (0, 0)))


@config
class Unsettled(Recipe):
    pass


WITHOUT_FORMATS = {
    "QLinearConfig": lambda recipe: QLinearConfig(128, 128, recipe),
    "GroupedQLinearConfig": lambda recipe: GroupedQLinearConfig(2, 128, 128, recipe),
    "with_recipe": lambda recipe: with_recipe(ChainConfig(steps=(Step("up", linear, LinearConfig(128, 128)),)), recipe),
    "ColumnQLinearConfig": lambda recipe: dist.ColumnQLinearConfig(128, 128, recipe, axis=dist.Axis("tp", 1, 0)),
    "funcops.nn.Linear": lambda recipe: fnn.Linear(128, 128, recipe=recipe),
}


@pytest.mark.parametrize("where", WITHOUT_FORMATS)
def test_a_recipe_without_formats_is_refused_by_name(where):
    with pytest.raises(
        TypeError, match=r"recipe must be a Recipe whose formats are set \(self\.settle\(x, w, dy\) in .*Unsettled$"
    ):
        WITHOUT_FORMATS[where](Unsettled())


def test_what_settle_takes():
    with pytest.raises(TypeError, match="^OfOne.settle: x must be Format, got 'e4m3'$"):
        OfOne(format="e4m3")


def test_scales_from_earlier_steps_are_those_of_delayed_scaling():
    made = type("Remembers", (OfOne,), {"delayed": True})
    with pytest.raises(ValueError, match=r"^Remembers: delayed must be False, or the class a subclass of Fp8Delayed"):
        made()
    assert type("Longer", (Fp8Delayed,), {})(history=4096).delayed


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_rows_in_groups_take_a_format_or_refuse_it(format):
    """A group of rows is a layer of its own, or the recipe is refused."""
    recipe = OfOne(format=format)
    if format.tile != (0, 0) and (format.tile[0] > 1 or format.tile[1] == 0):
        with pytest.raises(ValueError, match=r"^GroupedQLinearConfig: recipe\.x\.tile must be \(0, 0\) or within a row"):
            GroupedQLinearConfig(2, 128, 128, recipe)
        return
    cfg = GroupedQLinearConfig(2, 128, 128, recipe, bias=False)
    generator = torch.Generator().manual_seed(0)
    weight, rows, dy = (torch.randn(*shape, 128, generator=generator) for shape in ((2, 128), (256,), (256,)))
    _, residuals = grouped_qlinear.fwd(
        GroupedLinearParams(weight, None), (rows, torch.tensor([0, 96, 256], dtype=torch.int32)), cfg
    )
    dparams, _ = grouped_qlinear.bwd(residuals, dy, cfg)
    for e, own in enumerate((slice(96), slice(96, 256))):
        one = QLinearConfig(128, 128, recipe, bias=False)
        _, kept = qlinear.fwd(LinearParams(weight[e], None), rows[own], one)
        torch.testing.assert_close(dparams.weight[e], qlinear.bwd(kept, dy[own], one)[0].weight, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("recipe", [Hybrid(), Hybrid(keep="input", hadamard=True), Hybrid(dx=False)], ids=str)
def test_rows_in_groups_take_hybrids(recipe):
    cfg = GroupedQLinearConfig(2, 128, 128, recipe, bias=False)
    generator = torch.Generator().manual_seed(0)
    weight, rows, dy = (torch.randn(*shape, 128, generator=generator) for shape in ((2, 128), (256,), (256,)))
    x = rows, torch.tensor([0, 96, 256], dtype=torch.int32)
    for columns in (None, True):
        weights = GroupedLinearParams(weight, None)
        weights = weights if columns is None else quantize_params(weights, cfg, dtype=torch.float32)
        y, residuals = grouped_qlinear.fwd(weights, x, cfg)
        dparams, dx = grouped_qlinear.bwd(residuals, dy, cfg)
        for e, own in enumerate((slice(96), slice(96, 256))):
            one = QLinearConfig(128, 128, recipe, bias=False)
            y_one, kept = qlinear.fwd(LinearParams(weight[e], None), rows[own], one)
            of_one, dx_one = qlinear.bwd(kept, dy[own], one)
            for got, want in ((y[own], y_one), (dx[0][own], dx_one), (dparams.weight[e], of_one.weight)):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


def test_what_rows_in_groups_refuse():
    for recipe, message in (
        (
            Mine(kinds=("pow2", "e8m0", "pow2")),
            r"recipe\.w\.scales must be of the kind of x's, 'pow2': groups are multiplied as codes",
        ),
        (OfTwo(), r"recipe\.dy_col\.tile must be x_col's, \(1, 128\), as dw takes both by one tile \(or wgrad='high'\), got"),
    ):
        with pytest.raises(ValueError, match=f"^GroupedQLinearConfig: {message}"):
            GroupedQLinearConfig(2, 128, 128, recipe)
    assert GroupedQLinearConfig(2, 128, 128, OfTwo(wgrad="high")).experts == 2


X, DY, W = torch.randn(3, 128, 256, generator=torch.Generator().manual_seed(0)).unbind()
W = torch.cat((W, W.flip(1)))


def of_rank(mesh, recipe, columns, sequence):
    """y, dw and dx of one rank, each along the dims on which the ranks hold parts."""
    tp = mesh["tp"]
    op, config = (dist.column_qlinear, dist.ColumnQLinearConfig) if columns else (dist.row_qlinear, dist.RowQLinearConfig)
    cfg = config(256, 256, recipe, bias=False, axis=tp, sequence_parallel=sequence)

    def own(t, dim):
        return t if dim is None else t.chunk(2, dim)[tp.rank].contiguous()

    rows = 0 if sequence else None
    x, dy = (own(X, rows), own(DY, 1)) if columns else (own(X, 1), own(DY, rows))
    y, residuals = op.fwd(LinearParams(own(W, 0 if columns else 1), None), x, cfg)
    dparams, dx = op.bwd(residuals, dy, cfg)
    return y, dparams.weight, dx


@pytest.mark.parametrize("sequence", [pytest.param(False, marks=pytest.mark.slow, id="whole"), pytest.param(True, id="sequence")])
@pytest.mark.parametrize("columns", [True, False], ids=["column", "row"])
@pytest.mark.parametrize("format", [*FORMATS, *HYBRIDS[:3]], ids=lambda format: getattr(format, "name", str(format)))
def test_layers_over_ranks_take_a_format_or_refuse_it(format, columns, sequence):
    """Two ranks have the codes of one process, or the recipe is refused."""
    recipe = format if isinstance(format, Hybrid) else OfOne(format=format)
    where = "ColumnQLinearConfig" if columns else "RowQLinearConfig"
    format = recipe.x_col
    refused = r"\(0, 0\) or blocks" if format.tile == (1, 0) else "within a row" if sequence and format.tile[0] > 1 else None
    if refused is not None:
        with pytest.raises(ValueError, match=rf"^{where}: recipe\.x\.tile must be {refused}"):
            run_ranks({"tp": 2}, lambda mesh: of_rank(mesh, recipe, columns, sequence))
        return
    ranks = run_ranks({"tp": 2}, lambda mesh: of_rank(mesh, recipe, columns, sequence))
    one = QLinearConfig(256, 256, recipe, bias=False)
    y, residuals = qlinear.fwd(LinearParams(W, None), X, one)
    dparams, dx = qlinear.bwd(residuals, DY, one)
    rows = 0 if sequence else None
    dims = (1, 0, rows) if columns else (rows, 1, 1)
    for parts, dim, wanted in zip(zip(*ranks, strict=True), dims, (y, dparams.weight, dx), strict=True):
        found = parts[0] if dim is None else torch.cat(parts, dim)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)


def test_an_op_that_is_made_in_another_way_takes_no_recipe():
    mine = linear._replace(recomputable="norm")
    said = "^with_recipe: op 'linear' must be linear, or one that remat or with_policy made from it, got another$"
    with pytest.raises(ValueError, match=said):
        with_recipe(ChainConfig(steps=(Step("up", mine, LinearConfig(128, 128)),)), Mine())
