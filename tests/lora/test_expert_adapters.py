"""Adapters beside the layers of experts: they equal merged weights, in one process and over ranks, with a recipe too."""

import pytest
import torch
from safetensors.torch import load_file

from funcops import (
    ChainConfig,
    ExpertsConfig,
    GroupedLinearConfig,
    Needs,
    RouteConfig,
    Step,
    WithExtras,
    chain,
    dist,
    grouped_linear,
    random,
)
from funcops.engine.trees import paths, tree_map_with_path
from funcops.lora import adapter, load_adapter, lora_init, lora_needs, merge, save_adapter, unmerge, with_adapter_of, with_lora
from funcops.low_precision import Fp8Block, quantize_params, with_recipe
from funcops.models import MoEConfig, moe
from funcops.testing import run_ranks
from funcops.testing.checks import same_bits

D = torch.float64


def mixture(bias, dim=16, hidden=8, weights_on="output"):
    return moe(MoEConfig(route=RouteConfig(4, 2), experts=ExpertsConfig(4, dim, hidden, bias=bias, weights_on=weights_on)))


def given(bias, weights_on="output"):
    """The base's config, the config and params with adapters whose b is drawn, x and dy."""
    draw, base = torch.Generator().manual_seed(0), mixture(bias, weights_on=weights_on)
    cfg = with_lora(base, 3, ("experts",), alpha=6.0)
    params = lora_init(chain.init(base, key=random.key(0), dtype=D), cfg, key=random.key(1))
    drawn = lambda path, t: torch.randn(t.shape, generator=draw, dtype=D) if path.endswith("lora.b") else t  # noqa: E731
    return base, cfg, tree_map_with_path(drawn, params), *torch.randn(2, 12, 16, generator=draw, dtype=D)


def step(cfg, params, x, dy, needs=Needs.ALL):
    """y, gradients and dx, in both halves."""
    y, kept = chain.fwd(params, x, cfg, needs=needs)
    dy = WithExtras(dy, {"load": None, "loss": None})
    dparams, dx = chain.bwd(kept, dy, cfg)
    again, pending = chain.dgrad(kept, dy, cfg)
    same_bits((dparams, dx), (chain.wgrad(pending, cfg), again), "the halves")
    return y.main, dparams, dx


@pytest.mark.parametrize(("bias", "weights_on"), [(False, "output"), (True, "output"), (False, "input")])
def test_adapters_of_experts_equal_merged_weights(bias, weights_on):
    """da = c b^T dw and db = c dw a^T, of each expert's dw in the merged model."""
    base, cfg, params, x, dy = given(bias, weights_on)
    assert cfg == with_lora(base, 3, ("experts.up", "*.down"), alpha=6.0)
    merged = merge(params, cfg)
    (y, dparams, dx), (wanted, dmerged, dx_merged) = step(cfg, params, x, dy), step(base, merged, x, dy)
    close = lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=1e-12)  # noqa: E731
    close(y, wanted)
    close(dx, dx_merged)
    for name in ("up", "down"):
        dw, one = getattr(dmerged["experts"], name).weight, getattr(params["experts"], name)["both"]["lora"]
        found = getattr(dparams["experts"], name)["both"]["lora"]
        close(found.a, 2.0 * one.b.mT @ dw)
        close(found.b, 2.0 * dw @ one.a.mT)
    close(paths(unmerge(merged, adapter(params, cfg), cfg)), paths(params))
    frozen = step(cfg, params, x, dy, lora_needs(cfg))[1]["experts"].up["both"]
    same_bits(frozen["lora"], dparams["experts"].up["both"]["lora"], "of adapters alone")
    assert frozen["base"].weight is None


@pytest.mark.parametrize("bias", [False, True])
def test_adapters_of_experts_over_ranks(bias):
    """In either order of the rewrites, drawn by part."""
    base, cfg, params, x, dy = given(bias)
    y, wanted, dx = step(cfg, params, x, dy)
    pretrained = chain.init(base, key=random.key(0), dtype=D)
    made = lora_init(pretrained, cfg, key=random.key(1))

    def run(mesh):
        ep, rules = mesh["ep"], {"experts": "expert"}
        own, of_base = (dist.parallel(one, rules, mesh, axis="ep") for one in (cfg, base))
        assert own == with_lora(of_base, 3, ("experts",), alpha=6.0)
        specs = dist.specs_of(chain, own)
        mine = lora_init(dist.shard(pretrained, dist.specs_of(chain, of_base), mesh), own, key=random.key(1))
        same_bits(mine, dist.shard(made, specs, mesh), "init")
        y, dparams, dx = step(own, dist.shard(params, specs, mesh), x.chunk(2)[ep.rank], dy.chunk(2)[ep.rank])
        return y, dist.unshard(dist.sum_gradients(dparams, specs, mesh), specs, mesh), dx

    ys, found, dxs = zip(*run_ranks({"ep": 2}, run), strict=True)
    for got, want in ((torch.cat(ys), y), (torch.cat(dxs), dx), (paths(found[1]), paths(wanted))):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_a_recipe_of_the_base_before_or_after():
    base, recipe = mixture(False, 128, 128), Fp8Block()
    cfg = with_recipe(with_lora(base, 2, ("*.up",)), recipe, skip=("gate",))
    assert cfg == with_lora(with_recipe(base, recipe, skip=("gate",)), 2, ("*.up",))
    work = quantize_params(chain.init(cfg, key=random.key(0)), cfg)
    _, dparams, _ = step(cfg, work, torch.randn(8, 128).bfloat16(), torch.ones(8, 128).bfloat16(), lora_needs(cfg))
    assert dparams["experts"].up["both"]["lora"].b.abs().sum() > 0


def test_a_file_has_them_by_their_paths(tmp_path):
    """Without names, as parameters of a module: the first one wrapped, lora_A of all experts one below the other."""
    base, cfg, params, *_ = given(False)
    save_adapter(tmp_path, params, cfg)
    found = load_file(tmp_path / "adapter_model.safetensors")
    shapes = {name.removeprefix("base_model.model.experts."): list(t.shape) for name, t in found.items()}
    assert shapes == {
        "base_layer.lora_A.weight": [12, 16],
        "base_layer.lora_B.weight": [16, 12],
        "lora_A.weight": [12, 8],
        "lora_B.weight": [16, 12],
    }
    again = lora_init(merge(params, cfg), cfg, key=random.key(2))
    same_bits(adapter(load_adapter(tmp_path, again, cfg), cfg), adapter(params, cfg), "read")
    assert with_adapter_of(base, tmp_path) == cfg


def test_adapters_of_sharded_experts_are_not_written(tmp_path):
    def run(mesh):
        cfg = with_lora(dist.parallel(mixture(False), {"experts": "expert"}, mesh, axis="ep"), 2, ("experts",))
        with pytest.raises(ValueError, match=r"^save_adapter: cfg must be one with unsharded adapters .*got experts.up over .*ep"):
            save_adapter(tmp_path, None, cfg)

    run_ranks({"ep": 2}, run)


def test_what_adapters_of_experts_lack_raises_by_name():
    base = mixture(False)
    with pytest.raises(ValueError, match=r"^experts.up: GroupedLowRankConfig: dropout must be 0 beside experts"):
        with_lora(base, 2, ("experts.up",), dropout=0.1)
    with pytest.raises(ValueError, match="GroupedLowRankConfig: cfg.stacked must be True"):
        apart = Step("one", grouped_linear, GroupedLinearConfig(2, 4, 3, stacked=False), takes=("offsets",))
        with_lora(ChainConfig(steps=(apart,), extras=("offsets",)), 2, ("one",))
