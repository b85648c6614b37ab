"""The declaration of a saved tensor: its shape, its alias, and which gradients need it."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NamedTuple

from funcops.engine.contract.needs import Needs
from funcops.engine.errors import fail


class Phase(enum.Flag):
    """The halves of a backward, and the recomputation of y."""

    DGRAD = enum.auto()
    WGRAD = enum.auto()
    RECOMPUTE = enum.auto()


DGRAD = Phase.DGRAD
"""In `saved(needed_by=...)`: `dgrad` reads the field."""
WGRAD = Phase.WGRAD
"""In `saved(needed_by=...)`: `wgrad` reads the field, from the pending that `dgrad` returns."""
RECOMPUTE = Phase.RECOMPUTE
"""In `saved(needed_by=...)`: `recompute`, which recomputes y, reads the field."""


class Field(NamedTuple):
    """One saved tensor. `of` lists the gradients that need it (`"x"`, `"x.0"`, `"params.weight"`)."""

    shape: str
    alias: str | None
    needed_by: Phase
    of: tuple[str, ...]
    tree: bool = False
    recompute: bool = False  # RECOMPUTE in needed_by, and DGRAD: the tracer of torch 2.11 cannot test that
    dgrad: bool = False
    blocks: bool = False

    @property
    def of_x(self) -> bool:
        """Whether it is the op's x, or a part of it."""
        return (self.alias or "").partition(".")[0] == "x"

    @property
    def of_params(self) -> bool:
        """Whether it is a parameter, which is in memory anyway."""
        return (self.alias or "").startswith("params")

    def wanted(self, needs: Needs) -> bool:
        # a program recomputes y from this field, whichever gradients are needed
        if needs.recompute and self.recompute:
            return True
        sides = {"x": (needs.x, needs.input), "params": (needs.params, needs.param)}
        for gradient in self.of:
            side, _, path = gradient.partition(".")
            whole, part = sides[side]
            # a bare "x" or "params" means any gradient on that side
            if part(path) if path else whole:
                return True
        return False


ROOTS = ("x", "params", "y", "dy", "residuals")  # of the trees that a kept tensor may be a part of


def saved(
    shape: str, *, needed_by: Phase, alias: str | None = None, of: tuple[str, ...] = (), tree: bool = False, blocks: bool = False
) -> Any:
    """Declare a saved tensor, as a field of `Residuals` or `Pending`.

    - `shape`: what a report shows, `"[*, D]"`; `*` is any leading dimensions.
    - `needed_by`: `DGRAD`, `WGRAD`, `RECOMPUTE`, or several of them, `DGRAD | WGRAD`: which functions of the op read it.
    - `alias`: the path of the tensor that it is: `"x"`, `"x.0"` in a tuple, `"params.weight"`, `"y"`, in a pending also
      `"residuals.x"` and `"dy"`; None for a tensor of its own.
    - `of`: the gradients that need it (`"x"`, `"x.0"`, `"params"`, `"params.weight"`). The field is dropped if none of them is
      needed. By default it follows from `needed_by`: x for DGRAD, params for WGRAD.
    - `tree`: a tree of tensors, which may be the caller's own.
    - `blocks`: the backward also reads a `Packed` of blocks (`funcops.engine.residuals.forms`), as a policy compresses it.

    A field with an alias, and every tensor of a `tree`, is guarded: a backward after a write to it raises `StaleResidualError`."""
    # gradients exist of x and params alone; a kept tensor may be a part of any of the trees
    for path, known in ((alias, ROOTS), *((one, ("x", "params")) for one in of)):
        if path is not None and path.partition(".")[0] not in known:
            fail("saved", "alias" if path == alias else "of", f"a path below {', '.join(known)}", repr(path))
    sides = (("x",) if DGRAD in needed_by else ()) + (("params",) if WGRAD in needed_by else ())
    field = Field(shape, alias, needed_by, of or sides, tree, RECOMPUTE in needed_by, DGRAD in needed_by, blocks)
    return dataclasses.field(default=None, metadata={"saved": field})


class Inputs(NamedTuple):
    """The form of a tuple-valued x, so that dx mirrors it: a plain tuple or a named tuple."""

    make: Callable[[Any], Any]
    parts: int

    @staticmethod
    def of(x: tuple[Any, ...]) -> Inputs:
        # made once for plain tuples: every forward with a tuple for x asks
        if type(x) is tuple and len(x) < len(_PLAIN):
            return _PLAIN[len(x)] if len(x) != 2 or type(x[0]) is not tuple else NESTED
        return Inputs(getattr(type(x), "_make", tuple), len(x))

    def nothing(self) -> Any:
        return self.make((None,) * self.parts)


def _nested(parts: tuple[Any, ...]) -> tuple[Any, Any]:
    return tuple(parts[:-1]), parts[-1]


_PLAIN = tuple(Inputs(tuple, n) for n in range(5))
NESTED = Inputs(_nested, 4)  # ((a, b, c), d), which a chain gives to a step that takes d behind a step whose y is (a, b, c)
NO_GRADIENT: Any = None  # a gradient that is not needed; Any, so that results are typed as if it were
