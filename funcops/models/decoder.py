"""Decoder-only language models as data: one config describes models of many families, `decoder` makes its chain.

    embed -> layers x [ x + post(attention(norm(x))), x + post(mlp(norm(x))) ] -> norm -> head (-> cap)

x of the chain is `WithExtras(ids [B, T], {...})`, which `decoder_x` makes, y the logits [B, T, vocab]; y of a model with experts is
`WithExtras(logits, {"load": [L, E], "loss": [L]})`, with the outputs of the routers of its L layers with experts (`route`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from funcops.engine.backend.declare import readable
from funcops.engine.compose.chain import ChainConfig, chain
from funcops.engine.compose.parallel import ParallelConfig, parallel
from funcops.engine.compose.repeat import RepeatConfig, repeat
from funcops.engine.compose.skip import SkipConfig, skip
from funcops.engine.compose.step import Step
from funcops.engine.errors import check, describe, fail, require, require_count, require_dtype, require_flag, require_type
from funcops.engine.random import check_key
from funcops.engine.trees import WithExtras
from funcops.library.ops._ids import INDICES
from funcops.library.ops.activation import ActivationConfig, activation
from funcops.library.ops.attention import AttentionConfig, attention
from funcops.library.ops.cross_entropy import CrossEntropyConfig, cross_entropy
from funcops.library.ops.embedding import EmbeddingConfig, embedding
from funcops.library.ops.glu import KINDS as GATED
from funcops.library.ops.glu import GLUConfig, glu
from funcops.library.ops.l2_norm import L2NormConfig, l2_norm
from funcops.library.ops.latent_split import LatentSplitConfig, latent_split
from funcops.library.ops.layer_norm import LayerNormConfig, layer_norm
from funcops.library.ops.linear import LinearConfig, linear
from funcops.library.ops.position_embedding import PositionEmbeddingConfig, position_embedding
from funcops.library.ops.reshape import ReshapeConfig, reshape
from funcops.library.ops.rms_norm import RMSNormConfig, rms_norm
from funcops.library.ops.rope import RopeConfig, rope, rope_table
from funcops.library.ops.row_scale import RowScaleConfig, row_scale
from funcops.library.ops.scale import ScaleConfig, scale
from funcops.library.ops.sink_attention import SinkAttentionConfig, sink_attention
from funcops.library.ops.softcap import SoftcapConfig, softcap
from funcops.models.decoder_config import DecoderConfig, Kind, LatentConfig, groups, numbered
from funcops.models.documents import positions_of
from funcops.models.linear_attention import PACKED, gated, linear_steps
from funcops.models.mixture import ROUTED, MoEConfig, moe

__all__ = ["decoder", "decoder_x"]

CHOICES = None, "saved", "given"


def norm_step(name: str, cfg: DecoderConfig, size: int | None = None) -> Step:
    op, of = (rms_norm, RMSNormConfig) if cfg.norm == "rms_norm" else (layer_norm, LayerNormConfig)
    return Step(name, op, of(size or cfg.dim, eps=cfg.eps, zero_centered_gamma=cfg.zero_centered))


def attention_steps(cfg: DecoderConfig, kind: Kind, packed: bool, max_seqlen: int | None) -> ChainConfig:
    turns = {None: None, "rotation": cfg.rope, "local_rotation": cfg.local_rope}[kind.rotation]
    turned = () if kind.rotation is None else (kind.rotation,)
    tempered = ("temperature",) if kind.tempered else ()
    qkv = _qkv(cfg, turns, turned, tempered) if cfg.latent is None else _latent_qkv(cfg, cfg.latent, turns, turned)
    width = cfg.head_size if cfg.latent is None else cfg.latent.value_size
    scale = cfg.scale
    if cfg.qk_norm == "l2" and turned:  # the norms divide by the lengths of q and k, which are sqrt(D) root mean squares
        scale = cfg.head_size * (scale or cfg.head_size**-0.5)
    options: dict[str, Any] = dict(causal=True, scale=scale, window=kind.window, chunk=kind.chunk, softcap=cfg.softcap)
    options |= dict(packed=packed, max_seqlen=max_seqlen)
    ends = ("cu_seqlens",) if packed else ()
    mix = Step("mix", attention, AttentionConfig(**options), takes=ends)
    if cfg.sinks:
        mix = Step("mix", sink_attention, SinkAttentionConfig(cfg.heads, **options), takes=ends)
    merge = Step("merge", reshape, ReshapeConfig((cfg.heads, width), (cfg.heads * width,)))
    out = Step("out", linear, LinearConfig(cfg.heads * width, cfg.dim, bias=cfg.out_bias))
    extras, mixed = (*turned, *tempered, *ends), (*qkv, mix, merge)
    if cfg.attention_gate:
        gate = Step("proj", linear, LinearConfig(cfg.dim, cfg.heads * width, bias=cfg.qkv_bias))
        mixed = gated((gate,), ChainConfig(steps=mixed, extras=extras), "glu")
    return ChainConfig(steps=(*mixed, out), extras=extras)


def _heads(heads: int, size: int) -> Step:
    return Step("heads", reshape, ReshapeConfig((heads * size,), (heads, size)))


def _qkv(cfg: DecoderConfig, turns: Any, turned: tuple[str, ...], tempered: tuple[str, ...]) -> tuple[Step, ...]:
    def projection(name: str, heads: int) -> Step:
        steps = [
            Step("proj", linear, LinearConfig(cfg.dim, heads * cfg.head_size, bias=cfg.qkv_bias)),
            _heads(heads, cfg.head_size),
        ]
        if name != "v" and cfg.qk_norm == "all":
            steps.insert(1, norm_step("norm", cfg, heads * cfg.head_size))
        if name != "v" and cfg.qk_norm == "head":
            steps.append(norm_step("norm", cfg, cfg.head_size))
        turning, by = turned if name != "v" else (), tempered if name == "q" else ()
        if by:
            steps.insert(-1, Step("temperature", row_scale, RowScaleConfig(constant=True), takes=by))
        if turning:
            steps.append(Step("rope", rope, turns, takes=turning))
        if turning and cfg.qk_norm == "l2":
            steps.append(Step("norm", l2_norm, L2NormConfig(cfg.head_size, eps=cfg.head_size * cfg.eps)))
        return Step(name, chain, ChainConfig(steps=tuple(steps), extras=(*turning, *by)))

    branches = projection("q", cfg.heads), projection("k", cfg.kv_heads), projection("v", cfg.kv_heads)
    return (Step("qkv", parallel, ParallelConfig(branches=branches)),)


def _latent_qkv(cfg: DecoderConfig, latent: LatentConfig, turns: Any, turned: tuple[str, ...]) -> tuple[Step, ...]:
    """Make the steps that compute q, k and v from latents. The rotated numbers of a head come first."""
    size, own = latent.rope_size + latent.plain_size, latent.plain_size + latent.value_size
    of_q = dataclasses.replace(turns, dim=size, rotary_dim=turns.rotating)

    def down(rank: int) -> tuple[Step, ...]:
        norm = Step("norm", rms_norm, RMSNormConfig(rank, eps=latent.eps))
        return Step("down", linear, LinearConfig(cfg.dim, rank, bias=cfg.qkv_bias)), norm

    q = (
        *(() if latent.q_rank is None else down(latent.q_rank)),
        Step("up" if latent.q_rank else "proj", linear, LinearConfig(latent.q_rank or cfg.dim, cfg.heads * size, bias=False)),
        _heads(cfg.heads, size),
        Step("rope", rope, of_q, takes=turned),
    )
    up = Step("up", linear, LinearConfig(latent.kv_rank, cfg.heads * own, bias=False))
    kv = (*down(latent.kv_rank), up, _heads(cfg.heads, own))
    shared = (
        Step("proj", linear, LinearConfig(cfg.dim, latent.rope_size, bias=cfg.qkv_bias)),
        _heads(1, latent.rope_size),
        Step("rope", rope, turns, takes=turned),
    )
    branches = (
        Step("q", chain, ChainConfig(steps=q, extras=turned)),
        Step("kv", chain, ChainConfig(steps=kv)),
        Step("shared", chain, ChainConfig(steps=shared, extras=turned)),
    )
    split = LatentSplitConfig(cfg.heads, shared=latent.rope_size, own=latent.plain_size, value=latent.value_size)
    return Step("qkv", parallel, ParallelConfig(branches=branches)), Step("split", latent_split, split)


def decoder(
    cfg: DecoderConfig,
    *,
    loss: bool = False,
    reduction: str = "mean",
    entropy: bool = False,
    packed: bool = False,
    max_seqlen: int | None = None,
    choices: str | None = None,
) -> ChainConfig:
    """Make the chain of a config: ids to logits, or with `loss` ids and labels [B, T] to the mean cross entropy, whose step "loss"
    has no params: `{**params, "loss": None}`. Its `reduction` may be "sum", or "none" for one number a token; then with `entropy` y
    has an output "entropy", of each token's distribution, from the same pass over the logits. If `vocab` is above 4 `dim`, head and
    loss run as one (`joined`), and no logits are kept; fewer logits cost less than a second product. A head with an adapter, a
    recipe or a bias runs by itself. `packed`: ids [1, T] are documents one after another, which do not see each other, and x has
    their `cu_seqlens` (see `pack`), and for routers `documents`, the same without the padding; `max_seqlen` bounds their lengths
    (`AttentionConfig`). `choices`: of experts; "saved" adds the routers' `indices` to the outputs, "given" takes them from x
    (`decoder_x`) in place of the routers' own, so that a trainer's tokens go through the experts that a sampler's went through;
    each layer then has a program of its own. Raises `TypeError` if `cfg` is not a DecoderConfig, `ValueError` for `packed` with
    linear attention, for a `max_seqlen` without `packed`, for `entropy` without `loss` or with a reduction, and for `choices`
    without experts.

    >>> from funcops import RopeConfig
    >>> from funcops.models import DecoderConfig, decoder
    >>> sizes = dict(vocab=64, dim=32, layers=2, heads=4, kv_heads=2, head_size=8, hidden=48, context=64)
    >>> cfg = DecoderConfig(**sizes, rope=RopeConfig(8))
    >>> [step.name for step in decoder(cfg).steps], [step.name for step in decoder(cfg, loss=True).steps][-1]
    (['embed', 'blocks', 'norm', 'head'], 'loss')
    """
    require_type("decoder", "cfg", cfg, DecoderConfig)
    require_flag("decoder", loss=loss, packed=packed, entropy=entropy)
    require(
        loss or not entropy, "decoder", "entropy", "False without loss, as it comes from the loss's pass over the logits", entropy
    )
    require(not packed or cfg.linear is None, "decoder", "packed", PACKED, packed)
    if max_seqlen is not None:
        require_count("decoder", max_seqlen=max_seqlen)
        require(packed, "decoder", "max_seqlen", "None without packed", max_seqlen)
    require(choices in CHOICES, "decoder", "choices", f"one of {', '.join(map(repr, CHOICES))}", repr(choices))
    routed = any(cfg.kind(i).sparse for i in range(cfg.layers))
    require(choices is None or routed, "decoder", "choices", "None without layers of experts (cfg.moe)", repr(choices))
    steps = [Step("embed", embedding, EmbeddingConfig(cfg.vocab, cfg.dim)), *_scaled("scale", cfg.embed_scale)]
    if cfg.places:
        steps.append(Step("places", position_embedding, PositionEmbeddingConfig(cfg.context, cfg.dim), takes=("positions",)))
    blocks, outputs = _blocks(cfg, packed, max_seqlen, choices)
    head = Step("head", linear, LinearConfig(cfg.dim, cfg.vocab, bias=False))
    steps += [*blocks, norm_step("norm", cfg), *_scaled("logit_scale", cfg.logit_scale), head]
    if cfg.logit_softcap is not None:
        steps.append(Step("cap", softcap, SoftcapConfig(cfg.logit_softcap)))
    if loss:
        gives = ("entropy",) if entropy else ()
        steps.append(
            Step("loss", cross_entropy, CrossEntropyConfig(reduction=reduction, entropy=entropy), takes=("labels",), gives=gives)
        )
        outputs += gives
    ties = {"head.weight": "embed.weight"} if cfg.tied else {}
    ends = () if not packed else ("cu_seqlens",) if cfg.moe is None else ("cu_seqlens", "documents")
    extras = (*_extras(cfg), *ends, *(("choices",) if choices == "given" else ()), *(("labels",) if loss else ()))
    joined = ("loss",) if loss and cfg.vocab > 4 * cfg.dim else ()
    return ChainConfig(steps=tuple(steps), extras=extras, ties=ties, outputs=outputs, joined=joined)


def without_loss(params: Any) -> Any:
    """Return the params of `decoder(cfg)`, from these or from the params with a step "loss"."""
    if type(params) is dict and params.get("loss", 0) is None:
        return {name: part for name, part in params.items() if name != "loss"}
    return params


def _extras(cfg: DecoderConfig) -> tuple[str, ...]:
    places = ("positions",) if cfg.places else ()
    kinds = [cfg.kind(i) for i in range(cfg.layers)]
    used = {kind.rotation for kind in kinds} | {"temperature" for kind in kinds if kind.tempered}
    return (*places, *(name for name in ("rotation", "local_rotation", "temperature") if name in used))


def decoder_x(
    cfg: DecoderConfig,
    ids: Tensor,
    dtype: torch.dtype = torch.float32,
    *,
    positions: Tensor | None = None,
    labels: Tensor | None = None,
    key: Tensor | None = None,
    length: int | None = None,
    cu_seqlens: Tensor | None = None,
    tokens: int | None = None,
    choices: Tensor | None = None,
) -> WithExtras:
    """Make x of `decoder(cfg)`: ids [B, T], int64, with the rotary tables of q and k at `positions` ([T] or [B, T], default 0 to T
    - 1) for params of `dtype`, the `labels`, which are already shifted to the next tokens (-100: no label), and the `key` for the
    dropout of adapters (`with_lora`). `length`: the longest sequence that will occur, for a rope that depends on it (dynamic,
    longrope) and whose config lacks it; by default T, or as far as `positions` reach, in each packed document by itself.
    `cu_seqlens`: the starts of packed documents and T, [N + 1], int32, from which positions count. `tokens`: how many of the T come
    before the padding, as `sum(map(len, documents))`; a mixture of experts requires it with `cu_seqlens`, as no router counts
    padding. `choices`: the experts of each token by layer, [B, T, R, K] for R routers, or -1 in all places where a router chooses,
    for `decoder(cfg, choices="given")`. Raises `ValueError` or `TypeError` for a wrong shape or dtype, for a mixture's missing
    `tokens`, and if such a rope gets positions on a device, which are not read, or of a part of a sequence.

    >>> import torch
    >>> from funcops import RopeConfig, chain, random
    >>> from funcops.models import DecoderConfig, decoder, decoder_x
    >>> sizes = dict(vocab=64, dim=32, layers=2, heads=4, kv_heads=2, head_size=8, hidden=48, context=64)
    >>> cfg = DecoderConfig(**sizes, rope=RopeConfig(8))
    >>> params, x = chain.init(decoder(cfg), key=random.key(0)), decoder_x(cfg, torch.tensor([[1, 2, 3]]), torch.float32)
    >>> list(x.extras), chain.fwd(params, x, decoder(cfg))[0].shape
    (['rotation'], torch.Size([1, 3, 64]))
    """
    require_type("decoder_x", "cfg", cfg, DecoderConfig)
    check("decoder_x", "ids", ids, (...,), torch.int64)
    if ids.dim() != 2:
        fail("decoder_x", "ids", "[B, T]", list(ids.shape))
    require_dtype("decoder_x", dtype)
    if cu_seqlens is not None:
        check("decoder_x", "cu_seqlens", cu_seqlens, (...,), torch.int32, ids)
        require(ids.shape[0] == 1, "decoder_x", "ids", "[1, T] with cu_seqlens: one row of documents (see pack)", list(ids.shape))
        positions = positions_of(cu_seqlens, ids.shape[1]) if positions is None else positions
    _check_tokens(cfg, cu_seqlens, tokens)
    at = torch.arange(ids.shape[1], device=ids.device) if positions is None else positions
    check("decoder_x", "positions", at, ids.shape if getattr(at, "ndim", 1) > 1 else ids.shape[1:], torch.int64, ids)
    if labels is not None:
        check("decoder_x", "labels", labels, ids.shape, torch.int64, ids)
    if key is not None:
        check_key("decoder_x", key)
        check("decoder_x", "key", key, (2,), torch.int64, ids)
    if length is not None:
        require_count("decoder_x", length=length)
    if choices is not None:
        _check_choices(cfg, choices, ids)
    wide = torch.promote_types(dtype, torch.float32)
    made: dict[str, Any] = {"positions": at}
    for name, turns in (("rotation", cfg.rope), ("local_rotation", cfg.local_rope)):
        if turns is not None and name in _extras(cfg):
            made[name] = _rotation(turns, at, ids, positions, length, cu_seqlens, wide)
    if cfg.temperature is not None:
        strength, period = cfg.temperature
        made["temperature"] = (1 + strength * torch.log1p(torch.floor((at.to(wide) + 1) / period))).unsqueeze(-1)
    extras = {name: made[name] for name in _extras(cfg)}
    routed = None if cfg.moe is None or cu_seqlens is None else cu_seqlens.clamp(max=tokens)  # documents of padding become empty
    given = (("cu_seqlens", cu_seqlens), ("documents", routed), ("choices", choices), ("labels", labels), ("key", key))
    return WithExtras(ids, extras | {name: t for name, t in given if t is not None})


def _check_choices(cfg: DecoderConfig, choices: Tensor, ids: Tensor) -> None:
    if cfg.moe is None:
        fail("decoder_x", "choices", "None without experts (cfg.moe)", describe(choices))
    routers = sum(cfg.kind(i).sparse for i in range(cfg.layers))
    check("decoder_x", "choices", choices, (*ids.shape, routers, cfg.moe.route.top_k), INDICES, ids)


def _check_tokens(cfg: DecoderConfig, cu_seqlens: Tensor | None, tokens: int | None) -> None:
    where = "decoder_x"
    if tokens is None:
        wanted = "given with cu_seqlens (the routers of cfg must not count padding: sum(map(len, documents)))"
        require(cfg.moe is None or cu_seqlens is None, where, "tokens", wanted, None)
        return
    require_count(where, 0, tokens=tokens)
    require(cu_seqlens is not None, where, "tokens", "None without cu_seqlens", tokens)
    if cu_seqlens is not None and readable(cu_seqlens):
        require(tokens in cu_seqlens.tolist(), where, "tokens", "the end of a document, one of cu_seqlens", tokens)


def _rotation(
    turns: RopeConfig,
    at: Tensor,
    ids: Tensor,
    positions: Tensor | None,
    length: int | None,
    cu_seqlens: Tensor | None,
    wide: torch.dtype,
) -> Tensor:
    """The table of a rope, which may depend on the longest sequence: each packed document then has one of its own."""
    if turns.known_to is None:
        return rope_table(at, turns, dtype=wide)
    if length is not None or cu_seqlens is None:
        return rope_table(at, turns.at_length(length or _longest(ids, positions)), dtype=wide)
    ends = cu_seqlens.tolist() if readable(cu_seqlens) else []
    _require_whole(ends[-1:] == [ids.shape[1]], "cu_seqlens")
    parts = [at[..., first:last] for first, last in zip(ends, ends[1:], strict=False) if first < last] or [at]
    return torch.cat([rope_table(part, turns.at_length(_longest(ids, part)), dtype=wide) for part in parts], -3)


def _longest(ids: Tensor, positions: Tensor | None) -> int:
    """The length that positions reach. Raises for positions that do not say it: of a part of a sequence, or not read."""
    if positions is None:
        return max(ids.shape[1], 1)
    _require_whole(readable(positions) and (not positions.numel() or not positions.amin(-1).any()), "positions")
    return int(positions.max()) + 1 if positions.numel() else 1


def _require_whole(right: bool, name: str) -> None:
    wanted = f"given (the rope of cfg depends on the longest sequence, which {name} of a part, or on a device, do not say)"
    require(right, "decoder_x", "length", wanted, None)


def _blocks(cfg: DecoderConfig, packed: bool, max_seqlen: int | None, choices: str | None) -> tuple[list[Step], tuple[str, ...]]:
    """Make the layers, a `repeat` for each group, and the names of their routers' outputs."""
    rows, steps, router = groups(cfg), [], 0
    routers = iter(numbered("", sum(kind.sparse for row in rows for kind in row.kinds)))
    for name, row in zip(numbered("blocks", len(rows)), rows, strict=True):
        names = [next(routers) if kind.sparse else None for kind in row.kinds]
        routed = tuple([f"{output}{of}" for of in names if of is not None for output in _outputs(choices)])
        bodies, replays = [], choices == "given" and any(kind.sparse for kind in row.kinds)
        for _ in range(row.times if replays else 1):
            parts = []
            for j, (kind, of) in enumerate(zip(row.kinds, names, strict=True)):
                own, given = (
                    _with_choices(cfg, choices, router),
                    () if of is None else tuple([f"{n}{of}" for n in _outputs(choices)]),
                )
                parts.append(Step(f"layer{j}", chain, block(own, kind, packed, max_seqlen), gives=given))
                router += kind.sparse
            body = parts[0].cfg
            if len(parts) > 1:
                extras = tuple(dict.fromkeys(n for part in parts for n in part.cfg.extras))
                body = ChainConfig(steps=tuple(parts), extras=extras, outputs=routed)
            bodies.append(body)
        by_layer = tuple([(str(i), chain, body) for i, body in enumerate(bodies)]) if len(bodies) > 1 else ()
        steps.append(Step(name, repeat, RepeatConfig(chain, bodies[0], row.times, bodies=by_layer), gives=routed))
    return steps, tuple(n for step in steps for n in step.gives)


def _outputs(choices: str | None) -> tuple[str, ...]:
    """The names of a router's outputs, before its number."""
    return (*ROUTED, "indices") if choices == "saved" else ROUTED


def _with_choices(cfg: DecoderConfig, choices: str | None, router: int) -> DecoderConfig:
    """The config of a layer whose router, if it has one, is number `router`."""
    if cfg.moe is None or choices is None:
        return cfg
    route = dataclasses.replace(cfg.moe.route, replays=router if choices == "given" else None)
    return dataclasses.replace(cfg, moe=dataclasses.replace(cfg.moe, route=route, saves=choices == "saved"))


def choices_of(outputs: Any, cfg: DecoderConfig) -> Tensor:
    """The choices [B, T, R, K] of the R routers of a decoder, in the order of its layers, from its outputs by name."""
    names = iter(numbered("indices", sum(kind.sparse for row in groups(cfg) for kind in row.kinds)))
    found = [
        torch.stack([outputs[next(names)] for _ in of], 1) for row in groups(cfg) if (of := [k for k in row.kinds if k.sparse])
    ]
    return torch.cat([part.flatten(0, 1) for part in found]).movedim(0, 2)  # a group's are [times, its routers, B, T, K]


def block(cfg: DecoderConfig, kind: Kind, packed: bool = False, max_seqlen: int | None = None) -> ChainConfig:
    """One layer: attention and MLP, each added to its x."""
    attn, mlp = (
        linear_steps(cfg, cfg.linear) if kind.linear and cfg.linear is not None else attention_steps(cfg, kind, packed, max_seqlen),
        moe(_packed(cfg.moe, packed)) if kind.sparse and cfg.moe is not None else _mlp(cfg, cfg.hidden, cfg.mlp_bias),
    )
    name = "linear_attn" if kind.linear else "attn"
    steps = (Step(name, skip, SkipConfig(chain, _normed(cfg, attn))), Step("mlp", skip, SkipConfig(chain, _normed(cfg, mlp))))
    return ChainConfig(steps=steps, extras=(*steps[0].cfg.extras, *steps[1].cfg.extras), outputs=steps[1].cfg.outputs)


def _packed(mixture: MoEConfig, packed: bool) -> MoEConfig:
    return dataclasses.replace(mixture, route=dataclasses.replace(mixture.route, packed=True)) if packed else mixture


def _normed(cfg: DecoderConfig, body: ChainConfig) -> ChainConfig:
    before = (norm_step("norm", cfg),) if cfg.norm_before else ()
    after = (norm_step("post", cfg),) if cfg.norm_after else ()
    return ChainConfig(
        steps=(*before, *body.steps, *after, *_scaled("scale", cfg.residual_scale)), extras=body.extras, outputs=body.outputs
    )


def _scaled(name: str, factor: float) -> tuple[Step, ...]:
    return () if factor == 1.0 else (Step(name, scale, ScaleConfig(factor)),)


def _mlp(cfg: DecoderConfig, hidden: int, bias: bool) -> ChainConfig:
    gated = cfg.mlp in GATED
    act = Step("act", glu, GLUConfig(kind=cfg.mlp, gate="first")) if gated else Step("act", activation, ActivationConfig(cfg.mlp))
    up = Step("up", linear, LinearConfig(cfg.dim, 2 * hidden if gated else hidden, bias=bias))
    return ChainConfig(steps=(up, act, Step("down", linear, LinearConfig(hidden, cfg.dim, bias=bias))))
