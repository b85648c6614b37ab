"""check_capturable finds every planted fault on its line, and finds none in functions that can be captured."""

import ast
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import planted
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from funcops import GradModeError, graphs
from funcops.adapters.graphs import check_capturable, graphed
from funcops.adapters.graphs.without_gpu.faults import as_if_capturing, fault_of, is_users
from funcops.engine.errors import CaptureError

SOURCE = Path(planted.__file__).read_text().splitlines()
PLANTED = {node.name: node for node in ast.parse("\n".join(SOURCE)).body if isinstance(node, ast.FunctionDef)}


def wanted(node):
    found = {
        i: SOURCE[i - 1].rpartition("# fault: ")[2] for i in range(node.lineno, node.end_lineno + 1) if "# fault: " in SOURCE[i - 1]
    }
    assert len(found) == 1
    return next(iter(found.items()))


def inputs():
    return torch.arange(12.0).reshape(4, 3) - 5, torch.tensor([1, 0, 2, 1])


def test_there_are_enough():
    assert len(PLANTED) >= 20


@pytest.mark.turns("name", every=2)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name):
    line, kind = wanted(PLANTED[name])
    faults = check_capturable(getattr(planted, name), *inputs())
    assert (Path(planted.__file__).name, line, kind) in {(Path(f.where.file).name, f.where.line, f.kind) for f in faults}, faults
    assert str(faults[0]).startswith(planted.__file__) and f": {faults[0].kind}: " in str(faults[0])


def fine(x, ids):
    y = torch.where(x > 0, x, -x)[ids]
    y[0] = 1.0
    y[:, 1:] *= torch.full((), 2.0)
    rows = torch.zeros(4, 3).index_add(0, ids, y)
    return {"y": y.softmax(-1), "rows": rows, "top": torch.topk(x, 2).values, "n": None}


def test_nothing_is_found_where_nothing_is():
    assert check_capturable(fine, *inputs()) == []
    x, ids = inputs()
    before = x.clone()
    assert check_capturable(lambda x, ids: x.mul_(2), x, ids) == [] and torch.equal(x, before), "inputs are copied"


def is_captured():
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:  # torch was built without CUDA
        return False


def test_optimisers_of_torch_and_code_that_asks_whether_it_is_captured_have_no_fault():
    """A profiler's range, as torch.optim's steps have, runs nothing; a model that checks values outside of a capture alone."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimiser = torch.optim.SGD([weight], lr=0.1)

    def step(x, ids):
        if not is_captured() and bool((x > 100).all()):
            return -x
        with torch.enable_grad():
            loss = (x * weight).sum()
        (weight.grad,) = torch.autograd.grad(loss, [weight])
        optimiser.step()
        weight.grad = None
        return loss.detach()

    assert check_capturable(step, *inputs()) == []
    assert torch.equal(weight, torch.ones(3)), "the caller's weight does not change"
    assert not is_captured()
    assert graphed(step, *inputs())(*inputs()).shape == ()


@pytest.mark.parametrize(
    "write",
    [lambda t: t.add_(1), lambda t: t.view(-1)[1:].zero_(), lambda t: t.copy_(torch.ones(3)), lambda t: torch.add(t, 1, out=t)],
)
def test_writes_outside_are_undone(write):
    outside, x = torch.arange(3.0), torch.ones(3)

    def step(x):
        write(x)
        write(outside)
        return x + outside

    assert check_capturable(step, x) == []
    assert torch.equal(outside, torch.arange(3.0)) and torch.equal(x, torch.ones(3))


def test_with_cuda_torch_itself_says_whether_it_captures(monkeypatch):
    """A recording of CPU tensors beside a GPU does not capture a stream."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with as_if_capturing():
        assert not is_captured()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with as_if_capturing():
        assert is_captured()
    assert not is_captured()


def test_threads_that_record_at_once_answer_each_for_itself():
    """The one that began first ends first, as ranks of `run_ranks` do."""
    original, turn = torch.cuda.is_current_stream_capturing, threading.Barrier(2, timeout=60)

    def first():
        with as_if_capturing():
            turn.wait(), turn.wait()
        ended = is_captured()
        turn.wait()
        return ended

    def second():
        turn.wait()
        before = is_captured()
        with as_if_capturing():
            turn.wait(), turn.wait()
            return before, is_captured()

    with ThreadPoolExecutor(2) as threads:
        one, other = threads.submit(first), threads.submit(second)
        assert not one.result() and other.result() == (False, True)
    assert torch.cuda.is_current_stream_capturing is original


def test_a_backward_without_autograd_says_how():
    layer = torch.nn.Linear(3, 3)

    def step(x, ids):
        layer(x).sum().backward()
        return x

    remedy = r"a capture runs without autograd: write the step under torch.enable_grad\(\), or .* make_graphed_callables"
    (fault,) = check_capturable(step, *inputs())
    assert re.search(remedy, str(fault)) and fault.kind == "grad mode"
    with pytest.raises(GradModeError, match=f"graphed: .*{remedy}"):
        graphed(step, *inputs())


def test_an_error_for_other_values_is_a_fault():
    def table(x, ids):
        return x * {6.0: 1.0}[float(x.max())]

    kinds = [fault.kind for fault in check_capturable(table, *inputs())]
    assert kinds == ["host sync", "baked value"]
    assert "raises for other values: KeyError" in check_capturable(table, *inputs())[1].message


def test_a_result_of_another_structure_is_a_fault():
    def toggled(x, ids):
        planted.COUNT[0] += 1
        return {"a": x + 1} if planted.COUNT[0] % 2 else [x + 1, x]

    (fault,) = check_capturable(toggled, *inputs())
    assert fault.kind == "baked value" and "other leaves" in fault.message


def test_a_returned_number_is_a_fault():
    (fault,) = check_capturable(
        lambda x, ids: (x + 1, planted.COUNT.__setitem__(0, planted.COUNT[0] + 1) or planted.COUNT[0]), *inputs()
    )
    assert fault.kind == "baked value" and "in every replay" in fault.message


@pytest.mark.parametrize("odd", [0, 1])
def test_a_run_that_does_more_is_a_fault(odd):
    """Even if the results are the same, such as for work that is done every other step."""

    def longer(x, ids):
        planted.COUNT[0] += 1
        y = x + 1
        if planted.COUNT[0] % 2 == odd:
            x.sum()
        return y

    faults = check_capturable(longer, *inputs())
    assert any(fault.kind == "baked value" and "only one of two runs does" in fault.message for fault in faults), faults


LINALG = {  # whether a capture refuses it, as it waits for the device to know of errors: found on an H200
    True: "inv cholesky eigh eigvalsh svd svdvals eig eigvals lu_factor ldl_factor pinv matrix_rank matrix_exp cond solve lstsq",
    False: "inv_ex cholesky_ex lu_factor_ex solve_ex det slogdet lu matrix_norm vector_norm",
}
LINALG = {name: refused for refused, names in LINALG.items() for name in names.split()}


def linalg(name, a):
    return getattr(torch.linalg, name)(*(a, a)[: 2 if name.startswith(("solve", "lstsq")) else 1])


@pytest.mark.parametrize("name", LINALG)
def test_linear_algebra_that_checks_its_errors_is_found(name):
    faults = check_capturable(lambda a: linalg(name, a), torch.eye(3) + 0.1)
    assert bool(faults) == LINALG[name], faults
    if hasattr(torch.linalg, f"{name}_ex"):
        (fault,) = faults
        assert f"torch.linalg.{name} waits" in fault.message and f"use torch.linalg.{name}_ex" in fault.message


@pytest.mark.parametrize("name", [name for name in LINALG if name.endswith("_ex")])
def test_linear_algebra_that_is_asked_to_check_its_errors_is_found(name):
    def checked(a):
        return getattr(torch.linalg, name)(*(a, a)[: 1 + name.startswith("solve")], check_errors=True)

    (fault,) = check_capturable(checked, torch.eye(3) + 0.1)
    assert fault.kind == "host sync" and f"torch.linalg.{name} waits" in fault.message


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["inv", "svd", "matrix_exp", "inv_ex"])
def test_a_device_refuses_linear_algebra_that_is_found(name):
    """In a process of its own, because cuSOLVER's handles do not outlive a broken capture."""
    lines = f"""
import torch
from funcops.graphs import graphed
a = torch.eye(3, device="cuda") + 0.1
fn = lambda a: getattr(torch.linalg, {name!r})(*(a, a)[: 2 if {name!r}.startswith(("solve", "lstsq")) else 1])
fn(a)
try:
    graphed(fn, a)
except RuntimeError:
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, timeout=120)
    assert ("refused" in done.stdout) == LINALG[name], done


KEEPS = {
    "itself": lambda loss: loss,
    "detached": lambda loss: loss.detach(),
    "a view": lambda loss: loss[None],
    "in a tree": lambda loss: {"a": (loss, 1)},
}


@pytest.mark.parametrize("result", KEEPS)
@pytest.mark.parametrize("kept", KEEPS)
def test_results_that_pile_up_outside_are_found(kept, result):
    """A replay appends nothing, and what warm-up and capture appended is stale."""
    history = []

    def step(x, ids):
        loss = x.square().sum()
        history.append(KEEPS[kept](loss))
        return KEEPS[result](loss)

    (fault,) = check_capturable(step, *inputs())
    assert fault.kind == "escaping allocation" and "a result is also kept outside" in fault.message
    assert fault.where.line == step.__code__.co_firstlineno + 1


@pytest.mark.parametrize("keep", KEEPS)
def test_a_result_that_replaces_the_last_is_fine(keep):
    """The kept tensor is the graph's own buffer, which every replay writes: torch's way to give gradients to an optimiser."""
    last, weight = {}, torch.nn.Parameter(torch.ones(3))

    def step(x, ids):
        with torch.enable_grad():
            loss = (x * weight).sum()
        last["loss"] = KEEPS[keep](loss.detach())
        (weight.grad,) = torch.autograd.grad(loss, [weight])
        return last["loss"], weight.grad

    assert check_capturable(step, *inputs()) == []


def test_a_result_in_a_cycle_is_fine():
    def step(x, ids):
        node = {"y": x * 2}
        node["self"] = node
        return node["y"]

    assert check_capturable(step, *inputs()) == []


@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "Adamax"])
def test_an_optimiser_of_torch_that_waits_names_its_option(name):
    weight = torch.nn.Parameter(torch.ones(3))
    optimiser = getattr(torch.optim, name)([weight])

    def step(x):
        with torch.enable_grad():
            (x * weight).sum().backward()
        optimiser.step()
        optimiser.zero_grad()
        return x * 2

    said = r"in torch\.optim: make the optimiser with capturable=True, if it has that, or use funcops\.optim"
    x = torch.ones(3)
    for _ in range(2):  # the state is made in the first step
        (fault,) = [fault for fault in check_capturable(step, x) if fault.kind == "host sync"]
        assert re.search(said, fault.message) and fault.where.line == step.__code__.co_firstlineno + 3
        step(x)
    with pytest.raises(CaptureError, match=said):
        graphed(step, x)
    fault = check_capturable(lambda x: x * x.sum().item(), x)[0]
    assert "keep it a tensor" in fault.message and "optim" not in fault.message


NAMES = {
    "torch.unique makes": lambda x, ids: torch.unique(ids),
    "torch.nonzero makes": lambda x, ids: x.nonzero(),
    "torch.masked_select makes": lambda x, ids: x.masked_select(x > 0),
    "torch.rand_like draws": lambda x, ids: torch.rand_like(x),
    "Tensor.uniform_ draws": lambda x, ids: x.uniform_(),
    "constant of indexing": lambda x, ids: x[counted() % 3],
    "constant of torch.add": lambda x, ids: x + counted(),
    "constant of torch.softmax": lambda x, ids: x.softmax(counted() % 2),
    "does torch.": lambda x, ids: x.exp() if counted() % 2 else x.sin(),
    "does aten.add.Tensor instead of aten.add.Scalar": lambda x, ids: (
        torch.ops.aten.add.Tensor(x, x) if not counted() % 2 else torch.ops.aten.add.Scalar(x, 1.0)
    ),
}


def counted():
    planted.COUNT[0] += 1
    return planted.COUNT[0]


@pytest.mark.parametrize("said", NAMES)
def test_operators_have_the_names_that_users_write(said):
    planted.COUNT[0] = 0
    (fault,) = check_capturable(NAMES[said], *inputs())
    assert said in fault.message, fault


aten = torch.ops.aten
BESIDE = {  # whether a capture refuses it: found on an H200
    "index": (lambda x: aten.index.Tensor(x, [torch.arange(2)]), True),
    "assignment by an index": (lambda x: aten.index_put_.default(x, [torch.arange(2)], torch.ones((), device=x.device)), True),
    "assignment of a value": (lambda x: aten.index_put_.default(x, [torch.arange(2, device=x.device)], torch.ones(())), True),
    "where": (lambda x: torch.where(x > 0, x, torch.zeros(())), True),
    "scale": (lambda x: x * torch.full((), 2.0), False),
    "copy": (lambda x: torch.arange(4).to(x), True),
    "there": (lambda x: aten.index.Tensor(x, [torch.arange(2, device=x.device)]), False),
    "on the host": (lambda x: torch.zeros(3)[torch.arange(2)], False),
}


class Asked(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found = getattr(self, "found", None) or fault_of(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", BESIDE)
def test_a_tensor_of_the_host_beside_the_devices_is_found(kind):
    fn, refused = BESIDE[kind]
    with FakeTensorMode(allow_non_fake_inputs=True), Asked() as asked:
        fn(torch.empty(4, 4, device="cuda"))
    assert (asked.found is not None) == refused
    assert not refused or asked.found[0] == "host copy"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [kind for kind in BESIDE if kind != "on the host"])
def test_a_device_refuses_tensors_of_the_host(kind):
    fn, refused = BESIDE[kind]
    x = torch.ones(4, 4, device="cuda")
    assert bool([fault for fault in check_capturable(fn, x) if fault.kind == "host copy"]) == refused
    if refused:
        with pytest.raises(CaptureError):
            graphed(fn, x)
    else:
        graphed(fn, x)


def test_tensors_of_two_devices_say_what_to_do():
    def raising(x, ids):
        raise RuntimeError("Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!")

    (fault,) = check_capturable(raising, *inputs())
    assert fault.kind == "host copy" and fault.message.endswith("make it there: device=x.device")


SAID = {
    "host copy": ["CUDA error: no device", "no kernel for device cuda:0", "Torch not compiled with CUDA enabled", "a cuda tensor"],
    "dynamic shape": ["the shape of x is 3", "shapes differ", "got shape [2]"],
    "baked value": ["no", "", "Cudnn is absent", "ship it"],
}


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in SAID.items() for text in texts])
def test_an_error_is_sorted_by_the_kind_of_fault(kind, text):
    """Torch's messages write the device (cuda) in small letters and its library (CUDA) in capitals."""

    def raising(x, ids):
        raise RuntimeError(text)

    (fault,) = check_capturable(raising, *inputs())
    assert fault.kind == kind and text in fault.message and fault.where.file == __file__


def test_a_sync_that_only_the_recording_meets_is_a_fault():
    """The first two calls take no value of a tensor, the third does."""

    def third(x, ids):
        planted.COUNT[0] += 1
        return x * (x.max().item() if planted.COUNT[0] == 3 else 2.0)

    planted.COUNT[0] = 0
    (fault,) = check_capturable(third, *inputs())
    assert fault.kind == "baked value" and "item" in fault.message


class Box:
    def __init__(self, t):
        self.t = t


def test_a_tensor_in_an_object_that_is_no_tree_is_found():
    """A replay would write to it, and nobody could copy it."""
    faults = check_capturable(lambda x, ids: Box(x + 1), *inputs())
    assert [fault.kind for fault in faults] == ["escaping allocation"], faults


@pytest.mark.parametrize(
    ("file", "users"), [("{lib}/site-packages/mine/step.py", True), ("{lib}/contextlib.py", False), ("train.py", True)]
)
def test_a_fault_is_at_a_line_of_a_user_also_of_an_installed_package(file, users):
    assert is_users(file.format(lib=Path(ast.__file__).parent)) is users
    assert not is_users(torch.__file__) and not is_users(str(Path(graphs.__file__)))
