"""`from_torch` on models that we did not write."""

import copy
import functools
import importlib

import pytest
import torch
from torch import nn

import funcops
from funcops import Policy, Recompute
from funcops import nn as fnn
from funcops.adapters.nn import functional
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
    lines = done.details().splitlines()
    assert "2.0: Linear -> funcops.nn.Linear" in lines and "7: Conv1d left: not known" in lines
    assert list(model.state_dict()) == list(before.state_dict()) and isinstance(model[2], fnn.Sequential)
    assert_close(model(ids).detach(), before(ids).detach(), dtype=torch.float32, length=64)
    assert seen == [1]
    with pytest.raises(TypeError, match="from_torch: model must be Module"):
        fnn.from_torch(None)


def tiny(name="llama"):
    """A decoder with two MLPs."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    if name == "gpt2":
        drops = dict(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16, **drops)
        )
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=2, **sizes))


def state_of(model):
    """What `from_torch` may change of every module."""
    return [(type(m), dict(vars(m))) for m in model.modules()]


def assert_untouched(model, before):
    for (cls, attributes), (cls_before, attributes_before) in zip(state_of(model), before, strict=True):
        assert cls is cls_before and attributes.keys() == attributes_before.keys()
        assert all(value is attributes_before[name] for name, value in attributes.items())


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, MemoryError])
def test_an_exception_leaves_the_model_as_it_was(error, monkeypatch):
    model = nn.ModuleList([tiny(), nn.Sequential(nn.GLU(), nn.Linear(4, 4), nn.LayerNorm(4))])
    before, module = state_of(model), importlib.import_module("funcops.adapters.nn.from_torch")
    steps = (
        [("prepare", i) for i in (0, 1, 7, 13, 20)]
        + [("swapped", i) for i in (0, 3)]
        + [("_left", 1), ("Change", 9), ("Change", -1)]
    )
    real_change = fnn.from_torch(copy.deepcopy(model)).replaced
    for name, at in steps:
        count, real = [], getattr(module, name)

        def failing(*given, real=real, at=at % len(real_change), count=count):
            count.append(1)
            if len(count) > at:
                raise error
            return real(*given)

        with monkeypatch.context() as patch, pytest.raises(error):
            patch.setattr(module, name, failing)
            fnn.from_torch(model, policy="minimal")
        assert len(count) > at % len(real_change)
        assert_untouched(model, before)


@pytest.mark.parametrize(
    "policy, error, text",
    [
        ("minimall", ValueError, "policy must be a Policy or one of"),
        (7, TypeError, "policy must be Policy"),
        (Policy({"nowhere.*": Recompute()}), ValueError, "rules must be globs over"),
    ],
    ids=str,
)
def test_a_policy_that_is_wrong(policy, error, text):
    for model in (tiny(), tiny("gpt2"), nn.Sequential(nn.Linear(4, 4)), nn.Tanh()):
        before = state_of(model)
        with pytest.raises(ValueError if text.startswith("rules") else error, match="from_torch: policy must be|" + text):
            fnn.from_torch(model, policy=policy)
        assert_untouched(model, before)


@pytest.mark.parametrize("policy", sorted(funcops.POLICIES))
def test_a_policy_that_finds_no_mlp(policy):
    model = nn.Sequential(nn.RMSNorm(4), nn.Linear(4, 4), nn.SiLU())
    before = state_of(model)
    with pytest.raises(ValueError, match="from_torch: policy must be None for a model without an MLP that is known"):
        fnn.from_torch(model, policy=policy)
    assert_untouched(model, before)
    fnn.from_torch(tiny(), policy=policy)


def test_classes_are_known_by_where_they_are_defined(monkeypatch):
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    model = tiny()

    class LlamaRMSNorm(nn.Module):  # the user's own, with another formula
        def __init__(self):
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.ones(16)), 1e-6

        def forward(self, x):
            return x * (1 + self.weight)

    class LlamaMLP(modeling.LlamaMLP):
        def forward(self, x):
            return 2 * super().forward(x)

    def ForCausalLMLoss(logits, labels, vocab_size, **_):
        return logits.square().mean()

    model.model.norm = LlamaRMSNorm()
    model.model.layers[0].mlp.__class__ = LlamaMLP
    model.model.layers[1].mlp.forward = functools.partial(lambda f, x: 3 * f(x), model.model.layers[1].mlp.forward)
    model.loss_function = ForCausalLMLoss
    patched = lambda self, x: 5 * x  # noqa: E731
    other, ids = copy.deepcopy(model), torch.randint(32, (2, 8))
    done = fnn.from_torch(other)
    assert {c.path: c.after for c in done.left} == {
        "model.norm": "not known",
        "model.layers.1.mlp": "a forward of its own is set on it",
    }
    want, got = model(input_ids=ids, labels=ids), other(input_ids=ids, labels=ids)
    assert_close(
        (got.loss.detach(), got.logits.detach()), (want.loss.detach(), want.logits.detach()), dtype=torch.float32, length=64
    )
    monkeypatch.setattr(modeling.LlamaRMSNorm, "forward", patched)  # as kernel libraries do
    assert not any(c.before == "LlamaRMSNorm" for c in fnn.from_torch(tiny()).replaced)


def nodes(node):
    """How many ops are behind an autograd node."""
    seen, stack = set(), [node]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack += [n for n, _ in node.next_functions]
    return sum(n.name() == "_NodeBackward" for n in seen)


def test_an_mlp_is_one_node_while_nothing_is_done_to_it():
    for name, parts in (("llama", ("gate_proj", "act_fn")), ("gpt2", ("c_fc", "act"))):
        model = tiny(name).eval()
        fnn.from_torch(model)
        mlp, x = (model.model.layers if name == "llama" else model.transformer.h)[0].mlp, torch.randn(2, 16)
        one = nodes(mlp(x).grad_fn)
        assert one == (1 if name == "llama" else 2) and len(functional(mlp)[2]) == 3, "and GPT-2's dropout"
        for part in parts:
            handle = getattr(mlp, part).register_forward_hook(lambda *_: None)
            assert nodes(mlp(x).grad_fn) != one
            with pytest.raises(ValueError, match=f"MLP: {part} must be as its class has it, without hooks"):
                functional(mlp)
            handle.remove()
            assert nodes(mlp(x).grad_fn) == one


def test_halves_of_a_batch_add_up_to_the_whole():
    """`num_items_in_batch` divides: what Trainer's gradient accumulation rests on."""
    model = tiny().double()
    fnn.from_torch(model)
    ids = torch.randint(32, (4, 9))
    labels = ids.masked_fill(torch.rand(4, 9) < 0.3, -100)
    items = (labels[:, 1:] != -100).sum()
    whole = model(input_ids=ids, labels=labels).loss
    whole.backward()
    want = {n: p.grad for n, p in model.named_parameters()}
    for count in (items, int(items)):
        model.zero_grad()
        halves = [
            model(input_ids=a, labels=b, num_items_in_batch=count).loss for a, b in zip(ids.split(2), labels.split(2), strict=True)
        ]
        for half in halves:
            half.backward()
        torch.testing.assert_close(sum(halves), whole)
        torch.testing.assert_close({n: p.grad for n, p in model.named_parameters()}, want)
