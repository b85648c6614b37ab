"""A digest tells every change of a bit and every exchange of elements, and nothing else: not strides, and not how many at once."""

import math

import pytest
import torch

from funcops.adapters.recording import digest as digests
from funcops.adapters.recording.digest import BLOCK, Digest, digest

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn, torch.uint8, torch.complex64]
SIZES = (0, 1, 3, 255, 257, BLOCK - 1, 2 * BLOCK + 5, 3 * BLOCK)


def drawn(shape, dtype, seed=0):
    draw = torch.Generator().manual_seed(seed)
    t = torch.randn(shape, generator=draw)
    return t > 0 if dtype is torch.bool else (10 * t).abs().to(dtype) if dtype is torch.uint8 else (10 * t).to(dtype)


def found(t):
    return Digest.of(digest(t))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_and_offsets_do_not_matter(dtype):
    t = drawn((37, 19), dtype)
    apart = torch.cat([t.view(torch.uint8).reshape(-1)[:0], t.reshape(-1).view(torch.uint8)]).view(dtype).view(37, 19)
    moved = torch.empty(37 * 19 + 1, dtype=dtype)[1:].view(37, 19)  # begins within a word
    moved.copy_(t)
    for other in (t.t().contiguous().t(), apart, moved):
        assert torch.equal(digest(other), digest(t))
    assert digest(t).nbytes <= 100


@pytest.mark.parametrize("size", SIZES)
def test_a_bit_and_an_exchange_are_told(size):
    draw = torch.Generator().manual_seed(size)
    t = torch.randn(size, generator=draw)
    for _ in range(5 if size else 0):
        i, bit = (int(torch.randint(n, (), generator=draw)) for n in (size, 32))
        other = t.clone()
        other.view(torch.int32)[i] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
        assert found(other).hash != found(t).hash
        j = int(torch.randint(size, (), generator=draw))
        other = t.clone()
        other[[i, j]] = t[[j, i]]
        assert (found(other).hash == found(t).hash) == torch.equal(other, t)
    assert found(torch.cat([t, torch.zeros(1)])).hash != found(t).hash, "zeros at the end count"


def test_signs_of_pairs_do_not_cancel():
    """The highest bits of two words: a sum of products with odd numbers would lose them."""
    t = torch.zeros(64, dtype=torch.float64)
    hashes = {found(t).hash}
    for i in range(64):
        for j in range(i):
            other = t.clone()
            other[[i, j]] = -0.0
            hashes.add(found(other).hash)
    assert len(hashes) == 1 + 64 * 63 // 2


def test_the_hash_does_not_depend_on_how_many_words_at_once(monkeypatch):
    t = drawn(5 * BLOCK + 77, torch.float32)
    here = digest(t)

    class Elsewhere(torch.Tensor):
        is_cpu = False  # as on a device, where many blocks are one operator

    there = digest(t.as_subclass(Elsewhere)).as_subclass(torch.Tensor)
    assert here[0] == there[0]
    torch.testing.assert_close(here[1:].view(torch.float64), there[1:].view(torch.float64), rtol=1e-9, atol=1e-9)


def test_numbers():
    t = torch.tensor([0.0, -3.0, 2.0, math.inf, math.nan, 0.0])
    d = found(t)
    assert math.isnan(d.largest) and math.isnan(d.mean_square) and d.zeros == pytest.approx(1 / 3)
    assert d.nonfinite == pytest.approx(1 / 3)
    d = found(t[:3].to(torch.bfloat16))
    assert (d.largest, d.nonfinite) == (3.0, 0.0) and d.mean_square == pytest.approx(13 / 3)
    assert found(t[:0]) == found(t[:0].clone()) and found(t[:0]).largest == 0.0


@pytest.mark.parametrize("kind", ["noise", "one element", "one column", "a constant"])
def test_sketches_tell_the_distance(kind):
    """Over draws its mean square is right, and a single one is within a small factor."""
    ratios = []
    for seed in range(60):
        t = drawn((64, 300), torch.float64, seed)
        d = torch.zeros_like(t)
        if kind == "noise":
            d = 1e-3 * drawn((64, 300), torch.float64, 1000 + seed)
        elif kind == "one element":
            d[seed, 2 * seed] = 0.1
        elif kind == "one column":
            d[:, seed] = drawn(64, torch.float64, seed)
        else:
            d += 1e-3
        a, b = found(t), found(t + d)
        ratios.append(sum((x - y) ** 2 for x, y in zip(a.sketch, b.sketch, strict=True)) / 6 / float(d.square().sum()))
    # the signs are drawn once, so a constant gives one ratio
    assert kind == "a constant" or 0.6 < sum(ratios) / len(ratios) < 1.6
    assert sum(1 / 9 < ratio < 9 for ratio in ratios) > 0.8 * len(ratios)


def test_positions_are_mixed_before_the_sum(monkeypatch):
    """The test of exchanges can fail: without positions they cancel."""
    real = digests._tables
    monkeypatch.setattr(digests, "_tables", lambda device: (torch.zeros_like(real(device)[0]), real(device)[1]))
    t = torch.randn(64)
    assert found(t).hash == found(t.view(-1, 2).flip(0).reshape(-1)).hash
