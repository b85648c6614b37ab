"""`from_torch` on models that we did not write."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from funcops import nn as fnn
from funcops.testing.tolerances import assert_close


class Tweaked(nn.Linear):
    pass


def test_torch_layers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 6), nn.LayerNorm(6), nn.Sequential(nn.Linear(6, 8), nn.GELU()), nn.GLU(), Tweaked(4, 4), nn.ReLU(inplace=True),
                          nn.LayerNorm(4, elementwise_affine=False), nn.Conv1d(3, 2, 1))  # fmt: skip
    before, ids = copy.deepcopy(model), torch.randint(9, (2, 3))
    seen = []
    model[1].register_forward_hook(lambda *_: seen.append(1))
    done = fnn.from_torch(model)
    assert [c.path for c in done.replaced] == ["", "0", "1", "2", "2.0", "2.1", "3"]
    assert {c.path: c.after for c in done.left} == {
        "4": "a subclass of Linear",
        "5": "inplace must be False, got True",
        "6": "elementwise_affine must be True: the op has a weight, got False",
        "7": "not known",
    }
    assert "2.0: Linear -> funcops.nn.Linear" in str(done) and "7: Conv1d left: not known" in str(done)
    assert list(model.state_dict()) == list(before.state_dict()) and isinstance(model[2], fnn.Sequential)
    assert_close(model(ids).detach(), before(ids).detach(), dtype=torch.float32, length=64)
    assert seen == [1]
    with pytest.raises(TypeError, match="from_torch: model must be Module"):
        fnn.from_torch(None)


def kept(model, batch, dtype):
    """loss, logits, gradients, and the bytes that the forward leaves for the backward, parameters aside."""
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    seen = {}

    def pack(t):
        if t.untyped_storage()._cdata not in parameters:
            seen[t.untyped_storage()._cdata] = t.untyped_storage().nbytes(), t
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        out = model(input_ids=batch, labels=batch)
    total = sum(size for size, _ in seen.values())
    out.loss.backward()
    return out.loss.detach(), out.logits.detach(), {n: p.grad for n, p in model.named_parameters()}, total


def hugging_face(name):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=256, hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    if name == "gpt2":
        cfg = transformers.GPT2Config(
            vocab_size=256, n_embd=64, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
        return transformers.GPT2LMHeadModel(cfg)
    kind = {"llama": "Llama", "qwen2": "Qwen2"}[name]
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("policy", [None, "minimal"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_hugging_face(name, policy, dtype):
    model = hugging_face(name).to(dtype)
    other = copy.deepcopy(model)
    done = fnn.from_torch(other, policy=policy)
    names = {c.before for c in done.replaced}
    assert {"Linear", "ForCausalLMLoss", {"llama": "LlamaMLP", "qwen2": "Qwen2RMSNorm", "gpt2": "GPT2MLP"}[name]} <= names
    batch = torch.randint(256, (8, 64))  # large enough that norms are computed again
    model.zero_grad()
    want, got = kept(copy.deepcopy(model), batch, dtype), kept(other, batch, dtype)
    print(f"{name} {dtype} {policy}: {got[3] / want[3]:.3f} of {want[3]:,} bytes")
    assert_close(got[:2], want[:2], dtype=dtype, length=4096)
    exact = kept(copy.deepcopy(model).float(), batch, torch.float32)[2]
    for path, gradient in exact.items():
        errors = [(found[2][path].float() - gradient).norm() / (gradient.norm() + 1e-6) for found in (got, want)]
        assert errors[0] < 1.3 * errors[1] + 1e-4, (path, errors, "no further from float32 than torch is")
    assert got[3] <= 0.6 * want[3], (got[3], want[3])
