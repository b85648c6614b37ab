"""Generated source: how it is compiled, and names as they are written into it."""

from __future__ import annotations

import itertools
import linecache
import weakref
from types import FunctionType
from typing import Any

__all__ = ["compile_source", "exact"]

_numbers = itertools.count()


def compile_source(what: str, text: str, scope: dict[str, Any]) -> dict[str, Any]:
    """Define the functions of a text in `scope`, their globals, and return it. Tracebacks and `inspect.getsource` show the text,
    until the function that it defines last is gone; `what` names it there.

    >>> import inspect
    >>> from funcops.engine.backend.source import compile_source
    >>> scope = compile_source("example", "def double(x):\\n    return two * x\\n", {"two": 2})
    >>> scope["double"](4), inspect.getsource(scope["double"]).splitlines()[1]
    (8, '    return two * x')
    """
    # numbered, as `linecache` would show another text of the same name
    file = f"<funcops {what}, {next(_numbers)}>"
    exec(compile(text, file, "exec"), scope)
    made = [one for one in scope.values() if isinstance(one, FunctionType) and one.__code__.co_filename == file]
    if made:
        # without a time of change: `checkcache` would drop an entry whose file does not exist
        linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
        weakref.finalize(made[-1], linecache.cache.pop, file, None).atexit = False
    return scope


def exact(names: Any) -> Any:
    """Turn names, alone or in tuples, lists and dicts, into plain strings: a subclass of str may have its own repr, which must not
    get into source or a path. Any other value is returned unchanged.

    >>> import enum
    >>> from funcops.engine.backend.source import exact
    >>> exact(("up", enum.Enum("Name", {"DOWN": "down"}, type=str).DOWN))
    ('up', 'down')
    """
    kind = type(names)
    if kind in (tuple, list):
        return kind([exact(one) for one in names])
    if kind is dict:
        return {exact(name): exact(value) for name, value in names.items()}
    return str.__str__(names) if isinstance(names, str) and kind is not str else names
