"""Capture a whole training step as one graph: what the graph holds, that it gives the same bits, and what cannot be captured.

    python examples/07_capture.py                  # a few seconds

Without a GPU the graph is recorded and replayed: a dry run, with the same checks and errors as a CUDA graph. Its time means
nothing, and is left out. Prints two tables: the captured step beside the eager one, and three small faults that `check_capturable`
finds, with its message for each. Draws how many kernels of the graph are the forward's, the backward's and the optimiser's.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from digits.flags import parsed, parser_of
from torch import Tensor

from funcops import (
    ActivationConfig,
    ChainConfig,
    CrossEntropyConfig,
    DropoutConfig,
    LinearConfig,
    Needs,
    Step,
    WithExtras,
    activation,
    chain,
    cross_entropy,
    donate,
    dropout,
    linear,
    random,
)
from funcops.engine.errors import size_of
from funcops.graphs import check_capturable, graphed
from funcops.optim import AdamWConfig, adamw_init, adamw_update, clip_by_global_norm
from funcops.trees import tensors, tree_map_tensors

NUMBERS = (
    ("width", 64, "width of the hidden layer"),
    ("rows", 32, "rows in a batch"),
    ("steps", 20, "steps of each run, captured and eager"),
)
FEATURES, CLASSES, OPTIMISER = 32, 10, AdamWConfig()


def model_of(width: int) -> ChainConfig:
    return ChainConfig(
        steps=(
            Step("up", linear, LinearConfig(FEATURES, width)),
            Step("act", activation, ActivationConfig(kind="gelu")),
            Step("drop", dropout, DropoutConfig(0.1), takes=("key",)),
            Step("head", linear, LinearConfig(width, CLASSES)),
            Step("loss", cross_entropy, CrossEntropyConfig(), takes=("labels",)),
        ),
        extras=("key", "labels"),
    )


def step_of(model: ChainConfig) -> Callable[..., Any]:
    def step(params: Any, state: Any, x: Tensor, labels: Tensor, key: Tensor, lr: Tensor) -> Any:
        """Do one update, written into params and state; all values that differ from step to step are arguments."""
        loss, residuals = chain.fwd(params, WithExtras(x, {"key": key, "labels": labels}), model, needs=Needs(x=False))
        grads, _ = chain.bwd(donate(residuals), torch.ones_like(loss), model)
        grads, _ = clip_by_global_norm(grads, 1.0)
        new = adamw_update(params, grads, state, OPTIMISER, lr=lr)
        for old, value in zip(tensors((params, state)), tensors(new), strict=True):
            old.copy_(value)
        return params, state, loss

    return step


def kernels_by_part(width: int, rows: int, device: str) -> dict[str, int]:
    """Count the kernels of each part of a step: a graph of the parts up to it has so many more than the graph before. The forward
    keeps its residuals, as one without may take other kernels."""
    model = model_of(width)
    params = chain.init(model, key=random.key(0), device=device, dtype=torch.float32)
    state = adamw_init(params, OPTIMISER)
    x, labels, key, lr = batch(0, rows, device)
    given, needs = WithExtras(x, {"key": key, "labels": labels}), Needs(x=False)

    def forward(params: Any) -> Any:
        return chain.fwd(params, given, model, needs=needs)

    def backward(params: Any) -> Any:
        loss, residuals = forward(params)
        return loss, chain.bwd(donate(residuals), torch.ones_like(loss), model)[0]

    def clipping(params: Any) -> Any:
        loss, grads = backward(params)
        return loss, clip_by_global_norm(grads, 1.0)[0]

    def adamw(params: Any) -> Any:
        loss, grads = clipping(params)
        return loss, adamw_update(params, grads, state, OPTIMISER, lr=lr)

    found, before = dict[str, int](), 0
    for part in (forward, backward, clipping, adamw):
        count = graphed(part, params).report().kernels or 0
        found[part.__name__], before = count - before, count
    return found


def plot(path: Path, parts: dict[str, int], what: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 2.4), layout="constrained")
    left = 0
    for name, count in parts.items():
        bar = axes.barh([0], [count], left=left, label=name)
        axes.bar_label(bar, [str(count)], label_type="center", color="white")
        left += count
    axes.set(xlabel=what, yticks=[], xlim=(0, left), title="One graph holds a whole step")
    axes.legend(ncols=len(parts), loc="upper center", bbox_to_anchor=(0.5, -0.3), frameon=False)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def batch(step: int, rows: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    keys = [random.fold_in(random.key(i, device=device), step) for i in range(3)]
    x = random.normal(keys[0], (rows, FEATURES))
    labels = (random.uniform(keys[1], (rows,)) * CLASSES).long()
    return x, labels, keys[2], torch.tensor(1e-3, device=device)


def run(step: Callable[..., Any], start: Any, batches: list[Any]) -> tuple[Any, list[float], list[Tensor]]:
    """Run all batches; return params and state after them, the milliseconds of each step, and the losses."""
    trees, times, losses = start, [], []
    for one in batches:
        began = time.perf_counter()
        *trees, loss = step(*trees, *one)
        if loss.is_cuda:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
        losses.append(loss)
    return trees, times, losses


def captured_beside_eager(width: int, rows: int, steps: int, device: str) -> str:
    model = model_of(width)
    params = chain.init(model, key=random.key(0), device=device, dtype=torch.float32)
    start = params, adamw_init(params, OPTIMISER)
    own = tree_map_tensors(torch.clone, start)
    batches = [batch(i, rows, device) for i in range(steps)]
    step = step_of(model)
    replay = graphed(step, *own, *batches[0], inputs={"0": "donated", "1": "donated"})
    found = replay.report()
    eager, eager_ms, _ = run(step, start, batches)
    graph, graph_ms, losses = run(replay, own, batches)
    same = all(torch.equal(a, b) for a, b in zip(tensors(eager), tensors(graph), strict=True))
    rows_of_table = [
        ("backend", "", found.backend),
        *([("ms a step, median", *(f"{statistics.median(ms):.2f}" for ms in (eager_ms, graph_ms)))] if device == "cuda" else []),
        ("kernels (operators, where there is no GPU)", "", f"{found.kernels:,}" if found.kernels else "not known"),
        ("copied inputs", "", size_of(found.input_bytes)),
        ("outputs", "", size_of(found.output_bytes)),
        ("pool", "", size_of(found.pool_bytes)),
        (f"loss of step {steps}", "", f"{float(losses[-1]):.4f}"),
        ("params and state at the end", "", "the same bits" if same else "OTHER BITS"),
    ]
    return "\n".join([f"{'':44}{'step':>10}{'captured':>18}", *(f"{a:44}{b:>10}{c:>18}" for a, b, c in rows_of_table)])


def clips(x: Tensor) -> Tensor:
    norm = x.norm()
    return x / norm if norm > 1 else x


def picks(x: Tensor) -> Tensor:
    return x[x > 0].sum()


def draws(x: Tensor) -> Tensor:
    return x + torch.randn(x.shape)


def faults() -> str:
    lines = [f"{'function':10}{'what it is':20}message"]
    for function in (clips, picks, draws):
        for fault in check_capturable(function, torch.linspace(-1, 2, 16)):
            lines.append(f"{function.__name__:10}{fault.kind:20}{fault.message}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    args = parsed(parser_of("07_capture.py", "Capture a training step as one graph.", NUMBERS), argv, NUMBERS)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(captured_beside_eager(args.width, args.rows, args.steps, device))
    print(f"\nwhat no graph can hold\n{faults()}")
    plot(args.plot, kernels_by_part(args.width, args.rows, device), "kernels" if device == "cuda" else "operators")
    print(f"wrote {args.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
