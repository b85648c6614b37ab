"""`batch_wgrads` joins the weight gradients of layers with recipes, groups and ranks: the same sums, of fewer products."""

import functools
import itertools

import pytest
import torch
from launches import launches
from law_cases import FIRST as OPERATORS

from funcops import (
    ActivationConfig,
    ChainConfig,
    Compress,
    ExpertsConfig,
    GroupedLinearConfig,
    GroupedQLinearConfig,
    LinearConfig,
    LinearParams,
    Needs,
    Policy,
    QLinearConfig,
    SkipConfig,
    Step,
    activation,
    batch_wgrads,
    chain,
    dist,
    experts,
    grouped_linear,
    grouped_qlinear,
    linear,
    qlinear,
    random,
    remat,
    skip,
    with_policy,
)
from funcops.distributed.ops.parallel_low_rank import ParallelLowRankConfig, parallel_low_rank
from funcops.engine.backend import backend
from funcops.engine.trees import cast, leaves, paths, tensors, tree_map_tensors
from funcops.library.ops.grouped_wgrads import Columns
from funcops.library.ops.low_rank import LowRankConfig, low_rank
from funcops.low_precision import MXFP8, NVFP4, Fp8Block, Fp8Current, Fp8Delayed, gradients_like, quantize_params, recipe_init
from funcops.testing import run_ranks
from funcops.testing.checks import float_like, same_bits
from funcops.testing.tolerances import assert_close

pytest.importorskip("triton")

HOW = (None, "each", "concatenate", "batch", "group")
COUNT, ROWS, WIDTH = 3, 128, 128  # whole blocks of every format
PRODUCTS = ("mm", "addmm", "bmm", "grouped_mm", "scaled_mm.product", "grouped_scaled.wgrad", "grouped.wgrad")
ONE = Fp8Block(keep="input")
HIGH = Fp8Block(keep="input", wgrad="high")
LOW = {"block": Fp8Block(), "col": Fp8Block(keep="col"), "input": ONE, "high": HIGH, "mx": MXFP8(), "current": Fp8Current()}


def on(layer, **options):
    """The config of a layer over two ranks, from the axis."""
    return lambda axis: layer(WIDTH * 2, WIDTH * 2, axis=axis, **options)


# The op, its config (of an axis), and the products of COUNT pendings by `how`: alone, concatenated, as a batch, as a group.
ALONE = {
    **{name: (qlinear, QLinearConfig(WIDTH, WIDTH * 2, recipe), (3, 1, 1, 1)) for name, recipe in LOW.items()},
    "delayed": (qlinear, QLinearConfig(WIDTH, WIDTH * 2, Fp8Delayed()), ()),
    "low rank": (low_rank, LowRankConfig(WIDTH, WIDTH, 8, dropout=0.5), (6, 2, 2, 2)),
    "grouped": (grouped_linear, GroupedLinearConfig(3, WIDTH, 16), (3, 3, 1, 1)),
    **{
        f"grouped {name}": (grouped_qlinear, GroupedQLinearConfig(3, WIDTH, WIDTH, recipe), (3, 3, 1, 1))
        for name, recipe in LOW.items()
    },
    "grouped fp4": (grouped_qlinear, GroupedQLinearConfig(3, WIDTH, WIDTH, NVFP4(stochastic=False)), (3, 3, 1, 1)),
    "grouped delayed": (grouped_qlinear, GroupedQLinearConfig(3, WIDTH, WIDTH, Fp8Delayed()), ()),
    "grouped gathered": (grouped_qlinear, GroupedQLinearConfig(3, WIDTH, WIDTH, LOW["block"], gathered=True), (3, 3, 1, 1)),
    "experts": (experts, ExpertsConfig(3, WIDTH, 16), (6, 6, 2, 2)),
}
OVER_RANKS = {
    "column": (dist.column_linear, on(dist.ColumnLinearConfig), (3, 1, 1, 1)),
    "column of all rows": (dist.column_linear, on(dist.ColumnLinearConfig, sequence_parallel=False), (3, 1, 1, 1)),
    "row": (dist.row_linear, on(dist.RowLinearConfig), (3, 1, 1, 1)),
    "row of all rows": (dist.row_linear, on(dist.RowLinearConfig, sequence_parallel=False), (3, 1, 1, 1)),
    "column block": (dist.column_qlinear, on(dist.ColumnQLinearConfig, recipe=LOW["block"]), (3, 1, 1, 1)),
    "column high": (dist.column_qlinear, on(dist.ColumnQLinearConfig, recipe=HIGH), (3, 1, 1, 1)),
    "column current": (dist.column_qlinear, on(dist.ColumnQLinearConfig, recipe=LOW["current"]), (3, 1, 1, 1)),
    "row current": (dist.row_qlinear, on(dist.RowQLinearConfig, recipe=LOW["current"]), (3, 1, 1, 1)),
    "row input": (dist.row_qlinear, on(dist.RowQLinearConfig, recipe=ONE), (3, 1, 1, 1)),
    "row high": (dist.row_qlinear, on(dist.RowQLinearConfig, recipe=HIGH), (3, 1, 1, 1)),
    "adapter of a column": (parallel_low_rank, on(ParallelLowRankConfig, rank=8, side="column"), (6, 2, 2, 2)),
    "adapter of a row": (parallel_low_rank, on(ParallelLowRankConfig, rank=8, side="row"), (6, 2, 2, 2)),
}
FIRST = ("column", "row input")  # in the first tier


def inputs(op, cfg, i, device, dtype, axis=None):
    """The i-th x of the op; rows of groups, with some in no group."""

    def draw(*shape):
        t = torch.randn(shape, generator=torch.Generator().manual_seed(i), dtype=torch.float32)
        return t.to(device, dtype)

    rows = ROWS // (
        axis.size if axis is not None and cfg.sequence_parallel and "row" not in (op.name[:3], getattr(cfg, "side", "")) else 1
    )
    x = draw(rows, cfg.dim if op is experts else cfg.wanted())
    if op is low_rank:
        return x, torch.tensor([5, i], device=device)
    if op is experts:
        chosen = torch.arange(2 * ROWS, dtype=torch.int32).view(ROWS, 2) % 3
        return draw(ROWS, 2).softmax(-1), x, chosen.to(device)
    if op in (grouped_linear, grouped_qlinear):
        offsets = torch.tensor([0, 40, 40 + i, 100], dtype=torch.int32).to(device)
        if not cfg.gathered:
            return x, offsets
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(i)).to(device, torch.int32)
        return x, offsets, order, order.argsort().to(torch.int32).view(ROWS, 1)
    return x


def pendings(op, cfg, work, device, dtype, axis=None):
    found = []
    for i in range(COUNT):
        y, kept = op.fwd(work, inputs(op, cfg, i, device, dtype, axis), cfg)
        dy = (
            torch.randn(y.shape, generator=torch.Generator().manual_seed(100 + i)).to(y) if device == "cpu" else torch.empty_like(y)
        )
        found.append(op.dgrad(kept, dy, cfg)[1])
    return found


def made(op, cfg, device="cpu", dtype=torch.bfloat16):
    """The working tree."""
    params = op.init(cfg, key=None if device == "meta" else random.key(0), device=device, dtype=dtype)
    if device == "meta" or cfg.low_recipe is None:
        return params
    return quantize_params(params, cfg, recipe_init(cfg, params), dtype=dtype)


def check(op, cfg, axis=None):
    """The sums of every way beside the sums of one `wgrad` after another: the same bits where nothing is joined."""
    work = made(op, cfg)
    waiting = pendings(op, cfg, work, "cpu", torch.bfloat16, axis)
    want = gradients_like(work, torch.float32)
    for pending in waiting:
        op.wgrad(pending, cfg, into=want)
    for how in HOW:
        got = batch_wgrads(op, waiting, cfg, into=gradients_like(work, torch.float32), how=how)
        if how in (None, "each") and axis is None and not low_rows(cfg):
            same_bits(got, want, f"{op}, {how}")
        assert_close(dense(got), dense(want), dtype=torch.bfloat16, length=COUNT * ROWS)


def low_rows(cfg):
    """Whether the table of the CPU joins products of so few rows."""
    return cfg.low_recipe is None or cfg.low_recipe.wgrad == "high"


def dense(tree):
    return tree_map_tensors(lambda t: t.float() if t.is_floating_point() else t.view(torch.int32).float(), tree)


@pytest.mark.parametrize("name", ALONE)
def test_sums_equal_one_wgrad_after_another(name):
    op, cfg, _ = ALONE[name]
    check(op, cfg)


OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("delayed", "grouped current", "grouped fp4")]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["current", "grouped block", *OTHERS])
def test_sums_of_triton_equal_one_wgrad_after_another(name):
    op, cfg, _ = ALONE[name]
    with backend("triton"):
        check(op, cfg)


@pytest.mark.parametrize(
    "name", [n if n in ("column", "row input") else pytest.param(n, marks=pytest.mark.slow) for n in OVER_RANKS]
)
def test_sums_over_ranks_equal_one_wgrad_after_another(name):
    op, of, _ = OVER_RANKS[name]
    run_ranks({"tp": 2}, lambda mesh: check(op, of(mesh["tp"]), mesh["tp"]))


@pytest.mark.turns("name", every=2)
@pytest.mark.parametrize("name", [name for name in (*ALONE, *OVER_RANKS) if "delayed" not in name])  # whose scales are data
def test_joined_products_are_as_written_down(name, monkeypatch):
    op, cfg, (alone, concatenated, batch, group) = (ALONE | OVER_RANKS)[name]
    axis = None
    if name in OVER_RANKS:
        axis = dist.Mesh.abstract({"tp": 2}, 0)["tp"]
        cfg = cfg(axis)
    work = made(op, cfg, "meta")
    with launches(monkeypatch):
        waiting = pendings(op, cfg, work, "meta", torch.bfloat16, axis)
    for how, count in zip(HOW, (alone, alone, concatenated, batch, group), strict=True):
        with launches(monkeypatch) as found:
            batch_wgrads(op, waiting, cfg, into=gradients_like(work, torch.float32), how=how)
        assert sum(one in PRODUCTS for one in found) == count, (how, found)


@pytest.mark.slow
@pytest.mark.parametrize("given", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["into", "new"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda op: op,
        pytest.param(lambda op: with_policy(op, "minimal"), marks=pytest.mark.slow),
        pytest.param(remat, marks=pytest.mark.slow),
    ],
    ids=["plain", "policy", "remat"],
)
def test_a_compiled_step_joins_them(wrap, given):
    """Also where the pendings have another config than the op: a skip keeps its body's, a policy the plain op's."""
    body = ChainConfig(steps=(Step("up", linear, LinearConfig(4, 4)), Step("act", activation, ActivationConfig("silu"))))
    op, cfg = wrap(skip), SkipConfig(chain, body)
    params, x = op.init(cfg, key=random.key(0), dtype=torch.float64), torch.ones(3, 4, dtype=torch.float64)

    def step(params, x):
        waiting = []
        for scale in (1.0, 2.0):
            y, residuals = op.fwd(params, x * scale, cfg)
            waiting.append(op.dgrad(residuals, y, cfg)[1])
        sums = tree_map_tensors(torch.zeros_like, params) if given else None
        return batch_wgrads(op, waiting, cfg, into=sums)

    found = torch.compile(step, fullgraph=True, backend="eager")(params, x)
    for got, want in zip(tensors(found), tensors(step(params, x)), strict=True):
        torch.testing.assert_close(got, want)


COUNTS = (2, 600)


def with_params():
    """The first case of each operator with params, in each dtype of 16 bits."""
    return [(case, dtype) for case in OPERATORS for dtype in case.dtypes if dtype.itemsize == 2 and tensors(case.make(dtype)[0])]


PARTS = 6  # of the operators, one of which is in the first tier


@pytest.mark.turns("how", "part")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("how", [None, "concatenate"])
def test_sums_of_any_number_of_gradients_of_16_bits_are_rounded_once(how, part):
    """They equal sums in float64 of microbatches' gradients, whose rounding to 16 bits alone is counted: a sum in 16 bits of 600
    equal gradients stops at 256, or loses half of each."""
    leaves_seen = 0
    for case, dtype in with_params()[part::PARTS]:
        params, x = case.make(dtype)
        y, residuals = case.op.fwd(params, x, case.cfg)
        pending = case.op.dgrad(residuals, float_like(y, 3), case.cfg)[1]
        one = [None if t is None else t.double() for t in leaves(case.op.wgrad(pending, case.cfg))]
        for count in COUNTS:
            sums = leaves(batch_wgrads(case.op, [pending] * count, case.cfg, how=how))
            for found, each in zip(sums, one, strict=True):
                if each is not None:
                    leaves_seen += 1
                    assert found.dtype in (dtype, torch.float32), case
                    wanted, largest = count * each, torch.finfo(found.dtype).max
                    bound = 1.5 * torch.finfo(dtype).eps * each.abs().max() * count
                    far = (found.double() - wanted).abs()[wanted.abs() < 0.99 * largest] > bound
                    assert not far.any(), (case.op, case.cfg, dtype, count)
    assert leaves_seen > 100 / PARTS


LAYER = LinearConfig(8, 4)
MIXED = {"layer": (linear, LAYER, ""), "packed": (chain, ChainConfig(steps=(Step("up", linear, LAYER),)), "up.")}
MIXED["packed"] = (with_policy(chain, Policy({"up.dy": Compress("fp8")})), *MIXED["packed"][1:])
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("name", ["layer", pytest.param("packed", marks=pytest.mark.slow)])
def test_pendings_of_other_needs_and_dtypes_are_summed_in_any_order(name):
    """Each leaf is the sum over the pendings that have it, in the dtype that holds all of them; None if none has it."""
    op, cfg, at = MIXED[name]
    masks, pendings = (True, (at + "weight",), (at + "bias",), False), {}
    for mask, dtype in itertools.product(masks, FLOATS):
        params = cast(op.init(cfg, key=random.key(0), dtype=torch.float32), dtype)
        y, residuals = op.fwd(params, random.normal(random.key(1), (3, 8)).to(dtype), cfg, needs=Needs(params=mask))
        pendings[mask, dtype] = op.dgrad(residuals, torch.full_like(y, 0.3), cfg)[1]
    for i, (first, second) in enumerate(itertools.product(masks, masks)):
        both = [pendings[first, FLOATS[i % 3]], pendings[second, FLOATS[i // 3 % 3]]]
        each = [paths(op.wgrad(pending, cfg)) for pending in both]
        for path, found in paths(batch_wgrads(op, both, cfg)).items():
            given = [one[path] for one in each if one[path] is not None]
            if not given:
                assert found is None
                continue
            assert found.dtype is functools.reduce(torch.promote_types, [t.dtype for t in given]), (first, second)
            rounded = 3 * max([torch.finfo(t.dtype).eps for t in given])
            torch.testing.assert_close(found.double(), sum(t.double() for t in given), atol=0.0, rtol=rounded)


@pytest.mark.parametrize("name", ["block", "high", "col"])
@pytest.mark.parametrize("asked", ["weight", "bias"])
def test_pendings_of_one_leaf_of_a_layer_with_a_recipe_are_summed(name, asked):
    """The other has no gradient, nor an accumulator."""
    cfg = QLinearConfig(WIDTH, WIDTH, LOW[name], bias=True)
    params = qlinear.init(cfg, key=random.key(0))
    y, residuals = qlinear.fwd(params, torch.randn(ROWS, WIDTH), cfg, needs=Needs(params=[asked]))
    pending = qlinear.dgrad(residuals, torch.ones_like(y), cfg)[1]
    found, one = batch_wgrads(qlinear, [pending] * COUNT, cfg), qlinear.wgrad(pending, cfg)
    for leaf, other in paths(found).items():
        assert (other is None) == (leaf != asked), leaf
    assert_close(getattr(found, asked), COUNT * getattr(one, asked), dtype=torch.float32, length=ROWS)


def test_joined_columns_end_with_the_columns_of_no_group():
    """Kernels read where the last group ends from there."""
    codes, scales = torch.zeros(4, 32, dtype=torch.uint8), torch.ones(1, 32)
    starts, ends = torch.tensor([0, 16, 32]), torch.tensor([10, 20])
    part = Columns((codes, scales, None), (codes, scales, None), starts, ends, (), 32)
    joined = Columns.joined([part, part])
    assert joined.starts.tolist() == [0, 16, 32, 48, 64] and joined.ends.tolist() == [10, 20, 42, 52]
    assert joined.width == joined.dy[0].shape[1] == 64


def test_a_gradient_that_is_no_tensor_is_named():
    def wgrad(pending, cfg, *, into=None):
        return LinearParams("a word", None)

    params, cfg = linear.init(LinearConfig(3, 3), key=random.key(0)), LinearConfig(3, 3)
    y, kept = linear.fwd(params, torch.ones(2, 3), cfg)
    pending = linear.dgrad(kept, y, cfg)[1]
    with pytest.raises(TypeError, match="^batch_wgrads: gradient must be a tensor, got 'a word'"):
        batch_wgrads(linear._replace(wgrad=wgrad), [pending, pending], cfg)
