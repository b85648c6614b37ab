"""Two Gloo processes: `python two_ranks.py FOLDER`. Each prints the result of each check; their exit codes are printed last."""

import functools
import itertools
import json
import random as python_random
import sys
import time
from datetime import timedelta
from pathlib import Path

import drawn_messages
import torch
import torch.distributed as torch_dist
from dist_cases import CASES, on_axis
from forked import codes
from torch._C._distributed_c10d import _get_work_registry_size

from funcops import ChainConfig, GLUConfig, LinearConfig, RepeatConfig, Step, chain, dist, glu, linear, random, repeat
from funcops.checkpoint import CODES
from funcops.distributed import Mesh, comm
from funcops.engine.contract.digest import digest
from funcops.engine.trees import leaves, tensors, tree_map
from funcops.testing import run_ranks
from funcops.testing.checks import float_like


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


WAYS = ((True, "bulk"), (True, "ring"), (False, "bulk"))  # sequence_parallel, overlap


def given(mesh, sequence, overlap="bulk"):
    cfg = mlp(mesh["tp"], overlap, sequence)
    draw = functools.partial(torch.randn, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    x, dy = (t.chunk(2)[mesh.rank] if sequence else t for t in (draw(), draw()))
    return cfg, chain.init(cfg, key=random.key(0), dtype=torch.float64), x, dy


def both_ways(op, params, x, dy, cfg):
    y, residuals = op.fwd(params, x, cfg)
    return y, op.bwd(residuals, dy, cfg)


def of_op(name, mesh):
    """An op, and this rank's params, x and dy of its case."""
    case = on_axis(*CASES[name], mesh["tp"])
    params, x = case.make(torch.float64)
    dy = float_like(case.op.fwd(params, x, case.cfg)[0], 7 + mesh.rank)
    return case.op, params, x, dy, case.cfg


def every_op(mesh):
    return [both_ways(*of_op(name, mesh)) for name in CASES]


def steps(mesh):
    return [update(*given(mesh, *way)) for way in WAYS]


def sums(mesh):
    """Sums in buckets, in order, whole and by shards, and the gradients of a stack whose params are sharded."""
    tp = mesh["tp"]
    grads = {"a": torch.arange(7.0) / 3 + mesh.rank, "b": [torch.ones(4, 2).bfloat16() / 3 * (1 + mesh.rank), None]}
    found = [dist.finish(dist.reduce_start(grads, tp, shard=shard, bucket_bytes=20)) for shard in (None, tp)]
    cfg = RepeatConfig(dist.sharded, dist.ShardedConfig(linear, LinearConfig(4, 4), axis=tp), times=3)
    y, residuals = repeat.fwd(repeat.init(cfg, key=random.key(0)), torch.ones(2, 4) * mesh.rank, cfg)
    return [*found, dist.finish(dist.gather_shards_start(found[1], grads, tp)), repeat.bwd(residuals, y, cfg)]


def gathered(mesh):
    """Leaves of each dtype of files, whole from two parts: a hash of each."""
    made = {str(dtype): torch.arange(2 * dtype.itemsize, dtype=torch.uint8).view(dtype) for dtype in CODES.values()}
    made["torch.bool"] = torch.tensor([True, False])
    specs = {"*": dist.Spec("tp", 0)}
    whole = dist.unshard(dist.shard(made, specs, mesh), specs, mesh)
    assert all(digest(whole[name]) == digest(t) and whole[name].dtype is t.dtype for name, t in made.items())
    return len(whole)


def same(mesh, fn):
    """Whether these processes give the same as threads: sums of two have only one order."""
    want = run_ranks({"tp": 2}, fn)[mesh.rank]
    return all(torch.equal(a, b) for a, b in zip(tensors(fn(mesh)), tensors(want), strict=True))


def compiled(fn, args, backend):
    """The distance between eager and one compiled graph."""
    got = torch.compile(fn, fullgraph=True, backend=backend)(*args)
    pairs = zip(leaves(got), leaves(fn(*args)), strict=True)
    return max([float((a - b).abs().max()) for a, b in pairs if a is not None])


def compiled_steps(mesh, backend, ways):
    found = [(functools.partial(update, args[0]), args[1:], backend) for args in (given(mesh, *way) for way in ways)]
    return max(compiled(*one) for one in found)


def compiled_sums(mesh):
    """The collectives of a training step's gradients, whole and by shards, compiled."""
    tp = mesh["tp"]
    grads = (torch.arange(7.0) / 3 + mesh.rank, torch.ones(4, 2) * mesh.rank)

    def both(*grads):
        return [dist.finish(dist.reduce_start(list(grads), tp, shard=shard, bucket_bytes=20)) for shard in (None, tp)]

    return compiled(both, grads, "aot_eager")


TRACED = ("vocab_linear_cross_entropy", "context_attention")


def compiled_ops(mesh):
    found = [of_op(name, mesh) for name in TRACED]
    return max(compiled(functools.partial(both_ways, op, cfg=cfg), args, "aot_eager") for op, *args, cfg in found)


def disagreement(mesh):
    x = torch.ones(2 + mesh.rank, 6)
    step = functools.partial(dist.gather_fwd, None, cfg=dist.GatherConfig(mesh["tp"]))
    started = time.monotonic()
    try:
        dist.handshake(mesh, step, x)
    except ValueError as error:
        return str(error), time.monotonic() - started < 60


def shaken(mesh, step):
    try:
        return len(dist.handshake(mesh, step, torch.ones(6, 5)).sent)
    except ValueError as error:
        return str(error)


def drawn_handshakes(mesh):
    """How many drawn programs pass where they are equal, and are refused where not: one that was sent would abort, or hang."""
    draw, found = python_random.Random(5), [0, 0]
    for _ in range(25):
        program, rank = drawn_messages.drawn(draw, ["tp"], 4), draw.randrange(2)
        other, what = drawn_messages.changed(draw, program)
        found[0] += shaken(mesh, lambda x, run=program: drawn_messages.run(mesh, run, x)) == len(program)
        run = other if mesh.rank == rank else program
        said = shaken(mesh, lambda x, run=run: drawn_messages.run(mesh, run, x))
        found[1] += str(said).startswith("handshake: collective ")
    return found


def refused(mesh):
    """The operators of torch.distributed that change their arguments, and which a handshake refuses, on tensors of any device."""
    found = set()
    for place in ("cpu", None):
        for name in drawn_messages.unordered(torch_dist, mesh.rank, torch.ones(2)):

            def step(x, name=name, place=place):
                drawn_messages.unordered(torch_dist, mesh.rank, torch.ones(2, device=place))[name]()

            found |= {name} if f"got c10d.{name}" in str(shaken(mesh, step)) else {f"{name} on {place}: {shaken(mesh, step)}"}
    return sorted(found)


def checkpoint(mesh, folder):
    """Two processes save and load; the test loads the files in one process."""
    tree, specs = {"w": torch.arange(24.0).reshape(4, 6), "b": torch.arange(6)}, {"w": dist.Spec("tp", 1, parts=(4, 2))}
    own = dist.shard(tree, specs, mesh)
    dist.save(own, folder, specs, mesh)
    return all(map(torch.equal, tensors(dist.load(folder, own, specs, mesh)), tensors(own)))


SHIFT = functools.partial(comm.start_shift, by=1)
STARTED = (comm.start_gather, comm.start_scatter_sum, comm.start_sum, comm.start_all_to_all, SHIFT)


def in_flight(tp, other):
    """The numbers of collectives in flight after two starts, of every pair of kinds: over one axis, and over two."""
    counts = {"one": set(), "two": set()}
    for first, second in itertools.product(STARTED, repeat=2):
        for name, axis in (("one", tp), ("two", other)):
            sent = [(first(torch.arange(4.0), tp), tp), (second(torch.ones(2, 3), axis), axis)]
            counts[name].add(_get_work_registry_size())
            for one in sent:
                comm.wait(*one)
            assert not _get_work_registry_size() and not comm._in_flight
    return counts


def rank(store, number):
    torch_dist.init_process_group("gloo", f"file://{store}", rank=number, world_size=2, timeout=timedelta(minutes=5))
    try:
        Mesh.of({"dp": 2, "tp": 2}, "cpu")
    except ValueError as error:
        print("wrong product|", error)
    mesh = Mesh.of({"dp": 1, "tp": 2}, "cpu")
    print("place|", mesh.rank, mesh["tp"].rank, mesh["dp"].group)
    print("ops|", same(mesh, every_op))
    print("dtypes|", gathered(mesh) == len(CODES))
    print("steps|", same(mesh, steps))
    print("sums|", same(mesh, sums))
    print("handshake|", len(dist.handshake(mesh, lambda *args: update(mlp(mesh["tp"]), *args), *given(mesh, True)[1:]).sent))
    print("checkpoint|", checkpoint(mesh, store.with_name("checkpoint")))
    print("disagreement|", disagreement(mesh))
    print("drawn|", drawn_handshakes(mesh))
    print("refused|", refused(mesh))
    print("finish|", dist.finish(dist.gather_start(torch.ones(1) * mesh.rank, mesh["tp"])).tolist())
    print("in flight|", in_flight(mesh["tp"], Mesh.of({"cp": torch_dist.new_group([0, 1])}, "cpu")["cp"]))
    print("traced|", compiled_steps(mesh, "aot_eager", WAYS))
    print("traced ops|", compiled_ops(mesh))
    print("traced sums|", compiled_sums(mesh))
    print("compiled|", compiled_steps(mesh, "inductor", WAYS[1:2]))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    print(json.dumps(codes({f"rank{i}": functools.partial(rank, folder / "store", i) for i in range(2)}, folder)))
