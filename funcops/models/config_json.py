"""The fields of a config.json, taken one by one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from funcops.engine.errors import describe, require, require_type

Found = dict[str, Any]  # the arguments of a DecoderConfig
NEVER = object()
MOST = 2**31 - 1  # of any whole number, as sizes and positions are


class Fields:
    """The fields of a config.json, each taken once by name; a null field counts as absent."""

    def __init__(self, where: str, given: Mapping[str, Any], length: int | None) -> None:
        self.where, self.given, self.length, self.taken = where, given, length, set[str]()
        self.last = ""  # the field that was taken last

    def take(self, name: str, default: Any = NEVER, kind: Any = None) -> Any:
        """Return a field's value, which must be of type `kind`, by default the default's type; or the default if it is absent."""
        self.taken.add(name)
        self.last = name
        value = self.given.get(name)
        if value is None:
            require(default is not NEVER, self.where, name, "given", "none")
            return default
        wanted = kind or (type(default) if isinstance(default, (bool, int, float, str)) else None)
        if wanted is not None:
            require_type(self.where, name, value, *((int, float) if wanted is float else (wanted,)))
        if type(value) is int:
            require(0 <= value <= MOST, self.where, name, f"from 0 to {MOST}", describe(value))
        if type(value) is float:
            require(math.isfinite(value), self.where, name, "finite", value)
        return value

    def only(self, name: str, value: Any) -> None:
        got = self.take(name, value)
        require(got == value, self.where, name, repr(value), repr(got))
