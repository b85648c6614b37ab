"""Hugging Face models that `from_torch` knows, compared with the originals."""

import copy
import importlib
import pickle

import pytest
import torch
from torch import nn

from funcops import nn as fnn
from funcops.adapters.nn import models
from funcops.testing.tolerances import assert_close
from tests.adapters.tiny_models import MODELS, batch_of, kept, tiny

pytestmark = pytest.mark.filterwarnings("ignore")
pytest.importorskip("transformers")
ONE = dict(num_hidden_layers=1, num_layers=1, n_layer=1)


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


def test_every_row_has_a_model():
    assert {row for row, *_ in MODELS.values()} == {row for row, _ in models.ROWS}
    for row, classes in models.ROWS:
        module = importlib.import_module(f"transformers.models.{row}.modeling_{row}")
        assert all(models.swapped(getattr(module, name)) for name in classes), row


KINDS = ("Gemma2", "Phi3", "Olmo2", "DeepSeek-V3", "GPT-2", "BERT", "ViT", "T5", "T5 1.1")  # a model of each norm and MLP


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in KINDS else pytest.mark.slow) for name in MODELS])
def test_loss_and_gradients(name):
    """In float64, as far as norms that compute in float32 let them be equal; weights are drawn, not ones and zeros."""
    sizes = MODELS[name][3]
    experts = any("experts" in key for key in sizes)
    model = tiny(name, **({} if experts else {key: n for key, n in ONE.items() if key in sizes})).double().eval()
    if experts:
        model.set_experts_implementation("eager")  # grouped products have no float64
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    other, batch = copy.deepcopy(model), batch_of(model, 2, 8)
    done = fnn.from_torch(other)
    assert list(other.state_dict()) == list(model.state_dict())
    classes = dict(models.ROWS)[MODELS[name][0]]
    assert {c.before for c in done.replaced} >= classes.keys() - {"T5DenseActDense", "T5DenseGatedActDense"}
    found = []
    for one in (model, other):
        loss = one(**batch).loss
        loss.backward()
        found.append((loss.detach(), gradients(one)))
    (want_loss, want), (got_loss, got) = found
    assert abs(got_loss - want_loss) <= 1e-6 * abs(want_loss)
    for path, gradient in want.items():
        assert (gradient is None) == (got[path] is None), path
        if gradient is not None:
            assert (got[path] - gradient).norm() <= 1e-6 * gradient.norm() + 1e-12, path


NET_OF_ATTENTION = ("T5", "T5 1.1")  # theirs has a bias and dropout: no SDPA but by whole matrices of scores
# Their MLPs are several modules: a program may write between them, so what lies there is kept. Norms keep float32 statistics.
IN_MODULES = {"BERT": 1.01, "ViT": 0.77}


@pytest.mark.slow
def test_the_bytes_that_models_keep():
    """In bfloat16 at most 0.65 of torch's bytes, without experts, which are not swapped, and attention that keeps all scores; more
    only where an MLP is several modules."""
    lines, over = [f"{'':12} {'bytes before':>14} {'after':>12} {'part':>6} {'net':>6}"], []
    for name in MODELS:
        model = tiny(name).to(torch.bfloat16)
        other, batch = copy.deepcopy(model), batch_of(model)
        fnn.from_torch(other)
        (_, before, attention, experts), (_, after, attention_now, experts_now) = kept(model, batch), kept(other, batch)
        assert (attention, experts) == (attention_now, experts_now)
        apart = experts + attention * (name in NET_OF_ATTENTION)
        net = (after - apart) / (before - apart)
        lines.append(f"{name:12} {before:14,} {after:12,} {after / before:6.2f} {net:6.2f}")
        over += [name] if net > IN_MODULES.get(name, 0.65) else []
    print("\n".join(lines))
    assert not over, over


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("policy", [None, "minimal"])
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "GPT-2"])
def test_policies(name, policy, dtype):
    model = tiny(name, **(dict(resid_pdrop=0, embd_pdrop=0) if name == "GPT-2" else {})).to(dtype)
    other = copy.deepcopy(model)
    names = {c.before for c in fnn.from_torch(other, policy=policy).replaced}
    assert {"Linear", "ForCausalLMLoss", {"Llama": "LlamaMLP", "Qwen2": "Qwen2RMSNorm", "GPT-2": "GPT2MLP"}[name]} <= names
    batch = batch_of(model)  # large enough that norms are computed again
    found = []
    for one in (copy.deepcopy(model), other, copy.deepcopy(model).float()):
        out, size, *_ = kept(one, batch)
        out.loss.backward()
        found.append(((out.loss.detach(), out.logits.detach()), gradients(one), size))
    want, got, exact = found
    print(f"{name} {dtype} {policy}: {got[2] / want[2]:.3f} of {want[2]:,} bytes")
    assert_close(got[0], want[0], dtype=dtype, length=4096)
    for path, gradient in exact[1].items():
        errors = [(found[1][path].float() - gradient).norm() / (gradient.norm() + 1e-6) for found in (got, want)]
        assert errors[0] < 1.3 * errors[1] + 1e-4, (path, errors, "no further from float32 than torch is")
    most = 0.67 if policy is None and dtype is torch.float32 else 0.6  # norms before attention are kept: their readers are modules
    assert got[2] <= most * want[2], (got[2], want[2])


def norms():
    for row, classes in models.ROWS:
        for name in classes:
            if name.endswith("Norm"):
                yield getattr(importlib.import_module(f"transformers.models.{row}.modeling_{row}"), name)


def test_norms_of_two_dtypes():
    """x and weight of any two dtypes: y has the dtype and values of the original norm."""
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    for cls in norms():
        for dtype in dtypes:
            for of_weight in dtypes:
                norm = cls(16, eps=0.01).to(of_weight)
                nn.init.normal_(norm.weight)
                x = torch.randn(3, 16, dtype=dtype)
                want = norm(x)
                assert fnn.from_torch(norm).replaced
                got = norm(x)
                assert got.dtype is want.dtype, (cls, dtype, of_weight)
                rounds = min((dtype, of_weight), key=lambda d: -torch.finfo(d).eps)
                torch.testing.assert_close(
                    got, want, rtol=4 * torch.finfo(rounds).eps + 1e-6, atol=1e-3 if rounds.itemsize == 2 else 1e-6
                )


ACTIVATIONS = [path.rpartition(".")[2] for path in models.MODELS if path.startswith("transformers.activations.")]


def test_activations():
    from transformers import activations

    x = torch.linspace(-3, 3, 31, dtype=torch.float64)
    for name in ACTIVATIONS:
        cls = getattr(activations, name)
        made = cls()
        want = made(x)
        assert fnn.from_torch(made).replaced and isinstance(made, cls), name
        torch.testing.assert_close(made(x), want, rtol=1e-9, atol=1e-9)
    for python in (activations.GELUActivation(use_gelu_python=True), activations.GELUTanh(use_gelu_tanh_python=True)):
        assert [c.after for c in fnn.from_torch(python).left] == ["act must be the function of its class, got another function"]


@pytest.mark.turns("name")
@pytest.mark.parametrize("name", ["Gemma2", "T5 1.1", "ViT"])
def test_copies_and_pickles(name):
    model = tiny(name).eval()
    fnn.from_torch(model)
    batch = batch_of(model, 2, 8)
    want = model(**batch).loss
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(**batch).loss, want)
        assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
        fnn.to_torch(other)
        assert not any(hasattr(m, "op") for m in other.modules())


def test_t5_keeps_its_last_layer_in_another_dtype():
    """`_keep_in_fp32_modules` says so: x is cast to the layer's dtype."""
    for name in ("T5", "T5 1.1"):
        model = tiny(name, num_layers=1).to(torch.bfloat16).eval()
        for module in model.modules():
            if hasattr(module, "wo"):
                module.wo.float()
        other, batch = copy.deepcopy(model), batch_of(model, 2, 8)
        fnn.from_torch(other)
        assert_close(other(**batch).logits.detach(), model(**batch).logits.detach(), dtype=torch.bfloat16, length=64)


@pytest.mark.parametrize("name", ["T5", "T5 1.1", "GPT-2"])
def test_dropout_of_an_mlp(name):
    """The share of zeros, and the same zeros in the backward: an MLP with identity weights shows the mask."""
    model = tiny(name)
    fnn.from_torch(model)
    mlp = next(m for m in model.modules() if type(m).__name__ in ("T5DenseActDense", "T5DenseGatedActDense", "GPT2MLP"))
    mlp.dropout.p = 0.4
    x = torch.rand(512, 64, requires_grad=True)
    with torch.no_grad():
        for weight in (layer.weight for layer in mlp.children() if hasattr(layer, "weight")):
            weight.copy_(torch.eye(*weight.shape))
    y = mlp(x)
    zeros = y == 0
    assert abs(zeros.float().mean() - 0.4) < 0.02
    y.sum().backward()
    assert torch.equal(x.grad == 0, zeros)
    assert not torch.equal(mlp(x) == 0, zeros), "another mask each time"
    assert not (mlp.eval()(x) == 0).any()


@pytest.mark.slow
def test_compiled_before_any_call():
    """A swapped module looks up its parts before the first call: a compiler could not trace that."""
    model = tiny("T5 1.1", num_layers=1)
    fnn.from_torch(model)
    block, x = model.encoder.block[0].layer[1], torch.randn(2, 8, 64)
    with torch.no_grad():
        y = torch.compile(block, backend="eager", fullgraph=True)(x)  # with its dropouts
    assert y.shape == x.shape and not torch.equal(y, x)
