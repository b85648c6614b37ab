"""Train the model of train_lm.py in four stages on two processes, under any schedule by name or from a CSV file.

    python examples/05_pipeline.py --schedule zb_v --check
    python examples/05_pipeline.py --schedule mine.csv

Residuals and pending weight gradients are data: each process runs its stages' actions in the schedule's order, without autograd.
`--check` computes in float64 and compares the gradients and the losses with one process. At the end it draws which rank runs which
action when, by the costs of the stages on this machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lm.data import TextError, batch, load_corpus
from lm.model import described, init, model_x
from lm.stages import split, staged
from torch import Tensor

from funcops import WithExtras, chain
from funcops.adapters.pipelining import Pipeline
from funcops.contract import Needs
from funcops.optim import AdamWConfig, adamw_init, adamw_update
from funcops.schedule import (
    Schedule,
    draw,
    dualpipe_v,
    fold,
    gpipe,
    interleaved_1f1b,
    interleaved_zb,
    measure_stages,
    one_f_one_b,
    simulate,
    zb_h1,
    zb_h2,
    zb_v,
)
from funcops.trees import paths

ONE_STAGE = {"gpipe": gpipe, "one_f_one_b": one_f_one_b, "zb_h1": zb_h1, "zb_h2": zb_h2}
LOOPED = {"interleaved_1f1b": interleaved_1f1b, "interleaved_zb": interleaved_zb}
FOLDED = {"zb_v": zb_v, "dualpipe_v": dualpipe_v}
NEEDS = Needs(x=False)


def schedule_of(args: argparse.Namespace) -> Schedule:
    """The schedule that the flags name, for --stages stages and --ranks processes. Raises `ValueError` if it does not fit."""
    name, ranks, stages, count = args.schedule, args.ranks, args.stages, args.microbatches
    if name in ONE_STAGE:
        return fold(ONE_STAGE[name](stages, count), ranks)
    if name in LOOPED:
        if stages % ranks:
            raise ValueError(f"--stages: expected a multiple of --ranks {ranks} for {name}, got {stages}")
        return LOOPED[name](ranks, count, stages // ranks)
    if name in FOLDED:
        if stages != 2 * ranks:
            raise ValueError(f"--stages: expected {2 * ranks}, two a rank, for {name}, got {stages}")
        return FOLDED[name](ranks, count)
    if not Path(name).is_file():
        known = ", ".join([*ONE_STAGE, *LOOPED, *FOLDED])
        raise ValueError(f"--schedule: expected one of {known}, or a CSV file, got {name!r}")
    made = Schedule.from_csv(Path(name).read_text(), Path(name).stem)
    if (made.stages, made.microbatches, len(made.ranks)) != (stages, count, ranks):
        got = f"{made.stages} stages, {made.microbatches} microbatches on {len(made.ranks)} ranks"
        raise ValueError(f"--schedule: expected {stages} stages, {count} microbatches on {ranks} ranks, got {got}")
    return made


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="05_pipeline.py", description="Train a language model in stages on several processes.")
    parser.add_argument(
        "--schedule", default="zb_v", help="a name, or a CSV file as torch.distributed.pipelining writes it (default: %(default)s)"
    )
    for name, value in (("ranks", 2), ("stages", 4), ("microbatches", 8), ("steps", 20), ("batch", 8), ("context", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("dim", 64), ("layers", 4), ("heads", 2), ("kv-heads", 1), ("hidden", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument(
        "--tied", action="store_true", help="one matrix for the embedding and the head (first and last stage on one rank)"
    )
    parser.add_argument("--text", help="a file or a folder (default: the standard library's own sources)")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds after which a process gives up on another")
    parser.add_argument("--check", action="store_true", help="in float64, compare gradients and losses with one process")
    parser.add_argument(
        "--plot",
        type=Path,
        default=Path("05_pipeline.png"),
        help="where the picture of the schedule goes, with the costs measured on this machine (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    for name in ("ranks", "microbatches", "steps", "batch", "context"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: expected at least 1, got {getattr(args, name)}")
    if args.batch % args.microbatches:
        parser.error(f"--batch: expected a multiple of --microbatches {args.microbatches}, got {args.batch}")
    try:
        sizes = dict(dim=args.dim, layers=args.layers, heads=args.heads, kv_heads=args.kv_heads, hidden=args.hidden)
        args.decoder = described(**sizes, context=args.context, tied=args.tied)
        args.model = staged(args.decoder, args.stages)
        args.made = schedule_of(args)
    except ValueError as error:
        parser.error(str(error))
    args.dtype = torch.float64 if args.check else torch.float32
    return args


def inputs(x: Tensor, labels: Tensor, args: argparse.Namespace) -> WithExtras:
    return model_x(args.decoder, x, labels, args.dtype)


def microbatches(x: Tensor, labels: Tensor, args: argparse.Namespace) -> list[WithExtras]:
    parts = zip(x.chunk(args.microbatches), labels.chunk(args.microbatches), strict=True)
    return [inputs(*part, args) for part in parts]


def first_params(args: argparse.Namespace) -> dict[str, Any]:
    return split(init(args.decoder, seed=args.seed, dtype=args.dtype, device="cpu"), args.decoder, args.stages)


class Reference:
    """One process that trains the same model, for --check."""

    def __init__(self, params: dict[str, Any], adamw: AdamWConfig) -> None:
        self.params, self.adamw, self.state = params, adamw, adamw_init(params, adamw)

    def step(self, x: Tensor, labels: Tensor, args: argparse.Namespace) -> tuple[float, Any]:
        loss, residuals = chain.fwd(self.params, inputs(x, labels, args), args.model, needs=NEEDS)
        grads, _ = chain.bwd(residuals, torch.ones_like(loss), args.model)
        self.params, self.state = adamw_update(self.params, grads, self.state, self.adamw)
        return float(loss), grads


def distance(got: Any, want: Any) -> float:
    """The largest relative error over the leaves that this rank has."""
    wanted = paths(want)
    return max(float((t - wanted[path]).norm() / wanted[path].norm()) for path, t in paths(got).items() if t is not None)


def work(rank: int, args: argparse.Namespace, data: Tensor, store: str) -> None:
    """Run one process, its stages' part of every step. It exits with 1 if --check finds a difference."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks, timeout=timedelta(seconds=args.timeout)
    )
    whole, adamw = first_params(args), AdamWConfig(lr=args.lr)
    x, labels = batch(data, step=0, seed=args.seed, size=args.batch, context=args.context)
    pipeline = Pipeline(args.made, args.model, microbatches(x, labels, args)[0], dtype=args.dtype, needs=NEEDS)
    own = {name: whole[name] for name in pipeline.names}
    state, reference = adamw_init(own, adamw), Reference(whole, adamw) if args.check else None
    worst = {"gradients": 0.0, "losses": 0.0}
    for step in range(args.steps):
        x, labels = batch(data, step=step, seed=args.seed, size=args.batch, context=args.context)
        losses, grads, _, peak = pipeline.step(own, microbatches(x, labels, args))
        own, state = adamw_update(own, grads, state, adamw)
        loss = None if losses is None else float(torch.stack(losses).mean())
        if reference is not None:
            want, wanted = reference.step(x, labels, args)
            worst["gradients"] = max(worst["gradients"], distance(grads, wanted) if step == 0 else 0.0)
            worst["losses"] = max(worst["losses"], 0.0 if loss is None else abs(loss - want) / want)
        if loss is not None and (step % 5 == 4 or step in (0, args.steps - 1)):
            print(
                f"step {step + 1}: loss {loss:.4f}, at most {peak / 2**20:.2f} MiB of residuals and pendings on rank {rank}",
                flush=True,
            )
    found = torch.tensor(list(worst.values()))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    if args.check and rank == 0:
        print(f"largest relative error against one process: gradients {found[0]:.2e}, losses of {args.steps} steps {found[1]:.2e}")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(
        int(args.check and not bool((found < 1e-12).all()))
    )  # a thread of Gloo may still hold a tensor, and Python's own exit would not wait for it


def plot(args: argparse.Namespace, data: Tensor) -> None:
    x, labels = batch(data, step=0, seed=args.seed, size=args.batch // args.microbatches, context=args.context)
    found = measure_stages(first_params(args), inputs(x, labels, args), args.model, needs=NEEDS)
    costs = [dataclasses.replace(c, forward=1e3 * c.forward, dgrad=1e3 * c.dgrad, wgrad=1e3 * c.wgrad) for c in found]
    simulated = simulate(args.made, costs)
    draw(simulated, str(args.plot), unit="milliseconds")
    print(f"wrote {args.plot}; in milliseconds, {simulated}")


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        data = load_corpus(args.text, context=args.context).train
    except TextError as error:
        print(f"05_pipeline.py: {error}", file=sys.stderr)
        return 2
    print(
        f"{args.made.name}: {args.stages} stages, {args.microbatches} microbatches, {args.ranks} processes\n{args.made}", flush=True
    )
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.spawn(work, (args, data, f"{folder}/store"), nprocs=args.ranks)
        except torch.multiprocessing.ProcessExitedException as error:
            print(f"05_pipeline.py: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    plot(args, data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
