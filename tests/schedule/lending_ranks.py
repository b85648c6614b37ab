"""Gloo processes of which some keep residuals for others: `python lending_ranks.py FOLDER CASES...`. Each rank prints `NAME| VALUE`
lines, or fails; their exit codes are printed last. A case is the name of a function here, and has two ranks."""

import fcntl
import functools
import gc
import json
import os
import random as pyrandom
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as torch_dist
from forked import codes
from policy_cases import SMALL, WAYS, X, by_backward, drawn_needs

from funcops import (
    ChainConfig,
    Compress,
    LinearConfig,
    Policy,
    RepeatConfig,
    RMSNormConfig,
    Step,
    chain,
    donate,
    linear,
    random,
    repeat,
    report,
    rms_norm,
    with_policy,
)
from funcops.dist import Mesh
from funcops.engine.residuals.report import kept_values
from funcops.schedule import At, lend
from funcops.schedule.lend import FULL, HEAD, PUT, _head
from funcops.testing.checks import same_bits

DRAWN = 24
CHAIN = ChainConfig(steps=(Step("norm", rms_norm, RMSNormConfig(8)), Step("mix", linear, LinearConfig(8, 8))))


def settled(lent):
    """Wait until all that was put is at its rank, and all that was dropped is freed: a put that is too large is answered last."""
    gc.collect()
    line = lent._lines[1]
    for _ in range(2):  # what is dropped while it is put has its turn after the first answer
        answer = line._do(lambda: (line.socket.sendall(HEAD.pack(PUT, 1 << 40, 1 << 40)), _head(line.socket)))
        assert answer.result()[1][0] == FULL


def barrier():
    """The processes of a test agree on when to look; a program need not."""
    torch_dist.barrier()


def of_a_chain(axis):
    """A chain under two rules, one with a codec."""
    policy = Policy({"norm.x": Compress("int8") | At(1, axis), "mix.x": At(1, axis)}, outputs="none")
    alone = Policy({"norm.x": Compress("int8")}, outputs="none")
    return with_policy(chain, policy), with_policy(chain, alone), chain.init(CHAIN, key=random.key(0))


def short(mesh):
    """Rank 1 takes no part in the program: it looks at its counts only."""
    axis = mesh["pp"]
    with lend(mesh, "pp", {1: 1 << 20}) as lent:
        if mesh.rank == 1:
            for when in ("put", "read", "used up", "dropped"):
                barrier()
                print(f"{when}| {lent.nbytes}", flush=True)
                barrier()
            print(f"peak| {lent.peak_bytes}")
            return
        op, alone, params = of_a_chain(axis)
        like = chain.init(CHAIN, device="meta"), X.to("meta")
        print("before|", report(op.fwd(*like, CHAIN)[1], *like).places["rank 1 of pp"])
        y, kept = op.fwd(params, X, CHAIN)
        want = alone.bwd(alone.fwd(params, X, CHAIN)[1], torch.ones_like(y), CHAIN)
        print("after|", report(kept, params, X).places["rank 1 of pp"])
        step = (
            lambda: None,
            lambda: same_bits(op.bwd(kept, torch.ones_like(y), CHAIN), want, "kept"),
            lambda: same_bits(op.bwd(donate(kept), torch.ones_like(y), CHAIN), want, "donated"),
            lambda: op.fwd(params, X, CHAIN) and None,
        )
        for act in step:
            act()
            settled(lent)
            barrier()
            barrier()


def drawn(rng, place):
    """A config of some layers, x, and rules by path for some of them, perhaps with a codec."""
    op, cfg, x = SMALL[rng.choice(list(SMALL))]
    times = rng.randint(1, 3)
    fields = sorted({path for path, *_ in kept_values(op.fwd(op.init(cfg, key=random.key(0)), x, cfg)[1])})
    codec = rng.choice([None, None, "bf16", "mxfp8", "int8"])
    action = place if codec is None else Compress(codec) | place
    layers = rng.choice(["*", "0", f"0-{times - 1}"])
    fields = [path for path in fields if codec is None or path[-1] in "xqkvy"]
    rules = {f"{layers}.{name}": action for name in rng.sample(fields, min(rng.randint(1, 4), len(fields)))}
    return RepeatConfig(op, cfg, times), x, Policy(rules, optional=True), codec


def drawn_rules(mesh):
    """Blocks, rules, codecs, halves, donation and needs: the bits of the codec alone, and the bytes that the report said."""
    axis = mesh["pp"]
    with lend(mesh, "pp", {1: 1 << 24}) as lent:
        for seed in range(DRAWN):
            if mesh.rank == 1:
                barrier()
                print(f"{seed}| {lent.nbytes}", flush=True)
                barrier()
                barrier()
                print(f"{seed} after| {lent.nbytes}", flush=True)
                barrier()
                continue
            rng = pyrandom.Random(seed)
            cfg, x, policy, codec = drawn(rng, At(1, axis))
            op, params = with_policy(repeat, policy), repeat.init(cfg, key=random.key(0))
            needs, way = drawn_needs(rng, params), rng.choice(WAYS)
            y, kept = op.fwd(params, x, cfg, needs=needs)
            print(f"{seed}| {report(kept, params, x).places.get('rank 1 of pp', 0)}")
            settled(lent)
            barrier()
            barrier()
            alone = Policy({rule: Compress(codec) for rule, _ in policy.rules} if codec else {}, optional=True)
            want = with_policy(repeat, alone)
            dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed))
            same_bits(
                by_backward(op, kept, dy, cfg, way),
                by_backward(want, want.fwd(params, x, cfg, needs=needs)[1], dy, cfg, way),
                f"{policy} {needs}",
            )
            del kept
            settled(lent)
            barrier()
            barrier()


def gone(mesh):
    """Rank 1 is killed while it holds residuals: what it had is lost, and nothing more is sent."""
    lent, alive = lend(mesh, "pp", {1: 1 << 20}), (Path(sys.argv[1]) / "gone.lock").open("a")
    if mesh.rank == 1:
        fcntl.flock(alive, fcntl.LOCK_EX)  # until it has ended: opened after its connections, it is closed after them
    torch_dist.barrier()
    if mesh.rank == 1:
        torch_dist.barrier()
        os._exit(9)
    op, _, params = of_a_chain(mesh["pp"])
    y, kept = op.fwd(params, X, CHAIN)
    settled(lent)
    torch_dist.barrier()
    fcntl.flock(alive, fcntl.LOCK_EX)
    for _ in range(2):
        _fails("backward", functools.partial(op.bwd, kept, torch.ones_like(y), CHAIN))
    for _ in range(2):
        _fails("forward", lambda: op.fwd(params, X, CHAIN))
    del kept
    lent.close()
    print("closed| True")


def killed(mesh):
    """Rank 0 is killed: rank 1 frees what it held for it."""
    lent = lend(mesh, "pp", {1: 1 << 20})
    torch_dist.barrier()
    if mesh.rank == 0:
        op, _, params = of_a_chain(mesh["pp"])
        _y, _kept = op.fwd(params, X, CHAIN)
        settled(lent)
        os._exit(9)
    _wait_for(lambda: lent.peak_bytes)
    _wait_for(lambda: not lent.nbytes)
    print("freed|", lent.nbytes)
    lent.close()


def stopped(mesh):
    """Rank 1 does not answer: rank 0 is told after its wait, not before and not never."""
    lent = lend(mesh, "pp", {1: 1 << 20}, wait=timedelta(seconds=10))
    torch_dist.barrier()
    path = Path(sys.argv[1]) / "stopped.pid"
    if mesh.rank == 1:
        path.with_suffix(".new").write_text(str(os.getpid()))
        path.with_suffix(".new").rename(path)
        _wait_for(lambda: False)
    _wait_for(path.exists)
    op, _, params = of_a_chain(mesh["pp"])
    y, kept = op.fwd(params, X, CHAIN)
    settled(lent)
    pid = int(path.read_text())
    os.kill(pid, 19)
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):  # a thread may answer once more before it stops
        _wait_for(lambda stat=stat: stat.read_text().rpartition(") ")[2].startswith("T"))
    start = time.monotonic()
    _fails("backward", lambda: op.bwd(kept, torch.ones_like(y), CHAIN))
    print("in time|", 9 < time.monotonic() - start < 60)
    os.kill(pid, 9)


def raised(mesh):
    """A step that raises leaves nothing at rank 1."""
    lent = lend(mesh, "pp", {1: 1 << 20})
    torch_dist.barrier()
    if mesh.rank == 1:
        _wait_for(lambda: lent.peak_bytes)
        _wait_for(lambda: not lent.nbytes)
        print("freed|", lent.nbytes)
    else:
        op, _, params = of_a_chain(mesh["pp"])
        _, kept = op.fwd(params, X, CHAIN)
        settled(lent)
        try:
            op.bwd(kept, torch.ones(1), CHAIN)
        except ValueError as error:
            print("said|", str(error).splitlines()[0])
        del kept
        gc.collect()
    lent.close()


def _wait_for(what):
    for _ in range(1200):
        if what():
            return
        time.sleep(0.05)
    raise AssertionError("waited for a minute")


def _fails(name, call):
    try:
        call()
    except OSError as error:
        print(f"{name}| {error}".replace("\n", " "), flush=True)
        return
    raise AssertionError("no error")


def work(case, rank, path):
    torch.set_num_threads(1)
    torch_dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2, timeout=timedelta(minutes=5))
    globals()[case](Mesh.of({"pp": 2}, "cpu"))


def main(folder, *cases):
    ranks = {f"{case}-{rank}": functools.partial(work, case, rank, folder / f"{case}.store") for case in cases for rank in range(2)}
    print(json.dumps(codes(ranks, folder)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
