"""`plan` and `explain`: which steps of a chain run as which kernel, and why others do not."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from funcops.compose.chain import ChainConfig, window_of
from funcops.compose.parallel import ParallelConfig, needs_of_branches
from funcops.compose.plan import (
    BACKWARD,
    FORWARD,
    SIBLINGS_BACKWARD,
    SIBLINGS_FORWARD,
    NearMiss,
    Piece,
    Plan,
    make_plan,
)
from funcops.compose.siblings import find
from funcops.errors import describe, fail, in_html, on_screen, require_device, require_dtype, require_type
from funcops.needs import Needs


def plan(cfg: ChainConfig, needs: Needs = Needs.ALL, device_type: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> Plan:
    """The pieces in which a chain runs: a pure function of its arguments and of the rules that are registered. On device type
    "cpu" every step runs by itself."""
    require_type("plan", "cfg", cfg, ChainConfig)
    _check_asked("plan", needs, device_type, dtype)
    return make_plan(window_of(cfg, needs, dtype), device_type, cfg.fuse)


def _check_asked(where: str, needs: Any, device_type: Any, dtype: Any) -> None:
    require_type(where, "needs", needs, Needs)
    require_type(where, "device_type", device_type, str)
    require_device(where, device_type)
    require_dtype(where, dtype)


def plan_siblings(cfg: ParallelConfig, needs: Needs, device_type: str, dtype: torch.dtype) -> Plan:
    """As `plan`, of the first steps of a parallel's branches."""
    found: dict[str, tuple[Piece, ...]] = {FORWARD: (), BACKWARD: ()}
    misses: list[NearMiss] = []
    for half, phase in ((FORWARD, SIBLINGS_FORWARD), (BACKWARD, SIBLINGS_BACKWARD)) if cfg.fuse else ():
        siblings, near = find(cfg.apart, needs_of_branches(cfg, needs), phase, device_type, dtype)
        misses += [miss._replace(step=cfg.branches[0].name) for miss in near]
        if siblings is not None:
            found[half] = (Piece(cfg.branches, 0, siblings.rule),)
    return Plan(found[FORWARD], found[BACKWARD], tuple(misses))


class Explained(NamedTuple):
    """The plans of all chains in a config, and of all parallels that have one, by path."""

    plans: dict[str, Plan]

    def __repr__(self) -> str:
        return on_screen(str(self))

    def _repr_html_(self) -> str:
        return in_html(repr(self))

    def __str__(self) -> str:
        return "\n".join(f"{path or '(the chain)'}\n  " + str(one).replace("\n", "\n  ") for path, one in self.plans.items())


def explain(cfg: Any, needs: Needs = Needs.ALL, device_type: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> Explained:
    """What `plan` says of `cfg` and of every chain inside it, with the near misses and their reasons. Inner chains are shown as
    if all their gradients were asked for, unless `needs` is Needs.NONE."""
    if not hasattr(cfg, "with_parts"):
        fail("explain", "cfg", "the config of a combinator", describe(cfg), TypeError)
    _check_asked("explain", needs, device_type, dtype)
    found: dict[str, Plan] = {}

    def visit(inner: Any, path: str, own: Needs) -> None:
        if getattr(inner, "unrolled", None) is not None:  # a skip of a chain runs as a chain
            visit(inner.unrolled, path, own)
            return
        if type(inner) is ChainConfig:
            found[path] = plan(inner, own, device_type, dtype)
        if type(inner) is ParallelConfig and (joined := plan_siblings(inner, own, device_type, dtype)) != Plan((), (), ()):
            found[path] = joined
        if hasattr(inner, "with_parts"):

            def part(name: Any, op: Any, part_cfg: Any) -> tuple[Any, Any]:
                visit(part_cfg, path if name is None else f"{path}.{name}".strip("."), own and Needs.ALL)
                return op, part_cfg

            inner.with_parts(part)

    visit(cfg, "", needs)
    return Explained(found)
