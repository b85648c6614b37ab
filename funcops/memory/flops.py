"""Counting the floating-point operations of matrix products in a trace on shapes."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from funcops.engine.backend.declare import KERNELS

__all__ = ["ON_CPU", "FlopCounter"]


def _attention_flops(q: Any, k: Any, v: Any, *_: Any, products: tuple[int, int] = (1, 1), **__: Any) -> int:
    """Two products, as torch counts them on other devices: a causal mask saves nothing. q: [B, H, T, D], k: [B, H', S, D]."""
    batch, heads, rows, size = q
    return int(2 * batch * heads * rows * k[-2] * (products[0] * size + products[1] * v[-1]))


def _attention_backward_flops(dy: Any, *x: Any, **_: Any) -> int:
    """Five products: the recomputed scores, dv, dp, dq, dk."""
    return _attention_flops(*x, products=(3, 2))


_aten = torch.ops.aten
ON_CPU = {  # torch's counter lacks the CPU's attention
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}


class FlopCounter(TorchDispatchMode):
    """torch's counter, which also knows the kernels of this library: of one that reads values by its formula, of any other by its
    torch body, which runs beside it on the same shapes. Inside a FakeTensorMode."""

    def __init__(self) -> None:
        super().__init__()
        self.of_torch, self.of_formulas = FlopCounterMode(display=False, custom_mapping=ON_CPU), 0
        self.kernels = {f"funcops::{kernel.name}{by}": kernel for kernel in KERNELS for by in ("", "_by_torch")}

    def __enter__(self) -> FlopCounter:
        self.of_torch.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.of_torch.__exit__(*error)

    @property
    def total(self) -> int:
        return int(self.of_torch.get_total_flops()) + self.of_formulas

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kernel = self.kernels.get(func._schema.name)
        if kernel is not None:
            names = [argument.name for argument in func._schema.arguments[: len(args)]]  # torch leaves out defaults
            given = dict(zip(names, args, strict=True))
            if kernel.flops is not None:
                self.of_formulas += kernel.flops(**{one: given[one] for one in inspect.signature(kernel.flops).parameters})
            elif not kernel.opaque:  # a written tensor's count of writes must not change
                written = {name: torch.empty_like(t) for name in kernel.mutates if isinstance(t := given.get(name), Tensor)}
                kernel.torch_impl(**{**given, **written})
        return func(*args, **(kwargs or {}))
