"""The rules of linear layers serve each variant that has the property they ask for: over ranks, in low precision, both. Each rule
fires there, and gives what `fuse=False` gives."""

import importlib
import pkgutil
import threading

import pytest
import torch
from fusion_cases import MAKERS, made
from lora_model import drawn as with_b
from triton.runtime import interpreter

from benchmarks.plain import PlainBlock, plain_name
from funcops import (
    ActivationConfig,
    ChainConfig,
    GLUConfig,
    LayerNormConfig,
    LinearConfig,
    Needs,
    RopeConfig,
    SkipConfig,
    Step,
    WithExtras,
    activation,
    chain,
    dist,
    explain,
    glu,
    layer_norm,
    linear,
    plan,
    random,
    rope_table,
    skip,
)
from funcops.engine.backend import backend
from funcops.engine.contract.configs import Composite, fields_of
from funcops.engine.trees import paths, put
from funcops.library.kernels import triton as triton_kernels
from funcops.lora import lora_init, lora_needs, with_lora
from funcops.lora.rewrite import adapted_linears
from funcops.low_precision import Fp8Block, Fp8Current, gradients_like, quantize_params, recipe_init, with_recipe
from funcops.models.blocks import block_config, gpt2_block_config
from funcops.testing import run_ranks

pytest.importorskip("triton")

WIDTH, ROWS, TOKENS = 256, 16, 4
RECIPES = {
    "": None,
    "block": Fp8Block(),
    "input": Fp8Block(keep="input"),
    "high": Fp8Block(keep="input", wgrad="high"),
    "current": Fp8Current(),
}
OWN = {
    "up": lambda name: Step(name, linear, LinearConfig(WIDTH, WIDTH, bias=False)),
    "up_b": lambda name: Step(name, linear, LinearConfig(WIDTH, WIDTH)),
    "wide": lambda name: Step(name, linear, LinearConfig(WIDTH, 2 * WIDTH, bias=False)),
    "down": lambda name: Step(name, linear, LinearConfig(WIDTH, WIDTH, bias=False)),
    "down_b": lambda name: Step(name, linear, LinearConfig(WIDTH, WIDTH)),
    "ln": lambda name: Step(name, layer_norm, LayerNormConfig(WIDTH)),
    "glu": lambda name: Step(name, glu, GLUConfig(kind="swiglu", gate="first")),
}
INNER = ChainConfig(steps=(OWN["down"]("down"), OWN["up"]("up")))
OWN["mid"] = lambda name: Step(name, skip, SkipConfig(chain, INNER))
ROLES = {"up*": "column", "wide*": "column", "down*": "row", "mid*.up": "column", "mid*.down": "row"}


def unfused(cfg):
    """The config with fusion off, also in its parts."""
    changes = {"fuse": False} if "fuse" in fields_of(cfg) else {}
    return cfg.with_parts(lambda name, op, part: (op, unfused(part) if isinstance(part, Composite) else part), **changes)


@pytest.fixture(autouse=True)
def one_kernel_at_a_time(monkeypatch):
    """Ranks are threads, and the interpreter holds one grid; implementations are imported before, by one thread."""
    for module in pkgutil.iter_modules(triton_kernels.__path__):
        importlib.import_module(f"{triton_kernels.__name__}.{module.name}")
    lock, launcher = threading.Lock(), interpreter.InterpretedFunction.__getitem__

    def one(kernel, grid):
        launch = launcher(kernel, grid)

        def run(*args, **options):
            with lock:
                return launch(*args, **options)

        return run

    monkeypatch.setattr(interpreter.InterpretedFunction, "__getitem__", one)


def halves(cfg):
    """The rules that fire in each half."""
    found = plan(cfg, dtype=torch.float32)
    return [", ".join(line.rule.name for line in half if line.rule) for half in found[:2]]


def step(cfg, work, x, dy, way):
    """y, dparams and dx: at once, in halves, or added to accumulators."""
    with backend("triton"):
        y, residuals = chain.fwd(work, x, cfg)
        if way == "whole":
            dparams, dx = chain.bwd(residuals, dy, cfg)
        elif way == "into":
            dparams, dx = chain.bwd(residuals, dy, cfg, into=gradients_like(work, torch.float32))
        else:
            dx, pending = chain.dgrad(residuals, dy, cfg)
            dparams = chain.wgrad(pending, cfg)
    return {"y": y, "dx": getattr(dx, "main", dx), **{path: t for path, t in paths(dparams).items() if t is not None}}


def check(cfg, recipe, mesh=None, **options):
    """The steps of `cfg` with its rules, and without; returns the rules that fire."""
    cfg = cfg if RECIPES[recipe] is None else with_recipe(cfg, RECIPES[recipe])
    axis = None
    if mesh is not None:
        cfg, axis = dist.parallel(cfg, options.pop("roles"), mesh, **options), mesh["tp"]
    params = chain.init(cfg, key=random.key(0), dtype=torch.float32)
    params = with_b(params, cfg) if any(adapted_linears(cfg)) else params
    work = params if RECIPES[recipe] is None else quantize_params(params, cfg, recipe_init(cfg, params), dtype=torch.float32)
    sharded = axis is not None and options.get("sequence_parallel", True)

    def drawn(i):
        t = torch.randn(ROWS // TOKENS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(i))
        return t.chunk(axis.size)[axis.rank] if sharded else t

    x, extras = drawn(1), {"given": drawn(2), "key": random.key(7), "positions": torch.arange(TOKENS)}
    x = WithExtras(x, {name: extras[name] for name in cfg.extras}) if cfg.extras else x
    plain = unfused(cfg)
    with backend("triton"):
        dy = chain.fwd(work, x, plain)[0]
    dy = torch.randn(dy.shape, generator=torch.Generator().manual_seed(3))
    want = step(plain, work, x, dy, "whole")
    for way in ("whole", "halves", "into"):
        got = step(cfg, work, x, dy, way)
        assert got.keys() == want.keys()
        for name, t in got.items():  # a code on the border of two rounds to the other one where sums differ in their last bit
            error = (t - want[name]).norm() / want[name].norm()
            assert error < (1e-5 if RECIPES[recipe] is None else 5e-3), (recipe, way, name, error)
    return halves(cfg)


def of_words(words):
    """The chain of these steps, and the roles of its layers over ranks."""
    names = words.split()
    roles = {glob: role for glob, role in ROLES.items() if glob.partition("*")[0] in [name.partition("_")[0] for name in names]}
    return made(words, MAKERS | OWN), roles


BIAS = "bias gradients, recomputed"
ONE_RANK = [
    ("up_b gelu down_b drop", "input", "", BIAS),
    ("up_b gelu down_b drop", "high", "", BIAS),
    ("up_b gelu down_b drop", "block", "quantised output", BIAS),
    ("up_b silu down_b", "current", "", BIAS),
    ("wide glu down", "input", "", "recomputed GLU"),
    ("wide glu down_b gelu", "high", "", f"recomputed GLU, {BIAS}"),
    ("down_b drop add", "block", "dropout + add", BIAS),
    ("down_b drop add", "current", "dropout + add", BIAS),
]
TWO_RANKS = [
    ("ln up_b gelu down_b", "", "linear + epilogue", BIAS),
    ("ln up_b gelu down_b", "input", "", BIAS),
    ("ln up_b gelu down_b", "block", "", BIAS),
    ("wide glu down", "", "", "recomputed GLU"),
    ("wide glu down", "input", "", "recomputed GLU"),
    ("up gelu scale down_b", "", "linear + epilogue", "linear dgrad + derivative"),
    ("up gelu down", "", "linear + epilogue", BIAS),
    ("up mid down", "", "linear + epilogue", "fork + reader"),
]


def most_slow(rows, first):
    """The rows as parameters; all but the numbers `first` are in the second tier."""
    return [pytest.param(*row, marks=() if i in first else pytest.mark.slow) for i, row in enumerate(rows)]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "recipe", "forward", "backward"), most_slow(ONE_RANK, (0, 3, 4)), ids=str)
def test_a_rule_serves_layers_in_low_precision(words, recipe, forward, backward):
    assert check(of_words(words)[0], recipe) == [forward, backward]


def infer(recipe, mesh=None):
    """y of layers around an activation for which nothing is kept, without rules and with them; and the first rule."""
    words, roles = of_words("up_b gelu down")
    cfg = with_recipe(words, RECIPES[recipe])
    cfg = cfg if mesh is None else dist.parallel(cfg, roles, mesh)
    work = quantize_params(chain.init(cfg, key=random.key(0)), cfg, dtype=torch.float32)
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    ys = []
    for one in (unfused(cfg), cfg):
        with backend("triton"):
            ys.append(chain.fwd(work, x, one, needs=Needs.NONE)[0])
    return *ys, plan(cfg, needs=Needs.NONE, dtype=torch.float32).forward[0].rule.name


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("recipe", ["input", "current"])
def test_a_bias_in_low_precision_is_added_with_an_activation_that_keeps_nothing(recipe, ranks):
    for want, got, name in [infer(recipe)] if ranks == 1 else run_ranks({"tp": 2}, lambda mesh: infer(recipe, mesh)):
        assert name == "bias + activation"
        assert (got - want).norm() / want.norm() < 5e-3  # a code on the border of two


@pytest.mark.parametrize("sequence_parallel", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("words", "recipe", "forward", "backward"), most_slow(TWO_RANKS, (0,)), ids=str)
def test_a_rule_serves_layers_over_ranks(words, recipe, forward, backward, sequence_parallel):
    cfg, roles = of_words(words)
    options = {"roles": roles, "sequence_parallel": sequence_parallel}
    for found in run_ranks({"tp": 2}, lambda mesh: check(cfg, recipe, mesh, **options)):
        assert found == [forward, backward]


BLOCKS = {"GPT-2": gpt2_block_config(WIDTH, 2, WIDTH, 0.1), "Llama": block_config(WIDTH, 2, WIDTH)}
BLOCK_ROLES = {"*.qkv.*.proj": "column", "*.out": "row", "*.up": "column", "*.down": "row"}
# of one rank, or over two ranks with or without sequence parallelism
WHOLE = [("Llama", "input", None), ("GPT-2", "", False), ("GPT-2", "input", None), ("Llama", "", True), ("Llama", "input", True)]
WHOLE += [("Llama", "block", None), ("Llama", "current", False), ("GPT-2", "input", False), ("GPT-2", "", True)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "recipe", "sequence_parallel"), most_slow(WHOLE, (0,)), ids=str)
def test_siblings_of_a_block_give_what_they_give_one_by_one(name, recipe, sequence_parallel):
    options = {} if sequence_parallel is None else {"roles": BLOCK_ROLES, "sequence_parallel": sequence_parallel}
    if not options:
        found = check(BLOCKS[name], recipe)
    else:
        found = run_ranks({"tp": 2}, lambda mesh: check(BLOCKS[name], recipe, mesh, **dict(options)))[0]
    assert "q, k and v" in str(found) or "sibling linears" in str(found)


IN_FLIGHT = [
    ("Llama", "", "bulk", "q, k and v"),
    ("GPT-2", "", "ring", "q, k and v"),
    ("Llama", "input", "bulk", "sibling linears"),
]


@pytest.mark.parametrize(("name", "recipe", "overlap", "rule"), most_slow(IN_FLIGHT, ()), ids=str)
def test_siblings_in_flight_give_what_they_give_one_by_one(name, recipe, overlap, rule):
    options = {"roles": BLOCK_ROLES, "overlap": overlap}
    found = run_ranks({"tp": 2}, lambda mesh: check(BLOCKS[name], recipe, mesh, **dict(options)))[0]
    assert f"{rule}, in flight" in found[1]


# The block and its adapters, the recipe, the ranks as in WHOLE; and what fires in the backward.
ADAPTED = [
    ("GPT-2", {}, "", None, "q, k and v", "bias gradients, recomputed for readers"),
    ("Llama", {}, "", None, "q, k and v", "recomputed GLU"),
    ("Llama", {"dropout": 0.5}, "", None, "q, k and v", "recomputed GLU"),
    ("Llama", {}, "block", None, "fork + norm", "recomputed GLU"),
    ("GPT-2", {}, "input", None, "sibling linears", "bias gradients, recomputed for readers"),
    ("GPT-2", {}, "", False, "q, k and v", "bias gradients, recomputed for readers"),
    ("Llama", {}, "", True, "q, k and v", "recomputed GLU"),
    ("Llama", {}, "input", True, "sibling linears", "recomputed GLU"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "more", "recipe", "sequence_parallel", "first", "second"), most_slow(ADAPTED, (1,)), ids=str)
def test_rules_serve_layers_with_adapters(name, more, recipe, sequence_parallel, first, second):
    cfg = with_lora(BLOCKS[name], 3, ("*",), alpha=6.0, **more)
    if sequence_parallel is None:
        found = check(cfg, recipe)
    else:
        options = {"roles": BLOCK_ROLES, "sequence_parallel": sequence_parallel}
        found = run_ranks({"tp": 2}, lambda mesh: check(cfg, recipe, mesh, **dict(options)))[0]
    assert first in found[1] and second in found[1]


@pytest.mark.parametrize("frozen", [pytest.param(False, marks=pytest.mark.slow), True], ids=["all", "lora"])
def test_fused_gradients_of_an_adapted_block_equal_autograds(frozen):
    """In float32, beside float64 of the plain module with w + c b a in place of w."""
    base = block_config(WIDTH, 2, WIDTH)
    cfg = with_lora(base, 3, ("*",), alpha=6.0)
    params = with_b(lora_init(chain.init(base, key=random.key(0), dtype=torch.float32), cfg, key=random.key(1)), cfg)
    x, dy = torch.randn(2, 2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))
    table = rope_table(torch.arange(TOKENS), RopeConfig(WIDTH // 2))
    with backend("triton"):
        _, kept = chain.fwd(params, WithExtras(x, {"positions": table}), cfg, needs=lora_needs(cfg) if frozen else Needs.ALL)
        dparams, dx = chain.bwd(kept, dy, cfg)
    leaves = {path: t.double().requires_grad_() for path, t in paths(params).items() if t is not None}

    def weight(path, t):
        at = path.removesuffix("base.weight")
        return t if at == path else t + 2.0 * leaves[f"{at}lora.b"] @ leaves[f"{at}lora.a"]

    named = {path.replace(".both.base", ""): weight(path, t) for path, t in leaves.items() if ".lora." not in path}
    named = {f"block.{plain_name(path)}": t for path, t in named.items()}
    inner = x.double().requires_grad_()
    torch.func.functional_call(PlainBlock(WIDTH, 2, WIDTH, TOKENS).double(), named, (inner,)).backward(dy.double())
    given = {path: t for path, t in paths(dparams).items() if t is not None}
    assert given.keys() == {path for path in leaves if not frozen or ".lora." in path}
    for path, t in given.items():
        error = (t.double() - leaves[path].grad).norm() / leaves[path].grad.norm()
        assert error < 1e-5, (path, error)
    assert frozen or (dx.main.double() - inner.grad).norm() / inner.grad.norm() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
def test_a_weight_of_another_dtype_is_refused_as_without_rules(fuse, bias, dtype):
    steps = Step("up", linear, LinearConfig(16, 16, bias=bias)), Step("act", activation, ActivationConfig("gelu"))
    cfg = ChainConfig(steps=steps, fuse=fuse)
    assert any(line.rule for line in plan(cfg, device_type="cuda", dtype=torch.float32).forward) is fuse
    params = chain.init(cfg, key=random.key(0))
    wrong = put(params, "up.weight", params["up"].weight.to(dtype))
    with backend("triton"), pytest.raises(TypeError, match="up: linear_fwd: params.weight must be float32, got"):
        chain.fwd(wrong, torch.randn(4, 16), cfg)


@pytest.mark.parametrize("overlap", ["none", "bulk", "ring"])
def test_a_layer_that_sends_its_dx_under_the_product_of_dw_ends_no_rule(overlap):
    options = {} if overlap == "none" else {"overlap": overlap}
    text = str(explain(dist.parallel(BLOCKS["GPT-2"], BLOCK_ROLES, dist.Mesh.abstract({"tp": 2}, 0), **options)))
    assert ("mlp.up + mlp.act + mlp.down: bias gradients" in text) == (overlap == "none"), text
    assert "mlp.act + mlp.down: bias gradients" in text
