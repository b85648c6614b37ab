"""The parts of a config that let a row's y or dx depend on the other rows of a batch, as their ops declare it (`Op.mixes`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from funcops.engine.contract.op import Op
from funcops.engine.contract.walk import Part, walk


def mixing(op: Op, cfg: Any) -> Iterator[tuple[Part, str | None]]:
    """The parts of an op, itself first, that let rows depend on each other, and by what; None if the author has not said."""
    for part in walk(cfg, op=op):
        mixes = part.op.mixes(part.cfg) if callable(part.op.mixes) else part.op.mixes
        if mixes != "":
            yield part, mixes
