"""The model of train_lm.py: the flags as a `DecoderConfig` of `funcops.models`, and how its weights start.

    embed -> layers x [ x + attention(norm(x)), x + swiglu(norm(x)) ] -> norm -> head -> cross entropy

With experts a mixture of experts replaces swiglu, and the model also returns their `load` and `loss` [layers].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcops import ChainConfig, ExpertsConfig, RopeConfig, RouteConfig, WithExtras, chain, random
from funcops.dist import Axis, zigzag_positions
from funcops.low_precision import Recipe, with_recipe
from funcops.models import DecoderConfig, MoEConfig, decoder, decoder_x
from funcops.trees import tree_map_with_path

VOCAB = 256  # bytes


def described(
    *,
    dim: int = 192,
    layers: int = 4,
    heads: int = 3,
    kv_heads: int = 1,
    hidden: int = 512,
    context: int = 256,
    tied: bool = False,
    experts: int = 0,
    top_k: int = 2,
    shared: int = 0,
) -> DecoderConfig:
    """The decoder of these flags. `experts`: the number of experts, of `hidden` each, instead of MLPs; `shared`: the number of
    experts that all tokens go through. Raises `ValueError` that names a flag."""
    least = dict(dim=dim, layers=layers, heads=heads, kv_heads=kv_heads, hidden=hidden, context=context, top_k=top_k)
    for name, value in least.items():
        if value < 1:
            raise ValueError(f"--{name.replace('_', '-')}: expected at least 1, got {value}")
    if dim % heads or (dim // heads) % 2:
        raise ValueError(f"--dim: expected an even multiple of --heads {heads}, got {dim}")
    if heads % kv_heads:
        raise ValueError(f"--kv-heads: expected a divisor of --heads {heads}, got {kv_heads}")
    if experts and top_k > experts:
        raise ValueError(f"--top-k: expected at most --experts {experts}, got {top_k}")
    mixture = None
    if experts:
        router = RouteConfig(experts, top_k, score="sigmoid", bias=True)
        mixture = MoEConfig(route=router, experts=ExpertsConfig(experts, dim, hidden), shared=shared * hidden)
    size = dim // heads
    return DecoderConfig(
        vocab=VOCAB,
        dim=dim,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        hidden=hidden,
        context=context,
        eps=1e-5,
        rope=RopeConfig(size),
        moe=mixture,
        tied=tied,
    )


def model(cfg: DecoderConfig, recipe: Recipe | None = None, *, loss: bool = True) -> ChainConfig:
    """The model from bytes [B, T] and labels [B, T] to the mean loss, in nats per byte, or without `loss` from bytes to logits
    [B, T, 256]. With a recipe the blocks' linear layers, but not the head, run in low precision."""
    made = decoder(cfg, loss=loss)
    return made if recipe is None else with_recipe(made, recipe, only=("blocks.*",), skip=left_out(recipe, cfg))


def model_x(cfg: DecoderConfig, x: Tensor, labels: Tensor, dtype: torch.dtype, cp: Axis | None = None) -> WithExtras:
    """x of `model(cfg)`, for params of `dtype`; with an axis `cp`, for this rank's positions."""
    at = None if cp is None else zigzag_positions(x.shape[1] * cp.size, cp, x.device)
    return decoder_x(cfg, x, dtype, positions=at, labels=labels)


def main_of(y: Any) -> Tensor:
    """The main value of a model's y, without the load and loss of experts."""
    return y.main if isinstance(y, WithExtras) else y


def left_out(recipe: Recipe, cfg: DecoderConfig) -> tuple[str, ...]:
    """The steps that a recipe skips: routers, and in 4 bits half of the weights: attention's products, which `leave_wide` of a
    trained model's report chose, and the product whose input has the widest range. Published training in 4 bits leaves out about
    15 % of a far larger model's layers (https://arxiv.org/abs/2509.25149)."""
    return ("*.gate",) * (cfg.moe is not None) + ("*.attn.*", "*.down") * (recipe.x.element == "e2m1")


def init(cfg: DecoderConfig, *, seed: int, dtype: torch.dtype, device: Any = None) -> dict[str, Any]:
    """Params, drawn on the CPU, with normal matrices of variance 1/fan_in; matrices that write into the stream are also divided by
    sqrt(2 layers)."""
    params = chain.init(model(cfg), key=random.key(seed), dtype=dtype, device="cpu")
    into_stream = (2 * cfg.layers) ** -0.5

    def draw(path: str, t: Tensor | None) -> Tensor | None:
        if t is None or t.dim() < 2:
            return t if t is None or device is None else t.to(device)
        std = t.shape[-1] ** -0.5
        if path == "embed.weight":
            std = std if cfg.tied else 0.5
        elif path.endswith(("out.weight", "down.weight")):
            std *= into_stream
        key = random.fold_in(random.key(seed + 1), random.path_id(path))
        drawn = random.normal(key, tuple(t.shape), std=std, dtype=dtype)
        return drawn if device is None else drawn.to(device)

    return tree_map_with_path(draw, params)
