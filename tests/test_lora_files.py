"""Adapters in files: PEFT's, both ways, and what is spoiled."""

import json

import pytest
import torch
from lora_model import NAMES, base_config, drawn, ours, plain, same_bits, theirs

from funcops import chain, random
from funcops.errors import CheckpointError
from funcops.lora import adapter, load_adapter, lora_init, merge, save_adapter, with_lora
from funcops.trees import put, tree_map_tensors

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.*")


@pytest.mark.parametrize("stacked", [False, True], ids=["layers", "stacked"])
def test_files_are_those_of_peft_both_ways(stacked, tmp_path):
    _, cfg, params = ours(stacked=stacked, dtype=torch.float32)
    save_adapter(tmp_path / "ours", params, cfg, names=NAMES)
    model = theirs(cfg, params).float()
    model.save_pretrained(tmp_path / "theirs")
    sizes = [(tmp_path / who / "adapter_model.safetensors").stat().st_size for who in ("ours", "theirs")]
    assert abs(sizes[0] - sizes[1]) < 200
    for who in ("ours", "theirs"):
        fresh = lora_init(merge(params, cfg), cfg, key=random.key(9))
        assert same_bits(adapter(load_adapter(tmp_path / who, fresh, cfg, names=NAMES), cfg), adapter(params, cfg)), who
    read = peft.PeftModel.from_pretrained(plain().float(), tmp_path / "ours")
    want = {name: t for name, t in model.state_dict().items() if "lora_" in name}
    got = {name: t for name, t in read.state_dict().items() if "lora_" in name}
    assert got.keys() == want.keys() and same_bits(got, want)
    assert next(m for m in read.modules() if hasattr(m, "scaling")).scaling == {"default": 2.0}


def test_two_ranks_in_one_file(tmp_path):
    base = base_config()
    cfg = with_lora(with_lora(base, 2, ("*.q.proj",), alpha=4), 3, ("*.out", "*.down"), alpha=3)
    params = drawn(lora_init(chain.init(base, key=random.key(0)), cfg, key=random.key(1)), cfg)
    save_adapter(tmp_path, params, cfg, names=NAMES, base="here")
    said = json.loads((tmp_path / "adapter_config.json").read_text())
    assert said["r"] == 3 and said["rank_pattern"] == {"blocks.0.attn.q": 2, "blocks.1.attn.q": 2}
    assert same_bits(load_adapter(tmp_path, params, cfg, names=NAMES), params)
    read = peft.PeftModel.from_pretrained(plain().float(), tmp_path)
    layers = {n: (m.r["default"], m.scaling["default"]) for n, m in read.named_modules() if hasattr(m, "scaling")}
    assert {n.rpartition(".")[2]: found for n, found in layers.items()} == {"q": (2, 2.0), "out": (3, 1.0), "down": (3, 1.0)}


def edited(**changes):
    def edit(folder):
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def tensors_edited(change):
    def edit(folder):
        from safetensors.torch import load_file, save_file

        path = folder / "adapter_model.safetensors"
        found = load_file(path)
        change(found)
        save_file(found, path)

    return edit


def cut(name):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-100])


Q = "base_model.model.blocks.1.attn.q.lora_A.weight"
SPOILED = {
    "missing": (tensors_edited(lambda t: t.pop(Q)), CheckpointError, f"missing: {Q}"),
    "extra": (tensors_edited(lambda t: t.update(more=torch.ones(1))), CheckpointError, "extra: more"),
    "mis-shaped": (tensors_edited(lambda t: t.update({Q: torch.ones(2, 16)})), CheckpointError, r"mis-shaped: .* got \[2, 16\]"),
    "mis-typed": (tensors_edited(lambda t: t.update({Q: t[Q].half()})), CheckpointError, "mis-typed: .* got float16"),
    "cut off": (cut("adapter_model.safetensors"), CheckpointError, "must be a safetensors file"),
    "config cut off": (cut("adapter_config.json"), CheckpointError, "adapter_config.json must be JSON"),
    "no config": (lambda folder: (folder / "adapter_config.json").unlink(), FileNotFoundError, "adapter_config.json"),
    "no tensors": (lambda folder: (folder / "adapter_model.safetensors").unlink(), FileNotFoundError, "adapter_model"),
    "rank": (edited(r=4), CheckpointError, r"r of blocks\.0\.attn\.q must be 3, as in cfg, got 4"),
    "alpha": (edited(lora_alpha=7), CheckpointError, "lora_alpha of .* must be 6, as in cfg, got 7"),
    "dora": (edited(use_dora=True), CheckpointError, "use_dora must be False, got True"),
    "rslora": (edited(use_rslora=True), CheckpointError, "use_rslora must be False, got True"),
    "bias": (edited(bias="all"), CheckpointError, "bias must be 'none', got 'all'"),
    "kind": (edited(peft_type="IA3"), CheckpointError, "peft_type must be 'LORA', got 'IA3'"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    _, cfg, params = ours(dtype=torch.float32)
    folder = tmp_path_factory.mktemp("saved")
    save_adapter(folder, params, cfg, names=NAMES)
    return folder, cfg, params


@pytest.mark.parametrize("name", SPOILED)
def test_nothing_of_a_spoiled_folder_is_loaded(name, saved, tmp_path):
    spoil, error, message = SPOILED[name]
    folder, cfg, params = saved
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert load_adapter(tmp_path, params, cfg, names=NAMES) is not None
    spoil(tmp_path)
    before = tree_map_tensors(torch.clone, params)
    with pytest.raises(error, match=message):
        load_adapter(tmp_path, params, cfg, names=NAMES)
    assert same_bits(params, before)


def test_a_write_that_fails_leaves_the_folder_as_it_was(saved, tmp_path):
    _, cfg, params = saved
    save_adapter(tmp_path, params, cfg, names=NAMES)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    bad = put(params, "blocks.1.attn.out.both.lora.b", torch.ones(3, 3))
    with pytest.raises(ValueError, match=r"adapter\['blocks.1.attn.out'\].b must be \[16, 3\], got \[3, 3\]"):
        save_adapter(tmp_path, bad, cfg, names=NAMES)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_two_modules_of_one_name_are_not_written(tmp_path):
    _, cfg, params = ours(dtype=torch.float32)
    with pytest.raises(ValueError, match="save_adapter: names must be a name for each adapter, got model for blocks.0"):
        save_adapter(tmp_path, params, cfg, names={"blocks.0.attn.qkv.q.proj": "model", "blocks.0.attn.qkv.v.proj": "model",
                                                   "blocks.*": "b*"})  # fmt: skip
    assert not list(tmp_path.iterdir())
