"""check_capturable finds every planted fault on its line, and finds none in functions that can be captured."""

import ast
import re
from pathlib import Path

import planted
import pytest
import torch

from funcops import GradModeError
from funcops.adapters.graphs import check_capturable, graphed
from funcops.adapters.graphs.faults import as_if_capturing

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


def test_a_backward_without_autograd_says_how():
    layer = torch.nn.Linear(3, 3)

    def step(x, ids):
        layer(x).sum().backward()
        return x

    remedy = r"a capture runs without autograd: write the step under torch.enable_grad\(\), or .* make_graphed_callables"
    assert re.search(remedy, str(check_capturable(step, *inputs())[0]))
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
