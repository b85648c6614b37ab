"""Permutation of tokens to experts: each token's row, once for every expert chosen for it, sorted by expert.

    rows[place_tk] = x_t        dx_t = sum_k drows[place_tk], over k in order        (`unpermute` with forward and backward swapped)

x is `(x, indices)`. x, dx: [*, D] of one float dtype; indices: [*, K] int32 or int64 in [0, E], the experts of each token. y is
`(rows, offsets, place)`: rows [N, D], N = T K for T tokens, where expert e has rows offsets[e] to offsets[e + 1]; offsets [E + 1]
and place [*, K] int32. dy is `(drows, None, None)`: integers have no gradient. An index of E is a dropped choice: its row, at
offsets[E] or beyond, is zero and has no gradient. Within an expert rows are in the order of the tokens.
With `gathered` no rows are made, for ops that gather them by an index (`grouped_linear`, `glu`): x is `(weights, x, indices)`, as
for `experts`, or with x [T, D] in codes, and y is `(x, weights, offsets, order, place)`, with x and weights themselves; row n
belongs to token order[n] // K, with weight weights.flat[order[n]], order [N] int32. dy is `(dx, d weights, None, None, None)`, and
nothing is kept.
Sums are in float32 (float64 for float64), rounded once. Kept: place and offsets, parts of y: no bytes of its own.
An index outside [0, E] raises `IndexError` on the CPU; on CUDA it is a device-side assertion, as in PyTorch.

>>> import torch
>>> from funcops import PermuteConfig, permute_bwd, permute_fwd
>>> cfg, indices = PermuteConfig(2), torch.tensor([[1], [0], [1]], dtype=torch.int32)
>>> (rows, offsets, place), residuals = permute_fwd(None, (torch.tensor([[10.0], [20.0], [30.0]]), indices), cfg)
>>> rows.flatten(), offsets, residuals.place is place
(tensor([20., 10., 30.]), tensor([0, 1, 3], dtype=torch.int32), True)
>>> permute_bwd(residuals, (torch.tensor([[1.0], [2.0], [3.0]]), None, None), cfg)[1][0].flatten()
tensor([2., 1., 3.])
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from funcops.engine.backend import wide
from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config, dgrad_of, forward, make_op, no_params
from funcops.engine.contract.schema import DGRAD, Inputs, Residuals, saved, static
from funcops.engine.errors import FLOATS, check, describe, fail, not_a_tuple, require
from funcops.library.formats import QTensor
from funcops.library.kernels import routing as kernels
from funcops.library.ops._ids import INDICES, check_ids
from funcops.library.ops._tuples import require_tuple

__all__ = ["PermuteConfig", "PermuteResiduals"]
__all__ += ["permute", "permute_bwd", "permute_dgrad", "permute_fwd", "permute_init", "permute_wgrad"]


@config
class PermuteConfig(OpConfig):
    """`experts` (E), by which rows are sorted; `gathered`: rows are gathered by an index, not made."""

    experts: int = field(kw_only=False)
    gathered: bool = False

    def __post_init__(self) -> None:
        require(self.experts >= 1, "PermuteConfig", "experts", "at least 1", self.experts)

    def widths(self, width: int | None) -> tuple[int | None, int | None]:
        return None, None if self.gathered else width


class PermuteResiduals(Residuals, static=("inputs", "shape", "dtype")):
    offsets: Any = saved("[E + 1]", alias="y.1", needed_by=DGRAD, of=("x.0",))
    place: Any = saved("[*, K]", alias="y.2", needed_by=DGRAD, of=("x.0",))
    weights_like: Any = static()  # the shape and dtype of weights


@forward(PermuteConfig)
def permute_fwd(
    params: None, x: tuple[Tensor, ...], cfg: PermuteConfig, *, needs: Needs = Needs.ALL
) -> tuple[tuple[Tensor, ...], PermuteResiduals | None]:
    """x: `(x, indices)` -> `(rows, offsets, place)`, or `(weights, x, indices)` -> `(x, weights, offsets, order, place)`. Raises
    `ValueError` or `TypeError` for a wrong shape, dtype or device."""
    if cfg.gathered:
        return _sorted(x, cfg, needs)
    t, indices = check_rows_and_choices("permute_fwd", x, "indices")
    check("permute_fwd", "x.0", t, (...,), FLOATS)
    if tuple(t.shape[:-1]) != tuple(indices.shape[:-1]) or not t.dim():
        fail("permute_fwd", "x.0", f"[{', '.join([*map(str, indices.shape[:-1]), 'D'])}], one row per token of x.1", list(t.shape))
    check_ids("permute_fwd", "x.1 (indices)", indices, cfg.experts)
    _, _, offsets, place = kernels.sort_by_expert(indices, cfg.experts)
    by_token = place.view(-1, indices.shape[-1])
    rows = kernels.scatter_rows(t.reshape(by_token.shape[0], t.shape[-1]), by_token, offsets)
    kept = PermuteResiduals.keep(cfg, needs, offsets=offsets, place=place, inputs=Inputs.of(x), shape=rows.shape, dtype=t.dtype)
    return (rows, offsets, place), kept


def _sorted(x: Any, cfg: PermuteConfig, needs: Needs) -> tuple[tuple[Tensor, ...], PermuteResiduals | None]:
    """Sort the choices by expert, without copying x."""
    weights, t, indices = require_tuple("permute_fwd", x, "weights", "x", "indices")
    given, t = t, t.outline() if isinstance(t, QTensor) else t
    check("permute_fwd", "x.1 (x)", t, (...,), FLOATS)
    check("permute_fwd", "x.0 (weights)", weights, (...,), tuple({t.dtype: 0, wide(t.dtype): 0}), t)
    if not t.dim() or not weights.dim() or weights.shape[:-1] != t.shape[:-1] or not weights.shape[-1]:
        fail("permute_fwd", "x.0 (weights)", f"{[*t.shape[:-1], 'K']}, K at least 1, one row per token of x.1", list(weights.shape))
    check("permute_fwd", "x.2 (indices)", indices, weights.shape, INDICES, t)
    kernels.check_row_count("permute_fwd", "x.2 (indices)", indices.numel())
    check_ids("permute_fwd", "x.2 (indices)", indices, cfg.experts)
    order, _, offsets, place = kernels.sort_by_expert(indices, cfg.experts)
    return (given, weights, offsets, order, place), sorted_kept(cfg, needs, x)


def sorted_kept(cfg: PermuteConfig, needs: Needs, x: tuple[Tensor, Tensor, Tensor]) -> PermuteResiduals | None:
    """Residuals for rows that are not made."""
    weights, t, _ = x
    like = weights.shape, weights.dtype
    return PermuteResiduals.keep(cfg, needs, weights_like=like, inputs=Inputs.of(x), shape=t.shape, dtype=t.dtype)


def check_rows_and_choices(where: str, x: Any, name: str) -> tuple[Tensor, Tensor]:
    """Check and return a pair whose second part has an integer for each choice of each token."""
    if not isinstance(x, tuple) or len(x) != 2:
        not_a_tuple(where, x, "x", name)
    dtypes = INDICES if name == "indices" else torch.int32
    check(where, f"x.1 ({name})", x[1], (...,), dtypes, x[0] if isinstance(x[0], Tensor) else None)
    if not x[1].dim() or not x[1].shape[-1]:
        fail(where, f"x.1 ({name})", "[..., K], K at least 1", list(x[1].shape))
    kernels.check_row_count(where, f"x.1 ({name})", x[1].numel())
    return x


@dgrad_of(PermuteResiduals)
def permute_dgrad(residuals: PermuteResiduals, dy: Any, cfg: PermuteConfig) -> tuple[tuple[Tensor | None, ...], None]:
    """dy: `(drows, None, None)` -> `(dx, None)`, or `(dx, d weights, None, None, None)` -> `(d weights, dx, None)`. No params, so
    pending is None."""
    if cfg.gathered:
        return _back(residuals, dy), None
    if not isinstance(dy, tuple) or len(dy) != 3:
        fail("permute_dgrad", "dy", "a tuple (drows, None, None)", describe(dy), TypeError)
    for i, name in ((1, "offsets"), (2, "place")):
        if dy[i] is not None:
            fail("permute_dgrad", f"dy.{i}", f"None ({name} are integers, without a gradient)", describe(dy[i]), TypeError)
    place, drows = residuals.place, dy[0]
    if drows is not None:
        check("permute_dgrad", "dy.0", drows, residuals.shape, residuals.dtype, place)
    if drows is None or not residuals.needs.input(0):
        return residuals.nothing(), None
    dx = kernels.gather_rows(drows, place.view(-1, place.shape[-1]), residuals.offsets)
    return residuals.inputs.make((dx.view(*place.shape[:-1], dx.shape[-1]), None)), None


def _back(residuals: PermuteResiduals, dy: Any) -> Any:
    names = "dx", "d weights", "offsets", "order", "place"
    if not isinstance(dy, tuple) or len(dy) != len(names):
        fail("permute_dgrad", "dy", "a tuple (dx, d weights, None, None, None)", describe(dy), TypeError)
    for i, like in enumerate(((residuals.shape, residuals.dtype), residuals.weights_like)):
        if dy[i] is not None:
            check("permute_dgrad", f"dy.{i} ({names[i]})", dy[i], *like)
    for i, name in enumerate(names[2:], 2):
        if dy[i] is not None:
            fail("permute_dgrad", f"dy.{i}", f"None ({name} are integers, without a gradient)", describe(dy[i]), TypeError)
    wanted = [d if residuals.needs.input(i) else None for i, d in enumerate((dy[1], dy[0]))]
    return residuals.inputs.make((*wanted, None))


permute = make_op("permute", PermuteConfig, fwd=permute_fwd, dgrad=permute_dgrad)
permute_init, permute_bwd, permute_wgrad = no_params(permute, permute_dgrad)
