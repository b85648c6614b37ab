"""Ops from torch functions where a policy runs their forward again: a write to a captured tensor raises, and anything else that a
function reads beside its arguments is what the first run read."""

import collections
import copy
import functools
import os
import pickle
import threading
import types

import pytest
import torch

from funcops import (
    ChainConfig,
    LinearConfig,
    Needs,
    RepeatConfig,
    SkipConfig,
    SoftcapConfig,
    Step,
    TorchConfig,
    chain,
    differentiable,
    linear,
    op_from_torch,
    random,
    remat,
    repeat,
    report,
    skip,
    softcap,
    with_policy,
)
from funcops.engine.errors import StaleResidualError
from funcops.engine.trees import tensors

D, TIMES = 4, 2
CFG = TorchConfig()


def layers_of(op):
    """A chain of the op between two linears, in a skip, twice."""
    steps = Step("up", linear, LinearConfig(D, D)), Step("own", op, CFG), Step("down", linear, LinearConfig(D, D))
    return RepeatConfig(skip, SkipConfig(chain, ChainConfig(steps=steps)), TIMES)


class Centre(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.full((D,), 3.0))
        self.scale, self.factor = torch.nn.Parameter(torch.full((D,), 2.0), requires_grad=False), 1.0

    def forward(self, x):
        return x.square() * self.mean * self.scale * self.factor


CENTRE = torch.full((D,), 3.0)


def captures():
    """Rows by name: a function that reads a tensor beside its arguments, that tensor, and its name in an error."""
    centre, module, other = torch.full((D,), 3.0), Centre(), torch.full((2, D), 3.0)
    held, table = [torch.full((D,), 3.0)], {"centre": torch.full((D,), 3.0)}
    owner = types.SimpleNamespace(centre=torch.full((D,), 3.0))

    def helper(x):
        return x.square() * centre

    class Owner:
        def __init__(self):
            self.centre = torch.full((D,), 3.0)

        def step(self, params, x, cfg):
            return x.square() * self.centre

        def __call__(self, params, x, cfg):
            return x.square() * self.centre

    one, called = Owner(), Owner()
    return {
        "variable": (lambda params, x, cfg: x.square() * centre, centre, "centre"),
        "only in the backward": (lambda params, x, cfg: (x * centre).exp() * centre, centre, "centre"),
        "global": (lambda params, x, cfg: x.square() * CENTRE, CENTRE, "CENTRE"),
        "helper": (lambda params, x, cfg: helper(x), centre, "centre"),
        "a view": (lambda params, x, cfg: x.square() * other[1], other, "other"),
        "written beside": (lambda params, x, cfg: x.clone().mul_(centre) * x, centre, "centre"),
        "list": (lambda params, x, cfg: x.square() * held[0], held[0], "0"),
        "dict": (lambda params, x, cfg: x.square() * table["centre"], table["centre"], "0"),
        "object": (lambda params, x, cfg: x.square() * owner.centre, owner.centre, "0"),
        "buffer": (lambda params, x, cfg: module(x), module.mean, "module.mean"),
        "frozen parameter": (lambda params, x, cfg: module(x), module.scale, "module.scale"),
        "method": (one.step, one.centre, "0"),
        "callable": (called, called.centre, "0"),
        "partial": (functools.partial(lambda c, params, x, cfg: x.square() * c, centre), centre, "Tensor"),
        "default": (lambda params, x, cfg, c=centre: x.square() * c, centre, "0"),
        "two of one name": (lambda params, x, cfg: helper(x) * (lambda centre: x * centre)(other[0]), centre, "centre"),
        "index": (lambda params, x, cfg: x.square() * other[:, 1:2].sum(), other, "other"),
    }


WRITES = {
    "mul_": lambda t: t.mul_(2),
    "item": lambda t: t.__setitem__((..., 0), 9.0),
    "copy_": lambda t: t.copy_(torch.zeros_like(t)),
    "of a view": lambda t: t.view(-1)[1:].add_(1),
    "foreach": lambda t: torch._foreach_mul_([t], 2.0),
}
AROUND = {
    "alone": lambda op: (op, CFG),
    "remat": lambda op: (remat(op), CFG),
    "chain": lambda op: (chain, ChainConfig(steps=(Step("own", op, CFG),))),
    "remat of a chain": lambda op: (remat(chain), ChainConfig(steps=(Step("own", op, CFG),))),
    "minimal": lambda op: (with_policy(repeat, "minimal"), layers_of(op)),
}


def gradients(op, residuals, y, cfg):
    return tensors(op.bwd(residuals, torch.ones_like(y), cfg))


def params_of(op, cfg):
    return op.init(cfg, key=random.key(0))


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.turns("write", "way", "around", every=140)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("way", captures())
def test_a_captured_tensor_is_guarded(way, write, around):
    fn, captured, name = captures()[way]
    before = captured.clone()
    op, cfg = AROUND[around](op_from_torch(fn, name="own"))
    params, x = params_of(op, cfg), torch.arange(float(D)).repeat(2, 1)
    y, residuals = op.fwd(params, x, cfg)
    if around != "alone" or "exp" in way:
        wanted = x.clone().requires_grad_()
    else:
        fn(None, (wanted := x.clone().requires_grad_()), CFG).sum().backward()
        torch.testing.assert_close(op.bwd(residuals, torch.ones_like(y), cfg)[1], wanted.grad)
        rows = [line for line in str(report(residuals, params, x)).splitlines() if f"captured.{name} " in line]
        assert len(rows) == 1 and "0 bytes" not in rows[0]
    WRITES[write](captured)
    try:
        with pytest.raises(StaleResidualError, match=rf"captured\.{name} must be as the forward left it"):
            op.bwd(residuals, torch.ones_like(y), cfg)
        y, residuals = op.fwd(params, x, cfg)  # the next one reads what it is now
        op.bwd(residuals, torch.ones_like(y), cfg)
    finally:
        captured.copy_(before)


def test_a_pending_guards_what_its_wgrad_reads():
    gain = torch.full((D,), 3.0)
    op = op_from_torch(
        lambda params, x, cfg: x * (params["w"] * gain),
        name="own",
        init=lambda cfg, *, key=None, device=None, dtype=None: {"w": torch.ones(D)},
    )
    y, residuals = op.fwd({"w": torch.ones(D)}, torch.ones(2, D), CFG)
    _, pending = op.dgrad(residuals, torch.ones_like(y), CFG)
    gain.mul_(2)
    with pytest.raises(StaleResidualError, match="own_wgrad: pending.kept.captured.gain must be as the forward left it"):
        op.wgrad(pending, CFG)


RATE = 1.0
SETTINGS = types.ModuleType("settings")
Pair = collections.namedtuple("Pair", "held")


class Rate(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rate, self.more, self.held = 1.0, types.SimpleNamespace(rate=1.0), [1.0]

    def forward(self, x):
        return x * self.rate * self.more.rate * self.held[0] * (1 if self.training else 2)


class Owner:
    rate = 1.0

    def step(self, params, x, cfg):
        return x.sin() * self.rate

    def __call__(self, params, x, cfg):
        return x.sin() * self.rate

    def get(self):
        return self.rate


class Slotted:
    __slots__ = ("rate",)


class Behind:
    def __init__(self):
        self.held = [1.0]

    @property
    def rate(self):
        return self.held[0]


def rebound():
    """Rows by name: a function of x that reads a number beside its arguments, and a function that sets it."""
    cell, held, table, lot = 1.0, [1.0], {"rate": [1.0]}, [1.0] * 100
    owner, module, pair = types.SimpleNamespace(rate=1.0, inner=types.SimpleNamespace(rate=1.0)), Rate(), (1, [1.0])
    array = pytest.importorskip("numpy").ones(1)
    one, called, behind, slotted, own = Owner(), Owner(), Behind(), Slotted(), type("Own", (Owner,), {"rate": 1.0})
    slotted.rate, SETTINGS.rate = 1.0, 1.0
    several, queue, ordered, named, octets = (
        {1.0},
        collections.deque([1.0]),
        collections.OrderedDict(rate=1.0),
        Pair([1.0]),
        bytearray(1),
    )
    hooked, parts, table_of = torch.nn.Identity(), [types.SimpleNamespace(rate=1.0)], {"by": lambda x: x * one.rate, "get": one.get}
    hooked.register_forward_hook(lambda module, given, y: y * held[0])
    around = [1.0]
    around.append(around)

    def set_cell(value):
        nonlocal cell
        cell = value

    def helper(x):
        return x.sin() * cell

    def set_global(value):
        globals()["RATE"] = value

    def set_several(value):
        several.clear()
        several.add(value)

    def by_default(params, x, cfg, rate=[1.0], *, more={"rate": 1.0}):  # noqa: B006
        return x.sin() * rate[0] * more["rate"]

    def on(owner, name="rate"):
        return lambda value: setattr(owner, name, value)

    def at(owner, key=0):
        return lambda value: owner.__setitem__(key, value)

    return {
        "variable": (lambda params, x, cfg: x.sin() * cell, set_cell),
        "helper": (lambda params, x, cfg: helper(x), set_cell),
        "global": (lambda params, x, cfg: x.sin() * RATE, set_global),
        "list": (lambda params, x, cfg: x.sin() * held[0], at(held)),
        "a longer list": (lambda params, x, cfg: x.sin() * len(held), lambda v: held.__setitem__(slice(None), [1.0] * int(v))),
        "a long list": (lambda params, x, cfg: x.sin() * lot[50], at(lot, 50)),
        "a list in itself": (lambda params, x, cfg: x.sin() * around[0], at(around)),
        "dict": (lambda params, x, cfg: x.sin() * table["rate"][0], at(table["rate"])),
        "tuple": (lambda params, x, cfg: x.sin() * pair[1][0], at(pair[1])),
        "named tuple": (lambda params, x, cfg: x.sin() * named.held[0], at(named.held)),
        "set": (lambda params, x, cfg: x.sin() * sum(several), set_several),
        "deque": (lambda params, x, cfg: x.sin() * queue[0], at(queue)),
        "ordered dict": (lambda params, x, cfg: x.sin() * ordered["rate"], at(ordered, "rate")),
        "bytes": (lambda params, x, cfg: x.sin() * (1 + octets[0]), lambda v: octets.__setitem__(0, int(v) - 1)),
        "object": (lambda params, x, cfg: x.sin() * owner.rate, on(owner)),
        "inner object": (lambda params, x, cfg: x.sin() * owner.inner.rate, on(owner.inner)),
        "object in a list": (lambda params, x, cfg: x.sin() * parts[0].rate, on(parts[0])),
        "slots": (lambda params, x, cfg: x.sin() * slotted.rate, on(slotted)),
        "property": (lambda params, x, cfg: x.sin() * behind.rate, at(behind.held)),
        "by name": (lambda params, x, cfg: x.sin() * getattr(owner, "ra" + "te"), on(owner)),
        "class": (lambda params, x, cfg: x.sin() * own.rate, on(own)),
        "class of an object": (own().step, on(own)),
        "a module's global": (lambda params, x, cfg: x.sin() * SETTINGS.rate, on(SETTINGS)),
        "environment": (
            lambda params, x, cfg: x.sin() * float(os.environ.get("OF_A_TEST", 1)),
            lambda v: os.environ.__setitem__("OF_A_TEST", str(v)),
        ),
        "module": (lambda params, x, cfg: module(x.sin()), on(module)),
        "mode": (lambda params, x, cfg: module(x.sin()), lambda v: module.train(v == 1.0)),
        "object of a module": (lambda params, x, cfg: module(x.sin()), on(module.more)),
        "list of a module": (lambda params, x, cfg: module(x.sin()), at(module.held)),
        "hook of a module": (lambda params, x, cfg: hooked(x.sin()), at(held)),
        "method": (one.step, on(one)),
        "method that is called": (lambda params, x, cfg: x.sin() * one.get(), on(one)),
        "function in a dict": (lambda params, x, cfg: table_of["by"](x.sin()), on(one)),
        "method in a dict": (lambda params, x, cfg: x.sin() * table_of["get"](), on(one)),
        "callable": (called, on(called)),
        "array": (lambda params, x, cfg: x.sin() * float(array[0]), at(array)),
        "default": (by_default, at(by_default.__defaults__[0])),
        "keyword": (by_default, at(by_default.__kwdefaults__["more"], "rate")),
        "partial": (functools.partial(lambda by, params, x, cfg: x.sin() * by[0], held), at(held)),
    }


@pytest.mark.turns("way", "around", every=45)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("way", rebound())
def test_a_value_that_was_rebound_is_not_read_anew(way, around):
    """A forward and its backward read the same value, whatever happens between them and whatever was traced before."""
    fn, change = rebound()[way]

    def made():
        op, cfg = AROUND[around](op_from_torch(fn, name="own"))
        return op, params_of(op, cfg), cfg

    def forward(value, op, params, cfg):
        change(value)
        return op.fwd(params, x, cfg)

    def backward(y, residuals, op, cfg):
        return [y, *gradients(op, residuals, y, cfg)]

    x, wanted = torch.arange(float(D)).repeat(2, 1), {}
    try:
        for value in (1.0, 5.0):
            op, params, cfg = made()
            wanted[value] = backward(*forward(value, op, params, cfg), op, cfg)
        op, params, cfg = made()
        y, residuals = forward(1.0, op, params, cfg)
        change(5.0)
        torch.testing.assert_close(backward(y, residuals, op, cfg), wanted[1.0])
        inner = op_from_torch(fn, name="own")
        forward(5.0, inner, None, CFG)  # a trace with other needs
        op, cfg = AROUND[around](inner)
        y, residuals = forward(1.0, op, params, cfg)
        read = 1.0 if torch.allclose(y, wanted[1.0][0]) else 5.0
        torch.testing.assert_close(backward(y, residuals, op, cfg), wanted[read])
    finally:
        change(1.0)


UNSEEN = (  # attributes of objects, and what lies behind them: a trace does not depend on them
    *("object", "inner object", "object in a list", "slots", "property", "by name", "class", "class of an object"),
    *("a module's global", "environment", "module", "object of a module", "list of a module", "hook of a module"),
    *("method", "method that is called", "function in a dict", "method in a dict", "callable"),
)


@pytest.mark.turns("way")
@pytest.mark.parametrize("way", [way for way in rebound() if way not in UNSEEN])
def test_a_value_that_was_rebound_is_read_by_the_next_forward(way):
    fn, change = rebound()[way]
    op, x = op_from_torch(fn, name="own"), torch.arange(float(D)).repeat(2, 1)
    try:
        for value in (1.0, 5.0, 1.0):
            change(value)
            torch.testing.assert_close(op.fwd(None, x, CFG)[0], fn(None, x, CFG))
    finally:
        change(1.0)


def longer():
    """Rows by name: a container or an array, a function that reads a value in it, and one that sets that value."""
    numpy = pytest.importorskip("numpy")
    at_50 = lambda held: held[50]  # noqa: E731
    put = lambda held, value: held.__setitem__(50, value)  # noqa: E731
    return {
        "numbers": ([1.0] * 70, at_50, put),
        "table": ({i: 1.0 for i in range(70)}, at_50, put),
        "tensors": ([torch.ones(D) for _ in range(70)], at_50, lambda held, value: put(held, torch.full((D,), value))),
        "nested": ([[1.0] * 70, 1.0], lambda held: held[0][50], lambda held, value: put(held[0], value)),
        "mixed": ([1.0] * 70 + [[1.0]], lambda held: held[70][0], lambda held, value: held[70].__setitem__(0, value)),
        "array": (numpy.ones(70), at_50, put),
        "every other": (numpy.ones(140)[::2], at_50, put),
    }


@pytest.mark.parametrize("name", longer())
def test_a_long_container_is_compared(name):
    held, read, change = longer()[name]
    op, x = op_from_torch(lambda params, x, cfg: x * read(held), name="own"), torch.ones(D)
    for value in (1.0, 5.0, 1.0):
        change(held, value)
        assert torch.equal(op.fwd(None, x, CFG)[0], x * value)


PARTS = {
    "parameter": lambda m: setattr(m[0], "weight", torch.nn.Parameter(torch.zeros(D), requires_grad=False)),
    "no parameter": lambda m: setattr(m[0], "bias", None),
    "buffer": lambda m: setattr(m[1], "running_mean", torch.full((D,), 3.0)),
    "module": lambda m: m.__setitem__(2, torch.nn.Tanh()),
    "another module": lambda m: m.append(torch.nn.Tanh()),
    "mode": lambda m: m.train(),
}


@pytest.mark.turns("part", every=3)
@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_a_module_that_was_assigned(part):
    norm = torch.nn.BatchNorm1d(D, affine=False, track_running_stats=True)
    module = torch.nn.Sequential(torch.nn.LayerNorm(D), norm, torch.nn.Sigmoid()).requires_grad_(False).eval()
    module[0].bias.fill_(0.5)
    op, x = op_from_torch(lambda params, x, cfg: module(x), name="own"), torch.arange(float(D)).repeat(2, 1)
    op.fwd(None, x, CFG)
    PARTS[part](module)
    if part == "mode":
        with pytest.raises(ValueError, match="own_fwd: fn must be a function that torch can trace without writes"):
            op.fwd(None, x, CFG)
    else:
        torch.testing.assert_close(op.fwd(None, x, CFG)[0], module(x))


@pytest.mark.parametrize("around", ["alone", "remat", "chain"])
def test_a_captured_tensor_that_is_trained_later(around):
    """It is refused then, too: its gradient would be lost."""
    gain = torch.full((D,), 3.0)
    op, cfg = AROUND[around](op_from_torch(lambda params, x, cfg: x * gain, name="own"))
    x = torch.arange(float(D)).repeat(2, 1)
    op.fwd(params_of(op, cfg), x, cfg)
    gain.requires_grad_()
    with pytest.raises(ValueError, match="own_fwd: fn must be a function that takes tensors that require grad as params or x"):
        op.fwd(params_of(op, cfg), x, cfg)


class Into:
    """Ways in which the values of a tensor become numbers of Python."""

    def listed(t):
        return sum(t.tolist())

    def array(t):
        return float(t.numpy()[0])

    def asarray(t):
        return float(pytest.importorskip("numpy").asarray(t)[0])

    def function_of_numpy(t):
        return float(pytest.importorskip("numpy").sqrt(t)[0])

    def exchanged(t):
        return float(pytest.importorskip("numpy").from_dlpack(t)[0])

    def item(t):
        return t[0].item()

    def number(t):
        return float(t[0])

    def truth(t):
        return 2 if t[0] > 5 else 3

    def remade(t):
        return torch.tensor([t[0], t[1]])[0]

    def as_tensor(t):
        return torch.as_tensor([t[0], t[1]])[0]

    def split(t):
        return torch.ones(D).split(t.long().tolist()[:1], 0)[0].sum()

    def index(t):
        return (1.0, 2.0, 3.0, 4.0)[t.long()[0]]


@pytest.mark.turns("wraps", "way", every=8)
@pytest.mark.parametrize("wraps", [lambda op: op, remat], ids=["alone", "remat"])
@pytest.mark.parametrize("way", [name for name in vars(Into) if name[0] != "_"])
def test_values_of_a_captured_tensor_are_no_constants(way, wraps):
    """It is refused, or a later forward reads the new values."""
    own = torch.full((2,), 2.0)
    read = getattr(Into, way)
    op = wraps(op_from_torch(lambda params, x, cfg: x * read(own), name="own"))
    x = torch.arange(float(D))
    with pytest.raises(ValueError, match="own_fwd: fn must be a function whose shapes and steps do not depend on values"):
        op.fwd(None, x, CFG)
    literal = op_from_torch(lambda params, x, cfg: x * torch.tensor([2.0, 3.0]).sum() * sum([1, 2]), name="own")
    torch.testing.assert_close(wraps(literal).fwd(None, x, CFG)[0], x * 15)


LAYOUTS = {  # the first one, which comes back at another offset, is always in the first tier
    "slice": lambda t: t[1:, 2:],
    "plain": lambda t: t,
    "transposed": lambda t: t.mT,
    "step": lambda t: t[::2, ::3],
    "expanded": lambda t: t[:1].expand(4, 6),
    "conj": lambda t: torch.complex(t, t.sin()).conj(),
}
READS = {
    "strided": lambda params, x, cfg: x.as_strided((2,), (1,), x.storage_offset()).sin() * x.sum(),
    "plain": lambda params, x, cfg: x * x.exp(),
}


@pytest.mark.turns("layout", "read", "offload", every=8)
@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("read", READS)
def test_a_second_run_has_the_layouts_of_the_first(layout, read, offload):
    """Also where x comes back from another memory in other strides."""
    base = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = LAYOUTS[layout](base)
    own = op_from_torch(READS[read], name="own")
    y, residuals = own.fwd(None, x, CFG)
    want = own.bwd(residuals, torch.ones_like(y), CFG)
    op = remat(own, offload=offload)
    y, residuals = op.fwd(None, x, CFG)
    torch.testing.assert_close(op.bwd(residuals, torch.ones_like(y), CFG), want)


@pytest.mark.turns("around", "needs")
@pytest.mark.parametrize("around", [remat, lambda op: remat(remat(op)), lambda op: remat(with_policy(chain, "minimal"))])
@pytest.mark.parametrize("needs", [Needs(), Needs(x=False), Needs(params=False), Needs(params=("up",)), Needs(params=("own.w",))])
def test_a_second_run_is_cut_for_its_needs(around, needs):
    """The first run's trace has all gradients, the second one asks for some."""
    own = op_from_torch(
        lambda params, x, cfg: (x * params["w"]).sin() * params["b"],
        name="own",
        init=lambda cfg, *, key=None, device=None, dtype=None: {
            "w": torch.full((D,), 0.5, device=device, dtype=dtype),
            "b": torch.ones(D, device=device, dtype=dtype),
        },
    )
    cfg = ChainConfig(steps=(Step("up", linear, LinearConfig(D, D)), Step("own", own, CFG), Step("again", own, CFG)))
    params, x = chain.init(cfg, key=random.key(0)), torch.arange(float(D)).repeat(2, 1)
    y, residuals = chain.fwd(params, x, cfg, needs=needs)
    want = chain.bwd(residuals, torch.ones_like(y), cfg)
    op = around(chain)
    y, residuals = op.fwd(params, x, cfg, needs=needs)
    torch.testing.assert_close(tensors(op.bwd(residuals, torch.ones_like(y), cfg)), tensors(want))


def test_threads_run_again_apart():
    """Each thread's second run reads what its own first run read."""
    local = threading.local()
    op = remat(op_from_torch(lambda params, x, cfg: x.sin() * local.rate, name="own"))
    x, found = torch.arange(float(D)), {}
    together = threading.Barrier(2, timeout=60)

    def run(rate):
        local.rate = rate
        y, residuals = op.fwd(None, x + rate, CFG)
        together.wait()
        local.rate = 0.0
        found[rate] = op.bwd(residuals, torch.ones_like(y), CFG)[1] / (x + rate).cos(), y / (x + rate).sin()

    threads = [threading.Thread(target=run, args=(rate,)) for rate in (2.0, 3.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for dx, y in found.values():
        torch.testing.assert_close(dx, y)
    assert len(found) == 2


def test_threads_that_trace_at_once_leave_nothing_set():
    """Torch has one flag for all threads that says that it traces: left set, each later call of a compiled function raises."""
    together = threading.Barrier(4, timeout=60)

    def run():
        op = op_from_torch(lambda params, x, cfg: x.sin().exp().tanh(), name="own")
        together.wait()
        op.fwd(None, torch.arange(float(D)), CFG)

    for _ in range(3):
        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        together.reset()
        assert not torch.fx._symbolic_trace.is_fx_symbolic_tracing()


def test_residuals_go_to_another_process_or_say_why_not():
    op, x = op_from_torch(lambda params, x, cfg: x.sin() * x, name="own"), torch.arange(float(D))
    y, residuals = op.fwd(None, x, CFG)
    there = pickle.loads(pickle.dumps(residuals))
    assert torch.equal(op.bwd(there, y, CFG)[1], op.bwd(residuals, y, CFG)[1])
    again = remat(op).fwd(None, x, CFG)[1]
    with pytest.raises(TypeError, match="^remat: pickled residuals must be of operators whose forward reads its arg"):
        pickle.dumps(again)


def test_a_copy_of_residuals_is_run_again_by_the_same_owner():
    own = op_from_torch(lambda params, x, cfg: x.sin() * x, name="own")
    op, x = remat(own), torch.arange(float(D))
    y, residuals = op.fwd(None, x, CFG)
    want = own.bwd(own.fwd(None, x, CFG)[1], y, CFG)[1]
    for _ in range(2):
        assert torch.equal(op.bwd(copy.deepcopy(residuals), y, CFG)[1], want)


@pytest.mark.slow
# Dynamo's own, of the trace, which it leaves out, and of the code after it, whose inputs it asks for a grad.
@pytest.mark.filterwarnings(
    "ignore:Dynamo does not know how to trace the builtin:UserWarning", "ignore:The .grad attribute of a Tensor"
)
def test_under_torch_compile():
    """A compiler leaves out what it cannot trace, and the first run's notes are made there too; other ops are traced whole."""
    owner = types.SimpleNamespace(rate=1.0)
    op = remat(op_from_torch(lambda params, x, cfg: x.sin() * owner.rate, name="own"))
    x = torch.arange(float(D), requires_grad=True)
    again = differentiable(remat(softcap))  # made beforehand: the compiler warns of the cache in which remat keeps its ops
    capped = torch.compile(lambda x: again(None, x, SoftcapConfig(3.0)), fullgraph=True, backend="eager")
    wanted = torch.autograd.grad(differentiable(softcap)(None, x, SoftcapConfig(3.0)).sum(), x)
    torch.testing.assert_close(torch.autograd.grad(capped(x).sum(), x), wanted)
    y = torch.compile(lambda x: differentiable(op)(None, x, CFG), backend="eager")(x)
    owner.rate = 5.0
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], x.detach().cos())
