"""`plan` and `explain`: which calls of a program run as which kernel, what that saves, and why others are not fused."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from funcops.engine.contract.configs import Composite
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import Op
from funcops.engine.contract.walk import nested, rewrite
from funcops.engine.errors import (
    describe,
    in_html,
    join_path,
    on_screen,
    require,
    require_device,
    require_dtype,
    require_flag,
    require_type,
)
from funcops.engine.program.lower import Call, Lowered, lower
from funcops.engine.program.programs import joins, rows_of
from funcops.engine.program.rows import Row
from funcops.engine.program.rules import BACKWARD, FORWARD, NearMiss, Piece, Rule, Saving, cover
from funcops.engine.program.turns import turns_of

__all__ = ["explain", "plan"]


class Line(NamedTuple):
    """Calls that run as one by a rule; or one call, without a rule."""

    calls: tuple[Call, ...]
    rule: Rule | None
    saves: Saving = Saving()

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(path_of(call) for call in self.calls)

    def __str__(self) -> str:
        what = f"{self.rule.name}, saves {self.saves}" if self.rule else str(self.calls[0].op)
        return f"{' + '.join(self.paths)}: {what}"


class FusionPlan(NamedTuple):
    """The lines of each half, in the order of the forward; why rules are not in it, as they nearly match, or lost to others that
    save more; and for each named output, the path of the call that gives it."""

    forward: tuple[Line, ...]
    backward: tuple[Line, ...]
    near_misses: tuple[NearMiss, ...]
    outputs: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        lines = [
            f"{phase:<9} {line}" for phase, found in ((FORWARD, self.forward), (BACKWARD, self.backward[::-1])) for line in found
        ]
        lines += [f"{'output':<9} {name}: given by {path}" for name, path in self.outputs]
        lines += [f"not {miss.rule} at {miss.path} ({miss.phase}): {miss.reason}" for miss in self.near_misses]
        return "\n".join(lines)


def path_of(call: Call) -> str:
    """The path of a call's step; for a skip's fork and sum, the skip's path with their name."""
    return call.path if call.place is not None and call.path else join_path(call.path, call.op.name)


def plan(cfg: Any, needs: Needs = Needs.ALL, device_type: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> FusionPlan:
    """The calls of a combinator, and which run as one: a pure function of its arguments and of the rules that are registered.
    Raises `TypeError` for a config of another op.

    >>> from funcops import ActivationConfig, BiasConfig, ChainConfig, Step, activation, bias, plan
    >>> cfg = ChainConfig(steps=(Step("bias", bias, BiasConfig(8)), Step("act", activation, ActivationConfig("gelu"))))
    >>> [line.rule.name for line in plan(cfg).backward], plan(cfg).backward[0].saves
    (['bias + activation'], Saving(passes=1, launches=1))
    >>> [line.rule for line in plan(cfg, device_type="cpu").backward]
    [None, None]
    """
    _check_options("plan", needs, device_type, dtype)
    return _planned(lowered_of("plan", cfg, needs), device_type, dtype)


def _planned(lowered: Lowered, device_type: str, dtype: torch.dtype) -> FusionPlan:
    found = cover(lowered, device_type, dtype)
    of = {value: path_of(call) for call in lowered.calls for value in call.gives}
    outputs = tuple((name, of[value]) for name, value in lowered.outputs.items())
    return FusionPlan(_lines(lowered, found.forward), _lines(lowered, found.backward), found.near_misses, outputs)


def _check_options(where: str, needs: Any, device_type: Any, dtype: Any) -> None:
    require_type(where, "needs", needs, Needs)
    require_type(where, "device_type", device_type, str)
    require_device(where, device_type)
    require_dtype(where, dtype)


def lowered_of(where: str, cfg: Any, needs: Needs) -> Lowered:
    require(
        isinstance(cfg, Composite) and cfg.lowered_by is not None,
        where,
        "cfg",
        "the config of a chain, a skip or a parallel",
        describe(cfg),
        TypeError,
    )
    return lower(cfg.lowered_by, cfg, needs)


def _lines(lowered: Lowered, pieces: dict[int, Piece]) -> tuple[Line, ...]:
    member = {call.index: piece for piece in pieces.values() for call in piece.calls}
    found: list[Line] = []
    for call in lowered.calls:
        piece = member.get(call.index)
        if piece is None:
            found.append(Line((call,), None))
        elif piece.calls[0] is call:
            found.append(Line(piece.calls, piece.rule, piece.saves))
    return tuple(found)


class Explained(NamedTuple):
    """The plan of a config, and the plans of the programs inside it (such as a repeat's body), by path."""

    plans: dict[str, FusionPlan]
    rows: dict[str, dict[str, tuple[Row, ...]]] = {}  # by path, the rows of the forward and of the whole backward

    def __repr__(self) -> str:
        return on_screen(str(self))

    def _repr_html_(self) -> str:
        return in_html(repr(self))

    def __str__(self) -> str:
        lines = list[str]()
        for path in dict.fromkeys((*self.plans, *self.rows)):
            lines += [path or "(the program)", *(f"  {line}" for line in str(self.plans.get(path, "")).split("\n") if line)]
            for phase, rows in self.rows.get(path, {}).items():
                lines += [f"  rows of the {phase}", *(f"    {line}" for row in rows for line in str(row).split("\n"))]
        return "\n".join(lines)


def explain(
    cfg: Any,
    needs: Needs = Needs.ALL,
    device_type: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    *,
    rows: bool = False,
    op: Op | None = None,
) -> Explained:
    """The `plan` of `cfg` and of every program inside it, with the near misses and their reasons. The body of a repeat is shown
    once, as if all its gradients were needed, unless `needs` is Needs.NONE, and as a layer between two others: its forward begins
    with the sum that ends the layer before it, if one kernel computes both. It takes neither params nor an x. With `rows` it also
    shows the statements of each forward and whole backward: what each reads and writes, where a local is released, when the
    layers of a repeat start and wait for communication, and which steps pause for other parts in an `interleave`. `op`: the op of
    the config, if it is under a policy: of a repeat whose layers have different rules, each body is shown, with the numbers of its
    layers. Raises `TypeError` for a config that is not a combinator's, `TypeError` or `ValueError` for invalid needs, device type
    or dtype.

    >>> from funcops import ActivationConfig, BiasConfig, ChainConfig, Step, activation, bias, explain
    >>> cfg = ChainConfig(steps=(Step("bias", bias, BiasConfig(8)), Step("act", activation, ActivationConfig("gelu"))))
    >>> print(explain(cfg))
    (the program)
      forward   bias: bias
      forward   act: activation
      backward  bias + act: bias + activation, saves 1 pass and 1 launch
      not bias + activation at bias (forward): the activation keeps the sum
    """
    require(isinstance(cfg, Composite), "explain", "cfg", "the config of a combinator", describe(cfg), TypeError)
    _check_options("explain", needs, device_type, dtype)
    require_flag("explain", rows=rows)
    require_type("explain", "op", op, Op, type(None))
    # a part whose op is under a policy, as it runs
    cfg = rewrite(
        cfg, lambda part: under(part.cfg) if (under := getattr(part.op and part.op.fwd, "resolved_for", None)) else None, op=op
    )[1]
    found: dict[str, FusionPlan] = {}
    written: dict[str, dict[str, tuple[Row, ...]]] = {}
    for part, around in nested(cfg):
        # a combinator that is lowered into the program around it has none of its own to show
        in_program = bool(around) and around[-1].cfg.lowered_by is not None and part.op.lower is not None
        # without a prefetch the layers only run one after another
        if rows and part.composite and part.cfg.times is not None and part.cfg.ahead is not None:
            written[part.path] = turns_of(part.cfg.ahead, part.cfg.times)
        if not part.composite or part.cfg.lowered_by is None or in_program:
            continue
        own = needs and Needs.ALL if around else needs
        # lowered twice, as `joins` cuts the one that it gets
        low, between = lowered_of("explain", part.cfg, own), lowered_of("explain", part.cfg, own)
        found[part.path] = _planned(low, device_type, dtype)
        # only in a repeat does another layer follow, into which the sum at the end may move
        if around and (around[-1].cfg.times or 1) > 1 and joins(between, device_type, dtype):
            found[part.path] = found[part.path]._replace(forward=_planned(between, device_type, dtype).forward)
        else:
            between = low
        if rows:
            halves, pausing = {"forward": between, "backward": low}, any(one.cfg.side_by_side for one in around)
            covers = {which: cover(one, device_type, dtype) for which, one in halves.items()}
            written[part.path] = {which: rows_of(which, one, covers[which], pausing=pausing) for which, one in halves.items()}
    return Explained(found, written)
