"""Keys and bits: the published Philox vectors, independence of streams, distributions."""

import pytest
import torch

from funcops import random

FULL = 0xFFFFFFFF
# Random123, kat_vectors, philox4x32 with 10 rounds: counter, key, result.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((FULL,) * 4, (FULL,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "want"), VECTORS)
def test_known_answers(counter, key, want):
    def words(values):
        return tuple(torch.tensor(v, dtype=torch.int64) for v in values)

    assert tuple(int(w) for w in random.philox(words(key), words(counter))) == want


def test_bits_are_the_words_of_counted_blocks():
    assert [int(w) for w in random.bits(random.key(0), 4)] == list(VECTORS[0][2])
    assert torch.equal(random.bits(random.key(5), 10)[:7], random.bits(random.key(5), 7))


def test_streams_differ_and_repeat():
    key = random.key(3)
    streams = [key, random.key(4), *random.split(key, 5), random.fold_in(key, 99), random.fold_in(random.fold_in(key, 0), 0)]
    draws = [tuple(random.bits(k, 8).tolist()) for k in streams]
    assert len(set(draws)) == len(draws)
    assert torch.equal(random.fold_in(key, 7), random.fold_in(key, torch.tensor(7)))
    assert random.path_id("blocks") == random.path_id("blocks") != random.path_id("block")


def test_distributions():
    n = 200_000
    u = random.uniform(random.key(1), (n,), low=-1.0, high=3.0, dtype=torch.float64)
    assert -1 <= float(u.min()) and float(u.max()) < 3
    assert abs(float(u.mean()) - 1) < 4 * (4 / 12**0.5) / n**0.5
    z = random.normal(random.key(2), (n,), dtype=torch.float64)
    assert abs(float(z.mean())) < 4 / n**0.5
    assert abs(float(z.var()) - 1) < 4 * (2 / n) ** 0.5


def test_wrong_keys_are_named():
    with pytest.raises(TypeError, match="random.bits: key must be int64, got float32"):
        random.bits(torch.ones(2), 3)
    with pytest.raises(TypeError, match="random.uniform: key must be a key"):
        random.uniform(None, (3,))
    assert random.normal(None, (3, 2), device="meta").device.type == "meta"
