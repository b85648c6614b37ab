"""The decoder as data: a chain of steps, and its params.

    embed -> n_layers x [ x + attention(norm(x)), x + swiglu(norm(x)) ] -> norm -> head -> cross entropy

With experts a mixture of them has swiglu's place, and the model gives their `load` and `loss` [n_layers] besides (`models.moe`).

Two extras come from the caller: the rotation table [T, 1, 3K] of the rotary embedding, made once for all layers, and labels
[B, T] for the loss.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from funcops import (
    AttentionConfig,
    ChainConfig,
    CrossEntropyConfig,
    EmbeddingConfig,
    ExpertsConfig,
    GLUConfig,
    LinearConfig,
    ParallelConfig,
    RepeatConfig,
    ReshapeConfig,
    RMSNormConfig,
    RopeConfig,
    RouteConfig,
    SkipConfig,
    Step,
    WithExtras,
    attention,
    chain,
    cross_entropy,
    embedding,
    glu,
    linear,
    parallel,
    random,
    repeat,
    reshape,
    rms_norm,
    rope,
    rope_table,
    skip,
)
from funcops.dist import Axis, zigzag_positions
from funcops.low_precision import Recipe, with_recipe
from funcops.models import MoEConfig, moe
from funcops.trees import tree_map_with_path

VOCAB = 256


@dataclass(frozen=True)
class Sizes:
    dim: int = 192
    layers: int = 4
    heads: int = 3
    kv_heads: int = 1
    hidden: int = 512
    tied: bool = False
    experts: int = 0  # of `hidden` each, in the place of the MLPs
    top_k: int = 2
    shared: int = 0  # experts that all tokens go through besides

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1 and name not in ("tied", "experts", "shared"):
                raise ValueError(f"--{name.replace('_', '-')}: expected at least 1, got {value}")
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise ValueError(f"--dim: expected an even multiple of --heads {self.heads}, got {self.dim}")
        if self.heads % self.kv_heads:
            raise ValueError(f"--kv-heads: expected a divisor of --heads {self.heads}, got {self.kv_heads}")
        if self.experts and self.top_k > self.experts:
            raise ValueError(f"--top-k: expected at most --experts {self.experts}, got {self.top_k}")


def rotation(length: int, sizes: Sizes, like: Tensor, cp: Axis | None = None) -> Tensor:
    """The rotary table of positions 0..length - 1, for activations of the dtype and device of `like`. With an axis, of the `length`
    positions that this rank has of all."""
    wide = torch.promote_types(like.dtype, torch.float32)
    at = torch.arange(length, device=like.device) if cp is None else zigzag_positions(length * cp.size, cp, like.device)
    return rope_table(at, _rope(sizes), dtype=wide)


def _rope(sizes: Sizes) -> RopeConfig:
    return RopeConfig(sizes.dim // sizes.heads)


def _projection(sizes: Sizes, heads: int, turned: bool) -> ChainConfig:
    width = heads * sizes.dim // sizes.heads
    steps = (
        Step("proj", linear, LinearConfig(sizes.dim, width, bias=False)),
        Step("heads", reshape, ReshapeConfig((width,), (heads, width // heads))),
        Step("rope", rope, _rope(sizes), takes=("rotation",)),
    )
    return ChainConfig(steps=steps if turned else steps[:2], extras=("rotation",) if turned else ())


def block(sizes: Sizes) -> ChainConfig:
    dim, size = sizes.dim, sizes.dim // sizes.heads
    qkv = ParallelConfig(
        branches=(
            Step("q", chain, _projection(sizes, sizes.heads, turned=True)),
            Step("k", chain, _projection(sizes, sizes.kv_heads, turned=True)),
            Step("v", chain, _projection(sizes, sizes.kv_heads, turned=False)),
        )
    )
    attn = ChainConfig(
        steps=(
            Step("norm", rms_norm, RMSNormConfig(dim, eps=1e-5)),
            Step("qkv", parallel, qkv),
            Step("mix", attention, AttentionConfig(causal=True)),
            Step("merge", reshape, ReshapeConfig((sizes.heads, size), (dim,))),
            Step("out", linear, LinearConfig(dim, dim, bias=False)),
        ),
        extras=("rotation",),
    )
    norm, mlp = Step("norm", rms_norm, RMSNormConfig(dim, eps=1e-5)), _mlp(sizes)
    mlp = ChainConfig(steps=(norm, *mlp.steps), outputs=mlp.outputs)
    steps = (Step("attn", skip, SkipConfig(chain, attn)), Step("mlp", skip, SkipConfig(chain, mlp)))
    return ChainConfig(steps=steps, extras=("rotation",), outputs=mlp.outputs)


def _mlp(sizes: Sizes) -> ChainConfig:
    dim, hidden = sizes.dim, sizes.hidden
    if sizes.experts:
        router = RouteConfig(sizes.experts, sizes.top_k, score="sigmoid", bias=True)
        return moe(MoEConfig(route=router, experts=ExpertsConfig(sizes.experts, dim, hidden), shared=sizes.shared * hidden))
    return ChainConfig(
        steps=(
            Step("up", linear, LinearConfig(dim, 2 * hidden, bias=False)),
            Step("act", glu, GLUConfig(kind="swiglu", gate="first")),
            Step("down", linear, LinearConfig(hidden, dim, bias=False)),
        )
    )


ROLES = {"*.proj": "column", "*.out": "row", "*.up": "column", "*.down": "row"}  # over ranks, as funcops.dist.parallel takes them


def body(sizes: Sizes) -> tuple[Step, ...]:
    return (
        Step("embed", embedding, EmbeddingConfig(VOCAB, sizes.dim)),
        Step("blocks", repeat, RepeatConfig(chain, block(sizes), sizes.layers)),
        Step("norm", rms_norm, RMSNormConfig(sizes.dim, eps=1e-5)),
        Step("head", linear, LinearConfig(sizes.dim, VOCAB, bias=False)),
    )


def ties(sizes: Sizes) -> dict[str, str]:
    return {"head.weight": "embed.weight"} if sizes.tied else {}


def outputs(sizes: Sizes) -> tuple[str, ...]:
    return block(sizes).outputs


def main_of(y: Any) -> Tensor:
    """What a model of mixtures gives, without their load and loss."""
    return y.main if isinstance(y, WithExtras) else y


def predictor(sizes: Sizes, recipe: Recipe | None = None) -> ChainConfig:
    """Bytes [B, T] to logits [B, T, 256]; with a recipe the blocks' linear layers in low precision, and not the head."""
    return _in(recipe, ChainConfig(steps=body(sizes), extras=("rotation",), ties=ties(sizes), outputs=outputs(sizes)))


def model(sizes: Sizes, recipe: Recipe | None = None) -> ChainConfig:
    """Bytes [B, T] and labels [B, T] to the mean loss, in nats per byte."""
    loss = Step("loss", cross_entropy, CrossEntropyConfig(), takes=("labels",))
    steps, extras = (*body(sizes), loss), ("rotation", "labels")
    return _in(recipe, ChainConfig(steps=steps, extras=extras, ties=ties(sizes), outputs=outputs(sizes)))


def _in(recipe: Recipe | None, cfg: ChainConfig) -> ChainConfig:
    return cfg if recipe is None else with_recipe(cfg, recipe, only=("blocks.*",), skip=left_out(recipe))


def left_out(recipe: Recipe) -> tuple[str, ...]:
    """In 4 bits the product whose input reaches furthest: training with them leaves some layers as they are
    (https://arxiv.org/abs/2509.25149, the last 15 % there)."""
    return ("*.down",) if recipe.x.element == "e2m1" else ()


def init(sizes: Sizes, *, seed: int, dtype: torch.dtype, device: Any) -> dict[str, Any]:
    """Matrices normal with variance 1/fan_in, those that write into the stream divided by sqrt(2 layers) besides."""
    params = chain.init(model(sizes), key=random.key(seed), dtype=dtype, device="cpu")
    into_stream = (2 * sizes.layers) ** -0.5

    def draw(path: str, t: Tensor | None) -> Tensor | None:
        if t is None or t.dim() < 2:
            return None if t is None else t.to(device)
        std = t.shape[-1] ** -0.5
        if path == "embed.weight":
            std = std if sizes.tied else 0.5
        elif path.endswith(("out.weight", "down.weight")):
            std *= into_stream
        key = random.fold_in(random.key(seed + 1), random.path_id(path))
        return random.normal(key, tuple(t.shape), std=std, dtype=dtype).to(device)

    return tree_map_with_path(draw, params)
