"""A decoder whose attention reads a cache: its config, and its params with the cache in them."""

from __future__ import annotations

import functools
from typing import Any

from funcops.engine.contract.op import Op
from funcops.engine.contract.walk import Inside, Part, rewrite
from funcops.engine.errors import describe, fail
from funcops.engine.trees import at, has
from funcops.library.ops.attention import attention
from funcops.library.ops.causal_conv1d import causal_conv1d
from funcops.library.ops.gated_delta_rule import gated_delta_rule
from funcops.library.ops.sink_attention import sink_attention
from funcops.models import recurrent_cache as recurrent
from funcops.models.cache import Cache, CachedAttentionConfig, CachedParams, KVCache, RecurrentCache, cached_attention
from funcops.models.latent_cache import LatentParams, latent_steps, weight_of_latents


@functools.lru_cache(maxsize=64)
def with_cache(cfg: Any, latents: bool = False) -> Any:
    """Return the config of a combinator with every attention reading a cache: the attention's params are then `CachedParams`, and
    there is one more extra input, "cache", made by `slots`. `latents`: multi-head latent attention reads latents. Convolutions and
    gated delta rules go on from what a `RecurrentCache` holds. Raises `ValueError` for attention that is not causal, packed, or in
    low precision, and for latents that no plain linear reads."""

    def cached(part: Part) -> tuple[Op, Any] | Inside | None:
        if part.composite:
            return latent_steps(part) if latents else None
        if part.op is causal_conv1d:
            return recurrent.cached_conv, recurrent.CachedConvConfig(of=part.cfg)
        if part.op is gated_delta_rule:
            return recurrent.cached_delta_rule, recurrent.CachedDeltaRuleConfig(of=part.cfg)
        reads = part.op is attention or part.op is sink_attention
        if part.cfg.attends and not reads:
            wanted = "attention that reads a cache (leave the attention of this model without a recipe: its params are the same)"
            fail("with_cache", part.path, wanted, part.op.name if part.op else "another")
        return (cached_attention, CachedAttentionConfig(of=part.cfg)) if reads else None

    return rewrite(cfg, cached)[1]


def with_caches(where: str, params: Any, cache: Cache) -> Any:
    """Return the params of `with_cache(decoder(cfg))`: the decoder's params, with each layer's cache in its attention."""
    nested: dict[str, Any] = {}
    for path, layer in cache.layers.items():
        whole = "attn.gated.mixed" if has(params, f"{path}.attn.gated") else "attn"
        below = f"{path}.{recurrent.PARTS if type(layer) is RecurrentCache else whole}"
        if not has(params, f"{below}.mix"):
            fail(where, "params", f"a decoder's, with {below}.mix", describe(params), TypeError)
        inner = nested
        for name in below.split("."):
            inner = inner.setdefault(name, {})
        inner |= _of_attention(where, below, at(params, below), layer)
    return _placed(params, nested)


def _of_attention(where: str, path: str, attn: Any, layer: KVCache | RecurrentCache) -> dict[str, Any]:
    """The params that change in a layer's attention, by step."""
    if type(layer) is RecurrentCache:
        return recurrent.of_linear_attention(attn, layer)
    assert type(layer) is KVCache
    sinks = getattr(attn["mix"], "sinks", None)
    if layer.v is not None:
        return {"mix": CachedParams(layer.k, layer.v, sinks)}
    weight = weight_of_latents(where, path, attn)
    return {"qkv": {"kv": {"up": None}}, "split": LatentParams(layer.k, weight, sinks), "mix": None}


def _placed(given: Any, new: Any) -> Any:
    if not isinstance(new, dict):
        return new
    if isinstance(given, tuple):
        return tuple([_placed(part, new[str(i)]) for i, part in enumerate(given)])
    return {**given, **{name: _placed(given[name], part) for name, part in new.items()}}
