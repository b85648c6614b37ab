"""The rounding of x, w and dy in a step, against the report on the same batch and against the codes."""

import pytest
import torch

from funcops import ChainConfig, LinearConfig, LinearParams, RepeatConfig, Step, chain, linear, quantization_report, random, repeat
from funcops.logs import logs_init, split_logs, with_logs
from funcops.low_precision import (
    MXFP8,
    NVFP4,
    Fp8Block,
    Fp8Current,
    Fp8Delayed,
    ScaleState,
    begin_step,
    quantize_params,
    rounding_logs,
    weight_rounding,
    with_recipe,
)

RECIPES = [Fp8Current(), Fp8Block(), MXFP8(), NVFP4(stochastic=False), Fp8Delayed(history=4)]
ONE = ChainConfig(steps=(Step("up", linear, LinearConfig(128, 256)),))


def wild(*shape, seed=0):
    """Numbers whose sizes differ by many powers of two, so that small ones vanish."""
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=draw) * 2.0 ** torch.randint(-36, 4, shape, generator=draw)).to(torch.bfloat16)


def watched(cfg, params, x, dy, state=None, key=None):
    logged = with_logs(cfg, rounding_logs(cfg))
    work, _ = begin_step(params, cfg, {} if state is None else state, key=key)
    y, residuals = chain.fwd(logs_init(work, logged), x, logged)
    assert torch.equal(y, chain.fwd(work, x, cfg)[0])
    return work, split_logs(chain.bwd(residuals, dy, logged)[0], logged)[1]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
def test_it_says_what_the_report_says(recipe):
    """The report measures the same layer on the same batch without the recipe."""
    cfg, params, x, dy = (
        with_recipe(ONE, recipe),
        chain.init(ONE, key=random.key(0), dtype=torch.bfloat16),
        wild(32, 128),
        wild(32, 256, seed=1),
    )
    (row,) = quantization_report(params, x, ONE, recipe, dy=dy).rows
    work, found = watched(cfg, params, x, dy)
    weights = weight_rounding(params, work)["up.weight"]
    for name in ("x", "dy"):
        one = row.operands[name]
        assert float(found["up"][f"{name}_amax"]) == one.amax > 0
        assert float(found["up"][f"{name}_underflow"]) == pytest.approx(one.zeros) and (one.zeros > 0 or name == "dy")
        assert float(found["up"][f"{name}_saturated"]) == pytest.approx(one.saturated)
        assert 0 < found["up"][f"{name}_error"] < 0.2
    assert (float(weights.amax), float(weights.underflow), float(weights.saturated)) == pytest.approx(row.operands["w"][:3])


def test_a_scale_that_is_too_large_saturates():
    """With delayed scaling it is the step's own scale that counts: of x and dy four times too large."""
    cfg = with_recipe(ONE, Fp8Delayed(history=4))
    params, x = chain.init(ONE, key=random.key(0)), torch.linspace(-1, 1, 4 * 128).reshape(4, 128).to(torch.bfloat16)
    scale = torch.tensor([4 * 448.0, 448.0, 4 * 57344.0])
    state = {"up.weight": ScaleState(scale, torch.zeros(4, 3))}
    _, found = watched(cfg, params, x, torch.ones(4, 256, dtype=torch.bfloat16), state)
    assert float(found["up"]["x_saturated"]) == pytest.approx(0.75, abs=0.01) and found["up"]["dy_saturated"] == 1.0
    torch.testing.assert_close(found["up"]["dy_error"], torch.tensor(0.75))


def test_a_key_rounds_as_the_step_does():
    cfg = with_recipe(ONE, NVFP4())
    params, x, dy = chain.init(ONE, key=random.key(0)), wild(32, 128), wild(32, 256, seed=1)
    (first, again), (other, _) = [[watched(cfg, params, x, dy, key=random.key(k))[1]["up"] for _ in range(2)] for k in (1, 2)]
    assert torch.equal(first["dy_error"], again["dy_error"]) and not torch.equal(first["dy_error"], other["dy_error"])
    assert torch.equal(first["x_error"], other["x_error"])


@pytest.mark.parametrize("stacked", [True, False])
def test_layers_have_numbers_of_their_own(stacked):
    body = ChainConfig(steps=(Step("layers", repeat, RepeatConfig(linear, LinearConfig(128, 128), times=3, stacked=stacked)),))
    cfg, params = with_recipe(body, Fp8Block()), chain.init(body, key=random.key(0))
    _, found = watched(cfg, params, wild(8, 128), wild(8, 128, seed=1))
    assert found["layers.*"]["x_error"].shape == (3,) and found["layers.*"]["x_error"].unique().numel() == 3
    weights = weight_rounding(params, quantize_params(params, cfg))
    if stacked:
        assert weights["layers.weight"].error.shape == (3,)
    else:
        assert list(weights) == [f"layers.{i}.weight" for i in range(3)]


def test_what_has_no_codes_is_refused():
    with pytest.raises(ValueError, match=r"rounding_logs: cfg must be one with steps in a recipe, got ChainConfig"):
        rounding_logs(ONE)
    cfg, params = with_recipe(ONE, Fp8Block()), chain.init(ONE, key=random.key(0))
    work = quantize_params(params, cfg)
    with pytest.raises(ValueError, match=r"weight_rounding: params must be a tree with up.weight, got"):
        weight_rounding({}, work)
    with pytest.raises(ValueError, match=r"weight_rounding: params.up.weight must be \[256, 128\], got"):
        weight_rounding({"up": LinearParams(torch.ones(128, 128), None)}, work)
    assert weight_rounding(params, params) == {}
