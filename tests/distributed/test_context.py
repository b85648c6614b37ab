"""Attention over a sequence that is sharded over an axis: equal to the plain op, on every number of ranks."""

import importlib
import math

import pytest
import torch
from dist_cases import ONE, axis_of, context_attention
from hypothesis import example, given, settings
from hypothesis import strategies as st

from funcops import (
    AttentionConfig,
    EmbeddingConfig,
    EmbeddingParams,
    LinearCrossEntropyConfig,
    LinearCrossEntropyParams,
    Needs,
    SinkAttentionConfig,
    SinkAttentionParams,
    attention,
    dist,
    embedding,
    linear_cross_entropy,
    sink_attention,
)
from funcops.distributed import comm
from funcops.library.kernels import attention as kernels
from funcops.testing import check_dist, run_ranks
from funcops.testing.checks import float_like, same_bits
from funcops.testing.tolerances import assert_close

module = importlib.import_module("funcops.distributed.ops.context_attention")
WAYS = ("gather", "ring", "heads")


def shared(heads, way):
    """A number of heads that ranks can share out, if they do."""
    return 8 * heads if way == "heads" else heads


DRAWN = given(
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(1, 2),
    st.integers(1, 2),
    st.sampled_from((4, 5)),
    st.sampled_from((None, 3, 6)),
    st.booleans(),
)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=1)
@example(2, 1, 1, 2, 2, 4, None, True)  # nothing empty, whatever is drawn
@example(1, 1, 2, 1, 2, 4, 3, False)
@DRAWN
def test_it_is_the_plain_op_in_parts(way, batch, t, s, heads, groups, size, value, causal):
    case = context_attention(batch, t, s, shared(heads, way), groups, size, causal, way, value=value)
    check_dist(dist.context_attention, case)


@pytest.mark.parametrize(("way", "causal"), [("gather", True), ("ring", False), ("heads", True), ("heads", False)])
def test_capped_scores(way, causal):
    case = context_attention(2, 1, 2, shared(1, way), 2, 4, causal, way, 0.7, 0.5, value=6)
    check_dist(dist.context_attention, case, sizes=(1, 2, 4))


OPTIONS = {  # an attention in order, of rows whose windows and sequences reach into other chunks, or end in them
    "a window": dict(causal=True, window=7, softcap=1.5),
    "alibi": dict(causal=True, alibi=True),
    "a bias": dict(causal=True, bias=True),
    "a bias, all keys": dict(bias=True),
    "packed": dict(causal=True, packed=True),
    "packed, a window": dict(causal=True, packed=True, window=3),
    "chunks": dict(causal=True, chunk=6),
    "packed, chunks": dict(causal=True, packed=True, chunk=3, window=2),
    "sinks alone": dict(causal=True),
}


WHOLE = [
    (way, name)
    for way in ("gather", "heads")
    for name in OPTIONS
    if way == "gather" or name[:2] not in ("al", "a ") or "win" in name
]


@pytest.mark.turns("sinks", "way", "name", every=2)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("way", "name"), WHOLE)
def test_options_of_attention(way, name, sinks):
    options, length, draw = OPTIONS[name], 16, torch.Generator().manual_seed(1)
    n = 4 if way == "gather" else 2
    if sinks:
        plain, config, op = SinkAttentionConfig(4, **options), dist.ContextSinkAttentionConfig, dist.context_sink_attention
        options, of = options | {"heads": 4}, sink_attention
    else:
        plain, config, op, of = AttentionConfig(**options), dist.ContextAttentionConfig, dist.context_attention, attention
    batch, keys = 2 - plain.packed, length * (2 - plain.causal)
    shapes = (batch, length, 4, 8), (batch, keys, 2, 8), (batch, keys, 2, 5), *[(1, 4, length, keys)] * plain.bias
    x = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]
    x += [torch.tensor([0, 3, 3, 11, length], dtype=torch.int32)] * plain.packed
    params = SinkAttentionParams(torch.randn(4, generator=draw, dtype=torch.float64)) if sinks else None
    y, kept = of.fwd(params, tuple(x), plain)
    dy = torch.randn(y.shape, generator=draw, dtype=torch.float64)
    dparams, dx = of.bwd(kept, dy, plain)

    def part(t, axis):
        return dist.zigzag(t, axis, 1 if t.shape[1] != 4 else 2) if t.dim() == 4 else t

    def run(mesh):
        cp = mesh["cp"]
        cfg = config(cp, comm=way, **options)
        y, kept = op.fwd(params, tuple([part(t, cp) for t in x]), cfg)
        dparams, dx = op.bwd(kept, part(dy, cp), cfg)
        again, pending = op.dgrad(kept, part(dy, cp), cfg)
        same_bits((op.wgrad(pending, cfg), again), (dparams, dx), "the halves")
        return y, *dx[:3], *[None if d is None else d.transpose(1, 2) for d in dx[3:]], dparams and comm.sum_over(dparams.sinks, cp)

    found = list(zip(*run_ranks({"cp": n}, run), strict=True))
    want = [y, *dx[:3], *[None if d is None else d.transpose(1, 2) for d in dx[3:]]]
    for ranks, one in zip(found[:-1], want, strict=True):
        if one is not None:
            torch.testing.assert_close(dist.unzigzag(torch.cat(ranks, 1), axis_of(n)), one, rtol=0, atol=1e-13)
    if sinks:
        torch.testing.assert_close(found[-1][-1], dparams.sinks, rtol=0, atol=1e-13)


def test_sinks_and_windows_are_the_plain_op_in_parts():
    case = context_attention(2, 1, 1, 1, 2, 4, True, "gather", window=5, sinks=True)
    check_dist(dist.context_sink_attention, case, sizes=(1, 2, 4))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=6)
@DRAWN
def test_more_shapes(way, batch, t, s, heads, groups, size, value, causal):
    case = context_attention(batch, t, s, shared(heads, way), groups, size, causal, way, scale=0.3, value=value)
    check_dist(dist.context_attention, case)


def qkv(dtype, causal, length=16, size=8, device="cpu"):
    """q of 4 heads, k and v of 2; as many keys as queries if causal, otherwise twice as many."""
    shapes = (2, length, 4, size), *[(2, length if causal else 2 * length, 2, size)] * 2
    return tuple(torch.randn(shape).to(device, dtype) for shape in shapes)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
CAUSAL = pytest.mark.parametrize("causal", [True, False])


@CAUSAL
@DTYPES
def test_narrow_dtypes(dtype, causal):
    hold_to_plain(qkv(dtype, causal), causal)


@pytest.mark.gpu
@CAUSAL
@DTYPES
@pytest.mark.parametrize("length", [256, 8 * 18])  # of which a rank has whole groups of 32 rows, and not
def test_narrow_dtypes_on_a_device(dtype, causal, length):
    for size in (64, 264):
        hold_to_plain(qkv(dtype, causal, length, size, "cuda"), causal)


def hold_to_plain(whole, causal):
    """Compare with attention in one piece, within the op's tolerance."""
    dtype, cfg = whole[0].dtype, AttentionConfig(causal=causal)
    y, residuals = attention.fwd(None, whole, cfg)
    dy = float_like(y, 7)
    want = y, *attention.bwd(residuals, dy, cfg)[1]

    def run(mesh, way):
        part = [dist.zigzag(t, mesh["cp"]) for t in (*whole, dy)]
        cfg = dist.ContextAttentionConfig(mesh["cp"], causal=causal, comm=way)
        y, residuals = dist.context_attention.fwd(None, tuple(part[:3]), cfg)
        assert y.dtype is dtype and residuals.logsumexp.dtype is torch.float32
        return y, *dist.context_attention.bwd(residuals, part[3], cfg)[1]

    for way in WAYS:
        n = 2 if way == "heads" else 4
        found = run_ranks({"cp": n}, lambda mesh, way=way: run(mesh, way))
        for name, parts, one in zip(("y", "dq", "dk", "dv"), zip(*found, strict=True), want, strict=True):
            assert_close(
                dist.unzigzag(torch.cat(parts, 1), axis_of(n)), one, dtype=dtype, length=one.numel(), what=f"{way}: {name}"
            )


@CAUSAL
def test_one_rank_has_the_bits_of_attention(causal):
    x, plain = qkv(torch.float32, causal), AttentionConfig(causal=causal)
    y, residuals = attention.fwd(None, x, plain)
    want = y, attention.bwd(residuals, y, plain)
    for way in WAYS:
        cfg = dist.ContextAttentionConfig(ONE, causal=causal, comm=way)
        y, residuals = dist.context_attention.fwd(None, x, cfg)
        same_bits((y, dist.context_attention.bwd(residuals, y, cfg)), want, way)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_sent_and_computed_blocks(n, monkeypatch):
    """All ranks compute equally much, and nothing for masked blocks; k and v are sent once each way, then dk and dv."""
    seen = {}

    def counted(given):
        def call(*args):
            q, k = args[1:3] if len(args) == 8 else args[:2]
            work = q.shape[1] * k.shape[1]
            assert work
            seen[mesh_rank[0]] = seen.get(mesh_rank[0], 0) + (work // 2 if args[-2] else work)
            return given(*args)

        return call

    for name in ("attention_fwd", "attention_bwd"):
        monkeypatch.setattr(kernels, name, counted(getattr(kernels, name)))
    mesh_rank = [0]

    def step(mesh, way):
        mesh_rank[0] = mesh.rank
        cfg = dist.ContextAttentionConfig(mesh["cp"], causal=True, comm=way)
        q, kv = torch.zeros(1, 8, 4, 8), torch.zeros(1, 8, 2, 8)
        y, residuals = dist.context_attention.fwd(None, (q, kv, kv), cfg)
        dist.context_attention.bwd(residuals, y, cfg)

    kv = 8 * 2 * (8 + 8)
    shift = f"all_to_all of float32[*, {kv}]"
    gathered = [f"all_gather of float32[{kv}]"] * 2 + [f"reduce_scatter (sum) of float32[{kv * n}]"]
    for way, want in (("gather", gathered), ("ring", [shift] * (3 * n - 2))):
        seen.clear()
        programs = dist.check_program(lambda mesh, way=way: step(mesh, way), {"cp": n})
        assert {tuple(map(str, program.sent)) for program in programs.values()} == {tuple(want)}
        assert seen == dict.fromkeys(range(n), 2 * (8 * 8 * n // 2))


def test_heads_travel_together():
    """Forward q, k and v in one message, and y and its logsumexp; backward these with dy, and three gradients in one."""

    def step(mesh):
        cfg = dist.ContextAttentionConfig(mesh["cp"], causal=True, comm="heads")
        q, kv = torch.zeros(1, 8, 4, 8), torch.zeros(1, 8, 2, 8)
        y, residuals = dist.context_attention.fwd(None, (q, kv, kv), cfg)
        dist.context_attention.bwd(residuals, y, cfg)

    forward, backward = (4 + 2 + 2, 4), (3 * 4 + 2 + 2, 4 + 2 + 2)  # heads of each message
    for program in dist.check_program(step, {"cp": 2}).values():
        sizes = [sum(one.sends) * math.prod(one.shape[1:]) for one in program.sent]
        whole, rows = 8 * 8, 8  # elements of a head, and of its logsumexp
        assert sizes == [forward[0] * whole, forward[1] * whole, 4 * rows, backward[0] * whole, 4 * rows, backward[1] * whole]


def test_a_gradient_that_nobody_asks_for_is_none():
    cfg = dist.ContextAttentionConfig(axis=dist.Mesh.abstract({"cp": 1}, 0)["cp"], causal=True)
    x = tuple(torch.randn(3, 1, 4, 2, 3).unbind())
    for asked in ([], False, ["0"]):
        y, residuals = dist.context_attention.fwd(None, x, cfg, needs=Needs(x=asked))
        if residuals is not None:
            dx, pending = dist.context_attention.dgrad(residuals, y, cfg)
            assert pending is None and [d is not None for d in dx] == [bool(asked), False, False]


def test_tensors_without_a_gradient_are_not_sent():
    for way, back in (("gather", 1), ("ring", 3)):

        def step(mesh, way=way):
            cfg = dist.ContextAttentionConfig(mesh["cp"], comm=way)
            x = tuple(torch.zeros(1, 2, 1, 4) for _ in range(3))
            y, residuals = dist.context_attention.fwd(None, x, cfg, needs=Needs(x=("0",)))
            dq, dk, dv = dist.context_attention.bwd(residuals, y, cfg)[1]
            assert dq.shape == x[0].shape and dk is None and dv is None

        assert len(dist.check_program(step, {"cp": 4})[0].sent) == 2 * back


@settings(max_examples=20)
@given(st.integers(1, 5), st.integers(0, 3), st.integers(0, 2), st.integers(1, 3))
def test_zigzag_and_back(n, length, dim, width):
    sizes = [width] * 3
    sizes[dim] = 2 * n * length
    t = torch.arange(math.prod(sizes)).reshape(sizes)
    parts = [dist.zigzag(t, axis_of(n, rank), dim) for rank in range(n)]
    assert torch.equal(dist.unzigzag(torch.cat(parts, dim - 3), axis_of(n), dim), t)
    positions = [dist.zigzag_positions(2 * n * length, axis_of(n, rank)) for rank in range(n)]
    for part, where in zip(parts, positions, strict=True):
        assert torch.equal(part, t.index_select(dim, where))
    assert len({int(where.sum()) for where in positions}) == 1


def bad_calls(cp):
    """Error texts and the calls that raise them, on one rank of an axis of two."""

    def fwd(*shapes, **options):
        return dist.context_attention.fwd(None, tuple(map(torch.ones, shapes)), dist.ContextAttentionConfig(cp, **options))

    def plain(t):
        return dist.context_attention.fwd(None, (t, t, t), dist.ContextAttentionConfig(cp))

    where, good = "context_attention_fwd", (1, 4, 2, 8)
    yield (
        f"{where}: x.0 (q) must be of an even length (two chunks in zigzag order), got 3",
        lambda: fwd(*[(1, 3, 2, 8)] * 3, causal=True),
    )
    yield f"{where}: x.1 (k) must be as long as q, 4 (cfg.causal), got 6", lambda: fwd(good, *[(1, 6, 2, 8)] * 2, causal=True)
    yield f"{where}: x.1 (k) must be of a number of heads that divides 2, got 3", lambda: fwd(good, *[(1, 4, 3, 8)] * 2)
    yield f"{where}: x.0 (q) must be [B, T, H, D], got [4, 2, 8]", lambda: fwd(*[(4, 2, 8)] * 3)
    yield (
        f"{where}: x must be a tuple (q, k, v), got",
        lambda: dist.context_attention.fwd(None, torch.ones(good), dist.ContextAttentionConfig(cp)),
    )
    yield f"{where}: x.0 (q) must be a plain tensor", lambda: plain(torch.ones(good).as_subclass(DTensor))
    yield "ContextAttentionConfig: comm must be 'gather', 'ring' or 'heads', got 'p2p'", lambda: fwd(*[good] * 3, comm="p2p")
    for name in ("alibi", "packed"):
        said = "False without causal (kernels take the last row to be at the last key), got True"
        yield f"ContextAttentionConfig: {name} must be {said}", lambda name=name: fwd(*[good] * 3, **{name: True})
    said = "comm must be 'gather' or 'heads' with a window, chunks or packed sequences, 'gather' with ALiBi or a bias, got"
    for way, options in (
        ("ring", dict(window=2)),
        ("ring", dict(alibi=True)),
        ("heads", dict(alibi=True)),
        ("heads", dict(bias=True)),
    ):
        yield (
            f"ContextAttentionConfig: {said} '{way}'",
            lambda way=way, options=options: fwd(*[good] * 3, causal=True, comm=way, **options),
        )
    for name, heads in (("0 (q)", (3, 1)), ("1 (k)", (2, 1))):
        got = 1 if name[0] == "1" else 3
        said = f"of a number of heads that 2 divides (cfg.comm is 'heads'; 'gather' takes any), got {got}"
        shapes = [(1, 4, count, 8) for count in (heads[0], heads[1], heads[1])]
        yield f"{where}: x.{name} must be {said}", lambda shapes=shapes: fwd(*shapes, comm="heads")
    yield f"{where}: x.3 (bias) must be [1 or 1, 2 or 1, 4, 8], got [1, 1, 4, 4]", lambda: fwd(*[good] * 3, (1, 1, 4, 4), bias=True)
    yield f"{where}: x.1 (k) must be of an even length", lambda: fwd(good, *[(1, 3, 2, 8)] * 2, (1, 1, 4, 6), bias=True)
    t = torch.ones(1, 6)
    for name in ("zigzag", "unzigzag"):
        yield (
            f"{name}: t must be of a multiple of 4 along dimension 1 (axis 'tp' of 2), got float32[1, 6]",
            lambda name=name: getattr(dist, name)(t, cp),
        )
    yield ("zigzag_positions: length must be a multiple of 4 (axis 'tp' of 2), got 6", lambda: dist.zigzag_positions(6, cp))


class DTensor(torch.Tensor):
    """A stand-in for torch's class, recognised by its name."""


def test_bad_calls_raise_on_every_rank():
    def run(mesh):
        for said, call in bad_calls(mesh["tp"]):
            with pytest.raises((ValueError, TypeError)) as raised:
                call()
            assert str(raised.value).startswith(said), (said, raised.value)

    run_ranks({"tp": 2}, run)


def test_slopes_of_some_heads_are_refused():
    said = "AttentionConfig: alibi must be False over heads sharded over 2 ranks, got True"
    with pytest.raises(ValueError, match=f"^{said}"):
        AttentionConfig(alibi=True).sharded(2, 2)
    with pytest.raises(ValueError, match=f"^Sink{said}"):
        SinkAttentionConfig(4, alibi=True).sharded(2, 2)
    with pytest.raises(
        ValueError, match="^SinkAttentionConfig: heads must be dim -2 of x, and a multiple of 3, got 4, dim -2 sharded"
    ):
        SinkAttentionConfig(4).sharded(2, 3)


def other_half(rank, other, cfg, t, s):
    """Planted fault: the wrong queries attend to the keys of later ranks."""
    right = PAIR(rank, other, cfg, t, s)
    return right._replace(query=0) if other > rank else right


def own_logsumexp(total, out, logsumexp, first):
    """Planted fault: the logsumexp of the first keys is returned, not of all keys."""
    MERGE((total[0], total[1].clone()), out, logsumexp, first)


PAIR, MERGE = module._Pair.of, kernels.merge
WRONG = {
    "other queries": (module._Pair, "of", staticmethod(other_half), "y"),
    "nothing merged": (kernels, "merge", lambda *args: None, "y"),
    "a logsumexp of some": (kernels, "merge", own_logsumexp, "dx.0"),
    "another's keys": (comm, "scatter_sum", comm.own_slice, "dx.1"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_op_does_not_pass(what, monkeypatch):
    place, name, instead, said = WRONG[what]
    monkeypatch.setattr(place, name, instead)
    with pytest.raises(AssertionError, match=f"2 ranks: AssertionError: {said} differs"):
        check_dist(dist.context_attention, context_attention(1, 1, 1, 1, 2, 4, True, "gather"), sizes=(1, 2))


def test_a_sequence_and_a_vocabulary_over_two_axes():
    """Embedding, attention and losses on cp 2 x tp 2: the sum of losses and the gradients of one process."""
    vocab, width, length = 16, 8, 8
    ids, labels = torch.randint(vocab, (2, length)), torch.randint(vocab, (2, length))
    table, head = (torch.randn(vocab, width, dtype=torch.float64) for _ in range(2))

    def step(embed, attend, project, cut, part):
        """The loss, and the gradients of table and head."""
        (embed, embed_cfg), (attend, attend_cfg), (project, project_cfg) = embed, attend, project
        hidden, of_embed = embed.fwd(EmbeddingParams(part(table)), cut(ids), embed_cfg)
        heads = hidden.unflatten(-1, (2, 4))
        y, of_attend = attend.fwd(None, (heads, heads, heads), attend_cfg)
        loss, of_loss = project.fwd(LinearCrossEntropyParams(part(head)), (y.flatten(2), cut(labels)), project_cfg)
        dhead, (dy, _) = project.bwd(of_loss, torch.ones_like(loss), project_cfg)
        dq, dk, dv = attend.bwd(of_attend, dy.unflatten(-1, (2, 4)), attend_cfg)[1]
        dtable, _ = embed.bwd(of_embed, (dq + dk + dv).flatten(2), embed_cfg)
        return loss, dtable.weight, dhead.weight

    def run(mesh):
        cp, tp = mesh["cp"], mesh["tp"]
        found = step(
            (dist.vocab_embedding, dist.VocabEmbeddingConfig(vocab, width, axis=tp, sequence_parallel=False)),
            (dist.context_attention, dist.ContextAttentionConfig(cp, causal=True, comm="ring")),
            (
                dist.vocab_linear_cross_entropy,
                dist.VocabLinearCrossEntropyConfig(width, vocab, axis=tp, reduction="sum", sequence_parallel=False),
            ),
            lambda t: dist.zigzag(t, cp),
            lambda t: t.chunk(2)[tp.rank].clone(),
        )
        return [comm.sum_over(t, cp) for t in found]

    loss, *gradients = step(
        (embedding, EmbeddingConfig(vocab, width)),
        (attention, AttentionConfig(causal=True)),
        (linear_cross_entropy, LinearCrossEntropyConfig(width, vocab, reduction="sum")),
        lambda t: t,
        lambda t: t,
    )
    found = run_ranks({"cp": 2, "tp": 2}, run)
    for cp_rank in (0, 1):
        for one in found[2 * cp_rank : 2 * cp_rank + 2]:
            torch.testing.assert_close(one[0], loss, rtol=1e-12, atol=0)
        for i, want in enumerate(gradients):
            joined = torch.cat([one[i + 1] for one in found[2 * cp_rank : 2 * cp_rank + 2]])
            torch.testing.assert_close(joined, want, rtol=1e-12, atol=1e-12)
