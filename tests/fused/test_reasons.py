"""Why a fusion does not cover calls that look like its own, as `explain` says it."""

import pytest
import torch

from funcops import (
    ActivationConfig,
    AddConfig,
    ChainConfig,
    ForkConfig,
    GLUConfig,
    LayerNormConfig,
    LinearConfig,
    Needs,
    ParallelConfig,
    QLinearConfig,
    ReshapeConfig,
    RMSNormConfig,
    RopeConfig,
    Step,
    activation,
    add,
    chain,
    explain,
    fork,
    glu,
    layer_norm,
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


@pytest.mark.parametrize("dim", [(128,), (2, 128)], ids=str)
@pytest.mark.parametrize("norm", [(rms_norm, RMSNormConfig), (layer_norm, LayerNormConfig)], ids=lambda norm: norm[0].name)
def test_why_a_norm_does_not_add_the_gradient_of_a_stream(norm, dim):
    op, config = norm
    steps = Step("split", fork, ForkConfig(), gives=("stream",)), Step("norm", op, config(dim))
    text = str(explain(ChainConfig(steps=(*steps, Step("end", add, AddConfig(), takes=("stream",))))))
    assert ("split + norm: fork + reader" in text) == (len(dim) == 1)
    why = "not fork + reader at split (backward): the norm goes over several dimensions"
    assert (why in text) == (len(dim) > 1)


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


def test_heads_whose_input_has_no_gradient_are_not_joined_backward():
    branches, _ = HEADS["of one layer"]
    step = Step("qkv", parallel, ParallelConfig(branches=branches), takes=("positions",))
    text = str(explain(ChainConfig(steps=(step,), extras=("positions",)), Needs(x=False)))
    assert ": q, k and v, saves" in text.partition("  backward")[0] and text.count(": q, k and v, saves") == 1
    assert "not sibling linears at qkv.q.proj (siblings backward): no gradient is asked of their input" in text
