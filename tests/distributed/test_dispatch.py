"""Tokens to the ranks of their experts and back, as ops: each is the other's backward; a mixture with plain ops between them."""

import pytest
import torch
from dist_cases import combine, dispatch

from funcops import (
    ChainConfig,
    ExpertsConfig,
    GLUConfig,
    GroupedLinearConfig,
    PermuteConfig,
    Step,
    UnpermuteConfig,
    WithExtras,
    chain,
    dist,
    experts,
    glu,
    grouped_linear,
    permute,
    random,
    unpermute,
)
from funcops.graphs import check_capturable
from funcops.testing import check_dist, run_ranks
from funcops.testing.checks import same_bits
from funcops.testing.tolerances import assert_close
from funcops.trees import nbytes, paths, tree_map_tensors

CASES = [dispatch((1, 3), 3, 2), dispatch((2,), 2, 3, 0.5), dispatch((2,), 8, 2, None, 8), dispatch((1,), 1, 2, None, 1)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_go_to_the_ranks_of_their_experts(case):
    check_dist(dist.dispatch, case, sizes=(1, 2, 4))


def test_no_tokens_at_all():
    def on_rank(mesh):
        x = torch.zeros(0, 2), torch.zeros(0, 3), torch.zeros(0, 2, dtype=torch.int32)
        y, kept = dist.dispatch.fwd(None, x, dist.DispatchConfig(8, axis=mesh["ep"]))
        back, _ = dist.combine.fwd(None, (y[1], y[3]), dist.CombineConfig(mesh["ep"]))
        (dweights, dx, none), _ = dist.dispatch.dgrad(kept, (*y[:2], None, None), dist.DispatchConfig(8, axis=mesh["ep"]))
        assert none is None
        return [tuple(t.shape) for t in (*y, back, dweights, dx)]

    assert run_ranks({"ep": 2}, on_rank)[1] == [(0, 2), (0, 3), (0, 2), (0, 2), (0, 3), (0, 2), (0, 3)]


@pytest.mark.parametrize("case", [combine((1, 2), 2, 3), combine((2,), 1, 2, 0), combine((0,), 2, 2)], ids=str)
def test_rows_come_back_to_their_tokens(case):
    check_dist(dist.combine, case, sizes=(1, 2, 4))


X = torch.randn(16, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
WEIGHTS, DY = (torch.randn(16, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (2, 3))
CHOSEN = torch.rand(16, 9, generator=torch.Generator().manual_seed(4)).argsort(-1)[:, :2].int()  # 8: a choice that was dropped


def test_each_is_the_backward_of_the_other():
    """Bit for bit, and every kept tensor is an alias."""

    def on_rank(mesh):
        axis = mesh["ep"]
        to, back = dist.DispatchConfig(8, axis=axis, capacity=0.75), dist.CombineConfig(axis)
        given = tree_map_tensors(lambda t: t.chunk(4)[axis.rank], (WEIGHTS, X, CHOSEN))
        (weights, rows, indices, place), kept = dist.dispatch.fwd(None, given, to)
        drows, dweights = torch.randn_like(rows), torch.randn_like(weights)
        y, of_combine = dist.combine.fwd(None, (drows, place), back)
        (d_weights, dx, none), _ = dist.dispatch.dgrad(kept, (dweights, drows, None, None), to)
        same_bits(dx, y, "dx")
        same_bits(d_weights, dist.combine.fwd(None, (dweights, place), back)[0], "dweights")
        same_bits(dist.dispatch.dgrad(kept, (None, drows, None, None), to)[0], (None, dx, None), "a part of dy that is zero")
        same_bits(dist.combine.dgrad(of_combine, given[1], back)[0], (rows, None), "drows")
        assert none is None and kept.place is place and of_combine.place is place and nbytes(kept) == nbytes(place)
        return [t.tolist() for t in (indices, place)]

    for indices, place in run_ranks({"ep": 4}, on_rank):
        assert len(indices) == 4 * 3 and all(0 <= i <= 2 for row in indices for i in row)
        assert any(at == 12 for row in place for at in row)


GATED = GLUConfig(kind="swiglu", gate="first", scaled=True)


def plain_ops(params, x, dy, axis):
    """y and gradients by hand, through dispatch, permute, two grouped layers around a gated unit, unpermute and combine."""
    own = 8 // axis.size
    ops = {
        "up": (grouped_linear, GroupedLinearConfig(own, 3, 8, bias=False)),
        "act": (glu, GATED),
        "down": (grouped_linear, GroupedLinearConfig(own, 4, 3, bias=False)),
        "back": (unpermute, UnpermuteConfig()),
        "combine": (dist.combine, dist.CombineConfig(axis)),
    }
    kept = {}

    def fwd(name, params, x):
        op, cfg = ops[name]
        y, kept[name] = op.fwd(params, x, cfg)
        return y

    def dgrad(name, dy):
        op, cfg = ops[name]
        return op.dgrad(kept[name], dy, cfg)

    to, sort = dist.DispatchConfig(8, axis=axis), PermuteConfig(own)
    (weights, rows, indices, place), kept_to = dist.dispatch.fwd(None, x, to)
    (rows, offsets, at), kept_sort = permute.fwd(None, (rows, indices), sort)
    of_rows = weights.new_empty(len(rows)).scatter_(0, at.flatten().long(), weights.flatten())
    z = fwd("up", params.up, (rows, offsets))
    y = fwd("combine", None, (fwd("back", None, (fwd("down", params.down, (fwd("act", None, (z, of_rows)), offsets)), at)), place))
    (drows, _), _ = dgrad("combine", dy)
    (drows, _), _ = dgrad("back", drows)
    (da, _), of_down = dgrad("down", drows)
    (dz, d_of_rows), _ = dgrad("act", da)
    (drows, _), of_up = dgrad("up", dz)
    (drows, _), _ = permute.dgrad(kept_sort, (drows, None, None), sort)
    (dweights, dx, _), _ = dist.dispatch.dgrad(kept_to, (d_of_rows[at.long()], drows, None, None), to)
    return y, dweights, dx, [grouped_linear.wgrad(of, ops[name][1]).weight for name, of in (("up", of_up), ("down", of_down))]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_plain_ops_between_them_are_experts_of_one_process(n):
    cfg = ExpertsConfig(8, 3, 4)
    params = experts.init(cfg, key=random.key(0), dtype=torch.float64)
    y, kept = experts.fwd(params, (WEIGHTS, X, CHOSEN), cfg)
    grads, (dweights, dx, _) = experts.bwd(kept, DY, cfg)

    def on_rank(mesh):
        axis = mesh["ep"]
        of = dist.ParallelExpertsConfig(8, 3, 4, axis=axis)
        own = dist.shard(params, of.specs, mesh)
        *given, dy = (t.chunk(n)[axis.rank] for t in (WEIGHTS, X, CHOSEN, DY))
        found = plain_ops(own, tuple(given), dy, axis)
        one, kept = dist.parallel_experts.fwd(own, tuple(given), of)
        g, (dw, d, _) = dist.parallel_experts.bwd(kept, dy, of)
        for got, want in zip(found[:3], (one, dw, d), strict=True):
            assert_close(got, want, dtype=torch.float64)
        for got, want in zip(found[3], (g.up.weight, g.down.weight), strict=True):
            assert_close(got, want, dtype=torch.float64)
        return found[:3], found[3]

    parts = run_ranks({"ep": n}, on_rank)
    for i, want in enumerate((y, dweights, dx)):
        assert_close(torch.cat([first[i] for first, _ in parts]), want, dtype=torch.float64)
    for i, want in enumerate((grads.up.weight, grads.down.weight)):
        assert_close(torch.cat([weights[i] for _, weights in parts]), want, dtype=torch.float64)


def test_a_chain_of_them_is_parallel_experts():
    """Bit for bit, in halves too."""
    params = experts.init(ExpertsConfig(8, 3, 4), key=random.key(0), dtype=torch.float64)

    def on_rank(mesh):
        axis = mesh["ep"]
        of = dist.ParallelExpertsConfig(8, 3, 4, axis=axis, capacity=0.75)
        to, back = dist.DispatchConfig(8, axis=axis, capacity=0.75), dist.CombineConfig(axis)
        names = "tokens", "indices"
        steps = (
            Step("there", dist.dispatch, to, takes=names, gives=("rows", "chosen", "place")),
            Step("experts", experts, ExpertsConfig(4, 3, 4), takes=("rows", "chosen")),
            Step("back", dist.combine, back, takes=("place",)),
        )
        cfg, own = ChainConfig(steps=steps, extras=names), dist.shard(params, of.specs, mesh)
        *given, dy = (t.chunk(2)[axis.rank] for t in (WEIGHTS, X, CHOSEN, DY))
        want, kept = dist.parallel_experts.fwd(own, tuple(given), of)
        y, residuals = chain.fwd(
            {"there": None, "experts": own, "back": None}, WithExtras(given[0], dict(zip(names, given[1:], strict=True))), cfg
        )
        same_bits(y, want, "y")
        dparams, (dweights, dx, _) = dist.parallel_experts.bwd(kept, dy, of)
        found, pending = chain.dgrad(residuals, dy, cfg)
        same_bits((found.main, found.extras), (dweights, {"tokens": dx, "indices": None}), "dx")
        same_bits(chain.wgrad(pending, cfg)["experts"], dparams, "dparams")

    run_ranks({"ep": 2}, on_rank)


def bad_calls(ep):
    to, back = dist.DispatchConfig(4, axis=ep), dist.CombineConfig(ep)
    w, x, i = torch.ones(2, 3), torch.ones(2, 4), torch.zeros(2, 3, dtype=torch.int32)
    place = torch.zeros(2, 2, dtype=torch.int32)
    (_, rows, _, _), kept = dist.dispatch.fwd(None, (w, x, i), to)
    yield "DispatchConfig: experts must be a multiple of 2, the number of ranks, got 5", lambda: dist.DispatchConfig(5, axis=ep)
    yield "DispatchConfig: capacity must be None or in (0, 1], got 1.5", lambda: dist.DispatchConfig(4, axis=ep, capacity=1.5)
    yield "DispatchConfig: axis must be Axis, got 'ep'", lambda: dist.DispatchConfig(4, axis="ep")
    yield "dispatch_fwd: x must be a tuple (weights, x, indices), got tuple of 2", lambda: dist.dispatch.fwd(None, (w, x), to)
    yield "dispatch_fwd: x.1 (x) must be [..., H], got []", lambda: dist.dispatch.fwd(None, (w, x[0, 0], i), to)
    yield "dispatch_fwd: x.0 (weights) must be [2, 'K'], K in 1..4", lambda: dist.dispatch.fwd(None, (w[:1], x, i), to)
    yield "dispatch_fwd: x.2 (indices) must be int32 or int64, got int16", lambda: dist.dispatch.fwd(None, (w, x, i.short()), to)
    yield "dispatch_dgrad: dy must be a tuple (dweights, drows, None, None)", lambda: dist.dispatch.dgrad(kept, rows, to)
    yield (
        "dispatch_dgrad: dy.2 must be None (indices are integers, without a gradient), got float32[2, 3]",
        lambda: dist.dispatch.dgrad(kept, (None, None, w, None), to),
    )
    yield "dispatch_dgrad: dy.1 must be [4, 4], got [2, 4]", lambda: dist.dispatch.dgrad(kept, (None, x, None, None), to)
    yield "combine_fwd: x must be a tuple (x, place), got float32[2, 4]", lambda: dist.combine.fwd(None, x, back)
    yield "combine_fwd: x.0 (rows) must be [n C, D], got float32[2]", lambda: dist.combine.fwd(None, (x[:, 0], place), back)
    yield (
        "combine_fwd: x.0 (rows) must be of a size along dimension 0 that axis 'ep' of 2 divides, got float32[3, 2]",
        lambda: dist.combine.fwd(None, (w.T.contiguous(), place), back),
    )
    yield "combine_fwd: x.1 (place) must be int32, got int64", lambda: dist.combine.fwd(None, (rows, place.long()), back)
    yield "CombineConfig: axis must be Axis, got 3", lambda: dist.CombineConfig(3)


def test_wrong_calls_raise_before_anything_is_sent():
    def run(mesh):
        for said, call in bad_calls(mesh["ep"]):
            with pytest.raises((ValueError, TypeError)) as raised:
                call()
            assert str(raised.value).startswith(said)

    run_ranks({"ep": 2}, run)
    one = dist.Mesh.abstract({"ep": 1}, 0)["ep"]
    x = torch.ones(2, 1), torch.ones(2, 4), torch.full((2, 1), 5, dtype=torch.int32)
    with pytest.raises(IndexError):
        dist.dispatch.fwd(None, x, dist.DispatchConfig(4, axis=one))
    with pytest.raises(IndexError):
        dist.combine.fwd(None, (torch.ones(2, 4), torch.full((2, 1), 3, dtype=torch.int32)), dist.CombineConfig(one))


@pytest.mark.parametrize("n", [1, 4])
def test_a_graph_can_hold_them(n):
    """Nothing waits for the host, and shapes are known without values."""
    axis = dist.Mesh.abstract({"ep": n}, n - 1)["ep"]
    to, back = dist.DispatchConfig(8, axis=axis), dist.CombineConfig(axis)

    def there_and_back(weights, x, indices):
        (w, rows, _, place), kept = dist.dispatch.fwd(None, (weights, x, indices), to)
        y, of_combine = dist.combine.fwd(None, (rows, place), back)
        return y, dist.dispatch.dgrad(kept, (w, rows, None, None), to)[0], dist.combine.dgrad(of_combine, y, back)[0]

    if n == 1:  # more ranks would need processes
        assert check_capturable(there_and_back, WEIGHTS, X, CHOSEN) == []
    made = paths(there_and_back(*(t.to("meta") for t in (WEIGHTS, X, CHOSEN))))
    shapes = {path: tuple(t.shape) for path, t in made.items() if t is not None}
    assert shapes == {"0": (16, 3), "1.0": (16, 2), "1.1": (16, 3), "2.0": (16 * n, 3)}
