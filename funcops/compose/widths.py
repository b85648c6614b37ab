"""Widths, the last dimension of main, followed from step to step: those of two steps that cannot fit are refused with the config.

An op's config says what it knows: `widths(width)` gives the width that its x must have (None: any) and that of its y for an x of
`width` (None: not known). A combinator's config has `follow` instead. A config with neither is a step behind which nothing is
known.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from funcops.errors import fail


class Width(NamedTuple):
    """A width, and the path of the step that gives it."""

    size: int
    of: str


def follow(where: str, path: str, cfg: Any, width: Width | None) -> Width | None:
    """The width behind the step at `path`, whose x has `width`; None where it is not known. Raises `ValueError` where it cannot
    fit."""
    if hasattr(cfg, "follow"):
        return cfg.follow(where, path, width)  # type: ignore[no-any-return]
    if not hasattr(cfg, "widths"):
        return None
    wanted, given = cfg.widths(None if width is None else width.size)
    if width is not None and wanted is not None and wanted != width.size:
        fail(where, f"x of step {path!r}", f"[..., {wanted}]", f"[..., {width.size}] of step {width.of!r}")
    if given is None:
        return None
    return width if width is not None and wanted is None and given == width.size else Width(given, path)


def wanted(cfg: Any) -> int | None:
    """The width that the x of a body must have, as far as its first steps say."""
    if hasattr(cfg, "widths"):
        return cfg.widths(None)[0]  # type: ignore[no-any-return]
    for inner in getattr(cfg, "first_parts", ()):
        found = wanted(inner)
        if found is not None:
            return found
    return None


def inside(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)
