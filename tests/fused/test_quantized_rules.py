"""The kernel that makes the x of a quantised linear layer also quantises it, and siblings share the codes: the same bits."""

import collections
import dataclasses
import sys

import pytest
import torch
from launches import launches
from triton.runtime import interpreter

from benchmarks.overhead import low_precision_cases
from funcops import (
    ActivationConfig,
    ChainConfig,
    GLUConfig,
    LayerNormConfig,
    LinearConfig,
    Needs,
    ParallelConfig,
    QLinearConfig,
    RMSNormConfig,
    Step,
    activation,
    backend,
    chain,
    glu,
    layer_norm,
    linear,
    parallel,
    plan,
    qlinear,
    random,
    rms_norm,
)
from funcops.engine.backend import gemm
from funcops.engine.contract.op import config
from funcops.engine.program import rules
from funcops.engine.trees import nbytes, tree_map_tensors
from funcops.library.kernels import activation as activations
from funcops.library.kernels import glu as glus
from funcops.library.kernels import norm, quantize_after
from funcops.library.kernels.quantize import quantize_row
from funcops.low_precision import MXFP8, Format, Fp8Block, Fp8Current, Fp8Delayed, Recipe, quantize_params, recipe_init
from funcops.testing import LAWS, Case
from funcops.testing.checks import float_like, same_bits
from funcops.testing.laws import LAYOUTS

HOW = [("e4m3", 128, "pow2"), ("e5m2", 128, "float32"), ("e4m3", 32, "e8m0")]


def draw(*shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "width"), [pytest.param(3, 64, marks=pytest.mark.slow), (2, 200)])
def test_kernels_give_the_codes_of_y(rows, width, dtype, how):
    x, w, b = draw(rows, width, dtype=dtype), draw(width, dtype=dtype, seed=1), draw(width, dtype=dtype, seed=2)
    x[0, 5] = float("nan")
    both = draw(rows, 2 * width, dtype=dtype, seed=3)

    def codes(y):
        return tuple(quantize_row(y, how[0], 1, *how[1:], None, None))

    with backend("triton"):
        y, rstd = norm.rms_norm_fwd(x, w, 1e-5, True)
        same_bits(quantize_after.rms_norm_quantize(x, w, 1e-5, True, *how), (*codes(y), rstd), "rms_norm")
        y, *statistics = norm.layer_norm_fwd(x, w, b, 1e-5, False)
        same_bits(quantize_after.layer_norm_quantize(x, w, b, 1e-5, False, *how), (*codes(y), *statistics), "layer_norm")
        for first in (True, False):
            y = glus.glu_fwd(both, None, "swiglu", first)
            same_bits(tuple(quantize_after.glu_quantize(both, "swiglu", first, *how)), codes(y), "glu")
        y = activations.activation_fwd(x, "sigmoid")
        same_bits(quantize_after.activation_quantize(x, "sigmoid", *how), codes(y), "activation")


CALLS = {
    "rms_norm": (quantize_after.rms_norm_quantize, lambda x, w: (x, w, 1e-5, True)),
    "layer_norm": (quantize_after.layer_norm_quantize, lambda x, w: (x, w, w, 1e-5, False)),
    "glu": (quantize_after.glu_quantize, lambda x, w: (x, "swiglu", True)),
    "activation": (quantize_after.activation_quantize, lambda x, w: (x, "gelu")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CALLS)
def test_kernels_give_the_same_codes_for_every_layout(name, layout):
    kernel, arguments = CALLS[name]
    x, w = draw(2, 3, 80, dtype=torch.float32), draw(80, dtype=torch.float32, seed=1)
    with backend("triton"):
        want = kernel(*arguments(x, w), *HOW[2])
        same_bits(kernel(*arguments(LAYOUTS[layout](x), LAYOUTS[layout](w)), *HOW[2]), want, layout)


@pytest.mark.parametrize("shape", [(2, 80), (0, 80), (2, 0, 80)], ids=str)
@pytest.mark.parametrize("how", [("e2m1", 32, "e8m0"), ("e4m3", 16, "pow2"), *HOW], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_formats_that_kernels_lack_and_no_rows_go_through_y(name, how, shape):
    kernel, arguments = CALLS[name]
    if 0 not in shape and how in HOW:
        return
    given = (*arguments(draw(*shape, dtype=torch.float32), draw(80, dtype=torch.float32, seed=1)), *how)
    with backend("triton"):
        same_bits(tuple(kernel(*given)), tuple(kernel.kernel.torch_impl(*given)), "codes of y")


WIDTH = 160
MAKERS = {
    "rms_norm": Step("made", rms_norm, RMSNormConfig(WIDTH)),
    "layer_norm": Step("made", layer_norm, LayerNormConfig(WIDTH)),
    "glu": Step("made", glu, GLUConfig(kind="swiglu", gate="first")),
    "activation": Step("made", activation, ActivationConfig(kind="silu")),
}


def two(maker, recipe):
    return ChainConfig(steps=(MAKERS[maker], Step("up", qlinear, QLinearConfig(WIDTH, 96, recipe))))


def names(cfg, device_type="cuda"):
    return [line.rule.name for line in plan(cfg, device_type=device_type).forward if line.rule]


@pytest.mark.parametrize("maker", MAKERS)
def test_a_maker_and_its_reader_are_one(maker):
    written = Fp8Block(), Fp8Block(bwd="e5m2"), MXFP8(keep="row")
    for recipe in (*written, Fp8Block(keep="col"), Fp8Current(), MXFP8()):
        found = recipe in written
        assert ("quantised output" in names(two(maker, recipe))) == found, recipe


@config
class Tiled(Recipe):
    """Operands in tiles of one size, of which x is kept by rows."""

    tile: tuple = (1, 0)
    scales: str = "pow2"
    keep: str = "row"

    def __post_init__(self):
        self.settle(*[Format("e4m3", self.tile, self.scales)] * 3)


TILED = [("pow2", (0, 0)), ("pow2", (1, 0)), ("pow2", (1, 128)), ("pow2", (128, 128)), ("float32", (0, 0)), ("float32", (128, 128))]
TILED += [("e8m0", (1, 32)), ("e8m0", (32, 32))]


@pytest.mark.parametrize("maker", MAKERS)
def test_a_maker_writes_codes_of_parts_of_rows_alone(maker):
    """The scale of a whole row, or of several rows, is known when its last element is."""
    for scales, tile in TILED:
        fused = tile in ((1, 128), (1, 32))
        assert ("quantised output" in names(two(maker, Tiled(tile=tile, scales=scales)))) == fused, (scales, tile)


def unfused(cfg):
    """The config with fusion off, in the chain and in its parallels."""
    steps = [dataclasses.replace(s, cfg=dataclasses.replace(s.cfg, fuse=False)) if s.op is parallel else s for s in cfg.steps]
    return dataclasses.replace(cfg, steps=tuple(steps), fuse=False)


def both_ways(cfg, x, needs=Needs.ALL):
    """y and gradients by Triton, fused and unfused."""
    params = chain.init(cfg, key=random.key(0), dtype=x.dtype)
    for given in (params, quantize_params(params, cfg, dtype=x.dtype)):
        found = []
        for one in (cfg, unfused(cfg)):
            with backend("triton"):
                y, kept = chain.fwd(given, x, one, needs=needs)
                found.append((y, chain.bwd(kept, float_like(y, 3), one)))
        same_bits(*found, "fused and not")


@pytest.mark.turns("maker")
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=str)
def test_a_maker_and_its_reader_give_the_same_bits(maker, dtype, monkeypatch):
    monkeypatch.setattr(rules, "FEW", 0)
    x = draw(2, 3, WIDTH * (1 + (maker == "glu")), dtype=dtype)
    both_ways(two(maker, Fp8Block()), x)
    both_ways(two(maker, Fp8Block()), x, Needs(params=["up.weight"]))
    both_ways(two(maker, Fp8Block(amax_epsilon=1e3)), x)
    both_ways(two(maker, MXFP8(keep="row")), x)


@pytest.mark.parametrize("maker", ["rms_norm", "layer_norm"])
def test_a_norm_before_a_quantised_layer_refuses_as_alone(maker, monkeypatch):
    monkeypatch.setattr(rules, "FEW", 0)
    cfg, x = two(maker, Fp8Block()), draw(3, WIDTH, dtype=torch.bfloat16)
    params, said = chain.init(cfg, key=random.key(0), dtype=x.dtype), []
    for wrong in (torch.ones(WIDTH // 2), torch.ones(1, WIDTH), torch.ones(WIDTH).double()):
        wrong = wrong if wrong.dtype is torch.float64 else wrong.to(x.dtype)
        for one in (cfg, unfused(cfg)):
            with backend("triton"), pytest.raises((ValueError, TypeError)) as error:
                chain.fwd(params | {"made": dataclasses.replace(params["made"], weight=wrong)}, x, one)
            said.append(str(error.value))
    assert said[::2] == said[1::2] and all("made" in one and "weight" in one for one in said)


def siblings(recipes):
    layers = [(linear, LinearConfig) if recipe is None else (qlinear, QLinearConfig) for recipe in recipes]
    branches = tuple(
        Step(f"b{i}", op, make(WIDTH, 32 * (i + 1), *([] if recipe is None else [recipe])))
        for i, (recipe, (op, make)) in enumerate(zip(recipes, layers, strict=True))
    )
    return ChainConfig(steps=(Step("qkv", parallel, ParallelConfig(branches=branches)),))


@pytest.mark.slow
def test_siblings_share_their_codes(monkeypatch):
    monkeypatch.setattr(rules, "FEW", 0)
    for recipe in (Fp8Block(), Fp8Block(keep="col"), Fp8Current(), MXFP8()):
        cfg = siblings([recipe] * 3)
        x = draw(70, WIDTH, dtype=torch.bfloat16)
        both_ways(cfg, x)
        params = quantize_params(chain.init(cfg, key=random.key(0), dtype=torch.float32), cfg)
        once, thrice = (nbytes([n.x for n in chain.fwd(params, x, c)[1]["qkv"].values()]) for c in (cfg, unfused(cfg)))
        assert thrice == 3 * once, f"{recipe}: codes are kept once"
    assert "sibling linears, x once" in names(siblings([Fp8Block()] * 2))
    assert "sibling linears, x once" not in names(siblings([Fp8Block(), Fp8Block(bwd="e5m2")]))


@pytest.mark.turns("recipe", every=3)
@pytest.mark.parametrize("recipe", [Fp8Block(), Fp8Current(), MXFP8()], ids=lambda recipe: type(recipe).__name__)
def test_quantised_siblings_refuse_as_the_ops_alone(recipe, monkeypatch):
    monkeypatch.setattr(rules, "FEW", 0)
    case = Case(op=chain, cfg=siblings([recipe] * 2), x=lambda d: d.randn(4, WIDTH), reference=None, name="siblings")
    LAWS["loud"](case, torch.float32)


@pytest.mark.parametrize("own", [None, Fp8Current(), Fp8Delayed()], ids=lambda recipe: type(recipe).__name__)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_siblings_share_their_codes_beside_one_that_has_another_recipe_or_none(own, place, monkeypatch):
    monkeypatch.setattr(rules, "FEW", 0)
    recipes = [Fp8Block()] * 2
    recipes.insert(place, own)
    cfg, x = siblings(recipes), draw(70, WIDTH, dtype=torch.bfloat16)
    params = chain.init(cfg, key=random.key(0), dtype=torch.float32)
    params = quantize_params(params, cfg, recipe_init(cfg, params))
    found = []
    for one in (cfg, unfused(cfg)):
        y, kept = chain.fwd(params, x, one)
        found.append((y, chain.bwd(kept, float_like(y, 3), one)))
    same_bits(*found, "shared and not")
    nodes = [n.x for i, n in enumerate(chain.fwd(params, x, cfg)[1]["qkv"].values()) if i != place]
    assert nodes[0] is nodes[1], "codes are kept once"


@pytest.mark.parametrize(("made", "most"), [(False, 6), (True, 5)])
def test_launches_of_a_quantised_linear(made, most, monkeypatch):
    """Launches of its forward and backward with a step's working tree, without a norm's that makes and quantises its x."""
    up = Step("up", qlinear, QLinearConfig(512, 1024, Fp8Block(), bias=False))
    cfg = ChainConfig(steps=((Step("norm", rms_norm, RMSNormConfig(512)),) if made else ()) + (up,))
    params = quantize_params(chain.init(cfg, key=random.key(0), dtype=torch.float32), cfg)
    x, dy = draw(256, 512, dtype=torch.bfloat16), draw(256, 1024, dtype=torch.bfloat16)
    params, x, dy = tree_map_tensors(lambda t: t.to("meta"), (params, x, dy))
    with launches(monkeypatch) as found:
        _, kept = chain.fwd(params, x, cfg)
        chain.bwd(kept, dy, cfg)
    own = [name for name in found if not name.startswith("norm_kernels")]
    assert len(own) - made <= most, found


def host_calls(fn):
    """The number of functions called, Python's and C's, without what Triton's interpreter would run."""
    found = collections.Counter()
    for _ in range(2):
        fn()
    sys.setprofile(lambda frame, event, arg: found.update([event]))
    try:
        fn()
    finally:
        sys.setprofile(None)
    return found["call"] + found["c_call"]


@pytest.mark.parametrize(("name", "plain", "low"), [("linear", 160, 395), ("llama block", 1810, 2960)])
def test_host_work_of_layers(name, plain, low, monkeypatch):
    """Host calls of forward and backward in bfloat16 and in FP8, as `bench overhead` counts them: launches are planned once,
    constants are not checked again, and trees are not walked. The limits leave room for other versions of Python and torch."""
    monkeypatch.setattr(interpreter.InterpretedFunction, "__getitem__", lambda kernel, grid: lambda *_, **__: None)
    with backend("triton"), gemm("triton"):
        found = [host_calls(fn) for fn in low_precision_cases(name)]
    assert found[0] <= plain and found[1] <= low, found


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("maker", ["rms_norm", "layer_norm", "glu"])
def test_an_x_that_does_not_fit_is_refused_as_without_the_rule(maker, fuse, monkeypatch):
    monkeypatch.setattr(rules, "FEW", 0)
    plain = two(maker, Fp8Block())
    cfg = plain if fuse else unfused(plain)
    wrong, step = WIDTH // 2 * (1 + (maker == "glu")), "up" if maker == "glu" else plain.steps[0].name
    with backend("triton"), pytest.raises(ValueError, match=rf"^{step}: \w+_fwd: x must be \[.*, {WIDTH}\], got"):
        chain.fwd(chain.init(cfg, key=random.key(0)), draw(2, wrong, dtype=torch.float32), cfg)


@pytest.mark.parametrize("maker", ["rms_norm", "layer_norm", "glu"])
@pytest.mark.parametrize("wrong", ["a dict", "a number", "float64", "x of int32", "x of complex64", "x is a list"])
def test_what_does_not_fit_a_layer_is_refused_as_without_the_rule(maker, wrong, monkeypatch):
    monkeypatch.setattr(rules, "FEW", 0)
    plain, said = two(maker, Fp8Block()), []
    x = draw(2, WIDTH * (1 + (maker == "glu")), dtype=torch.bfloat16)
    params = chain.init(plain, key=random.key(0), dtype=x.dtype)
    own = params["up"]
    if not wrong.startswith("x"):
        params["up"] = {"a dict": {"weight": own.weight}, "a number": 3.0}.get(wrong, tree_map_tensors(torch.Tensor.double, own))
    x = {"x of int32": x.int(), "x of complex64": x.to(torch.complex64), "x is a list": x.tolist()}.get(wrong, x)
    for cfg in (plain, unfused(plain)):
        with backend("triton"), pytest.raises((TypeError, ValueError)) as error:
            chain.fwd(params, x, cfg)
        said.append(str(error.value))
    assert said[0] == said[1] and ("x must be" if wrong.startswith("x") else "params") in said[0]
