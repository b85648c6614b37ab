"""Groups of ranks that run a pipeline, all at once: `python two_ranks.py FOLDER [COUNT:]MODES...`, two ranks unless told. Each rank
prints a line of numbers a case, or fails; their exit codes are printed last.

MODES of four ranks: allocated, graphed (against an eager pipeline), raises, stops (rank 2 in its second step).
MODES of a pair, with commas between: gradients (for every schedule), curve (for six); drawn;
leveled; leaves; tied; frozen; logged; recorded; outputs; reduce; modules; nan, refused (rank 1's first step), kill, raise (rank 1
goes wrong in its second step). Each says `== MODE` first.
"""

import functools
import json
import os
import random as random_numbers
import sys
import time
import weakref
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from drawn import every
from exchanged import check_exchanged, exchange, exchanged
from forked import codes
from staged import DIM, USER, decoder, layered, linears, microbatches, reference, routed_stages, square_error, stages_of_modules
from torch.utils._python_dispatch import TorchDispatchMode

from funcops import Needs, chain, compare, random, recording
from funcops.adapters.pipelining import BucketedMean, Pipeline, split_stage
from funcops.engine.residuals.report import storage_of
from funcops.engine.trees import paths, tensors, tree_map, tree_map_tensors
from funcops.logs import logs_init, split_logs, with_logs
from funcops.optim import AdamWConfig, adamw_init, adamw_update
from funcops.schedule import (
    Schedule,
    delay_w,
    dualpipe_v,
    fold,
    gpipe,
    interleaved_1f1b,
    interleaved_zb,
    level,
    one_f_one_b,
    run,
    stage_choices,
    zb_v,
)
from funcops.testing.checks import same_bits

M, DRAWN, ROWS = 8, 18, 48
LONG, SHORT, BRIEF = timedelta(minutes=10), timedelta(seconds=20), timedelta(seconds=8)


SCHEDULES = {
    "gpipe": fold(gpipe(4, M), 2),
    "one_f_one_b": fold(one_f_one_b(4, M), 2),
    "interleaved_1f1b": interleaved_1f1b(2, M),
    "interleaved_zb": interleaved_zb(2, M),
    "zb_v": zb_v(2, M),
    "dualpipe_v": dualpipe_v(2, M),
    "delayed": delay_w(interleaved_1f1b(2, M), 9),
    "user": Schedule.from_csv(USER),
}

CURVES = ("gpipe", "one_f_one_b", "interleaved_zb", "zb_v", "dualpipe_v", "user")


def distance(got, want):
    """The largest relative error over the leaves that this rank has."""
    want = paths(want)
    found = [float((t - want[path]).norm() / want[path].norm()) for path, t in paths(got).items() if t is not None]
    assert found
    return max(found)


def setup(count=M, cfg=None, seed=0):
    cfg = cfg or decoder(4, keyed=True)
    return cfg, chain.init(cfg, key=random.key(1), dtype=torch.float64), microbatches(count, cfg, seed=seed)


def local(pipeline, params):
    return {name: params[name] for name in pipeline.names}


def gradients():
    for name, schedule in SCHEDULES.items():
        cfg, params, xs = setup(schedule.microbatches)
        losses, want = reference(params, xs, cfg)
        pipeline = Pipeline(schedule, cfg, xs[0], dtype=torch.float64)
        for _ in range(2):
            ys, dparams, *_ = pipeline.step(local(pipeline, params), xs)
            assert ys is None or torch.equal(torch.stack(ys), torch.stack(losses))
            assert sorted(dparams) == sorted(pipeline.names)
            print(name, distance(dparams, want))


def drawn():
    """The bits of `run`, for the rank's part."""
    for schedule in every(seed=6, count=DRAWN, ranks=2):
        cfg, params, xs, dys = linears(schedule)
        want = run(schedule, params, xs, cfg, dys)
        pipeline = Pipeline(schedule, cfg, xs[0])
        ys, dparams, dxs, _ = pipeline.step(local(pipeline, params), xs, dys)
        same_bits(dparams, {name: want.dparams[name] for name in pipeline.names}, f"of {schedule}")
        for here, found, wanted in (("s0" in dparams, dxs, want.dxs), (ys is not None, ys, want.ys)):
            if here:
                same_bits(found, wanted, f"of {schedule}")
        print("drawn", 0.0)


def leveled():
    """Each rank's stages under the policies of a plan: the bits of `run` without it, and the bytes that were planned."""
    for made in (interleaved_1f1b(2, M), zb_v(2, M), fold(one_f_one_b(4, M), 2)):
        cfg, params, xs = setup(cfg=layered(4, 4))
        plan, want = level(made, stage_choices(cfg, xs[0], dtype=torch.float64)), run(made, params, xs, cfg)
        pipeline = Pipeline(plan.schedule, plan.staged(cfg), xs[0], dtype=torch.float64)
        ys, dparams, _, peak = pipeline.step(local(pipeline, params), xs)
        same_bits(dparams, {name: want.dparams[name] for name in pipeline.names}, f"of {made.name}")
        assert ys is None or torch.equal(torch.stack(ys), torch.stack(want.ys))
        assert peak <= plan.after.peak_bytes[dist.get_rank()], "a tensor that two stages share counts once"
        print("leveled", 0.0)


class Allocated(TorchDispatchMode):
    """The most bytes at a time of the storages that are made while it is on."""

    def __init__(self):
        super().__init__()
        self.alive, self.nbytes, self.peak = set(), 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        given = {storage_of(t) for t in tensors((args, kwargs))}
        for t in tensors(found):
            key, size = storage_of(t), t.untyped_storage().nbytes()
            if key not in given and key not in self.alive:
                self.alive.add(key)
                self.nbytes += size
                weakref.finalize(t.untyped_storage(), self.freed, key, size)
        self.peak = max(self.peak, self.nbytes)
        return found

    def freed(self, key, size):
        self.alive.discard(key)
        self.nbytes -= size


def allocated():
    """The largest peak of four ranks over their mean, of the bytes that their allocators gave, without a plan and with it; the bits
    are equal. The sums of gradients and the values of one action are a part of the peaks."""
    for made in (one_f_one_b(4, 16), zb_v(4, 16), interleaved_1f1b(4, 16)):
        cfg = layered(made.stages, 32 // made.stages)
        params, xs = chain.init(cfg, key=random.key(1), dtype=torch.float64), microbatches(16, cfg, rows=ROWS)
        plan = level(made, stage_choices(cfg, xs[0], dtype=torch.float64, count=12))
        found, ratios = [], []
        for schedule, staged in ((made, cfg), (plan.schedule, plan.staged(cfg))):
            pipeline = Pipeline(schedule, staged, xs[0], dtype=torch.float64)
            own = local(pipeline, params)
            with Allocated() as counted:
                found.append(pipeline.step(own, xs))
            every = [torch.zeros((), dtype=torch.int64) for _ in range(4)]
            dist.all_gather(every, torch.tensor(counted.peak))
            ratios.append(max(map(int, every)) * 4 / sum(map(int, every)))
        assert found[1].peak_bytes <= plan.after.peak_bytes[dist.get_rank()]
        same_bits((found[1].ys, found[1].dparams), (found[0].ys, found[0].dparams), f"of {made.name}")
        print(made.name, *ratios)


def leaves():
    """Messages of leaves of any kind."""
    for case in range(DRAWN):
        sent = exchanged(random_numbers.Random(case))
        check_exchanged(dist.get_rank(), sent, exchange(dist.get_rank(), sent))
        print("leaves", 0.0)


ADAMW = AdamWConfig(lr=1e-2)


@functools.cache
def trained(count):
    """20 steps of one process: the loss of each, and the params at the end."""
    cfg, params, _ = setup(count, decoder(4))
    state, losses = adamw_init(params, ADAMW), []
    for step in range(20):
        found, grads = reference(params, microbatches(count, cfg, seed=step % 2), cfg)
        params, state = adamw_update(params, grads, state, ADAMW)
        losses.append(float(torch.stack(found).mean()))
    assert losses[-1] < losses[0] - 0.05, "the model learns"
    return losses, params


def curve():
    cfg = decoder(4)
    for name in CURVES:
        schedule = SCHEDULES[name]
        _, params, xs = setup(schedule.microbatches, cfg)
        pipeline = Pipeline(schedule, cfg, xs[0], dtype=torch.float64)
        own = local(pipeline, params)
        state, (losses, whole) = adamw_init(own, ADAMW), trained(schedule.microbatches)
        far = 0.0
        for step, loss in enumerate(losses):
            ys, dparams, *_ = pipeline.step(own, microbatches(schedule.microbatches, cfg, seed=step % 2))
            own, state = adamw_update(own, dparams, state, ADAMW)
            if ys is not None:
                far = max(far, abs(float(torch.stack(ys).mean()) - loss))
        print(name, max(far, distance(own, whole)))


def tied():
    cfg, params, xs = setup(cfg=decoder(4, ties={"s3.head.weight": "s0.embed.weight"}))
    _, want = reference(params, xs, cfg)
    pipeline = Pipeline(zb_v(2, M), cfg, xs[0], dtype=torch.float64)
    print("tied", distance(pipeline.step(local(pipeline, params), xs).dparams, want))
    try:
        Pipeline(interleaved_zb(2, M), cfg, xs[0], dtype=torch.float64)
    except ValueError as error:
        print("refused", 0.0 if "s3.head.weight on rank 1 and s0.embed.weight on rank 0" in str(error) else str(error))


def frozen():
    cfg, params, xs = setup(cfg=decoder(4))
    _, want = reference(params, xs, cfg)
    pipeline = Pipeline(zb_v(2, M), cfg, xs[0], dtype=torch.float64, needs=Needs(x=False, params=("s2", "s3")))
    into = tree_map_tensors(lambda t: torch.ones_like(t), local(pipeline, params))
    _, dparams, dxs, peak = pipeline.step(local(pipeline, params), xs, into=into)
    assert peak > 0 and len(dxs) == M
    trained = {name: tree_map_tensors(lambda t: t - 1, tree) for name, tree in dparams.items() if name in ("s2", "s3")}
    print("frozen", distance(trained, want))
    still = [t for name, tree in dparams.items() if name in ("s0", "s1") for t in paths(tree).values() if t is not None]
    assert all(bool((t == 1).all()) for t in still)


def logged():
    """Each rank has the values of its stages, a row for each microbatch."""
    model, params, xs = setup(cfg=decoder(4))
    asked = {name: ("dx_norm", "dw_norm") for name in ("s1", "s2")} | {"s3": ("dw_norm",)}
    alone = with_logs(model, asked)
    want = [split_logs(run(gpipe(4, 1), logs_init(params, alone), [x], alone).dparams, alone)[1] for x in xs]
    for name, schedule in SCHEDULES.items():
        count = schedule.microbatches
        cfg = with_logs(model, asked, runs=count)
        pipeline = Pipeline(schedule, cfg, xs[0], dtype=torch.float64)
        _, dparams, *_ = pipeline.step(logs_init(local(pipeline, params), cfg), xs[:count])
        _, found = split_logs(dparams, cfg)
        assert set(found) == {*asked} & {*pipeline.names}
        far = 0.0
        for path, named in found.items():
            for key in asked[path]:
                one = torch.stack([m[path][key] for m in want[:count]]) / count  # the mean over microbatches has the gradient
                # the user's schedule does not run weight gradients in the order of microbatches, which rows have
                got, one = (t.sort().values if name == "user" else t for t in (named[key], one))
                far = max(far, float((got - one).abs().max() / one.abs().max()))
        print(name, far)


def recorded():
    """Each rank's recording against one process's: the values of its stages are the same, and nothing else is told."""
    model, params, xs = setup(cfg=decoder(4))
    for name, schedule in SCHEDULES.items():
        given = xs[: schedule.microbatches]
        with recording() as whole:
            run(schedule, params, given, model)
        pipeline = Pipeline(schedule, model, xs[0], dtype=torch.float64)
        with recording() as mine:
            pipeline.step(local(pipeline, params), given)
        found = compare(whole, mine)
        assert found.first is None and not found.only_b and found.matched, found
        assert {one.a.path.partition(".")[0] for one in found.matched} == {*pipeline.names}
        print(name, 0.0)


def outputs():
    """Each rank has the outputs of its stages; a loss added at a stage reaches the gradients of all stages before it."""
    cfg, params, xs = routed_stages()
    losses = ("loss0", "loss3", "logits2")
    want = run(zb_v(2, M), params, xs, cfg, losses=losses)
    pipeline = Pipeline(zb_v(2, M), cfg, xs[0], dtype=torch.float64)
    ys, dparams, *_ = pipeline.step(local(pipeline, params), xs, losses=losses)
    print("outputs", distance(dparams, want.dparams))
    for y, of_all in zip(ys, want.ys, strict=True):
        assert (y.main is None) == ("last" not in pipeline.names)
        own = {name for name, t in y.extras.items() if t is not None}
        assert own == {name for name in cfg.outputs if cfg.steps[int(name[-1])].name in pipeline.names}
        assert all(torch.equal(y.extras[name], of_all.extras[name]) for name in own)
    print("ys", 0.0)


def fails(pipeline, own, xs, into=None):
    """A step that raises: its message, and the place."""
    try:
        pipeline.step(own, xs, into=into)
    except Exception as error:
        print(type(error).__name__, str(error).splitlines()[0], *getattr(error, "__notes__", []), flush=True)
        return
    raise AssertionError("no error")


def second_step():
    """A pipeline whose first step succeeded on both ranks."""
    cfg, params, xs = setup(cfg=decoder(4))
    pipeline = Pipeline(zb_v(2, M), cfg, xs[0], dtype=torch.float64)
    own = local(pipeline, params)
    pipeline.step(own, xs)
    return pipeline, own, xs


def nan():
    pipeline, own, xs = second_step()
    if dist.get_rank() == 1:
        next(t for t in paths(own).values() if t is not None)[0] = float("nan")
    fails(pipeline, own, xs)


def refused():
    cfg, params, xs = setup(cfg=decoder(4))
    pipeline = Pipeline(zb_v(2, M), cfg, xs[0], dtype=torch.float64)
    own = local(pipeline, params)
    narrow = tree_map_tensors(lambda t: torch.zeros_like(t, dtype=torch.float32), own)
    fails(pipeline, own, xs, narrow if dist.get_rank() == 1 else None)
    print("refused", distance(pipeline.step(own, xs).dparams, reference(params, xs, cfg)[1]))


def kill():
    """Rank 0 must end with an error, though its timeout is long."""
    pipeline, own, xs = second_step()
    if dist.get_rank() == 1:
        os._exit(9)
    fails(pipeline, own, xs)
    os._exit(0)


def raise_(path):
    """Rank 0 must end by its timeout: rank 1, which raised, stays alive until then."""
    cfg, params, xs = setup(cfg=decoder(4))
    dist.barrier()
    group = dist.new_group(timeout=SHORT if dist.get_rank() == 0 else LONG)
    pipeline = Pipeline(zb_v(2, M), cfg, xs[0], dtype=torch.float64, group=group)
    own = local(pipeline, params)
    if dist.get_rank() == 1:
        own["s1"] = tree_map(lambda t: None if t is None else t[:1], own["s1"])
    for _ in range(2):
        fails(pipeline, own, xs)
    ended = path.with_suffix(".ended")
    if dist.get_rank() == 0:
        ended.touch()
    while not ended.exists():
        time.sleep(0.05)
    os._exit(0)


def graphed():
    """Graphs between messages have the bits of the eager pipeline, in three steps of training, with accumulators and without."""
    for made in (zb_v(4, M), one_f_one_b(4, M), interleaved_zb(4, M)):
        cfg, params, xs = setup(cfg=decoder(made.stages, keyed=True))
        eager, captured = (Pipeline(made, cfg, xs[0], dtype=torch.float64, graphed=one) for one in (False, True))
        first, second = (tree_map_tensors(torch.clone, local(eager, params)) for _ in range(2))
        for step in range(3):
            xs = microbatches(M, cfg, seed=step)
            found, peaks = [], []
            for pipeline, own in ((eager, first), (captured, second)):
                ys, dparams, dxs, peak = pipeline.step(own, xs)
                peaks.append(peak)
                found.append((ys, dparams, dxs))
                tree_map_tensors(lambda p, g: p.sub_(0.1 * g), own, dparams)
            same_bits(found[1], found[0], f"of {made.name}, step {step}")
            assert peaks[0] == peaks[1] > 0
        print(made.name, 0.0)


def who_failed(go_wrong):
    """The second step of four ranks, of which rank 2 goes wrong: what the others say. The word of rank 2 is not needed any more
    when all have ended."""
    cfg, params, xs = setup(cfg=decoder(4))
    dist.barrier()
    pipeline = Pipeline(one_f_one_b(4, M), cfg, xs[0], dtype=torch.float64, group=dist.new_group(timeout=BRIEF), graphed=True)
    own = local(pipeline, params)
    pipeline.step(own, xs)
    if dist.get_rank() == 2:
        go_wrong(pipeline, own, xs)
    else:
        fails(pipeline, own, xs)
    os._exit(0)


def raises():
    def go_wrong(pipeline, own, xs):
        pipeline._graphs.graphs[1].replay = lambda: 1 / 0
        fails(pipeline, own, xs)
        time.sleep(3 * BRIEF.total_seconds())

    who_failed(go_wrong)


def stops():
    who_failed(lambda *_: time.sleep(3 * BRIEF.total_seconds()))


def reduce():
    """Data parallelism: each process runs a schedule of its own over half of the microbatches."""
    rank = dist.get_rank()
    cfg, params, xs = setup(16, cfg=decoder(2))
    _, want = reference(params, xs, cfg)
    for bucket_bytes in (1, 600, 2**20):
        mean = BucketedMean(bucket_bytes=bucket_bytes)
        started = []

        def start(stage, dparams, mean=mean, started=started):
            started.append(stage)
            mean.start(dparams)

        ran = run(delay_w(one_f_one_b(2, 8), 4), params, xs[rank * 8 : rank * 8 + 8], cfg, done=start)
        mean.wait()
        assert sorted(started) == [0, 1]
        print("reduce", distance(ran.dparams, want))


def modules():
    """Torch's own schedules over `nn` stages, with and without examples of the values between them."""
    from torch.distributed.pipelining import schedules

    torch.manual_seed(0)
    x, target = torch.randn(2, 16, DIM, dtype=torch.float64)
    whole = stages_of_modules()
    square_error(whole(x), target).backward()
    placements = {"ScheduleZBVZeroBubble": "v", "ScheduleDualPipeV": "v", "ScheduleInterleavedZeroBubble": "loop"}
    for name, style in placements.items():
        for static in (True, False):
            every = stages_of_modules()
            rank = dist.get_rank()
            mine = (rank, 3 - rank) if style == "v" else (rank, 2 + rank)
            example = [torch.empty(2, DIM, dtype=torch.float64).requires_grad_(i > 0) for i in range(5)]
            given = {i: ((example[i],), (example[i + 1],)) if static else () for i in mine}
            stages = [split_stage(every[i], i, 4, "cpu", *given[i]) for i in mine]
            schedule = getattr(schedules, name)(stages, M, loss_fn=square_error)
            for _ in range(2):
                every.zero_grad()
                schedule.step(*([x] if rank == 0 else []), target=target)
                got, want = ({i: {n: p.grad for n, p in of[i].named_parameters()} for i in mine} for of in (every, whole))
                print(name, static, distance(got, want))


def work(count, modes, rank, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=count, timeout=LONG)
    for mode in modes.split(","):
        print("==", mode, flush=True)
        raise_(path) if mode == "raise" else globals()[mode]()
        dist.barrier()
    dist.destroy_process_group()


def main(folder, *groups):
    calls = {}
    for group in groups:
        count, modes = group.split(":") if ":" in group else ("2", group)
        for rank in range(int(count)):
            calls[f"{modes}-{rank}"] = functools.partial(work, int(count), modes, rank, folder / f"{modes}.store")
    print(json.dumps(codes(calls, folder)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
