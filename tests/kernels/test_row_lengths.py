"""Triton kernels that read rows 16 bytes at a time, over drawn row lengths: shorter rows, unaligned rows, rows of several blocks.
Each is compared with the torch body."""

import random as draws

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder

from funcops import RopeConfig, random, rope_table
from funcops.engine.backend import backend
from funcops.library.kernels import (
    add_norm,
    bias_activation,
    cross_entropy,
    embedding,
    entropy,
    glu,
    norm,
    pointwise,
    qkv_split,
    rope,
)
from funcops.library.kernels.activation import activation_bwd, activation_fwd
from funcops.library.kernels.triton import norm as launches
from funcops.library.kernels.triton import norm_odd
from funcops.library.kernels.triton.aligned import GROUP, spans
from funcops.library.kernels.triton.pointwise import words_from
from funcops.testing.laws import poisoned_empties
from funcops.testing.tolerances import assert_close

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DRAWN = 3


def floats(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


def lengths(rng):
    """A drawn length of rows: short, odd, about a block, about a multiple of 16 bytes."""
    return rng.choice(
        [rng.randint(1, 19), rng.randint(20, 700), 4096 + rng.randint(-9, 9), 8 * rng.randint(1, 300) + rng.choice([0, 4])]
    )


def both(kernel, *args):
    """Results of a kernel, in memory where unwritten values show, and of its body."""
    with backend("triton"), poisoned_empties():
        got = kernel(*args)
    return got, kernel.kernel.torch_impl(*args)


def losses(rng, rows, width, dtype):
    logits, labels = floats(rows, width, dtype=dtype), torch.randint(width, (rows,))
    labels[rng.randrange(rows)] = rng.choice([-100, 0, width - 1])
    options = rng.choice([0.0, 0.1]), -100, rng.choice([0.0, 1e-3])
    got, want = both(cross_entropy.cross_entropy_fwd, logits, labels, *options)
    yield got, want
    yield both(cross_entropy.cross_entropy_bwd, torch.rand(rows), logits, labels, want[1], *options)


def entropies(rng, rows, width, dtype):
    """Beside a class that is never drawn; the losses have the bits of those without entropies."""
    logits, labels = floats(rows, width, dtype=dtype), torch.randint(width, (rows,))
    logits[rng.randrange(rows), rng.randrange(width)] = -float("inf") if width > 1 else 0.0
    labels = logits.argmax(1).where(torch.rand(rows) < 0.8, torch.tensor(-100))
    options = 0.0, -100, rng.choice([0.0, 1e-3])
    got, want = both(entropy.entropy_fwd, logits, labels, *options)
    yield got, want
    with backend("triton"):
        assert all(map(torch.equal, got[:2], cross_entropy.cross_entropy_fwd(logits, labels, *options)))
    args = torch.rand(rows), torch.randn(rows), logits, labels, want[1], want[2], 0.0, -100, 1e-3
    yield both(entropy.entropy_bwd, *args)
    owned = logits.clone(), logits.clone()
    for name, t in zip(("triton", "torch"), owned, strict=True):
        with backend(name):
            entropy.entropy_bwd_owned(*args[:2], t, *args[3:], 0, width)
    yield owned


def losses_with_gradients(rng, rows, width, dtype):
    logits, labels = floats(rows, width, dtype=dtype), torch.randint(width, (rows,))
    labels[rng.randrange(rows)] = rng.choice([-100, 0, width - 1])
    options, dloss = (rng.choice([0.0, 0.1]), -100, rng.choice([0.0, 1e-3])), rng.choice([torch.rand(rows), torch.tensor(0.3)])
    found, owned = [], (logits.clone(), logits)
    for name, t in zip(("triton", "torch"), owned, strict=True):
        with backend(name):
            found.append(cross_entropy.cross_entropy_with_gradient(dloss, t, labels, *options))
    yield found
    yield owned


def gradients_in_place(rng, rows, width, dtype):
    logits, first = floats(rows, width, dtype=dtype), rng.randint(0, 9)
    args = torch.randint(width + 18, (rows,)), torch.rand(rows, 2) + 4.0, 0.1, -100, 1e-3, first, width + 18
    owned = logits.clone(), logits.clone()
    for name, t in zip(("triton", "torch"), owned, strict=True):
        with backend(name):
            cross_entropy.cross_entropy_bwd_owned(torch.ones(()), t, *args)
    yield owned


def sums(rng, rows, width, dtype):
    x, b = floats(rows, width, dtype=dtype), floats(width, dtype=dtype)
    yield both(pointwise.add, x, b)
    yield both(bias_activation.bias_activation_fwd, x, b, rng.choice(["gelu", "gelu_tanh", "tanh"]))


def dropped(rng, rows, width, dtype):
    x, b = floats(rows, width, dtype=dtype), floats(width, dtype=dtype)
    key, p = random.fold_in(random.key(7), rng.randrange(2**40)), rng.choice([0.5, 1e-12, 0.25, 1 - 2**-40])
    yield both(pointwise.dropout, x, key, min(p, 0.5))
    if p < 0.6:
        yield both(pointwise.dropout_add, x, rng.choice([b, None]), x, key, p)


def gates(rng, rows, width, dtype):
    gate, linear, dy = (floats(rows, width, dtype=dtype) for _ in range(3))
    yield both(glu.glu_pair_fwd, gate, linear, "geglu")
    yield both(glu.glu_pair_bwd, dy, gate, linear, "swiglu")
    with backend("triton"), poisoned_empties():
        found = glu.glu_pair_bwd_recompute(over := dy.clone(), gate, linear, "geglu")
    wanted = glu.glu_pair_bwd_recompute.kernel.torch_impl(again := dy.clone(), gate, linear, "geglu")
    yield (over, *found), (again, *wanted)


@pytest.mark.turns("dtype")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "kernels", [losses, entropies, losses_with_gradients, gradients_in_place, sums, dropped, gates], ids=lambda f: f.__name__
)
def test_rows_of_any_length(kernels, dtype):
    rng = draws.Random(kernels.__name__ + str(dtype))
    for rows, width in [(7, 5), *((rng.randint(1, 5), lengths(rng)) for _ in range(DRAWN))]:
        for got, want in kernels(rng, rows, width, dtype):
            assert_close(got, want, dtype=dtype, length=width)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_blocks_of_odd_vocabularies_begin_with_a_line_of_the_cache(dtype, monkeypatch):
    """So a warp's 512 bytes, which it loads or stores at a time, lie in four lines, and not in five."""
    found, width = [], 4096 + draws.Random(str(dtype)).randint(200, 400)
    logits, labels = floats(5, width, dtype=dtype), torch.randint(width, (5,))
    for name in ("create_masked_load", "create_masked_store"):

        def accessed(self, ptrs, *args, before=getattr(InterpreterBuilder, name)):
            if ptrs.data.size >= 4096:
                found.append(int(ptrs.data.min()) - logits.data_ptr())
            return before(self, ptrs, *args)

        monkeypatch.setattr(InterpreterBuilder, name, accessed)
    with backend("triton"):
        _, lse = cross_entropy.cross_entropy_fwd(logits, labels, 0.0, -100, 0.0)
        cross_entropy.cross_entropy_bwd_owned(torch.ones(()), logits, labels, lse, 0.0, -100, 0.0, 0, width)
    assert len(found) == 5 * 2 * 3, "two blocks a row, of which the forward loads one, and the backward loads and stores one"
    assert not any(at % 128 for at in found)


@pytest.mark.turns("dtype")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_odd_rows_of_norms_share_programs(dtype, monkeypatch):
    """A program has rows of equal alignment, at every offset within 16 bytes. The number of programs of a forward changes no
    bit."""
    rng = draws.Random(str(dtype))
    for name in ("PARTS", "ODD_PROGRAMS"):
        assert getattr(launches, name) % GROUP == 0
        monkeypatch.setattr(launches, name, GROUP)
    rows, width = rng.randint(9, 12), rng.choice([2 * rng.randint(1024, 1100) + 1, 4099, 5001, 2056])
    x, residual, dy, ds = (floats(rows, width, dtype=dtype) for _ in range(4))
    w, b = floats(width, dtype=dtype), floats(width, dtype=dtype)
    got, want = both(add_norm.add_layer_norm_fwd, x, residual, w, b, 1e-5, False)
    assert_close(got, want, dtype=dtype, length=width)
    with monkeypatch.context() as patch, backend("triton"):
        patch.setattr(launches, "ODD_PROGRAMS", 2 * GROUP)
        again = add_norm.add_layer_norm_fwd(x, residual, w, b, 1e-5, False)
    assert all(torch.equal(*pair) for pair in zip(got, again, strict=True))
    args = dy, ds, want[1], w, b, *want[2:], False, True, True
    (dx, y, *parts), (want_dx, _, *totals) = both(add_norm.add_layer_norm_bwd_recompute, *args)
    assert_close((dx, y), (want_dx, want[0]), dtype=dtype, length=width)
    sums, total = both(norm.row_sums, dy)
    for part, whole in zip([*parts, sums], [*totals, total], strict=True):
        assert part.stride(0) % 16 == 0
        assert_close(part.sum(0), whole.sum(0), dtype=dtype, length=rows)
    with backend("triton"):
        found = norm.sum_two_parts(*parts, torch.float32)
        assert torch.equal(found[0], norm.sum_parts(parts[0].contiguous(), torch.float32))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize(("kind", "shifted"), [("rms", True), ("layer", False), ("layer without bias", True)])
def test_rows_that_a_backward_loads_twice(kind, shifted, dtype):
    """Too long to be kept in registers: dx, y and the sums of all are made from the second load."""
    width = {torch.float32: 4112, torch.bfloat16: 8208}[dtype]
    assert launches.whole_rows(width, dtype.itemsize).again
    x, residual, dy, ds = (floats(3, width, dtype=dtype) for _ in range(4))
    w, b = floats(width, dtype=dtype), floats(width, dtype=dtype) if kind == "layer" else None
    if kind == "rms":
        y, stream, rstd = add_norm.add_rms_norm_fwd(x, residual, w, 1e-5, shifted)
        found = both(add_norm.add_rms_norm_bwd_recompute, dy, ds, stream, w, rstd, shifted, True)
    else:
        y, stream, mean, rstd = add_norm.add_layer_norm_fwd(x, residual, w, b, 1e-5, shifted)
        found = both(add_norm.add_layer_norm_bwd_recompute, dy, ds, stream, w, b, mean, rstd, shifted, True, b is not None)
    (dx, again, *parts), (want, _, *totals) = found
    assert_close((dx, again), (want, y), dtype=dtype, length=width)
    for part, whole in zip(parts, totals, strict=True):
        if whole is not None:
            assert_close(part.sum(0), whole.sum(0), dtype=dtype, length=3)


def test_parts_are_read_no_further_than_their_memory():
    """Nothing is read beyond memory that ends with the last row; if there is room, its content is ignored."""
    for width in (5, 333):
        whole = launches.room(torch.empty(1, width), 3, True)
        assert launches.rows_of(whole) == ((whole,), whole.stride(0)) and whole.stride(0) % 16 == 0
        cut = torch.empty(2 * whole.stride(0) + width).as_strided(whole.shape, whole.stride())
        found, stride = launches.rows_of(cut)
        assert stride == width and found[0].is_contiguous()
        base = torch.full((3, whole.stride(0)), torch.nan)
        base[:, :width] = torch.randn(3, width)
        with backend("triton"):
            assert_close(norm.sum_parts(base[:, :width], torch.float32), base[:, :width].sum(0), dtype=torch.float32)


@pytest.mark.turns("dtype")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_of_any_size(dtype):
    """Heads that are rotated wholly, partly or not at all; angles shared by the batches or not."""
    rng = draws.Random(str(dtype))
    for _ in range(4):
        batches, tokens, heads, kv_heads = (rng.randint(1, 3) for _ in range(4))
        dim = rng.choice([rng.randint(2, 40), 64, 80, 128])
        rotary, interleaved, shared = 2 * rng.randint(1, dim // 2), rng.random() < 0.5, rng.random() < 0.7
        positions = torch.randint(999, (tokens,) if shared else (batches, tokens))
        table = rope_table(positions, RopeConfig(rotary, theta=100.0, interleaved=interleaved))
        q = floats(batches, tokens, heads, dim, dtype=dtype)
        k, v = (floats(batches, tokens, kv_heads, dim, dtype=dtype) for _ in range(2))
        turning = rng.choice([table, table, None])
        for got, want in (
            both(rope.rope_apply, q, table, interleaved, rng.random() < 0.5),
            both(qkv_split.qkv_split_fwd, torch.cat((q, k, v), -2).flatten(-2), turning, heads, kv_heads, interleaved),
            both(qkv_split.qkv_split_bwd, q, k, v, turning, interleaved),
        ):
            assert_close(got, want, dtype=dtype)


@pytest.mark.turns("dtype")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_no_token_has_are_zero(dtype):
    """Few tokens or many, all equal or far apart, with and without the first and last ids, padding among them."""
    rng = draws.Random(str(dtype))
    for _ in range(4):
        n, vocab, width = rng.choice([1, 5, 40]), rng.choice([1, 3, 17, 99]), rng.choice([1, 5, 16])
        known = rng.sample(range(vocab), rng.randint(1, min(vocab, 6))) if rng.random() < 0.7 else range(vocab)
        ids = torch.tensor([rng.choice(known) for _ in range(n)])
        dy, padding = floats(n, width, dtype=dtype), rng.choice([-1, *known])
        got, want = both(embedding.embedding_wgrad, dy, ids, vocab, padding)
        assert_close(got, want, dtype=torch.bfloat16 if dtype is torch.float16 else dtype, length=n)
        base = torch.randn(vocab, width)
        main_grad = base.clone()
        with backend("triton"):
            embedding.embedding_wgrad_into(dy, ids, padding, main_grad)
        assert_close(main_grad, base + embedding.embedding_wgrad(dy.float(), ids, vocab, padding), dtype=torch.float32, length=n)
        assert torch.equal(main_grad[want[:, 0] == 0], base[want[:, 0] == 0])


@triton.jit
def _draw(key_ptr, words_ptr, first, BLOCK: tl.constexpr):
    words = words_from(tl.load(first), tl.load(key_ptr), tl.load(key_ptr + 1), BLOCK)
    tl.store(words_ptr + tl.arange(0, 4 * BLOCK), words.to(tl.int64))


@pytest.mark.parametrize("first", [0, 2**29 - 4, 2**31 - 4, 2**32 - 4, 2**34 - 4, 2**40 + 5])
def test_random_words_of_any_position(first):
    """Positions beyond 2^31, and positions where a word of the counter ends."""
    key, words = random.fold_in(random.key(2**63 + 11), 2**40 + 7), torch.empty(32, dtype=torch.int64)
    _draw[(1,)](key, words, torch.tensor([first]), 8)
    low, block = 0xFFFFFFFF, first + torch.arange(8)
    (seed, stream), wanted = key.tolist(), (block & low, block >> 32)
    want = random.philox((seed & low, (seed >> 32) & low), (*wanted, stream & low, (stream >> 32) & low))
    assert torch.equal(words & low, torch.stack(want, -1).flatten())


def test_a_span_is_a_multiple_of_what_repeats_and_of_16_bytes():
    rng = draws.Random(0)
    for _ in range(300):
        period = rng.choice([rng.randint(1, 40), rng.randint(1, 9000), 2 ** rng.randint(0, 31), rng.randint(2**27, 2**31)])
        rows = rng.randint(1, 10000)
        s = spans(rows * period, period, 1024)
        span, (across, down, _) = GROUP * s.groups, s.grid
        assert span % period == 0 and s.wraps == (span != period) and s.wide == (span + 1024 > 2**31)
        assert across * 1024 >= min(span, rows * period) > (across - 1) * 1024 and 1 <= down <= max(1, rows * period // span)
        assert span <= 8 * max(period, 1024), "lanes beyond a span do nothing"


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh"])
def test_gelu_is_as_exact_as_float32(kind):
    """Also far from 0, where a sum with 1 would lose it."""
    x = torch.linspace(-12.0, 12.0, 4000)
    (y, want), (dx, slope) = both(activation_fwd, x, kind), both(activation_bwd, torch.ones_like(x), x, kind)
    want, slope = activation_fwd(x.double(), kind), activation_bwd(torch.ones_like(x).double(), x.double(), kind)
    assert ((y - want).abs() <= 3e-7 * want.abs().clamp(min=0.3)).all()
    assert ((dx - slope).abs() <= 5e-7).all()
    near = (x < 0) & (x > -5)
    assert ((y - want).abs() <= 2e-5 * want.abs())[near].all()


@pytest.mark.parametrize("width", [33, 37, 40])
def test_a_program_sums_every_row_of_its_part_from_end_to_end(width):
    """The rows of a part begin at one offset within 16 bytes; its last program sums what lies outside of whole groups."""
    dy, block = floats(5 * GROUP + 3, width), 16
    parts = torch.full((GROUP, launches.stride_of(width)), torch.nan)
    across = -(-(width // GROUP * GROUP) // block) + 1
    norm_odd.launch_column_sums(GROUP, across, 1, dy, parts, len(dy), width, parts.stride(0), 1, 2, block, num_warps=4)
    want = torch.stack([dy[part::GROUP].sum(0) for part in range(GROUP)])
    assert_close(parts[:, :width], want, dtype=torch.float32, length=len(dy))
