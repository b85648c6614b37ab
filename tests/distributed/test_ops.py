"""Collectives and linear layers over an axis: equal to the plain op, on every number of ranks."""

import dataclasses
import itertools
import types

import pytest
import torch
from dist_cases import LAYERS, LOW, ONE, PLAIN, collectives, latent_split, layer, low_layer, of_rank
from hypothesis import example, given, settings
from hypothesis import strategies as st

from funcops import (
    ChainConfig,
    GLUConfig,
    LinearConfig,
    LinearParams,
    Op,
    SkipConfig,
    Step,
    batch_wgrads,
    chain,
    dist,
    glu,
    linear,
    random,
    skip,
)
from funcops.distributed import AllToAllConfig, Mesh, VocabEmbeddingConfig, all_to_all
from funcops.distributed.testing.dist import _reference
from funcops.engine.contract.needs import Needs
from funcops.engine.trees import paths
from funcops.testing import LAWS, check_dist, run_ranks
from funcops.testing.checks import same_bits

SIZES_OF_ROWS = st.tuples(st.integers(0, 2)) | st.tuples(st.integers(0, 2), st.integers(0, 3))
SHAPES = st.tuples(SIZES_OF_ROWS, st.integers(1, 5), st.integers(1, 3), st.booleans())


@settings(max_examples=2)
@example(1, 2, 1, 0)  # nothing empty, whatever is drawn
@given(st.integers(0, 2), st.integers(1, 2), st.integers(-2, 9), st.sampled_from((0, 1, -1, -2)))
def test_collectives_are_the_plain_op_in_parts(rows, width, by, dim):
    for op, case in collectives(rows, width, by, dim):
        check_dist(op, case)


OVERLAPS = ((True, "bulk"), (False, "bulk"), (True, "none"), (False, "none"))  # with sequence_parallel


@pytest.mark.turns("sequence", "overlap", "name", every=2)
@pytest.mark.parametrize(("sequence", "overlap"), [*OVERLAPS[:2], (True, "ring")], ids=["bulk", "whole", "ring"])
@pytest.mark.parametrize("name", LAYERS)
@settings(max_examples=1)
@example(shape=((1, 2), 3, 2, True))
@given(shape=SHAPES)
def test_linear_layers_are_the_plain_op_in_parts(name, sequence, overlap, shape):
    sizes = (1, 2, 4) if overlap == "ring" else (1, 2, 4, 8)  # eight take seven shifts for each product: see the rings of eight
    check_dist(LAYERS[name][0], layer(name, *shape, sequence, overlap), sizes=sizes)


@pytest.mark.slow
@settings(max_examples=12)
@given(st.data())
def test_more_shapes(data):
    rows, width, by = (data.draw(st.integers(low, high)) for low, high in ((0, 3), (1, 3), (-9, 9)))
    for op, case in collectives(rows, width, by, data.draw(st.sampled_from((0, 1, -1, -2)))):
        check_dist(op, case)
    for name in LAYERS:
        overlap = data.draw(st.sampled_from(OVERLAPS))
        check_dist(LAYERS[name][0], layer(name, *data.draw(SHAPES), *overlap))


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
@settings(max_examples=2)
@given(shape=SHAPES)
def test_rings_of_eight(name, shape):
    check_dist(LAYERS[name][0], layer(name, *shape, True, "ring"), sizes=(8,))


@pytest.mark.parametrize(("name", "sequence", "keep"), [("column", True, "input"), ("row", False, "col"), ("column", False, "row")])
@settings(max_examples=1)
@given(shape=SHAPES)
def test_layers_in_low_precision_are_the_plain_op_in_parts(name, sequence, keep, shape):
    rows, i, o, _ = shape
    check_dist(LOW[name][0], low_layer(name, rows, i, o, sequence, keep), sizes=(1, 2, 4))


@pytest.mark.parametrize("sequence", [True, False])
def test_heads_that_share_a_part_of_a_key(sequence):
    check_dist(dist.parallel_latent_split, latent_split(1, 2, sequence))


def test_every_op_of_the_room_is_among_them():
    assert {value.name for value in vars(dist).values() if isinstance(value, Op)} == PLAIN.keys()


@pytest.mark.turns("name", every=2)
@pytest.mark.parametrize("name", PLAIN)
def test_laws_on_one_rank(name):
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    for i, (law, check) in enumerate(LAWS.items()):
        if law not in ("compiles", *PLAIN[name].exempt):
            check(PLAIN[name], torch.float64 if law == "finite_differences" else dtypes[i % 4])


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN)
def test_compiles_on_one_rank(name):
    LAWS["compiles"](PLAIN[name], torch.float32)


LAWS_OF_RANKS = ("split", "mirror", "frugal", "loud", "guarded")  # the others compare with one process, or set what threads share


WAYS = {"overlap": ("bulk", "ring"), "comm": ("gather", "ring")}


@pytest.mark.turns("name", every=3)
@pytest.mark.parametrize("name", PLAIN)
def test_laws_on_two_ranks(name):
    """All ranks run the laws at once: if one raises, all do."""
    fields = {field.name for field in dataclasses.fields(PLAIN[name].op.config)}
    ways = [{name: way} for name, both in WAYS.items() if name in fields for way in both[: 1 if "recipe" in fields else 2]] or [{}]

    def check(mesh):
        for law, way in itertools.product(LAWS_OF_RANKS, ways):
            LAWS[law](of_rank(name, mesh["tp"], **way), torch.float64)

    run_ranks({"tp": 2}, check)


WRONG = {"axis": ("tp", None, 2), "overlap": ("", "some", None), "dim": (1.5, True, "0"), "by": (1.5, None), "bias": (1, "no")}
WRONG |= {"parts": ((1.5,), (0, 6), [6], (4,), 6), "p": (1.5, -0.5, "0", None), "train": (1, None), "shared": (None, [], (3,))}
WRONG |= {"op": (None, "linear"), "cfg": (None, 3), "also": (3, (3,), [], (ONE,)), "dtype": ("bfloat16", torch.int8)}
WRONG |= {"grad_dtype": WRONG["dtype"], "gradient": ("both", None)}
WRONG |= {"ordered": (1, "no"), "bucket_bytes": (0, 1.5, None)}
WRONG |= {"split": WRONG["dim"], "cat": (0, *WRONG["dim"]), "sequence_parallel": WRONG["bias"]}
WRONG |= dict.fromkeys(("in_features", "out_features", "num_embeddings", "vocab", "chunk_bytes"), (0, -2, 1.5, True, "3", None))
WRONG |= {"label_smoothing": (1.0, -0.1, "0", None), "z_loss": (-1.0, float("inf"), None), "reduction": ("avg", None)}
WRONG |= {"entropy": WRONG["bias"]}
WRONG |= {"ignore_index": WRONG["by"], "padding_idx": (-1, 1e9, "0"), "causal": WRONG["bias"], "scale": (0.0, float("nan"), "1")}
WRONG |= {"recipe": (None, "fp8_current")}
WRONG |= {"comm": ("p2p", None), "kind": ("silu", None), "capacity": (0.0, 1.5, "1"), "softcap": (0.0, -1.0, "1")}
WRONG |= dict.fromkeys(("limit", "alpha", "offset"), ("1", None))
WRONG |= dict.fromkeys(("experts", "hidden", "rank"), WRONG["vocab"])
WRONG |= {"side": ("both", None), "dropout": (1.0, "0", None)}
WRONG |= dict.fromkeys(("own", "value"), WRONG["vocab"])
WRONG |= {"shards": ("rows", None), "reshard_after_forward": WRONG["bias"], "stage": (1, "3", None)}
WRONG |= {"alibi": WRONG["bias"], "packed": WRONG["bias"], "window": (0, 1.5), "heads": (0, "1", None), "over": (1, None)}
WRONG |= {"heads_axis": (2, "tp"), "format": (3, "e4m3")}
WRONG |= {"chunk": (0, 1.5, True, "3"), "max_seqlen": (0, 1.5, True, "3"), "weights_on": ("both", None)}
MAY_BE_ZERO = {("parallel_low_rank", "scale")}


@pytest.mark.parametrize("name", LAYERS)
def test_one_rank_has_the_bits_of_linear(name):
    op, config = LAYERS[name]
    cfg, plain = config(5, 6, axis=ONE, overlap="bulk"), LinearConfig(5, 6)
    params, x = linear.init(plain, key=random.key(3)), torch.randn(4, 5)
    same_bits(op.init(cfg, key=random.key(3)), params, "init")
    (y, residuals), (want, kept) = op.fwd(params, x, cfg), linear.fwd(params, x, plain)
    same_bits((y, op.bwd(residuals, y, cfg)), (want, linear.bwd(kept, y, plain)), name)


@pytest.mark.parametrize("name", LAYERS)
def test_a_bias_that_a_layer_lacks_has_no_gradient(name):
    """Whoever asks for it gets None, from the whole backward and from its halves."""
    op, config = LAYERS[name]
    cfg = config(5, 6, axis=ONE, bias=False)
    y, residuals = op.fwd(op.init(cfg, key=random.key(3)), torch.randn(4, 5), cfg, needs=Needs(params=["bias"]))
    for dparams in (op.bwd(residuals, y, cfg)[0], op.wgrad(op.dgrad(residuals, y, cfg)[1], cfg)):
        assert dparams.weight is None and dparams.bias is None


@pytest.mark.parametrize(("name", "dim"), [("column", 0), ("row", 1)])
def test_parts_are_slices_of_what_linear_draws(name, dim):
    op, config = LAYERS[name]
    whole = linear.init(LinearConfig(8, 8), key=random.key(1))
    for n in (2, 8):
        parts = [op.init(config(8, 8, axis=Mesh.abstract({"tp": n}, r)["tp"]), key=random.key(1)) for r in range(n)]
        same_bits(torch.cat([p.weight for p in parts], dim), whole.weight, "weights")
        assert all(p.weight.is_contiguous() and p.weight.untyped_storage().nbytes() * n == whole.weight.nbytes for p in parts)
        for r, p in enumerate(parts):
            same_bits(p.bias, whole.bias.chunk(n)[r] if name == "column" else whole.bias, "bias")


def mlp(axis, overlap):
    """A gated MLP of which each of n ranks has 1/n, as steps of a chain."""
    return ChainConfig(
        steps=(
            Step("up", dist.column_linear, dist.ColumnLinearConfig(6, 32, axis=axis, bias=False, overlap=overlap)),
            Step("act", glu, GLUConfig(kind="swiglu", gate="first")),
            Step("down", dist.row_linear, dist.RowLinearConfig(16, 6, axis=axis, overlap=overlap)),
        )
    )


def test_a_wgrad_of_x_that_is_computed_again():
    """The row layer's dgrad has no x: what a chain computes again comes for its wgrad."""

    def run(mesh):
        for overlap, of_x in itertools.product(("none", "bulk", "ring"), (True, False)):
            steps, needs = mlp(mesh["tp"], overlap).steps[1:], Needs(x=of_x)
            cfg = ChainConfig(steps=steps)
            params = chain.init(cfg, key=random.key(0), dtype=torch.float64)
            x, dy = torch.randn(4, 16, dtype=torch.float64), torch.randn(2, 6, dtype=torch.float64)
            residuals = chain.fwd(params, x, cfg, needs=needs)[1]
            dparams, dx = chain.bwd(residuals, dy, cfg)
            found, pending = chain.dgrad(residuals, dy, cfg)
            same_bits((found, chain.wgrad(pending, cfg)), (dx, dparams), f"{overlap}, {needs}")
            assert (residuals["down"].x is None) == (dx is not None) == of_x

    run_ranks({"tp": 2}, run)


def test_steps_of_a_chain():
    """gate and up are sharded separately, so that rank r's rows are [gate_r | up_r]."""
    plain = ChainConfig(
        steps=(
            Step("up", linear, LinearConfig(6, 32, bias=False)),
            Step("act", glu, GLUConfig(kind="swiglu", gate="first")),
            Step("down", linear, LinearConfig(16, 6)),
        )
    )
    whole = chain.init(plain, key=random.key(0), dtype=torch.float64)
    x, dy = (torch.randn(8, 3, 6, dtype=torch.float64) for _ in range(2))
    y, residuals = chain.fwd(whole, x, plain)
    dparams, dx = chain.bwd(residuals, dy, plain)

    def run(mesh):
        n, r = mesh["tp"].size, mesh.rank
        up = torch.cat([half.chunk(n)[r] for half in whole["up"].weight.chunk(2)])
        down = LinearParams(whole["down"].weight.chunk(n, 1)[r].contiguous(), whole["down"].bias)
        params = {"up": LinearParams(up, None), "act": None, "down": down}
        cfg = mlp(mesh["tp"], "bulk")
        y, residuals = chain.fwd(params, x.chunk(n)[r].contiguous(), cfg)
        dx, pending = chain.dgrad(residuals, dy.chunk(n)[r].contiguous(), cfg)
        return y, dx, chain.wgrad(pending, cfg)

    for n in (2, 8):
        ys, dxs, parts = zip(*run_ranks({"tp": n}, run), strict=True)
        torch.testing.assert_close(torch.cat(ys), y, rtol=0, atol=1e-12)
        torch.testing.assert_close(torch.cat(dxs), dx, rtol=0, atol=1e-12)
        torch.testing.assert_close(sum(p["down"].bias for p in parts), dparams["down"].bias, rtol=0, atol=1e-12)
        halves = [torch.cat([p["up"].weight.chunk(2)[i] for p in parts]) for i in (0, 1)]
        torch.testing.assert_close(torch.cat(halves), dparams["up"].weight, rtol=0, atol=1e-12)


def test_a_skip_of_collectives():
    """sum_over and copy_to as steps of a chain without parallel layers."""

    def run(mesh):
        axis = mesh["tp"]
        body = ChainConfig(
            steps=(
                Step("in", dist.copy_to, dist.CopyToConfig(axis)),
                Step("up", linear, LinearConfig(3, 3, bias=False)),
                Step("out", dist.sum_over, dist.SumOverConfig(axis)),
            )
        )
        cfg = SkipConfig(chain, body)
        params = {"in": None, "up": LinearParams(torch.full((3, 3), 1.0 + mesh.rank), None), "out": None}
        y, residuals = skip.fwd(params, torch.ones(2, 3), cfg)
        (_, dx) = skip.bwd(residuals, torch.ones(2, 3), cfg)
        return y, dx

    for y, dx in run_ranks({"tp": 2}, run):
        assert torch.equal(y, torch.full((2, 3), 1 + 9.0)) and torch.equal(dx, torch.full((2, 3), 1 + 9.0))


def test_a_reference_may_leave_an_input_unread():
    case = types.SimpleNamespace(reference=lambda params, x, n: 2.0 * x)
    x, unread = torch.ones(3), torch.ones(2)
    y, dy, (dparams, dx) = _reference(case, {"unread": unread}, x, 1)
    assert dparams == {"unread": None} and torch.equal(dx, 2.0 * dy) and torch.equal(y, 2.0 * x)


@pytest.mark.parametrize(
    ("op", "config", "width"),
    [
        (dist.gather_same, dist.GatherSameConfig, 16),
        (dist.scatter_sum, dist.ScatterSumConfig, 4),
        (dist.slice_of, dist.SliceOfConfig, 4),
    ],
    ids=str,
)
def test_a_chain_knows_the_width_behind_a_collective_of_the_last_dimension(op, config, width):
    """Behind one of the first dimension it knows no width."""
    tp = Mesh.abstract({"tp": 2}, 0)["tp"]

    def of(dim, then):
        first, last = Step("a", linear, LinearConfig(3, 8)), Step("z", linear, LinearConfig(then, 2))
        return ChainConfig(steps=(first, Step("b", op, config(tp, dim=dim)), last))

    assert of(-1, width) != of(0, 5)
    with pytest.raises(
        ValueError, match=rf"^ChainConfig: x of step 'z' must be \[\.\.\., 5\], got \[\.\.\., {width}\] of step 'b'$"
    ):
        of(-1, 5)


@pytest.mark.parametrize("options", [{"p": 0.0}, {"p": 0.5, "train": False}, {"p": 1.0}], ids=str)
def test_a_dropout_of_nothing_or_of_all_needs_no_draw(options):
    """Nor does its gradient: both are what was given, or zeros."""
    cfg = dist.ShardedDropoutConfig(shared=(dist.Shared(0, Mesh.abstract({"tp": 2}, 1)["tp"]),), **options)
    x, dy = torch.ones(2, 3), torch.full((2, 3), 2.0)
    y, kept = dist.sharded_dropout.fwd(None, (x, random.key(0)), cfg)
    _, (dx, dkey) = dist.sharded_dropout.bwd(kept, dy, cfg)
    gone = cfg.p == 1.0
    assert torch.equal(y, 0 * x if gone else x) and torch.equal(dx, 0 * dy if gone else dy) and dkey is None


def test_a_chain_knows_the_width_behind_an_all_to_all():
    """Dimensions that are counted from the front may be the last one: their width is not known."""
    axis = Mesh.abstract({"cp": 2}, 0)["cp"]

    def steps(out, **dims):
        parts = ("up", linear, LinearConfig(3, 8)), ("turn", all_to_all, AllToAllConfig(axis, **dims)), ("out", linear, out)
        return ChainConfig(steps=tuple(Step(*part) for part in parts))

    for width, split, cat in ((16, 0, -1), (4, -1, 0), (8, 0, 1), (5, 0, 1)):
        steps(LinearConfig(width, 3), split=split, cat=cat)
    for width, split, cat in ((8, 0, -1), (16, -1, 0)):
        with pytest.raises(ValueError, match="out"):
            steps(LinearConfig(width, 3), split=split, cat=cat)


@pytest.mark.parametrize("pad", range(8))
def test_one_rank_alone_has_the_row_that_gets_no_gradient(pad):
    axes = [Mesh.abstract({"tp": 4}, rank)["tp"] for rank in range(4)]
    skipped = [VocabEmbeddingConfig(8, 4, axis=axis, padding_idx=pad).skipped for axis in axes]
    assert skipped == [pad - 2 * rank if rank == pad // 2 else -1 for rank in range(4)]


@pytest.mark.parametrize("kind", ["column", "row", "sharded"])
@pytest.mark.parametrize("asked", ["x", "bias", "weight"])
def test_some_gradients_of_a_layer_over_ranks_are_those_of_all(kind, asked):
    """Whole, in halves, and joined with another's."""
    needs = Needs(x=asked == "x", params=False if asked == "x" else [asked])

    def each(mesh):
        axis = mesh["tp"]
        if kind == "sharded":
            op, cfg = dist.sharded, dist.ShardedConfig(linear, LinearConfig(4, 4), axis=axis)
        else:
            op = {"column": dist.column_linear, "row": dist.row_linear}[kind]
            cfg = {"column": dist.ColumnLinearConfig, "row": dist.RowLinearConfig}[kind](4, 4, axis=axis, sequence_parallel=False)
        params = op.init(cfg, key=random.key(0))
        x = torch.ones(2, 2 if kind == "row" else 4)
        y, kept = op.fwd(params, x, cfg)
        (every, dx), dy = op.bwd(kept, torch.ones_like(y), cfg), torch.ones_like(y)
        want = paths({"dx": dx if asked == "x" else None, "dparams": every})
        want = {path: t for path, t in want.items() if path.rpartition(".")[2] in (asked, "dx" if asked == "x" else asked)}
        kept = op.fwd(params, x, cfg, needs=needs)[1]
        dparams, dx = op.bwd(kept, dy, cfg)
        half, pending = op.dgrad(kept, dy, cfg)
        assert (pending is None) == (asked == "x")
        halves = {"dx": half, "dparams": op.wgrad(pending, cfg)}
        for got in ({"dx": dx, "dparams": dparams}, halves):
            got = {path: t for path, t in paths(got).items() if t is not None}
            assert got.keys() == want.keys()
            assert all(torch.equal(t, want[path]) for path, t in got.items())
        if pending is not None and kind != "sharded":
            sums = batch_wgrads(op, [pending, pending], cfg)
            assert all(torch.equal(t, 2 * want[f"dparams.{path}"]) for path, t in paths(sums).items() if t is not None)
        return True

    assert all(run_ranks({"tp": 2}, each))
