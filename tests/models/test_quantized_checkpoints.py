"""Checkpoints in codes: equal to Hugging Face's dequantised weights and to the published formulas; mismatches raise by name."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_hf import FAMILIES, edited, saved
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from funcops import CheckpointError, trees
from funcops.library.kernels import nf4
from funcops.low_precision import NF4, quantize_weights, with_weight_only
from funcops.models import decoder, from_hf, open_hf

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
BNB = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "load_in_8bit": False,
    "_load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_compute_dtype": "bfloat16",
    "llm_int8_skip_modules": None,
    "llm_int8_threshold": 6.0,
}
WIDE = dict(hidden_size=256, intermediate_size=384)
SIZES = {
    "gpt_oss": dict(hidden_size=64, intermediate_size=32),
    "qwen3": WIDE,
    "deepseek_v3": WIDE | dict(kv_lora_rank=150),
    "llama": WIDE,
}


def published(codes, scale):
    """weight_dequant of DeepSeek-V3's inference/kernel.py: blocks of 128 x 128, cut at the edges."""
    return codes.float() * scale.repeat_interleave(128, 0)[: len(codes)].repeat_interleave(128, 1)[:, : codes.shape[1]]


def in_fp8(tensors):
    """Every second projection in codes, and one whose last block is cut: the tensors, and their numbers by the published formula.
    Hugging Face gives the same numbers, but refuses the cut one."""
    codes, numbers = {}, {}
    theirs = Fp8Dequantize(None)
    for i, (name, t) in enumerate(sorted(tensors.items())):
        codes[name] = numbers[name] = t.bfloat16()
        if "proj" in name and (i % 2 or "kv_a" in name) and t.dim() == 2:
            codes[name] = (40 * t.float()).to(torch.float8_e4m3fn)
            grid = [-(-n // 128) for n in t.shape]
            scale = codes[f"{name}_scale_inv"] = 2 * torch.rand(grid, generator=torch.Generator().manual_seed(i)) / 40
            numbers[name] = published(codes[name], scale).bfloat16()
            if all(n % g == 0 and (n // g == 128 or g == 1) for n, g in zip(t.shape, grid, strict=True)):
                assert torch.equal(theirs._dequantize_one(codes[name], scale, torch.bfloat16), numbers[name])
    return codes, numbers


def in_mxfp4(tensors):
    """The experts in codes."""
    codes, numbers, draw = {}, {}, torch.Generator().manual_seed(0)
    for name, t in sorted(tensors.items()):
        codes[name] = numbers[name] = t.bfloat16()
        if name.endswith(("gate_up_proj", "down_proj")):
            del codes[name]
            experts, width, rows = t.shape
            blocks = torch.randint(256, (experts, rows, width // 32, 16), generator=draw, dtype=torch.uint8)
            scales = torch.randint(118, 130, blocks.shape[:-1], generator=draw, dtype=torch.uint8)
            codes |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            numbers[name] = convert_moe_packed_tensors(blocks, scales)
    return codes, numbers


def in_nf4(tensors):
    """Projections in 4 bits, every second one with scales in 8 bits, as bitsandbytes' `QuantState.as_dict(packed=True)` names them
    and its `dequantize_4bit` reads them."""
    codes, numbers, draw = {}, {}, torch.Generator().manual_seed(0)
    levels, shares = torch.tensor(nf4.LEVELS), nf4.shares(torch.device("cpu"))
    for i, (name, t) in enumerate(sorted(tensors.items())):
        codes[name] = numbers[name] = t.bfloat16()
        if "proj" in name and t.dim() == 2 and t.shape[1] % 64 == 0:
            blocks, said = t.numel() // 64, {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(t.shape)}
            packed = codes[name] = torch.randint(256, (t.numel() // 2, 1), generator=draw, dtype=torch.uint8)
            scales = codes[f"{name}.absmax"] = torch.rand(blocks, generator=draw)
            codes[f"{name}.quant_map"] = levels.clone()
            if i % 2 or "down" in name:
                small = codes[f"{name}.absmax"] = torch.randint(256, (blocks,), generator=draw, dtype=torch.uint8)
                largest = codes[f"{name}.nested_absmax"] = torch.rand(-(-blocks // 256), generator=draw)
                codes[f"{name}.nested_quant_map"] = shares.clone()
                said |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 1.5}
                scales = shares[small.long()] * largest.repeat_interleave(256)[:blocks] + 1.5
            codes[f"{name}.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
            values = torch.stack((levels[(packed >> 4).long()], levels[(packed & 15).long()]), -1).reshape(blocks, 64)
            numbers[name] = (values * scales[:, None]).reshape(t.shape).bfloat16()
    return codes, numbers


WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False, "observer": "minmax"}


def compressed(kind, **weights):
    """The config of compressed-tensors, as llm-compressor writes it."""
    group = {
        "targets": ["Linear"],
        "weights": WEIGHTS | weights,
        "input_activations": {"dynamic": True},
        "output_activations": None,
    }
    said = {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    return said | {"quantization_status": "compressed", "kv_cache_scheme": None, "sparsity_config": {}, "version": "0.12.2"}


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "producer": {"name": "modelopt"}, "ignore": ["lm_head"]}
COMPRESSED = {
    "fp8 of a tensor": compressed("float-quantized", strategy="tensor"),
    "fp8 of rows": compressed("float-quantized"),
    "fp8 of blocks": compressed("float-quantized", strategy="block", block_structure=[128, 128]),
    "int8 of rows": compressed("int-quantized", type="int"),
    "int4 of groups": compressed("pack-quantized", type="int", num_bits=4, strategy="group", group_size=64, actorder=None),
    "int8 of groups": compressed("pack-quantized", type="int", num_bits=8, strategy="group", group_size=32),
    "int4 of rows": compressed("pack-quantized", type="int", num_bits=4, strategy="channel", group_size=None),
    "nvfp4": compressed("nvfp4-pack-quantized", num_bits=4, strategy="tensor_group", group_size=16),
    "modelopt": MODELOPT,
}
LEVELS = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def in_compressed(name, t, how, draw):
    """The tensors of a weight [O, I] by compressed-tensors' or ModelOpt's layout, and its numbers, by their formulas in float32."""
    height, width = t.shape
    scale = {"tensor": (1,), "rows": (height, 1), "blocks": (-(-height // 128), -(-width // 128))}
    if how.startswith(("fp8", "int8 of rows")):
        codes = (
            (40 * t.float()).to(torch.float8_e4m3fn) if how.startswith("fp8") else (9 * t.float()).clamp(-128, 127).to(torch.int8)
        )
        s = (torch.rand(scale[how.split()[-1]], generator=draw) / 40).bfloat16()
        wide = s.float().repeat_interleave(128, 0)[:height].repeat_interleave(128, 1)[:, :width] if "blocks" in how else s.float()
        return {name: codes, f"{name}_scale": s}, codes.float() * wide
    if how.startswith("int"):
        bits = int(how[3])
        group = {"int4 of groups": 64, "int8 of groups": 32}.get(how, width)
        values = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (height, width), generator=draw)
        s = (torch.rand(height, width // group, generator=draw) / 40).bfloat16()
        per, words = 32 // bits, torch.zeros(height, -(-width // (32 // bits)), dtype=torch.int64)
        for k in range(width):
            words[:, k // per] |= (values[:, k] + 2 ** (bits - 1)) << bits * (k % per)
        words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
        return {f"{name}_packed": words, f"{name}_scale": s, f"{name}_shape": torch.tensor([height, width])}, (
            values.float() * s.float().repeat_interleave(group, 1)
        )
    packed = torch.randint(256, (height, width // 2), generator=draw, dtype=torch.uint8)
    s = (200 * torch.rand(height, width // 16, generator=draw)).to(torch.float8_e4m3fn)
    values = LEVELS[torch.stack((packed & 15, packed >> 4), -1).flatten(1).long()]
    if how == "nvfp4":
        one = torch.tensor([2688 / 0.7])
        made = {f"{name}_packed": packed, f"{name}_scale": s, f"{name}_global_scale": one}
        return made | {f"{name.removesuffix('weight')}input_global_scale": torch.ones(1)}, values * (
            s.float() / one
        ).repeat_interleave(16, 1)
    one = torch.tensor(0.7 / 2688)
    made = {
        name: packed,
        f"{name}_scale": s,
        f"{name}_scale_2": one,
        f"{name.removesuffix('weight')}input_scale": torch.tensor(0.1),
    }
    return made, values * (s.float() * one).repeat_interleave(16, 1)


def all_compressed(how):
    def encode(tensors):
        codes, numbers, draw = {}, {}, torch.Generator().manual_seed(0)
        for i, (name, t) in enumerate(sorted(tensors.items())):
            numbers[name] = t.bfloat16()
            coded = "proj" in name and t.dim() == 2 and t.shape[1] % 64 == 0 and (i % 2 or "down" in name)
            made, exact = in_compressed(name, t, how, draw) if coded else ({name: t.bfloat16()}, t)
            codes |= made
            numbers[name] = exact.bfloat16()
        return codes, numbers

    return encode


CODED = {"gpt_oss": (in_mxfp4, MXFP4), "llama": (in_nf4, BNB)}


def both(name, path, monkeypatch, how=None, **sizes):
    """A folder of codes, and a folder of the same numbers decoded."""
    kind, options = FAMILIES[name]
    monkeypatch.setitem(FAMILIES, name, (kind, options | SIZES[name] | sizes))
    saved(name, path / "codes")
    saved(name, path / "numbers")
    file = "model.safetensors"
    encode, config = (
        CODED.get(name, (in_fp8, FP8 | {"scale_fmt": "ue8m0"})) if how is None else (all_compressed(how), COMPRESSED[how])
    )
    made = encode(load_file(path / "codes" / file))
    for folder, tensors in zip(("codes", "numbers"), made, strict=True):
        save_file({key: t.contiguous() for key, t in tensors.items()}, path / folder / file, metadata={"format": "pt"})
    edited(path / "codes", quantization_config=config)
    return path / "codes", path / "numbers"


@pytest.mark.parametrize(
    ("name", "how"), [*((name, None) for name in SIZES), *(("qwen3", how) for how in COMPRESSED), ("deepseek_v3", "fp8 of blocks")]
)
def test_codes_are_read_as_their_numbers(name, how, tmp_path, monkeypatch):
    """Bit for bit, whole and by rows, in any order and with any block ends."""
    codes, numbers = both(name, tmp_path, monkeypatch, how)
    (got, cfg), (want, same) = from_hf(codes), from_hf(numbers)
    assert cfg == same
    read = {path: t for path, t in trees.paths(want).items() if t is not None}
    for path, t in read.items():
        assert trees.at(got, path).dtype is t.dtype and torch.equal(trees.at(got, path), t), path
    with open_hf(codes) as weights:
        for path, t in read.items():
            n = len(t)
            for a, b in ((0, 0), (1, n - 1), (n // 2, n // 2 + 1), (n, n)):
                assert torch.equal(weights.read(path, a, b), t[a:b]), (path, a, b)


def test_numbers_are_rounded_once(tmp_path, monkeypatch):
    codes, _ = both("qwen3", tmp_path, monkeypatch)
    file, name = load_file(codes / "model.safetensors"), "model.layers.0.mlp.down_proj.weight"
    wanted = published(file[name], file[f"{name}_scale_inv"])
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert torch.equal(from_hf(codes, dtype=dtype)[0]["blocks"][0]["mlp"]["down"].weight, wanted.to(dtype))


def test_scales_that_are_powers_of_two_are_read(tmp_path, monkeypatch):
    """DeepSeek-V3.1 stores them as F8_E8M0."""
    codes, _ = both("qwen3", tmp_path, monkeypatch)
    path, name = codes / "model.safetensors", "model.layers.0.mlp.down_proj.weight"
    tensors = load_file(path)
    scale = 2.0 ** torch.randint(-9, 3, tensors[f"{name}_scale_inv"].shape)
    tensors[f"{name}_scale_inv"] = scale.to(torch.float8_e8m0fnu)
    save_file(tensors, path, metadata={"format": "pt"})
    assert torch.equal(from_hf(codes)[0]["blocks"][0]["mlp"]["down"].weight, published(tensors[name], scale).bfloat16())


def test_a_nan_scale_gives_nan(tmp_path, monkeypatch):
    """255 is NaN (OCP MX); the smallest and the largest scale are numbers."""
    codes, _ = both("gpt_oss", tmp_path, monkeypatch)
    path, name = codes / "model.safetensors", "model.layers.0.mlp.experts.down_proj"
    tensors = load_file(path)
    tensors[f"{name}_scales"][0, :3, 0] = torch.tensor([255, 0, 254], dtype=torch.uint8)
    tensors[f"{name}_blocks"][0, :3, 0] = 0x12  # 1 and 0.5
    save_file(tensors, path, metadata={"format": "pt"})
    found = from_hf(codes)[0]["blocks"][0]["layer0"]["mlp"]["experts"].down.weight[0, :3, :2].double()
    assert found[0].isnan().all() and found[1:].tolist() == [[2.0**-127, 2.0**-128], [2.0**127, 2.0**126]]


def both_groups():
    """Rows in one group, blocks in another."""
    groups = [compressed("float-quantized", strategy=one)["config_groups"]["group_0"] for one in ("channel", "block")]
    return compressed("float-quantized") | {"config_groups": dict(zip("ab", groups, strict=True))}


BAD = {
    "quantization_config.quant_method must be one of compressed-tensors, modelopt, fp8, mxfp4, bitsandbytes, got 'awq'": (
        "qwen3",
        dict(FP8, quant_method="awq"),
        None,
    ),
    "quantization_config.format must be 'float-quantized' or 'int-quantized' or": ("qwen3", compressed("marlin-24"), None),
    "or 'int-quantized' or 'pack-quantized' or 'nvfp4-pack-quantized', got none": (
        "qwen3",
        {"quant_method": "compressed-tensors"},
        None,
    ),
    "config_groups.group_0.weights.strategy must be 'tensor' or 'channel' or 'block', got 'group'": (
        "qwen3",
        compressed("float-quantized", strategy="group"),
        None,
    ),
    "config_groups.group_0.weights.symmetric must be True, got False": (
        "qwen3",
        compressed("pack-quantized", type="int", num_bits=4, strategy="channel", symmetric=False),
        None,
    ),
    "config_groups.group_0.weights.actorder must be None or 'static' or 'weight', got 'group'": (
        "qwen3",
        compressed("pack-quantized", type="int", num_bits=4, strategy="group", group_size=64, actorder="group"),
        None,
    ),
    "config_groups.group_0.weights.block_structure must be None or [128, 128], got [64, 64]": (
        "qwen3",
        compressed("float-quantized", strategy="block", block_structure=[64, 64]),
        None,
    ),
    "quantization_config.kv_cache_scheme must be None, got {'num_bits': 8}": (
        "qwen3",
        compressed("float-quantized") | {"kv_cache_scheme": {"num_bits": 8}},
        None,
    ),
    "quantization_config.config_groups must be groups stored in one way, got float-quantized block and float-quantized channel": (
        "qwen3",
        both_groups(),
        None,
    ),
    "quantization_config.config_groups must be groups stored in one way, got none": (
        "qwen3",
        compressed("float-quantized") | {"config_groups": {}},
        None,
    ),
    "quantization_config.config_groups must be dict, got list": (
        "qwen3",
        compressed("float-quantized") | {"config_groups": ["group_0"]},
        None,
    ),
    "quantization_config.config_groups.group_0.weights must be dict, got None": (
        "qwen3",
        compressed("float-quantized") | {"config_groups": {"group_0": {"targets": ["Linear"]}}},
        None,
    ),
    "quantization_config.config_groups.a.weights must be dict, got None": (
        "qwen3",
        compressed("float-quantized") | {"config_groups": {"a": "Linear"}},
        None,
    ),
    "model.layers.0.mlp.down_proj.weight_packed must be of a width that 100 divides, got 384": (
        "qwen3",
        compressed("pack-quantized", type="int", num_bits=4, strategy="group", group_size=100),
        lambda t: t.update({f"{DOWN}_packed": torch.ones(256, 48, dtype=torch.int32), f"{DOWN}_scale": torch.ones(256, 3)}),
    ),
    "quantization_config.quant_algo must be 'NVFP4' or 'W4A16_NVFP4', got 'FP8'": ("qwen3", MODELOPT | {"quant_algo": "FP8"}, None),
    "mis-shaped: model.layers.0.mlp.down_proj.weight_scale [256, 1], got [2, 3]": (
        "qwen3",
        compressed("float-quantized"),
        lambda t: t.update({f"{DOWN}_scale": torch.ones(2, 3)}),
    ),
    "missing: model.layers.0.mlp.down_proj.weight_global_scale [1]": (
        "qwen3",
        COMPRESSED["nvfp4"],
        lambda t: t.update(
            {f"{DOWN}_packed": torch.ones(256, 192).byte(), f"{DOWN}_scale": torch.ones(256, 24).to(torch.float8_e4m3fn)}
        ),
    ),
    "quantization_config.weight_block_size must be [128, 128], got [64, 64]": (
        "qwen3",
        dict(FP8, weight_block_size=[64, 64]),
        None,
    ),
    "quantization_config.fmt must be 'e4m3', got 'e5m2'": ("qwen3", dict(FP8, fmt="e5m2"), None),
    "quantization_config must be of known fields (quant_method, fmt, weight_block_size, activation_scheme, scale_fmt, "
    "modules_to_not_convert, dequantize), got 'twist'": ("qwen3", dict(FP8, twist=1), None),
    "quantization_config must be dict, got 'fp8'": ("qwen3", "fp8", None),
    "extra: model.layers.0.mlp.down_proj.weight_scale_inv [2, 3]": ("qwen3", None, lambda t: None),
    "model.layers.0.mlp.down_proj.weight_scale_inv [2, 3], got [3, 2]": (
        "qwen3",
        FP8,
        lambda t: t.update({f"{DOWN}_scale_inv": torch.ones(3, 2)}),
    ),
    "mis-typed: model.layers.0.mlp.down_proj.weight_scale_inv float32 or bfloat16 or float8_e8m0fnu, got I32": (
        "qwen3",
        FP8,
        lambda t: t.update({f"{DOWN}_scale_inv": torch.ones(2, 3, dtype=torch.int32)}),
    ),
    "missing: model.layers.0.mlp.down_proj.weight_scale_inv [2, 3]": ("qwen3", FP8, lambda t: t.pop(f"{DOWN}_scale_inv")),
    "mis-typed: model.layers.0.mlp.down_proj.weight float8_e4m3fn, got BF16": (
        "qwen3",
        FP8,
        lambda t: t.update({DOWN: torch.ones(256, 384, dtype=torch.bfloat16)}),
    ),
    "mis-shaped: model.layers.0.mlp.experts.down_proj_blocks [4, 64, 1, 16], got [4, 64, 16]": (
        "gpt_oss",
        MXFP4,
        lambda t: t.update({f"{EXPERTS}_blocks": t[f"{EXPERTS}_blocks"].flatten(2)}),
    ),
    "missing: model.layers.0.mlp.experts.down_proj_scales [4, 64, 1]": ("gpt_oss", MXFP4, lambda t: t.pop(f"{EXPERTS}_scales")),
    "mis-typed: model.layers.0.mlp.experts.down_proj_scales uint8, got F32": (
        "gpt_oss",
        MXFP4,
        lambda t: t.update({f"{EXPERTS}_scales": t[f"{EXPERTS}_scales"].float()}),
    ),
    "quantization_config.bnb_4bit_quant_type must be 'nf4', got 'fp4'": ("llama", BNB | {"bnb_4bit_quant_type": "fp4"}, None),
    "quantization_config.load_in_4bit must be True, got False": ("llama", BNB | {"load_in_4bit": False}, None),
    "missing: model.layers.0.mlp.down_proj.weight.absmax [1536]": ("llama", BNB, lambda t: t.pop(f"{DOWN}.absmax")),
    "missing: model.layers.0.mlp.down_proj.weight.quant_state.bitsandbytes__nf4": ("llama", BNB, lambda t: t.pop(DOWN + STATE)),
    "blocksize in model.layers.0.mlp.down_proj.weight.quant_state.bitsandbytes__nf4 must be 64, got 128": (
        "llama",
        BNB,
        lambda t: t.update({DOWN + STATE: stated(t, blocksize=128)}),
    ),
    "shape in model.layers.0.mlp.down_proj.weight.quant_state.bitsandbytes__nf4 must be [256, 384], got [384, 256]": (
        "llama",
        BNB,
        lambda t: t.update({DOWN + STATE: stated(t, shape=[384, 256])}),
    ),
    "weight.quant_state.bitsandbytes__nf4 must be the bytes of a JSON object, got": (
        "llama",
        BNB,
        lambda t: t.update({DOWN + STATE: torch.zeros(3, dtype=torch.uint8)}),
    ),
    "model.layers.0.mlp.down_proj.weight.quant_map must be the levels of NF4, got others": (
        "llama",
        BNB,
        lambda t: t.update({f"{DOWN}.quant_map": t[f"{DOWN}.quant_map"] + 0.01}),
    ),
    "model.layers.0.self_attn.o_proj.weight must be of a width that 64 divides, got 24": (
        "llama",
        BNB,
        lambda t: t.update({"model.layers.0.self_attn.o_proj.weight.absmax": torch.ones(96)}),
    ),
    "mis-shaped: model.layers.0.mlp.down_proj.weight [49152, 1], got [49151, 1]": (
        "llama",
        BNB,
        lambda t: t.update({DOWN: t[DOWN][1:].clone()}),
    ),
}
STATE = ".quant_state.bitsandbytes__nf4"


def stated(tensors, **changes):
    said = json.loads(bytes(tensors[DOWN + STATE].tolist())) | changes
    return torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)


DOWN, EXPERTS = "model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.experts.down_proj"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        return {name: both(name, tmp_path_factory.mktemp(name), patch)[0] for name in ("qwen3", "gpt_oss", "llama")}


@pytest.mark.parametrize("said", BAD)
def test_a_mismatch_is_named(said, folders):
    name, config, change = BAD[said]
    folder = folders[name]
    path = folder / "model.safetensors"
    before, text = load_file(path), (folder / "config.json").read_text()
    edited(folder, quantization_config=config)
    try:
        if change is not None:
            tensors = dict(before)
            change(tensors)
            save_file(tensors, path, metadata={"format": "pt"})
        with pytest.raises((CheckpointError, ValueError, TypeError)) as error:
            from_hf(folder)
    finally:
        save_file(before, path, metadata={"format": "pt"})
        (folder / "config.json").write_text(text)
    assert said in str(error.value)


def test_codes_of_bitsandbytes_are_made_again(tmp_path, monkeypatch):
    """From the numbers in float32, whose scales are the file's: the codes of the file, where each block uses its last level."""
    codes, _ = both("llama", tmp_path, monkeypatch)
    path = codes / "model.safetensors"
    tensors = load_file(path)
    for name, t in tensors.items():
        if f"{name}.absmax" in tensors:
            t.view(-1, 32)[:, 5] = 0x0F  # each block has a largest element
    save_file(tensors, path, metadata={"format": "pt"})
    params, cfg = from_hf(codes, dtype=torch.float32)
    low = with_weight_only(decoder(cfg), NF4(), skip=("head",))
    made = quantize_weights(params, low)["blocks"][0]["mlp"]["down"].weight
    assert made.codes.flatten().equal(tensors[DOWN].flatten())


def test_a_width_without_whole_groups_is_named(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match=r"down_proj_blocks must be of a width that 32 divides, got 40"):
        codes, _ = both("gpt_oss", tmp_path, monkeypatch, intermediate_size=40)
        from_hf(codes)
