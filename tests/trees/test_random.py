"""Keys and bits: the published Philox vectors, independence of streams, distributions."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from funcops.engine import random
from funcops.engine.backend import backend
from funcops.graphs import graphed

FULL = 0xFFFFFFFF
# Random123, kat_vectors, philox4x32 with 10 rounds: counter, key, result.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((FULL,) * 4, (FULL,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@pytest.mark.parametrize(("counter", "key", "want"), VECTORS)
def test_known_answers(counter, key, want):
    def words(values):
        return tuple(torch.tensor(v, dtype=torch.int64) for v in values)

    assert tuple(int(w) for w in random.philox(words(key), words(counter))) == want


def test_bits_are_the_words_of_counted_blocks():
    assert [int(w) for w in random.bits(random.key(0), 4)] == list(VECTORS[0][2])
    assert torch.equal(random.bits(random.key(5), 10)[:7], random.bits(random.key(5), 7))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("seed", [0, 7, -5, 2**63 - 1, 2**64 - 1])
def test_words_made_in_parts_are_philox_words(seed, threads, monkeypatch):
    """At sizes around the ends of parts, and in blocks beyond 2^32, against the function of the published vectors."""
    monkeypatch.setattr(random, "PART", 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    key = random.fold_in(random.key(seed), 3)
    own, stream = (int(word) & (2**64 - 1) for word in key)
    for blocks in (torch.arange(n) for n in (0, 1, 7, 8, 9, 16, 17, 40)):
        for first in (0, 2**32 - 3, 2**40):
            counter = (blocks + first) & FULL, (blocks + first) >> 32, stream & FULL, stream >> 32
            words = torch.stack(
                random.philox((own & FULL, own >> 32), tuple(torch.as_tensor(c).expand(len(blocks)) for c in counter)), -1
            )
            assert torch.equal(random._blocks(key, blocks + first), words.reshape(-1))


def test_a_recorded_or_traced_draw_reads_its_key_again():
    first, second = random.key(1), random.key(2)

    def draw(key):
        return random.bits(key, 9)

    for made in (torch.compile(draw, backend="eager"), make_fx(draw)(first), graphed(draw, first)):
        assert made(first).equal(draw(first)) and made(second).equal(draw(second))
    assert torch.func.vmap(draw)(torch.stack((first, second)))[1].equal(draw(second))


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
    for key in (None, random.key(0)):
        drawn = random.normal(key, (3, 2), device="meta"), random.uniform(random.key(0), (3, 2), device="meta")
        assert {(t.device.type, t.shape) for t in drawn} == {("meta", (3, 2))}


@pytest.mark.parametrize("draw", [random.uniform, random.normal])
def test_a_tensor_without_values_is_no_draw_that_was_put_off(draw):
    with random.put_off() as drawn:
        values = draw(random.key(0), (3, 2))
        assert draw(random.key(0), (3, 2), device="meta").is_meta and draw(None, (3, 2), device="meta").is_meta
    assert [given for given, _ in drawn] == [values]


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
EXTREMES = torch.tensor([0, 1, 255, 256, 2**31, FULL - 255, FULL - 1, FULL])
RANGES = [
    (0.0, 1.0),
    (1.0, 2.0),
    (-1.0, 0.0),
    (-0.7, 0.7),
    (0.1, 0.3),
    (-3.0, -2.0),
    (0.0, 1e-7),
    (-65504.0, 65504.0),
    (1.0, 1.0625),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("low", "high"), RANGES, ids=str)
def test_uniform_stays_below_high_in_every_dtype(low, high, dtype, monkeypatch):
    """From the words at both ends, where rounding would leave the range."""
    monkeypatch.setattr(random, "bits", lambda key, n: EXTREMES[:n])
    drawn = random.uniform(random.key(0), (len(EXTREMES),), low=low, high=high, dtype=dtype).double()
    assert drawn.dtype is torch.float64 and low <= float(drawn.min()) and float(drawn.max()) < high
    assert (drawn.diff() >= 0).all()
    limits = torch.finfo(dtype)
    near = 2 * limits.eps * max(abs(low), abs(high), limits.tiny) + (high - low) * 2.0**-24
    assert float(drawn.min()) <= low + near and float(drawn.max()) >= high - near, "no further from the ends than rounding takes"


def test_a_range_without_a_number_is_refused():
    for low, high, dtype in ((1.0, 1.0, torch.float64), (2.0, 1.0, torch.float32), (1.001, 1.002, torch.bfloat16)):
        with pytest.raises(ValueError, match="random.uniform: low, high must be"):
            random.uniform(random.key(0), (3,), low=low, high=high, dtype=dtype)
    for low, high in ((float("-inf"), 0.0), (0.0, float("nan")), (-3e38, 3e38)):
        with pytest.raises(ValueError, match="random.uniform: low, high must be finite"):
            random.uniform(random.key(0), (3,), low=low, high=high, dtype=torch.float32)


@pytest.mark.parametrize("word", [0, FULL])
def test_normals_are_finite_at_the_ends_of_the_bits(word, monkeypatch):
    """The logarithm never gets a zero."""
    monkeypatch.setattr(random, "bits", lambda key, n: torch.full((n,), word))
    drawn = random.normal(random.key(0), (6,), dtype=torch.float64)
    assert drawn.isfinite().all() and float(drawn.abs().max()) <= (2 * 32 * 0.6932) ** 0.5


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_fold_in_is_injective_over_its_range(name):
    """Near 0, near 2^63, and ids of names; by the splitmix64 finaliser written out in Python's integers."""

    def stream(before, data):
        z = (before + (data + 1) * 0x9E3779B97F4A7C15) % 2**64
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            z = (z ^ (z >> shift)) * factor % 2**64
        return z ^ (z >> 31)

    if name == "triton":
        pytest.importorskip("triton")
    given = [*range(200), *(2**31 + i for i in range(-3, 3)), *(2**63 - i for i in range(1, 50)), random.path_id("norm")]
    for key in (random.key(0), random.fold_in(random.key(-5), 3)):
        with backend(name):
            made = [random.fold_in(key, data) for data in given]
            of_tensors = [random.fold_in(key, torch.tensor(data)) for data in given]
            narrow = [
                random.fold_in(key, torch.tensor(7, dtype=dtype)) for dtype in (torch.int32, torch.int16, torch.int8, torch.uint8)
            ]
        assert [k.tolist() for k in made] == [k.tolist() for k in of_tensors]
        assert [int(k[1]) % 2**64 for k in made] == [stream(int(key[1]) % 2**64, data) for data in given]
        assert len({int(k[1]) for k in (key, *made)}) == len(given) + 1 and {int(k[0]) for k in made} == {int(key[0])}
        assert all(torch.equal(k, made[7]) for k in narrow)


def test_data_on_the_host_go_to_a_device_by_value(monkeypatch):
    pytest.importorskip("triton")
    from funcops.library.kernels.triton import random as kernels

    given = []
    monkeypatch.setattr(kernels, "_launch_fold_in", lambda *args, **_: given.append(args))
    with backend("triton"):
        random.fold_in(torch.empty(2, dtype=torch.int64, device="meta"), torch.tensor(9, dtype=torch.uint8))
    ((*_, key, data, out, number, of_data),) = given
    assert (data, number, of_data) == (None, 9, False) and out.shape == key.shape


@pytest.mark.parametrize("data", [-1, -(2**63), 2**63, 2**64, 2**64 + 1])
def test_other_data_are_refused(data):
    with pytest.raises(ValueError, match=r"random.fold_in: data must be from 0 to 2\^63 - 1, got"):
        random.fold_in(random.key(0), data)
    with pytest.raises(ValueError, match="data must be|seed must be") if data != -1 else pytest.raises(ValueError):
        random.fold_in(random.key(0), torch.tensor(data)) if -(2**63) <= data < 2**63 else random.key(data * 2)
    with pytest.raises(TypeError, match="random.fold_in: data must be int64"):
        random.fold_in(random.key(0), torch.tensor(1.0))


@pytest.mark.parametrize("place", range(64))
def test_every_bit_of_a_key_counts(place):
    """Every bit of the seed and of the stream, the sign bit included."""
    bit = (1 << place) - ((1 << 64) if place == 63 else 0)
    key = torch.tensor([5, 7])
    drawn = random.bits(key, 8)
    for i in range(2):
        other = key.clone()
        other[i] ^= bit
        assert not torch.equal(random.bits(other, 8), drawn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("draw", [random.uniform, random.normal])
def test_a_draw_without_values_has_only_a_shape(draw, dtype):
    found = draw(random.key(0), (2, 3), device="meta", dtype=dtype)
    assert found.is_meta and found.shape == (2, 3) and found.dtype is dtype


def test_pieces_of_a_draw_without_values_have_their_own_shape():
    whole = random.uniform(random.key(0), (6, 4), ranges=(((1, 2), (4, 1)), ((0, 3),)))
    found = random.uniform(random.key(0), (6, 4), ranges=(((1, 2), (4, 1)), ((0, 3),)), device="meta")
    assert found.is_meta and found.shape == whole.shape == (3, 3)


@pytest.mark.parametrize("seed", [0, 7, 2**63 + 5, 2**64 - 1])
def test_a_key_of_torch_is_a_key_as_int64(seed):
    theirs = torch.tensor([seed, 0], dtype=torch.uint64)  # as torch.func._random.key makes it
    assert torch.equal(random.bits(theirs.view(torch.int64), 9), random.bits(random.key(seed), 9))
    for draw in (lambda: random.bits(theirs, 9), lambda: random.fold_in(theirs, 1), lambda: random.split(theirs, 2)):
        with pytest.raises(TypeError, match="key must be int64, got uint64"):
            draw()
