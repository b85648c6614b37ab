"""Codes written by `to_hf`: the published layouts and configs, and the same numbers when they are read."""

import dataclasses
import json
import math
import re

import pytest
import torch
from safetensors.torch import load_file
from tiny_hf import FAMILIES, saved
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from funcops import CheckpointError, RopeConfig, chain, random
from funcops.engine.trees import at, paths, put, replace, stands_for_one, tree_map
from funcops.low_precision import (
    MXFP8,
    NF4,
    NVFP4,
    Format,
    Fp8Block,
    Fp8Current,
    Fp8Delayed,
    QTensor,
    dense,
    quantize_params,
    quantize_tensor,
    quantize_weights,
    with_recipe,
    with_weight_only,
)
from funcops.models import DecoderConfig, decoder, from_hf, to_hf
from funcops.models.quantized_writing import codes_of

CFG = DecoderConfig(
    vocab=64, dim=256, layers=1, heads=4, kv_heads=2, head_size=64, hidden=384, context=64, rope=RopeConfig(64), family="llama"
)
ROWS = Format("e4m3", (1, 0), "float32")
FLAT = Format("e2m1", (1, 16), "e4m3")


def in_codes(how, cfg=CFG, params=None, skip=("head",)):
    """The params with the weights of the linear layers in codes: as a working tree, or with `with_weight_only`."""
    plain = decoder(cfg)
    params = chain.init(plain, key=random.key(0), dtype=torch.float32) if params is None else params
    if isinstance(how, Format | NF4):
        return quantize_weights(params, with_weight_only(plain, how, skip=skip))
    return quantize_params(params, with_recipe(plain, how, skip=skip), {})


def numbers(params):
    """The numbers that codes stand for, in float32."""

    def wide(node):
        node = codes_of("", node)
        return replace(node, dtype=torch.float32) if isinstance(node, QTensor) else node

    return dense(tree_map(wide, params, is_leaf=stands_for_one))


LEVELS = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def nibbles(packed):
    """`unpack_fp4_from_uint8` of compressed-tensors and ModelOpt: the low half is the first."""
    return LEVELS[torch.stack((packed & 0x0F, packed >> 4), -1).flatten(1).long()]


def tiled(scale, rows, columns):
    return scale.float().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]


F8, F32, U8, E8 = torch.float8_e4m3fn, torch.float32, torch.uint8, torch.float8_e8m0fnu
ACTIVATIONS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True}
WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
E4M3 = "torch.float8_e4m3fn"


def compressed(kind, weights, activations):
    """`QuantizationConfig` of compressed-tensors, with a preset of its quantization/quant_scheme.py."""
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
        "format": kind,
    }
    said = {"quant_method": "compressed-tensors", "format": kind, "quantization_status": "compressed", "ignore": ["lm_head"]}
    return said | {"config_groups": {"group_0": group}, "kv_cache_scheme": None, "global_compression_ratio": None}


FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
UE8M0 = FP8 | {"scale_fmt": "ue8m0"}
BLOCK = compressed(
    "float-quantized",
    WEIGHTS | {"strategy": "block", "block_structure": [128, 128]},
    ACTIVATIONS | {"strategy": "group", "group_size": 128},
)
TENSOR = compressed("float-quantized", WEIGHTS | {"strategy": "tensor"}, ACTIVATIONS | {"strategy": "token"})
CHANNEL = compressed("float-quantized", WEIGHTS | {"strategy": "channel"}, ACTIVATIONS | {"strategy": "token"})
NVFP4A16 = compressed(
    "nvfp4-pack-quantized",
    WEIGHTS | {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": E4M3, "zp_dtype": E4M3},
    None,
)
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "W4A16_NVFP4",
    "config_groups": {
        "group_0": {"weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}, "targets": ["Linear"]}
    },
    "ignore": ["lm_head"],
    "producer": {"name": "funcops"},
}


def grid(rows, columns):
    return [math.ceil(rows / 128), math.ceil(columns / 128)]


# the tensors of a weight [O, I] beside it: part of the name, dtype, shape; and its numbers from them, by the published formula
PARTS = {
    "fp8": (
        {"weight": (F8, lambda o, i: [o, i]), "weight_scale_inv": (F32, grid)},
        lambda t, o, i: t["weight"].float() * tiled(t["weight_scale_inv"], o, i),
    ),
    "fp8 e8m0": (
        {"weight": (F8, lambda o, i: [o, i]), "weight_scale_inv": (E8, grid)},
        lambda t, o, i: t["weight"].float() * tiled(t["weight_scale_inv"], o, i),
    ),
    "block": (
        {"weight": (F8, lambda o, i: [o, i]), "weight_scale": (F32, grid)},
        lambda t, o, i: t["weight"].float() * tiled(t["weight_scale"], o, i),
    ),
    "tensor": (
        {"weight": (F8, lambda o, i: [o, i]), "weight_scale": (F32, lambda o, i: [1])},
        lambda t, o, i: t["weight"].float() * t["weight_scale"],
    ),
    "channel": (
        {"weight": (F8, lambda o, i: [o, i]), "weight_scale": (F32, lambda o, i: [o, 1])},
        lambda t, o, i: t["weight"].float() * t["weight_scale"],
    ),
    "nvfp4": (
        {
            "weight_packed": (U8, lambda o, i: [o, i // 2]),
            "weight_scale": (F8, lambda o, i: [o, i // 16]),
            "weight_global_scale": (F32, lambda o, i: [1]),
        },
        lambda t, o, i: (
            nibbles(t["weight_packed"]) * (t["weight_scale"].float() / t["weight_global_scale"]).repeat_interleave(16, 1)
        ),
    ),
    "modelopt": (
        {
            "weight": (U8, lambda o, i: [o, i // 2]),
            "weight_scale": (F8, lambda o, i: [o, i // 16]),
            "weight_scale_2": (F32, lambda o, i: []),
        },
        lambda t, o, i: nibbles(t["weight"]) * (t["weight_scale"].float() * t["weight_scale_2"]).repeat_interleave(16, 1),
    ),
}
WAYS = {
    "fp8": (Fp8Block(), {}, "fp8", UE8M0),
    "fp8, scales of any size": (Fp8Block(scales="float32", keep="col"), {}, "fp8", FP8),
    "fp8, scales in 8 bits": (Fp8Block(), {"scale_dtype": E8}, "fp8 e8m0", UE8M0),
    "blocks": (Fp8Block(), {"quant_method": "compressed-tensors"}, "block", BLOCK),
    "a tensor": (Fp8Current(), {}, "tensor", TENSOR),
    "a tensor, delayed": (Fp8Delayed(), {}, "tensor", TENSOR),
    "rows": (ROWS, {}, "channel", CHANNEL),
    "nvfp4": (NVFP4(stochastic=False), {}, "nvfp4", NVFP4A16),
    "nvfp4, weights alone": (FLAT, {"quant_method": "compressed-tensors"}, "nvfp4", NVFP4A16),
    "modelopt": (NVFP4(stochastic=False), {"quant_method": "modelopt"}, "modelopt", MODELOPT),
}
SHAPES = {
    "q": (256, 256),
    "k": (128, 256),
    "v": (128, 256),
    "o": (256, 256),
    "gate": (384, 256),
    "up": (384, 256),
    "down": (256, 384),
}


@pytest.mark.parametrize("way", WAYS)
def test_codes_are_written_by_the_published_layout_and_read_as_the_same_numbers(way, tmp_path):
    """Names, dtypes, shapes and config as published; numbers from the file by the published formula, and by `from_hf`. The bits are
    the same, except that compressed-tensors divides by a scale of NVFP4 where a working tree multiplies."""
    how, options, layout, config = WAYS[way]
    work = in_codes(how)
    to_hf(work, CFG, tmp_path / "m", **options)
    file, said = load_file(tmp_path / "m" / "model.safetensors"), json.loads((tmp_path / "m" / "config.json").read_text())
    assert said["quantization_config"] == config
    parts, formula = PARTS[layout]
    close = dict(rtol=2.0**-22, atol=0) if layout == "nvfp4" else dict(rtol=0, atol=0)
    want, again = numbers(work), from_hf(tmp_path / "m", dtype=torch.float32)[0]
    for path, t in paths(want).items():
        if t is not None:
            torch.testing.assert_close(at(again, path), t.float(), **close, msg=path)
    for name, (height, width) in SHAPES.items():
        layer = f"model.layers.0.{'self_attn' if name in 'qkvo' else 'mlp'}.{name}_proj."
        found = {key.removeprefix(layer): t for key, t in file.items() if key.startswith(layer)}
        assert {key: (t.dtype, list(t.shape)) for key, t in found.items()} == {
            key: (dtype, shape(height, width)) for key, (dtype, shape) in parts.items()
        }
        block = want["blocks"][0]
        whole = {"o": block["attn"]["out"], "down": block["mlp"]["down"]}.get(name)
        if name in "qkv":
            whole = block["attn"]["qkv"][name]["proj"]
        rows = {"gate": slice(384), "up": slice(384, None)}.get(name, slice(None))
        w = (block["mlp"]["up"] if whole is None else whole).weight[rows]
        torch.testing.assert_close(formula(found, height, width), w, **close, msg=name)
        if layout == "fp8":  # Hugging Face's
            theirs = Fp8Dequantize(None)._dequantize_one(found["weight"], found["weight_scale_inv"], torch.float32)
            assert torch.equal(theirs, w)
    assert file["lm_head.weight"].dtype in (torch.float32, torch.bfloat16) and len(file) == 7 * len(parts) + 5
    if said["quantization_config"]["quant_method"] == "fp8":
        theirs = FineGrainedFP8Config.from_dict(said["quantization_config"])
        assert list(theirs.weight_block_size) == [128, 128] and theirs.modules_to_not_convert == ["lm_head"]


@pytest.mark.parametrize(
    ("name", "how"),
    [("qwen3_moe", NVFP4(stochastic=False)), ("qwen3_moe", Fp8Current()), ("phi3", FLAT), ("phi3", ROWS), ("deepseek_v3", ROWS)],
    ids=str,
)
def test_experts_and_fused_projections_keep_their_numbers(name, how, tmp_path, monkeypatch):
    """Experts are written each on their own, q, k and v of Phi-3 as one tensor, which has scales by rows alone, and DeepSeek's rows
    of heads in the order of its files."""
    kind, sizes = FAMILIES[name]
    if "moe" in name:
        monkeypatch.setitem(FAMILIES, name, (kind, {**sizes, "intermediate_size": 48, "moe_intermediate_size": 32}))
    saved(name, tmp_path / "dense")
    params, cfg = from_hf(tmp_path / "dense")
    skip = ("head", *(("*gate",) if "moe" in name else ()), *(("*qkv.*", "*mlp.*") if how == FLAT else ()))
    work = in_codes(how, cfg, params, skip)
    to_hf(work, cfg, tmp_path / "m")
    want, again = paths(numbers(work)), paths(from_hf(tmp_path / "m", dtype=torch.float32)[0])
    assert sum(isinstance(codes_of(path, n), QTensor) for path, n in paths(work, is_leaf=stands_for_one).items()) > 1
    for path, t in want.items():
        if t is not None:
            torch.testing.assert_close(again[path], t.float(), rtol=2.0**-22, atol=0, msg=path)


def other(**sizes):
    return dataclasses.replace(CFG, **sizes)


def mixed():
    work, path = in_codes(Fp8Block()), "blocks.0.mlp.down.weight"
    return put(work, path, quantize_tensor(at(work, path).row.dequantize(), ROWS)), CFG


REFUSED = {
    "codes in one format, as config.json has one, got e4m3 128x128 pow2 and e4m3 1xall float32": mixed,
    "params.blocks.0.attn.out.weight must be codes of e4m3 with a scale for all, for each row or 128x128, or": lambda: (
        in_codes(Format("e5m2", (1, 0), "float32")),
        CFG,
    ),
    "must be codes of e4m3 with a scale for all, for each row or 128x128, or e2m1 with e4m3 scales (NVFP4)": lambda: (
        in_codes(MXFP8()),
        CFG,
    ),
    "weight must be a tensor (low_precision.dense decodes it), or codes by rows of e4m3 or e2m1, got NF4": lambda: (
        in_codes(NF4()),
        CFG,
    ),
    "must be whole blocks of 128 rows, in their order (low_precision.dense decodes codes), got a cut at row 320": lambda: (
        in_codes(Fp8Block(), other(hidden=320)),
        other(hidden=320),
    ),
    "to_hf: model.layers.0.mlp.down_proj.weight must be of a width that 16 divides, got 24": lambda: (
        in_codes(FLAT, other(dim=32, hidden=24)),
        other(dim=32, hidden=24),
    ),
    "params.embed.weight must be a tensor, got codes": lambda: (
        put(in_codes(ROWS), "embed.weight", quantize_tensor(torch.ones(64, 256), ROWS)),
        CFG,
    ),
}


@pytest.mark.parametrize("said", REFUSED)
def test_codes_without_a_layout_are_named(said, tmp_path):
    params, cfg = REFUSED[said]()
    with pytest.raises(CheckpointError) as error:
        to_hf(params, cfg, tmp_path / "m")
    assert said in str(error.value) and str(error.value).startswith("to_hf: ") and not list(tmp_path.iterdir())


def test_what_a_family_stores_transposed_is_named(tmp_path):
    """And, made dense, written beside the rest in codes."""
    saved("gpt2", tmp_path / "dense")
    params, cfg = from_hf(tmp_path / "dense")
    work = in_codes(ROWS, cfg, params)
    with pytest.raises(
        CheckpointError, match="must be a tensor .*: the family stores it transposed, or several matrices as one, got"
    ):
        to_hf(work, cfg, tmp_path / "m")
    to_hf(dense(work), cfg, tmp_path / "m")
    assert "quantization_config" not in json.loads((tmp_path / "m" / "config.json").read_text())


@pytest.mark.parametrize(
    ("how", "options", "said"),
    [
        (
            Fp8Block(),
            {"quant_method": "modelopt"},
            "quant_method must be one that has e4m3 128x128 pow2: fp8 or compressed-tensors",
        ),
        (ROWS, {"quant_method": "fp8"}, "quant_method must be one that has e4m3 1xall float32: compressed-tensors, got 'fp8'"),
        (None, {"quant_method": "fp8"}, "quant_method must be None for params without codes, got 'fp8'"),
        (None, {"scale_dtype": E8}, "scale_dtype must be torch.float32 for params without codes"),
        (
            Fp8Block(scales="float32", keep="col"),
            {"scale_dtype": E8},
            "scale_dtype must be torch.float32; or torch.float8_e8m0fnu for",
        ),
        (
            Fp8Block(),
            {"scale_dtype": torch.bfloat16},
            "scale_dtype must be torch.float32; or torch.float8_e8m0fnu for powers of two",
        ),
    ],
    ids=str,
)
def test_a_layout_that_does_not_fit_raises(how, options, said, tmp_path):
    params = chain.init(decoder(CFG), key=random.key(0)) if how is None else in_codes(how)
    with pytest.raises(ValueError) as error:
        to_hf(params, CFG, tmp_path / "m", **options)
    assert said in str(error.value) and not list(tmp_path.iterdir())


def test_scales_that_are_no_powers_of_two_are_not_written_as_such(tmp_path):
    work = in_codes(Fp8Block())
    at(work, "blocks.0.mlp.down.weight").row.scales[0, 0] *= 1.5
    said = "to_hf: the scales of model.layers.0.mlp.down_proj.weight must be powers of two from 2^-127 to 2^127, as scale_dtype is"
    with pytest.raises(ValueError, match=f"^{re.escape(said)} float8_e8m0fnu, got others$"):
        to_hf(work, CFG, tmp_path / "m", scale_dtype=E8)


def test_leaves_that_a_file_has_as_one_are_all_in_codes_with_one_scale(tmp_path):
    """Phi-3's q, k and v: without one of them, and with a scale for each."""
    saved("phi3", tmp_path / "dense")
    params, cfg = from_hf(tmp_path / "dense")
    work = in_codes(ROWS, cfg, params)
    one = "blocks.0.attn.qkv.k.proj.weight"
    with pytest.raises(CheckpointError, match=f"params.{one} must be in codes, as .*q.proj.weight is, with which it is stored"):
        to_hf(put(work, one, at(work, one).dequantize()), cfg, tmp_path / "m")
    with pytest.raises(
        CheckpointError, match=r"the params in .*qkv_proj.weight must be with one scale, as the file has one tensor"
    ):
        to_hf(in_codes(Fp8Current(), cfg, params), cfg, tmp_path / "m")
