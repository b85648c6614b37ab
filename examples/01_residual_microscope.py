"""Show what a language model keeps for its backward, tensor by tensor and policy by policy.

    python examples/01_residual_microscope.py                  # a few seconds
    python examples/01_residual_microscope.py --layers 2 --dim 256 --context 512 --table

Runs a small Llama forward and backward under each policy of `funcops.POLICIES`, and lists what it kept with `report`. Draws a block
twice: the bytes of each step by field, under the default policy, and the bytes of each policy by step. Prints how many bytes of the
whole model each policy keeps, and the largest relative error of its gradients against `save_all`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from digits.flags import parsed, parser_of

from funcops import POLICIES, Needs, Policy, RopeConfig, chain, donate, random, report, with_policy
from funcops.engine.errors import size_of
from funcops.engine.residuals.report import Report
from funcops.models import DecoderConfig, decoder, decoder_x
from funcops.trees import paths

NUMBERS = (("dim", 128, "width, a multiple of 4 heads"), ("layers", 2, "blocks"), ("context", 128, "tokens"))
VOCAB, HEADS = 256, 4
DEFAULT = "recompute_elementwise"


def llama(dim: int, layers: int, context: int) -> DecoderConfig:
    size = dim // HEADS
    return DecoderConfig(
        vocab=VOCAB,
        dim=dim,
        layers=layers,
        heads=HEADS,
        kv_heads=HEADS,
        head_size=size,
        hidden=4 * dim,
        context=context,
        rope=RopeConfig(size),
        family="llama",
    )


def looked_at(cfg: DecoderConfig, policies: Mapping[str, Policy] = POLICIES) -> dict[str, tuple[Report, dict[str, Any]]]:
    """The report and the gradients by path, for each policy."""
    model = decoder(cfg, loss=True)
    params = chain.init(model, key=random.key(0), dtype=torch.float32)
    ids = (random.uniform(random.key(1), (1, cfg.context)) * VOCAB).long()
    x = decoder_x(cfg, ids, torch.float32, labels=ids.roll(-1, 1))
    found = {}
    for name, policy in policies.items():
        op = with_policy(chain, policy)
        loss, residuals = op.fwd(params, x, model, needs=Needs(x=False))
        kept = report(residuals, params, x)
        grads, _ = op.bwd(donate(residuals), torch.ones_like(loss), model)
        found[name] = kept, paths(grads)
    return found


def bars(kept: Report, depth: int) -> dict[str, int]:
    """The kept bytes of the first block, by the first `depth` names of the path inside it."""
    found: dict[str, int] = {}
    for row in kept.rows:
        names = row.path.split(".")
        if names[:2] == ["blocks", "0"] and row.bytes:
            inside = names[2 : 2 + depth]
            name = "the block's input" if inside[:1] == ["x"] else ".".join(inside)
            found[name] = found.get(name, 0) + row.bytes
    return found


def table(found: dict[str, tuple[Report, dict[str, Any]]]) -> str:
    want = found["save_all"][1]
    most = found["save_all"][0].kept_bytes
    lines = [f"{'policy':22} {'kept':>12} {'of save_all':>12} {'furthest gradient':>18}"]
    for name, (kept, grads) in found.items():
        off = max(float((t - want[path]).norm() / want[path].norm()) for path, t in grads.items() if t is not None)
        far = "the same bits" if all(t is None or torch.equal(t, want[path]) for path, t in grads.items()) else f"{off:.1e}"
        lines.append(f"{name:22} {size_of(kept.kept_bytes):>12} {kept.kept_bytes / most:>12.1%} {far:>18}")
    return "\n".join(lines)


def stacked(axes: Any, rows: dict[str, dict[str, int]], title: str) -> None:
    """Draw a bar for each row, in KiB, its parts named inside if there is room, and in the legend."""
    names = list(dict.fromkeys(name for parts in rows.values() for name in parts))
    left = [0.0] * len(rows)
    for i, name in enumerate(names):
        widths = [parts.get(name, 0) / 1024 for parts in rows.values()]
        axes.barh(list(rows), widths, left=left, label=name, color=f"C{i % 10}", edgecolor="white", hatch="//" * (i // 10))
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("KiB kept", fontsize=8)
    axes.set_title(title, fontsize=9)
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=6)


def by_field(kept: Report) -> dict[str, dict[str, int]]:
    rows: dict[str, dict[str, int]] = {}
    for path, size in bars(kept, 9).items():
        step, _, field = path.rpartition(".")
        rows.setdefault(step or path, {})[field] = size
    return rows


def draw(found: dict[str, tuple[Report, dict[str, Any]]], path: Path | None = None) -> Any:
    """Draw the figure, and write it to `path` if given."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    stacked(left, by_field(found[DEFAULT][0]), f"a block, by path ({DEFAULT})")
    stacked(right, {name: bars(kept, 2) for name, (kept, _) in found.items()}, "a block, by policy")
    if path is not None:
        figure.savefig(path, dpi=100)
    return figure


def main(argv: list[str] | None = None) -> int:
    parser = parser_of("01_residual_microscope.py", "What a language model keeps for its backward.", NUMBERS)
    parser.add_argument("--table", action="store_true", help="print every tensor that the default policy keeps, too")
    args = parsed(parser, argv, NUMBERS)
    if args.dim % (2 * HEADS):
        parser.error(f"--dim: expected a multiple of {2 * HEADS}, got {args.dim}")
    found = looked_at(llama(args.dim, args.layers, args.context))
    if args.table:
        print(found[DEFAULT][0])
    print(table(found))
    draw(found, args.plot)
    print(f"wrote {args.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
