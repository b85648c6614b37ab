"""The gradient noise scale: the published estimators are unbiased, and the norms of microbatches are those gradients'."""

import pytest
import torch

from funcops import (
    ChainConfig,
    CrossEntropyConfig,
    LinearConfig,
    RepeatConfig,
    Step,
    WithExtras,
    chain,
    cross_entropy,
    linear,
    random,
    repeat,
)
from funcops.engine.trees import tensors, tree_map_tensors
from funcops.logs import gradient_noise, logs_init, param_logs, split_logs, total_norm, with_logs

D = torch.float64


def test_the_estimators_are_unbiased():
    """Gradients of examples are drawn around G with variance 4 in each of 50 directions: S is 200, |G|^2 is 2."""
    draw, mean, small, microbatches, steps = torch.Generator().manual_seed(0), torch.full((50,), 0.2, dtype=D), 2, 4, 4000
    examples = mean + 2 * torch.randn(steps, microbatches, small, 50, generator=draw, dtype=D)
    each = examples.mean(2)
    found = [gradient_noise(one.norm(dim=1), one.mean(0).norm(), batch_small=small, batch_big=small * microbatches) for one in each]
    noise, signal = (torch.stack(values).mean() for values in zip(*found, strict=True))
    assert noise.item() == pytest.approx(200, rel=0.02) and signal.item() == pytest.approx(2.0, abs=0.5)
    assert found[0].scale == found[0].noise / found[0].signal


def test_equal_gradients_have_no_noise():
    found = gradient_noise(torch.full((3,), 2.0), torch.tensor(2.0), batch_small=4, batch_big=12)
    assert found == (0.0, 4.0) and found.scale == 0.0


@pytest.mark.parametrize("stacked", [True, False])
def test_the_norms_of_microbatches(stacked):
    layers = RepeatConfig(linear, LinearConfig(4, 4), 2, stacked=stacked)
    loss = Step("loss", cross_entropy, CrossEntropyConfig(), takes=("labels",))
    steps = Step("layers", repeat, layers), Step("head", linear, LinearConfig(4, 8)), loss
    model, runs = ChainConfig(steps=steps, extras=("labels",)), 3
    assert list(param_logs(model)) == ["layers.*", "head"]
    cfg, params = with_logs(model, param_logs(model), runs=runs), chain.init(model, key=random.key(0), dtype=D)
    xs = [WithExtras(torch.randn(5, 4, dtype=D), {"labels": torch.randint(8, (5,))}) for _ in range(runs)]
    work = logs_init(params, cfg)
    sums, want = tree_map_tensors(torch.zeros_like, work), []
    for x in xs:
        y, residuals = chain.fwd(work, x, cfg)
        chain.bwd(residuals, torch.ones_like(y), cfg, into=sums)
        y, residuals = chain.fwd(params, x, model)
        want.append(torch.stack([t.norm() for t in tensors(chain.bwd(residuals, torch.ones_like(y), model)[0])]).norm())
    torch.testing.assert_close(total_norm(split_logs(sums, cfg)[1], cfg), torch.stack(want))


def test_what_has_no_noise_is_refused():
    ends = Step("a", linear, LinearConfig(4, 4)), Step("b", linear, LinearConfig(4, 4))
    with pytest.raises(ValueError, match=r"param_logs: cfg must be a chain without ties, got ties of b.weight"):
        param_logs(ChainConfig(steps=ends, ties={"b.weight": "a.weight"}))
    with pytest.raises(ValueError, match=r"gradient_noise: batch_big must be more than batch_small, 2, got 2"):
        gradient_noise(torch.ones(2), torch.ones(()), batch_small=2, batch_big=2)
    cfg = with_logs(ChainConfig(steps=ends), {"a": ("dx_norm",)})
    with pytest.raises(ValueError, match=r"total_norm: logs must be logs of cfg with a dw_norm, as of param_logs, got"):
        total_norm({"a": {"dx_norm": torch.ones(())}}, cfg)
