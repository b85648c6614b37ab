"""The command line of train_lm, checked before anything starts."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from funcops import POLICIES
from lm.model import Sizes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags, with `sizes`, `dtype` and `device` made into objects; a bad one ends the program with one line."""
    parser = argparse.ArgumentParser(prog="train_lm.py", description="Train a byte-level language model with a functional loop.")
    parser.add_argument("--text", help="a file or a folder (default: the standard library's own sources)")
    parser.add_argument("--out", type=Path, default=Path("runs/lm"), help="where results go (default: %(default)s)")
    for name, value in (("dim", 192), ("layers", 4), ("heads", 3), ("kv-heads", 1), ("hidden", 512)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("context", 256), ("batch", 8), ("steps", 1000), ("warmup", 50), ("eval-every", 250)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=1.0, help="largest global norm of the gradients")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", type=int, default=300, help="bytes of text to sample at the end")
    parser.add_argument("--tied", action="store_true", help="one matrix for the embedding and the head")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="of the computation; weights stay float32")
    parser.add_argument("--delay-wgrad", action="store_true", help="all dgrads first, then all wgrads")
    parser.add_argument("--policy", choices=POLICIES, help="what is kept for the backward (default: recompute_elementwise)")
    parser.add_argument("--budget", type=float, help="MiB kept for the backward at most; picks the cheapest policy that fits")
    parser.add_argument("--compile", action="store_true", help="the whole step as one torch.compile graph")
    parser.add_argument(
        "--graph", action="store_true", help="the whole step as one CUDA graph (without a GPU: recorded and replayed)"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--stop-at", type=int, help="save and stop after this many steps, as Ctrl-C would")
    parser.add_argument("--check", action="store_true", help="compare one step with plain PyTorch in float64, and exit")
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
    for name in ("lr", "clip"):
        if not getattr(args, name) > 0:
            parser.error(f"--{name}: expected a number above 0, got {getattr(args, name)}")
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"--out: expected a folder, got {str(args.out)!r}, which is a file")
    if args.resume and not (args.out / "checkpoint.safetensors").exists():
        parser.error(f"--resume: expected a checkpoint in --out {str(args.out)!r}, got none")
    try:
        args.device = torch.device(args.device)
        torch.empty(1, device=args.device)
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device: expected a device of this machine, got {args.device!r} ({str(error).splitlines()[0]})")
    try:
        args.sizes = Sizes(args.dim, args.layers, args.heads, args.kv_heads, args.hidden, args.tied)
    except ValueError as error:
        parser.error(str(error))
    args.dtype = DTYPES[args.dtype]
    return args
