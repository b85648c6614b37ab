"""Checks of kernels while a law runs: a kernel returns fresh tensors, writes only to the arguments that `mutates` names, and its
two implementations return the same forms. A call outside of `kernels_checked` pays nothing for them."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from funcops.engine.backend import select
from funcops.engine.backend.declare import KERNELS, Kernel, watched
from funcops.engine.errors import describe
from funcops.engine.trees import tensors, tree_map_tensors
from funcops.testing.checks import equal_bits

_lock, _blocks = threading.Lock(), 0


@contextlib.contextmanager
def kernels_checked() -> Iterator[None]:
    """A block in which every eager call of a kernel is checked. Raises `AssertionError` in a call that breaks a rule."""
    with select.chosen(select.choice()):  # in any block a call asks `choose`, on the CPU too
        _count(1)
        try:
            yield
        finally:
            _count(-1)


def _count(by: int) -> None:
    global _blocks
    with _lock:
        _blocks += by
        for kernel in list(KERNELS) if _blocks == (by > 0) else ():
            kernel.scope["choose"] = functools.partial(_choose, kernel) if by > 0 else kernel.choose


def _choose(kernel: Kernel, first: Tensor) -> Any:
    chosen = kernel.choose(first)
    return chosen if watched() else functools.partial(_checked, kernel, chosen)


def _checked(kernel: Kernel, chosen: Any, *args: Any) -> Any:
    names = kernel.torch_impl.__code__.co_varnames
    before = tree_map_tensors(torch.clone, args)
    result = chosen(*args)
    for name, arg, was in zip(names, args, before, strict=False):
        for t, old in zip(tensors(arg), tensors(was), strict=True):
            same = name in kernel.mutates or equal_bits(t, old)
            assert same, f"kernel {kernel.name!r} wrote to {name}: write to a tensor of its own, or declare mutates=({name!r},)"
            shared = [t.numel() > 0 and _memory(r) == _memory(t) for r in tensors(result)]
            assert not any(shared), f"kernel {kernel.name!r} returned memory of {name}: a kernel returns fresh tensors"
    if chosen is not kernel.torch_impl:
        got, want = (one if isinstance(one, tuple) else (one,) for one in (result, kernel.torch_impl(*before)))
        said = f"Triton returned {', '.join(map(describe, got))}, torch {', '.join(map(describe, want))}"
        right = len(got) == len(want) and all(map(_alike, got, want))
        assert right, f"kernel {kernel.name!r}: {said}"
    return result


def _alike(got: Any, want: Any) -> bool:
    """Whether two results have one form; a torch body may add up at once, [1, N], what Triton returns as partial sums, [P, N]."""
    if not isinstance(got, Tensor) or not isinstance(want, Tensor):
        return got is want
    summed = want.dim() == got.dim() > 1 and want.shape[0] == 1 and want.shape[1:] == got.shape[1:]
    return got.dtype is want.dtype and (got.shape == want.shape or summed)


def _memory(t: Tensor) -> int:
    return t.untyped_storage()._cdata
