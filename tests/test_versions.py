"""A write in place counts: what autograd and residuals look at to notice it is a tensor's version."""

import contextlib
import inspect

import pytest
import torch
from tiny_samples import tiny
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from funcops import LinearConfig, donate, linear, random
from funcops.adapters.graphs import backend as graphs
from funcops.adapters.graphs import graphed, graphed_op, make_graphed_callables
from funcops.backend import backend
from funcops.errors import StaleResidualError
from funcops.optim import AdamWConfig, SGDConfig, adamw_init, adamw_update, ema_update, sgd_init, sgd_update
from funcops.trees import tensors, tree_map

BACKENDS = ("torch", "triton")
UPDATES = {
    "adamw": (adamw_init, adamw_update, AdamWConfig()),
    "sgd": (sgd_init, sgd_update, SGDConfig()),
    "momentum": (sgd_init, sgd_update, SGDConfig(momentum=0.9)),
    "ema": (lambda params, _: params, lambda p, g, state, decay, in_place: ema_update(p, g, decay, in_place=in_place), 0.9),
}
CFG = LinearConfig(4, 3)


def clones(tree):
    return tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, tree)


def versions(tree):
    return [t._version for t in tensors(tree)]


@pytest.fixture(autouse=True)
def triton_or_skip(request):
    if "triton" in request.node.name:
        pytest.importorskip("triton")


class Watched(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [*BACKENDS, "triton, watched"])
def test_kernels_that_write_to_an_argument(name):
    """Every kernel that says so, in every sample."""
    seen = set()
    for sample in tiny(torch.float32):
        declared = sample.kernel.kernel
        if not declared.mutates or declared.name in seen:
            continue
        seen.add(declared.name)
        names = list(inspect.signature(declared.torch_impl).parameters)
        args = clones(sample.args)
        written = {n: [t for t in tensors(arg) if t.numel()] for n, arg in zip(names, args, strict=True) if n in declared.mutates}
        before = versions(written)
        with backend(name.partition(",")[0]), Watched() if "watched" in name else contextlib.nullcontext():
            sample.kernel(*args)
        assert all([now > then for now, then in zip(versions(written), before, strict=True)]), declared.name
    assert len(seen) >= 4


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("name", BACKENDS)
def test_an_update_between_forward_and_backward_is_noticed(name, update, strided):
    init, run, cfg = UPDATES[update]
    params = linear.init(CFG, key=random.key(0))
    if strided:
        params = type(params)(params.weight.mT.contiguous().mT, params.bias)
    state, x = init(params, cfg), torch.randn(2, 4)
    grads = tree_map(torch.ones_like, params)
    y, residuals = linear.fwd(params, x, CFG)
    before = versions((params, state))
    with backend(name):
        run(params, grads, state, cfg, in_place=True)
    assert all([now > then for now, then in zip(versions((params, state)), before, strict=True)])
    with pytest.raises(StaleResidualError, match="weight"):
        linear.bwd(donate(residuals), torch.ones_like(y), CFG)


@pytest.mark.parametrize("update", UPDATES)
def test_a_replay_that_writes_counts_too(update):
    init, run, cfg = UPDATES[update]
    params = linear.init(CFG, key=random.key(0))
    state, grads, x = init(params, cfg), tree_map(torch.ones_like, params), torch.randn(2, 4)
    step = graphed(lambda p, g, s: run(p, g, s, cfg, in_place=True), params, grads, state, inputs={"0": "donated", "2": "donated"})
    captured = graphed_op(linear, CFG, params, x)
    y, residuals = linear.fwd(params, x, CFG)
    _, in_flight = captured.fwd(params, x)
    before = versions((params, state))
    step(params, grads, state)
    assert all([now > then for now, then in zip(versions((params, state)), before, strict=True)])
    with pytest.raises(StaleResidualError, match="weight"):
        linear.bwd(residuals, torch.ones_like(y), CFG)
    with pytest.raises(StaleResidualError, match="params"):
        captured.bwd(in_flight, torch.ones_like(y))


class Silent:
    """A captured function whose replay counts no write, as that of a CUDA graph."""

    def __init__(self, captured):
        self.captured = captured

    def __getattr__(self, name):
        return getattr(self.captured, name)

    def replay(self):
        with torch.autograd._unsafe_preserve_version_counter(tuple(self.written)):
            self.captured.replay()


@pytest.fixture
def silent(monkeypatch):
    """All graphs' replays are silent about these tensors."""
    written = []
    capture = graphs.RecorderBackend.capture

    def silenced(*args):
        captured, result = capture(*args)
        found = Silent(captured)
        found.written = written
        return found, result

    monkeypatch.setattr(graphs.RecorderBackend, "capture", silenced)
    return written


def test_a_replay_counts_what_the_device_does_not(silent):
    t, x = torch.zeros(3), torch.ones(3)
    step = graphed(lambda t, x: t.add_(x), t, x, inputs={"0": "donated"}, outputs="borrow")
    params = linear.init(CFG, key=random.key(0))
    main = tree_map(torch.zeros_like, params)
    captured = graphed_op(linear, CFG, params, torch.randn(2, 4), into=main)
    norm = torch.nn.BatchNorm1d(3)
    made = make_graphed_callables(norm, (torch.randn(5, 3),))
    silent += [t, *tensors(main), *norm.buffers()]
    for what, run in (
        (t, lambda: step(t, x)),
        (main, lambda: captured.bwd(captured.fwd(params, torch.randn(2, 4))[1], torch.ones(2, 3))),
        (norm.num_batches_tracked, lambda: made(torch.randn(5, 3))),
    ):
        before = versions(what)
        run()
        assert all([now > then for now, then in zip(versions(what), before, strict=True)])
