"""The order of copies and computation: streams record what is copied out, what comes back, and when."""

import contextlib
import weakref

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from funcops import (
    ChainConfig,
    LinearConfig,
    RepeatConfig,
    RMSNormConfig,
    Step,
    chain,
    linear,
    random,
    repeat,
    rms_norm,
    with_policy,
)
from funcops.engine.residuals import Offload, Policy, donate, pack, unpack
from funcops.engine.residuals.offload import Copies, copies
from funcops.engine.trees import leaves, tensors
from funcops.testing.checks import same_bits

TIMES = 4
BODY = ChainConfig(steps=(Step("norm", rms_norm, RMSNormConfig(8)), Step("mix", linear, LinearConfig(8, 8))))


class Stream:
    def __init__(self, name, notes):
        self.name, self.notes = name, notes

    def wait_stream(self, other):
        self.notes.append((self.name, "waits for", other.name))

    def record_event(self):
        return len(self.notes) - 1  # after the note that stands there

    def wait_event(self, event):
        self.notes.append((self.name, "waits for", event))


class Device:
    """A stand-in that treats some CPU tensors as a device's."""

    def __init__(self, monkeypatch):
        self.notes, self.hosts, self.now = [], weakref.WeakSet(), None
        self.main, self.aside = Stream("main", self.notes), Stream("side", self.notes)
        fresh = Copies()
        for name in ("home", "coming"):
            monkeypatch.setattr(copies, name, getattr(fresh, name))
        monkeypatch.setattr(copies, "_streams", {None: None})
        for name in ("leaves", "own_stream", "room", "back", "held_by", "side", "current", "on"):
            monkeypatch.setattr(copies, name, getattr(self, name))

    def leaves(self, t):
        return not any(t is host for host in self.hosts)

    def own_stream(self, t):
        return t.numel() > 0

    def room(self, t):
        room = torch.empty_like(t)
        self.hosts.add(room)
        self.notes.append((self.stream, "out", room.data_ptr()))
        return room

    def back(self, host, device):
        self.notes.append((self.stream, "back", host.data_ptr()))
        return host.clone()

    def held_by(self, stream, t):
        self.notes.append((stream.name, "holds", t.data_ptr()))

    @property
    def stream(self):
        return (self.now or self.main).name

    def side(self, device):
        return self.aside

    def current(self, device):
        return self.main

    @contextlib.contextmanager
    def on(self, stream):
        before, self.now = self.now, stream
        yield
        self.now = before


@pytest.fixture
def device(monkeypatch):
    return Device(monkeypatch)


def noting(op, notes):
    """The op, which records when a backward begins to compute."""

    def bwd(*args, **kwargs):
        notes.append(("main", "backward", None))
        return op.bwd(*args, **kwargs)

    return op._replace(bwd=bwd)


def ran(policy, notes):
    cfg = RepeatConfig(chain._replace(bwd=noting(chain, notes).bwd), BODY, TIMES)
    op = with_policy(repeat, policy)
    params = repeat.init(cfg, key=random.key(0))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    y, residuals = op.fwd(params, x, cfg)
    return y, op.bwd(donate(residuals), torch.ones_like(y), cfg)


def test_the_layer_before_comes_back_while_a_layer_computes(device):
    notes = device.notes
    want = ran("minimal", [])
    got = ran("offload_block_inputs", notes)
    same_bits(got, want, "offloaded")
    outs = [at for who, what, at in notes if what == "out"]
    backs = [at for who, what, at in notes if what == "back"]
    assert len(outs) == TIMES and backs == outs[::-1], "each once, the last first"
    computed = [i for i, note in enumerate(notes) if note[1] == "backward"]
    for layer, start in enumerate(computed):  # counted from the last
        begun = [i for i, note in enumerate(notes[:start]) if note[1] == "back"]
        assert len(begun) == min(layer + 2, TIMES), "its own copy and the previous layer's have begun, and no more"
        own = begun[layer]
        assert any(note[:2] == ("main", "waits for") and note[2] == own for note in notes[:start]), "main waits for its own copy"


def test_copies_are_apart_and_memory_is_held_until_they_are_done(device):
    ran("offload_block_inputs", device.notes)
    notes = device.notes
    for i, (who, what, _) in enumerate(notes):
        if what == "out":
            assert who == "side" and notes[i - 1] == ("side", "waits for", "main"), "not before the tensor is there"
            assert notes[i + 1][:2] == ("side", "holds")
        if what == "back":
            assert who == "side"
            done = next(j for j, note in enumerate(notes) if note == ("main", "waits for", i))
            assert notes[done + 1][:2] == ("main", "holds")
    assert not copies.coming and not copies.home, "what is used up is forgotten"


@pytest.mark.parametrize("donated", [False, True])
def test_a_field_that_is_offloaded(device, donated):
    op, cfg = with_policy(chain, Policy({"mix.x": Offload()}, outputs="none")), BODY
    params, x = chain.init(cfg, key=random.key(0)), torch.randn(4, 8)
    y, residuals = op.fwd(params, x, cfg)
    want_y, want = chain.fwd(params, x, cfg)
    dy = torch.randn_like(y)
    for _ in range(1 if donated else 2):
        got = op.bwd(donate(residuals) if donated else residuals, dy, cfg)
        same_bits((y, got), (want_y, chain.bwd(want, dy, cfg)), "offloaded")
    assert [who for who, what, _ in device.notes if what in ("out", "back")] == ["side"] * (2 if donated else 3)


def test_copies_and_views_on_the_host_wait_for_all_offloads(device):
    x = torch.randn(6, 4)
    (kept,) = tensors(pack([x], Offload()))
    for part in (kept[2:], kept.clone()):
        device.hosts.add(part)
        device.notes.clear()
        assert torch.equal(copies.on_device(part, x.device), part)
        assert device.notes[0] == ("main", "waits for", "side")


def test_copies_under_capture_and_of_nothing_are_in_order(device, monkeypatch):
    monkeypatch.setattr(copies, "own_stream", lambda t: False)
    x = torch.randn(3)
    kept = pack([x, torch.empty(0)], Offload())
    assert all(
        isinstance(t, Tensor) and torch.equal(t, want) for t, want in zip(leaves(unpack(kept)), [x, torch.empty(0)], strict=True)
    )
    assert {who for who, *_ in device.notes} == {"main"} and not copies.home


def test_the_hosts_memory_is_pinned_where_a_device_copies_to_it(monkeypatch):
    with FakeTensorMode():
        theirs = torch.empty(3, device="cuda")
    asked = []
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory, **_: asked.append(pin_memory))
    Copies().room(theirs)
    Copies().room(torch.zeros(3))
    assert asked == [True, False]


def test_a_device_has_one_stream_of_copies(monkeypatch):
    made = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(device) or object())
    own, devices = Copies(), [torch.device("cuda", i) for i in (0, 1, 0, 1)]
    first, second, *again = [own.side(device) for device in devices]
    assert again == [first, second] and first is not second and made == devices[:2]


@pytest.mark.parametrize(
    ("rows", "available", "capturing", "own"),
    [(1, True, False, True), (0, True, False, False), (1, False, False, False), (1, True, True, False)],
)
def test_copies_have_a_stream_of_their_own_where_there_is_one(rows, available, capturing, own, monkeypatch):
    """Not under capture, where it would not join again, nor for nothing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert Copies().own_stream(torch.zeros(rows)) is own
    with FakeTensorMode():
        assert not Copies().own_stream(torch.zeros(1))
