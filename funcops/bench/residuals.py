"""Bytes that a block keeps for its backward, per token and hidden unit, against what autograd saves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from funcops import Compress, Policy, WithExtras, chain, random, report, with_policy
from funcops.bench.measure import Row
from funcops.bench.models import block_config, gpt2_block_config
from funcops.bench.plain import PlainBlock, PlainGPT2Block
from funcops.op import Op

DIM, HEADS, LENGTH = 512, 8, 512
UNIT = "bytes per token and unit"
FP8 = Compress("fp8")
LOW = {  # what of a Llama block is in 8 bits
    "the SwiGLU's input": Policy({"mlp.act.x": FP8}),
    "the inputs of the SwiGLU and of norms": Policy({"mlp.act.x": FP8, "*.norm.x": FP8}),
}


def run() -> list[Row]:
    torch.manual_seed(0)
    positions = {"positions": torch.arange(LENGTH)}
    llama = block_config(DIM, HEADS, 1408), positions, PlainBlock(DIM, HEADS, 1408, LENGTH)
    gpt2 = gpt2_block_config(DIM, HEADS, 2048, 0.1), {"key": random.key(0)}, PlainGPT2Block(DIM, HEADS, 2048, 0.1)
    plain = [row for name, case in (("llama block", llama), ("gpt-2 block", gpt2)) for row in _measure(name, *case)]
    return plain + list(_low(llama[0], positions))


def _low(cfg: Any, extras: dict[str, Tensor]) -> Iterator[Row]:
    """What a Llama block keeps by policies of 8 bits; and the dys of linears that its pending holds."""
    params = chain.init(cfg, key=random.key(0), dtype=torch.bfloat16)
    x = WithExtras(torch.randn(1, LENGTH, DIM, dtype=torch.bfloat16), extras)
    units = LENGTH * DIM
    for name, policy in LOW.items():
        kept = report(with_policy(chain, policy).fwd(params, x, cfg)[1], params, extras).kept_bytes
        yield Row("residuals", "llama block", f"funcops, fp8: {name}", "kept", kept / units, UNIT)
    for provider, policy in (("funcops", Policy()), ("funcops, fp8: *.dy", Policy({"*.dy": FP8}))):
        op = with_policy(chain, policy)
        y, residuals = op.fwd(params, x, cfg)
        _, pending = op.dgrad(residuals, torch.randn_like(y), cfg)
        waiting = sum(row.bytes for row in report(pending, params, x).rows if row.path.endswith(".dy"))
        yield Row("residuals", "llama block", provider, "pending dy", waiting / units, UNIT)


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
