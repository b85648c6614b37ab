"""Weights in few bits: each path through a model gives the bits of the same model with the decoded weights."""

import pytest
import torch
from tiers import drawn

from funcops import (
    ActivationConfig,
    ChainConfig,
    IdentityConfig,
    LinearConfig,
    Needs,
    RepeatConfig,
    Step,
    activation,
    chain,
    checkpoint,
    differentiable,
    dist,
    donate,
    explain,
    fit,
    linear,
    random,
    remat,
    repeat,
    report,
    rewrite,
    trees,
    walk,
    with_policy,
)
from funcops.engine.contract.walk import Inside
from funcops.graphs import wgrads_beside
from funcops.library.ops.experts import ExpertsConfig, experts
from funcops.library.ops.grouped_linear import GroupedLinearConfig, grouped_linear
from funcops.library.ops.rope import RopeConfig
from funcops.library.ops.route import RouteConfig
from funcops.lora import adapter, lora_init, lora_needs, merge, with_adapter, with_lora
from funcops.low_precision import (
    NF4,
    Format,
    Fp8Block,
    dense,
    gradients_like,
    quantize_weight,
    quantize_weights,
    weight_only,
    with_recipe,
    with_weight_only,
)
from funcops.models import DecoderConfig, MoEConfig, decoder, decoder_x, generate, moe
from funcops.testing import run_ranks

FORMATS = {
    "nf4": NF4(),
    "nf4 double": NF4(double=True),
    "mxfp4": Format("e2m1", (1, 32), "e8m0"),
    "nvfp4": Format("e2m1", (1, 16), "e4m3"),
    "fp8 blocks": Format("e4m3", (128, 128), "float32"),
    "fp8 tensor": Format("e5m2", (0, 0), "float32"),
}
SIZES = dict(vocab=96, dim=64, layers=2, heads=4, kv_heads=2, head_size=16, hidden=96, context=32)
LLAMA = DecoderConfig(**SIZES, rope=RopeConfig(16))
TARGETS = ("*.proj", "*.out", "*.up", "*.down")
X = decoder_x(LLAMA, torch.randint(96, (2, 9), generator=torch.Generator().manual_seed(0)), dtype=torch.float32)


def mlp(stacked=False):
    steps = (
        Step("up", linear, LinearConfig(64, 128)),
        Step("act", activation, ActivationConfig("silu")),
        Step("down", linear, LinearConfig(128, 64)),
    )
    body = ChainConfig(steps=steps)
    return ChainConfig(steps=(Step("layers", repeat, RepeatConfig(chain, body, 3, stacked=stacked)),)) if stacked else body


def same(got, want):
    """Trees of gradients, bit for bit; a decoded weight's gradient is dense."""
    got, want = (trees.paths(tree, is_leaf=trees.stands_for_one) for tree in (got, want))
    assert got.keys() == want.keys()
    for path, t in want.items():
        assert (got[path] is None) if t is None else got[path].equal(t), path


def step(op, params, x, cfg, needs=Needs.ALL):
    y, residuals = op.fwd(params, x, cfg, needs=needs)
    dparams, dx = op.bwd(donate(residuals), torch.ones_like(y) + y, cfg)
    return {"y": y, "dparams": dparams, "dx": dx}


def ones(t):
    return torch.ones_like(t) if t.is_floating_point() else None


def unfused(cfg):
    """The config without rules of fusion, which do not join layers in few bits."""
    return rewrite(cfg, lambda part: Inside(changes=lambda _: {"fuse": False}) if isinstance(part.cfg, ChainConfig) else None)[1]


BASE = unfused(decoder(LLAMA))


def quantized(cfg, format, **only):
    low = with_weight_only(cfg, format, **only)
    return low, quantize_weights(chain.init(cfg, key=random.key(0), dtype=torch.float32), low)


@pytest.mark.parametrize("name, policy", drawn(FORMATS, ["save_all", "minimal", "recompute_elementwise", "compress_fp8"]))
def test_a_model_has_the_bits_of_its_decoded_weights(name, policy):
    cfg, params = quantized(BASE, FORMATS[name], skip=("head",))
    op = with_policy(chain, policy)
    same(step(op, params, X, cfg), step(op, dense(params), X, BASE))
    kept = [report(op.fwd(p, X, c)[1], p, X).kept_bytes for p, c in ((params, cfg), (dense(params), BASE))]
    assert kept[0] == kept[1], "codes are aliases, too"


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("policy", ["save_all", "minimal"])
def test_adapters_learn_beside_frozen_codes(before, policy):
    """`with_lora` before or after; params in 4 bits are a third of the bytes, with adapters, embeddings and head in float32."""
    base, plain = quantized(BASE, NF4(double=True), skip=("head",)), with_lora(BASE, 4, TARGETS)
    if before:
        cfg = with_weight_only(plain, NF4(double=True), skip=("head",))
        made = lora_init(chain.init(BASE, key=random.key(0), dtype=torch.float32), plain, key=random.key(1))
        params = quantize_weights(made, cfg)
    else:
        cfg = with_lora(base[0], 4, TARGETS)
        params = lora_init(base[1], cfg, key=random.key(1))
    own = trees.tree_map(lambda t: t + 0.1, adapter(params, cfg))
    params, needs, op = with_adapter(params, own, cfg), lora_needs(cfg), with_policy(chain, policy)
    found, wanted = (step(op, p, X, c, needs) for p, c in ((params, cfg), (dense(params), plain)))
    same(found, wanted)
    assert found["dparams"]["blocks"][0]["mlp"]["up"]["both"]["base"].weight is None
    assert trees.nbytes(params) < 0.4 * trees.nbytes(dense(params))
    merged = merge(dense(params), plain)
    assert torch.allclose(chain.fwd(merged, X, BASE)[0], found["y"], atol=1e-4)


def through_remat(cfg, params):
    return step(remat(chain), params, torch.ones(3, 64), cfg)


def through_autograd(cfg, params):
    x = torch.ones(3, 64, requires_grad=True)
    y = differentiable(chain)(params, x, cfg)
    (dx,) = torch.autograd.grad((y * y).sum(), x)
    return {"y": y.detach(), "dx": dx}


def through_a_compiler(cfg, params):
    f = torch.compile(differentiable(chain), fullgraph=True, backend="aot_eager")
    x = torch.ones(3, 64, requires_grad=True)
    y = f(params, x, cfg)
    (dx,) = torch.autograd.grad((y * y).sum(), x)
    return {"y": y.detach(), "dx": dx}


def through_halves_into_accumulators(cfg, params):
    y, residuals = chain.fwd(params, torch.ones(3, 64), cfg)
    dx, pending = chain.dgrad(residuals, y, cfg)
    return {"dx": dx, "into": chain.wgrad(pending, cfg, into=gradients_like(params))}


def through_a_checkpoint(cfg, params):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(params, f"{folder}/file.safetensors")
        params = checkpoint.load(f"{folder}/file.safetensors", params)
    return step(chain, params, torch.ones(3, 64), cfg)


def through_bfloat16(cfg, params):
    return step(chain, trees.cast(params, torch.bfloat16), torch.ones(3, 64, dtype=torch.bfloat16), cfg)


def through_codes_of_8_bits(cfg, params):
    return step(chain, params, torch.ones(3, 64), with_recipe(cfg, Fp8Block()))


WAYS = {f.__name__: f for name, f in list(globals().items()) if name.startswith("through_")}


@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.slow] * (way == "through_a_compiler")) for way in WAYS])
@pytest.mark.parametrize("format", [NF4(), NF4(double=True)], ids=lambda format: format.name)
def test_every_way_through(way, format):
    plain = unfused(mlp())
    cfg, params = quantized(plain, format)
    decoded = dense(trees.cast(params, torch.bfloat16) if way == "through_bfloat16" else params)
    found, wanted = WAYS[way](cfg, params), WAYS[way](plain, decoded)
    same(found, wanted)


@pytest.mark.parametrize("name", FORMATS)
def test_stacked_layers_are_quantised_one_by_one(name):
    plain = unfused(mlp(stacked=True))
    cfg, params = quantized(plain, FORMATS[name])
    whole = chain.init(plain, key=random.key(0), dtype=torch.float32)["layers"]["up"].weight
    for layer in range(3):
        assert dense(params)["layers"]["up"].weight[layer].equal(quantize_weight(whole[layer], FORMATS[name]).dequantize())
    same(step(chain, params, torch.ones(3, 64), cfg), step(chain, dense(params), torch.ones(3, 64), plain))


@pytest.mark.parametrize("name", FORMATS)
def test_experts(name):
    plain = unfused(moe(MoEConfig(route=RouteConfig(4, 2), experts=ExpertsConfig(4, dim=64, hidden=32))))
    x = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    lora = with_lora(plain, 2, ("experts",))
    for base in (plain, lora):
        cfg = with_weight_only(base, FORMATS[name], skip=("gate",))
        params = chain.init(plain, key=random.key(0), dtype=torch.float32)
        params = quantize_weights(lora_init(params, lora, key=random.key(1)) if base is lora else params, cfg)
        found = []
        for p, c in ((params, cfg), (dense(params), base)):
            y, residuals = chain.fwd(p, x, c)
            found.append({"y": y.main, "grads": chain.bwd(residuals, trees.tree_map(ones, y), c)})
        same(*found)


LAYERS = {
    "linear": (linear, LinearConfig(64, 32), lambda x: x),
    "groups": (grouped_linear, GroupedLinearConfig(3, 64, 32), lambda x: (x, torch.tensor([0, 2, 2, 5], dtype=torch.int32))),
    "experts": (experts, ExpertsConfig(3, dim=64, hidden=32), lambda x: (x[:, :2].abs(), x, torch.tensor([[0, 2]] * 5))),
}


@pytest.mark.turns("name", "layer", every=6)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("name", FORMATS)
def test_cast_codes_decode_to_the_dtype_that_they_were_cast_to(name, layer):
    (op, cfg, given), format = LAYERS[layer], FORMATS[name]
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    for before, after in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16), (torch.float16, torch.float64)):
        params = trees.cast(op.init(cfg, key=random.key(0), dtype=torch.float32), before)
        low, plain = params, trees.cast(params, after)
        for path in cfg.linear_weights:
            codes = quantize_weight(trees.at(params, path), format)
            low, plain = trees.put(low, path, codes), trees.put(plain, path, codes.dequantize(torch.float32).to(after))
        own = trees.cast(given(x), after)
        same(step(weight_only(op, format), trees.cast(low, after), own, cfg), step(op, plain, own, cfg))


def test_ranks():
    """Tensor parallelism, rewritten before or after; each rank quantises its own part."""
    plain, rules = unfused(mlp()), {"up": "column", "down": "row"}

    def each(mesh):
        base = dist.parallel(plain, rules, mesh)
        cfg = with_weight_only(base, NF4(double=True))
        assert cfg == dist.parallel(with_weight_only(plain, NF4(double=True)), rules, mesh)
        params = chain.init(plain, key=random.key(0), dtype=torch.float32)
        params = quantize_weights(dist.shard(params, dist.specs_of(chain, base), mesh), cfg)
        x = torch.ones(3, 64) + mesh["tp"].rank
        same(step(chain, params, x, cfg), step(chain, dense(params), x, base))
        return [step.op.name for step in cfg.steps]

    assert run_ranks({"tp": 2}, each)[0] == ["weight_only(column_linear)", "activation", "weight_only(row_linear)"]


def test_decoding_planning_and_names():
    cfg, params = quantized(decoder(LLAMA), NF4(double=True), skip=("head",))
    ids = torch.randint(96, (2, 5), generator=torch.Generator().manual_seed(1))
    for got, want in zip(generate(params, LLAMA, ids, 6, model=cfg), generate(dense(params), LLAMA, ids, 6), strict=True):
        assert got.equal(want)
    assert fit(chain, cfg, X, 10**7).picked == fit(chain, decoder(LLAMA), X, 10**7).picked
    assert "weight_only(linear)" in str(explain(with_weight_only(mlp(), NF4())))
    assert trees.same_structure(chain.init(cfg, key=random.key(0), dtype=torch.float32), params), "init makes codes"


def test_bytes():
    """0.5625 bytes an element, 0.5156 and a little for the means and largest with double quantisation."""
    weight = torch.randn(256, 1024)
    assert trees.nbytes(quantize_weight(weight, NF4())) == weight.numel() * 9 // 16
    assert trees.nbytes(quantize_weight(weight, NF4(double=True))) == weight.numel() * 33 // 64 + 4 * 16 + 4


def test_an_updated_code_is_noticed():
    cfg, params = quantized(mlp(), NF4())
    y, residuals = chain.fwd(params, torch.ones(3, 64), cfg)
    params["up"].weight.codes.add_(1)
    with pytest.raises(Exception, match=r"up.*residuals.weight.codes"):
        chain.bwd(residuals, y, cfg)


REFUSED = {
    "params.weight must be in nf4 1x64 float32: quantize_weights(params, cfg) makes it, got float32[128, 64]": lambda: chain.fwd(
        chain.init(mlp(), key=random.key(0)), torch.ones(3, 64), with_weight_only(mlp(), NF4())
    ),
    "params.weight must be in e2m1 1x32 e8m0: quantize_weights(params, cfg) makes it, got NF4Tensor": lambda: chain.fwd(
        quantized(mlp(), NF4())[1], torch.ones(3, 64), with_weight_only(mlp(), FORMATS["mxfp4"])
    ),
    "up: linear_fwd: params.weight must be float32, got bfloat16: x is float32, cast one of them": lambda: chain.fwd(
        trees.cast(quantized(mlp(), NF4())[1], torch.bfloat16), torch.ones(3, 64), with_weight_only(mlp(), NF4())
    ),
    "with_weight_only: cfg must be without a tie of head.weight, or skip=('head',), got one with it": lambda: with_weight_only(
        decoder(DecoderConfig(**SIZES, rope=RopeConfig(16), tied=True)), NF4()
    ),
    "with_weight_only: only must be globs over up, down, got 'act'": lambda: with_weight_only(mlp(), NF4(), only=("act",)),
    "with_weight_only: skip must be globs over up, down, got 'head'": lambda: with_weight_only(mlp(), NF4(), skip=("head",)),
    "with_weight_only: cfg must be the config of a combinator (of one layer take weight_only(op, format)), got LinearConfig": (
        lambda: with_weight_only(LinearConfig(64, 64), NF4())
    ),
    "quantize_weights: cfg must be one that with_weight_only made, got LinearConfig": (
        lambda: quantize_weights({}, LinearConfig(64, 64))
    ),
    "quantize_weights: cfg must be one that with_weight_only made, got ChainConfig": lambda: quantize_weights({}, mlp()),
    "quantize_weights: params must be a tree with up.weight, got": lambda: quantize_weights({}, with_weight_only(mlp(), NF4())),
    "quantize_weights: params.up.weight must be a float tensor, or in nf4 1x64 float32, got": lambda: quantize_weights(
        quantized(mlp(), FORMATS["mxfp4"])[1], with_weight_only(mlp(), NF4())
    ),
    "weight must be a matrix [O, I], or several, got [64]": lambda: quantize_weight(torch.ones(64), NF4()),
    "weight must be at least one matrix [O, I], got [0, 4, 64]": lambda: quantize_weight(torch.ones(0, 4, 64), FORMATS["mxfp4"]),
    "weight must be a float tensor [*, O, I], got": lambda: quantize_weight(torch.ones(64), FORMATS["mxfp4"]),
    "(of a model: with_weight_only(cfg, format), after with_lora), got activation": lambda: weight_only(activation, NF4()),
    "op must be a linear layer or experts (of a model: with_weight_only(cfg, format), after with_lora), got chain": lambda: (
        weight_only(chain, NF4())
    ),
    "(of a model: with_weight_only(cfg, format), after with_lora), got expert_steps": lambda: with_lora(
        with_weight_only(moe(MoEConfig(route=RouteConfig(4, 2), experts=ExpertsConfig(4, dim=64, hidden=32))), NF4()),
        2,
        ("experts",),
    ),
    "weight_only(linear)_fwd: cfg must be LinearConfig, got IdentityConfig": lambda: weight_only(linear, NF4()).fwd(
        None, torch.ones(3, 64), IdentityConfig()
    ),
}


@pytest.mark.parametrize("said", REFUSED)
def test_refused(said):
    with pytest.raises((ValueError, TypeError)) as error:
        REFUSED[said]()
    assert said in str(error.value)


def test_steps_keep_their_format():
    cfg = with_weight_only(with_weight_only(mlp(), NF4(), only=("up",)), FORMATS["mxfp4"])
    assert [str(part.op) for part in walk(cfg) if not part.composite] == [
        "weight_only(linear)",
        "activation",
        "weight_only(linear)",
    ]
    params = quantize_weights(chain.init(mlp(), key=random.key(0)), cfg)
    assert (params["up"].weight.format, params["down"].weight.format) == (NF4(), FORMATS["mxfp4"])
    assert quantize_weights(params, cfg)["up"].weight is params["up"].weight


MADE = {
    "remat": lambda op: remat(op),
    "a policy": lambda op: with_policy(op, "minimal"),
    "a policy within remat": lambda op: remat(with_policy(op, "minimal")),
}
WITHIN = {name: lambda cfg, make=make: rewrite(cfg, lambda part: (make(part.op), part.cfg) if part.cfg.linear_weights else None)[1]
          for name, make in MADE.items()} | {"a branch": wgrads_beside}  # fmt: skip


@pytest.mark.parametrize("name", WITHIN)
def test_an_op_made_of_one_in_few_bits_has_its_format(name):
    """Its weights become codes, and a second format changes nothing."""
    plain = ChainConfig(steps=(Step("layers", repeat, RepeatConfig(linear, LinearConfig(64, 64), 2)),))
    cfg = WITHIN[name](with_weight_only(plain, NF4()))
    assert with_weight_only(cfg, FORMATS["mxfp4"]) == cfg
    params = quantize_weights(chain.init(plain, key=random.key(0)), cfg)
    assert [layer.weight.format for layer in params["layers"]] == [NF4(), NF4()]


def test_params_of_another_op_are_refused_as_the_op_itself_does():
    op, cfg = weight_only(linear, FORMATS["nf4"]), LinearConfig(64, 64)
    with pytest.raises(TypeError, match=r"^linear_fwd: params must be LinearParams, got dict"):
        op.fwd({"weight": torch.ones(64, 64)}, torch.ones(2, 64), cfg)


@pytest.mark.parametrize("name", ["nf4", "nf4 double"])
def test_codes_of_a_weight_stand_for_it(name):
    weight = torch.randn(64, 256) * torch.linspace(1, 2, 64)[:, None]
    found = quantize_weight(weight, FORMATS[name]).dequantize()
    assert float(((found - weight).norm(dim=1) / weight.norm(dim=1)).max()) < 0.15
