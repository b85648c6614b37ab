"""Tokens to the ranks of their experts and back, as ops: each is the other's backward; a mixture with plain ops between them."""

from collections import Counter

import pytest
import torch
from dist_cases import combine, dispatch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from two_devices import TwoDevices, placed

from funcops import (
    ChainConfig,
    ExpertsConfig,
    GLUConfig,
    GroupedLinearConfig,
    Needs,
    PermuteConfig,
    RouteConfig,
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
from funcops.engine.contract.walk import walk
from funcops.engine.trees import nbytes, paths, tree_map_tensors
from funcops.graphs import check_capturable, graphed
from funcops.low_precision import Fp8Current, with_recipe
from funcops.models import MoEConfig, moe
from funcops.testing import check_dist, run_ranks
from funcops.testing.checks import same_bits
from funcops.testing.tolerances import assert_close

CASES = [dispatch((1, 3), 3, 2), dispatch((2,), 2, 3, 0.5), dispatch((2,), 8, 2, 1.0, 8), dispatch((1,), 1, 2, 1.0, 1)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_go_to_the_ranks_of_their_experts(case):
    check_dist(dist.dispatch, case, sizes=(1, 2, 4))


def test_no_tokens_at_all():
    def on_rank(mesh):
        x = torch.zeros(0, 2), torch.zeros(0, 3), torch.zeros(0, 2, dtype=torch.int32)
        y, kept = dist.dispatch.fwd(None, x, dist.DispatchConfig(8, axis=mesh["ep"]))
        back, _ = dist.combine.fwd(None, (y[1], *y[3:]), dist.CombineConfig(mesh["ep"]))
        (dweights, dx, none), _ = dist.dispatch.dgrad(kept, (*y[:2], None, None, None), dist.DispatchConfig(8, axis=mesh["ep"]))
        assert none is None
        return [tuple(t.shape) for t in (*y, back, dweights, dx)]

    assert run_ranks({"ep": 2}, on_rank)[1] == [(0, 2), (0, 3), (0, 2), (0, 2), (2, 2), (0, 3), (0, 2), (0, 3)]


@pytest.mark.parametrize("case", [combine((1, 2), 2, 3), combine((2,), 1, 2, 0), combine((0,), 2, 2)], ids=str)
def test_rows_come_back_to_their_tokens(case):
    check_dist(dist.combine, case, sizes=(1, 2, 4))


X = torch.randn(16, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
WEIGHTS, DY = (torch.randn(16, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (2, 3))
CHOSEN = torch.rand(16, 9, generator=torch.Generator().manual_seed(4)).argsort(-1)[:, :2].int()  # 8: a choice that was dropped


@pytest.mark.parametrize("capacity", [0.75, None])
def test_each_is_the_backward_of_the_other(capacity):
    """Bit for bit, and every kept tensor is an alias."""

    def on_rank(mesh):
        axis = mesh["ep"]
        to, back = dist.DispatchConfig(8, axis=axis, capacity=capacity), dist.CombineConfig(axis)
        given = tree_map_tensors(lambda t: t.chunk(4)[axis.rank], (WEIGHTS, X, CHOSEN))
        (weights, rows, indices, place, sizes), kept = dist.dispatch.fwd(None, given, to)
        drows, dweights = torch.randn_like(rows), torch.randn_like(weights)
        y, of_combine = dist.combine.fwd(None, (drows, place, sizes), back)
        (d_weights, dx, none), _ = dist.dispatch.dgrad(kept, (dweights, drows, None, None, None), to)
        same_bits(dx, y, "dx")
        same_bits(d_weights, dist.combine.fwd(None, (dweights, place, sizes), back)[0], "dweights")
        same_bits(dist.dispatch.dgrad(kept, (None, drows, None, None, None), to)[0], (None, dx, None), "a part of dy that is zero")
        same_bits(dist.combine.dgrad(of_combine, given[1], back)[0], (rows, None, None), "drows")
        assert none is None and all(of.place is place and of.sizes is sizes for of in (kept, of_combine))
        assert nbytes(kept) == nbytes((place, sizes))
        return [t.tolist() for t in (indices, place)]

    for indices, place in run_ranks({"ep": 4}, on_rank):
        assert all(0 <= i <= 2 for row in indices for i in row)
        if capacity is not None:
            assert len(indices) == 4 * 3 and any(at == 12 for row in place for at in row)


def of_rank(rank, tokens, n, experts, choices, idle=()):
    """Weights, tokens and choices of a rank; no token chooses an expert of the ranks in `idle`."""
    draw = torch.Generator().manual_seed(rank)
    score = torch.rand(tokens, experts, generator=draw)
    for r in idle:
        score[:, r * experts // n : (r + 1) * experts // n] = 2.0
    return torch.rand(tokens, choices, generator=draw), torch.randn(tokens, 3, generator=draw), score.argsort(-1)[:, :choices].int()


def test_rows_without_a_capacity_are_the_used_ones_with_room_for_all():
    """Bit for bit, in the same order, and the same gradients."""

    def on_rank(mesh):
        axis, given = mesh["ep"], of_rank(mesh.rank, 7, 4, 8, 2)
        used, rest = [], []
        for capacity in (1.0, None):
            cfg = dist.DispatchConfig(8, axis=axis, capacity=capacity)
            (weights, rows, indices, place, sizes), kept = dist.dispatch.fwd(None, given, cfg)
            here = (indices < 2).any(1)
            sent = len(rows) if sizes is None else sizes[0].sum()
            used.append((weights[here], rows[here], indices[here], place < sent))
            rest.append(int((~here).sum()))
            rest.append(dist.dispatch.dgrad(kept, (weights, rows, None, None, None), cfg)[0])
        same_bits(used[1], used[0], "used rows")
        same_bits(rest[3], rest[1], "dx")
        return rest[0], rest[2]

    assert all(room > 0 and none == 0 for room, none in run_ranks({"ep": 4}, on_rank))


class Rows(TorchDispatchMode):
    """The rows that this rank sends to others, by the shape of a row."""

    runs = True  # see funcops.engine.backend.declare.tracing

    def __init__(self, rank):
        super().__init__()
        self.rank, self.sent = rank, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            self.sent[tuple(args[0].shape[1:])] += sum(args[2]) - args[2][self.rank]
        return func(*args, **(kwargs or {}))


SENT = [(8, 64, 2, 1.64, 7), pytest.param(64, 128, 8, 7.45, 63, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("n", "experts", "choices", "routed", "room"), SENT)
def test_as_many_rows_are_sent_as_are_routed(n, experts, choices, routed, room):
    """`routed`: rows a token for other ranks, (n - 1) (1 - (1 - 1 / n)^K) if each choice is a rank at random."""
    tokens = 64 if n == 8 else 16

    def on_rank(mesh):
        axis, given, sent = mesh["ep"], of_rank(mesh.rank, tokens, n, experts, choices), []
        for capacity in (None, 1.0):
            cfg = dist.DispatchConfig(experts, axis=axis, capacity=capacity)
            with Rows(mesh.rank) as counted:
                (_, rows, _, place, sizes), kept = dist.dispatch.fwd(None, given, cfg)
                y, of = dist.combine.fwd(None, (rows, place, sizes), dist.CombineConfig(axis))
                dist.combine.dgrad(of, y, dist.CombineConfig(axis))
                dist.dispatch.dgrad(kept, (None, rows, None, None, None), cfg)
            sent.append(counted.sent)
        theirs = [{e * n // experts for e in row} - {mesh.rank} for row in given[2].tolist()]
        return sent, sum(map(len, theirs))

    found = run_ranks({"ep": n}, on_rank)
    exact, there = [one[0] for one, _ in found], [count for _, count in found]
    assert [one[choices,] for one in exact] == [2 * count for count in there]  # weights and indices
    assert sum(one[3,] for one in exact) == 4 * sum(there)  # tokens and their gradients, there and back
    assert all(one[()] == n - 1 for one in exact)  # a count for each rank
    assert sum(there) / (n * tokens) == pytest.approx(routed, rel=0.05)
    assert {one[1][3,] for one, _ in found} == {4 * room * tokens}


LOADS = {0: 5, 1: 0, 2: 3, 3: 4}  # a rank without tokens; no token goes to the last rank's experts


def test_a_rank_may_have_no_tokens_and_may_receive_none():
    """y and all gradients of one process, with other numbers of tokens on each rank."""
    cfg = ExpertsConfig(8, 3, 4)
    params = experts.init(cfg, key=random.key(0), dtype=torch.float64)
    parts = [
        tree_map_tensors(lambda t: t.double() if t.is_floating_point() else t, of_rank(r, m, 4, 8, 2, (3,)))
        for r, m in LOADS.items()
    ]
    y, kept = experts.fwd(params, tuple(map(torch.cat, zip(*parts, strict=True))), cfg)
    grads, (dweights, dx, _) = experts.bwd(kept, y, cfg)

    def on_rank(mesh):
        of = dist.ParallelExpertsConfig(8, 3, 4, axis=mesh["ep"])
        y, kept = dist.parallel_experts.fwd(dist.shard(params, of.specs, mesh), parts[mesh.rank], of)
        g, (dweights, dx, _) = dist.parallel_experts.bwd(kept, y, of)
        return y, dweights, dx, g.up.weight, g.down.weight, kept.sizes.tolist()

    *found, sizes = zip(*run_ranks({"ep": 4}, on_rank), strict=True)
    for got, want in zip(found, (y, dweights, dx, grads.up.weight, grads.down.weight), strict=True):
        assert_close(torch.cat(got), want, dtype=torch.float64)
    assert sizes[1][0] == sizes[3][1] == [0, 0, 0, 0] and sum(sizes[2][1]) > 0


def test_programs_know_that_the_numbers_of_rows_are_data():
    """Ranks of other numbers of tokens agree without a capacity, and not with one; other widths are a fault either way."""

    def step(capacity, dim=lambda mesh: 3):
        def of(mesh, device=None):
            weights, x, indices = of_rank(0, 4 + mesh["ep"].rank, 2, 8, 2)
            given = weights, x.new_zeros(len(x), dim(mesh)), indices
            cfg, back = dist.DispatchConfig(8, axis=mesh["ep"], capacity=capacity), dist.CombineConfig(mesh["ep"])
            (w, rows, _, place, *sizes), kept = dist.dispatch.fwd(None, tree_map_tensors(lambda t: t.to("meta"), given), cfg)
            y, of_combine = dist.combine.fwd(None, (rows, place, *sizes), back)
            drows, *_ = dist.combine.dgrad(of_combine, y, back)[0]
            d_weights, dx, _ = dist.dispatch.dgrad(kept, (w, drows, None, None, None), cfg)[0]
            assert (y.shape, dx.shape, d_weights.shape) == (given[1].shape, given[1].shape, weights.shape)
            return rows

        return of

    programs = dist.check_program(step(None), {"ep": 2})
    assert [str(one) for one in programs[1].sent] == [
        "all_to_all of int64[*]",
        *(f"all_to_all of {kind}" for kind in ("float32[*, 2]", "float32[*, 3]", "int32[*, 2]")),
        *["all_to_all of float32[*, 3]"] * 2,
        "all_to_all of float32[*, 2]",
        "all_to_all of float32[*, 3]",
    ]
    assert [one.sends for one in programs[1].sent] == [(1, 1), *[()] * 7]
    with pytest.raises(ValueError, match="must send the rows that the other rank expects"):
        dist.check_program(step(1.0), {"ep": 2})
    with pytest.raises(ValueError, match=r"got all_to_all of float32\[\*, 3\] on rank 0, all_to_all of float32\[\*, 4\] on rank 1"):
        dist.check_program(step(None, lambda mesh: 3 + mesh["ep"].rank), {"ep": 2})

    def shaken(mesh):
        return len(dist.handshake(mesh, lambda: step(None)(mesh)).sent)

    assert run_ranks({"ep": 2}, shaken) == [8, 8]


def test_a_trace_needs_a_capacity():
    axis = dist.Mesh.abstract({"ep": 2}, 0)["ep"]

    def sent(capacity):
        return make_fx(lambda *x: dist.dispatch.fwd(None, x, dist.DispatchConfig(8, axis=axis, capacity=capacity))[0][1])

    given = of_rank(0, 4, 2, 8, 2)
    with pytest.raises(ValueError, match=r"dispatch_fwd: capacity must be given in a graph, and under .* \(1.0 has room"):
        sent(None)(*given)


def test_a_graph_needs_a_capacity():
    """A recording would send the rows of its first step again and again."""

    def captured(mesh):
        given = of_rank(mesh.rank, 4, 2, 8, 2)

        def sent(capacity):
            cfg = dist.DispatchConfig(8, axis=mesh["ep"], capacity=capacity)
            return graphed(lambda *x: dist.dispatch.fwd(None, x, cfg)[0][1], *given)

        with pytest.raises(ValueError, match=r"capacity must be given in a graph, .* \(1.0 has room"):
            sent(None)
        return sent(1.0)(*given).shape

    assert {tuple(shape) for shape in run_ranks({"ep": 2}, captured)} == {(8, 3)}


def test_a_model_is_given_its_capacity():
    mixture, mesh = moe(MoEConfig(route=RouteConfig(8, 2), experts=ExpertsConfig(8, 6, 4))), dist.Mesh.abstract({"ep": 2}, 0)
    low = with_recipe(mixture, Fp8Current(), only=("experts",))
    for cfg in (mixture, low):
        for capacity in (None, 1.0):
            made = dist.parallel(cfg, {"experts": "expert"}, mesh, axis="ep", capacity=capacity)
            kinds = dist.ParallelExpertsConfig, dist.DispatchConfig
            assert [part.cfg.capacity for part in walk(made) if isinstance(part.cfg, kinds)] == [capacity]
    hidden = dist.parallel(mixture, {"experts": "hidden"}, dist.Mesh.abstract({"tp": 2}, 0), capacity=1.0)
    assert [part.cfg.capacity for part in walk(hidden) if isinstance(part.cfg, dist.ParallelExpertsConfig)] == [None]


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
    (weights, rows, indices, place, sizes), kept_to = dist.dispatch.fwd(None, x, to)
    (rows, offsets, at), kept_sort = permute.fwd(None, (rows, indices), sort)
    of_rows = weights.new_empty(len(rows)).scatter_(0, at.flatten().long(), weights.flatten())
    z = fwd("up", params.up, (rows, offsets))
    down = fwd("down", params.down, (fwd("act", None, (z, of_rows)), offsets))
    y = fwd("combine", None, (fwd("back", None, (down, at)), place, sizes))
    (drows, _, _), _ = dgrad("combine", dy)
    (drows, _), _ = dgrad("back", drows)
    (da, _), of_down = dgrad("down", drows)
    (dz, d_of_rows), _ = dgrad("act", da)
    (drows, _), of_up = dgrad("up", dz)
    (drows, _), _ = permute.dgrad(kept_sort, (drows, None, None), sort)
    (dweights, dx, _), _ = dist.dispatch.dgrad(kept_to, (d_of_rows[at.long()], drows, None, None, None), to)
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


@pytest.mark.parametrize("capacity", [0.75, None])
def test_a_chain_of_them_is_parallel_experts(capacity):
    """Bit for bit, in halves too."""
    params = experts.init(ExpertsConfig(8, 3, 4), key=random.key(0), dtype=torch.float64)

    def on_rank(mesh):
        axis = mesh["ep"]
        of = dist.ParallelExpertsConfig(8, 3, 4, axis=axis, capacity=capacity)
        to, back = dist.DispatchConfig(8, axis=axis, capacity=capacity), dist.CombineConfig(axis)
        names = "tokens", "indices"
        steps = (
            Step("there", dist.dispatch, to, takes=names, gives=("rows", "chosen", "place", "sizes")),
            Step("experts", experts, ExpertsConfig(4, 3, 4), takes=("rows", "chosen")),
            Step("back", dist.combine, back, takes=("place", "sizes")),
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
    to, back = dist.DispatchConfig(4, axis=ep, capacity=1.0), dist.CombineConfig(ep)
    sizes = torch.full((2, 2), 2)
    w, x, i = torch.ones(2, 3), torch.ones(2, 4), torch.zeros(2, 3, dtype=torch.int32)
    place = torch.zeros(2, 2, dtype=torch.int32)
    (_, rows, _, _, _), kept = dist.dispatch.fwd(None, (w, x, i), to)
    yield "DispatchConfig: experts must be a multiple of 2, the number of ranks, got 5", lambda: dist.DispatchConfig(5, axis=ep)
    yield "DispatchConfig: capacity must be None or in (0, 1], got 1.5", lambda: dist.DispatchConfig(4, axis=ep, capacity=1.5)
    yield "DispatchConfig: axis must be Axis, got 'ep'", lambda: dist.DispatchConfig(4, axis="ep")
    yield "dispatch_fwd: x must be a tuple (weights, x, indices), got tuple of 2", lambda: dist.dispatch.fwd(None, (w, x), to)
    yield "dispatch_fwd: x.1 (x) must be [..., H], got []", lambda: dist.dispatch.fwd(None, (w, x[0, 0], i), to)
    yield "dispatch_fwd: x.0 (weights) must be [2, 'K'], K in 1..4", lambda: dist.dispatch.fwd(None, (w[:1], x, i), to)
    yield "dispatch_fwd: x.2 (indices) must be int32 or int64, got int16", lambda: dist.dispatch.fwd(None, (w, x, i.short()), to)
    yield "dispatch_dgrad: dy must be a tuple (dweights, drows, None, None, None)", lambda: dist.dispatch.dgrad(kept, rows, to)
    for at, name in ((2, "indices"), (4, "sizes")):
        dy = tuple(w if part == at else None for part in range(5))
        said = f"dispatch_dgrad: dy.{at} must be None ({name} are integers, without a gradient), got float32[2, 3]"
        yield said, lambda dy=dy: dist.dispatch.dgrad(kept, dy, to)
    yield "dispatch_dgrad: dy.1 must be [4, 4], got [2, 4]", lambda: dist.dispatch.dgrad(kept, (None, x, None, None, None), to)
    yield "combine_fwd: x must be a tuple (rows, place, sizes), got float32[2, 4]", lambda: dist.combine.fwd(None, x, back)
    yield "combine_fwd: x.0 (rows) must be [R, D], got float32[2]", lambda: dist.combine.fwd(None, (x[:, 0], place), back)
    yield (
        "combine_fwd: x.0 (rows) must be [4, D], the rows that came by x.2 (sizes), got float32[2, 4]",
        lambda: dist.combine.fwd(None, (x, place, sizes), back),
    )
    yield "combine_fwd: x.2 (sizes) must be [2, 2], got [2, 1]", lambda: dist.combine.fwd(None, (rows, place, sizes[:, :1]), back)
    yield "combine_fwd: x.2 (sizes) must be int64, got int32", lambda: dist.combine.fwd(None, (rows, place, sizes.int()), back)
    yield (
        "combine_fwd: x.0 (rows) must be of a size along dimension 0 that axis 'ep' of 2 divides, got float32[3, 2]",
        lambda: dist.combine.fwd(None, (w.T.contiguous(), place), back),
    )
    yield "combine_fwd: x.1 (place) must be int32, got int64", lambda: dist.combine.fwd(None, (rows, place.long()), back)
    yield "CombineConfig: axis must be Axis, got 3", lambda: dist.CombineConfig(3)


def test_sizes_on_a_device_are_refused():
    """To read them there the host would wait."""
    x = torch.ones(4, 4), torch.zeros(2, 2, dtype=torch.int32), placed(torch.full((2, 2), 2))
    said = r"^combine_fwd: x\.2 \(sizes\) must be on the host, as from dispatch, got int64\[2, 2\]"
    with TwoDevices(), pytest.raises(ValueError, match=said):
        dist.combine.fwd(None, x, dist.CombineConfig(dist.Mesh.abstract({"ep": 2}, 0)["ep"]))


def test_no_rows_are_sent_for_a_gradient_that_nobody_asks_for():
    """Nor if the places are named, which have none."""

    def back(mesh):
        cfg, x = dist.CombineConfig(mesh["ep"]), (torch.ones(4, 3), torch.tensor([[0, 1], [2, 3]]).int())
        for asked in ([], ["1"], False):
            y, residuals = dist.combine.fwd(None, x, cfg, needs=Needs(x=asked))
            assert residuals is None or dist.combine.dgrad(residuals, y, cfg) == ((None, None), None)

    run_ranks({"ep": 2}, back)


@pytest.mark.parametrize("asked", [[], ["0"], ["1"], ["2"], False], ids=str)
def test_the_gradients_of_a_dispatch_are_those_that_are_asked_for_and_given(asked):
    cfg = dist.DispatchConfig(2, axis=dist.Mesh.abstract({"ep": 1}, 0)["ep"])
    x = torch.rand(3, 2), torch.ones(3, 4), torch.tensor([[0, 1], [1, 0], [0, 1]], dtype=torch.int32)
    (weights, rows, *_), residuals = dist.dispatch.fwd(None, x, cfg, needs=Needs(x=asked))
    if residuals is not None:
        for dy in ((weights, rows), (None, rows), (weights, None), (None, None)):
            dx, pending = dist.dispatch.dgrad(residuals, (*dy, None, None, None), cfg)
            assert pending is None and dx[2] is None
            want = [dy[i] is not None and str(i) in (asked or []) for i in (0, 1)]
            assert [d is not None for d in dx[:2]] == want


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
    to, back = dist.DispatchConfig(8, axis=axis, capacity=1.0), dist.CombineConfig(axis)

    def there_and_back(weights, x, indices):
        (w, rows, _, place, sizes), kept = dist.dispatch.fwd(None, (weights, x, indices), to)
        y, of_combine = dist.combine.fwd(None, (rows, place, sizes), back)
        return y, dist.dispatch.dgrad(kept, (w, rows, None, None, None), to)[0], dist.combine.dgrad(of_combine, y, back)[0]

    if n == 1:  # more ranks would need processes
        assert check_capturable(there_and_back, WEIGHTS, X, CHOSEN) == []
    made = paths(there_and_back(*(t.to("meta") for t in (WEIGHTS, X, CHOSEN))))
    shapes = {path: tuple(t.shape) for path, t in made.items() if t is not None}
    assert shapes == {"0": (16, 3), "1.0": (16, 2), "1.1": (16, 3), "2.0": (16 * n, 3)}
