"""Find the best mesh for a decoder on a number of GPUs: a table of the fastest layouts that fit, and a picture of the best
pipeline.

    python examples/plan_parallel.py --gpus 64 --plot best.png
    python examples/plan_parallel.py --gpus 512 --gpu A100 --hidden 8192 --ffn 28672 --layers 80 --heads 64 --batch 512 --fixed tp=8
    python examples/plan_parallel.py --gpus 64 --experts 8 --choices 2 --vocab 32000 --seq 4096 --fixed cp=1 tp=1

The model is described by its sizes (by default an 8B Llama); no model is run. `--fixed` searches only layouts with the given
values; `--why tp=16` says why the meshes of that size are out.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from funcops.schedule import Decoder, Mixture, plan_parallel

SIZES = {"hidden": 4096, "ffn": 14336, "layers": 32, "heads": 32, "kv-heads": 8, "vocab": 128256, "seq": 8192, "batch": 256}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="plan_parallel.py", description="The fastest meshes of a decoder that fit.")
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--gpu", default="H100", help="the kind: A100 or H100 (default: %(default)s)")
    parser.add_argument("--memory", type=float, default=72.0, help="GiB of a GPU that may be used (default: %(default)s)")
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value, help="(default: %(default)s)")
    parser.add_argument("--experts", type=int, default=0, help="of each layer, `ffn` wide; 0: one MLP (default: %(default)s)")
    parser.add_argument("--choices", type=int, default=2, help="experts of a token (default: %(default)s)")
    parser.add_argument("--fixed", nargs="*", default=[], metavar="NAME=VALUE", help="values that a layout must have")
    parser.add_argument("--why", nargs="*", default=[], metavar="NAME=SIZE", help="say why the meshes of these sizes are out")
    parser.add_argument("--show", type=int, default=10, help="rows to print (default: %(default)s)")
    parser.add_argument("--plot", help="a file for the picture of the best pipeline (needs matplotlib)")
    return parser.parse_args(argv)


def pairs(flag: str, given: list[str]) -> dict[str, Any]:
    """`["tp=8"]` as a dict. Raises `ValueError`."""
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--{flag}: expected NAME=VALUE, got {text!r}")
        found[name] = int(value) if value.lstrip("-").isdigit() else value
    return found


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    try:
        mixture = Mixture(args.experts, args.choices) if args.experts else None
        model = Decoder(**{name.replace("-", "_"): getattr(args, name.replace("-", "_")) for name in SIZES}, mixture=mixture)
        fixed, why = pairs("fixed", args.fixed), pairs("why", args.why)
        plan = plan_parallel(model, args.gpus, args.memory * 2**30, args.gpu, fixed=fixed, show=args.show)
        out = plan.why_not(**why) if why else ()
    except (ValueError, TypeError) as error:
        sys.exit(f"plan_parallel.py: {error}")
    print(f"{model.params / 1e9:.1f}B params, {model.batch * model.seq:,} tokens a step")
    print(plan)
    for one in out:
        print(one)
    print(f"\nthe first:\n{plan.best}")
    if args.plot:
        plan.draw(args.plot)
        print(f"its pipeline: {args.plot}")


if __name__ == "__main__":
    main()
