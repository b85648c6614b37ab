"""Teach a small language model to count, from preferences between its own samples (DPO) and from rewards of them (GRPO).

A token is a digit. The reward of a sample is the share of its digits that are one more than the digit before, 9 before 0. Both
losses see the model only by the log-probability of each token, so a step keeps two floats a token of the head, and no logits:

    y, kept = chain.fwd(params, x, model)             y = -log p(token), [B, T], by linear_cross_entropy
    value, dlogps = dpo(-y, reference, beta)          or grpo(...): a loss of log-probabilities, and its gradient
    grads, _ = chain.bwd(kept, -dlogps, model)

Draws the mean reward of fresh samples over the steps.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from funcops import ChainConfig, RopeConfig, chain, donate, random
from funcops.contract import Needs
from funcops.engine.residuals.report import report
from funcops.models import DecoderConfig, SamplingConfig, decoder, decoder_x, generate
from funcops.optim import AdamWConfig, adamw_init, adamw_update, clip_by_global_norm

DIGITS, LENGTH, GROUP = 10, 12, 8
CFG = DecoderConfig(
    vocab=DIGITS, dim=32, layers=2, heads=4, kv_heads=2, head_size=8, hidden=64, context=LENGTH + 1, rope=RopeConfig(8)
)
IGNORED = -100  # the label of a token that does not count


def token_model(cfg: DecoderConfig) -> ChainConfig:
    """The chain from ids and labels [B, T] to -log p of each label, without logits, however small the vocabulary."""
    return dataclasses.replace(decoder(cfg, loss=True, reduction="none"), joined=("loss",))


def dpo(logps: Tensor, reference: Tensor, beta: float, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Direct preference optimisation: the loss, and its gradient with respect to `logps`. Rows [2B, T] are B chosen answers, then B
    rejected ones; `reference`: the log-probabilities under the model that training began with. Tokens that do not count are 0."""
    chosen, rejected = (logps - reference).sum(-1).chunk(2)
    margin = beta * (chosen - rejected)
    loss = -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)
    slope = (smoothing - torch.sigmoid(-margin)) * beta / len(margin)
    return loss.mean(), torch.cat((slope, -slope)).unsqueeze(-1).expand_as(logps).contiguous()


def grpo(
    logps: Tensor, sampled: Tensor, reference: Tensor, advantages: Tensor, counts: Tensor, clip: float, beta: float
) -> tuple[Tensor, Tensor]:
    """Group relative policy optimisation: the loss, and its gradient with respect to `logps` [B, T]. `sampled`: log-probabilities
    under the model that drew the samples; `advantages`: one for each sample; `counts`: which tokens are the model's own."""
    ratio, gain = torch.exp(logps - sampled), advantages.unsqueeze(-1)
    limited = ratio.clamp(1 - clip, 1 + clip)
    gap = reference - logps
    losses = -torch.minimum(ratio * gain, limited * gain) + beta * (torch.exp(gap) - gap - 1)
    slopes = -gain * ratio * (ratio * gain <= limited * gain) + beta * (1 - torch.exp(gap))
    share = counts / counts.sum(-1, keepdim=True).clamp(min=1) / len(counts)
    return (losses * share).sum(), slopes * share


def advantages_of(rewards: Tensor) -> Tensor:
    """The rewards [groups, samples] relative to their group, flat."""
    return ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()


def digits(key: Tensor, count: int) -> Tensor:
    """Random prompts, [count, 1]."""
    return (random.uniform(key, (count, 1)) * DIGITS).long()


def draw(params: Any, prompts: Tensor, key: Tensor) -> Tensor:
    """Complete each prompt [B, 1] to a row of LENGTH more digits."""
    without_loss = {name: part for name, part in params.items() if name != "loss"}
    sampling = SamplingConfig(temperature=1.0)
    return torch.cat((prompts, torch.stack(list(generate(without_loss, CFG, prompts, LENGTH, key=key, sampling=sampling)), 1)), 1)


def reward(rows: Tensor) -> Tensor:
    return ((rows[:, :-1] + 1) % DIGITS == rows[:, 1:]).float().mean(1)


def log_probs(params: Any, rows: Tensor, model: ChainConfig, needs: Needs = Needs.NONE) -> tuple[Tensor, Any]:
    """log p of each digit after the first, [B, LENGTH], and what the backward needs."""
    x = decoder_x(CFG, rows[:, :-1].contiguous(), torch.float32, labels=rows[:, 1:].contiguous())
    y, kept = chain.fwd(params, x, model, needs=needs)
    return -y, kept


class Learner:
    """A model, the reference that it began as, and its optimiser."""

    def __init__(self, seed: int, lr: float) -> None:
        self.model = token_model(CFG)
        self.params: Any = chain.init(self.model, key=random.key(seed))
        self.reference, self.cfg = self.params, AdamWConfig(lr=lr, weight_decay=0.0)
        self.state, self.kept_bytes = adamw_init(self.params, self.cfg), 0.0

    def step(self, rows: Tensor, loss: Any) -> float:
        """One update by `loss(log-probabilities)`, which returns its value and gradient."""
        logps, kept = log_probs(self.params, rows, self.model, Needs(x=False))
        self.kept_bytes = report(kept, self.params, rows).kept_bytes / logps.numel()
        value, dlogps = loss(logps)
        grads, _ = chain.bwd(donate(kept), -dlogps, self.model)
        grads, _ = clip_by_global_norm(grads, 1.0)
        self.params, self.state = adamw_update(self.params, grads, self.state, self.cfg)
        return float(value)


def learn_by_preferences(steps: int, prompts: int, seed: int) -> tuple[Learner, list[float]]:
    """DPO on pairs that the model draws before it learns: of two answers to a prompt the one with more reward is chosen."""
    learner, rewards = Learner(seed, 3e-3), []
    for i in range(steps):
        key = random.fold_in(random.key(seed + 1), i)
        starts = digits(key, prompts * GROUP).repeat(2, 1)
        rows = draw(learner.reference, starts, random.fold_in(key, 1))
        pairs, points = rows.unflatten(0, (2, -1)), reward(rows).unflatten(0, (2, -1))
        first = (points[0] >= points[1]).long()
        at = torch.arange(len(first))
        ordered = torch.cat((pairs[1 - first, at], pairs[first, at]))
        reference, _ = log_probs(learner.reference, ordered, learner.model)
        learner.step(ordered, lambda logps, reference=reference: dpo(logps, reference, beta=0.3))
        rewards.append(fresh(learner, i, seed))
    return learner, rewards


def learn_by_rewards(steps: int, prompts: int, seed: int) -> tuple[Learner, list[float]]:
    """GRPO: a group of answers to each prompt, drawn by the model as it is, and two updates by each batch of them."""
    learner, rewards = Learner(seed, 3e-3), []
    for i in range(steps):
        key = random.fold_in(random.key(seed + 2), i)
        starts = digits(key, prompts).repeat_interleave(GROUP, 0)
        rows = draw(learner.params, starts, random.fold_in(key, 1))
        gains = advantages_of(reward(rows).view(prompts, GROUP))
        (sampled, _), (reference, _) = (log_probs(p, rows, learner.model) for p in (learner.params, learner.reference))
        ones = torch.ones_like(sampled)
        for _ in range(2):
            learner.step(rows, lambda logps, s=sampled, r=reference, g=gains, o=ones: grpo(logps, s, r, g, o, clip=0.2, beta=0.01))
        rewards.append(fresh(learner, i, seed))
    return learner, rewards


def fresh(learner: Learner, step: int, seed: int) -> float:
    """The mean reward of 64 new samples."""
    starts = torch.arange(64).remainder(DIGITS).unsqueeze(1)
    return float(reward(draw(learner.params, starts, random.fold_in(random.key(seed + 3), step))).mean())


def plot(path: Path, curves: dict[str, list[float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for name, rewards in curves.items():
        axes.plot(range(1, len(rewards) + 1), rewards, label=name)
    axes.axhline(1 / DIGITS, linestyle="--", color="gray", label="chance")
    axes.set(xlabel="batch", ylabel="mean reward of fresh samples", ylim=(0, 1.03), title="Counting, from preferences and rewards")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="10_preferences.py", description="DPO and GRPO on digits that should count.")
    parser.add_argument("--steps", type=int, default=50, help="batches of each (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=16, help="prompts in a batch (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, prompts and samples (default: %(default)s)")
    parser.add_argument(
        "--plot", type=Path, default=Path("10_preferences.png"), help="where the picture goes (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    for name in ("steps", "prompts"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: expected at least 1, got {getattr(args, name)}")
    if not args.plot.parent.is_dir():  # before any training
        parser.error(f"--plot: expected a file in a folder that exists, got {str(args.plot)!r}")
    curves = {}
    print("loss  reward before  after  bytes kept a token")
    for name, learn in (("DPO", learn_by_preferences), ("GRPO", learn_by_rewards)):
        before = fresh(Learner(args.seed, 0.0), 0, args.seed)
        learner, curves[name] = learn(args.steps, args.prompts, args.seed)
        last = curves[name][-10:]
        print(f"{name:4}  {before:13.2f}  {sum(last) / len(last):5.2f}  {learner.kept_bytes:18,.0f}")
    plot(args.plot, curves)
    print(f"wrote {args.plot}")


if __name__ == "__main__":
    main()
