"""Compare how much work each expert of a mixture gets: a vision transformer on digits, whose MLP is 8 experts, under three routers.

    python examples/08_expert_load.py                  # half a minute

A token goes through the 2 of 8 experts that the router scores highest. The loss of the digits does not make the router use all
experts alike, so something else must: a loss of the router (`RouteConfig(aux=)`, arXiv:2101.03961), or a bias that each step moves
towards an even load (`optim.balance`, arXiv:2408.15664). Prints for each way how many of the held-out digits are read correctly,
and the share of the busiest and of the idlest expert. Draws the load of every expert over the steps, and by digit.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from digits.data import CLASSES, Digits, MissingPackage, load, rows
from digits.flags import parsed, parser_of
from digits.model import TOKENS, WIDTH, attend, plain_norm, reader, with_loss
from torch import Tensor

from funcops import ChainConfig, ExpertsConfig, Needs, RouteConfig, SkipConfig, Step, WithExtras, chain, donate, random, skip
from funcops.models import MoEConfig, moe
from funcops.optim import AdamWConfig, adamw_init, adamw_update, balance, decay_mask, warmup_cosine
from funcops.trees import at, put

NUMBERS = (
    ("steps", 200, "training steps for each router"),
    ("batch", 64, "images in a step"),
    ("experts", 8, "experts, of which each token goes through 2"),
)
TOP_K, HIDDEN = 2, 64
OPTIMISER = AdamWConfig(weight_decay=0.05)
PEAK, RATE, AUX, LAST = 2e-3, 0.01, 0.02, 50
BIAS = "moe.route.bias"


class Result(NamedTuple):
    """A router's result. `over_time`: [steps, experts], the share of each expert, 1 is an even share; `by_digit`: [10, experts],
    the same for the tokens of each held-out digit; `right`: how many held-out digits are read correctly."""

    over_time: Tensor
    by_digit: Tensor
    right: int


def routers(experts: int) -> dict[str, RouteConfig]:
    return {
        "nothing": RouteConfig(experts, TOP_K),
        "a loss": RouteConfig(experts, TOP_K, aux=AUX),
        "a bias": RouteConfig(experts, TOP_K, score="sigmoid", bias=True),
    }


def vit(route: RouteConfig) -> ChainConfig:
    """The model: images to logits, and the router's load and loss."""
    mixture = moe(MoEConfig(route=route, experts=ExpertsConfig(route.experts, dim=WIDTH, hidden=HIDDEN)))
    normed = ChainConfig(steps=(plain_norm(), *mixture.steps), outputs=mixture.outputs)
    blocks = Step("attn", skip, SkipConfig(chain, attend(plain_norm()))), Step("moe", skip, SkipConfig(chain, normed))
    return reader(*blocks, outputs=mixture.outputs)


def shares(counts: Tensor) -> Tensor:
    return counts.float() / counts.float().mean(-1, keepdim=True)


def train(digits: Digits, route: RouteConfig, steps: int, size: int) -> Result:
    cfg = vit(route)
    model, positions = with_loss(cfg), torch.arange(TOKENS)
    params: Any = chain.init(model, key=random.key(2), dtype=torch.float32)
    state, decay, loads = adamw_init(params, OPTIMISER), decay_mask(params), []
    for step in range(steps):
        chosen = rows(digits, step, size)
        x = WithExtras(digits.images[chosen], {"positions": positions, "labels": digits.labels[chosen]})
        y, residuals = chain.fwd(params, x, model, needs=Needs(x=False))
        dy = WithExtras(torch.ones_like(y.main), {"load": None, "loss": torch.ones_like(y.extras["loss"]) if route.aux else None})
        grads, _ = chain.bwd(donate(residuals), dy, model)
        lr = warmup_cosine(step, peak=PEAK, warmup=min(20, steps), total=steps)
        params, state = adamw_update(params, grads, state, OPTIMISER, lr=lr, decay=decay, in_place=True)
        if route.bias:
            params = put(params, BIAS, balance(at(params, BIAS), y.extras["load"], RATE))
        loads.append(y.extras["load"])
    reads = {name: part for name, part in params.items() if name != "loss"}
    right, by_digit = 0, []
    for digit in range(CLASSES):
        x = WithExtras(digits.held_out[digits.held_out_labels == digit], {"positions": positions})
        y, _ = chain.fwd(reads, x, cfg, needs=Needs.NONE)
        right += int((y.main.argmax(-1) == digit).sum())
        by_digit.append(y.extras["load"])
    return Result(shares(torch.stack(loads)), shares(torch.stack(by_digit)), right)


def table(digits: Digits, found: dict[str, Result]) -> str:
    count = len(digits.held_out_labels)
    lines = [f"{'balanced by':12} {f'right of {count}':>13} {'busiest expert':>15} {'idlest expert':>14}"]
    for name, result in found.items():
        late = result.over_time[-LAST:].mean(0)
        lines.append(f"{name:12} {result.right:13d} {float(late.max()):15.2f} {float(late.min()):14.2f}")
    return "\n".join([*lines, f"share of the choices of the last {LAST} steps, 1 for as many as each would get evenly"])


def draw(found: dict[str, Result], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.6), layout="constrained")
    panels = figure.subplots(2, len(found), squeeze=False)
    for (above, below), (name, result) in zip(panels.T, found.items(), strict=True):
        for axes, shown in ((above, result.over_time.T), (below, result.by_digit.T)):
            image = axes.imshow(shown.tolist(), aspect="auto", interpolation="nearest", cmap="RdBu_r", vmin=0, vmax=2)
            axes.tick_params(labelsize=7)
        above.set_title(f"balanced by {name}", fontsize=9)
        above.set_xlabel("step", fontsize=8)
        below.set_xlabel("digit, held out", fontsize=8)
        below.set_xticks(range(CLASSES))
    for axes in panels[:, 0]:
        axes.set_ylabel("expert", fontsize=8)
    bar = figure.colorbar(image, ax=panels, extend="max", label="of an even share")
    bar.ax.tick_params(labelsize=7)
    figure.savefig(path, dpi=90)


def main(argv: list[str] | None = None) -> int:
    parser = parser_of("08_expert_load.py", "The load of the experts of a mixture, under three routers.", NUMBERS)
    args = parsed(parser, argv, NUMBERS)
    if args.experts < TOP_K:
        parser.error(f"--experts: expected at least {TOP_K}, got {args.experts}")
    try:
        digits = load()
    except MissingPackage as error:
        print(f"08_expert_load.py: {error}", file=sys.stderr)
        return 2
    found = {name: train(digits, route, args.steps, args.batch) for name, route in routers(args.experts).items()}
    print(table(digits, found))
    draw(found, args.plot)
    print(f"wrote {args.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
