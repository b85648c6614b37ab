"""Attention over a cache, by torch and by Triton, against softmax written out over the whole sequence in float64."""

import random as draws

import pytest
import torch

from funcops.engine.backend import backend
from funcops.library.kernels import slot_attention as declared
from funcops.library.kernels.scored_attention import alibi_slopes
from funcops.library.kernels.slot_attention import slot_attention_fwd
from funcops.library.kernels.triton import slot_attention as by_triton
from funcops.testing.tolerances import assert_close

OPTIONS = ("window", "chunk", "softcap", "alibi", "bias", "sinks", "latents", "strides")


def drawn(seed):
    """A call: sizes, options, and sequences of which some are empty, some short, and some longer than a ring."""
    rng = draws.Random(seed)
    options = {name: rng.random() < 0.3 for name in OPTIONS}
    tokens, kv_heads = rng.choice((1, 1, 2, 5, 17, 40)), 1 if options["latents"] else rng.choice((1, 2, 3))
    window = rng.randint(1, 60) if options["window"] else 0
    chunk = rng.randint(1, 60) if options["chunk"] else 0
    reach = min(window or chunk, chunk or window)
    slots = reach + tokens - 1 + rng.randint(0, 3) if reach else rng.choice((tokens + 3, 70, 300, 600))
    longest = slots * (3 if reach else 1)
    ends = [rng.choice((0, tokens, rng.randint(tokens, longest), longest)) for _ in range(rng.choice((1, 3)))]
    firsts = [max(0, end - tokens) for end in ends]
    size, width = rng.choice(((8, 8), (16, 5), (24, 32), (48, 32), (64, 64), (80, 80)))
    if options["latents"]:
        size, width = rng.choice(((12, 8), (48, 32), (40, 40)))
    return (
        options,
        tokens,
        slots,
        (window, chunk),
        longest,
        torch.tensor(firsts),
        torch.tensor(ends),
        (kv_heads, rng.choice((1, 2, 4))),
        (size, width),
    )


def made(seed, dtype):
    """The arguments of the kernel, and y."""
    options, tokens, slots, (window, chunk), longest, firsts, ends, (kv_heads, group), (size, width) = drawn(seed)
    torch.manual_seed(seed)
    batch, heads = len(ends), kv_heads * group
    q, keys = torch.randn(batch, tokens, heads, size), torch.randn(batch, longest, kv_heads, size)
    values = keys[..., :width] if options["latents"] else torch.randn(batch, longest, kv_heads, width)
    bias = torch.randn(draws.Random(seed).choice((1, batch)), heads, tokens, longest).to(dtype) if options["bias"] else None
    sinks = torch.randn(heads).to(dtype) if options["sinks"] else None
    q, keys, values = (t.to(dtype) for t in (q, keys, values))
    k, v = (torch.full((batch, kv_heads, slots, n), 7.0, dtype=dtype) for n in (size, width))
    for row, end in enumerate(ends.tolist()):
        for position in range(end):  # later ones write over earlier ones
            k[row, :, position % slots], v[row, :, position % slots] = keys[row, position], values[row, position]
    if options["strides"]:
        k, v = (t.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for t in (k, v))
    softcap = 3.0 if options["softcap"] else 0.0
    masks = window, chunk, softcap, options["alibi"], size**-0.5
    args = q, k, None if options["latents"] else v, firsts, ends, bias, sinks, width, *masks
    return args, whole(*(None if t is None else t.double() for t in (q, keys, values, bias, sinks)), firsts, ends, *args[8:])


def whole(q, keys, values, bias, sinks, firsts, ends, window, chunk, softcap, alibi, scale):
    """Attention over all positions of each sequence."""
    y = q.new_zeros((*q.shape[:3], values.shape[3]))
    for row, end in enumerate(ends.tolist()):
        k, v = (t[row, :end].repeat_interleave(q.shape[2] // t.shape[2], 1).transpose(0, 1) for t in (keys, values))
        s = q[row].transpose(0, 1) @ k.mT * scale
        s = softcap * (s / softcap).tanh() if softcap else s
        away = (firsts[row] + torch.arange(q.shape[1]))[:, None] - torch.arange(end)
        if alibi:
            s = s - alibi_slopes(q.shape[2], q.device, q.dtype)[:, None, None] * away
        if bias is not None:
            s = s + bias[row % len(bias), :, :, :end]
        s = s.masked_fill((away < 0) | (away >= window if window else away < 0), float("-inf"))
        if chunk:
            at = torch.arange(end), (firsts[row] + torch.arange(q.shape[1]))[:, None]
            s = s.masked_fill(at[0] // chunk != at[1] // chunk, float("-inf"))
        extra = s.new_full((*s.shape[:2], 1), float("-inf")) if sinks is None else sinks[:, None, None].expand(*s.shape[:2], 1)
        p = torch.cat((s, extra), -1).softmax(-1)[..., :-1].nan_to_num(0.0)
        y[row] = (p @ v).transpose(0, 1)
    return y


@pytest.mark.turns("seed", every=4)
@pytest.mark.parametrize("seed", range(80))
@pytest.mark.parametrize("by", ["torch", "triton"])
def test_drawn_calls_equal_softmax_written_out(by, seed):
    dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3] if by == "triton" or seed % 2 else torch.float64
    args, want = made(seed, dtype)
    with backend(by):
        y = slot_attention_fwd(*args)
    assert y.dtype is dtype and y.is_contiguous()
    assert_close(y, want, dtype=dtype)


def test_draws_reach_every_option_and_both_launches():
    found = [drawn(seed) for seed in range(80)]
    assert all(any(options[name] for options, *_ in found) for name in OPTIONS)
    assert any(n <= by_triton.FEW and slots > 512 for _, n, slots, *_ in found)
    assert any(n > by_triton.FEW and slots > 512 for _, n, slots, *_ in found)
    assert any((ends == 0).any() for *_, ends, _, _ in found) and any((ends > slots).any() for _, _, slots, *_, ends, _, _ in found)


def test_what_empty_slots_hold_changes_nothing():
    """NaN in slots that no position has filled."""
    k, v, q = torch.randn(2, 2, 600, 16), torch.randn(2, 2, 600, 16), torch.randn(2, 1, 4, 16)
    ends = torch.tensor([300, 5])
    for row, end in enumerate(ends.tolist()):
        k[row, :, end:], v[row, :, end:] = float("nan"), float("nan")
    with backend("triton"):
        y = slot_attention_fwd(q, k, v, ends - 1, ends, None, None, 16, 0, 0, 0.0, False, 0.25)
    assert y.isfinite().all()


def test_a_sequence_has_the_same_bits_beside_others_and_with_more_room():
    torch.manual_seed(0)
    q, k, v, ends = torch.randn(3, 1, 4, 32), torch.randn(3, 2, 900, 32), torch.randn(3, 2, 900, 32), torch.tensor([700, 3, 899])
    with backend("triton"):
        y = slot_attention_fwd(q, k, v, ends - 1, ends, None, None, 32, 0, 0, 0.0, False, 0.2)
        for row in range(3):
            part = slice(row, row + 1)
            wider = [torch.cat((t[part], torch.randn(1, 2, 1000, 32)), 2) for t in (k, v)]
            alone = slot_attention_fwd(q[part], *wider, ends[part] - 1, ends[part], None, None, 32, 0, 0, 0.0, False, 0.2)
            assert torch.equal(alone, y[part])
    assert declared.slot_attention_fwd.kernel.triton_impl is by_triton.slot_attention_fwd


@pytest.mark.parametrize("by", ["torch", "triton"])
@pytest.mark.parametrize(("size", "width"), [(8, 0), (8, 2048)], ids=["no values", "long values"])
def test_heads_that_kernels_lack_are_left_to_torch(by, size, width):
    """The average of the values, as the keys say nothing."""
    q, k, v, ends = torch.zeros(2, 1, 4, size), torch.randn(2, 2, 5, size), torch.randn(2, 2, 5, width), torch.tensor([5, 3])
    with backend(by):
        y = slot_attention_fwd(q, k, v, ends - 1, ends, None, None, width, 0, 0, 0.0, False, 1.0)
    want = torch.stack([v[row, :, :end].mean(1).repeat_interleave(2, 0) for row, end in enumerate((5, 3))])[:, None]
    assert_close(y, want, dtype=torch.float32)


def test_a_program_takes_as_many_rows_as_the_device_holds(monkeypatch):
    """The least that it needs is a row of q, keys and values with one stage; where loads do not go on meanwhile, one factor."""
    from funcops.engine.backend.shared import HOPPER, SharedMemory
    from funcops.library.kernels.triton import slot_attention as module

    latents, many = (512, 64, 512), module.TILES[2, 512][True]
    for memory, rows in (
        *((HOPPER, 64), (SharedMemory(166_912, True, False), 64), (SharedMemory(101_376, True, False), 32)),
        *((SharedMemory(65_536, False, False), 64), (SharedMemory(32_768, False, False), 32)),
    ):
        monkeypatch.setattr(module, "shared_memory", lambda memory=memory: memory)
        tile = module.tile_of(2, latents, True, True)
        assert tile == many._replace(rows=rows, stages=many.stages if memory.copies else 1)
        assert module.shared_of(rows, tile.keys, latents, True, 2, 1, memory) <= memory.limit
        assert rows == 64 or module.shared_of(2 * rows, tile.keys, latents, True, 2, 1, memory) > memory.limit
