"""Sharded experts equal one process, in whole blocks too; dx is sent before the products of dw; capacity drops tokens."""

import threading

import pytest
import torch
from dist_cases import parallel_experts

from funcops import ExpertsConfig, RouteConfig, WithExtras, chain, dist, experts, random, walk
from funcops.distributed import comm
from funcops.distributed.ops import _tokens
from funcops.distributed.ops import parallel_experts as home
from funcops.engine.trees import paths, put, tensors, tree_map_tensors
from funcops.graphs import check_capturable
from funcops.low_precision import (
    MXFP8,
    NVFP4,
    Fp8Block,
    Fp8Current,
    Fp8Delayed,
    quantize_params,
    recipe_init,
    split_amaxes,
    with_recipe,
)
from funcops.models import MoEConfig, moe
from funcops.testing import check_dist, run_ranks
from funcops.testing.checks import same_bits
from funcops.testing.tolerances import assert_close


def test_experts_equal_one_process():
    check_dist(dist.parallel_experts, parallel_experts((1, 2), 3, 3, 2, True), sizes=(1, 2, 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [((2,), 2, 3, 2, False), ((1, 2), 1, 3, 2, False, 1), ((0, 3), 2, 2, 2, True), ((1,), 8, 2, 3, False)]
)
def test_experts_equal_one_process_however_they_are_chosen(case):
    """All tokens to one, no tokens, every expert."""
    check_dist(dist.parallel_experts, parallel_experts(*case))


MIXTURE = moe(MoEConfig(route=RouteConfig(8, 2), experts=ExpertsConfig(8, 6, 4), shared=3))


def block(seed=0):
    params = chain.init(MIXTURE, key=random.key(seed), dtype=torch.float64)
    x, dy = torch.randn(2, 8, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return params, x, dy


def backward(params, x, dy, cfg):
    y, kept = chain.fwd(params, x, cfg)
    return y, chain.bwd(kept, WithExtras(dy, {"load": None, "loss": None}), cfg)


@pytest.mark.parametrize("axis", ["tp", "ep"])
def test_experts_are_where_ranks_have_rows_of_their_own(axis):
    mesh, rules = dist.Mesh.abstract({axis: 2}, 0), {"*.experts": "expert"}
    said = f"^parallel: moe.routed.experts, of experts over '{axis}', must be where ranks have rows of their own, got sharded only"
    with pytest.raises(ValueError, match=f"{said} along rows$"):
        dist.parallel(MIXTURE, rules, mesh, axis=axis, experts=axis, sequence_parallel=False)
    made = dist.parallel(MIXTURE, rules, mesh, axis=axis, experts=axis)
    assert [part.op for part in walk(made) if part.path == "moe.routed.experts"] == [dist.parallel_experts]


@pytest.mark.parametrize("n", [2, 4])
def test_a_block_on_ranks_equals_one_process(n):
    """Each rank has rows of its own; gradients of replicated params are sums over ranks, gradients of experts are whole."""
    params, x, dy = block()
    y, (grads, dx) = backward(params, x, dy, MIXTURE)

    def on_rank(mesh):
        ep = mesh["ep"]
        cfg = dist.parallel(MIXTURE, {"*.experts": "expert"}, mesh, axis="ep")
        specs = dist.specs_of(chain, cfg)
        own = dist.shard(params, specs, mesh)
        y, (grads, dx) = backward(own, x.chunk(n)[ep.rank], dy.chunk(n)[ep.rank], cfg)
        summed = {
            path: g if path in specs and specs[path].axis else comm.sum_over(g, ep)
            for path, g in paths(grads).items()
            if g is not None
        }
        return (
            y,
            dx,
            summed,
            comm.sum_over(y.extras["load"], ep),
            {path: g for path, g in paths(dist.shard(params, specs, mesh)).items()},
        )

    found = run_ranks({"ep": n}, on_rank)
    assert_close(torch.cat([one[0].main for one in found]), y.main, dtype=torch.float64)
    assert_close(torch.cat([one[1] for one in found]), dx, dtype=torch.float64)
    assert all(torch.equal(one[3], y.extras["load"]) for one in found)
    for path, want in paths(grads).items():
        got = [one[2][path] for one in found if want is not None]
        if got:
            assert_close(torch.cat(got) if ".experts." in path else got[0], want, dtype=torch.float64, what=path)


def test_dx_leaves_before_the_products_of_dw(monkeypatch):
    params, x, dy = block()
    of, log = experts.init(ExpertsConfig(8, 6, 4), key=random.key(0), dtype=torch.float64), []
    first = set()  # the thread of the first rank: ranks are threads, and what is patched is all ranks'
    indices = torch.rand(8, 8, generator=torch.Generator().manual_seed(1)).argsort(-1)[:, :2].int()
    given, rows = (torch.rand(8, 2, dtype=torch.float64), x[:, 0].contiguous(), indices), dy[:, 0].contiguous()

    def noted(name, home, fn):
        def noting(*args, **options):
            if threading.get_ident() in first:
                log.append(name)
            return fn(*args, **options)

        monkeypatch.setattr(home, fn.__name__, noting)

    def on_rank(mesh):
        ep = mesh["ep"]
        cfg = dist.ParallelExpertsConfig(8, 6, 4, axis=ep)
        own = dist.shard(of, cfg.specs, mesh)
        _, kept = dist.parallel_experts.fwd(own, tree_map_tensors(lambda t: t.chunk(2)[ep.rank], given), cfg)
        if ep.rank == 0:
            first.add(threading.get_ident())
            noted("all to all", comm, comm.start_all_to_all)
            noted("dgrad", home, home.experts_dgrad)
            noted("wgrad", home, home.experts_wgrad)
            noted("wait", comm, comm.wait)
        dist.parallel_experts.bwd(kept, rows.chunk(2)[ep.rank], cfg)

    run_ranks({"ep": 2}, on_rank)
    program = log
    assert program[-1] == "wait" and program.index("dgrad") < program.index("wgrad")
    between = program[program.index("dgrad") : program.index("wgrad")]
    assert between.count("all to all") == 2 and "wait" not in between


def test_a_rank_takes_no_tokens_beyond_capacity():
    """Each rank sends 4 tokens to the first rank, which has two slots for each: the last two get zeros, and no gradient."""
    of = experts.init(ExpertsConfig(4, 3, 2), key=random.key(0), dtype=torch.float64)
    tokens, weights = torch.randn(8, 3, dtype=torch.float64), torch.ones(8, 1, dtype=torch.float64)
    whole, _ = experts.fwd(of, (weights, tokens, torch.zeros(8, 1, dtype=torch.int32)), ExpertsConfig(4, 3, 2))

    def on_rank(mesh):
        ep = mesh["ep"]
        cfg = dist.ParallelExpertsConfig(4, 3, 2, axis=ep, capacity=0.5)
        x = weights.chunk(2)[ep.rank], tokens.chunk(2)[ep.rank], torch.zeros(4, 1, dtype=torch.int32)
        y, kept = dist.parallel_experts.fwd(dist.shard(of, cfg.specs, mesh), x, cfg)
        _, (d_weights, dx, _) = dist.parallel_experts.bwd(kept, torch.ones_like(y), cfg)
        return y, d_weights, dx

    for rank, (y, d_weights, dx) in enumerate(run_ranks({"ep": 2}, on_rank)):
        assert_close(y[:2], whole.chunk(2)[rank][:2], dtype=torch.float64)
        assert dx[:2].any(1).all() and not any(t[2:].any() for t in (y, d_weights, dx))


@pytest.mark.parametrize("path", ["up.weight", "up.bias", "down.weight", "down.bias"])
def test_a_backward_refuses_an_accumulator_in_its_own_name(path):
    """Nothing is added to the others."""
    cfg = dist.ParallelExpertsConfig(4, 6, 5, axis=dist.Mesh.abstract({"ep": 1}, 0)["ep"], bias=True)
    params = dist.parallel_experts.init(cfg, key=random.key(0))
    x = torch.ones(3, 2), torch.randn(3, 6), torch.tensor([[0, 1], [1, 2], [3, 0]])
    y, kept = dist.parallel_experts.fwd(params, x, cfg)
    zeros = tree_map_tensors(torch.zeros_like, params)
    into = put(zeros, path, paths(zeros)[path][..., :-1])
    with pytest.raises(ValueError, match=rf"^parallel_experts_bwd: into\.{path} must be "):
        dist.parallel_experts.bwd(kept, y, cfg, into=into)
    assert not any(t.any() for t in tensors(into))


def test_specs_of_a_mixture_in_low_precision():
    """Its experts are steps with one class of params; some have no params."""
    low = with_recipe(MIXTURE, Fp8Current(), only=("*.experts",))
    assert low != MIXTURE and dist.specs_of(chain, low) == {}


WIDE = moe(MoEConfig(route=RouteConfig(4, 2), experts=ExpertsConfig(4, 128, 128)))
RECIPES = (Fp8Block(), Fp8Current(keep="input"), Fp8Delayed(history=2), MXFP8(), NVFP4(stochastic=False))


def low_step(cfg, params, x, dy, state):
    """y, dx, gradients and amaxes, in both halves."""
    work, dy = quantize_params(params, cfg, state, dtype=torch.float64), WithExtras(dy, {"load": None, "loss": None})
    y, kept = chain.fwd(work, x, cfg)
    dparams, dx = chain.bwd(kept, dy, cfg)
    dx_again, pending = chain.dgrad(kept, dy, cfg)
    same_bits((dparams, dx), (chain.wgrad(pending, cfg), dx_again), "the halves")
    return y.main, dx, *split_amaxes(dparams)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda one: type(one).__name__)
def test_experts_with_a_recipe_have_the_codes_of_one_process(recipe):
    """The recipe before or after, and the params of one process's init; an expert's rows are in the order of all tokens."""
    low, draw = with_recipe(WIDE, recipe, skip=("gate",)), torch.Generator().manual_seed(0)
    x, dy = torch.randn(2, 64, 128, generator=draw, dtype=torch.float64)
    whole = chain.init(low, key=random.key(1), dtype=torch.float64)
    y, dx, wanted, amaxes = low_step(low, whole, x, dy, recipe_init(low, whole))

    def run(mesh):
        ep, rules = mesh["ep"], {"experts": "expert"}
        cfg = dist.parallel(low, rules, mesh, axis="ep")
        assert cfg == with_recipe(dist.parallel(WIDE, rules, mesh, axis="ep"), recipe, skip=("gate",))
        specs = dist.specs_of(chain, cfg)
        own = dist.shard(whole, specs, mesh)
        same_bits(chain.init(cfg, key=random.key(1), dtype=torch.float64), own, "init")
        same_bits(dist.init(chain, cfg, specs, mesh, key=random.key(1), dtype=torch.float64), own, "dist.init")
        y, dx, dparams, found = low_step(cfg, own, x.chunk(2)[ep.rank], dy.chunk(2)[ep.rank], recipe_init(cfg, own))
        found = dist.amaxes_over(found, ep, specs=specs)
        return y, dx, dist.unshard(dist.sum_gradients(dparams, specs, mesh), specs, mesh), found

    ys, dxs, found, joined = zip(*run_ranks({"ep": 2}, run), strict=True)
    same_bits((torch.cat(ys), torch.cat(dxs)), (y, dx), "y and dx")
    for dparams in found:
        same_bits(dparams["experts"], wanted["experts"], "dw")
        assert_close(dparams["gate"].weight, wanted["gate"].weight, dtype=torch.float64)
    same_bits({path: torch.cat([one[path] for one in joined]) for path in joined[0]}, amaxes, "amaxes")


@pytest.mark.parametrize("sequence", [True, False])
def test_hidden_features_over_ranks(sequence):
    """A rank has all experts, and some hidden features of each; the shared MLP beside them is a column and a row layer."""
    mixture = moe(MoEConfig(route=RouteConfig(8, 2), experts=ExpertsConfig(8, 6, 4), shared=4))
    params, (_, x, dy) = chain.init(mixture, key=random.key(0), dtype=torch.float64), block()
    rules = {"*.experts": "hidden", "*.shared.up": "column", "*.shared.down": "row"}
    y, (grads, dx) = backward(params, x, dy, mixture)

    def on_rank(mesh):
        tp = mesh["tp"]
        cfg = dist.parallel(mixture, rules, mesh, sequence_parallel=sequence)
        specs = dist.specs_of(chain, cfg)
        own = dist.shard(params, specs, mesh)
        assert own["moe"]["routed"]["experts"].up.weight.shape == (8, 4, 6)
        same_bits(paths(chain.init(cfg, key=random.key(0), dtype=torch.float64)), paths(own), "init")
        mine, dmine = (t.chunk(2)[tp.rank] if sequence else t for t in (x, dy))
        y, (grads, dx) = backward(own, mine, dmine, cfg)
        return y.main, dx, dist.unshard(dist.sum_gradients(grads, specs, mesh), specs, mesh)

    ys, dxs, found = zip(*run_ranks({"tp": 2}, on_rank), strict=True)
    whole = (lambda parts: torch.cat(parts)) if sequence else (lambda parts: parts[1])
    assert_close(whole(ys), y.main, dtype=torch.float64)
    assert_close(whole(dxs), dx, dtype=torch.float64)
    for path, want in paths(grads).items():
        if want is not None:
            assert_close(paths(found[1])[path], want, dtype=torch.float64, what=path)


def test_hidden_features_of_experts_have_no_bias_and_no_recipe():
    tp = dist.Mesh.abstract({"tp": 2}, 0)["tp"]
    with pytest.raises(ValueError, match="^ParallelExpertsConfig: bias must be False with shards='hidden'"):
        dist.ParallelExpertsConfig(4, 8, 8, axis=tp, shards="hidden", bias=True, sequence_parallel=True)
    cfg = dist.parallel(MIXTURE, {"*.experts": "hidden"}, dist.Mesh.abstract({"tp": 2}, 0))
    with pytest.raises(ValueError, match="ParallelExpertsConfig: shards must be 'experts' with a recipe or adapters"):
        with_recipe(cfg, Fp8Current(), only=("*.experts",))


def test_places_need_no_word_from_the_host():
    axis = dist.Mesh.abstract({"ep": 4}, 1)["ep"]
    indices = torch.rand(6, 8).argsort(-1)[:, :3].int()
    assert check_capturable(lambda ids: _tokens.token_of(_tokens.send_rows(ids, 8, None, axis), 24), indices) == []
    place = _tokens.send_rows(indices, 8, None, axis)
    token = _tokens.token_of(place, 24)
    assert token.shape == (4 * 6,)
    for t, row in enumerate(indices.tolist()):
        assert [int(token[at]) if at < 24 else None for at in place[t].tolist()] == [
            t if any(e // 2 == r for e in row) else None for r in range(4)
        ]


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (torch.ones(3, 6), r"x must be a tuple \(weights, x, indices\), got float32\[3, 6\]"),
        ((torch.ones(3, 2), torch.ones(3, 5), torch.zeros(3, 2).long()), r"x\.1 \(x\) must be \[\.\.\., 6\], got \[3, 5\]"),
        ((torch.ones(2, 2), torch.ones(3, 6), torch.zeros(3, 2).long()), r"x\.0 \(weights\) must be .*, got \[2, 2\]"),
        ((torch.ones(3, 2), torch.ones(3, 6), torch.zeros(3, 2)), r"x\.2 \(indices\) must be int32 or int64, got float32"),
    ],
)
def test_tokens_that_do_not_fit_are_refused_by_name(x, said):
    cfg = dist.ParallelExpertsConfig(4, 6, 5, axis=dist.Mesh.abstract({"ep": 1}, 0)["ep"])
    with pytest.raises((TypeError, ValueError), match=f"^parallel_experts_fwd: {said}"):
        dist.parallel_experts.fwd(dist.parallel_experts.init(cfg, key=random.key(0)), x, cfg)
