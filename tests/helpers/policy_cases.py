"""Blocks under policies."""

import torch
from law_cases import CASES

from funcops import (
    ChainConfig,
    CrossEntropyConfig,
    EmbeddingConfig,
    RMSNormConfig,
    Step,
    WithExtras,
    chain,
    cross_entropy,
    embedding,
    linear,
    random,
    rms_norm,
)
from funcops.engine.trees import leaves
from funcops.library.ops.linear import LinearConfig
from funcops.models.blocks import block_config, gpt2_block_config

LLAMA = block_config(64, 4, 96), {"positions": torch.arange(16)}


GPT2 = gpt2_block_config(64, 4, 96, 0.1), {"key": random.key(3)}


BLOCKS = {"llama": LLAMA, "gpt-2": GPT2}


COMBINED = [
    c
    for c, d in CASES
    if d is torch.float64 and c.op.name in ("chain", "skip", "parallel", "repeat", "dropout", "linear", "rms_norm")
]


def made(block, dtype=torch.float32):
    cfg, extras = BLOCKS[block]
    params = chain.init(cfg, key=random.key(0), dtype=dtype)
    x, dy = (random.uniform(random.key(i), (2, 16, 64), low=-1, high=1, dtype=dtype) for i in (1, 2))
    return cfg, params, WithExtras(x, dict(extras)), dy


def bits(tree):
    return [None if t is None else t.clone() for t in leaves(tree)]


def same(a, b):
    return all((s is None and t is None) or torch.equal(s, t) for s, t in zip(leaves(a), leaves(b), strict=True))


TIES = {"head.weight": "embed.weight"}


def decoder(ties=(), bias=False, **options):
    steps = (
        Step("embed", embedding, EmbeddingConfig(11, 6)),
        Step("norm", rms_norm, RMSNormConfig(6)),
        Step("head", linear, LinearConfig(6, 11, bias=bias)),
        Step("loss", cross_entropy, CrossEntropyConfig(**options), takes=("labels",)),
    )
    return ChainConfig(steps=steps, extras=("labels",), ties=ties)
