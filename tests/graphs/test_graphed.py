"""graphed: the whole training step, its checks, and borrowed outputs."""

import collections
import copy
import dataclasses
import gc
import pickle
import types

import pytest
import torch
from model import batch, init, same, step

from funcops import LinearConfig, linear, random
from funcops.adapters.graphs import check_capturable, graphed
from funcops.adapters.graphs.statics import clones
from funcops.engine.errors import BorrowedError, CaptureError, GradModeError, StaleResidualError
from funcops.engine.trees import tensors

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DONATED = {"0": "donated", "1": "donated"}


@pytest.mark.turns("device", "outputs", "slots", every=2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("outputs", ["clone", "borrow"])
@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_a_training_step_gives_the_same_bits(slots, outputs, device):
    """Three steps of two accumulations: dropout draws from new keys, the rate changes, the step counts."""
    params, state = init(device)
    want = clones((params, state))
    before = clones((params, state))
    rate = torch.tensor(1e-2, device=device)
    captured = graphed(step, params, state, batch(0, device), batch(1, device), rate, inputs=DONATED, outputs=outputs, slots=slots)
    same((params, state), before)
    losses = []
    for i in range(3):
        given = batch(2 * i, device), batch(2 * i + 1, device), rate / (i + 1)
        *want, loss_want = step(*want, *given)
        p, s, loss = captured(params, state, *given)
        assert tensors(p)[0] is tensors(params)[0], "what is donated comes back as it is"
        same((params, state, loss), (*want, loss_want))
        losses.append(float(loss))
    assert len(set(losses)) == 3


@pytest.mark.parametrize("device", DEVICES)
def test_report_reset_dot(tmp_path, device):
    x = torch.randn(4, 3, device=device)
    captured = graphed(lambda x: {"y": (x @ x.mT).relu(), "n": None}, x, keep_graph=device == "cuda")
    report = captured.report()
    assert report.input_bytes == 48 and report.output_bytes == 64 and report.pool_bytes >= 64 and report.residual_bytes == 0
    assert "inputs 48 bytes" in str(report) and (report.kernels is None or report.kernels >= 2)
    captured.instantiate()
    captured.dot(str(tmp_path / "graph.dot"))
    assert "digraph" in (tmp_path / "graph.dot").read_text()
    if device == "cpu":
        assert report.backend == "recorder" and "aten.mm" in (tmp_path / "graph.dot").read_text()
        with pytest.raises(RuntimeError, match="raw_graph: a CUDA graph is needed, got a recording"):
            _ = captured.raw_graph
    assert captured(x)["n"] is None
    captured.reset()
    with pytest.raises(RuntimeError, match=r"graphed: must not be called after reset\(\)"):
        captured(x)
    assert captured.report().pool_bytes in (0, report.pool_bytes)


def double(x, scale=None):
    return x * 2


def wrong(x, **changes):
    return [changes.get("x", x)]


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (lambda x: (x[:2],), ValueError, r"input 0 must be float32\[4, 3\], got float32\[2, 3\]"),
        (lambda x: (x.double(),), TypeError, r"input 0 must be float32\[4, 3\], got float64\[4, 3\]"),
        (lambda x: (torch.empty(3, 4).mT.copy_(x),), ValueError, r"input 0 must be of strides \(3, 1\), got \(1, 4\)"),
        (lambda x: (x.to("meta"),), ValueError, "input 0 must be on device cpu, got meta"),
        (lambda x: ([x],), ValueError, r"inputs must be as captured, 0, got missing \['0'\], extra \['0.0'\]"),
        (lambda x: (x, 2), ValueError, r"inputs must be as captured, 0, got missing \[\], extra \['1'\]"),
        (lambda x: (3.0,), TypeError, r"input 0 must be float32\[4, 3\], got 3.0"),
        (lambda x: (None,), TypeError, r"input 0 must be float32\[4, 3\], got None"),
        (lambda x: (x[:1].expand(4, 3),), ValueError, "input 0 must be of strides"),
    ],
)
def test_wrong_inputs_are_named_before_anything_runs(given, error, text):
    x = torch.randn(4, 3)
    captured = graphed(double, x, outputs="borrow")
    y = captured(x)
    with pytest.raises(error, match="graphed: " + text):
        captured(*given(x + 1))
    assert torch.equal(y, x * 2), "the graph did not run"


def test_another_container_with_the_same_paths_is_named():
    captured = graphed(lambda x: x[0] * 2, [torch.ones(2)])
    for other in ((torch.ones(2),), {"0": torch.ones(2)}):
        with pytest.raises(ValueError, match=r"inputs must be of the captured structure PyTreeSpec\(\(\[\*\],\).*, got Py"):
            captured(other)


def test_values_other_than_tensors_are_baked_in():
    captured = graphed(lambda x, n, flag: x * n if flag else x, torch.ones(3), 2.0, True)
    assert torch.equal(captured(torch.ones(3), 2.0, True), torch.full((3,), 2.0))
    with pytest.raises(ValueError, match="graphed: input 1 must be 2.0, the captured value, got 3.0"):
        captured(torch.ones(3), 3.0, True)
    with pytest.raises(ValueError, match="input 2 must be True"):
        captured(torch.ones(3), 2.0, 1)


class Result(collections.OrderedDict):
    """A dict that only its own class knows."""


@dataclasses.dataclass(frozen=True)
class Fixed:
    number: int = 3


@pytest.mark.parametrize("value", [Result(y=torch.ones(2)), {1, 2}, torch.nn.Linear(2, 2), types.SimpleNamespace()], ids=type)
def test_a_result_that_may_change_is_refused(value):
    """Each replay would give the one of the capture, whose tensors the next replay writes."""
    with pytest.raises(TypeError, match=rf"output.odd must be a tensor, or a value that cannot change, .*{type(value).__name__}"):
        graphed(lambda x: {"y": x * 2, "odd": value}, torch.ones(2))
    for right in (3, "a", torch.float32, Fixed(), torch.relu, Fixed, None, torch.device("cpu")):
        found = graphed(lambda x, right=right: {"y": x * 2, "right": right}, torch.ones(2))(torch.ones(2))
        assert found["right"] == right and torch.equal(found["y"], torch.full((2,), 2.0))


@pytest.mark.parametrize("value", [0.0, float("nan"), float("-inf"), complex(0, -0.0)], ids=str)
def test_a_baked_in_number_is_compared_by_its_bits(value):
    """Equality does not tell 0.0 from -0.0, nor NaN from any other number."""
    captured = graphed(lambda x, n: torch.full_like(x, n), torch.ones(2, dtype=torch.complex64), value)
    got = captured(torch.ones(2, dtype=torch.complex64), type(value)(str(value)))
    assert repr(got[0].item()) == repr(complex(value))
    with pytest.raises(ValueError, match="graphed: input 1 must be .*, the captured value, got"):
        captured(torch.ones(2, dtype=torch.complex64), -value if value == value else 1.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", ["pinned", "donated"])
def test_a_leaf_that_moved_raises(policy, device):
    state, x = torch.ones(3, device=device), torch.ones(3, device=device)
    captured = graphed(lambda state, x: state + x, state, x, inputs={"0": policy})
    state.mul_(2)
    assert torch.equal(captured(state, x + 1), state + x + 1)
    with pytest.raises(ValueError, match=rf"input 0 must be at its captured address \({policy}\), got a tensor at another"):
        captured(state.clone(), x)


VIEWS = {
    "index": lambda y: y[1:],
    "transposed": lambda y: y.mT,
    "flat": lambda y: y.view(-1),
    "expanded": lambda y: y.expand(2, 3, 4),
    "of a view": lambda y: y.t()[0].unsqueeze(0),
    "one of several": lambda y: y.unbind(1)[-1],
    "itself": lambda y: y.contiguous(),
    "written to": lambda y: y.add_(1),
    "detached": lambda y: y.detach(),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_borrowed_outputs_are_borrowed_too(view):
    captured = graphed(double, torch.ones(3, 4), outputs="borrow", debug=True)
    y, plain = captured(torch.ones(3, 4)), torch.full((3, 4), 2.0)
    copied, seen = y.clone()[1:], VIEWS[view](y)
    assert torch.equal(seen + 0, VIEWS[view](plain))
    leaf = y.detach()
    leaf.requires_grad_()
    leaf.square().sum().backward()
    assert torch.equal(leaf.grad, 2 * leaf.detach())
    captured(torch.zeros(3, 4))
    assert float(copied.sum()) == 16
    with pytest.raises(BorrowedError, match="^the output was borrowed from a graph that has been replayed since"):
        _ = seen + 0


@pytest.mark.parametrize("policy", ["pinned", "donated"])
@pytest.mark.parametrize("view", [lambda z: z.conj(), lambda z: z.conj().imag], ids=["conjugated", "negated"])
def test_another_reading_of_the_same_memory_raises(view, policy):
    z = torch.randn(3, dtype=torch.complex64)
    same = z if view(z).is_complex() else z.imag
    captured = graphed(lambda z: 2 * z, same, inputs=policy)
    with pytest.raises(ValueError, match=rf"input 0 must be of the captured sign and conjugation \({policy}\), got another"):
        captured(view(z))


def test_expanded_outputs():
    captured = graphed(lambda x: (x.sum(0, keepdim=True).expand(5, 3), x.sum()[None].expand(2)), torch.ones(4, 3))
    x = torch.randn(4, 3)
    for want, got in zip((x.sum(0).expand(5, 3), x.sum().expand(2)), captured(x), strict=True):
        assert torch.equal(want, got)


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
@pytest.mark.parametrize("policy", ["copy", "pinned"])
def test_only_donated_tensors_are_written(policy, inference):
    """In inference mode too, where torch does not count writes to the tensors that it makes."""
    with torch.inference_mode(inference):
        x = torch.ones(3)
        with pytest.raises(
            CaptureError, match=f"input 0 must not be written to unless it is donated, got an input of policy '{policy}'"
        ):
            graphed(lambda x: x.add_(1), x, inputs=policy)


def test_a_write_by_the_last_run_alone_is_noticed():
    """The runs before it only read."""
    runs = iter((False, True))

    def last_writes(x):
        return x.add_(1) if next(runs) else x + 1

    with pytest.raises(CaptureError, match="^graphed: input 0 must not be written to unless it is donated"):
        graphed(last_writes, torch.ones(3), warmup=1)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_stale_borrowed_output_is_not_copied(copied):
    captured = graphed(double, torch.ones(3), outputs="borrow", debug=True)
    y = captured(torch.ones(3))
    copied(y)
    captured(torch.ones(3))
    with pytest.raises(BorrowedError, match="^the output was borrowed from a graph that has been replayed since"):
        copied(y)


@pytest.mark.parametrize("called", [False, True], ids=["", "called in inference"])
@pytest.mark.parametrize("made", [False, True], ids=["", "captured in inference"])
def test_graphs_of_inference_mode(made, called):
    with torch.inference_mode(made):
        state = torch.ones(3)
        captured = graphed(lambda state, x: (state.mul_(2), state + x), state, torch.ones(3), inputs={"0": "donated"})
        assert torch.equal(state, torch.ones(3))
    with torch.inference_mode(called):
        same, y = captured(state, torch.full((3,), 5.0))
    assert same is state and torch.equal(state, torch.full((3,), 2.0)) and torch.equal(y, torch.full((3,), 7.0))


@pytest.mark.parametrize("outputs", ["clone", "borrow"])
@pytest.mark.parametrize("inputs", ["copy", "pinned", {"0": "pinned"}])
def test_residuals_of_a_replay_are_fresh_until_written_to(inputs, outputs):
    """Though a copy of x overwrites the buffer that they alias."""
    cfg, dy, x = LinearConfig(3, 2), torch.ones(4, 2), torch.randn(4, 3)
    params = linear.init(cfg, key=random.key(0))
    forward = graphed(lambda params, x: linear.fwd(params, x, cfg), params, x, inputs=inputs, outputs=outputs)
    for _ in range(2):
        x.mul_(2)
        y, kept = forward(params, x)
        want = linear.bwd(linear.fwd(params, x, cfg)[1], dy, cfg)
        for got, one in zip(tensors(linear.bwd(kept, dy, cfg)), tensors(want), strict=True):
            assert torch.equal(got, one)
    kept.x.add_(1)
    with pytest.raises(StaleResidualError, match="linear_bwd: residuals.x must be as the forward left it"):
        linear.bwd(kept, dy, cfg)


@pytest.mark.parametrize("written", [False, True])
def test_residuals_that_the_function_itself_writes_to_are_stale(written):
    cfg, x = LinearConfig(3, 2), torch.randn(4, 3)
    params = linear.init(cfg, key=random.key(0))

    def step(params, x):
        _, kept = linear.fwd(params, x * 1, cfg)
        (kept.x if written else x * 1).add_(1)
        return kept

    kept = graphed(step, params, x)(params, x)
    assert (kept.stale() == "x") if written else kept.fresh()


@pytest.mark.parametrize("inputs", ["copy", {"0": "pinned"}])
def test_stale_residuals_are_noticed(inputs):
    """The graph's copy of them would be of other values than the forward's."""
    cfg, dy = LinearConfig(3, 2), torch.ones(4, 2)
    params, x = linear.init(cfg, key=random.key(0)), torch.randn(4, 3)
    _, kept = linear.fwd(params, x, cfg)
    captured = graphed(lambda kept, dy: linear.bwd(kept, dy, cfg), kept, dy, inputs=inputs)
    for got, want in zip(tensors(captured(kept, dy)), tensors(linear.bwd(kept, dy, cfg)), strict=True):
        assert torch.equal(got, want)
    params.weight.add_(1)
    for call in (lambda: captured(kept, dy), lambda: graphed(lambda kept: tensors(kept)[0] + 1, kept)):
        with pytest.raises(StaleResidualError, match="graphed: residuals.weight must be as the forward left it, got a tensor"):
            call()


@pytest.mark.parametrize("device", DEVICES)
def test_borrowed_outputs(device):
    x = torch.ones(3, device=device)
    captured = graphed(double, x, outputs="borrow", debug=True, slots=2)
    first, second = captured(x), captured(x + 1)
    assert float(first.sum()) == 6 and torch.equal(first + second, 2 * x + 2 * x + 2)
    third = captured(x + 2)
    assert float(third.sum()) == 18 and float(second.sum()) == 12
    for use in (lambda: first + 1, lambda: torch.cat([x, first]), lambda: first.sum(), lambda: first.cpu()):
        with pytest.raises(BorrowedError, match="^the output was borrowed from a graph that has been replayed since"):
            use()
    captured.reset()
    with pytest.raises(BorrowedError):
        _ = third + 1
    owned = graphed(double, x)
    y = owned(x)
    owned(x + 1)
    assert torch.equal(y, 2 * x)


def test_who_would_expect_a_gradient_is_told():
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(GradModeError, match="graphed: inputs must not require grad, got some that do, in grad mode"):
        graphed(double, x)
    captured = graphed(double, x.detach())
    with pytest.raises(GradModeError, match="make_graphed_callables"):
        captured(x)
    with torch.no_grad():
        assert torch.equal(captured(x), 2 * x)


def test_passing_through_and_views():
    x, n = torch.arange(6.0).reshape(2, 3), torch.tensor([1, 0])
    captured = graphed(lambda x, n: (x, x[n], x[0], {"t": x.mT, "n": n}), x, n)
    for k in range(3):
        same(captured(x + k, n), (x + k, (x + k)[n], x[0] + k, {"t": (x + k).mT, "n": n}))
    y = captured(x, n)[0]
    captured(x + 7, n)
    assert torch.equal(y, x)


def test_two_functions_of_one_pool():
    x = torch.ones(4)
    first = graphed(lambda x: x + 1, x, outputs="borrow")
    second = graphed(lambda y: y * 3, first(x), inputs="pinned", pool=first)
    assert torch.equal(second(first(x + 1)), torch.full((4,), 9.0)), "the output of the one is the input of the other, uncopied"


@pytest.mark.parametrize("device", DEVICES)
def test_a_failing_capture_leaves_nothing_behind(device):
    x, state = torch.ones(3, device=device), torch.ones(3, device=device)

    def bad(x, state):
        state.add_(1)
        return x * float(x.sum())

    enabled = gc.isenabled()
    for _ in range(2):
        with pytest.raises(CaptureError) as error:
            graphed(bad, x, state, inputs={"1": "donated"})
        assert device == "cuda" or f"{__file__}:" in str(error.value) and "host sync" in str(error.value)
        assert gc.isenabled() == enabled and torch.equal(state, torch.ones_like(state))
    if device == "cuda":
        assert not torch.cuda.is_current_stream_capturing()
    assert torch.equal(graphed(double, x)(x), 2 * x)
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_inputs_are_held_by_the_graph(device):
    """Torch can check that captured inputs are still alive: these always are."""
    state = torch.ones(1000, device=device)
    address, storage = state.data_ptr(), torch.multiprocessing.reductions.StorageWeakRef(state.untyped_storage())
    captured = graphed(lambda state, x: state + x, state, torch.ones(1000, device=device), inputs={"0": "pinned"})
    again = state.view(1000)
    del state
    assert torch.equal(captured(again, again), 2 * again) and again.data_ptr() == address
    del again
    gc.collect()
    assert not storage.expired()
    captured.reset()
    del captured
    gc.collect()
    assert storage.expired()


@pytest.mark.gpu
def test_on_a_stream_of_ones_own():
    stream, x = torch.cuda.Stream(), torch.ones(3, device="cuda")
    before = torch.cuda.current_stream()
    captured = graphed(double, x, stream=stream, capture_error_mode="thread_local")
    assert torch.cuda.current_stream() == before
    assert torch.equal(captured(x + 1), 2 * x + 2)
    assert type(captured.raw_graph) is torch.cuda.CUDAGraph


def test_bad_arguments():
    x = torch.ones(3)
    with pytest.raises(ValueError, match="graphed: slots must be at least 1, got 0"):
        graphed(double, x, slots=0)
    with pytest.raises(ValueError, match="graphed: outputs must be 'clone' or 'borrow', got 'view'"):
        graphed(double, x, outputs="view")
    with pytest.raises(ValueError, match=r"graphed: inputs\['0'\] must be 'copy' or 'pinned' or 'donated', got 'static'"):
        graphed(double, x, inputs={"0": "static"})
    with pytest.raises(ValueError, match="graphed: inputs must be patterns over 0, got '1.weight'"):
        graphed(double, x, inputs={"1.weight": "pinned"})
    with pytest.raises(ValueError, match="graphed: warmup must be at least 0, got -1"):
        graphed(double, x, warmup=-1)
    with pytest.raises(ValueError, match="graphed: capture_error_mode must be 'global' or"):
        graphed(double, x, capture_error_mode="local")


def test_a_generator_draws_anew_and_ones_own_is_refused():
    captured = graphed(torch.rand_like, torch.ones(5))
    assert not torch.equal(captured(torch.ones(5)), captured(torch.ones(5)))
    with pytest.raises(CaptureError, match="a custom generator is not registered"):
        graphed(lambda x: x + torch.rand(3, generator=torch.Generator()), torch.ones(3))


def test_the_step_has_no_faults():
    params, state = init()
    assert check_capturable(step, params, state, batch(0), batch(1), torch.tensor(1e-2)) == []


def test_a_report_counts_kernels_where_there_is_a_count():
    report = graphed(double, torch.ones(3)).report()
    for kernels, said in ((None, False), (0, True), (7, True)):
        assert str(report._replace(kernels=kernels)).endswith(f", {kernels} kernels") is said
        assert ("kernels" in str(report._replace(kernels=kernels))) is said
