"""q, k and v of multi-head latent attention, from its projections.

    kv_h = (own_h, v_h)        k_h = (shared, own_h)
    d shared = sum over h of dk_h's first part        d kv_h = (dk_h's rest, dv_h)

x is `(q, kv, shared)`. q, dq: [*, T, N, S + O]; kv: [*, T, N, O + V]; shared: [*, T, 1, S], the rotary part; one float dtype.
y is `(q, k, v)`: q itself, k [*, T, N, S + O], v [*, T, N, V], a view of kv. Kept: nothing. arXiv:2405.04434.

>>> import torch
>>> from funcops import LatentSplitConfig, latent_split_bwd, latent_split_fwd
>>> cfg = LatentSplitConfig(2, shared=1, own=3, value=4)
>>> q, kv, shared = torch.zeros(1, 5, 2, 4), torch.zeros(1, 5, 2, 7), torch.ones(1, 5, 1, 1)
>>> (q, k, v), residuals = latent_split_fwd(None, (q, kv, shared), cfg)
>>> k[0, 0], v.shape
(tensor([[1., 0., 0., 0.],
        [1., 0., 0., 0.]]), torch.Size([1, 5, 2, 4]))
>>> _, _, dshared = latent_split_bwd(residuals, (None, torch.ones_like(k), None), cfg)[1]
>>> dshared.flatten()
tensor([2., 2., 2., 2., 2.])
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

from torch import Tensor

from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config, dgrad_of, forward, make_op, no_params
from funcops.engine.contract.schema import Inputs, Residuals
from funcops.engine.errors import FLOATS, check, describe, fail, require
from funcops.library.kernels import latent_split as kernels
from funcops.library.ops._tuples import require_tuple

__all__ = ["LatentSplitConfig", "LatentSplitResiduals"]
__all__ += ["latent_split", "latent_split_bwd", "latent_split_dgrad", "latent_split_fwd", "latent_split_init", "latent_split_wgrad"]


@config
class LatentSplitConfig(OpConfig):
    """`heads` (N), and the sizes in a head: `shared` (S) and `own` (O) of a key, `value` (V)."""

    heads: int = field(kw_only=False)
    shared: int
    own: int
    value: int
    reruns = True

    def __post_init__(self) -> None:
        for name in ("heads", "shared", "own", "value"):
            require(getattr(self, name) >= 1, type(self).__name__, name, "at least 1", getattr(self, name))


class LatentSplitResiduals(Residuals, static=("inputs", "shape", "dtype")):
    """No tensor, only the shape and dtype of dy."""


@forward(LatentSplitConfig)
def latent_split_fwd(
    params: None, x: tuple[Tensor, Tensor, Tensor], cfg: LatentSplitConfig, *, needs: Needs = Needs.ALL
) -> tuple[tuple[Tensor, Tensor, Tensor], LatentSplitResiduals | None]:
    """x: `(q, kv, shared)` -> `(q, k, v)`. Raises `ValueError` or `TypeError` for a wrong shape, dtype or device."""
    q, kv, shared = require_tuple("latent_split_fwd", x, "q", "kv", "shared")
    check("latent_split_fwd", "x.0 (q)", q, (..., cfg.heads, cfg.shared + cfg.own), FLOATS)
    rows = q.shape[:-2]
    check("latent_split_fwd", "x.1 (kv)", kv, (*rows, cfg.heads, cfg.own + cfg.value), q.dtype, q)
    check("latent_split_fwd", "x.2 (shared)", shared, (*rows, 1, cfg.shared), q.dtype, q)
    own, v = kv.split((cfg.own, cfg.value), -1)
    kept = LatentSplitResiduals.keep(cfg, needs, inputs=Inputs.of(x), shape=q.shape, dtype=q.dtype)
    return (q, kernels.join_heads(shared, own), v), kept


@dgrad_of(LatentSplitResiduals)
def latent_split_dgrad(
    residuals: LatentSplitResiduals, dy: Any, cfg: LatentSplitConfig
) -> tuple[tuple[Tensor, Tensor, Tensor], None]:
    """dy: `(dq, dk, dv)`, None for zero -> `(dq, dkv, dshared)`. No params, so pending is None."""
    if not isinstance(dy, tuple) or len(dy) != 3:
        fail("latent_split_dgrad", "dy", "a tuple (dq, dk, dv)", describe(dy), TypeError)
    needs, rows, key = residuals.needs, residuals.shape[:-2], cfg.shared + cfg.own
    for i, (part, size) in enumerate(zip(dy, (key, key, cfg.value), strict=True)):
        if part is not None:
            check("latent_split_dgrad", f"dy.{i}", part, (*rows, cfg.heads, size), residuals.dtype)
    dq, dk, dv = dy
    dkv = dshared = None
    if needs.input(1) and not (dk is None and dv is None):
        dkv = _gradient_of_kv(dk, dv, cfg)
    if needs.input(2) and dk is not None:
        dshared = kernels.sum_heads(dk[..., : cfg.shared])
    return residuals.inputs.make((dq if needs.input(0) else None, dkv, dshared)), None


def _gradient_of_kv(dk: Tensor | None, dv: Tensor | None, cfg: LatentSplitConfig) -> Tensor:
    """d kv from dk and dv, None for zero."""
    like = dv if dk is None else dk
    assert like is not None
    own = like.new_zeros((*like.shape[:-1], cfg.own)) if dk is None else dk[..., cfg.shared :]
    values = like.new_zeros((*like.shape[:-1], cfg.value)) if dv is None else dv
    return kernels.join_values(own, values)


latent_split = make_op("latent_split", LatentSplitConfig, fwd=latent_split_fwd, dgrad=latent_split_dgrad)
latent_split_init, latent_split_bwd, latent_split_wgrad = no_params(latent_split, latent_split_dgrad)
