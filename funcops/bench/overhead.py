"""Host time of forward + backward at sizes where compute is negligible, against torch.nn and autograd.

The rows "nn" are modules, ours and torch's, both driven by autograd. A chain keeps what autograd keeps, but in the rows
"recomputing": there it runs its norms and activations twice, as it does by default, for fewer bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from funcops import LinearConfig, RMSNormConfig, RopeConfig, WithExtras, chain, linear, random, rms_norm, rope_table
from funcops import nn as fnn
from funcops.adapters.autograd.differentiable import backward_calls
from funcops.bench.measure import Row, interleaved, summary
from funcops.bench.models import block_config, mlp_config
from funcops.bench.plain import MLP, PlainBlock

DIM, LENGTH, HEADS = 16, 3, 2


def _cases() -> list[tuple[str, Any, Any, nn.Module]]:
    return [
        ("linear", linear, LinearConfig(DIM, DIM), nn.Linear(DIM, DIM)),
        ("rms_norm", rms_norm, RMSNormConfig(DIM), nn.RMSNorm(DIM)),
        ("swiglu mlp", chain, mlp_config(DIM, 24, recompute=False), MLP(DIM, 24)),
        ("llama block", chain, block_config(DIM, HEADS, 24, recompute=False), PlainBlock(DIM, HEADS, 24, LENGTH)),
        ("llama block, recomputing", chain, block_config(DIM, HEADS, 24), PlainBlock(DIM, HEADS, 24, LENGTH)),
    ]


def _modules(lib: Any) -> dict[str, nn.Module]:
    return {
        "nn.Linear": lib.Linear(DIM, DIM),
        "nn.RMSNorm": lib.RMSNorm(DIM),
        "nn.Sequential, mlp": lib.Sequential(lib.Linear(DIM, 24), lib.GELU(), lib.Linear(24, DIM)),
        "nn.Sequential, norm and mlp": lib.Sequential(lib.RMSNorm(DIM), lib.Linear(DIM, 24), lib.GELU(), lib.Linear(24, DIM)),
    }


def run() -> list[Row]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [row for case in _cases() for row in _measure(*case)]
        theirs = _modules(nn)
        return rows + [row for name, ours in _modules(fnn).items() for row in _measure_modules(name, ours, theirs[name])]
    finally:
        torch.set_num_threads(threads)


def _measure_modules(name: str, ours: nn.Module, theirs: nn.Module) -> list[Row]:
    """Both under autograd. The operators of ours are counted once, so that the row is of our kernels."""
    x, dy = torch.randn(LENGTH, DIM, requires_grad=True), torch.randn(LENGTH, DIM)
    with backward_calls() as count:
        ours(x).backward(dy)
    assert count() == 1, "one node, whose backward is an op's"
    samples = interleaved(
        {"funcops": lambda: ours(x).backward(dy), "torch.nn": lambda: theirs(x).backward(dy)}, rounds=25, calls=100
    )
    return summary("overhead", name, samples, "funcops")


def _measure(name: str, op: Any, cfg: Any, module: nn.Module) -> list[Row]:
    torch.manual_seed(0)
    data, dy = torch.randn(2, LENGTH, DIM), torch.randn(2, LENGTH, DIM)
    params = op.init(cfg, key=random.key(0), dtype=torch.float32)
    x: Any = (
        WithExtras(data, {"positions": rope_table(torch.arange(LENGTH), RopeConfig(DIM // HEADS))})
        if getattr(cfg, "extras", ())
        else data
    )
    leaf = data.clone().requires_grad_()
    inputs = [leaf, *module.parameters()]

    fwd, bwd = op.fwd, op.bwd

    def ours() -> Any:
        _, residuals = fwd(params, x, cfg)
        return bwd(residuals, dy, cfg)

    def backward() -> None:
        module(leaf).backward(dy)

    def grad() -> Any:
        return torch.autograd.grad(module(leaf), inputs, dy)

    calls = 400 if name in ("linear", "rms_norm") else 60
    samples = interleaved({"funcops": ours, ".backward()": backward, "autograd.grad": grad}, rounds=25, calls=calls)
    return summary("overhead", name, samples, "funcops")
