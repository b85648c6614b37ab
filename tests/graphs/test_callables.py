"""make_graphed_callables: modules and functions under autograd give the same bits as without."""

import copy

import pytest
import torch
import torch_writes
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from funcops import nn as fnn
from funcops.adapters.graphs import callables, make_graphed_callables
from funcops.engine.errors import BorrowedError, CaptureError, GraphOrderError, StaleResidualError

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ORDER = [1, 2, 1, 2, -2, -1, 1, 2, -2, -1, -2, -1]


def of_torch():
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 6))


def of_funcops():
    return fnn.Sequential(fnn.Linear(6, 8), fnn.LayerNorm(8), fnn.GELU(), fnn.Linear(8, 6))


def mixed():
    return torch.nn.Sequential(fnn.Linear(6, 8), torch.nn.Tanh(), fnn.Linear(8, 6, bias=False))


MODELS = {"torch.nn": of_torch, "funcops.nn": of_funcops, "mixed": mixed}


def made(kind, device, seed=0):
    torch.manual_seed(seed)
    return MODELS[kind]().to(device)


def given(i, device, requires_grad=True):
    generator = torch.Generator().manual_seed(i)
    return torch.randn(4, 6, generator=generator).to(device).requires_grad_(requires_grad)


def grads(module):
    return [p.grad for p in module.parameters()]


def equal(a, b):
    assert len(a) == len(b) > 0
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("kind", "delayed"), [(kind, False) for kind in MODELS] + [("funcops.nn", True), ("mixed", True)]
)  # torch's own layers have nothing to delay
@pytest.mark.parametrize("hooked", [False, True])
def test_three_steps_of_two_accumulations(hooked, kind, delayed, device):
    plain, module = made(kind, device), made(kind, device)
    graphed = make_graphed_callables(module, (given(0, device),), delayed_wgrad=delayed)
    assert graphed is module
    for p in (*plain.parameters(), *module.parameters()) if hooked else ():
        p.register_hook(lambda g: g / (1 + g.norm()))
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 0.5 + 0.25))
    optimisers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True) for m in (plain, module)]
    for step in range(3):
        for micro in range(2):
            xs = [given(10 * step + micro, device) for _ in range(2)]
            ys = [m(x) for m, x in zip((plain, module), xs, strict=True)]
            for y in ys:
                y.square().sum().backward()
            if delayed:
                graphed.backward_dw()
            equal([ys[0].detach(), xs[0].grad], [ys[1].detach(), xs[1].grad])
        equal(grads(plain), grads(module))
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
    equal(list(plain.parameters()), list(module.parameters()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("delayed", [False, True], ids=["at once", "delayed"])
def test_interleaved_microbatches(delayed, device):
    """Two chunks with two microbatches each in flight, in an explicit order: one graph for each chunk would overwrite results."""
    plain, modules = ([made("mixed", device, seed) for seed in (1, 2)] for _ in range(2))
    graphed = make_graphed_callables(tuple(modules), ((given(0, device),), (given(0, device),)), order=ORDER, delayed_wgrad=delayed)
    for chunks in (plain, graphed):
        for step in range(2):
            xs, hs, ys = {}, {}, {}
            counts = {1: [0, 0], 2: [0, 0]}
            for action in ORDER:
                k, direction = abs(action), int(action < 0)
                m = counts[k][direction]
                counts[k][direction] += 1
                if action == 1:
                    xs[m] = given(100 * step + m, device)
                    hs[m] = chunks[0](xs[m])
                elif action == 2:
                    inner = hs[m].detach().requires_grad_()
                    ys[m] = inner, chunks[1](inner)
                elif action == -2:
                    ys[m][1].square().sum().backward()
                else:
                    hs[m].backward(ys[m][0].grad)
                if delayed and action < 0 and chunks is graphed:
                    chunks[k - 1].backward_dw()
    for a, b in zip(plain, modules, strict=True):
        equal(grads(a), grads(b))


def test_another_order_raises():
    modules = tuple(made("mixed", "cpu", seed) for seed in (1, 2))
    first, second = make_graphed_callables(modules, ((given(0, "cpu"),), (given(0, "cpu"),)), order=[1, 2, -2, -1])
    with pytest.raises(GraphOrderError, match="make_graphed_callables: step 0 of the order must be 1, got 2"):
        second(given(0, "cpu"))
    h = first(given(0, "cpu"))
    with pytest.raises(GraphOrderError, match="step 1 of the order must be 2, got -1"):
        h.sum().backward()
    for order, text in [
        ([1, -1], "every callable"),
        ([1, 2, -2], "a backward for each forward"),
        ([-1, 1], "each backward after its forward"),
        ([3], "numbers from 1 to 2"),
    ]:
        with pytest.raises(ValueError, match=text):
            make_graphed_callables(
                tuple(made("mixed", "cpu") for _ in range(2)), ((given(0, "cpu"),), (given(0, "cpu"),)), order=order
            )


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_two_replays_are_the_callers_own(device):
    """torch's are views of static buffers: keeping the first and adding the second gives twice the second."""
    plain, module = made("mixed", device), made("mixed", device)
    graphed = make_graphed_callables(module, (given(0, device),))
    both = []
    for m in (plain, graphed):
        kept = [torch.autograd.grad(m(given(i, device)).square().sum(), list(m.parameters())) for i in range(2)]
        both.append([a + b for a, b in zip(*kept, strict=True)])
    equal(*both)
    aliased = make_graphed_callables(made("mixed", device), (given(0, device),), clone_param_grads=False)
    first = torch.autograd.grad(aliased(given(0, device)).square().sum(), list(aliased.parameters()))
    second = torch.autograd.grad(aliased(given(1, device)).square().sum(), list(aliased.parameters()))
    assert first[0].data_ptr() == second[0].data_ptr(), "as torch does it, if one asks for that"


@pytest.mark.parametrize("clone_param_grads", [True, False])
@pytest.mark.parametrize("delayed", [False, True], ids=["at once", "delayed"])
@pytest.mark.parametrize("kind", MODELS)
def test_gradients_of_inputs_are_the_callers_own(kind, delayed, clone_param_grads):
    """Whoever owns the gradients of params."""
    if delayed and kind == "torch.nn":
        return
    graphed = make_graphed_callables(
        made(kind, "cpu"), (given(0, "cpu"),), clone_param_grads=clone_param_grads, delayed_wgrad=delayed
    )
    plain, kept = made(kind, "cpu"), []
    for i in range(3):
        xs = [given(i, "cpu") for _ in range(2)]
        for module, x in zip((plain, graphed), xs, strict=True):
            module.zero_grad()
            module(x).square().sum().backward()
        if delayed:
            graphed.backward_dw()
        kept.append([x.grad for x in xs])
    for want, got in kept:
        assert torch.equal(want, got)


@pytest.mark.parametrize("delayed", [False, True], ids=["at once", "delayed"])
def test_a_weight_used_twice_gets_both_gradients(delayed):
    def twice():
        torch.manual_seed(0)
        layer = fnn.Linear(6, 6)
        return torch.nn.Sequential(layer, torch.nn.Tanh(), layer)

    plain, graphed = twice(), make_graphed_callables(twice(), (given(0, "cpu"),), delayed_wgrad=delayed)
    for module in (plain, graphed):
        module(given(1, "cpu")).square().sum().backward()
    if delayed:
        graphed.backward_dw()
    for a, b in zip(grads(plain), grads(graphed), strict=True):
        torch.testing.assert_close(a, b)


def test_one_call_in_flight_without_an_order():
    graphed = make_graphed_callables(made("mixed", "cpu"), (given(0, "cpu"),))
    y = graphed(given(0, "cpu"))
    with pytest.raises(GraphOrderError, match="a slot must be free, got 1 calls whose backward has not run: capture with an order"):
        graphed(given(1, "cpu"))
    del y
    y = graphed(given(1, "cpu"))  # what nobody will go back through is free again
    y.sum().backward(retain_graph=True)
    with pytest.raises(GraphOrderError, match="a backward must run once, got a second one"):
        y.sum().backward()
    with torch.no_grad():
        for i in range(3):
            assert torch.equal(graphed(given(i, "cpu")), made("mixed", "cpu")(given(i, "cpu"))), "without gradients no slot is held"


class Dict(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.drop = torch.nn.Linear(6, 3), torch.nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, *, scale, names=("a",)):
        self.seen.add_(1)
        y = self.drop(self.inner(x["a"])) * scale
        return {"y": y, "n": None, "mean": y.detach().mean(), "names": names}


def test_trees_keywords_buffers_and_modes():
    module = Dict()
    sample = ({"a": given(0, "cpu")},)
    graphed = make_graphed_callables(module, sample, sample_kwargs={"scale": torch.tensor(2.0)})
    assert float(module.seen) == 0, "warm-up and capture are undone"
    out = graphed({"a": given(1, "cpu")}, scale=torch.tensor(3.0))
    assert out["n"] is None and out["names"] == ("a",) and not out["mean"].requires_grad and float(module.seen) == 1
    out["y"].sum().backward()
    again = graphed({"a": given(1, "cpu")}, scale=torch.tensor(3.0))
    assert not torch.equal(again["y"], out["y"]), "dropout draws new bits at each replay"
    del again
    module.eval()
    want = module.inner(given(1, "cpu")) * 3
    assert torch.equal(graphed({"a": given(1, "cpu")}, scale=torch.tensor(3.0))["y"], want), "in another mode it runs as it is"
    module.train()
    with pytest.raises(ValueError, match="arguments must be as captured"):
        graphed({"a": given(1, "cpu")})
    with pytest.raises(ValueError, match=r"input 0.0.a must be float32\[4, 6\], got float32\[2, 6\]"):
        graphed({"a": given(1, "cpu")[:2].detach().requires_grad_()}, scale=torch.tensor(3.0))
    with pytest.raises(ValueError, match="input 0.0.a must be a tensor with requires_grad=True, got False"):
        graphed({"a": given(1, "cpu", False)}, scale=torch.tensor(3.0))


class Rebinds(nn.Module):
    """A forward that puts a new tensor in the place of its buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x):
        self.seen = self.seen + x.detach().mean(0)
        return x * self.seen


def normalised(frozen=False):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.5)))
    module[0].weight.requires_grad_(not frozen)
    return module


OTHERS = "its captured submodules, parameters and buffers, where they were, got others"
UNSEEN = {  # changes of a module that a replay would not see, and what its call says
    "a buffer elsewhere": (lambda m: setattr(m[1], "running_mean", torch.ones(8)), f"module '1' must have {OTHERS}"),
    "another layer": (lambda m: m[2].insert(1, nn.Tanh()), f"module '2' must have {OTHERS}"),
    "another last layer": (lambda m: m[2].__setitem__(0, nn.Linear(8, 6)), f"module '2' must have {OTHERS}"),
    "a layer less": (lambda m: m.pop(1), f"module '' must have {OTHERS}"),
    "a bias less": (lambda m: setattr(m[2][0], "bias", None), f"module '2.0' must have {OTHERS}"),
    "a weight trained": (lambda m: m.requires_grad_(True), "module '0' must have no parameter trained that was frozen, got one"),
    "a hook": (lambda m: m[2][0].register_forward_hook(lambda *_: None), "module '2.0' must have no hooks"),
    "a hook of gradients": (lambda m: m[1].register_full_backward_hook(lambda *_: None), "module '1' must have no hooks"),
}


@pytest.mark.parametrize("change", UNSEEN)
def test_a_change_that_a_replay_would_not_see_raises(change):
    module = make_graphed_callables(normalised(frozen=True), (given(0, "cpu"),))
    make, said = UNSEEN[change]
    make(module)
    with pytest.raises(ValueError, match=said):
        module(given(1, "cpu"))


def test_a_forward_that_rebinds_a_buffer_is_refused():
    with pytest.raises(ValueError, match=f"module '' must have {OTHERS}: write to tensors in place"):
        make_graphed_callables(Rebinds(), (given(0, "cpu"),))


@pytest.mark.parametrize("delayed", [False, True], ids=["at once", "delayed"])
def test_a_weight_that_was_frozen_since_gets_no_gradient(delayed):
    module = make_graphed_callables(made("funcops.nn", "cpu"), (given(0, "cpu"),), delayed_wgrad=delayed)
    module[0].requires_grad_(False)
    module(given(1, "cpu")).sum().backward()
    if delayed:
        module.backward_dw()
    assert module[0].weight.grad is None and module[3].weight.grad is not None


def test_another_mode_of_a_submodule_runs_uncaptured():
    """A batch norm that a training loop holds in eval mode, or a dropout that it turns off."""
    plain, module = normalised(), make_graphed_callables(normalised(), (given(0, "cpu"),))
    for m in (plain, module):
        m[1].eval()
        m[2][1].eval()
    x = given(1, "cpu", False)
    assert torch.equal(plain(x), module(x))


@pytest.mark.parametrize("called", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("captured", [None, torch.bfloat16])
def test_another_autocast_runs_uncaptured(captured, called):
    def cast(dtype, **more):
        return torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None, **more)

    plain, module = (made("torch.nn", "cpu") for _ in range(2))
    with cast(captured, cache_enabled=False):
        module = make_graphed_callables(module, (given(0, "cpu"),))
    with cast(called):
        want, got = plain(given(1, "cpu")), module(given(1, "cpu"))
    assert want.dtype is got.dtype and torch.equal(want, got)


@pytest.mark.parametrize("zero", [lambda m: None, lambda m: m.zero_grad(set_to_none=False)], ids=["kept", "zeroed"])
def test_a_gradient_that_still_is_a_buffer_is_not_overwritten(zero):
    module = make_graphed_callables(made("mixed", "cpu"), (given(0, "cpu"),), clone_param_grads=False)
    module(given(1, "cpu")).sum().backward()
    zero(module)
    with pytest.raises(BorrowedError, match="buffers must be free, got some that are a parameter's p.grad: set p.grad to None"):
        module(given(2, "cpu")).sum().backward()


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x):
        return (x * self.frozen * self.scale).tanh()


class Averages(nn.Module):
    """Counts its calls in a frozen parameter, and in a buffer."""

    def __init__(self):
        super().__init__()
        self.layer, self.frozen = nn.Linear(6, 6), nn.Parameter(torch.zeros(()), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        with torch.no_grad():
            self.frozen.add_(1)
            self.seen.add_(1)
        return self.layer(x).tanh()


def test_what_a_forward_writes_to_does_not_stop_calls_in_flight():
    plain = Averages()
    module = make_graphed_callables(copy.deepcopy(plain), (given(0, "cpu"),), order=[1, 1, -1, -1])
    for m in (plain, module):
        ys = [m(given(i, "cpu")) for i in (1, 2)]
        for y in ys:
            y.square().sum().backward()
    equal(grads(plain)[1:], grads(module)[1:])


@pytest.mark.parametrize("path", ["parameters.frozen", "buffers.scale", "outputs.0"])
def test_what_a_backward_may_read_must_be_as_the_forward_left_it(path):
    """Autograd raises for each of them."""
    module = make_graphed_callables(Scaled(), (given(0, "cpu"),), outputs="borrow")
    y = module(given(1, "cpu"))
    with torch.no_grad():
        (y if path == "outputs.0" else getattr(module, path.partition(".")[2])).mul_(3)
    with pytest.raises(StaleResidualError, match=f"{path} must be as the forward left it, got a tensor that was written to since"):
        y.sum().backward()


def test_parameters_written_to_before_the_backward_are_noticed():
    module = make_graphed_callables(made("mixed", "cpu"), (given(0, "cpu"),))
    y = module(given(1, "cpu"))
    with torch.no_grad():
        module[0].weight.add_(1)
    with pytest.raises(StaleResidualError, match="parameters.0.weight must be as the forward left it, got a tensor"):
        y.sum().backward()


@pytest.mark.parametrize("write", torch_writes.WRITES)
def test_parameters_written_to_before_backward_dw_are_noticed(write):
    module = make_graphed_callables(made("mixed", "cpu"), (given(0, "cpu"),), delayed_wgrad=True)
    module[2].weight.grad = torch.ones_like(module[2].weight)  # of another backward
    module(given(1, "cpu")).sum().backward()
    torch_writes.WRITES[write]([module[2].weight])
    said = r"parameters.2.weight must be as the backward left it, got .* since. Call backward_dw\(\) before the optimiser"
    with pytest.raises(StaleResidualError, match=said):
        module.backward_dw()
    module.backward_dw()
    module(given(1, "cpu")).sum().backward()  # its slot is free again


def test_functions_and_unused_inputs():
    def f(x, y):
        return x * 2

    x, y = given(0, "cpu"), given(1, "cpu")
    with pytest.raises(RuntimeError, match="unused|not have been used"):
        make_graphed_callables(f, (x, y))
    graphed = make_graphed_callables(f, (x, y), allow_unused_input=True)
    a, b = given(2, "cpu"), given(3, "cpu")
    graphed(a, b).sum().backward()
    assert torch.equal(a.grad, torch.full_like(a, 2.0)) and b.grad is None
    assert graphed.__name__ == "f"


def test_several_outputs_of_which_some_are_unused():
    graphed = make_graphed_callables(lambda x: (x * 2, x * 3), (given(0, "cpu"),))
    for unused in range(2):
        x = given(1, "cpu")
        graphed(x)[1 - unused].sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 3.0 - unused))


def test_make_graphed_callables_checks_as_torch_does():
    hooked = made("torch.nn", "cpu")
    hooked[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="module must be without hooks"):
        make_graphed_callables(hooked, (given(0, "cpu"),))
    buffered = made("torch.nn", "cpu")
    buffered.register_buffer("b", torch.ones(1, requires_grad=True))
    with pytest.raises(ValueError, match="module must be without buffers that require grad"):
        make_graphed_callables(buffered, (given(0, "cpu"),))
    with torch.autocast("cpu"), pytest.raises(ValueError, match="autocast must be off"):
        make_graphed_callables(made("torch.nn", "cpu"), (given(0, "cpu"),))
    with pytest.raises(TypeError, match="sample_args must be a tuple"):
        make_graphed_callables(made("torch.nn", "cpu"), given(0, "cpu"))
    with pytest.raises(TypeError, match="callable must be a module or a function, got 3"):
        make_graphed_callables(3, (given(0, "cpu"),))
    with pytest.raises(ValueError, match="sample_args must be 2 tuples, one per callable"):
        make_graphed_callables((made("torch.nn", "cpu"),) * 2, ((given(0, "cpu"),),))
    with pytest.raises(CaptureError, match="host sync"):
        make_graphed_callables(lambda x: x * x.sum().item(), (given(0, "cpu"),))


@pytest.mark.parametrize("loss", [lambda y: y.square().sum(), lambda y: y.sum(), lambda y: y[0].expand_as(y).sum()])
def test_a_gradient_is_differentiated_once(loss):
    """Whether the cotangent requires grad or not."""
    graphed = make_graphed_callables(made("mixed", "cpu"), (given(0, "cpu"),))
    x = given(1, "cpu")
    (g,) = torch.autograd.grad(loss(graphed(x)), x, create_graph=True)
    with pytest.raises(RuntimeError, match="a gradient must not be differentiated again"):
        g.square().sum().backward()


@pytest.mark.parametrize("kind", MODELS)
def test_no_autograd_node_of_a_parameter_is_of_the_capture(kind):
    """A node that adds to `.grad` runs on the stream that it was made on: later steps must not use the capture's nodes."""
    module = made(kind, "cpu")
    held = []
    capture = callables._capture
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(callables, "_capture", lambda *args, **kwargs: held.append(capture(*args, **kwargs)) or held[-1])
        graphed = make_graphed_callables(module, (given(0, "cpu"),))
    waiting, seen = [t.grad_fn for slot in held for t in slot.held], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
    leaves = [node.variable for node in seen if hasattr(node, "variable")]
    assert leaves and not any(leaf is p for leaf in leaves for p in module.parameters())
    assert all(isinstance(p, torch.nn.Parameter) for p in graphed.parameters())


class Wrapped(nn.Module):
    """Returns what Hugging Face's models return, which only torch's pytree knows."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        hidden = self.up(x).relu()
        return BaseModelOutput(last_hidden_state=self.down(hidden), hidden_states=(hidden,))


def test_outputs_that_torchs_pytree_knows_come_back():
    torch.manual_seed(0)
    module, x = Wrapped(), torch.randn(5, 3)
    plain = copy.deepcopy(module)
    graphed = make_graphed_callables(module, (x,))
    for _ in range(2):
        x = torch.randn(5, 3)
        got, want = graphed(x), plain(x)
        assert type(got) is BaseModelOutput and torch.equal(got.last_hidden_state, want.last_hidden_state)
        assert torch.equal(got.hidden_states[0], want.hidden_states[0])
        (got.last_hidden_state.square().sum() + got["hidden_states"][0].sum()).backward()
        (want.last_hidden_state.square().sum() + want["hidden_states"][0].sum()).backward()
    for ours, theirs in zip(graphed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("output", [None, 3, (), {"a": 1}], ids=repr)
def test_an_output_without_a_tensor_is_refused(output):
    with pytest.raises(TypeError, match="the output must be a tensor or a tree with tensors, got"):
        make_graphed_callables(lambda x: output, (torch.ones(2),))
