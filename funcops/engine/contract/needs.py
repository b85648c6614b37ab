"""`Needs`: which gradients a backward will compute. Static, hashable; it decides what the residuals hold. In a program it also
carries what a policy chose: the fields that are recomputed (`drop`), and whether y is (`recompute`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from torch.compiler import is_dynamo_compiling

from funcops.engine.backend.source import exact
from funcops.engine.contract.trace_safe_cache import remember
from funcops.engine.errors import describe, fail, nearest
from funcops.engine.trees import has, paths

__all__ = ["Mask", "Needs", "check_needs", "sub_mask"]

Mask = bool | tuple[str, ...]


class Needs:
    """`Needs(x=True, params=True)`; each side is a bool, or the paths that need a gradient.

    A mask may be given as an iterable of dotted paths (a path covers all below it) or as a tree of bools, and is kept as a sorted
    tuple of paths; what neither names needs no gradient. Equal needs are one object, except those that a compiler makes while it
    traces.

    >>> from funcops import Needs
    >>> Needs(params={"weight": True, "bias": False})
    Needs(x=True, params=('weight',))
    """

    __slots__ = ("_hash", "drop", "params", "recompute", "x")
    x: Mask
    params: Mask
    drop: tuple[str, ...]  # fields that the residuals leave out, as a program recomputes them
    recompute: bool  # whether a program will recompute y
    ALL: ClassVar[Needs]
    NONE: ClassVar[Needs]

    def __new__(cls, x: Any = True, params: Any = True) -> Needs:
        return _intern(_mask("x", x), _mask("params", params))

    @property
    def any(self) -> bool:
        """Whether anything is needed, as `bool(needs)` says, which the compiler of torch 2.11 does not trace."""
        return bool(self.x or self.params or self.recompute)

    def __bool__(self) -> bool:
        return self.any

    def __repr__(self) -> str:
        more = f", drop={self.drop}" if self.drop else ""
        return f"Needs(x={self.x}, params={self.params}{more}{', recompute=True' if self.recompute else ''})"

    def __reduce__(self) -> Any:
        # unpickled by the function that returns the one object: ops ask whether `needs is ALL`
        return _intern, (self.x, self.params, self.drop, self.recompute)

    def __copy__(self) -> Needs:
        return self

    def __deepcopy__(self, memo: Any) -> Needs:
        return self

    def dropping(self, fields: tuple[str, ...]) -> Needs:
        """The same gradients, with residuals that lack these fields until a program fills them in."""
        return _intern(self.x, self.params, fields, self.recompute)

    def with_recompute(self) -> Needs:
        """The same gradients, and y recomputed."""
        return _intern(self.x, self.params, self.drop, True)

    @property
    def of_gradients(self) -> Needs:
        """The same gradients, without what a program chose."""
        return _intern(self.x, self.params) if self.drop or self.recompute else self

    def param(self, path: str) -> bool:
        """Whether the gradient of this parameter is needed."""
        mask = self.params
        return mask if mask is True else _covers(mask, path)

    def input(self, path: str | int) -> bool:
        """Whether the gradient of this part of x is needed: `"0"` or 0 for the first of a tuple."""
        mask = self.x
        return mask if mask is True else _covers(mask, str(path))


_interned: dict[Any, Needs] = {}  # a plain dict: torch.compile finds what is in it


def _intern(x: Mask, params: Mask, drop: tuple[str, ...] = (), recompute: bool = False) -> Needs:
    key = x, params, drop, recompute
    if key not in _interned:
        needs = object.__new__(Needs)
        needs.x, needs.params, needs.drop, needs.recompute = key
        return remember(_interned, key, needs)
    return _interned[key]


def _mask(side: str, value: Any) -> Mask:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        value = (value,)
    elif not isinstance(value, Mapping) and isinstance(value, Iterable):  # a tuple, as an iterator can be read only once
        value = tuple(value) if not isinstance(value, tuple) else value
    if not isinstance(value, tuple) or not all(isinstance(path, str) for path in value):
        found = paths(value)
        for path, wanted in found.items():
            if not isinstance(wanted, bool):
                fail("Needs", f"{side} at {path!r}", "a bool, or every entry a path", repr(wanted), TypeError)
        value = [path for path, wanted in found.items() if wanted]
    # equal masks get one form, by which the one object is found; a mask without paths is False
    return tuple(sorted(set(exact(tuple(value))))) or False


def _covers(mask: Mask, path: str) -> bool:
    if isinstance(mask, bool):
        return mask
    # also of a part that holds a path of the mask: a combinator asks about the part first
    return any(path == m or path.startswith(m + ".") or m.startswith(path + ".") for m in mask)


_parts: dict[tuple[Mask, str], Mask] = {}  # a plain dict: torch.compile warns of a functools.cache


def sub_mask(mask: Mask, name: str) -> Mask:
    """The part of a mask that lies under `name`."""
    if isinstance(mask, bool):
        return mask
    if is_dynamo_compiling():  # the tracer would guard on what the memo lacks, and compile anew once it has it
        return _sub_mask(mask, name)
    found = _parts.get((mask, name))
    return remember(_parts, (mask, name), _sub_mask(mask, name)) if found is None else found


def _sub_mask(mask: tuple[str, ...], name: str) -> Mask:
    return True if name in mask else tuple([m[len(name) + 1 :] for m in mask if m.startswith(name + ".")]) or False


Needs.ALL = Needs()
Needs.NONE = Needs(x=False, params=False)
Needs(x=False), Needs(params=False)  # made here, so that no compiler is the first to ask for them


def check_needs(where: str, needs: Any, params: Any, x: Any) -> None:
    """`needs` must be a `Needs`, and every path in it must exist."""
    if not isinstance(needs, Needs):
        fail(where, "needs", "a Needs", describe(needs), TypeError)
    if isinstance(needs.params, tuple):
        known = paths(params)
        for path in needs.params:
            if not any(k == path or k.startswith(path + ".") for k in known):
                globs = " (needs take no globs)" if "*" in path else ""
                # only params that exist are suggested, though an absent one, such as a bias, may be named
                there = [k for k, t in known.items() if t is not None]
                fail(where, "needs.params", f"paths among {nearest(path, there) or '(no params)'}", f"{path!r}{globs}")
    if isinstance(needs.x, tuple) and (unknown := [path for path in needs.x if not has(x, path)]):
        parts = [path for path in paths(x) if path]
        fail(where, "needs.x", f"paths among {', '.join(parts)}" if parts else "a bool (x is one tensor)", repr(unknown[0]))
