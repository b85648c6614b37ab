"""Two operators that a user of the engine would write, without the library: a product with weights, and a softplus."""

from dataclasses import field

import torch

from funcops.engine import random
from funcops.engine.compose.chain import ChainConfig, chain
from funcops.engine.compose.repeat import RepeatConfig, repeat
from funcops.engine.compose.skip import SkipConfig, skip
from funcops.engine.compose.step import Step
from funcops.engine.contract.accumulators import accumulate
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import OpConfig, config, dgrad_of, forward, init_of, make_op, recompute_of, same_width, wgrad_of
from funcops.engine.contract.schema import DGRAD, NO_GRADIENT, RECOMPUTE, WGRAD, Pending, Residuals, saved
from funcops.engine.errors import FLOATS, check
from funcops.engine.trees import leaf, tree


@config
class SoftplusConfig(OpConfig):
    widths = same_width


class SoftplusResiduals(Residuals):
    x: torch.Tensor = saved("[*]", alias="x", needed_by=DGRAD | RECOMPUTE)


@forward(SoftplusConfig)
def softplus_fwd(params, x, cfg, *, needs=Needs.ALL):
    check("softplus_fwd", "x", x, (...,), FLOATS)
    return torch.nn.functional.softplus(x), SoftplusResiduals.keep(cfg, needs, x=x)


@dgrad_of(SoftplusResiduals)
def softplus_dgrad(residuals, dy, cfg):
    x = residuals.x
    check("softplus_dgrad", "dy", dy, x.shape, x.dtype, x)
    return dy * torch.sigmoid(x), None


@recompute_of(SoftplusResiduals)
def softplus_recompute(residuals, cfg):
    return torch.nn.functional.softplus(residuals.x)


softplus = make_op(
    "softplus", SoftplusConfig, fwd=softplus_fwd, dgrad=softplus_dgrad, recomputable="elementwise", recompute=softplus_recompute
)


@config
class ProductConfig(OpConfig):
    ins: int = field(kw_only=False)
    outs: int = field(kw_only=False)

    def widths(self, width):
        return self.ins, self.outs


@tree
class ProductParams:
    weight: torch.Tensor = leaf("[O, I]")


class ProductResiduals(Residuals):
    x: torch.Tensor = saved("[*, I]", alias="x", needed_by=WGRAD, of=("params.weight",))
    weight: torch.Tensor = saved("[O, I]", alias="params.weight", needed_by=DGRAD)


class ProductPending(Pending):
    x: torch.Tensor = saved("[*, I]", alias="residuals.x", needed_by=WGRAD)
    dy: torch.Tensor = saved("[*, O]", alias="dy", needed_by=WGRAD)


@init_of(ProductConfig)
def product_init(cfg, *, key=None, device=None, dtype=None):
    shape = cfg.outs, cfg.ins
    if key is None:
        return ProductParams(torch.empty(shape, device=device, dtype=dtype))
    return ProductParams(random.uniform(key, shape, low=-0.5, high=0.5, dtype=dtype, device=device))


@forward(ProductConfig, ProductParams)
def product_fwd(params, x, cfg, *, needs=Needs.ALL):
    check("product_fwd", "x", x, (..., cfg.ins), FLOATS)
    check("product_fwd", "params.weight", params.weight, (cfg.outs, cfg.ins), x.dtype, x)
    return x @ params.weight.mT, ProductResiduals.keep(cfg, needs, x=x, weight=params.weight)


@dgrad_of(ProductResiduals)
def product_dgrad(residuals, dy, cfg):
    x, weight, needs = residuals.x, residuals.weight, residuals.needs
    like = weight if x is None else x
    check("product_dgrad", "dy", dy, (..., cfg.outs) if x is None else (*x.shape[:-1], cfg.outs), like.dtype, like)
    return dy @ weight if needs.x else NO_GRADIENT, ProductPending.keep(cfg, needs, x=x, dy=dy)


@wgrad_of(ProductPending, ProductParams)
def product_wgrad(pending, cfg, *, into=None):
    x, dy = pending.x.reshape(-1, cfg.ins), pending.dy.reshape(-1, cfg.outs)
    return accumulate("product_wgrad", ProductParams(dy.mT @ x), into)


product = make_op("product", ProductConfig, init=product_init, fwd=product_fwd, dgrad=product_dgrad, wgrad=product_wgrad)

BODY = ChainConfig(steps=(Step("up", product, ProductConfig(4, 4)), Step("act", softplus, SoftplusConfig())))
LAYERS = RepeatConfig(skip, SkipConfig(chain, BODY), times=3)
MODEL = ChainConfig(steps=(Step("blocks", repeat, LAYERS), Step("out", product, ProductConfig(4, 2))))
