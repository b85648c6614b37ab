"""A rank that raises, stops, or sends another shape at any collective of a drawn program: the others end, and the error names
the rank and the collective."""

import random
import re

import pytest
import torch
from test_handshake import GRID, drawn_program

from funcops.distributed import Mesh, comm
from funcops.testing import run_ranks


class Broken(Exception):
    pass


def run_with(mesh, program, place, fault, rank):
    """Run a program with values; at the collective `place` this rank has the fault, if it is `rank`. Returns what was sent."""
    for at, one in enumerate(program):
        axis, columns = mesh[one.axis], one.columns
        if mesh.rank == rank and at == place:
            if fault == "raises":
                raise Broken(f"at {at}")
            if fault == "stops":
                return
            columns += 1
        if one.kind == "rows":
            sends, receives = list(one.splits[axis.rank]), [row[axis.rank] for row in one.splits]
            x = torch.ones(sum(sends), columns, dtype=one.dtype)
            comm.wait(comm.ops.all_to_all_single(x, receives, sends, axis.group), axis)
            continue
        x = torch.ones(axis.size, columns, dtype=one.dtype)
        {"sum": comm.sum_over, "gather": comm.gather, "scatter": comm.scatter_sum}[one.kind](x, axis)


def number(program, place, mesh):
    """How many collectives over the same axis come before the one at `place`."""
    return sum(one.axis == program[place].axis for one in program[:place])


@pytest.mark.parametrize("fault", ["raises", "stops", "shape"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_a_fault_at_any_collective_is_named(fault, seed):
    draw = random.Random(seed)
    program = drawn_program(draw)
    for place, one in enumerate(program):
        rank = draw.randrange(6)
        with pytest.raises((Broken, ValueError, RuntimeError, AssertionError)) as raised:
            run_ranks(GRID, lambda mesh, place=place, rank=rank: run_with(mesh, program, place, fault, rank))
        said, notes = str(raised.value), getattr(raised.value, "__notes__", [])
        mesh = Mesh.abstract(GRID, rank)
        peers, at = mesh.peers(mesh[one.axis]), f"{number(program, place, mesh)} over axis {one.axis!r}"
        if fault == "raises":
            assert isinstance(raised.value, Broken) and notes == [f"on rank {rank}"]
        elif fault == "stops":
            waiting = {int(found) for found in re.findall(r"rank (\d) for", said)}
            assert rank not in waiting and waiting & set(peers) and at in said, said
        else:
            assert at in said and (f"rank {rank}" in said or any(f"rank {peer}" in said for peer in peers)), said
