"""The fields of a config.json of Llama 4: chunks of attention, layers without rope and their temperature, and experts."""

from __future__ import annotations

from typing import Any

from funcops.engine.errors import fail, require
from funcops.library.ops.experts import ExpertsConfig
from funcops.library.ops.route import RouteConfig
from funcops.models.config_json import Fields, Found
from funcops.models.decoder_config import DecoderConfig
from funcops.models.mixture import MoEConfig

CHUNKED, FULL = "chunked_attention", "full_attention"


def read_llama4(fields: Fields, found: Found) -> None:
    where, layers = fields.where, found["layers"]
    interval = fields.take("no_rope_layer_interval", 4)
    require(interval >= 1, where, "no_rope_layer_interval", "at least 1", interval)
    rotated = fields.take("no_rope_layers", [], list) or [int((i + 1) % interval != 0) for i in range(layers)]
    require(len(rotated) >= layers, where, "no_rope_layers", f"a list of {layers}", len(rotated))
    found["unrotated"] = tuple(i for i in range(layers) if not rotated[i])
    chunk = fields.take("attention_chunk_size", None if "attention_chunk_size" in fields.given else 8192, int)
    types = fields.take("layer_types", [CHUNKED if one else FULL for one in rotated[:layers]], list)
    require(len(types) == layers, where, "layer_types", f"a list of {layers}", len(types))
    for one in types:
        require(one in (CHUNKED, FULL), where, "layer_types", f"of {CHUNKED!r} and {FULL!r}", repr(one))
    require(CHUNKED not in types or chunk, where, "attention_chunk_size", "given", "none")
    found["chunks"] = tuple(chunk if one == CHUNKED else None for one in types) if CHUNKED in types else ()
    found["qk_norm"] = "l2" if fields.take("use_qk_norm", True) else None
    number = type(fields.given.get("attn_temperature_tuning")) is int  # as in early files, 4
    tuned = fields.take("attn_temperature_tuning", True, int if number else bool)
    temperature = float(fields.take("attn_scale", 0.1, float)), float(fields.take("floor_scale", 8192, float))
    found["temperature"] = temperature if tuned else None
    _read_experts(fields, found)


def _read_experts(fields: Fields, found: Found) -> None:
    layers, hidden = found["layers"], fields.take("intermediate_size", 8192)
    count, chosen = fields.take("num_local_experts", 16), fields.take("num_experts_per_tok", 1)
    step = fields.take("interleave_moe_layer_step", 1)
    require(step >= 1, fields.where, "interleave_moe_layer_step", "at least 1", step)
    sparse = fields.take("moe_layers", list(range(step - 1, layers, step)), list)
    dense = tuple(i for i in range(layers) if i not in sparse)
    experts = ExpertsConfig(count, found["dim"], hidden, kind=found["mlp"], weights_on="input")
    route = RouteConfig(count, chosen, score="sigmoid", normalize=False)
    if len(dense) < layers:
        found["moe"] = MoEConfig(route=route, experts=experts, shared=hidden, dense=dense)


def write_llama4(cfg: DecoderConfig) -> dict[str, Any]:
    chunks, moe, of = cfg.chunks or (None,) * cfg.layers, cfg.moe, cfg.temperature
    if moe is None:
        fail("to_hf", "cfg.moe", f"a MoEConfig, for family {cfg.family!r}", None)
    return {
        "no_rope_layers": [int(i not in cfg.unrotated) for i in range(cfg.layers)],
        **dict([("attention_chunk_size", one) for one in chunks if one][:1]),  # Hugging Face's model does not take null
        "layer_types": [CHUNKED if one else FULL for one in chunks],
        "use_qk_norm": cfg.qk_norm is not None,
        "attn_temperature_tuning": of is not None,
        **({} if of is None else {"attn_scale": of[0], "floor_scale": int(of[1])}),
        "intermediate_size": moe.experts.hidden,
        "num_local_experts": moe.route.experts,
        "num_experts_per_tok": moe.route.top_k,
        "moe_layers": [i for i in range(cfg.layers) if i not in moe.dense],
    }
