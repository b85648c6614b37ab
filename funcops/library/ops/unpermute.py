"""Return of tokens from their experts: the sum of a token's rows.

    y_t = sum_k rows[place_tk], over k in order        drows[place_tk] = dy_t        (`permute` with forward and backward swapped)

x is `(rows, place)`, as `permute` returns them. rows, drows: [N, D] of one float dtype; place: [*, K] int32, a permutation of the
N = T K rows of T tokens; y, dy: [*, D]. Sums are in float32 (float64 for float64), rounded once. Rows of dropped choices
are zero, as from `permute`, and add nothing. Kept: place, an alias.
A place outside [0, N) raises `IndexError` on the CPU. Rows must be weighted before: ahead of a linear layer weights cost no kept
rows, here they would.

>>> import torch
>>> from funcops import UnpermuteConfig, unpermute_bwd, unpermute_fwd
>>> rows, place = torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.tensor([[0, 3], [2, 1]], dtype=torch.int32)
>>> y, residuals = unpermute_fwd(None, (rows, place), UnpermuteConfig())
>>> y.flatten(), unpermute_bwd(residuals, torch.tensor([[10.0], [20.0]]), UnpermuteConfig())[1][0].flatten()
(tensor([5., 5.]), tensor([10., 20., 20., 10.]))
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config, dgrad_of, forward, make_op, no_params, same_width
from funcops.engine.contract.schema import DGRAD, Inputs, Residuals, saved
from funcops.engine.errors import FLOATS, check, fail
from funcops.library.kernels import routing as kernels
from funcops.library.ops.permute import check_rows_and_choices

__all__ = ["UnpermuteConfig", "UnpermuteResiduals"]
__all__ += ["unpermute", "unpermute_bwd", "unpermute_dgrad", "unpermute_fwd", "unpermute_init", "unpermute_wgrad"]


@config
class UnpermuteConfig(OpConfig):
    """No options."""

    widths = same_width
    featurewise = True


class UnpermuteResiduals(Residuals, static=("inputs", "shape", "dtype")):
    place: Tensor = saved("[*, K]", alias="x.1", needed_by=DGRAD, of=("x.0",))


@forward(UnpermuteConfig)
def unpermute_fwd(
    params: None, x: tuple[Tensor, Tensor], cfg: UnpermuteConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, UnpermuteResiduals | None]:
    """x: `(rows, place)` -> y: [*, D]. Raises `ValueError` or `TypeError` for a wrong shape, dtype or device."""
    rows, place = check_rows_and_choices("unpermute_fwd", x, "place")
    check("unpermute_fwd", "x.0 (rows)", rows, (...,), FLOATS)
    if rows.dim() != 2 or rows.shape[0] != place.numel():
        fail("unpermute_fwd", "x.0 (rows)", f"[{place.numel()}, D], a row for each place", list(rows.shape))
    y = kernels.gather_rows(rows, place.reshape(-1, place.shape[-1]), None).view(*place.shape[:-1], rows.shape[-1])
    return y, unpermute_kept(cfg, needs, x, y)


def unpermute_kept(cfg: UnpermuteConfig, needs: Needs, x: tuple[Tensor, Tensor], y: Tensor) -> UnpermuteResiduals | None:
    return UnpermuteResiduals.keep(cfg, needs, place=x[1], inputs=Inputs.of(x), shape=y.shape, dtype=y.dtype)


@dgrad_of(UnpermuteResiduals)
def unpermute_dgrad(residuals: UnpermuteResiduals, dy: Any, cfg: UnpermuteConfig) -> tuple[tuple[Tensor, None], None]:
    """dy: [*, D] -> `(drows, None)`. No params, so pending is None."""
    place = residuals.place
    check("unpermute_dgrad", "dy", dy, residuals.shape, residuals.dtype, place)
    if not residuals.needs.input(0):
        return residuals.nothing(), None
    by_token = place.reshape(-1, place.shape[-1])
    drows = kernels.scatter_rows(dy.reshape(by_token.shape[0], dy.shape[-1]), by_token, None)
    return residuals.inputs.make((drows, None)), None


unpermute = make_op("unpermute", UnpermuteConfig, fwd=unpermute_fwd, dgrad=unpermute_dgrad)
unpermute_init, unpermute_bwd, unpermute_wgrad = no_params(unpermute, unpermute_dgrad)
