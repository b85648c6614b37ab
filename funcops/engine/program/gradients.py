"""The gradients of values, as rows of a backward: how they are taken apart, summed and passed on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from funcops.engine.program.lower import Call, Fold, Value, flat
from funcops.engine.program.rows import Group, Rows, local

NONE = "None"  # in place of the name of a gradient that is zero


class Gradients:
    """Rows that know which values have a gradient so far: g and the value's number."""

    def __init__(self, rows: Rows, half: str) -> None:
        self.rows, self.half = rows, half
        lowered = rows.lowered
        self.have: set[int] = set()
        self.keys = {row.out for row in lowered.forward if type(row) is Fold}  # values without a gradient
        self.outer = {v: name for name, v in lowered.outputs.items()}  # outputs whose gradient is only dy so far

    def enter(self) -> None:
        """Take dy apart: the gradients of the output and of the named outputs."""
        low = self.rows.lowered
        if low.outputs:
            self.rows.add("outputs", None, (), [local("gradient", v) for v in low.outputs.values()], self.half, tuple(low.outputs))
            self.have.update(low.outputs.values())
        self.give(low.output, "dy")
        # the argument's name would hold the gradient to the end
        self.rows.add("release", None, ["dy"])

    def gradient(self, value: int) -> str:
        return local("gradient", value) if value in self.have else NONE

    def give(self, value: Value, gradient: str) -> None:
        """Add to the gradient of a value, or of a tuple's parts."""
        if isinstance(value, tuple):
            self._take_apart(gradient, value)
            return
        if value in self.outer:
            self.meet(local("gradient", value), gradient, self.outer.pop(value))
        if value in self.have:
            self.rows.add("sum", None, (local("gradient", value), gradient), (local("gradient", value),))
        else:
            self.rows.add("copy", None, (gradient,), (local("gradient", value),))
        self.have.add(value)

    def meet(self, dy: str, gradient: str, name: str) -> None:
        """Check that the caller's gradient of an output is like the gradient from its readers inside, to which it is added."""
        self.rows.at("")
        self.rows.add("meet", None, (dy, gradient), (), self.half, name)

    def _take_apart(self, name: str, value: Value) -> None:
        """Unpack a tuple of gradients into the gradients of its parts."""
        numbers = flat(value)
        # a value that has a gradient gets this one added, so the part comes under another name first
        targets = [local("gradient", v) if v not in self.have else local("part", v) for v in numbers]
        kind = "split" if len(numbers) == len(value) else "nested split"
        self.rows.add(kind, None, (name,), targets, _like(value, iter(targets)), len(value), value)
        for v, target in zip(numbers, targets, strict=True):
            if v in self.have:
                self.give(v, target)
            self.have.add(v)

    def dy(self, call: Call) -> str:
        """The name of the gradient of the call's outputs, or `None`."""
        parts = [self.gradient(v) for v in (call.out, *call.gives)]
        if not call.gives or all(part == NONE for part in parts):
            return parts[0]
        self.rows.add("join", None, parts, (local("dy", call.index),), parts[0], parts[1:], call.names)
        return local("dy", call.index)

    def spread(self, call: Call) -> None:
        """Add the call's dx to the gradients of the values that it read."""
        d = local("dx", call.index)
        if not call.takes:
            self.give(call.main, d)
            return
        parts = [f"{d}_{k}" for k in range(len(call.takes) + 1)]
        masks = ["main", *(f"extras.{n}" for n in call.labels)] if call.labels else [str(k) for k in range(len(parts))]
        if call.labels:
            for part, own in zip(parts, [".main", *(f".extras[{label!r}]" for label in call.labels)], strict=True):
                self.rows.add("part", None, (d,), (part,), own)
        else:
            self.rows.add("parts", None, (d,), parts, (None,) * len(parts))
        if call.needs.input(masks[0]):
            self.give(call.main, parts[0])
        for value, mask, part in zip(call.takes, masks[1:], parts[1:], strict=True):
            if call.needs.input(mask) and value not in self.keys:
                self.give(value, part)


def _like(value: Value, names: Iterator[str]) -> Any:
    """Names in the form of a value."""
    return Group(_like(one, names) if isinstance(one, tuple) else next(names) for one in value)
