"""Forms of a kept tensor: as it is, compressed, in the host's memory, or none. `pack` gives it one, `unpack` takes it back.

In a block of `one_form_each` a tensor that is kept more than once is packed once: its fields share the bytes, also where one of
them is a view of another.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops.backend import tracing
from funcops.marks import version, versions
from funcops.residuals.codec import codec, smaller
from funcops.residuals.offload import copies
from funcops.residuals.policy import Action, Compress, Drop, Offload
from funcops.trees import leaf, static, tree, tree_map, tree_map_tensors


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
    """A kept tensor in another form. `parts`: what is kept; `view`: where it is a view of the tensor that was packed, the
    layouts of both."""

    parts: Any = leaf("its tensors")
    action: Any = static()
    dtype: Any = static()
    device: Any = static()
    view: Any = static(None)

    @property
    def _version(self) -> Any:
        """Those of its parts: it is guarded as the tensor is that it stands for."""
        return versions(self)

    def __reduce__(self) -> Any:
        """Pickle has no code for 8-bit floats: they go as bytes."""
        parts = tuple([(t.view(torch.uint8), t.dtype) if t.dtype.itemsize == 1 else (t, t.dtype) for t in self.parts])
        return _unpickled, (parts, self.action, self.dtype, self.device, self.view)


def _unpickled(parts: Any, action: Action, dtype: Any, device: Any, view: Any) -> Packed:
    return Packed(tuple([t.view(kind) for t, kind in parts]), action=action, dtype=dtype, device=device, view=view)


class _Known(NamedTuple):
    """The form of a tensor, while its storage (held weakly) lives and nobody writes to it."""

    storage: Any
    version: Any
    layout: Layout
    form: Packed


_known: ContextVar[dict[Any, _Known] | None] = ContextVar("funcops.forms", default=None)


def one_form_each() -> contextlib.AbstractContextManager[None]:
    """A block in which `pack` gives a tensor the form that it has. A compiler sees equal computations itself."""
    return contextlib.nullcontext() if tracing() or _known.get() is not None else _one_form_each()


@contextlib.contextmanager
def _one_form_each() -> Iterator[None]:
    token = _known.set({})
    try:
        yield
    finally:
        _known.reset(token)


def pack(t: Any, action: Action) -> Any:
    """The tensor, or each of a tree, in the form that the action gives it; as it is where that would not help."""
    if isinstance(action, Drop):
        return None
    if not isinstance(t, Tensor):
        return tree_map_tensors(lambda one: pack(one, action), t)
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
        if found.layout.dense and layout.dense and _same_places(found.layout, layout):
            form = found.form
            return Packed(form.parts, action=action, dtype=form.dtype, device=form.device, view=(found.layout, layout))
    form = _packed(t, action)
    known[key] = _Known(weakref.ref(storage), version(t), layout, form)
    return form


def _same_places(a: Layout, b: Layout) -> bool:
    return a.offset == b.offset and torch.Size(a.shape).numel() == torch.Size(b.shape).numel()


def _packed(t: Tensor, action: Action) -> Packed:
    parts = codec("pack", action.codec).encode(t) if isinstance(action, Compress) else (copies.on_host(t),)
    return Packed(parts, action=action, dtype=t.dtype, device=t.device, view=None)


def unpack(value: Any) -> Any:
    """What was packed, in a tree of any kind."""
    if value is None or isinstance(value, Tensor):
        return value
    if type(value) is not Packed:
        return tree_map(lambda one: unpack(one) if type(one) is Packed else one, value, is_leaf=lambda one: type(one) is Packed)
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
