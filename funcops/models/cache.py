"""The state of decoding: keys and values of earlier positions, and attention that reads them.

A layer's cache has R slots; position p is in slot p mod R. A layer that sees all positions has a slot for each of the `context`; a
layer whose rows see at most W, by a window or by chunks of attention, has a ring of W + chunk - 1: a chunk of tokens is written
before it attends, and its first row still sees W positions. With n positions in the cache, a slot holds the last p < n with
p mod R = slot; it is empty if that is below 0.

    write k, v at slots        s_ij = score(q_i, k_j), -inf if slot j is empty, or its position is after i or beyond reach
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops.engine.backend import wide
from funcops.engine.backend.declare import readable
from funcops.engine.contract.configs import OpConfig, config
from funcops.engine.contract.marks import Gone
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import forward, init_of, make_op
from funcops.engine.contract.schema import Donated
from funcops.engine.errors import (
    FLOATS,
    DonatedError,
    check,
    describe,
    fail,
    require,
    require_count,
    require_device,
    require_dtype,
    require_flag,
    require_type,
)
from funcops.engine.trees import leaf, static, tree, tree_map_tensors
from funcops.library.kernels.slot_attention import slot_attention_fwd
from funcops.library.ops.attention import AttentionConfig, check_parts, check_qkv, scored
from funcops.library.ops.sink_attention import sink_attention_init
from funcops.models.decoder_config import DecoderConfig, layer_paths

__all__ = ["Cache", "KVCache", "cache_init", "cached_attention", "roll_back"]

CACHE = "cache"  # the extra input of cached attention
NO_WAY_BACK = "a KVCache: the state of linear attention cannot go back, keep the cache before the draft (decode without donate)"


@tree
class KVCache:
    """The keys and values of a layer, in R slots. `v` is None for latents: k, of one head, has in each slot the latent of L numbers
    and the rotated key of S, of which every head makes its keys and values."""

    k: Tensor = leaf("[B, K, R, D]")
    v: Tensor | None = leaf("[B, K, R, V]")


@tree
class RecurrentCache:
    """The state of a layer of linear attention: its convolutions' last inputs, and the gated delta rule's state, which is wide."""

    q: Tensor = leaf("[B, W - 1, K D]")
    k: Tensor = leaf("[B, W - 1, K D]")
    v: Tensor = leaf("[B, W - 1, H V]")
    state: Tensor = leaf("[B, H, D, V]")


@tree
class Cache:
    """`layers`: the keys and values, or the state, of each layer, by its path; `lengths`: the number of cached positions of each
    sequence; `reached`: where a layer has a ring, the most positions from which each sequence was rolled back, else None;
    `context`: the most positions; `chunk`: the most tokens that are taken at once."""

    layers: dict[str, KVCache | RecurrentCache]
    lengths: Tensor = leaf("[B]")
    reached: Tensor | None = leaf("[B]")
    context: int = static(0)
    chunk: int = static(0)

    def fresh(self) -> bool:
        return type(self.lengths) is not Gone

    def complain(self, where: str) -> None:
        raise DonatedError(f"{where}: cache must be unused, got a Cache given away with donate()")

    def give(self) -> Cache:
        """Return a Cache that takes over this one's tensors, and leave this one empty: see `donate`."""
        made = dataclasses.replace(self)
        self.layers, self.lengths = Gone("cache.layers"), Gone("cache.lengths")  # type: ignore[assignment]
        self.reached = None
        return made


def cache_init(
    cfg: DecoderConfig,
    batch: int,
    *,
    context: int | None = None,
    chunk: int = 256,
    dtype: torch.dtype | None = None,
    device: Any = None,
    latents: bool = True,
) -> Cache:
    """Make an empty cache for `batch` sequences of up to `context` positions (default: the config's), which takes up to `chunk`
    tokens at once. `dtype`: of the params. `latents`: with multi-head latent attention keep the latents (576 numbers a token for
    DeepSeek-V3), not the keys and values of all heads (40,960). It needs plain weights where keys and values are made of them: for
    adapters or codes there give False. Raises `ValueError` or `TypeError` for a size below 1, or more positions than are
    learned.

    >>> from funcops import RopeConfig
    >>> from funcops.models import Cache, DecoderConfig, KVCache, cache_init
    >>> sizes = dict(vocab=64, dim=32, layers=2, heads=4, kv_heads=2, head_size=8, hidden=48, context=64)
    >>> cfg = DecoderConfig(**sizes, rope=RopeConfig(8))
    >>> cache = cache_init(cfg, batch=2, context=32, chunk=16)
    >>> isinstance(cache, Cache), cache.lengths, list(cache.layers)
    (True, tensor([0, 0]), ['blocks.0', 'blocks.1'])
    >>> isinstance(cache.layers["blocks.0"], KVCache), cache.layers["blocks.0"].k.shape
    (True, torch.Size([2, 2, 32, 8]))
    """
    where = "cache_init"
    require_type(where, "cfg", cfg, DecoderConfig)
    context = cfg.context if context is None else context
    require_count(where, batch=batch, context=context, chunk=chunk)
    require_dtype(where, dtype)
    require_device(where, device)
    if cfg.places:
        require(context <= cfg.context, where, "context", f"at most {cfg.context}, as many positions as are learned", context)
    require_flag(where, latents=latents)
    chunk, layers = min(chunk, context), {}
    for path, shapes in shapes_of(cfg, batch, context, chunk, latents).items():
        dtypes = {"state": wide(dtype or torch.get_default_dtype())}
        made = {n: None if s is None else torch.zeros(s, dtype=dtypes.get(n, dtype), device=device) for n, s in shapes.items()}
        layers[path] = _class_of(shapes)(**made)
    lengths = torch.zeros(batch, dtype=torch.int64, device=device)
    return Cache(layers, lengths, lengths.clone() if _has_rings(layers, context) else None, context=context, chunk=chunk)


def _has_rings(layers: dict[str, Any], context: int) -> bool:
    return any(type(layer) is KVCache and layer.k.shape[2] < context for layer in layers.values())


def roll_back(cache: Any, lengths: Tensor) -> Cache:
    """The cache with only the first `lengths` [B], int64, positions of each sequence, as if the later ones had never been decoded:
    what a draft has added and the model does not confirm. `cache` is copied, unless it is given as `donate(cache)`.

    A ring of a layer with a window has overwritten earlier positions: it goes back by at most the cache's chunk from the most
    positions that it has held, or to 0, which empties it. Raises `ValueError` for a cache of linear attention, whose states have
    no positions; and for lengths that are longer, negative or too far back (on a device, or under recording: an assertion at run
    time).

    >>> import torch
    >>> from funcops import donate, RopeConfig
    >>> from funcops.models import DecoderConfig, cache_init, roll_back
    >>> sizes = dict(vocab=64, dim=32, layers=2, heads=4, kv_heads=2, head_size=8, hidden=48, context=64)
    >>> cache = cache_init(DecoderConfig(**sizes, rope=RopeConfig(8)), batch=2, context=32)
    >>> cache.lengths += 5
    >>> roll_back(donate(cache), torch.tensor([5, 3])).lengths
    tensor([5, 3])
    """
    where = "roll_back"
    held = looked_at(where, cache)
    require_type(where, "cache", held, Cache)
    check(where, "cache.lengths", held.lengths, (...,), torch.int64)
    for path, layer in held.layers.items():
        if type(layer) is RecurrentCache:
            fail(where, f"cache.layers.{path}", NO_WAY_BACK, "a RecurrentCache")
        require_type(where, f"cache.layers.{path}", layer, KVCache)
        for name, t in (("k", layer.k), ("v", layer.v))[: 1 if layer.v is None else 2]:
            check(where, f"cache.layers.{path}.{name}", t, (...,), FLOATS, held.lengths)
            rows = t.dim() == 4 and t.shape[:1] == held.lengths.shape
            require(rows, where, f"cache.layers.{path}.{name}", "[B, K, R, D] with B as in cache.lengths", list(t.shape))
    check(where, "lengths", lengths, tuple(held.lengths.shape), torch.int64, held.lengths)
    most = _most(where, held)
    least = torch.zeros_like(held.lengths) if most is None else (most - held.chunk).clamp_min(0)
    right = ((least <= lengths) | (lengths == 0)) & (lengths <= held.lengths)
    if not readable(lengths):
        torch._assert_async(right.all(), f"{where}: lengths must be at most cache.lengths, and not too far back")
    elif not bool(right.all()):
        row = int((~right).int().argmax())
        low, high = int(least[row]), int(held.lengths[row])
        fail(where, f"lengths[{row}]", f"from {low} to {high}{', or 0' * (low > 0)}", int(lengths[row]))
    mine = cache.take(where) if type(cache) is Donated else tree_map_tensors(torch.clone, cache)
    mine.lengths.copy_(lengths)
    if most is not None:
        mine.reached.copy_(torch.where(lengths == 0, 0, most))
    return mine


def _most(where: str, cache: Cache) -> Tensor | None:
    """The most positions that each sequence has had in the rings of a cache, where they have overwritten earlier ones; None without
    rings."""
    if not _has_rings(cache.layers, cache.context):
        return None
    check(where, "cache.reached", cache.reached, tuple(cache.lengths.shape), torch.int64, cache.lengths)
    return torch.maximum(cache.lengths, cache.reached)  # type: ignore[arg-type]


def looked_at(where: str, cache: Any) -> Any:
    """Return the cache, also out of `donate(cache)`, without taking it yet. Raises `DonatedError` if it was used already."""
    if type(cache) is Donated:
        if cache._node is None:
            raise DonatedError(f"{where}: cache must be unused, got one that was given away with donate() and taken already")
        return cache._node
    if type(cache) is Cache and not cache.fresh():
        cache.complain(where)
    return cache


def slots_of(window: int | None, context: int, chunk: int) -> int:
    return context if window is None else min(context, window + chunk - 1)


@functools.lru_cache(maxsize=64)
def shapes_of(cfg: DecoderConfig, batch: int, context: int, chunk: int, latents: bool) -> dict[str, dict[str, Any]]:
    """The shapes of each layer's tensors by name, None for a v of latents. The dict is cached: do not change it."""
    heads, k, v, latent = cfg.kv_heads, cfg.head_size, cfg.head_size, cfg.latent
    if latent is not None and latents:
        heads, k, v = 1, latent.kv_rank + latent.rope_size, 0
    elif latent is not None:
        heads, k, v = cfg.heads, latent.rope_size + latent.plain_size, latent.value_size
    found: dict[str, dict[str, Any]] = {}
    for i, path in enumerate(layer_paths(cfg)):
        if cfg.linear is not None and cfg.kind(i).linear:
            found[path] = cfg.linear.cache_shapes(batch)
            continue
        slots = slots_of(cfg.kind(i).reach, context, chunk)
        found[path] = {"k": (batch, heads, slots, k), "v": (batch, heads, slots, v) if v else None}
    return found


def _class_of(shapes: dict[str, Any]) -> Any:
    return RecurrentCache if "state" in shapes else KVCache


def keeps_latents(cache: Any) -> bool:
    """Whether the layers of a cache hold latents."""
    layers = list(cache.layers.values()) if isinstance(cache.layers, dict) else []
    return bool(layers) and type(layers[0]) is KVCache and layers[0].v is None


def check_cache(where: str, cache: Any, cfg: DecoderConfig, batch: int) -> None:
    """Check everything but the number of positions."""
    require_type(where, "cache", cache, Cache)
    check(where, "cache.lengths", cache.lengths, (batch,), torch.int64)
    wanted = shapes_of(cfg, batch, cache.context, cache.chunk, keeps_latents(cache))
    if not isinstance(cache.layers, dict) or cache.layers.keys() != wanted.keys():
        fail(where, "cache.layers", f"a dict of the layers {', '.join(wanted)}", describe(cache.layers))
    like = None
    for path, shapes in wanted.items():
        layer = cache.layers[path]
        require_type(where, f"cache.layers.{path}", layer, _class_of(shapes))
        for name, shape in shapes.items():
            t = getattr(layer, name)
            if name == "state" and like is not None:
                check(where, f"cache.layers.{path}.{name}", t, shape, wide(like.dtype), cache.lengths)
                continue
            if shape is None:
                require(t is None, where, f"cache.layers.{path}.{name}", "None, as in the other layers", describe(t))
                continue
            check(where, f"cache.layers.{path}.{name}", t, shape, None if like is None else like.dtype, cache.lengths)
            like = t


def check_room(where: str, cache: Cache, tokens: int, counts: Tensor | None, known: int | None) -> None:
    """Raise unless the cache has room for that many more tokens, within the positions up to which rope is `known` (None: all). On
    the CPU the lengths are read; on a device, or under recording, an assertion checks them at run time."""
    after = cache.lengths + (tokens if counts is None else counts)
    most = min(cache.context, known or cache.context)
    remedy = "of a rope that knows the longest sequence, from_hf(..., length={})"
    if not readable(cache.lengths):
        wanted = (
            f"cache must be of a longer context than {most}" if most == cache.context else f"cfg must be {remedy.format('...')}"
        )
        torch._assert_async((after <= most).all(), f"{where}: {wanted}")
        return
    needed = int(after.max())
    require(needed <= cache.context, where, "cache", f"of a context of at least {needed}", f"one of {cache.context}")
    require(
        needed <= most, where, "cfg", remedy.format(cache.context), f"position {needed - 1} beyond its original context, {most}"
    )


class Slots(NamedTuple):
    """The places of new tokens in caches of R slots."""

    rows: Tensor  # [B, 1]
    at: Tensor  # [B, T], the slots that they are written to
    new: Tensor | None  # [B, T], True for real tokens; None: all are
    first: Tensor  # [B], the position of each sequence's first one
    ends: Tensor  # [B], the number of positions in the cache after the write


def slots(cache: Cache, tokens: int, counts: Tensor | None, windows: tuple[int | None, ...]) -> dict[int | None, Slots]:
    """Return, by how many positions a row sees at most, the slots of tokens that follow the cached positions."""
    first, ends = cache.lengths, cache.lengths + (tokens if counts is None else counts)
    position = first.unsqueeze(1) + torch.arange(tokens, device=first.device)
    rows, new = torch.arange(len(first), device=first.device).unsqueeze(1), None if counts is None else position < ends.unsqueeze(1)
    found = {}
    for window in dict.fromkeys(windows or (None,)):
        found[window] = Slots(rows, position % slots_of(window, cache.context, cache.chunk), new, first, ends)
    return found


@config
class CachedAttentionConfig(OpConfig):
    """`of`: the config of the attention that reads the cache."""

    of: AttentionConfig
    takes_also = (CACHE,)

    def __post_init__(self) -> None:
        require_causal(self.of)


def require_causal(of: Any) -> None:
    """Raise unless attention of this config can read a cache."""
    where = "with_cache"
    require_type(where, "attention", of, AttentionConfig)
    require(of.causal, where, "attention.causal", "True: later positions are not cached yet", of.causal)
    require(not of.packed, where, "attention.packed", "False: each sequence has a row of its own", of.packed)


@tree
class CachedParams:
    """A layer's cache, and the sinks if attention has them."""

    k: Tensor | None = leaf("[B, K, R, D]")
    v: Tensor | None = leaf("[B, K, R, V]")
    sinks: Tensor | None = leaf("[H]")


@init_of(CachedAttentionConfig)
def cached_attention_init(
    cfg: CachedAttentionConfig, *, key: Tensor | None = None, device: Any = None, dtype: torch.dtype | None = None
) -> CachedParams:
    """Make the sinks alone: `cache_init` makes a cache."""
    of: Any = cfg.of
    if not of.sinks:
        return CachedParams(None, None, None)
    return CachedParams(None, None, sink_attention_init(of, device=device, dtype=dtype).sinks)


@forward(CachedAttentionConfig, CachedParams)
def cached_attention_fwd(
    params: CachedParams, x: tuple[Any, dict[int | None, Slots]], cfg: CachedAttentionConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, None]:
    """x: `(attention's x, slots)` -> y [B, T, H, V]. k and v of x are written into the cache in place. The last dim of a bias is
    the context. The op saves nothing and has no backward."""
    where, (given, by_window), of = "cached_attention_fwd", x, cfg.of
    if needs:
        fail(where, "needs", "Needs.NONE: a cache that is written to has no gradient", needs)
    q, k, v, *rest = check_parts(where, given, of.parts)
    check_qkv(where, q, k, v, of.causal)
    bias = rest[0] if rest else None
    at, keys, values = by_window[of.reach], params.k, params.v
    assert keys is not None and values is not None
    for name, new, held in (("x.1 (k)", k, keys), ("x.2 (v)", v, values)):
        check(where, f"{name}, as the cache,", new, (held.shape[0], at.at.shape[1], held.shape[1], held.shape[3]), held.dtype, held)
    write(keys, k, at)
    write(values, v, at)
    return attend(where, q, params, at, bias, of, of.score(q.shape[3]).scale, values.shape[3]), None


def attend(
    where: str, q: Tensor, params: CachedParams, at: Slots, bias: Tensor | None, of: AttentionConfig, scale: float, width: int
) -> Tensor:
    """Attention of q [B, T, H, D] over a layer's cache. Without a v, values are the first `width` elements of k."""
    (batch, tokens, heads, _), sinks = q.shape, params.sinks if of.sinks else None
    if of.sinks:
        check(where, "params.sinks", sinks, (heads,), tuple(dict.fromkeys((q.dtype, wide(q.dtype)))), q)
    if bias is not None:
        check(where, "x.3 (bias)", bias, (...,), q.dtype, q)
        shape = bias.shape
        if len(shape) != 4 or shape[0] not in (1, batch) or shape[1] not in (1, heads) or shape[2] != tokens:
            fail(where, "x.3 (bias)", f"[{batch} or 1, {heads} or 1, {tokens}, context]", list(shape))
    options = of.window or 0, of.chunk or 0, of.softcap or 0.0, of.alibi, scale
    y: Tensor = slot_attention_fwd(q, params.k, params.v, at.first, at.ends, bias, sinks, width, *options)
    return y


def write(cache: Tensor, new: Tensor, at: Slots) -> None:
    """Write [B, T, K, D] into [B, K, R, D]; padding leaves its slots unchanged."""
    held = cache.transpose(1, 2)
    if at.new is not None:
        new = torch.where(at.new[:, :, None, None], new, held[at.rows, at.at])
    held.index_put_((at.rows, at.at), new)


def no_backward(kept: Any, *_: Any, **__: Any) -> Any:
    fail("cached_attention_bwd", "residuals", "of another op: a cache that is written to has no gradient", describe(kept))


cached_attention = make_op(
    "cached_attention",
    CachedAttentionConfig,
    init=cached_attention_init,
    fwd=cached_attention_fwd,
    dgrad=no_backward,
    wgrad=no_backward,
    bwd=no_backward,
    mixes=lambda cfg: scored(cfg.of),
)
