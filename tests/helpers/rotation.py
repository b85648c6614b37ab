"""Rotary position embedding by complex numbers: what the cases of `rope` and `qkv_split` are held to."""

import torch


def turned(params, x, cfg):
    """The rotation as a product of complex numbers."""
    t, positions = x
    r = cfg.rotating
    turning, rest = t[..., :r], t[..., r:]
    frequencies = cfg.theta ** (-torch.arange(0, r, 2, dtype=torch.float64, device=x[0].device) / r)
    angles = positions.double()[..., None] * frequencies
    phase = torch.polar(torch.ones_like(angles), angles)[..., None, :]
    if cfg.interleaved:
        a, b = turning[..., 0::2], turning[..., 1::2]
    else:
        a, b = turning.chunk(2, -1)
    z = torch.complex(a.double(), b.double()) * phase
    parts = (z.real, z.imag)
    out = torch.stack(parts, -1).flatten(-2) if cfg.interleaved else torch.cat(parts, -1)
    return torch.cat((out, rest), -1)
