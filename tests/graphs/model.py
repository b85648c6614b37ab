"""A small model with dropout, its whole training step, and comparisons bit by bit."""

import torch

from funcops import (
    ActivationConfig,
    ChainConfig,
    CrossEntropyConfig,
    DropoutConfig,
    LayerNormConfig,
    LinearConfig,
    Needs,
    Step,
    WithExtras,
    activation,
    chain,
    cross_entropy,
    donate,
    dropout,
    layer_norm,
    linear,
    random,
)
from funcops.engine.trees import leaves, paths, tree_map
from funcops.optim import AdamWConfig, adamw_init, adamw_update

CFG = ChainConfig(
    steps=(
        Step("norm", layer_norm, LayerNormConfig(8)),
        Step("up", linear, LinearConfig(8, 16)),
        Step("act", activation, ActivationConfig("gelu")),
        Step("drop", dropout, DropoutConfig(0.4), takes=("key",)),
        Step("head", linear, LinearConfig(16, 5)),
        Step("loss", cross_entropy, CrossEntropyConfig(), takes=("labels",)),
    ),
    extras=("key", "labels"),
)
ADAMW = AdamWConfig(lr=1e-2, weight_decay=0.1)


def init(device="cpu"):
    params = chain.init(CFG, key=random.key(0), device=device)
    return params, adamw_init(params, ADAMW)


def batch(i, device="cpu"):
    generator = torch.Generator().manual_seed(i)
    x, labels = torch.randn(6, 8, generator=generator), torch.randint(5, (6,), generator=generator)
    extras = {"key": random.fold_in(random.key(9), i).to(device), "labels": labels.to(device)}
    return WithExtras(x.to(device), extras)


def step(params, state, first, second, rate):
    """Two accumulation steps and an update, written into params and state."""
    grads = None
    for x in (first, second):
        loss, residuals = chain.fwd(params, x, CFG, needs=Needs(x=False))
        found, _ = chain.bwd(donate(residuals), torch.full_like(loss, 0.5), CFG)
        grads = found if grads is None else tree_map(lambda a, b: None if a is None else a + b, grads, found)
    updated = adamw_update(params, grads, state, ADAMW, lr=rate)
    for old, new in zip(leaves((params, state)), leaves(updated), strict=True):
        if isinstance(old, torch.Tensor):
            old.copy_(new)
    return params, state, loss


def same(a, b):
    a, b = paths(a), paths(b)
    assert list(a) == list(b)
    for path, t in a.items():
        assert torch.equal(t, b[path]) if isinstance(t, torch.Tensor) else t == b[path], path
