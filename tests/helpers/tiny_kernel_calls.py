"""The bench's calls at tiny sizes on the CPU, made once a process. Kernels that write to their arguments get copies."""

import functools

import torch

from benchmarks.kernel_calls import Maker, kernel_calls

SHRINK = 4096


@functools.cache
def tiny(dtype):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return tuple(kernel_calls(Maker("cpu", dtype, shrink=SHRINK)))


def names():
    return [f"{call.name}-{i}" for i, call in enumerate(tiny(torch.float32))]
