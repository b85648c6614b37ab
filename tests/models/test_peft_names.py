"""Adapters of decoders, written to PEFT's model of the same checkpoint and read from it."""

import dataclasses
import re

import pytest
import torch
from lora_model import drawn, same_bits
from tiny_hf import tiny, transformers
from torch.testing import assert_close

from funcops import Needs, RopeConfig, WithExtras, chain, random
from funcops.engine.errors import CheckpointError
from funcops.engine.trees import paths
from funcops.lora import RowsOf, adapter, load_adapter, lora_init, merge, save_adapter, with_lora
from funcops.models import DecoderConfig, decoder, decoder_x, from_hf, generate, peft_names, to_hf

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.*")
ATTENTION, UP = ("*.attn.qkv.*.proj", "*.attn.out", "*.mlp.down"), ("*.mlp.up",)
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
IDS = torch.arange(10).view(2, 5)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama") / "model"
    tiny("llama").save_pretrained(folder)
    return folder


def theirs(folder, adapters):
    return peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(folder).eval(), adapters).eval()


def logits(params, cfg, model):
    return chain.fwd(params, decoder_x(cfg, IDS, params["embed"].weight.dtype), model, needs=Needs.NONE)[0]


def test_adapters_of_every_linear_go_to_peft_and_come_back(llama, tmp_path):
    pretrained, cfg = from_hf(llama)
    model = with_lora(decoder(cfg), 3, (*ATTENTION, *UP), alpha=6.0)
    params = drawn(lora_init(pretrained, model, key=random.key(0)), model)
    globs = {
        "blocks.*.attn.qkv.*.proj": "model.layers.*.self_attn.*_proj",
        "blocks.*.attn.out": "model.layers.*.self_attn.o_proj",
        "blocks.*.mlp.up": ("model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj"),
        "blocks.*.mlp.down": "model.layers.*.mlp.down_proj",
    }
    for i, names in enumerate((peft_names(cfg, model), globs)):
        save_adapter(tmp_path / str(i), params, model, names=names)
        with torch.no_grad():
            assert_close(theirs(llama, tmp_path / str(i))(IDS).logits, logits(params, cfg, model), rtol=1e-4, atol=1e-5)
        again = load_adapter(tmp_path / str(i), lora_init(pretrained, model, key=random.key(1)), model, names=names)
        assert same_bits(adapter(again, model), adapter(params, model))


def test_adapters_that_peft_made_of_gate_and_up_are_one_of_twice_the_rank(llama, tmp_path):
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_pretrained(llama)
    made = peft.get_peft_model(base, peft.LoraConfig(r=2, lora_alpha=6, target_modules=MODULES, init_lora_weights=False)).eval()
    made.save_pretrained(tmp_path)
    pretrained, cfg = from_hf(llama)
    model = with_lora(with_lora(decoder(cfg), 2, ATTENTION, alpha=6.0), 4, UP, alpha=12.0)
    params = load_adapter(tmp_path, lora_init(pretrained, model, key=random.key(0)), model, names=peft_names(cfg, model))
    with torch.no_grad():
        assert_close(made(IDS).logits, logits(params, cfg, model), rtol=1e-4, atol=1e-5)
    one = with_lora(decoder(cfg), 2, (*ATTENTION, *UP), alpha=6.0)
    said = r"lora_A of model\.layers\.0\.mlp\.up_proj must be equal to .*gate_proj's .*rank 4 with alpha 12 at blocks\.0\.mlp\.up"
    with pytest.raises(CheckpointError, match=said):
        load_adapter(tmp_path, lora_init(pretrained, one, key=random.key(0)), one, names=peft_names(cfg, one))
    other = with_lora(with_lora(decoder(cfg), 2, ATTENTION, alpha=6.0), 3, UP, alpha=9.0)
    with pytest.raises(CheckpointError, match="r of model.layers.0.mlp.gate_proj must be 3, as in cfg, for each if they .* got 2"):
        load_adapter(tmp_path, lora_init(pretrained, other, key=random.key(0)), other, names=peft_names(cfg, other))


def test_a_file_of_float32_beside_a_base_of_16_bits(llama, tmp_path):
    pretrained, cfg = from_hf(llama, dtype=torch.bfloat16)
    model = with_lora(decoder(cfg), 2, UP)
    masters = drawn(lora_init(pretrained, model, key=random.key(0), dtype=torch.float32), model)
    save_adapter(tmp_path, masters, model)
    params = lora_init(pretrained, model, key=random.key(1))
    with pytest.raises(CheckpointError, match="dtype must be given, as .* has torch.float32"):
        load_adapter(tmp_path, params, model)
    assert same_bits(adapter(load_adapter(tmp_path, params, model, dtype=torch.float32), model), adapter(masters, model))
    got = load_adapter(tmp_path, params, model, dtype=torch.bfloat16)
    assert {t.dtype for t in paths(adapter(got, model)).values()} == {torch.bfloat16}
    want = {path: t.bfloat16() for path, t in paths(adapter(masters, model)).items()}
    assert all(torch.equal(t, want[path]) for path, t in paths(adapter(got, model)).items())
    assert logits(got, cfg, model).isfinite().all()


@pytest.mark.parametrize(
    ("family", "of"), [("phi3", "qkv.q.proj"), ("gpt2", "qkv.v.proj"), ("deepseek_v3", "qkv.q.up"), ("llama", "out")]
)
def test_a_linear_that_is_a_part_of_a_module_is_named_by_its_rows(family, of, tmp_path):
    tiny(family).save_pretrained(tmp_path / "model")
    _, cfg = from_hf(tmp_path / "model")
    names = peft_names(cfg, with_lora(decoder(cfg), 2, (f"*.attn.{of}",)))
    every = peft_names(cfg)
    assert names and all(every[path] == name for path, name in names.items())
    assert {type(name) for name in names.values()} == ({str} if family == "llama" else {RowsOf})


SIZES = dict(vocab=31, dim=8, layers=2, heads=2, kv_heads=1, head_size=4, hidden=6, context=32)


def test_an_adapter_at_a_linear_that_the_checkpoint_does_not_have_is_named():
    cfg = DecoderConfig(**SIZES, rope=RopeConfig(4), family="llama")
    gated = dataclasses.replace(cfg, attention_gate=True)
    said = "peft_names: model must be decoder(cfg) with adapters, got an adapter at blocks.0.attn.gated.gate.proj, whose weight a "
    with pytest.raises(ValueError, match=f"^{re.escape(said)}checkpoint does not have$"):
        peft_names(cfg, with_lora(decoder(gated), 2, ("*.gate.proj",)))
    with pytest.raises(ValueError, match="^peft_names: model must be one that with_lora made, got one without adapters$"):
        peft_names(cfg, decoder(cfg))


@pytest.mark.parametrize(
    ("model", "got"), [(3, "3"), ("llama", "'llama'"), (DecoderConfig(**SIZES, rope=RopeConfig(4)), "DecoderConfig"), ({}, "dict")]
)
def test_a_model_that_is_no_chain_is_refused(model, got):
    cfg = DecoderConfig(**SIZES, rope=RopeConfig(4), family="llama")
    with pytest.raises(TypeError, match=f"^peft_names: model must be ChainConfig or NoneType, got {got}$"):
        peft_names(cfg, model)


@pytest.mark.parametrize(
    ("changes", "path"), [({"attention_gate": True}, "blocks.1.attn.gated.gate.proj"), ({"places": True, "rope": None}, "places")]
)
def test_params_that_the_family_has_no_names_for_are_named(changes, path):
    cfg = dataclasses.replace(DecoderConfig(**SIZES, rope=RopeConfig(4), family="llama"), **changes)
    said = rf"^peft_names: params of family 'llama' must be all covered by its rules, got (.*, )?{path}\.weight(, .*)?$"
    with pytest.raises(ValueError, match=said):
        peft_names(cfg)


def test_params_with_a_loss_and_without_one(llama, tmp_path):
    """Functions that take a decoder's params also take them with "loss": None; making params for a config with a loss needs it."""
    pretrained, cfg = from_hf(llama)
    model, lossy = (with_lora(decoder(cfg, loss=loss), 2, UP) for loss in (False, True))
    with pytest.raises(ValueError, match=r"lora_init: params must be the base config's .*, got missing \['loss'\], extra \[\]"):
        lora_init(pretrained, lossy, key=random.key(0))
    params = drawn(lora_init({**pretrained, "loss": None}, lossy, key=random.key(0)), lossy)
    loss, _ = chain.fwd(params, decoder_x(cfg, IDS, torch.float32, labels=IDS), lossy, needs=Needs.NONE)
    assert loss.isfinite()
    want = torch.stack(list(generate({k: v for k, v in params.items() if k != "loss"}, cfg, IDS, 3, model=model)))
    assert torch.equal(torch.stack(list(generate(params, cfg, IDS, 3, model=model))), want)
    assert torch.equal(torch.stack(list(generate(merge(params, lossy), cfg, IDS, 3))), want)
    to_hf(merge(params, lossy), cfg, tmp_path / "merged")
    with pytest.raises(CheckpointError, match=r"to_hf: params must be .*without adapters \(lora.merge\), got adapters"):
        to_hf(params, cfg, tmp_path / "not")
    with pytest.raises(TypeError, match=r"merge them, or give model=.*missing \[.*\] and \d+ more, extra") as caught:
        generate(params, cfg, IDS, 3)
    assert len(str(caught.value)) < 400
    for other in (lossy, with_lora(decoder(cfg), 2, UP, dropout=0.1)):
        with pytest.raises(ValueError, match=r"generate: model must be made of decoder\(cfg\), whose extras are .*, got \["):
            generate(params, cfg, IDS, 3, model=other)


def test_dropout_beside_a_decoder(llama):
    """Trained with the config with dropout, whose key is an extra, and used with the config without."""
    pretrained, cfg = from_hf(llama)
    model = with_lora(decoder(cfg), 2, UP, dropout=0.5)
    params = drawn(lora_init(pretrained, model, key=random.key(0)), model)
    x = decoder_x(cfg, IDS, torch.float32, key=random.key(1))
    by_hand = WithExtras(x.main, {**decoder_x(cfg, IDS, torch.float32).extras, "key": random.key(1)})
    got, want = (chain.fwd(params, one, model, needs=Needs.NONE)[0] for one in (x, by_hand))
    assert torch.equal(got, want) and not torch.equal(got, logits(params, cfg, with_lora(decoder(cfg), 2, UP)))
