"""Checkpoints in codes: what Hugging Face dequantises them to, and the published formulas; what does not fit raises by name."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_hf import FAMILIES, edited, saved
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from funcops import CheckpointError, trees
from funcops.models import from_hf, open_hf

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
WIDE = dict(hidden_size=256, intermediate_size=384)
SIZES = {"gpt_oss": dict(hidden_size=64, intermediate_size=32), "qwen3": WIDE, "deepseek_v3": WIDE | dict(kv_lora_rank=150)}


def published(codes, scale):
    """weight_dequant of DeepSeek-V3's inference/kernel.py: blocks of 128 x 128, those at the edges cut."""
    return codes.float() * scale.repeat_interleave(128, 0)[: len(codes)].repeat_interleave(128, 1)[:, : codes.shape[1]]


def in_fp8(tensors):
    """Every second projection in codes, and one whose last block is cut; the tensors, and their numbers by the published formula,
    which are Hugging Face's, but for that one, which it refuses."""
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


def both(name, path, monkeypatch, **sizes):
    """A folder of codes, and a folder of the same numbers decoded."""
    kind, options = FAMILIES[name]
    monkeypatch.setitem(FAMILIES, name, (kind, options | SIZES[name] | sizes))
    saved(name, path / "codes")
    saved(name, path / "numbers")
    file = "model.safetensors"
    made = (in_mxfp4 if name == "gpt_oss" else in_fp8)(load_file(path / "codes" / file))
    for folder, tensors in zip(("codes", "numbers"), made, strict=True):
        save_file({key: t.contiguous() for key, t in tensors.items()}, path / folder / file, metadata={"format": "pt"})
    edited(path / "codes", quantization_config=MXFP4 if name == "gpt_oss" else FP8 | {"scale_fmt": "ue8m0"})
    return path / "codes", path / "numbers"


@pytest.mark.parametrize("name", SIZES)
def test_codes_are_read_as_their_numbers(name, tmp_path, monkeypatch):
    """Bit for bit, whole and by rows, whatever their order and wherever blocks end."""
    codes, numbers = both(name, tmp_path, monkeypatch)
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


def test_a_nan_scale_gives_nan(tmp_path, monkeypatch):
    """255 is NaN (OCP MX); the least and the largest scale are numbers."""
    codes, _ = both("gpt_oss", tmp_path, monkeypatch)
    path, name = codes / "model.safetensors", "model.layers.0.mlp.experts.down_proj"
    tensors = load_file(path)
    tensors[f"{name}_scales"][0, :3, 0] = torch.tensor([255, 0, 254], dtype=torch.uint8)
    tensors[f"{name}_blocks"][0, :3, 0] = 0x12  # 1 and 0.5
    save_file(tensors, path, metadata={"format": "pt"})
    found = from_hf(codes)[0]["blocks"][0]["layer0"]["mlp"]["experts"].down.weight[0, :3, :2].double()
    assert found[0].isnan().all() and found[1:].tolist() == [[2.0**-127, 2.0**-128], [2.0**127, 2.0**126]]


BAD = {
    "quantization_config.quant_method must be one of fp8, mxfp4, got 'awq'": ("qwen3", dict(FP8, quant_method="awq"), None),
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
    "mis-typed: model.layers.0.mlp.down_proj.weight_scale_inv float32 or bfloat16, got I32": (
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
}
DOWN, EXPERTS = "model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.experts.down_proj"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        return {name: both(name, tmp_path_factory.mktemp(name), patch)[0] for name in ("qwen3", "gpt_oss")}


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


def test_a_width_without_whole_groups_is_named(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match=r"down_proj_blocks must be of a width that 32 divides, got 40"):
        codes, _ = both("gpt_oss", tmp_path, monkeypatch, intermediate_size=40)
        from_hf(codes)
