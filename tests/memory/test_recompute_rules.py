"""`Recompute()` for any step or field never keeps more, and never changes a gradient's bits."""

import pytest
import torch
from policy_cases import made, same

from funcops import (
    ActivationConfig,
    ChainConfig,
    LayerNormConfig,
    LinearConfig,
    Policy,
    Recompute,
    RMSNormConfig,
    Step,
    activation,
    chain,
    layer_norm,
    linear,
    random,
    report,
    rms_norm,
    with_policy,
)
from funcops.engine.trees import paths

D, ROWS = 16, 512
NORMS = {"rms_norm": (rms_norm, RMSNormConfig(D)), "layer_norm": (layer_norm, LayerNormConfig(D))}


def behind_an_activation(norm):
    """A chain in which the norm's x is recomputed anyway."""
    op, cfg = NORMS[norm]
    steps = (Step("a", linear, LinearConfig(D, D)), Step("act", activation, ActivationConfig("gelu")), Step("norm", op, cfg))
    return ChainConfig(steps=(*steps, Step("b", linear, LinearConfig(D, D))))


def given(model):
    if model in NORMS:
        cfg = behind_an_activation(model)
        x, dy = (random.normal(random.key(i), (ROWS, D)) for i in (1, 2))
        return cfg, chain.init(cfg, key=random.key(0)), x, dy
    return made(model)


def rules_of(model):
    """The paths of every step and of every field that the plain chain keeps."""
    cfg, params, x, _ = given(model)
    kept = chain.fwd(params, x, cfg)[1]
    fields = [path for path, t in paths(kept).items() if isinstance(t, torch.Tensor)]
    return sorted({path for field in fields for path in (field, field.rpartition(".")[0]) if path})


EACH = [(model, rule) for model in (*NORMS, "llama", "gpt-2") for rule in rules_of(model)]


@pytest.mark.parametrize(("model", "rule"), EACH, ids=[" ".join(one) for one in EACH])
def test_a_rule_keeps_less_or_raises(model, rule):
    cfg, params, x, dy = given(model)
    y, plain = chain.fwd(params, x, cfg)
    op = with_policy(chain, Policy({rule: Recompute()}))
    try:
        got, kept = op.fwd(params, x, cfg)
    except ValueError as error:
        assert "with_policy" in str(error)
        return
    assert torch.equal(got, y)
    assert report(kept, params, x).kept_bytes < report(plain, params, x).kept_bytes
    for ours, theirs in zip(op.bwd(kept, dy, cfg), chain.bwd(plain, dy, cfg), strict=True):
        assert same(ours, theirs)
