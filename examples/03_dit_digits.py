"""A diffusion transformer (DiT, arXiv:2212.09748) learns to draw handwritten digits: scikit-learn's, of 8 x 8 pixels.

    python examples/03_dit_digits.py                  # under half a minute

Two chains are joined by hand. The conditioner computes from the time and the requested digit a scale and a shift for each norm of
the body, and a `modulate` after the norm applies them. They are extras of the body: their gradients are returned with the input
gradient, and are the conditioner's dy. The model learns the velocity from images to noise (a rectified flow, arXiv:2209.03003):

    x_t = (1 - t) image + t noise        loss = mean (model(x_t, t, digit) - (noise - image))^2

Draws digits from noise in a few steps of Euler's method, and prints for how many of them the nearest held-out image shows the
requested digit.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from digits.data import CLASSES, SIDE, Digits, MissingPackage, load, rows
from digits.flags import parsed, parser_of
from digits.model import GRID, PATCH, PIXELS, TOKENS, WIDTH, attend, mlp, plain_norm, tokens
from torch import Tensor

from funcops import (
    ActivationConfig,
    ChainConfig,
    LinearConfig,
    ModulateConfig,
    Needs,
    ParallelConfig,
    SkipConfig,
    Step,
    UnpatchifyConfig,
    WithExtras,
    activation,
    chain,
    donate,
    linear,
    modulate,
    parallel,
    random,
    skip,
    unpatchify,
)
from funcops.optim import AdamWConfig, adamw_init, adamw_update, ema_init, ema_update, warmup_cosine
from funcops.trees import tree_map_with_path

NUMBERS = (
    ("steps", 800, "of training"),
    ("batch", 64, "images in a step"),
    ("layers", 2, "blocks"),
    ("euler", 20, "steps from noise to an image"),
    ("samples", 5, "images drawn of each digit"),
)
OPTIMISER = AdamWConfig(weight_decay=0.0)
PEAK, DECAY, GUIDANCE, UNASKED = 3e-3, 0.99, 2.0, 0.1
FREQUENCIES = 16
CONDITION = 2 * FREQUENCIES + CLASSES


class Model(NamedTuple):
    """The two chains. After positions, the extras of `body` are the outputs of `conditioner`, `names`, in its order."""

    conditioner: ChainConfig
    body: ChainConfig
    names: tuple[str, ...]


def modulated(name: str) -> tuple[Step, ...]:
    """A norm, and a `modulate` that applies the condition to its output."""
    return plain_norm(), Step("modulate", modulate, ModulateConfig(), takes=(f"{name}_scale", f"{name}_shift"))


def model_of(layers: int) -> Model:
    parts = {f"{part}{i}": make for i in range(layers) for part, make in (("attn", attend), ("mlp", mlp))}
    blocks = [Step(name, skip, SkipConfig(chain, make(*modulated(name)))) for name, make in parts.items()]
    head = (
        *modulated("last"),
        Step("head", linear, LinearConfig(WIDTH, PIXELS)),
        Step("image", unpatchify, UnpatchifyConfig(PATCH, GRID)),
    )
    names = tuple(f"{norm}_{part}" for norm in (*parts, "last") for part in ("scale", "shift"))
    branches = tuple(Step(name, linear, LinearConfig(WIDTH, WIDTH)) for name in names)
    conditioner = ChainConfig(
        steps=(
            Step("embed", linear, LinearConfig(CONDITION, WIDTH)),
            Step("act", activation, ActivationConfig(kind="silu")),
            Step("parts", parallel, ParallelConfig(branches=branches)),
        )
    )
    return Model(conditioner, ChainConfig(steps=(*tokens(), *blocks, *head), extras=("positions", *names)), names)


def init(model: Model) -> dict[str, Any]:
    """Params whose modulations, block outputs and head are zero, so that each block starts as the identity."""
    params = {
        "conditioner": chain.init(model.conditioner, key=random.key(2), dtype=torch.float32),
        "body": chain.init(model.body, key=random.key(3), dtype=torch.float32),
    }

    def start(path: str, t: Tensor | None) -> Tensor | None:
        zero = path.startswith("conditioner.parts.") or path.split(".")[-2] in ("out", "down", "head")
        return torch.zeros_like(t) if t is not None and zero else t

    return tree_map_with_path(start, params)


def condition(t: Tensor, asked: Tensor) -> Tensor:
    """The condition [B, 42]: sines and cosines of the time, and the requested digit, one-hot (-1, any digit: zeros)."""
    angles = t[:, None] * torch.exp(torch.linspace(0, math.log(1000), FREQUENCIES))
    return torch.cat([angles.sin(), angles.cos(), (asked[:, None] == torch.arange(CLASSES)).float()], dim=-1)


def velocity(params: Any, x: Tensor, given: Tensor, model: Model, needs: Needs) -> tuple[Tensor, tuple[Any, Any]]:
    """The model's y, and the residuals of both its ops."""
    parts, of_parts = chain.fwd(params["conditioner"], given, model.conditioner, needs=needs)
    extras = {"positions": torch.arange(TOKENS), **dict(zip(model.names, parts, strict=True))}
    wanted = Needs(x=tuple(f"extras.{name}" for name in model.names)) if needs else needs
    y, of_body = chain.fwd(params["body"], WithExtras(x, extras), model.body, needs=wanted)
    return y, (of_parts, of_body)


def gradients(residuals: tuple[Any, Any], dy: Tensor, model: Model) -> dict[str, Any]:
    """The gradients of both chains; the body's gradients of scales and shifts are the conditioner's dy."""
    of_parts, of_body = residuals
    body, dx = chain.bwd(donate(of_body), dy, model.body)
    dparts = tuple(dx.extras[name] for name in model.names)
    conditioner, _ = chain.bwd(donate(of_parts), dparts, model.conditioner)
    return {"conditioner": conditioner, "body": body}


def train(digits: Digits, model: Model, steps: int, size: int) -> tuple[Any, list[float]]:
    """Train; return the running mean of the params, and the loss of each step."""
    params = init(model)
    state, average, losses = adamw_init(params, OPTIMISER), ema_init(params), []
    for step in range(steps):
        chosen = rows(digits, step, size)
        keys = random.split(random.fold_in(random.key(4), step), 3)
        images, t = digits.images[chosen], random.uniform(keys[0], (size,))
        noise = random.normal(keys[1], tuple(images.shape))
        asked = torch.where(random.uniform(keys[2], (size,)) < UNASKED, -1, digits.labels[chosen])
        at = t[:, None, None, None]
        y, residuals = velocity(params, (1 - at) * images + at * noise, condition(t, asked), model, Needs(x=False))
        off = y - (noise - images)
        grads = gradients(residuals, 2 * off / off.numel(), model)
        lr = warmup_cosine(step, peak=PEAK, warmup=min(50, steps), total=steps)
        params, state = adamw_update(params, grads, state, OPTIMISER, lr=lr, in_place=True)
        average = ema_update(average, params, min(DECAY, (1 + step) / (10 + step)))
        losses.append(float(off.square().mean()))
    return average, losses


def sample(params: Any, model: Model, asked: Tensor, euler: int) -> Tensor:
    """Draw images [N, 1, 8, 8] of the requested digits from noise. The digit's contribution to the velocity counts twice (guidance,
    arXiv:2207.12598)."""
    x, count = random.normal(random.key(5), (len(asked), 1, SIDE, SIDE)), len(asked)
    both = torch.cat([asked, torch.full_like(asked, -1)])
    for i in range(euler):
        t = torch.full((2 * count,), 1 - i / euler)
        y, _ = velocity(params, torch.cat([x, x]), condition(t, both), model, Needs.NONE)
        told, plain = y.split(count)
        x = x - (plain + GUIDANCE * (told - plain)) / euler
    return x


def nearest(digits: Digits, images: Tensor) -> Tensor:
    """The digit of the nearest held-out image, for each image."""
    return digits.held_out_labels[torch.cdist(images.flatten(1), digits.held_out.flatten(1)).argmin(-1)]


def draw(digits: Digits, images: Tensor, losses: list[float], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), layout="constrained")
    halves: Any = figure.subfigures(1, 2, width_ratios=(1, 1.3))
    left, right = halves
    axes = left.add_subplot()
    axes.plot(losses, linewidth=0.6)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("mean squared error")
    axes.set_xlabel("step")
    axes.set_title("loss of a batch", fontsize=9)
    count = len(images) // CLASSES
    true = [digits.held_out[digits.held_out_labels == digit][0, 0] for digit in range(CLASSES)]
    apart = [torch.nn.functional.pad(one, (1, 1, 1, 1), value=-1) for one in (*images[:, 0], *true)]
    columns = [torch.cat([*apart[digit * count : (digit + 1) * count], apart[len(images) + digit]]) for digit in range(CLASSES)]
    axes = right.add_subplot()
    axes.imshow(torch.cat(columns, dim=1).numpy(), cmap="gray_r", vmin=-1, vmax=1)
    axes.axhline(count * (SIDE + 2) - 0.5, color="C1")
    axes.set_title("drawn from noise; below the line, one of the dataset", fontsize=9)
    axes.axis("off")
    figure.savefig(path, dpi=100)


def main(argv: list[str] | None = None) -> int:
    args = parsed(parser_of("03_dit_digits.py", "Train a diffusion transformer on scikit-learn's digits.", NUMBERS), argv, NUMBERS)
    try:
        digits = load()
    except MissingPackage as error:
        print(f"03_dit_digits.py: {error}", file=sys.stderr)
        return 2
    model = model_of(args.layers)
    params, losses = train(digits, model, args.steps, args.batch)
    asked = torch.arange(CLASSES).repeat_interleave(args.samples)
    images = sample(params, model, asked, args.euler)
    right = int((nearest(digits, images) == asked).sum())
    last = losses[-50:]
    print(f"loss: {losses[0]:.3f} at first, {sum(last) / len(last):.3f} over the last {len(last)} steps")
    print(f"nearest to a digit of the kind asked for: {right} of {len(asked)}")
    draw(digits, images, losses, args.plot)
    print(f"wrote {args.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
