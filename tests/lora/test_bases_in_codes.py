"""Adapters on a base that holds nothing but codes."""

import pytest
import torch

from funcops import ChainConfig, LinearConfig, Step, chain, linear, random, trees
from funcops.lora import lora_init, lora_needs, with_lora
from funcops.low_precision import NF4, Format, Fp8Block, dense, quantize_params, quantize_weights, with_recipe, with_weight_only

FORMATS = {
    "nf4": NF4(),
    "nf4 double": NF4(double=True),
    "mxfp8": Format("e4m3", (1, 32), "e8m0"),
    "mxfp4": Format("e2m1", (1, 32), "e8m0"),
    "nvfp4": Format("e2m1", (1, 16), "e4m3"),
    "rows": Format("e4m3", (1, 0), "float32"),
    "tensor": Format("e5m2", (0, 0)),
}
BASE = ChainConfig(
    steps=(Step("up", linear, LinearConfig(64, 64, bias=False)), Step("down", linear, LinearConfig(64, 64, bias=False)))
)


def of_adapters(params, cfg, x):
    y, residuals = chain.fwd(params, x, cfg, needs=lora_needs(cfg))
    return y, chain.bwd(residuals, torch.ones_like(y), cfg)[0]["up"]["both"]["lora"].b


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_they_have_the_dtype_that_the_codes_stand_for(name, dtype):
    low = with_weight_only(BASE, FORMATS[name])
    base = quantize_weights(chain.init(BASE, key=random.key(0), dtype=dtype), low)
    cfg = with_lora(low, rank=2, targets=("*",))
    params = lora_init(base, cfg, key=random.key(1))
    plain = lora_init(dense(base), with_lora(BASE, rank=2, targets=("*",)), key=random.key(1))
    for step in ("up", "down"):
        assert params[step]["both"]["base"] is base[step]
        assert torch.equal(params[step]["both"]["lora"].a, plain[step]["both"]["lora"].a)
        assert params[step]["both"]["lora"].a.dtype is dtype
        assert lora_init(base, cfg, key=random.key(1), dtype=torch.float16)[step]["both"]["lora"].a.dtype is torch.float16
    for to in (dtype, torch.float32):  # a cast of the whole tree is followed by codes and adapters
        y, db = of_adapters(trees.cast(params, to), cfg, torch.ones(3, 64, dtype=to))
        assert y.dtype is db.dtype is to


def test_they_have_the_dtype_of_a_working_tree():
    low = with_recipe(BASE, Fp8Block())
    work = quantize_params(chain.init(BASE, key=random.key(0), dtype=torch.bfloat16), low)
    params = lora_init(work, with_lora(low, rank=2, targets=("up",)), key=random.key(1))
    assert params["up"]["both"]["lora"].a.dtype is torch.bfloat16
