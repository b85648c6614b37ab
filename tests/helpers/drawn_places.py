"""Rules drawn for layers of several blocks, each with a place and maybe a codec, and what is drawn of a backward."""

import torch

from funcops import Compress, Needs, Policy, RepeatConfig, SkipConfig, WithExtras, chain, donate, random, skip
from funcops.engine.residuals.report import kept_values
from funcops.engine.trees import paths
from funcops.models.blocks import block_config, gpt2_block_config, mlp_config

X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
BODIES = {
    "mlp": (skip, SkipConfig(chain, mlp_config(8, 12)), {}),
    "llama": (chain, block_config(8, 2, 12), {"positions": torch.arange(3)}),
    "gpt-2": (chain, gpt2_block_config(8, 2, 12, 0.1), {"key": random.key(3)}),
}


def within(codec, got, want):
    """Whether a decoded tensor is within the error that `engine/residuals/codec.py` states."""
    got, want = got.float(), want.float()
    row = want.abs().amax(-1, keepdim=True)  # of at most 32 elements here, so a block is a row
    most = {"bf16": want.abs() * 2**-8, "int8": row / 254 * 1.0001, "mxfp8": torch.maximum(want.abs() * 2**-4, row * 2**-17)}
    return bool(((got - want).abs() <= most[codec]).all())


def drawn(rng, place):
    """An op and config of some layers, x, and rules by path for some of them."""
    op, cfg, extras = BODIES[rng.choice(list(BODIES))]
    times = rng.randint(1, 3)
    fields = sorted({path for path, *_ in kept_values(op.fwd(op.init(cfg, key=random.key(0)), given(extras), cfg)[1])})
    codec = rng.choice([None, None, "bf16", "mxfp8", "int8"])
    action = place if codec is None else Compress(codec) | place
    layers = rng.choice(["*", "0", f"0-{times - 1}"])
    fields = [path for path in fields if codec is None or path[-1] in "xqkvy"]
    names = rng.sample(fields, min(rng.randint(1, 4), len(fields)))
    rules = {f"{layers}.{name}": action for name in names}
    return op, RepeatConfig(op, cfg, times), given(extras), Policy(rules, optional=True), codec


def given(extras):
    return WithExtras(X, extras) if extras else X


def drawn_needs(rng, params):
    some = tuple(rng.sample(sorted(path for path, t in paths(params).items() if t is not None), 2))
    return Needs(x=rng.choice([True, True, False]), params=rng.choice([True, True, some]))


def by_backward(op, kept, dy, cfg, halves, donated):
    give = donate if donated else (lambda tree: tree)
    if not halves:
        return op.bwd(give(kept), dy, cfg)
    dx, pending = op.dgrad(give(kept), dy, cfg)
    return op.wgrad(give(pending), cfg), dx
