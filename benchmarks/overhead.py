"""Host time of forward + backward at sizes where compute is negligible, against torch.nn and autograd.

The rows "nn" are modules, ours and torch's, both under autograd. A chain keeps what autograd keeps, except in the rows
"recomputing": there it runs its norms and activations twice, as it does by default, for fewer bytes.

The rows "donated", "halves", "donated halves" and "positions as ids" compare funcops with itself: with the same residuals not given
away, with the whole backward, with halves, and with a table of the rope that is ready. The rows "step" are a step of training with
its clipping and AdamW, beside autograd's with torch's clipping and fused AdamW.

The rows "fp8" compare bfloat16 with FP8 as on a device, where a quantiser is one launch instead of a dozen operators as on the CPU.
They time the host's work up to the driver's launch call, with the driver stubbed; both sides use our launcher, for products too.
Torch's own work (memory, views) is included, except its attention, which is prepared as for a device and then only allocates its
results; the step's working tree is made before. These rows need Triton without its interpreter.

Times are the process's CPU times: with wall clocks, other work on the machine would change the ratios far more.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import Row, interleaved, summary
from benchmarks.plain import MLP, PlainBlock
from funcops import (
    LinearConfig,
    Needs,
    RMSNormConfig,
    RopeConfig,
    WithExtras,
    backend,
    chain,
    donate,
    linear,
    qlinear,
    random,
    rms_norm,
    rope_table,
)
from funcops import nn as fnn
from funcops.adapters.autograd.differentiable import backward_calls
from funcops.engine.backend import gemm, select
from funcops.engine.contract.op import Op
from funcops.engine.trees import cast, tree_map_tensors
from funcops.library.kernels import attention
from funcops.low_precision import Fp8Block, quantize_params, with_recipe
from funcops.models.blocks import block_config, mlp_config
from funcops.optim import AdamWConfig, adamw_init, adamw_update, clip_factor, global_norm

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
        rows += [row for name, ours in _modules(fnn).items() for row in _measure_modules(name, ours, theirs[name])]
        return rows + _low_precision()
    finally:
        torch.set_num_threads(threads)


def _low_precision() -> list[Row]:
    if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET", "0") != "0":
        return []
    from funcops.engine.backend.launch import planned_launches
    from funcops.testing.aot import stubbed

    rows = []
    with stubbed(), planned_launches(), backend("triton"), gemm("triton"), _as_on_a_device():
        for name, calls in (("linear", 400), ("llama block", 60)):
            plain, low = low_precision_cases(name)
            samples = interleaved({"funcops, fp8": low, "funcops, bfloat16": plain}, rounds=25, calls=calls, cpu=True)
            rows += summary("overhead", f"{name}, fp8", samples, "funcops, fp8")
    return rows


@contextmanager
def _as_on_a_device() -> Iterator[None]:
    """Attention as on CUDA, whose operator only allocates; and no call asks whether its tensors, on the CPU, are left to torch."""

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Any:
        return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)

    def backward(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Any:
        return [torch.empty_like(t) for t in (q, k, v)]

    ways, kernels = attention.WAYS, (attention.attention_fwd.kernel, attention.attention_bwd.kernel)
    bodies, flash, asks = [kernel.torch_impl for kernel in kernels], ways["flash"], select._left_on_the_cpu
    ways["flash"] = type(flash)(forward, backward)
    kernels[0].torch_impl, kernels[1].torch_impl = attention.cuda_fwd, attention.cuda_bwd
    select._left_on_the_cpu = lambda: False
    try:
        yield
    finally:
        ways["flash"], select._left_on_the_cpu = flash, asks
        kernels[0].torch_impl, kernels[1].torch_impl = bodies


def low_precision_cases(name: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Forward and backward of a "linear" or a "llama block" in bfloat16, and the same in FP8 by blocks."""
    block = name == "llama block"
    cfg: Any = block_config(128, HEADS, 128) if block else LinearConfig(128, 128, bias=False)
    low, device = with_recipe(cfg, Fp8Block()), "cuda" if torch.cuda.is_available() else "cpu"
    params = (chain if block else linear).init(cfg, key=random.key(0), device=device)
    data, dy = torch.randn(2, 2, 8, 128, dtype=torch.bfloat16, device=device)
    table = rope_table(torch.arange(8, device=device), RopeConfig(128 // HEADS))

    def both(op: Op, work: Any, cfg: Any, x: Tensor | WithExtras) -> Callable[[], Any]:
        def run() -> Any:
            _, residuals = op.fwd(work, x, cfg)
            return op.bwd(residuals, dy, cfg)

        return run

    x = WithExtras(data, {"positions": table}) if block else data
    plain, quantised = (chain, chain) if block else (linear, qlinear)
    return both(plain, cast(params, torch.bfloat16), cfg, x), both(quantised, quantize_params(params, low), low, x)


def _measure_modules(name: str, ours: nn.Module, theirs: nn.Module) -> list[Row]:
    """Time both under autograd. First check that ours runs as a single node, so that the row measures our kernels."""
    x, dy = torch.randn(LENGTH, DIM, requires_grad=True), torch.randn(LENGTH, DIM)
    with backward_calls() as count:
        ours(x).backward(dy)
    assert count() == 1, "one node, whose backward is an op's"
    samples = interleaved(
        {"funcops": lambda: ours(x).backward(dy), "torch.nn": lambda: theirs(x).backward(dy)}, rounds=25, calls=100, cpu=True
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
    samples = interleaved({"funcops": ours, ".backward()": backward, "autograd.grad": grad}, rounds=25, calls=calls, cpu=True)
    rows = summary("overhead", name, samples, "funcops") + _variants(name, op, cfg, params, x, dy, calls)
    return rows + _step(name, op, cfg, params, module, x, data, dy, calls)


def _step(name: str, op: Op, cfg: Any, params: Any, module: nn.Module, x: Any, data: Tensor, dy: Tensor, calls: int) -> list[Row]:
    """Rows for a whole step of training: forward, backward of donated residuals, a norm of all gradients by which they are clipped,
    and AdamW in place. Positions are ids, as a loop has them; autograd's step has its table ready."""
    x = WithExtras(x.main, {"positions": torch.arange(LENGTH)}) if type(x) is WithExtras else x
    needs, settings = Needs(x=False), AdamWConfig(lr=1e-4)
    params, theirs = tree_map_tensors(torch.clone, params), list(module.parameters())
    state, fused = adamw_init(params, settings), torch.optim.AdamW(theirs, lr=1e-4, fused=True)

    def ours() -> Any:
        _, residuals = op.fwd(params, x, cfg, needs=needs)
        dparams, _ = op.bwd(donate(residuals), dy, cfg)
        factor = clip_factor(global_norm(dparams), 1.0)
        return adamw_update(params, dparams, state, settings, factor=factor, in_place=True)[0]

    def autograd() -> Any:
        module(data).backward(dy)
        nn.utils.clip_grad_norm_(theirs, 1.0)
        fused.step()
        fused.zero_grad()
        return theirs

    samples = interleaved({"funcops, step": ours, "autograd, step": autograd}, rounds=25, calls=calls, cpu=True)
    return summary("overhead", f"{name}, step", samples, "funcops, step")


def _variants(name: str, op: Op, cfg: Any, params: Any, x: Any, dy: Tensor, calls: int) -> list[Row]:
    """Rows for what the pages' loops do, each beside the same call without it: donated residuals, halves, halves of which both are
    donated, positions as ids."""

    def kept(node: Any) -> Any:
        return node

    def bwd(x: Any, give: Callable[[Any], Any]) -> Callable[[], Any]:
        def run() -> Any:
            _, residuals = op.fwd(params, x, cfg)
            return op.bwd(give(residuals), dy, cfg)

        return run

    def halves(give: Callable[[Any], Any]) -> Callable[[], Any]:
        def run() -> Any:
            _, residuals = op.fwd(params, x, cfg)
            dx, pending = op.dgrad(give(residuals), dy, cfg)
            return op.wgrad(give(pending), cfg), dx

        return run

    whole = bwd(x, kept)
    pairs = {"donated": (bwd(x, donate), whole), "donated halves": (halves(donate), halves(kept)), "halves": (halves(kept), whole)}
    if type(x) is WithExtras:
        pairs["positions as ids"] = bwd(WithExtras(x.main, {"positions": torch.arange(LENGTH)}), kept), whole
    rows = []
    for what, (one, other) in pairs.items():
        samples = interleaved({f"funcops, {what}": one, "funcops": other}, rounds=25, calls=calls, cpu=True)
        rows += summary("overhead", f"{name}, {what}", samples, f"funcops, {what}")
    return rows
