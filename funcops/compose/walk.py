"""What rewrites of a whole model's config share: a walk over its steps by path, and its ties; globs over these paths, by which they
choose steps; and an op that was wrapped, made again of another."""

from __future__ import annotations

import re
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


def shared_layers(known: Sequence[str], glob: str) -> str:
    """Of a glob that matches no path: what it must be where it names some layers of a `repeat`; "" of others."""
    given = glob.split(".")
    shared = ["*" if re.fullmatch(r"\d+|\[[^]]*\]", part) else part for part in given]
    for path in known:
        places = [i for i, part in enumerate(path.split(".")) if part == "*" and shared[i : i + 1] == ["*"] != given[i : i + 1]]
        if places and matches(path, (".".join(shared),)):
            repeat = (" " + ".".join(path.split(".")[: places[0]])).rstrip()
            return f"of all layers of the repeat{repeat}, which share one config, as {'.'.join(shared)!r}"
    return ""


def check_globs(where: str, name: str, globs: Any) -> None:
    """A tuple or list of strings."""
    if not isinstance(globs, (tuple, list)) or not all(isinstance(glob, str) for glob in globs):
        fail(where, name, "a tuple of globs", repr(globs), TypeError)


def remade(where: str, op: Op, source: Op, becomes: Op) -> Op:
    """The op made of `becomes` as `op` is made of `source`, as by remat or with_policy. Raises `ValueError` for what is not."""
    if op is source:
        return becomes
    make, args = getattr(op.fwd, "made_by", (None, ()))
    if make is None:
        fail(where, f"op {op.name!r}", f"{source.name}, or one that remat or with_policy made of it", "another")
    return make(*[remade(where, arg, source, becomes) if isinstance(arg, Op) else arg for arg in args])  # type: ignore[no-any-return]
