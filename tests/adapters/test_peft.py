"""Adapters on every linear layer of a swapped decoder: the gradients equal the original's."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from funcops import nn as fnn

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
TARGETS = {
    "llama": LLAMA,
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"],
    "gpt2": ["c_attn", "c_fc", "c_proj"],
}


class ExactNorm(nn.Module):
    """transformers' RMSNorm in x's own dtype: its cast to float32 would cause an error of 1e-7 against float64."""

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


def decoder(name):
    torch.manual_seed(0)
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).double()
    if name == "phi3":
        return transformers.Phi3ForCausalLM(transformers.Phi3Config(pad_token_id=0, **SIZES)).double()
    drops = dict(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16, **drops)
    ).double()


def config(kind, name):
    targets = TARGETS[name]
    if kind == "ia3":
        feed = ["c_fc"] if name == "gpt2" else ["down_proj"]
        return peft.IA3Config(
            target_modules=targets, feedforward_modules=feed, fan_in_fan_out=name == "gpt2", init_ia3_weights=False
        )
    return peft.LoraConfig(
        target_modules=targets, r=2, init_lora_weights=False, fan_in_fan_out=name == "gpt2", use_dora=kind == "dora"
    )


def adapted(model, kind, name):
    torch.manual_seed(1)
    return peft.get_peft_model(model, config(kind, name)).double()


def outcome(model, ids):
    """Logits, and the gradient of every parameter that has one."""
    model.zero_grad()
    logits = model(input_ids=ids).logits
    nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten().roll(-1)).backward()
    return logits.detach(), {n.removeprefix("base_model.model."): p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.turns("order", "kind", "name", every=2)
@pytest.mark.parametrize("order", ["the swap first", "the adapter first"])
@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
@pytest.mark.parametrize("name", ["llama", "gpt2", pytest.param("phi3", marks=pytest.mark.slow)])
def test_adapters(name, kind, order):
    got, ids = decoder(name), torch.randint(32, (2, 9))
    want = copy.deepcopy(got)
    for module in want.modules():
        if type(module).__name__ in ("LlamaRMSNorm", "Phi3RMSNorm"):
            module.__class__ = ExactNorm
    want = adapted(want, kind, name)
    if order == "the swap first":
        fnn.from_torch(got)
        got = adapted(got, kind, name)
    else:
        got = adapted(got, kind, name)
        assert fnn.from_torch(got).replaced

    def same():
        assert_close(outcome(got, ids), outcome(want, ids), rtol=1e-9, atol=1e-9)

    def calm():
        with torch.no_grad():
            assert_close(got(input_ids=ids).logits, want(input_ids=ids).logits, rtol=1e-9, atol=1e-9)
            return want(input_ids=ids).logits

    same()
    assert len(outcome(got, ids)[1]) >= len(config(kind, name).target_modules), "the adapters have gradients"
    with_adapter = calm()
    with got.disable_adapter(), want.disable_adapter():
        assert (calm() - with_adapter).abs().max() > 1e-3
    for model in (got, want):
        model.merge_adapter()
    assert_close(calm(), with_adapter, rtol=1e-7, atol=1e-7)
    for model in (got, want):
        model.unmerge_adapter()
    same()
    got, want = got.merge_and_unload(), want.merge_and_unload()
    for model in (got, want):
        model.requires_grad_()
    same()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_every_parameter_learns_beside_an_adapter(name):
    """`modules_to_save`, and full fine-tuning beside an adapter, train every parameter."""
    models = [adapted(decoder(name), "lora", name) for _ in range(2)]
    for module in models[0].modules():
        if type(module).__name__ in ("LlamaRMSNorm", "Phi3RMSNorm"):
            module.__class__ = ExactNorm
    fnn.from_torch(models[1])
    for model in models:
        model.requires_grad_()
    ids = torch.randint(32, (2, 9))
    assert_close(outcome(models[1], ids), outcome(models[0], ids), rtol=1e-9, atol=1e-9)
