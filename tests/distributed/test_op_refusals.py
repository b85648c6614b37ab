"""Wrong calls of the ops over ranks are refused by name, on every rank, before anything is sent."""

import dataclasses
import re

import pytest
import torch
from dist_cases import LAYERS, ONE, PLAIN
from test_ops import MAY_BE_ZERO, WRONG

from funcops import (
    ChainConfig,
    EmbeddingParams,
    LinearConfig,
    LinearCrossEntropyParams,
    LinearParams,
    SinkAttentionParams,
    Step,
    chain,
    dist,
    linear,
    random,
)
from funcops.distributed import Mesh
from funcops.low_precision import NVFP4, Fp8Current
from funcops.testing import run_ranks


@pytest.mark.parametrize("name", PLAIN)
def test_a_wrong_value_of_a_config_field_raises(name):
    cfg = PLAIN[name].cfg
    for field in dataclasses.fields(cfg):
        for value in WRONG[field.name][(name, field.name) in MAY_BE_ZERO :]:
            with pytest.raises((ValueError, TypeError), match=rf"^{type(cfg).__name__}: {field.name} must be .*, got"):
                dataclasses.replace(cfg, **{field.name: value})


class DTensor(torch.Tensor):
    """A stand-in for torch's class, recognised by its name."""


class AsyncCollectiveTensor(torch.Tensor):
    """A stand-in for torch's class, recognised by its name."""


def bad_calls(tp):
    """Error texts and the calls that raise them, on one rank of an axis of two."""
    column, row = (config(4, 6, axis=tp) for _, config in LAYERS.values())
    params = LinearParams(torch.ones(3, 4), torch.ones(3))
    rows = LinearParams(torch.ones(6, 2), torch.ones(6))
    x, fwd = torch.ones(2, 4), dist.column_linear.fwd
    yield (
        "ColumnLinearConfig: out_features must be a multiple of 2, the size of axis 'tp', got 7",
        lambda: dist.ColumnLinearConfig(4, 7, axis=tp),
    )
    yield (
        "RowLinearConfig: in_features must be a multiple of 2, the size of axis 'tp', got 5",
        lambda: dist.RowLinearConfig(5, 6, axis=tp),
    )
    for config in (dist.ColumnLinearConfig, dist.RowLinearConfig):
        yield (
            f"{config.__name__}: overlap must be 'none' or 'bulk' without sequence_parallel, as rows are not sharded, got 'ring'",
            lambda config=config: config(4, 6, axis=tp, overlap="ring", sequence_parallel=False),
        )
    yield (
        "column_linear_fwd: x must be a plain tensor (pass its to_local(), and the axis in the config), got DTensor",
        lambda: fwd(params, x.as_subclass(DTensor), column),
    )
    yield (
        "column_linear_fwd: params.weight must be a plain tensor",
        lambda: fwd(LinearParams(params.weight.as_subclass(DTensor), params.bias), x, column),
    )
    yield (
        "gather_fwd: x must be a plain tensor (wait for it first (.wait()), or use funcops.dist.gather_start), got Async",
        lambda: dist.gather.fwd(None, x.as_subclass(AsyncCollectiveTensor), dist.GatherConfig(tp)),
    )
    yield (
        "column_linear_fwd: params.weight must be [3, 4], got [6, 4]",
        lambda: fwd(linear.init(LinearConfig(4, 6), device="meta"), x, column),
    )
    yield (
        "column_linear_fwd: x must be [m, ..., 4], as its first dim is sharded, got float32[4]",
        lambda: fwd(params, torch.ones(4), column),
    )
    yield (
        "row_linear_fwd: x must be of a size along dimension 0 that axis 'tp' of 2 divides, got float32[3, 2]",
        lambda: dist.row_linear.fwd(rows, torch.ones(3, 2), row),
    )
    yield "row_linear_fwd: x must be [..., 2], got [2, 4]", lambda: dist.row_linear.fwd(rows, x, row)
    yield (
        "gather_fwd: x must be of more dimensions (cfg.dim is 2), got float32[2, 4]",
        lambda: dist.gather.fwd(None, x, dist.GatherConfig(tp, dim=2)),
    )
    for dim in (2, 5, -3):
        yield (
            f"sharded_dropout_fwd: x.0 must be of more dimensions (cfg.shared has one of {dim}), got float32[2, 4]",
            lambda dim=dim: dist.sharded_dropout.fwd(
                None, (x, random.key(0)), dist.ShardedDropoutConfig(0.5, shared=(dist.Shared(dim, tp),))
            ),
        )
    for wrong, got in ((x, "float32[2, 4]"), ((x,), "tuple"), ([x, random.key(0)], "list")):
        yield (
            f"sharded_dropout_fwd: x must be a tuple (x, key), got {got}",
            lambda wrong=wrong: dist.sharded_dropout.fwd(None, wrong, dist.ShardedDropoutConfig(0.5, shared=(dist.Shared(0, tp),))),
        )
    for op, own, part, cfg in ((dist.column_linear, params, x, column), (dist.row_linear, rows, x[:, :2], row)):
        yield (
            f"{op.name}_fwd: params.bias must be None (cfg.bias is False), got a tensor",
            lambda op=op, own=own, part=part, cfg=cfg: op.fwd(own, part, dataclasses.replace(cfg, bias=False)),
        )
    yield (
        "all_to_all_fwd: x must be of more dimensions (cfg.split and cfg.cat are one), got float32[4]",
        lambda: dist.all_to_all.fwd(None, torch.ones(4), dist.AllToAllConfig(tp)),
    )
    yield (
        "ChainConfig: x of step 'down' must be [..., 3], got [..., 4] of step 'up'",
        lambda: ChainConfig(
            steps=(
                Step("up", dist.column_linear, dist.ColumnLinearConfig(4, 8, axis=tp)),
                Step("down", dist.row_linear, dist.RowLinearConfig(6, 4, axis=tp)),
            )
        ),
    )
    for name, op, cfg in (
        ("scatter_sum", dist.scatter_sum, dist.ScatterSumConfig(tp)),
        ("slice_of", dist.slice_of, dist.SliceOfConfig(tp)),
    ):
        yield (
            f"{name}_fwd: x must be of a size along dimension 0 that axis 'tp' of 2 divides, got float32[5, 2]",
            lambda op=op, cfg=cfg: op.fwd(None, torch.ones(5, 2), cfg),
        )


def test_bad_calls_raise_on_every_rank():
    def run(mesh):
        for said, call in bad_calls(mesh["tp"]):
            with pytest.raises((ValueError, TypeError)) as raised:
                call()
            assert str(raised.value).startswith(said)
        step = ChainConfig(steps=(Step("up", dist.column_linear, dist.ColumnLinearConfig(4, 6, axis=mesh["tp"])),))
        with pytest.raises(ValueError, match=r"^up: column_linear_fwd: x must be \[\.\.\., 4\], got \[2, 5\]"):
            chain.fwd({"up": LinearParams(torch.ones(3, 4), torch.ones(3))}, torch.ones(2, 5), step)

    run_ranks({"tp": 2}, run)


TWO, GIVEN = Mesh.abstract({"tp": 2}, 0)["tp"], torch.ones(1, 4, 2, 8)
DROPS = dist.ParallelLowRankConfig(4, 4, 1, axis=TWO, side="column", dropout=0.5)
BY_ROWS = NVFP4(stochastic=False, row_scaled=True, four_over_six="all", w_tile=(1, 16))


def wrapped(*shape):
    return torch.ones(shape).as_subclass(DTensor)


def attended(more, op=dist.context_attention, params=None, config=dist.ContextAttentionConfig, **options):
    x = (GIVEN, GIVEN, GIVEN) if more is None else (GIVEN, GIVEN, GIVEN, more)
    return op.fwd(params, x, config(TWO, **options) if params is None else config(axis=TWO, **options))


def hidden(experts=4, dim=8, size=8, **options):
    return dist.ParallelExpertsConfig(experts, dim, size, **{"axis": TWO, "shards": "hidden", "sequence_parallel": True, **options})


def adapted(key, cfg=DROPS):
    return dist.parallel_low_rank.fwd(dist.parallel_low_rank.init(cfg, key=random.key(0)), (torch.ones(2, 4), key), cfg)


NO_SCALE = "must be False, as ranks hold parts of a row and share no scale of it"
PLAIN_TENSOR = "must be a plain tensor (pass its to_local(), and the axis in the config), got DTensor"
REFUSED = {  # on an axis without a group: nothing is sent
    "ColumnLinearConfig: parts must be a multiple of 2, the size of axis 'tp', got 3": lambda: dist.ColumnLinearConfig(
        4, 6, axis=TWO, parts=(3, 3)
    ),
    f"RowQLinearConfig: recipe.x.row_scaled {NO_SCALE}, got True": lambda: dist.RowQLinearConfig(64, 64, BY_ROWS, axis=TWO),
    "row_qlinear_fwd: x must be of a size along dimension 0 that axis 'tp' of 2 divides, got float32[3, 32]": lambda: (
        dist.row_qlinear.fwd(
            LinearParams(torch.ones(64, 32), torch.ones(64)),
            torch.ones(3, 32),
            dist.RowQLinearConfig(64, 64, Fp8Current(), axis=TWO),
        )
    ),
    "all_to_all_fwd: x must be of a size along dimension 0 that axis 'tp' of 2 divides, got float32[3, 4]": lambda: (
        dist.all_to_all.fwd(None, torch.ones(3, 4), dist.AllToAllConfig(TWO))
    ),
    f"combine_fwd: x.1 (place) {PLAIN_TENSOR} int32[2, 2]": lambda: dist.combine.fwd(
        None, (torch.ones(4, 4), torch.zeros(2, 2, dtype=torch.int32).as_subclass(DTensor)), dist.CombineConfig(TWO)
    ),
    f"context_attention_fwd: x.3 (bias) {PLAIN_TENSOR} float32[1, 2, 4, 8]": lambda: attended(wrapped(1, 2, 4, 8), bias=True),
    "context_attention_fwd: x.3 (cu_seqlens) must be int32, got int64": lambda: attended(
        torch.tensor([0, 8]), causal=True, packed=True
    ),
    "context_attention_fwd: x.3 (cu_seqlens) must be ascending, from 0 to q's length 8, got [0, 9]": lambda: attended(
        torch.tensor([0, 9], dtype=torch.int32), causal=True, packed=True
    ),
    "context_sink_attention_fwd: x.0 (q) must be [1, 4, 4, 8], got [1, 4, 2, 8]": lambda: attended(
        None,
        dist.context_sink_attention,
        SinkAttentionParams(torch.zeros(4)),
        dist.ContextSinkAttentionConfig,
        heads=4,
        causal=True,
    ),
    "ParallelLatentSplitConfig: heads must be a multiple of 2, the size of axis 'tp', got 3": lambda: (
        dist.ParallelLatentSplitConfig(3, shared=2, own=2, value=2, axis=TWO)
    ),
    "ParallelExpertsConfig: axis must be Axis, got 'tp'": lambda: hidden(axis="tp"),
    "ParallelExpertsConfig: hidden must be a multiple of 2, the size of axis 'tp', got 7": lambda: hidden(size=7),
    "ParallelExpertsConfig: sequence_parallel must be True or False with shards='hidden', got None": lambda: hidden(
        sequence_parallel=None
    ),
    "ParallelExpertsConfig: capacity must be None with shards='hidden', got 0.5": lambda: hidden(capacity=0.5),
    "parallel_low_rank_fwd: x.1 (the key) must be int64, got float32": lambda: adapted(torch.ones(2)),
    "parallel_low_rank_fwd: x.1 (the key) must be [2], got [3]": lambda: adapted(torch.zeros(3, dtype=torch.int64)),
    "parallel_low_rank_fwd: x.0 must be of more dimensions (cfg.shared has one of 3), got float32[2, 4]": lambda: adapted(
        random.key(0), dataclasses.replace(DROPS, shared=(dist.Shared(3, TWO),))
    ),
    "VocabEmbeddingConfig: dim must be at least 1, got 0": lambda: dist.VocabEmbeddingConfig(8, 0, axis=TWO),
    f"vocab_cross_entropy_fwd: x.0 (logits) {PLAIN_TENSOR} float32[2, 4]": lambda: dist.vocab_cross_entropy.fwd(
        None, (wrapped(2, 4), torch.tensor([0, 1])), dist.VocabCrossEntropyConfig(TWO)
    ),
    f"vocab_linear_cross_entropy_fwd: x.0 (x) {PLAIN_TENSOR} float32[1, 3]": lambda: dist.vocab_linear_cross_entropy.fwd(
        LinearCrossEntropyParams(torch.ones(4, 3)),
        (wrapped(1, 3), torch.tensor([0, 1])),
        dist.VocabLinearCrossEntropyConfig(3, 8, axis=TWO),
    ),
    "zigzag: t must be Tensor, got 3": lambda: dist.zigzag(3, TWO),
    "unzigzag: t must be Tensor, got None": lambda: dist.unzigzag(None, TWO),
    "gather_shards_start: axis must be Axis, got 'tp'": lambda: dist.gather_shards_start({}, {}, "tp"),
    "raise_on_all_ranks: fault must be str or NoneType, got 3": lambda: dist.raise_on_all_ranks(3, Mesh(axes=(ONE,))),
    "is_saved: path must be str or PathLike, got 3": lambda: dist.is_saved(3),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_does_not_fit_an_axis_is_refused_before_anything_is_sent(said):
    with pytest.raises((ValueError, TypeError)) as raised:
        REFUSED[said]()
    assert str(raised.value) == said


HALVES = {
    "wgrad": lambda op, kept, pending, dy, cfg, into: op.wgrad(pending, cfg, into=into),
    "bwd": lambda op, kept, pending, dy, cfg, into: op.bwd(kept, dy, cfg, into=into),
    "products": lambda op, kept, pending, dy, cfg, into: op.products(pending, cfg, into=into),
}
ADDED_TO = {
    "weight must be [6, 4], got [7, 4]": LinearParams(torch.ones(7, 4), torch.ones(6)),
    "bias must be [6], got [5]": LinearParams(torch.ones(6, 4), torch.ones(5)),
    "weight must be on device cpu, got meta": LinearParams(torch.ones(6, 4, device="meta"), torch.ones(6)),
}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", LAYERS)
def test_accumulators_of_another_shape_are_refused_by_each_half(name, half):
    op, config = LAYERS[name]
    cfg = config(4, 6, axis=ONE)
    y, kept = op.fwd(op.init(cfg, key=random.key(3)), torch.ones(2, 4), cfg)
    _, pending = op.dgrad(kept, y, cfg)
    for said, into in ADDED_TO.items():
        with pytest.raises(ValueError, match=re.escape(f"{op.name}_{'bwd' if half == 'bwd' else 'wgrad'}: into.{said}")):
            HALVES[half](op, kept, pending, y, cfg, into)


def test_accumulators_of_another_table_are_refused():
    cfg = dist.VocabEmbeddingConfig(8, 3, axis=ONE)
    y, kept = dist.vocab_embedding.fwd(dist.vocab_embedding.init(cfg, key=random.key(3)), torch.tensor([0, 7]), cfg)
    _, pending = dist.vocab_embedding.dgrad(kept, y, cfg)
    with pytest.raises(ValueError, match=r"^vocab_embedding_wgrad: into\.weight must be \[8, 3\], got \[7, 3\]$"):
        dist.vocab_embedding.wgrad(pending, cfg, into=EmbeddingParams(torch.ones(7, 3)))
