"""`pack_qkv`: the weights of q, k and v in one memory, at the same paths, and one product for the three."""

import pytest
import torch

from funcops import (
    ChainConfig,
    LinearConfig,
    ParallelConfig,
    ReshapeConfig,
    RopeConfig,
    Step,
    WithExtras,
    chain,
    checkpoint,
    fused,
    linear,
    parallel,
    random,
    reshape,
    rope,
)
from funcops.engine.backend import backend
from funcops.engine.trees import at, paths, tensors, tree_map
from funcops.library.fused import pack_qkv, siblings
from funcops.lora import lora_init, with_lora
from funcops.models.blocks import Sizes, block_config, decoder_config
from funcops.optim import AdamWConfig, adamw_init, adamw_update
from funcops.testing.tolerances import assert_close

NAMES = "qkv"
CFG = block_config(32, heads=4, hidden=48, kv_heads=2)


def weights_of(params, path="attn.qkv"):
    return [at(params, f"{path}.{name}".strip(".")).get("proj").weight for name in NAMES]


def in_one_memory(params, path="attn.qkv"):
    with torch.no_grad():
        return siblings.stacked(*weights_of(params, path)) is not None


def run(cfg, params, seed=1):
    x = WithExtras(random.normal(random.key(seed), (1, 4, 32)), {"positions": torch.arange(4)})
    with backend("triton"):
        y, kept = chain.fwd(params, x, cfg)
        dparams, dx = chain.bwd(kept, random.normal(random.key(seed + 1), tuple(y.shape)), cfg)
    return y, dparams, dx


@pytest.fixture
def widths(monkeypatch):
    """The widths of the products of q, k and v that run as one."""
    found, product = [], siblings.linear_fwd
    monkeypatch.setattr(siblings, "linear_fwd", lambda x, w, b: found.append(w.shape[0]) or product(x, w, b))
    return found


def test_every_layer_gets_one_memory_and_keeps_its_paths_and_values():
    cfg = decoder_config(Sizes(dim=32, layers=2, heads=4, kv_heads=2, hidden=48))
    params = chain.init(cfg, key=random.key(0))
    given = pack_qkv(params, cfg)
    assert all(in_one_memory(given, f"blocks.{i}.attn.qkv") and not in_one_memory(params, f"blocks.{i}.attn.qkv") for i in (0, 1))
    assert list(paths(given)) == list(paths(params))
    for path, t in paths(params).items():
        assert t is None or (torch.equal(paths(given)[path], t) and (".qkv." in path) == (paths(given)[path] is not t)), path
    again = pack_qkv(given, cfg)
    assert all(a is b for a, b in zip(tensors(again), tensors(given), strict=True))
    leaf = pack_qkv(tree_map(lambda t: t if t is None else t.clone().requires_grad_(), params), cfg)
    assert all(t.requires_grad and t.is_leaf for t in tensors(leaf))


def test_one_product_gives_what_three_give(widths):
    params = chain.init(CFG, key=random.key(0))
    want = run(CFG, params)
    assert widths == []
    assert_close(run(CFG, pack_qkv(params, CFG)), want, dtype=torch.float32, length=1024)
    assert widths == [64]


@pytest.mark.parametrize("biased", ["qkv", "k"])
def test_biases_lie_in_one_memory_too(widths, biased):
    """If only some layers have one, there are three products."""
    turned = Step("rope", rope, RopeConfig(8), takes=("positions",))

    def heads(name, n):
        proj = Step("proj", linear, LinearConfig(32, 8 * n, bias=name in biased))
        steps = proj, Step("heads", reshape, ReshapeConfig((8 * n,), (n, 8)))
        return ChainConfig(steps=steps) if name == "v" else ChainConfig(steps=(*steps, turned), extras=("positions",))

    cfg = ParallelConfig(branches=tuple(Step(name, chain, heads(name, 4 if name == "q" else 2)) for name in NAMES))
    params, x = parallel.init(cfg, key=random.key(0)), WithExtras(torch.randn(4, 32), {"positions": torch.arange(4)})
    packed = pack_qkv(params, cfg)
    with backend("triton"):
        assert_close(parallel.fwd(packed, x, cfg)[0], parallel.fwd(params, x, cfg)[0], dtype=torch.float32, length=1024)
    assert widths == ([64] if biased == "qkv" else []) and in_one_memory(packed, "")


def test_a_step_leaves_them_in_one_memory_and_a_file_does_not(tmp_path):
    params, optimiser = pack_qkv(chain.init(CFG, key=random.key(0)), CFG), AdamWConfig(lr=0.1)
    _, grads, _ = run(CFG, params)
    plain = tree_map(lambda t: t if t is None else t.clone(), params)
    state = adamw_init(params, optimiser)
    pure, _ = adamw_update(plain, grads, adamw_init(plain, optimiser), optimiser)
    again, _ = adamw_update(params, grads, state, optimiser)
    assert not torch.equal(*[weights_of(given)[0] for given in (params, again)])
    adamw_update(params, grads, state, optimiser, in_place=True)
    assert in_one_memory(params) and in_one_memory(again) and not in_one_memory(pure)
    for given in (again, pure):
        assert all(torch.equal(a, b) for a, b in zip(tensors(params), tensors(given), strict=True))
    checkpoint.save(params, tmp_path / "w")
    loaded = checkpoint.load(tmp_path / "w", like=params)
    assert not in_one_memory(loaded) and in_one_memory(pack_qkv(loaded, CFG))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_accumulators_in_one_memory_get_one_product(dtype, monkeypatch):
    """Their sums are what accumulators apart get, with the products of the three in one."""
    params, x = chain.init(CFG, key=random.key(0)), WithExtras(torch.randn(1, 4, 32), {"positions": torch.arange(4)})
    ran, gradients = [], fused.qkv.linear_gradients
    monkeypatch.setattr(fused.qkv, "linear_gradients", lambda name, dy, *a: ran.append(dy.shape[-1]) or gradients(name, dy, *a))
    found = []
    for packed, runs in ((False, []), (True, [64])):
        sums = tree_map(lambda t: None if t is None else torch.ones_like(t, dtype=dtype), params)
        sums = pack_qkv(sums, CFG) if packed else sums
        with backend("triton"):
            y, kept = chain.fwd(params, x, CFG)
            into, _ = chain.bwd(kept, y, CFG, into=sums)
        assert all(a is b for a, b in zip(tensors(into), tensors(sums), strict=True)) and ran == runs
        found.append(tree_map(lambda t: None if t is None else t.float() - 1, into))
    assert_close(found[1], found[0], dtype=torch.float32, length=4096)


def test_adapters_keep_their_base_in_one_memory(widths):
    cfg = with_lora(CFG, rank=2, targets=("*.q.proj", "*.v.proj"))
    params = chain.init(CFG, key=random.key(0))
    apart, packed = (lora_init(given, cfg, key=random.key(1)) for given in (params, pack_qkv(params, CFG)))
    found = {path: t for path, t in paths(packed).items() if path.startswith("attn.qkv") and path.endswith("weight")}
    assert len({t.untyped_storage().data_ptr() for t in found.values()}) == 1
    assert_close(run(cfg, packed), run(cfg, apart), dtype=torch.float32, length=1024)
    assert widths == []


def test_other_layers_and_other_params_stay_or_raise():
    cfg = block_config(32, heads=4, hidden=48)
    with pytest.raises(ValueError, match="pack_qkv: params must be params of cfg, with attn.qkv.q.proj, got"):
        pack_qkv({"attn": {}}, cfg)
    with pytest.raises(TypeError, match="walk: cfg must be"):
        pack_qkv({}, None)
    half = chain.init(cfg, key=random.key(0))
    half["attn"]["qkv"]["k"]["proj"].weight = half["attn"]["qkv"]["k"]["proj"].weight.bfloat16()
    assert pack_qkv(half, cfg)["attn"]["qkv"]["q"]["proj"].weight is half["attn"]["qkv"]["q"]["proj"].weight
