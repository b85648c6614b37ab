"""Models cut into stages, on four processes of Gloo: `python four_stages.py FOLDER MODELS...`. Each rank prints for each schedule
its distance from autograd, and by how many the products of all ranks differ from autograd's. Their exit codes are printed last.
"""

import functools
import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from cut_models import M, by_autograd, cut, off
from forked import codes
from products import Products

from funcops import Needs
from funcops.adapters.pipelining import Pipeline
from funcops.schedule import dualpipe_v, one_f_one_b, zb_h1, zb_h2, zb_v

RANKS = 4
BY_STAGES = {4: [one_f_one_b(RANKS, M), zb_h1(RANKS, M), zb_h2(RANKS, M)], 8: [zb_v(RANKS, M), dualpipe_v(RANKS, M)]}


def run(rank, folder, names):
    torch.set_num_threads(1)
    where = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=RANKS, timeout=timedelta(minutes=10))
    for name in names:
        for stages, schedules in BY_STAGES.items():
            model, xs, loss, (cfg, params) = cut(name, stages)
            losses, want, products = by_autograd(model, xs, loss)
            dtype = next(model.parameters()).dtype
            for schedule in schedules:
                pipeline = Pipeline(schedule, cfg, xs[0], dtype=dtype, needs=Needs(x=False, params=True))
                with Products() as found:
                    stepped = pipeline.step({name: params[name] for name in pipeline.names}, xs)
                count = torch.tensor(found.count)
                dist.all_reduce(count)
                print(name, schedule.name, off(stepped, losses, want), int(count) - products)


if __name__ == "__main__":
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    print(json.dumps(codes({str(rank): functools.partial(run, rank, folder, names) for rank in range(RANKS)}, folder)))
