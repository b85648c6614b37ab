"""Rotary position embedding by complex numbers: what the cases of `rope` and `qkv_split` are held to."""

import math

import torch


def frequencies(cfg, device=None):
    """The frequencies of the pairs [R/2], in float64, by the papers' formulas."""
    r, scaling = cfg.rotating, cfg.scaling
    if cfg.layout == "axial":
        return torch.cat([cfg.theta ** (-torch.arange(n, dtype=torch.float64, device=device) / n) for n in cfg.sections])
    pair = torch.arange(r // 2, dtype=torch.float64, device=device)
    plain = cfg.theta ** (-2 * pair / r)
    kind = type(scaling).__name__
    if scaling is None:
        return plain
    if kind == "LinearScaling":
        return plain / scaling.factor
    if kind == "DynamicScaling":
        times = max(scaling.length or 0, scaling.original_context) / scaling.original_context
        return (cfg.theta * (scaling.factor * times - scaling.factor + 1) ** (r / (r - 2))) ** (-2 * pair / r)
    if kind == "LongRopeScaling":
        long = scaling.length is not None and scaling.length > scaling.original_context
        return plain / torch.tensor(scaling.long_factor if long else scaling.short_factor, dtype=torch.float64, device=device)
    turns = scaling.original_context * plain / (2 * math.pi)  # within the original context
    if kind == "Llama3Scaling":
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
    else:
        at = [
            r * math.log(scaling.original_context / (2 * math.pi * b)) / (2 * math.log(cfg.theta))
            for b in (scaling.beta_fast, scaling.beta_slow)
        ]
        first, last = (math.floor(at[0]), math.ceil(at[1])) if scaling.truncate else at
        first, last = max(first, 0), min(last, r - 1)
        kept = 1 - ((pair - first) / max(last - first, 1e-3)).clamp(0, 1)
    return plain * kept + plain / scaling.factor * (1 - kept)


def angles(positions, cfg):
    """[*, T, R/2], in float64."""
    found = positions.double()[..., None] * frequencies(cfg, positions.device)
    if cfg.sections is None:
        return found
    axes = [axis for axis, n in enumerate(cfg.sections) for _ in range(n)]
    if cfg.layout == "interleaved":
        axes = [0] * len(axes)
        for axis, n in enumerate(cfg.sections):
            axes[axis : axis + len(cfg.sections) * n : len(cfg.sections)] = [axis] * len(axes[axis :: len(cfg.sections)][:n])
    return torch.stack([found[axis][..., i] for i, axis in enumerate(axes)], -1)


def turned(params, x, cfg):
    """The rotation as a product of complex numbers."""
    t, positions = x
    r = cfg.rotating
    turning, rest = t[..., :r], t[..., r:]
    by = angles(positions, cfg)
    phase = torch.polar(torch.full_like(by, cfg.factor), by)[..., None, :]
    if cfg.interleaved:
        a, b = turning[..., 0::2], turning[..., 1::2]
    else:
        a, b = turning.chunk(2, -1)
    z = torch.complex(a.double(), b.double()) * phase
    parts = (z.real, z.imag)
    out = torch.stack(parts, -1).flatten(-2) if cfg.interleaved else torch.cat(parts, -1)
    return torch.cat((out, rest), -1)
