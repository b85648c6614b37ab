"""A walk over the config of a whole model: its steps by path, and its ties. Rewrites choose steps by globs over these paths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from funcops.compose.repeat import RepeatConfig
from funcops.compose.widths import inside
from funcops.errors import fail
from funcops.op import Op
from funcops.program.values import parts_of


def below(path: str, name: Any) -> str:
    """The path of a part; one without a name, as the body of a skip, has its combinator's."""
    return path if name is None else inside(path, str(name))


def parts(cfg: Any, each: bool) -> Iterator[tuple[Any, Op, Any]]:
    """Name, op and config of the parts of a combinator's config; of a `repeat` the body, as "*", or with `each` once a layer: by
    number, or without a name where params are stacked."""
    for name, op, inner in parts_of(cfg):
        names = [name]
        if type(cfg) is RepeatConfig and each:
            names = [None] if cfg.stacked else list(range(cfg.times))
        yield from ((one, op, inner) for one in names)


def steps(cfg: Any, path: str = "", each: bool = False) -> Iterator[tuple[str, Any]]:
    """Path and config of every part that is no combinator."""
    if not hasattr(cfg, "with_parts"):
        yield path, cfg
        return
    for name, _, inner in parts(cfg, each):
        yield from steps(inner, below(path, name), each)


def ties(cfg: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Every tied path, and what it is tied to."""
    if hasattr(cfg, "with_parts"):
        for tied, source in getattr(cfg, "ties", ()):
            yield inside(path, tied), inside(path, source)
        for name, _, inner in parts(cfg, each=True):
            yield from ties(inner, below(path, name))


def matches(path: str, globs: Sequence[str]) -> bool:
    """Whether one of the globs is for that path."""
    return any(fnmatchcase(path, glob) for glob in globs)


def check_globs(where: str, name: str, globs: Any) -> None:
    """A tuple or list of strings."""
    if not isinstance(globs, (tuple, list)) or not all(isinstance(glob, str) for glob in globs):
        fail(where, name, "a tuple of globs", repr(globs), TypeError)
