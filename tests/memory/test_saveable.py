"""`without_params` and `with_params`: residuals and pendings of every op and of compositions hold no weights, go through a pickle
and a checkpoint, and give the same bits with the params put back; without them every backward names what it lacks."""

import pickle
import random as pyrandom
import subprocess
import sys

import pytest
import torch
from law_cases import MODULES, turns

from funcops import (
    ChainConfig,
    Compress,
    InterleaveConfig,
    LinearConfig,
    Needs,
    Offload,
    Policy,
    Recompute,
    RepeatConfig,
    RMSNormConfig,
    SkipConfig,
    StaleResidualError,
    Step,
    TorchConfig,
    WithExtras,
    chain,
    checkpoint,
    dist,
    donate,
    fused,
    interleave,
    linear,
    models,
    op_from_module,
    op_from_torch,
    random,
    remat,
    repeat,
    report,
    rms_norm,
    skip,
    with_params,
    with_policy,
    without_params,
)
from funcops.engine.errors import DonatedError
from funcops.engine.residuals.report import storages
from funcops.engine.trees import dense, leaves, replace, tensors, tree_map, tree_map_tensors
from funcops.lora import lora_needs, with_lora
from funcops.low_precision import NF4, Fp8Block, Fp8Current, quantize_params, quantize_weights, weight_only, with_recipe
from funcops.memory.saveable import LeftOut
from funcops.models.blocks import block_config, gpt2_block_config, mlp_config
from funcops.testing import run_ranks
from funcops.testing.checks import same_bits

GOT = r"got params\.\S*, left out by without_params: with_params\(kept, params\) puts it back"
LEFT_OUT = "must be .*" + GOT


def gradient_of(y):
    floats = tree_map(lambda t: t if t is not None and t.is_floating_point() else None, dense(y))
    return tree_map_tensors(lambda t: torch.sin(torch.arange(t.numel(), dtype=torch.float64)).reshape(t.shape).to(t), floats)


def left_out(tree):
    return [leaf for leaf in leaves(tree) if isinstance(leaf, LeftOut)]


def sent(tree):
    return pickle.loads(pickle.dumps(tree))


def check(op, params, x, cfg, needs=Needs.ALL, ask=None):
    """Returns the number of leaves that were left out."""
    y, kept = op.fwd(params, x, cfg, needs=needs)
    if kept is None:
        return 0
    dy = gradient_of(y)
    want = op.bwd(kept, dy, cfg)
    small, none = without_params(kept, params, digest=bool(ask)), tree_map_tensors(lambda t: t, params)
    assert not storages(small).keys() & storages(params).keys(), "a weight is left"
    assert report(kept).kept_bytes >= report(small).kept_bytes
    if left_out(small):
        for run in (op.bwd, op.dgrad, lambda node, *rest: op.bwd(donate(node), *rest)):
            with pytest.raises(TypeError, match=LEFT_OUT):
                run(sent(small), dy, cfg)
    for back in (with_params(small, params), with_params(sent(small), none)):
        same_bits(op.bwd(back, dy, cfg), want, op.name)
        dx, pending = op.dgrad(back, dy, cfg)
        waiting = without_params(pending, params)
        assert not storages(waiting).keys() & storages(params).keys(), "a weight is left in the pending"
        same_bits((op.wgrad(with_params(sent(waiting), none), cfg), dx), want, op.name)
    same_bits(op.bwd(donate(with_params(sent(small), params)), dy, cfg), want, op.name)
    same_bits(op.bwd(kept, dy, cfg), want, "what was given stays")
    return len(left_out(small))


@pytest.mark.parametrize("name", MODULES)
def test_residuals_of_every_op(name):
    cases = [(case, dtype) for case, dtype in turns() if case in MODULES[name].CASES]
    for case, dtype in cases:
        check(case.op, *case.make(dtype), case.cfg)


D, KEY, PLACES = 16, {"key": random.key(3)}, {"positions": torch.arange(4)}
TIED = ChainConfig(
    steps=(Step("a", linear, LinearConfig(D, D)), Step("norm", rms_norm, RMSNormConfig(D)), Step("b", linear, LinearConfig(D, D))),
    ties={"b.weight": "a.weight", "b.bias": "a.bias"},
)


def bodies():
    """Models of every kind: op, config and x's extras."""
    mlp = mlp_config(D, 24)
    return {
        "llama": (repeat, RepeatConfig(chain, block_config(D, 2, 24), 3), PLACES),
        "gpt-2": (repeat, RepeatConfig(chain, gpt2_block_config(D, 2, 24, 0.1), 2), KEY),
        "stacked": (repeat, RepeatConfig(skip, SkipConfig(chain, mlp), 3, stacked=True), {}),
        "nested": (repeat, RepeatConfig(repeat, RepeatConfig(chain, mlp, 2, stacked=True), 2), {}),
        "tied": (chain, TIED, {}),
        "interleave": (interleave, InterleaveConfig(chain, mlp, 2), {}),
        "remat": (chain, ChainConfig(steps=(Step("m", remat(chain), mlp), Step("n", rms_norm, RMSNormConfig(D)))), {}),
        "adapters": (repeat, with_lora(RepeatConfig(chain, mlp, 2), 2, ("*.up", "*.down")), {}),
        "codes": (chain, ChainConfig(steps=(Step("w", weight_only(linear, NF4()), LinearConfig(D, D)), Step("m", chain, mlp))), {}),
        "fp8": (repeat, with_recipe(RepeatConfig(chain, mlp, 2), Fp8Current()), {}),
        "blocks of fp8": (repeat, with_recipe(RepeatConfig(chain, mlp, 2, stacked=True), Fp8Block()), {}),
    }


POLICIES = [
    "save_all",
    "minimal",
    "offload_block_inputs",
    Policy({"*": Recompute()}, optional=True),
    Policy({"*0*": Recompute(), "*.x": Compress("int8")}, optional=True),
    Policy({"*.down": Offload(), "*.up": Recompute()}, optional=True),
]


@pytest.mark.turns("name", every=4)
@pytest.mark.parametrize("name", bodies())
def test_residuals_of_compositions_under_policies(name):
    rng, found = pyrandom.Random(name), 0
    op, cfg, extras = bodies()[name]
    params = op.init(cfg, key=random.key(0), dtype=torch.float32)
    if name == "codes":
        params = quantize_weights(params, cfg)
    elif "fp8" in name:
        params = quantize_params(params, cfg, None, dtype=torch.float32)
    x = random.normal(random.key(1), (2, 4, D))
    x = WithExtras(x, dict(extras)) if extras else x
    needs = [Needs.ALL, Needs(x=False), Needs(params=False), *([lora_needs(cfg)] if name == "adapters" else [])]
    for policy in (None, *POLICIES):
        under = op if policy is None else with_policy(op, policy)
        found += check(under, params, x, cfg, rng.choice(needs) if name != "codes" else Needs(params=False), ask=rng.random() < 0.3)
    assert found


def test_residuals_of_a_decoder_with_joined_loss():
    """Its head and loss run as one, and its weights are tied; so are the layers under rules of their own."""
    cfg = models.DecoderConfig(vocab=80, dim=D, layers=3, heads=2, kv_heads=1, head_size=8, hidden=24, context=6, tied=True)
    whole, ids = models.decoder(cfg, loss=True), torch.randint(80, (2, 6), generator=torch.Generator().manual_seed(0))
    params = {**chain.init(models.decoder(cfg), key=random.key(0), dtype=torch.float32), "loss": None}
    x = models.decoder_x(cfg, ids, torch.float32, labels=ids)
    for op in (chain, with_policy(chain, Policy({"blocks.1-2.mlp": Recompute(), "blocks.0": Recompute()}))):
        assert check(op, params, x, whole)


def test_weights_in_one_memory():
    """Each of three weights that share a storage is known by its place in it."""
    cfg = block_config(D, 2, 24)
    params = fused.pack_qkv(chain.init(cfg, key=random.key(0)), cfg)
    assert check(chain, params, WithExtras(torch.randn(2, 4, D), dict(PLACES)), cfg)


def test_functions_and_modules_as_ops():
    module = torch.nn.Sequential(torch.nn.Linear(D, 24), torch.nn.GELU(), torch.nn.Linear(24, D))
    x = torch.randn(3, D)
    op, params = op_from_module(module, x)
    assert check(op, params, x, TorchConfig())
    init = lambda cfg, *, key, device, dtype: {"w": torch.randn(D, D)}  # noqa: E731
    own = op_from_torch(lambda params, x, cfg: torch.tanh(x @ params["w"]) @ params["w"].t(), name="own", init=init)
    assert check(own, {"w": torch.randn(D, D)}, x, TorchConfig())


def test_shards_of_params():
    """Residuals of layers whose params are sharded hold this rank's shards: these are left out."""

    def run(mesh):
        steps = (Step("up", linear, LinearConfig(D, 24)), Step("layers", repeat, RepeatConfig(chain, mlp_config(24, 16), 2)))
        cfg = dist.zero3(ChainConfig(steps=steps), mesh["dp"])
        params = chain.init(cfg, key=random.key(0))
        x = random.normal(random.fold_in(random.key(1), mesh.rank), (2, D))
        y, kept = chain.fwd(params, x, cfg)
        want, small = chain.bwd(kept, y, cfg), without_params(kept, params)
        assert left_out(small) and not storages(small).keys() & storages(params).keys()
        same_bits(chain.bwd(with_params(sent(small), params), y, cfg), want, "")

    run_ranks({"dp": 2}, run)


CFG = SkipConfig(chain, mlp_config(D, 24))


def small_one(digest=False, times=None):
    op, cfg = (skip, CFG) if times is None else (repeat, RepeatConfig(skip, CFG, times, stacked=True))
    params, x = op.init(cfg, key=random.key(0)), random.normal(random.key(1), (3, D))
    y, kept = op.fwd(params, x, cfg)
    return op, cfg, params, y, kept, without_params(kept, params, digest=digest)


def test_params_are_checked_by_path():
    op, cfg, params, y, kept, small = small_one(digest=True)
    up = params["up"]
    wrong = {
        r"params must be a tree with the leaves of the forward's params, got missing \['up.weight'\], extra \[\]": replace(
            up, weight=None
        ),
        r"params must be a tree .* got missing \[\], extra \['up.bias'\]": replace(up, bias=torch.zeros(48)),
        r"params.up.weight must be float32\[48, 16\], got float32\[47, 16\]": replace(up, weight=up.weight[:47]),
        r"params.up.weight must be the values of the forward \(by their digest\), got others": replace(up, weight=up.weight + 1),
    }
    for message, other in wrong.items():
        with pytest.raises(ValueError, match="with_params: " + message):
            with_params(small, {**params, "up": other})
    with pytest.raises(TypeError, match=r"with_params: params.up.weight must be float32\[48, 16\], got float64\[48, 16\]"):
        with_params(small, {**params, "up": replace(up, weight=up.weight.double())})
    with pytest.raises(ValueError, match=r"missing \['down.weight', 'norm.weight'\] and 1 more, extra \[\]"):
        with_params(small, None)
    for function in (without_params, with_params):
        with pytest.raises(TypeError, match=f"{function.__name__}: kept must be residuals or pending of an op, got float32"):
            function(y, params)
        with pytest.raises(DonatedError):
            function(donate(op.fwd(params, y, cfg)[1]), params)
        assert function(None, params) is None
    with pytest.raises(ValueError, match=r"without_params: kept.norm.weight must be a leaf of params, as the forward was given it"):
        without_params(kept, tree_map_tensors(torch.clone, params))


def test_the_first_leaf_without_a_tensor_is_named():
    op, cfg, params, y, _, small = small_one(times=3)
    with pytest.raises(TypeError, match=r"^2.*linear_bwd: residuals.weight must be float32\[16, 24\], .*, " + GOT):
        op.bwd(small, y, cfg)
    assert small[0]["down"].weight == "down.weight"


@pytest.mark.parametrize("what", ["a weight before", "a weight between", "x between"])
def test_what_was_written_to_is_stale(what):
    op, cfg = repeat, RepeatConfig(skip, CFG, 2, stacked=True)
    params, x = op.init(cfg, key=random.key(0)), random.normal(random.key(1), (3, D))
    y, kept = op.fwd(params, x, cfg)
    if what == "a weight before":
        params["up"].weight.add_(1)
        with pytest.raises(StaleResidualError, match=r"without_params: residuals\.\S*weight"):
            without_params(kept, params)
        return
    small = without_params(kept, params)
    (params["up"].weight if what == "a weight between" else x).add_(1)
    with pytest.raises(StaleResidualError):
        op.bwd(with_params(small, params), y, cfg)


@pytest.mark.parametrize("times", [None, 3], ids=["plain", "stacked"])
def test_weights_of_other_strides_take_the_places(times):
    """Views of a stacked leaf are made anew from a tensor with other strides, as one from a file may have."""
    op, cfg, params, y, kept, small = small_one(times=times)
    other = tree_map_tensors(lambda t: t.clone().transpose(0, -1).contiguous().transpose(0, -1), params)
    found, want = op.bwd(with_params(sent(small), other), y, cfg), op.bwd(kept, y, cfg)
    assert any(a.stride() != b.stride() for a, b in zip(tensors(other), tensors(params), strict=True))
    for a, b in zip(tensors(found), tensors(want), strict=True):
        torch.testing.assert_close(a, b)


def test_a_checkpoint_holds_what_is_left(tmp_path):
    op, cfg, params, y, kept, small = small_one(times=3)
    checkpoint.save(small, tmp_path / "kept.safetensors")
    like = tree_map_tensors(torch.empty_like, small)
    back = checkpoint.load(tmp_path / "kept.safetensors", like)
    same_bits(op.bwd(with_params(back, params), y, cfg), op.bwd(kept, y, cfg), "")
    weights = sum(t.nbytes for t in tensors(params))
    assert (tmp_path / "kept.safetensors").stat().st_size < sum(storages(kept).values()) - 0.9 * weights + 4096


OTHER = """
import pickle, sys, torch
torch.set_num_threads(1)  # a sum over rows has other bits on more threads
from funcops import RepeatConfig, SkipConfig, chain, random, repeat, skip, with_params
from funcops.models.blocks import mlp_config
small, y = pickle.load(open(sys.argv[1], "rb"))
cfg = RepeatConfig(skip, SkipConfig(chain, mlp_config(16, 24)), 3, stacked=True)
params = repeat.init(cfg, key=random.key(0))
pickle.dump(repeat.bwd(with_params(small, params), y, cfg), open(sys.argv[1] + ".out", "wb"))
"""


def test_a_backward_in_another_process(tmp_path):
    op, cfg, params, y, kept, small = small_one(digest=True, times=3)
    (tmp_path / "sent").write_bytes(pickle.dumps((small, y)))
    subprocess.run([sys.executable, "-c", OTHER, str(tmp_path / "sent")], check=True, timeout=300)
    same_bits(pickle.loads((tmp_path / "sent.out").read_bytes()), op.bwd(kept, y, cfg), "")
