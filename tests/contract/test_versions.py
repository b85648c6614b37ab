"""A write in place increases a tensor's version, by which autograd and residuals notice it."""

import contextlib
import inspect
import re

import pytest
import torch
from tiny_kernel_calls import tiny
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from funcops import (
    ChainConfig,
    LinearConfig,
    RMSNormConfig,
    Step,
    chain,
    delayed_wgrad,
    donate,
    linear,
    nn,
    random,
    remat,
    rms_norm,
)
from funcops.adapters.graphs import backend as graphs
from funcops.adapters.graphs import graphed, graphed_op, make_graphed_callables
from funcops.engine.backend import backend
from funcops.engine.errors import BorrowedError, StaleResidualError
from funcops.engine.trees import tensors, tree_map
from funcops.optim import (
    AdamWConfig,
    MuonConfig,
    SGDConfig,
    adamw_init,
    adamw_update,
    combine,
    ema_update,
    matrix_mask,
    muon_init,
    muon_update,
    partition,
    sgd_init,
    sgd_update,
)

BACKENDS = ("torch", "triton")


def both_init(params, cfg):
    matrices, rest = partition(params, matrix_mask(params))
    return muon_init(matrices, cfg), adamw_init(rest, AdamWConfig())


def both_update(params, grads, state, cfg, in_place):
    (p, p2), (g, g2) = (partition(tree, matrix_mask(params)) for tree in (params, grads))
    new, of_matrices = muon_update(p, g, state[0], cfg, in_place=in_place)
    rest, of_rest = adamw_update(p2, g2, state[1], AdamWConfig(), in_place=in_place)
    return combine(new, rest), (of_matrices, of_rest)


UPDATES = {
    "muon": (both_init, both_update, MuonConfig()),
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
    """Every kernel that declares a write, in every call."""
    seen = set()
    for call in tiny(torch.float32):
        declared = call.kernel.kernel
        if not declared.mutates or declared.name in seen:
            continue
        seen.add(declared.name)
        names = list(inspect.signature(declared.torch_impl).parameters)
        args = clones(call.args)
        written = {n: [t for t in tensors(arg) if t.numel()] for n, arg in zip(names, args, strict=True) if n in declared.mutates}
        before = versions(written)
        with backend(name.partition(",")[0]), Watched() if "watched" in name else contextlib.nullcontext():
            call.kernel(*args)
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


WRITES = {
    "in place": lambda t: t.add_(0),
    "a view": lambda t: t.view(-1)[:1].mul_(1),
    "detached": lambda t: t.detach().mul_(1),
    "copy_": lambda t: t.copy_(t.clone()),
    "copy_ of itself": lambda t: t.copy_(t),
    "an index": lambda t: t.__setitem__(0, t[0].clone()),
    "out=": lambda t: torch.add(t, 0, out=t),
    "foreach": lambda t: torch._foreach_add_([t], 0),
    "optimiser": lambda t: sgd_update(t.detach(), torch.zeros_like(t), sgd_init(t, SGDConfig()), SGDConfig(), in_place=True),
    ".data": lambda t: t.data.add_(0),
    "numpy": lambda t: t.detach().numpy().__iadd__(0),
}
UNSEEN = {".data", "numpy"}  # by autograd, too


def of_op(op, cfg, half):
    """The tensors that others hold too, by the path at which an error names them, and the half of the backward that reads them."""
    params, x, dy = op.init(cfg, key=random.key(0)), torch.randn(2, 4), torch.randn(2, 3)
    kept = op.fwd(params, x, cfg)[1]
    if half == "wgrad":
        kept, x = op.dgrad(kept, dy, cfg)[1], dy
        return {"dy": x}, lambda: op.wgrad(kept, cfg)
    if half == "donate":
        return {"x": x}, lambda: donate(kept)
    return {"weight": tensors(params)[0], "x": x}, lambda: getattr(op, half)(kept, dy, cfg)


def of_graph(half):
    params, x, dy = linear.init(CFG, key=random.key(0)), torch.randn(2, 4), torch.randn(2, 3)
    graph = graphed_op(linear, CFG, params, x, outputs="borrow")
    y, kept = graph.fwd(params, x)
    if half == "wgrad":
        kept = graph.dgrad(kept, dy)[1]
    run = (lambda: graph.wgrad(kept)) if half == "wgrad" else lambda: getattr(graph, half)(kept, dy)
    found = {"params.weight": params.weight, "slot 0.y": y, "slot 0.residuals.x": graph._slots[0].results["fwd"][1].x}
    return (found | {"slot 0.pending.dy": kept.tree.dy} if half == "wgrad" else found), run


def of_module(half):
    module, x = nn.Sequential(nn.Linear(4, 3)), torch.randn(2, 4, requires_grad=True)
    if half == "delayed":
        with delayed_wgrad() as store:
            module(x).sum().backward()
        return {"params.m0.weight": module[0].weight}, store.run
    late = half == "backward_dw"
    graph = make_graphed_callables(module, (x.detach().clone(),), delayed_wgrad=late)
    y = graph(x.detach()).sum()
    if late:
        y.backward()
    return {"parameters.0.weight": module[0].weight}, graph.backward_dw if late else y.backward


STEPS = ChainConfig(steps=(Step("norm", rms_norm, RMSNormConfig(4)), Step("up", linear, CFG)))
GUARDS = {
    **{f"linear {half}": lambda half=half: of_op(linear, CFG, half) for half in ("bwd", "dgrad", "wgrad", "donate")},
    "chain": lambda: of_op(chain, STEPS, "bwd"),
    "chain, dgrad": lambda: of_op(chain, STEPS, "dgrad"),
    "remat": lambda: of_op(remat(chain), STEPS, "bwd"),
    **{f"graphed_op {half}": lambda half=half: of_graph(half) for half in ("bwd", "dgrad", "wgrad")},
    **{half: lambda half=half: of_module(half) for half in ("delayed", "callable", "backward_dw")},
}


@pytest.mark.parametrize("guard", GUARDS)
def test_every_guard_notices_counted_writes_in_one_wording(guard):
    unwritten, run = GUARDS[guard]()
    run()
    for name, write in WRITES.items():
        for i in range(len(unwritten) if name in ("in place", "a view") else 1):
            given, run = GUARDS[guard]()
            path, t = list(given.items())[i]
            before = t._version
            with torch.no_grad():
                write(t)
            assert (t._version == before) is (name in UNSEEN), name
            if name in UNSEEN:
                run()
                continue
            with pytest.raises((StaleResidualError, BorrowedError)) as raised:
                run()
            said = rf"^[\w ()+,:]+: [\w. ]*{path} must be as the (forward|backward) left it, got a tensor that was written to since"
            assert re.search(said, str(raised.value)), (name, str(raised.value))


class Silent:
    """A captured function whose replay, like a CUDA graph's, counts no write."""

    def __init__(self, captured):
        self.captured = captured

    def __getattr__(self, name):
        return getattr(self.captured, name)

    def replay(self):
        with torch.autograd._unsafe_preserve_version_counter(tuple(self.written)):
            self.captured.replay()


@pytest.fixture
def silent(monkeypatch):
    """Make the replays of all graphs silent about these tensors."""
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
