"""Forms of a kept tensor: as it is, compressed, in the host's memory, or none. `to_form` gives it one, `from_form` takes it back.

In a block of `one_form_each` a tensor that is kept more than once is packed once: its fields share the bytes, also where one of
them is a view of another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops.backend import tracing
from funcops.contract.marks import version, versions
from funcops.errors import short
from funcops.formats import QTensor
from funcops.residuals.codec import BLOCKS, codec, smaller
from funcops.residuals.offload import copies
from funcops.residuals.policy import Action, Compress, Drop, Offload
from funcops.trees import leaf, static, tree, tree_map


class Layout(NamedTuple):
    """How a tensor lies in its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(t: Tensor) -> Layout:
        return Layout(tuple(t.shape), t.stride(), int(t.storage_offset()))

    @property
    def dense(self) -> bool:
        """Whether each place between its first and its last is one element's."""
        places = 1
        for stride, size in sorted((stride, size) for stride, size in zip(self.stride, self.shape, strict=True) if size != 1):
            if stride != places:
                return False
            places *= size
        return True


@tree
class Packed:
    """A kept tensor in another form. `parts`: what is kept; `shape`, `dtype` and `device` are its own; `view`: where it is a view
    of the tensor that was packed, the layouts of both."""

    parts: Any = leaf("its tensors")
    action: Any = static()
    shape: Any = static()
    dtype: Any = static()
    device: Any = static()
    view: Any = static(None)

    @property
    def _version(self) -> Any:
        """Those of its parts: it is guarded as the tensor is that it stands for."""
        return versions(self)

    @property
    def form(self) -> str:
        """As a report says it."""
        return self.action.codec if isinstance(self.action, Compress) else f"{short(self.dtype)} on the host"


class _Known(NamedTuple):
    """The form of a tensor, while its storage (held weakly) lives and nobody writes to it."""

    storage: Any
    version: Any
    layout: Layout
    form: Packed


_known: ContextVar[dict[Any, _Known] | None] = ContextVar("funcops.forms", default=None)


def one_form_each() -> contextlib.AbstractContextManager[None]:
    """A block in which `to_form` gives a tensor the form that it has. A compiler sees equal computations itself."""
    return contextlib.nullcontext() if tracing() or _known.get() is not None else _one_form_each()


@contextlib.contextmanager
def _one_form_each() -> Iterator[None]:
    token = _known.set({})
    try:
        yield
    finally:
        _known.reset(token)


def to_form(t: Any, action: Action) -> Any:
    """The tensor, or each of a tree, in the form that the action gives it; as it is where that would not help. A `QTensor`, which
    is in few bits already, is not compressed."""
    if isinstance(action, Drop):
        return None
    if not isinstance(t, Tensor):
        low = QTensor if isinstance(action, Compress) else ()
        return tree_map(
            lambda one: to_form(one, action) if isinstance(one, Tensor) else one, t, is_leaf=lambda one: isinstance(one, low)
        )
    compress = isinstance(action, Compress) and smaller(action.codec, t)
    if not compress and not (isinstance(action, Offload) and copies.leaves(t)):
        return t
    known = None if tracing() else _known.get()
    if known is None:
        return _packed(t, action)
    storage, layout = t.untyped_storage(), Layout.of(t)
    key = storage._cdata, t.dtype, action
    if (found := known.get(key)) is not None and found.storage() is storage and found.version == version(t):
        if found.layout == layout:
            return found.form
        if found.layout.dense and layout.dense and _same_elements(found.layout, layout):
            form = found.form
            return dataclasses.replace(form, shape=t.shape, view=(found.layout, layout))
    form = _packed(t, action)
    known[key] = _Known(weakref.ref(storage), version(t), layout, form)
    return form


def _same_elements(a: Layout, b: Layout) -> bool:
    return a.offset == b.offset and torch.Size(a.shape).numel() == torch.Size(b.shape).numel()


def _packed(t: Tensor, action: Action) -> Packed:
    parts = codec("pack", action.codec).encode(t) if isinstance(action, Compress) else (copies.on_host(t),)
    return Packed(parts, action=action, shape=t.shape, dtype=t.dtype, device=t.device, view=None)


def in_blocks(value: Any) -> bool:
    """Whether it is a whole tensor in codes and scales of blocks, for whoever reads these as they are: see `block_of`."""
    return type(value) is Packed and isinstance(value.action, Compress) and value.action.codec in BLOCKS and value.view is None


def block_of(value: Packed) -> int:
    """Elements of a row that share a scale."""
    return BLOCKS[value.action.codec]


def from_form(value: Any) -> Any:
    """What was packed, in a tree of any kind."""
    if value is None or isinstance(value, Tensor):
        return value
    if type(value) is not Packed:
        return tree_map(lambda one: from_form(one) if type(one) is Packed else one, value, is_leaf=lambda one: type(one) is Packed)
    if isinstance(value.action, Compress):
        t = codec("unpack", value.action.codec).decode(value.parts, value.dtype)
    else:
        t = copies.on_device(value.parts[0], value.device)
    if value.view is None:
        return t
    of, layout = value.view
    if t.stride() != of.stride:
        t = t.new_empty_strided(of.shape, of.stride).copy_(t)
    return t.as_strided(layout.shape, layout.stride, t.storage_offset())
