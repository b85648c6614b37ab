"""A training step of each standard model on the meta device: what a card must run. `bench aot` compiles its launches, and
`bench cards` says on which cards they fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from funcops import ExpertsConfig, RopeConfig, RouteConfig, WithExtras, chain, rope_table
from funcops.models import MoEConfig
from funcops.models.blocks import Sizes, decoder_config, gpt2_block_config

BATCH, LENGTH = 2, 1024


def _decoder(sizes: Sizes, mixture: MoEConfig | None = None) -> tuple[Any, Any]:
    ids = torch.empty(sizes.batch, sizes.context, dtype=torch.int64, device="meta")
    table = rope_table(torch.empty(sizes.context, dtype=torch.int64, device="meta"), RopeConfig(sizes.dim // sizes.heads))
    return decoder_config(sizes, mixture), WithExtras(ids, {"positions": table, "labels": ids})


def _block(dim: int, p: float) -> tuple[Any, Any]:
    x = torch.empty(BATCH, LENGTH, dim, dtype=torch.bfloat16, device="meta")
    key = torch.empty(2, dtype=torch.int64, device="meta")
    return gpt2_block_config(dim, dim // 64, 4 * dim, p), WithExtras(x, {"key": key})


MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "Llama": lambda: _decoder(Sizes(4096, 1, 32, 8, 14336, 128256, LENGTH, BATCH)),
    "GPT-2": lambda: _block(768, 0.1),
    "GPT-2 medium": lambda: _block(1024, 0.1),
    "ViT": lambda: _block(1024, 0.0),
    "Qwen3-MoE": lambda: _decoder(
        Sizes(2048, 1, 32, 4, 6144, 151936, LENGTH, BATCH),
        MoEConfig(route=RouteConfig(128, 8), experts=ExpertsConfig(128, 2048, 768)),
    ),
}


def step(model: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """Run the forward and the backward of a model of `MODELS`, with a mean loss or the gradients of y."""
    cfg, given = MODELS[model]()
    params = chain.init(cfg, key=None, dtype=dtype, device="meta")
    y, residuals = chain.fwd(params, given, cfg)
    dy = WithExtras(torch.empty_like(y.main), dict.fromkeys(y.extras)) if isinstance(y, WithExtras) else y
    chain.bwd(residuals, dy, cfg)
