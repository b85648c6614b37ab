"""Cases of the ops of `funcops.dist`: on any number of ranks, and on one, which makes each its plain op."""

import functools

import torch
import torch.nn.functional as F

from funcops import LinearParams, dist
from funcops.dist import Mesh
from funcops.testing import Case, DistCase, Placed

SHARD, INVARIANT, REPLICATE, PARTIAL = (Placed(kind) for kind in ("shard", "invariant", "replicate", "partial"))
LAYERS = {"column": (dist.column_linear, dist.ColumnLinearConfig), "row": (dist.row_linear, dist.RowLinearConfig)}
ONE = Mesh.abstract({"tp": 1}, 0)["tp"]


def collective(op, config, x, y, shape, reference=lambda params, x, n: x * 1.0, **fields):
    """Of a whole x of this shape."""
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
    """Each, and a case of it; `dim`: of a [8 rows, 8 width] tensor, or counted from behind."""
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
    """column_linear or row_linear; the sizes that are shared out are multiples of 8."""
    column = name == "column"
    i, o = (i, 8 * o) if column else (8 * i, o)
    made = functools.partial(LAYERS[name][1], i, o, bias=bias, sequence_parallel=sequence)
    whole = SHARD if sequence else INVARIANT
    of_bias = SHARD if column else REPLICATE if sequence else INVARIANT
    return DistCase(
        cfg=lambda axis: made(axis=axis, overlap=overlap),
        twin=lambda axis: made(axis=axis),
        x=lambda d: d.randn(8 * rows[0], *rows[1:], i),
        params=lambda d: LinearParams(d.randn(o, i), d.randn(o) if bias else None),
        reference=lambda params, x, n: F.linear(x, params.weight, params.bias),
        placed_x=whole if column else Placed("shard", -1),
        placed_y=Placed("shard", -1) if column else whole,
        placed_params=LinearParams(Placed("shard", 0 if column else 1), of_bias if bias else None),
        name=f"{rows}-{i}-{o}-bias={bias}-sequence={sequence}-{overlap}",
    )


def plain_cases():
    """Each op on an axis of one rank, which makes it its plain op."""
    found = [*collectives(1, 1, 1, 0), *[(LAYERS[n][0], layer(n, (1, 2), 3, 2, True, True, "bulk")) for n in LAYERS]]
    for op, case in found:
        free = ("x",) if case.params is None else ()
        cancels = ("params.bias", "params.weight") if case.params else ()
        yield op, Case(
            op=op, cfg=case.cfg(ONE), x=case.x, params=case.params, free=free, cancels=cancels,
            reference=lambda params, x, cfg, case=case: case.reference(params, x, 1),
        )  # fmt: skip


PLAIN = {op.name: case for op, case in plain_cases()}
