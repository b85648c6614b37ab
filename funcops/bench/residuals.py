"""Bytes that a Llama block keeps for its backward, per token and hidden unit, against what autograd saves."""

from __future__ import annotations

import torch
from torch import Tensor

from funcops import WithExtras, chain, random, report
from funcops.bench.measure import Row
from funcops.bench.models import block_config
from funcops.bench.plain import PlainBlock

DIM, HEADS, HIDDEN, LENGTH = 512, 8, 1408, 512


def run() -> list[Row]:
    torch.manual_seed(0)
    dtype = torch.bfloat16
    data = torch.randn(1, LENGTH, DIM, dtype=dtype)
    cfg = block_config(DIM, HEADS, HIDDEN)
    params = chain.init(cfg, key=random.key(0), dtype=dtype)
    positions = torch.arange(LENGTH)
    _, residuals = chain.fwd(params, WithExtras(data, {"positions": positions}), cfg)
    kept = report(residuals, params, {"positions": positions}).kept_bytes  # the block's input counts

    module = PlainBlock(DIM, HEADS, HIDDEN, LENGTH).to(dtype)
    tables = {t.untyped_storage()._cdata for t in (*module.parameters(), module.cos, module.sin)}
    storages: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage._cdata not in tables:
            storages[storage._cdata] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = module(data.clone().requires_grad_())
    units = LENGTH * DIM
    rows = [
        Row("residuals", "llama block", "funcops", "kept", kept / units, "bytes per token and unit"),
        Row("residuals", "llama block", "autograd", "kept", sum(storages.values()) / units, "bytes per token and unit"),
    ]
    del y
    return rows
