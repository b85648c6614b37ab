"""Parts of transformers on images: [B, 1, 8, 8] becomes 16 tokens of 2 x 2 pixels; every token sees all tokens."""

from __future__ import annotations

from digits.data import CLASSES, SIDE
from funcops import (
    ActivationConfig,
    AttentionConfig,
    ChainConfig,
    CrossEntropyConfig,
    LayerNormConfig,
    LinearConfig,
    PatchifyConfig,
    PositionEmbeddingConfig,
    QKVSplitConfig,
    ReshapeConfig,
    Step,
    activation,
    attention,
    cross_entropy,
    layer_norm,
    linear,
    patchify,
    position_embedding,
    qkv_split,
    reshape,
)

PATCH, GRID = (2, 2), (SIDE // 2, SIDE // 2)
TOKENS, PIXELS = GRID[0] * GRID[1], PATCH[0] * PATCH[1]
WIDTH, HEADS = 64, 4


def tokens() -> tuple[Step, ...]:
    """The steps from images to tokens: patches, a linear layer, and position embeddings."""
    return (
        Step("patches", patchify, PatchifyConfig(PATCH)),
        Step("embed", linear, LinearConfig(PIXELS, WIDTH)),
        Step("places", position_embedding, PositionEmbeddingConfig(TOKENS, WIDTH), takes=("positions",)),
    )


def attend(*norm: Step) -> ChainConfig:
    """The attention of a block, after its norm."""
    steps = (
        *norm,
        Step("qkv", linear, LinearConfig(WIDTH, 3 * WIDTH)),
        Step("split", qkv_split, QKVSplitConfig(HEADS, WIDTH // HEADS)),
        Step("mix", attention, AttentionConfig()),
        Step("merge", reshape, ReshapeConfig((HEADS, WIDTH // HEADS), (WIDTH,))),
        Step("out", linear, LinearConfig(WIDTH, WIDTH)),
    )
    return ChainConfig(steps=steps, extras=extras_of(norm))


def mlp(*norm: Step) -> ChainConfig:
    steps = (
        *norm,
        Step("up", linear, LinearConfig(WIDTH, 4 * WIDTH)),
        Step("act", activation, ActivationConfig(kind="gelu")),
        Step("down", linear, LinearConfig(4 * WIDTH, WIDTH)),
    )
    return ChainConfig(steps=steps, extras=extras_of(norm))


def plain_norm() -> Step:
    return Step("norm", layer_norm, LayerNormConfig(WIDTH))


def reader(*blocks: Step, outputs: tuple[str, ...] = ()) -> ChainConfig:
    """The model from images [B, 1, 8, 8] to logits [B, 10]: these blocks and one linear layer over all tokens. `outputs`: the
    blocks' named outputs, which the model then returns too."""
    steps = (
        *tokens(),
        *blocks,
        plain_norm(),
        Step("together", reshape, ReshapeConfig((TOKENS, WIDTH), (TOKENS * WIDTH,))),
        Step("head", linear, LinearConfig(TOKENS * WIDTH, CLASSES)),
    )
    return ChainConfig(steps=steps, extras=("positions",), outputs=outputs)


def with_loss(cfg: ChainConfig) -> ChainConfig:
    loss = Step("loss", cross_entropy, CrossEntropyConfig(label_smoothing=0.1), takes=("labels",))
    return ChainConfig(steps=(*cfg.steps, loss), extras=(*cfg.extras, "labels"), outputs=cfg.outputs)


def extras_of(steps: tuple[Step, ...]) -> tuple[str, ...]:
    return tuple(name for step in steps for name in step.takes)
