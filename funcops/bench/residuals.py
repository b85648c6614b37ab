"""Bytes that a block keeps for its backward, per token and hidden unit, against what autograd saves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from funcops import WithExtras, chain, random, report, with_policy
from funcops.bench.measure import Row
from funcops.bench.models import block_config, gpt2_block_config
from funcops.bench.plain import PlainBlock, PlainGPT2Block
from funcops.op import Op

DIM, HEADS, LENGTH = 512, 8, 512
UNIT = "bytes per token and unit"


def run() -> list[Row]:
    torch.manual_seed(0)
    llama = block_config(DIM, HEADS, 1408), {"positions": torch.arange(LENGTH)}, PlainBlock(DIM, HEADS, 1408, LENGTH)
    gpt2 = gpt2_block_config(DIM, HEADS, 2048, 0.1), {"key": random.key(0)}, PlainGPT2Block(DIM, HEADS, 2048, 0.1)
    return [row for name, case in (("llama block", llama), ("gpt-2 block", gpt2)) for row in _measure(name, *case)]


def _measure(name: str, cfg: Any, extras: dict[str, Tensor], module: nn.Module) -> list[Row]:
    data = torch.randn(1, LENGTH, DIM, dtype=torch.bfloat16)
    params = chain.init(cfg, key=random.key(0), dtype=torch.bfloat16)

    def ours(op: Op) -> int:
        _, residuals = op.fwd(params, WithExtras(data, extras), cfg)
        return report(residuals, params, extras).kept_bytes  # the block's input counts

    kept = {
        "funcops": ours(chain),
        "funcops, compress_fp8": ours(with_policy(chain, "compress_fp8")),
        "autograd": saved_by_autograd(module.to(torch.bfloat16), data),
    }
    return [Row("residuals", name, provider, "kept", value / (LENGTH * DIM), UNIT) for provider, value in kept.items()]


def saved_by_autograd(module: nn.Module, data: Tensor) -> int:
    """The bytes of the storages that a forward saves, but for the module's params and tables."""
    tables = {t.untyped_storage()._cdata for t in (*module.parameters(), *vars(module).values()) if isinstance(t, Tensor)}
    storages: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage._cdata not in tables:
            storages[storage._cdata] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = module(data.clone().requires_grad_())
    kept = sum(storages.values())
    del y
    return kept
