"""Leaves for a node of autograd, and the bytes that a call leaves with autograd."""

import torch
from torch.autograd.graph import saved_tensors_hooks

from funcops import LinearConfig, random
from funcops.engine.trees import tree_map_tensors

LINEAR = LinearConfig(4, 3)


def leaves_of(cfg, op, seed=0, dtype=torch.float64):
    params = op.init(cfg, key=random.key(seed), dtype=dtype)
    return tree_map_tensors(lambda t: t.requires_grad_(t.is_floating_point()), params)


def kept_bytes(run):
    """Bytes that a call leaves with autograd, counted once a storage."""
    seen = {}

    def pack(t):
        seen[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        y = run()
    return y, seen
