"""Blocks and models built from operators alone, as the benchmarks and pages use them."""

from __future__ import annotations

from typing import NamedTuple

from funcops.engine.compose.chain import ChainConfig, chain
from funcops.engine.compose.parallel import ParallelConfig, parallel
from funcops.engine.compose.repeat import RepeatConfig, repeat
from funcops.engine.compose.skip import SkipConfig, skip
from funcops.engine.compose.step import Step
from funcops.engine.errors import require
from funcops.library.ops.activation import ActivationConfig, activation
from funcops.library.ops.attention import AttentionConfig, attention
from funcops.library.ops.cross_entropy import CrossEntropyConfig, cross_entropy
from funcops.library.ops.dropout import DropoutConfig, dropout
from funcops.library.ops.embedding import EmbeddingConfig, embedding
from funcops.library.ops.glu import GLUConfig, glu
from funcops.library.ops.layer_norm import LayerNormConfig, layer_norm
from funcops.library.ops.linear import LinearConfig, linear
from funcops.library.ops.reshape import ReshapeConfig, reshape
from funcops.library.ops.rms_norm import RMSNormConfig, rms_norm
from funcops.library.ops.rope import RopeConfig, rope
from funcops.models import MoEConfig, moe


class Sizes(NamedTuple):
    """The sizes of a decoder and its batch; the defaults are the same as in examples/train_lm.py."""

    dim: int = 192
    layers: int = 4
    heads: int = 3
    kv_heads: int = 1
    hidden: int = 512
    vocab: int = 256
    context: int = 256
    batch: int = 8


def mlp_config(dim: int, hidden: int, recompute: bool = True) -> ChainConfig:
    return ChainConfig(
        recompute=recompute,
        steps=(
            Step("norm", rms_norm, RMSNormConfig(dim, eps=1e-5)),
            Step("up", linear, LinearConfig(dim, 2 * hidden, bias=False)),
            Step("act", glu, GLUConfig(kind="swiglu", gate="first")),
            Step("down", linear, LinearConfig(hidden, dim, bias=False)),
        ),
    )


def block_config(
    dim: int, heads: int, hidden: int, kv_heads: int | None = None, recompute: bool = True, mixture: MoEConfig | None = None
) -> ChainConfig:
    """A Llama block, or with a mixture of experts a Qwen3-MoE block; the extra `positions` [T] may be their rotary table.

    x, y: [*, T, dim]. `hidden` is the size of the MLP; norms have an eps of 1e-5, with a mixture 1e-6. Params: `attn.norm`,
    `attn.qkv.q.proj` (and k, v), `attn.out`, `mlp.norm`, `mlp.up` and `mlp.down`, with a mixture what `moe` has in place of the
    last two. With `recompute` outputs of norms and the GLU are not kept. Raises `ValueError` if heads do not divide dim."""
    require(dim % heads == 0, "block_config", "heads", f"a divisor of dim {dim}", heads)
    size, eps = dim // heads, 1e-5 if mixture is None else 1e-6

    def projection(n: int, turned: bool) -> ChainConfig:
        steps: tuple[Step, ...] = (
            Step("proj", linear, LinearConfig(dim, n * size, bias=False)),
            Step("heads", reshape, ReshapeConfig((n * size,), (n, size))),
        )
        if turned and mixture is not None:
            steps = (*steps, Step("norm", rms_norm, RMSNormConfig(size, eps=eps)))
        turn = Step("rope", rope, RopeConfig(size), takes=("positions",))
        return ChainConfig(steps=(*steps, turn) if turned else steps, extras=("positions",) if turned else ())

    branches = tuple(Step(name, chain, projection(heads if name == "q" else kv_heads or heads, name != "v")) for name in "qkv")
    attn = ChainConfig(
        steps=(
            Step("norm", rms_norm, RMSNormConfig(dim, eps=eps)),
            Step("qkv", parallel, ParallelConfig(branches=branches)),
            Step("mix", attention, AttentionConfig(causal=True)),
            Step("merge", reshape, ReshapeConfig((heads, size), (dim,))),
            Step("out", linear, LinearConfig(dim, dim, bias=False)),
        ),
        extras=("positions",),
        recompute=recompute,
    )
    mlp = mlp_config(dim, hidden, recompute)
    if mixture is not None:
        of = moe(mixture)
        mlp = ChainConfig(steps=(Step("norm", rms_norm, RMSNormConfig(dim, eps=eps)), *of.steps), outputs=of.outputs)
    steps = (Step("attn", skip, SkipConfig(chain, attn)), Step("mlp", skip, SkipConfig(chain, mlp)))
    return ChainConfig(steps=steps, extras=("positions",), outputs=mlp.outputs)


def gpt2_block_config(dim: int, heads: int, hidden: int, p: float) -> ChainConfig:
    """A GPT-2 block with dropout on its two branches; the extra `key` is a random key."""
    size = dim // heads
    heads_of = (Step("proj", linear, LinearConfig(dim, dim)), Step("heads", reshape, ReshapeConfig((dim,), (heads, size))))
    drop = Step("drop", dropout, DropoutConfig(p=p), takes=("key",))
    attn = ChainConfig(
        steps=(
            Step("norm", layer_norm, LayerNormConfig(dim)),
            Step("qkv", parallel, ParallelConfig(branches=tuple(Step(n, chain, ChainConfig(steps=heads_of)) for n in "qkv"))),
            Step("mix", attention, AttentionConfig(causal=True)),
            Step("merge", reshape, ReshapeConfig((heads, size), (dim,))),
            Step("out", linear, LinearConfig(dim, dim)),
            drop,
        ),
        extras=("key",),
    )
    mlp = ChainConfig(
        steps=(
            Step("norm", layer_norm, LayerNormConfig(dim)),
            Step("up", linear, LinearConfig(dim, hidden)),
            Step("act", activation, ActivationConfig("gelu_tanh")),
            Step("down", linear, LinearConfig(hidden, dim)),
            drop,
        ),
        extras=("key",),
    )
    return ChainConfig(
        steps=(Step("attn", skip, SkipConfig(chain, attn)), Step("mlp", skip, SkipConfig(chain, mlp))), extras=("key",)
    )


def decoder_config(sizes: Sizes, mixture: MoEConfig | None = None) -> ChainConfig:
    """A decoder from tokens [B, T] to the mean loss, with the routers' load and loss as outputs. Extras: `positions`, or their
    rotary table, and `labels` [B, T]."""
    block, eps = block_config(sizes.dim, sizes.heads, sizes.hidden, sizes.kv_heads, mixture=mixture), 1e-6 if mixture else 1e-5
    steps = (
        Step("embed", embedding, EmbeddingConfig(sizes.vocab, sizes.dim)),
        Step("blocks", repeat, RepeatConfig(chain, block, sizes.layers)),
        Step("norm", rms_norm, RMSNormConfig(sizes.dim, eps=eps)),
        Step("head", linear, LinearConfig(sizes.dim, sizes.vocab, bias=False)),
        Step("loss", cross_entropy, CrossEntropyConfig(), takes=("labels",)),
    )
    return ChainConfig(steps=steps, extras=("positions", "labels"), outputs=block.outputs)
