"""Flags that the examples share."""

from __future__ import annotations

import argparse
from pathlib import Path


def parser_of(program: str, what: str, numbers: tuple[tuple[str, int, str], ...], plot: bool = True) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description=what)
    for name, value, text in numbers:
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N", help=f"{text} (default: %(default)s)")
    if plot:
        picture = Path(program).with_suffix(".png")
        parser.add_argument("--plot", type=Path, default=picture, help="where the picture goes (default: %(default)s)")
    return parser


def parsed(
    parser: argparse.ArgumentParser, argv: list[str] | None, numbers: tuple[tuple[str, int, str], ...]
) -> argparse.Namespace:
    """The parsed flags; a number below 1 ends the program with a one-line error."""
    args = parser.parse_args(argv)
    for name, _, _ in numbers:
        value = getattr(args, name.replace("-", "_"))
        if value < 1:
            parser.error(f"--{name}: expected at least 1, got {value}")
    return args
