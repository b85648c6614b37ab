"""The command line of train_lm, checked before anything starts."""

from __future__ import annotations

import argparse
import functools
import math
from pathlib import Path

import torch

from funcops import POLICIES
from funcops.dist import Mesh, parallel
from funcops.low_precision import MXFP8, NVFP4, Fp8Block, Fp8Current, Fp8Delayed
from lm.model import described, model
from lm.piped import SCHEDULES, roles
from lm.ranks import sizes_of
from lm.results import holds_run

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
RECIPES = {"fp8_block": Fp8Block, "fp8_current": Fp8Current, "fp8_delayed": Fp8Delayed, "mxfp8": MXFP8}
RECIPES |= {"nvfp4": NVFP4, "nvfp4_nearest": functools.partial(NVFP4, stochastic=False)}


ONE_PROCESS = {"check": "whole params are compared", "graph": "communication is not captured", "profile": "one process is profiled"}
ONE_PROCESS |= {"watch": "whole params are compared"}
OF_EXPERTS = {"top_k": 2, "shared": 0, "balance": 0.002}  # the defaults with --experts
OF_DECODER = ("dim", "layers", "heads", "kv_heads", "hidden", "context", "tied", "experts", "top_k", "shared")
PIPED = {
    "tied": "the embedding and the head are on two stages",
    "delay_wgrad": "the schedule orders weight gradients",
    "budget": "each stage keeps what its schedule leaves waiting",
    "compile": "the schedule is run action by action",
    "experts": "no stage sends their load",
}

OVERLAPS = ("none", "bulk", "ring")

RUNS = Path("runs")

NUMBERS: dict[str, tuple[tuple[str, type, object, str], ...]] = {
    "model": (
        ("dim", int, 192, "width of the residual stream"),
        ("layers", int, 4, "number of blocks"),
        ("heads", int, 3, "heads of queries"),
        ("kv-heads", int, 1, "heads of keys and values; divides --heads"),
        ("hidden", int, 512, "width of the MLPs"),
    ),
    "training": (
        ("context", int, 256, "bytes (tokens) in a row"),
        ("batch", int, 8, "rows in a step"),
        ("steps", int, 1000, "steps in all; the learning rate falls until the last"),
        ("warmup", int, 50, "steps in which the learning rate rises"),
        ("lr", float, 3e-3, "largest learning rate"),
        ("weight-decay", float, 0.1, "decay of matrices"),
        ("clip", float, 1.0, "largest global norm of the gradients"),
        ("seed", int, 0, "seed of the weights and of the batches"),
        ("eval-every", int, 250, "steps between evaluations, each of which saves the run"),
    ),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="train_lm.py", description="Train a byte-level language model with a functional loop.")
    data = parser.add_argument_group("data and results")
    data.add_argument("--text", help="a file or a folder (default: the standard library's own sources)")
    data.add_argument("--out", type=Path, help="where results go (default: runs/lm, or runs/lm-2, ... if that has a run)")
    data.add_argument(
        "--resume",
        nargs="?",
        const="yes",
        choices=("yes", "auto"),
        help="resume from the checkpoint in --out (default: in the latest run); auto: if there is one, else begin (for torchrun "
        "--max-restarts)",
    )
    data.add_argument("--force", action="store_true", help="overwrite the run in --out")
    data.add_argument(
        "--stop-at", type=int, metavar="STEP", help="save and stop after this step, as Ctrl-C would (default: --steps)"
    )
    data.add_argument("--sample", type=int, default=300, metavar="BYTES", help="text to sample at the end (default: %(default)s)")
    for title, rows in NUMBERS.items():
        group = parser.add_argument_group(title)
        for name, kind, value, text in rows:
            group.add_argument(f"--{name}", type=kind, default=value, metavar="N", help=f"{text} (default: %(default)s)")
        if title == "training":
            group.add_argument(
                "--optimizer",
                choices=("adamw", "muon"),
                default="adamw",
                help="muon: Muon for the matrices of the blocks, AdamW for the rest (default: %(default)s)",
            )
            group.add_argument(
                "--eight-bit-state", action="store_true", help="the optimiser's state in 8 bits by blocks, 2 bytes a param, not 8"
            )
        if title == "model":
            group.add_argument("--tied", action="store_true", help="one matrix for the embedding and the head")
            _add_experts(parser)
    _add_processes(parser)
    how = parser.add_argument_group("how a step is computed")
    how.add_argument("--device", default="cpu", help="as torch names it (default: %(default)s)")
    how.add_argument(
        "--dtype",
        default="float32",
        choices=[*DTYPES, "auto"],
        help="dtype of the computation; weights stay float32. auto: bfloat16 if the device has instructions for it, else float32 "
        "(default: %(default)s)",
    )
    how.add_argument(
        "--recipe",
        choices=RECIPES,
        help="low precision for the blocks' linear layers; CPUs emulate it slowly, with the same codes. nvfp4 rounds gradients "
        "stochastically, nvfp4_nearest does not (default: none)",
    )
    how.add_argument("--delay-wgrad", action="store_true", help="all dgrads first, then all wgrads")
    how.add_argument("--policy", choices=POLICIES, help="what is kept for the backward (default: recompute_elementwise)")
    how.add_argument(
        "--budget",
        type=float,
        metavar="MIB",
        help="MiB that may be kept for the backward; picks the cheapest policy that fits (default: none)",
    )
    how.add_argument("--compile", action="store_true", help="the whole step as one torch.compile graph")
    how.add_argument("--graph", action="store_true", help="the whole step as one CUDA graph (without a GPU: recorded and replayed)")
    how.add_argument(
        "--watch",
        type=int,
        metavar="N",
        help="every N steps print norms by block, the largest update over a weight, the noise of gradients, and the errors of a "
        "recipe, and draw them by path in watch.svg; such a step runs its rows once more (default: never)",
    )
    how.add_argument("--profile", action="store_true", help="print where the time of a step goes, by path, and exit")
    how.add_argument("--check", action="store_true", help="compare one step with plain PyTorch in float64, and exit")
    return parser


def _add_processes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("processes, under torchrun: the product of these is their number")
    number = functools.partial(group.add_argument, type=int, metavar="N")
    number("--dp", help="data parallelism: each has other rows (default: the remaining processes)")
    for name, text in (
        ("ep", "expert parallelism: each has some of the --experts, and other rows"),
        ("tp", "tensor parallelism: each has a part of every projection"),
        ("cp", "context parallelism: each has some positions"),
        ("pp", "pipeline parallelism: each has some of the layers"),
    ):
        number(f"--{name}", default=1, help=f"{text} (default: %(default)s)")
    number(
        "--zero",
        choices=(0, 1, 2, 3),
        default=0,
        help="what --dp shards: 1 or 2 the optimiser's state and sums of gradients, 3 weights too (default: %(default)s)",
    )
    group.add_argument(
        "--overlap", choices=OVERLAPS, default="bulk", help="what runs while ranks along --tp communicate (default: %(default)s)"
    )
    number("--microbatches", help="microbatches of a step in the pipeline (default: twice --pp)")
    group.add_argument("--schedule", choices=SCHEDULES, default="zb_h1", help="schedule of the pipeline (default: %(default)s)")


def _add_experts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("mixtures of experts, instead of MLPs")
    group.add_argument("--experts", type=int, metavar="N", help="number of experts, of --hidden each (default: none, an MLP)")
    group.add_argument("--top-k", type=int, metavar="N", help="number of experts that a token goes through (default: 2)")
    group.add_argument("--shared", type=int, metavar="N", help="number of experts that all tokens go through (default: none)")
    group.add_argument(
        "--balance", type=float, metavar="RATE", help="how far a step moves the biases that even the load (default: 0.002)"
    )


def _check_experts(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    for name, least in (("experts", 1), ("top_k", 1), ("shared", 1), ("balance", 0)):
        value, flag = getattr(args, name), f"--{name.replace('_', '-')}"
        if value is None:
            continue
        if not least <= value < math.inf:
            parser.error(f"{flag}: expected a finite number of at least {least}, got {value}")
        if args.experts is None:
            parser.error(f"{flag}: expected with --experts, got {value} without")
    if args.experts is not None:
        vars(args).update({name: value for name, value in OF_EXPERTS.items() if getattr(args, name) is None})


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags, with `decoder`, `dtype`, `device` and `out` made into objects; a bad flag ends the program with a one-line
    error."""
    parser = _parser()
    args = parser.parse_args(argv)
    for name in ("context", "batch", "steps", "eval_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1, got {getattr(args, name)}")
    args.warmup = min(args.warmup, args.steps)
    if args.warmup < 0:
        parser.error(f"--warmup: expected at least 0, got {args.warmup}")
    if args.graph and args.compile:
        parser.error("--graph: expected without --compile")
    if args.policy and args.budget is not None:
        parser.error("--budget: expected without --policy, as it picks one")
    if args.budget is not None and not args.budget > 0:
        parser.error(f"--budget: expected a number above 0, got {args.budget}")
    for name, least, ok in (
        ("lr", "above 0", args.lr > 0),
        ("clip", "above 0", args.clip > 0),
        ("weight-decay", "of at least 0", args.weight_decay >= 0),
    ):
        value = getattr(args, name.replace("-", "_"))
        if not ok or value == math.inf:
            parser.error(f"--{name}: expected a {'finite ' if value == math.inf else ''}number {least}, got {value}")
    if args.watch is not None and args.watch < 1:
        parser.error(f"--watch: expected at least 1, got {args.watch}")
    if args.microbatches is not None and args.microbatches < 1:
        parser.error(f"--microbatches: expected at least 1, got {args.microbatches}")
    if not -(2**63) <= args.seed < 2**63 - 1:
        parser.error(f"--seed: expected a number of 64 bits, got {args.seed}")
    if args.sample < 0:
        parser.error(f"--sample: expected at least 0, got {args.sample}")
    if args.stop_at is not None and args.stop_at < 1:
        parser.error(f"--stop-at: expected at least 1, got {args.stop_at}")
    _check_experts(parser, args)
    _check_out(parser, args)
    try:
        args.device = torch.device(args.device)
        torch.empty(1, device=args.device)
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device: expected a device of this machine, got {args.device!r} ({str(error).splitlines()[0]})")
    try:
        args.decoder = described(**{name: value for name in OF_DECODER if (value := getattr(args, name)) is not None})
        args.recipe = RECIPES[args.recipe]() if args.recipe else None
    except ValueError as error:
        parser.error(str(error))
    try:
        model(args.decoder, args.recipe)
    except ValueError as error:
        parser.error(f"--recipe: {error}")
    try:
        args.mesh = sizes_of(args)
    except ValueError as error:
        parser.error(str(error))
    _check_mesh(parser, args)
    if args.check and args.recipe is not None:
        parser.error("--check: expected without --recipe, as it compares in float64, without rounding")
    args.dtype = _quick_dtype(args.device) if args.dtype == "auto" else DTYPES[args.dtype]
    return args


def _quick_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 if the device multiplies it faster than float32: a GPU of compute capability 8.0, a CPU with AVX-512 BF16 or AMX."""
    if device.type == "cuda":
        quick = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        found = torch.cpu.get_capabilities() if device.type == "cpu" else {}
        quick = bool(found.get("avx512_bf16") or found.get("amx_bf16"))
    return torch.bfloat16 if quick else torch.float32


def _check_mesh(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if math.prod(args.mesh.values()) == 1:
        return
    said = " ".join(f"--{name} {n}" for name, n in args.mesh.items())
    if args.zero == 3 and args.pp > 1:
        parser.error(f"--zero: expected 0 to 2 with --pp {args.pp}, got 3")
    for name, why in (ONE_PROCESS | (PIPED if args.pp > 1 else {})).items():
        if getattr(args, name):
            parser.error(f"--{name.replace('_', '-')}: expected without {said}, as {why}, got {getattr(args, name)}")
    if args.optimizer == "muon":
        parser.error(f"--optimizer: expected adamw with {said}, as Muon's state is saved by one process, got muon")
    if args.zero == 3 and args.compile:
        parser.error("--compile: expected without --zero 3, whose layers take minutes to trace, got True")
    if args.recipe is None:
        return
    slotless = {"pp": args.pp > 1, "ep": args.ep > 1, "zero": args.zero == 3}
    if args.recipe.delayed and any(slotless.values()):
        other = " ".join(f"--{name} {getattr(args, name)}" for name, given in slotless.items() if given)
        parser.error(f"--recipe: expected one without state with {other}, which has no slots for its scales, got fp8_delayed")
    if args.recipe.stochastic and args.zero == 3:
        parser.error("--recipe: expected nvfp4_nearest with --zero 3, whose gathered weights have no random keys, got nvfp4")
    try:
        mesh = Mesh.abstract(args.mesh, 0)
        parallel(model(args.decoder, args.recipe), roles(mesh, args.decoder), mesh, overlap=args.overlap)
    except ValueError as error:
        parser.error(f"--recipe with {said} --overlap {args.overlap}: {error}")


def _check_out(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Choose --out; an existing run is overwritten only with --force."""
    begins = args.resume == "auto"
    args.resume = args.resume is not None
    if args.resume and args.force:
        parser.error("--force: expected without --resume, which continues the run")
    if args.out is None:
        found = _runs()
        fresh = args.force or not (args.resume or found)
        args.out = RUNS / "lm" if fresh else found[-1] if args.resume else RUNS / f"lm-{_number(found[-1]) + 1}"
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"--out: expected a folder, got {str(args.out)!r}, which is a file")
    there = holds_run(args.out)
    args.resume = args.resume and (there or not begins)
    if args.resume and not there:
        parser.error(f"--resume: expected a checkpoint in --out {str(args.out)!r}, got none")
    if there and not (args.resume or args.force or args.check):
        parser.error(
            f"--out: expected a folder without a run, got {str(args.out)!r}: --resume goes on with it, --force writes over it"
        )


def _runs() -> list[Path]:
    """The folders runs/lm, runs/lm-2, ... that contain a run, in order."""
    return sorted([folder for folder in RUNS.glob("lm*") if _number(folder) and holds_run(folder)], key=_number)


def _number(folder: Path) -> int:
    """The number of a run's folder: 1 for lm, 2 for lm-2; 0 for another name."""
    tail = folder.name.removeprefix("lm")
    return 1 if not tail else int(tail[1:]) if tail[0] == "-" and tail[1:].isdecimal() else 0
