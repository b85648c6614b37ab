"""NF4: 4 bits an element, the index of one of 16 levels, which share out a normal distribution equally.

    x ~ LEVELS[code] absmax          absmax: the largest |x| of a block of 64 neighbours in a row (the last of a row may be shorter)

codes: uint8 [*, ceil(K / 2)], two elements a byte, the even one in the high half; absmax: float32 [*, ceil(K / 64)].

Double quantisation writes the absmaxes in 8 bits: absmax ~ SHARES[code] largest + mean, of 256 neighbours in reading order,
largest: float32 [*, ceil(N / 256)], and of all N of a matrix, mean: float32 [*, 1].

Source: QLoRA (arXiv 2305.14314). Levels, rounding and the layout of codes are bitsandbytes' (csrc/kernels.cu, functional.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from funcops.engine.backend import kernel

LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
BLOCK, NESTED = 64, 256
LEAST = 1e-38  # a smaller absmax counts as this one: its inverse is a finite number


@kernel()
def nf4_dequantize(codes: Tensor, absmax: Tensor, width: int, out: torch.dtype) -> Tensor:
    """x [*, width] in the dtype `out`: levels times absmax in float32, rounded once."""
    levels = torch.tensor(LEVELS, device=codes.device)
    pairs = torch.stack((levels.repeat_interleave(16), levels.repeat(16)), -1).view(torch.float64)  # two levels for each byte
    values = pairs.squeeze(-1)[codes.reshape(-1).to(torch.int32)].view(torch.float32).view(*codes.shape[:-1], 2 * codes.shape[-1])
    blocks, rest = width // BLOCK, width % BLOCK
    values[..., : blocks * BLOCK].unflatten(-1, (blocks, BLOCK)).mul_(absmax[..., :blocks, None])
    if rest:
        values[..., blocks * BLOCK :].mul_(absmax[..., blocks:])
    return values[..., :width].to(out).contiguous()


def nf4_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and absmaxes of x [*, K]. Each element goes to the nearest level, the lower of two that are as near; a block with a NaN
    or an infinity is decoded to numbers that are not finite."""
    width = x.shape[-1]
    blocks = torch.nn.functional.pad(x.float(), (0, -width % BLOCK)).unflatten(-1, (-1, BLOCK))
    absmax = blocks.abs().amax(-1)
    share = (blocks * (1.0 / absmax.clamp(min=LEAST)).unsqueeze(-1)).clamp_(-1.0, 1.0).flatten(-2)
    codes = _nearest(share[..., : width + width % 2], torch.tensor(LEVELS, device=x.device))
    return (codes[..., 0::2] << 4) | codes[..., 1::2], absmax


def nested(absmax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Double quantisation of the absmaxes of matrices, [*, O, B]: codes uint8 [*, O, B], largest and mean, of each matrix."""
    flat = absmax.flatten(-2)
    mean = flat.mean(-1, keepdim=True)
    blocks = torch.nn.functional.pad(flat - mean, (0, -flat.shape[-1] % NESTED)).unflatten(-1, (-1, NESTED))
    largest = blocks.abs().amax(-1)
    share = (blocks * (1.0 / largest.clamp(min=LEAST)).unsqueeze(-1)).clamp_(-1.0, 1.0).flatten(-2)
    codes = _nearest(share[..., : flat.shape[-1]], shares(absmax.device))
    return codes.reshape(absmax.shape), largest, mean


def unnested(codes: Tensor, largest: Tensor, mean: Tensor) -> Tensor:
    """The absmaxes that `nested` wrote in 8 bits."""
    found = shares(codes.device)[codes.flatten(-2).to(torch.int32)]
    each = largest.repeat_interleave(NESTED, -1)[..., : found.shape[-1]]
    return (found * each + mean).reshape(codes.shape)


def shares(device: torch.device) -> Tensor:
    """The 256 numbers of [-1, 1] of bitsandbytes' dynamic map, in order: 0, 1, and for i from 0 to 6 the centres of 2^i equal steps
    from 0.1 to 1, times 10^(i - 6), of either sign."""
    found = [torch.tensor([0.0, 1.0], device=device)]
    for i in range(7):
        steps = torch.linspace(0.1, 1.0, 2**i + 1, dtype=torch.float32, device=device)
        centres = (10.0 ** (i - 6)) * ((steps[:-1] + steps[1:]) / 2.0)
        found += [centres, -centres]
    return torch.cat(found).sort().values


def _nearest(share: Tensor, levels: Tensor) -> Tensor:
    return torch.bucketize(share.contiguous(), (levels[:-1] + levels[1:]) / 2, out_int32=True).to(torch.uint8)
