"""The rules of linear layers serve each variant that has the property they ask for: over ranks, in low precision, both. Each rule
fires there, and gives what `fuse=False` gives."""

import dataclasses
import importlib
import pkgutil
import threading

import pytest
import torch
from fusion_cases import MAKERS, made
from triton.runtime import interpreter

from funcops import (
    ChainConfig,
    GLUConfig,
    LayerNormConfig,
    LinearConfig,
    SkipConfig,
    Step,
    WithExtras,
    chain,
    dist,
    glu,
    layer_norm,
    linear,
    plan,
    random,
    skip,
)
from funcops.backend import backend
from funcops.kernels import triton as triton_kernels
from funcops.low_precision import Fp8Block, Fp8Current, gradients_like, quantize_params, recipe_init, with_recipe
from funcops.testing import run_ranks
from funcops.trees import paths

pytest.importorskip("triton")

WIDTH, ROWS = 256, 16
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
    """The chain with fusion off, also inside its skips."""
    steps = [
        dataclasses.replace(s, cfg=dataclasses.replace(s.cfg, cfg=unfused(s.cfg.cfg))) if s.op is skip else s for s in cfg.steps
    ]
    return dataclasses.replace(cfg, steps=tuple(steps), fuse=False)


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


def check(words, recipe, mesh=None, **options):
    cfg = made(words, MAKERS | OWN)
    cfg = cfg if RECIPES[recipe] is None else with_recipe(cfg, RECIPES[recipe])
    axis = None
    if mesh is not None:
        roles = {
            glob: role for glob, role in ROLES.items() if any(one.name.startswith(glob.partition("*")[0]) for one in cfg.steps)
        }
        cfg, axis = dist.parallel(cfg, roles, mesh, **options), mesh["tp"]
    params = chain.init(cfg, key=random.key(0), dtype=torch.float32)
    work = params if RECIPES[recipe] is None else quantize_params(params, cfg, recipe_init(cfg, params), dtype=torch.float32)
    sharded = axis is not None and options.get("sequence_parallel", True)

    def drawn(i):
        t = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(i))
        return t.chunk(axis.size)[axis.rank] if sharded else t

    x, extras = drawn(1), {"given": drawn(2), "key": random.key(7)}
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
            assert error < (1e-5 if RECIPES[recipe] is None else 2e-3), (words, recipe, way, name, error)
    return halves(cfg)


BIAS = "bias gradients, recomputed"
ONE_RANK = [
    ("up_b gelu down_b drop", "input", "", BIAS),
    ("up_b gelu down_b drop", "high", "", BIAS),
    ("up_b gelu down_b drop", "block", "quantised output", BIAS),
    ("up_b silu down_b", "current", "", BIAS),
    ("wide glu down", "input", "", "recomputed GLU + linear"),
    ("wide glu down_b gelu", "high", "", "recomputed GLU + linear"),
]
TWO_RANKS = [
    ("ln up_b gelu down_b", "", "linear + epilogue", BIAS),
    ("ln up_b gelu down_b", "input", "", BIAS),
    ("ln up_b gelu down_b", "block", "", BIAS),
    ("wide glu down", "", "", "recomputed GLU + linear"),
    ("wide glu down", "input", "", "recomputed GLU + linear"),
    ("up gelu scale down_b", "", "linear + epilogue", "linear dgrad + derivative"),
    ("up gelu down", "", "linear + epilogue", BIAS),
    ("up mid down", "", "linear + epilogue", "fork + reader"),
]


def most_slow(rows, first):
    """The rows as parameters; all but the numbers `first` are in the second tier."""
    return [pytest.param(*row, marks=() if i in first else pytest.mark.slow) for i, row in enumerate(rows)]


@pytest.mark.parametrize(("words", "recipe", "forward", "backward"), most_slow(ONE_RANK, (0, 3, 4)), ids=str)
def test_a_rule_serves_layers_in_low_precision(words, recipe, forward, backward):
    assert check(words, recipe) == [forward, backward]


@pytest.mark.parametrize("sequence_parallel", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("words", "recipe", "forward", "backward"), most_slow(TWO_RANKS, (0, 4, 5)), ids=str)
def test_a_rule_serves_layers_over_ranks(words, recipe, forward, backward, sequence_parallel):
    for found in run_ranks({"tp": 2}, lambda mesh: check(words, recipe, mesh, sequence_parallel=sequence_parallel)):
        assert found == [forward, backward]
