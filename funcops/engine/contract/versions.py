"""Versions: torch's count of the writes to a tensor and its views, by which later writes are noticed.

A mark is a tensor's version; while `sampling()` is true (`funcops.checking`) it is a version and a sample of the values. A write
that torch does not count, through `tensor.data`, a NumPy array or a raw pointer, goes unnoticed here as it does in autograd, except
by a sample. No other module reads versions: nodes read their marks with the source that `mark_source` writes, `once` gets the
reader, all other code uses `Versions`.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from funcops.engine.backend import once
from funcops.engine.backend.source import compile_source
from funcops.engine.errors import StaleResidualError, join_path, stale
from funcops.engine.trees import FIELDS, paths, tensors

__all__ = ["version"]

_own: Callable[[Any], Any] = operator.attrgetter("_version")
once.version = _own
_readers: dict[type, Callable[[Any], Any]] = {}  # by class of node


def versions(value: Any, read: Callable[[Any], Any] = _own) -> Any:
    """`read(t)` for a tensor t; for a small tree, a tuple with `read` of each of its tensors, in the tree's order."""
    kind = type(value)
    if read is _own and kind in _readers:
        return _readers[kind](value)
    if isinstance(value, Tensor):
        return read(value)
    if kind in FIELDS:
        return tuple([versions(getattr(value, name), read) for name in FIELDS[type(value)][0]])
    if type(value) is tuple:
        return tuple([versions(part, read) for part in value])
    return () if value is None else tuple([read(t) for t in tensors(value)])


def counts_writes(cls: type) -> type:
    """Class decorator of a node whose fields are each a tensor, None, or such a node: it gets a `_version`, as a tensor has, which
    `versions` returns for it. Written out as source: every forward and backward reads it."""
    reads = "".join([f"() if (t := n.{name}) is None else t._version, " for name in FIELDS[cls][0]])
    _readers[cls] = compile_source(f"version of {cls.__name__}", f"def version(n):\n    return ({reads})\n", {})["version"]
    cls._version = property(_readers[cls])  # type: ignore[attr-defined]
    return cls


def version(t: Any) -> Any:
    """The version of a tensor; None for an inference tensor, which has no version."""
    try:
        return t._version
    except RuntimeError:
        return None


SAMPLE = 1024  # elements of a tensor in a sample, spread evenly; all elements of a smaller tensor
sampling: Callable[[], bool] = bool  # whether marks hold samples, too: False, until `funcops.checking` replaces it


def mark_of(t: Any) -> Any:
    """The mark of a tensor as it is now."""
    now = version(t)
    return Sampled(now, t) if now is not None and sampling() and _sample(t) is not None else now


# an int, so that the written tests of marks compare it as they do a version
class Sampled(int):
    """A version, with a sample of its tensor (held weakly): equal to that version as long as the sampled values are the same."""

    ref: Callable[[], Any]
    bits: Any

    def __new__(cls, now: int, t: Tensor) -> Sampled:
        made = super().__new__(cls, now)
        made.ref, made.bits = weakref.ref(t), _sample(t)
        return made

    def __eq__(self, other: object) -> bool:
        # `is True`, as NotImplemented is true, too
        return int.__eq__(self, other) is True and self.holds()  # type: ignore[arg-type]

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__

    def holds(self) -> bool:
        t = self.ref()
        bits = None if t is None else _sample(t)
        return bits is None or (bits.shape == self.bits.shape and torch.equal(bits, self.bits))


def _sample(t: Tensor) -> Tensor | None:
    """The bits of a sample of a tensor; None if it is not a plain tensor with values that can be read."""
    known = type(t) in (Tensor, torch.nn.Parameter) and not t.is_meta and t.layout is torch.strided
    if not known or torch._C._len_torch_dispatch_stack() or torch._C._functorch.is_functorch_wrapped_tensor(t):
        return None
    # a comparison waits for the device, which no capture allows
    if t.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    with torch.no_grad():
        every, size = t.detach(), t.numel()
        if size > SAMPLE:
            place = torch.arange(SAMPLE, device=t.device) * size // SAMPLE
            # by index: a flat view of any strides may be a copy of the whole tensor
            found = every[torch.unravel_index(place, t.shape)]
        else:
            found = every.reshape(-1)
        # a clone, as a view would change with the tensor; bytes, as NaN does not equal itself
        return found.clone().view(torch.uint8)


def mark_source(tensor: str, tree: bool, name: str = "") -> str:
    """The source of `versions(tensor)` for an expression that is a tensor or None (with `tree`, anything), without the call.
    `name`: a local for an expression that takes long to evaluate."""
    if tree:
        return f"versions({tensor})"
    return f"() if {f'({name} := {tensor})' if name else tensor} is None else {name or tensor}._version"


class Versions:
    """The tensors of a tree, which it holds, and their versions when it is made, to notice later writes."""

    __slots__ = ("_marks", "_tensors", "_tree")

    def __init__(self, tree: Any, found: list[Tensor]) -> None:
        self._tree, self._tensors, self._marks = tree, found, [version(t) for t in found]

    @staticmethod
    def of(tree: Any) -> Versions:
        return Versions(tree, tensors(tree))

    def now(self) -> Versions:
        """The same tensors with their versions now."""
        return Versions(self._tree, self._tensors)

    def written(self) -> list[Tensor]:
        """The tensors that were written to since."""
        return [t for t, mark in zip(self._tensors, self._marks, strict=True) if version(t) != mark]

    def check(
        self, where: str, what: str, by: str = "forward", hint: str = "", error: type[Exception] = StaleResidualError
    ) -> None:
        """Raise if a tensor was written to since, with its path in the tree, which the error calls `what`."""
        found = self.written()
        if found:
            path = next(path for path, leaf in paths(self._tree).items() if leaf is found[0])
            stale(where, join_path(what, path), by, hint, error=error)
