"""Measure what delaying weight gradients costs and gains on one device: the model of train_lm.py, several microbatches per step.

    at once     F0 B0 F1 B1 ...               each weight gradient right after its input gradient
    delayed     F0 I0 F1 I1 ... W0 W1 ...     all weight gradients at the end; pendings wait
    batched     F0 I0 F1 I1 ... W             the same pendings, joined into one product for each weight (`batch_wgrads`)

Prints the time of a step and the most bytes that wait, and draws the bytes over time. On one device delaying alone gains nothing;
in a pipeline it fills the time in which a rank would wait, and it allows to join small products.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lm.data import TextError, batch, load_corpus
from lm.flags import DTYPES
from lm.model import described, init, model, model_x

from funcops import ChainConfig, Ledger, Step, batch_wgrads, chain, donate
from funcops.contract import Needs
from funcops.schedule import Action, Schedule, run
from funcops.trees import cast, paths, tree_map_tensors

NEEDS = Needs(x=False)


class Trace(NamedTuple):
    """One step's gradients, and the seconds and bytes after each action."""

    dparams: Any
    seconds: list[float]
    nbytes: list[int]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="04_delayed_wgrad.py", description="What delaying weight gradients costs and gains on one device."
    )
    for name, value in (
        ("microbatches", 8),
        ("rows", 1),
        ("context", 128),
        ("repeats", 7),
        ("dim", 192),
        ("layers", 4),
        ("heads", 3),
        ("hidden", 512),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument(
        "--dtype", default="bfloat16", choices=DTYPES, help="dtype of the computation; gradients are summed in float32 at least"
    )
    parser.add_argument("--text", help="a file or a folder (default: the standard library's own sources)")
    parser.add_argument(
        "--plot", type=Path, default=Path("04_delayed_wgrad.png"), help="where the picture goes (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    for name in ("microbatches", "rows", "context", "repeats"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: expected at least 1, got {getattr(args, name)}")
    try:
        args.decoder = described(dim=args.dim, layers=args.layers, heads=args.heads, hidden=args.hidden, context=args.context)
    except ValueError as error:
        parser.error(str(error))
    if not args.plot.parent.is_dir():  # before any step
        parser.error(f"--plot: expected a file in a folder that exists, got {str(args.plot)!r}")
    args.dtype = DTYPES[args.dtype]
    return args


def scheduled(actions: list[tuple[str, int]], params: Any, xs: list[Any], cfg: ChainConfig, into: Any) -> Trace:
    """Run a step with the model as one stage, its actions in the order given."""
    schedule = Schedule("one stage", (tuple(Action(0, kind, m) for kind, m in actions),))
    whole = ChainConfig(steps=(Step("model", chain, cfg),), extras=cfg.extras)
    ran = run(schedule, {"model": params}, xs, whole, needs=NEEDS, into={"model": into})
    return Trace(ran.dparams["model"], [e.seconds for e in ran.events], [e.nbytes for e in ran.events])


def batched(params: Any, xs: list[Any], cfg: ChainConfig, into: Any) -> Trace:
    """Run a step as a hand-written loop."""
    seconds, nbytes, start = [], [], time.perf_counter()

    def note(ledger: Ledger) -> None:
        seconds.append(time.perf_counter() - start)
        nbytes.append(ledger.nbytes)

    with Ledger(params, xs) as ledger:
        for m, x in enumerate(xs):
            loss, residuals = chain.fwd(params, x, cfg, needs=NEEDS)
            ledger.keep(f"residuals {m}", residuals)
            note(ledger)
            _, pending = chain.dgrad(donate(ledger.take(f"residuals {m}")), torch.full_like(loss, 1 / len(xs)), cfg)
            ledger.keep(f"pending {m}", pending)
            note(ledger)
        del residuals, pending
        dparams = batch_wgrads(chain, [donate(ledger.take(path)) for path in ledger.waiting], cfg, into=into)
        note(ledger)
    return Trace(dparams, seconds, nbytes)


def orders(count: int) -> dict[str, list[tuple[str, int]]]:
    every = range(count)
    return {
        "at once": [(kind, m) for m in every for kind in "FB"],
        "delayed": [(kind, m) for m in every for kind in "FI"] + [("W", m) for m in every],
    }


def measure(args: argparse.Namespace, data: torch.Tensor) -> dict[str, list[Trace]]:
    """Run the ways in turns, so that noise of the machine affects all alike."""
    cfg, wide = model(args.decoder), torch.promote_types(args.dtype, torch.float32)
    params = cast(init(args.decoder, seed=0, dtype=wide, device="cpu"), args.dtype)
    batches = [batch(data, step=m, seed=0, size=args.rows, context=args.context) for m in range(args.microbatches)]
    xs = [model_x(args.decoder, x, labels, args.dtype) for x, labels in batches]
    ways: dict[str, Callable[[Any], Trace]] = {
        name: lambda into, order=order: scheduled(order, params, xs, cfg, into) for name, order in orders(args.microbatches).items()
    }
    ways["batched"] = lambda into: batched(params, xs, cfg, into)
    found: dict[str, list[Trace]] = {name: [] for name in ways}
    for _ in range(args.repeats + 1):
        for name, way in ways.items():
            found[name].append(way(tree_map_tensors(lambda t: torch.zeros_like(t, dtype=wide), params)))
    return {name: traces[1:] for name, traces in found.items()}


def table(found: dict[str, list[Trace]]) -> str:
    first = next(iter(found.values()))
    lines = [f"{'':10} {'ms a step':>10} {'ratio':>7} {'MiB at most':>12} {'furthest gradient':>18}"]
    for name, traces in found.items():
        times = [trace.seconds[-1] for trace in traces]
        ratio = statistics.median(a / b.seconds[-1] for a, b in zip(times, first, strict=True))
        want = paths(first[0].dparams)
        far = max(
            float((t - want[path]).norm() / want[path].norm()) for path, t in paths(traces[0].dparams).items() if t is not None
        )
        lines.append(
            f"{name:10} {1e3 * statistics.median(times):10.1f} {ratio:7.3f} {max(traces[0].nbytes) / 2**20:12.2f} {far:18.1e}"
        )
    return "\n".join(lines)


def draw(found: dict[str, list[Trace]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, traces in found.items():
        trace = min(traces, key=lambda one: one.seconds[-1])
        axes.step([0.0, *(1e3 * s for s in trace.seconds)], [0.0, *(n / 2**20 for n in trace.nbytes)], where="post", label=name)
    axes.set_xlabel("time in the step, ms")
    axes.set_ylabel("residuals and pendings, MiB")
    axes.set_title("What a step keeps for its backward, the fastest of each way", fontsize=10)
    axes.legend()
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        data = load_corpus(args.text, context=args.context).train
    except TextError as error:
        print(f"04_delayed_wgrad.py: {error}", file=sys.stderr)
        return 2
    found = measure(args, data)
    print(table(found))
    draw(found, args.plot)
    print(f"wrote {args.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
