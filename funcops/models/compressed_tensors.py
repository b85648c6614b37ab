"""Tensors of compressed-tensors' and ModelOpt's checkpoints, as the numbers that their codes stand for. NAME is `layer.weight`.

    float-quantized       w = codes s      NAME [O, I] e4m3, NAME_scale: s of the tensor [1], of rows [O, 1], or of blocks
    int-quantized         the same         NAME [O, I] int8
    pack-quantized        w = (code - 2^(bits - 1)) s      NAME_packed [O, I bits / 32] int32, the first code in the lowest bits,
                                           NAME_scale [O, I / group], NAME_shape [2]
    nvfp4-pack-quantized  w = codes s / g  NAME_packed [O, I / 2], two e2m1 a byte, the first in the low half, NAME_scale
                                           [O, I / 16] e4m3, NAME_global_scale [1]: g
    modelopt, NVFP4       w = codes s g    NAME [O, I / 2], NAME_scale [O, I / 16] e4m3, NAME_scale_2 []: g

Scales of activations (`input_scale`, ...) say how a server rounds activations, and are left out. Sources: compressed-tensors 0.12
(`compressors/`), ModelOpt's `unified_hf_export`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops.engine.errors import CheckpointError, fail, require_type

BLOCK, GROUP, WORD = 128, 16, 32
PACKED, SHAPE, SCALE, SECOND, GLOBAL = (f"weight_{part}" for part in ("packed", "shape", "scale", "scale_2", "global_scale"))
WIDE = ("F32", "BF16", "F16")
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FREE = dict.fromkeys(("ignore", "config_groups", "global_compression_ratio", "version", "producer", "exclude_modules"))
SERVED: dict[str, dict[str, tuple[Any, ...] | None]] = {
    "compressed-tensors": {
        **FREE,
        "format": ("float-quantized", "int-quantized", "pack-quantized", "nvfp4-pack-quantized"),
        "quantization_status": ("compressed", "frozen"),
        "kv_cache_scheme": (None,),
        "sparsity_config": (None, {}, {"format": "dense"}),
        "transform_config": (None, {}),
    },
    "modelopt": {
        **FREE,
        "quant_algo": ("NVFP4", "W4A16_NVFP4"),
        "group_size": (GROUP,),
        "kv_cache_quant_algo": (None,),
        "kv_cache_scheme": (None,),
    },
}
# what `weights` of a group must be, by format; other fields concern how the codes were made
WEIGHTS: dict[str, dict[str, tuple[Any, ...]]] = {
    "float-quantized": {"num_bits": (8,), "type": ("float",), "strategy": ("tensor", "channel", "block")},
    "int-quantized": {"num_bits": (8,), "type": ("int",), "strategy": ("tensor", "channel")},
    "pack-quantized": {
        "num_bits": (4, 8),
        "type": ("int",),
        "strategy": ("channel", "group"),
        "actorder": (None, "static", "weight"),
    },
    "nvfp4-pack-quantized": {"num_bits": (4,), "type": ("float",), "strategy": ("tensor_group",), "group_size": (GROUP,)},
}
ALWAYS = {
    "symmetric": (True,),
    "dynamic": (False,),
    "block_structure": (None, [BLOCK, BLOCK]),
    "zp_dtype": (None, "torch.int8", "torch.float8_e4m3fn"),
}


class Part(NamedTuple):
    """The name, shape and dtypes that a tensor of a file must have."""

    name: str
    shape: list[int]
    codes: tuple[str, ...]  # dtypes, by safetensors' names


def layout(where: str, said: Mapping[str, Any]) -> str:
    """Return how weights are stored, in words: the format, and for some the strategy, or bits and group. Raises `ValueError` or
    `TypeError`, which name the field, for groups of weights that are not all stored so."""
    if said["quant_method"] == "modelopt":
        return "modelopt"
    if "format" not in said:
        fail(where, "quantization_config.format", " or ".join(map(repr, WEIGHTS)), "none")
    kind, groups = said["format"], said.get("config_groups") or {}
    require_type(where, "quantization_config.config_groups", groups, dict)
    found = set()
    for name, group in groups.items():
        at = f"quantization_config.config_groups.{name}.weights"
        weights: Any = group.get("weights") if isinstance(group, dict) else None
        require_type(where, at, weights, dict)
        for field, values in {**ALWAYS, **WEIGHTS[kind]}.items():
            if field in weights and weights[field] not in values or field not in weights and field in ("num_bits", "strategy"):
                fail(where, f"{at}.{field}", " or ".join(map(repr, values)), repr(weights.get(field)))
        more = {"pack-quantized": f" {weights['num_bits']} {weights.get('group_size') or 0}", "nvfp4-pack-quantized": ""}
        found.add(kind + more.get(kind, f" {weights['strategy']}"))
    if len(found) != 1:
        fail(where, "quantization_config.config_groups", "groups stored in one way", " and ".join(sorted(found)) or "none")
    return str(found.pop())


def parts(method: str, name: str, shape: list[int], files: Mapping[str, Any]) -> list[Part]:
    """The parts that the files hold of a quantised tensor; [] for a tensor that is not quantised."""
    kind, *more = method.split()
    if kind not in (*WEIGHTS, "modelopt") or len(shape) != 2 or not name.endswith("weight"):
        return []
    layer = name.removesuffix("weight")
    packed = kind in ("pack-quantized", "nvfp4-pack-quantized")
    codes, scale = layer + PACKED if packed else name, layer + SCALE
    if scale not in files and not (packed and codes in files):
        return []
    height, width = shape
    if kind in ("float-quantized", "int-quantized"):
        scales = {"tensor": [1], "channel": [height, 1], "block": [math.ceil(n / BLOCK) for n in shape]}[more[0]]
        found = [Part(codes, shape, ("F8_E4M3",) if kind == "float-quantized" else ("I8",)), Part(scale, scales, WIDE)]
    elif kind == "pack-quantized":
        bits, group = map(int, more)
        per = WORD // bits
        _divides(codes, width, group or width)
        found = [Part(codes, [height, math.ceil(width / per)], ("I32",)), Part(scale, [height, width // (group or width)], WIDE)]
        found.append(Part(layer + SHAPE, [2], ("I64", "I32")))
    else:
        _divides(codes, width, GROUP)
        one = Part(layer + GLOBAL, [1], ("F32",)) if packed else Part(layer + SECOND, [], ("F32",))
        found = [Part(codes, [height, width // 2], ("U8",)), Part(scale, [height, width // GROUP], ("F8_E4M3",)), one]
    beside = [layer + of for of in ("input_scale", "input_global_scale") if layer + of in files]
    return [*found, *(Part(one, list(files[one].get_slice(one).get_shape()), WIDE) for one in beside)]


def _divides(name: str, width: int, group: int) -> None:
    if width % group:
        fail("open_hf", name, f"of a width that {group} divides", width, CheckpointError)


def decoded(method: str, rows: slice, codes: Any, scales: Any, rest: list[Any]) -> Tensor:
    """Rows of a tensor as numbers, in float32, from the slices of its parts."""
    kind, *more = method.split()
    given, height = codes[rows], codes.get_shape()[0]
    if kind in ("float-quantized", "int-quantized"):
        if more[0] == "block":
            at = torch.arange(height)[rows] // BLOCK
            scale = scales[:].float()[at].repeat_interleave(BLOCK, 1)[:, : given.shape[1]]
        else:
            scale = scales[:].float() if more[0] == "tensor" else scales[rows].float()
        return given.float() * scale
    scale = scales[rows].float()
    if kind == "pack-quantized":
        bits = int(more[0])
        per, width = WORD // bits, int(rest[0][:][1])
        shifts = torch.arange(0, WORD, bits, dtype=torch.int32)
        values = (given[:, :, None] >> shifts & (1 << bits) - 1).reshape(len(given), per * given.shape[1])[:, :width]
        numbers = (values - (1 << bits - 1)).float()
    else:
        levels = torch.tensor([*E2M1, *(-level for level in E2M1)])
        numbers = levels[torch.stack((given & 15, given >> 4), -1).flatten(1).int()]
        one = rest[0][...].reshape(())
        scale = scale * one if kind == "modelopt" else scale / one
    return numbers * scale.repeat_interleave(numbers.shape[1] // max(1, scale.shape[1]), 1)
