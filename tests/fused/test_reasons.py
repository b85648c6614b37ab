"""Why a fusion does not cover calls that look like its own, as `explain` says it."""

import pytest
import torch

from funcops import (
    ActivationConfig,
    ChainConfig,
    GLUConfig,
    LinearConfig,
    ParallelConfig,
    QLinearConfig,
    ReshapeConfig,
    RMSNormConfig,
    RopeConfig,
    Step,
    activation,
    chain,
    explain,
    glu,
    linear,
    parallel,
    qlinear,
    reshape,
    rms_norm,
    rope,
)
from funcops.low_precision import Fp8Block, Fp8Current

NORM, COLUMNS = (rms_norm, RMSNormConfig(128)), "the linear quantises columns, or whole tensors"
BEFORE = {
    "wide norm": ((rms_norm, RMSNormConfig((2, 128))), Fp8Block(), "the norm goes over several dimensions"),
    "pairs": ((glu, GLUConfig("swiglu", paired=True)), Fp8Block(), "the GLU has two inputs"),
    "x itself": (NORM, Fp8Block(keep="input"), "the linear saves x itself"),
    "whole": (NORM, Fp8Current(), COLUMNS),
    "columns": (NORM, Fp8Block(keep="col"), COLUMNS),
    "norm": (NORM, Fp8Block(), None),
    "activation": ((activation, ActivationConfig("silu")), Fp8Block(), None),
}


@pytest.mark.parametrize("name", BEFORE)
def test_why_an_output_is_not_quantised(name):
    made, recipe, why = BEFORE[name]
    text = str(explain(ChainConfig(steps=(Step("made", *made), Step("out", qlinear, QLinearConfig(128, 64, recipe))))))
    if why is None:
        assert "made + out: quantised output" in text and "not quantised output" not in text
    else:
        assert f"not quantised output at made (forward): {why}\n" in f"{text}\n" and ": quantised output" not in text


def heads(name, count, size=8, turned=True, **how):
    steps = [
        Step("proj", linear, LinearConfig(32, count * size)),
        Step("heads", reshape, ReshapeConfig((count * size,), (count, size))),
    ]
    if not turned:
        return Step(name, chain, ChainConfig(steps=tuple(steps)))
    turn = Step("turn", rope, RopeConfig(size, **how), takes=("positions",))
    return Step(name, chain, ChainConfig(steps=(*steps, turn), extras=("positions",)), takes=("positions",))


HEADS = {
    "of one layer": ((heads("q", 4), heads("k", 2), heads("v", 2, turned=False)), None),
    "sizes": ((heads("q", 4), heads("k", 2), heads("v", 2, 16, False)), "their heads are not of one size"),
    "counts": ((heads("q", 4), heads("k", 2), heads("v", 4, turned=False)), "k and v have not as many heads"),
    "turns": ((heads("q", 4), heads("k", 2, interleaved=True), heads("v", 2, turned=False)), "q and k do not turn alike"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", HEADS)
def test_why_heads_are_not_made_together(name, dtype):
    branches, why = HEADS[name]
    step = Step("qkv", parallel, ParallelConfig(branches=branches), takes=("positions",))
    text = str(explain(ChainConfig(steps=(step,), extras=("positions",)), dtype=dtype))
    why = "float64 runs on torch" if dtype is torch.float64 else why
    assert (": q, k and v, saves" in text) == (why is None)
    for half in ("forward", "backward"):
        assert (f"not q, k and v at qkv.q.proj (siblings {half}): {why}" in text) == (why is not None)
