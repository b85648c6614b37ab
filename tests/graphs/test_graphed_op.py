"""graphed_op: halves as graphs, slots in flight, the order of calls, and the ownership of tensors."""

import random as draws

import pytest
import torch
from model import CFG, batch, init, same

from funcops import (
    ActivationConfig,
    ChainConfig,
    LinearConfig,
    Needs,
    RepeatConfig,
    RouteConfig,
    Step,
    TorchConfig,
    activation,
    chain,
    linear,
    op_from_torch,
    random,
    remat,
    repeat,
    route,
    with_policy,
)
from funcops.adapters.graphs import graphed_op
from funcops.adapters.graphs.statics import clones
from funcops.engine.errors import BorrowedError, CaptureError, GraphOrderError, StaleResidualError
from funcops.engine.trees import tensors, tree_map, tree_map_tensors
from funcops.schedule import delay_w, one_f_one_b, zb_h1, zb_h2

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NEEDS = Needs(x=False)
FOLLOWS = {"residuals": ("dgrad", "bwd", "release"), "pending": ("wgrad", "release")}  # what takes a handle


def add(a, b):
    return b if a is None else tree_map(lambda p, q: None if p is None else p + q, a, b)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.turns("ranks")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "make", [one_f_one_b, zb_h1, zb_h2, lambda p, m: delay_w(one_f_one_b(p, m), p + 1)], ids=["1f1b", "zb_h1", "zb_h2", "delayed"]
)
def test_the_orders_of_schedules(make, ranks, device):
    """The actions of a schedule's first rank, with as many slots as it has microbatches in flight: one to four in 1F1B and
    ZB-H1."""
    params, _ = init(device)
    actions = make(ranks, 8).ranks[0]
    slots = most_in_flight(actions)
    assert slots == ranks or make not in (one_f_one_b, zb_h1)
    graph = graphed_op(chain, CFG, params, batch(0, device), slots=slots, needs=NEEDS)
    residuals, pendings, want, got = {}, {}, None, None
    dy = torch.tensor(0.125, device=device)
    for _, kind, m in actions:
        if kind == "F":
            loss, residuals[m] = graph.fwd(params, batch(m, device))
            loss_want, kept = chain.fwd(params, batch(m, device), CFG, needs=NEEDS)
            assert torch.equal(loss, loss_want)
            want = add(want, chain.bwd(kept, dy, CFG)[0])
        elif kind == "I":
            _, pendings[m] = graph.dgrad(residuals.pop(m), dy)
        elif kind == "W":
            got = add(got, graph.wgrad(pendings.pop(m)))
        else:
            got = add(got, graph.bwd(residuals.pop(m), dy)[0])
    same(got, reference(params, actions, dy, device))
    assert not residuals and not pendings


def reference(params, actions, dy, device):
    """The sum, in the order of the weight gradients."""
    total = None
    for _, kind, m in actions:
        if kind in "WB":
            _, kept = chain.fwd(params, batch(m, device), CFG, needs=NEEDS)
            total = add(total, chain.bwd(kept, dy, CFG)[0])
    return total


def most_in_flight(row):
    now = most = 0
    for action in row:
        now += {"F": 1, "W": -1, "B": -1}.get(action.kind, 0)
        most = max(most, now)
    return most


def small(slots=2, **options):
    cfg = LinearConfig(3, 2)
    params = linear.init(cfg, key=random.key(0))
    x, dy = torch.randn(4, 3), torch.randn(4, 2)
    return graphed_op(linear, cfg, params, x, slots=slots, **options), params, x, dy


def test_every_wrong_order_raises():
    graph, params, x, dy = small()
    y, residuals = graph.fwd(params, x)
    with pytest.raises(GraphOrderError, match="graphed linear_wgrad: must be given pending, got residuals of slot 0"):
        graph.wgrad(residuals)
    dx, pending = graph.dgrad(residuals, dy)
    for again in (graph.dgrad, graph.bwd):
        with pytest.raises(GraphOrderError, match="residuals of slot 0 must be unused, got some that were used already"):
            again(residuals, dy)
    with pytest.raises(GraphOrderError, match="must be given residuals, got pending of slot 0"):
        graph.bwd(pending, dy)
    graph.fwd(params, x)
    with pytest.raises(
        GraphOrderError, match=r"graphed linear_fwd: a slot must be free, got 2 in flight \(0: pending, 1: residuals\)"
    ):
        graph.fwd(params, x)
    graph.wgrad(pending)
    with pytest.raises(GraphOrderError, match="pending of slot 0 must be unused"):
        graph.wgrad(pending)
    _, residuals = graph.fwd(params, x)
    assert "residuals in slot 0" in repr(residuals)
    graph.release(residuals)
    with pytest.raises(GraphOrderError, match="must be unused"):
        graph.dgrad(residuals, dy)
    other, *_ = small()
    with pytest.raises(GraphOrderError, match="residuals must be this graph's, got another graph's"):
        other.dgrad(residuals, dy)
    with pytest.raises(
        TypeError, match="graphed linear_dgrad: residuals must be what this graph's fwd or dgrad returned, got float32"
    ):
        graph.dgrad(y, dy)
    graph.reset()
    with pytest.raises(GraphOrderError, match=r"must not be called after reset\(\)"):
        graph.bwd(residuals, dy)


def test_wrong_inputs_raise_and_leave_the_slot_unchanged():
    graph, params, x, dy = small(1)
    with pytest.raises(ValueError, match=r"graphed linear_fwd: input 1 must be float32\[4, 3\], got float32\[2, 3\]"):
        graph.fwd(params, x[:2])
    y, residuals = graph.fwd(params, x)
    with pytest.raises(TypeError, match=r"graphed linear_dgrad: input 0 must be float32\[4, 2\], got float64"):
        graph.dgrad(residuals, dy.double())
    moved = tree_map_tensors(torch.clone, params)
    graph.bwd(residuals, dy)
    with pytest.raises(ValueError, match=r"input 0.weight must be at its captured address \(pinned\)"):
        graph.fwd(moved, x)


def test_a_write_in_flight_is_noticed():
    graph, params, x, dy = small(1, outputs="borrow")
    y, residuals = graph.fwd(params, x)
    params.weight.add_(1)
    with pytest.raises(StaleResidualError, match="linear_dgrad: params.weight must be as the forward left it"):
        graph.dgrad(residuals, dy)
    graph, params, x, dy = small(1, outputs="borrow")
    y, residuals = graph.fwd(params, x)
    y.add_(1)
    with pytest.raises(BorrowedError, match="slot 0.y must be as the forward left it, got a tensor that was written to"):
        graph.dgrad(residuals, dy)
    graph, params, x, dy = small(1)
    _, residuals = graph.fwd(params, x)
    residuals.tree.x.zero_()
    with pytest.raises(BorrowedError, match="slot 0.residuals.x must be as the forward left it"):
        graph.bwd(residuals, dy)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_two_replays_add_up(device):
    """torch's make_graphed_callables returns its own buffers: two replays give the last gradient, twice (pytorch#181723)."""
    params, _ = init(device)
    dy = torch.tensor(1.0, device=device)
    graph = graphed_op(chain, CFG, params, batch(0, device), slots=1, needs=NEEDS)
    found, want = [], []
    for m in range(2):
        _, residuals = graph.fwd(params, batch(m, device))
        found.append(graph.bwd(residuals, dy)[0])
        want.append(reference(params, [(0, "B", m)], dy, device))
    same(add(*found), add(*want))
    into = tree_map_tensors(torch.zeros_like, params)
    graph = graphed_op(chain, CFG, params, batch(0, device), slots=2, needs=NEEDS, into=into)
    assert not any(bool(t.any()) for t in tensors(into)), "warm-up and capture are undone"
    _, first = graph.fwd(params, batch(0, device))
    _, second = graph.fwd(params, batch(1, device))
    _, pending = graph.dgrad(first, dy)
    assert graph.wgrad(pending) is into and graph.bwd(second, dy)[0] is into
    for got, one in zip(tensors(into), tensors(add(*want)), strict=True):
        torch.testing.assert_close(got, one)


@pytest.mark.parametrize("captured", [True, False])
def test_into_stands_where_an_op_takes_it(captured):
    """A capture with accumulators adds to them alone; what cannot be added to raises before the slot is freed."""
    cfg, x, dy = LinearConfig(4, 3), torch.randn(2, 4), torch.randn(2, 3)
    params = linear.init(cfg, key=random.key(0))
    sums = tree_map_tensors(torch.ones_like, params)
    graph = graphed_op(linear, cfg, params, x, into=sums if captured else None)
    want = linear.bwd(linear.fwd(params, x, cfg)[1], dy, cfg)[0]
    for wrong in (tree_map_tensors(lambda t: torch.ones(5), params), {"w": torch.ones(3, 4)}):
        _, residuals = graph.fwd(params, x)
        with pytest.raises((ValueError, TypeError), match=r"^graphed linear_bwd: into"):
            graph.bwd(residuals, dy, into=wrong)
        _, pending = graph.dgrad(residuals, dy)
        with pytest.raises((ValueError, TypeError), match=r"^graphed linear_wgrad: into"):
            graph.wgrad(pending, into=wrong)
        graph.release(pending)
    _, residuals = graph.fwd(params, x)
    assert graph.bwd(residuals, dy, into=sums)[0] is sums
    _, residuals = graph.fwd(params, x)
    assert graph.wgrad(graph.dgrad(residuals, dy)[1], into=sums) is sums
    for total, gradient in zip(tensors(sums), tensors(want), strict=True):
        torch.testing.assert_close(total, 1 + 2 * gradient)


def test_params_are_trained_in_place_between_replays():
    graph, params, x, dy = small(1)
    for _ in range(3):
        y, residuals = graph.fwd(params, x)
        assert torch.equal(y, torch.nn.functional.linear(x, params.weight, params.bias))
        dparams, _ = graph.bwd(residuals, dy)
        for p, g in zip(tensors(params), tensors(dparams), strict=True):
            p.sub_(g, alpha=0.1)


@pytest.mark.parametrize("device", DEVICES)
def test_buffers_have_names_and_bytes(tmp_path, device):
    params, _ = init(device)
    graph = graphed_op(chain, CFG, params, batch(0, device), slots=2, keep_graph=device == "cuda")
    report = graph.report()
    assert report.residual_bytes > 0 and report.input_bytes == 2 * (6 * 8 * 4 + 6 * 8 + 16 + 4)
    y, residuals = graph.fwd(params, batch(0, device))
    assert residuals.tree["head"].weight.shape == (5, 16) and residuals.slot == 0
    graph.instantiate()
    graph.dot(str(tmp_path / "dgrad.dot"), "dgrad")
    if device == "cpu":
        with pytest.raises(RuntimeError, match="a CUDA graph is needed, got a recording"):
            graph.raw_graph("fwd")
    assert (tmp_path / "dgrad.dot").stat().st_size > 100
    assert set(graph.graphs(1)) == {"fwd", "dgrad", "wgrad", "bwd"}
    _, dx = graph.bwd(residuals, torch.ones_like(y))
    assert report.output_bytes == 2 * sum(t.nbytes for t in tensors((y, dx)))


def test_an_op_without_params():
    """Nobody is asked for a rule for params that it lacks."""
    double = op_from_torch(lambda params, x, cfg: x * x, init=lambda cfg, **given: {})
    x = torch.randn(4)
    graph = graphed_op(double, TorchConfig(), {}, x)
    y, residuals = graph.fwd({}, x)
    assert torch.equal(y, x * x)
    assert torch.equal(graph.bwd(residuals, torch.ones(4))[1], 2 * x)


def test_bad_arguments():
    cfg = LinearConfig(3, 2)
    params, x = linear.init(cfg, key=random.key(0)), torch.randn(4, 3)
    with pytest.raises(ValueError, match="graphed_op: needs must be Needs of at least one gradient"):
        graphed_op(linear, cfg, params, x, needs=Needs.NONE)
    with pytest.raises(TypeError, match="graphed_op: cfg must be ChainConfig, got LinearConfig"):
        graphed_op(chain, cfg, params, x)
    with pytest.raises(ValueError, match="graphed_op: slots must be at least 1, got 0"):
        graphed_op(linear, cfg, params, x, slots=0)
    before = clones(params)
    with pytest.raises(ValueError, match=r"linear_fwd: x must be \[..., 3\]"):
        graphed_op(linear, cfg, params, x[:, :2])
    same(params, before)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_graph_is_asked_for_by_name_and_slot(slots, tmp_path, monkeypatch):
    """The first slot's if no slot is named; here a recording stands for a device's graph."""
    graph, *_ = small(slots)
    kind = type(graph.graphs()["fwd"])
    monkeypatch.setattr(kind, "raw_graph", property(lambda self: self))
    monkeypatch.setattr(kind, "dot", lambda self, path: asked.append((self, path)))
    asked = []
    for name in ("fwd", "dgrad", "wgrad", "bwd"):
        ours = [graph.graphs(slot)[name] for slot in range(slots)]
        assert len({id(one) for one in ours}) == slots and graph.graphs()[name] is ours[0]
        assert graph.raw_graph(name) is ours[0] and [graph.raw_graph(name, slot) for slot in range(slots)] == ours
        graph.dot("a", name)
        graph.dot("b", name, slots - 1)
        assert asked[-2:] == [(ours[0], "a"), (ours[-1], "b")]
    graph.dot("c")
    assert asked[-1] == (graph.graphs(0)["fwd"], "c")
    with pytest.raises(IndexError):
        graph.raw_graph("fwd", slots)


@pytest.mark.parametrize("seed", range(4))
def test_what_was_used_or_released_is_refused_for_ever(seed):
    """Drawn calls on two slots: whatever follows, a handle is taken once, and then never again."""
    graph, params, x, dy = small(2)
    draw, flying, used = draws.Random(seed), [], []
    for _ in range(25):
        ways = ["fwd"] * (len(flying) < 2) + [(one, name) for one in flying for name in FOLLOWS[one.kind]]
        way = draw.choice(ways)
        if way == "fwd":
            flying.append(graph.fwd(params, x)[1])
        else:
            one, name = way
            flying.remove(one)
            used.append(one)
            gave = getattr(graph, name)(one, *[dy] * (name in ("dgrad", "bwd")))
            flying += [gave[1]] if name == "dgrad" else []
        for old in used:
            for name in FOLLOWS[old.kind]:
                with pytest.raises(GraphOrderError, match="must be unused"):
                    getattr(graph, name)(old, *[dy] * (name in ("dgrad", "bwd")))


@pytest.mark.parametrize("half", ["dgrad", "bwd"])
@pytest.mark.parametrize("later", ["fwd", "same", "reset"])
def test_a_borrowed_dx_ends_with_the_next_replay(half, later):
    """The forward comes first in the pool, and may write where its backwards have their results."""
    graph, params, x, dy = small(1, outputs="borrow", debug=True)

    def step():
        residuals = graph.fwd(params, x)[1]
        first, second = getattr(graph, half)(residuals, dy)
        return (first, second) if half == "dgrad" else (second, None)

    dx, pending = step()
    assert torch.equal(dx + 0, dy @ params.weight)
    if pending is not None:
        graph.wgrad(pending)
    if later == "fwd":
        graph.fwd(params, x)
    elif later == "same":
        step()
    else:
        graph.reset()
    with pytest.raises(BorrowedError, match="was borrowed from a graph that has been replayed since"):
        dx + 0


@pytest.mark.turns("around", "half", every=4)
@pytest.mark.parametrize("around", ["alone", "remat", "minimal", "remat of a chain", "repeat of remat"])
@pytest.mark.parametrize("half", ["bwd", "dgrad"])
def test_a_tensor_that_a_function_captured(around, half):
    """A write to it between a forward and its backward raises, also where only the second run of the forward reads it."""
    gain = torch.full((3,), 2.0)
    own = op_from_torch(lambda params, x, cfg: (x * gain).sin(), name="own")
    body = ChainConfig(steps=(Step("own", own, TorchConfig()), Step("up", linear, LinearConfig(3, 3))))
    op, cfg = {
        "alone": (own, TorchConfig()),
        "remat": (remat(own), TorchConfig()),
        "minimal": (with_policy(repeat, "minimal"), RepeatConfig(chain, body, 2)),
        "remat of a chain": (remat(chain), body),
        "repeat of remat": (repeat, RepeatConfig(remat(chain), body, 2)),
    }[around]
    params, x, dy = op.init(cfg, key=random.key(0)), torch.randn(4, 3), torch.randn(4, 3)
    graph = graphed_op(op, cfg, params, x, slots=2)
    for factor in (2.0, 3.0):  # a write between two forwards is read
        gain.fill_(factor)
        y, residuals = op.fwd(params, x, cfg)
        same(graph.bwd(graph.fwd(params, x)[1], dy), op.bwd(residuals, dy, cfg))
    _, kept = graph.fwd(params, x)
    gain.mul_(2)
    with pytest.raises(BorrowedError, match=rf"{half}: slot 0.* must"):
        getattr(graph, half)(kept, dy)


def test_parts_of_y_that_are_integers_have_no_gradient():
    cfg, x = RouteConfig(8, 2), torch.randn(3, 8)
    graph = graphed_op(route, cfg, route.init(cfg, key=random.key(0)), x)
    params = route.init(cfg, key=random.key(0))
    y, residuals = route.fwd(params, x, cfg)
    dy = tree_map_tensors(lambda t: torch.ones_like(t) if t.is_floating_point() else None, y)
    same(graph.bwd(graph.fwd(params, x)[1], dy), route.bwd(residuals, dy, cfg))


@pytest.mark.parametrize("slots", [1, 2])
def test_the_first_slot_alone_is_warmed_up(slots):
    """The others find what it has compiled and allocated."""
    ran = []

    def fwd(*given, **options):
        ran.append(1)
        return linear.fwd(*given, **options)

    cfg = LinearConfig(3, 3)
    params, x = linear.init(cfg, key=random.key(0)), torch.ones(2, 3)
    counts = []
    for warmup in (0, 3):
        ran.clear()
        graphed_op(linear._replace(fwd=fwd), cfg, params, x, slots=slots, warmup=warmup)
        counts.append(len(ran))
    assert counts[1] - counts[0] == 3


def test_an_op_that_writes_to_its_inputs_is_refused():
    """Neither x nor dy is donated."""
    cfg, x = ActivationConfig("gelu"), torch.ones(3)

    def fwd(params, x, cfg, *, needs=Needs.ALL):
        return activation.fwd(params, x.add_(1), cfg, needs=needs)

    def dgrad(residuals, dy, cfg):
        return activation.dgrad(residuals, dy.add_(1), cfg)

    for changes, said in (({"fwd": fwd}, "activation_fwd: input 1"), ({"dgrad": dgrad}, "activation_dgrad: input 0")):
        with pytest.raises(CaptureError, match=f"^graphed {said} must not be written to unless it is donated"):
            graphed_op(activation._replace(**changes), cfg, None, x)
