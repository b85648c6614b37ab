"""config.json as a DecoderConfig, and back, by the tables of `families.py` and sections for parts that take more than one field.

A `Section` has `read(fields, found)`, which adds to the config's arguments `found`, where the plain fields are already present, and
`write(cfg)`, which returns the fields of config.json.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from funcops.engine.errors import describe, fail, one_of, require, require_type
from funcops.library.ops.experts import ExpertsConfig
from funcops.library.ops.route import RouteConfig
from funcops.models.config_json import NEVER, Fields, Found
from funcops.models.decoder_config import DecoderConfig, LatentConfig, LinearAttentionConfig
from funcops.models.families import FAMILIES, IGNORED, Family
from funcops.models.llama4_fields import read_llama4, write_llama4
from funcops.models.mixture import MoEConfig
from funcops.models.rope_fields import legacy, read_rope, write_rope

LINEAR, FULL = "linear_attention", "full_attention"
SIZES = {
    "linear_num_key_heads": ("key_heads", 16),
    "linear_num_value_heads": ("value_heads", 32),
    "linear_key_head_dim": ("key_size", 128),
    "linear_value_head_dim": ("value_size", 128),
    "linear_conv_kernel_dim": ("width", 4),
}


def read_linear(fields: Fields, found: dict[str, Any]) -> None:
    """Read the sizes, and the layers from "layer_types" or, if absent, from their period."""
    layers, period = found["layers"], fields.take("full_attention_interval", 4)
    require(period >= 1, fields.where, "full_attention_interval", "at least 1", period)
    types = fields.take("layer_types", [LINEAR if (i + 1) % period else FULL for i in range(layers)], list)
    require(len(types) == layers, fields.where, "layer_types", f"a list of {layers}", len(types))
    for one in types:
        require(one in (LINEAR, FULL), fields.where, "layer_types", f"of {LINEAR!r} and {FULL!r}", repr(one))
    sizes = {of: fields.take(name, default) for name, (of, default) in SIZES.items()}
    of = tuple(i for i in range(layers) if types[i] == LINEAR)
    found["linear"] = LinearAttentionConfig(**sizes, layers=of) if of else None


def write_linear(cfg: DecoderConfig) -> dict[str, Any]:
    """Return the fields of a config. Raises `ValueError` if it has no linear attention."""
    of = cfg.linear
    if of is None:
        fail("to_hf", "cfg.linear", f"a LinearAttentionConfig, for family {cfg.family!r}", None)
    types = [LINEAR if i in of.layers else FULL for i in range(cfg.layers)]
    return {"layer_types": types, **{name: getattr(of, held) for name, (held, _) in SIZES.items()}}


GATES = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu_tanh", "gelu": "geglu", "relu": "reglu"}
PLAIN_ACTS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu", "silu": "silu"}


class Section(NamedTuple):
    read: Callable[[Fields, Found], None]
    write: Callable[[DecoderConfig], Found]


def _read_act(fields: Fields, found: Found) -> None:
    name, acts = _act(fields.take("model_type"))
    kind = fields.take(name, "", str)
    require(kind in acts, fields.where, name, one_of(acts, kind), repr(kind))
    found["mlp"] = acts[kind]


def _write_act(cfg: DecoderConfig) -> Found:
    name, acts = _act(cfg.family)
    return {name: next((hf for hf, kind in acts.items() if kind == cfg.mlp), None)}


def _act(family: str) -> tuple[str, dict[str, str]]:
    if family == "gpt2":
        return "activation_function", PLAIN_ACTS
    return ("hidden_activation" if family.startswith("gemma") else "hidden_act"), GATES


def _read_biases(fields: Fields, found: Found) -> None:
    found["qkv_bias"] = found["out_bias"] = fields.take("attention_bias", fields.given["model_type"] == "gpt_oss")


def _read_qkv_bias(fields: Fields, found: Found, name: str = "qkv_bias") -> None:
    found["qkv_bias"] = fields.take(name, True)


def _read_mlp_bias(fields: Fields, found: Found) -> None:
    found["mlp_bias"] = fields.take("mlp_bias", False)


def _read_rope(fields: Fields, found: Found) -> None:
    family, where = fields.given["model_type"], fields.where
    context, original = found["context"], fields.take("original_max_position_embeddings", None, int)
    size = found["latent"].rope_size if found.get("latent") else found["head_size"]
    thetas = {"gemma3_text": 1e6, "mixtral": 1e6, "gpt_oss": 150000.0, "olmo3": 5e5, "smollm3": 2e6, "llama4_text": 5e5}
    new, scaling = fields.take("rope_parameters", None, dict), fields.take("rope_scaling", None, dict)
    theta, part = fields.take("rope_theta", None, float), fields.take("partial_rotary_factor", None, float)
    local = fields.take("rope_local_base_freq", None, float) if family == "gemma3_text" else None
    interleaved = fields.take("rope_interleave", True) if family == "deepseek_v3" else family in ("glm4", "llama4_text")
    before = {"rope_theta": theta or thetas.get(family, 1e4), **(scaling or SCALED.get(family, {}))}
    before.setdefault("partial_rotary_factor", part or ROTATED.get(family))
    if before.get("rope_type", before.get("type")) == "yarn" and family == "phi3":
        before["rope_type"] = "longrope"

    def rope(given: Found) -> Any:
        parts = {"partial_rotary_factor": part or ROTATED[family]} if family in ROTATED else {}
        given = {"rope_theta": before["rope_theta"], **parts, **given}
        if family not in ("phi3", *ROTATED) and given.get("rope_type", given.get("type", "default")) == "default":
            given.pop("partial_rotary_factor", None)  # Hugging Face's models of these families rotate whole heads regardless
        return read_rope(where, given, size, context, original=original, length=fields.length, interleaved=interleaved)

    nested = new is not None and "full_attention" in new
    if new is None:
        found["rope"] = rope(before)
    else:
        found["rope"] = rope(new["full_attention"] if nested else new)
        if theta is not None or scaling is not None:
            same = rope(before) == found["rope"]
            require(same, where, "rope_scaling", "the same as rope_parameters, or absent", scaling)
    if family in LOCAL_THETAS:
        parameters = {"rope_theta": local or LOCAL_THETAS[family], **((new or {}).get("sliding_attention") or {})}
        found["local_rope"] = rope(parameters)
    elif nested:
        fail(where, "rope_parameters", "flat", f"nested, by {', '.join(new)}")


SCALED: dict[str, Any] = {  # the scaling of rope by default
    "gpt_oss": {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
}
ROTATED = {"glm4": 0.5, "qwen3_next": 0.25}  # the part of a head that is rotated by default
LOCAL_THETAS = {"gemma3_text": 1e4, "olmo3": 5e5}  # of the layers with a window, which have a rope of their own


def _write_rope(cfg: DecoderConfig) -> Found:
    if cfg.rope is None:
        return {}
    found = write_rope(cfg.rope, cfg.context)
    if cfg.family in ROTATED:
        found.setdefault("partial_rotary_factor", 1.0)  # which is not what its absence means
    made = {"rope_parameters": found, **legacy(found)}
    if cfg.family == "deepseek_v3":
        made["rope_interleave"] = cfg.rope.interleaved
    if cfg.family == "phi3":
        made["original_max_position_embeddings"] = getattr(cfg.rope.scaling, "original_context", cfg.context)
    if cfg.local_rope is not None:
        local = write_rope(cfg.local_rope, cfg.context)
        made["rope_parameters"] = {"full_attention": found, "sliding_attention": local}
        if cfg.family == "gemma3_text":
            made["rope_local_base_freq"] = local["rope_theta"]
    return made


def _read_one_window(fields: Fields, found: Found) -> None:
    window = fields.take("sliding_window", None, int)
    used = fields.take("use_sliding_window", False) if fields.given["model_type"] == "qwen3_moe" else True
    found["windows"] = (window,) * found["layers"] if window and used else ()


def _write_one_window(cfg: DecoderConfig) -> Found:
    window = cfg.windows[0] if cfg.windows else None
    return {"sliding_window": window, **({"use_sliding_window": bool(window)} if cfg.family == "qwen3_moe" else {})}


SLIDING, FULL = "sliding_attention", "full_attention"
PERIODS = {"olmo3": 4}  # one layer of so many sees all positions; by default of 2


def _read_windows(fields: Fields, found: Found) -> None:
    """Read the window of each layer, from "layer_types" or, if absent, by the family's pattern."""
    family, layers = fields.given["model_type"], found["layers"]
    if family in ("qwen2", "qwen3"):
        used, first = fields.take("use_sliding_window", False), fields.take("max_window_layers", layers, int)
        types = [SLIDING if used and i >= first else FULL for i in range(layers)]
    elif family == "qwen2_moe":
        used, first = fields.take("use_sliding_window", False), fields.take("max_window_layers", 28, int)
        types = [SLIDING if used and i < first and i % 2 == 0 else FULL for i in range(layers)]
    else:
        used, period = True, fields.take("sliding_window_pattern", 6) if family == "gemma3_text" else PERIODS.get(family, 2)
        require(period >= 1, fields.where, "sliding_window_pattern", "at least 1", period)
        types = [SLIDING if (i + 1) % period else FULL for i in range(layers)]
    types = fields.take("layer_types", types, list)
    require(len(types) == layers, fields.where, "layer_types", f"a list of {layers}", len(types))
    for one in types:
        require(one in (SLIDING, FULL), fields.where, "layer_types", f"of {SLIDING!r} and {FULL!r}", repr(one))
    window = fields.take("sliding_window", None, int)
    require(not used or window or SLIDING not in types, fields.where, "sliding_window", "given", "none")
    windows = tuple(window if used and one == SLIDING else None for one in types)
    found["windows"] = windows if any(windows) else ()


def _write_windows(cfg: DecoderConfig) -> Found:
    windows = cfg.windows or (None,) * cfg.layers
    window = next((one for one in windows if one), None)
    found: Found = {"layer_types": [SLIDING if one else FULL for one in windows]}
    found |= {} if window is None else {"sliding_window": window}  # null is refused by some versions of Hugging Face's classes
    return found | ({"use_sliding_window": window is not None} if cfg.family in ("qwen2", "qwen3", "qwen2_moe") else {})


def _read_gemma(fields: Fields, found: Found) -> None:
    caps = (50.0, 30.0) if fields.given["model_type"] == "gemma2" else (None, None)
    found["scale"] = fields.take("query_pre_attn_scalar", 256, float) ** -0.5
    for name, of, cap in zip(("softcap", "logit_softcap"), ("attn_logit", "final_logit"), caps, strict=True):
        given = f"{of}_softcapping" in fields.given  # then null means no cap
        found[name] = fields.take(f"{of}_softcapping", None if given else cap, float)
    if fields.given["model_type"] == "gemma3_text":
        found["softcap"] = None  # a field that Hugging Face's model reads and does not use
    found["embed_scale"] = found["dim"] ** 0.5


def _write_gemma(cfg: DecoderConfig) -> Found:
    scalar = (cfg.scale or cfg.head_size**-0.5) ** -2
    scalar = round(scalar) if math.isclose(scalar, round(scalar)) else scalar
    caps = {"attn_logit_softcapping": cfg.softcap, "final_logit_softcapping": cfg.logit_softcap}
    return {"query_pre_attn_scalar": scalar, **caps}


def _read_smollm3(fields: Fields, found: Found) -> None:
    layers, interval = found["layers"], fields.take("no_rope_layer_interval", 4)
    require(interval >= 1, fields.where, "no_rope_layer_interval", "at least 1", interval)
    rotated = fields.take("no_rope_layers", [(i + 1) % interval for i in range(layers)], list)  # 1 where a layer has rope
    require(len(rotated) >= layers, fields.where, "no_rope_layers", f"a list of {layers}", len(rotated))
    found["unrotated"] = tuple(i for i in range(layers) if not rotated[i])
    used, window = fields.take("use_sliding_window", False), fields.take("sliding_window", None, int)
    sliding = [bool(used and window) and i in found["unrotated"] for i in range(layers)]
    types = fields.take("layer_types", [SLIDING if one else FULL for one in sliding], list)
    require(len(types) == layers, fields.where, "layer_types", f"a list of {layers}", len(types))
    allowed = (SLIDING, FULL) if used and window else (FULL,)
    for one in types:
        require(one in allowed, fields.where, "layer_types", f"of {', '.join(map(repr, allowed))}", repr(one))
    found["windows"] = tuple(window if one == SLIDING else None for one in types) if SLIDING in types else ()


def _write_smollm3(cfg: DecoderConfig) -> Found:
    window = next((one for one in cfg.windows if one), None)
    return {
        "no_rope_layers": [int(i not in cfg.unrotated) for i in range(cfg.layers)],
        "layer_types": [SLIDING if one else FULL for one in cfg.windows or (None,) * cfg.layers],
        "use_sliding_window": window is not None,
        **({} if window is None else {"sliding_window": window}),
    }


def _read_granite(fields: Fields, found: Found) -> None:
    for name, of in GRANITE.items():
        found[of] = fields.take(name, 1.0, float)
    scaling = fields.take("logits_scaling", 1.0, float)
    require(scaling > 0, fields.where, "logits_scaling", "above 0", scaling)
    found["logit_scale"] = 1.0 / scaling


GRANITE = {"embedding_multiplier": "embed_scale", "residual_multiplier": "residual_scale", "attention_multiplier": "scale"}


def _write_granite(cfg: DecoderConfig) -> Found:
    return {"logits_scaling": 1.0 / cfg.logit_scale, **{name: getattr(cfg, of) for name, of in GRANITE.items()}}


def _read_gpt2(fields: Fields, found: Found) -> None:
    found["kv_heads"], found["head_size"] = found["heads"], found["dim"] // found["heads"]


def _moe(found: Found, route: RouteConfig, hidden: int, **options: Any) -> None:
    require(route.experts <= MOST_EXPERTS, "ExpertsConfig", "experts", f"at most {MOST_EXPERTS}", route.experts)
    made = {name: options.pop(name) for name in ("shared", "shared_gate", "gate_bias", "dense") if name in options}
    experts = ExpertsConfig(route.experts, found["dim"], hidden, **{"kind": found["mlp"], **options})
    found["moe"] = MoEConfig(route=route, experts=experts, **made)


def _read_mixtral(fields: Fields, found: Found) -> None:
    route = RouteConfig(fields.take("num_local_experts", kind=int), fields.take("num_experts_per_tok", kind=int))
    _moe(found, route, found["hidden"])


def _write_mixtral(cfg: DecoderConfig) -> Found:
    moe = _moe_of(cfg)
    return {"num_local_experts": moe.route.experts, "num_experts_per_tok": moe.route.top_k}


def _moe_of(cfg: DecoderConfig) -> MoEConfig:
    if cfg.moe is None:
        fail("to_hf", "cfg.moe", f"a MoEConfig, for family {cfg.family!r}", None)
    return cfg.moe


def _read_qwen3_moe(fields: Fields, found: Found, **options: Any) -> None:
    count = fields.take("num_experts", None, int) or fields.take("num_local_experts", kind=int)
    fields.take("num_local_experts", count)
    normalize = fields.take("norm_topk_prob", fields.given["model_type"] == "qwen3_next")
    step = fields.take("decoder_sparse_step", 1)
    require(step >= 1, fields.where, "decoder_sparse_step", "at least 1", step)
    only = fields.take("mlp_only_layers", [], list)
    dense = tuple(i for i in range(found["layers"]) if i in only or (i + 1) % step)
    route = RouteConfig(count, fields.take("num_experts_per_tok", kind=int), normalize=normalize)
    _moe(found, route, fields.take("moe_intermediate_size", kind=int), dense=dense, **options)


def _write_qwen3_moe(cfg: DecoderConfig) -> Found:
    moe = _moe_of(cfg)
    return {
        "num_experts": moe.route.experts,
        "num_experts_per_tok": moe.route.top_k,
        "norm_topk_prob": moe.route.normalize,
        "moe_intermediate_size": moe.experts.hidden,
        "mlp_only_layers": list(moe.dense),
        "decoder_sparse_step": 1,
    }


def _read_qwen2_moe(fields: Fields, found: Found) -> None:
    shared = fields.take("shared_expert_intermediate_size", kind=int)
    require(shared >= 1, fields.where, "shared_expert_intermediate_size", "at least 1", shared)
    _read_qwen3_moe(fields, found, shared=shared, shared_gate=True)


def _write_qwen2_moe(cfg: DecoderConfig) -> Found:
    return {**_write_qwen3_moe(cfg), "shared_expert_intermediate_size": _moe_of(cfg).shared}


def _read_qwen3_next(fields: Fields, found: Found) -> None:
    read_linear(fields, found)
    _read_qwen2_moe(fields, found)


LATENT = {
    "kv_lora_rank": "kv_rank",
    "qk_rope_head_dim": "rope_size",
    "qk_nope_head_dim": "plain_size",
    "v_head_dim": "value_size",
    "q_lora_rank": "q_rank",
}


def _read_latent(fields: Fields, found: Found) -> None:
    """Read the sizes of latent attention. Hugging Face's "head_dim" is the rotated part of a head; `head_size` is a whole head."""
    sizes = {of: fields.take(name, None if of == "q_rank" else NEVER, int) for name, of in LATENT.items()}
    latent = found["latent"] = LatentConfig(**sizes)
    found["head_size"], found["kv_heads"] = latent.rope_size + latent.plain_size, found["heads"]


def _write_latent(cfg: DecoderConfig) -> Found:
    if cfg.latent is None:
        fail("to_hf", "cfg.latent", f"a LatentConfig, for family {cfg.family!r}", None)
    found = {name: getattr(cfg.latent, of) for name, of in LATENT.items()}
    return {**found, "head_dim": cfg.latent.rope_size}


def _read_deepseek(fields: Fields, found: Found) -> None:
    route = RouteConfig(
        fields.take("n_routed_experts", kind=int),
        fields.take("num_experts_per_tok", kind=int),
        score="sigmoid",
        bias=True,
        normalize=fields.take("norm_topk_prob", True),
        scale=float(fields.take("routed_scaling_factor", 1.0)),
        groups=fields.take("n_group", 1),
        top_groups=fields.take("topk_group", 1),
    )
    hidden, dense = fields.take("moe_intermediate_size", kind=int), fields.take("first_k_dense_replace", 0)
    require(dense < found["layers"], fields.where, "first_k_dense_replace", f"below {found['layers']}, the layers", dense)
    shared = fields.take("n_shared_experts", kind=int)
    require(shared >= 1, fields.where, "n_shared_experts", "at least 1", shared)
    _moe(found, route, hidden, shared=hidden * shared, dense=tuple(range(dense)))
    scaling, size = found["rope"].scaling, found["head_size"]
    mscale = getattr(scaling, "mscale_all_dim", None)
    if mscale:
        found["scale"] = size**-0.5 * (0.1 * mscale * math.log(scaling.factor) + 1.0) ** 2


def _write_deepseek(cfg: DecoderConfig) -> Found:
    moe = _moe_of(cfg)
    return {
        "n_routed_experts": moe.route.experts,
        "num_experts_per_tok": moe.route.top_k,
        "norm_topk_prob": moe.route.normalize,
        "routed_scaling_factor": moe.route.scale,
        "n_group": moe.route.groups,
        "topk_group": moe.route.top_groups,
        "moe_intermediate_size": moe.experts.hidden,
        "first_k_dense_replace": len(moe.dense),
        "n_shared_experts": moe.shared // moe.experts.hidden,
    }


def _read_gpt_oss(fields: Fields, found: Found) -> None:
    route = RouteConfig(fields.take("num_local_experts", kind=int), fields.take("num_experts_per_tok", kind=int))
    limits = dict(limit=fields.take("swiglu_limit", 7.0), alpha=fields.take("swiglu_alpha", 1.702))
    _moe(found, route, found["hidden"], kind="clamped_swiglu", bias=True, gate_bias=True, **limits)


def _write_gpt_oss(cfg: DecoderConfig) -> Found:
    experts = _moe_of(cfg).experts
    return {**_write_mixtral(cfg), "swiglu_limit": experts.limit, "swiglu_alpha": experts.alpha}


SECTIONS = {
    "act": Section(_read_act, _write_act),
    "biases": Section(_read_biases, lambda cfg: {"attention_bias": cfg.qkv_bias}),
    "mlp_bias": Section(_read_mlp_bias, lambda cfg: {"mlp_bias": cfg.mlp_bias}),
    "rope": Section(_read_rope, _write_rope),
    "one_window": Section(_read_one_window, _write_one_window),
    "windows": Section(_read_windows, _write_windows),
    "gemma": Section(_read_gemma, _write_gemma),
    "smollm3": Section(_read_smollm3, _write_smollm3),
    "granite": Section(_read_granite, _write_granite),
    "glm4": Section(functools.partial(_read_qkv_bias, name="attention_bias"), lambda cfg: {"attention_bias": cfg.qkv_bias}),
    "gpt2": Section(_read_gpt2, lambda cfg: {}),
    "latent": Section(_read_latent, _write_latent),
    "llama4": Section(read_llama4, write_llama4),
    "mixtral": Section(_read_mixtral, _write_mixtral),
    "qkv_bias": Section(_read_qkv_bias, lambda cfg: {"qkv_bias": cfg.qkv_bias}),
    "qwen2_moe": Section(_read_qwen2_moe, _write_qwen2_moe),
    "qwen3_moe": Section(_read_qwen3_moe, _write_qwen3_moe),
    "qwen3_next": Section(_read_qwen3_next, lambda cfg: {**write_linear(cfg), **_write_qwen2_moe(cfg)}),
    "deepseek": Section(_read_deepseek, _write_deepseek),
    "gpt_oss": Section(_read_gpt_oss, _write_gpt_oss),
}


def family_of(where: str, name: Any) -> Family:
    require_type(where, "model_type", name, str, type(None))
    hint = f", a model with a vision tower: save its language model alone, a {VISION[name]!r}" if name in VISION else ""
    require(name in FAMILIES, where, "model_type", one_of(FAMILIES, name), repr(name) + hint)
    return FAMILIES[name]


VISION = {"gemma3": "gemma3_text", "llama4": "llama4_text", "mistral3": "mistral", "qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2"}


def read_config(where: str, given: Mapping[str, Any], length: int | None = None) -> DecoderConfig:
    """Return the DecoderConfig of a config.json. `length`: the longest sequence that will occur, if rope depends on it. Raises
    `ValueError` or `TypeError`, which name the field, for an unknown family, field or value, or a missing field."""
    family = family_of(where, given.get("model_type"))
    fields = Fields(where, {**family.absent, **given}, length)
    try:
        return _read(fields, family)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        said, name = str(error), fields.last
        if said.startswith(where):
            raise
        if " must be " in said:  # of a part's config, whose names are close to the fields'
            raise type(error)(f"{where}: {said}") from error
        fail(where, name, f"one that a model of family {given['model_type']!r} can have", f"{describe(given.get(name))} ({said})")


def _read(fields: Fields, family: Family) -> DecoderConfig:
    where, given = fields.where, fields.given
    found: Found = {"family": fields.take("model_type"), **family.has}
    for name, of in family.fields.items():
        found[of] = fields.take(name, family.defaults.get(name, None if name in DERIVED else NEVER), KINDS.get(of, int))
        if of not in KINDS and found[of] is not None:
            most = MOST_LAYERS if of == "layers" else MOST_SIZE
            require(1 <= found[of] <= most, where, name, f"from 1 to {most}", found[of])
    for of, derive in DERIVED.values():
        if found.get(of) is None and of in family.fields.values():
            found[of] = derive(found)
    for section in family.sections:
        SECTIONS[section].read(fields, found)
    for name, value in family.only.items():
        fields.only(name, value)
    unknown = sorted(set(given) - fields.taken - set(IGNORED) - set(family.ignored))
    require(not unknown, where, "fields", f"known for family {found['family']!r}", ", ".join(map(repr, unknown)))
    return DecoderConfig(**found)


MOST_LAYERS, MOST_SIZE, MOST_EXPERTS = 2**12, 2**26, 2**12  # far above any model: what is more would fill the memory with names


KINDS: dict[str, type] = {"eps": float, "tied": bool}
DERIVED: dict[str, tuple[str, Callable[[Found], int]]] = {
    "num_key_value_heads": ("kv_heads", lambda found: found["heads"]),
    "head_dim": ("head_size", lambda found: found["dim"] // found["heads"]),
    "n_inner": ("hidden", lambda found: 4 * found["dim"]),
}


def write_config(cfg: DecoderConfig) -> dict[str, Any]:
    """Return the fields of a config.json that read as `cfg`. Raises `ValueError`, which names the field, if its family has no such
    model."""
    family = family_of("to_hf", cfg.family)
    found: Found = {"model_type": cfg.family, "architectures": [family.architecture]}
    found |= {name: getattr(cfg, of) for name, of in family.fields.items()}
    for section in family.sections:
        found |= SECTIONS[section].write(cfg)
    again = read_config("to_hf", found, getattr(getattr(cfg.rope, "scaling", None), "length", None))
    for one in dataclasses.fields(DecoderConfig):
        got, read = getattr(cfg, one.name), getattr(again, one.name)
        rounded = 2**-8 if one.name == "embed_scale" else 1e-12  # embed_scale is rounded to the params' dtype
        same = got == read or (type(got) is type(read) is float and math.isclose(got, read, rel_tol=rounded))
        require(same, "to_hf", f"cfg.{one.name}", f"{read!r} for family {cfg.family!r} with these other fields", repr(got))
    return found
