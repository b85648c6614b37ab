"""Counter-based random bits: Philox 4x32-10 (Salmon et al., SC'11), keys as small int64 tensors.

A key is int64[2]: (seed, stream), 16 bytes. Draws are pure functions of the key and the element's index, so the same
key gives the same bits on every device and in every implementation, and a captured graph draws new bits when its key
changes. Element i is word i % 4 of block i // 4; the Philox key is the seed, the counter is (block, stream).
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from funcops.engine.backend import kernel, tracing
from funcops.engine.backend.declare import readable
from funcops.engine.errors import (
    check,
    describe,
    fail,
    require,
    require_callable,
    require_count,
    require_device,
    require_dtype,
    require_number,
    require_type,
)

__all__ = ["bits", "bits_of", "check_key", "fold_in", "key", "normal", "path_id", "philox", "put_off", "split", "uniform"]

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_GOLDEN = 0x9E3779B97F4A7C15
Ranges = Sequence[tuple[int, int]]  # starts and lengths along a dimension
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def key(seed: int, *, device: Any = None) -> Tensor:
    """A key int64[2] from an integer seed, -2^63 to 2^64 - 1, modulo 2^64; on torch's default device, unless one is given.
    A key of torch.func._random, uint64[2], is one of ours as `key.view(torch.int64)`. Raises `TypeError` for a seed
    that is not an int, `ValueError` for one outside that range.

    >>> from funcops.random import key
    >>> key(7)
    tensor([7, 0])
    """
    require_type("random.key", "seed", seed, int)
    require_device("random.key", device)
    require(-(2**63) <= seed < 2**64, "random.key", "seed", "from -2^63 to 2^64 - 1", seed)
    # int64 holds the same 64 bits: as a negative number from 2^63 on
    return torch.tensor([_signed(seed), 0], dtype=torch.int64, device=device)


def path_id(name: str) -> int:
    """A stable 63-bit number for a name, to fold into a key. Raises `TypeError` for a name that is not a string.

    >>> from funcops.random import path_id
    >>> path_id("mlp.up") == path_id("mlp.up"), path_id("mlp.up") == path_id("mlp.down")
    (True, False)
    """
    require_type("random.path_id", "name", name, str)
    return _hashed(name)


def _hashed(name: str) -> int:
    # 63 bits, as `fold_in` takes no negative numbers
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


# Marks the result as a constant for Dynamo, as `torch.compiler.assume_constant_result` would, which imports the compiler.
_hashed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """A key whose stream depends on `key` and `data`, from 0 to 2^63 - 1; different data give independent streams.

    The new stream is the splitmix64 finaliser of stream + (data + 1) * golden ratio: a bijection of either. Raises `ValueError`
    for other data (-1 would give the key itself); a tensor's value is checked only on the CPU, where reading it does not sync.

    >>> from funcops.random import fold_in, key
    >>> step_key = fold_in(key(7), 1)
    >>> step_key.equal(fold_in(key(7), 1)), step_key.equal(fold_in(key(7), 2))
    (True, False)
    """
    check("random.fold_in", "key", key, (2,), torch.int64)
    if isinstance(data, int):
        # refuses a bool, which Python takes for an int
        require_type("random.fold_in", "data", data, int)
        require(0 <= data < 2**63, "random.fold_in", "data", "from 0 to 2^63 - 1", data)
        return _fold_in(key, None, data)  # type: ignore[no-any-return]
    check("random.fold_in", "data", data, (), _INTEGERS)
    if data.is_cpu and not tracing():
        require(int(data) >= 0, "random.fold_in", "data", "from 0 to 2^63 - 1", int(data))
    return _fold_in(key, data, 0)  # type: ignore[no-any-return]


@kernel(rows="each")
def _fold_in(key: Tensor, data: Optional[Tensor], number: int) -> Tensor:
    """`fold_in` of the tensor `data`, or of `number` if that is None."""
    step: Any = _signed((number + 1) * _GOLDEN) if data is None else (data.to(torch.int64) + 1) * _signed(_GOLDEN)
    z = key[1] + step
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        # a shift of int64 repeats the sign: the mask takes these bits away
        z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    z = z ^ ((z >> 31) & ((1 << 33) - 1))
    return torch.stack((key[0], z))


def split(key: Tensor | None, n: int) -> Sequence[Tensor | None]:
    """`n` independent keys, int64[n, 2]; a list of None if `key` is None (on the meta device). Raises `ValueError` for n below
    1.

    >>> from funcops.random import key, split
    >>> split(key(7), 3).shape
    torch.Size([3, 2])
    """
    require_count("random.split", n=n)
    if key is None:
        return [None] * n
    return torch.stack([fold_in(key, i) for i in range(n)])  # type: ignore[return-value]


def philox(key: tuple[Any, Any], counter: tuple[Any, Any, Any, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox 4x32-10 on 32-bit words held in int64 tensors (or ints): four words out for four words of counter. Raises
    `TypeError` unless `key` and `counter` are tuples of two and of four words.

    >>> from funcops.random import philox
    >>> [hex(word) for word in philox((0, 0), (0, 0, 0, 0))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    for name, words, count in (("key", key, 2), ("counter", counter, 4)):
        if not isinstance(words, tuple) or len(words) != count:
            fail("random.philox", name, f"a tuple of {count}", describe(words), TypeError)
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        # a product of two words may fill the sign bit, whose copies the mask takes away after the shift
        c0, c1, c2, c3 = ((p1 >> 32) & _LOW) ^ c1 ^ k0, p1 & _LOW, ((p0 >> 32) & _LOW) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def bits(key: Tensor, n: int) -> Tensor:
    """`n` random 32-bit words, int64[n] in [0, 2**32). Raises `ValueError` or `TypeError` for an invalid key, `ValueError` for
    a negative n.

    >>> from funcops.random import bits, key
    >>> first = bits(key(0), 8)
    >>> first.shape, bits(key(0), 4).equal(first[:4])
    (torch.Size([8]), True)
    """
    check("random.bits", "key", key, (2,), torch.int64)
    require_count("random.bits", 0, n=n)
    return _blocks(key, torch.arange((n + 3) // 4, dtype=torch.int64, device=key.device))[:n]


def _blocks(key: Tensor, block: Tensor) -> Tensor:
    """The four words of each block, one after the other."""
    # a captured or traced draw must read its key at every run, so it is not taken as numbers
    if readable(key):
        own, at = key.tolist()
        return _blocks_in_parts(own, at, block)
    seed, stream = key[0], key[1]
    words = philox((seed & _LOW, (seed >> 32) & _LOW), (block & _LOW, block >> 32, stream & _LOW, (stream >> 32) & _LOW))
    return torch.stack(words, -1).reshape(-1)


PART = 1 << 14  # blocks per thread whose words stay in the cache


def _blocks_in_parts(seed: int, stream: int, block: Tensor) -> Tensor:
    """`_blocks` by `philox`'s rounds in place, a part at a time: two to three times as fast on a CPU. The words that a round does
    not multiply are masked only at the end."""
    found = block.new_empty((len(block), 4))
    # the keys of the rounds depend on the seed alone: once for all parts
    keys = [((seed + i * _WEYL[0]) & _LOW, ((seed >> 32) + i * _WEYL[1]) & _LOW) for i in range(10)]
    size = PART * torch.get_num_threads()
    for counter, words in zip(block.split(size), found.split(size), strict=True):
        c0, c1 = counter & _LOW, counter >> 32
        c2, c3 = torch.full_like(c0, stream & _LOW), torch.full_like(c0, (stream >> 32) & _LOW)
        p0, p1 = torch.empty_like(c0), torch.empty_like(c0)
        for k0, k1 in keys:
            torch.mul(c0, _MULTIPLIERS[0], out=p0)
            torch.mul(c2, _MULTIPLIERS[1], out=p1)
            torch.bitwise_right_shift(p1, 32, out=c0).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_LOW)
            torch.bitwise_right_shift(p0, 32, out=c2).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_LOW)
            # buffers change roles: a product is a word of the next round, and the buffer of the old word is free
            c1, p1, c3, p0 = p1, c1, p0, c3
        for i, word in enumerate((c0, c1.bitwise_and_(_LOW), c2, c3.bitwise_and_(_LOW))):
            words[:, i] = word
    return found.view(-1)


def _words(key: Tensor, starts: Tensor, length: int) -> Tensor:
    """The words of runs of `length` elements from `starts` [R], int64[R, length]. Only the blocks that hold them are computed."""
    # as many blocks as a run needs that begins at the last word of one
    count = (length + 6) // 4
    block = (starts // 4)[:, None] + torch.arange(count, device=starts.device)
    words = _blocks(key, block.reshape(-1)).reshape(len(starts), 4 * count)
    return words.gather(1, (starts % 4)[:, None] + torch.arange(length, device=starts.device))


def uniform(
    key: Tensor | None,
    shape: Sequence[int],
    *,
    low: float = 0.0,
    high: float = 1.0,
    dtype: torch.dtype | None = None,
    device: Any = None,
    ranges: Sequence[Ranges] | None = None,
) -> Tensor:
    """Uniform in [low, high) from 32 random bits per element (24 if the dtype is narrower than float64). A value that
    rounding would put outside becomes the nearest one inside. `ranges`: draw only this part of the tensor of `shape`, as in
    `bits_of`. Raises `ValueError` if the dtype has no value inside.

    >>> from funcops.random import key, uniform
    >>> draws = uniform(key(0), (1000,), low=-1.0, high=3.0)
    >>> draws.shape, bool((draws >= -1).all() and (draws < 3).all()), bool((draws.mean() - 1).abs() < 0.1)
    (torch.Size([1000]), True, True)
    """
    dtype = _check_draw("random.uniform", shape, dtype, device, low=low, high=high)
    first, last = _inside("random.uniform", low, high, dtype)
    if ranges is not None:
        _check_ranges("random.uniform", shape, ranges)
    own = shape if ranges is None else [sum(n for _, n in pieces) for pieces in ranges]
    if key is None:
        return _empty("random.uniform", own, dtype, device)
    check_key("random.uniform", key)
    # after the check of the key: a wrong one raises on the meta device, too
    if _no_values(device):
        return torch.empty(tuple(own), dtype=dtype, device="meta")
    key, n = key.to(device) if device is not None else key, math.prod(shape)

    def values(starts: Tensor | None, length: int) -> Tensor:
        words = bits(key, n) if starts is None else _words(key, starts, length)
        # float32 holds 24 bits: all 32 would round up to 1, which is outside
        unit = words.to(torch.float64) * 2.0**-32 if dtype is torch.float64 else (words >> 8).to(torch.float32) * 2.0**-24
        return (low + (high - low) * unit).clamp_(first, last).to(dtype)

    draw = _Draw(tuple(shape), dtype, key.device, values)
    return _drawn(draw) if ranges is None else draw.part(ranges)


def normal(
    key: Tensor | None,
    shape: Sequence[int],
    *,
    mean: float = 0.0,
    std: float = 1.0,
    dtype: torch.dtype | None = None,
    device: Any = None,
) -> Tensor:
    """Normal by Box-Muller, two words for two values. Raises `ValueError` or `TypeError` for an invalid key, mean or std (std must
    be at least 0).

    >>> from funcops.random import key, normal
    >>> draws = normal(key(0), (100, 100), std=2.0)
    >>> draws.shape, bool((draws.std() - 2).abs() < 0.05)
    (torch.Size([100, 100]), True)
    """
    dtype = _check_draw("random.normal", shape, dtype, device, mean=mean, std=std)
    require_number("random.normal", mean=mean)
    require_number("random.normal", 0, std=std)
    if key is None:
        return _empty("random.normal", shape, dtype, device)
    check_key("random.normal", key)
    if _no_values(device):
        return torch.empty(tuple(shape), dtype=dtype, device="meta")
    key, n = key.to(device) if device is not None else key, math.prod(shape)
    # of an odd number the last sine is left out
    half = (n + 1) // 2

    def pairs(first: Tensor, second: Tensor, turn: Callable[[Tensor], Tensor]) -> Tensor:
        # + 1, as the logarithm of a word of zeros would be infinite
        radius = torch.sqrt(-2.0 * torch.log((first.to(torch.float64) + 1) * 2.0**-32))
        return radius * turn(second.to(torch.float64) * (2.0 * math.pi * 2.0**-32))

    def run(starts: Tensor, length: int, turn: Callable[[Tensor], Tensor]) -> Tensor:
        return pairs(_words(key, starts, length), _words(key, starts + half, length), turn)

    def values(starts: Tensor | None, length: int) -> Tensor:
        if starts is None:
            words = bits(key, 2 * half)
            found = torch.cat([pairs(words[:half], words[half:], turn) for turn in (torch.cos, torch.sin)])[:n]
        else:
            found = _in_halves(starts, length, half, run)
        return (mean + std * found).to(dtype)

    return _drawn(_Draw(tuple(shape), dtype, key.device, values))


def _in_halves(starts: Tensor, length: int, half: int, run: Callable[[Tensor, int, Any], Tensor]) -> Tensor:
    """Runs of elements, float64[R, length]: cosines at indices below `half`, sines at the others; one run may have both."""
    found = torch.empty(len(starts), length, dtype=torch.float64, device=starts.device)
    for rows, before, turn in ((starts + length <= half, 0, torch.cos), (starts >= half, half, torch.sin)):
        found[rows] = run(starts[rows] - before, length, turn)
    # a run over the middle begins again at the first pair, for its sines
    for row in torch.nonzero((starts < half) & (starts + length > half))[:, 0].tolist():
        cut = half - int(starts[row])
        found[row, :cut] = run(starts[row, None], cut, torch.cos)[0]
        found[row, cut:] = run(starts.new_zeros(1), length - cut, torch.sin)[0]
    return found


class _Draw(NamedTuple):
    """A draw of `uniform` or `normal`; a part of it has the same bits as in the whole. `values(starts, length)` returns runs of
    elements, [R, length], or all elements, [n], if starts is None."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    values: Callable[[Tensor | None, int], Tensor]

    def part(self, ranges: Sequence[Ranges]) -> Tensor:
        return _in_runs(self.shape, ranges, self.device, self.values)


def _drawn(draw: _Draw) -> Tensor:
    later = None if tracing() else _later.get()
    if later is None or not later.takes(len(later.draws)):
        if later is not None:
            # holds the place of this draw, as `takes` is asked by number
            later.draws.append(None)
        return draw.values(None, 0).reshape(draw.shape)
    later.draws.append((torch.empty(draw.shape, dtype=draw.dtype, device="meta"), draw))
    return later.draws[-1][0]  # type: ignore[index]


class _Later(NamedTuple):
    """The draws of a `put_off` block, in order, None for a draw that was not deferred; `takes(i)` says whether draw i is
    deferred."""

    takes: Callable[[int], bool]
    draws: list[tuple[Tensor, _Draw] | None]


# of a context, so that draws of other threads are not deferred
_later: ContextVar[_Later | None] = ContextVar("later", default=None)


def put_off(
    takes: Callable[[int], bool] = lambda place: True,
) -> contextlib.AbstractContextManager[list[tuple[Tensor, Any] | None]]:
    """Defer the draws of `uniform` and `normal` in a block: they return tensors on the meta device. The list has these, in order,
    each with its draw, whose `part(ranges)` draws the (start, length) pairs `ranges` along each dimension, with the same bits as
    the whole. `takes(i)`: whether draw i is deferred; if not, its entry is None. Raises `TypeError` if `takes` is not a function.

    >>> from funcops.random import key, normal, put_off
    >>> with put_off() as waiting:
    ...     w = normal(key(0), (4, 3))
    ...
    >>> stand_in, draw = waiting[0]
    >>> w.device.type, stand_in is w, draw.part(([(2, 2)], [(0, 3)])).equal(normal(key(0), (4, 3))[2:])
    ('meta', True, True)
    """
    require_callable("random.put_off", takes=takes)
    # apart, as a generator would check its arguments only at the `with`
    return _putting_off(takes)


@contextlib.contextmanager
def _putting_off(takes: Callable[[int], bool]) -> Iterator[list[tuple[Tensor, Any] | None]]:
    token = _later.set(_Later(takes, []))
    try:
        yield _later.get().draws  # type: ignore[union-attr]
    finally:
        _later.reset(token)


def bits_of(key: Tensor, shape: Sequence[int], ranges: Sequence[Ranges]) -> Tensor:
    """The words that `bits` draws for a part of a tensor of `shape`: the (start, length) pairs `ranges` along each dimension,
    concatenated. Raises `ValueError` or `TypeError` for an invalid key or shape.

    >>> from funcops.random import bits, bits_of, key
    >>> bits_of(key(0), (4, 3), ([(2, 2)], [(0, 3)])).flatten().equal(bits(key(0), 12)[6:])
    True
    """
    check("random.bits_of", "key", key, (2,), torch.int64)
    require_type("random.bits_of", "shape", shape, tuple, list)
    require_count("random.bits_of", 0, **{f"shape.{i}": size for i, size in enumerate(shape)})
    _check_ranges("random.bits_of", shape, ranges)
    n = math.prod(shape)
    return _in_runs(
        shape, ranges, key.device, lambda starts, length: bits(key, n) if starts is None else _words(key, starts, length)
    )


def _check_ranges(where: str, shape: Sequence[int], ranges: Any) -> None:
    require_type(where, "ranges", ranges, tuple, list)
    require(len(ranges) == len(shape), where, "ranges", f"{len(shape)} lists of pairs, one per dimension of shape", len(ranges))
    for i, (size, pieces) in enumerate(zip(shape, ranges, strict=True)):
        right = isinstance(pieces, (tuple, list)) and bool(pieces) and all(_is_range(piece, size) for piece in pieces)
        require(right, where, f"ranges.{i}", f"pairs of a start and a length within {size}", pieces)


def _is_range(piece: Any, size: int) -> bool:
    # by type, as a bool passes for an int
    right = isinstance(piece, (tuple, list)) and [type(n) for n in piece] == [int, int]
    return right and piece[0] >= 0 and piece[1] >= 0 and piece[0] + piece[1] <= size


def _in_runs(shape: Sequence[int], ranges: Sequence[Ranges], device: Any, values: Callable[[Tensor | None, int], Tensor]) -> Tensor:
    """The part `ranges` of a tensor of `shape`; `values` computes runs of its elements (all elements, if starts is None)."""
    for dim, pieces in enumerate(ranges):
        if len(pieces) > 1:
            boxes = [[*ranges[:dim], (piece,), *ranges[dim + 1 :]] for piece in pieces]
            return torch.cat([_in_runs(shape, box, device, values) for box in boxes], dim)
    box = [pieces[0] for pieces in ranges]
    sizes = [n for _, n in box]
    cut = [dim for dim, n in enumerate(sizes) if n != shape[dim]]
    # all of it: whole blocks in order, without an index for each word
    if not cut:
        return values(None, 0).reshape(sizes)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    starts = torch.full((), sum(start * stride for (start, _), stride in zip(box, strides, strict=True)), device=device)
    # behind the last dimension that is cut, elements follow one another: each run ends there
    for n, stride in zip(sizes[: cut[-1]], strides, strict=False):
        starts = starts[..., None] + torch.arange(n, device=device) * stride
    return values(starts.reshape(-1), sizes[cut[-1]] * strides[cut[-1]]).reshape(sizes)


def _inside(where: str, low: float, high: float, dtype: torch.dtype) -> tuple[float, float]:
    """The smallest and the largest number of the dtype in [low, high)."""
    limits = torch.finfo(dtype)
    digits = 1 - math.frexp(limits.eps)[1] + 1  # eps is 2^(1 - digits)
    smallest = math.frexp(limits.smallest_normal)[1] - digits  # the exponent of the least subnormal number

    def nearest(value: float, rounding: Callable[[float], int]) -> float:
        unit = math.ldexp(1.0, max(math.frexp(value)[1] - digits, smallest))
        return rounding(value / unit) * unit

    # the width is a number of the dtype in which draws are computed, where it must not overflow
    ok = -limits.max <= low < high and high - low <= torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).max
    require(ok, where, "low, high", f"finite, low below high, and not further apart than {dtype} can represent", (low, high))
    # `high` itself is outside: what is rounded down is the float64 before it
    first, last = nearest(low, math.ceil), min(limits.max, nearest(math.nextafter(high, -math.inf), math.floor))
    require(first <= last, where, "low, high", f"with a number of {dtype} between", (low, high))
    return first, last


def check_key(where: str, key: Any) -> None:
    """Raise unless `key` is a random key, on any device but the meta device, where a key has no numbers.

    >>> import torch
    >>> from funcops.random import check_key
    >>> check_key("my_op", torch.ones(2))
    Traceback (most recent call last):
        ...
    TypeError: my_op: key must be int64, got float32
    """
    if not isinstance(key, Tensor):
        fail(where, "key", "a key, random.key(0) for example", describe(key), TypeError)
    check(where, "key", key, (2,), torch.int64)
    if key.is_meta and not tracing():
        fail(where, "key", "a tensor with values (or None, if params are on the meta device)", describe(key) + " on meta")


def _check_draw(where: str, shape: Any, dtype: Any, device: Any, **numbers: Any) -> torch.dtype:
    """Check all arguments of a draw but the key, and return its dtype."""
    require_type(where, "shape", shape, tuple, list)
    require_count(where, 0, **{f"shape.{i}": size for i, size in enumerate(shape)})
    require_dtype(where, dtype)
    require_device(where, device)
    for name, value in numbers.items():
        require_type(where, name, value, float, int)
    return dtype or torch.get_default_dtype()


def _no_values(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _empty(where: str, shape: Sequence[int], dtype: torch.dtype, device: Any) -> Tensor:
    if not _no_values(device):
        fail(where, "key", "a key, random.key(0) for example; only on the meta device may it be None", "None", TypeError)
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def _signed(n: int) -> int:
    """`n` modulo 2**64 as a signed 64-bit integer."""
    n &= (1 << 64) - 1
    return n - (1 << 64) if n >> 63 else n
