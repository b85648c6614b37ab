"""A recipe of one's own: its three formats must have scales of one kind, since a product decodes both operands by one kind."""

import itertools

import pytest
import torch

from funcops import LinearConfig, QLinearConfig, linear, qlinear, random
from funcops.contract.op import config
from funcops.low_precision import Format, Recipe, quantize_params, quantize_tensor

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
def test_a_recipe_has_scales_of_one_kind(kinds):
    if len(set(kinds)) > 1 and set(kinds) != ONE:
        with pytest.raises(ValueError, match=r"^Mine: (w|dy)\.scales must be of the kind of x's, '\w+', got '\w+'$"):
            Mine(kinds=kinds)
        return
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
