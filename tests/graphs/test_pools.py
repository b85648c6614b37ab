"""Memory pools: replays in any legal order give the eager bits, and tensors that a graph of a shared pool may have overwritten
raise."""

import gc
import random as python_random

import pytest
import torch
from model import CFG, batch, init, same

from funcops import LinearConfig, chain, linear, random
from funcops import nn as fnn
from funcops.adapters.graphs import graphed, graphed_op, make_graphed_callables, timeline
from funcops.engine.errors import BorrowedError, StaleResidualError
from funcops.engine.trees import tensors

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def steps_of_slots(draw, slots, length):
    """Legal steps (kind, call) of up to `slots` calls in flight, ending with none in flight."""
    fresh, kept, pending, steps = 0, [], [], []
    while len(steps) < length or kept or pending:
        can = ["F"] * (len(kept) + len(pending) < slots and len(steps) < length) + ["I", "B"] * bool(kept) + ["W"] * bool(pending)
        what = draw.choice(can)
        if what == "F":
            call, fresh = fresh, fresh + 1
            kept.append(call)
        else:
            call = (pending if what == "W" else kept).pop(draw.randrange(len(pending if what == "W" else kept)))
            if what == "I":
                pending.append(call)
        steps.append((what, call))
    return steps


class Run:
    """A graphed op beside the eager one: each step's results are compared, borrowed ones until the slot's next forward."""

    def __init__(self, graph, params, wants, device):
        self.graph, self.params, self.wants, self.device = graph, params, wants, device
        self.flying, self.lent = {}, {}

    def step(self, what, call):
        dy, (y, dparams, dx) = torch.tensor(0.5, device=self.device), self.wants[call % len(self.wants)]
        if what == "F":
            free = next(i for i, slot in enumerate(self.graph._slots) if slot.state == "free")
            self.look(self.lent.pop(free, ()))
            got, self.flying[call] = self.graph.fwd(self.params, batch(call % len(self.wants), self.device))
            self.lend(call, got, y)
        elif what == "I":
            got, pending = self.graph.dgrad(self.flying[call], dy)
            self.flying[call] = pending
            self.lend(call, got, dx)
        elif what == "W":
            same(self.graph.wgrad(self.flying[call]), dparams)
            del self.flying[call]
        else:
            got = self.graph.bwd(self.flying[call], dy)
            same(got[0], dparams)
            self.lend(call, got[1], dx)
            del self.flying[call]

    def lend(self, call, got, want):
        self.lent.setdefault(self.flying[call].slot, []).append((got, want))

    def in_slot(self, slot):
        return {call for call, one in self.flying.items() if one.slot == slot}

    def look(self, pairs):
        for got, want in pairs:
            same(got, want)

    def end(self):
        for pairs in self.lent.values():
            self.look(pairs)


def eager(params, device, calls=5):
    """The expected (y, dparams, dx) of each batch."""
    wants = []
    for i in range(calls):
        y, residuals = chain.fwd(params, batch(i, device), CFG)
        wants.append((y, *chain.bwd(residuals, torch.tensor(0.5, device=device), CFG)))
    return wants


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("outputs", [pytest.param("clone", marks=pytest.mark.slow), "borrow"])
def test_graphed_op_in_any_order(outputs, device):
    """Twenty drawn orders of forwards, dgrads, wgrads and backwards over one to four slots."""
    params, _ = init(device)
    wants = eager(params, device)
    for slots in (1, 2, 3, 4):
        graph = graphed_op(chain, CFG, params, batch(0, device), slots=slots, outputs=outputs, warmup=1)
        for seed in range(5):
            run = Run(graph, params, wants, device)
            for step in steps_of_slots(python_random.Random(100 * slots + seed), slots, 10):
                run.step(*step)
            run.end()


def linears(seed, device):
    torch.manual_seed(seed)
    return torch.nn.Sequential(fnn.Linear(6, 8), torch.nn.Tanh(), fnn.Linear(8, 6)).to(device)


def an_order(draw, most):
    """Forwards (k) and backwards (-k) of two callables, with `most` calls of each in flight."""
    now, order = [most, most], [1, 2] * most
    draw.shuffle(order)
    while any(now) or len(order) < 6 * most:
        can = [k + 1 for k in (0, 1) if now[k] < most and len(order) < 6 * most] + [-k - 1 for k in (0, 1) if now[k]]
        step = draw.choice(can)
        now[abs(step) - 1] += 1 if step > 0 else -1
        order.append(step)
    return order


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("delayed", [False, True], ids=["at once", "delayed"])
@pytest.mark.parametrize("given", [False, True], ids=["no order", "an order"])
def test_callables_in_any_order(given, delayed, device):
    """Two callables: with one call of each in flight, twelve drawn orders; with two, six given orders, twice."""
    pair = None
    for seed in range(6 if given else 12):
        draw, most = python_random.Random(seed), 2 if given else 1
        order = an_order(draw, most)
        if given or pair is None:
            plain = [linears(k, device) for k in (0, 1)]
            sample = (torch.ones(4, 6, device=device, requires_grad=True),)
            pair = make_graphed_callables(
                tuple(linears(k, device) for k in (0, 1)),
                (sample, sample),
                num_warmup_iters=1,
                order=order if given else None,
                delayed_wgrad=delayed,
                outputs="borrow",
            )
        for modules in (plain, pair):
            torch.manual_seed(seed)
            pick = python_random.Random(seed)
            for module in modules:
                module.zero_grad()
            flying, found = {1: [], 2: []}, []
            for step in order * (1 + given):
                k = abs(step)
                if step > 0:
                    x = torch.randn(4, 6).to(device).requires_grad_()
                    flying[k].append((x, modules[k - 1](x)))
                else:
                    x, y = flying[k].pop(pick.randrange(len(flying[k])))
                    y.square().sum().backward()
                    found.append(x.grad)
                    if delayed and modules is pair:
                        modules[k - 1].backward_dw()
            found += [p.grad for module in modules for p in module.parameters()]
            if modules is plain:
                want = found
        assert len(want) == len(found) and all(torch.equal(a, b) for a, b in zip(want, found, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_borrowed_outputs_live_for_as_many_calls_as_slots(slots, device):
    def fn(x):
        h = (x * 3).softmax(-1)
        return {"y": h @ x.mT, "n": (h * 100).long(), "mask": h > 0.2}

    x = torch.randn(5, 4, device=device)
    captured, held = graphed(fn, x, outputs="borrow", slots=slots), []
    for i in range(3 * slots):
        held = [*held, (captured(x + i), fn(x + i))][-slots:]
        for got, want in held:
            same(got, want)
    assert captured.report().pool_bytes >= slots * sum(t.nbytes for t in tensors(fn(x)))


REFUSED = (
    r"graphed chain_\w+: \w+ of slot 0 must be untouched, got a replay of a graph that was captured earlier into the same "
    "memory pool since: capture without pool="
)


@pytest.mark.parametrize("device", DEVICES)
def test_a_shared_pool_gives_the_same_bits_or_raises(device):
    """A function and two ops in one pool, in fifteen drawn orders: a tensor in flight raises if an earlier captured graph of the
    pool was replayed since. Tensors of another slot, or of the first graph, never do."""
    params, _ = init(device)
    wants, x = eager(params, device), torch.ones(4, device=device)
    first = graphed(lambda x: (x * 2).exp(), x, warmup=0)
    ops = [graphed_op(chain, CFG, params, batch(0, device), slots=2, warmup=0, pool=first) for _ in range(2)]
    refused, served = [0, 0], [0, 0]
    for seed in range(15):
        draw, runs = python_random.Random(seed), [Run(graph, params, wants, device) for graph in ops]
        todo, spoilt = [steps_of_slots(draw, 2, 8) for _ in ops], [set(), set()]
        while any(todo):
            k = draw.choice([k for k in (0, 1) if todo[k]])
            what, call = todo[k].pop(0)
            if draw.random() < 0.1:
                first(x)
                for run, calls in zip(runs, spoilt, strict=True):
                    calls |= run.in_slot(0)
            if call not in spoilt[k]:
                before = runs[k].in_slot(0)
                runs[k].step(what, call)
                served[k] += what != "F"
                if k == 0 and call in before | runs[k].in_slot(0):
                    spoilt[1] |= runs[1].in_slot(0)
            elif call in runs[k].flying:
                with pytest.raises(BorrowedError, match=REFUSED):
                    runs[k].step(what, call)
                ops[k].release(runs[k].flying.pop(call))
                refused[k] += 1
        for run in runs:
            run.end()
    assert refused[1] > refused[0] > 5 and min(served) > 50, (refused, served)


@pytest.mark.parametrize("device", DEVICES)
def test_callables_in_a_shared_pool(device):
    x = torch.randn(4, 6, device=device, requires_grad=True)
    for delayed in (False, True):
        first = graphed(lambda x: (x * 2).exp(), x.detach())
        module, plain = linears(0, device), linears(0, device)
        make_graphed_callables(module, (x,), pool=first, delayed_wgrad=delayed)
        y = module(x)
        first(x.detach())
        with pytest.raises(BorrowedError, match="the tensors of the forward must be untouched, got a replay of a graph that was"):
            y.sum().backward()
        del y
        first(x.detach())
        for of in (plain, module):
            of(x).square().sum().backward()
        if delayed:
            first(x.detach())
            with pytest.raises(BorrowedError, match="the tensors of the backward must be untouched, got a replay of a graph that"):
                module.backward_dw()
        else:
            assert all(torch.equal(a.grad, b.grad) for a, b in zip(module.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_stale_borrowed_outputs_of_a_shared_pool_raise(device):
    x = torch.ones(3, device=device)
    first = graphed(lambda x: x * 2 + 1, x, outputs="borrow", debug=True)
    second = graphed(lambda x: x * 3 + 1, x, outputs="borrow", debug=True, pool=first)
    mine, yours = first(x), second(x)
    assert float(mine.sum()) == 9 and float(yours.sum()) == 12
    second(x)
    assert float(mine.sum()) == 9, "a graph captured later harms nothing"
    yours = second(x)
    first(x)
    with pytest.raises(
        BorrowedError, match="^the output was borrowed from a graph, and a graph that was captured earlier into the same"
    ):
        yours.sum()
    assert float(second(x).sum()) == 12


def test_versions_count_overwrites_by_earlier_graphs_of_a_pool():
    """So autograd, and residuals that hold borrowed tensors, notice them without `debug`, too."""
    pool, x, lent = None, torch.ones(3), []
    for i in range(3):
        pool = graphed(lambda x, i=i: x * 2 + i, x, outputs="borrow", pool=pool)
        lent.append((pool, pool(x)))
    for i, (captured, _) in enumerate(lent):
        before = [y._version for _, y in lent]
        captured(x)
        assert [y._version > old for (_, y), old in zip(lent, before, strict=True)] == [j >= i for j in range(3)]


@pytest.mark.parametrize("half", ["dgrad", "bwd"])
def test_a_borrowed_dx_lives_until_the_slots_next_forward(half):
    """The forward's graph was captured first."""
    cfg = LinearConfig(3, 2)
    params, x, dy = linear.init(cfg, key=random.key(0)), torch.randn(4, 3), torch.randn(4, 2)
    for debug in (False, True):
        graph = graphed_op(linear, cfg, params, x, outputs="borrow", debug=debug)
        _, residuals = graph.fwd(params, x)
        found = getattr(graph, half)(residuals, dy)
        dx = found[0] if half == "dgrad" else found[1]
        if half == "dgrad":
            graph.wgrad(found[1])
        want, version = dy @ params.weight, dx._version
        assert torch.equal(dx, want)
        graph.fwd(params, x)
        if debug:
            with pytest.raises(BorrowedError, match="was borrowed from a graph that has been replayed since"):
                dx.sum()
        else:
            assert dx._version > version, "autograd, and residuals that hold it, must see that it was written over"


def test_a_slot_whose_backward_is_refused_can_be_released():
    cfg = LinearConfig(3, 2)
    params, x = linear.init(cfg, key=random.key(0)), torch.randn(4, 3)
    graph = graphed_op(linear, cfg, params, x)
    _, residuals = graph.fwd(params, x)
    params.weight.add_(1)
    with pytest.raises(StaleResidualError):
        graph.bwd(residuals, torch.ones(4, 2))
    graph.release(residuals)
    graph.fwd(params, x)


def test_a_timeline_knows_what_was_written_over():
    """Fifty drawn histories of a pool: graphs are captured, replayed and dropped, and the records of them stay bounded."""

    class Pool:
        pass

    for seed in range(50):
        draw, pool, entries, spoilt = python_random.Random(seed), Pool(), [], set()
        for _ in range(60):
            what = draw.choice("CRRRRD") if entries else "C"
            if what == "C":
                entries.append(timeline.TimelineEntry(pool))
                assert len(entries[0].timeline.last) <= 2 * len(entries)
                continue
            entry = draw.choice(entries)
            if what == "R":
                entry.replayed()
                spoilt = (spoilt | {one.order for one in entries if one.order > entry.order}) - {entry.order}
            else:
                entries.remove(entry)
                spoilt -= {entry.order}
                if draw.random() < 0.5:
                    entry.leave()
                del entry
            assert [one.overwritten() for one in entries] == [one.order in spoilt for one in entries]


@pytest.mark.slow
def test_nothing_is_kept_of_a_pool_whose_graphs_are_gone():
    gc.collect()
    before = len(timeline._timelines)
    captured = graphed(lambda x: x * 2, torch.ones(3), slots=2, outputs="borrow")
    assert len(timeline._timelines) == before + 2
    other = graphed(lambda x: x * 3, torch.ones(3), outputs="borrow", pool=captured)
    (line,) = [one for one in timeline._timelines.values() if len(one.last) == 2]
    del other
    gc.collect()
    assert len(line.last) == 2 and len(line.alive) == len(line.lending) == 1, (
        "nor of a graph that was dropped, where others of its pool live"
    )
    captured.reset()
    del captured, line
    gc.collect()
    assert len(timeline._timelines) == before
