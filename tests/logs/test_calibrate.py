"""Amaxes of a run in high precision, as the first scales of delayed scaling."""

import pytest
import torch

from funcops import ChainConfig, ExpertsConfig, LinearConfig, RepeatConfig, Step, chain, experts, linear, random, repeat
from funcops.engine.trees import tree_map_tensors
from funcops.logs import calibrated, calibration_logs, logs_init, split_logs, with_logs
from funcops.low_precision import Fp8Delayed, quantize_params, recipe_init, split_amaxes, with_recipe

RUNS = 3


def model(stacked):
    layers = RepeatConfig(linear, LinearConfig(128, 128), 2, stacked=stacked)
    return ChainConfig(steps=(Step("layers", repeat, layers), Step("head", linear, LinearConfig(128, 64))))


@pytest.mark.parametrize("stacked", [True, False])
def test_they_are_the_amaxes_that_products_in_low_precision_measure(stacked):
    """In a first step without state each product measures its own operands."""
    wide = model(stacked)
    low, params = with_recipe(wide, Fp8Delayed(history=4)), chain.init(wide, key=random.key(0), dtype=torch.float32)
    xs = [torch.randn(8, 128, generator=torch.Generator().manual_seed(i)) * (i + 1) for i in range(RUNS)]
    cfg = with_logs(wide, calibration_logs(low), runs=RUNS)
    work = logs_init(params, cfg)
    sums = tree_map_tensors(torch.zeros_like, work)
    measured = []
    for x in xs:
        y, residuals = chain.fwd(work, x, cfg)
        chain.bwd(residuals, y, cfg, into=sums)
        codes = quantize_params(params, low, {}, dtype=torch.float32)
        y, residuals = chain.fwd(codes, x, low)
        measured.append(split_amaxes(chain.bwd(residuals, y, low)[0])[1])
    amaxes = calibrated(split_logs(sums, cfg)[1], cfg, params)
    want = {path: torch.stack([one[path] for one in measured]).amax(0) for path in measured[0]}
    assert amaxes.keys() == want.keys() == recipe_init(low, params).keys()
    for path, t in want.items():
        torch.testing.assert_close(amaxes[path], t, rtol=0.1, atol=0)
        torch.testing.assert_close(amaxes[path][..., 1], t[..., 1], rtol=0, atol=0)
    first = amaxes["layers.weight"][0] if stacked else amaxes["layers.0.weight"]
    assert first[0] == torch.stack(xs).abs().max()
    state = recipe_init(low, params, amaxes=amaxes)
    torch.testing.assert_close(state["head.weight"].scale * amaxes["head.weight"], torch.tensor([448.0, 448.0, 57344.0]))


def test_a_state_of_them_does_not_saturate():
    """A step with these scales has the codes of a step that measures its own, if its batch is the same."""
    wide, x = model(False), torch.randn(8, 128)
    low, params = with_recipe(wide, Fp8Delayed(history=4)), chain.init(wide, key=random.key(0), dtype=torch.float32)
    cfg = with_logs(wide, calibration_logs(low))
    y, residuals = chain.fwd(logs_init(params, cfg), x, cfg)
    amaxes = calibrated(split_logs(chain.bwd(residuals, y, cfg)[0], cfg)[1], cfg, params)
    state = recipe_init(low, params, amaxes=amaxes)
    with_state, measuring = [chain.fwd(quantize_params(params, low, s, dtype=torch.float32), x, low)[0] for s in (state, {})]
    assert (with_state - y).norm() < 0.1 * y.norm() and (with_state - measuring).norm() < 0.05 * y.norm()


def test_what_cannot_be_calibrated_is_refused():
    wide = model(False)
    with pytest.raises(ValueError, match=r"calibration_logs: cfg must be one with delayed scaling \(Fp8Delayed\), got ChainConfig"):
        calibration_logs(wide)
    groups = ChainConfig(steps=(Step("mix", experts, ExpertsConfig(2, 128, 128)),))
    with pytest.raises(ValueError, match=r"calibration_logs: .* must be a linear layer without groups"):
        calibration_logs(with_recipe(groups, Fp8Delayed()))
    cfg, params = with_logs(wide, {"head": ("dx_norm",)}), chain.init(wide, key=random.key(0))
    with pytest.raises(ValueError, match=r"calibrated: cfg must be one with the logs of calibration_logs, got ChainConfig"):
        calibrated({}, cfg, params)
    cfg = with_logs(wide, {"head": ("x_amax", "dy_amax")})
    with pytest.raises(ValueError, match=r"calibrated: logs must be logs of cfg, with x_amax, dy_amax of head, got"):
        calibrated({}, cfg, params)
    found = {"head": {"x_amax": torch.ones(()), "dy_amax": torch.ones(())}}
    with pytest.raises(TypeError, match=r"calibrated: params.head.weight must be a weight \[O, I\] of its own, got None"):
        calibrated(found, cfg, {"layers": params["layers"], "head": None})
