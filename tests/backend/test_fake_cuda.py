"""Forward and backward on fake CUDA tensors: without a GPU they show which implementation is chosen, and that no tensor is made on
another device."""

import pytest
import torch
from law_cases import CASES
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from funcops.engine.trees import leaves, tensors, tree_map_tensors
from funcops.library.ops.linear_wgrads import Product
from funcops.optim import AdamWConfig, AdamWState, adamw_update
from funcops.optim import adamw as optimiser
from funcops.testing.laws import float_like

ROWS = [(case, dtype) for case, dtype in CASES if dtype in (torch.float64, torch.float32, torch.bfloat16)]


@pytest.fixture
def indexing(monkeypatch):
    """x[...], copy_ and contiguous of fake tensors, through aten's operators: a torch without CUDA has no device guard for Python's
    own calls."""
    if torch.cuda.is_available():
        return
    get, put = Tensor.__getitem__, Tensor.__setitem__

    def setitem(x, where, value):
        if isinstance(x, FakeTensor):
            part = indexed(x, where)
            part.copy_(value) if isinstance(value, Tensor) else torch.ops.aten.fill_(part, value)
        else:
            put(x, where, value)

    monkeypatch.setattr(Tensor, "__getitem__", lambda x, where: indexed(x, where) if isinstance(x, FakeTensor) else get(x, where))
    monkeypatch.setattr(Tensor, "__setitem__", setitem)
    monkeypatch.setattr(Tensor, "contiguous", lambda x: torch.ops.aten.contiguous(x))
    monkeypatch.setattr(Tensor, "copy_", lambda x, source, non_blocking=False: torch.ops.aten.copy_(x, source, non_blocking))


def indexed(x, where):
    """Indexing by integers, slices, None, one ellipsis and consecutive index tensors; the result is a view if x[where] is one."""
    where = list(where) if isinstance(where, tuple) else [where]
    if any(one is ... for one in where):
        at = next(i for i, one in enumerate(where) if one is ...)
        where[at : at + 1] = [slice(None)] * (x.dim() - sum(one is not None for one in where) + 1)
    at, indices = 0, []
    for one in where:
        if isinstance(one, Tensor) and one.dim():
            indices += [None] * (at - len(indices)) + [one]
        elif isinstance(one, (int, Tensor)):
            x = torch.ops.aten.select.int(x, at, int(one))
            continue
        elif one is None:
            x = torch.ops.aten.unsqueeze.default(x, at)
        else:
            x = torch.ops.aten.slice.Tensor(x, at, one.start, one.stop, one.step or 1)
        at += 1
    return torch.ops.aten.index.Tensor(x, indices) if indices else x


class NoWaiting(TorchDispatchMode):
    """Raises at anything that would make the host wait for the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source, blocking = (
                (args[0], not (kwargs or {}).get("non_blocking")) if len(args) < 2 else (args[1], args[2:] != (True,))
            )
            assert source.device == result.device or not blocking, f"{func} from {source.device} to {result.device} waits"
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value is read"
        return result


@pytest.mark.parametrize("rows", [(8, 8), (8, 24, 16)], ids=str)
@pytest.mark.parametrize("how", [None, "concatenate", "batch", "group"])
def test_joined_weight_gradients_do_not_wait(how, rows, indexing, monkeypatch):
    monkeypatch.setattr(Product, "accumulator", property(lambda p: id(p.dw)))  # a fake tensor has no address
    with FakeTensorMode(), NoWaiting():
        made = []
        for n in rows:
            dy, x = (torch.empty(n, size, dtype=torch.bfloat16, device="cuda") for size in (16, 32))
            made.append(Product.of(dy, x, torch.empty(16, 32, device="cuda"), torch.empty(16, device="cuda")))
        Product.join(made, how)
    assert all(p.dw.is_cuda for p in made)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [pytest.param(case, dtype, marks=() if i % 32 == i // 32 % 32 else pytest.mark.slow) for i, (case, dtype) in enumerate(ROWS)],
    ids=str,
)
def test_results_stay_on_the_device(case, dtype, indexing):
    params, x = case.make(dtype)
    y, residuals = case.op.fwd(params, x, case.cfg)
    dy = float_like(y, 7)
    want = y, case.op.bwd(residuals, dy, case.cfg)
    with FakeTensorMode(allow_non_fake_inputs=True), NoWaiting():
        params, x, dy = tree_map_tensors(
            lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda"), (params, x, dy)
        )
        y, residuals = case.op.fwd(params, x, case.cfg)
        got = y, case.op.bwd(residuals, dy, case.cfg)
    for g, w in zip(leaves(got), leaves(want), strict=True):
        assert (g is None) == (w is None)
        assert g is None or (g.shape, g.dtype, g.device.type) == (w.shape, w.dtype, "cuda")
    assert all(t.is_cuda for t in tensors(residuals))


@pytest.mark.parametrize("factor", [0.5, None])
def test_a_factor_of_gradients_that_is_a_number_does_not_wait(factor, indexing, monkeypatch):
    seen = []
    monkeypatch.setattr(optimiser, "_written_", lambda *args: seen.append(args))
    with FakeTensorMode(), NoWaiting():
        params = {"w": torch.empty(3, device="cuda")}
        state = AdamWState(torch.empty(1, device="cuda"), *[{"w": torch.empty(3, device="cuda")} for _ in range(2)])
        adamw_update(params, {"w": torch.empty(3, device="cuda")}, state, AdamWConfig(), factor=factor, in_place=True)
    assert [t is None or t.is_cuda for t in tensors(seen)] and len(seen) == 1
