"""A tensor in 88 bytes: a hash of its bits, four numbers, and a sketch from which the distance of two tensors is estimated.

The hash is of the tensor's elements in order, whatever its strides and device: words of 8 bytes, each mixed with its position and
then spread over all 64 bits, in sums over blocks, which are mixed with their positions again. So neither a change of one bit nor an
exchange of elements cancels, and any order of the additions gives the same sum. The sketch has six sums of all elements with signs
drawn once: the mean square of the differences of two sketches is, in expectation, the square of the tensors' distance.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from funcops.library.kernels import tables

WORDS, BLOCK, WIDTH, SKETCHES = 11, 1 << 16, 256, 6
SPREAD, STRIDE = -0x40A7B892E31B1A47, -0x61C8864680B583EB  # odd, as multipliers that lose no bit must be


class Digest(NamedTuple):
    """The numbers of a tensor: the hash of its bits; the largest |v|, NaN if there is one; the mean of v^2; the shares of zeros and
    of values that are not finite; and the sketch."""

    hash: int
    largest: float
    mean_square: float
    zeros: float
    nonfinite: float
    sketch: tuple[float, ...]

    @staticmethod
    def of(words: Tensor) -> Digest:
        """The digest in a row of words on the host."""
        numbers = words[1:].view(torch.float64).tolist()
        return Digest.made(int(words[0]) & 0xFFFFFFFFFFFFFFFF, numbers)

    @staticmethod
    def made(bits: int, numbers: list[float]) -> Digest:
        """The digest with this hash and these numbers, in order."""
        largest, mean_square, zeros, nonfinite, *sketch = numbers
        return Digest(bits, largest, mean_square, zeros, nonfinite, tuple(sketch))


def digest(t: Tensor) -> Tensor:
    """The digest of a tensor as words, int64[11], computed on its device without waiting for it."""
    flat = t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    flat = flat.view(torch.uint8) if flat.dtype is torch.bool else flat
    return torch.cat([_hash(flat).reshape(1), torch.cat(_numbers(flat)).view(torch.int64)])


_cache = tables.Tables(16)


def _tables(device: torch.device) -> tuple[Tensor, ...]:
    """The numbers that are added to the words of a block, by position; and the signs of a sketch, for rows and for columns."""
    return _cache.get(device, None, _on_host).on_device


def _on_host() -> tuple[tuple[Tensor, Tensor], None]:
    numbers = torch.arange(2 * SKETCHES * WIDTH, dtype=torch.int64)
    return (torch.arange(1, BLOCK + 1, dtype=torch.int64) * STRIDE, _signs(numbers).view(2, SKETCHES, WIDTH)), None


def _spread(words: Tensor, scratch: Tensor | None = None) -> Tensor:
    """Each word as another one, every bit of which depends on all bits of the first; in place."""
    words ^= torch.bitwise_right_shift(words, 32, out=scratch)
    words *= SPREAD
    words ^= torch.bitwise_right_shift(words, 29, out=scratch)
    return words


def _signs(numbers: Tensor) -> Tensor:
    return 1.0 - 2.0 * (_spread(_spread(numbers * STRIDE + 1)) >> 17 & 1).double()


def _hash(flat: Tensor) -> Tensor:
    """The hash of a vector's bits."""
    positions, _ = _tables(flat.device)
    many = BLOCK if flat.is_cpu else 64 * BLOCK  # words at once: what fits a cache, or a device
    sums = []
    for part in _words(flat):
        scratch = torch.empty(2, min(many, part.numel()), dtype=torch.int64, device=flat.device)
        for start in range(0, part.numel(), many):
            words = part[start : start + many]
            whole = words.numel() // BLOCK * BLOCK
            if whole:
                rows = scratch[:, :whole].view(2, -1, BLOCK)
                torch.add(words[:whole].view(-1, BLOCK), positions, out=rows[0])
                sums.append(_spread(rows[0], rows[1]).sum(1))
            if whole < words.numel():
                rest = scratch[:, : words.numel() - whole]
                torch.add(words[whole:], positions[: words.numel() - whole], out=rest[0])
                sums.append(_spread(rest[0], rest[1]).sum().reshape(1))
    sums.append(torch.full((1,), flat.numel(), dtype=torch.int64, device=flat.device))
    joined = torch.cat(sums)
    places = torch.arange(1, joined.numel() + 1, dtype=torch.int64, device=flat.device) * STRIDE
    return _spread(_spread(_spread(joined) + places)).sum()


def _words(flat: Tensor) -> list[Tensor]:
    """The bits of a vector as words of 8 bytes, and those that are left, with zeros behind them."""
    each = 8 // flat.element_size()
    whole = flat.numel() // each * each
    first = flat[:whole]
    if first.data_ptr() % 8 or first.storage_offset() % each:  # a view as words begins at a word
        first = first.clone()
    rest = flat[whole:].view(torch.uint8)
    return [part for part in (first.view(torch.int64), pad(rest, (0, -rest.numel() % 8)).view(torch.int64)) if part.numel()]


CODES = [getattr(torch, name) for name in ("float4_e2m1fn_x2",) if hasattr(torch, name)]  # two numbers in a byte
SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
COMPUTES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, *SIGNED.values(), torch.int8)


def _readable(flat: Tensor) -> Tensor:
    """A vector in a dtype that operators compute with; codes of other dtypes as their bits."""
    if flat.dtype in COMPUTES:
        return flat
    of_bytes = flat.element_size() == 1 and flat.is_floating_point() and flat.dtype not in CODES
    return flat.float() if of_bytes else flat.view(SIGNED[flat.element_size()])


def _numbers(flat: Tensor) -> list[Tensor]:
    """The largest |v|, the mean of v^2, the shares of zeros and of values that are not finite, and the sketch: sums of all elements
    with signs."""
    if not flat.numel():
        return [torch.zeros(4 + SKETCHES, dtype=torch.float64, device=flat.device)]
    flat = _readable(flat)
    least, most = (bound.double() for bound in torch.aminmax(flat))
    largest = torch.maximum(least.abs(), most.abs())
    zeros = 1.0 - torch.count_nonzero(flat).double() / flat.numel()
    nonfinite = torch.zeros_like(zeros) if _known_finite(flat, largest) else (~torch.isfinite(flat)).sum().double() / flat.numel()
    sketch, squares = _products(flat)
    return [torch.stack([largest, squares / flat.numel(), zeros, nonfinite]), sketch]


def _known_finite(flat: Tensor, largest: Tensor) -> bool:
    """Whether no value of a vector is infinite or NaN: on the host it costs nothing to look first."""
    return flat.is_cpu and bool(torch.isfinite(largest))


def _blocks(flat: Tensor, many: int) -> list[Tensor]:
    """A vector in parts of whole blocks, at most so many elements each, and the rest."""
    whole = flat.numel() // BLOCK * BLOCK
    return [*(flat[:whole].split(many) if whole else ()), *([flat[whole:]] if whole < flat.numel() else ())]


def _products(flat: Tensor) -> tuple[Tensor, Tensor]:
    """The sketch of a vector, and the sum of its squares. A block of it is a square, whose rows and columns have signs; so has the
    block."""
    _, (of_rows, of_columns) = _tables(flat.device)
    many = (1 if flat.is_cpu else 256) * BLOCK  # at once
    wide = torch.empty(min(many, flat.numel() + -flat.numel() % WIDTH), dtype=torch.float64, device=flat.device)
    sums, squares = [], []
    for part in _blocks(flat, many):
        rest = part.numel() + -part.numel() % WIDTH
        wide[: part.numel()].copy_(part)
        wide[part.numel() : rest].zero_()
        square = wide[:rest].view(-1, min(BLOCK, rest) // WIDTH, WIDTH)
        sums.append(((of_rows[:, : square.shape[1]] @ square) * of_columns).sum(2))
        squares.append(torch.dot(wide[:rest], wide[:rest]))
    found = torch.cat(sums)
    numbers = torch.arange(found.numel(), dtype=torch.int64, device=flat.device).view_as(found) + 2 * SKETCHES * WIDTH
    return (found * _signs(numbers)).sum(0), torch.stack(squares).sum()
