"""The repr of a config: fields that are not at their default, over several lines if they are long."""

from __future__ import annotations

import dataclasses
from typing import Any

from funcops.engine.errors import in_html

WIDTH, INDENT = 100, "    "


def shown(cfg: Any) -> str:
    """The repr of a config: the call that makes it, where every name is known, without the fields that are at their default.

    >>> from funcops import ChainConfig, LinearConfig, Step, linear
    >>> LinearConfig(64, 32)
    LinearConfig(in_features=64, out_features=32)
    >>> ChainConfig(steps=(Step("up", linear, LinearConfig(64, 32)), Step("down", linear, LinearConfig(32, 64, bias=False))))
    ChainConfig(
        steps=(
            Step(name='up', op=linear, cfg=LinearConfig(in_features=64, out_features=32)),
            Step(name='down', op=linear, cfg=LinearConfig(in_features=32, out_features=64, bias=False)),
        ),
    )
    """
    return _Printer().text(cfg, "", 0)


def html(cfg: Any) -> str:
    """The repr for a notebook."""
    return in_html(repr(cfg))


class _Printer:
    """The texts of one repr. `lines`: what each value is on one line, by its id."""

    def __init__(self) -> None:
        self.lines: dict[int, str] = {}

    def opened(self, value: Any) -> tuple[str, list[tuple[str, Any]], str] | None:
        """Return what opens a value, its named parts, and what closes it; None for a value without parts."""
        # a class with a repr of its own is left to it
        if dataclasses.is_dataclass(value) and type(value).__repr__ is shown:
            # optimisers say so: their defaults are worth reading
            every = getattr(type(value), "shows_defaults", False)
            fields = [f for f in dataclasses.fields(value) if f.init and f.repr and (every or not _usual(f, value))]
            return f"{type(value).__name__}(", [(f"{f.name}=", getattr(value, f.name)) for f in fields], ")"
        return ("(", [("", one) for one in value], ")") if type(value) is tuple and value else None

    def line(self, value: Any) -> str:
        # once for each part: a config of depth n would write its innermost part 2^n times
        found = self.lines.get(id(value))
        if found is None:
            inside = self.opened(value)
            if inside is None:
                return repr(value)
            opening, inner, closing = inside
            comma = "," if opening == "(" and len(inner) == 1 else ""
            found = opening + ", ".join([name + self.line(one) for name, one in inner]) + comma + closing
            self.lines[id(value)] = found
        return found

    def text(self, value: Any, before: str, depth: int) -> str:
        """The value as source. `before`: what stands before it on its line; `depth`: of that line."""
        line, inside = self.line(value), self.opened(value)
        if inside is None or len(INDENT) * depth + len(before) + len(line) <= WIDTH:
            return line
        opening, inner, closing = inside
        rows = [INDENT * (depth + 1) + name + self.text(one, name, depth + 1) + "," for name, one in inner]
        return "\n".join([opening, *rows, INDENT * depth + closing])


def _usual(f: Any, cfg: Any) -> bool:
    """Whether a field is at its default."""
    value, default = getattr(cfg, f.name), f.default
    if f.default_factory is not dataclasses.MISSING:
        default = f.default_factory()
    # 1, 1.0 and True are equal, but not the same text
    return type(value) is type(default) and bool(value == default)
