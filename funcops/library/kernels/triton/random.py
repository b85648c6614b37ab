"""Folding a number into a random key by one program: torch's operators take a dozen launches."""

from __future__ import annotations

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.engine import random as declared
from funcops.engine.backend.launch import launcher


@triton.jit(do_not_specialize=["number"])
def _fold_in(key_ptr, data_ptr, out_ptr, number: tl.int64, DATA: tl.constexpr):
    """(seed, stream) to (seed, splitmix64's finaliser of stream + (number + 1) * golden ratio); with DATA the number is read."""
    i = tl.arange(0, 2)
    words = tl.load(key_ptr + i).to(tl.uint64)
    if DATA:
        number = tl.load(data_ptr).to(tl.int64)
    z = words + (number.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    tl.store(out_ptr + i, tl.where(i == 0, words, z).to(tl.int64))


_launch_fold_in = launcher(_fold_in)


@declared._fold_in.triton
def fold_in(key: Tensor, data: Optional[Tensor], number: int) -> Tensor:
    if data is not None and data.is_cpu and not key.is_cpu:
        number, data = int(data), None
    key, out = key.contiguous(), torch.empty_like(key, memory_format=torch.contiguous_format)
    _launch_fold_in(1, 1, 1, key, data, out, number, data is not None, num_warps=1)
    return out
