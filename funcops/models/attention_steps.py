"""The steps of a decoder layer's attention."""

from __future__ import annotations

import dataclasses
from typing import Any

from funcops.engine.compose.chain import ChainConfig, chain
from funcops.engine.compose.parallel import ParallelConfig, parallel
from funcops.engine.compose.step import Step
from funcops.library.ops.attention import AttentionConfig, attention
from funcops.library.ops.l2_norm import L2NormConfig, l2_norm
from funcops.library.ops.latent_split import LatentSplitConfig, latent_split
from funcops.library.ops.layer_norm import LayerNormConfig, layer_norm
from funcops.library.ops.linear import LinearConfig, linear
from funcops.library.ops.reshape import ReshapeConfig, reshape
from funcops.library.ops.rms_norm import RMSNormConfig, rms_norm
from funcops.library.ops.rope import rope
from funcops.library.ops.row_scale import RowScaleConfig, row_scale
from funcops.library.ops.sink_attention import SinkAttentionConfig, sink_attention
from funcops.models.decoder_config import DecoderConfig, Kind, LatentConfig
from funcops.models.linear_attention import gated


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
