"""Forms of a kept tensor: unchanged, compressed, in the host's memory, or dropped. `to_form` converts to a form, `from_form` back.

In a block of `one_form_each`, a tensor that several fields keep is packed once: the fields share the bytes, even if one field holds
a view of another's tensor.
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
from torch.compiler import is_dynamo_compiling

from funcops.engine.contract.marks import version, versions
from funcops.engine.errors import short
from funcops.engine.residuals.codec import codec, smaller
from funcops.engine.residuals.policy import Action, Compress, Drop, Offload, Placed
from funcops.engine.trees import leaf, static, tree, tree_map

__all__ = ["Layout", "Packed", "block_of", "from_form", "has_form", "one_form_each", "to_form"]


AT = {"here": "", "host": " on the host", "file": " in a file"}  # what a report says of a form in a place


class Layout(NamedTuple):
    """The layout of a tensor in its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(t: Tensor) -> Layout:
        return Layout(tuple(t.shape), t.stride(), int(t.storage_offset()))

    @property
    def dense(self) -> bool:
        """Whether the elements fill their range of the storage, without gaps or overlaps."""
        places = 1
        # a dimension of one element may have any stride
        for stride, size in sorted((stride, size) for stride, size in zip(self.stride, self.shape, strict=True) if size != 1):
            if stride != places:
                return False
            places *= size
        return True


@tree
class Packed:
    """A kept tensor in another form. `parts` are the tensors of that form; `shape`, `dtype` and `device` are the original's.
    `view`: if the original is a view of the tensor that was packed, the layouts of that tensor and of the view."""

    parts: Any = leaf("its tensors")
    action: Any = static()
    shape: Any = static()
    dtype: Any = static()
    device: Any = static()
    view: Any = static(None)

    @property
    def _version(self) -> Any:
        """The versions of the parts, so that a packed tensor is guarded like the original."""
        return versions(self)

    @property
    def form(self) -> str:
        """The name of the form in a report."""
        name = str(self.action.codec) if isinstance(self.action, Compress) else short(self.dtype)
        return name + AT.get(self.place, f" on {self.place}")

    @property
    def place(self) -> str:
        """The place of its bytes: "here", on the device that computes, the memory of its "host", a "file", or another
        by its name, such as "rank 1 of pp"."""
        away = self.parts[0] if type(self.parts[0]) is Packed else self
        return getattr(away.parts[0], "place", "host") if isinstance(away.action, Offload) else "here"


def has_form(value: Any) -> bool:
    """Whether a node stands for one tensor in another form: it has the `shape` of that tensor, and `form`, a name for reports."""
    # a property: a class of somebody's own may have a field of that name
    return isinstance(getattr(type(value), "form", None), property)


class _Known(NamedTuple):
    """The form of a tensor, while its storage (held weakly) lives and nobody writes to it."""

    storage: Any
    version: Any
    layout: Layout
    form: Packed


_known: ContextVar[dict[Any, _Known] | None] = ContextVar("funcops.forms", default=None)


def one_form_each() -> contextlib.AbstractContextManager[None]:
    """A block in which `to_form` reuses the form of a tensor that it converted before. A compiler merges equal computations
    itself."""
    return contextlib.nullcontext() if is_dynamo_compiling() or _known.get() is not None else _one_form_each()


@contextlib.contextmanager
def _one_form_each() -> Iterator[None]:
    token = _known.set({})
    try:
        yield
    finally:
        _known.reset(token)


def to_form(t: Any, action: Action) -> Any:
    """Convert a tensor, or each tensor of a tree, to the form of the action; unchanged if that would save nothing. A node with a
    form of its own, which is already in few bits, is not compressed."""
    if isinstance(action, Drop):
        return None
    if isinstance(action, Placed):  # the parts of the form have a form of their own
        return to_form(to_form(t, Compress(action.codec)), action.place)
    if not isinstance(t, Tensor):
        in_bits = has_form if isinstance(action, Compress) else None
        return tree_map(lambda one: to_form(one, action) if isinstance(one, Tensor) else one, t, is_leaf=in_bits)
    compress = isinstance(action, Compress) and smaller(action.codec, t)
    if not compress and not (isinstance(action, Offload) and action.mover.leaves(t)):
        return t
    known = None if is_dynamo_compiling() else _known.get()
    if known is None:
        return _packed(t, action)
    storage, layout = t.untyped_storage(), Layout.of(t)
    key = storage._cdata, t.dtype, action
    # another storage may have got the address by now, so the object itself is compared
    if (found := known.get(key)) is not None and found.storage() is storage and found.version == version(t):
        if found.layout == layout:
            return found.form
        # both fill the same range of the storage, so one is a view of the other's elements
        same = found.layout.offset == layout.offset and torch.Size(found.layout.shape).numel() == t.numel()
        if same and found.layout.dense and layout.dense:
            return dataclasses.replace(found.form, shape=t.shape, view=(found.layout, layout))
    form = _packed(t, action)
    known[key] = _Known(weakref.ref(storage), version(t), layout, form)
    return form


def _packed(t: Tensor, action: Any) -> Packed:
    return Packed(
        codec("pack", action.codec).encode(t) if isinstance(action, Compress) else (action.mover.on_host(t),),
        action=action,
        shape=t.shape,
        dtype=t.dtype,
        device=t.device,
        view=None,
    )


def block_of(value: Packed) -> int:
    """The number of elements of a row that share a scale of one byte; 0 in another form."""
    return codec("unpack", value.action.codec).block


def from_form(value: Any) -> Any:
    """The original of a packed tensor, or of each packed tensor in a tree."""
    if value is None or isinstance(value, Tensor):
        return value
    if type(value) is not Packed:
        return tree_map(lambda one: from_form(one) if type(one) is Packed else one, value, is_leaf=lambda one: type(one) is Packed)
    parts = tuple([from_form(part) for part in value.parts])  # which may be packed in turn
    if isinstance(value.action, Compress):
        t = codec("unpack", value.action.codec).decode(parts, value.dtype)
    else:
        t = value.action.mover.on_device(parts[0], value.device)
    if value.view is None:
        return t
    of, layout = value.view
    # a codec may return another layout, and the view has strides of the packed tensor's
    if t.stride() != of.stride:
        t = t.new_empty_strided(of.shape, of.stride).copy_(t)
    return t.as_strided(layout.shape, layout.stride, t.storage_offset())
