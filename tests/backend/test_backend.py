"""The kernel registry: which implementation runs, and how a tracer sees a Triton kernel."""

import asyncio
import contextlib
import contextvars
import importlib.util
import itertools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny_kernel_calls import tiny
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from funcops import ActivationConfig, activation, random
from funcops.adapters.autograd import differentiable
from funcops.engine.backend import backend, declare, gemm, kernel, select
from funcops.engine.backend.declare import Kernel
from funcops.library.kernels import linear, sibling_linear
from funcops.library.kernels.activation import activation_bwd
from funcops.library.kernels.bias_activation import bias_activation_bwd
from funcops.library.kernels.norm import rms_norm_bwd, row_sums


@kernel()
def registry_probe(x: Tensor, factor: float) -> Tensor:
    """factor * x."""
    return x * factor


@registry_probe.triton
def launch(x, factor):
    return torch.add(x * factor, 0.0)


@kernel()
def torch_only(x: Tensor) -> Tensor:
    """2 x."""
    return x + x


@kernel(opaque=True)
def host_probe(x: Tensor) -> Tensor:
    """x times its first number, which is read on the host."""
    return x * x[0].item()


@host_probe.fake
def _host_probe_fake(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_eager_calls_go_straight_to_the_chosen_implementation():
    x = torch.ones(2)
    calls = []
    registry_probe.kernel.triton_impl = lambda x, factor: calls.append(factor) or launch(x, factor)
    try:
        registry_probe(x, 2.0)
        assert calls == []
        with backend("triton"):
            assert torch.equal(registry_probe(x, 3.0), 3 * x)
        assert calls == [3.0]
    finally:
        registry_probe.kernel.triton_impl = launch


def test_a_tracer_sees_the_operator_of_triton_and_the_body_of_torch():
    x = torch.ones(2)

    def targets(graph):
        return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]

    assert targets(make_fx(lambda x: registry_probe(x, 2.0))(x)) == ["aten.mul.Tensor"]
    assert targets(make_fx(host_probe, tracing_mode="fake")(x)) == ["funcops.host_probe_by_torch.default"], "it reads a number"
    assert torch.equal(host_probe(3 * x), 9 * x)
    with backend("triton"):
        assert targets(make_fx(lambda x: registry_probe(x, 2.0))(x)) == ["funcops.registry_probe.default"]
        compiled = torch.compile(lambda x: registry_probe(x, 2.0), fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), 2 * x)


def test_a_missing_implementation_is_named():
    with backend("triton"), pytest.raises(ValueError, match="torch_only: backend must be 'torch'"):
        torch_only(torch.ones(2))
    with pytest.raises(ValueError, match="backend: name must be 'torch' or 'triton', got 'cuda'"), backend("cuda"):
        pass


@pytest.mark.parametrize("variable", ["FUNCOPS_BACKEND", "FUNCOPS_GEMM"])
def test_an_environment_variable_is_checked(monkeypatch, variable):
    """The check comes when the package is imported, which reads the variable."""
    among = {"FUNCOPS_BACKEND": select.BACKENDS, "FUNCOPS_GEMM": select.PROVIDERS}[variable]
    monkeypatch.setenv(variable, "fast")
    spec = importlib.util.spec_from_file_location("select_again", select.__file__)
    with pytest.raises(ValueError, match=f"{variable}: name must be {' or '.join(map(repr, among))}, got 'fast'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def in_thread(run):
    """Run `run` in a new thread; return its result or raise its error."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


@pytest.mark.parametrize("choose", [backend, gemm], ids=["backend", "gemm"])
def test_a_choice_holds_in_its_own_context_alone(choose):
    """Blocks of two threads begin and end in every order."""
    name, before = "triton", select.choice()
    for order in ("abAB", "abBA", "aAbB"):
        blocks = {who: (choose(name), contextvars.copy_context()) for who in "ab"}
        for step in order:
            block, context = blocks[step.lower()]
            context.run(block.__enter__ if step.islower() else lambda block=block: block.__exit__(None, None, None))
            inside = {who: context.run(select.choice) != before for who, (_, context) in blocks.items()}
            begun = order[: order.index(step) + 1]
            assert inside == {who: who in begun and who.upper() not in begun for who in "ab"}, (order, step)
            assert select.choice() == before == in_thread(select.choice)
    assert not select.chosen_anywhere


def test_many_threads_leave_nothing_behind():
    def work(name):
        for _ in range(200):
            with backend(name):
                assert select.choice()[0] == name
        return select.choice()[0]

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(work, ["triton", "torch"] * 4)) == {None}
    assert not select.chosen_anywhere and select.choice() == select.DEFAULT


def test_tasks_choose_for_themselves():
    async def work(name, turns):
        with backend(name):
            for _ in range(turns):
                await asyncio.sleep(0)
                assert select.choice()[0] == name

    async def both():
        await asyncio.gather(work("triton", 3), work("torch", 5))
        return select.choice()[0]

    assert asyncio.run(both()) is None


def test_a_compiled_function_follows_the_choice_of_each_call(monkeypatch):
    """One function is compiled once for each choice, then called under changing choices, and in a thread without one."""
    monkeypatch.setattr(registry_probe.kernel, "triton_impl", lambda x, factor: x * -factor)
    monkeypatch.setattr(registry_probe.kernel, "operator", lambda: lambda x, factor: x * -factor)
    compiled, x = torch.compile(lambda x: registry_probe(x, 2.0), fullgraph=True, backend="eager"), torch.ones(2)
    for _ in range(2):
        assert torch.equal(compiled(x), 2 * x)
        with backend("triton"):
            assert torch.equal(compiled(x), -2 * x)
            assert torch.equal(in_thread(lambda: compiled(x)), 2 * x)
            with backend("torch"):
                assert torch.equal(compiled(x), 2 * x)


def test_a_backward_on_another_thread_runs_on_the_backend_of_its_forward(monkeypatch):
    """Autograd runs the backwards of a device on a thread that inherits no context."""
    seen = []
    cfg = ActivationConfig(kind="silu")
    kernel = activation_bwd.kernel
    monkeypatch.setattr(kernel, "torch_impl", kernel.torch_impl)
    kernel.find_triton()
    triton_impl = kernel.triton_impl
    monkeypatch.setattr(kernel, "triton_impl", lambda *args: seen.append(select.choice()[0]) or triton_impl(*args))
    x = torch.randn(3, requires_grad=True)
    with backend("triton"):
        y = differentiable(activation)(None, x, cfg)
    in_thread(lambda: torch.autograd.grad(y.sum(), x, retain_graph=True))
    assert seen == ["triton"] and select.choice() == select.DEFAULT
    plain = differentiable(activation)(None, x, cfg)
    torch.autograd.grad(plain.sum(), x)
    assert seen == ["triton"], "no choice, no Triton"
    with backend("triton"):
        plain = torch.autograd.grad(differentiable(activation)(None, x, cfg).sum(), x)
    assert seen == ["triton"] * 2


@kernel(product=True)
def product_probe(x: Tensor) -> Tensor:
    """3 x, a bare product for the registry."""
    return 3 * x


@product_probe.triton
def launch_product(x):
    return torch.add(x * 3, 0.0)


def test_who_is_chosen_for_a_dtype_and_a_provider_of_products():
    """float64 is the reference for kernels, so it never runs on them; `gemm` affects only bare products."""
    wide, narrow = torch.ones(2, dtype=torch.float64), torch.ones(2)
    probe, product = registry_probe.kernel, product_probe.kernel
    assert probe.choose(narrow) is probe.torch_impl and product.choose(narrow) is product.torch_impl
    with backend("triton"):
        assert probe.choose(narrow) is probe.triton_impl and product.choose(narrow) is product.triton_impl
        assert probe.choose(wide) is probe.torch_impl and product.choose(wide) is product.torch_impl
        with gemm("cublas"):
            assert probe.choose(narrow) is probe.triton_impl and product.choose(narrow) is product.torch_impl
        with gemm("triton"):
            assert product.choose(narrow) is product.triton_impl


X, DY, W = torch.ones(3, 2), torch.ones(3, 4), torch.ones(4, 2)
PRODUCTS = {
    linear.linear_fwd: (X, W, None),
    linear.linear_dgrad: (DY, W),
    linear.linear_wgrad: (DY, X, False),
    linear.linear_bwd: (DY, X, W, False),
    sibling_linear.sibling_linear_fwd: (X, W, W, None, None, None, None),
    sibling_linear.sibling_linear_dgrad: (DY, DY, None, W, W, None),
    sibling_linear.joined_linear_dgrad: (torch.ones(3, 12), W, W, W),
}


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: product.kernel.name)
def test_bare_products_are_left_to_cublas(product):
    """`gemm("cublas")` takes torch's own product, and so does a traced graph, which a compiler reads."""
    pytest.importorskip("triton")
    declared, args = product.kernel, PRODUCTS[product]

    def traced():
        return f"funcops.{declared.name}" in str(make_fx(lambda *args: product(*args))(*args).graph)

    with backend("triton"):
        assert declared.choose(X) is declared.triton_impl and traced()
        with gemm("cublas"):
            assert declared.choose(X) is declared.torch_impl and not traced()
        with gemm("auto"):
            assert declared.choose(X) is declared.triton_impl and not traced()


def test_every_triton_kernel_is_an_operator_too():
    """A dispatch mode calls kernels through the library, so torch must accept each schema."""
    pytest.importorskip("triton")
    for call in {call.name: call for call in tiny(torch.float32)}.values():
        assert call.kernel.kernel.find_triton() and call.kernel.kernel.operator()


@pytest.mark.parametrize("shape", [(48, 64), (3, 5, 1030)], ids=str)
def test_a_tracer_keeps_the_number_of_rows_symbolic(shape):
    """Results whose shape a Triton file computes from sizes, some of which it remembers."""
    pytest.importorskip("triton")
    x = torch.ones(shape)
    rstd, b = torch.ones(*shape[:-1], 1), torch.ones(shape[-1])
    calls = (
        lambda x, rstd, b: row_sums(x),
        lambda x, rstd, b: rms_norm_bwd(x, x, b, rstd, False, True, True)[1],
        lambda x, rstd, b: bias_activation_bwd(x, x, b, "gelu", True)[1],
    )
    with backend("triton"):
        for call in calls:
            nodes = [*make_fx(call, tracing_mode="symbolic")(x, rstd, b).graph.nodes]
            rows, made = nodes[0].meta["val"].shape[:-1], nodes[-1].all_input_nodes[0].meta["val"]
            assert not any(str(size).isdigit() for size in rows)
            assert made.shape == call(x, rstd, b).shape


def test_tensors_on_the_cpu_are_left_to_torch_beside_a_gpu(monkeypatch):
    """Keys, and params that are moved later, are on the CPU, where compiled Triton kernels cannot read them."""
    key = random.key(3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with backend("triton"):
        for interpreted in ("0", "1"):
            monkeypatch.setenv("TRITON_INTERPRET", interpreted)
            random._fold_in.kernel.find_triton()
            want = random._fold_in.kernel.torch_impl if interpreted == "0" else random._fold_in.kernel.triton_impl
            assert random._fold_in.kernel.choose(key) is want
            # what is on the meta device stands for a device's, as `bench aot` has it
            assert random._fold_in.kernel.choose(key.to("meta")) is random._fold_in.kernel.triton_impl


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_triton_without_a_gpu_names_its_interpreter():
    from funcops.engine.backend import launch

    with pytest.raises(RuntimeError, match="name must be 'torch' without a GPU, got 'triton'.*TRITON_INTERPRET=1"):
        launch._first_device()


def test_threads_that_ask_at_once_define_an_operator_once():
    def doubled_at_once(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    declared, found, interval = Kernel(doubled_at_once, (), False, False, True), [], sys.getswitchinterval()
    together = threading.Barrier(8)

    def ask():
        together.wait()
        found.append(declared.torch_operator())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(found) == 8 and len(set(map(id, found))) == 1


class Marked(TorchDispatchMode):
    """A mode that says of itself what it does with operators."""

    def __init__(self, **marks):
        super().__init__()
        vars(self).update(marks)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


MARKS = [{}, *({name: said} for name in ("runs", "records", "reads") for said in (True, False))]


@pytest.mark.parametrize("inner", MARKS, ids=str)
def test_a_mode_is_taken_for_what_it_says_of_itself(inner):
    """A mode that says nothing traces, records nothing and has no values; one of two modes is enough for each of these."""
    t = torch.ones(2)
    assert (declare.tracing(), declare.watched(), declare.capturing(), declare.readable(t)) == (False, False, False, True)
    for outer in (None, {}, {"runs": True, "records": True, "reads": True}):
        modes = [inner] if outer is None else [outer, inner]
        runs, records, reads = ([m.get(name, False) for m in modes] for name in ("runs", "records", "reads"))
        with contextlib.ExitStack() as stack:
            for marks in modes:
                stack.enter_context(Marked(**marks))
            assert declare.tracing() == (not all(runs)) and declare.watched()
            assert declare.capturing() == any(records) and declare.readable(t) == all(reads)


def test_a_launch_runs_on_the_device_of_its_tensors(monkeypatch):
    """torch.cuda.device stands in for a device; what the launch returns is returned."""
    entered = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext(entered.append(device)))
    device = torch.device("cuda", 3)
    assert declare._on_device(device, lambda *args: (args, list(entered)), 1, "a") == ((1, "a"), [device])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_in_one_memory_are_one_weight(dtype):
    """A view where each begins at the end of the one before, whatever the memory holds before the first; else None."""
    for before, counts in itertools.product((0, 3), [(2, 3), (1, 1), (2, 1, 4)]):
        memory = torch.randn(before + sum(counts) + 1, 4).to(dtype)
        parts = list(memory[before : before + sum(counts)].split(counts))
        found = sibling_linear.stacked(*parts)
        assert found is not None and torch.equal(found, torch.cat(parts)) and found.data_ptr() == parts[0].data_ptr()
        flat = sibling_linear.stacked(*[part.reshape(-1) for part in parts])  # biases
        assert flat is not None and flat.data_ptr() == parts[0].data_ptr()
        apart = [parts[0], *(part.clone() for part in parts[1:])]
        gap = [parts[0], memory[before + counts[0] + 1 :][: counts[1]], *parts[2:]]
        asking = [part.detach().requires_grad_() for part in parts]
        for wrong in (parts[::-1], apart, gap, asking, [parts[0], *(part[:, :2] for part in parts[1:])]):
            assert sibling_linear.stacked(*wrong) is None
        with torch.no_grad():
            assert sibling_linear.stacked(*asking) is not None
