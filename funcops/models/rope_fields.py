"""The rotary embedding of a config.json as a RopeConfig, and back.

It is written in both of its forms: "rope_parameters" (transformers 5), and "rope_theta" with "rope_scaling" beside it (earlier).
Either form is read; if both are present they must agree.
"""

from __future__ import annotations

import math
from typing import Any

from funcops.engine.errors import fail, require
from funcops.library.ops.rope import RopeConfig
from funcops.library.ops.rope_scaling import DynamicScaling, LinearScaling, Llama3Scaling, LongRopeScaling, YarnScaling

LONG = "longrope"
NAMES = {"su": LONG, "yarn": "yarn"}  # Phi 3's earlier names for its scaling
# each scaling by its name in config.json
KINDS: dict[str, Any] = {
    "linear": LinearScaling,
    "dynamic": DynamicScaling,
    "yarn": YarnScaling,
    LONG: LongRopeScaling,
    "llama3": Llama3Scaling,
}
ORIGINAL = "original_max_position_embeddings"
BY_SCALING = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    LONG: ("short_factor", "long_factor", "factor", "attention_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def read_rope(
    where: str, given: dict[str, Any], size: int, context: int, *, original: int | None, length: int | None, interleaved: bool
) -> RopeConfig:
    """Return the RopeConfig of "rope_parameters", for heads of `size` in a model of `context`. `original`: the context before
    scaling, if it is given beside them. Raises `ValueError` for an unknown type or field, or a missing field."""
    fields = {name: value for name, value in given.items() if value is not None}
    kind = fields.pop("rope_type", fields.pop("type", "default"))
    fields.pop("type", None)
    kind = NAMES.get(kind, kind)
    if "rope_theta" not in fields:
        fail(where, "rope_theta", "given", "none")
    theta, part = float(fields.pop("rope_theta")), float(fields.pop("partial_rotary_factor", 1.0))
    turning = int(size * part)
    options: dict[str, Any] = dict(theta=theta, rotary_dim=None if turning == size else turning, interleaved=interleaved)
    if kind == "default":
        fields.pop("factor", None)
        fields.pop(ORIGINAL, None)
        _nothing_else(where, fields, kind)
        return RopeConfig(size, **options)
    require(kind in KINDS, where, "rope_type", f"one of default, {', '.join(KINDS)}", repr(kind))
    before = fields.pop(ORIGINAL, None)
    before = original or before or context
    found = {name: fields.pop(name) for name in BY_SCALING[kind] if name in fields}
    _nothing_else(where, fields, kind)
    if kind == LONG:
        found = {n: tuple(map(float, v)) if isinstance(v, list) else v for n, v in found.items()}
        found["factor"] = max(found.get("factor") or context / before, 1.0)
    if kind == "yarn":
        found = {n: v for n, v in found.items() if v or n == "truncate"}
        found["factor"] = found.get("factor") or context / before
    if kind != "linear":
        found["original_context"] = context if kind == "dynamic" else before
    if kind in ("dynamic", LONG):
        found["length"] = length
    try:
        return RopeConfig(size, scaling=KINDS[kind](**found), **options)
    except TypeError as error:
        fail(where, f"rope of type {kind!r}", f"of fields {', '.join(BY_SCALING[kind])}", error)


def _nothing_else(where: str, fields: dict[str, Any], kind: str) -> None:
    require(not fields, where, f"fields of a rope of type {kind!r}", "known", ", ".join(map(repr, fields)))


def write_rope(rope: RopeConfig, context: int) -> dict[str, Any]:
    """Return the "rope_parameters" of a RopeConfig."""
    found: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.rotating != rope.dim:
        found["partial_rotary_factor"] = rope.rotating / rope.dim
    scaling: Any = rope.scaling
    if scaling is None:
        return {"rope_type": "default", **found}
    kind = next(name for name, cls in KINDS.items() if type(scaling) is cls)
    found["rope_type"] = kind
    for name in BY_SCALING[kind]:
        value = getattr(scaling, name)
        if value is not None:
            found[name] = list(value) if isinstance(value, tuple) else value
    before: Any = getattr(scaling, "original_context", None)
    if kind not in ("linear", "dynamic"):
        found[ORIGINAL] = before
    if kind == LONG and math.isclose(found["factor"], max(context / before, 1.0)):
        del found["factor"]  # which Phi 3 does not take
    return found


def legacy(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the earlier fields that say the same as "rope_parameters"."""
    rest = {name: value for name, value in parameters.items() if name not in ("rope_theta", "partial_rotary_factor")}
    found = {"rope_theta": parameters["rope_theta"], "rope_scaling": None if rest == {"rope_type": "default"} else rest}
    if "partial_rotary_factor" in parameters:
        found["partial_rotary_factor"] = parameters["partial_rotary_factor"]
    return found
