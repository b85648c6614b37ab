"""Train a small Llama-style decoder on bytes of text, with a functional loop: no autograd, no nn.Module.

    loss, residuals = chain_fwd(params, x, model)
    grads, _ = chain_bwd(donate(residuals), dloss, model)
    params, state = adamw_update(params, grads, state, cfg)

Writes loss.png, metrics.csv and a checkpoint to --out, and ends with a sample of text. `--help` lists the flags.

    torchrun --nproc-per-node 4 examples/train_lm.py --dp 4

trains on several processes, with the losses of one, and can resume from a checkpoint of any number of processes.
"""

from __future__ import annotations

import dataclasses
import math
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from lm.check import largest_relative_error
from lm.data import Corpus, TextError, batch, load_corpus, trigram_loss, windows
from lm.flags import parse
from lm.kept import policy_of, say_what_is_kept, say_what_rounding_does
from lm.model import init, model
from lm.optimiser import first_state, optimiser_of
from lm.profiled import say_profile
from lm.ranks import AXES, Ranks, leave, quiet, started
from lm.results import (
    MANY,
    ONE,
    Row,
    RunError,
    check_writable,
    load_run,
    plot,
    plot_load,
    plot_seen,
    save_run,
    seen_before,
    shares,
    text_of,
    texts,
)
from lm.step import Settings, State, evaluate, loss_and_grads, train_step, written_step
from lm.watched import Seen, lines, watched
from torch import Tensor
from tqdm import tqdm

from funcops import CheckpointError, chain, dist, random
from funcops.contract import Op
from funcops.engine.errors import size_of
from funcops.graphs import graphed
from funcops.low_precision import quantize_params, recipe_init
from funcops.models import SamplingConfig, generate
from funcops.optim import warmup_cosine
from funcops.precision import nonfinite
from funcops.trees import tensors, tree_map_tensors

VALIDATION_WINDOWS = 256
MOST_SKIPPED = 10
FREE = {  # flags that do not change the results of a run
    "out",
    "resume",
    "force",
    "stop_at",
    "sample",
    "delay_wgrad",
    "policy",
    "budget",
    "graph",
    "profile",
    "watch",
    "mesh",
    "overlap",
    "microbatches",
    "schedule",
    "zero",
    *AXES,
}


def settings_of(args: Any, params: Any, ranks: Ranks, op: Op = chain) -> Settings:
    return Settings(
        decoder=args.decoder,
        ranks=ranks,
        model=ranks.model,
        op=op,
        optimiser=optimiser_of(args, params),
        clip=args.clip,
        dtype=args.dtype,
        delay_wgrad=args.delay_wgrad,
        in_place=not args.compile,
        recipe=args.recipe,
        balance=args.balance or 0.0,
    )


def sample(params: Any, prompt: Tensor, args: Any, scales: Any = None) -> Iterator[Tensor]:
    """Draw the next `args.sample` bytes, [1] each, one by one, at temperature 0.8, from the key of --seed. Text may grow beyond the
    context: in every layer a byte sees the last `context` bytes, which the cache holds in a ring."""
    cfg = dataclasses.replace(args.decoder, windows=(args.context,) * args.layers)
    predictor = model(cfg, args.recipe, loss=False)
    without_loss = {k: v for k, v in params.items() if k != "loss"}
    key = random.key(args.seed, device=args.device)
    compute = quantize_params(without_loss, predictor, scales, dtype=args.dtype, columns=False, key=key)
    sampling = SamplingConfig(temperature=0.8)
    return generate(compute, cfg, prompt[None].to(args.device), args.sample, key=key, sampling=sampling, model=predictor)


class Interrupt:
    """Turns Ctrl-C, and SIGTERM, with which schedulers end a job, into a flag that the loop reads between steps, so that every step
    is completed, and saved."""

    def __enter__(self) -> Interrupt:
        self.asked = False
        self.before = {one: signal.signal(one, self.ask) for one in (signal.SIGINT, signal.SIGTERM)}
        return self

    def ask(self, *_: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *_: Any) -> None:
        for one, before in self.before.items():
            signal.signal(one, before)


class Run:
    """A training run: params, state, the steps done, and the function of the next step."""

    def __init__(self, args: Any, corpus: Corpus, ranks: Ranks | None = None) -> None:
        ranks = Ranks.one(args) if ranks is None else ranks
        dtype = torch.promote_types(args.dtype, torch.float32)
        self.args, self.corpus, self.ranks = args, corpus, ranks
        self.params = ranks.init(args, dtype)
        self.count = sum(t.numel() for t in tensors(chain.init(model(args.decoder), device="meta")))
        op, self.policy = policy_of(args, ranks)
        self.s = settings_of(args, self.params, ranks, op)
        self.done, self.skipped, self.rows, self.seen = 0, 0, list[Row](), list[Seen]()
        self.state = State(first_state(ranks.shards(self.params), self.s.optimiser), self.first_scales())
        self.seconds = 0.0
        if args.resume:
            like = tree_map_tensors(lambda t: t.to("meta"), (self.params, self.state.optimiser))
            self.params, self.state = None, State(None, self.state.scales)  # freed, before as much is read
            like = like[0], State(like[1], self.state.scales)
            loaded = load_run(args.out, *like, kept_flags(args), ranks, args.device)
            self.params, self.state, self.done, self.rows = loaded
            self.seen = seen_before(args.out, self.done)
            self.seconds = self.rows[-1].seconds if self.rows else 0.0
        self.val = [t.to(args.device) for t in windows(corpus.held_out, count=VALIDATION_WINDOWS, context=args.context)]
        self.step_fn = train_step
        self.captured: Any = None
        self.baseline = trigram_loss(corpus.train, corpus.held_out) if ranks.first else math.nan

    def first_scales(self) -> Any:
        """The state of a recipe before the first step: {}, as that step measures the first scales. A step in a graph has
        scales from the start: they are from a step that is thrown away."""
        if self.s.recipe is None or not self.s.recipe.delayed:
            return {}
        if self.args.resume:
            return recipe_init(self.s.model, self.params)  # the shapes of those that are read
        if not (self.args.compile or self.args.graph):
            return {}
        return loss_and_grads(self.params, *self.batch(), self.s, {}).scales

    def batch(self) -> tuple[Tensor, Tensor]:
        a = self.args
        x, labels = self.ranks.rows(*batch(self.corpus.train, step=self.done, seed=a.seed, size=a.batch, context=a.context))
        return x.to(a.device), labels.to(a.device)

    def key(self) -> Tensor | None:
        """The random key of the next step, for a recipe that rounds stochastically."""
        a = self.args
        return None if a.recipe is None or not a.recipe.stochastic else self.ranks.key(a.seed, self.done, a.device)

    def advance(self) -> Row:
        """Do one step. Raises `FloatingPointError` after ten steps in a row that were not finite."""
        a, (x, labels) = self.args, self.batch()
        lr = warmup_cosine(self.done, peak=a.lr, warmup=a.warmup, total=a.steps)
        watches = a.watch is not None and (self.done + 1) % a.watch == 0
        before = (tree_map_tensors(torch.clone, self.params), self.state.scales) if watches else None
        began = time.perf_counter()
        self.params, self.state, loss, norm, load = self.step(x, labels, lr)
        row = Row(self.done + 1, float(loss), None, lr, float(norm), self.seconds + time.perf_counter() - began)
        row = row._replace(load=None if load is None else load.tolist())
        if before is not None:
            seen = watched(row.step, before[0], self.params, x, labels, self.s, before[1], self.key())
            self.seen += seen
            for line in lines(seen):
                tqdm.write(f"  step {row.step}: {line}")
            self.draw_seen()
        self.skipped = 0 if math.isfinite(row.norm) else self.skipped + 1
        if self.skipped:
            where = nonfinite(loss_and_grads(self.params, x, labels, self.s, self.state.scales, self.key()).grads) or "the loss"
            if self.ranks.first:
                tqdm.write(f"step {row.step} skipped: loss {row.loss}, not finite at {where}", file=sys.stderr)
        if self.skipped == MOST_SKIPPED:
            raise FloatingPointError(f"{MOST_SKIPPED} steps in a row were not finite; the last checkpoint is from before them")
        self.done, self.seconds = row.step, row.seconds
        if self.done % a.eval_every == 0 or self.done == a.steps:
            row = row._replace(val_loss=evaluate(self.params, *self.val, self.s, a.batch * 2, self.state.scales, self.key()))
        self.rows.append(row)
        return row

    def agree(self) -> None:
        """Check on all processes, before they send anything, that they will send matching messages."""

        def step(params: Any, scales: Any, x: Tensor, labels: Tensor, key: Tensor | None) -> Any:
            if self.ranks.stages is not None:
                return self.ranks.reduced(*self.ranks.stages.once(params, x, labels, self.s.dtype, key))
            return self.ranks.reduced(*loss_and_grads(params, x, labels, self.s, scales, key)[:2])

        dist.handshake(self.ranks.mesh, step, self.params, self.state.scales, *self.batch(), self.key())

    def step(self, x: Tensor, labels: Tensor, lr: float) -> Any:
        if not self.args.graph:
            return self.step_fn(
                self.params, self.state, x, labels, torch.tensor(lr) if self.args.compile else lr, self.key(), self.s
            )
        given = self.params, self.state, x, labels, torch.tensor(lr, device=x.device), self.key()
        if self.captured is None:
            self.captured = graphed(lambda *trees: written_step(*trees, self.s), *given, inputs={"0": "donated", "1": "donated"})
            print(f"captured: {self.captured.report()}")
        return self.captured(*given)

    def compile(self) -> None:
        """Compile the step before the clock runs. The first call's result is thrown away: a compiled step does not write to
        arguments."""
        a, (x, labels) = self.args, self.batch()
        print("compiling the step ...", flush=True)
        began = time.perf_counter()
        self.step_fn = torch.compile(train_step, fullgraph=True, dynamic=False)
        self.step_fn(self.params, self.state, x, labels, torch.tensor(a.lr), self.key(), self.s)
        print(f"compiled in {time.perf_counter() - began:.1f} s (not counted as training)")

    def save(self) -> bool:
        """Write checkpoint, metrics and picture, each whole or not at all. If one cannot be written, the run goes on, and the
        earlier file stays. Returns whether the checkpoint is written. Each rank writes its own part, which any mesh reads."""
        a, saved = self.args, True
        try:
            save_run(a.out, self.params, self.state, self.done, self.rows, kept_flags(a), self.ranks)
        except (OSError, CheckpointError) as error:
            saved = False
            if self.ranks.first:
                tqdm.write(f"train_lm.py: step {self.done} is not saved: {error}", file=sys.stderr)
        if self.ranks.first:
            self.draw()
        return not self.ranks.any(not saved)

    def draw(self) -> None:
        a = self.args
        try:
            plot(a.out, self.rows, self.baseline)
            plot_load(a.out, self.rows)
        except (OSError, ImportError) as error:
            drawn = "loss.png is" if a.experts is None else "loss.png or load.png is"
            tqdm.write(f"train_lm.py: {drawn} not written: {error}", file=sys.stderr)

    def draw_seen(self) -> None:
        try:
            plot_seen(self.args.out, self.seen)
        except (OSError, ImportError) as error:
            tqdm.write(f"train_lm.py: watch.csv or watch.svg is not written: {error}", file=sys.stderr)

    def say_load(self) -> None:
        """Print the load of the experts since the last evaluation."""
        since = [row for row in self.rows if row.load is not None and row.step > self.done - self.args.eval_every]
        for i, layer in enumerate(shares(since) if since else ()):
            unused = int((layer == 0).sum())
            said = " ".join(f"{share:.2f}" for share in layer.tolist())
            tqdm.write(f"  load of the experts of block {i}, 1 is even: {said}" + (f"; {unused} unused" if unused else ""))


def kept_flags(args: Any) -> dict[str, str]:
    """The flags that a resumed run must share with the run that it continues."""
    return {k: str(v) for k, v in vars(args).items() if k not in FREE and k != "decoder"}


def loop(run: Run) -> bool:
    """Run steps until the last one, --stop-at or Ctrl-C, and save on the way and at the end. Returns whether the end is saved."""
    a, first, began = run.args, run.done, run.seconds
    stop_at = a.steps if a.stop_at is None else min(a.stop_at, a.steps)
    saved = first
    shown = None if run.ranks.first else True  # None: only on a terminal
    with Interrupt() as interrupt, tqdm(total=a.steps, initial=run.done, unit="step", disable=shown) as bar:
        while run.done < stop_at and not run.ranks.any(interrupt.asked):
            row = run.advance()
            bar.update()
            speed = (run.done - first) * a.batch * a.context / max(1e-9, run.seconds - began)
            bar.set_postfix_str(f"loss {row.loss:.3f}, {speed:,.0f} tokens/s")
            if row.val_loss is not None:
                tqdm.write(
                    f"step {row.step}: training loss {row.loss:.4f}, held-out loss {row.val_loss:.4f}, "
                    f"{row.seconds:.1f} s of training"
                )
                run.say_load()
                saved = run.done if run.save() else saved
    return saved == run.done or run.save()


def train(args: Any, ranks: Ranks) -> int:
    corpus = load_corpus(args.text, context=args.context)
    check_writable(args.out)
    print(
        f"{corpus.source}: {size_of(len(corpus.train))} to train on, {size_of(len(corpus.held_out))} held out; "
        f"results go to {args.out}"
    )
    run = Run(args, corpus, ranks)
    if args.profile:
        files = say_profile(run.params, run.state, *run.batch(), run.key(), run.s, args)
        print(f"wrote {' and '.join(map(str, files))}")
        return 0
    dtype = str(args.dtype).removeprefix("torch.")
    print(f"{run.count:,} parameters, {args.batch * args.context} bytes (tokens) a step, in {dtype}")
    if ranks.stages is None and ranks.zero < 3:
        say_what_is_kept(run.params, *run.batch(), run.s, run.policy, run.state.scales, run.key())
    if not ranks.alone:
        print(f"{ranks.mesh.size} processes: {' x '.join(f'{name} {n}' for name, n in args.mesh.items())}")
        run.agree()
    print(f"baseline: a trigram table gets {run.baseline:.3f} nats per byte on the held-out text")
    if args.compile:
        run.compile()
    try:
        saved = loop(run)
    except FloatingPointError as error:
        print(f"train_lm.py: {error}", file=sys.stderr)
        return 1
    checkpoint = args.out / (ONE if ranks.alone else MANY)
    if run.done < args.steps:
        print(f"stopped after step {run.done}" + (f"; --resume goes on from {checkpoint}" if saved else ""))
        return 0 if saved else 1
    last = run.rows[-1]
    print(f"held-out loss {last.val_loss:.4f} nats per byte after {last.seconds:.1f} s of training (trigram {run.baseline:.3f})")
    if saved:
        pictures = f"{args.out / 'loss.png'}, " + ("" if args.experts is None else f"{args.out / 'load.png'}, ")
        print(f"wrote {pictures}{args.out / 'metrics.csv'} and {checkpoint}")
    if args.recipe is not None and ranks.alone:
        say_what_rounding_does(run.params, *run.batch(), run.s, run.key())
    if args.sample:
        prompt, params = corpus.held_out[:64].long(), ranks.whole(run.params)
        if ranks.first:
            print(f"prompt, from the held-out text:\n{text_of(prompt)}\nsample:")
            for piece in texts(sample(params, prompt, args, run.state.scales)):
                print(piece, end="", flush=True)
            print()
    return 0 if saved else 1


def check(args: Any) -> int:
    args.dtype = torch.float64
    corpus = load_corpus(args.text, context=args.context)
    params = init(args.decoder, seed=args.seed, dtype=torch.float64, device="cpu")
    x, labels = batch(corpus.train, step=0, seed=args.seed, size=args.batch, context=args.context)
    error, where = largest_relative_error(params, x, labels, settings_of(args, params, Ranks.one(args)), args)
    print(f"largest relative error against plain PyTorch in float64: {error:.2e} (at {where})")
    return 0 if error < 1e-9 else 1


def main(argv: list[str] | None = None) -> int:
    with quiet():
        args = parse(argv)
    try:
        if args.check:
            return check(args)
        with started(args) as ranks:
            return train(args, ranks)
    except (TextError, RunError) as error:
        print(f"train_lm.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # outside of the loop, or a second time in it
        print("train_lm.py: interrupted; earlier saves are unchanged", file=sys.stderr)
        return 130


if __name__ == "__main__":
    leave(main)
