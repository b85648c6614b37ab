"""Two Gloo processes: `python two_ranks.py FOLDER`. Each prints what came of each check; their exit codes are printed last."""

import functools
import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as torch_dist
from forked import codes

from funcops import ChainConfig, GLUConfig, Step, chain, dist, glu, random
from funcops.dist import Mesh
from funcops.testing import run_ranks
from funcops.trees import leaves, tensors, tree_map

OPS = ("gather", "scatter_sum", "sum_over", "copy_to", "gather_same", "slice_of", "all_to_all", "shift")


def mlp(tp, overlap="bulk", sequence=True):
    shared = dict(axis=tp, overlap=overlap, sequence_parallel=sequence)
    return ChainConfig(
        steps=(
            Step("up", dist.column_linear, dist.ColumnLinearConfig(6, 16, **shared)),
            Step("act", glu, GLUConfig(kind="swiglu", gate="first")),
            Step("down", dist.row_linear, dist.RowLinearConfig(8, 6, **shared)),
        )
    )


def update(cfg, params, x, dy):
    """Forward, backward and a step of descent."""
    y, residuals = chain.fwd(params, x, cfg)
    dparams, dx = chain.bwd(residuals, dy, cfg)
    return y, dx, tree_map(lambda p, g: None if p is None else p - 0.1 * g, params, dparams)


def given(mesh, sequence):
    cfg = mlp(mesh["tp"], sequence=sequence)
    draw = functools.partial(torch.randn, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    x, dy = (t.chunk(2)[mesh.rank] if sequence else t for t in (draw(), draw()))
    return cfg, chain.init(cfg, key=random.key(0), dtype=torch.float64), x, dy


def every_op(mesh):
    found = []
    for name in OPS:
        op = getattr(dist, name)
        cfg = op.config(mesh["tp"])
        y, residuals = op.fwd(None, torch.arange(8.0).reshape(4, 2) + mesh.rank, cfg)
        found += [y, op.bwd(residuals, y + mesh.rank, cfg)[1]]
    return found


def steps(mesh):
    return [update(*given(mesh, sequence)) for sequence in (True, False)]


def same(mesh, fn):
    """These processes give what threads give: sums of two have one order."""
    want = run_ranks({"tp": 2}, fn)[mesh.rank]
    return all(torch.equal(a, b) for a, b in zip(tensors(fn(mesh)), tensors(want), strict=True))


def compiled(mesh):
    """The largest distance from eager of a step that is one graph."""
    worst = 0.0
    for sequence in (True, False):
        args = given(mesh, sequence)
        got = torch.compile(functools.partial(update, args[0]), fullgraph=True, backend="aot_eager")(*args[1:])
        pairs = zip(leaves(got), leaves(update(*args)), strict=True)
        worst = max([worst, *[float((a - b).abs().max()) for a, b in pairs if a is not None]])
    return worst


def disagreement(mesh):
    x = torch.ones(2 + mesh.rank, 6)
    step = functools.partial(dist.gather_fwd, None, cfg=dist.GatherConfig(mesh["tp"]))
    started = time.monotonic()
    try:
        dist.handshake(mesh, step, x)
    except ValueError as error:
        return str(error), time.monotonic() - started < 60


def rank(store, number):
    torch_dist.init_process_group("gloo", f"file://{store}", rank=number, world_size=2, timeout=timedelta(minutes=5))
    try:
        Mesh.of({"dp": 2, "tp": 2}, "cpu")
    except ValueError as error:
        print("wrong product|", error)
    mesh = Mesh.of({"dp": 1, "tp": 2}, "cpu")
    print("place|", mesh.rank, mesh["tp"].rank, mesh["dp"].group)
    print("ops|", same(mesh, every_op))
    print("steps|", same(mesh, steps))
    print("handshake|", len(dist.handshake(mesh, lambda *args: update(mlp(mesh["tp"]), *args), *given(mesh, True)[1:]).sent))
    print("disagreement|", disagreement(mesh))
    print("finish|", dist.finish(dist.gather_start(torch.ones(1) * mesh.rank, mesh["tp"])).tolist())
    print("compiled|", compiled(mesh))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    print(json.dumps(codes({f"rank{i}": functools.partial(rank, folder / "store", i) for i in range(2)}, folder)))
