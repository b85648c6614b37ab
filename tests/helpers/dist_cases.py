"""Cases of the ops of `funcops.dist`, on any number of ranks; on one rank each is its plain op."""

import dataclasses
import functools
import itertools
import math

import torch
import torch.nn.functional as F

from funcops import EmbeddingParams, LinearConfig, LinearCrossEntropyParams, LinearParams, SinkAttentionParams, dist, linear, random
from funcops.distributed import Mesh
from funcops.engine.trees import tree_map
from funcops.library.formats.recipes import Fp8Current
from funcops.library.ops.experts import ExpertsParams
from funcops.library.ops.grouped_linear import GroupedLinearParams
from funcops.lora import LowRankParams
from funcops.testing import Case, DistCase, Placed

SHARD, INVARIANT, REPLICATE, PARTIAL = (Placed(kind) for kind in ("shard", "invariant", "replicate", "partial"))
LAYERS = {"column": (dist.column_linear, dist.ColumnLinearConfig), "row": (dist.row_linear, dist.RowLinearConfig)}
ONE = Mesh.abstract({"tp": 1}, 0)["tp"]


def collective(op, config, x, y, shape, reference=lambda params, x, n: x * 1.0, **fields):
    """A case of a collective on a whole x of this shape."""
    return DistCase(
        cfg=lambda axis: config(axis, **fields),
        x=lambda d: d.randn(*shape),
        reference=reference,
        placed_x=x,
        placed_y=y,
        name=f"{op.name}-{shape}-{fields}",
    )


def rolled(by):
    return lambda params, x, n: torch.roll(x, by * (x.shape[0] // n), 0)


def collectives(rows, width, by, dim):
    """Each collective with a case; `dim`: of a [8 rows, 8 width] tensor, or counted from the end."""
    shape = (8 * rows, 8 * width)
    part, other = Placed("shard", dim), 1 - dim % 2
    for op, config, x, y, fields in (
        (dist.gather, dist.GatherConfig, part, REPLICATE, {"dim": dim}),
        (dist.scatter_sum, dist.ScatterSumConfig, PARTIAL, part, {"dim": dim}),
        (dist.sum_over, dist.SumOverConfig, PARTIAL, INVARIANT, {}),
        (dist.copy_to, dist.CopyToConfig, INVARIANT, REPLICATE, {}),
        (dist.gather_same, dist.GatherSameConfig, part, INVARIANT, {"dim": dim}),
        (dist.slice_of, dist.SliceOfConfig, INVARIANT, part, {"dim": dim}),
        (dist.all_to_all, dist.AllToAllConfig, Placed("shard", other), part, {"split": dim, "cat": other}),
    ):
        yield op, collective(op, config, x, y, shape, **fields)
    yield dist.shift, collective(dist.shift, dist.ShiftConfig, SHARD, SHARD, shape, rolled(by), by=by)


def layer(name, rows, i, o, bias, sequence, overlap):
    """column_linear or row_linear, beside itself without overlap; sharded sizes are multiples of 8."""
    column = name == "column"
    i, o = (i, 8 * o) if column else (8 * i, o)
    made = functools.partial(LAYERS[name][1], i, o, bias=bias, sequence_parallel=sequence)
    whole = SHARD if sequence else INVARIANT
    of_bias = SHARD if column else REPLICATE if sequence else INVARIANT
    return DistCase(
        cfg=lambda axis: made(axis=axis, overlap=overlap),
        **{"near" if overlap == "ring" else "twin": lambda axis: made(axis=axis)},
        x=lambda d: d.randn(8 * rows[0], *rows[1:], i),
        params=lambda d: LinearParams(d.randn(o, i), d.randn(o) if bias else None),
        reference=lambda params, x, n: F.linear(x, params.weight, params.bias),
        placed_x=whole if column else Placed("shard", -1),
        placed_y=Placed("shard", -1) if column else whole,
        placed_params=LinearParams(Placed("shard", 0 if column else 1), of_bias if bias else None),
        name=f"{rows}-{i}-{o}-bias={bias}-sequence={sequence}-{overlap}",
    )


def low_rank_layer(side, rows, i, o, rank, sequence):
    """An adapter beside column_linear or row_linear."""
    column = side == "column"
    i, o = (i, 8 * o) if column else (8 * i, o)
    made = functools.partial(dist.ParallelLowRankConfig, i, o, rank, scale=0.5, side=side, sequence_parallel=sequence)
    whole, other = sequence_or_whole(sequence), REPLICATE if sequence else INVARIANT
    return DistCase(
        cfg=lambda axis: made(axis=axis),
        x=lambda d: d.randn(8 * rows[0], *rows[1:], i),
        params=lambda d: LowRankParams(d.randn(rank, i), d.randn(o, rank)),
        reference=lambda params, x, n: 0.5 * F.linear(F.linear(x, params.a), params.b),
        placed_x=whole if column else Placed("shard", -1),
        placed_y=Placed("shard", -1) if column else whole,
        placed_params=LowRankParams(*((other, Placed("shard", 0)) if column else (Placed("shard", 1), other))),
        name=f"{side}-{rows}-{i}-{o}-{rank}-sequence={sequence}",
    )


class Fp8(torch.autograd.Function):
    """x w^T of operands rounded to 8 bits with one scale a tensor, from its largest element; straight-through gradients."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return Fp8.rounded(x) @ Fp8.rounded(w).mT

    @staticmethod
    def backward(ctx, dy):
        x, w = map(Fp8.rounded, ctx.saved_tensors)
        dy = Fp8.rounded(dy, torch.float8_e5m2)
        return dy @ w, dy.flatten(0, -2).mT @ x.flatten(0, -2)

    @staticmethod
    def rounded(t, dtype=torch.float8_e4m3fn):
        scale = torch.tensor(torch.finfo(dtype).max) / t.abs().max().float() if t.numel() and t.any() else torch.tensor(1.0)
        return ((t.float() * scale).to(dtype).float() * (1 / scale)).double()


LOW = {"column": (dist.column_qlinear, dist.ColumnQLinearConfig), "row": (dist.row_qlinear, dist.RowQLinearConfig)}


def low_layer(name, rows, i, o, sequence, keep):
    """column_qlinear or row_qlinear with `Fp8Current`: its scales are of whole tensors, on any number of ranks."""
    case = layer(name, rows, i, o, True, sequence, "bulk")

    def cfg(overlap):
        plain = case.cfg(ONE)
        made = functools.partial(LOW[name][1], plain.in_features, plain.out_features, sequence_parallel=sequence)
        return lambda axis: made(axis=axis, recipe=Fp8Current(keep=keep), overlap=overlap)

    def reference(params, x, n):
        return Fp8.apply(x, params.weight) + params.bias

    return dataclasses.replace(case, cfg=cfg("bulk"), twin=cfg("none"), reference=reference, name=f"{case.name}-{keep}")


def row_split(rows, i, o, bias, **options):
    """A linear whose params are sharded; each rank has rows of its own."""
    return DistCase(
        cfg=lambda axis: dist.ShardedConfig(linear, LinearConfig(i, 8 * o, bias=bias), axis=axis, **options),
        x=lambda d: d.randn(8 * rows, i),
        params=lambda d: LinearParams(d.randn(8 * o, i), d.randn(8 * o) if bias else None),
        reference=lambda params, x, n: F.linear(x, params.weight, params.bias),
        placed_x=SHARD,
        placed_y=SHARD,
        placed_params=LinearParams(SHARD, SHARD if bias else None),
        name=f"{rows}-{i}-{o}-bias={bias}-{options}",
    )


def sequence_or_whole(sequence):
    return SHARD if sequence else INVARIANT


def vocab_embedding(rows, vocab, dim, padding, sequence):
    vocab = 8 * vocab
    pad = vocab // 2 if padding else None

    def reference(params, ids, n):
        return F.embedding(ids, params.weight, pad)

    return DistCase(
        cfg=lambda axis: dist.VocabEmbeddingConfig(vocab, dim, axis=axis, padding_idx=pad, sequence_parallel=sequence),
        x=lambda d: d.integers(0, vocab, 8 * rows[0], *rows[1:]),
        params=lambda d: EmbeddingParams(d.randn(vocab, dim)),
        reference=reference,
        placed_x=INVARIANT,
        placed_y=sequence_or_whole(sequence),
        placed_params=EmbeddingParams(SHARD),
        name=f"{rows}-{vocab}-{dim}-{pad}-sequence={sequence}",
    )


def loss(logits, labels, label_smoothing=0.0, ignore_index=-100, z_loss=0.0, reduction="mean", entropy=False):
    flat, ids = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    counts = ids != ignore_index
    found = F.cross_entropy(flat, ids, reduction="none", label_smoothing=label_smoothing, ignore_index=ignore_index)
    found = (found + z_loss * flat.logsumexp(-1).square() * counts).reshape(labels.shape)
    if entropy:
        return found, (torch.distributions.Categorical(logits=flat).entropy() * counts).reshape(labels.shape)
    return found if reduction == "none" else found.sum() / (counts.sum() if reduction == "mean" else 1)


def some_labels(d, vocab, rows, ignore_index=-100, **options):
    """The first is not ignored, the second is."""
    labels = d.integers(0, vocab, *rows)
    labels.reshape(-1)[:2] = torch.tensor([vocab - 1, ignore_index])[: labels.numel()]
    return labels


def vocab_cross_entropy(rows, vocab, **options):
    vocab = 8 * vocab
    return DistCase(
        cfg=lambda axis: dist.VocabCrossEntropyConfig(axis, **options),
        x=lambda d: (3 * d.randn(*rows, vocab), some_labels(d, vocab, rows, **options)),
        reference=lambda params, x, n: loss(*x, **options),
        placed_x=(Placed("shard", -1), INVARIANT),
        placed_y=(INVARIANT, INVARIANT) if options.get("entropy") else INVARIANT,
        name=f"{rows}-{vocab}-{options}",
    )


def vocab_linear_cross_entropy(rows, width, vocab, sequence, chunk_bytes, softcap=None, gradient="backward", **options):
    vocab, rows = 8 * vocab, (8 * rows[0], *rows[1:])
    given = dict(sequence_parallel=sequence, chunk_bytes=chunk_bytes, softcap=softcap, gradient=gradient)
    made = functools.partial(dist.VocabLinearCrossEntropyConfig, width, vocab, **given)

    def reference(params, x, n):
        logits = x[0] @ params.weight.T
        return loss(logits if softcap is None else softcap * torch.tanh(logits / softcap), x[1], **options)

    return DistCase(
        cfg=lambda axis: made(axis=axis, **options),
        x=lambda d: (d.randn(*rows, width), some_labels(d, vocab, rows, **options)),
        params=lambda d: LinearCrossEntropyParams(d.randn(vocab, width)),
        reference=reference,
        placed_x=(sequence_or_whole(sequence), INVARIANT),
        placed_y=(INVARIANT, INVARIANT) if options.get("entropy") else INVARIANT,
        placed_params=LinearCrossEntropyParams(SHARD),
        name=f"{rows}-{width}-{vocab}-sequence={sequence}-{chunk_bytes}-{softcap}-{gradient}-{options}",
    )


def attended(q, k, v, causal, scale, softcap=None, window=None, sinks=None):
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    if causal:
        seen = torch.ones(scores.shape[-2:]).tril()
        scores = scores.masked_fill((seen if window is None else seen.triu(1 - window)) == 0, float("-inf"))
    if sinks is not None:  # the score of a key whose value is zero
        scores = torch.cat((scores, sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
        v = torch.cat((v, torch.zeros_like(v[:, :1])), 1)
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1) if k.shape[1] else scores, v)


def axis_of(n, rank=0):
    return Mesh.abstract({"tp": n}, rank)["tp"]


def context_attention(
    batch, t, s, heads, groups, size, causal, comm, scale=None, softcap=None, window=None, sinks=False, value=None
):
    """A case of 16 t queries and 16 s keys; whole tensors are in the order in which ranks would gather them."""
    s = t if causal else s

    def reference(params, x, n):
        own = params.sinks if sinks else None
        y = attended(*(dist.unzigzag(one, axis_of(n)) for one in x), causal, scale, softcap, window, own)
        return torch.cat([dist.zigzag(y, axis_of(n, rank)) for rank in range(n)], 1)

    def x(d):
        q, k = d.randn(batch, 16 * t, heads * groups, size), d.randn(batch, 16 * s, heads, size)
        return q, k, d.randn(batch, 16 * s, heads, value or size)

    made = functools.partial(dist.ContextSinkAttentionConfig, heads=heads * groups) if sinks else dist.ContextAttentionConfig
    part = Placed("shard", 1)
    return DistCase(
        cfg=lambda axis: made(axis, causal=causal, scale=scale, comm=comm, softcap=softcap, window=window),
        **({"params": lambda d: SinkAttentionParams(d.randn(heads * groups))} if sinks else {}),
        placed_params=SinkAttentionParams(Placed("replicate")) if sinks else None,
        x=x,
        reference=reference,
        placed_x=(part, part, part),
        placed_y=part,
        name=f"{batch}-{t}-{s}-{heads}x{groups}-{size}-causal={causal}-{comm}-{softcap}-{window}-{sinks}-{value}",
    )


def parallel_experts(rows, choices, dim, hidden, bias, some=8, **options):
    """8 experts, of which the first `some` are chosen."""
    count = 8

    def x(d):
        indices = d.rand(8 * rows[0], *rows[1:], some).argsort(-1)[..., :choices].to(torch.int32)
        return d.rand(*indices.shape), d.randn(*indices.shape[:-1], dim), indices

    def params(d):
        up, down = (GroupedLinearParams(d.randn(count, o, i)) for o, i in ((2 * hidden, dim), (dim, hidden)))
        if bias:
            up.bias, down.bias = d.randn(count, 2 * hidden), d.randn(count, dim)
        return ExpertsParams(up, down)

    def reference(params, x, n):
        """Every expert computes every token."""
        weights, tokens, indices = x
        total = torch.zeros_like(tokens)
        for e in range(count):
            up, down = ((p.weight[e], p.bias[e] if bias else None) for p in (params.up, params.down))
            gate, value = F.linear(tokens, *up).chunk(2, -1)
            total = total + F.linear(F.silu(gate) * value, *down) * (weights * (indices == e)).sum(-1, keepdim=True)
        return total

    part = GroupedLinearParams(SHARD, SHARD if bias else None)
    return DistCase(
        cfg=lambda axis: dist.ParallelExpertsConfig(count, dim, hidden, axis=axis, bias=bias, **options),
        x=x,
        params=params,
        reference=reference,
        placed_x=(SHARD, SHARD, SHARD),
        placed_y=SHARD,
        placed_params=ExpertsParams(part, part),
        buffers=True,
        name=f"{rows}-{choices}-{dim}-{hidden}-bias={bias}-{some}-{options}",
    )


def sent(weights, tokens, indices, count, n, capacity):
    """Each rank's weights, rows and indices, with C slots for the tokens of each rank, and the slots of all tokens."""
    m, own = len(tokens) // n, count // n
    room = math.ceil(capacity * m)
    zeros = torch.zeros_like(weights[0]), torch.zeros_like(tokens[0]), torch.full_like(indices[0], own)
    place = torch.full((len(tokens), n), n * room, dtype=torch.int32)
    rows = []
    for r, q in itertools.product(range(n), repeat=2):
        here = (indices >= r * own) & (indices < (r + 1) * own)
        goes = [t for t in range(q * m, (q + 1) * m) if here[t].any()][:room]
        place[goes, r] = torch.arange(r * room, r * room + len(goes), dtype=torch.int32)
        rows += [(weights[t], tokens[t], torch.where(here[t], indices[t] - r * own, own)) for t in goes]
        rows += [zeros] * (room - len(goes))
    return (*(torch.stack(column) for column in zip(*rows, strict=True)), place)


def latent_split(rows, heads, sequence):
    """8 heads times `heads`, of keys with 2 shared and 3 own numbers, and values of 4."""

    def reference(params, x, n):
        q, kv, shared = x
        own, v = kv.split((3, 4), -1)
        return q * 1.0, torch.cat((shared.expand(*own.shape[:-1], 2), own), -1), v * 1.0

    of_heads, rest = Placed("shard", -2), Placed("shard", 0) if sequence else Placed("invariant")
    return DistCase(
        cfg=lambda axis: dist.ParallelLatentSplitConfig(8 * heads, shared=2, own=3, value=4, axis=axis, sequence_parallel=sequence),
        x=lambda d: (d.randn(8 * rows, 2, 8 * heads, 5), d.randn(8 * rows, 2, 8 * heads, 7), d.randn(8 * rows, 2, 1, 2)),
        reference=reference,
        placed_x=(of_heads, of_heads, rest),
        placed_y=(of_heads, of_heads, of_heads),
        name=f"{rows}-{heads}-sequence={sequence}",
    )


def dispatch(rows, choices, dim, capacity=1.0, some=9):
    """A case of 8 experts: tokens choose among the first `some`; a ninth is a choice that was dropped. With a capacity, as ranks
    have equal parts of y."""

    def x(d):
        indices = d.rand(8 * rows[0], *rows[1:], some).argsort(-1)[..., :choices].to(torch.int32)
        return d.rand(*indices.shape), d.randn(*indices.shape[:-1], dim), indices

    def reference(params, x, n):
        weights, tokens, indices = (t.flatten(0, -2) for t in x)
        made, got, own, place = sent(weights, tokens, indices, 8, n, capacity)
        return made, got, own, place.view(*x[1].shape[:-1], n), None

    return DistCase(
        cfg=lambda axis: dist.DispatchConfig(8, axis=axis, capacity=capacity),
        x=x,
        reference=reference,
        placed_x=(SHARD, SHARD, SHARD),
        placed_y=(SHARD, SHARD, SHARD, SHARD, None),
        buffers=True,  # a place for each rank
        name=f"{rows}-{choices}-{dim}-{capacity}-{some}",
    )


def combine(tokens, choices, dim, spare=1):
    """Tokens in eight blocks, each in slots of its own among `spare` more, on any number of ranks."""
    room = math.prod(tokens) * choices + spare

    def x(d):
        place = torch.stack([b * room + torch.randperm(room, generator=d.generator)[: room - spare] for b in range(8)])
        return d.randn(64 * room, dim), place.view(8 * tokens[0], *tokens[1:], choices).to(torch.int32)

    def reference(params, x, n):
        rows, place = x
        back = rows.view(n, n, -1, dim).transpose(0, 1).reshape(n, -1, dim)
        return torch.cat([b[p.long()].sum(-2) for b, p in zip(back, place.chunk(n), strict=True)])

    return DistCase(
        cfg=dist.CombineConfig,
        x=x,
        reference=reference,
        placed_x=(SHARD, SHARD),
        placed_y=SHARD,
        name=f"{tokens}-{choices}-{dim}-{spare}",
    )


def all_cases():
    """A small case of each op, and the further arguments of its `Case`."""
    for op, case in collectives(1, 1, 1, 0):
        yield op, case, {"free": ("x",)}
    for name, (op, _) in LAYERS.items():
        yield op, layer(name, (1, 2), 3, 2, True, True, "bulk"), {"cancels": ("params.bias", "params.weight")}
    for name, (op, _) in LOW.items():
        given = {"exempt": ("finite_differences",), "cancels": ("params.bias", "params.weight")}
        yield op, low_layer(name, (1, 2), 3, 2, True, "row"), given
    yield dist.sharded, row_split(1, 3, 2, True), {"cancels": ("params.bias", "params.weight")}
    padded = {"exempt": ("finite_differences",)}  # the padding's gradient is defined as 0, and is not the derivative
    yield dist.vocab_embedding, vocab_embedding((1, 3), 1, 3, True, True), {"free": ("x",), **padded}
    options = {"label_smoothing": 0.1, "z_loss": 0.01}
    yield dist.vocab_cross_entropy, vocab_cross_entropy((4,), 1, **options), {}
    yield dist.vocab_linear_cross_entropy, vocab_linear_cross_entropy((1,), 3, 1, True, 80, **options), {}
    yield dist.parallel_low_rank, low_rank_layer("column", (1, 2), 3, 2, 2, True), {"cancels": ("params.a", "params.b")}
    yield dist.parallel_experts, parallel_experts((1, 3), 3, 3, 2, True), {}
    yield dist.dispatch, dispatch((1, 3), 3, 2), {}
    yield dist.combine, combine((1, 2), 2, 3), {"free": ("x.0", "x.1")}
    yield dist.parallel_latent_split, latent_split(1, 1, True), {"free": ("x.0", "x.1", "x.2")}
    yield dist.context_attention, context_attention(1, 1, 1, 1, 2, 4, True, "ring"), {}
    yield dist.context_sink_attention, context_attention(1, 1, 1, 1, 2, 4, True, "ring", sinks=True), {}


def on_axis(op, case, more, axis):
    """The part of a case that one rank of an axis has; without a reference unless it is the only rank."""

    def part(whole, placed):
        return tree_map(lambda t, p: None if t is None else p.split(t, axis.size)[axis.rank], whole, placed)

    return Case(
        op=op,
        cfg=case.cfg(axis),
        x=lambda d: part(case.x(d), case.placed_x),
        params=lambda d: None if case.params is None else part(case.params(d), case.placed_params),
        reference=lambda params, x, cfg: case.reference(params, x, 1),
        name=f"{op.name}-{case}",
        **more,
    )


CASES = {op.name: (op, case, more) for op, case, more in all_cases()}


def dropped(params, x, cfg):
    kept = random.bits(x[1], x[0].numel()).reshape(x[0].shape) >= round(cfg.p * 2**32)
    return torch.where(kept, x[0] / (1 - cfg.p), torch.zeros_like(x[0]))


def of_rank(name, axis, **fields):
    """The part of a case that one rank of an axis has, with these fields in its config."""
    if name in CASES:
        op, case, more = CASES[name]
        own = dataclasses.replace(case, cfg=lambda axis: dataclasses.replace(case.cfg(axis), **fields))
        return on_axis(op, own, more | {"casts": op.name.endswith("cross_entropy")}, axis)
    return Case(
        op=dist.sharded_dropout,
        cfg=dist.ShardedDropoutConfig(0.5, shared=(dist.Shared(0, axis),)),
        x=lambda d: (d.randn(4, 3), d.key()),
        reference=dropped,
        free=("x.0",),
    )


PLAIN = {name: of_rank(name, ONE) for name in (*CASES, "sharded_dropout")}
