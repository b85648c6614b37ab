"""The config of a decoder, and the kinds of its layers."""

from __future__ import annotations

import math
from typing import NamedTuple

from funcops.engine.contract.configs import config
from funcops.engine.errors import one_of, require, require_count, require_number, require_type
from funcops.library.ops.activation import KINDS as ACTIVATIONS
from funcops.library.ops.glu import KINDS as GATED
from funcops.library.ops.rope import RopeConfig
from funcops.models.mixture import MoEConfig

__all__ = ["DecoderConfig", "LatentConfig", "LinearAttentionConfig", "layer_paths"]


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
class LinearAttentionConfig:
    """The layers `layers` have linear attention, with `key_heads` heads of q and k of `key_size` numbers, `value_heads` heads of v
    of `value_size`, and convolutions of `width` over time before them.

    >>> from funcops import chain
    >>> from funcops.models import DecoderConfig, LinearAttentionConfig, decoder, layer_paths
    >>> linear = LinearAttentionConfig(key_heads=2, value_heads=4, key_size=8, value_size=6, layers=(0,))
    >>> sizes = dict(vocab=64, dim=32, layers=2, heads=4, kv_heads=2, head_size=8, hidden=48, context=64)
    >>> cfg = DecoderConfig(**sizes, linear=linear)
    >>> layer_paths(cfg), sorted(chain.init(decoder(cfg), device="meta")["blocks0"][0])
    (['blocks0.0', 'blocks1.0'], ['linear_attn', 'mlp'])
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    width: int = 4
    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        where = "LinearAttentionConfig"
        for name in ("key_heads", "value_heads", "key_size", "value_size", "width"):
            require_count(where, **{name: getattr(self, name)})
        divides = self.value_heads % self.key_heads == 0
        require(divides, where, "key_heads", f"a number that divides value_heads, {self.value_heads}", self.key_heads)
        given = self.layers
        right = isinstance(given, tuple) and all(type(i) is int and i >= 0 for i in given) and len(set(given)) == len(given) > 0
        require(right, where, "layers", "a tuple of different numbers of layers", given)

    @property
    def keys(self) -> int:
        """How many numbers the keys of a token are."""
        return self.key_heads * self.key_size

    def cache_shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors of a `RecurrentCache`."""
        state = (batch, self.value_heads, self.key_size, self.value_size)
        held = {name: (batch, self.width - 1, size) for name, size in (("q", self.keys), ("k", self.keys), ("v", self.values))}
        return {**held, "state": state}

    @property
    def values(self) -> int:
        """How many numbers the values of a token are."""
        return self.value_heads * self.value_size


@config
class DecoderConfig:
    """A decoder with `layers` layers of width `dim`, attention of `heads` heads (k and v: `kv_heads`) of `head_size`, and MLPs of
    `hidden`; `context`: the longest sequence that the model is made for.

    mlp                an activation of `glu` (gated) or of `activation`
    norm, eps          "rms_norm" or "layer_norm"; `zero_centered` scales by 1 + w
    norm_before, norm_after     whether a block norms its x, and its output before the sum with x
    qk_norm            "head": each head of q and k is normed by itself; "all": all heads together; "l2": each head by its root mean
                       square, after rope and only with it, without a weight; or None
    *_bias             whether q, k and v, attention's last layer and the MLP's two have biases
    rope, local_rope   the rotary embedding, and another one for layers with a window (default: the same)
    unrotated          the numbers of the layers without rope (NoPE)
    places             learned position embeddings, `context` of them, instead of rope
    windows, chunks    for each layer, how many positions a token attends to, or None for all; and the length of chunks of
                       positions, of which a token attends to its own, or None
    temperature        (a, f): without rope, q at position p is multiplied by 1 + a log(1 + floor((p + 1) / f))
    scale, softcap, sinks       of attention; the first is head_size^(-1/2) by default
    attention_gate     whether attention's output is multiplied by the sigmoid of a linear layer of x
    latent, moe        see `LatentConfig`, which replaces head_size, kv_heads and qk_norm, and `MoEConfig`
    linear             the layers with linear attention instead, see `LinearAttentionConfig`
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
    chunks: tuple[int | None, ...] = ()
    temperature: tuple[float, float] | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    latent: LatentConfig | None = None
    moe: MoEConfig | None = None
    attention_gate: bool = False
    linear: LinearAttentionConfig | None = None
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
        require(self.mlp in (*GATED, *ACTIVATIONS), where, "mlp", one_of((*GATED, *ACTIVATIONS), self.mlp), repr(self.mlp))
        require(self.norm in ("rms_norm", "layer_norm"), where, "norm", "'rms_norm' or 'layer_norm'", repr(self.norm))
        require(self.norm_before or self.norm_after, where, "norm_before", "True without norm_after", False)
        require(self.qk_norm in (None, "head", "all", "l2"), where, "qk_norm", "None, 'head', 'all' or 'l2'", repr(self.qk_norm))
        require_number(where, 0, eps=self.eps)
        for name in ("scale", "softcap", "embed_scale", "residual_scale", "logit_scale", "logit_softcap"):
            value = getattr(self, name)
            if value is not None:
                require_number(where, **{name: value})
                require(value > 0, where, name, "above 0", value)
        for name in ("windows", "chunks"):
            given = getattr(self, name)
            right = isinstance(given, tuple) and all(w is None or (type(w) is int and w >= 1) for w in given)
            require(right, where, name, f"a tuple of {name} of at least 1, or None", given)
            count = len(given)
            require(count in (0, self.layers), where, name, f"() or one for each of {self.layers} layers", f"{count} of them")
        self._check_temperature()
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
        require_type(where, "linear", self.linear, LinearAttentionConfig, type(None))
        if self.linear is not None:
            of = self.linear.layers
            right = all(i < self.layers for i in of) and len(of) < self.layers
            require(right, where, "linear.layers", f"some of layers 0..{self.layers - 1}, and not all", of)
            plain = all(not row or not row[i] for row in (self.windows, self.chunks) for i in of)
            require(plain, where, "linear.layers", "layers without a window or chunk", of)
        mixed = self.linear is not None or self.attention_gate
        require(self.latent is None or not mixed, where, "latent", "None with attention_gate or linear", self.latent)
        if self.moe is not None:
            jitter = self.moe.route.jitter
            require(jitter == 0, where, "moe.route.jitter", "0 (a decoder takes no key)", jitter)
            packed = self.moe.route.packed
            require(not packed, where, "moe.route.packed", "False (decoder(cfg, packed=True) sets it)", packed)
            require(self.moe.experts.dim == self.dim, where, "moe.experts.dim", f"{self.dim}, as dim", self.moe.experts.dim)
            layers = all(0 <= i < self.layers for i in self.moe.dense) and len(set(self.moe.dense)) < self.layers
            require(layers, where, "moe.dense", f"some of layers 0..{self.layers - 1}, and not all", self.moe.dense)

    def _check_temperature(self) -> None:
        where, given = "DecoderConfig", self.temperature
        if given is None:
            return
        right = isinstance(given, tuple) and len(given) == 2 and all(type(one) in (int, float) for one in given)
        right = right and 0 <= given[0] < math.inf and 0 < given[1] < math.inf
        require(right, where, "temperature", "None, or (a, f) with a of at least 0 and f above 0, both finite", given)
        plain = self.latent is None and self.qk_norm != "head"
        require(plain, where, "temperature", "None with latent, or with qk_norm 'head', which would undo it", given)

    def kind(self, layer: int) -> Kind:
        sparse = self.moe is not None and layer not in self.moe.dense
        if self.linear is not None and layer in self.linear.layers:
            return Kind(None, None, sparse, linear=True)
        window = self.windows[layer] if self.windows else None
        local = window is not None and self.local_rope is not None
        rotation = None if self.rope is None or layer in self.unrotated else "local_rotation" if local else "rotation"
        tempered = rotation is None and self.temperature is not None
        return Kind(window, rotation, sparse, chunk=self.chunks[layer] if self.chunks else None, tempered=tempered)


class Kind(NamedTuple):
    """The properties in which layers may differ."""

    window: int | None
    rotation: str | None  # the extra by which q and k are rotated: by rope or local_rope
    sparse: bool  # has experts
    linear: bool = False  # has linear attention
    chunk: int | None = None
    tempered: bool = False  # q has a temperature

    @property
    def reach(self) -> int | None:
        """How many positions a token attends to at most; None: all."""
        return min((one for one in (self.window, self.chunk) if one), default=None)


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
    for name, row in zip(numbered("blocks", len(rows)), rows, strict=True):
        parts = ("",) if len(row.kinds) == 1 else tuple(f".layer{j}" for j in range(len(row.kinds)))
        found += [f"{name}.{i}{part}" for i in range(row.times) for part in parts]
    return found


def numbered(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name}{i}" for i in range(count)]
