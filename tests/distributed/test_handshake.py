"""Programs as data: a step's messages are known before it runs, and if ranks disagree all raise."""

import re

import pytest
import torch

from funcops import LinearParams, dist
from funcops.distributed import Mesh, check_program, finish, gather_start, handshake, record
from funcops.testing import run_ranks

SIZES = {"dp": 2, "tp": 2}


def mlp(mesh, x, overlap="none"):
    """Forward and backward of a column-parallel layer."""
    cfg = dist.ColumnLinearConfig(4, 8, axis=mesh["tp"], overlap=overlap)
    params = LinearParams(x.new_ones(cfg.weight_shape), x.new_ones(cfg.bias_shape))
    y, residuals = dist.column_linear.fwd(params, x, cfg)
    return dist.column_linear.bwd(residuals, y, cfg)


def total(axis, x):
    return dist.sum_over.fwd(None, x, dist.SumOverConfig(axis))[0]


def test_a_program_is_what_a_step_sends():
    mesh = Mesh.abstract(SIZES, 1)
    for overlap, order in (("none", "gather scatter gather"), ("bulk", "gather gather scatter"), ("ring", "shift gather shift")):
        program = record(lambda x, overlap=overlap: mlp(mesh, x, overlap), torch.ones(3, 4))
        names = {
            "gather": "all_gather of float32[3, 4]",
            "scatter": "reduce_scatter (sum) of float32[6, 4]",
            "shift": "all_to_all of float32",
        }
        assert [str(one) for one in program.sent] == [names[word] for word in order.split()] and not program.unfinished
        assert {one.group for one in program.sent} == {"tp[0:2:1]"}


def agreed(mesh):
    return handshake(mesh, lambda x: (mlp(mesh, x), total(mesh["dp"], x)), torch.ones(2, 4))


def test_ranks_that_agree_go_on():
    programs = run_ranks(SIZES, agreed)
    assert [len(p.sent) for p in programs] == [4] * 4 and agreed(Mesh.abstract({"dp": 1, "tp": 1}, 0)).sent == ()


def shape(mesh, x):
    return total(mesh["dp"], x[: 1 if mesh.rank == 2 else 2])


def kind(mesh, x):
    mlp(mesh, x)
    return total(mesh["tp"], x.double() if mesh.rank == 1 else x)


def order(mesh, x):
    steps = [lambda: total(mesh["tp"], x), lambda: dist.gather.fwd(None, x, dist.GatherConfig(mesh["tp"]))]
    for step in steps[:: -1 if mesh.rank == 3 else 1]:
        step()


def fewer(mesh, x):
    for _ in range(2 if mesh.rank == 0 else 3):
        total(mesh["dp"], x)


def elsewhere(mesh, x):
    return total(Mesh.abstract({"tp": 2}, mesh["tp"].rank)["tp"] if mesh.rank == 1 else mesh["tp"], x)


def other_mesh(mesh, x):
    return total(Mesh.abstract({"cp": 2, "tp": 2}, 3)["cp"], x) if mesh.rank == 3 else None


def unfinished(mesh, x):
    if mesh.rank == 2:
        gather_start(x, mesh["dp"])
    else:
        finish(gather_start(x, mesh["dp"]))


def broken(mesh, x):
    return total(mesh["tp"], x) if mesh.rank != 1 else total(mesh["tp"], x @ x)


FAULTS = {
    shape: "collective 0 over axis 'dp' must be the same on all ranks, got all_reduce (sum) of float32[2, 4] on rank 0, "
    "all_reduce (sum) of float32[1, 4] on rank 2",
    kind: "collective 3 over axis 'tp' must be the same on all ranks, got all_reduce (sum) of float32[2, 4] on rank 0, "
    "all_reduce (sum) of float64[2, 4] on rank 1",
    order: "collective 0 over axis 'tp' must be the same on all ranks, got all_reduce (sum) of float32[2, 4] on rank 2, "
    "all_gather of float32[2, 4] on rank 3",
    fewer: "collective 2 over axis 'dp' must be the same on all ranks, got nothing on rank 0, "
    "all_reduce (sum) of float32[2, 4] on rank 2",
    other_mesh: "collective 0 must be over an axis of the mesh (axis 'dp' of 2, axis 'tp' of 2), got all_reduce (sum) of "
    "float32[2, 4] over group 'cp[1:5:2]'",
    unfinished: "collective 0 must be finished, got all_gather of float32[2, 4] that nobody waits for on rank 2",
    broken: "step must run on the meta device, got RuntimeError on rank 1: ",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_raises_on_every_rank(fault):
    def run(mesh):
        with pytest.raises(ValueError) as raised:
            handshake(mesh, lambda x: fault(mesh, x), torch.ones(2, 4))
        return str(raised.value)

    said = run_ranks(SIZES, run)
    assert len(set(said)) == 1 and said[0].startswith(f"handshake: {FAULTS[fault]}"), said
    if fault is not broken:
        with pytest.raises(ValueError, match=re.escape(f"check_program: {FAULTS[fault]}")):
            check_program(lambda mesh: fault(mesh, torch.ones(2, 4)), SIZES)


@pytest.mark.slow
def test_programs_of_a_thousand_ranks():
    def step(mesh, wrong=None):
        cfg = dist.ColumnLinearConfig(4, 8, axis=mesh["tp"], overlap="bulk")
        params, x = LinearParams(torch.ones(2, 4), torch.ones(2)), torch.ones(4 if mesh.rank != wrong else 5, 4)
        y, residuals = dist.column_linear.fwd(params, x, cfg)
        total(mesh["dp"], dist.column_linear.bwd(residuals, y, cfg)[0].weight)

    sizes = {"dp": 8, "pp": 8, "cp": 4, "tp": 4}
    programs = check_program(step, sizes)
    assert len(programs) == 1024 and {len(p.sent) for p in programs.values()} == {4}
    with pytest.raises(ValueError, match=r"collective 0 over axis 'tp' .* got .*\[4, 4\] on rank 776, .*\[5, 4\] on rank 777"):
        check_program(lambda mesh: step(mesh, 777), sizes, ranks=range(768, 800))
    assert list(check_program(step, sizes, ranks=(3, 900))) == [3, 900]
