"""Decoding: tokens in, logits and the cache out; and a stream of the tokens that a model generates."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops.engine import random
from funcops.engine.backend.declare import readable
from funcops.engine.compose.chain import ChainConfig, chain
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import Op
from funcops.engine.contract.schema import Donated
from funcops.engine.contract.walk import Inside, Part, rewrite, steps
from funcops.engine.errors import FLOATS, check, describe, differing, fail, require, require_count, require_flag, require_type
from funcops.engine.trees import WithExtras, at, has, leaves, paths, stands_for_one, tree_map_tensors
from funcops.library.formats.scaled import unscaled
from funcops.library.ops.attention import attention
from funcops.library.ops.causal_conv1d import causal_conv1d
from funcops.library.ops.gated_delta_rule import gated_delta_rule
from funcops.library.ops.rope import RopeConfig
from funcops.library.ops.rope_scaling import LongRopeScaling
from funcops.library.ops.sink_attention import sink_attention
from funcops.models import recurrent_cache as recurrent
from funcops.models.cache import (
    CACHE,
    Cache,
    CachedAttentionConfig,
    CachedParams,
    KVCache,
    RecurrentCache,
    cache_init,
    cached_attention,
    check_cache,
    check_room,
    keeps_latents,
    looked_at,
    slots,
)
from funcops.models.decoder import choices_of, decoder, decoder_x, without_loss
from funcops.models.decoder_config import DecoderConfig, layer_paths
from funcops.models.latent_cache import LatentParams, latent_steps, plain_latents, weight_of_latents
from funcops.models.sampling import Sampled, SamplingConfig, drawn, sampled

__all__ = ["decode", "generate"]


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


_chain_of = functools.lru_cache(maxsize=64)(decoder)


@functools.lru_cache(maxsize=64)
def _windows(model: ChainConfig) -> tuple[int | None, ...]:
    """How many positions each attention sees at most, in order."""
    return tuple(part.cfg.reach for part in steps(model, layers=True) if part.cfg.attends)


@functools.lru_cache(maxsize=64)
def _growing(cfg: DecoderConfig) -> tuple[tuple[int, RopeConfig], ...]:
    """The ropes of layers that depend on the longest sequence and were not given its length, each after the length up to which it
    does not."""
    used = {cfg.kind(i).rotation for i in range(cfg.layers)}
    ropes = [turns for name, turns in (("rotation", cfg.rope), ("local_rotation", cfg.local_rope)) if name in used]
    return tuple((turns.known_to, turns) for turns in ropes if turns is not None and turns.known_to is not None)


@functools.lru_cache(maxsize=64)
def _dropping(model: ChainConfig) -> dict[str, float]:
    """The capacities of routers and experts, by path."""
    found = {part.path: getattr(part.cfg, "capacity", None) for part in steps(model, layers=True)}
    return {f"{path}.capacity": one for path, one in found.items() if one is not None}


def _check_model(where: str, model: Any, cfg: DecoderConfig) -> None:
    """Check that the model has the config's windows, for which the cache has slots, and the extras that `decoder_x` makes for
    it; and that no token's choices depend on how many others come with it."""
    require_type(where, "model", model, ChainConfig, type(None))
    for name, capacity in _dropping(_chain_of(cfg) if model is None else model).items():
        of_all = "None, as an expert's room depends on which tokens come together (dataclasses.replace(route, capacity=None))"
        fail(where, "cfg" if model is None else "model", f"of a {name} of {of_all}", capacity)
    if model is not None:
        wanted, got = (_windows(made) for made in (_chain_of(cfg), model))
        require(got == wanted, where, "model", f"made of decoder(cfg), whose layers have windows {list(wanted)}", f"{list(got)}")
        extras, given = (sorted(made.extras) for made in (_chain_of(cfg), model))
        said = f"made of decoder(cfg), whose extras are {extras} (no loss, and adapters by a config without dropout)"
        require(given == extras, where, "model", said, given)


def decode(
    params: Any, cache: Any, ids: Tensor, cfg: DecoderConfig, *, counts: Tensor | None = None, model: ChainConfig | None = None
) -> tuple[Tensor, Cache]:
    """Take the next T tokens of each sequence: ids [B, T] -> logits [B, T, vocab], the same as for the whole sequence at these
    positions, and the cache with the tokens in it. T is from 1 to the cache's chunk.

    `cache` is not written to, unless it is given as `donate(cache)`: then it is updated in place, and the returned one has the same
    tensors. `counts` [B], int64: the number of tokens in each row, which come first; the logits of the others have no meaning.
    `model`: the chain, if it is made from `decoder(cfg)`, by `with_lora` for example. A rope that depends on the longest sequence
    and was not given its length (`from_hf(..., length=)`) rotates as for sequences of up to its original context, and raises
    beyond. A router with a `capacity` is refused: which choices it drops depends on the tokens that come together.

    The call does not wait for a device. Raises `ValueError` or `TypeError` for another batch, layer, shape or dtype than the
    cache's, and for a cache that is too short (on a device, or under recording: an assertion at run time), `DonatedError` for a
    cache that was given away.

    >>> import torch
    >>> from funcops import RopeConfig, chain, donate, random
    >>> from funcops.models import DecoderConfig, cache_init, decode, decoder
    >>> sizes = dict(vocab=64, dim=32, layers=2, heads=4, kv_heads=2, head_size=8, hidden=48, context=64)
    >>> cfg = DecoderConfig(**sizes, rope=RopeConfig(8))
    >>> params, cache = chain.init(decoder(cfg), key=random.key(0)), cache_init(cfg, batch=1, context=32, chunk=16)
    >>> logits, cache = decode(params, donate(cache), torch.tensor([[1, 2, 3]]), cfg)
    >>> logits.shape, cache.lengths
    (torch.Size([1, 3, 64]), tensor([3]))
    """
    where = "decode"
    require_type(where, "cfg", cfg, DecoderConfig)
    _check_model(where, model, cfg)
    check(where, "ids", ids, (...,), torch.int64)
    if ids.dim() != 2:
        fail(where, "ids", "[B, T]", list(ids.shape))
    held = looked_at(where, cache)
    check_cache(where, held, cfg, ids.shape[0])
    batch, tokens = ids.shape
    expected = f"[{batch}, T] with T from 1 to the cache's chunk, {held.chunk}"
    require(1 <= tokens <= held.chunk, where, "ids", expected, list(ids.shape))
    check(where, "ids", ids, (...,), torch.int64, held.lengths)
    _check_counts(where, counts, ids, held)
    known = min((known for known, _ in _growing(cfg)), default=None)  # within it, every rope turns as for any shorter sequence
    check_room(where, held, tokens, counts, known)
    params = without_loss(params)
    placed = with_caches(where, params, held)
    mine = cache.take(where) if type(cache) is Donated else tree_map_tensors(torch.clone, cache)
    y = _step(placed if mine is held else with_caches(where, params, mine), mine, ids, cfg, counts, model, known)
    return _logits(y), mine


def _step(
    placed: Any, cache: Cache, ids: Tensor, cfg: DecoderConfig, counts: Tensor | None, model: ChainConfig | None, length: int | None
) -> Any:
    """Run `decode` in place on a cache that `placed` has in the params; return the model's y. `length`: see `decoder_x`."""
    tokens, dtype = ids.shape[1], next(iter(cache.layers.values())).k.dtype
    positions = cache.lengths.unsqueeze(1) + torch.arange(tokens, device=ids.device)
    if counts is not None:  # padding needs a position too, one that exists
        positions = torch.minimum(positions, (cache.lengths + counts - 1).clamp_min(0).unsqueeze(1))
    x = decoder_x(cfg, ids, dtype, positions=positions, length=length)
    given = WithExtras(x.main, {**x.extras, CACHE: slots(cache, tokens, counts, _windows(_chain_of(cfg)))})
    y, _ = chain.fwd(placed, given, with_cache(model or _chain_of(cfg), keeps_latents(cache)), needs=Needs.NONE)
    cache.lengths.add_(tokens if counts is None else counts)
    return y


def _logits(y: Any) -> Tensor:
    logits: Tensor = y.main if type(y) is WithExtras else y
    return logits


def _check_counts(where: str, counts: Any, ids: Tensor, cache: Cache) -> None:
    if counts is None:
        return
    check(where, "counts", counts, ids.shape[:1], torch.int64, cache.lengths)
    if readable(counts):
        found, most = counts.tolist(), ids.shape[1]
        require(all(0 <= n <= most for n in found), where, "counts", f"from 0 to {most}, as ids has", found)


def generate(
    params: Any,
    cfg: DecoderConfig,
    ids: Tensor,
    tokens: int,
    *,
    key: Tensor | None = None,
    sampling: SamplingConfig | None = None,
    lengths: Tensor | None = None,
    stop: Sequence[int] = (),
    chunk: int = 256,
    model: ChainConfig | None = None,
    log_probabilities: bool = False,
    entropy: bool = False,
    choices: bool = False,
) -> Iterator[Any]:
    """Generate the next `tokens` tokens after prompts ids [B, T], one after another: each [B], int64, as soon as it is computed.

    `sampling`: how tokens are drawn, by default the likeliest; each is drawn from `key`, folded with its number. `lengths` [B],
    int64: the lengths of prompts that are shorter than T, which begin their rows. `stop`: ids of tokens that end a row. Later
    tokens of that row repeat the id, and its cache is dropped, so that later steps compute the other rows alone; after the last
    row has ended the iterator ends. Prompts are taken in chunks of `chunk`. `model`: as in `decode`. `log_probabilities`: yield
    `Sampled(tokens, log_probabilities)` each time, the latter by the model's own softmax, before temperature and filters, and 0 for
    a row that has ended; `entropy` and `choices` fill these fields of it, the former from the same pass over the logits, the latter
    with the experts of every token, which a trainer can replay, by a model of `decoder(cfg, choices="saved")`, the default with
    it. Nothing waits for a device until a token is read, except with `stop`, which reads each token; stop
    iterating to end early.

    Raises `ValueError` or `TypeError`, when it is called, for arguments of a wrong shape, dtype or value, and if tokens reach
    beyond the original context of a rope that depends on the longest sequence and was not given its length.

    >>> import torch
    >>> from funcops import RopeConfig, chain, random
    >>> from funcops.models import DecoderConfig, decoder, generate
    >>> sizes = dict(vocab=64, dim=32, layers=2, heads=4, kv_heads=2, head_size=8, hidden=48, context=64)
    >>> cfg = DecoderConfig(**sizes, rope=RopeConfig(8))
    >>> params = chain.init(decoder(cfg), key=random.key(0))
    >>> tokens = list(generate(params, cfg, torch.tensor([[1, 2, 3]]), 4))
    >>> len(tokens), tokens[0].shape
    (4, torch.Size([1]))
    """
    where, sampling = "generate", SamplingConfig() if sampling is None else sampling
    require_type(where, "cfg", cfg, DecoderConfig)
    require_type(where, "sampling", sampling, SamplingConfig)
    _check_model(where, model, cfg)
    require_count(where, tokens=tokens, chunk=chunk)
    require_flag(where, log_probabilities=log_probabilities, entropy=entropy, choices=choices)
    for name, value in (("entropy", entropy), ("choices", choices)):
        require(log_probabilities or not value, where, name, "False without log_probabilities, beside which it is yielded", value)
    if choices:
        model = _chain_of(cfg, choices="saved") if model is None else model
        if "indices" not in {name.rstrip("0123456789") for name in model.outputs}:
            fail(
                where,
                "model",
                'made of decoder(cfg, choices="saved"), as choices are asked for',
                f"one with outputs {list(model.outputs)}",
            )
    check(where, "ids", ids, (...,), torch.int64)
    if ids.dim() != 2 or 0 in ids.shape:
        fail(where, "ids", "[B, T] of at least one token", list(ids.shape))
    if sampling.temperature > 0 or key is not None:
        random.check_key(where, key)
        check(where, "key", key, (2,), torch.int64, ids)
    if lengths is not None:
        check(where, "lengths", lengths, ids.shape[:1], torch.int64, ids)
        if readable(lengths):
            most, found = ids.shape[1], lengths.tolist()
            require(all(1 <= n <= most for n in found), where, "lengths", f"from 1 to {most}, as ids has", found)
    ends = isinstance(stop, (tuple, list)) and all(type(i) is int and 0 <= i < cfg.vocab for i in stop)
    require(ends, where, "stop", f"a sequence of ids from 0 to {cfg.vocab - 1}", repr(stop))
    params = without_loss(params)
    _check_params(where, params, model, cfg, ids)
    table = leaves(at(params, "embed"), is_leaf=stands_for_one)[0]  # the base's, where it has an adapter
    dtype, chunk = table.dtype, min(chunk, ids.shape[1])
    length = ids.shape[1] + tokens - 1
    _check_length(where, cfg, ids.shape[1], length)
    latents = plain_latents(model or _chain_of(cfg)) == len(layer_paths(cfg))
    cache = cache_init(cfg, ids.shape[0], context=length, chunk=chunk, dtype=dtype, device=ids.device, latents=latents)
    rows = _Rows(params, cfg, model, cache, _Saves(log_probabilities, entropy, choices))
    return rows.stream(ids, lengths, tokens, key, sampling, stop)


def _check_length(where: str, cfg: DecoderConfig, prompt: int, longest: int) -> None:
    """Check that each rope that depends on the longest sequence rotates all tokens by one function: they stay within its original
    context, or, with LongRoPE's two functions, the prompt is already beyond it. Otherwise the cached keys would be rotated by
    another function."""
    for known, rope in _growing(cfg):
        if longest > known and not (prompt > known and isinstance(rope.scaling, LongRopeScaling)):
            wanted = (
                f"of a rope that knows the longest sequence, as one goes beyond {known} positions: from_hf(..., length={longest})"
            )
            fail(where, "cfg", wanted, f"no length, with a prompt of {prompt} and {longest} in the end")


def _check_params(where: str, params: Any, model: ChainConfig | None, cfg: DecoderConfig, ids: Tensor) -> None:
    """Check all params before the stream runs; the ops would check them one by one while it runs."""
    abstract = (model or _chain_of(cfg)).abstract()
    given, wanted = (paths(tree, is_leaf=stands_for_one) for tree in (unscaled(params), abstract))
    if given.keys() != wanted.keys():
        said = "decoder(cfg)'s (with adapters: merge them, or give model=)" if model is None else "the model's"
        fail(where, "params", said, differing(given, wanted), TypeError)
    for path, want in wanted.items():
        t = given[path]
        if stands_for_one(t) or stands_for_one(want):  # quantised: its op checks more
            right = want is not None and tuple(t.shape) == tuple(want.shape) and t.device == ids.device
            expected = "None" if want is None else f"{list(want.shape)} on {ids.device}"
            require(right, where, f"params.{path}", expected, f"{list(t.shape)} on {t.device}")
        elif want is not None:
            check(where, f"params.{path}", t, tuple(want.shape), FLOATS if want.is_floating_point() else want.dtype, ids)


class _Saves(NamedTuple):
    """The values that are yielded beside tokens."""

    log_probabilities: bool
    entropy: bool
    choices: bool


class _Rows:
    """The sequences that a model goes on with, their cache, and the choices for the tokens since the last one that was yielded."""

    def __init__(self, params: Any, cfg: DecoderConfig, model: ChainConfig | None, cache: Cache, saves: _Saves) -> None:
        self.params, self.cfg, self.model, self.saves = params, cfg, model, saves
        self.choices: list[Tensor] = []
        self.hold(cache)

    def hold(self, cache: Cache) -> None:
        self.cache, self.placed = cache, with_caches("generate", self.params, cache)

    def step(self, ids: Tensor, counts: Tensor | None) -> Tensor:
        y = _step(self.placed, self.cache, ids, self.cfg, counts, self.model, self.cache.context)
        if self.saves.choices:
            found = choices_of(y.extras, self.cfg)
            if counts is not None:
                there = torch.arange(ids.shape[1], device=ids.device) < counts.unsqueeze(1)
                found = found.masked_fill(~there[..., None, None], -1)
            self.choices.append(found)
        return _logits(y)

    def sampled(self, logits: Tensor, tokens: Tensor) -> Sampled | None:
        """The values that are yielded with tokens; None for tokens alone."""
        if not self.saves.log_probabilities:
            return None
        found = sampled(logits, tokens, self.saves.entropy)
        if self.saves.choices:
            found, self.choices = found._replace(choices=torch.cat(self.choices, 1)), []
        return found

    def prompted(self, ids: Tensor, lengths: Tensor | None) -> Tensor:
        """Take the prompts; return the logits of the last token of each."""
        last: Any = None
        for start in range(0, ids.shape[1], self.cache.chunk):
            part = ids[:, start : start + self.cache.chunk]
            counts = None if lengths is None else (lengths - start).clamp(0, part.shape[1])
            logits = self.step(part, counts)
            last = logits[:, -1] if counts is None else _last(logits, counts, last)
        found: Tensor = last
        return found

    def stream(
        self, ids: Tensor, lengths: Tensor | None, tokens: int, key: Tensor | None, sampling: SamplingConfig, stop: Sequence[int]
    ) -> Iterator[Tensor | Sampled]:
        """Yield the tokens after the prompts. A row draws the same numbers, whether or not others have ended."""
        last, batch = self.prompted(ids, lengths), len(ids)
        seen = None if sampling.repetition_penalty == 1 else _seen(ids, lengths, self.cfg)
        going, ended, ends = torch.arange(batch, device=ids.device), ids.new_zeros(batch), ids.new_tensor(list(stop))
        for i in range(tokens):
            u = None if key is None else random.uniform(random.fold_in(key, i), (batch, 1), dtype=torch.float64)
            token = drawn("generate", last, u if u is None or not stop else u[going], sampling, seen)
            found = self.sampled(last, token)
            if not stop:
                yield token if found is None else found
            else:
                ended = ended.index_put((going,), token)
                yield ended if found is None else _in_whole(found, ended, going)
                goes_on = ~torch.isin(token, ends)
                if not goes_on.any():
                    return
                if not goes_on.all():
                    going, token = going[goes_on], token[goes_on]
                    seen = None if seen is None else seen[goes_on]
                    self.hold(tree_map_tensors(lambda t, kept=goes_on: t[kept], self.cache))
            if i + 1 < tokens:
                seen = None if seen is None else seen.scatter(1, token.unsqueeze(1), True)
                last = self.step(token.unsqueeze(1), None)[:, -1]


def _in_whole(found: Sampled, tokens: Tensor, going: Tensor) -> Sampled:
    """Put the values of the rows that go on among all rows: 0 for the others, and choices of -1."""

    def whole(t: Tensor | None, other: int) -> Tensor | None:
        return None if t is None else t.new_full((len(tokens), *t.shape[1:]), other).index_put((going,), t)

    values = whole(found.log_probabilities, 0), whole(found.entropy, 0), whole(found.choices, -1)
    return Sampled(tokens, *values)  # type: ignore[arg-type]


def _seen(ids: Tensor, lengths: Tensor | None, cfg: DecoderConfig) -> Tensor:
    """Which tokens occur in each prompt: [B, V]."""
    there = torch.ones_like(ids, dtype=torch.int8)
    if lengths is not None:
        there = (torch.arange(ids.shape[1], device=ids.device) < lengths.unsqueeze(1)).to(torch.int8)
    return ids.new_zeros((len(ids), cfg.vocab), dtype=torch.int8).scatter_reduce(1, ids, there, "amax").bool()


def _last(logits: Tensor, counts: Tensor, before: Tensor | None) -> Tensor:
    """The logits of each row's last token, which may be in an earlier chunk."""
    place = (counts - 1).clamp_min(0)[:, None, None].expand(-1, 1, logits.shape[2])
    found = logits.gather(1, place).squeeze(1)
    return found if before is None else torch.where((counts > 0).unsqueeze(1), found, before)
