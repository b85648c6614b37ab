"""The mode on Triton: widths and dtypes alone choose kernels and tiles, and a row's sums have one order. Here the interpreter runs
the kernels, and plans are read from launches; what a device's bits are, a smoke check has to say."""

import json
import os
import random as draws
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from invariant_cases import gradients_case, one_case
from law_cases import FIRST
from triton.runtime import interpreter

from funcops import (
    AttentionConfig,
    CrossEntropyConfig,
    LayerNormConfig,
    LinearConfig,
    RMSNormConfig,
    RopeConfig,
    attention,
    backend,
    chain,
    cross_entropy,
    layer_norm,
    linear,
    random,
    rms_norm,
)
from funcops.engine.backend import gemm
from funcops.invariant import with_invariant
from funcops.library.kernels.attention import attend_bwd, attend_fwd
from funcops.library.kernels.pins import Pins, pinning
from funcops.library.kernels.scored_attention import Score
from funcops.library.kernels.slot_attention import slot_attention_fwd
from funcops.library.kernels.triton import attention as by_segments
from funcops.library.kernels.triton.grouped import tile_for
from funcops.models import DecoderConfig, check_invariant, decoder
from funcops.testing import Case
from funcops.testing import invariant as law

DTYPES = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def a_product_of_rows_apart(monkeypatch):
    """The interpreter multiplies with NumPy, whose library orders a row's sum by the row's place in a tile; no device does."""
    handle = interpreter.TensorHandle

    def create_dot(self, a, b, d, *args):
        product = np.einsum("mk,kn->mn", np.ascontiguousarray(a.data), np.ascontiguousarray(b.data))
        return handle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(law, "MOST_ROWS", 12)


def of(op, cfg, x, params=None):
    return Case(op=op, cfg=cfg, x=x, reference=None, params=params, name=op.name)


# rows that no 16 bytes divide, of which each begins elsewhere in them, and more rows than a tile of a product has
ODD = [
    of(rms_norm, RMSNormConfig(2051), lambda draw: draw.randn(2, 2051)),
    of(layer_norm, LayerNormConfig(2051), lambda draw: draw.randn(2, 2051)),
    of(
        cross_entropy,
        CrossEntropyConfig(reduction="none", label_smoothing=0.1),
        lambda draw: (draw.randn(3, 131), draw.integers(0, 131, 3)),
    ),
    of(linear, LinearConfig(100, 33), lambda draw: draw.randn(23, 100)),
    of(linear, LinearConfig(80, 1, bias=False), lambda draw: draw.randn(2, 80)),
]


@pytest.mark.turns("case", "dtype", every=4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ODD, ids=lambda case: f"{case.op.name}-{case.cfg}")
def test_rows_of_odd_widths(case, dtype, monkeypatch):
    if case.op is linear:
        monkeypatch.setattr(law, "MOST_ROWS", 70)
    with backend("triton"):
        assert law.count_compared(case, dtype) == 6


@pytest.mark.slow
def test_every_op_obeys():
    """The ops that obey by torch do so by Triton: it refuses none of their kernels."""
    held = set()
    for i, case in enumerate(FIRST):
        if not law.exempt(case) and DTYPES[i % 2] in case.dtypes:
            with backend("triton"):
                held |= {case.op.name} if law.count_compared(case, DTYPES[i % 2]) else set()
    assert len(held) > 15


def tensors_of(seed):
    """Options, q, k, v and dy of a drawn call."""
    draw = draws.Random(seed)
    length, group, heads, size = draw.randint(70, 150), draw.choice((1, 2, 3)), draw.choice((1, 2)), draw.choice((8, 24))
    window, chunk = draw.choice((0, 9, 70)), draw.choice((0, 0, 40))
    generator = torch.Generator().manual_seed(seed)
    given = [torch.randn(1, length, h, size, generator=generator) for h in (group * heads, heads, heads, group * heads)]
    return draw, Score(True, window, 0.0, draw.random() < 0.3, size**-0.5), chunk, [t.to(DTYPES[seed % 2]) for t in given]


@pytest.mark.turns("seed", every=12)
@pytest.mark.parametrize("seed", range(12))
def test_attention_goes_over_keys_in_one_order(seed, monkeypatch):
    """In training, packed, as a prefix, and over a cache with and without a ring, by few tokens and by many; gradients too."""
    monkeypatch.setattr(by_segments, "SEGMENT", 64)
    draw, score, chunk, (q, k, v, dy) = tensors_of(seed)
    length, to = q.shape[1], draw.randint(1, q.shape[1] - 1)
    dy[:, to:] = 0
    with backend("triton"), pinning(Pins()):
        y, lse = attend_fwd(q, k, v, None, None, score, chunk)
        dx = attend_bwd(dy, q, k, v, None, None, y, lse, score, False, chunk)[:3]
        cut = [t[:, :to] for t in (q, k, v)]
        of_prefix = attend_fwd(*cut, None, None, score, chunk)
        assert y[:, :to].equal(of_prefix[0]) and lse[..., :to].equal(of_prefix[1])
        got = attend_bwd(dy[:, :to], *cut, None, None, *of_prefix, score, False, chunk)[:3]
        assert all(a[:, :to].equal(b) for a, b in zip(dx, got, strict=True))
        before = draw.randint(1, 20)
        packed = [torch.cat((t[:, -before:], t), 1) for t in (q, k, v)]
        ends = torch.tensor([0, before, before + length])
        found = attend_fwd(*packed, None, ends, score, chunk)
        assert found[0][:, before:].equal(y)
        given = torch.cat((dy[:, -before:], dy), 1), *packed, None, ends, *found
        assert all(a[:, before:].equal(b) for a, b in zip(attend_bwd(*given, score, False, chunk), dx, strict=False))
        for tokens in (1, 3, min(20, length)):
            end = draw.randint(tokens, length)
            reach = min(score.window or chunk or end, chunk or score.window or end)
            slots = draw.choice((reach + tokens - 1, end, length + 40))
            keys, values = (t.new_zeros(2, t.shape[2], slots, t.shape[3]) for t in (k, v))
            for p in range(max(0, end - slots), end):
                keys[:, :, p % slots], values[:, :, p % slots] = k[0, p], v[0, p]
            at, options = torch.tensor([end - tokens, 0]), (score.window, chunk, 0.0, score.alibi, score.scale)
            rows = q[:, end - tokens : end].expand(2, -1, -1, -1)
            one = slot_attention_fwd(rows, keys, values, at, at + tokens, None, None, v.shape[3], *options)[0]
            assert one.equal(y[0, end - tokens : end]), (tokens, end, slots)
    exact, _ = attend_fwd(q, k, v, None, None, score, chunk)
    torch.testing.assert_close(y, exact, atol=2e-6 if q.dtype is torch.float32 else 2e-2, rtol=0)


SIZES = dict(vocab=77, dim=24, layers=1, heads=4, kv_heads=2, head_size=8, hidden=20, context=64)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_decoder_gives_the_bits_of_training(dtype):
    cfg = DecoderConfig(**SIZES, rope=RopeConfig(8))
    model = with_invariant(decoder(cfg))
    params = chain.init(model, key=random.key(0), dtype=dtype)
    with backend("triton"):
        assert check_invariant(params, cfg, model, tokens=10) == 95


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_drawn_decoders(seed):
    with backend("triton"):
        wrong, count = one_case(seed, tokens=2, longest=12)
        assert count > 5 and not any(wrong.values())
        assert gradients_case(seed, longest=9) in (True, None)


def test_what_is_not_served_is_refused_by_name():
    x = torch.randn(3, 8)
    params = linear.init(LinearConfig(8, 4), key=random.key(0))
    q = torch.randn(1, 4, 2, 8)
    with backend("triton"), pinning(Pins()):
        said = "^a product of rows: gemm must be 'auto' or 'triton' in invariant mode: .* got 'cublas'$"
        with gemm("cublas"), pytest.raises(ValueError, match=said):
            linear.fwd(params, x, LinearConfig(8, 4))
        with pytest.raises(ValueError, match="^attention_fwd: cfg.softcap must be off in invariant mode"):
            attention.fwd(None, (q, q, q), AttentionConfig(causal=True, softcap=3.0))
        wide = torch.randn(1, 4, 2, 300)
        with pytest.raises(
            ValueError, match=r"^attention in invariant mode: x \(heads\) must be of at most 256 elements by Triton, got 300$"
        ):
            attention.fwd(None, (wide, wide, wide), AttentionConfig(causal=True))


def test_experts_have_one_tile():
    def tiles():
        return {tile_for(torch.bfloat16, rows, 8, 128, 256) for rows in (1, 100, 10_000)}

    with pinning(Pins()):
        assert len(tiles()) == 1
    assert len(tiles()) == 2


PROGRAM = """
import json, random, torch
from funcops.engine.backend import backend
from funcops.engine.backend.launch import planned_launches
from funcops.library.kernels import cross_entropy, experts, fused_linear, grouped, linear, norm, slot_attention
from funcops.library.kernels.attention import attend_bwd, attend_fwd
from funcops.library.kernels.pins import Pins, pinning
from funcops.library.kernels.scored_attention import Score
from funcops.testing.aot import TARGETS, stubbed

draw = random.Random(0)
SCORE = Score(True, 0, 0.0, False, 0.1)

def calls(rows, dtype, wide, out):
    def empty(*shape, dtype=dtype):
        return torch.empty(*shape, dtype=dtype, device="meta")
    x, w, b = empty(rows, wide), empty(out, wide), empty(out)
    column, labels = empty(rows, 1, dtype=torch.float32), empty(rows, dtype=torch.int64)
    yield "linear", lambda: linear.linear_fwd(x, w, b)
    yield "without a bias", lambda: linear.linear_fwd(x, w, None)
    yield "dgrad", lambda: linear.linear_dgrad(x, empty(wide, out))
    yield "into", lambda: fused_linear.fused_linear_dgrad_into(x, empty(wide, out), 1.0, empty(rows, out, dtype=torch.float32))
    yield "norm", lambda: norm.rms_norm_fwd(x, empty(wide), 1e-6, False)
    yield "dnorm", lambda: norm.rms_norm_bwd(x, x, empty(wide), column, False, True, True)
    yield "loss", lambda: cross_entropy.cross_entropy_fwd(x, labels, 0.0, -100, 0.0)
    offsets, order = empty(9, dtype=torch.int32), empty(rows, dtype=torch.int64)
    yield "grouped", lambda: grouped.grouped_product(x, empty(8, out, wide), None, offsets, None, 1, None, True)
    up, weights = empty(8, 2 * out, wide), empty(rows, 1)
    yield "experts", lambda: experts.experts_up(x, up, None, weights, order, offsets, "swiglu", 0.0, 0.0, 0.0, False)
    q, k = empty(1, rows, 8, 128), empty(1, rows, 2, 128)
    yield "attention", lambda: attend_fwd(q, k, k, None, None, SCORE)
    lse = empty(1, 8, rows, dtype=torch.float32)
    yield "dattention", lambda: attend_bwd(q, q, k, k, None, None, q, lse, SCORE, False)
    ends, cache = empty(1, dtype=torch.int64), empty(1, 2, 5000, 128)
    how = None, None, 128, 0, 0, 0.0, False, 0.1
    yield "decode", lambda: slot_attention.slot_attention_fwd(q, cache, cache, ends, ends, *how)

def constant(launch):
    # without sizes, M and the like, and ALL: whether a program has all segments of keys, or one
    names = [name for name in launch.arguments if name.isupper() and len(name) > 1 and name != "ALL"]
    return str({name: launch.arguments[name] for name in names}), launch.key[-2:]

def configs(pinned):
    found = {}
    for dtype, wide, out in ((torch.bfloat16, 5120, 128), (torch.float32, 2051, 333)):
        for rows in (1, draw.randint(2, 60), draw.randint(61, 1000), draw.randint(20_000, 40_000)):
            for name, call in calls(rows, dtype, wide, out):
                with planned_launches() as planned:
                    if pinned:
                        with pinning(Pins()):
                            call()
                    else:
                        call()
                of = found.setdefault(f"{name} {wide} {out} {dtype}", {})
                for launch in planned:
                    of.setdefault(launch.kernel.__name__, set()).add(constant(launch))
    return {name: max(map(len, of.values()), default=0) for name, of in found.items()}

with stubbed(TARGETS["sm_90"].gpu), backend("triton"):
    print(json.dumps([configs(pinned) for pinned in (True, False)]))
"""


@pytest.mark.slow
def test_the_number_of_rows_chooses_nothing():
    """Launches for drawn numbers of rows have one configuration for each kernel: of products, of norms and losses, of experts, and
    of attention in training and decoding. Without the mode, rows do choose."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    ran = subprocess.run([sys.executable, "-c", PROGRAM], env=env, cwd=root, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    in_the_mode, without = json.loads(ran.stdout.splitlines()[-1])
    assert in_the_mode and {name: n for name, n in in_the_mode.items() if n != 1} == {}
    assert {name.split()[0] for name, n in without.items() if n > 1} >= {"into", "grouped", "experts", "decode"}
