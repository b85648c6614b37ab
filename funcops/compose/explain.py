"""`plan` and `explain`: which steps of a chain run as which kernel, and why others do not."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from funcops.compose.chain import ChainConfig, needs_of_steps
from funcops.compose.plan import Plan, make_plan
from funcops.errors import require_type
from funcops.needs import Needs


def plan(
    cfg: ChainConfig, needs: Needs = Needs.ALL, device_type: str = "cuda", dtype: torch.dtype = torch.bfloat16
) -> Plan:
    """The pieces in which a chain runs: a pure function of its arguments and of the rules that are registered. On device type
    "cpu" every step runs by itself."""
    require_type("plan", "cfg", cfg, ChainConfig)
    return make_plan(cfg.steps, needs_of_steps(cfg, needs), device_type, dtype, cfg.fuse)


class Explained(NamedTuple):
    """The plans of a chain and of all chains in it, by path."""

    plans: dict[str, Plan]

    def __str__(self) -> str:
        return "\n".join(f"{path or '(the chain)'}\n  " + str(one).replace("\n", "\n  ") for path, one in self.plans.items())


def explain(
    cfg: Any, needs: Needs = Needs.ALL, device_type: str = "cuda", dtype: torch.dtype = torch.bfloat16
) -> Explained:
    """What `plan` says of `cfg` and of every chain inside it, with the near misses and their reasons. Inner chains are shown as
    if all their gradients were asked for, unless `needs` is Needs.NONE."""
    found: dict[str, Plan] = {}

    def visit(inner: Any, path: str, own: Needs) -> None:
        if getattr(inner, "unrolled", None) is not None:  # a skip of a chain runs as a chain
            visit(inner.unrolled, path, own)
            return
        if type(inner) is ChainConfig:
            found[path] = plan(inner, own, device_type, dtype)
        if hasattr(inner, "with_parts"):

            def part(name: Any, op: Any, part_cfg: Any) -> tuple[Any, Any]:
                visit(part_cfg, path if name is None else f"{path}.{name}".strip("."), own and Needs.ALL)
                return op, part_cfg

            inner.with_parts(part)

    visit(cfg, "", needs)
    return Explained(found)
