"""A decoder whose attention reads a cache: its config, and its params with the cache in them."""

from __future__ import annotations

import functools
from typing import Any

from funcops.contract.op import Op
from funcops.contract.walk import Inside, Part, rewrite
from funcops.errors import describe, fail
from funcops.models.cache import Cache, CachedAttentionConfig, CachedParams, KVCache, cached_attention
from funcops.models.latent_cache import LatentParams, latent_steps, weight_of_latents
from funcops.ops.attention import attention
from funcops.ops.sink_attention import sink_attention
from funcops.trees import at, has


@functools.lru_cache(maxsize=64)
def with_cache(cfg: Any, latents: bool = False) -> Any:
    """Return the config of a combinator with every attention reading a cache: the attention's params are then `CachedParams`, and
    there is one more extra input, "cache", made by `slots`. `latents`: multi-head latent attention reads latents. Raises
    `ValueError` for attention that is not causal, or packed, and for latents that no plain linear reads."""

    def cached(part: Part) -> tuple[Op, Any] | Inside | None:
        if part.composite:
            return latent_steps(part) if latents else None
        reads = part.op is attention or part.op is sink_attention
        return (cached_attention, CachedAttentionConfig(of=part.cfg)) if reads else None

    return rewrite(cfg, cached)[1]


def with_caches(where: str, params: Any, cache: Cache) -> Any:
    """Return the params of `with_cache(decoder(cfg))`: the decoder's params, with each layer's cache in its attention."""
    nested: dict[str, Any] = {}
    for path, layer in cache.layers.items():
        if not has(params, f"{path}.attn.mix"):
            fail(where, "params", f"a decoder's, with {path}.attn.mix", describe(params), TypeError)
        inner = nested
        for name in f"{path}.attn".split("."):
            inner = inner.setdefault(name, {})
        inner |= _of_attention(where, f"{path}.attn", at(params, f"{path}.attn"), layer)
    return _placed(params, nested)


def _of_attention(where: str, path: str, attn: Any, layer: KVCache) -> dict[str, Any]:
    """The params that change in a layer's attention, by step."""
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
