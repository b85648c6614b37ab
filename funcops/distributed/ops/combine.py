"""Return of tokens from the ranks of their experts: the sum of these ranks' results.

    back = all_to_all(rows)        y_t = sum over r of back[place_tr]        (`dispatch` with forward and backward swapped)
    drows = all_to_all(sent)        sent[place_tr] = dy_t

x is `(rows, place, sizes)`, as `dispatch` returns them: rows [R, D] of one float dtype, which go back to the ranks from which they
came, `sizes[1]` to each; place [m, *, K] int32, the rows of each of this rank's tokens among the N = `sizes[0].sum()` rows that
come back, N if it was not sent; two tokens never share a row. `dispatch` has K = n. If sizes is None, or x is `(rows, place)`, the
same number of rows goes to each rank, and N is R. y, dy: [m, *, D]; drows: [R, D], zero in unused rows. Sums are in float32
(float64 for float64), in the order of the places, that is of the ranks, rounded once. Kept: place and sizes, aliases. A place
outside [0, N] raises `IndexError` on the CPU. Rows must be weighted before, as for `unpermute`.

>>> import torch
>>> from funcops import dist
>>> from funcops.testing import run_ranks
>>> def each(mesh):
...     cfg, place = dist.CombineConfig(mesh["ep"]), torch.tensor([[0, 2], [1, 4]], dtype=torch.int32)
...     rows = torch.tensor([[1.0], [2.0], [3.0], [4.0]]) + 10 * mesh.rank
...     y, residuals = dist.combine_fwd(None, (rows, place), cfg)  # the second token went to rank 0 alone
...     _, (drows, _) = dist.combine_bwd(residuals, y, cfg)
...     return y.flatten(), drows.flatten(), residuals.place is place
...
>>> for rank in run_ranks({"ep": 2}, each):
...     print(rank)
...
(tensor([12.,  2.]), tensor([12.,  2., 16.,  4.]), True)
(tensor([16.,  4.]), tensor([12.,  0., 16.,  0.]), True)
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from funcops.distributed import comm
from funcops.distributed.checks import check_divides, check_tensor, require_axis
from funcops.distributed.mesh import Axis
from funcops.distributed.ops._tokens import arrived, in_flight, rows_sent, start, start_back, token_of
from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config, dgrad_of, forward, make_op, no_params, same_width
from funcops.engine.contract.pausing import landed, without_params
from funcops.engine.contract.schema import DGRAD, Inputs, Residuals, saved, static
from funcops.engine.errors import FLOATS, describe, fail, not_a_tuple
from funcops.library.ops.permute import check_rows_and_choices

__all__ = ["CombineConfig", "CombineResiduals"]
__all__ += ["combine", "combine_bwd", "combine_dgrad", "combine_fwd", "combine_init", "combine_wgrad"]


@config
class CombineConfig(OpConfig):
    """`axis`: the axis of `dispatch`."""

    axis: Axis = field(kw_only=False)

    def __post_init__(self) -> None:
        require_axis("CombineConfig", self.axis)

    widths = same_width
    featurewise = True


class CombineResiduals(Residuals, static=("inputs", "shape", "dtype")):
    place: Tensor = saved("[*, K]", alias="x.1", needed_by=DGRAD, of=("x.0",))
    sizes: Tensor | None = saved("[2, n]", alias="x.2", needed_by=DGRAD, of=("x.0",))
    rows: int = static()  # R


@forward(CombineConfig)
def combine_fwd(
    params: None, x: tuple[Tensor, ...], cfg: CombineConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, CombineResiduals | None]:
    """x: `(rows, place, sizes)` -> y: [m, *, D]. Raises `ValueError` or `TypeError` for a wrong shape, dtype or device."""
    found: tuple[Tensor, CombineResiduals | None] = landed(_begin(params, x, cfg, needs=needs))
    return found


def _begin(params: None, x: tuple[Tensor, ...], cfg: CombineConfig, *, needs: Needs) -> Any:
    if not isinstance(x, tuple) or len(x) not in (2, 3):
        not_a_tuple("combine_fwd", x, "rows", "place", "sizes")
    rows, place = check_rows_and_choices("combine_fwd", x[:2], "place")
    sizes = x[2] if len(x) == 3 else None
    check_tensor("combine_fwd", "x.0 (rows)", rows, (...,), FLOATS)
    check_tensor("combine_fwd", "x.1 (place)", place, (...,))
    if rows.dim() != 2:
        fail("combine_fwd", "x.0 (rows)", "[R, D]", describe(rows))
    _check_sizes("combine_fwd", sizes, rows, cfg.axis)
    at, inputs, count = place.reshape(-1, place.shape[-1]), Inputs.of(x), rows.shape[0]
    sent = start_back(rows, at, sizes, cfg.axis)

    def end() -> tuple[Tensor, CombineResiduals | None]:
        y = arrived(sent, at, cfg.axis).view(*place.shape[:-1], sent.shape[-1])
        return y, CombineResiduals.keep(
            cfg, needs, place=place, sizes=sizes, inputs=inputs, shape=y.shape, dtype=y.dtype, rows=count
        )

    return in_flight(cfg.axis, end)


def _check_sizes(where: str, sizes: Any, rows: Tensor, axis: Axis) -> None:
    if sizes is None:
        check_divides(where, "x.0 (rows)", rows, 0, axis)
        return
    check_tensor(where, "x.2 (sizes)", sizes, (2, axis.size), torch.int64)
    if sizes.is_meta:
        return
    if sizes.device.type != "cpu":
        fail(where, "x.2 (sizes)", "on the host, as from dispatch", describe(sizes))
    came = int(sizes[1].sum())
    if rows.shape[0] != came:
        fail(where, "x.0 (rows)", f"[{came}, D], the rows that came by x.2 (sizes)", describe(rows))


@dgrad_of(CombineResiduals)
def combine_dgrad(residuals: CombineResiduals, dy: Any, cfg: CombineConfig) -> tuple[tuple[Tensor | None, ...], None]:
    """dy: [m, *, D] -> `(drows, None, None)`, as long as x. No params, so pending is None."""
    found: tuple[tuple[Tensor | None, ...], None] = landed(_begin_back(residuals, dy, cfg))
    return found


def _begin_back(residuals: CombineResiduals, dy: Any, cfg: CombineConfig) -> Any:
    place = residuals.place
    check_tensor("combine_dgrad", "dy", dy, residuals.shape, residuals.dtype, place)
    if not residuals.needs.input(0):
        return residuals.nothing(), None
    at, sizes, rows = place.reshape(-1, place.shape[-1]), residuals.sizes, residuals.rows
    token = token_of(at, rows if sizes is None else rows_sent(at, sizes, None, cfg.axis))
    inputs, sent = residuals.inputs, start(dy.reshape(-1, dy.shape[-1]), token, cfg.axis, sizes, rows)

    def end() -> tuple[tuple[Tensor | None, ...], None]:
        return inputs.make((comm.wait(sent, cfg.axis), None, None)[: inputs.parts]), None

    return in_flight(cfg.axis, end)


combine = make_op(
    "combine",
    CombineConfig,
    fwd=combine_fwd,
    dgrad=combine_dgrad,
    pausing=without_params("combine", CombineConfig, CombineResiduals, _begin, _begin_back),
)
combine_init, combine_bwd, combine_wgrad = no_params(combine, combine_dgrad)
