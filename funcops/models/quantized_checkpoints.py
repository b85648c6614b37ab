"""Reads quantised tensors of a checkpoint as the numbers that their codes stand for.

    "fp8"     w = codes s        NAME [O, I] e4m3, NAME_scale_inv [ceil(O/128), ceil(I/128)]: s of each block of 128 x 128
    "mxfp4"   w = codes 2^(s - 127)      NAME_blocks [*, O, I/32, 16], two e2m1 a byte, the first in the low half, NAME_scales
                                         [*, O, I/32]: s of 32 numbers; w is [*, O, I], and the tensor its transpose [*, I, O]
    "bitsandbytes"    w in NF4 (`library/kernels/nf4.py`)    NAME [O I/2, 1], NAME.absmax [O I/64], in 8 bits if NAME.nested_absmax
                                         [O I/64/256] is there, and NAME.quant_state.bitsandbytes__nf4: bytes of JSON
    "compressed-tensors", "modelopt"     see `compressed_tensors.py`

The names tell which tensors of a file are quantised, and `quantization_config` in config.json tells how. Sources: DeepSeek-V3
(arXiv:2412.19437, `weight_dequant` of its inference/kernel.py), OCP Microscaling Formats 1.0, GPT-OSS (arXiv:2508.10925),
bitsandbytes (`QuantState.as_dict` of its functional.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from funcops.engine.errors import CheckpointError, fail, one_of, require, require_type
from funcops.library.formats import Format, QTensor
from funcops.library.kernels import nf4
from funcops.models import compressed_tensors as compressed
from funcops.models.compressed_tensors import Part

BLOCK, GROUP = 128, 32
ROWS, MX = Format("e4m3", (1, BLOCK), "float32"), Format("e2m1", (1, GROUP), "e8m0")
SCALE, BLOCKS, SCALES = "_scale_inv", "_blocks", "_scales"
ABSMAX, LEVELS, NESTED, SHARES, STATE = (
    f".{name}" for name in ("absmax", "quant_map", "nested_absmax", "nested_quant_map", "quant_state.bitsandbytes__nf4")
)
# fields beside "quant_method", and their supported values; None: any value, as the field does not concern stored weights
SERVED: dict[str, dict[str, tuple[Any, ...] | None]] = {
    **compressed.SERVED,
    "fp8": {
        "fmt": ("e4m3",),
        "weight_block_size": ([BLOCK, BLOCK],),
        "activation_scheme": ("dynamic",),
        "scale_fmt": None,
        "modules_to_not_convert": None,
        "dequantize": None,
    },
    "mxfp4": {"modules_to_not_convert": None, "dequantize": None},
    "bitsandbytes": {
        "load_in_4bit": (True,),
        "load_in_8bit": (False,),
        "_load_in_4bit": None,
        "_load_in_8bit": None,
        "bnb_4bit_quant_type": ("nf4",),
        "bnb_4bit_quant_storage": ("uint8",),
        "bnb_4bit_use_double_quant": None,
        "bnb_4bit_compute_dtype": None,
        "llm_int8_enable_fp32_cpu_offload": None,
        "llm_int8_has_fp16_weight": None,
        "llm_int8_skip_modules": None,
        "llm_int8_threshold": None,
    },
}


def coding(where: str, given: Mapping[str, Any]) -> str:
    """Return how a checkpoint is quantised: a key of `SERVED`, or "". Raises `ValueError` or `TypeError`, which name the field, for
    an unsupported method, field or value."""
    if given.get("quantization_config") is None:
        return ""
    said = given["quantization_config"]
    require_type(where, "quantization_config", said, dict)
    method = said.get("quant_method")
    require_type(where, "quantization_config.quant_method", method, str, type(None))
    require(method in SERVED, where, "quantization_config.quant_method", one_of(SERVED, method), repr(method))
    served = {"quant_method": None, **SERVED[method]}
    unknown = sorted(set(said) - set(served))
    require(not unknown, where, "quantization_config", f"of known fields ({', '.join(served)})", ", ".join(map(repr, unknown)))
    for name, values in served.items():
        if values is not None and name in said and said[name] not in values:
            fail(where, f"quantization_config.{name}", " or ".join(map(repr, values)), repr(said[name]))
    return compressed.layout(where, said) if method in compressed.SERVED else str(method)


def parts(method: str, name: str, shape: list[int], files: Mapping[str, Any]) -> list[Part]:
    """The parts that the files hold of a quantised tensor; [] for a tensor that is not quantised."""
    if method == "fp8" and len(shape) == 2 and (name + SCALE in files or _code(files, name) == "F8_E4M3"):
        scales = [math.ceil(n / BLOCK) for n in shape]
        return [Part(name, shape, ("F8_E4M3",)), Part(name + SCALE, scales, ("F32", "BF16", "F8_E8M0"))]
    if method == "mxfp4" and len(shape) > 1 and (name + BLOCKS in files or name + SCALES in files):
        *lead, width, rows = shape
        if width % GROUP:
            fail("open_hf", name + BLOCKS, f"of a width that {GROUP} divides", width, CheckpointError)
        groups = [*lead, rows, width // GROUP]
        return [Part(name + BLOCKS, [*groups, GROUP // 2], ("U8",)), Part(name + SCALES, groups, ("U8",))]
    if method == "bitsandbytes" and len(shape) == 2 and (name + ABSMAX in files or _code(files, name) == "U8"):
        return _nf4_parts(name, shape, files)
    return compressed.parts(method, name, shape, files)


def _nf4_parts(name: str, shape: list[int], files: Mapping[str, Any]) -> list[Part]:
    if shape[1] % nf4.BLOCK:
        fail("open_hf", name, f"of a width that {nf4.BLOCK} divides", shape[1], CheckpointError)
    blocks, double = math.prod(shape) // nf4.BLOCK, name + NESTED in files
    found = [Part(name, [math.prod(shape) // 2, 1], ("U8",)), Part(name + ABSMAX, [blocks], ("U8" if double else "F32",))]
    found.append(Part(name + LEVELS, [len(nf4.LEVELS)], ("F32",)))
    if double:
        found += [Part(name + NESTED, [math.ceil(blocks / nf4.NESTED)], ("F32",)), Part(name + SHARES, [256], ("F32",))]
    if name + STATE not in files:
        return [*found, Part(name + STATE, [], ("U8",))]
    wanted = {"quant_type": "nf4", "blocksize": nf4.BLOCK, "shape": shape} | ({"nested_blocksize": nf4.NESTED} if double else {})
    said = _state(name, files)
    for field, value in wanted.items():
        if said.get(field) != value:
            fail("open_hf", f"{field} in {name + STATE}", repr(value), repr(said.get(field)), CheckpointError)
    if name + LEVELS in files and not torch.equal(files[name + LEVELS].get_tensor(name + LEVELS), torch.tensor(nf4.LEVELS)):
        fail("open_hf", name + LEVELS, "the levels of NF4", "others", CheckpointError)
    return [*found, Part(name + STATE, list(files[name + STATE].get_slice(name + STATE).get_shape()), ("U8",))]


def _state(name: str, files: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that bitsandbytes writes beside a tensor."""
    try:
        found = json.loads(bytes(files[name + STATE].get_tensor(name + STATE).tolist()))
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"open_hf: {name + STATE} must be the bytes of a JSON object, got {error}") from error
    return found if isinstance(found, dict) else {}


def _code(files: Mapping[str, Any], name: str) -> str:
    return str(files[name].get_slice(name).get_dtype()) if name in files else ""


class Coded:
    """A quantised tensor with the interface of a safetensors slice: rows of its first dim as numbers, in float32 ("mxfp4" in
    bfloat16, which represents all of them)."""

    def __init__(self, method: str, found: list[Part], files: Mapping[str, Any]) -> None:
        decode = {"fp8": self._fp8, "mxfp4": self._mxfp4, "bitsandbytes": self._nf4}
        self._codes, self._scales, *self._rest = (files[part.name].get_slice(part.name) for part in found)
        self._decode = decode[method] if method in decode else self._compressed
        self._method = method
        self._said = _state(found[0].name, files) if method == "bitsandbytes" else {}

    def __getitem__(self, index: Any) -> Tensor:
        first, *rest = index if isinstance(index, tuple) else (index,)
        made = self._decode(first)
        return made[(slice(None), *rest)] if rest else made

    def _fp8(self, rows: slice) -> Tensor:
        height, width = self._codes.get_shape()
        at = torch.arange(height)[rows]
        codes, scales = self._codes[rows].view(torch.uint8), self._scales[:].float()[at // BLOCK]
        return _numbers(codes, scales, ROWS, (len(at), width), torch.float32)

    def _compressed(self, rows: slice) -> Tensor:
        return compressed.decoded(self._method, rows, self._codes, self._scales, self._rest)

    def _mxfp4(self, lead: slice) -> Tensor:
        codes, scales = self._codes[lead], self._scales[lead]
        shape = (*scales.shape[:-1], GROUP * scales.shape[-1])
        return _numbers(codes.flatten(-2), scales.flatten(0, -2), MX, shape, torch.bfloat16).mT

    def _nf4(self, rows: slice) -> Tensor:
        height, width = self._said["shape"]
        first, last, _ = rows.indices(height)
        count, per = max(last - first, 0), width // nf4.BLOCK
        codes = self._codes[first * width // 2 : last * width // 2].reshape(count, width // 2)
        absmax = self._scales[first * per : last * per]
        if len(self._rest) > 2:  # in 8 bits
            largest, shares = self._rest[1][:], self._rest[2][:]
            block = torch.arange(first * per, first * per + len(absmax)) // nf4.NESTED
            absmax = shares[absmax.to(torch.int32)] * largest[block] + self._said["nested_offset"]
        return nf4.nf4_dequantize(codes, absmax.reshape(count, per), width, torch.float32)  # type: ignore[no-any-return]


def _numbers(codes: Tensor, scales: Tensor, format: Format, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    made = QTensor(codes, scales, None, format=format, shape=torch.Size(shape), dtype=dtype, side="row", hadamard=False)
    return made.dequantize()
