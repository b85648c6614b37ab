"""Drawn leaves and specs on drawn meshes."""

import torch

from funcops.distributed import Spec

MESHES = ({"tp": 2}, {"dp": 2, "tp": 2}, {"pp": 2, "dp": 1, "tp": 4}, {"dp": 2, "cp": 2, "tp": 2}, {"tp": 1, "dp": 3})


DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn)


def drawn_leaf(draw, sizes):
    """A whole leaf, and a spec that its sizes allow."""
    axes = draw.sample(["", *sizes], 2)
    axis, fsdp = axes[0], draw.choice(["", axes[1]])
    dims, dim = draw.randint(1, 3), 0
    shape = [draw.randint(1, 3) for _ in range(dims)]
    parts = ()
    if axis:
        dim = draw.randrange(dims)
        n = sizes[axis] * (sizes[fsdp] if fsdp and dim == 0 else 1)
        parts = tuple(n * draw.randint(1, 3) for _ in range(draw.randint(1, 3)))
        shape[dim] = sum(parts)
    if fsdp and (dim or not axis):
        shape[0] *= sizes[fsdp]
    t = torch.randn(shape, generator=torch.Generator().manual_seed(draw.randrange(2**31)))
    packed = len(parts) > 1 or draw.random() < 0.5
    return (8 * t).to(draw.choice(DTYPES)), Spec(axis, dim, parts=parts if packed else (), fsdp=fsdp)


def bits(t):
    return t.view(torch.uint8) if t.dtype.is_floating_point and t.itemsize == 1 else t
