"""torch.compile in training: symbolic sizes, modules that have not run, and the number of compilations."""

import dataclasses
from itertools import combinations
from random import Random

import pytest
import torch
from law_cases import FIRST
from torch import nn
from torch._dynamo.utils import counters

from funcops import (
    ActivationConfig,
    AddConfig,
    ChainConfig,
    LayerNormConfig,
    LinearConfig,
    LinearParams,
    Needs,
    ParallelConfig,
    RepeatConfig,
    SkipConfig,
    Step,
    activation,
    add,
    chain,
    differentiable,
    layer_norm,
    linear,
    named_scope,
    named_steps,
    parallel,
    random,
    repeat,
    skip,
)
from funcops import nn as fnn
from funcops.adapters.nn.hugging_face import causal_lm_loss
from funcops.engine.trees import leaves, tensors, tree_map_tensors
from funcops.testing import assert_close

D = 8


@pytest.fixture(autouse=True)
def fresh():
    counters.clear()


def graphs():
    return counters["stats"]["unique_graphs"]


def gradients(model, run, x):
    x = x.clone().requires_grad_()
    y = run(x)
    y.square().sum().backward()
    found = [y.detach(), x.grad, *[p.grad for p in model.parameters()]]
    model.zero_grad()
    return found


def same(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def mlp(of=fnn):
    return of.Sequential(of.LayerNorm(D), of.Linear(D, 2 * D), of.GELU(), of.Linear(2 * D, D))


def swapped(model):
    assert fnn.from_torch(model).replaced
    return model


def of_hugging_face(module, name, config, **sizes):
    def make():
        transformers = pytest.importorskip("transformers")
        cls = getattr(getattr(transformers.models, module), f"modeling_{module}")
        cfg = getattr(transformers, config)(**sizes)
        more = [sizes["n_inner"]] if "n_inner" in sizes else []
        return swapped(getattr(cls, name)(*more, cfg))

    return make


PARTS = {
    "sequential": mlp,
    "swapped": lambda: swapped(mlp(nn)),
    "llama": of_hugging_face("llama", "LlamaMLP", "LlamaConfig", hidden_size=D, intermediate_size=2 * D, num_attention_heads=2),
    "qwen2": of_hugging_face("qwen2", "Qwen2MLP", "Qwen2Config", hidden_size=D, intermediate_size=2 * D, num_attention_heads=2),
    "gemma3": of_hugging_face("gemma3", "Gemma3MLP", "Gemma3TextConfig", hidden_size=D, intermediate_size=2 * D),
    "gpt2": of_hugging_face("gpt2", "GPT2MLP", "GPT2Config", n_embd=D, n_inner=2 * D, n_head=2, resid_pdrop=0.0),
    "t5": of_hugging_face("t5", "T5LayerFF", "T5Config", d_model=D, d_ff=2 * D, dropout_rate=0.0),
}


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "times", "backend"),
    [
        ("llama", 2, "eager"),
        slow("sequential", 3, "aot_eager"),
        *[slow(p, 2, "eager") for p in PARTS if p not in ("llama", "sequential")],
    ],
)
def test_symbolic_sizes(part, times, backend):
    """Several chains of equal configs that are different objects."""
    torch.manual_seed(0)
    model = nn.Sequential(*[PARTS[part]() for _ in range(times)])
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for rows in (3, 5, 7):
        x = torch.randn(rows, 2, D)
        same(gradients(model, compiled, x), gradients(model, model, x))
    assert graphs() == 1 and not counters["graph_break"]


@pytest.mark.parametrize("dynamic", [True, slow(False)])
def test_residuals_of_another_config_are_refused(dynamic):
    mine, others = LinearConfig(D, D), LinearConfig(D, D, bias=False)
    params, x = linear.init(mine, key=random.key(0)), torch.randn(3, D)

    def step(params, x, cfg):
        y, residuals = linear.fwd(params, x, mine)
        return linear.bwd(residuals, y, cfg)[1]

    compiled = torch.compile(step, backend="eager", dynamic=dynamic)
    torch.testing.assert_close(compiled(params, x, LinearConfig(D, D)), step(params, x, mine))
    with pytest.raises(Exception, match="the config of the forward"):
        compiled(params, x, others)


EDITS = {
    "as it is": lambda model, rng: None,
    "append": lambda model, rng: model.append(fnn.Linear(D, D)),
    "insert": lambda model, rng: model.insert(rng.randrange(len(model)), nn.Tanh()),
    "prepend": lambda model, rng: model.insert(0, fnn.RMSNorm(D)),
    "nested": lambda model, rng: model.append(swapped(mlp(nn))),
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, slow(1), slow(2), slow(3)])
def test_modules_that_have_not_run(seed):
    """Compiled whole before any call of the module or of a similar one, and after edits of what is compiled."""
    rng = Random(seed)
    torch.manual_seed(seed)
    width = rng.randrange(9, 99)  # no other config is equal
    model = rng.choice(
        [
            lambda: swapped(nn.Sequential(nn.Linear(D, width), rng.choice([nn.GELU, nn.SiLU])(), nn.Linear(width, D))),
            lambda: fnn.Sequential(fnn.Linear(D, width), nn.Tanh(), fnn.Linear(width, D)),
            lambda: swapped(nn.Sequential(nn.LayerNorm(D), nn.Sequential(nn.Linear(D, width), nn.ReLU(), nn.Linear(width, D)))),
        ]
    )()
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=rng.choice([False, True]))
    for edit in ("as it is", *rng.sample(sorted(EDITS), 2)):
        EDITS[edit](model, rng)
        x = torch.randn(3, D)
        got = gradients(model, compiled, x)  # before any eager call
        same(got, gradients(model, model, x))


def test_a_key_by_a_name_compiles():
    def step(key):
        return random.fold_in(key, random.path_id("a name that nobody has asked about"))

    key = random.key(3)
    assert torch.equal(torch.compile(step, backend="eager", fullgraph=True)(key), step(key))


CHAIN = ChainConfig(
    steps=(
        Step("norm", layer_norm, LayerNormConfig(D)),
        Step("up", linear, LinearConfig(D, 2 * D)),
        Step("act", activation, ActivationConfig("gelu")),
        Step("down", linear, LinearConfig(2 * D, D)),
    )
)


LAYERS = RepeatConfig(skip, SkipConfig(chain, CHAIN), times=2)
BRANCHES = ParallelConfig(branches=(Step("a", linear, LinearConfig(D, D)), Step("b", chain, CHAIN)))


def masks_of(paths):
    """Every mask of one or two paths, with and without x."""
    return [Needs(x=x, params=given) for x in (True, False) for n in (1, 2) for given in combinations(paths, n)]


STEPS = {
    "linear": (linear, LinearConfig(D, D), masks_of(("weight", "bias"))),
    "layer_norm": (layer_norm, LayerNormConfig(D), masks_of(("weight", "bias"))),
    "chain": (chain, CHAIN, masks_of(("norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias"))),
    "repeat": (repeat, LAYERS, masks_of(("0.norm.weight", "0.up.bias", "1.up.weight", "1.down.weight"))),
    "stacked": (
        repeat,
        dataclasses.replace(LAYERS, stacked=True),
        masks_of(("norm.weight", "up.bias", "up.weight", "down.weight")),
    ),
    "parallel": (parallel, BRANCHES, masks_of(("a.weight", "a.bias", "b.up.weight", "b.down.bias"))),
}


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("linear", 0),
        ("repeat", 5),
        *[slow(*one) for one in zip(("linear", "layer_norm", "chain", "chain"), (1, 2, 3, 4), strict=True)],
    ]
    + [slow("repeat", 6), slow("stacked", 7), slow("parallel", 8)],
)
def test_needs_seen_later_compile_nothing_again(name, seed):
    op, cfg, masks = STEPS[name]
    params, x = op.init(cfg, key=random.key(0)), torch.randn(3, D)
    rng = Random(seed)
    first, *others = rng.sample(masks, len(masks))

    def step(params, x, needs):
        y, residuals = op.fwd(params, x, cfg, needs=needs)
        return op.bwd(residuals, y, cfg)

    compiled = torch.compile(lambda params, x: step(params, x, first), backend="eager", fullgraph=True)
    want = step(params, x, first) if rng.random() < 0.5 else None
    compiled(params, x)
    for needs in (*others, first):
        step(params, x, needs)
    got = compiled(params, x)
    assert graphs() == 1
    same([t for t in leaves(got) if t is not None], [t for t in leaves(want or step(params, x, first)) if t is not None])


@pytest.mark.parametrize("name", ["linear", slow("chain"), slow("repeat")])
def test_names_compile_once_more_and_are_kept(name):
    """A profiled step and the step without names both stay compiled."""
    op, cfg, _ = STEPS[name]
    params, x = op.init(cfg, key=random.key(0)), torch.randn(3, D)

    def step(params, x):
        with named_scope("step"):
            y, residuals = op.fwd(params, x, cfg)
            return op.bwd(residuals, y, cfg)

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    want = leaves(step(params, x))
    for _ in range(3):
        same(leaves(compiled(params, x)), want)
        with named_steps():
            same(leaves(compiled(params, x)), want)
    assert graphs() == 2


@pytest.mark.slow
def test_a_frozen_module_is_compiled_once():
    """Other modules are frozen in other ways."""
    model, x = mlp(), torch.randn(3, D)
    model[1].weight.requires_grad_(False)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    compiled(x).sum().backward()
    for i in range(1, 4):
        other = mlp()
        for j, p in enumerate(other.parameters()):
            p.requires_grad_(bool(i >> j % 2 & 1))
        other(x).sum().backward()
        compiled(x).sum().backward()
    assert graphs() == 1


@pytest.mark.parametrize("items", [None, 3])
@pytest.mark.parametrize("ignored", [-100, 1])
def test_the_first_call_of_a_causal_loss_compiles_it_for_all(ignored, items):
    logits, labels = torch.randn(2, 5, 7, requires_grad=True), torch.randint(7, (2, 5))
    compiled = torch.compile(causal_lm_loss, backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            compiled(logits, labels, 7, items, ignored).backward()
    assert graphs() == 1


BY_AUTOGRAD = [case for case in FIRST if case.op.name != "quantize"]  # whose y is codes, which have no gradient


@pytest.mark.parametrize("case", [case if case.op.name == "rms_norm" else slow(case) for case in BY_AUTOGRAD], ids=str)
def test_a_compiled_call_has_the_gradients_of_an_eager_one(case):
    """The comparison is by autograd: if a forward writes in place, the tracer may return the tensor twice, once with a gradient."""

    def by_autograd(run):
        params, x = tree_map_tensors(lambda t: t.clone().requires_grad_(t.is_floating_point()), case.make(torch.float32))
        y = tensors(run(params, x))
        able = [t for t in y if t.requires_grad]
        draw = torch.Generator().manual_seed(2)
        torch.autograd.backward(able, [torch.randn(t.shape, generator=draw) for t in able])
        return [*[t.detach() for t in y], *[t.grad for t in tensors((params, x)) if t.grad is not None]]

    def step(params, x):
        return differentiable(case.op)(params, x, case.cfg)

    assert_close(by_autograd(torch.compile(step, fullgraph=True, backend="eager")), by_autograd(step), dtype=torch.float32)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_tensor_that_is_given_twice_compiles(frozen):
    """Both halves of a pair, or two params of one chain, with their gradients added up as autograd does."""
    layers = ChainConfig(steps=tuple(Step(name, linear, LinearConfig(D, D, bias=False)) for name in "ab"))
    w = torch.randn(D, D, requires_grad=not frozen)
    x = torch.randn(3, D, requires_grad=True)

    def step(w, x):
        y = differentiable(chain)({"a": LinearParams(w), "b": LinearParams(w)}, x, layers)
        return differentiable(add)(None, (y, y), AddConfig())

    def gradients(run):
        return torch.autograd.grad(run(w, x).sum(), [t for t in (w, x) if t.requires_grad])

    torch.testing.assert_close(gradients(torch.compile(step, fullgraph=True, backend="eager")), gradients(step))
