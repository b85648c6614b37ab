"""Batched matrix product, with gradients of both factors.

    y = a b          da = dy b^T        db = a^T dy
    y = a b^T        da = dy b          db = dy^T a        with `transposed`

x is `(a, b)`. a, da: [*, M, K]; b, db: [*, K, N], with `transposed` [*, N, K]; y, dy: [*, M, N]; the same leading sizes, one float
dtype. Kept: a and b, aliases: no bytes of their own. torch's library computes it on every device.

>>> import torch
>>> from funcops import BMMConfig, bmm_bwd, bmm_fwd
>>> queries, keys = torch.ones(2, 3, 4), torch.ones(2, 5, 4)
>>> y, residuals = bmm_fwd(None, (queries, keys), BMMConfig(transposed=True))
>>> y.shape, residuals.b is keys
(torch.Size([2, 3, 5]), True)
>>> _, (da, db) = bmm_bwd(residuals, torch.ones(2, 3, 5), BMMConfig(transposed=True))
>>> da[0, 0], db[0, 0]
(tensor([5., 5., 5., 5.]), tensor([3., 3., 3., 3.]))
"""

from __future__ import annotations

from dataclasses import field

from torch import Tensor

from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config, dgrad_of, forward, make_op, no_params
from funcops.engine.contract.schema import DGRAD, Inputs, Residuals, saved
from funcops.engine.errors import FLOATS, check, fail, show_shape
from funcops.library.kernels import bmm as kernels
from funcops.library.ops._tuples import require_tuple

__all__ = ["BMMConfig", "BMMResiduals", "bmm", "bmm_bwd", "bmm_dgrad", "bmm_fwd", "bmm_init", "bmm_wgrad"]


@config
class BMMConfig(OpConfig):
    """`transposed`: b is given as [*, N, K], as keys are."""

    mixes_positions = True

    transposed: bool = field(default=False, kw_only=False)

    def widths(self, width: int | None) -> tuple[int | None, int | None]:
        return None, None


class BMMResiduals(Residuals, static=("inputs", "shape", "dtype")):
    a: Tensor = saved("[*, M, K]", alias="x.0", needed_by=DGRAD, of=("x.1",))
    b: Tensor = saved("[*, K, N] or [*, N, K]", alias="x.1", needed_by=DGRAD, of=("x.0",))


@forward(BMMConfig)
def bmm_fwd(
    params: None, x: tuple[Tensor, Tensor], cfg: BMMConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, BMMResiduals | None]:
    """x: `(a, b)` -> y: [*, M, N]. Raises `ValueError` or `TypeError` for a wrong shape, dtype or device."""
    a, b = require_tuple("bmm_fwd", x, "a", "b")
    check("bmm_fwd", "x.0 (a)", a, (...,), FLOATS)
    if a.dim() < 2:
        fail("bmm_fwd", "x.0 (a)", "[..., M, K]", list(a.shape))
    check("bmm_fwd", "x.1 (b)", b, (...,), a.dtype, a)
    rows, inner = a.shape[:-2], a.shape[-1]
    if b.dim() != a.dim() or b.shape[:-2] != rows or b.shape[-1 if cfg.transposed else -2] != inner:
        wanted = (*rows, "N", inner) if cfg.transposed else (*rows, inner, "N")
        fail("bmm_fwd", "x.1 (b)", show_shape(wanted), list(b.shape))
    y = kernels.bmm_fwd(a, b, cfg.transposed)
    return y, BMMResiduals.keep(cfg, needs, a=a, b=b, inputs=Inputs.of(x), shape=y.shape, dtype=y.dtype)


@dgrad_of(BMMResiduals)
def bmm_dgrad(residuals: BMMResiduals, dy: Tensor, cfg: BMMConfig) -> tuple[tuple[Tensor, Tensor], None]:
    """`(da, db)`. No params, so pending is None."""
    a, b, needs = residuals.a, residuals.b, residuals.needs
    check("bmm_dgrad", "dy", dy, residuals.shape, residuals.dtype, b if a is None else a)
    da = kernels.bmm_bwd_left(dy, b, cfg.transposed) if needs.input(0) else None
    db = kernels.bmm_bwd_right(dy, a, cfg.transposed) if needs.input(1) else None
    return residuals.inputs.make((da, db)), None


bmm = make_op("bmm", BMMConfig, fwd=bmm_fwd, dgrad=bmm_dgrad)
bmm_init, bmm_bwd, bmm_wgrad = no_params(bmm, bmm_dgrad)
