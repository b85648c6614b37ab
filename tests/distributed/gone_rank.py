"""A Gloo process whose neighbour is gone: `python gone_rank.py FOLDER`. It prints the error of each way of sending."""

import functools
import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as torch_dist
from forked import codes

from funcops import LinearConfig, dist, linear, random
from funcops.distributed import Mesh, comm, finish

GRADS = {"a": torch.ones(4, 2), "b": torch.ones(3)}
KINDS = {
    "all_reduce": lambda axis: comm.sum_over(torch.ones(3), axis),
    "all_gather": lambda axis: comm.gather(torch.ones(3), axis),
    "reduce_scatter": lambda axis: comm.scatter_sum(torch.ones(4), axis),
    "all_to_all": lambda axis: comm.all_to_all(torch.ones(2, 2), axis, 0, 1),
    "shift": lambda axis: comm.shift(torch.ones(3), axis, 1),
    "max": lambda axis: comm.largest(torch.ones(3), axis),
    "two": lambda axis: (comm.start_sum(torch.ones(3), axis), comm.start_gather(torch.ones(3), axis)),
    "finish": lambda axis: finish(dist.gather_start(torch.ones(3), axis)),
    "sums": lambda axis: finish(dist.reduce_start(GRADS, axis)),
    "backend's sums": lambda axis: finish(dist.reduce_start(GRADS, axis, ordered=False)),
    "shards": lambda axis: finish(dist.gather_shards_start(dist.own_shards(GRADS, axis), GRADS, axis)),
    "layer": lambda axis: dist.sharded.fwd(*_layer(axis)),
}


def _layer(axis):
    cfg = dist.ShardedConfig(linear, LinearConfig(4, 4), axis=axis)
    return dist.sharded.init(cfg, key=random.key(0)), torch.ones(2, 4), cfg


def rank(store, number):
    torch_dist.init_process_group("gloo", f"file://{store}", rank=number, world_size=2, timeout=timedelta(minutes=5))
    mesh = Mesh.of({"dp": 1, "tp": 2}, "cpu")
    comm.sum_over(torch.ones(1), mesh["tp"])
    if number == 1:
        return
    for name, call in {**KINDS, "handshake": lambda axis: dist.handshake(mesh, KINDS["sums"], axis)}.items():
        try:
            call(mesh["tp"])
        except RuntimeError as error:
            print(f"{name}| {error}".replace(chr(10), " "))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    print(json.dumps(codes({f"rank{i}": functools.partial(rank, folder / "store", i) for i in range(2)}, folder)))
