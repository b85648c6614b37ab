"""A call of a kernel, the product or bytes that it is measured by, and a maker of its arguments."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from funcops.engine import random

CODES = 13  # bits of a Hopper's sums of products of 8-bit codes
Prepared = Callable[..., Callable[[], Any]]
Dtype = torch.dtype  # in `KernelCall` the name dtype is a field


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """The call `kernel(*args)`. `torch(*args)` prepares torch's own call for the same result, if one differs from the kernel's
    torch body, and `others` calls by further providers. `product(*args)` prepares the bare matrix product, of `flops`, that the
    kernel is measured by (None: it is measured by bytes), with sums of `length` terms. `dtype`: the results' dtype, if it is not
    the maker's. `values(results)`: decodes results that are codes. `bits`: of the mantissa of sums, if a device's products keep
    fewer than the dtype has."""

    kernel: Any
    shape: str
    args: tuple[Any, ...]
    torch: Prepared | None = None
    product: Prepared | None = None
    flops: float = 0.0
    length: int = 1
    dtype: Dtype | None = None
    values: Callable[[Any], Any] | None = None
    bits: int | None = None
    others: tuple[tuple[str, Prepared], ...] = ()

    @property
    def name(self) -> str:
        return str(self.kernel.kernel.name)

    @property
    def named(self) -> dict[str, Any]:
        """The arguments by name, without those left to their defaults."""
        return dict(zip(inspect.signature(self.kernel.kernel.torch_impl).parameters, self.args, strict=False))


def direct(f: Callable[..., Any]) -> Prepared:
    return lambda *args: lambda: f(*args)


def gradient(f: Callable[..., Tensor], *, wrt: int) -> Prepared:
    """Only the autograd backward of f, for args `(dy, *inputs of f)`, with respect to the first `wrt` inputs."""

    def prepare(dy: Tensor, *args: Any) -> Callable[[], Any]:
        leaves = [t.detach().requires_grad_() for t in args[:wrt]]
        y = f(*leaves, *args[wrt:])
        return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)

    return prepare


class Maker:
    """Makes arguments on a device, in a dtype, of sizes divided by `shrink`."""

    def __init__(self, device: str, dtype: torch.dtype, shrink: int = 1) -> None:
        self.device, self.dtype, self.shrink = device, dtype, shrink

    def sizes(self, *sizes: int) -> tuple[int, ...]:
        return tuple(max(8, n // self.shrink) for n in sizes)

    def floats(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        if self.device == "meta":  # meta tensors hold no numbers
            return torch.empty(shape, device="meta", dtype=dtype or self.dtype)
        return torch.randn(shape, device=self.device).to(dtype or self.dtype)

    def wide(self, *shape: int) -> Tensor:
        return torch.empty(shape, device="meta") if self.device == "meta" else torch.rand(shape, device=self.device) + 0.5

    def ids(self, *shape: int, below: int) -> Tensor:
        return torch.randint(below, shape, device=self.device)

    def codes(self, *shape: int, about: int = 0x38) -> Tensor:
        """Random bytes that are codes of numbers around 1, in 8 bits and in 4."""
        return torch.randint(about - 8, about + 8, shape, device=self.device, dtype=torch.uint8)

    def key(self) -> Tensor:
        return random.key(0).to(self.device)
