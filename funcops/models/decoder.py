"""Decoder-only language models as data: one config describes models of many families, `decoder` makes its chain.

    embed -> layers x [ x + post(attention(norm(x))), x + post(mlp(norm(x))) ] -> norm -> head (-> cap)

x of the chain is `WithExtras(ids [B, T], {...})`, which `decoder_x` makes, y the logits [B, T, vocab]; y of a model with experts is
`WithExtras(logits, {"load": [L, E], "loss": [L]})`, with the outputs of the routers of its L layers with experts (`route`).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops.backend.declare import watched
from funcops.compose.chain import ChainConfig, chain
from funcops.compose.parallel import ParallelConfig, parallel
from funcops.compose.repeat import RepeatConfig, repeat
from funcops.compose.skip import SkipConfig, skip
from funcops.compose.step import Step
from funcops.contract.configs import config
from funcops.errors import check, fail, require, require_count, require_dtype, require_flag, require_number, require_type
from funcops.models.documents import positions_of
from funcops.models.mixture import MoEConfig, moe
from funcops.ops.activation import KINDS as ACTIVATIONS
from funcops.ops.activation import ActivationConfig, activation
from funcops.ops.attention import AttentionConfig, attention
from funcops.ops.cross_entropy import CrossEntropyConfig, cross_entropy
from funcops.ops.embedding import EmbeddingConfig, embedding
from funcops.ops.glu import KINDS as GATED
from funcops.ops.glu import GLUConfig, glu
from funcops.ops.latent_split import LatentSplitConfig, latent_split
from funcops.ops.layer_norm import LayerNormConfig, layer_norm
from funcops.ops.linear import LinearConfig, linear
from funcops.ops.position_embedding import PositionEmbeddingConfig, position_embedding
from funcops.ops.reshape import ReshapeConfig, reshape
from funcops.ops.rms_norm import RMSNormConfig, rms_norm
from funcops.ops.rope import RopeConfig, rope, rope_table
from funcops.ops.scale import ScaleConfig, scale
from funcops.ops.sink_attention import SinkAttentionConfig, sink_attention
from funcops.ops.softcap import SoftcapConfig, softcap
from funcops.random import check_key
from funcops.trees import WithExtras

__all__ = ["DecoderConfig", "LatentConfig", "decoder", "decoder_x", "layer_paths"]


@config
class LatentConfig:
    """Multi-head latent attention (arXiv:2405.04434): k and v are linear in a latent of `kv_rank` numbers a token. A head of q and
    k has `rope_size` rotated numbers, which k's heads share, and then `plain_size` others; a head of v has `value_size`. q is
    linear in a latent of `q_rank` numbers, or in x itself. `eps`: of the norms of both latents.

    >>> from funcops import RopeConfig, chain
    >>> from funcops.models import DecoderConfig, LatentConfig, decoder
    >>> latent = LatentConfig(kv_rank=16, rope_size=4, plain_size=8, value_size=8)
    >>> cfg = DecoderConfig(
    ...     vocab=64, dim=32, layers=1, heads=4, kv_heads=4, head_size=12, hidden=48, context=64, rope=RopeConfig(4), latent=latent
    ... )
    >>> sorted(chain.init(decoder(cfg), device="meta"))
    ['blocks', 'embed', 'head', 'norm']
    """

    kv_rank: int
    rope_size: int
    plain_size: int
    value_size: int
    q_rank: int | None = None
    eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("kv_rank", "rope_size", "plain_size", "value_size", "q_rank"):
            value = getattr(self, name)
            require(value is None or value >= 1, "LatentConfig", name, "at least 1", value)
        require_number("LatentConfig", 0, eps=self.eps)


@config
class DecoderConfig:
    """A decoder with `layers` layers of width `dim`, attention of `heads` heads (k and v: `kv_heads`) of `head_size`, and MLPs of
    `hidden`; `context`: the longest sequence that the model is made for.

    mlp                an activation of `glu` (gated) or of `activation`
    norm, eps          "rms_norm" or "layer_norm"; `zero_centered` scales by 1 + w
    norm_before, norm_after     whether a block norms its x, and its output before the sum with x
    qk_norm            "head": each head of q and k is normed by itself; "all": all heads together; or None
    *_bias             whether q, k and v, attention's last layer and the MLP's two have biases
    rope, local_rope   the rotary embedding, and another one for layers with a window (default: the same)
    unrotated          the numbers of the layers without rope (NoPE)
    places             learned position embeddings, `context` of them, instead of rope
    windows            for each layer, how many positions a token attends to, or None for all
    scale, softcap, sinks       of attention; the first is head_size^(-1/2) by default
    latent, moe        see `LatentConfig`, which replaces head_size, kv_heads and qk_norm, and `MoEConfig`
    embed_scale, residual_scale, logit_scale    factors on the embeddings, on what attention and MLP add to their x, on the logits
    logit_softcap      a bound that logits stay below
    tied               whether the head's weight is embed's
    family             Hugging Face's name for the kind of model ("model_type"); nothing here depends on it
    """

    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    hidden: int
    context: int
    mlp: str = "swiglu"
    norm: str = "rms_norm"
    eps: float = 1e-6
    zero_centered: bool = False
    norm_before: bool = True
    norm_after: bool = False
    qk_norm: str | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    rope: RopeConfig | None = None
    local_rope: RopeConfig | None = None
    unrotated: tuple[int, ...] = ()
    places: bool = False
    windows: tuple[int | None, ...] = ()
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    latent: LatentConfig | None = None
    moe: MoEConfig | None = None
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    tied: bool = False
    family: str = ""

    def __post_init__(self) -> None:
        where = "DecoderConfig"
        for name in ("vocab", "dim", "layers", "heads", "kv_heads", "head_size", "hidden", "context"):
            require(getattr(self, name) >= 1, where, name, "at least 1", getattr(self, name))
        require(self.heads % self.kv_heads == 0, where, "kv_heads", f"a number that divides heads, {self.heads}", self.kv_heads)
        require(self.mlp in (*GATED, *ACTIVATIONS), where, "mlp", f"one of {', '.join((*GATED, *ACTIVATIONS))}", repr(self.mlp))
        require(self.norm in ("rms_norm", "layer_norm"), where, "norm", "'rms_norm' or 'layer_norm'", repr(self.norm))
        require(self.norm_before or self.norm_after, where, "norm_before", "True without norm_after", False)
        require(self.qk_norm in (None, "head", "all"), where, "qk_norm", "None, 'head' or 'all'", repr(self.qk_norm))
        require_number(where, 0, eps=self.eps)
        for name in ("scale", "softcap", "embed_scale", "residual_scale", "logit_scale", "logit_softcap"):
            value = getattr(self, name)
            if value is not None:
                require_number(where, **{name: value})
                require(value > 0, where, name, "above 0", value)
        right = isinstance(self.windows, tuple) and all(w is None or (type(w) is int and w >= 1) for w in self.windows)
        require(right, where, "windows", "a tuple of windows of at least 1, or None", self.windows)
        count = len(self.windows)
        require(count in (0, self.layers), where, "windows", f"() or one for each of {self.layers} layers", f"{count} of them")
        of_rope = range(self.layers if self.rope is not None and self.latent is None else 0)
        right = isinstance(self.unrotated, tuple) and all(type(i) is int and i in of_rope for i in self.unrotated)
        require(right, where, "unrotated", "a tuple of layers' numbers (() without rope, or with latent)", self.unrotated)
        for name, cls in (("latent", LatentConfig), ("moe", MoEConfig), ("rope", RopeConfig), ("local_rope", RopeConfig)):
            require_type(where, name, getattr(self, name), cls, type(None))
        require(self.local_rope is None or self.rope is not None, where, "local_rope", "None without rope", self.local_rope)
        for name in ("rope", "local_rope"):
            turns = getattr(self, name)
            size = self.head_size if self.latent is None else self.latent.rope_size
            require(turns is None or turns.dim == size, where, name, f"None or a RopeConfig({size})", turns)
        if self.latent is not None:
            require(
                self.rope is not None and self.qk_norm is None, where, "latent", "None without rope, or with qk_norm", self.latent
            )
        if self.moe is not None:
            jitter = self.moe.route.jitter
            require(jitter == 0, where, "moe.route.jitter", "0 (a decoder takes no key)", jitter)
            require(self.moe.experts.dim == self.dim, where, "moe.experts.dim", f"{self.dim}, as dim", self.moe.experts.dim)
            layers = all(0 <= i < self.layers for i in self.moe.dense) and len(set(self.moe.dense)) < self.layers
            require(layers, where, "moe.dense", f"some of layers 0..{self.layers - 1}, and not all", self.moe.dense)

    def kind(self, layer: int) -> Kind:
        window = self.windows[layer] if self.windows else None
        local = window is not None and self.local_rope is not None
        rotation = None if self.rope is None or layer in self.unrotated else "local_rotation" if local else "rotation"
        return Kind(window, rotation, self.moe is not None and layer not in self.moe.dense)


class Kind(NamedTuple):
    """The properties in which layers may differ."""

    window: int | None
    rotation: str | None  # the extra by which q and k are rotated: by rope or local_rope
    sparse: bool  # has experts


class Group(NamedTuple):
    """A row of layers of the given kinds, repeated `times` times."""

    kinds: tuple[Kind, ...]
    times: int


def groups(cfg: DecoderConfig) -> list[Group]:
    """Split the layers, in order, into periodic groups: each group is as long as possible, its period as short as possible."""
    kinds = [cfg.kind(i) for i in range(cfg.layers)]
    found: list[Group] = []
    while kinds:
        best = Group(tuple(kinds[:1]), 1)
        for period in range(1, len(kinds) // 2 + 1):
            row, times = kinds[:period], 1
            while kinds[times * period : (times + 1) * period] == row:
                times += 1
            if times > 1 and times * period > len(best.kinds) * best.times:
                best = Group(tuple(row), times)
        found.append(best)
        kinds = kinds[len(best.kinds) * best.times :]
    return found


def layer_paths(cfg: DecoderConfig) -> list[str]:
    """The path of each layer's params: "blocks.3", or if layers are of several kinds "blocks1.3" or "blocks.3.layer1".
    Raises `TypeError` if `cfg` is not a DecoderConfig.

    >>> from funcops.models import DecoderConfig, layer_paths
    >>> sizes = dict(vocab=64, dim=32, layers=4, heads=4, kv_heads=2, head_size=8, hidden=48, context=64)
    >>> layer_paths(DecoderConfig(**sizes))
    ['blocks.0', 'blocks.1', 'blocks.2', 'blocks.3']
    >>> layer_paths(DecoderConfig(**sizes, windows=(16, None, 16, None)))
    ['blocks.0.layer0', 'blocks.0.layer1', 'blocks.1.layer0', 'blocks.1.layer1']
    """
    require_type("layer_paths", "cfg", cfg, DecoderConfig)
    rows, found = groups(cfg), []
    for name, row in zip(_names("blocks", len(rows)), rows, strict=True):
        parts = ("",) if len(row.kinds) == 1 else tuple(f".layer{j}" for j in range(len(row.kinds)))
        found += [f"{name}.{i}{part}" for i in range(row.times) for part in parts]
    return found


def _names(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name}{i}" for i in range(count)]


def decoder(cfg: DecoderConfig, *, loss: bool = False, reduction: str = "mean", packed: bool = False) -> ChainConfig:
    """Make the chain of a config: ids to logits, or with `loss` ids and labels [B, T] to the mean cross entropy, whose step "loss"
    has no params: `{**params, "loss": None}`. Its `reduction` may be "sum", or "none" for one number a token. If `vocab` is above
    4 `dim`, head and loss run as one (`joined`), and no logits are kept; fewer logits cost less than a second product. A head with
    an adapter, a recipe or a bias runs by itself. `packed`: ids [1, T] are documents one after another, which do not see each
    other, and x has their `cu_seqlens` (see `pack`). Raises `TypeError` if `cfg` is not a DecoderConfig.

    >>> from funcops import RopeConfig
    >>> from funcops.models import DecoderConfig, decoder
    >>> sizes = dict(vocab=64, dim=32, layers=2, heads=4, kv_heads=2, head_size=8, hidden=48, context=64)
    >>> cfg = DecoderConfig(**sizes, rope=RopeConfig(8))
    >>> [step.name for step in decoder(cfg).steps], [step.name for step in decoder(cfg, loss=True).steps][-1]
    (['embed', 'blocks', 'norm', 'head'], 'loss')
    """
    require_type("decoder", "cfg", cfg, DecoderConfig)
    require_flag("decoder", loss=loss, packed=packed)
    steps = [Step("embed", embedding, EmbeddingConfig(cfg.vocab, cfg.dim)), *_scaled("scale", cfg.embed_scale)]
    if cfg.places:
        steps.append(Step("places", position_embedding, PositionEmbeddingConfig(cfg.context, cfg.dim), takes=("positions",)))
    blocks, outputs = _blocks(cfg, packed)
    head = Step("head", linear, LinearConfig(cfg.dim, cfg.vocab, bias=False))
    steps += [*blocks, _norm("norm", cfg), *_scaled("logit_scale", cfg.logit_scale), head]
    if cfg.logit_softcap is not None:
        steps.append(Step("cap", softcap, SoftcapConfig(cfg.logit_softcap)))
    if loss:
        steps.append(Step("loss", cross_entropy, CrossEntropyConfig(reduction=reduction), takes=("labels",)))
    ties = {"head.weight": "embed.weight"} if cfg.tied else {}
    extras = (*_extras(cfg), *(("cu_seqlens",) if packed else ()), *(("labels",) if loss else ()))
    joined = ("loss",) if loss and cfg.vocab > 4 * cfg.dim else ()
    return ChainConfig(steps=tuple(steps), extras=extras, ties=ties, outputs=outputs, joined=joined)


def without_loss(params: Any) -> Any:
    """Return the params of `decoder(cfg)`, from these or from the params with a step "loss"."""
    if type(params) is dict and params.get("loss", 0) is None:
        return {name: part for name, part in params.items() if name != "loss"}
    return params


def _extras(cfg: DecoderConfig) -> tuple[str, ...]:
    places = ("positions",) if cfg.places else ()
    used = {cfg.kind(i).rotation for i in range(cfg.layers)}
    return (*places, *(name for name in ("rotation", "local_rotation") if name in used))


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
) -> WithExtras:
    """Make x of `decoder(cfg)`: ids [B, T], int64, with the rotary tables of q and k at `positions` ([T] or [B, T], default 0 to T
    - 1) for params of `dtype`, the `labels`, which are already shifted to the next tokens (-100: no label), and the `key` for the
    dropout of adapters (`with_lora`). `length`: the longest sequence that will occur, for a rope that depends on it (dynamic,
    longrope) and whose config lacks it; by default T, or as far as `positions` reach. `cu_seqlens`: the starts of packed documents
    and T, [N + 1], int32, from which positions count. Raises `ValueError` or `TypeError` for a
    wrong shape or dtype, and if such a rope gets positions on a device, which are not read.

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
    at = torch.arange(ids.shape[1], device=ids.device) if positions is None else positions
    check("decoder_x", "positions", at, ids.shape if getattr(at, "ndim", 1) > 1 else ids.shape[1:], torch.int64, ids)
    if labels is not None:
        check("decoder_x", "labels", labels, ids.shape, torch.int64, ids)
    if key is not None:
        check_key("decoder_x", key)
        check("decoder_x", "key", key, (2,), torch.int64, ids)
    if length is not None:
        require_count("decoder_x", length=length)
    wide = torch.promote_types(dtype, torch.float32)
    made: dict[str, Any] = {"positions": at}
    for name, turns in (("rotation", cfg.rope), ("local_rotation", cfg.local_rope)):
        if turns is not None and name in _extras(cfg):
            if turns.known_to is not None:
                turns = turns.at_length(length or _longest(ids, positions))
            made[name] = rope_table(at, turns, dtype=wide)
    extras = {name: made[name] for name in _extras(cfg)}
    given = (("cu_seqlens", cu_seqlens), ("labels", labels), ("key", key))
    return WithExtras(ids, extras | {name: t for name, t in given if t is not None})


def _longest(ids: Tensor, positions: Tensor | None) -> int:
    """The length that positions reach. Raises for positions on a device or under recording, which are not read."""
    if positions is None:
        return max(ids.shape[1], 1)
    if watched() or not positions.is_cpu:
        fail(
            "decoder_x", "length", "given (the rope of cfg depends on the longest sequence, which positions do not say here)", None
        )
    return int(positions.max()) + 1 if positions.numel() else 1


def _blocks(cfg: DecoderConfig, packed: bool) -> tuple[list[Step], tuple[str, ...]]:
    """Make the layers, a `repeat` for each group, and the names of their routers' outputs."""
    rows, steps = groups(cfg), []
    routers = iter(_names("", sum(kind.sparse for row in rows for kind in row.kinds)))
    for name, row in zip(_names("blocks", len(rows)), rows, strict=True):
        parts = []
        for j, kind in enumerate(row.kinds):
            of = next(routers) if kind.sparse else None
            given = () if of is None else (f"load{of}", f"loss{of}")
            parts.append(Step(f"layer{j}", chain, block(cfg, kind, packed), gives=given))
        gives, body = tuple(n for part in parts for n in part.gives), parts[0].cfg
        if len(parts) > 1:
            extras = tuple(dict.fromkeys(n for part in parts for n in part.cfg.extras))
            body = ChainConfig(steps=tuple(parts), extras=extras, outputs=gives)
        steps.append(Step(name, repeat, RepeatConfig(chain, body, row.times), gives=gives))
    return steps, tuple(n for step in steps for n in step.gives)


def block(cfg: DecoderConfig, kind: Kind, packed: bool = False) -> ChainConfig:
    """One layer: attention and MLP, each added to its x."""
    attn, mlp = (
        _attention(cfg, kind, packed),
        moe(cfg.moe) if kind.sparse and cfg.moe is not None else _mlp(cfg, cfg.hidden, cfg.mlp_bias),
    )
    steps = (Step("attn", skip, SkipConfig(chain, _normed(cfg, attn))), Step("mlp", skip, SkipConfig(chain, _normed(cfg, mlp))))
    return ChainConfig(steps=steps, extras=steps[0].cfg.extras, outputs=steps[1].cfg.outputs)


def _normed(cfg: DecoderConfig, body: ChainConfig) -> ChainConfig:
    before = (_norm("norm", cfg),) if cfg.norm_before else ()
    after = (_norm("post", cfg),) if cfg.norm_after else ()
    return ChainConfig(
        steps=(*before, *body.steps, *after, *_scaled("scale", cfg.residual_scale)), extras=body.extras, outputs=body.outputs
    )


def _scaled(name: str, factor: float) -> tuple[Step, ...]:
    return () if factor == 1.0 else (Step(name, scale, ScaleConfig(factor)),)


def _norm(name: str, cfg: DecoderConfig, size: int | None = None) -> Step:
    op, of = (rms_norm, RMSNormConfig) if cfg.norm == "rms_norm" else (layer_norm, LayerNormConfig)
    return Step(name, op, of(size or cfg.dim, eps=cfg.eps, zero_centered_gamma=cfg.zero_centered))


def _attention(cfg: DecoderConfig, kind: Kind, packed: bool) -> ChainConfig:
    turns = {None: None, "rotation": cfg.rope, "local_rotation": cfg.local_rope}[kind.rotation]
    turned = () if kind.rotation is None else (kind.rotation,)
    qkv = _qkv(cfg, turns, turned) if cfg.latent is None else _latent_qkv(cfg, cfg.latent, turns, turned)
    width = cfg.head_size if cfg.latent is None else cfg.latent.value_size
    options: dict[str, Any] = dict(causal=True, scale=cfg.scale, window=kind.window, softcap=cfg.softcap, packed=packed)
    ends = ("cu_seqlens",) if packed else ()
    mix = Step("mix", attention, AttentionConfig(**options), takes=ends)
    if cfg.sinks:
        mix = Step("mix", sink_attention, SinkAttentionConfig(cfg.heads, **options), takes=ends)
    merge = Step("merge", reshape, ReshapeConfig((cfg.heads, width), (cfg.heads * width,)))
    out = Step("out", linear, LinearConfig(cfg.heads * width, cfg.dim, bias=cfg.out_bias))
    return ChainConfig(steps=(*qkv, mix, merge, out), extras=(*turned, *ends))


def _heads(heads: int, size: int) -> Step:
    return Step("heads", reshape, ReshapeConfig((heads * size,), (heads, size)))


def _qkv(cfg: DecoderConfig, turns: Any, turned: tuple[str, ...]) -> tuple[Step, ...]:
    def projection(name: str, heads: int) -> Step:
        steps = [
            Step("proj", linear, LinearConfig(cfg.dim, heads * cfg.head_size, bias=cfg.qkv_bias)),
            _heads(heads, cfg.head_size),
        ]
        if name != "v" and cfg.qk_norm == "all":
            steps.insert(1, _norm("norm", cfg, heads * cfg.head_size))
        if name != "v" and cfg.qk_norm == "head":
            steps.append(_norm("norm", cfg, cfg.head_size))
        turning = turned if name != "v" else ()
        if turning:
            steps.append(Step("rope", rope, turns, takes=turning))
        return Step(name, chain, ChainConfig(steps=tuple(steps), extras=turning))

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


def _mlp(cfg: DecoderConfig, hidden: int, bias: bool) -> ChainConfig:
    gated = cfg.mlp in GATED
    act = Step("act", glu, GLUConfig(kind=cfg.mlp, gate="first")) if gated else Step("act", activation, ActivationConfig(cfg.mlp))
    up = Step("up", linear, LinearConfig(cfg.dim, 2 * hidden if gated else hidden, bias=bias))
    return ChainConfig(steps=(up, act, Step("down", linear, LinearConfig(hidden, cfg.dim, bias=bias))))
