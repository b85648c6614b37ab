"""Low-rank linear map, as a LoRA adapter adds it to a linear layer.

    y = c (m * x) a^T b^T

    t = c dy b        da = t^T (m * x)        db = c dy^T ((m * x) a^T), both summed over rows        dx = m * (t a)

x, dx: [*, I], y, dy: [*, O]; a: [R, I]; b: [O, R]; all of one float dtype. m is 1 without dropout. With `cfg.dropout` the op's x is
(x, key), and m is drawn as in `dropout`, and redrawn in the backward. Kept: x, a and b, aliases, and c (m * x) a^T: [*, R]; not
the dropped x. `into` may be float32 accumulators for 16-bit gradients.
Source: LoRA, arXiv 2106.09685; initialisation and dropout as in PEFT (peft/tuners/lora/layer.py).

>>> import torch
>>> from funcops import random
>>> from funcops.lora import LowRankConfig, low_rank
>>> cfg = LowRankConfig(8, 4, 2, scale=0.5)
>>> params = low_rank.init(cfg, key=random.key(0))
>>> y, residuals = low_rank.fwd(params, torch.ones(3, 8), cfg)
>>> y.abs().sum(), residuals.u.shape
(tensor(0.), torch.Size([3, 2]))
>>> cfg = LowRankConfig(8, 4, 2, dropout=0.1)
>>> y, residuals = low_rank.fwd(params, (torch.ones(3, 8), random.key(1)), cfg)
>>> residuals.key.shape
torch.Size([2])
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops.engine import random
from funcops.engine.contract.accumulators import check_into
from funcops.engine.contract.by_config import ByConfig
from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import Op, both_halves, config, dgrad_of, forward, init_of, make_op, wgrad_of
from funcops.engine.contract.schema import DGRAD, NO_GRADIENT, WGRAD, Inputs, Pending, Residuals, saved, static
from funcops.engine.errors import check, check_rows, describe, not_a_tuple, require, require_count, require_number
from funcops.engine.trees import leaf, tree
from funcops.library.kernels import linear as products
from funcops.library.kernels import pointwise
from funcops.library.ops.dropout import MASK, sharded_mask
from funcops.library.ops.linear import LinearConfig, LinearParams, linear_gradients
from funcops.library.ops.linear_wgrads import Product
from funcops.library.ops.qlinear import QLinearConfig

__all__ = ["LowRankConfig", "LowRankParams"]
__all__ += ["low_rank", "low_rank_bwd", "low_rank_dgrad", "low_rank_fwd", "low_rank_init", "low_rank_wgrad"]


@config
class LowRankConfig(OpConfig):
    """`in_features` (I), `out_features` (O) and `rank` (R), all at least 1; `scale`: the factor c; `dropout`: the probability with
    which an element of x is dropped, in [0, 1); `shared`: how x is sharded over ranks, which draw their parts of one mask
    (`dist.parallel` says it, as in `dist.ShardedDropoutConfig`)."""

    in_features: int = field(kw_only=False)
    out_features: int = field(kw_only=False)
    rank: int = field(kw_only=False)
    scale: float = 1.0
    dropout: float = 0.0
    shared: tuple[Any, ...] = ()
    reruns = True

    def __post_init__(self) -> None:
        where = type(self).__name__
        require_count(where, in_features=self.in_features, out_features=self.out_features, rank=self.rank)
        require_number(where, scale=self.scale)
        require_number(where, 0.0, dropout=self.dropout)
        require(self.dropout < 1.0, where, "dropout", "below 1", self.dropout)
        require(isinstance(self.shared, tuple), where, "shared", "a tuple of dist.Shared", describe(self.shared))

    def widths(self, width: int | None) -> tuple[int | None, int | None]:
        return self.in_features, self.out_features

    by_ids = False  # whether x is ids, each the number of a column of a

    @property
    def draws_mask(self) -> bool:  # type: ignore[override]
        return self.dropout > 0.0

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """The shape of each leaf."""
        return {"a": (self.rank, self.in_features), "b": (self.out_features, self.rank)}

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape of the weight that the factors change."""
        return (*self.shapes["b"][:-1], self.shapes["a"][-1])

    def change(self, a: Tensor, b: Tensor) -> Tensor:
        """The change of the weight, without the factor c."""
        return torch.matmul(b, a)


@tree
class LowRankParams:
    a: Tensor = leaf("[R, I]")
    b: Tensor = leaf("[O, R]")


class LowRankResiduals(Residuals, static=("dtype",)):
    x: Tensor = saved("[*, I]", alias="x", needed_by=WGRAD, of=("params.a",))
    u: Tensor = saved("[*, R]", needed_by=WGRAD, of=("params.b",))
    a: Tensor = saved("[R, I]", alias="params.a", needed_by=DGRAD)
    b: Tensor = saved("[O, R]", alias="params.b", needed_by=DGRAD | WGRAD, of=("x", "params.a"))
    y_shape: torch.Size = static()


class LowRankDropoutResiduals(Residuals, static=("inputs", "dtype")):
    x: Tensor = saved("[*, I]", alias="x.0", needed_by=WGRAD, of=("params.a",))
    u: Tensor = saved("[*, R]", needed_by=WGRAD, of=("params.b",))
    a: Tensor = saved("[R, I]", alias="params.a", needed_by=DGRAD, of=("x.0",))
    b: Tensor = saved("[O, R]", alias="params.b", needed_by=DGRAD | WGRAD, of=("x.0", "params.a"))
    key: Tensor = saved("[2]", alias="x.1", needed_by=DGRAD | WGRAD, of=("x.0", "params.a"))
    y_shape: torch.Size = static()


Factors = Callable[[Any, Any, str], tuple[Tensor, Tensor]]  # (pending, cfg, "a" or "b") -> the operands of its gradient
LowRankKept = LowRankResiduals | LowRankDropoutResiduals


def _keyed(cfg: LowRankConfig) -> bool:
    return cfg.dropout > 0.0


def _kept(cfg: LowRankConfig) -> type[LowRankKept]:
    return LowRankDropoutResiduals if _keyed(cfg) else LowRankResiduals


class LowRankPending(Pending):
    x: Tensor = saved("[*, I]", alias="residuals.x", needed_by=WGRAD, of=("params.a",))
    t: Tensor = saved("[*, R]", needed_by=WGRAD, of=("params.a",))
    key: Tensor = saved("[2]", alias="residuals.key", needed_by=WGRAD, of=("params.a",))
    dy: Tensor = saved("[*, O]", alias="dy", needed_by=WGRAD, of=("params.b",))
    u: Tensor = saved("[*, R]", alias="residuals.u", needed_by=WGRAD, of=("params.b",))


@init_of(LowRankConfig)
def low_rank_init(
    cfg: LowRankConfig, *, key: Tensor | None = None, device: Any = None, dtype: torch.dtype | None = None
) -> LowRankParams:
    """a is uniform in ±1/sqrt(I), Kaiming's with a = sqrt(5); b is zero, and so is y."""
    bound = cfg.in_features**-0.5
    a = random.uniform(key, (cfg.rank, cfg.in_features), low=-bound, high=bound, dtype=dtype, device=device)
    at = device if device is not None else a.device if key is None else key.device  # an a to be drawn later has no device yet
    return LowRankParams(a, torch.zeros(cfg.out_features, cfg.rank, dtype=a.dtype, device=at))


@forward(LowRankConfig, LowRankParams)
def low_rank_fwd(
    params: LowRankParams, x: Tensor | tuple[Tensor, Tensor], cfg: LowRankConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, LowRankKept | None]:
    """`y = c (m * x) a^T b^T`. x: [*, I], or with dropout `(x, key)` -> y: [*, O]. Raises `ValueError` or `TypeError` for a wrong
    shape, dtype or device."""
    if cfg.dropout == 0.0:
        _check("x", params, x, cfg)
        y, u = _product(params, x, cfg)  # type: ignore[arg-type]
        return y, LowRankResiduals.keep(cfg, needs, x=x, u=u, a=params.a, b=params.b, y_shape=y.shape, dtype=y.dtype)
    if not isinstance(x, tuple) or len(x) != 2:
        not_a_tuple("low_rank_fwd", x, "x", "key", why=", as cfg.dropout is above 0")
    rows, key = x
    _check("x.0", params, rows, cfg)
    check("low_rank_fwd", "x.1 (the key)", key, (2,), torch.int64, rows)
    y, u = _product(params, masked(rows, key, cfg), cfg)
    return y, LowRankDropoutResiduals.keep(
        cfg, needs, x=rows, u=u, a=params.a, b=params.b, key=key, y_shape=y.shape, dtype=y.dtype, inputs=Inputs.of(x)
    )


def _check(name: str, params: LowRankParams, x: Any, cfg: LowRankConfig) -> None:
    where = "low_rank_fwd"
    check_rows(where, name, x, cfg.in_features)
    check(where, "params.a", params.a, (cfg.rank, cfg.in_features), x.dtype, x)
    check(where, "params.b", params.b, (cfg.out_features, cfg.rank), x.dtype, x)


def _product(params: LowRankParams, x: Tensor, cfg: LowRankConfig) -> tuple[Tensor, Tensor]:
    """Return y, and u = c x a^T: the factor is applied to u, which has the fewest elements."""
    u = pointwise.scale(products.linear_fwd(x, params.a, None), cfg.scale)
    return products.linear_fwd(u, params.b, None), u


@dgrad_of(ByConfig(LowRankConfig, _kept, (LowRankResiduals, LowRankDropoutResiduals)))
def low_rank_dgrad(
    residuals: LowRankKept, dy: Tensor, cfg: LowRankConfig
) -> tuple[Tensor | tuple[Tensor, None], LowRankPending | None]:
    """`dx = c m * (dy b a)`. dy: [*, O] -> dx: [*, I], or with dropout `(dx, None)`; and the pending weight gradients: x, t, dy and
    u, of which t is new."""
    needs, b = residuals.needs, residuals.b
    check("low_rank_dgrad", "dy", dy, residuals.y_shape, residuals.dtype, residuals.u if b is None else b)
    t = NO_GRADIENT if b is None else pointwise.scale(products.linear_dgrad(dy, b), cfg.scale)  # read by dx and da
    if isinstance(residuals, LowRankResiduals):
        dx = products.linear_dgrad(t, residuals.a) if needs.x else NO_GRADIENT
        return dx, LowRankPending.keep(cfg, needs, x=residuals.x, t=t, key=None, dy=dy, u=residuals.u)
    dx, key = NO_GRADIENT, residuals.key
    if needs.input(0):
        dx = masked(products.linear_dgrad(t, residuals.a), key, cfg)
    pending = LowRankPending.keep(cfg, needs, x=residuals.x, t=t, key=key, dy=dy, u=residuals.u)
    return residuals.inputs.make((dx, None)), pending


@wgrad_of(LowRankPending, LowRankParams)
def low_rank_wgrad(pending: LowRankPending, cfg: LowRankConfig, *, into: LowRankParams | None = None) -> LowRankParams:
    """`da = t^T x`, `db = dy^T u`; added to `into` if given."""
    return low_rank_gradients("low_rank_wgrad", pending, cfg, into, _factors)


def low_rank_gradients(where: str, pending: Any, cfg: LowRankConfig, into: LowRankParams | None, factors: Factors) -> LowRankParams:
    """The requested ones of da and db, each from its operands `factors(pending, cfg, name)`; added to `into` if given."""
    if into is not None:  # before anything is sent
        check_low_rank_into(where, pending, cfg, into)
    made = LowRankParams(NO_GRADIENT, NO_GRADIENT)
    for name in _asked(pending):
        sums = None if into is None else LinearParams(getattr(into, name), None)
        setattr(made, name, linear_gradients(where, *factors(pending, cfg, name), False, sums).weight)
    return made if into is None else into


def masked(t: Tensor, key: Tensor, cfg: LowRankConfig) -> Tensor:
    """`m * t`."""
    return sharded_mask(t, key, cfg.dropout, cfg.shared) if cfg.shared else pointwise.dropout(t, key, cfg.dropout)  # type: ignore[no-any-return]


def dropped(pending: Any, cfg: LowRankConfig) -> Tensor:
    """The x that a was multiplied with."""
    return pending.x if pending.key is None else masked(pending.x, pending.key, cfg)  # type: ignore[no-any-return]


def products_of(where: str, pending: Any, cfg: LowRankConfig, into: LowRankParams, factors: Factors) -> list[Product]:
    """da and db as products of few rows, which may be computed together with other layers'."""
    check_low_rank_into(where, pending, cfg, into)
    return [Product.of(*factors(pending, cfg, name), getattr(into, name), None) for name in _asked(pending)]


def _asked(pending: Any) -> list[str]:
    return ["a"] * (pending.t is not None) + ["b"] * (pending.u is not None)


def _factors(pending: LowRankPending, cfg: LowRankConfig, name: str) -> tuple[Tensor, Tensor]:
    """The operands of da and of db."""
    if name == "b":
        return pending.dy, pending.u
    return pending.t, dropped(pending, cfg)


def check_low_rank_into(where: str, pending: Any, cfg: LowRankConfig, into: LowRankParams) -> None:
    """Check both accumulators before either is written."""
    like = {name: (pending.t if name == "a" else pending.u).new_empty(()).expand(cfg.shapes[name]) for name in _asked(pending)}
    check_into(where, into, LowRankParams(like.get("a"), like.get("b")))  # type: ignore[arg-type]


def low_rank_products(pending: LowRankPending, cfg: LowRankConfig, *, into: LowRankParams) -> list[Product]:
    """da and db as products to run later."""
    return products_of("low_rank_wgrad", pending, cfg, into, _factors)


low_rank = make_op(
    "low_rank",
    LowRankConfig,
    init=low_rank_init,
    fwd=low_rank_fwd,
    dgrad=low_rank_dgrad,
    wgrad=low_rank_wgrad,
    products=low_rank_products,
    keyed=_keyed,
    mixes=lambda cfg: MASK if cfg.dropout else "",
)
low_rank_bwd = both_halves(low_rank, low_rank_dgrad, low_rank_wgrad)


class Adapter(NamedTuple):
    """`beside(cfg, rank, scale, dropout)`: the op and config of an adapter beside a layer. `layer`: "linear" or "embedding"."""

    beside: Callable[[Any, int, float, float], tuple[Op, LowRankConfig]]
    layer: str = "linear"


ADAPTERS: dict[type, Adapter] = {}
"""By the class of a layer's config. The file of each kind of adapter enters the layers that it serves."""


def adapter_of(cfg: Any) -> Adapter | None:
    """The entry of `ADAPTERS` for a config; None if no adapter serves its layer."""
    return ADAPTERS.get(type(cfg))


def _beside(cfg: Any, rank: int, scale: float, dropout: float) -> tuple[Op, LowRankConfig]:
    return low_rank, LowRankConfig(cfg.in_features, cfg.out_features, rank, scale=scale, dropout=dropout)


ADAPTERS |= dict.fromkeys((LinearConfig, QLinearConfig), Adapter(_beside))
