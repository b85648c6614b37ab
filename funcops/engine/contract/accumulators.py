"""`into`: the accumulators that a backward adds its gradients to, checked leaf by leaf before anything is added."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from funcops.engine.backend import tracing, wide
from funcops.engine.errors import GradModeError, describe, describe_tree, fail, join_path
from funcops.engine.trees import leaves, paths, same_structure

__all__ = ["accumulate", "check_accumulator", "check_apart", "check_into", "check_width", "takes_sums"]

T = TypeVar("T")


def accumulate(where: str, gradients: T, into: T | None) -> T:
    """Return `gradients`, or `into` with the gradients added in place, after a check of every leaf: the result of a `wgrad`.

    Raises `TypeError` or `ValueError`, before anything is added, if a gradient has no accumulator in `into` with its shape and
    device, its dtype or a wider one, and memory of its own."""
    if into is None:
        return gradients
    check_into(where, into, gradients)
    for accumulator, gradient in zip(leaves(into), leaves(gradients), strict=True):
        if gradient is not None:
            accumulator.add_(gradient)
    return into


def check_into(where: str, into: Any, gradients: Any) -> None:
    """Raise unless every gradient has an accumulator with its shape and device, its dtype or a wider one, and memory of its own."""
    if not same_structure(into, gradients):
        fail(where, "into", f"a tree like dparams, {describe_tree(gradients)}", describe_tree(into))
    have, given = paths(into), {}
    for path, gradient in paths(gradients).items():
        if gradient is not None:
            # an accumulator that gets no gradient may be None, or shared: nothing is written to it
            given[path] = have[path]
            check_accumulator(where, path, have[path], gradient.shape, gradient.device)
            check_width(where, path, have[path], gradient.dtype)
    check_apart(where, given)


def takes_sums(accumulator: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether a kernel of ours can add sums of gradients of `dtype` to it unrounded; true for None, to which nothing is added."""
    # the kernels write only to contiguous memory
    return accumulator is None or (accumulator.dtype is wide(dtype) and accumulator.is_contiguous())


def check_accumulator(where: str, path: str, accumulator: Any, shape: Any, device: Any = None) -> None:
    """Raise unless it is a float tensor of that shape, on that device, on which `add_` can be called."""
    if not isinstance(accumulator, Tensor):
        fail(where, join_path("into", path), f"a tensor {list(shape)}", describe(accumulator), TypeError)
    if tuple(accumulator.shape) != tuple(shape):  # two tuples: torch 2.11 cannot trace a comparison of a Size with one
        fail(where, join_path("into", path), str(list(shape)), list(accumulator.shape))
    if device is not None and accumulator.device != device:
        fail(where, join_path("into", path), f"on device {device}", accumulator.device)
    if not accumulator.is_floating_point():
        fail(where, join_path("into", path), "a floating dtype", accumulator.dtype, TypeError)
    # torch would refuse its `add_`, too, but only after others were added to
    if accumulator.requires_grad and torch.is_grad_enabled():
        wanted = "a tensor that does not require grad"
        fail(where, join_path("into", path), wanted, "one that does, in grad mode", GradModeError)
    # as above: torch refuses to add to it only when its turn comes
    if not accumulator.is_contiguous() and _overlaps_itself(accumulator):
        got = f"{describe(accumulator)} with strides {accumulator.stride()}"
        fail(where, join_path("into", path), "a tensor with memory for every element", got)


def check_width(where: str, path: str, accumulator: Tensor, dtype: torch.dtype) -> None:
    have = accumulator.dtype
    if have is not dtype and have.itemsize <= dtype.itemsize:  # neither float16 nor bfloat16 holds all values of the other
        fail(where, join_path("into", path), f"{dtype} or a wider float dtype", have, TypeError)


def check_apart(where: str, accumulators: dict[str, Tensor], name: str = "into", reads: dict[str, Tensor] | None = None) -> None:
    """Raise if two of them share memory, which would get the gradients, or updates, of both; or if one shares memory with a
    tensor which the call reads (`reads`, by its whole path)."""
    # a traced tensor has no address that could be compared
    if len(accumulators) + len(reads or {}) < 2 or tracing():
        return
    every = {f"{name}.{path}": t for path, t in accumulators.items()}
    written = {*every}
    # in the order of addresses each is compared only with earlier ones that reach as far; an empty tensor shares nothing
    every |= reads or {}
    spans = sorted([(t.data_ptr(), t.data_ptr() + _reach(t) * t.element_size(), path) for path, t in every.items() if t.numel()])
    held: list[tuple[int, str]] = []  # what reaches as far as the next one
    for start, stop, path in spans:
        held = [one for one in held if one[0] > start]
        for _, other in held:
            # every tensor on the meta device has the address 0, and no memory
            if start and (path in written or other in written) and _share(every[other], every[path]):
                mine, theirs = (path, other) if path in written else (other, path)
                fail(where, mine, "a tensor of its own", f"memory of {theirs}")
        held.append((stop, path))


def _reach(t: Tensor) -> int:
    """The number of elements of memory from the first element of a tensor to its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))


def _overlaps_itself(t: Tensor) -> bool:
    reach = 0
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)) if t.numel() else ():
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _share(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors whose spans of memory meet have an element in common: of one storage, or of two over the same memory, as
    of a NumPy array that torch took twice."""
    if a.device != b.device:
        return False
    size, first = a.element_size(), min(a.data_ptr(), b.data_ptr())
    # spans without gaps that meet share an element; elements that lie on no common grid are refused uncounted
    if (a.is_contiguous() and b.is_contiguous()) or size != b.element_size() or (a.data_ptr() - b.data_ptr()) % size:
        return True
    end = max([t.data_ptr() + _reach(t) * size for t in (a, b)])
    # on the CPU whatever torch's default device is: places are counted, no element is read
    taken = torch.zeros((end - first) // size, dtype=torch.bool, device="cpu")
    taken.as_strided(a.shape, a.stride(), (a.data_ptr() - first) // size).fill_(True)
    return bool(taken.as_strided(b.shape, b.stride(), (b.data_ptr() - first) // size).any())
