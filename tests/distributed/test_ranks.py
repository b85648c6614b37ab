"""`run_ranks` and `check_dist` notice planted faults of every kind."""

import contextlib
import dataclasses
import re
import sys
import threading

import pytest
import torch
from dist_cases import LAYERS, collectives, layer
from torch.utils._python_dispatch import TorchDispatchMode

from funcops import dist
from funcops.distributed import comm
from funcops.distributed.testing import check_dist, ranks, run_ranks


def total(axis, x):
    return comm.sum_over(x, axis)


def test_results_are_in_the_order_of_ranks_and_sums_too():
    big = [1e16, 1.0, -1e16, 1.0]

    def run(mesh):
        x = torch.tensor([big[mesh.rank]], dtype=torch.float64)
        return mesh.rank, total(mesh["tp"], x).item()

    assert run_ranks({"tp": 4}, run) == [(r, ((1e16 + 1.0) - 1e16) + 1.0) for r in range(4)]


def read_early(mesh, x):
    t = comm.start_sum(x, mesh["tp"])
    assert not t.isnan().any(), "read in flight"


def write(mesh, x):
    t = comm.start_sum(x, mesh["tp"])
    x.add_(1)
    comm.wait(t, mesh["tp"])


def forget(mesh, x):
    comm.start_sum(x, mesh["tp"])


def disagree(mesh, x):
    total(mesh["tp"], x[: 1 + mesh.rank])


def wait_in_a_ring(mesh, x):
    total(mesh["dp" if mesh.rank in (0, 3) else "tp"], x)


def leave(mesh, x):
    return total(mesh["tp"], x) if mesh.rank else None


def leak(mesh, x):
    total(dist.Mesh.abstract({"cp": 2}, 0)["cp"], x)


def fail(mesh, x):
    if mesh.rank == 1:
        raise KeyError("mine")
    total(mesh["tp"], x)


FAULTS = {
    read_early: (AssertionError, "read in flight"),
    write: (AssertionError, "all_reduce: x must be left unchanged until it is waited for, got one that was written to"),
    forget: (AssertionError, "collective 0 over axis 'tp' of 2: it must be finished"),
    disagree: (ValueError, "it must be the same on all ranks, got"),
    wait_in_a_ring: (RuntimeError, "run_ranks: every rank must be able to go on, got all running ones waiting: rank 0"),
    leave: (RuntimeError, "run_ranks: every rank must be able to go on, got all running ones waiting: rank"),
    leak: (ValueError, "all_reduce: group must be of an axis of the mesh (dp["),
    fail: (KeyError, "mine"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_mistakes_that_a_network_would_hide_raise(fault):
    error, said = FAULTS[fault]
    with pytest.raises(error, match=re.escape(said)):
        run_ranks({"dp": 2, "tp": 2}, lambda mesh: fault(mesh, torch.ones(2)))


CASES = {op.name: (op, case) for op, case in collectives(1, 1, 1, 0)}
CASES |= {name: (LAYERS[name][0], layer(name, (1,), 3, 2, True, True, "bulk")) for name in LAYERS}
CASES |= {f"{name} ring": (LAYERS[name][0], layer(name, (1,), 3, 2, True, True, "ring")) for name in LAYERS}
WRONG = {  # in what is sent, by what it is instead, and who must notice
    "a sum left out": ("scatter_sum", comm.own_slice, {"gather": "dx differs", "scatter_sum": "y differs"}),
    "a sum left to each": ("sum_over", lambda x, axis: x, dict.fromkeys(("copy_to", "sum_over"), "rank 1 has other bits")),
    "another's part": (
        "own_slice",
        lambda x, axis, dim=0: x.narrow(dim, 0, x.shape[dim] // axis.size),
        {"gather_same": "dx differs", "slice_of": "y differs", "row": "dgrad and wgrad: 0.bias differs"},
    ),
    "the other way": ("shift", lambda x, axis, by, own=comm.shift: own(x, axis, -by if axis.size > 2 else 0), {"shift": "differs"}),
    "a sum that nobody sends": (
        "start_scatter_sum",
        lambda x, axis, dim=0: x[: x.shape[0] // axis.size].clone(),
        {"column": "differs", "row": "y differs"},
    ),
    "a ring that does not turn": (
        "start_shift",
        lambda x, axis, by: x[None].clone(),
        dict.fromkeys(("column ring", "row ring"), r"the near one\.0 differs"),
    ),
    "not waited for": ("wait", lambda t, axis: t.clone(), {"column": "be finished", "row": "differs", "gather": "be finished"}),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_op_does_not_pass(what, monkeypatch):
    name, instead, noticed = WRONG[what]
    monkeypatch.setattr(comm, name, instead)
    for case, said in noticed.items():
        with pytest.raises(AssertionError, match=said):
            check_dist(*CASES[case], sizes=(2,))


def test_other_bits_and_other_objects_do_not_pass():
    column, case = CASES["column"]

    def rounded(params, x, cfg, **options):
        y, residuals = column.fwd(params, x, cfg, **options)
        return (y * (1 + 2**-52) if cfg.overlap == "none" else y), residuals

    def copied(params, x, cfg, **options):
        return column.fwd(params, x.clone(), cfg, **options)

    for fwd, said in ((rounded, "the twin: 0 differs"), (copied, "x kept as another tensor")):
        with pytest.raises(AssertionError, match=said):
            check_dist(column._replace(fwd=fwd), case, sizes=(2,))
    with pytest.raises(AssertionError, match=r"y differs by"):
        check_dist(column, dataclasses.replace(case, reference=lambda *given: case.reference(*given) + 1e-11), sizes=(4,))


class _Seen(TorchDispatchMode):
    """Notes the operators that it is called with."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def test_ranks_that_use_an_operator_first_at_once_get_one_object_of_it():
    """Torch keeps the object by a pointer that it does not own: if each thread made one, all but the last would be freed."""
    count, ranks, interval = 100, 6, sys.getswitchinterval()
    library, together = torch.library.Library("first_use_probe", "DEF"), threading.Barrier(ranks)
    for i in range(count):
        library.define(f"op{i}(Tensor x) -> Tensor")
        library.impl(f"op{i}", lambda x: x.clone(), "CompositeExplicitAutograd")

    def each(mesh):
        with _Seen() as seen:
            for i in range(count):
                together.wait(60)  # a rank that raised leaves the others behind
                getattr(torch.ops.first_use_probe, f"op{i}")(torch.ones(1))
        return seen.ops

    sys.setswitchinterval(1e-6)
    try:
        found = run_ranks({"dp": ranks}, each)
    finally:
        sys.setswitchinterval(interval)
    known = [getattr(torch.ops.first_use_probe, f"op{i}").default for i in range(count)]
    for ops in found:
        assert all(a is b for a, b in zip([op for op in ops if op.namespace == "first_use_probe"], known, strict=True))
    assert torch._ops.OpOverloadPacket.__getattr__.__name__ == "__getattr__", "torch's own again"
    assert sys.getswitchinterval() == interval


@pytest.mark.parametrize("asserts", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_ranks_leave_the_interval_of_threads(asserts, fails, monkeypatch):
    """No rank is interrupted by another under a torch that asserts one maker of operators, and afterwards threads are again."""
    monkeypatch.setattr(ranks, "_ASSERTS", asserts)
    found, before, interval = [], sys.getswitchinterval(), 0.002

    def each(mesh):
        found.append(sys.getswitchinterval())
        if fails:
            raise KeyError("mine")

    sys.setswitchinterval(interval)
    try:
        with pytest.raises(KeyError) if fails else contextlib.nullcontext():
            run_ranks({"dp": 2}, each)
        assert sys.getswitchinterval() == interval
    finally:
        sys.setswitchinterval(before)
    assert found == [1e3 if asserts else interval] * 2
