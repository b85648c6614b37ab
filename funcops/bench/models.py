"""The models that the benches build of funcops' operators; `plain` has them in torch.nn."""

from __future__ import annotations

from typing import NamedTuple

from funcops import (
    AttentionConfig,
    ChainConfig,
    CrossEntropyConfig,
    EmbeddingConfig,
    GLUConfig,
    LinearConfig,
    ParallelConfig,
    RepeatConfig,
    ReshapeConfig,
    RMSNormConfig,
    RopeConfig,
    SkipConfig,
    Step,
    attention,
    chain,
    cross_entropy,
    embedding,
    glu,
    linear,
    parallel,
    repeat,
    reshape,
    rms_norm,
    rope,
    skip,
)


class Sizes(NamedTuple):
    """Of a decoder and its batch; the defaults are those of examples/train_lm.py."""

    dim: int = 192
    layers: int = 4
    heads: int = 3
    kv_heads: int = 1
    hidden: int = 512
    vocab: int = 256
    context: int = 256
    batch: int = 8


def mlp_config(dim: int, hidden: int) -> ChainConfig:
    return ChainConfig(
        steps=(
            Step("norm", rms_norm, RMSNormConfig(dim, eps=1e-5)),
            Step("up", linear, LinearConfig(dim, 2 * hidden, bias=False)),
            Step("act", glu, GLUConfig(kind="swiglu", gate="first")),
            Step("down", linear, LinearConfig(hidden, dim, bias=False)),
        )
    )


def block_config(dim: int, heads: int, hidden: int, kv_heads: int | None = None) -> ChainConfig:
    """A Llama block; the extra `positions` may be their rotary table."""
    size = dim // heads

    def projection(n: int, turned: bool) -> ChainConfig:
        steps = (
            Step("proj", linear, LinearConfig(dim, n * size, bias=False)),
            Step("heads", reshape, ReshapeConfig((n * size,), (n, size))),
            Step("rope", rope, RopeConfig(size), takes=("positions",)),
        )
        return ChainConfig(steps=steps if turned else steps[:2], extras=("positions",) if turned else ())

    branches = tuple(
        Step(name, chain, projection(heads if name == "q" else kv_heads or heads, name != "v")) for name in "qkv"
    )
    attn = ChainConfig(
        steps=(
            Step("norm", rms_norm, RMSNormConfig(dim, eps=1e-5)),
            Step("qkv", parallel, ParallelConfig(branches=branches)),
            Step("mix", attention, AttentionConfig(causal=True)),
            Step("merge", reshape, ReshapeConfig((heads, size), (dim,))),
            Step("out", linear, LinearConfig(dim, dim, bias=False)),
        ),
        extras=("positions",),
    )
    steps = (Step("attn", skip, SkipConfig(chain, attn)), Step("mlp", skip, SkipConfig(chain, mlp_config(dim, hidden))))
    return ChainConfig(steps=steps, extras=("positions",))


def decoder_config(sizes: Sizes) -> ChainConfig:
    """Tokens [B, T] to the mean loss. Extras: `positions`, or their rotary table, and `labels` [B, T]."""
    block = block_config(sizes.dim, sizes.heads, sizes.hidden, sizes.kv_heads)
    steps = (
        Step("embed", embedding, EmbeddingConfig(sizes.vocab, sizes.dim)),
        Step("blocks", repeat, RepeatConfig(chain, block, sizes.layers)),
        Step("norm", rms_norm, RMSNormConfig(sizes.dim, eps=1e-5)),
        Step("head", linear, LinearConfig(sizes.dim, sizes.vocab, bias=False)),
        Step("loss", cross_entropy, CrossEntropyConfig(), takes=("labels",)),
    )
    return ChainConfig(steps=steps, extras=("positions", "labels"))
