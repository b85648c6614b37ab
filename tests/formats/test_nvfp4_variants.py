"""NVFP4 with a scale for each row, and with tiles mapped to 4 or 6: to the bit by Transformer Engine's published reference
(pytorch/custom_recipes/reference_nvfp4.py), re-derived here; and tiles of one or two dimensions in whole layers."""

import itertools
import math

import pytest
import torch

from funcops import LinearConfig, QLinearConfig, linear, qlinear, random
from funcops.engine.backend import backend
from funcops.engine.contract.op import config
from funcops.library.formats import Format, QTensor, dense, quantize_sides, quantize_tensor, turned
from funcops.library.kernels import quantize
from funcops.library.ops.grouped_qlinear import GroupedQLinearConfig
from funcops.library.ops.qlinear_wgrads import product
from funcops.low_precision import MXFP8, NVFP4, Fp8Block, Recipe, quantize_params

np = pytest.importorskip("numpy")
ml_dtypes = pytest.importorskip("ml_dtypes")
GREATEST = np.finfo(np.float32).max
NV = Format("e2m1", (1, 16), "e4m3")


def e4m3(t):
    return t.clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)


def fp4(t):
    return t.clip(-6, 6).astype(ml_dtypes.float4_e2m1fn)


def reference(x, amax, tile, mode, e4m3_max):
    """Codes and scales of `_quantize_blockwise_reference`: x [m, n], amax [1, 1] of the tensor, or [m, 1] of rows; `mode`: "off",
    "mse" or "mae", then as `_quantize_blockwise_4over6_reference` without fast math."""
    m, n = x.shape
    x, amax = x.float().numpy(), amax.numpy().reshape(-1, 1)
    height = tile[0]
    found = np.abs(x).reshape(m // height, height, n // 16, 16).max((1, 3)).repeat(height, 0)  # for each row
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        s = np.minimum(np.float32(e4m3_max) * np.float32(6) / amax, np.float32(GREATEST))
        s = np.where((s == 0) | (amax == 0), np.float32(1), s)
        if mode == "off":
            candidates = [found * (s * np.float32(1 / 6))]
        else:
            base = found / np.float32(6) * s
            candidates = [base, base * np.float32(1.5)]
        made = []
        for candidate in candidates:
            scale = e4m3(np.minimum(candidate, np.float32(GREATEST)))
            decode = scale.astype(np.float32)
            encode = np.minimum(np.float32(1) / (decode * (np.float32(1) / s)), np.float32(GREATEST))
            codes = fp4(x * encode.repeat(16, 1))
            value = codes.astype(np.float32) * decode.repeat(16, 1) * amax / np.float32(6 * e4m3_max)
            apart = (value - x).reshape(m, n // 16, 16)
            error = np.zeros((m, n // 16), np.float32)
            for i in range(16):
                error = error + (apart[..., i] * apart[..., i] if mode == "mse" else np.abs(apart[..., i]))
            made.append((codes.view(np.uint8), scale.view(np.uint8), error))
    codes, scales, _ = made[0]
    if mode != "off":
        errors = [error for *_, error in made]
        if height == 16:  # the order of the CUDA warp's reduction
            rows = [error.reshape(m // 16, 16, n // 16) for error in errors]
            for half in (8, 4, 2, 1):
                rows = [r[:, :half] + r[:, half : 2 * half] for r in rows]
            errors = [r[:, 0].repeat(16, 0) for r in rows]
        four = errors[1] < errors[0]
        codes = np.where(four.repeat(16, 1), made[1][0], codes)
        scales = np.where(four, made[1][1], scales)
    codes = codes[:, ::2] | codes[:, 1::2] << 4
    return torch.from_numpy(codes), torch.from_numpy(scales[::height])


def sources():
    g = torch.Generator().manual_seed(0)
    plain = torch.randn(64, 96, generator=g)
    sizes = torch.exp2(torch.randint(-12, 12, (64, 96), generator=g))
    rows = plain * torch.exp2(torch.randint(-20, 20, (64, 1), generator=g))
    zeros = plain.clone()
    zeros[:17], zeros[40, 16:32] = 0.0, 0.0
    tile = torch.tensor([6.0, 0.0] + [0.5, 0.75] * 127)  # as much error by either mapping, so that the order of sums decides
    tiles = torch.stack([tile[torch.randperm(256, generator=g)] for _ in range(24)]).view(4, 6, 16, 16)
    even = tiles.transpose(1, 2).reshape(64, 96)
    ties = torch.randint(-8, 9, (64, 96), generator=g) * 0.5
    return {
        "normal": plain,
        "bf16": plain.bfloat16(),
        "sizes": plain * sizes,
        "rows": rows,
        "zeros": zeros,
        "ties": ties,
        "even": even * 0.37,
    }


@pytest.mark.parametrize("mode", ["off", "mse", "mae"])
@pytest.mark.parametrize("tile", [(1, 16), (16, 16)], ids=str)
@pytest.mark.parametrize("row_scaled", [False, True], ids=["tensor", "rows"])
def test_codes_are_those_of_transformer_engines_reference(row_scaled, tile, mode):
    if row_scaled and tile == (16, 16):
        with pytest.raises(
            ValueError, match=r"^Format: row_scaled must be False with tiles of \(16, 16\) and e4m3 scales, got True$"
        ):
            Format("e2m1", tile, "e4m3", row_scaled=True)
        return
    format, chosen = Format("e2m1", tile, "e4m3", row_scaled=row_scaled, four_over_six=mode), 0
    for name, x in sources().items():
        for side, lying in (("row", x), ("col", x.mT.contiguous())):
            if side == "col" and tile == (16, 16):
                continue  # a transposed copy
            amax = lying.float().abs().amax(1, keepdim=True) if row_scaled else x.float().abs().max().reshape(1, 1)
            codes, scales = reference(lying, amax, tile, mode, 448 if mode == "off" else 256)
            q = quantize_tensor(x, format, side=side)
            assert torch.equal(q.codes, codes) and torch.equal(q.scales, scales), (name, side)
            assert q.scale.shape == ((len(lying), 1) if row_scaled else (1,))
            with backend("triton"), np.errstate(all="ignore"):
                again = quantize_tensor(x, format, side=side)
            assert torch.equal(again.codes, codes) and torch.equal(again.scales, scales), (name, side)
            if mode != "off":
                chosen += (scales != reference(lying, amax, tile, "off", 256)[1]).sum().item()
            error = (q.dequantize() - x).float().norm() / x.float().norm()
            assert error < (0.3 if name == "even" else 0.2), (name, side, error)
        row, col = quantize_sides(x, format)
        assert torch.equal(row.codes, quantize_tensor(x, format).codes)
        assert torch.equal(col.codes, quantize_tensor(x, format, side="col").codes)
    assert (chosen > 0) == (mode != "off")


def test_four_over_six_has_the_smaller_error_and_rows_do_where_they_differ_in_size():
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))

    def error(t, **how):
        return ((quantize_tensor(t, Format("e2m1", (1, 16), "e4m3", **how)).dequantize() - t).norm() / t.norm()).item()

    assert error(x, four_over_six="mse") < error(x, four_over_six="mae") < 0.97 * error(x)
    apart = x * torch.exp2(torch.linspace(-30, 0, 256))[:, None]

    def of_small_rows(**how):
        found = quantize_tensor(apart, Format("e2m1", (1, 16), "e4m3", **how)).dequantize()[:64]
        return ((found - apart[:64]).norm() / apart[:64].norm()).item()

    assert of_small_rows(row_scaled=True) < 0.12 < 0.3 < of_small_rows()


def test_nan_and_infinity_in_variants():
    x = torch.ones(32, 32)
    x[3, 5], x[20, 20] = math.nan, math.inf
    for mode, row_scaled in (("mse", False), ("mae", True), ("off", True)):
        y = quantize_tensor(x, Format("e2m1", (1, 16), "e4m3", four_over_six=mode, row_scaled=row_scaled)).dequantize()
        assert y[3, :16].isnan().all() and y.isnan().sum() == 16 and y[20, 20] > 6


def test_no_rows_and_one_have_codes_in_every_variant():
    for mode, row_scaled, side, rows in itertools.product(("off", "mae", "mse"), (False, True), ("row", "col"), (0, 1)):
        x = torch.full((rows, 16), 6.0)
        q = quantize_tensor(x, Format("e2m1", (1, 16), "e4m3", four_over_six=mode, row_scaled=row_scaled), side=side)
        assert torch.equal(q.dequantize(), x), (mode, row_scaled, side, rows)


def test_a_scale_for_each_row_goes_through_the_product():
    """The kernel multiplies tiles by their own scales; a row's scale multiplies its sums after it."""
    rows, whole = Format("e2m1", (1, 16), "e4m3", row_scaled=True), NV
    x, w = torch.randn(2, 7, 64), torch.randn(48, 64)
    for left, right in itertools.product((rows, whole), repeat=2):
        a, b = quantize_tensor(x, left), quantize_tensor(w, right)
        want = dense(a).double() @ dense(b).double().mT
        for name in ("torch", "triton"):
            with backend(name), np.errstate(all="ignore"):
                c = product(a, b, torch.float32, True)
            torch.testing.assert_close(c.double(), want, rtol=1e-5, atol=1e-5)
    assert isinstance(a, QTensor) and a.scale.shape == (1,)


RECIPES = [
    *(Fp8Block(x_tile=x, w_tile=w, dy_tile=dy) for x, w, dy in itertools.product(((1, 128), (128, 128)), repeat=3)),
    Fp8Block(x_tile=(128, 128), w_tile=(1, 128), scales="float32"),
    Fp8Block(w_tile=(1, 128), scales="float32", keep="col"),
    MXFP8(w_tile=(32, 32)),
    NVFP4(stochastic=False, w_tile=(1, 16)),
    NVFP4(stochastic=False, row_scaled=True),
    NVFP4(stochastic=False, row_scaled=True, hadamard=False, keep="input"),
    NVFP4(stochastic=False, four_over_six="all", w_tile=(1, 16)),
    NVFP4(stochastic=False, four_over_six="weights", error="mae", row_scaled=True),
    NVFP4(four_over_six="activations", stochastic=True),
]


@pytest.mark.turns("name")
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_layers_with_other_tiles(recipe, name):
    """Each product is the product of the operands, quantised by the sides that it reads."""
    for operand in ("x", "w", "dy"):
        assert getattr(recipe, operand).tile == getattr(recipe, f"{operand}_tile", getattr(recipe, operand).tile)
    g = torch.Generator().manual_seed(0)
    x, dy = torch.randn(144, 256, generator=g), torch.randn(144, 128, generator=g)
    cfg = QLinearConfig(256, 128, recipe, bias=False)
    params = linear.init(LinearConfig(256, 128, bias=False), key=random.key(0), dtype=torch.float32)
    with backend(name), np.errstate(all="ignore"):
        work = quantize_params(params, cfg, dtype=torch.float32, key=random.key(3))
        y, residuals = qlinear.fwd(work, x, cfg)
        dparams, dx = qlinear.bwd(residuals, dy, cfg)
    w, keys = params.weight, random.split(work.weight.key, 2) if recipe.stochastic else (None, None)
    row = {"x": quantize_tensor(x, recipe.x), "w": quantize_tensor(w, recipe.w), "dy": quantize_tensor(dy, recipe.dy, key=keys[0])}
    col = {
        "x": quantize_tensor(x, recipe.x, side="col", hadamard=recipe.hadamard),
        "w": quantize_tensor(w, recipe.w, side="col"),
        "dy": quantize_tensor(dy, recipe.dy, side="col", hadamard=recipe.hadamard, key=keys[1]),
    }
    if recipe.keep == "row":
        col["x"] = turned(row["x"])
    row, col = ({key: dense(q).double() for key, q in of.items()} for of in (row, col))
    for got, want in ((y, row["x"] @ row["w"].mT), (dx, row["dy"] @ col["w"]), (dparams.weight, col["dy"].mT @ col["x"])):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=2e-4)
    exact = [x @ w.mT, dy @ w, dy.mT @ x]
    for got, want in zip((y, dx, dparams.weight), exact, strict=True):
        assert (got - want).norm() < (0.3 if recipe.x.element == "e2m1" else 0.06) * want.norm()


@config
class Mixed(Recipe):
    x_format: Format = NV
    dy_format: Format = NV
    stochastic: bool = False

    def __post_init__(self):
        self.settle(self.x_format, NV, self.dy_format)


def test_refusals_of_variants():
    for make, message in (
        (lambda: Fp8Block(x_tile=(1, 0)), r"Fp8Block: x_tile must be \(1, 128\) or \(128, 128\), got \(1, 0\)"),
        (lambda: MXFP8(w_tile=(16, 16)), r"MXFP8: w_tile must be \(1, 32\) or \(32, 32\), got \(16, 16\)"),
        (lambda: NVFP4(w_tile=(32, 32)), r"NVFP4: w_tile must be \(1, 16\) or \(16, 16\), got \(32, 32\)"),
        (lambda: NVFP4(four_over_six="dy"), "NVFP4: four_over_six must be one of none, weights, activations, all, got 'dy'"),
        (lambda: NVFP4(error="max"), "NVFP4: error must be one of mse, mae .did you mean mae.., got 'max'"),
        (
            lambda: Format("e4m3", (1, 32), "e8m0", four_over_six="mse"),
            "Format: four_over_six must be one of off with e8m0 scales, got 'mse'",
        ),
        (
            lambda: Fp8Block(x_tile=(1, 128), scales="float32"),
            "Fp8Block: keep must be 'input' or 'col', as codes by rows would be rounded a second time, got 'row'",
        ),
        (
            lambda: GroupedQLinearConfig(2, 32, 32, NVFP4(stochastic=False, row_scaled=True)),
            r"GroupedQLinearConfig: recipe\.x\.row_scaled must be False, as rows are gathered once .*, got True",
        ),
        (
            lambda: GroupedQLinearConfig(2, 128, 128, Fp8Block(dy_tile=(128, 128))),
            r"GroupedQLinearConfig: recipe\.dy\.tile must be \(0, 0\) or within a row.*, got \(128, 128\)",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            make()
    tried = Format("e2m1", (1, 16), "e4m3", four_over_six="mse")
    with pytest.raises(ValueError, match=r"^quantize_tensor: key must be None where four_over_six compares the errors of rounding"):
        quantize_tensor(torch.randn(4, 16), tried, key=random.key(0))
    with pytest.raises(ValueError, match=r"^Mixed: dy\.four_over_six must be 'off' with stochastic"):
        Mixed(dy_format=tried, stochastic=True)
    with pytest.raises(ValueError, match="amax must be None"):
        quantize_tensor(torch.randn(4, 16), Format("e2m1", (1, 16), "e4m3", row_scaled=True), amax=torch.ones(1))
    assert quantize.line_amax(torch.ones(0, 4), False, False).shape == (0, 1)
