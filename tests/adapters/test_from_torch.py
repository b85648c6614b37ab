"""`from_torch` on models of other libraries."""

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
    model = nn.Sequential(
        nn.Embedding(9, 6),
        nn.LayerNorm(6),
        nn.Sequential(nn.Linear(6, 8), nn.GELU()),
        nn.GLU(),
        Tweaked(4, 4),
        nn.ReLU(inplace=True),
        nn.LayerNorm(4, elementwise_affine=False),
        nn.Conv1d(3, 2, 1),
        nn.GroupNorm(2, 2, affine=False),
        nn.Softmax(1),
        nn.RMSNorm(4, elementwise_affine=False),
    )
    before, ids = copy.deepcopy(model), torch.randint(9, (2, 3))
    seen = []
    model[1].register_forward_hook(lambda *_: seen.append(1))
    done = fnn.from_torch(model)
    assert [c.path for c in done.replaced] == ["", "0", "1", "2", "2.0", "2.1", "3", "5", "6", "8", "9", ""]
    assert {c.path: c.after for c in done.left} == {
        "4": "a subclass of Linear",
        "7": "not known",
        "10": "eps must be a number if the layer has no weight, got None",
    }
    lines = done.details().splitlines()
    assert "2.0: Linear -> funcops.nn.Linear" in lines and "7: Conv1d left: not known" in lines
    assert list(model.state_dict()) == list(before.state_dict()) and isinstance(model[2], fnn.Sequential)
    assert_close(model(ids).detach(), before(ids).detach(), dtype=torch.float32, length=64)
    assert seen == [1]
    with pytest.raises(TypeError, match="from_torch: model must be Module"):
        fnn.from_torch(None)


@pytest.mark.parametrize("widths", [{}, dict(kdim=3, vdim=5)], ids=["one width", "three"])
def test_attention_is_left_with_its_reason(widths):
    """Alone, inside a layer, and with the projection that it holds but never calls; a model that is one runs on its joint graph."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.ModuleList([nn.MultiheadAttention(8, 2, **widths), layer])
    left = {c.path: c.after for c in fnn.from_torch(model).left if "Dropout" not in c.before}
    here, inside = ("0", "1.self_attn"), ("0.out_proj", "1.self_attn.out_proj")
    want = dict.fromkeys(here, "funcops.nn has no layer for attention: write it as steps, qkv_split, attention and linear")
    assert left == want | dict.fromkeys(inside, "MultiheadAttention reads its weight and never calls it")
    alone = fnn.from_torch(nn.MultiheadAttention(8, 2, **widths))
    assert [c.path for c in alone.left] == ["out_proj"] and [c.after for c in alone.replaced] == ["its joint graph"]


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
    """The class and attributes of every module, which `from_torch` may change."""
    return [(type(m), dict(vars(m))) for m in model.modules()]


def assert_untouched(model, before):
    for (cls, attributes), (cls_before, attributes_before) in zip(state_of(model), before, strict=True):
        assert cls is cls_before and attributes.keys() == attributes_before.keys()
        assert all(value is attributes_before[name] for name, value in attributes.items())


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, MemoryError])
def test_an_exception_leaves_the_model_unchanged(error, monkeypatch):
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
    with pytest.raises(ValueError, match="from_torch: policy must be left out for a model without a known MLP"):
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


def nodes(y):
    """The number of ops behind y. y must stay alive meanwhile: in torch 2.11 its node does not outlive it."""
    seen, stack = set(), [y.grad_fn]
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
        one = nodes(mlp(x))
        assert one == 1 and len(functional(mlp)[2]) == 3, "GPT-2's dropout is at rest"
        for part in parts:
            handle = getattr(mlp, part).register_forward_hook(lambda *_: None)
            assert nodes(mlp(x)) != one
            with pytest.raises(ValueError, match=f"MLP: {part} must be unchanged from its class, without hooks"):
                functional(mlp)
            handle.remove()
            assert nodes(mlp(x)) == one
        with torch.nn.modules.module.register_module_forward_hook(lambda *_: None), pytest.raises(ValueError) as caught:
            functional(mlp)
        assert str(caught.value).endswith("MLP: hooks must be absent, got some on all modules")
        setattr(mlp, parts[0], nn.Identity())
        with pytest.raises(ValueError, match=rf"MLP: {parts[0]} must be .* of a known class, got torch\.nn\..*\.Identity"):
            functional(mlp)


def test_halves_of_a_batch_add_up_to_the_whole():
    """`num_items_in_batch` divides the loss: Trainer's gradient accumulation relies on that."""
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


def test_a_class_that_only_says_where_it_is_from():
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    names = {"__module__": modeling.__name__, "__qualname__": "LlamaRMSNorm", "forward": modeling.LlamaRMSNorm.forward}
    impostor = type("LlamaRMSNorm", (nn.Module,), names)()
    impostor.weight, impostor.variance_epsilon = nn.Parameter(torch.ones(4)), 1e-6
    assert [c.after for c in fnn.from_torch(impostor).replaced] == ["its joint graph"]


def changed(model, **chosen):
    return sorted(c.path for c in fnn.from_torch(copy.deepcopy(model), **chosen).replaced)


def test_only_and_skip():
    """Globs of paths, ends of paths, names of classes, and classes; each matches a module and everything in it."""
    model = tiny()
    everything = changed(model)
    mlp = type(model.model.layers[0].mlp)
    finds = {
        "*": everything,
        "model.layers.0": [p for p in everything if p.startswith("model.layers.0.")],
        "model.layers.*.mlp": [p for p in everything if ".mlp" in p],
        "layers.?.mlp": [p for p in everything if ".mlp" in p],
        "mlp": [p for p in everything if ".mlp" in p],
        "q_proj": [p for p in everything if p.endswith(".q_proj")],
        "lm_head": ["lm_head"],
        "loss_function": ["loss_function"],
        "*RMSNorm": [p for p in everything if "norm" in p],
        "LlamaMLP": [p for p in everything if ".mlp" in p],
        mlp: [p for p in everything if ".mlp" in p],
        nn.Linear: [p for p in everything if p.endswith(("_proj", "lm_head"))],
        (nn.Embedding, "lm_head"): ["lm_head", "model.embed_tokens"],
    }
    for pattern, found in finds.items():
        assert found and changed(model, only=pattern) == found, pattern
        rest = sorted(set(everything) - set(found))
        assert changed(model, skip=pattern) == rest, pattern
        assert changed(model, only="*", skip=pattern) == rest
    assert changed(model, skip=[]) == everything
    assert changed(model, only="mlp", policy="minimal") == finds["mlp"]


@pytest.mark.parametrize("name", ["only", "skip"])
def test_patterns_that_are_wrong(name):
    model = tiny()
    before = state_of(model)
    for pattern, error, text in (
        ("lm_haed", ValueError, "patterns that each find a module of the model, got 'lm_haed'"),
        ("model.layers.2", ValueError, "patterns that each find a module of the model, got 'model.layers.2'"),
        ("Model.layers.1", ValueError, "patterns that each find a module of the model, got 'Model.layers.1'"),
        (["mlp", "lm_haed"], ValueError, "patterns that each find a module of the model, got 'lm_haed'"),
        (nn.Conv2d, ValueError, "patterns that each find a module of the model, got Conv2d"),
        ("", ValueError, "patterns that each find a module of the model, got ''"),
        (7, TypeError, "globs of paths, names of classes, or classes, got 7"),
        (["mlp", None], TypeError, "globs of paths, names of classes, or classes, got None"),
        (model.lm_head, TypeError, "globs of paths, names of classes, or classes, got Linear"),
    ):
        with pytest.raises(error, match=f"^from_torch: {name} must be {text}$"):
            fnn.from_torch(model, **{name: pattern})
    with pytest.raises(ValueError, match="from_torch: only must be None or at least one pattern, got none"):
        fnn.from_torch(model, only=[])
    with pytest.raises(ValueError, match="from_torch: policy must be left out for a model without a known MLP"):
        fnn.from_torch(model, only="lm_head", policy="minimal")
    assert_untouched(model, before)


def test_the_report_is_a_summary():
    for layers in (2, 12):
        model = nn.ModuleList(
            [nn.Sequential(nn.Linear(4, 4), nn.Embedding(2, 4, sparse=True), nn.Conv1d(1, 1, 1)) for _ in range(layers)]
        )
        done = fnn.from_torch(model)
        lines = str(done).splitlines()
        assert lines[0] == f"{2 * layers} replaced, {2 * layers} left, 0 already on funcops" and len(lines) == 5
        more = f"2.0, ... ({layers - 3} more)" if layers > 2 else "1.0"
        assert any(line.startswith(f"{layers:4} x Linear -> funcops.nn.Linear: 0.0, 1.0") and line.endswith(more) for line in lines)
        assert repr(done) == str(done) and len(done.details().splitlines()) == 4 * layers


def test_a_second_call_reports_modules_already_replaced():
    model = tiny()
    first = fnn.from_torch(model)
    state = state_of(model)
    second = fnn.from_torch(model)
    assert not second.replaced and not second.left and len(second.already) == len(first.replaced)
    assert str(second).startswith(f"0 replaced, 0 left, {len(first.replaced)} already on funcops")
    assert "LlamaMLP already funcops.chain" in str(second)
    assert_untouched(model, state)
    third = fnn.from_torch(model, policy="minimal")
    assert not third.replaced and sum("policy given" in c.after for c in third.already) == 2
    mlp, x = model.model.layers[0].mlp, torch.randn(2, 16)
    assert mlp.policy == "minimal" and mlp(x).grad_fn.name() == "_NodeBackward"
    partly = tiny()
    fnn.from_torch(partly, only="mlp")
    assert not fnn.from_torch(partly, only="mlp").replaced
    assert len(fnn.from_torch(partly).replaced) == len(first.replaced) - 10


def models_to_undo():
    own_loss = tiny()
    own_loss.loss_function = own_loss.loss_function
    made = nn.Sequential(
        nn.Linear(4, 4), fnn.Linear(4, 4), nn.GLU(), fnn.Sequential(nn.GELU()), nn.LayerNorm(2, elementwise_affine=False)
    )
    return tiny(), tiny("gpt2"), own_loss, made


def test_to_torch_undoes_it():
    for model in models_to_undo():
        for options in ({}, {"policy": "minimal"}, {"only": "*Linear"}):
            before, parameters, keys = state_of(model), list(model.parameters()), list(model.state_dict())
            try:
                done = fnn.from_torch(model, **options)
            except ValueError:  # without an MLP that is known, or a Linear
                continue
            x = torch.randint(32, (2, 8)) if hasattr(model, "config") else torch.randn(2, 4)
            model(x)
            model.eval().train()
            undone = fnn.to_torch(model)
            assert sorted(c.path for c in undone.replaced) == sorted(c.path for c in done.replaced)
            assert {(c.path, c.before) for c in done.replaced} == {(c.path, c.after) for c in undone.replaced}
            assert list(model.state_dict()) == keys
            assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
            for module in model.modules():
                vars(module).pop("_cfg", None), vars(module).pop("_cached", None)
            for (cls, attributes), (cls_before, attributes_before) in zip(state_of(model), before, strict=True):
                assert cls is cls_before and attributes.keys() == attributes_before.keys() - {"_cfg", "_cached"}
            assert not fnn.to_torch(model).replaced
            assert len(fnn.from_torch(model, **options).replaced) == len(done.replaced)
            fnn.to_torch(model)
    with pytest.raises(TypeError, match="to_torch: model must be Module"):
        fnn.to_torch(None)


def test_to_torch_keeps_later_changes():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fnn.from_torch(model)
    nn.utils.parametrizations.weight_norm(model[0])
    done = fnn.to_torch(model)
    assert [c.path for c in done.replaced] == ["", "1"]
    assert [(c.path, c.after) for c in done.left] == [("0", "its class is now ParametrizedLinear")]
    decoder = tiny()
    fnn.from_torch(decoder)
    mine = decoder.loss_function = lambda *given, **options: None
    fnn.to_torch(decoder)
    assert decoder.loss_function is mine


@pytest.mark.parametrize("kind", ["linear", "norm", "embedding"])
def test_a_module_with_a_forward_of_its_own_stays_as_it_is(kind):
    """Its neighbour is swapped; it is named, keeps its class, and runs what was set on it."""
    from funcops.nn import from_torch as swap

    made = {"linear": lambda: nn.Linear(4, 4), "norm": lambda: nn.LayerNorm(4), "embedding": lambda: nn.Embedding(5, 4)}[kind]
    model = nn.ModuleDict({"own": made(), "other": made()})
    before = type(model["own"])
    model["own"].forward = lambda x: "mine"
    swap(model)
    assert type(model["own"]) is before and model["own"](torch.ones(1, 4)) == "mine"
    assert type(model["other"]) is not before
