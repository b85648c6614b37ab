"""Map where 8 and 4 bits cost precision: the rounding error of every linear layer of a language model, by recipe.

    python examples/06_fp8_error_map.py                  # a quarter of a minute

Trains the model of train_lm.py for some steps, so that its weights have left their random start. Then `quantization_report`
measures each recipe's errors in the three products of each layer: y = x w^T, dx = dy w, dw = dy^T x. Draws the relative errors as a
map, a row for each layer. Prints the worst layer of each recipe, and the steps over a limit, which `with_recipe(..., skip=)` would
leave out. Scales come from the current tensors, so `fp8_delayed` has the errors of `fp8_current`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from digits.flags import parsed, parser_of
from lm.data import batch, load_corpus
from lm.flags import RECIPES
from lm.model import described, init, model, model_x
from torch import Tensor

from funcops import Needs, WithExtras, chain, donate, quantization_report
from funcops.low_precision.report import QuantizationReport
from funcops.models import DecoderConfig
from funcops.optim import AdamWConfig, adamw_init, adamw_update

NUMBERS = (
    ("steps", 100, "training steps before the report"),
    ("layers", 4, "blocks"),
    ("dim", 128, "width, a multiple of 4"),
    ("context", 64, "tokens in a row"),
    ("rows", 8, "rows in a batch"),
)
PRODUCTS = ("y", "dx", "dw")


def trained(cfg: DecoderConfig, data: Tensor, steps: int, rows: int) -> tuple[Any, WithExtras]:
    """Trained params, and a batch that they have not seen."""
    whole, params, optimiser = model(cfg), init(cfg, seed=0, dtype=torch.float32, device="cpu"), AdamWConfig()
    state = adamw_init(params, optimiser)

    def inputs(step: int) -> WithExtras:
        return model_x(cfg, *batch(data, step=step, seed=0, size=rows, context=cfg.context), torch.float32)

    for step in range(steps):
        loss, residuals = chain.fwd(params, inputs(step), whole, needs=Needs(x=False))
        grads, _ = chain.bwd(donate(residuals), torch.ones_like(loss), whole)
        params, state = adamw_update(params, grads, state, optimiser, lr=2e-3, in_place=True)
    return params, inputs(steps)


def short(path: str) -> str:
    """The path of a layer, or of a step in all blocks, without the parts that all paths share."""
    return path.removeprefix("blocks.").removeprefix("*.").replace("attn.qkv.", "")


def table(found: dict[str, QuantizationReport], limit: float) -> str:
    lines = [f"{'recipe':13}{'y':>8}{'dx':>8}{'dw':>8}  {'worst':16}steps over {limit:.0%}"]
    for name, one in found.items():
        means = [sum(getattr(row, product) for row in one.rows) / len(one.rows) for product in PRODUCTS]
        worst = max(one.rows, key=lambda row: row.worst)
        over = one.over(limit)
        steps = "all" if len(over) == len({row.step for row in one.rows}) else " ".join(map(short, over)) or "none"
        lines.append(f"{name:13}{''.join(f'{mean:8.2%}' for mean in means)}  {short(worst.path):16}{steps}")
    return "\n".join([*lines, "y, dx, dw: the mean over layers of the relative error, in norm"])


def draw(found: dict[str, QuantizationReport], path: Path | None = None) -> Any:
    """Draw the figure, and write it to `path` if given."""
    from matplotlib.figure import Figure

    layers = [short(row.path) for row in next(iter(found.values())).rows]
    figure = Figure(figsize=(9, 1.6 + 0.16 * len(layers)), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    maps = {product: [[getattr(row, product) for row in one.rows] for one in found.values()] for product in PRODUCTS}
    most = max(error for columns in maps.values() for column in columns for error in column)
    for axes, product in zip(panels, PRODUCTS, strict=True):
        image = axes.imshow(list(zip(*maps[product], strict=True)), aspect="auto", cmap="magma_r", vmin=0, vmax=most)
        axes.set_xticks(range(len(found)), list(found), rotation=40, ha="right", fontsize=7)
        axes.set_yticks(range(len(layers)), layers, fontsize=6)
        axes.set_title(f"error of {product}", fontsize=9)
    bar = figure.colorbar(image, ax=panels, format=lambda value, _: f"{value:.0%}")
    bar.ax.tick_params(labelsize=7)
    if path is not None:
        figure.savefig(path, dpi=100)
    return figure


def main(argv: list[str] | None = None) -> int:
    parser = parser_of("06_fp8_error_map.py", "The rounding error of every linear layer, by recipe.", NUMBERS)
    parser.add_argument("--text", help="a file or a folder (default: the standard library's own sources)")
    parser.add_argument("--limit", type=float, default=0.05, help="error over which a step is named (default: %(default)s)")
    args = parsed(parser, argv, NUMBERS)
    if not args.limit > 0:
        parser.error(f"--limit: expected a number above 0, got {args.limit}")
    try:
        cfg = described(dim=args.dim, layers=args.layers, heads=2, hidden=2 * args.dim, context=args.context)
        data = load_corpus(args.text, context=args.context).train
    except ValueError as error:  # the text's errors too
        parser.error(str(error))
    params, x = trained(cfg, data, args.steps, args.rows)
    found = {name: quantization_report(params, x, model(cfg), recipe()) for name, recipe in RECIPES.items()}
    print(table(found, args.limit))
    draw(found, args.plot)
    print(f"wrote {args.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
