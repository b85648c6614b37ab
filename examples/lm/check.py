"""One step against an independent plain PyTorch version of the model, in float64."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from funcops.trees import paths
from lm.step import Settings, loss_and_grads


def largest_relative_error(params: Any, x: Tensor, labels: Tensor, s: Settings, args: Any) -> tuple[float, str]:
    """The largest error of the loss and of any gradient, relative to that tensor's largest value, and its path."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout: wheels do not contain `benchmarks`
    from benchmarks.plain import PlainLlama, plain_name
    from benchmarks.plain_moe import Mixture, Router

    cfg = args.decoder
    plain = PlainLlama(
        dim=cfg.dim,
        n_layers=cfg.layers,
        n_heads=cfg.heads,
        n_kv_heads=cfg.kv_heads,
        hidden=cfg.hidden,
        context=cfg.context,
        tied=cfg.tied,
    )
    if cfg.moe is not None:
        router = Router(cfg.moe.route.experts, cfg.moe.route.top_k, score="sigmoid")
        for block in plain.blocks:
            block.mlp = Mixture(block.mlp.norm, cfg.dim, cfg.hidden, cfg.moe.shared, router)  # type: ignore[assignment, union-attr]
    plain = plain.to(torch.float64)
    ours = {plain_name(path): t for path, t in paths(params).items() if t is not None}
    plain.load_state_dict(ours)
    want = plain(x, labels)
    want.backward()
    loss, grads, *_ = loss_and_grads(params, x, labels, s, {})
    worst = float((loss - want.detach()).abs() / want.detach().abs()), "loss"
    gradients = {plain_name(path): g for path, g in paths(grads).items() if g is not None}
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        error = float((gradients[name] - parameter.grad).abs().max() / parameter.grad.abs().max())
        worst = max(worst, (error, name))
    return worst
