"""Delayed weight gradients of modules."""

import contextlib
import gc
import sys
import warnings

import pytest
import torch
import torch_writes
from torch import nn

from funcops import LinearConfig, LinearParams, delayed_wgrad, differentiable, linear
from funcops import nn as fnn
from funcops.adapters.autograd import delayed
from funcops.engine.errors import StaleResidualError

D = 5


def model():
    torch.manual_seed(0)
    return fnn.Sequential(fnn.LayerNorm(D), fnn.Linear(D, 8), fnn.GELU(), fnn.Linear(8, D)).double()


def batches(n=3):
    return torch.randn(n, 4, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def grads(module):
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def test_grads_are_accumulated_over_microbatches():
    plain, delayed = model(), model()
    store = delayed_wgrad()
    for x in batches():
        plain(x).square().sum().backward()
        given = x.clone().requires_grad_()
        with store:
            delayed(given).square().sum().backward()
        assert given.grad is not None
    assert all(p.grad is None for p in delayed.parameters()) and len(store) == 3 and store.nbytes() > 0
    store.run()
    assert len(store) == 0
    for a, b in zip(grads(plain), grads(delayed), strict=True):
        assert torch.equal(a, b)


def test_autocast_does_not_reach_the_weight_gradients():
    plain, delayed, store = model().float(), model().float(), delayed_wgrad()
    x = batches(1)[0].float()
    plain(x).square().sum().backward()
    with store:
        delayed(x).square().sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        store.run()
    assert all(torch.equal(a, b) for a, b in zip(grads(plain), grads(delayed), strict=True))


def test_tied_weights_main_grad_and_hooks():
    a, b = fnn.Linear(D, D).double(), fnn.Linear(D, D, bias=False).double()
    b.weight = a.weight
    a.bias.main_grad = torch.ones(D, dtype=torch.float64)
    seen = []
    x = batches(1)[0]
    with delayed_wgrad() as store:
        b(a(x)).sum().backward()
    a.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    a.weight.register_hook(lambda g: 2 * g)
    store.run()
    want = [t.detach().clone().requires_grad_() for t in (a.weight, a.bias)]
    ((x @ want[0].T + want[1]) @ want[0].T).sum().backward()
    torch.testing.assert_close(a.weight.grad, 2 * want[0].grad)
    torch.testing.assert_close(a.bias.main_grad, 1 + want[1].grad)
    assert a.bias.grad is None and len(seen) == 1


def test_a_main_grad_of_another_shape_is_refused():
    layer = fnn.Linear(2, 3)
    layer.weight.main_grad = torch.zeros(6)
    with delayed_wgrad() as store:
        layer(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match=r"delayed_wgrad: main_grad must be \[3, 2\], got \[6\]"):
        store.run()
    store.discard()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("removed", [False, True])
def test_hooks_fire_once_for_each_gradient(removed, tied, after):
    """In `run` for delayed gradients; in the backward for gradients of torch's own ops, which share a weight if `tied`."""

    def trained(context):
        torch.manual_seed(0)
        module, fired = fnn.Sequential(fnn.Linear(D, D), fnn.GELU(), fnn.Linear(D, D)).double(), []
        handles = []
        for i, p in enumerate(module.parameters()):
            if after:
                handles.append(p.register_post_accumulate_grad_hook(lambda p, i=i: fired.append(i)))
            else:
                handles.append(p.register_hook(lambda g, i=i: (fired.append(i), 2 * g)[1]))
        for x in batches(2):
            with context() as store:
                y = module(x)
                (y + torch.nn.functional.linear(y, module[0].weight) if tied else y).sum().backward()
            fired.append("run")
            if store is not None:
                store.run()
            fired.append("next")
            if removed:
                handles[0].remove()
        return grads(module), fired

    want, _ = trained(contextlib.nullcontext)
    got, fired = trained(delayed_wgrad)
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a, b)
    first = [0] * tied, [0, 1, 2, 3]  # a chain is one op
    second = ([], [1, 2, 3]) if removed else first
    assert fired == [*first[0], "run", *first[1], "next", *second[0], "run", *second[1], "next"]


def halve(p):
    p.grad.mul_(0.5)


HOOKS = {
    "a norm": lambda p: p.register_hook(lambda g: g / g.norm()),
    "after": lambda p: p.register_post_accumulate_grad_hook(halve),
    "both": lambda p: (HOOKS["a norm"](p), HOOKS["after"](p)),
}
TIED = {  # ways to use a weight several times: in one op, in several, with a wider main gradient
    "one op": lambda: fnn.Sequential(fnn.Linear(D, D), fnn.GELU(), fnn.Linear(D, D, bias=False)),
    "several ops": lambda: nn.Sequential(fnn.Linear(D, D), nn.Softplus(), fnn.Linear(D, D, bias=False)),
    "a table": lambda: nn.Sequential(fnn.Embedding(D, D), nn.Softplus(), fnn.Linear(D, D, bias=False)),
}


@pytest.mark.parametrize("tied", TIED)
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_get_the_sum_of_a_tied_weight(hook, tied):
    """Autograd gives them one sum in each backward."""

    def trained(context):
        torch.manual_seed(0)
        module = TIED[tied]().double()
        module[2].weight = module[0].weight
        HOOKS[hook](module[0].weight)
        with context() as store:
            for x in batches(2):
                module(x.argmax(-1) if tied == "a table" else x).square().sum().backward()
        if store is not None:
            store.run()
            assert not store.parts
        return grads(module)

    for want, got in zip(trained(contextlib.nullcontext), trained(delayed_wgrad), strict=True):
        torch.testing.assert_close(got, want)


ASKED = {  # what a backward asks for, of x and the parameters
    "x": lambda loss, x, ps: torch.autograd.grad(loss, [x]),
    "a weight": lambda loss, x, ps: torch.autograd.grad(loss, [ps[0]]),
    "all": lambda loss, x, ps: torch.autograd.grad(loss, [x, *ps]),
    "inputs: x": lambda loss, x, ps: loss.backward(inputs=[x]),
    "inputs: a bias": lambda loss, x, ps: loss.backward(inputs=[ps[1]]),
    "inputs: all": lambda loss, x, ps: loss.backward(inputs=[x, *ps]),
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("tied", TIED)
def test_only_what_a_backward_asks_for_is_computed(asked, tied):
    """Then a whole backward, of what the first one gave, as a gradient penalty's."""

    def trained(context):
        torch.manual_seed(0)
        module, x = TIED[tied]().double(), batches(1)[0].requires_grad_()
        given = x.argmax(-1) if tied == "a table" else x
        ps = list(module.parameters())
        with context() as store:
            y = module(given)
            found = ASKED[asked]((y.sum() + x.sum()), x, ps)
            module(given).square().sum().backward(inputs=ps[:2])
        if store is not None:
            store.run()
        return [x.grad, *grads(module), *(found or ())]

    for want, got in zip(trained(contextlib.nullcontext), trained(delayed_wgrad), strict=True):
        assert (want is None) == (got is None)
        if want is not None:
            torch.testing.assert_close(got, want)


def test_a_weight_that_is_not_a_leaf_is_not_delayed():
    base = torch.randn(3, D, dtype=torch.float64, requires_grad=True)
    params = LinearParams(base * 2, None)
    with delayed_wgrad() as store:
        differentiable(linear)(params, batches(1)[0], LinearConfig(D, 3, bias=False)).sum().backward()
    assert len(store) == 0 and base.grad is not None


def test_frozen_parts_stay_without():
    module = model()
    module[1].weight.requires_grad_(False)
    with delayed_wgrad() as store:
        module(batches(1)[0]).sum().backward()
    store.run()
    assert module[1].weight.grad is None and module[1].bias.grad is not None


def test_work_left_behind_raises():
    module, x = model(), batches(1)[0]
    with delayed_wgrad() as store:
        module(x).sum().backward()
    with pytest.raises(RuntimeError, match="1 weight gradients of the previous store were never run"), delayed_wgrad():
        pass
    store.discard()
    with delayed_wgrad(), pytest.raises(RuntimeError, match="must not be entered inside another"), delayed_wgrad():
        pass
    lost = delayed_wgrad()
    with lost:
        module(x).sum().backward()
    with pytest.raises(RuntimeError, match="reduce\\(\\) must follow run\\(\\)"):
        lost.reduce()
    lost.discard()


@pytest.mark.parametrize("write", torch_writes.WRITES)
def test_params_that_changed_are_stale(write):
    module = model()
    for p in module.parameters():
        p.grad = torch.ones_like(p)  # of another backward
    with delayed_wgrad() as store:
        module(batches(1)[0]).sum().backward()
    torch_writes.WRITES[write](list(module.parameters()))
    with pytest.raises(StaleResidualError, match="chain_wgrad: params.m0.weight must be as the backward left it"):
        store.run()


def test_a_failed_backward_leaves_nothing():
    with pytest.raises(ZeroDivisionError), delayed_wgrad() as store:
        model()(batches(1)[0]).sum().backward()
        raise ZeroDivisionError
    assert len(store) == 0
    with delayed_wgrad():
        pass


def test_a_weight_gradient_that_is_lost_as_python_ends_has_the_name_of_its_op(monkeypatch):
    module, x = fnn.Linear(3, 3), torch.randn(2, 3)
    with delayed_wgrad() as store:
        module(x).sum().backward()
    monkeypatch.setattr(delayed, "paths", lambda tree: {})  # optree knows no nodes any more
    with pytest.warns(RuntimeWarning, match=r"1 weight gradients of a store that is gone were never run \(linear\)"):
        del store
    with pytest.raises(RuntimeError, match=r"never run \(linear\): keep the store"), delayed_wgrad():
        pass


LOST = r"delayed_wgrad: {} weight gradients of a store that is gone were never run \(chain m0.weight, .*\)"


def forgotten(name, module, x):
    """Stores with work that nobody can run any more, by the way in which they were lost."""
    if name == "no name":
        with delayed_wgrad():
            module(x).sum().backward()
    elif name == "another in its place":
        with delayed_wgrad() as store:
            module(x).sum().backward()
        store = delayed_wgrad()
        assert len(store) == 0
    elif name == "two backwards":
        with delayed_wgrad():
            module(x).sum().backward()
            module(x).sum().backward()
    elif name == "an error before run":
        with contextlib.suppress(ZeroDivisionError):
            with delayed_wgrad() as store:
                module(x).sum().backward()
            raise ZeroDivisionError
        del store
    elif name == "an error in run":  # of a hook
        handle = module[0].weight.register_hook(lambda g: 1 / 0)
        with delayed_wgrad() as store:
            module(x).sum().backward()
            module(x).sum().backward()
        with contextlib.suppress(ZeroDivisionError):
            store.run()
        handle.remove()
        del store
    elif name == "a cycle":
        store = delayed_wgrad()
        store.itself = store
        with store:
            module(x).sum().backward()
        del store
    elif name == "a deleted module":
        own = model()
        with delayed_wgrad():
            own(x).sum().backward()
        del own


FORGOTTEN = (
    "no name",
    "another in its place",
    "two backwards",
    "an error before run",
    "an error in run",
    "a cycle",
    "a deleted module",
)


@pytest.mark.parametrize("name", FORGOTTEN)
def test_a_forgotten_store_warns(name):
    """It names its params when it is dropped, as a coroutine that was never awaited; the next block raises once."""
    count = 2 if name == "two backwards" else 1
    with pytest.warns(RuntimeWarning, match=LOST.format(count) + r": call its run\(\) or discard\(\)"):
        forgotten(name, model(), batches(1)[0])
        gc.collect()
    with pytest.raises(RuntimeError, match=LOST.format(count) + ": keep the store"), delayed_wgrad():
        pass
    with delayed_wgrad():
        pass


def test_a_forgotten_store_fails_a_test_in_which_warnings_are_errors():
    with warnings.catch_warnings(), caught_unraisable() as seen:
        warnings.simplefilter("error")
        forgotten("no name", model(), batches(1)[0])
        gc.collect()
    assert [type(one) for one in seen] == [RuntimeWarning] and "chain m0.weight" in str(seen[0])
    with contextlib.suppress(RuntimeError), delayed_wgrad():
        pass


@contextlib.contextmanager
def caught_unraisable():
    """The exceptions of finalisers, which Python only prints."""
    seen, before = [], sys.unraisablehook
    sys.unraisablehook = lambda one: seen.append(one.exc_value)
    try:
        yield seen
    finally:
        sys.unraisablehook = before


USED = ("run", "run twice", "discarded", "an error inside", "empty", "run in parts")


@pytest.mark.parametrize("name", USED)
def test_a_store_without_work_left_says_nothing(name):
    module, x = model(), batches(1)[0]
    with contextlib.suppress(ZeroDivisionError), delayed_wgrad() as store:
        if name != "empty":
            module(x).sum().backward()
        if name == "an error inside":
            raise ZeroDivisionError
    if name.startswith("run"):
        store.run()
    if name in ("run twice", "run in parts"):
        once = grads(module)
        if name == "run in parts":
            with store:
                module(x).sum().backward()
        store.run()
        for got, want in zip(grads(module), once, strict=True):
            torch.testing.assert_close(got, 2 * want if name == "run in parts" else want)
    if name == "discarded":
        store.discard()
    with warnings.catch_warnings(), caught_unraisable() as seen:
        warnings.simplefilter("error")
        del store
        gc.collect()
    assert not seen
    with delayed_wgrad():
        pass


FROZEN = {
    "all": lambda m: list(m.parameters()),
    "a weight": lambda m: [m[1].weight],
    "a bias": lambda m: [m[3].bias],
    "a norm": lambda m: list(m[0].parameters()),
}


@pytest.mark.turns("name", "when", "tied", "held", every=4)
@pytest.mark.parametrize("held", [None, "grad", "main_grad"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", FROZEN)
def test_a_parameter_that_is_frozen_has_the_gradients_of_autograd(name, when, tied, held):
    """After the backward it keeps its gradient; after the forward alone it gets none."""

    def trained(context):
        module = model()
        if tied:
            module = nn.ModuleList([*module, fnn.Linear(D, 8).double()])
            module[4].weight = module[1].weight
        for p in module.parameters() if held else ():
            setattr(p, held, torch.ones_like(p))
        y = batches(1)[0]
        for layer in module:
            y = layer(y)
        if when == "before":
            [p.requires_grad_(False) for p in FROZEN[name](module)]
        with context() as store:
            y.square().sum().backward()
        if when == "after":
            [p.requires_grad_(False) for p in FROZEN[name](module)]
        if store is not None:
            store.run()
        if held == "main_grad":
            return [p.main_grad - 1 if store is not None else p.grad for p in module.parameters()]
        return grads(module)

    for got, want in zip(trained(delayed_wgrad), trained(contextlib.nullcontext), strict=True):
        torch.testing.assert_close(got, torch.zeros_like(got) if want is None and got is not None else want)


COMPILED = {"in parts": dict(backend="eager"), "whole": dict(backend="aot_eager", fullgraph=True)}


@pytest.mark.slow
@pytest.mark.turns("inside")
@pytest.mark.parametrize("inside", [True, False], ids=["forward inside", "backward alone"])
@pytest.mark.parametrize("options", COMPILED.values(), ids=COMPILED)
def test_a_compiled_model_delays_or_raises(options, inside):
    plain, compiled = model(), model()
    run = torch.compile(compiled, **options)
    x, store = batches(1)[0], delayed_wgrad()
    plain(x).square().sum().backward()
    loss = None if inside else run(x).square().sum()
    try:
        with store:
            (run(x).square().sum() if inside else loss).backward()
    except RuntimeError as error:
        assert "delayed_wgrad" in str(error)
        assert len(store) == 0
        return
    assert len(store) == 1 and all(p.grad is None for p in compiled.parameters())
    store.run()
    assert all(torch.equal(a, b) for a, b in zip(grads(plain), grads(compiled), strict=True))
    assert inside, "what was compiled before the block cannot wait"


@pytest.mark.slow
def test_blocks_without_a_backward_and_with_a_plain_one_beside_compiled_ops():
    x = batches(1)[0]
    torch.compile(model(), backend="eager")(x).sum().backward()
    for _ in range(2):
        with delayed_wgrad():
            pass
    weight = torch.ones(D, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="delayed_wgrad: the backward must be of ops that are not compiled"), delayed_wgrad():
        (x * weight).sum().backward()
    with delayed_wgrad() as store:
        model()(x).sum().backward()
    store.run()


@pytest.fixture
def alone(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


WRAPPED = {
    "whole": lambda ddp: ddp,
    "a part": lambda ddp: torch.nn.Sequential(fnn.Linear(D, D).double(), ddp, fnn.Linear(D, D).double()),
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}], ids=str)
def test_a_distributed_model_must_not_reduce(alone, wrap, options):
    ddp = torch.nn.parallel.DistributedDataParallel(model(), **options)
    run, x = wrap(ddp), batches(1)[0]
    for outside in (True, False):  # DistributedDataParallel decides in the forward
        loss = run(x).square().sum() if outside else None
        store = delayed_wgrad()
        with pytest.raises(RuntimeError, match=r"delayed_wgrad: the forward of chain must be under no_sync\(\)"), store:
            (loss if outside else run(x).square().sum()).backward()
        assert len(store) == 0
    ddp.zero_grad(set_to_none=True)
    plain = model()
    plain.load_state_dict(ddp.module.state_dict())
    with ddp.no_sync(), delayed_wgrad() as store:
        ddp(x).square().sum().backward()
    store.run()
    store.reduce()
    plain(x).square().sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(grads(plain), grads(ddp), strict=True))


def test_a_model_without_a_parameter_that_got_a_gradient_is_refused():
    store, weight = delayed_wgrad(), torch.nn.Parameter(torch.ones(2, 3))
    store.done = {id(weight): weight}
    with pytest.raises(
        ValueError, match=r"model must be one that holds all parameters that got a gradient, got one without float32\[2, 3\]"
    ):
        store.reduce_sharded(torch.nn.Linear(3, 2))


def test_a_model_that_is_not_under_fully_shard_is_refused():
    linear, store = torch.nn.Linear(3, 2), delayed_wgrad()
    linear.weight.grad, store.done = torch.ones(2, 3), {id(linear.weight): linear.weight}
    with pytest.raises(TypeError, match="delayed_wgrad: model must be under fully_shard, got a plain parameter weight"):
        store.reduce_sharded(linear)


def test_sharded_gradients_leave_nothing_to_the_next_step(alone):
    """The parameters that were whole in the first step are the same tensors in the second."""
    from torch.distributed.fsdp import fully_shard

    plain, sharded = model(), fully_shard(model(), mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    sharded.set_reshard_after_backward(False)
    for x in batches(2):
        plain.zero_grad()
        sharded.zero_grad()
        plain(x).square().sum().backward()
        with delayed_wgrad() as store:
            sharded(x).square().sum().backward()
        store.run()
        store.reduce_sharded(sharded)
        found = [p.grad.full_tensor() for p in sharded.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(grads(plain), found, strict=True))
