"""`from_torch(model, example=...)`: a model that runs as its joint graph does all that it did before, with the same bits."""

import collections
import contextlib
import copy
import dataclasses
import gc
import inspect
import pickle
import warnings
import weakref

import pytest
import torch
from products import saved_by
from torch import nn
from torch.utils.checkpoint import checkpoint

from funcops import delayed_wgrad
from funcops import nn as fnn
from funcops.adapters.nn import whole

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")
NODE = "_NodeBackward"


def draw(*shape, seed=1, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@dataclasses.dataclass
class Answer:
    loss: torch.Tensor
    rest: object = None


Pair = collections.namedtuple("Pair", "first second")


class Net(nn.Module):
    """Dropout, batch statistics, a counter, tied weights; a result of several classes, with and without gradients."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.drop, self.down = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.3), nn.Linear(12, 6)
        self.twin = nn.Linear(6, 12)
        self.twin.weight = self.up.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x, gain=None, *, halve=False, parts=None):
        self.calls += 1
        h = self.drop(self.norm(self.up(x)) * self.calls + self.twin(x))
        h = h / 2 if halve else h
        h = h if gain is None else gain * h
        for one in parts or ():
            h = h + one
        y = self.down(h)
        near = torch.distributions.Normal(y, 1.0, validate_args=False)
        found = {"y": y, "hidden": (h, None, "text"), "pair": Pair(y.argmax(-1), [h.detach(), 3]), "near": near, "at": y}
        return Answer(y.square().mean(), found)


def nets(build=Net):
    torch.manual_seed(0)
    plain = build().double()
    return plain, copy.deepcopy(plain)


def made(build=Net, example=None):
    plain, ours = nets(build)
    assert fnn.from_torch(ours, example=draw(5, 6) if example is None else example).replaced
    return plain, ours


def by_loss(found):
    return found.loss


def by_parts(found):
    return found.rest["hidden"][0].sum() + found.rest["near"].log_prob(torch.zeros(5, 6)).sum()


def by_all(found):
    return by_loss(found) + by_parts(found) + found.rest["at"].sum()


def of(found):
    return found if isinstance(found, torch.Tensor) else found.loss


def step(model, call, loss=of):
    """A result, and copies of all gradients and buffers after its backward."""
    torch.manual_seed(5)
    found = call(model)
    loss(found).backward()
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return found, grads, {name: b.clone() for name, b in model.named_buffers()}


def assert_same(got, want):
    assert got.keys() == want.keys() and got
    for name, t in want.items():
        assert (got[name] is None) if t is None else torch.equal(got[name], t), name


def assert_steps(plain, ours, call, loss=of):
    """Both have the same results and gradients, and ours is one node."""
    want, got = step(plain, call, loss), step(ours, call, loss)
    assert_same(got[1], want[1])
    assert all(torch.equal(a, want[2][name]) for name, a in got[2].items()) and got[2].keys() == want[2].keys()
    assert type(got[0]) is type(want[0]) and torch.equal(of(got[0]), of(want[0]))
    assert type(of(got[0]).grad_fn).__name__ == NODE
    return got[0], want[0]


@pytest.mark.parametrize("loss", [by_loss, by_parts, by_all])
def test_three_steps_have_the_same_bits(loss):
    plain, ours = made()
    before = set(ours.state_dict())
    for seed in range(3):
        got, want = assert_steps(plain, ours, lambda m, x=draw(5, 6, seed=seed): m(x), loss)
        plain.down.weight.data.add_(0.1)
        ours.down.weight.data.add_(0.1)
    assert type(ours) is Net and set(ours.state_dict()) == before and ours.forward.traces.tries == 1
    assert_same(dict(ours.named_buffers()), dict(plain.named_buffers()))
    a, b = got.rest, want.rest
    assert type(a["pair"]) is Pair and type(a["near"]) is type(b["near"]) and a["at"] is a["y"]
    assert a["hidden"][1:] == (None, "text") and a["pair"].second[1] == 3
    flat = lambda r: [r["y"], r["hidden"][0], r["pair"].first, r["pair"].second[0], r["near"].loc]  # noqa: E731
    for one, other in zip(flat(a), flat(b), strict=True):
        assert torch.equal(one, other) and one.requires_grad == other.requires_grad


CALLS = {
    "by position": lambda m: m(draw(5, 6), draw(5, 12)),
    "by name": lambda m: m(x=draw(5, 6), gain=2.0, halve=True),
    "none and a number": lambda m: m(draw(5, 6), None, halve=False),
    "a list of tensors": lambda m: m(draw(5, 6), parts=[draw(5, 12), draw(12)]),
    "other rows": lambda m: m(draw(3, 6)),
    "a slice": lambda m: m(draw(6, 5).T),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_every_kind(name):
    plain, ours = made()
    assert_steps(plain, ours, CALLS[name])
    assert ours.forward.traces.tries == 2


def test_gradients_of_inputs():
    plain, ours = made()
    xs = [draw(5, 6).requires_grad_() for _ in range(2)]
    gains = [draw(5, 12, seed=2).requires_grad_() for _ in range(2)]
    for model, x, gain in zip((plain, ours), xs, gains, strict=True):
        step(model, lambda m, x=x, gain=gain: m(x * 2, gain=gain))
    assert torch.equal(xs[0].grad, xs[1].grad) and torch.equal(gains[0].grad, gains[1].grad)


def test_microbatches_in_flight_and_accumulated_gradients():
    plain, ours = made()
    for model in (plain, ours):
        torch.manual_seed(1)
        model.calls = torch.zeros((), dtype=torch.float64)
        # a counter that is read by two backwards was written to between them, for autograd; with ours each has its own
        first, second = (model(draw(5, 6, seed=i)).loss for i in range(2)) if model is ours else (None, None)
        if model is plain:
            for i in range(2):
                model(draw(5, 6, seed=i)).loss.backward()
        else:
            first.backward()
            second.backward()
    assert_same({n: p.grad for n, p in ours.named_parameters()}, {n: p.grad for n, p in plain.named_parameters()})
    assert_same(dict(ours.named_buffers()), dict(plain.named_buffers()))


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.mix, self.head = (
            nn.Embedding(7, 8),
            nn.LayerNorm(8),
            nn.Linear(8, 8),
            nn.Linear(8, 7, bias=False),
        )
        self.head.weight = self.embed.weight

    def forward(self, ids):
        h = self.mix(torch.relu(self.mix(self.norm(self.embed(ids)))))
        logits = self.head(h)
        return Answer(nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()), logits)


@pytest.mark.parametrize("cached", [True, False])
def test_autocast_is_a_trace_of_its_own(cached):
    """Weights that are used twice are cast once, as the region says, so their gradients are summed in 16 bits."""
    ids = torch.arange(12).view(3, 4) % 7
    plain, ours = nets(Language)
    plain, ours = plain.float(), ours.float()
    region = lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=cached)  # noqa: E731
    with region():
        fnn.from_torch(ours, example=ids)
    for _ in range(2):
        found = []
        for model in (plain, ours):
            with region():
                found.append(step(model, lambda m: m(ids)))
        assert found[1][0].rest.dtype is torch.bfloat16 and torch.equal(found[0][0].rest, found[1][0].rest)
        assert_same(found[1][1], found[0][1])
    assert ours.forward.traces.tries == 1
    assert_steps(plain, ours, lambda m: m(ids))
    assert ours.forward.traces.tries == 2, "outside of it, another one"


def test_a_trace_leaves_no_casts_in_the_region():
    """Such casts would have no gradients, and torch would take them where the parameter is used again."""
    ids = torch.arange(12).view(3, 4) % 7
    plain, ours = nets(Language)
    plain, ours = plain.float(), ours.float()
    with torch.autocast("cpu", torch.bfloat16):
        fnn.from_torch(ours, example=ids)
        fnn.to_torch(ours)
        got = step(ours, lambda m: m(ids))
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(got[1], step(plain, lambda m: m(ids))[1])


def test_fewer_bytes_than_autograd():
    ids = torch.arange(32).view(4, 8) % 7
    plain, ours = nets(Language)
    fnn.from_torch(ours, example=ids)
    kept = [saved_by(lambda m=m: m(ids), [*m.parameters(), ids])[1] for m in (plain, ours)]
    assert 0 < kept[1] <= 0.8 * kept[0]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_hooks_at_its_border_run():
    plain, ours = made(Language, torch.arange(12).view(3, 4) % 7)
    logs = []
    for model in (plain, ours):
        log = []
        logs.append(log)
        model.register_forward_pre_hook(lambda m, args, log=log: log.append("pre") or (args[0] + 1,))
        model.register_forward_hook(lambda m, args, y, log=log: log.append("forward") or y.loss * 2)
        model.register_full_backward_pre_hook(lambda m, dy, log=log: log.append("before"))
        model.register_full_backward_hook(lambda m, dx, dy, log=log: log.append("backward"))
        model.embed.weight.register_hook(lambda g, log=log: log.append("gradient") or 2 * g)
        model.mix.weight.register_post_accumulate_grad_hook(lambda p, log=log: log.append("accumulated"))
    want, got = (step(model, lambda m: m(torch.arange(8).view(2, 4) % 5)) for model in (plain, ours))
    assert sorted(logs[0]) == sorted(logs[1]) and len(logs[1]) == 6 and torch.equal(want[0], got[0])
    assert_same(got[1], want[1])
    assert ours.forward.traces.tries == 2, "the forward does not change by them"


def hooked(model):
    return model.mix.register_forward_hook(lambda *_: None), "its part 'mix' has a hook, which would run in a trace alone"


def hooked_globally(model):
    return nn.modules.module.register_module_forward_hook(lambda *_: None), "hooks are set on all modules"


@pytest.mark.parametrize("hook", [hooked, hooked_globally])
def test_hooks_of_its_parts_run_in_every_call(hook):
    ids = torch.arange(12).view(3, 4) % 7
    plain, ours = made(Language, ids)
    handle, reason = hook(ours)
    try:
        with pytest.warns(RuntimeWarning, match=f"Language: this call, and others like it, run as before from_torch, as {reason}"):
            found = ours(ids)
        assert type(found.loss.grad_fn).__name__ != NODE
        ours(ids)  # no second warning
    finally:
        handle.remove()
    assert_steps(plain, ours, lambda m: m(ids))


def test_modes_frozen_parameters_and_dtypes():
    plain, ours = made()
    call = lambda m: m(draw(5, 6, dtype=m.up.weight.dtype))  # noqa: E731
    for change in (
        lambda m: m.eval(),
        lambda m: m.train(),
        lambda m: m.norm.requires_grad_(False),
        lambda m: m.zero_grad(),
        lambda m: m.requires_grad_(),
        lambda m: m.float(),
        lambda m: setattr(m.drop, "p", 0.6),
        lambda m: setattr(m, "down", nn.Linear(12, 6, bias=False, dtype=torch.float32)),
        lambda m: m.load_state_dict(m.state_dict(), assign=True),
    ):
        torch.manual_seed(2)
        change(plain)
        torch.manual_seed(2)
        change(ours)
        assert_steps(plain, ours, call)


def test_without_gradients_it_runs_as_before():
    plain, ours = made()
    for region in (torch.no_grad, torch.inference_mode):
        with region():
            torch.manual_seed(3)
            want = plain(draw(4, 6)).loss
            torch.manual_seed(3)
            assert torch.equal(ours(draw(4, 6)).loss, want)
    plain.requires_grad_(False)
    ours.requires_grad_(False)
    assert not ours(draw(4, 6)).loss.requires_grad and not plain(draw(4, 6)).loss.requires_grad
    assert_same(dict(ours.named_buffers()), dict(plain.named_buffers()))
    assert ours.forward.traces.tries == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies(copied):
    plain, ours = made()
    assert_steps(plain, ours, lambda m: m(draw(5, 6)))
    other = copied(ours)
    plain.zero_grad()
    other.zero_grad()
    assert other.forward.module is other and other.forward is not ours.forward
    assert_steps(plain, other, lambda m: m(draw(5, 6)))
    assert other.forward.traces.tries == 1 == ours.forward.traces.tries
    assert fnn.to_torch(other).replaced and "forward" not in vars(other) and "forward" in vars(ours)


def test_it_is_undone_and_set_once():
    plain, ours = nets()
    before = set(vars(ours))
    report = fnn.from_torch(ours, example=draw(5, 6))
    assert str(report) == "1 replaced, 0 left, 0 already on funcops\n   1 x Net -> its joint graph: (the model)"
    assert not fnn.from_torch(ours, example=draw(5, 6)).replaced and ours.forward.traces.tries == 1
    assert fnn.from_torch(ours, example=(draw(4, 6), 2)).already and ours.forward.traces.tries == 2, "this example is traced, too"
    assert inspect.signature(ours.forward) == inspect.signature(plain.forward)
    assert inspect.signature(ours.forward.__func__) == inspect.signature(Net.forward)
    undone = fnn.to_torch(ours)
    assert str(undone.replaced[0]) == "Change(path='', before='its joint graph', after='Net')" and set(vars(ours)) == before
    assert step(ours, lambda m: m(draw(5, 6)))[0].loss.grad_fn.name() == "MeanBackward0"
    fnn.from_torch(ours, example=draw(5, 6))
    ours.forward = lambda x: x
    assert fnn.to_torch(ours).left[0].after == "its forward was wrapped or replaced since"


def test_a_model_is_freed():
    ours = made()[1]
    found = step(ours, lambda m: m(draw(5, 6)))
    kept = weakref.ref(ours)
    del ours, found
    gc.collect()
    assert kept() is None


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)), nn.Sequential(nn.Linear(6, 6), nn.GELU())

    def forward(self, x):
        return self.second(self.first(x)).sum()


WAYS = {
    "a part": lambda m, x: fnn.from_torch(m.first, example=x),
    "a part and the whole": lambda m, x: (fnn.from_torch(m.first, example=x), fnn.from_torch(m, example=x)),
    "its layers and the whole": lambda m, x: (fnn.from_torch(m), fnn.from_torch(m, example=x)),
    "the whole and its layers": lambda m, x: (fnn.from_torch(m, example=x), fnn.from_torch(m)),
}


@pytest.mark.parametrize("name", WAYS)
def test_with_other_swaps(name):
    plain, ours = nets(Stack)
    x = draw(4, 6)
    WAYS[name](ours, x)
    found = [step(model, lambda m: m(x)) for model in (plain, ours)]
    if "layers" in name:  # whose formulas have other roundings
        assert all(torch.allclose(g, found[0][1][n], rtol=1e-12, atol=1e-12) for n, g in found[1][1].items())
    else:
        assert_same(found[1][1], found[0][1])
    assert (type(found[1][0].grad_fn).__name__ == NODE) == (name != "a part")
    fnn.to_torch(ours)
    assert_same(step(ours, lambda m: m.zero_grad() or m(x))[1], step(plain, lambda m: m.zero_grad() or m(x))[1])


def compiled(model, x):
    return torch.compile(model, backend="eager", fullgraph=True)(x)


def compiled_in_place(model, x):
    model.compile(backend="eager", fullgraph=True)
    return model(x)


def exported(model, x):
    return torch.export.export(model, (x,)).module()(x)


def jitted(model, x):
    return torch.jit.trace(model, (x,), check_trace=False)(x)


def checkpointed(model, x):
    return checkpoint(model, x, use_reentrant=False)


def functional(model, x):
    return torch.func.functional_call(model, dict(model.named_parameters()), (x,))


def transformed(model, x):
    params = {name: p.detach() for name, p in model.named_parameters()}
    grads = torch.func.grad(lambda params: torch.func.functional_call(model, params, (x,)))(params)
    return sum((model.get_parameter(name) * g).sum() for name, g in grads.items())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("way", [compiled, compiled_in_place, exported, jitted, checkpointed, functional, transformed])
def test_what_calls_or_traces_it(way):
    plain, ours = made(Stack)
    x = draw(5, 6)
    want, got = (step(model, lambda m: way(m, x)) for model in (plain, ours))
    assert torch.equal(got[0], want[0])
    assert_same(got[1], want[1])


def test_delayed_weight_gradients():
    plain, ours = made(Stack)
    want = step(plain, lambda m: m(draw(5, 6)))[1]
    with delayed_wgrad() as store:
        assert set(step(ours, lambda m: m(draw(5, 6)))[1].values()) == {None}
    store.run()
    assert_same({n: p.grad for n, p in ours.named_parameters()}, want)


def test_a_second_derivative_raises():
    ours = made(Stack)[1]
    x = draw(5, 6).requires_grad_()
    (grad,) = torch.autograd.grad(ours(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match="Stack_bwd: a gradient must not be differentiated again"):
        grad.sum().backward()


class Branches(nn.Module):
    """Its step depends on values if `asks`; it counts, in an attribute and a list, if `counts`."""

    def __init__(self):
        super().__init__()
        self.layer, self.asks, self.counts, self.seen, self.calls = nn.Linear(6, 6), False, False, [], 0

    def forward(self, x, cache=None):
        if self.counts:
            self.calls += 1
            self.seen.append(self.calls)
        if self.asks and self.layer(x).sum() > 0:
            return self.layer(2 * x).sum()
        return self.layer(x).sum() if cache is None else self.layer(x).sum() * len(cache)


def asking(model):
    model.asks = True


def counting(model):
    model.counts = True


@pytest.mark.parametrize(
    ("change", "reason"), [(asking, "do not depend on values of its inputs"), (counting, "leaves its attributes")]
)
def test_a_step_that_cannot_be_traced_runs_as_before(change, reason):
    plain, ours = made(Branches)
    for model in (plain, ours):
        change(model)
    with pytest.warns(RuntimeWarning, match=f"Branches: this call, .* run as before from_torch, as Branches_fwd: .*{reason}"):
        ours(draw(5, 6))
    plain(draw(5, 6))
    tried = ours.forward.traces.tries
    for rows in (5, 4, 3):
        want, got = (step(model, lambda m, rows=rows: m(draw(rows, 6))) for model in (plain, ours))
        assert torch.equal(want[0], got[0])
        assert_same(got[1], want[1])
    assert ours.forward.traces.tries == tried == 2, "no other trace is tried"
    assert (ours.calls, ours.seen) == (plain.calls, plain.seen), "a trace leaves no traces"
    for model in (plain, ours):
        model.asks = model.counts = False
    fnn.from_torch(ours, example=draw(5, 6))
    assert_steps(plain, ours, lambda m: m(draw(5, 6)))


class Ids(collections.UserList):
    pass


def test_arguments_of_other_classes_run_as_before():
    plain, ours = made(Branches)
    with pytest.warns(RuntimeWarning, match=r"its argument 'cache' is of class Ids, not a plain tensor or number"):
        assert torch.equal(ours(draw(5, 6), cache=Ids([1, 2])), plain(draw(5, 6), cache=Ids([1, 2])))
    sub = draw(5, 6).as_subclass(type("Own", (torch.Tensor,), {}))
    with pytest.warns(RuntimeWarning, match=r"its argument '0' is of class Own, not a plain tensor or number"):
        assert torch.equal(ours(sub), plain(sub))
    with pytest.raises(TypeError, match="unexpected keyword argument 'cach'"):
        ours(draw(5, 6), cach=None)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ours(draw(5, 7))
    assert_steps(plain, ours, lambda m: m(draw(5, 6)))


def test_many_shapes_run_as_before(monkeypatch):
    monkeypatch.setattr(whole, "TRACES", 3)
    plain, ours = made(Stack)
    for rows in (1, 2):
        assert_steps(plain, ours, lambda m, rows=rows: m(draw(rows, 6)))
    with pytest.warns(RuntimeWarning, match="it has been traced 3 times, for as many shapes, .*: pad inputs to few lengths"):
        ours(draw(3, 6))
    ours(draw(4, 6))
    assert_same(step(ours, lambda m: m(draw(3, 6)))[1], step(plain, lambda m: m(draw(3, 6)))[1])
    assert_steps(plain, ours, lambda m: m(draw(5, 6)))


class Holds(nn.Module):
    def __init__(self, kept):
        super().__init__()
        self.layer, self.kept = nn.Linear(6, 6), kept

    def forward(self, x):
        return {"y": self.layer(x), "kept": self.kept, "by": self}


def test_what_the_module_holds_stays_the_same_object():
    ours = made(lambda: Holds(Ids([1])))[1]
    found = ours(draw(5, 6))
    assert found["kept"] is ours.kept and found["by"] is ours


@pytest.mark.parametrize(
    ("model", "given", "error", "text"),
    [
        (
            lambda: Branches(),
            dict(example=draw(5, 7)),
            ValueError,
            "example must be arguments with which Branches runs, got float64",
        ),
        (lambda: Branches(), dict(example={"y": draw(5, 6)}), ValueError, "example must be arguments with which Branches runs"),
        (lambda: nn.Flatten(), dict(example=iter(())), ValueError, "its argument '0' is of class tuple_iterator"),
        (
            lambda: nn.DataParallel(Branches()),
            dict(example=draw(5, 6)),
            ValueError,
            r"the module inside \(model.module\), with example",
        ),
        (lambda: torch.compile(Branches()), dict(example=draw(5, 6)), ValueError, r"the module inside \(model._orig_mod\)"),
        (lambda: Branches(), dict(example=draw(5, 6), policy="minimal"), ValueError, "policy must be left out with example"),
        (lambda: Branches(), dict(example=draw(5, 6), skip="layer"), ValueError, "skip must be left out with example"),
    ],
)
def test_wrong_arguments(model, given, error, text):
    built = model()
    built = built.double() if not isinstance(built, nn.DataParallel) else built
    before = dict(vars(built))
    with pytest.raises(error, match=f"from_torch: .*{text}"):
        fnn.from_torch(built, **given)
    assert vars(built) == before


def test_a_model_that_cannot_be_traced_is_left_as_it_was():
    ours = nets(Branches)[1]
    asking(ours)
    before = dict(vars(ours))
    with pytest.raises(ValueError, match="from_torch: model must be one whose call with the example can be traced .* on values"):
        fnn.from_torch(ours, example=draw(5, 6))
    hook = ours.layer.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="from_torch: model must be .* got its part 'layer' has a hook"):
        fnn.from_torch(ours, example=draw(5, 6))
    hook.remove()
    ours.forward = ours.forward
    fnn.from_torch(ours.layer, example=draw(5, 6))
    assert {**before, "forward": ours.forward} == vars(ours)
    ours.forward = lambda x: x
    with pytest.raises(ValueError, match="a module without a forward of its own, with example .call from_torch before"):
        fnn.from_torch(ours, example=draw(5, 6))


def test_a_warning_names_the_line_of_the_call():
    ours = made(Branches)[1]
    asking(ours)
    with warnings.catch_warnings(record=True) as said, contextlib.suppress(ZeroDivisionError):
        warnings.simplefilter("always")
        ours(draw(5, 6))
    assert [one.filename for one in said] == [__file__]
