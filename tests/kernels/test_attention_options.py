"""Which kernel runs attention with which options, the arguments of torch's on CUDA, and the cost of a window."""

import importlib
import itertools
import types

import pytest
import torch
from attention_calls import HALVES, made, on_cuda, refused
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from funcops import (
    AttentionConfig,
    SinkAttentionConfig,
    SinkAttentionParams,
    attention,
    attention_bwd,
    attention_fwd,
    sink_attention,
)
from funcops.engine.backend import backend
from funcops.library.kernels import attention as library
from funcops.library.kernels.attention import attend_bwd, attend_fwd
from funcops.library.kernels.scored_attention import Score, scored_attention_bwd, scored_attention_fwd
from funcops.library.kernels.triton import scaled_attention
from funcops.testing.tolerances import assert_close

aten = torch.ops.aten
PLAIN = Score(causal=True, window=0, softcap=0.0, alibi=False, scale=0.3)
OPTIONS = {  # a score; T, S; v's head size, or None; whether there is a bias, and sequences
    "plain": (PLAIN, 33, 33, None, False, False),
    "shorter": (PLAIN, 5, 33, None, False, False),
    "value": (PLAIN, 33, 33, 24, False, False),
    "window": (PLAIN._replace(window=7), 33, 33, None, False, False),
    "packed": (PLAIN, 33, 33, 40, False, True),
    "softcap": (PLAIN._replace(softcap=5.0), 33, 33, None, False, False),
    "alibi": (PLAIN._replace(alibi=True), 33, 33, None, False, False),
    "bias": (PLAIN, 33, 33, None, True, False),
}
SERVED = {  # the table of docs/kernels.md: 16-bit heads of up to 256; float32 and longer heads
    "plain": ("flash", "efficient"),
    "shorter": ("flash", "triton"),
    "value": ("flash", "efficient"),
    "window": ("flash", "triton"),
    "packed": ("flash", "triton"),
    "softcap": ("triton", "triton"),
    "alibi": ("triton", "triton"),
    "bias": ("triton", "triton"),
}


class Seen(TorchDispatchMode):
    """Records whose kernels run, and why torch's would not take their arguments."""

    def __init__(self):
        super().__init__()
        self.by, self.wrong = set(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        kernel = "flash" if "flash_attention" in name else "efficient" if "efficient_attention" in name else ""
        kernel = "triton" if "scored_attention" in name else kernel
        if kernel:
            self.by.add(kernel)
        if kernel in ("flash", "efficient"):
            dy, given = (args[:1], args[1:4]) if "backward" in name else ((), args[:3])
            rows = "dot_product" not in name  # [B, T, H, D], or [T, H, D]
            lies = [(t if t.dim() == 4 else t.unsqueeze(0)).transpose(1, 2 if rows else 1) for t in (*given, *dy)]
            self.wrong += [why for why in [refused(kernel, *lies)] if why]
        for asked in [one for one in args if isinstance(one, list)] if kernel == "efficient" else []:
            self.wrong += [] if asked == [True, True, True, False] else [f"gradients {asked}"]  # a fake kernel returns all
        return func(*args, **(kwargs or {}))


def given(name, dtype, size, make=torch.zeros):
    score, t, s, value, biased, packed = OPTIONS[name]
    b = 1 if packed else 2
    q, _, _ = made(make, dtype, b, t, 4, 2, size, "contiguous")
    _, k, v = made(make, dtype, b, s, 4, 2, size, "contiguous")
    v = v if value is None else made(make, dtype, b, s, 4, 2, value, "contiguous")[2]
    bias = make(1, 4, t, s).to(dtype) if biased else None
    ends = torch.tensor([0, 5, 5, t], dtype=torch.int32) if packed else None
    return q, k, v, bias, ends, score


@pytest.mark.parametrize("name", OPTIONS)
def test_who_attends_on_cuda(name):
    for dtype, size, column in ((torch.bfloat16, 64, 0), (torch.float32, 20, 1), (torch.bfloat16, 264, 1)):
        *given_here, score = given(name, dtype, size)
        with FakeTensorMode(), Seen() as seen:
            q, k, v, bias, ends = (t if t is None else on_cuda(t) for t in given_here)
            y, lse = attend_fwd(q, k, v, bias, ends, score)
            grads = attend_bwd(torch.empty_like(y), q, k, v, bias, ends, y, lse, score, True)
        assert seen.by == {SERVED[name][column]}, (dtype, size)
        assert not seen.wrong, (dtype, size, seen.wrong)
        assert y.shape == (*q.shape[:3], v.shape[3]) and lse.shape[:2] == (q.shape[0], q.shape[2])
        assert [None if g is None else g.shape for g in grads] == [None if t is None else t.shape for t in (q, k, v, bias)]


def stands_for(causal, options, cu, window, q, k, v, scale):
    """Our kernel's arguments for a call of torch's, with rows [B, T, H, D] or [T, H, D]."""
    sides = options.get("window_size_left"), options.get("window_size_right")
    assert sides == ((window - 1, 0) if window else (None, None)), "i - j < window, and no key after one's own"
    q, k, v = (t if t.dim() == 4 else t.unsqueeze(0) for t in (q, k, v))
    return q, k, v, None, cu, causal, window, 0.0, False, scale


def numbers(window, longest=33):
    """Run torch's CUDA kernels by ours, on the CPU. As there, rows after the `longest` of a sequence are not written."""

    def written(t, cu):
        for a, b in itertools.pairwise([] if cu is None else cu.tolist()):
            t[a + longest : b] = torch.nan
        return t

    def forward(q, k, v, cu, _, max_q, max_k, dropout, causal, mask, *, scale, **options):
        assert (max_q, max_k) == (longest, longest)
        y, lse = scored_attention_fwd(*stands_for(causal, options, cu, window, q, k, v, scale))
        return (y, lse) if cu is None else (written(y.squeeze(0), cu), lse.squeeze(0))

    def backward(dy, q, k, v, y, lse, cu, _, max_q, max_k, dropout, causal, *state, scale, **options):
        assert (max_q, max_k) == (longest, longest)
        q, k, v, *rest = stands_for(causal, options, cu, window, q, k, v, scale)
        dy, y, lse = (dy, y, lse) if cu is None else (dy.unsqueeze(0), y.unsqueeze(0), lse.unsqueeze(0))
        *grads, _ = scored_attention_bwd(dy, q, k, v, *rest[:2], y, lse, *rest[2:], False)
        return grads if cu is None else [written(g.squeeze(0), cu) for g in grads]

    named = {"_flash_attention_forward": forward, "_flash_attention_backward": backward}
    return types.SimpleNamespace(**{name: types.SimpleNamespace(default=f) for name, f in named.items()})


@pytest.mark.parametrize("name", ["window", "packed"])
def test_calls_for_cuda_give_the_same_numbers(name, monkeypatch):
    torch.manual_seed(0)
    dtype = torch.bfloat16
    for size in (64, 20):
        q, k, v, _, ends, score = given(name, dtype, size, torch.randn)
        dy = torch.randn(*q.shape[:3], v.shape[3]).to(dtype)
        with monkeypatch.context() as patch:
            patch.setattr(library, "_aten", numbers(score.window))
            y, lse = library.flash_fwd(q, k, v, ends, True, score.window, score.scale)
            got = y, library.flash_bwd(dy, q, k, v, ends, y, lse, True, score.window, score.scale)
        y, lse = scored_attention_fwd(q, k, v, None, ends, *score)
        *grads, _ = scored_attention_bwd(dy, q, k, v, None, ends, y, lse, *score, False)
        assert_close(got, (y, tuple(grads)), dtype=dtype, what=f"{name} {size}")


@pytest.mark.parametrize(("chunk", "max_seqlen", "longest"), [(0, 28, 28), (0, 29, 29), (0, 99, 33), (8, 0, 8), (8, 28, 8)])
def test_blocks_on_cuda_are_for_the_longest_sequence_not_for_the_row(chunk, max_seqlen, longest, monkeypatch):
    """33 rows of sequences of 5, 0 and 28; without a bound, blocks for 33 rows of each."""
    torch.manual_seed(0)
    q, k, v, _, ends, score = given("packed", torch.bfloat16, 64, torch.randn)
    dy = torch.randn(*q.shape[:3], v.shape[3]).to(q.dtype)
    want = attend_fwd(q, k, v, None, ends, score, chunk)
    want = want[0], attend_bwd(dy, q, k, v, None, ends, *want, score, False, chunk)
    monkeypatch.setattr(library, "_aten", numbers(0, longest))
    monkeypatch.setattr(library, "_served", lambda *_: "flash")
    y, lse = attend_fwd(q, k, v, None, ends, score, chunk, max_seqlen)
    got = y, attend_bwd(dy, q, k, v, None, ends, y, lse, score, False, chunk, max_seqlen)
    assert_close(got, want, dtype=q.dtype, what=f"{chunk} {max_seqlen}")


def test_a_device_notices_a_sequence_that_is_longer(monkeypatch):
    """Also where the ends stop before the row, whose rest is one more sequence."""
    q, k, v, _, ends, score = given("packed", torch.bfloat16, 64)
    monkeypatch.setattr(library, "_served", lambda *_: "flash")
    for bounds in (ends, torch.tensor([0, 5, 5], dtype=torch.int32)):
        with pytest.raises(RuntimeError, match=r"attention: x.3 \(cu_seqlens\) must be of sequences up to 27 long"):
            attend_fwd(q, k, v, None, bounds, score, 0, 27)


def test_float64_takes_no_kernel_that_has_none():
    for name, served in (("plain", "library"), ("shorter", ""), ("value", ""), ("window", ""), ("packed", ""), ("bias", "")):
        *given_here, score = given(name, torch.float64, 8)
        with FakeTensorMode():
            assert library._served(*(t if t is None else on_cuda(t) for t in given_here), score) == served


def test_sinks_take_the_rows_that_there_are(monkeypatch):
    """Memory-efficient attention pads its logsumexp with infinities; the sinks ignore the padding."""
    x = tuple(torch.randn(1, 5, 2, 8, dtype=torch.float64) for _ in range(3))
    params, cfg = SinkAttentionParams(torch.randn(2).double()), SinkAttentionConfig(2, causal=True)
    want, kept = sink_attention.fwd(params, x, cfg)

    def padded(*args):
        y, lse = attend_fwd(*args)
        return y, torch.nn.functional.pad(lse, (0, 27), value=float("inf"))

    monkeypatch.setattr(importlib.import_module("funcops.library.ops.sink_attention"), "attend_fwd", padded)
    y, longer = sink_attention.fwd(params, x, cfg)
    assert torch.equal(y, want) and torch.equal(longer.logsumexp, kept.logsumexp)
    assert longer.logsumexp.untyped_storage().nbytes() == 8 * 2 * 5


def grads_of(f, inputs, dy):
    leaves = [t.clone().requires_grad_() for t in inputs]
    return torch.autograd.grad(f(*leaves), leaves, dy)


@pytest.mark.parametrize(("t", "s"), [(7, 7), (1, 9), (4, 9)])
def test_gpt_oss_of_hugging_face_is_a_sink(t, s):
    """Hugging Face's eager attention with a window, groups and sinks: y and gradients within 1e-12."""
    gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    q, k, v = (torch.randn(2, n, h, 8, dtype=torch.float64) for n, h in ((t, 4), (s, 2), (s, 2)))
    sinks, dy = torch.randn(4, dtype=torch.float64), torch.randn(2, t, 4, 8, dtype=torch.float64)
    away = torch.arange(s) - torch.arange(t)[:, None] - (s - t)
    mask = torch.zeros(t, s, dtype=torch.float64).masked_fill((away > 0) | (away <= -3), float("-inf"))

    def theirs(q, k, v, sinks):
        module = types.SimpleNamespace(sinks=sinks, num_key_value_groups=2, training=False)
        return gpt_oss.eager_attention_forward(module, *(each.transpose(1, 2) for each in (q, k, v)), mask, scaling=0.4)[0]

    cfg = SinkAttentionConfig(4, causal=True, window=3, scale=0.4)
    y, kept = sink_attention.fwd(SinkAttentionParams(sinks), (q, k, v), cfg)
    dparams, dx = sink_attention.bwd(kept, dy, cfg)
    torch.testing.assert_close(y, theirs(q, k, v, sinks), rtol=0, atol=1e-12)
    torch.testing.assert_close((*dx, dparams.sinks), grads_of(theirs, (q, k, v, sinks), dy), rtol=0, atol=1e-12)


def test_gemma_2_of_hugging_face_has_a_cap():
    gemma = pytest.importorskip("transformers.models.gemma2.modeling_gemma2")
    q, k, v, dy = (torch.randn(2, 6, h, 8, dtype=torch.float64) for h in (4, 2, 2, 4))
    mask = torch.full((6, 6), float("-inf"), dtype=torch.float64).triu(1)[None, None]

    def theirs(q, k, v):
        module, heads = types.SimpleNamespace(num_key_value_groups=2, training=False), (t.transpose(1, 2) for t in (q, k, v))
        return gemma.eager_attention_forward(module, *heads, mask, scaling=0.4, softcap=1.5)[0]

    cfg = AttentionConfig(causal=True, scale=0.4, softcap=1.5)
    y, kept = attention_fwd(None, (q, k, v), cfg)
    # they take the softmax in float32
    torch.testing.assert_close(y, theirs(q, k, v), rtol=0, atol=1e-6)
    torch.testing.assert_close(attention_bwd(kept, dy, cfg)[1], grads_of(theirs, (q, k, v), dy), rtol=0, atol=1e-6)


def flops(t, **options):
    q = torch.empty(1, t, 2, 16, device="meta")
    cfg = AttentionConfig(causal=True, **options)
    with FlopCounterMode(display=False) as counter:
        y, kept = attention_fwd(None, (q, q, q), cfg)
        attention_bwd(kept, y, cfg)
    return counter.get_total_flops()


def test_a_window_costs_each_row_the_same():
    assert flops(2048, window=64) <= 2.05 * flops(1024, window=64)
    assert flops(2048, window=64) <= flops(2048, softcap=1.0) / 5


@pytest.mark.parametrize("options", [{"window": 3}, {"softcap": 2.0}, {"alibi": True}])
def test_residuals_are_as_many_bytes_as_without_options(options):
    q, k, v = torch.randn(2, 9, 4, 8), torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 8)
    kept = [attention.fwd(None, (q, k, v), AttentionConfig(causal=True, **given))[1] for given in ({}, options)]
    for name in attention.fields(AttentionConfig()):
        plain, other = (getattr(node, name) for node in kept)
        assert plain is other is None or (plain.shape, plain.dtype) == (other.shape, other.dtype), name


def test_rows_that_a_bias_hides_are_zeros():
    q, k, v = torch.randn(1, 3, 2, 8), torch.randn(1, 4, 2, 8), torch.randn(1, 4, 2, 8)
    bias = torch.zeros(1, 1, 3, 4)
    bias[..., 1, :] = float("-inf")
    cfg = AttentionConfig(bias=True)
    y, kept = attention_fwd(None, (q, k, v, bias), cfg)
    _, grads = attention_bwd(kept, torch.ones_like(y), cfg)
    assert (y[:, 1] == 0).all() and (grads[0][:, 1] == 0).all() and (grads[3][..., 1, :] == 0).all()
    assert all(g.isfinite().all() for g in (y, *grads))
    rows = [0, 2]
    want, _ = attention_fwd(None, (q[:, rows], k, v), AttentionConfig())
    assert_close(y[:, rows], want, dtype=torch.float32)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_parts_of_a_row_are_merged_by_its_logsumexp(dtype):
    """A prompt in pieces: each piece of q attends to earlier keys and to its own."""
    q, k, v = (torch.randn(1, 9, 2, 8).to(dtype) for _ in range(3))
    want, _ = attention_fwd(None, (q, k, v), AttentionConfig(causal=True))
    got = torch.cat(
        [
            attention_fwd(None, (q[:, a:b], k[:, :b], v[:, :b]), AttentionConfig(causal=True))[0]
            for a, b in ((0, 4), (4, 5), (5, 9))
        ],
        1,
    )
    assert_close(got, want, dtype=dtype)


LONG = {  # several blocks of rows and of keys: T, S, ends of sequences, whether there is a bias, the score
    "packed": (70, 70, [0, 20, 41, 70], False, PLAIN._replace(causal=False)),
    "window": (40, 75, None, False, PLAIN._replace(window=37, softcap=2.0)),
    "bias": (35, 66, None, True, PLAIN._replace(causal=False, alibi=True)),
}


@pytest.mark.parametrize("name", LONG)
def test_triton_goes_over_blocks(name):
    torch.manual_seed(0)
    t, s, ends, biased, score = LONG[name]
    q, k, v, dy = (torch.randn(1, n, h, 8) for n, h in ((t, 2), (s, 1), (s, 1), (t, 2)))
    bias = torch.randn(1, 2, t, s) if biased else None
    ends = None if ends is None else torch.tensor(ends, dtype=torch.int32)

    def run():
        y, lse = scored_attention_fwd(q, k, v, bias, ends, *score)
        return y, lse, scored_attention_bwd(dy, q, k, v, bias, ends, y, lse, *score, biased)

    want = run()
    with backend("triton"):
        got = run()
    assert_close(got, want, dtype=torch.float32)


@pytest.mark.parametrize("score", [PLAIN, PLAIN._replace(window=3, softcap=2.0, alibi=True)])
@pytest.mark.parametrize("first", [4, 9, 11])
def test_the_last_rows_of_packed_sequences(score, first, monkeypatch):
    """Rows from `first` on, over the keys of all rows, have the y and gradients that they have among all rows."""
    q, k, v, dy = torch.randn(4, 1, 12, 2, 8, dtype=torch.float64)
    dy[:, :first], ends = 0, torch.tensor([0, 3, 3, 8, 11, 12], dtype=torch.int32)

    def run(at):
        y, lse = attend_fwd(q[:, at:], k, v, None, ends, score)
        dq, *dkv, _ = attend_bwd(dy[:, at:], q[:, at:], k, v, None, ends, y, lse, score, False)
        return y[:, first - at :], lse[..., first - at :], dq[:, first - at :], *dkv

    want = run(0)
    torch.testing.assert_close(run(first), want, rtol=0, atol=1e-14)
    monkeypatch.setattr("funcops.library.kernels.scored_attention.read_here", lambda ends: False)  # as on a device
    torch.testing.assert_close(run(first), want, rtol=0, atol=1e-14)
    of_q, of_k = library._ends(ends, q[:, first:], k)
    assert of_k.tolist() == [*ends.tolist(), 12] and of_q.tolist() == [max(end - first, 0) for end in of_k.tolist()]


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("causal", [False, True])
def test_sizes_of_zero_give_the_formula_or_raise_by_name(scale, causal):
    """The sizes of q, k and v are 0, 1 or 3, in all combinations in turn."""
    cfg, served = AttentionConfig(scale=scale, causal=causal), 0
    for batch, t, s, heads, d, width in itertools.product((0, 3), (0, 1, 3), (0, 3), (0, 2), (0, 3), (0, 3)):
        q, k, v = torch.randn(batch, t, heads, d), torch.randn(batch, s, heads, d), torch.randn(batch, s, heads, width)
        try:
            y, kept = attention.fwd(None, (q, k, v), cfg)
        except ValueError as error:
            assert "attention_fwd: x." in str(error) and "must be" in str(error) and (not heads or not d or t > s), error
            continue
        dy = torch.randn(y.shape)
        got = attention.bwd(kept, dy, cfg)[1]
        given = [part.double().requires_grad_() for part in (q, k, v)]
        scores = torch.einsum("bthd,bshd->bhts", given[0], given[1]) * (d**-0.5 if scale is None else scale)
        hidden = torch.ones(t, s).tril(s - t) == 0
        p = scores.masked_fill(hidden & causal, -torch.inf).softmax(-1) if s else scores
        want = torch.einsum("bhts,bshv->bthv", p, given[2])
        torch.testing.assert_close(y, want.float())
        gradients = torch.autograd.grad(want, given, dy.double())
        for a, b in zip(got, gradients, strict=True):
            torch.testing.assert_close(a, b.float())
        served += 1
    assert served >= 16


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
def test_rows_see_their_own_chunk_however_many_rows_there_are(chunk):
    """All small numbers of rows, the last at the last key: by definition a row sees the keys of its chunk up to itself."""
    draw = torch.Generator().manual_seed(chunk)
    for keys in range(1, 9):
        for rows in range(1, keys + 1):
            q, k, v = (torch.randn(1, n, 1, 2, dtype=torch.float64, generator=draw) for n in (rows, keys, keys))
            at, key = torch.arange(keys - rows, keys)[:, None], torch.arange(keys)
            seen = (key <= at) & (key // chunk == at // chunk)
            given = [t.clone().requires_grad_() for t in (q, k, v)]
            scores = torch.einsum("bthd,bshd->bhts", *given[:2]) * PLAIN.scale
            want = torch.einsum("bhts,bshd->bthd", scores.masked_fill(~seen, -torch.inf).softmax(-1), given[2])
            y, lse = attend_fwd(q, k, v, None, None, PLAIN, chunk)
            torch.testing.assert_close(y, want)
            dy = torch.randn(y.shape, dtype=y.dtype, generator=draw)
            grads = attend_bwd(dy, q, k, v, None, None, y, lse, PLAIN, False, chunk)[:3]
            torch.testing.assert_close(grads, torch.autograd.grad(want, given, dy))


def test_every_pass_has_a_tile_for_every_size_of_a_head():
    """A head of fewer than 64 numbers takes the tile of 64."""
    tiles = scaled_attention.TILES
    assert {which for which, _ in tiles} == {"forward", "forward, p high", "by rows", "by keys"} and len(tiles) == 8
    for (which, size), of in tiles.items():
        dtype = {2: torch.bfloat16, 4: torch.float32}[size]
        made = [scaled_attention.tile_of(which, dtype, d) for d in (16, 32, 64, 128)]
        assert len(set(made[:3])) == 1 and set(of) == {64, 128}
        assert all(one.rows >= 16 and one.rows.bit_count() == 1 for one in (*made, *of.values())), "as Triton's blocks"


@pytest.mark.parametrize("change", [(2, 3, 2, 5), (2, 3, 2, 0), (1, 3, 2, 4), (2, 3, 1, 4), (2, 2, 2, 4), (2, 3, 2)], ids=str)
def test_keys_that_do_not_fit_queries_and_values_are_refused(change):
    q, v = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 2, 6)
    attention_fwd(None, (q, torch.randn(2, 3, 2, 4), v), AttentionConfig())
    with pytest.raises(ValueError, match=r"^attention_fwd: x\.[0-2] "):
        attention_fwd(None, (q, torch.randn(change), v), AttentionConfig())
