"""`donate` of a traced op's residuals: inside a half, a kept tensor is alive as long as an operator will read it, and no longer."""

import weakref

import pytest
import torch
from own_models import CFG, Language, draw
from test_batched_traces import ones
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from funcops import (
    Compress,
    DonatedError,
    Needs,
    Policy,
    TorchConfig,
    chain,
    donate,
    named_steps,
    op_from_module,
    op_from_torch,
    stages_from_module,
    with_policy,
)
from funcops.engine.trees import paths, tensors


def storage(t):
    return t.untyped_storage()._cdata


class Reads(TorchDispatchMode):
    """For each operator that runs: which of some storages it reads, and which are alive before it; and the bytes of all results."""

    def __init__(self, names):
        super().__init__()
        self.names, self.reads, self.alive, self.made, self.bytes = names, [], [], {}, []
        self.refs = {name: weak for name, (_, weak) in names.items()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {storage(t) for t in tensors((args, kwargs))}
        expired = torch.UntypedStorage._expired
        self.alive.append({name for name, weak in self.refs.items() if not expired(weak)})
        found = func(*args, **(kwargs or {}))
        # a storage that was freed may have given its address to another
        self.reads.append({n for n, (key, _) in self.names.items() if key in given and n in self.alive[-1]})
        self.made |= {storage(t): (t.untyped_storage()._weak_ref(), t.untyped_storage().nbytes()) for t in tensors(found)}
        self.bytes.append(sum(size for weak, size in self.made.values() if not expired(weak)))
        return found

    def during(self, run):
        with self:
            run()
        return self


def kept_alone(node, *held):
    """The storages of a node that nobody else holds, by path."""
    others = {storage(t) for t in tensors(held)}
    found = {path: t for path, t in paths(node).items() if isinstance(t, torch.Tensor) and storage(t) not in others}
    return {path: (storage(t), t.untyped_storage()._weak_ref()) for path, t in found.items()}


def wide():
    return nn.Sequential(*[nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 6)) for _ in range(4)])


def convolved():
    layers = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(144, 2)).eval()


def language():
    return Language()


IDS = torch.arange(10).view(2, 5) % 7
MODELS = {
    "layers": (wide, lambda: draw(4, 5, 6)),
    "convolutions": (convolved, lambda: draw(2, 4, 6, 6)),
    "language": (language, lambda: {"ids": IDS, "labels": IDS, "twice": True}),
}


def built(name):
    torch.manual_seed(0)
    build, example = MODELS[name]
    x = example()
    return *op_from_module(build().double(), x), x


@pytest.mark.parametrize("half", ["bwd", "dgrad", "wgrad", "wgrad into"])
@pytest.mark.parametrize("name", MODELS)
def test_a_kept_tensor_is_freed_after_its_last_reader(name, half):
    op, params, x = built(name)
    found = []

    def ran(give):
        y, node = op.fwd(params, x, CFG)
        dy, box = ones(y), [node]
        if half.startswith("wgrad"):
            box = [op.dgrad(node, dy, CFG)[1]]
        del node
        sums = {n: torch.zeros_like(t) for n, t in params.items()}
        reads = Reads(kept_alone(box[0], params, x, dy, list(box[0].traced.graphs.captured.values())))
        if half.startswith("wgrad"):
            into = sums if half == "wgrad into" else None
            reads.during(lambda: found.append(op.wgrad(give(box.pop()), CFG, into=into)))
            return reads, set()
        results = []
        reads.during(lambda: results.extend(getattr(op, half)(give(box.pop()), dy, CFG)))
        found.append(results)
        return reads, {storage(t) for t in tensors(results)}

    held = []
    plain, _ = ran(lambda node: held.append(node) or node)
    given, handed = ran(donate)
    every = set(plain.refs)
    assert plain.alive == [every] * len(plain.alive), "nothing is freed that somebody holds"
    assert len(given.alive) == len(plain.alive), "the same operators"
    last = {path for path, (key, _) in given.names.items() if key in handed}
    for i, alive in enumerate(given.alive):
        # storages that two tensors share have two paths
        need = {path for path in every if any(path in reads for reads in plain.reads[i:])} | last
        assert alive == need, (i, alive ^ need)
    assert max(given.bytes) <= max(plain.bytes)
    if half != "dgrad":
        assert len(given.alive[-1]) <= len(every) / 2 < len(given.alive[0]), "memory falls"
    elif name == "language":
        assert len(given.alive[-1]) < len(every), "attention's residuals are read by dgrad alone"
    assert all(map(torch.equal, tensors(found[0]), tensors(found[1])))


@pytest.mark.parametrize("half", ["bwd", "dgrad"])
def test_in_a_chain_of_stages(half):
    torch.manual_seed(0)
    cfg, params = stages_from_module(wide().double(), draw(4, 5, 6), ["2"])
    x = draw(4, 5, 6)
    y, node = chain.fwd(params, x, cfg)
    chain.bwd(node, ones(y), cfg)
    y, node = chain.fwd(params, x, cfg)
    dy, box = ones(y), [node]
    del node
    reads = Reads(kept_alone(box[0], params, x, dy))
    if half == "dgrad":
        pending = [chain.dgrad(donate(box.pop()), dy, cfg)[1]]
        reads = Reads(kept_alone(pending[0], params, x, dy))
        reads.during(lambda: chain.wgrad(donate(pending.pop()), cfg))
    else:
        reads.during(lambda: chain.bwd(donate(box.pop()), dy, cfg))
    counts = [len(alive) for alive in reads.alive]
    assert counts == sorted(counts, reverse=True) and len(set(counts)) >= 6, counts
    assert counts[-1] <= counts[0] / 3


def test_what_the_caller_has_of_a_given_node_stays_and_the_node_is_empty():
    op, params, x = built("layers")
    y, residuals = op.fwd(params, x, CFG)
    kept, before = residuals.kept, dict(residuals.kept)
    want = op.bwd(residuals, ones(y), CFG)
    got = op.bwd(donate(residuals), ones(y), CFG)
    assert all(map(torch.equal, tensors(got), tensors(want)))
    assert kept == before and all(kept[n] is before[n] for n in kept), "a dict that the caller took out"
    with pytest.raises(DonatedError):
        residuals.stale()
    cell = donate(op.fwd(params, x, CFG)[1])
    pending = op.dgrad(cell, ones(y), CFG)[1]
    for spent, run in ((cell, lambda one: op.bwd(one, ones(y), CFG)), (cell, lambda one: op.dgrad(one, ones(y), CFG))):
        with pytest.raises(DonatedError):
            run(spent)
    cell = donate(pending)
    op.wgrad(cell, CFG)
    with pytest.raises(DonatedError):
        op.wgrad(cell, CFG)


@pytest.mark.parametrize("half", ["bwd", "dgrad"])
def test_a_wrong_dy_leaves_what_was_given(half):
    """It is taken, as by every op, but a tensor that the caller holds is as before."""
    op, params, x = built("layers")
    y, residuals = op.fwd(params, x, CFG)
    with pytest.raises(ValueError, match="dy must be"):
        getattr(op, half)(residuals, ones(y)[:2], CFG)
    getattr(op, half)(donate(residuals), ones(y), CFG)


@pytest.mark.parametrize("how", ["codes", "named", "some", "function", "no dy"])
def test_the_same_gradients(how):
    op, params, x = built("layers")
    needs = Needs(x=False, params=frozenset({"1.1.weight"})) if how == "some" else Needs.ALL
    if how == "codes":
        op = with_policy(op, Policy({"kept.*": Compress("bf16")}))
    if how == "function":
        op, params = op_from_torch(lambda params, x, cfg: (x @ x.mT).tanh().sum(-1)), None
    y, residuals = op.fwd(params, x, CFG, needs=needs)
    dy = None if how == "no dy" else ones(y)
    want = [*op.dgrad(residuals, dy, CFG), *op.bwd(residuals, dy, CFG)]
    want[1] = op.wgrad(want[1], CFG)
    other = op.fwd(params, x, CFG, needs=needs)[1]

    def given():
        dx, pending = op.dgrad(donate(residuals), dy, CFG)
        return [dx, op.wgrad(None if pending is None else donate(pending), CFG), *op.bwd(donate(other), dy, CFG)]

    if how == "named":
        with named_steps():
            got = given()
    else:
        got = given()
    assert len(tensors(got)) == len(tensors(want)) and all(map(torch.equal, tensors(got), tensors(want)))
    assert bool(tensors(got)) == (how != "no dy")


def test_a_gradient_that_the_pending_holds_is_given_on():
    """One that dgrad computed needs no copy if nobody else has the pending."""
    op = op_from_torch(lambda params, x, cfg: x + params, init=lambda cfg, **options: torch.zeros(3, device=options["device"]))
    y, residuals = op.fwd(torch.zeros(3), torch.ones(3), TorchConfig())
    pending = op.dgrad(residuals, torch.ones(3), TorchConfig())[1]
    ref = weakref.ref(tensors(pending)[0])
    assert op.wgrad(pending, TorchConfig()) is not ref()
    assert torch.equal(op.wgrad(donate(pending), TorchConfig()), torch.ones(3))
