"""Inputs far from zero, or very large or small: what a forward keeps for its backward loses no more than plain PyTorch loses.

Inputs are x = scale * draw + shift. The errors of y and of each gradient are taken against float64 on the very same inputs, and
compared with plain PyTorch's.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from triton.runtime import interpreter

from funcops import (
    AttentionConfig,
    CrossEntropyConfig,
    GroupNormConfig,
    GroupNormParams,
    L2NormConfig,
    LayerNormConfig,
    LayerNormParams,
    LinearCrossEntropyConfig,
    LinearCrossEntropyParams,
    RMSNormConfig,
    RMSNormParams,
    RouteConfig,
    RouteParams,
    SinkAttentionConfig,
    SinkAttentionParams,
    SoftmaxConfig,
    attention,
    backend,
    cross_entropy,
    dist,
    group_norm,
    l2_norm,
    layer_norm,
    linear_cross_entropy,
    rms_norm,
    route,
    sink_attention,
    softmax,
)
from funcops.library.kernels import add_norm
from funcops.testing import run_ranks
from funcops.testing.tolerances import ROUNDOFF, SHIFTED_FACTOR, SHIFTED_ROUNDINGS

SHIFTS, SCALES = (0.0, 1.0, 300.0, 1e3, -1e4), (1e-4, 1e-2, 1.0, 1e2, 1e4)
POINTS = {"torch": list(itertools.product(SCALES, SHIFTS)), "triton": list(zip(SCALES, (300.0, -1e4, 1e3, 1.0, 0.0), strict=True))}
ROWS, WIDTH = 24, 40
LONG = 33024  # of rows that a kernel takes in pieces
EPS = 1e-6


class Draw:
    """Draws float32 tensors whose numbers are representable in `dtype`."""

    def __init__(self, seed, scale, shift, dtype):
        self.generator, self.scale, self.shift, self.dtype = torch.Generator().manual_seed(seed), scale, shift, dtype

    def plain(self, *shape):
        return torch.randn(shape, generator=self.generator).to(self.dtype).float()

    def moved(self, *shape):
        return (torch.randn(shape, generator=self.generator) * self.scale + self.shift).to(self.dtype).float()

    def ids(self, *shape, below):
        return torch.randint(below, shape, generator=self.generator)


class Probe(NamedTuple):
    """`make(draw)`: float leaves, whose gradients are compared, and the other inputs; `ours(leaves, other, dys)`: y and the
    gradients of the leaves, with dy made by `dys(y)`; `plain(leaves, other)`: y in plain PyTorch."""

    make: Callable[[Draw], tuple[list[torch.Tensor], Any]]
    ours: Callable[..., tuple[list, list]]
    plain: Callable[[list, Any], list]
    wide: bool = False  # whether ours computes in float32, and returns that, of narrower inputs; plain PyTorch then does, too
    terms: Callable[[list, list], list] = lambda leaves, sizes: [0.0 * size for size in sizes]  # of what a result is a difference


def ones(leaves, sizes):
    """Roundings of results made from probabilities, which are rounded at the size of their sum, 1."""
    return [1.0 for _ in sizes]


def of_means(x):
    """Roundings of results made from x minus a kept mean: PyTorch keeps it too, as one number rounded at its own size."""
    far = float((x.mean(-1).abs() * (x.var(-1, correction=0) + EPS).rsqrt()).max())
    return lambda sizes: [far * size for size in sizes]


def of_op(op, cfg, pack, unpack):
    """`pack(leaves, other)` is `(params, x)`; `unpack(dparams, dx)` the gradients of the leaves."""

    def ours(leaves, other, dys):
        y, residuals = op.fwd(*pack(leaves, other), cfg)
        several = isinstance(y, tuple)
        dy = dys(y if several else (y,))
        return list(y) if several else [y], unpack(*op.bwd(residuals, tuple(dy) if several else dy[0], cfg))

    return ours


def confident(margin, spread, rows=ROWS, vocab=WIDTH):
    """Logits in which the label's is `margin` above all others, which have the deviation `spread`; if `margin` is None, the label
    is drawn at random."""

    def make(d):
        logits, labels = d.moved(rows, vocab), d.ids(rows, below=vocab)
        if margin is not None:
            logits = d.shift - d.plain(rows, vocab).abs() * spread
            logits.scatter_(1, labels[:, None], d.shift + margin)
            logits = logits.to(d.dtype).float()
        return [logits], labels

    return make


def losses(make, smoothing=0.0, z=0.0):
    cfg = CrossEntropyConfig(label_smoothing=smoothing, z_loss=z, reduction="none")

    def plain(leaves, labels):
        rows = F.cross_entropy(leaves[0], labels, label_smoothing=smoothing, reduction="none")
        return [rows + z * leaves[0].logsumexp(-1).square() if z else rows]

    return Probe(
        make, of_op(cross_entropy, cfg, lambda t, labels: (None, (t[0], labels)), lambda _, dx: [dx[0]]), plain, True, ones
    )


def projected(smoothing=0.0, softcap=None):
    """Logits with a shift: the last feature is 1, and its weights are the shift."""
    cfg = LinearCrossEntropyConfig(
        3,
        WIDTH,
        reduction="none",
        label_smoothing=smoothing,
        softcap=softcap,
        chunk_bytes=(4 if softcap is None else 12) * 12 * WIDTH,
    )

    def make(d):
        x, w = d.plain(ROWS, 3), d.plain(WIDTH, 3) * min(d.scale, 10.0)
        x[:, 2], w[:, 2] = 1.0, d.shift
        return [x, w.to(d.dtype).float()], d.ids(ROWS, below=WIDTH)

    def plain(leaves, labels):
        logits = leaves[0] @ leaves[1].T
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        return [F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="none")]

    def pack(t, labels):
        return LinearCrossEntropyParams(t[1]), (t[0], labels)

    def terms(leaves, sizes):
        """Like `ones`, but a row of dx sums dlogits times weights; dlogits add up to 0, and their sizes to at most 2."""
        loss, _, dw = ones(leaves, sizes)
        return [loss, 2.0 * float(leaves[1].abs().max()), dw]

    return Probe(make, of_op(linear_cross_entropy, cfg, pack, lambda dp, dx: [dx[0], dp.weight]), plain, False, terms)


def normed(op, cfg, params, count, plain, width=WIDTH, rows=(ROWS,), **options):
    """x, and `count` vectors of weights."""

    def unpack(dparams, dx):
        return [dx, *(getattr(dparams, name) for name in ("weight", "bias")[:count])]

    return Probe(
        lambda d: ([d.moved(*rows, width), *(d.plain(width) for _ in range(count))], None),
        of_op(op, cfg, lambda t, _: (params(*t[1:]) if params else None, t[0]), unpack),
        lambda t, _: [plain(*t)],
        **options,
    )


def grouped(size, batch=3):
    return Probe(
        lambda d: ([d.moved(batch, 6, size), d.plain(6), d.plain(6)], None),
        of_op(
            group_norm,
            GroupNormConfig(2, 6, eps=EPS),
            lambda t, _: (GroupNormParams(*t[1:]), t[0]),
            lambda dparams, dx: [dx, dparams.weight, dparams.bias],
        ),
        lambda t, _: [F.group_norm(t[0], 2, t[1], t[2], EPS)],
        terms=lambda leaves, sizes: of_means(leaves[0].reshape(batch, 2, -1))(sizes),
    )


def added(centre, rows=ROWS, width=WIDTH):
    """Norms of a residual stream, by the kernels of a fusion rule; y is recomputed, too."""

    def make(d):
        x = d.moved(rows, width)
        return [x, d.plain(rows, width) * d.scale, d.plain(width), *([d.plain(width)] if centre else [])], d.dtype

    def ours(leaves, _, dys):
        x, residual, w, *b = leaves
        if centre:
            y, stream, mean, rstd = add_norm.add_layer_norm_fwd(x, residual, w, b[0], EPS, False)
            dy, dstream = dys((y, stream))
            dx, again, *parts = add_norm.add_layer_norm_bwd_recompute(dy, dstream, stream, w, b[0], mean, rstd, False, True, True)
        else:
            y, stream, rstd = add_norm.add_rms_norm_fwd(x, residual, w, EPS, False)
            dy, dstream = dys((y, stream))
            dx, again, *parts = add_norm.add_rms_norm_bwd_recompute(dy, dstream, stream, w, rstd, False, True)
        return [y, stream, again], [dx, dx, *(part.sum(0) for part in parts)]

    def plain(leaves, dtype):
        stream, size = leaves[0] + leaves[1], [width]
        stream = stream + (stream.to(dtype).to(stream.dtype) - stream).detach()  # rounded
        y = F.layer_norm(stream, size, *leaves[2:], EPS) if centre else F.rms_norm(stream, size, leaves[2], EPS)
        return [y, stream, y.detach()]

    def terms(leaves, sizes):
        return of_means((leaves[0] + leaves[1]) if centre else torch.zeros(1, 1))(sizes)

    return Probe(make, ours, plain, terms=terms)


def routed(**options):
    cfg = RouteConfig(8, 3, **options)

    def plain(leaves, _):
        t = leaves[0]
        s = torch.softmax(t, -1) if cfg.score == "softmax" else torch.sigmoid(t)
        chosen = torch.sort(t.detach(), dim=-1, descending=True, stable=True).indices[:, : cfg.top_k]
        weights = s.gather(-1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) if cfg.normalize else weights
        n = F.one_hot(chosen, cfg.experts).sum((0, 1)).to(t.dtype)
        loss = cfg.aux * cfg.experts * (n / (cfg.top_k * len(t)) * (s / s.sum(-1, keepdim=True)).mean(0)).sum()
        return [weights, None, None, loss + cfg.z * t.logsumexp(-1).square().mean()]

    ours = of_op(route, cfg, lambda t, _: (RouteParams(None), t[0]), lambda _, dx: [dx])
    return Probe(lambda d: ([d.moved(ROWS, 8)], None), ours, plain, True, ones)


def attended(op, cfg, sinks=False, biased=False):
    """Scores with a shift and a deviation: the last number of keys is 1, of queries the shift. PyTorch's fused kernel, which keeps
    logsumexp too, is the comparison."""

    def make(d):
        q, k, v = (d.plain(2, 6, 2, 8) for _ in range(3))
        q[..., :-1] *= d.scale
        q[..., -1], k[..., -1] = d.shift, 1.0
        more = d.moved(1, 2, 6, 6) if biased else d.plain(2) + d.shift * 8**-0.5 if sinks else None
        return [q, k, v], more

    def plain(leaves, more):
        q, k, v = (t.transpose(1, 2) for t in leaves)
        if cfg.softcap:
            s = cfg.softcap * torch.tanh(q @ k.mT * 8**-0.5 / cfg.softcap)
            return [(s.softmax(-1) @ v).transpose(1, 2)]
        mask = more.to(q.dtype).expand(2, 2, 6, 6) if biased else None
        if sinks:  # one more key, of zeros, whose score is the sink
            k, v = (F.pad(t, (0, 0, 0, 1)) for t in (k, v))
            mask = q.new_zeros(6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), float("-inf")).expand(2, 2, 6, 6)
            mask = torch.cat((mask, more.to(q.dtype)[None, :, None, None].expand(2, 2, 6, 1)), -1)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=cfg.causal and not sinks)
        return [y.transpose(1, 2)]

    def pack(t, more):
        if sinks:
            return SinkAttentionParams(more.to(t[0].dtype)), tuple(t)
        return None, (*t, more.to(t[0].dtype)) if biased else tuple(t)

    def terms(leaves, _):
        """Roundings of y, dq, dk and dv. With sinks the logsumexp comes from torch's kernel, rounded at the size of the scores."""
        q, k, v = (float(t.abs().max()) for t in leaves)
        sizes = [v, k * 8**-0.5, q * 8**-0.5, 1.0]
        if biased:  # dp minus its mean, which the kernel sums in another order: each is rounded at the size of v
            return [0.0, sizes[1] * v, sizes[2] * v, 0.0]
        largest = float((leaves[0].transpose(1, 2) @ leaves[1].transpose(1, 2).mT).abs().max()) * 8**-0.5 if sinks else 1.0
        return [size * largest if sinks or cfg.softcap else 0.0 for size in sizes]

    return Probe(make, of_op(op, cfg, pack, lambda dp, dx: list(dx[:3])), plain, terms=terms)


def layer(width, bias=True, rows=(ROWS,)):
    return normed(
        layer_norm,
        LayerNormConfig(width, eps=EPS, bias=bias),
        lambda w, b=None: LayerNormParams(w, b),
        1 + bias,
        lambda x, w, b=None: F.layer_norm(x, [width], w, b, EPS),
        width,
        rows,
        terms=lambda leaves, sizes: of_means(leaves[0])(sizes),
    )


def over_ranks(probe, op, make_cfg, split, join):
    """`probe` with the classes on two ranks: `split(leaves, other, rank)` is a rank's `(params, x)`; `join` makes the gradients of
    the leaves from all ranks'."""

    def ours(leaves, other, dys):
        def each(mesh):
            cfg = make_cfg(mesh["tp"])
            y, residuals = op.fwd(*split(leaves, other, mesh.rank), cfg)
            return y, *op.bwd(residuals, dys((y,))[0], cfg)

        y, dparams, dx = zip(*run_ranks({"tp": 2}, each), strict=True)
        return [y[0]], join(dparams, dx)

    return probe._replace(ours=ours)


def over_classes(smoothing):
    """Only the labels' classes have a margin, so one rank has nearly all of the sum."""
    return over_ranks(
        losses(confident(14.0, 0.5), smoothing, 1e-4),
        dist.vocab_cross_entropy,
        lambda axis: dist.VocabCrossEntropyConfig(axis, label_smoothing=smoothing, z_loss=1e-4, reduction="none"),
        lambda t, labels, rank: (None, (t[0].chunk(2, -1)[rank], labels)),
        lambda dparams, dx: [torch.cat([one[0] for one in dx], -1)],
    )


def projected_over_classes():
    options = dict(sequence_parallel=False, reduction="none", label_smoothing=0.2)
    return over_ranks(
        projected(0.2),
        dist.vocab_linear_cross_entropy,
        lambda axis: dist.VocabLinearCrossEntropyConfig(3, WIDTH, axis=axis, **options),
        lambda t, labels, rank: (LinearCrossEntropyParams(t[1].chunk(2)[rank]), (t[0], labels)),
        lambda dparams, dx: [dx[0][0], torch.cat([one.weight for one in dparams])],
    )


PROBES = {
    "vocab_cross_entropy": over_classes(0.0),
    "vocab_cross_entropy, smoothed": over_classes(0.1),
    "vocab_linear_cross_entropy, smoothed": projected_over_classes(),
    "cross_entropy": losses(confident(None, 0.0)),
    "cross_entropy, smoothed": losses(confident(None, 0.0), 0.1),
    "cross_entropy, z": losses(confident(None, 0.0), 0.0, 1e-3),
    "cross_entropy, sure by 5": losses(confident(5.0, 0.5)),
    "cross_entropy, sure by 14": losses(confident(14.0, 0.5)),
    "cross_entropy, sure by 14, smoothed": losses(confident(14.0, 0.5), 0.1, 1e-4),
    "cross_entropy of many classes": losses(confident(None, 0.0, 3, 9001), 0.1, 1e-4),
    "linear_cross_entropy": projected(),
    "linear_cross_entropy, smoothed": projected(0.2),
    "linear_cross_entropy, capped": projected(softcap=20.0),
    "softmax": normed(softmax, SoftmaxConfig(), None, 0, lambda x: torch.softmax(x, -1)),
    "softmax, long": normed(softmax, SoftmaxConfig(), None, 0, lambda x: torch.softmax(x, -1), LONG, (2,)),
    "rms_norm": normed(rms_norm, RMSNormConfig(WIDTH, eps=EPS), RMSNormParams, 1, lambda x, w: F.rms_norm(x, [WIDTH], w, EPS)),
    "rms_norm of heads": normed(
        rms_norm, RMSNormConfig(16, eps=EPS), RMSNormParams, 1, lambda x, w: F.rms_norm(x, [16], w, EPS), 16, (2, 6, 4)
    ),
    "layer_norm": layer(WIDTH),
    "layer_norm, odd": layer(37, bias=False),
    "l2_norm": normed(l2_norm, L2NormConfig(WIDTH, eps=EPS), None, 0, lambda x: x * (x.square().sum(-1, True) + EPS).rsqrt()),
    "layer_norm, long": layer(LONG, rows=(2,)),
    "group_norm": grouped(13),
    "group_norm, long": grouped(LONG // 4, 1),
    "add_rms_norm": added(False),
    "add_layer_norm": added(True),
    "add_layer_norm, long": added(True, 2, LONG),
    "route": routed(),
    "route, not normalised": routed(normalize=False),
    "route, losses": routed(aux=1e-2, z=1e-3),
    "route, sigmoid": routed(score="sigmoid", aux=1e-2),
    "attention": attended(attention, AttentionConfig()),
    "attention, causal": attended(attention, AttentionConfig(causal=True)),
    "attention, capped": attended(attention, AttentionConfig(softcap=30.0)),
    "attention, biased": attended(attention, AttentionConfig(bias=True), biased=True),
    "sink_attention": attended(sink_attention, SinkAttentionConfig(2, causal=True), sinks=True),
}


def grid():
    """All torch cases in float32 are in the first tier; of Triton's, those with logits."""
    for probe, name, dtype in itertools.product(PROBES, POINTS, (torch.float32, torch.bfloat16)):
        first = dtype is torch.float32 and (name == "torch" or probe.startswith(("cross_entropy", "route")))
        yield pytest.param(probe, name, dtype, id=f"{probe}-{name}-{dtype}", marks=() if first else pytest.mark.slow)


@pytest.fixture(autouse=True)
def one_rounding_a_product(monkeypatch):
    """The interpreter multiplies with NumPy: on some CPUs its float32 products of one row have other bits in a block of another
    shape. A backward that computes scores anew would lose by that what a device's does not."""
    kind, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    before = kind.create_dot

    def create_dot(self, a, b, d, *args):
        if a.data.dtype != np.float32 or b.data.dtype != np.float32:
            return before(self, a, b, d, *args)
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
        return handle((product + d.data).astype(d.data.dtype), d.dtype.scalar)

    monkeypatch.setattr(kind, "create_dot", create_dot)


def by_autograd(probe, leaves, other, dys):
    y = probe.plain(leaves, other)
    parts = [(t, dy) for t, dy in zip(y, dys(y), strict=True) if t is not None and t.requires_grad]
    return [*y, *torch.autograd.grad([t for t, _ in parts], leaves, [dy for _, dy in parts], allow_unused=True)]


def compared(probe, seed, scale, shift, dtype):
    """(name, error, PyTorch's error, a rounding) of each result."""
    leaves, other = probe.make(Draw(seed, scale, shift, dtype))
    leaves = [t.to(dtype).float() for t in leaves]
    other = other.to(dtype).float() if isinstance(other, torch.Tensor) and other.is_floating_point() else other

    def dys(y):
        generator = torch.Generator().manual_seed(seed)
        drawn = [None if t is None or not t.is_floating_point() else torch.randn(t.shape, generator=generator) for t in y]
        return [None if dy is None else dy.bfloat16().to(t.dtype) for dy, t in zip(drawn, y, strict=True)]

    widths = dict.fromkeys((torch.float64, torch.float32, torch.float32 if probe.wide else dtype))
    want, *torchs = (by_autograd(probe, [t.to(its).clone().requires_grad_() for t in leaves], other, dys) for its in widths)
    y, grads = probe.ours([t.to(dtype) for t in leaves], other, dys)
    sizes = [0.0 if t is None else float(t.detach().abs().max()) for t in want]
    for i, (got, exact, size, terms, *others) in enumerate(
        zip([*y, *grads], want, sizes, probe.terms(leaves, sizes), *torchs, strict=True)
    ):
        if exact is None or not exact.isfinite().all():  # the choice of experts; 0 / 0
            continue
        error, *allowed = (float((t.detach().double() - exact.detach()).abs().max()) for t in (got, *others))
        rounding = ROUNDOFF[got.dtype] * size + ROUNDOFF[torch.float32] * terms
        yield f"y{i}" if i < len(y) else f"d{i - len(y)}", error, max(allowed), rounding


@pytest.mark.turns("probe", "name", "dtype", every=3)
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # where the interpreter runs what a device does in silence
@pytest.mark.parametrize(("probe", "name", "dtype"), list(grid()))
def test_no_result_loses_more_than_pytorchs(probe, name, dtype):
    bad = []
    for seed, (scale, shift) in enumerate(POINTS[name]):
        with backend(name):
            for what, error, torchs, rounding in compared(PROBES[probe], seed, scale, shift, dtype):
                if not error <= SHIFTED_FACTOR * torchs + SHIFTED_ROUNDINGS * rounding:
                    bad.append(f"{what} of {scale:g} x + {shift:g}: {error:.2e}, torch {torchs:.2e}, a rounding {rounding:.2e}")
    assert not bad, "\n".join([f"{probe}: {len(bad)}", *bad])
