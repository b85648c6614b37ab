"""The same model under autograd, torch_remat and `op_from_module`: bytes alive after a forward, and products of a whole step.

torch_remat's annotation is the one with the fewest bytes that computes no product again: each linear layer, convolution and
attention is a region that is not recomputed, whose output the replay may read, in one checkpoint around the whole model with its
loss. One checkpoint a block would hold the blocks' inputs beside these. It does not replay dropout, so that belongs to a region.
"""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.memory import Live
from funcops.engine.trees import tensors

INSTALLED = importlib.util.find_spec("torch_remat") is not None
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "_grouped_mm"}
LAYERS = ("Linear", "DroppedLinear", "Conv1d", "Conv2d", "Conv1D")  # the last is GPT-2's linear layer


class Products(TorchDispatchMode):
    """Counts products and attentions; the backward of a convolution counts for each gradient of it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name == "convolution_backward":
            self.count += sum(args[10][:2])
        else:
            self.count += name in PRODUCTS or "scaled_dot_product" in name
        return func(*args, **(kwargs or {}))


def cost(forward: Callable[[], tuple[Any, Any]], backward: Callable[[Any, Any], Any]) -> tuple[int, int]:
    """The bytes that operators of `forward() -> (y, residuals)` made and that live after it, without y's; the products of both."""
    with Products() as products:
        with Live() as live:
            y, held = forward()
        gc.collect()
        kept = sum(live.seen.values()) - sum([t.nbytes for t in tensors(y)])
        backward(y, held)
    return kept, products.count


def cost_of_autograd(call: Callable[[], Tensor], weights: list[Tensor]) -> tuple[int, int]:
    """The cost of a step of `call() -> loss`."""
    return cost(lambda: (call(), None), lambda y, _: torch.autograd.grad(y, weights, torch.ones_like(y), allow_unused=True))


def cost_of_torch_remat(module: nn.Module, call: Callable[[], Tensor], weights: list[Tensor]) -> tuple[int, int]:
    """The cost of the same step with torch_remat's annotations; `call` calls the module."""
    import torch_remat

    calls: dict[str, int] = {}

    def again() -> Tensor:
        calls.clear()
        return call()

    with _annotated(module, calls):
        return cost_of_autograd(torch_remat.checkpoint(region_name="model")(again), weights)


@contextmanager
def in_blocks(blocks: nn.Sequential) -> Iterator[Callable[[Tensor], Tensor]]:
    """The same layers under the same annotation, but each block in a checkpoint of its own: fewer bytes at the peak of a step, as a
    backward replays one block at a time."""
    import torch_remat

    calls: dict[str, int] = {}

    def again(block: nn.Module) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            calls.clear()
            return block(x)

        return run

    def whole(x: Tensor) -> Tensor:
        for i, block in enumerate(blocks):
            x = torch_remat.checkpoint(region_name=f"block {i}")(again(block))(x)
        return x

    with _annotated(blocks, calls):
        yield whole


@contextmanager
def _annotated(module: nn.Module, calls: dict[str, int]) -> Iterator[None]:
    import torch_remat

    def region(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            y = torch_remat.region(function, f"{name}.{calls[name]}", recompute=False)(*args, **kwargs)
            torch_remat.recompute_needs_tensor(y)
            return y

        return run

    parts = dict[str, nn.Module]()
    for name, part in module.named_modules():  # a layer of PEFT's has layers inside, and is one region
        if type(part).__name__ in LAYERS and not any(name.startswith(f"{outer}.") for outer in parts):
            parts[name] = part
    attention = nn.functional.scaled_dot_product_attention
    try:
        nn.functional.scaled_dot_product_attention = region("attention", attention)
        for name, part in parts.items():
            part.forward = region(name, part.forward)
        yield
    finally:
        nn.functional.scaled_dot_product_attention = attention
        for part in parts.values():
            vars(part).pop("forward", None)
