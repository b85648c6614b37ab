"""Stochastic rounding in a schedule: each microbatch has noise of its own, and a single one has a step's."""

import pytest
import torch

from funcops import ChainConfig, LinearConfig, RepeatConfig, Step, chain, linear, random, repeat
from funcops.engine.program.values import fold_keys
from funcops.low_precision import NVFP4, quantize_params, with_recipe
from funcops.schedule import gpipe, interleaved_1f1b, one_f_one_b, run, zb_h1
from funcops.testing.checks import same_bits


def staged(stacked=False):
    layer = ChainConfig(steps=(Step("up", linear, LinearConfig(16, 16)),))
    stage = ChainConfig(steps=(Step("layers", repeat, RepeatConfig(chain, layer, 2, stacked=stacked)),))
    return with_recipe(ChainConfig(steps=tuple(Step(f"s{i}", chain, stage) for i in range(2))), NVFP4())


def given(cfg, count, same=True):
    draw = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(count, 16, 16, generator=draw) for _ in range(2))
    work = quantize_params(chain.init(cfg, key=random.key(0)), cfg, dtype=torch.float32, key=random.key(1))
    return work, [x[0]] * count if same else list(x), [dy[0]] * count if same else list(dy)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("generator", [gpipe, one_f_one_b, zb_h1])
def test_equal_microbatches_round_differently(generator, stacked):
    cfg = staged(stacked)
    work, xs, dys = given(cfg, 3)
    ran = run(generator(2, 3), work, xs, cfg, dys)
    same_bits(ran.ys[0], ran.ys[1], "forwards round to nearest")
    assert not any(torch.equal(ran.dxs[a], ran.dxs[b]) for a, b in ((0, 1), (0, 2), (1, 2)))


def test_a_single_microbatch_has_the_bits_of_a_step():
    cfg = staged()
    work, xs, dys = given(cfg, 1)
    ran, (y, kept) = run(one_f_one_b(2, 1), work, xs, cfg, dys), chain.fwd(work, xs[0], cfg)
    dparams, dx = chain.bwd(kept, dys[0], cfg)
    same_bits((ran.ys[0], ran.dxs[0], ran.dparams), (y, dx, dparams), "of a step")


def test_noise_does_not_depend_on_the_schedule():
    """Each microbatch has the bits of a step with its number folded into all keys."""
    cfg = staged()
    work, xs, dys = given(cfg, 3, same=False)
    want = []
    for m, (x, dy) in enumerate(zip(xs, dys, strict=True)):
        own = fold_keys(work, m)
        assert own["s0"]["layers"][0]["up"].weight.row is work["s0"]["layers"][0]["up"].weight.row, "codes are shared"
        want.append(chain.bwd(chain.fwd(own, x, cfg)[1], dy, cfg)[1])
    for schedule in (gpipe(2, 3), zb_h1(2, 3), interleaved_1f1b(1, 3, 2)):
        same_bits(run(schedule, work, xs, cfg, dys).dxs, want, schedule.name)
