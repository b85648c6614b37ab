"""Writes quantised tensors of a checkpoint: codes as they are, by published layouts (`quantized_checkpoints.py` and
`compressed_tensors.py` have the formulas, and read them).

    method                  format of the codes                     stored as
    "fp8"                   e4m3 128x128                            NAME, NAME_scale_inv
    "compressed-tensors"    e4m3 all, 1xall, 128x128; e2m1 1x16, 16x16       float-quantized; nvfp4-pack-quantized
    "modelopt"              e2m1 1x16, 16x16                        W4A16_NVFP4: NAME, NAME_scale, NAME_scale_2

Only weights are described as quantised in NVFP4: its servers need calibrated scales of activations, which training does not give.
Sources: DeepSeek-V3's config.json; compressed-tensors (`quantization/quant_scheme.py`: FP8_DYNAMIC, FP8_BLOCK, NVFP4A16;
`compressors/`); ModelOpt's `convert_hf_config.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops.engine.errors import CheckpointError, fail, few, require
from funcops.engine.trees import replace
from funcops.library.formats import Format, NF4Tensor, QTensor, QWeight
from funcops.library.formats.qtensor import by_tiles
from funcops.library.formats.scaled import Scaled
from funcops.models import compressed_tensors as compressed

BLOCK, GROUP = compressed.BLOCK, compressed.GROUP
STRATEGIES = {(0, 0): "tensor", (1, 0): "channel", (BLOCK, BLOCK): "block"}
METHODS = ("fp8", "compressed-tensors", "modelopt")
E4M3 = "torch.float8_e4m3fn"


def codes_of(path: str, node: Any) -> Any:
    """The `QTensor` by rows of a leaf in codes, whatever holds it; any other leaf as it is. Raises `CheckpointError` for codes that
    cannot be written."""
    node = node.value if type(node) is Scaled else node
    node = node.row if type(node) is QWeight else node
    if isinstance(node, NF4Tensor) or (isinstance(node, QTensor) and (node.side != "row" or node.hadamard)):
        got = "NF4" if isinstance(node, NF4Tensor) else f"codes by {'columns' if node.side == 'col' else 'rows, transformed'}"
        wanted = "a tensor (low_precision.dense decodes it), or codes by rows of e4m3 or e2m1"
        fail("to_hf", f"params.{path}", wanted, got, CheckpointError)
    return node


def shape_of(node: Any) -> Any:
    """The shape of a tensor or of codes, stacked dims included; anything else as it is."""
    if isinstance(node, QTensor):
        return [*node.codes.shape[: node.codes.dim() - len(node.shape)], *node.shape]
    return list(node.shape) if isinstance(node, Tensor) else node


class Unwritten(NamedTuple):
    """A tensor of a checkpoint, which is made when its file is written."""

    nbytes: int
    make: Callable[[], Tensor]


def coded_tensors(
    given: Mapping[str, Any],
    every: Sequence[Any],
    orders: Mapping[Any, Tensor | None],
    method: str | None,
    scale_dtype: torch.dtype,
) -> tuple[dict[str, Unwritten], dict[str, Any]]:
    """The tensors of files that hold the leaves in codes, by name, and the fields of config.json for them. `every`: what stores the
    leaves, `orders`: the order of the rows of each. Raises `ValueError` or `CheckpointError` for codes without a layout."""
    codes = {path: q for path, q in given.items() if isinstance(q, QTensor)}
    if not codes:
        require(method is None, "to_hf", "quant_method", "None for params without codes", repr(method))
        require(scale_dtype is torch.float32, "to_hf", "scale_dtype", "torch.float32 for params without codes", scale_dtype)
        return {}, {}
    method = method_of(codes, method, scale_dtype)
    found: dict[str, Unwritten] = {}
    plain: list[str] = [] if any(stored.paths == ("head.weight",) for stored in every) else ["lm_head"]
    for stored in every:
        leaves = {path: codes[path] for path in stored.paths if path in codes}
        if not leaves:
            linear = len(stored.tensor_shape()) == 2 and stored.paths != ("embed.weight",)
            plain += [name.removesuffix(".weight") for name in stored.names if linear and name.endswith(".weight")]
            continue
        if len(leaves) < len(stored.paths):
            wanted = f"in codes, as {next(iter(leaves))} is, with which it is stored"
            fail("to_hf", f"params.{next(path for path in stored.paths if path not in codes)}", wanted, "a tensor", CheckpointError)
        for i, name in enumerate(stored.names):
            make = functools.partial(written, method, name, leaves, stored, i, orders[stored], scale_dtype)
            for part, t in make().items():
                found[part] = Unwritten(t.nbytes, functools.partial(_one, make, part))
    return found, {"quantization_config": config_of(method, next(iter(codes.values())).format, sorted(plain))}


def _one(make: Callable[[], dict[str, Tensor]], name: str) -> Tensor:
    return make()[name]


def method_of(codes: Mapping[str, QTensor], wanted: str | None, scale_dtype: torch.dtype) -> str:
    """How these tensors are stored: a key of `METHODS`. Raises `CheckpointError` for formats without a layout."""
    formats = sorted({q.format.name for q in codes.values()})
    if len(formats) > 1:
        fail("to_hf", "params", "codes in one format, as config.json has one", " and ".join(formats), CheckpointError)
    path, q = next(iter(codes.items()))
    format = q.format
    nvfp4 = format.element == "e2m1" and format.scales == "e4m3" and not format.row_scaled
    served: tuple[str, ...] = ("compressed-tensors", "modelopt") if nvfp4 else ()
    if format.element == "e4m3" and format.tile in STRATEGIES and format.scales in ("pow2", "float32"):
        served = ("fp8", "compressed-tensors") if format.tile == (BLOCK, BLOCK) else ("compressed-tensors",)
    if not served:
        known = "e4m3 with a scale for all, for each row or 128x128, or e2m1 with e4m3 scales (NVFP4)"
        fail("to_hf", f"params.{path}", f"codes of {known}; low_precision.dense decodes others", format.name, CheckpointError)
    method = served[0] if wanted is None else wanted
    require(method in served, "to_hf", "quant_method", f"one that has {format.name}: {' or '.join(served)}", repr(method))
    if scale_dtype is not torch.float32:
        exact = method == "fp8" and format.scales == "pow2" and scale_dtype is torch.float8_e8m0fnu
        wanted = "torch.float32; or torch.float8_e8m0fnu for powers of two by quant_method 'fp8'"
        require(exact, "to_hf", "scale_dtype", wanted, scale_dtype)
    return method


def config_of(method: str, format: Format, ignore: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of config.json. `ignore`: the names of linear modules whose weights are not in codes."""
    if method == "fp8":
        scale = {"scale_fmt": "ue8m0"} if format.scales == "pow2" else {}
        said: dict[str, Any] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            **scale,
        }
        return {**said, "modules_to_not_convert": list(ignore)}
    four = format.element == "e2m1"
    if method == "modelopt":
        weights: dict[str, Any] = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": GROUP}
        said = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "ignore": list(ignore), "producer": {"name": "funcops"}}
        return {**said, "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}}}
    kind = "nvfp4-pack-quantized" if four else "float-quantized"
    weights = {"num_bits": 4 if four else 8, "type": "float", "symmetric": True, "dynamic": False}
    inputs: dict[str, Any] | None = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
    if four:
        weights |= {"strategy": "tensor_group", "group_size": GROUP, "scale_dtype": E4M3, "zp_dtype": E4M3}
        inputs = None
    else:
        weights["strategy"] = STRATEGIES[format.tile]
        if format.tile == (BLOCK, BLOCK):
            weights["block_structure"] = [BLOCK, BLOCK]
            inputs = {**inputs, "strategy": "group", "group_size": BLOCK}  # type: ignore[dict-item]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None, "format": kind}
    said = {"quant_method": "compressed-tensors", "format": kind, "quantization_status": "compressed", "kv_cache_scheme": None}
    return {**said, "config_groups": {"group_0": group}, "ignore": list(ignore), "global_compression_ratio": None}


def written(
    method: str, name: str, leaves: Mapping[str, QTensor], stored: Any, i: int, order: Tensor | None, scale_dtype: torch.dtype
) -> dict[str, Tensor]:
    """The tensors of a file that hold the i-th of the tensors which store these leaves."""
    rule, path = stored.rule, next(iter(leaves))
    if rule.transposed or rule.depthwise or (stored.axis and not stored.split) or not name.endswith("weight"):
        wanted = "a tensor (low_precision.dense decodes it): the family stores it transposed, or several matrices as one"
        fail("to_hf", f"params.{path}", wanted, "codes", CheckpointError)
    per = len(rule.names)
    parts = [_matrix(q, i // per if stored.split else None) for q in leaves.values()]
    q = _rows(name, parts, per, i % per, order)
    width, layer = q.shape[1], name.removesuffix("weight")
    scales = by_tiles(q.scales, q.format)
    if q.format.element == "e4m3":
        codes = q.codes.view(torch.float8_e4m3fn)
        if method == "fp8":
            return {
                name: codes,
                f"{name}_scale_inv": _power(name, scales) if scale_dtype is torch.float8_e8m0fnu else scales.contiguous(),
            }
        return {name: codes, layer + compressed.SCALE: scales.reshape(1) if q.format.tile == (0, 0) else scales.contiguous()}
    if width % GROUP:
        fail("to_hf", name, f"of a width that {GROUP} divides", width, CheckpointError)
    one, small = q.scale, scales.contiguous().view(torch.float8_e4m3fn)
    assert one is not None
    if method == "modelopt":
        return {name: q.codes, layer + compressed.SCALE: small, layer + compressed.SECOND: one.reshape(())}
    return {layer + compressed.PACKED: q.codes, layer + compressed.SCALE: small, layer + compressed.GLOBAL: (1 / one).reshape(1)}


def _power(name: str, scales: Tensor) -> Tensor:
    """Powers of two as their exponents in 8 bits."""
    made = (scales.contiguous().view(torch.int32) >> 23).to(torch.uint8).view(torch.float8_e8m0fnu)
    if not torch.equal(made.float(), scales):
        fail("to_hf", f"the scales of {name}", "powers of two from 2^-127 to 2^127, as scale_dtype is float8_e8m0fnu", "others")
    return made


def _matrix(q: QTensor, expert: int | None) -> QTensor:
    """A matrix of codes, with a row of scales for each row or for each 128."""
    q = q if expert is None else q.each()[expert]
    if q.format.element == "e2m1" and q.format.tile[0] > 1:  # files have 1x16: each row the scales of its tile
        each = by_tiles(q.scales, q.format).repeat_interleave(q.format.tile[0], 0)[: q.shape[0]]
        return replace(q, scales=each)
    return q


def _rows(name: str, parts: list[QTensor], per: int, i: int, order: Tensor | None) -> QTensor:
    """The i-th of `per` equal shares of the rows of matrices, one below the other, in the order of a file."""
    format, heights = parts[0].format, [q.shape[0] for q in parts]
    total = sum(heights)
    a, b = i * (total // per), (i + 1) * (total // per)
    of_all: list[Any] = [q.scale if format.element == "e2m1" else q.scales for q in parts]
    if format.whole and any(not torch.equal(one, of_all[0]) for one in of_all[1:]):
        wanted = "with one scale, as the file has one tensor for them (low_precision.dense decodes codes)"
        fail("to_hf", f"the params in {name}", wanted, f"{len(parts)} scales", CheckpointError)
    step = BLOCK if format.tile[0] == BLOCK else 1
    cuts = [sum(heights[:n]) for n in range(1, len(heights))] + [n for n in (a, b) if n != total]
    cut = [f"a cut at row {n}" for n in cuts if n % step] + ["rows in another order"] * (order is not None and step > 1)
    if cut:
        wanted = f"whole blocks of {step} rows, in their order (low_precision.dense decodes codes)"
        fail("to_hf", f"the params in {name}", wanted, few(cut), CheckpointError)

    def rows(ts: list[Tensor], a: int, b: int) -> Tensor:
        whole = torch.cat(ts) if len(ts) > 1 else ts[0]
        return (whole if order is None else whole[order.argsort().to(whole.device)])[a:b]

    codes = rows([q.codes for q in parts], a, b)
    scales = parts[0].scales
    if format.tile != (0, 0):
        scales = rows([by_tiles(q.scales, format) for q in parts], a // step, -(-b // step))
    return replace(parts[0], codes=codes.contiguous(), scales=scales, shape=torch.Size((b - a, parts[0].shape[1])))
