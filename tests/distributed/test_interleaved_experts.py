"""Microbatches side by side: the bits of one after another, and messages in flight during products of another one."""

import pytest
import torch

from funcops import (
    ChainConfig,
    ExpertsConfig,
    InterleaveConfig,
    RepeatConfig,
    RMSNormConfig,
    RouteConfig,
    SkipConfig,
    Step,
    WithExtras,
    chain,
    dist,
    donate,
    experts,
    explain,
    interleave,
    named_steps,
    random,
    remat,
    repeat,
    rewrite,
    rms_norm,
    skip,
)
from funcops.engine.backend import scopes
from funcops.engine.contract.pausing import take_turns
from funcops.engine.program.values import add
from funcops.engine.trees import paths, put, tree_map_tensors
from funcops.graphs import graphed
from funcops.library.ops.expert_steps import ExpertStepsConfig, expert_steps, plain_experts
from funcops.low_precision import Fp8Block, Fp8Delayed, quantize_params, recipe_init, with_recipe
from funcops.models import MoEConfig, moe
from funcops.testing import run_ranks
from funcops.testing.checks import same_bits
from funcops.testing.tolerances import assert_close

EXPERTS = 8


def layers(times=2, shared=4, dim=8, in_steps=False, recomputed=False, **router):
    """Blocks of a norm and a mixture."""
    route = RouteConfig(EXPERTS, 2, **router)
    mixture = moe(MoEConfig(route=route, experts=ExpertsConfig(EXPERTS, dim, dim // 2), shared=shared))
    block = ChainConfig(steps=(Step("norm", rms_norm, RMSNormConfig(dim)), *mixture.steps), outputs=mixture.outputs)
    cfg = RepeatConfig(remat(skip) if recomputed else skip, SkipConfig(chain, block), times)
    if not in_steps:
        return cfg
    return rewrite(cfg, lambda part: (expert_steps, ExpertStepsConfig(plain_experts(part.cfg))) if part.op is experts else None)[1]


def of_rank(cfg, mesh, capacity=None):
    return dist.parallel(cfg, {"*.experts": "expert"}, mesh, axis="ep", capacity=capacity)


def around(cfg, n, inside=False):
    """Parts of all layers, or of each layer."""
    if not inside:
        return interleave, InterleaveConfig(repeat, cfg, n)
    return repeat, RepeatConfig(interleave, InterleaveConfig(cfg.op, cfg.cfg, n), cfg.times)


def one_after_another(params, x, dy, cfg, n, into=None):
    """y, dparams and dx of microbatches in a loop, as by hand."""
    ys, dparams, dxs = [], None, []
    for i, (rows, drows) in enumerate(zip(x.chunk(n), dy.chunk(n), strict=True)):
        y, kept = repeat.fwd(params, rows, cfg)
        dlosses = {"load": None, "loss": torch.full_like(y.extras["loss"], i)}
        own, dx = repeat.bwd(kept, WithExtras(drows, dlosses), cfg, into=into)
        ys.append(y)
        dparams = add(dparams, own) if into is None else own
        dxs.append(dx)
    stacked = {name: torch.stack([y.extras[name] for y in ys]) for name in cfg.outputs}
    return WithExtras(torch.cat([y.main for y in ys]), stacked), dparams, torch.cat(dxs)


def side_by_side(params, x, dy, cfg, n, into=None, halves=False, given=lambda kept: kept):
    _, cfg = around(cfg, n)
    y, kept = interleave.fwd(params, x, cfg)
    loss = torch.arange(n).to(y.extras["loss"])[:, None].expand_as(y.extras["loss"]).contiguous()
    dy = WithExtras(dy, {"load": None, "loss": loss})
    if halves:
        dx, pending = interleave.dgrad(given(kept), dy, cfg)
        return y, interleave.wgrad(given(pending), cfg, into=into), dx
    return y, *interleave.bwd(given(kept), dy, cfg, into=into)


def batch(rank, rows, dim, dtype=torch.float32):
    return torch.randn(2, rows, 3, dim, dtype=dtype, generator=torch.Generator().manual_seed(rank))


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


FIRST = dict(size=2, n=2, times=1, shared=0)
LATER = [
    dict(size=2, n=2),
    dict(size=2, n=3, shared=0),
    dict(size=4, n=2, capacity=1.0),
    dict(size=4, n=3, idle=True, shared=0),
    dict(size=2, n=2, capacity=0.5, in_steps=True),
    dict(size=2, n=2, idle=True, in_steps=True),
    dict(size=2, n=2, recipe=Fp8Block(), dim=128, shared=0),
    dict(size=2, n=3, recipe=Fp8Delayed(history=2), dim=32),
    dict(size=2, n=2, capacity=1.0, recomputed=True),
    dict(size=1, n=2),
]


@pytest.mark.parametrize("case", [FIRST, *map(slow, LATER)], ids=str)
def test_the_bits_of_one_after_another(case):
    """With a shared MLP beside, tokens sent in codes, slots for some of the tokens, and ranks without any."""
    size, n, capacity, recipe, idle = (case.get(name) for name in ("size", "n", "capacity", "recipe", "idle"))
    options = {name: case[name] for name in ("times", "shared", "dim", "in_steps", "recomputed") if name in case}
    cfg, dim = layers(**options, aux=0.1), case.get("dim", 8)
    cfg = cfg if recipe is None else with_recipe(cfg, recipe, only=("*.experts.*",))
    whole = repeat.init(cfg, key=random.key(0), dtype=torch.float32)
    if idle:  # equal logits: all tokens go to the first experts
        for path in [path for path in paths(whole) if path.endswith("gate.weight")]:
            whole = put(whole, path, torch.zeros(EXPERTS, dim))

    def on_rank(mesh):
        own = of_rank(cfg, mesh, capacity)
        params = dist.shard(whole, dist.specs_of(repeat, own), mesh)
        work = params if recipe is None else quantize_params(params, own, recipe_init(own, params), dtype=torch.float32)
        x, dy = batch(mesh.rank, 2 * n, dim)
        want = one_after_another(work, x, dy, own, n)
        same_bits(side_by_side(work, x, dy, own, n), want, "bwd")
        if case is FIRST:
            return
        same_bits(side_by_side(work, x, dy, own, n, halves=True, given=donate), want, "halves")
        same_bits(side_by_side(work, x, dy, own, n, given=donate), want, "donated")
        if recipe is None:
            into, sums = (tree_map_tensors(torch.ones_like, want[1]) for _ in range(2))
            assert side_by_side(work, x, dy, own, n, into)[1] is into
            one_after_another(work, x, dy, own, n, sums)
            same_bits(into, sums, "into")
        op, each = around(own, n, inside=True)
        y, _ = op.fwd(work, x, each)
        same_bits((y.main, y.extras["load"]), (want[0].main, want[0].extras["load"].transpose(0, 1)), "parts of each layer")

    run_ranks({"ep": size}, on_rank)


def test_the_gradients_of_one_process():
    cfg = layers(times=1)
    whole = repeat.init(cfg, key=random.key(0), dtype=torch.float64)
    x, dy = batch(0, 8, 8, torch.float64)
    one, kept = repeat.fwd(whole, x, cfg)
    dwhole, dx = repeat.bwd(kept, WithExtras(dy, {"load": None, "loss": None}), cfg)

    def on_rank(mesh):
        ep = mesh["ep"]
        own = of_rank(cfg, mesh)
        specs = dist.specs_of(repeat, own)
        op, each = around(own, 2)
        assert dist.specs_of(op, each) == specs
        y, kept = op.fwd(dist.shard(whole, specs, mesh), x.chunk(2)[ep.rank], each)
        dparams, dx = op.bwd(kept, WithExtras(dy.chunk(2)[ep.rank], {"load": None, "loss": None}), each)
        return y.main, dx, dist.unshard(dist.sum_gradients(dparams, specs, mesh), specs, mesh)

    ys, dxs, found = zip(*run_ranks({"ep": 2}, on_rank), strict=True)
    assert_close((torch.cat(ys), torch.cat(dxs), found[1]), (one.main, dx, dwhole), dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("inside", [True, False])
def test_parts_with_sharded_params(inside):
    """Gradients as with whole params. Parts of each layer share its gathered params; parts of all layers gather for themselves."""
    cfg = layers()
    whole = repeat.init(cfg, key=random.key(0), dtype=torch.float64)

    def on_rank(mesh):
        op, own = around(of_rank(cfg, mesh), 2, inside)
        blocks = ChainConfig(steps=(Step("blocks", op, own),), outputs=own.outputs)
        params = dist.shard({"blocks": whole}, dist.specs_of(chain, blocks), mesh)
        x, dy = batch(mesh.rank, 4, 8, torch.float64)
        dy, found = WithExtras(dy, {"load": None, "loss": None}), []
        for given, one in ((params, blocks), (dist.own_shards(params, mesh["dp"]), dist.zero3(blocks, mesh["dp"]))):
            y, kept = chain.fwd(given, x, one)
            dparams, dx = chain.bwd(kept, dy, one)
            if one is blocks:
                dparams = dist.finish(dist.reduce_start(dparams, mesh["dp"], shard=mesh["dp"]))
            found.append((dparams, y, dx))
        same_bits(found[1][1:], found[0][1:], "y and dx")
        assert_close(found[1][0], found[0][0], dtype=torch.float64)

    run_ranks({"dp": 2, "ep": 2}, on_rank)


@pytest.mark.slow
def test_a_graph_replays_parts_in_turns():
    cfg = layers(times=1, shared=0)
    whole = repeat.init(cfg, key=random.key(0), dtype=torch.float32)

    def on_rank(mesh):
        own = of_rank(cfg, mesh, 1.0)
        params = dist.shard(whole, dist.specs_of(repeat, own), mesh)
        step = graphed(lambda x, dy: side_by_side(params, x, dy, own, 2), *batch(mesh.rank, 4, 8))
        x, dy = batch(mesh.rank + 2, 4, 8)
        same_bits(step(x, dy), one_after_another(params, x, dy, own, 2), "replayed")

    run_ranks({"ep": 2}, on_rank)


def counted(n, inside=False, capacity=1.0, **options):
    """How many messages a rank sends, and which of them are exposed."""

    def step(mesh):
        cfg = of_rank(layers(**options), mesh, capacity)
        op, each = around(cfg, n, inside) if n > 1 else (repeat, cfg)
        x = torch.empty(12, 3, 8)
        _, kept = op.fwd(op.init(each, device="meta"), x, each)
        op.bwd(kept, WithExtras(x, {"load": None, "loss": None}), each)

    program = dist.check_program(step, {"ep": 2}, ranks=(0,))[0]
    return len(program.sent), program.exposed


@pytest.mark.parametrize(
    ("options", "sent", "exposed"),
    [
        (dict(n=1), 14, (0, 1, 2, 3, 4, 5, 6, 7, 8, 11)),
        (dict(n=2), 28, (15, 16)),
        (dict(n=2, inside=True), 28, (7, 15, 16, 22)),
        (dict(n=2, capacity=None, times=1), 16, (0, 4, 9, 10)),
        slow(dict(n=3), 42, (23, 24)),
        slow(dict(n=1, in_steps=True), 14, tuple(range(14))),
        slow(dict(n=2, in_steps=True), 28, (15, 16)),
        slow(dict(n=2, recomputed=True), 44, (15, 23, 24, 37, 38)),
    ],
    ids=str,
)
def test_exposed_messages(options, sent, exposed):
    """Around all layers only two are: the last part's rows on their way back at the end of the forward, and the first part's on
    their way there at the start of the backward. Parts of each layer have such a pair in each. Without a capacity the host waits
    for the numbers of rows. `docs/parallel-in-depth.md` has these counts."""
    assert counted(**options) == (sent, exposed)


def accumulated(params, xs, dys, cfg, into=None):
    """The backward of each microbatch beside the forward of the next one."""
    dys = [WithExtras(dy, {"load": None, "loss": None}) for dy in dys]
    y, kept = repeat.fwd(params, xs[0], cfg)
    ys, dxs = [y], []
    for x, dy in zip(xs[1:], dys, strict=False):
        backward = repeat.pausing.bwd(kept, dy, cfg, into=into)
        (_, dx), (y, kept) = take_turns([backward, repeat.pausing.fwd(params, x, cfg)])
        ys.append(y)
        dxs.append(dx)
    return ys, [*dxs, repeat.bwd(kept, dys[-1], cfg, into=into)[1]]


@pytest.mark.slow
def test_a_forward_beside_a_backward():
    """Only the first forward and the last backward are exposed, as of one microbatch alone; with the bits of a loop."""

    def exposed(mesh):
        cfg = of_rank(layers(), mesh, 1.0)
        accumulated(repeat.init(cfg, device="meta"), [torch.empty(4, 3, 8)] * 4, [torch.empty(4, 3, 8)] * 4, cfg)

    program = dist.check_program(exposed, {"ep": 2}, ranks=(0,))[0]
    assert len(program.sent) == 4 * 14 and program.exposed == (0, 1, 2, 3, 4, 5, 6, 7, 50, 53)

    def on_rank(mesh):
        cfg = of_rank(layers(times=1), mesh)
        params = repeat.init(cfg, key=random.key(0), dtype=torch.float32)
        xs, dys = (t.chunk(3) for t in batch(mesh.rank, 6, 8))
        sums, into = (tree_map_tensors(torch.ones_like, params) for _ in range(2))
        ys, dxs = accumulated(params, xs, dys, cfg, into)
        for i, (x, dy) in enumerate(zip(xs, dys, strict=True)):
            y, kept = repeat.fwd(params, x, cfg)
            _, dx = repeat.bwd(kept, WithExtras(dy, {"load": None, "loss": None}), cfg, into=sums)
            same_bits((ys[i], dxs[i]), (y, dx), f"microbatch {i}")
        same_bits(into, sums, "into")

    run_ranks({"ep": 2}, on_rank)


def test_steps_of_parts_have_their_names():
    """A pause ends the scopes of a part; the next turn opens them again."""

    def on_rank(mesh):
        own = of_rank(layers(times=1), mesh)
        x, dy = batch(mesh.rank, 4, 8)
        params = dist.shard(repeat.init(layers(times=1), key=random.key(0)), dist.specs_of(repeat, own), mesh)
        found = []
        for run in (one_after_another, side_by_side):
            with named_steps():
                run(params, x, dy, own, 2)
                found.append(set(scopes.names))
                assert not scopes.label().path
        return found

    one, other = run_ranks({"ep": 1}, on_rank)[0]
    assert one == other and "0.moe.routed.experts: fwd" in one


def test_explain_says_which_steps_pause():
    _, each = around(of_rank(layers(), dist.Mesh.abstract({"ep": 2}, 0)), 2)
    text = str(explain(each, rows=True))
    assert "pausing fwd moe.routed.experts(" in text and "pausing bwd moe.routed.experts(" in text
    assert "pausing" not in str(explain(each.cfg, rows=True))
