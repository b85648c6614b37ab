"""A donated tree is freed as if its user had given each part to its step, one by one, from the last; nobody keeps a part."""

import dataclasses
import weakref

import pytest
import torch
from law_cases import CASES
from torch.utils._python_dispatch import TorchDispatchMode

from funcops import (
    ActivationConfig,
    ChainConfig,
    DonatedError,
    GLUConfig,
    L2NormConfig,
    LayerNormConfig,
    LinearConfig,
    RepeatConfig,
    RMSNormConfig,
    SkipConfig,
    Step,
    activation,
    chain,
    donate,
    glu,
    l2_norm,
    layer_norm,
    linear,
    random,
    repeat,
    rms_norm,
    skip,
)
from funcops.engine.contract.schema import Saved
from funcops.engine.program import programs
from funcops.engine.residuals.nested import Nested
from funcops.engine.trees import leaves, paths
from funcops.testing.checks import float_like

D = 8
PARTS = {
    "up": (linear, LinearConfig(D, 2 * D)),
    "gate": (glu, GLUConfig("swiglu", gate="first")),
    "norm": (rms_norm, RMSNormConfig(D)),
    "act": (activation, ActivationConfig("gelu")),
    "mean": (layer_norm, LayerNormConfig(D)),
    "unit": (l2_norm, L2NormConfig(D)),
    "out": (linear, LinearConfig(D, D)),
}
STEPS = ChainConfig(steps=tuple(Step(name, *part) for name, part in PARTS.items()), recompute=False, fuse=False)
INNER = ChainConfig(steps=(Step("first", chain, STEPS), Step("last", chain, STEPS)), recompute=False, fuse=False)
LAYERS = RepeatConfig(chain, STEPS, 3)
RULES = dataclasses.replace(STEPS, fuse=True)  # on a CPU they decline, and the steps run one by one
TREES = {"steps": (chain, STEPS), "steps of steps": (chain, INNER), "layers": (repeat, LAYERS), "rules": (chain, RULES)}


class Alive(TorchDispatchMode):
    """Which kept tensors are alive at each call of torch's."""

    def __init__(self, kept, *others):
        super().__init__()
        known = {id(t) for t in leaves(others)}
        self.refs = {path: weakref.ref(t) for path, t in paths(kept).items() if t is not None and id(t) not in known}
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((str(func), {path for path, ref in self.refs.items() if ref() is not None}))
        out = func(*args, **(kwargs or {}))
        for i, t in enumerate(out if isinstance(out, (tuple, list)) else [out]):
            if isinstance(t, torch.Tensor):
                self.refs[f"result {i} of call {len(self.calls)}, {func}"] = weakref.ref(t)
        return out

    def during(self, run):
        with self:
            run()
        return self.calls


def parts_of(op, cfg):
    return [(i, cfg.op, cfg.cfg) for i in range(cfg.times)] if op is repeat else [(s.name, s.op, s.cfg) for s in cfg.steps]


def by_hand(half, op, cfg, box, dy, waiting):
    """The backward of steps one by one, each given its residuals away. `box`: a list, so that no caller holds a node."""
    node = box.pop()
    if op not in (chain, repeat):
        dx, rest = getattr(op, half)(donate(node), dy, cfg)[:: -1 if half == "bwd" else 1]
        waiting.append(rest)
        return dx
    parts = dict(node)
    node.clear()
    for name, inner, own in reversed(parts_of(op, cfg)):
        dy = by_hand(half, inner, own, [parts.pop(name)], dy, waiting)
    return dy


def forward(name):
    op, cfg = TREES[name]
    params = op.init(cfg, key=random.key(0))
    x = torch.randn(4, D)
    y, kept = op.fwd(params, x, cfg)
    return op, cfg, params, x, torch.ones_like(y), [kept]


@pytest.mark.parametrize("half", ["bwd", "dgrad"])
@pytest.mark.parametrize("name", TREES)
def test_memory_falls_where_it_does_by_hand(name, half):
    op, cfg, params, x, dy, box = forward(name)
    waiting = []
    alive = Alive(box[0], params, x, dy)
    paths_of_kept = list(alive.refs)
    kept = len(paths_of_kept)
    want = alive.during(lambda: by_hand(half, op, cfg, box, dy, waiting))
    del waiting[:]
    op, cfg, params, x, dy, box = forward(name)
    alive = Alive(box[0], params, x, dy)
    got = alive.during(lambda: waiting.append(getattr(op, half)(donate(box.pop()), dy, cfg)[1]))
    assert [func for func, _ in got] == [func for func, _ in want]
    for i, ((func, one), (_, other)) in enumerate(zip(got, want, strict=True)):
        assert one <= other, f"call {i}, {func}: {sorted(one - other)}"  # by hand a caller of steps holds their dy
        assert other.intersection(paths_of_kept) <= one, f"call {i}, {func}: {sorted(other - one)}"
    assert len(want[0][1]) == kept, "all at first"
    assert sum(path in want[-1][1] for path in paths_of_kept) < kept, "fewer at last"


def wgrads_by_hand(op, cfg, box, found):
    """The weight gradients of steps one by one, each given its pending away."""
    node = box.pop()
    if op not in (chain, repeat):
        found.append(op.wgrad(donate(node), cfg))
        return
    parts = dict(node)
    node.clear()
    del node
    for name, inner, own in reversed(parts_of(op, cfg)):
        if parts.get(name) is not None:
            wgrads_by_hand(inner, own, [parts.pop(name)], found)


@pytest.mark.parametrize("name", TREES)
def test_memory_falls_in_the_second_half_where_it_does_by_hand(name):
    def waiting():
        op, cfg, params, x, dy, box = forward(name)
        box.append(op.dgrad(donate(box.pop()), dy, cfg)[1])
        return op, cfg, box, Alive(box[0], params)

    op, cfg, box, alive = waiting()
    kept, results = list(alive.refs), []
    want = alive.during(lambda: wgrads_by_hand(op, cfg, box, results))
    op, cfg, box, alive = waiting()
    got = alive.during(lambda: results.append(op.wgrad(donate(box.pop()), cfg)))
    assert [func for func, _ in got] == [func for func, _ in want] and len(kept) > 3
    for i, ((func, one), (_, other)) in enumerate(zip(got, want, strict=True)):
        assert one.intersection(kept) == other.intersection(kept), f"call {i}, {func}"
    assert len(want[0][1].intersection(kept)) == len(kept) > len(want[-1][1].intersection(kept))


def test_a_skip_of_one_op_leaves_the_cell_to_that_op():
    """Whoever takes the node holds its leaves while the program runs."""
    cfg = SkipConfig(linear, LinearConfig(D, D))
    y, kept = skip.fwd(skip.init(cfg, key=random.key(0)), torch.randn(4, D), cfg)
    cell = donate(kept)
    assert programs._opened("skip_bwd", skip, cell, cfg)[0] is cell and cell._node is not None
    skip.bwd(cell, torch.ones_like(y), cfg)
    with pytest.raises(DonatedError):
        skip.bwd(cell, torch.ones_like(y), cfg)


COMBINED = list({id(case): case for case, _ in CASES if case.op.lower is not None or case.op is repeat}.values())


def nodes(kept):
    """All parts of residuals that are nodes of an op."""
    if isinstance(kept, Saved):
        return [kept]
    return [node for part in kept.values() for node in nodes(part)] if isinstance(kept, Nested) else []


@pytest.mark.parametrize("half", ["bwd", "dgrad"])
@pytest.mark.parametrize("case", COMBINED, ids=str)
def test_a_part_that_is_held_elsewhere_is_empty_afterwards(case, half):
    params, x = case.make(torch.float32)
    y, kept = case.op.fwd(params, x, case.cfg)
    held = nodes(kept)
    dx, pending = getattr(case.op, half)(donate(kept), float_like(y, 7), case.cfg)[:: -1 if half == "bwd" else 1]
    for node in held:
        with pytest.raises(DonatedError):
            node.stale()
    if half == "dgrad" and pending is not None:
        held = nodes(pending)
        case.op.wgrad(donate(pending), case.cfg)
        for node in held:
            with pytest.raises(DonatedError):
                node.stale()
