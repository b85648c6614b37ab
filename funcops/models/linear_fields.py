"""The fields of config.json about linear attention, as a LinearAttentionConfig, and back."""

from __future__ import annotations

from typing import Any

from funcops.engine.errors import fail, require
from funcops.models.config_json import Fields
from funcops.models.decoder_config import DecoderConfig, LinearAttentionConfig

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
