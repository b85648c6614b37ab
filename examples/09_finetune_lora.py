"""Fine-tune a small language model with LoRA, from a checkpoint on disk that the program makes itself on its first run.

    python examples/09_finetune_lora.py                  # under a minute on two cores
    python examples/09_finetune_lora.py --steps 500      # goes on where that run ended
    python examples/09_finetune_lora.py --weights nf4 --folder qlora        # QLoRA: the frozen layers in 4 bits

The base model learns the standard library's sources, a byte at a time. Its task is then the same text in upper case, which it has
hardly seen: only the adapters learn it. The program writes to FOLDER `base.safetensors`, every few steps a file from which the next
run resumes, and at the end the adapters in PEFT's format. Last it draws the loss, and prints a table: the held-out loss before and
after, the bytes that a step keeps for its backward, and the size of the trained params.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lm.data import TextError, batch, load_corpus, windows
from lm.model import described, init, model, model_x
from torch import Tensor

from funcops import ChainConfig, Needs, WithExtras, chain, checkpoint, donate, random, report
from funcops.engine.errors import CheckpointError
from funcops.lora import adapter, load_adapter, lora_init, lora_needs, merge, save_adapter, with_adapter, with_lora
from funcops.low_precision import NF4, dense, quantize_weights, with_weight_only
from funcops.optim import AdamWConfig, AdamWState, adamw_init, adamw_update
from funcops.trees import nbytes, tensors

CONTEXT, ROWS = 48, 8
DECODER = described(dim=64, layers=2, heads=2, hidden=128, context=CONTEXT)
TARGETS = ("*.proj", "*.out", "*.up", "*.down")
OPTIMISER = AdamWConfig(weight_decay=0.0)
EVERY = 50  # steps between two saves
AVERAGED = 20  # losses of batches for each point of the picture


class Run(NamedTuple):
    """The values that do not change while adapters learn. `params`: with the adapters at the start of the run; `merging`: the
    config for merging them, of float weights."""

    cfg: ChainConfig
    base: ChainConfig
    merging: ChainConfig
    params: Any
    data: Tensor
    held_out: Tensor
    lr: float


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="09_finetune_lora.py", description="Fine-tune a small language model with LoRA.")
    parser.add_argument("--folder", type=Path, default=Path("lora"), help="folder of the checkpoints (default: %(default)s)")
    parser.add_argument("--weights", choices=("float32", "nf4"), default="float32", help="how the frozen layers are stored")
    parser.add_argument("--text", help="a file or a folder (default: the standard library's own sources)")
    for name, value, what in (
        ("base-steps", 400, "training steps of the base model, if FOLDER has none yet"),
        ("steps", 300, "training steps of the adapters, including earlier runs"),
        ("rank", 8, "rank of the adapters"),
        ("alpha", 16, "the adapters' factor, times the rank"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{what} (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=5e-3, help="learning rate of the adapters (default: %(default)s)")
    args = parser.parse_args(argv)
    for name in ("base_steps", "steps", "rank", "alpha"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1, got {getattr(args, name)}")
    if not 0 < args.lr < 1:
        parser.error(f"--lr: expected a number between 0 and 1, got {args.lr}")
    return args


def upper(text: Tensor) -> Tensor:
    """The bytes of text with letters in upper case."""
    return torch.where((text >= ord("a")) & (text <= ord("z")), text - 32, text)


def inputs(params: Any, x: Tensor, labels: Tensor) -> WithExtras:
    return model_x(DECODER, x, labels, params["embed"].weight.dtype)


def loss_of(params: Any, cfg: ChainConfig, data: Tensor) -> float:
    x, labels = windows(data, count=64, context=CONTEXT)
    return float(chain.fwd(params, inputs(params, x, labels), cfg, needs=Needs.NONE)[0])


def base_model(args: argparse.Namespace, data: Tensor) -> Any:
    """The params of the base: read if the file exists, otherwise all trained on `data`, and written."""
    path, cfg = args.folder / "base.safetensors", model(DECODER)
    params = init(DECODER, seed=0, dtype=torch.float32, device="cpu")
    if path.is_file():
        return checkpoint.load(path, like=params)
    state = adamw_init(params, OPTIMISER)
    for step in range(args.base_steps):
        x, labels = batch(data, step=step, seed=0, size=ROWS, context=CONTEXT)
        loss, residuals = chain.fwd(params, inputs(params, x, labels), cfg, needs=Needs(x=False))
        grads, _ = chain.bwd(donate(residuals), torch.ones_like(loss), cfg)
        params, state = adamw_update(params, grads, state, OPTIMISER, lr=3e-3, in_place=True)
    args.folder.mkdir(parents=True, exist_ok=True)
    checkpoint.save(params, path)
    return params


def train_step(params: Any, state: AdamWState, step: int, run: Run) -> tuple[Any, AdamWState, Tensor]:
    """Do one step; return params with new adapters and otherwise the same tensors, the state, and the loss."""
    x, labels = batch(run.data, step=step, seed=1, size=ROWS, context=CONTEXT)
    loss, residuals = chain.fwd(params, inputs(params, x, labels), run.cfg, needs=lora_needs(run.cfg))
    grads, _ = chain.bwd(donate(residuals), torch.ones_like(loss), run.cfg)
    own, state = adamw_update(adapter(params, run.cfg), adapter(grads, run.cfg), state, OPTIMISER, lr=run.lr)
    return with_adapter(params, own, run.cfg), state, loss


def resumed(path: Path, run: Run) -> tuple[Any, AdamWState, int]:
    """Params with adapters, the optimiser's state and the steps done, read from the file if it exists."""
    own = adapter(run.params, run.cfg)
    state = adamw_init(own, OPTIMISER)
    if not path.is_file():
        return run.params, state, 0
    found = checkpoint.load(path, like={"adapter": own, "optimiser": state})
    done = int(checkpoint.read_metadata(path)["step"])
    return with_adapter(run.params, found["adapter"], run.cfg), found["optimiser"], done


def fine_tune(args: argparse.Namespace, run: Run) -> tuple[int, list[float]]:
    """Train the adapters, and write them; return the steps of earlier runs, and the loss of each step of this one."""
    path = args.folder / "resume.safetensors"
    params, state, done = resumed(path, run)
    if done:
        print(f"goes on after step {done}")
    losses = []
    for step in range(done, args.steps):
        params, state, loss = train_step(params, state, step, run)
        losses.append(float(loss))
        if (step + 1) % EVERY == 0 or step + 1 == args.steps:
            print(f"step {step + 1:4d}  loss {losses[-1]:.3f}")
            now = {"adapter": adapter(params, run.cfg), "optimiser": state}
            checkpoint.save(now, path, metadata={"step": str(step + 1)})
    save_adapter(args.folder / "adapter", params, run.cfg, base="base.safetensors")
    return done, losses


def plot(path: Path, done: int, losses: list[float], held_out: tuple[float, float]) -> None:
    """Draw the loss of batches, averaged, between the held-out losses of the base and with adapters."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parts = [losses[i : i + AVERAGED] for i in range(0, len(losses), AVERAGED)]
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    at = [done + AVERAGED * i + (len(part) + 1) / 2 for i, part in enumerate(parts)]
    axes.plot(at, [sum(part) / len(part) for part in parts], marker=".", label=f"batches, the mean of {AVERAGED}")
    axes.axhline(held_out[0], linestyle="--", color="gray", label="held-out text, base")
    axes.axhline(held_out[1], linestyle="--", color="tab:green", label="held-out text, with adapters")
    axes.set(xlabel="step", ylabel="nats a byte", title="Adapters of a frozen model learn text in upper case")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def table(args: argparse.Namespace, run: Run) -> tuple[str, tuple[float, float]]:
    """Losses on held-out text, bytes and sizes: for the base, with the written adapters, and merged; and the first two losses."""
    tuned = load_adapter(args.folder / "adapter", run.params, run.cfg)
    base, merged = (merge(dense(p), run.merging) for p in (run.params, tuned))  # initial adapters have b = 0: this is the base
    x, labels = batch(run.data, step=0, seed=1, size=ROWS, context=CONTEXT)
    x = inputs(base, x, labels)
    kept = {
        "every weight": report(chain.fwd(base, x, run.base, needs=Needs(x=False))[1], base, x).kept_bytes,
        "LoRA": report(chain.fwd(tuned, x, run.cfg, needs=lora_needs(run.cfg))[1], tuned, x).kept_bytes,
    }
    own = adapter(tuned, run.cfg)
    numbers = {name: sum(t.numel() for t in tensors(tree)) for name, tree in (("every weight", base), ("LoRA", own))}
    file = (args.folder / "adapter" / "adapter_model.safetensors").stat().st_size
    losses = [loss_of(*pair, run.held_out) for pair in ((base, run.base), (tuned, run.cfg), (merged, run.base))]
    lines = [
        ("held-out loss, upper case", f"{losses[0]:.3f}", f"{losses[1]:.3f}"),
        ("the same, merged", "", f"{losses[2]:.3f}"),
        ("numbers that learn", f"{numbers['every weight']:,}", f"{numbers['LoRA']:,}"),
        ("KiB of weights", f"{nbytes(base) / 1024:,.0f}", f"{nbytes(tuned) / 1024:,.0f}"),
        ("KiB of the file", f"{nbytes(base) / 1024:,.0f}", f"{file / 1024:,.0f}"),
        ("KiB of AdamW's state", f"{2 * nbytes(base) / 1024:,.0f}", f"{2 * nbytes(own) / 1024:,.0f}"),
        ("KiB that a step keeps for its backward", f"{kept['every weight'] / 1024:,.0f}", f"{kept['LoRA'] / 1024:,.0f}"),
    ]
    said = [f"{'':40}{'base':>12}{'LoRA':>12}", *(f"{what:40}{one:>12}{other:>12}" for what, one, other in lines)]
    return "\n".join(said), (losses[0], losses[1])


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        corpus = load_corpus(args.text, context=CONTEXT)
        params, base = base_model(args, corpus.train), model(DECODER)
        frozen = base
        if args.weights == "nf4":
            frozen = with_weight_only(base, NF4(double=True), skip=("head",))
            params = quantize_weights(params, frozen)
        cfg, merging = (with_lora(one, args.rank, TARGETS, alpha=args.alpha) for one in (frozen, base))
        params = lora_init(params, cfg, key=random.key(0))
        run = Run(cfg, base, merging, params, upper(corpus.train), upper(corpus.held_out), args.lr)
        done, losses = fine_tune(args, run)
    except (TextError, CheckpointError) as error:
        print(f"09_finetune_lora.py: {error}", file=sys.stderr)
        return 2
    said, held_out = table(args, run)
    print(said)
    if losses:
        plot(args.folder / "loss.png", done, losses, held_out)
        print(f"wrote {args.folder / 'loss.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
