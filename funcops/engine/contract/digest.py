"""A hash of a tensor's bits: what a checkpoint compares, and ranks that should have the same."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["digest"]


def digest(t: Tensor) -> int:
    """A hash, 64 bits, of a tensor's bits and their places: if one word of eight bytes has other bits, so has the hash. It is the
    same on each device, and for each layout."""
    # Not `reshape(-1)`, which leaves one element its stride, whatever that is.
    flat = t.detach().resolve_conj().resolve_neg().contiguous().as_strided((t.numel(),), (1,)).view(torch.uint8)
    size, whole = len(flat), len(flat) // 8 * 8
    # Words at a time: in a cache, and little memory beside t's; on a device few launches, each of which the sum waits for.
    most = max(64, min(2**15, whole // 256)) if t.device.type == "cpu" else 2**22
    step, total, at = -0x61C8864680B583EB, 0, 0
    # places count from 1: the mixing function maps 0 to 0, so a zero at place 0 would not count
    places = torch.arange(1, min(most, whole // 8) + 2, device=t.device) * step
    tail = torch.zeros(16, dtype=torch.uint8, device=t.device)
    tail[: size - whole] = flat[whole:]
    tail[8:] = torch.tensor([size]).view(torch.uint8)  # zeros at its end count
    for piece in (*flat[:whole].split(8 * most), tail):
        if piece.data_ptr() % 8 or piece.storage_offset() % 8:  # a view of a mapped file
            piece = piece.clone()
        words = piece.view(torch.int64)
        # sums of 64 bits wrap, so the result depends neither on the pieces nor on a device's order of adding
        total += int(_mixed(words ^ (places[: len(words)] + _signed(at * step))).sum())
        at += len(words)
    return total % 2**64


def _mixed(x: Tensor) -> Tensor:
    """SplitMix64's mixing function of each element, in place: one to one, and a bit of x changes about half of the result's."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        x ^= (x >> shift) & (2 ** (64 - shift) - 1)  # the sign is not shifted in: it would cancel itself
        x *= factor
    return x


def _signed(x: int) -> int:
    return (x + 2**63) % 2**64 - 2**63
