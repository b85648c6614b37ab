"""Errors that newcomers met end with the remedy."""

import pytest
import torch

import funcops
from funcops import (
    AddConfig,
    AttentionConfig,
    ChainConfig,
    DropoutConfig,
    LinearConfig,
    Needs,
    Policy,
    Recompute,
    RopeConfig,
    Step,
    batch_wgrads,
    chain,
    differentiable,
    dist,
    donate,
    linear,
    nn,
    qlinear,
    random,
    remat,
    rope,
    value_and_grad,
    vjp,
    with_policy,
)
from funcops.lora import lora_init, merge, with_lora
from funcops.low_precision import NF4, NVFP4, Fp8Block, quantize_params, quantize_weights, with_recipe, with_weight_only
from funcops.models import DecoderConfig, decoder, to_hf
from funcops.models.blocks import block_config
from funcops.schedule import Schedule

CFG = ChainConfig(steps=(Step("up", linear, LinearConfig(64, 64)), Step("down", linear, LinearConfig(64, 64))))
LOW = with_recipe(LinearConfig(64, 64), Fp8Block())


def params(cfg=CFG):
    return chain.init(cfg, key=random.key(0))


def merged():
    cfg = with_lora(with_recipe(CFG, Fp8Block()), rank=2, targets=("up",))
    return merge(quantize_params(lora_init(params(), cfg, key=random.key(1)), cfg), cfg)


def donated():
    _, residuals = chain.fwd(params(), torch.ones(2, 64), CFG)
    return donate(residuals)["up"]


def written():
    sizes = dict(vocab=64, dim=64, layers=1, heads=4, kv_heads=2, head_size=16, hidden=64, context=64, family="llama")
    cfg = DecoderConfig(**sizes, rope=RopeConfig(16))
    codes = quantize_weights(chain.init(decoder(cfg), key=random.key(0)), with_weight_only(decoder(cfg), NF4(), skip=("head",)))
    to_hf(codes, cfg, "never written")


def low(dtype):
    return qlinear.fwd(quantize_params(qlinear.init(LOW, key=random.key(0)), LOW), torch.ones(32, 64, dtype=dtype), LOW)


MODULE = torch.nn.Linear(2, 2)
TAKE_OPS = {
    "value_and_grad": value_and_grad,
    "vjp": lambda fn: vjp(fn, torch.ones(2)),  # as JAX has it
    "batch_wgrads": batch_wgrads,
    "Step": lambda fn: Step("one", fn, LinearConfig(2, 2)),
    "remat": remat,
    "with_policy": lambda fn: with_policy(fn, "save_all"),
    "differentiable": differentiable,
}
# what the first step of a chain with one tensor for x lacks
TUPLES = {"dropout": ("key",), "rope": ("positions",), "add": ("b",), "attention": ("k", "v"), "cross_entropy": ("labels",)}
CONFIGS = {"dropout": DropoutConfig(0.5), "rope": RopeConfig(8), "add": AddConfig(), "attention": AttentionConfig()}
TAKES = r"x must be a tuple \(.*\), got float32\[2, 8\]: a step of a chain takes .* with Step\(..., takes=\('%s'"


def alone(name):
    op = getattr(funcops, name)
    cfg = ChainConfig(steps=(Step("one", op, CONFIGS.get(name) or op.config()),))
    chain.fwd({"one": None}, torch.ones(2, 8), cfg)


REMEDIES = {
    "heads": (lambda: block_config(64, 5, 96), r"block_config: heads must be a divisor of dim 64, got 5"),
    "a file's name": (
        lambda: Schedule.from_csv("mine.csv"),
        r"got the name of one: Path\('mine.csv'\).read_text\(\) gives its text",
    ),
    "a torch module": (lambda: nn.functional(torch.nn.Linear(2, 2)), r"got Linear: call funcops.nn.from_torch\(module\) first"),
    "float positions": (
        lambda: rope.fwd(None, (torch.ones(5, 2, 8), torch.ones(5)), RopeConfig(8)),
        r"x.1 must be positions of int64, or their table \(rope_table\) \[5, 1, 24\], got float32\[5\]",
    ),
    "a path": (
        lambda: with_policy(chain, Policy({"dwn": Recompute()})).fwd(params(), torch.ones(2, 64), CFG),
        r"got 'dwn', nearest down, .*\(\d+ in all: report\(residuals\) lists them\)",
    ),
    "y of many numbers": (
        lambda: value_and_grad(chain)(params(), torch.ones(2, 64), CFG),
        r"got float32\[2, 64\]: end the chain with a loss, or call vjp with a dy",
    ),
    **{
        f"{what} {'a module' if fn is MODULE else 'a function'}": (
            lambda call=call, fn=fn: call(fn),
            rf"^{what}.*: op must be Op, got \w+: op_from_torch\(fn\) makes one of fn\(params, x, cfg\) -> y, op_from_module\(",
        )
        for fn in (lambda x: x, MODULE)
        for what, call in TAKE_OPS.items()
    },
    **{f"a tuple for {name}": (lambda name=name: alone(name), TAKES % "', '".join(names)) for name, names in TUPLES.items()},
    **{
        f"batch_wgrads, {how!r}": (
            lambda how=how: batch_wgrads(chain, [None], CFG, how=how),
            rf"how must be None, or one of 'each', 'concatenate', 'batch', 'group'{meant}, got {how!r}",
        )
        for how, meant in (("one", ""), (3, ""), ("bacth", r" \(did you mean 'batch'\?\)"))
    },
    "codes merged": (merged, r"merge before the weights are quantised, or funcops.low_precision.dense\(params\) first"),
    "a donated tree": (donated, r"must not be looked into, .*: take its parts first, and donate each"),
    "another op's config": (
        lambda: linear.init(LOW),
        r"linear_init: cfg must be LinearConfig, got QLinearConfig: call qlinear_init",
    ),
    "another op's config, fwd": (lambda: linear.fwd(None, torch.ones(2, 64), LOW), r"got QLinearConfig: call qlinear_fwd"),
    "codes of another dtype": (lambda: low(torch.float32), r"quantize_params\(params, cfg, dtype=torch.float32\)"),
    "no key": (
        lambda: quantize_params(params(), with_recipe(CFG, NVFP4())),
        r"key must be a random key, .* another in each step, as random.fold_in\(key, step\), .*; or stochastic=False\), got None",
    ),
    "no layer left": (
        lambda: with_recipe(CFG, Fp8Block(), skip=("up", "down")),
        r"with_recipe: skip must be globs that leave one of the linear layers up, down, got \('up', 'down'\), which names them all",
    ),
    "a format of weights": (lambda: with_recipe(CFG, NF4()), r"a format of weights alone: with_weight_only"),
    "the class of a format": (lambda: with_weight_only(CFG, NF4), r"format must be a Format or an NF4, got the class NF4: call it"),
    "codes as a checkpoint": (
        written,
        r"blocks.0.* must be a tensor \(low_precision.dense decodes it\), or codes by rows of e4m3 or e2m1, got NF4",
    ),
    "processes": (lambda: dist.Mesh.of({"tp": 2}), r"start it by torchrun --nproc-per-node 2"),
    "a wrong path of needs": (
        lambda: chain.fwd(params(), torch.ones(2, 64), CFG, needs=Needs(params=["*.weight"])),
        r"got '\*.weight' \(needs take no globs\)",
    ),
    "uneven dtypes": (
        lambda: chain.fwd(params(), torch.ones(2, 64, dtype=torch.float64), CFG),
        r"x is float64, cast one of them \(funcops.trees.cast\)",
    ),
    **{
        f"target {glob}": (
            lambda glob=glob: with_lora(block_config(64, 4, 96), rank=2, targets=(glob,)),
            rf"got '{glob}'{said}".replace("*", r"\*"),
        )
        for glob, said in (
            ("q_proj", ", nearest '*.q.proj'"),
            ("q", ", nearest '*.q.proj'"),
            ("down_proj", ", nearest '*.down'"),
            ("all-linear", ": write '*' for every linear"),
        )
    },
}


@pytest.mark.parametrize("case", REMEDIES)
def test_an_error_ends_with_the_remedy(case):
    call, message = REMEDIES[case]
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        call()
