"""`from_torch(model, example=batch)` of Hugging Face's models, bare and adapted: the bits of the untouched model, fewer bytes."""

import copy

import pytest
import tiny_models
import torch
from more_models import MORE, more
from products import saved_by

from funcops import nn as fnn
from funcops.engine.trees import tensors

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error:.*run as before from_torch:RuntimeWarning"),
]
NAMES = ("Llama", "Gemma2", "GPT-2", "ViT", "T5", "BERT", "Qwen3-MoE", "ResNet", "RegNet", "Mamba", "Whisper", "CLIP vision")


def model_of(name):
    if name in MORE:
        return more(name)
    model = tiny_models.tiny(name).double()
    model.config._experts_implementation = "batched_mm"
    batch = tiny_models.batch_of(model, rows=2, length=16)
    return model, {n: t.double() if t.is_floating_point() else t for n, t in batch.items()}


def step(model, batch):
    """The output, gradients and buffers of a step, and the bytes that it keeps."""
    model.zero_grad()
    torch.manual_seed(3)
    out, kept = saved_by(lambda: model(**batch), [*model.parameters(), *model.buffers(), *tensors(batch)])
    loss = out.loss if getattr(out, "loss", None) is not None else out[0].square().sum()
    loss.backward()
    return out, {n: p.grad for n, p in model.named_parameters()}, {n: b.clone() for n, b in model.named_buffers()}, kept


def same(a, b):
    return a is b is None or torch.equal(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_steps_have_the_same_bits_and_keep_fewer_bytes(name):
    plain, batch = model_of(name)
    ours = copy.deepcopy(plain)
    assert fnn.from_torch(ours, example=batch).replaced
    for seed in range(2):
        want, got = step(plain, batch), step(ours, batch)
        assert type(got[0]) is type(want[0]) and list(got[0]) == list(want[0])
        assert all(torch.equal(a, want[0][n]) for n, a in got[0].items() if isinstance(a, torch.Tensor))
        assert all(same(g, want[1][n]) for n, g in got[1].items()) and all(same(b, want[2][n]) for n, b in got[2].items())
        assert got[3] <= 0.8 * want[3]
        if seed == 0:
            for model in (plain, ours):
                with torch.no_grad():
                    next(model.parameters()).add_(0.01)
    assert ours.forward.traces.tries == 1
    if want[0].get("past_key_values") is not None:
        cache, other = got[0].past_key_values, want[0].past_key_values
        assert type(cache) is type(other) and cache.get_seq_length() == other.get_seq_length() == 16
    plain.eval()
    ours.eval()
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(tensors(ours(**batch)[0]), tensors(plain(**batch)[0]), strict=True))


def test_a_model_generates_as_before():
    plain, batch = model_of("Llama")
    ours = copy.deepcopy(plain)
    fnn.from_torch(ours, example=batch)
    ids = batch["input_ids"][:, :5]
    want, got = (model.eval().generate(ids, max_new_tokens=4, do_sample=False) for model in (plain, ours))
    assert torch.equal(want, got) and ours.forward.traces.tries == 1


ORDERS = {
    "the graph first": lambda model, adapt, batch: (fnn.from_torch(model, example=batch), adapt(model))[1],
    "the adapter first": lambda model, adapt, batch: (adapted := adapt(model), fnn.from_torch(adapted, example=batch))[0],
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_adapters(name, kind, order):
    pytest.importorskip("peft")
    from test_peft import adapted, decoder, outcome

    ids = torch.randint(32, (2, 9))
    want = adapted(decoder(name), kind, name)
    got = ORDERS[order](decoder(name), lambda model: adapted(model, kind, name), {"input_ids": ids})

    def compare():
        (a, grads), (b, ours) = outcome(want, ids), outcome(got, ids)
        assert torch.equal(a, b) and grads.keys() == ours.keys()
        assert all(torch.equal(g, ours[n]) for n, g in grads.items())
        return b

    before = compare()
    whole = got if order == "the adapter first" else got.base_model.model
    assert whole.forward.traces.tries <= 2
    with want.disable_adapter(), got.disable_adapter():
        assert not torch.equal(want(input_ids=ids).logits, before)
        assert torch.equal(want(input_ids=ids).logits, got(input_ids=ids).logits)
    compare()
