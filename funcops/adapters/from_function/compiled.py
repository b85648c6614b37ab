"""How torch.compile finds the trace of an op: Python looks it up while the compiler traces, which then follows the graphs alone."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import index
from typing import Any

import torch
from torch import Tensor

from funcops.adapters.from_function.joint import Like


class Watched(types.ModuleType):
    """`state` is computed whenever it is read. The compiler takes the attribute of a Python module as a constant, with a guard that
    reads it before each call, so that code which has read it is compiled anew after a change."""

    def __init__(self, read: Callable[[], str]) -> None:
        super().__init__("watched")
        self.read = read

    @property
    def state(self) -> str:
        return self.read()

    def kept(self, traced: Any) -> str:
        """The name of the attribute in which code that is being compiled finds the trace."""
        name = f"trace_{id(traced)}"
        setattr(self, name, traced)
        return name

    def clear(self) -> None:
        for name in [name for name in vars(self) if name.startswith("trace_")]:
            delattr(self, name)


def constants(t: Tensor) -> tuple[Any, ...]:
    """The shape, strides, dtype and device of a tensor, without symbols."""
    shape = tuple([index(n) for n in t.shape])
    if not t.is_contiguous():
        return shape, tuple([index(n) for n in t.stride()]), t.dtype, t.device
    strides: list[int] = []
    step = 1  # torch 2.13 cannot trace `stride()` of what was computed from sizes that were symbols at first
    for n in reversed(shape):
        strides.insert(0, step)
        step *= max(n, 1)
    return shape, tuple(strides), t.dtype, t.device


def stand_in(like: Like) -> Tensor:
    """A tensor of this layout for a trace, in which no value counts: the compiler has no others to give."""
    size = like.extent()
    if like.dtype.is_floating_point or like.dtype.is_complex:
        flat = torch.linspace(0.1, 0.9, size, device=like.device).to(like.dtype)
    else:  # indices that exist, and masks that hide nothing
        flat = torch.full((size,), like.dtype is torch.bool, dtype=like.dtype, device=like.device)
    return flat.as_strided(like.shape, like.stride)


@contextmanager
def uncompiled() -> Iterator[None]:
    """A block in which a model sees no compiler, for which it may take other steps."""
    home: Any = torch.compiler
    before, home._is_compiling_flag = home._is_compiling_flag, False
    try:
        yield
    finally:
        home._is_compiling_flag = before
