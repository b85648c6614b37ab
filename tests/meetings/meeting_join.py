"""An op of one's own: `x = ((q, k, v), cu_seqlens)`, as a chain gives it to a step that takes an extra, becomes attention's x,
`(q, k, v, cu_seqlens)`."""

from __future__ import annotations

from typing import Any, ClassVar

from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import OpConfig, config, dgrad_of, forward, make_op
from funcops.engine.contract.schema import Residuals


@config
class JoinConfig(OpConfig):
    """No options."""

    featurewise: ClassVar[bool] = True


class JoinResiduals(Residuals):
    """No tensor."""


@forward(JoinConfig)
def join_fwd(params: None, x: Any, cfg: JoinConfig, *, needs: Needs = Needs.ALL) -> tuple[Any, JoinResiduals | None]:
    """`y = (*x[0], x[1])`."""
    return (*x[0], x[1]), JoinResiduals.keep(cfg, needs)


@dgrad_of(JoinResiduals)
def join_dgrad(residuals: JoinResiduals, dy: Any, cfg: JoinConfig) -> tuple[Any, None]:
    """`dx = (dy[:-1], None)`: lengths have no gradient."""
    return (dy[:-1], None), None


join = make_op("join", JoinConfig, fwd=join_fwd, dgrad=join_dgrad)
