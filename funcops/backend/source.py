"""Names and keys in generated source."""

from __future__ import annotations

from typing import Any


def exact(names: Any) -> Any:
    """Turn names, alone or in tuples, lists and dicts, into plain strings: a subclass of str may have its own repr, which must not
    get into source or a path. Any other value is returned unchanged.

    >>> import enum
    >>> from funcops.backend.source import exact
    >>> exact(("up", enum.Enum("Name", {"DOWN": "down"}, type=str).DOWN))
    ('up', 'down')
    """
    kind = type(names)
    if kind in (tuple, list):
        return kind([exact(one) for one in names])
    if kind is dict:
        return {exact(name): exact(value) for name, value in names.items()}
    return str.__str__(names) if isinstance(names, str) and kind is not str else names


def literal(key: Any) -> str:
    """A key of a dict, as source.

    >>> from funcops.backend.source import literal
    >>> literal("up"), literal(3)
    ("'up'", '3')
    """
    for kind in (str, int):
        if isinstance(key, kind) and type(key) is not bool:
            return kind.__repr__(key)
    return repr(key)
