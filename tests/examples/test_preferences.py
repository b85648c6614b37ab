"""examples/10_preferences.py, run as a user would; and its losses against TRL's formulas, in float64."""

import dataclasses
import inspect
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from programs import check_picture, main_of, run

from funcops import Needs, RopeConfig, chain, random
from funcops.adapters.autograd import differentiable
from funcops.engine.trees import paths, tensors, tree_map_tensors
from funcops.models import DecoderConfig, decoder, decoder_x

D = torch.float64
EXAMPLE = main_of("10_preferences.py").__globals__
SIZES = dict(vocab=60, dim=12, layers=2, heads=2, kv_heads=1, head_size=6, hidden=20, context=16)
CFG = DecoderConfig(**SIZES, rope=RopeConfig(6))
CASES = {"plain": {}, "tied, capped": dict(tied=True, logit_softcap=1.5), "wide": dict(vocab=1000)}


def trl_dpo(logps, reference, beta, smoothing):
    """DPOTrainer, loss_type="sigmoid", as published: sums over the completion, chosen rows first."""
    chosen_logps, rejected_logps = logps.sum(-1).chunk(2)
    ref_chosen_logps, ref_rejected_logps = reference.sum(-1).chunk(2)
    logits = (chosen_logps - rejected_logps) - (ref_chosen_logps - ref_rejected_logps)
    return (-F.logsigmoid(beta * logits) * (1 - smoothing) - F.logsigmoid(-beta * logits) * smoothing).mean()


def trl_grpo(logps, old, reference, advantages, mask, epsilon, beta):
    """GRPOTrainer, loss_type="grpo", as published."""
    per_token_kl = torch.exp(reference - logps) - (reference - logps) - 1
    coef_1 = torch.exp(logps - old)
    coef_2 = torch.clamp(coef_1, 1 - epsilon, 1 + epsilon)
    per_token_loss = -torch.min(coef_1 * advantages.unsqueeze(1), coef_2 * advantages.unsqueeze(1))
    per_token_loss = per_token_loss + beta * per_token_kl
    return ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()


def given(name):
    """The config, the chain of log-probabilities, params, ids, labels with prompts and ends that do not count, and a reference."""
    cfg, draw = dataclasses.replace(CFG, **CASES[name]), torch.Generator().manual_seed(3)
    model = dataclasses.replace(decoder(cfg, loss=True, reduction="none"), joined=("loss",))
    assert "linear_cross_entropy" in [one.op.name for one in model.runs]
    params = chain.init(model, key=random.key(0), dtype=D)
    params = tree_map_tensors(lambda t: t + 0.3 * torch.randn(t.shape, generator=draw, dtype=D), params)
    ids, labels = (torch.randint(cfg.vocab, (6, 9), generator=draw) for _ in range(2))
    labels[:, :3], labels[0, 5:], labels[3] = -100, -100, -100  # the fourth answer is empty
    other = tree_map_tensors(lambda t: t + 0.1 * torch.randn(t.shape, generator=draw, dtype=D), params)
    x = decoder_x(cfg, ids, D, labels=labels)
    reference, sampled = (-chain.fwd(p, x, model, needs=Needs.NONE)[0] for p in (other, params))
    sampled = (sampled + 0.3 * torch.randn(sampled.shape, generator=draw, dtype=D)) * (labels != -100)
    return cfg, model, params, ids, labels, reference, sampled


def by_autograd(cfg, params, ids, labels, loss):
    """The loss and the gradients of all params, through whole logits and torch's log_softmax."""
    asked = tree_map_tensors(lambda t: t.clone().requires_grad_(), params)
    without_loss = {name: part for name, part in asked.items() if name != "loss"}
    logits = differentiable(chain)(without_loss, decoder_x(cfg, ids, D), decoder(cfg))
    logps = torch.log_softmax(logits, -1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1) * (labels != -100)
    value = loss(logps)
    return value.detach(), torch.autograd.grad(value, tensors(asked))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["dpo", "dpo, smoothed", "grpo", "grpo without a reference"])
def test_losses_and_gradients_are_trls_in_float64(name, kind):
    cfg, model, params, ids, labels, reference, sampled = given(name)
    mask = (labels != -100).to(D)
    if kind.startswith("dpo"):
        smoothing = 0.2 if "smoothed" in kind else 0.0
        theirs = lambda logps: trl_dpo(logps, reference, 0.4, smoothing)  # noqa: E731
        ours = lambda logps: EXAMPLE["dpo"](logps, reference, 0.4, smoothing)  # noqa: E731
    else:
        beta = 0.0 if "without" in kind else 0.3
        rewards = torch.rand(2, 3, dtype=D, generator=torch.Generator().manual_seed(1))
        flat = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        gains = EXAMPLE["advantages_of"](rewards)
        assert torch.equal(gains, flat.flatten())
        theirs = lambda logps: trl_grpo(logps, sampled, reference, gains, mask, 0.2, beta)  # noqa: E731
        ours = lambda logps: EXAMPLE["grpo"](logps, sampled, reference, gains, mask, 0.2, beta)  # noqa: E731
    wanted, gradients = by_autograd(cfg, params, ids, labels, theirs)
    y, kept = chain.fwd(params, decoder_x(cfg, ids, D, labels=labels), model, needs=Needs(x=False))
    assert not any("logits" in path for path in paths(kept))
    value, dlogps = ours(-y)
    grads, _ = chain.bwd(kept, -dlogps, model)
    torch.testing.assert_close(value, wanted, rtol=0, atol=1e-12)
    for got, want in zip(tensors(grads), gradients, strict=True):
        assert want.abs().max() > 1e-6
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_the_page_has_the_losses_of_the_program():
    page = (Path(__file__).resolve().parents[2] / "docs" / "preferences.md").read_text()
    for name in ("dpo", "grpo", "advantages_of"):
        assert inspect.getsource(EXAMPLE[name]) in page, name


def test_both_learn(tmp_path):
    said = run("10_preferences.py", "--steps", 14, "--prompts", 8, "--plot", tmp_path / "plot.png").splitlines()
    for line in said[1:3]:
        before, after, kept = map(float, line.replace(",", "").split()[1:])
        assert after > 1.2 * before and kept > 0
    check_picture(tmp_path / "plot.png")
