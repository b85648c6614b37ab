"""The pausing functions of combinators that are lowered to programs, and of the body of another combinator."""

from __future__ import annotations

from typing import Any

from funcops.compose.step import split_x
from funcops.contract.needs import Needs
from funcops.contract.pausing import Pauses, Pausing, ran
from funcops.program import programs


def _fwd(params: Any, x: Any, cfg: Any, *, needs: Needs = Needs.ALL) -> Pauses:
    op = cfg.lowered_by
    main, extras = split_x(f"{op.name}_fwd", x, cfg)
    return (yield from ran(programs.forward(op, cfg, needs, main, pausing=True)(params, main, extras)))


def _dgrad(residuals: Any, dy: Any, cfg: Any) -> Pauses:
    return (yield from programs.pausing_dgrad(cfg.lowered_by, residuals, dy, cfg))


def _bwd(residuals: Any, dy: Any, cfg: Any, *, into: Any = None) -> Pauses:
    return (yield from programs.pausing_bwd(cfg.lowered_by, residuals, dy, cfg, into))


LOWERED = Pausing(_fwd, _dgrad, _bwd)
