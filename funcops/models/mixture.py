"""A mixture of experts as a chain: each token goes through the K experts of E that a router chooses; with `shared`, all tokens also
go through one more MLP.

    l = x W_gate^T      w, i = route(l)      y_t = sum over k of w_tk expert_{i_tk}(x_t)  +  g_t shared(x_t)

g_t is 1, or with `shared_gate` sigmoid(x_t . w_s), one number per token (Qwen2-MoE).

The router's other results, `load` and `loss`, are named outputs of the chain (`ChainConfig(outputs=)`).
"""

from __future__ import annotations

from funcops.engine.compose.add import AddConfig, add
from funcops.engine.compose.chain import ChainConfig, chain
from funcops.engine.compose.fork import ForkConfig, fork
from funcops.engine.compose.parallel import ParallelConfig, parallel
from funcops.engine.compose.step import Step
from funcops.engine.contract.configs import config
from funcops.engine.errors import require, require_type
from funcops.library.ops.experts import ExpertsConfig, experts
from funcops.library.ops.glu import GLUConfig, glu
from funcops.library.ops.linear import LinearConfig, linear
from funcops.library.ops.route import RouteConfig, route
from funcops.library.ops.row_scale import RowScaleConfig, row_scale

__all__ = ["MoEConfig", "moe"]

ROUTED = ("load", "loss")


@config
class MoEConfig:
    """How tokens are routed, and the experts. `shared`: the hidden size of an MLP that every token goes through besides, with the
    experts' gated unit, 0 for none; `shared_gate`: whether its output is multiplied by a gate of its own; `gate_bias`: whether the
    router's linear layer has a bias; `saves`: whether the router's indices are an output, too; `dense`: the layers of a decoder
    that have an MLP instead of a mixture."""

    route: RouteConfig
    experts: ExpertsConfig
    shared: int = 0
    shared_gate: bool = False
    gate_bias: bool = False
    saves: bool = False
    dense: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require_type("MoEConfig", "route", self.route, RouteConfig)
        require_type("MoEConfig", "experts", self.experts, ExpertsConfig)
        same = self.route.experts == self.experts.experts
        require(same, "MoEConfig", "experts.experts", f"{self.route.experts}, as of route", self.experts.experts)
        require(self.shared >= 0, "MoEConfig", "shared", "at least 0", self.shared)
        plain = self.shared == 0 or not self.experts.bias
        require(plain, "MoEConfig", "shared", "0 beside experts with biases, which the shared MLP lacks", self.shared)
        require(self.shared > 0 or not self.shared_gate, "MoEConfig", "shared_gate", "False without a shared MLP", True)
        right = isinstance(self.dense, tuple) and all(type(i) is int and i >= 0 for i in self.dense)
        require(right, "MoEConfig", "dense", "a tuple of numbers of layers", self.dense)


def moe(cfg: MoEConfig) -> ChainConfig:
    """Make the chain of a mixture: x, y: [*, H], and with y the router's `load` [E] and `loss` [] (`route`). With jitter it takes
    the extra `key`, and if it is packed the extra `documents`, the router's `cu_seqlens`: a token of no document goes through no
    expert, only through a shared MLP. A router that `replays` adds the extra `choices`, [*, R, K]; with `saves` there is the output
    `indices`, [*, K] int32. Params: `gate`, `route` and `experts`; with a shared MLP these are in `moe.routed`, and its
    `up` and `down` in `moe.shared`; with a gate of its own in `moe.shared.gated.mlp`, beside `moe.shared.gated.gate`. Raises
    `TypeError` if `cfg` is not a MoEConfig.

    >>> import torch
    >>> from funcops import ExpertsConfig, RouteConfig, chain, random
    >>> from funcops.models import MoEConfig, moe
    >>> cfg = moe(MoEConfig(route=RouteConfig(4, 2), experts=ExpertsConfig(4, dim=8, hidden=16)))
    >>> params = chain.init(cfg, key=random.key(0))
    >>> y, residuals = chain.fwd(params, torch.ones(3, 8), cfg)
    >>> list(params), y.main.shape, int(y.extras["load"].sum())
    (['in', 'gate', 'route', 'experts'], torch.Size([3, 8]), 6)
    """
    require_type("moe", "cfg", cfg, MoEConfig)
    there = {"key": cfg.route.jitter, "documents": cfg.route.packed, "choices": cfg.route.replays is not None}
    extras = tuple([name for name, value in there.items() if value])
    outputs = (*ROUTED, "indices") if cfg.saves else ROUTED
    steps = (
        Step("in", fork, ForkConfig(), gives=("tokens",)),
        Step("gate", linear, LinearConfig(cfg.experts.dim, cfg.route.experts, bias=cfg.gate_bias)),
        Step("route", route, cfg.route, takes=extras, gives=("indices", *ROUTED)),
        Step("experts", experts, cfg.experts, takes=("tokens", "indices")),
    )
    routed = ChainConfig(steps=steps, extras=extras, outputs=outputs)
    if not cfg.shared:
        return routed
    both = ParallelConfig(branches=(Step("routed", chain, routed), Step("shared", chain, _shared(cfg))))
    return ChainConfig(steps=(Step("moe", parallel, both), Step("sum", add, AddConfig())), extras=extras, outputs=outputs)


def _shared(cfg: MoEConfig) -> ChainConfig:
    of, dim = cfg.experts, cfg.experts.dim
    gated = GLUConfig(kind=of.kind, gate="first", limit=of.limit, alpha=of.alpha, offset=of.offset)
    up = Step("up", linear, LinearConfig(dim, 2 * cfg.shared, bias=False))
    mlp = ChainConfig(steps=(up, Step("act", glu, gated), Step("down", linear, LinearConfig(cfg.shared, dim, bias=False))))
    if not cfg.shared_gate:
        return mlp
    both = ParallelConfig(branches=(Step("mlp", chain, mlp), Step("gate", linear, LinearConfig(dim, 1, bias=False))))
    return ChainConfig(steps=(Step("gated", parallel, both), Step("scale", row_scale, RowScaleConfig(sigmoid=True))))
