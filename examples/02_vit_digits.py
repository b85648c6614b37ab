"""A vision transformer (arXiv:2010.11929) learns to read handwritten digits: scikit-learn's, of 8 x 8 pixels.

    python examples/02_vit_digits.py                  # a quarter of a minute

The model is a chain: patches of 2 x 2, a linear layer, position embeddings, blocks, and one linear layer over all tokens. Prints
how many of the held-out digits it reads correctly, by digit, and draws its loss and the digits that it got wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from digits.data import CLASSES, Digits, MissingPackage, load, rows
from digits.flags import parsed, parser_of
from digits.model import TOKENS, attend, mlp, plain_norm, reader, with_loss
from torch import Tensor

from funcops import ChainConfig, Needs, RepeatConfig, SkipConfig, Step, WithExtras, chain, donate, random, repeat, skip
from funcops.optim import AdamWConfig, adamw_init, adamw_update, decay_mask, warmup_cosine

NUMBERS = (("steps", 300, "of training"), ("batch", 64, "images in a step"), ("layers", 2, "blocks"))
OPTIMISER = AdamWConfig(weight_decay=0.05)
PEAK = 2e-3


class Result(NamedTuple):
    losses: list[float]
    logits: Tensor  # for the held-out images


def vit(layers: int) -> ChainConfig:
    """The model: images [B, 1, 8, 8] to logits [B, 10]."""
    block = ChainConfig(
        steps=(Step("attn", skip, SkipConfig(chain, attend(plain_norm()))), Step("mlp", skip, SkipConfig(chain, mlp(plain_norm()))))
    )
    return reader(Step("blocks", repeat, RepeatConfig(chain, block, layers)))


def train(digits: Digits, steps: int, size: int, layers: int) -> Result:
    cfg = vit(layers)
    model, positions = with_loss(cfg), torch.arange(TOKENS)
    params: Any = chain.init(model, key=random.key(2), dtype=torch.float32)
    state, decay, losses = adamw_init(params, OPTIMISER), decay_mask(params), []
    for step in range(steps):
        chosen = rows(digits, step, size)
        x = WithExtras(digits.images[chosen], {"positions": positions, "labels": digits.labels[chosen]})
        loss, residuals = chain.fwd(params, x, model, needs=Needs(x=False))
        grads, _ = chain.bwd(donate(residuals), torch.ones_like(loss), model)
        lr = warmup_cosine(step, peak=PEAK, warmup=min(20, steps), total=steps)
        params, state = adamw_update(params, grads, state, OPTIMISER, lr=lr, decay=decay, in_place=True)
        losses.append(float(loss))
    reads = {name: part for name, part in params.items() if name != "loss"}
    logits, _ = chain.fwd(reads, WithExtras(digits.held_out, {"positions": positions}), cfg, needs=Needs.NONE)
    return Result(losses, logits)


def table(digits: Digits, result: Result) -> str:
    right = result.logits.argmax(-1) == digits.held_out_labels
    lines = ["digit  held out  read right"]
    for digit in range(CLASSES):
        of = right[digits.held_out_labels == digit]
        lines.append(f"{digit:5d}  {len(of):8d}  {int(of.sum()):10d}")
    return "\n".join([*lines, f"{'all':>5}  {len(right):8d}  {int(right.sum()):10d}  ({float(right.float().mean()):.1%})"])


def draw(digits: Digits, result: Result, path: Path) -> None:
    from matplotlib.figure import Figure

    said = result.logits.argmax(-1)
    wrong = (said != digits.held_out_labels).nonzero().flatten().tolist()[:16]
    figure = Figure(figsize=(8, 2.8), layout="constrained")
    halves: Any = figure.subfigures(1, 2)
    left, right = halves
    axes = left.add_subplot()
    axes.plot(result.losses, linewidth=0.8)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("nats")
    axes.set_xlabel("step")
    axes.set_title("loss of a batch", fontsize=9)
    right.suptitle("read wrong: what it is, and what was read", fontsize=9)
    for place, i in enumerate(wrong):
        axes = right.add_subplot(2, 8, place + 1)
        axes.imshow(digits.held_out[i, 0].numpy(), cmap="gray_r")
        axes.set_title(f"{int(digits.held_out_labels[i])}: {int(said[i])}", fontsize=8)
        axes.axis("off")
    figure.savefig(path, dpi=100)


def main(argv: list[str] | None = None) -> int:
    args = parsed(parser_of("02_vit_digits.py", "Train a vision transformer on scikit-learn's digits.", NUMBERS), argv, NUMBERS)
    try:
        digits = load()
    except MissingPackage as error:
        print(f"02_vit_digits.py: {error}", file=sys.stderr)
        return 2
    result = train(digits, args.steps, args.batch, args.layers)
    print(table(digits, result))
    draw(digits, result, args.plot)
    print(f"wrote {args.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
