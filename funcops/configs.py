"""Configs: frozen data, all that is static of an op, that check their fields and know their hash."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeVar

import torch
from typing_extensions import dataclass_transform

from funcops.errors import fail, require_type
from funcops.memo import number_while_tracing
from funcops.names import exact

T = TypeVar("T")
NoneType = type(None)
LARGEST = torch.finfo(torch.float32).max


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,))
def config(cls: type[T]) -> type[T]:
    """Class decorator: a frozen, keyword-only dataclass whose hash is computed once. All that is static of an op. A field
    annotated int, float, bool or str (or one of them, or None) raises `TypeError` for anything else, `ValueError` for NaN, and
    for a float that float32, in which kernels compute, has no number for."""
    checked = _check_types(cls)
    made: Any = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    compute = made.__hash__

    def __hash__(self: Any) -> int:
        try:
            return self._hash
        except AttributeError:
            object.__setattr__(self, "_hash", compute(self))
            return self._hash

    made.__hash__ = __hash__
    made.number_while_tracing = number_while_tracing
    # A copy is the config itself; a pickled one is made anew, as hashes and what is computed from fields hold in one process.
    made.__copy__ = lambda self: self
    made.__deepcopy__ = lambda self, memo: self
    names = [f.name for f in dataclasses.fields(made) if f.init]
    checked += names
    made.__reduce__ = lambda self: (_unpickled, (type(self), {name: getattr(self, name) for name in names}))
    return made


def _unpickled(cls: Any, fields: dict[str, Any]) -> Any:
    return cls(**fields)


_PLAIN = (str, int, float, bool, NoneType)
_TYPES = {"int": (int,), "float": (float, int), "bool": (bool,), "str": (str,), "None": (NoneType,)}


def _check_types(cls: Any) -> list[str]:
    """Put a check of plain fields before the class's own checks; and names in the fields that the list, which is returned, comes to
    hold are plain strings from then on."""
    fields: list[str] = []
    wanted: dict[str, tuple[type, ...]] = {}
    for name, annotation in cls.__dict__.get("__annotations__", {}).items():
        words = (annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))).split(" | ")
        if all([word in _TYPES for word in words]):
            wanted[name] = tuple([t for word in words for t in _TYPES[word]])
    given = getattr(cls, "__post_init__", None)

    def __post_init__(self: Any) -> None:
        for name in fields:
            value = getattr(self, name)
            if type(value) not in _PLAIN:
                object.__setattr__(self, name, exact(value))
        for name, types in wanted.items():
            value = getattr(self, name)
            require_type(type(self).__name__, name, value, *types)
            if value != value:
                fail(type(self).__name__, name, "a number", value)
            if float in types and value is not None and LARGEST < abs(value) < math.inf:
                fail(type(self).__name__, name, f"at most {LARGEST:.3g} in size, as float32 is", value)
        if given is not None:
            given(self)

    cls.__post_init__ = __post_init__
    return fields
