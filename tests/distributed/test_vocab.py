"""Ops over a sharded vocabulary: equal to the plain op, on every number of ranks."""

import dataclasses
import importlib

import pytest
import torch
from dist_cases import CASES, ONE, axis_of, vocab_cross_entropy, vocab_embedding, vocab_linear_cross_entropy
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from funcops import (
    CrossEntropyConfig,
    EmbeddingConfig,
    EmbeddingParams,
    LinearCrossEntropyConfig,
    LinearCrossEntropyParams,
    backend,
    cross_entropy,
    dist,
    embedding,
    linear_cross_entropy,
    random,
)
from funcops.distributed.ops._vocab import parts_of_rows
from funcops.engine.contract.needs import Needs
from funcops.testing import check_dist, run_ranks
from funcops.testing.checks import float_like, same_bits
from funcops.testing.tolerances import assert_close

ROWS = st.tuples(st.integers(0, 2)) | st.tuples(st.integers(0, 2), st.integers(0, 3))
OPTIONS = st.fixed_dictionaries(
    {
        "label_smoothing": st.sampled_from((0.0, 0.2)),
        "z_loss": st.sampled_from((0.0, 0.05)),
        "reduction": st.sampled_from(("mean", "sum", "none")),
        "ignore_index": st.sampled_from((-100, 0, 5, -1)),
    }
)
ALL_ON = {"label_smoothing": 0.2, "z_loss": 0.05, "reduction": "mean", "ignore_index": 3}
SMALL = st.integers(1, 3)


def check(rows, vocab, width, flag, sequence, chunk_bytes, options):
    if 0 in rows and options["reduction"] == "mean":
        options = {**options, "reduction": "sum"}  # the mean over no rows is nan
    check_dist(dist.vocab_embedding, vocab_embedding(rows, vocab, width, flag, sequence))
    check_dist(dist.vocab_cross_entropy, vocab_cross_entropy(rows, vocab, **options))
    cap = 1.5 if flag else None
    for gradient in ("backward", "forward")[: 1 + (options["reduction"] != "none")]:
        loss = vocab_linear_cross_entropy(rows, width, vocab, sequence, chunk_bytes, cap, gradient, **options)
        check_dist(dist.vocab_linear_cross_entropy, loss)


@pytest.mark.parametrize("sequence", [False, True])
def test_gradients_in_the_forward(sequence):
    loss = vocab_linear_cross_entropy((1, 2), 3, 1, sequence, 200, 1.5, "forward", **ALL_ON)
    check_dist(dist.vocab_linear_cross_entropy, loss, sizes=(1, 2))


@pytest.mark.parametrize("sequence", [False, True])
def test_entropies_over_ranks(sequence):
    options = dict(reduction="none", entropy=True)
    check_dist(dist.vocab_cross_entropy, vocab_cross_entropy((3, 2), 2, **options, label_smoothing=0.1), sizes=(1, 2, 4))
    loss = vocab_linear_cross_entropy((1, 2), 3, 2, sequence, 200, 1.5, z_loss=0.05, **options)
    check_dist(dist.vocab_linear_cross_entropy, loss, sizes=(1, 2))


DRAWN = given(ROWS, SMALL, SMALL, st.booleans(), st.booleans(), st.sampled_from((100, 600, 2**20)), OPTIONS)


@pytest.mark.slow
@settings(max_examples=1)
@example((1, 2), 2, 3, True, True, 200, ALL_ON)  # nothing empty, whatever is drawn
@example((1,), 1, 2, False, False, 100, {**ALL_ON, "reduction": "none"})
@DRAWN
def test_they_are_the_plain_op_in_parts(rows, vocab, width, flag, sequence, chunk_bytes, options):
    check(rows, vocab, width, flag, sequence, chunk_bytes, options)


@pytest.mark.slow
@settings(max_examples=8)
@DRAWN
def test_more_shapes(rows, vocab, width, flag, sequence, chunk_bytes, options):
    check(rows, vocab, width, flag, sequence, chunk_bytes, options)


PLAIN_OPS = {
    dist.vocab_embedding: (embedding, EmbeddingConfig(16, 3, padding_idx=9)),
    dist.vocab_cross_entropy: (cross_entropy, CrossEntropyConfig(label_smoothing=0.1, z_loss=0.1)),
    dist.vocab_linear_cross_entropy: (
        linear_cross_entropy,
        LinearCrossEntropyConfig(3, 16, chunk_bytes=160, z_loss=0.1, softcap=2.0),
    ),
}


def like(op, plain, axis, **more):
    """The config of a plain op, on an axis."""
    return op.config(**{f.name: getattr(plain, f.name) for f in dataclasses.fields(plain)}, axis=axis, **more)


def inputs(op, dtype=torch.float32):
    """x of 4 rows and 16 classes."""
    labels = torch.tensor([3, 9, 15, -100]) if op is not dist.vocab_embedding else torch.tensor([3, 9, 15, 3])
    if op is dist.vocab_embedding:
        return labels
    return torch.randn(4, 3 if op is dist.vocab_linear_cross_entropy else 16, dtype=dtype), labels


@pytest.mark.parametrize("op", PLAIN_OPS, ids=str)
def test_one_rank_has_the_bits_of_the_plain_op(op):
    plain, plain_cfg = PLAIN_OPS[op]
    cfg, x = like(op, plain_cfg, ONE), inputs(op)
    params = plain.init(plain_cfg, key=random.key(3))
    same_bits(op.init(cfg, key=random.key(3)), params, "init")
    (y, residuals), (want, kept) = op.fwd(params, x, cfg), plain.fwd(params, x, plain_cfg)
    same_bits((y, op.bwd(residuals, y, cfg)), (want, plain.bwd(kept, y, plain_cfg)), op.name)


@pytest.mark.parametrize("op", [dist.vocab_embedding, dist.vocab_linear_cross_entropy], ids=str)
def test_parts_are_slices_of_what_the_plain_op_draws(op):
    plain, plain_cfg = PLAIN_OPS[op]
    for n in (2, 8):
        parts = [op.init(like(op, plain_cfg, axis_of(n, rank)), key=random.key(1)).weight for rank in range(n)]
        same_bits(torch.cat(parts), plain.init(plain_cfg, key=random.key(1)).weight, "weights")
        assert all(part.untyped_storage().nbytes() == part.nbytes for part in parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", PLAIN_OPS, ids=str)
def test_narrow_dtypes(op, dtype):
    plain, plain_cfg = PLAIN_OPS[op]
    x, params = inputs(op, dtype), plain.init(plain_cfg, key=random.key(3), dtype=dtype)
    y, residuals = plain.fwd(params, x, plain_cfg)
    dy = float_like(y, 7)
    dparams, dx = plain.bwd(residuals, dy, plain_cfg)

    def run(mesh):
        cfg = like(op, plain_cfg, mesh["tp"], **({} if params is None else {"sequence_parallel": False}))
        own = None if params is None else type(params)(params.weight.chunk(4)[mesh.rank])
        mine = (x[0].chunk(4, -1)[mesh.rank], x[1]) if op is dist.vocab_cross_entropy else x
        y, residuals = op.fwd(own, mine, cfg)
        return y, op.bwd(residuals, dy, cfg)

    ys, gradients = zip(*run_ranks({"tp": 4}, run), strict=True)
    for one in ys:
        same_bits(one, ys[0], "y of every rank")
    assert_close(ys[0], y, dtype=dtype, what="y")
    if params is None:
        assert_close(torch.cat([dx[0] for _, dx in gradients], -1), dx[0], dtype=dtype, what="dlogits")
    else:
        assert_close(torch.cat([one.weight for one, _ in gradients]), dparams.weight, dtype=dtype, what="dw")
        assert_close(gradients[0][1], dx, dtype=dtype, what="dx")
    if op is dist.vocab_embedding:
        same_bits(ys[0], y, "y, of which all but one rank add zeros")


def test_only_four_floats_a_row_are_sent():
    """And no tensor with all rows and more than a chunk of classes is made."""
    n, rows, width, classes, chunk = 4, 64, 8, 4096, 64 * 128 * 4

    class Largest(TorchDispatchMode):
        found = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and not func.is_view and made.shape[-1:] != (width,):  # x, w and what is like them
                self.found = max(self.found, made.numel())
            return made

    def step(mesh, op, cfg, params, x):
        y, residuals = op.fwd(params, x, cfg)
        return op.bwd(residuals, torch.ones_like(y), cfg)

    def logits(mesh):
        cfg = dist.VocabCrossEntropyConfig(mesh["tp"], label_smoothing=0.1)
        step(mesh, dist.vocab_cross_entropy, cfg, None, (torch.zeros(rows, classes // n), torch.zeros(rows, dtype=torch.int64)))

    def chunks(mesh):
        op = dist.vocab_linear_cross_entropy
        cfg = op.config(width, classes, axis=mesh["tp"], label_smoothing=0.1, chunk_bytes=chunk)
        x = torch.zeros(rows // n, width), torch.zeros(rows, dtype=torch.int64)
        with Largest() as largest:
            step(mesh, op, cfg, op.init(cfg, device="meta"), x)
        assert rows < largest.found <= chunk // 4

    for sent in {program.sent for program in dist.check_program(logits, {"tp": n}).values()}:
        assert [str(one) for one in sent] == [f"all_gather of float32[4, {rows}]"]
    for sent in {program.sent for program in dist.check_program(chunks, {"tp": n}).values()}:
        whole, part = f"[{rows}, {width}]", f"[{rows // n}, {width}]"
        x = f"all_gather of float32{part}"
        assert [str(one) for one in sent] == [x, f"all_gather of float32[4, {rows}]", x, f"reduce_scatter (sum) of float32{whole}"]


def bad_calls(tp):
    """The error class, its text and the call, on one rank of an axis of two."""
    weight, ids = torch.ones(4, 3), torch.tensor([0, 7])
    embed, head = EmbeddingParams(weight), LinearCrossEntropyParams(weight)
    embedding_cfg, linear_cfg = dist.VocabEmbeddingConfig(8, 3, axis=tp), dist.VocabLinearCrossEntropyConfig(3, 8, axis=tp)
    logits_cfg = dist.VocabCrossEntropyConfig(tp)
    embed_fwd, head_fwd = dist.vocab_embedding.fwd, dist.vocab_linear_cross_entropy.fwd
    loss_fwd = dist.vocab_cross_entropy.fwd
    for config, name in ((dist.VocabEmbeddingConfig, "num_embeddings"), (dist.VocabLinearCrossEntropyConfig, "vocab")):
        sizes = {"dim": 3} if name == "num_embeddings" else {"in_features": 3}
        yield (
            f"{config.__name__}: {name} must be a multiple of 2, the size of axis 'tp', got 7",
            lambda config=config, sizes={**sizes, name: 7}: config(**sizes, axis=tp),
        )
    yield (
        "vocab_embedding_fwd: params.weight must be [4, 3], got [8, 3]",
        lambda: embed_fwd(EmbeddingParams(torch.ones(8, 3)), ids, embedding_cfg),
    )
    yield (
        "vocab_embedding_fwd: x must be of a size along dimension 0 that axis 'tp' of 2 divides, got int64[3]",
        lambda: embed_fwd(embed, torch.tensor([0, 1, 2]), embedding_cfg),
    )
    yield (
        "vocab_embedding_fwd: x must be [m, ...], as its first dim is sharded, got int64[]",
        lambda: embed_fwd(embed, torch.tensor(0), embedding_cfg),
    )
    yield "vocab_embedding_fwd: x must be int64, got float32", lambda: embed_fwd(embed, torch.ones(2), embedding_cfg)
    for outside in (-1, 8, 1000):
        there = torch.tensor([0, outside])
        said = f"must be ids from 0 to 7{{}}, got {outside}"
        yield f"vocab_embedding_fwd: x {said.format('')}", lambda there=there: embed_fwd(embed, there, embedding_cfg)
        labels = f"_fwd: x.1 (labels) {said.format(', or -100')}"
        yield f"vocab_cross_entropy{labels}", lambda there=there: loss_fwd(None, (torch.ones(2, 4), there), logits_cfg)
        yield f"vocab_linear_cross_entropy{labels}", lambda there=there: head_fwd(head, (torch.ones(1, 3), there), linear_cfg)
    yield (
        "vocab_cross_entropy_fwd: x.1 (labels) must be [3], got [2]",
        lambda: loss_fwd(None, (torch.ones(3, 4), ids), logits_cfg),
    )
    yield (
        "vocab_linear_cross_entropy_fwd: x.1 (labels) must be [4], got [2]",
        lambda: head_fwd(head, (torch.ones(2, 3), ids), linear_cfg),
    )
    yield (
        "vocab_linear_cross_entropy_fwd: x.0 (x) must be [m, ..., 3], as its first dim is sharded, got float32[3]",
        lambda: head_fwd(head, (torch.ones(3), ids[0]), linear_cfg),
    )


def test_labels_alone_have_no_gradient():
    cfg = dist.VocabCrossEntropyConfig(axis=dist.Mesh.abstract({"tp": 1}, 0)["tp"])
    x = torch.ones(3, 5), torch.tensor([0, 1, 4])
    for asked in ([], ["1"], False):
        y, residuals = dist.vocab_cross_entropy.fwd(None, x, cfg, needs=Needs(x=asked))
        assert residuals is None or dist.vocab_cross_entropy.dgrad(residuals, y, cfg) == ((None, None), None)
    y, residuals = dist.vocab_cross_entropy.fwd(None, x, cfg, needs=Needs(x=["1"]))
    assert residuals is not None


def test_bad_calls_raise_on_every_rank():
    def run(mesh):
        for said, call in bad_calls(mesh["tp"]):
            with pytest.raises((ValueError, TypeError, IndexError, RuntimeError)) as raised:
                call()
            assert str(raised.value).startswith(said), (said, raised.value)

    run_ranks({"tp": 2}, run)


def test_values_that_are_not_finite_reach_all_ranks():
    """One rank has a NaN, or only classes of -inf, as padding is."""

    def run(mesh, x):
        op, cfg = dist.vocab_cross_entropy, dist.VocabCrossEntropyConfig(mesh["tp"], reduction="none")
        y, residuals = op.fwd(None, (x.chunk(4, -1)[mesh.rank], torch.tensor([0, 1])), cfg)
        return y, op.bwd(residuals, torch.ones_like(y), cfg)[1][0]

    x = torch.randn(2, 8)
    x[0, 6], x[1, 4:] = float("nan"), -float("inf")
    ys, dxs = zip(*run_ranks({"tp": 4}, lambda mesh: run(mesh, x)), strict=True)
    want, residuals = cross_entropy.fwd(None, (x, torch.tensor([0, 1])), CrossEntropyConfig(reduction="none"))
    for y in ys:
        assert_close(y[1], want[1], dtype=torch.float32)
        assert y[0].isnan()
    dx = cross_entropy.bwd(residuals, torch.ones(2), CrossEntropyConfig(reduction="none"))[1][0]
    assert_close(torch.cat(dxs, -1)[1], dx[1], dtype=torch.float32)


@pytest.mark.parametrize("shift", [0.0, -1e4])
@pytest.mark.parametrize("n", [2, 4])
def test_a_rank_whose_classes_are_all_masked(n, shift):
    """The end of a padded vocabulary adds nothing to the sum, and gets no gradient."""
    logits, labels = torch.randn(5, 8) + shift, torch.tensor([0, 1, 2, 3, 3])
    logits[:, 8 - 8 // n :] = float("-inf")
    plain = CrossEntropyConfig(z_loss=1e-4, reduction="none")
    want, residuals = cross_entropy.fwd(None, (logits, labels), plain)
    (dlogits, _) = cross_entropy.bwd(residuals, torch.ones(5), plain)[1]

    def each(mesh):
        cfg = dist.VocabCrossEntropyConfig(mesh["tp"], z_loss=1e-4, reduction="none")
        y, kept = dist.vocab_cross_entropy_fwd(None, (logits.chunk(n, -1)[mesh.rank], labels), cfg)
        return y, dist.vocab_cross_entropy_bwd(kept, torch.ones(5), cfg)[1][0]

    ys, parts = zip(*run_ranks({"tp": n}, each), strict=True)
    assert want.isfinite().all() and not dlogits[:, 8 - 8 // n :].any()
    assert_close((ys[0], torch.cat(parts, -1)), (want, dlogits), dtype=torch.float32)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_parts_of_rows_by_triton(smoothing):
    """Without a rank to talk to. A label outside the classes makes NaN there, as in the plain op."""
    logits, labels = torch.randn(6, 10), torch.tensor([0, 9, 10, 19, -100, 20])
    for rank, expected in ((0, [0, 9, None, None, None]), (1, [None, None, 0, 9, None])):
        cfg = dist.VocabCrossEntropyConfig(axis_of(2, rank), label_smoothing=smoothing)
        with backend("triton"):
            highest, rest, picked, *below = parts_of_rows(logits, labels, cfg)
        assert_close(highest + rest, logits.logsumexp(-1), dtype=torch.float32)
        want = [0.0 if at is None else logits[row, at].item() for row, at in enumerate(expected)]
        assert_close(picked[:5], torch.tensor(want), dtype=torch.float32)
        assert picked[5].isnan()
        assert len(below) == bool(smoothing)
        for b in below:
            assert_close(b[:5], (highest - logits.mean(-1))[:5], dtype=torch.float32)


def own_losses(parts, labels, cfg):
    """Planted fault: the losses over this rank's classes alone."""
    highest, rest, picked = parts[:3]
    return rest + highest - picked, torch.stack((highest, rest), -1)


WRONG = {
    "ids of others": ("vocab_embedding", "own_rows_of", lambda ids, size, axis, fill=0: (ids % size, torch.zeros_like(ids).bool())),
    "losses of a rank": ("vocab_cross_entropy", "losses_of_rows", own_losses),
    "losses of a chunk": ("vocab_linear_cross_entropy", "losses_of_rows", own_losses),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_op_does_not_pass(what, monkeypatch):
    name, function, instead = WRONG[what]
    op, case, _ = CASES[name]
    monkeypatch.setattr(importlib.import_module(f"funcops.distributed.ops.{name}"), function, instead)
    with pytest.raises(AssertionError, match=r"2 ranks: AssertionError: (y|rank 1)"):
        check_dist(op, case, sizes=(1, 2))
