"""Train a small Llama-style decoder on bytes of text, with a functional loop: no autograd, no nn.Module.

    loss, residuals = chain_fwd(params, x, model)
    grads, _ = chain_bwd(donate(residuals), dloss, model)
    params, state = adamw_update(params, grads, state, cfg)

Writes loss.png, metrics.csv and a checkpoint to --out, and ends with a sample of text. `--help` lists the flags.
"""

from __future__ import annotations

import functools
import math
import signal
import sys
import time
from typing import Any

import torch
from lm.check import largest_relative_error
from lm.data import TextError, batch, load_corpus, trigram_loss, windows
from lm.flags import parse
from lm.model import block, init, model, predictor, rotation
from lm.results import Row, load_run, plot, save_run, text_of
from lm.step import Settings, evaluate, loss_and_grads, train_step
from torch import Tensor
from tqdm import tqdm

from funcops import WithExtras, chain_fwd, report
from funcops.needs import Needs
from funcops.optim import AdamWConfig, adamw_init, decay_mask, warmup_cosine
from funcops.precision import nonfinite
from funcops.trees import cast, tensors

VALIDATION_WINDOWS = 256


def settings_of(args: Any, params: Any) -> Settings:
    return Settings(
        sizes=args.sizes,
        model=model(args.sizes),
        optimiser=AdamWConfig(lr=args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay),
        decay=decay_mask(params, ("*norm.weight",)),
        clip=args.clip,
        dtype=args.dtype,
        delay_wgrad=args.delay_wgrad,
        in_place=not args.compile,
    )


def print_block_report(params: Any, x: Tensor, args: Any) -> None:
    """What one block keeps for its backward."""
    compute = cast(params, args.dtype)
    h = torch.zeros((*x.shape, args.sizes.dim), dtype=args.dtype, device=x.device)
    given = WithExtras(h, {"rotation": rotation(x.shape[1], args.sizes, like=h)})
    _, residuals = chain_fwd(compute["blocks"][0], given, block(args.sizes))
    print(f"One block keeps, for its backward:\n{report(residuals, compute['blocks'][0], given)}\n")


def sample(params: Any, prompt: Tensor, args: Any) -> Tensor:
    """`args.sample` bytes drawn at temperature 0.8, each from the last `context` bytes."""
    cfg, compute = predictor(args.sizes), cast({k: v for k, v in params.items() if k != "loss"}, args.dtype)
    generator = torch.Generator().manual_seed(args.seed)
    ids = prompt
    for _ in range(args.sample):
        x = ids[-args.context :][None].to(args.device)
        table = rotation(x.shape[1], args.sizes, like=compute["embed"].weight)
        logits, _ = chain_fwd(compute, WithExtras(x, {"rotation": table}), cfg, needs=Needs.NONE)
        p = (logits[0, -1].float().cpu() / 0.8).softmax(-1)
        ids = torch.cat((ids, torch.multinomial(p, 1, generator=generator)))
    return ids[len(prompt) :]


class Interrupt:
    """Turns Ctrl-C into a flag that the loop reads between steps, so that no step is left half done."""

    def __enter__(self) -> Interrupt:
        self.asked = False
        self.before = signal.signal(signal.SIGINT, self.ask)
        return self

    def ask(self, *_: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *_: Any) -> None:
        signal.signal(signal.SIGINT, self.before)


def train(args: Any) -> int:
    corpus = load_corpus(args.text, context=args.context)
    print(f"{corpus.source}: {len(corpus.train):,} bytes to train on, {len(corpus.held_out):,} held out")
    params = init(args.sizes, seed=args.seed, dtype=torch.promote_types(args.dtype, torch.float32), device=args.device)
    s = settings_of(args, params)
    state = adamw_init(params, s.optimiser)
    kept_settings = {k: str(v) for k, v in vars(args).items() if k not in ("out", "resume", "stop_at", "sample", "delay_wgrad")}
    rows: list[Row] = []
    start = 0
    if args.resume:
        params, state, start, rows = load_run(args.out, params, state, kept_settings)
    draw = functools.partial(batch, corpus.train, seed=args.seed, size=args.batch, context=args.context)
    print(f"{sum(t.numel() for t in tensors(params)):,} parameters, {args.batch * args.context} bytes a step")
    print_block_report(params, draw(step=0)[0].to(args.device), args)
    baseline = trigram_loss(corpus.train, corpus.held_out)
    print(f"baseline: a trigram table gets {baseline:.3f} nats per byte on the held-out text")
    val = [t.to(args.device) for t in windows(corpus.held_out, count=VALIDATION_WINDOWS, context=args.context)]

    step_fn = torch.compile(train_step, fullgraph=True, dynamic=False) if args.compile else train_step
    seconds = rows[-1].seconds if rows else 0.0
    stop_at = args.steps if args.stop_at is None else min(args.stop_at, args.steps)
    with Interrupt() as interrupt, tqdm(total=args.steps, initial=start, unit="step", disable=None) as bar:
        step = start
        while step < stop_at and not interrupt.asked:
            x, labels = (t.to(args.device) for t in draw(step=step))
            lr = warmup_cosine(step, peak=args.lr, warmup=args.warmup, total=args.steps)
            began = time.perf_counter()
            rate = torch.tensor(lr) if args.compile else lr
            params, state, loss_t, norm_t = step_fn(params, state, x, labels, rate, s)
            loss, norm = float(loss_t), float(norm_t)
            seconds += time.perf_counter() - began
            if not math.isfinite(norm):
                where = nonfinite(loss_and_grads(params, x, labels, s)[1]) or "the loss"
                print(f"step {step}: loss {loss}, not finite at {where}; stopped before saving", file=sys.stderr)
                return 1
            step += 1
            val_loss = evaluate(params, *val, s, args.batch * 2) if step % args.eval_every == 0 or step == args.steps else None
            rows.append(Row(step, loss, val_loss, lr, norm, seconds))
            bar.update()
            speed = (step - start) * args.batch * args.context / max(1e-9, seconds - (rows[0].seconds if start else 0.0))
            bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} bytes/s")
            if val_loss is not None:
                tqdm.write(f"step {step}: training loss {loss:.4f}, held-out loss {val_loss:.4f}, {seconds:.1f} s of training")
                save_run(args.out, params, state, step, rows, kept_settings)
    save_run(args.out, params, state, step, rows, kept_settings)
    if step < args.steps:
        print(f"stopped after step {step}; --resume goes on from {args.out / 'checkpoint.safetensors'}")
        return 0
    plot(args.out, rows, baseline)
    print(f"held-out loss {rows[-1].val_loss:.4f} nats per byte after {seconds:.1f} s of training (trigram {baseline:.3f})")
    print(f"wrote {args.out / 'loss.png'}, {args.out / 'metrics.csv'} and {args.out / 'checkpoint.safetensors'}")
    print("sample:\n" + text_of(sample(params, corpus.held_out[:64].long(), args)))
    return 0


def check(args: Any) -> int:
    args.dtype = torch.float64
    corpus = load_corpus(args.text, context=args.context)
    params = init(args.sizes, seed=args.seed, dtype=torch.float64, device="cpu")
    x, labels = batch(corpus.train, step=0, seed=args.seed, size=args.batch, context=args.context)
    error, where = largest_relative_error(params, x, labels, settings_of(args, params), args)
    print(f"largest relative error against plain PyTorch in float64: {error:.2e} (at {where})")
    return 0 if error < 1e-9 else 1


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        return check(args) if args.check else train(args)
    except TextError as error:
        print(f"train_lm.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
