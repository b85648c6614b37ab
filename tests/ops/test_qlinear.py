"""Quantised linear layers beside plain ones, random keys, and the calls that raise."""

import functools
import importlib
import re
import types
from contextlib import nullcontext

import pytest
import torch
import torch_writes
from law_cases import FIRST

import funcops
from funcops import (
    ChainConfig,
    LinearConfig,
    QLinearConfig,
    RepeatConfig,
    StaleResidualError,
    Step,
    chain,
    linear,
    qlinear,
    random,
    repeat,
)
from funcops.engine.trees import cast, leaves, paths, replace, tensors, tree_map_tensors
from funcops.library.formats import E4M3_BLOCK, E4M3_TENSOR, quantize_tensor
from funcops.low_precision import (
    MXFP8,
    NVFP4,
    Fp8Block,
    Fp8Current,
    Fp8Delayed,
    gradients_like,
    quantize_params,
    recipe_init,
    recipe_update,
    split_amaxes,
    with_keys,
    with_recipe,
)
from funcops.testing.checks import same_bits

WIDE, OUT, TOKENS = 256, 384, 200
BARS = [  # recipe; relative errors of y, dx and dw on normal data
    *[(Fp8Block(keep=keep), 0.05, 0.05) for keep in ("row", "col", "input")],
    (Fp8Block(scales="float32", keep="col"), 0.05, 0.05),
    (Fp8Block(bwd="e5m2"), 0.05, 0.08),
    (Fp8Block(keep="input", wgrad="high"), 0.05, 0.05),
    (Fp8Current(bwd="e4m3"), 0.05, 0.05),
    (Fp8Current(), 0.05, 0.08),
    (Fp8Delayed(), 0.05, 0.08),
    (MXFP8(), 0.05, 0.05),
    (NVFP4(stochastic=False), 0.22, 0.22),
    (NVFP4(stochastic=False, hadamard=False), 0.22, 0.22),
    (NVFP4(stochastic=True), 0.22, 0.30),  # rounding to either neighbour has twice the variance
]


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("recipe", "of_y", "of_gradients"), BARS, ids=lambda v: repr(v)[:60])
def test_errors_beside_the_plain_layer(recipe, of_y, of_gradients):
    plain = ChainConfig(steps=(Step("up", linear, LinearConfig(WIDE, OUT)),))
    low = with_recipe(plain, recipe)
    params = chain.init(plain, key=random.key(0), dtype=torch.float32)
    x, dy = draw(2, TOKENS // 2, WIDE), draw(2, TOKENS // 2, OUT, seed=1)
    y, kept = chain.fwd(params, x, plain)
    exact = y, *chain.bwd(kept, dy, plain)
    state = None
    for _ in range(1 + recipe.delayed):  # once for the scales of the tensors as they are
        work = quantize_params(params, low, state or recipe_init(low, params), dtype=torch.float32, key=random.key(1))
        y, kept = chain.fwd(work, x, low)
        dparams, dx = chain.bwd(kept, dy, low)
        dparams, amaxes = split_amaxes(dparams)
        state = recipe_init(low, params, amaxes=amaxes)
    found = y, dparams, dx
    names = ("y", "dw", "db", "dx")
    for name, got, want in zip(names, leaves(found), leaves(exact), strict=True):
        error = float((got - want).norm() / want.norm())
        bar = {"y": of_y, "db": 1e-6}.get(name, of_gradients)
        exactly = name == "db" or (name == "dw" and recipe.wgrad == "high")
        assert error <= bar and (error > 0.005) != exactly, f"{name}: {error}"


def test_a_working_tree_has_the_codes_of_a_step_that_quantises_itself():
    for recipe in (Fp8Block(), Fp8Block(keep="input"), Fp8Current(), MXFP8(), NVFP4(stochastic=False)):
        cfg = with_recipe(ChainConfig(steps=(Step("up", linear, LinearConfig(WIDE, OUT)),)), recipe)
        params = chain.init(cfg, key=random.key(0), dtype=torch.float32)
        x, dy = draw(TOKENS, WIDE).bfloat16(), draw(TOKENS, OUT, seed=1).bfloat16()
        found = []
        for work in (cast(params, torch.bfloat16), quantize_params(params, cfg), quantize_params(params, cfg, columns=False)):
            y, kept = chain.fwd(work, x, cfg)
            found.append((y, *chain.bwd(kept, dy, cfg)))
        same_bits(found[0], found[1], f"{recipe}")
        same_bits(found[0], found[2], f"{recipe}, columns made when they are read")


@pytest.mark.parametrize("stacked", [False, True])
def test_layers_of_a_repeat_have_scales_of_their_own(stacked):
    body = ChainConfig(steps=(Step("up", linear, LinearConfig(64, 64)),))
    plain = RepeatConfig(chain, body, 3, stacked=stacked)
    x = draw(TOKENS, 64)
    for recipe in (Fp8Block(), Fp8Delayed(history=4), NVFP4(stochastic=True)):
        cfg = with_recipe(plain, recipe)
        params = repeat.init(cfg, key=random.key(0), dtype=torch.float32)
        state = recipe_init(cfg, params) if recipe.delayed else None
        work = quantize_params(params, cfg, state, dtype=torch.float32, key=random.key(2))
        into = gradients_like(work)
        y, kept = repeat.fwd(work, x, cfg)
        repeat.bwd(kept, y, cfg, into=into)
        grads, amaxes = split_amaxes(into)
        assert {p: t.shape for p, t in paths(grads).items()} == {p: t.shape for p, t in paths(params).items()}
        if state:
            state = recipe_update(state, amaxes, recipe)
            scales = torch.stack([s.scale for s in state.values()]).reshape(-1, 3)
            assert len(scales) == 3 and len(scales.unique(dim=0)) == 3


@pytest.mark.slow
def test_keys_round_dy():
    cfg = with_recipe(ChainConfig(steps=(Step("up", linear, LinearConfig(WIDE, OUT, bias=False)),)), NVFP4(stochastic=True))
    params = chain.init(cfg, key=random.key(0), dtype=torch.float32)
    work, x, dy = (
        quantize_params(params, cfg, key=random.key(1)),
        draw(TOKENS, WIDE).bfloat16(),
        draw(TOKENS, OUT, seed=1).bfloat16(),
    )

    def gradients(work):
        y, kept = chain.fwd(work, x, cfg)
        return y, *chain.bwd(kept, dy, cfg)

    first, same, other = (
        gradients(work),
        gradients(with_keys(work, cfg, random.key(1))),
        gradients(with_keys(work, cfg, random.key(2))),
    )
    same_bits(first, same, "one key")
    assert torch.equal(first[0], other[0]), "x is rounded to nearest"
    assert not torch.equal(first[2], other[2]) and not torch.equal(first[1]["up"].weight, other[1]["up"].weight)
    many = torch.stack([gradients(with_keys(work, cfg, random.key(s)))[2].float() for s in range(24)])
    once, mean = (many[0] - dy @ work["up"].weight.row.dequantize()).norm(), many.mean(0) - dy @ work["up"].weight.row.dequantize()
    assert mean.norm() < 0.5 * once, "errors of different keys cancel"


def _chain(recipe=None, sizes=(WIDE, OUT), **options):
    cfg = ChainConfig(steps=(Step("up", linear, LinearConfig(*sizes)), Step("down", linear, LinearConfig(*sizes[::-1]))))
    return cfg if recipe is None else with_recipe(cfg, recipe, **options)


def _params(cfg):
    return chain.init(cfg, key=random.key(0), dtype=torch.float32)


def _written(write):
    cfg, x = _chain(Fp8Block()), draw(3, WIDE).bfloat16()
    params = _params(cfg)
    work, weight = quantize_params(params, cfg), params["down"].weight.requires_grad_()
    weight.grad = torch.ones_like(weight)
    write([weight])
    return lambda: chain.fwd(work, x, cfg) and params  # which live on


def _forward(made, asked, x=None):
    params = quantize_params(_params(_chain()), _chain(made)) if made else cast(_params(_chain()), torch.bfloat16)
    return lambda: chain.fwd(params, draw(3, WIDE).bfloat16() if x is None else x, _chain(asked) if asked else _chain())


def _kept(made, changes):
    cfg = _chain(made)
    y, kept = chain.fwd(quantize_params(_params(cfg), cfg), draw(3, WIDE).bfloat16(), cfg)
    node = kept["up"]
    kept["up"] = replace(node, x=replace(node.x, **changes))
    return lambda: chain.bwd(kept, y, cfg)


DELAYED = _chain(Fp8Delayed(history=2))
HALF = ChainConfig(steps=DELAYED.steps[:1])
SQUARE = LinearConfig(16, 16)
LONGER = _chain(Fp8Delayed(history=3))


def _updated(amaxes, history=2):
    return recipe_update(recipe_init(DELAYED, _params(DELAYED)), amaxes, Fp8Delayed(history=history))


BAD = {
    **{
        f"stale, {name}": (
            functools.partial(_written, write),
            "down: qlinear_fwd: params.weight must have the codes of the current weight",
            StaleResidualError,
        )
        for name, write in torch_writes.WRITES.items()
    },
    "another format": (
        lambda: _forward(Fp8Block(), Fp8Block(fwd="e5m2")),
        "up: qlinear_fwd: params.weight.row.format must be e5m2 128x128 pow2, got e4m3 128x128 pow2",
        ValueError,
    ),
    "scales of another recipe": (
        lambda: _forward(Fp8Current(), Fp8Block()),
        "up: qlinear_fwd: params.weight.row.format must be e4m3 128x128 pow2, got e4m3 allxall float32",
        ValueError,
    ),
    "quantised for a plain layer": (
        lambda: _forward(Fp8Block(), None),
        "up: linear_fwd: params.weight must be a tensor [384, 256], got QWeight",
        TypeError,
    ),
    "x of another dtype": (
        lambda: _forward(Fp8Block(), Fp8Block(), draw(3, WIDE)),
        "up: qlinear_fwd: params.weight.row must be made from float32, like x, got bfloat16",
        TypeError,
    ),
    "x quantised": (
        lambda: _forward(Fp8Block(), Fp8Block(), quantize_tensor(draw(3, WIDE), E4M3_BLOCK)),
        "up: qlinear_fwd: x must be a tensor [..., 256], got QTensor",
        TypeError,
    ),
    "delayed without state": (
        lambda: lambda: quantize_params(_params(DELAYED), DELAYED),
        "quantize_params: state must be given, for up.weight, down.weight ({} in a first step, then from end_step), got None",
        ValueError,
    ),
    "state of another model": (
        lambda: lambda: quantize_params(_params(DELAYED), DELAYED, recipe_init(HALF, _params(DELAYED))),
        "quantize_params: state must be one with down.weight, got one of up.weight",
        ValueError,
    ),
    "amaxes of another model": (
        lambda: lambda: _updated({"head.weight": torch.ones(3)}),
        "recipe_update: amaxes must be of weights among up.weight, down.weight, got 'head.weight'",
        ValueError,
    ),
    "no amaxes": (
        lambda: lambda: _updated({}),
        "recipe_update: amaxes must be of every weight in the state, as split_amaxes returns them if each has a gradient, "
        "got none of up.weight, down.weight",
        ValueError,
    ),
    "amaxes of a part of the model": (
        lambda: lambda: _updated({"up.weight": torch.ones(3)}),
        "recipe_update: amaxes must be of every weight in the state, as split_amaxes returns them if each has a gradient, "
        "got none of down.weight",
        ValueError,
    ),
    "a start from amaxes of a part of the model": (
        lambda: lambda: recipe_init(DELAYED, _params(DELAYED), amaxes={"up.weight": torch.ones(3)}),
        "recipe_init: amaxes must be of every weight in the state",
        ValueError,
    ),
    "an update by a recipe with another history": (
        lambda: lambda: _updated({path: torch.ones(3) for path in ("up.weight", "down.weight")}, history=3),
        "recipe_update: state['up.weight'].history must be [..., 3, 3], got [2, 3]",
        ValueError,
    ),
    "a state with another history": (
        lambda: lambda: quantize_params(_params(LONGER), LONGER, recipe_init(DELAYED, _params(DELAYED))),
        "quantize_params: state['up.weight'].history must be [..., 3, 3], got [2, 3]",
        ValueError,
    ),
    "a plain accumulator": (
        lambda: _into(lambda work: tree_map_tensors(torch.zeros_like, _params(DELAYED))),
        "qlinear_wgrad: into.weight must be Scaled, with a place for amaxes",
        TypeError,
    ),
    "amaxes on another device": (
        lambda: _into(lambda work: _with_scale(gradients_like(work), lambda scale: scale.to("meta"))),
        "down: qlinear_wgrad: into.weight.scale must be on device cpu, got meta",
        ValueError,
    ),
    "amaxes that share memory": (
        lambda: _into(lambda work: _with_scale(gradients_like(work), lambda scale: scale[:1].expand(3))),
        "down: qlinear_wgrad: into.weight.scale must be contiguous",
        ValueError,
    ),
    "sizes": (
        lambda: lambda: _chain(MXFP8(), (256, 100)),
        "QLinearConfig: out_features must be a multiple of 32 (MXFP8), got 100",
        ValueError,
    ),
    "a glob of nothing": (
        lambda: lambda: _chain(Fp8Block(), skip=("head",)),
        "with_recipe: skip must be globs over up, down, got 'head'",
        ValueError,
    ),
    "no key": (
        lambda: lambda: quantize_params(_params(_chain()), _chain(NVFP4(stochastic=True))),
        "quantize_params: key must be a random key, for up.weight, down.weight (to round dy: another in each step, as "
        "random.fold_in(key, step), any if no backward follows; or stochastic=False), got None",
        ValueError,
    ),
    "codes that are called transformed": (
        lambda: _kept(Fp8Block(), {"hadamard": True}),
        "x.hadamard must be False (codes by rows are never transformed), got True",
        ValueError,
    ),
    "edited codes": (
        lambda: _kept(Fp8Block(), {"codes": torch.zeros(2, WIDE).byte()}),
        "residuals.x must be uint8[3, 256], as the forward kept it, got uint8[2, 256]",
        ValueError,
    ),
    "edited format": (
        lambda: _kept(Fp8Block(), {"format": E4M3_TENSOR}),
        "format must be e4m3 1x128 pow2, got e4m3 allxall float32",
        ValueError,
    ),
    "a key of another dtype": (
        lambda: _with_key(random.key(0).int()),
        "up: qlinear_fwd: params.weight.key must be int64, got int32",
        TypeError,
    ),
    "a weight without its key": (
        lambda: _with_key(None),
        "up: qlinear_fwd: params.weight.key must be a tensor [2], got None",
        TypeError,
    ),
    "a state that holds no scales": (
        lambda: lambda: quantize_params(_params(DELAYED), DELAYED, dict.fromkeys(("up.weight", "down.weight"), 3)),
        "quantize_params: state['up.weight'] must be ScaleState, got 3",
        TypeError,
    ),
    "a tie to a weight without a recipe": (
        lambda: _tied(("down",)),
        "recipe_init: the tie of down.weight must be between weights of one recipe, as they share the source's scales, "
        "got one to up.weight",
        ValueError,
    ),
    "keys for no config": (
        lambda: lambda: with_keys({}, "up", random.key(0)),
        "with_keys: cfg must be the config of an op (of a DecoderConfig: decoder(cfg)), got 'up'",
        TypeError,
    ),
}


def _tied(only):
    plain = ChainConfig(steps=(Step("up", linear, SQUARE), Step("down", linear, SQUARE)), ties={"down.weight": "up.weight"})
    cfg = with_recipe(plain, Fp8Delayed(history=2), only=only)
    return lambda: recipe_init(cfg, _params(cfg))


def _with_key(key):
    cfg = _chain(NVFP4(stochastic=True))
    work = quantize_params(_params(cfg), cfg, key=random.key(0))
    work["up"] = replace(work["up"], weight=replace(work["up"].weight, key=key))
    return lambda: chain.fwd(work, draw(3, WIDE).bfloat16(), cfg)


def _with_scale(into, change):
    scaled = into["down"].weight
    return into | {"down": replace(into["down"], weight=replace(scaled, scale=change(scaled.scale)))}


def _into(made):
    work = quantize_params(_params(DELAYED), DELAYED, recipe_init(DELAYED, _params(DELAYED)))
    y, kept = chain.fwd(work, draw(3, WIDE).bfloat16(), DELAYED)
    return lambda: chain.bwd(kept, y, DELAYED, into=made(work))


@pytest.mark.parametrize("name", BAD)
def test_bad_calls_name_the_fault(name):
    make, message, error = BAD[name]
    call = make()
    with pytest.raises(error, match=re.escape(message)):
        call()


OPS = sorted({name for name in funcops.__all__ if isinstance(getattr(funcops, name), funcops.Op)} - {"dequantize"})


@pytest.mark.parametrize("name", OPS)
def test_no_op_takes_a_quantised_tensor_for_a_tensor(name):
    """Neither as a leaf of params nor as x."""
    case = next(case for case in FIRST if case.op.name == name)
    params, x = case.make(torch.float32)
    low = quantize_tensor(draw(4, 64), E4M3_BLOCK)
    with pytest.raises((TypeError, ValueError), match="must be .*got"):
        case.op.fwd(params, low, case.cfg)
    if tensors(params):
        with pytest.raises((TypeError, ValueError), match="must be .*got"):
            case.op.fwd(tree_map_tensors(lambda t: low, params), x, case.cfg)


def test_a_device_that_lacks_the_formats_is_refused(monkeypatch):
    cfg = QLinearConfig(32, 32, Fp8Block())
    params = qlinear.init(cfg, key=random.key(0))

    class OnCuda:
        is_cuda, device, dtype = True, "cuda", torch.float32

    module = importlib.import_module("funcops.library.ops.coded_linear")
    monkeypatch.setattr(module, "check", lambda *given: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with pytest.raises(RuntimeError, match=r"x must be on a device of capability \(9, 0\) or above.*, got capability \(8, 9\)"):
        module.check_params("qlinear_fwd", params, OnCuda, cfg)
    module.check_params("qlinear_fwd", params, OnCuda, QLinearConfig(32, 32, Fp8Block(emulate=True)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    module.check_params("qlinear_fwd", params, OnCuda, cfg)


def test_a_device_of_rocm_is_refused(monkeypatch):
    """No kernel multiplies codes there, though its capability is (9, 4)."""
    module = importlib.import_module("funcops.library.ops.coded_linear")
    monkeypatch.setattr(module, "check", lambda *given: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    x = types.SimpleNamespace(is_cuda=True, device="cuda", dtype=torch.float32)
    params = qlinear.init(QLinearConfig(32, 32, Fp8Current()), key=random.key(0))
    module.check_params("qlinear_fwd", params, x, QLinearConfig(32, 32, Fp8Block()))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    for recipe in (Fp8Block(), Fp8Current()):
        with pytest.raises(RuntimeError, match=r"x must be on a CUDA device of capability .* emulate=True.*, got a device of ROCm"):
            module.check_params("qlinear_fwd", params, x, QLinearConfig(32, 32, recipe))
    module.check_params("qlinear_fwd", params, x, QLinearConfig(32, 32, Fp8Block(emulate=True)))


@pytest.mark.parametrize("fwd", ["e4m3", "e5m2"])
@pytest.mark.parametrize("bwd", ["e4m3", "e5m2"])
def test_a_device_of_89_needs_a_library_that_multiplies_the_codes(fwd, bwd, monkeypatch):
    """It has no kernel of ours, and the library has no product of e5m2 by e5m2."""
    recipe = Fp8Current(fwd=fwd, bwd=bwd)
    assert recipe.capability == ((9, 0) if fwd == "e5m2" else (8, 9)) and Fp8Current.capability == (8, 9)
    module = importlib.import_module("funcops.library.ops.coded_linear")
    monkeypatch.setattr(module, "check", lambda *given: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    x = types.SimpleNamespace(is_cuda=True, device="cuda", dtype=torch.float32)
    params = qlinear.init(QLinearConfig(32, 32, recipe), key=random.key(0))
    for served in (False, True):
        monkeypatch.setattr(module, "SERVED", served)
        module.check_params("qlinear_fwd", params, x, QLinearConfig(32, 32, Fp8Current(fwd=fwd, bwd=bwd, emulate=True)))
        said = r"capability \(9, 0\) or above" if fwd == "e5m2" else "torch must be of CUDA 12.9 or later.*emulate=True"
        passes = served and fwd == "e4m3"
        with nullcontext() if passes else pytest.raises(RuntimeError, match=said):
            module.check_params("qlinear_fwd", params, x, QLinearConfig(32, 32, recipe))
