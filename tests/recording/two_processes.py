"""A step over two processes, recorded with and without a fault on rank 1: `python two_processes.py FOLDER`. Each rank saves its
recordings; their exit codes are printed, and rank 1 prints the place of the fault."""

import functools
import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as torch_dist
from forked import codes

sys.path.insert(0, str(Path(__file__).parents[1] / "meetings"))
from meeting_features import Meeting
from meeting_steps import of_rank
from planted_faults import Plan, planted

from funcops import recording
from funcops.distributed import Mesh

FAULT = 77


def rank(folder, number):
    torch.set_num_threads(1)
    torch_dist.init_process_group("gloo", f"file://{folder / 'store'}", rank=number, world_size=2, timeout=timedelta(minutes=5))
    mesh = Mesh.of({"tp": 2}, "cpu")
    for name, plan in {"right": Plan(), "wrong": Plan(FAULT, 1e-3)}.items():
        plan.follow(number == 1)
        with planted(plan), recording() as run:
            of_rank(Meeting("tp"), mesh)
        run.save(folder / f"{name}{number}.jsonl")
    if number == 1:
        print(json.dumps(plan.changed))


if __name__ == "__main__":
    to = Path(sys.argv[1])
    print(json.dumps(codes({f"rank{i}": functools.partial(rank, to, i) for i in range(2)}, to)))
