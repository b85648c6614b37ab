"""Kernels that do two things in one launch, by both implementations, against autograd in float64."""

import pytest
import torch
import torch.nn.functional as F
from tiers import drawn

from funcops import RopeConfig, random, rope_table
from funcops.engine.backend import backend
from funcops.library.kernels import add_norm, bias_activation, cross_entropy, embedding, glu, norm, pointwise, rope, sibling_linear
from funcops.library.kernels.activation import ACTIVATIONS, activation_fwd
from funcops.testing.laws import poisoned_empties
from funcops.testing.tolerances import assert_close

pytest.importorskip("triton")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(0, 8), (1, 1), (1, 19), (33, 5), (2, 3, 69), (2, 2100), (3, 8300)]
BACKENDS = ("torch", "triton")

pytestmark = [
    pytest.mark.parametrize("name", BACKENDS),
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
    pytest.mark.turns("dtype"),
]


def draw(*shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def strided(t):
    """The same values in every other element of a tensor twice as wide."""
    return torch.stack((t, t), -1).flatten(-2)[..., ::2]


def large_ones_once(kinds, shapes, large):
    """(kind, shape). Kinds differ in formulas, not in addresses, so only one of them has the large shape."""
    kinds = list(kinds)
    return [(kind, shape) for kind in kinds for shape in shapes] + [(kinds[0], large)]


@pytest.fixture(autouse=True)
def few_parts(monkeypatch):
    """Few programs, so that each takes one group of rows after another, as for thousands of rows."""
    monkeypatch.setattr("funcops.library.kernels.triton.bias_activation.PARTS", 3)


def exact(*tensors):
    return [t.double().requires_grad_() for t in tensors]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("centred", [False, True])
def test_add_rms_norm(name, dtype, shape, centred):
    x, r, dy, ds, w = (strided(draw(*s, dtype=dtype, seed=i)) for i, s in enumerate([shape] * 4 + [shape[-1:]]))
    with backend(name):
        y, stream, rstd = add_norm.add_rms_norm_fwd(x, r, w, 1e-6, centred)
        dx, parts = add_norm.add_rms_norm_bwd(dy, ds, stream, w, rstd, centred, True, True)
        again = add_norm.add_rms_norm_bwd(dy, ds, stream, w, rstd, centred, True, True)
        third, normed, _ = add_norm.add_rms_norm_bwd_recompute(dy, ds, stream, w, rstd, centred, False)
    assert torch.equal(stream, x + r) and torch.equal(third, dx)
    assert torch.equal(dx, again[0]) and torch.equal(parts, again[1])
    assert torch.equal(normed, y) if name == "triton" else normed.dtype is dtype
    assert_close(normed, y, dtype=dtype)
    s, v = exact(stream, w)
    want = F.rms_norm(s, v.shape, v + 1 if centred else v, 1e-6)
    (want * dy.double()).sum().backward()
    assert_close((y, dx), (want.detach(), s.grad + ds.double()), dtype=dtype, length=shape[-1])
    assert_close(parts.sum(0), v.grad, dtype=dtype, length=shape[-1])


@pytest.mark.parametrize("shape", [s for s in SHAPES if s[-1] > 1], ids=str)  # x - mean of one element is rounding alone
@pytest.mark.parametrize("bias", [False, True])
def test_add_layer_norm(name, dtype, shape, bias):
    x, r, dy, ds, w, b = (draw(*s, dtype=dtype, seed=i) for i, s in enumerate([shape] * 4 + [shape[-1:]] * 2))
    with backend(name):
        y, stream, mean, rstd = add_norm.add_layer_norm_fwd(x, r, w, b if bias else None, 1e-5, False)
        dx, dw, db = add_norm.add_layer_norm_bwd(dy, ds, stream, w, mean, rstd, False, True, True, bias)
        again = add_norm.add_layer_norm_bwd_recompute(dy, ds, stream, w, b if bias else None, mean, rstd, False, True, bias)
    assert torch.equal(stream, x + r) and (db is not None) == bias
    assert torch.equal(again[0], dx) and torch.equal(again[2], dw) and (again[3] is None or torch.equal(again[3], db))
    assert torch.equal(again[1], y) if name == "triton" else again[1].dtype is dtype
    assert_close(again[1], y, dtype=dtype, length=shape[-1])
    s, v, c = exact(stream, w, b)
    want = F.layer_norm(s, v.shape, v, c if bias else None, 1e-5)
    (want * dy.double()).sum().backward()
    assert_close((y, dx), (want.detach(), s.grad + ds.double()), dtype=dtype, length=shape[-1])
    assert_close(dw.sum(0), v.grad, dtype=dtype, length=shape[-1])
    if bias:
        assert_close(db.sum(0), c.grad, dtype=dtype, length=shape[-1])


@pytest.mark.parametrize("parts", [1, 5, 256])
@pytest.mark.parametrize("width", [1, 69, 200])
def test_parts_are_summed(name, dtype, parts, width):
    t = draw(parts, width, dtype=torch.float32)
    with backend(name):
        got = norm.sum_parts(t, dtype)
        for other in (t + 1.0, t[:1]):
            two = norm.sum_two_parts(other, t, dtype)
            assert torch.equal(two[0], norm.sum_parts(other, dtype)) and torch.equal(two[1], got)
    assert got.dtype is dtype
    assert_close(got, t.double().sum(0), dtype=dtype, length=parts)


@pytest.mark.parametrize(("kind", "shape"), large_ones_once(ACTIVATIONS, [(0, 8), (1, 1), (5, 3, 19)], (70, 1100)), ids=str)
def test_bias_activation(name, dtype, shape, kind):
    x, dy, b = (strided(draw(*s, dtype=dtype, seed=i)) for i, s in enumerate([shape, shape, shape[-1:]]))
    with backend(name):
        y = bias_activation.bias_activation_fwd(x, b, kind)
        dz, db = bias_activation.bias_activation_bwd(dy, x, b, kind, True)
        alone, none = bias_activation.bias_activation_bwd(dy, x, b, kind, False)
        summed, _ = bias_activation.bias_activation_bwd(dy, (x + b).contiguous(), None, kind, True)
    assert none is None and torch.equal(alone, dz)
    z = x.double() + b.double()
    f = ACTIVATIONS[kind]
    want = f.backward(dy.double(), z, f.forward(z) if f.reads_y else None)
    assert_close((y, dz), (f.forward(z), want), dtype=dtype)
    rounded = (x + b).double()
    assert_close(summed, f.backward(dy.double(), rounded, f.forward(rounded) if f.reads_y else None), dtype=dtype)
    assert_close(db.sum(0), want.reshape(-1, shape[-1]).sum(0), dtype=dtype)


@pytest.mark.parametrize(("kind", "shape"), large_ones_once(ACTIVATIONS, [(0, 8), (5, 3, 19)], (70, 1100)), ids=str)
def test_activation_bwd_recompute_is_both_kernels(name, dtype, shape, kind):
    x, dy = strided(draw(*shape, dtype=dtype)), draw(*shape, dtype=dtype, seed=1)
    with backend(name):
        want, y = bias_activation.bias_activation_bwd(dy, x, None, kind, True), activation_fwd(x, kind)
        for db in (True, False):
            again = dy.clone()
            dz, parts = bias_activation.activation_bwd_recompute(again, x, kind, db)
            assert torch.equal(dz, want[0]) and (torch.equal(parts, want[1]) if db else parts is None)
            assert torch.equal(again, y) if name == "triton" else again.dtype is dtype
            assert_close(again, y, dtype=dtype)


@pytest.mark.parametrize("shape", [(0, 8), (3, 5), (7, 12), (2, 40, 1028), (300, 64)], ids=str)
def test_dropout_and_its_sums(name, dtype, shape):
    dy, key = strided(draw(*shape, dtype=dtype)), random.key(5)
    with backend(name):
        dx, sums = bias_activation.dropout_bwd_sums(dy, key, 0.4)
        want = pointwise.dropout(dy, key, 0.4)
    assert torch.equal(dx, want) if name == "triton" else dx.dtype is dtype
    assert_close(dx, want, dtype=dtype)
    assert_close(sums.sum(0), want.double().reshape(-1, shape[-1]).sum(0), dtype=dtype, length=max(1, want[..., 0].numel()))


@pytest.mark.parametrize("shape", [(0, 8), (1,), (3, 5), (7, 1031)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_dropout_add(name, dtype, shape, bias):
    x, r, b = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=1), draw(shape[-1], dtype=dtype, seed=2)
    key = random.key(5)
    with backend(name):
        y = pointwise.dropout_add(x, b if bias else None, r, key, 0.4)
    kept = random.bits(key, x.numel()).reshape(shape) >= round(0.4 * 2**32)
    want = r.double() + kept * (x.double() + (b.double() if bias else 0.0)) / 0.6
    assert torch.equal(y[~kept], r[~kept]), "the very same elements are dropped"
    assert_close(y, want, dtype=dtype)


@pytest.mark.turns("dtype", "p")
@pytest.mark.parametrize("shape", [(0, 8), (1, 2), (3, 8), (7, 5), (2, 3, 2100), (3, 8300)], ids=str)
@pytest.mark.parametrize("p", [0.3, 1.0 - 2.0**-40])
def test_dropout_add_norm_is_both_kernels(name, dtype, shape, p):
    x, r = strided(draw(*shape, dtype=dtype)), draw(*shape, dtype=dtype, seed=1)
    w, b = draw(shape[-1], dtype=dtype, seed=2), draw(shape[-1], dtype=dtype, seed=3)
    key = random.key(5)
    with backend(name):
        want = pointwise.dropout_add(x, None, r, key, p)
        y, stream, rstd = add_norm.dropout_add_rms_norm_fwd(x, r, w, key, p, 1e-6, True)
        assert torch.equal(stream, want)
        assert all(torch.equal(g, w) for g, w in zip((y, rstd), norm.rms_norm_fwd(want, w, 1e-6, True), strict=True))
        for bias in (None, b):
            y, stream, mean, rstd = add_norm.dropout_add_layer_norm_fwd(x, r, w, bias, key, p, 1e-5, False)
            found = (y, mean, rstd), norm.layer_norm_fwd(want, w, bias, 1e-5, False)
            assert torch.equal(stream, want) and all(torch.equal(g, w) for g, w in zip(*found, strict=True))


def test_column_sums_take_rows_apart(name, dtype):
    t = draw(3, 11, 60, dtype=dtype)
    with backend(name):
        for part in t.split([20, 35, 5], -1):
            assert torch.equal(norm.row_sums(part), norm.row_sums(part.contiguous()))


@pytest.mark.parametrize("classes", [slice(0, 9), slice(0, 4), slice(4, 9), slice(8, 9)], ids=str)
def test_cross_entropy_gradient_over_some_classes(name, dtype, classes):
    logits, labels = draw(6, 9, dtype=dtype), torch.tensor([0, 8, -100, 4, 3, 8])
    dloss, highest = torch.rand(6), logits.float().amax(-1)
    lse = torch.stack((highest, torch.logsumexp(logits.float() - highest[:, None], -1)), -1)
    options = 0.1, -100, 1e-2
    want = cross_entropy.cross_entropy_bwd(dloss.double(), logits.double(), labels, lse.double(), *options)
    owned = logits[:, classes].contiguous()
    with backend(name):
        got = cross_entropy.cross_entropy_bwd(dloss, owned, labels, lse, *options, classes.start, 9)
        cross_entropy.cross_entropy_bwd_owned(dloss, owned, labels, lse, *options, classes.start, 9)
    assert_close(owned, want[:, classes], dtype=dtype)
    assert torch.equal(got, owned)


@pytest.mark.parametrize(("n", "vocab"), drawn([1, 32, 33, 100, 321], [1, 3, 50]))
def test_embedding_gradient_of_long_runs(name, dtype, n, vocab):
    ids, dy = torch.randint(vocab, (n,), generator=torch.Generator().manual_seed(n)), draw(n, 5, dtype=dtype)
    for padding in (-1, 0):
        want = embedding.embedding_wgrad(dy.double(), ids, vocab, padding)
        with backend(name):
            got = embedding.embedding_wgrad(dy, ids, vocab, padding)
        tight = name == "triton" or dtype is torch.float32  # torch adds up in the dtype itself
        assert_close(got, want, dtype=dtype if tight else torch.bfloat16, length=n)


@pytest.mark.parametrize("rows", [(0,), (1,), (2, 19), (70,)], ids=str)
@pytest.mark.parametrize("sizes", [(3, 5), (17, 4, 40), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("biased", [(), (0,), (0, 1, 2)], ids=str)
def test_sibling_linear(name, dtype, rows, sizes, biased):
    x, n = draw(*rows, 7, dtype=dtype), len(sizes)
    w = [draw(o, 7, dtype=dtype, seed=i) for i, o in enumerate(sizes)]
    b = [draw(o, dtype=dtype, seed=i) if i in biased else None for i, o in enumerate(sizes)]
    dy = [strided(draw(*rows, o, dtype=dtype, seed=i)) for i, o in enumerate(sizes)]
    pad = [None] * (3 - n)
    with backend(name):
        ys = sibling_linear.sibling_linear_fwd(x, *w, *pad, *b, *pad)
        dx = sibling_linear.sibling_linear_dgrad(*dy, *pad, *w, *pad)
        joined = sibling_linear.joined_linear_dgrad(torch.cat(dy, -1), *w) if n == 3 else dx
    assert ys[n:] == (None,) * (3 - n)
    want = tuple(F.linear(x.double(), w_.double(), None if b_ is None else b_.double()) for w_, b_ in zip(w, b, strict=True))
    assert_close(ys[:n], want, dtype=dtype, length=7)
    for found in (dx, joined):
        assert_close(found, sum(d.double() @ w_.double() for d, w_ in zip(dy, w, strict=True)), dtype=dtype, length=sum(sizes))


@pytest.mark.parametrize("sizes", [(3, 5, 70), (3, 70, 5), (70, 3, 5), (1, 1, 200), (3, 70), (70, 3)], ids=str)
def test_sibling_linear_of_several_tiles_of_columns(name, dtype, sizes):
    x, pad = draw(3, 7, dtype=dtype), [None] * (3 - len(sizes))
    w, b = [draw(o, 7, dtype=dtype, seed=o) for o in sizes], [draw(o, dtype=dtype, seed=o) for o in sizes]
    with backend(name), poisoned_empties():
        ys = sibling_linear.sibling_linear_fwd(x, *w, *pad, *b, *pad)
    want = tuple(F.linear(x.double(), w_.double(), b_.double()) for w_, b_ in zip(w, b, strict=True))
    assert_close(ys[: len(sizes)], want, dtype=dtype, length=7)


@pytest.mark.parametrize(("heads", "half"), drawn([(1, 1), (3, 5), (8, 2)], [(1, 2), (3, 6), (8, 40)]))
def test_a_pair_is_turned_as_each(name, dtype, heads, half):
    (heads, kv_heads), (half, dim) = heads, half
    q, k = draw(2, 5, heads, dim, dtype=dtype), strided(draw(2, 5, kv_heads, dim, dtype=dtype, seed=1))
    for interleaved, positions in ((False, torch.arange(5)), (True, torch.arange(10).reshape(2, 5))):
        table = rope_table(positions, RopeConfig(2 * half, theta=100.0, interleaved=interleaved))
        for inverse in (False, True):
            with backend(name):
                got = rope.rope_apply_pair(q, k, table, interleaved, inverse)
                want = [rope.rope_apply(t, table, interleaved, inverse) for t in (q, k)]
            assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("kind", "shape"),
    large_ones_once(["swiglu", "geglu_tanh", "glu", "quick_geglu"], [(0, 8), (1, 2), (33, 6), (2, 3, 70), (2, 4100)], (2, 70000)),
    ids=str,
)
def test_glu_bwd_recompute_is_both_kernels(name, dtype, shape, kind):
    first = kind in ("swiglu", "glu")  # which half is activated is an address
    x = strided(draw(*shape, dtype=dtype))
    dy = draw(*shape[:-1], shape[-1] // 2, dtype=dtype, seed=1)
    with backend(name):
        want_y, (want_dx, _) = glu.glu_fwd(x, None, kind, first), glu.glu_bwd(dy, x, None, kind, first, True, False)
        y = dy.clone()
        dx = glu.glu_bwd_recompute(y, x, kind, first)
        gate, linear = (t.contiguous() for t in (x.chunk(2, -1) if first else x.chunk(2, -1)[::-1]))
        wanted, over = (glu.glu_pair_fwd(gate, linear, kind), *glu.glu_pair_bwd(dy, gate, linear, kind)), dy.clone()
        pair = glu.glu_pair_bwd_recompute(over, gate, linear, kind)
    assert torch.equal(dx, want_dx) and torch.equal(y, want_y)
    assert all(torch.equal(got, want) for got, want in zip((over, *pair), wanted, strict=True))
