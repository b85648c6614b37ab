"""Teach a small language model to count by GRPO, with the log-probabilities that its sampler saved.

A token is a digit. The reward of a sample is the share of its digits that are one more than the digit before, 9 before 0. A token's
ratio, exp(log p by the trainer - log p by the sampler), should be 1 at the first update after sampling, by the same weights. It is
not: a sampler decodes a few rows token by token, a trainer takes packed rows, and products of other sizes sum in another order.
`with_invariant` gives a row the same bits in both, so every ratio is exactly 1:

    model = with_invariant(decoder(cfg))
    drawn = generate(params, cfg, prompts, n, model=model, key=key, log_probabilities=True)
    y, kept = chain.fwd(params, x, with_invariant(decoder(cfg, loss=True, reduction="none", packed=True)))       # y = -log p

The program runs both ways, and draws how far ratios are from 1 at the first update of each batch, and the mean reward.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from funcops import RopeConfig, chain, donate, random
from funcops.contract import Needs
from funcops.invariant import with_invariant
from funcops.models import DecoderConfig, SamplingConfig, decoder, decoder_x, generate, pack
from funcops.optim import AdamWConfig, adamw_init, adamw_update, clip_by_global_norm
from funcops.trees import tree_map_tensors

DIGITS, LENGTH, GROUP = 10, 12, 8
CFG = DecoderConfig(
    vocab=DIGITS, dim=32, layers=2, heads=4, kv_heads=2, head_size=8, hidden=64, context=LENGTH + 1, rope=RopeConfig(8)
)
OPTIMISER = AdamWConfig(lr=3e-3, weight_decay=0.0)


class Learner:
    """A model in float32, which samples and learns in `dtype`; `invariant`: with the same bits in both."""

    def __init__(self, seed: int, dtype: torch.dtype, invariant: bool) -> None:
        mode: Any = functools.partial(with_invariant, queries=32) if invariant else lambda cfg: cfg  # rows are short
        self.sampler, self.trainer = mode(decoder(CFG)), mode(decoder(CFG, loss=True, reduction="none", packed=True))
        self.dtype, self.params = dtype, chain.init(decoder(CFG), key=random.key(seed))
        self.state: Any = adamw_init(self.params, OPTIMISER)

    @property
    def work(self) -> Any:
        return tree_map_tensors(lambda t: t.to(self.dtype), self.params)

    def draw(self, prompts: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [B, 1 + LENGTH] that begin with the prompts [B, 1], and the log-probabilities [B, LENGTH] of their other digits."""
        options: Any = dict(key=key, sampling=SamplingConfig(temperature=1.0), log_probabilities=True)
        found = list(generate(self.work, CFG, prompts, LENGTH, model=self.sampler, **options))
        rows = torch.cat((prompts, torch.stack([one.tokens for one in found], 1)), 1)
        return rows, torch.stack([one.log_probabilities for one in found], 1)

    def update(self, rows: Tensor, sampled: Tensor, gains: Tensor, parts: int) -> Tensor:
        """One update by rows in `parts` packed microbatches of drawn order. Returns the ratios [B, LENGTH] before it."""
        work, ratios = self.work, torch.empty_like(sampled)
        sums = tree_map_tensors(torch.zeros_like, self.params) | {"loss": None}
        for part in torch.randperm(len(rows)).chunk(parts):
            batch = pack(list(rows[part]))
            x = decoder_x(CFG, batch.ids, self.dtype, labels=batch.labels, cu_seqlens=batch.cu_seqlens)
            y, kept = chain.fwd({**work, "loss": None}, x, self.trainer, needs=Needs(x=False))
            logps = -y.view(len(part), -1)[:, :-1]  # the last digit of a row has no label
            ratio, gain = torch.exp(logps - sampled[part]), gains[part].unsqueeze(-1)
            ratios[part] = ratio
            slopes = -gain * ratio * (ratio * gain <= ratio.clamp(0.8, 1.2) * gain) / rows[:, 1:].numel()
            chain.bwd(donate(kept), -torch.nn.functional.pad(slopes, (0, 1)).view(1, -1), self.trainer, into=sums)
        grads, _ = clip_by_global_norm({name: part for name, part in sums.items() if name != "loss"}, 1.0)
        self.params, self.state = adamw_update(self.params, grads, self.state, OPTIMISER)
        return ratios


def reward(rows: Tensor) -> Tensor:
    return ((rows[:, :-1] + 1) % DIGITS == rows[:, 1:]).float().mean(1)


def advantages_of(rewards: Tensor) -> Tensor:
    """The rewards [groups, samples] relative to their group, flat."""
    return ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()


def learn(learner: Learner, steps: int, prompts: int, seed: int) -> dict[str, list[float]]:
    """Two updates by each batch. Returns, by batch: how many ratios are not 1 at its first update, the furthest, and the reward."""
    found: dict[str, list[float]] = {"other": [], "furthest": [], "reward": []}
    torch.manual_seed(seed)
    for i in range(steps):
        key = random.fold_in(random.key(seed + 1), i)
        starts = (random.uniform(key, (prompts, 1)) * DIGITS).long().repeat_interleave(GROUP, 0)
        rows, sampled = learner.draw(starts, random.fold_in(key, 1))
        rewards = reward(rows)
        gains = advantages_of(rewards.view(prompts, GROUP))
        away = (learner.update(rows, sampled, gains, parts=3) - 1).abs()
        learner.update(rows, sampled, gains, parts=2)
        for name, value in (("other", (away > 0).float().mean()), ("furthest", away.max()), ("reward", rewards.mean())):
            found[name].append(float(value))
    return found


def plot(path: Path, curves: dict[str, dict[str, list[float]]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 4), layout="constrained")
    for name, found in curves.items():
        batches = range(1, len(found["reward"]) + 1)
        left.plot(batches, [100 * share for share in found["other"]], label=name, linewidth=2)
        right.plot(batches, found["reward"], label=name)
    left.set(xlabel="batch", ylabel="% of tokens", ylim=(-3, 103), title="Ratios that are not 1 at the first update")
    right.set(xlabel="batch", ylabel="mean reward of its samples", ylim=(0, 1.03), title="What is learnt")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="11_same_bits.py", description="GRPO whose ratio is exactly 1 at the first update.")
    parser.add_argument("--steps", type=int, default=30, help="batches of each (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=16, help="prompts in a batch (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, prompts and samples (default: %(default)s)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the work (default: %(default)s)")
    parser.add_argument("--plot", type=Path, default=Path("11_same_bits.png"), help="where the picture goes (default: %(default)s)")
    args = parser.parse_args(argv)
    for name in ("steps", "prompts"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: expected at least 1, got {getattr(args, name)}")
    if not args.plot.parent.is_dir():  # before any training
        parser.error(f"--plot: expected a file in a folder that exists, got {str(args.plot)!r}")
    curves = {}
    print("mode       ratios not 1  furthest from 1  reward before  after")
    for name, invariant in (("free", False), ("invariant", True)):
        learner = Learner(args.seed, getattr(torch, args.dtype), invariant)
        found = curves[name] = learn(learner, args.steps, args.prompts, args.seed)
        last = found["reward"][-10:]
        share, furthest = sum(found["other"]) / args.steps, max(found["furthest"])
        print(f"{name:9}  {share:12.2%}  {furthest:15.2g}  {found['reward'][0]:13.2f}  {sum(last) / len(last):5.2f}")
    plot(args.plot, curves)
    print(f"wrote {args.plot}")


if __name__ == "__main__":
    main()
