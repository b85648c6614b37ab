"""Linear layer in low precision.

    y = q(x) q(w)^T + b

    dx = q(dy) q(w)        dw = q(dy)^T q(x), summed over rows        db = sum over rows of dy

x: [*, I], y, dy: [*, O]; w: [O, I]; b: [O] or None, of one float dtype, as for `linear`. q rounds to a format and back
(`library.formats`). Each product quantises its operands along the dim that it sums over: x by rows for y and by columns for dw, w
by rows for y and by columns for dx, dy by rows for dx and by columns for dw. Gradients are straight through: they treat q as the
identity.

`cfg.recipe` chooses the formats (`funcops.low_precision`). w is a tensor, which every forward and backward quantises, or
a `QWeight` of `quantize_params`, made once a step. For `Fp8Delayed` it has scales beside it (`Scaled`), and dparams has the amaxes.
Kept: x in low precision, or x itself if the recipe has keep="input"; w, an alias.

>>> import torch
>>> from funcops import QLinearConfig, qlinear, random
>>> from funcops.low_precision import Fp8Block
>>> cfg = QLinearConfig(128, 128, recipe=Fp8Block(), bias=False)
>>> params, x = qlinear.init(cfg, key=random.key(0)), torch.ones(4, 128)
>>> y, residuals = qlinear.fwd(params, x, cfg)
>>> residuals.x.codes.dtype, residuals.x.codes.shape
(torch.uint8, torch.Size([4, 128]))
>>> residuals.weight is params.weight
True
>>> dparams, dx = qlinear.bwd(residuals, torch.ones(4, 128), cfg)
>>> dparams.weight[0, :2]
tensor([4., 4.])
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from funcops.engine.contract.op import config
from funcops.engine.contract.schema import DGRAD, WGRAD, Pending, Residuals, saved, static
from funcops.engine.errors import require
from funcops.library.formats.recipes import require_recipe
from funcops.library.ops._layer_op import layer_op
from funcops.library.ops._low_config import LowConfig, low_form
from funcops.library.ops._rounding_logs import ROUNDING_LOGS
from funcops.library.ops.coded_linear import CodedLinear
from funcops.library.ops.linear import LinearConfig, linear

__all__ = ["QLinearConfig", "QLinearPending", "QLinearResiduals"]
__all__ += ["qlinear", "qlinear_bwd", "qlinear_dgrad", "qlinear_fwd", "qlinear_init", "qlinear_wgrad"]


@config
class QLinearConfig(LowConfig, LinearConfig):
    """The fields of `LinearConfig`, and a `recipe` of `funcops.low_precision`. Raises `ValueError` for sizes that its blocks do not
    divide."""

    plain = LinearConfig

    def __post_init__(self) -> None:
        require_recipe("QLinearConfig", self.recipe)
        super().__post_init__()
        for name in ("in_features", "out_features"):
            size, multiple = getattr(self, name), self.recipe.multiple
            require(size % multiple == 0, "QLinearConfig", name, f"a multiple of {multiple} ({type(self.recipe).__name__})", size)


class QLinearResiduals(Residuals, static=("dtype",)):
    x: Any = saved("[*, I]", needed_by=WGRAD, of=("params.weight",), tree=True)
    weight: Any = saved("[O, I]", alias="params.weight", needed_by=DGRAD, tree=True)
    amaxes: Tensor = saved("[2]", needed_by=WGRAD, of=("params.weight",))
    rounding: Tensor = saved("[3] or [2]", needed_by=DGRAD | WGRAD, of=("x", "params.weight"), tree=True)
    y_shape: torch.Size = static()


class QLinearOfInputResiduals(QLinearResiduals):
    x: Tensor = saved("[*, I]", alias="x", needed_by=WGRAD, of=("params.weight",))


class QLinearPending(Pending, static=("dtype",)):
    x: Any = saved("[*, I]", alias="residuals.x", needed_by=WGRAD, of=("params.weight",), tree=True)
    dy: Any = saved("[*, O]", needed_by=WGRAD, of=("params.weight",), tree=True)
    db: Tensor = saved("[O]", needed_by=WGRAD, of=("params.bias",))
    amaxes: Tensor = saved("[3]", needed_by=WGRAD, of=("params.weight",))


class _Layer(CodedLinear):
    of_input = QLinearOfInputResiduals

    def prepares(self, cfg: Any) -> Hashable:
        return None if cfg.recipe.delayed else cfg.recipe  # with delayed scaling each has a scale of its own

    def joins(self, cfg: Any) -> Hashable:
        return cfg.recipe if cfg.recipe.keep == "input" and cfg.recipe.wgrad == "low" else None

    def shared(self, pending: Any, cfg: Any) -> dict[str, Any] | None:
        return {"x": self.factors("qlinear_wgrad", pending, cfg)[1]}


qlinear, qlinear_init, qlinear_fwd, qlinear_bwd, qlinear_dgrad, qlinear_wgrad = layer_op(
    _Layer,
    "qlinear",
    QLinearConfig,
    QLinearResiduals,
    QLinearPending,
    logs=ROUNDING_LOGS,
    init="The params that `linear_init` draws, in high precision.",
    fwd="""`y = q(x) q(w)^T + b`. x: [*, I] -> y: [*, O]. Raises `ValueError` or `TypeError` for a wrong shape, dtype, device,
    format or recipe, and `RuntimeError` on a device without the formats.""",
    dgrad="""`dx = q(dy) q(w)`. dy: [*, O] -> dx: [*, I], and the pending weight gradient: dy and x in low precision, db; with
    keep="input" x itself, and dy itself if dw is computed in high precision.""",
    wgrad="""`dw = q(dy)^T q(x)`, and db; added to `into` if given. For a `Scaled` weight, dw is `Scaled` too, with the amaxes [3]
    of x, w and dy, uint32 (`funcops.library.formats.scaled.bits_of`); `into` takes the larger of these.""",
)


low_form(linear, qlinear)
