"""Old names that still work until version 0.4: each warns (`DeprecationWarning`) and says its new name.

`docs/reference.py` and `__all__` list new names only. Modules that have moved are in `funcops.contract.moved`.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def warn(where: str, old: str, new: str, stacklevel: int = 3) -> None:
    """Warn that `old` is now `new`. `stacklevel`: as of `warnings.warn`, called in this function."""
    warnings.warn(f"{where}: {old} is now {new}; the old name is removed in version 0.4", DeprecationWarning, stacklevel)


def old_arguments(**new_names: str) -> Callable[[F], F]:
    """Decorator: the function also takes these old keyword arguments, and passes each on under its new name."""

    def decorate(fn: F) -> F:
        where = fn.__qualname__.removesuffix(".__init__")

        @functools.wraps(fn)
        def renaming(*args: Any, **options: Any) -> Any:
            for old in [name for name in options if name in new_names]:
                warn(where, old, new_names[old])
                options[new_names[old]] = options.pop(old)
            return fn(*args, **options)

        return renaming  # type: ignore[return-value]

    return decorate


def old_attributes(**new_names: str) -> Callable[[type[T]], type[T]]:
    """Class decorator: these old attributes give the values of the new ones."""

    def decorate(cls: type[T]) -> type[T]:
        for old, new in new_names.items():

            def value(self: Any, old: str = old, new: str = new) -> Any:
                warn(cls.__name__, old, new)
                return getattr(self, new)

            setattr(cls, old, property(value))
        return cls

    return decorate


def old_fields(**new_names: str) -> Callable[[type[T]], type[T]]:
    """Class decorator of a dataclass: these old names of fields work as arguments and as attributes."""

    def decorate(cls: type[T]) -> type[T]:
        setattr(cls, "__init__", old_arguments(**new_names)(cls.__init__))  # noqa: B010  mypy takes no assignment to a method
        return old_attributes(**new_names)(cls)

    return decorate


def old_names(module: str, **new_names: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module that gives these old names the values of the new ones."""

    def of_module(name: str) -> Any:
        if name not in new_names:
            of = sys.modules[module]
            raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name, obj=of)  # Python prints the nearest
        warn(module, name, new_names[name])
        return getattr(sys.modules[module], new_names[name])

    return of_module
