"""The bench's samples at tiny sizes on the CPU, made once a process. Kernels that write to their arguments get copies."""

import functools

import torch

from benchmarks.samples import Maker, samples

SHRINK = 4096


@functools.cache
def tiny(dtype):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return tuple(samples(Maker("cpu", dtype, shrink=SHRINK)))


def names():
    return [f"{sample.name}-{i}" for i, sample in enumerate(tiny(torch.float32))]
