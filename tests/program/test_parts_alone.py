"""A part of a chain's residuals or pending, given to the part's own backward: the gradients of the whole, or an error.

A chain recomputes what a step reads, and fills it in. Without the chain the field is missing, which must never mean "no gradient".
"""

import pytest
import torch

from funcops import (
    ActivationConfig,
    ChainConfig,
    LinearConfig,
    RMSNormConfig,
    SkipConfig,
    Step,
    WithExtras,
    activation,
    chain,
    linear,
    random,
    rms_norm,
    skip,
    with_policy,
)
from funcops.engine.trees import at, has, paths
from funcops.models.blocks import block_config, gpt2_block_config, mlp_config

D, ROWS = 16, 512


def inner():
    """A chain within a chain, whose norm is a step of the outer one."""
    mlp = ChainConfig(
        steps=(
            Step("up", linear, LinearConfig(D, 24)),
            Step("act", activation, ActivationConfig("gelu")),
            Step("down", linear, LinearConfig(24, D)),
        )
    )
    return ChainConfig(steps=(Step("norm", rms_norm, RMSNormConfig(D)), Step("mlp", chain, mlp)))


def stack():
    steps = inner().steps
    return ChainConfig(steps=tuple(Step(name, skip, SkipConfig(chain, ChainConfig(steps=steps))) for name in ("a", "b")))


MODELS = {
    "mlp": lambda: mlp_config(D, 24),
    "inner chain": inner,
    "stack of skips": stack,
    "recompute=False": lambda: ChainConfig(steps=(*inner().steps[:1], *inner().steps[1].cfg.steps), recompute=False),
    "llama block": lambda: block_config(D, 2, 24),
    "gpt2 block": lambda: gpt2_block_config(D, 2, 24, 0.0),
}
POLICIES = (None, "save_all", "minimal", "recompute_elementwise")


def parts(cfg, path=""):
    """(path, op, cfg) of each step of a chain and of the chains in it."""
    for step in cfg.steps:
        name = f"{path}.{step.name}" if path else step.name
        yield name, step.op, step.cfg
        below = step.cfg
        while isinstance(below, SkipConfig):
            below = below.cfg
        if isinstance(below, ChainConfig):
            yield from parts(below, name)


def part(tree, path):
    return at(tree, path) if has(tree, path) else None


def agree(got, want, where):
    want = {path: t for path, t in paths(want).items() if t is not None}
    got = {path: t for path, t in paths(got).items() if t is not None}
    assert got.keys() == want.keys(), where
    for path in want:
        torch.testing.assert_close(got[path], want[path], msg=lambda said, path=path: f"{where}.{path}: {said}")


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_a_part_alone_is_right_or_raises(model, policy):
    cfg = MODELS[model]()
    op = chain if policy is None else with_policy(chain, policy)
    key = random.key(0)
    params = op.init(cfg, key=key, dtype=torch.float64)
    x = random.normal(random.fold_in(key, 1), (2, ROWS, D), dtype=torch.float64)
    given = whole_input(cfg, x)
    y, residuals = op.fwd(params, given, cfg)
    dy = torch.ones_like(y) * torch.linspace(0.5, 1.5, D, dtype=torch.float64)
    dx, pending = op.dgrad(residuals, dy, cfg)
    whole = op.wgrad(pending, cfg)
    seen = {"right": 0, "raised": 0}
    for path, step_op, step_cfg in parts(cfg):
        own = part(pending, path)
        if own is None or part(params, path) is None:
            continue
        try:
            alone = step_op.wgrad(own, step_cfg)
        except (ValueError, TypeError) as error:
            assert "recompute=False" in str(error) or (policy and "of the forward" in str(error)), (path, error)
            seen["raised"] += 1
            continue
        agree(alone, part(whole, path), path)
        seen["right"] += 1
    assert sum(seen.values()) > 0
    assert seen["raised"] == 0 or model != "recompute=False" or policy


def whole_input(cfg, x):
    extras = {"positions": torch.arange(x.shape[1]).expand(x.shape[:2]), "key": random.key(3)}
    return WithExtras(x, {name: extras[name] for name in cfg.extras}) if cfg.extras else x
