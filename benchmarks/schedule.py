"""The cost of a split backward: matrix products, and live bytes between I and W, against the split of the same blocks by
torch.distributed.pipelining. On the CPU, and exact: every product and every storage is counted, except params and x. And the
simulator's predictions of published runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import published
from benchmarks.measure import Row
from benchmarks.memory import Live
from benchmarks.plain import PlainBlock, as_on_a_gpu
from funcops import RepeatConfig, WithExtras, chain, donate, random, repeat
from funcops import nn as fnn
from funcops.models.blocks import block_config

DIM, HEADS, HIDDEN, LENGTH, LAYERS = 256, 4, 704, 1024, 3
PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "_addmm_activation"}


class Products(TorchDispatchMode):
    """Counts matrix products of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "aten" and func._schema.name.partition("::")[2] in PRODUCTS
        return func(*args, **(kwargs or {}))


def run() -> list[Row]:
    return [*_products(), *_bytes(), *published.rows()]


def _functional() -> tuple[Any, Any, Any, Tensor]:
    cfg = RepeatConfig(chain, block_config(DIM, HEADS, HIDDEN), LAYERS)
    torch.manual_seed(0)
    data, dy = torch.randn(2, 1, LENGTH, DIM).unbind()
    return cfg, repeat.init(cfg, key=random.key(0)), WithExtras(data, {"positions": torch.arange(LENGTH)}), dy


def _modules(ours: bool) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(PlainBlock(DIM, HEADS, HIDDEN, LENGTH) for _ in range(LAYERS)))
    if ours:
        fnn.from_torch(model)
    data, dy = torch.randn(2, 1, LENGTH, DIM).unbind()
    return model, data.requires_grad_(), dy


def _products() -> list[Row]:
    """Count the linear layers' products in I and W (or B), over all blocks."""
    cfg, params, x, dy = _functional()
    counts: dict[str, int] = {}
    _, residuals = repeat.fwd(params, x, cfg)
    with Products() as counter:
        repeat.bwd(residuals, dy, cfg)
    counts["funcops, unsplit"] = counter.count
    with Products() as counter:
        _, pending = repeat.dgrad(residuals, dy, cfg)
        repeat.wgrad(pending, cfg)
    counts["funcops, split"] = counter.count
    for name, ours in (("torch.nn", False), ("funcops.nn (custom functions)", True)):
        model, data, dy = _modules(ours)
        y = model(data)
        with Products() as counter:
            y.backward(dy)
        counts[f"{name}, unsplit"] = counter.count
        model, data, dy = _modules(ours)
        with Products() as counter:
            forward_and = _torch_split(model, data, dy, lambda: None)
        counts[f"{name}, torch's split"] = counter.count - forward_and
    return [
        Row("schedule", f"{LAYERS} llama blocks", name, "matrix products in the backward", float(count), "")
        for name, count in counts.items()
    ]


def _torch_split(model: nn.Module, data: Tensor, dy: Tensor, between: Callable[[], None]) -> int:
    """Run forward, I and W as torch.distributed.pipelining does. Returns the number of products in the forward."""
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    with Products() as counter:
        y = model(data)
    _, groups = stage_backward_input([y], [dy], [data], model.parameters())
    del y
    between()
    stage_backward_weight(model.parameters(), groups)
    return counter.count


def _bytes() -> list[Row]:
    """Count live bytes after F, between I and W, and at the peak."""
    split = "torch's split of torch.nn"
    found: dict[str, dict[str, int]] = {"funcops": {}, split: {}, f"{split}, as on a GPU": {}}
    cfg, params, x, dy = _functional()
    with Live() as live:
        y, residuals = repeat.fwd(params, x, cfg)
        del y
        found["funcops"]["after F"] = _now(live)
        dx, pending = repeat.dgrad(donate(residuals), dy, cfg)
        found["funcops"]["between I and W"] = _now(live)
        dparams = repeat.wgrad(donate(pending), cfg)
    found["funcops"]["peak"] = live.peak
    del dx, dparams
    for torchs, gpu in ((found[split], False), (found[f"{split}, as on a GPU"], True)):
        model, data, dy = _modules(ours=False)
        if gpu:
            as_on_a_gpu(model)
        with Live() as live:
            y = model(data)
            torchs["after F"] = _now(live)
            del y
            _torch_split(model, data, dy, lambda torchs=torchs, live=live: torchs.update({"between I and W": _now(live)}))
        torchs["peak"] = live.peak
    case = f"{LAYERS} llama blocks, {LENGTH} tokens, float32"
    rows = [
        Row("schedule", case, name, f"live bytes {when}", value / 2**20, "MiB")
        for name, values in found.items()
        for when, value in values.items()
    ]
    ratios = {when: value / found[split][when] for when, value in found["funcops"].items()}
    return rows + [
        Row("schedule", case, "funcops", f"live bytes {when}, ratio to torch's split", ratio, "") for when, ratio in ratios.items()
    ]


def _now(live: Live) -> int:
    return sum(live.seen.values())
