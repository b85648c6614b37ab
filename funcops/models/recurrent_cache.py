"""The state of linear attention between tokens: the last inputs of each convolution, and what the gated delta rule holds.

    convolution: y of (held, x), cut off before x          held' = the last W - 1 of (held, x)
    gated delta rule: y, S' from S          (beta and g of padding are 0, which leaves S as it is)

Each token writes over both, so a cache cannot go back to an earlier position.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcops.engine.contract.configs import OpConfig, config
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import forward, init_of, make_op
from funcops.engine.errors import FLOATS, check, fail, require_type
from funcops.engine.trees import leaf, tree
from funcops.library.kernels.causal_conv1d import causal_conv1d_fwd
from funcops.library.kernels.gated_delta_rule import gated_delta_rule_fwd
from funcops.library.ops.causal_conv1d import CausalConv1dConfig
from funcops.library.ops.gated_delta_rule import GatedDeltaRuleConfig, check_delta_rule
from funcops.models.cache import CACHE, RecurrentCache, Slots, no_backward

PARTS = "linear_attn.gated.mixed"


@config
class CachedConvConfig(OpConfig):
    """`of`: the config of the convolution."""

    of: CausalConv1dConfig
    takes_also = (CACHE,)

    def __post_init__(self) -> None:
        require_type("with_cache", "convolution", self.of, CausalConv1dConfig)


@tree
class CachedConvParams:
    """The params of the convolution, and its last inputs."""

    weight: Tensor | None = leaf("[C, W]")
    bias: Tensor | None = leaf("[C]")
    held: Tensor | None = leaf("[B, W - 1, C]")


@config
class CachedDeltaRuleConfig(OpConfig):
    """`of`: the config of the gated delta rule."""

    of: GatedDeltaRuleConfig
    takes_also = (CACHE,)

    def __post_init__(self) -> None:
        require_type("with_cache", "gated_delta_rule", self.of, GatedDeltaRuleConfig)


@tree
class CachedState:
    """The state that the gated delta rule goes on from."""

    state: Tensor | None = leaf("[B, H, D, V]")


@init_of(CachedConvConfig)
def cached_conv_init(cfg: CachedConvConfig, *, key: Any = None, device: Any = None, dtype: Any = None) -> CachedConvParams:
    """No params of its own: `with_caches` places them."""
    return CachedConvParams(None, None, None)


@init_of(CachedDeltaRuleConfig)
def cached_delta_rule_init(cfg: CachedDeltaRuleConfig, *, key: Any = None, device: Any = None, dtype: Any = None) -> CachedState:
    """No params of its own: `with_caches` places them."""
    return CachedState(None)


@forward(CachedConvConfig, CachedConvParams)
def cached_conv_fwd(
    params: CachedConvParams, x: tuple[Tensor, dict[int | None, Slots]], cfg: CachedConvConfig, *, needs: Needs = Needs.NONE
) -> tuple[Tensor, None]:
    """x: `(t, slots)` with t [B, T, C] -> y [B, T, C]. The held inputs are written to in place. Raises `ValueError` or `TypeError`
    for a wrong shape, dtype or device."""
    where, (t, by_window), of, held = "cached_conv_fwd", x, cfg.of, params.held
    _no_gradient(where, needs)
    assert held is not None and params.weight is not None
    at = next(iter(by_window.values()))
    check(where, "x.0, as the cache,", t, (held.shape[0], at.at.shape[1], of.channels), held.dtype, held)
    check(where, "params.weight", params.weight, (of.channels, of.width), t.dtype, t)
    whole = torch.cat((held, t), 1)
    y = causal_conv1d_fwd(whole, params.weight, params.bias, of.silu)[:, of.width - 1 :]
    if at.new is None:
        held.copy_(whole[:, t.shape[1] :])
    else:  # padding is behind the tokens
        last = (at.ends - at.first).unsqueeze(1) + torch.arange(of.width - 1, device=t.device)
        held.copy_(whole[at.rows, last])
    return y, None


@forward(CachedDeltaRuleConfig, CachedState)
def cached_delta_rule_fwd(
    params: CachedState, x: tuple[Any, dict[int | None, Slots]], cfg: CachedDeltaRuleConfig, *, needs: Needs = Needs.NONE
) -> tuple[Tensor, None]:
    """x: `((q, k, v, g, beta), slots)` -> y [B, T, H, V]. The state is written to in place. Raises `ValueError` or `TypeError` for
    a wrong shape, dtype or device."""
    where, (given, by_window), of, state = "cached_delta_rule_fwd", x, cfg.of, params.state
    _no_gradient(where, needs)
    assert state is not None
    q, k, v, g, beta = check_delta_rule(where, given, of)
    at = next(iter(by_window.values()))
    check(where, "x.2 (v), as the cache,", v, (state.shape[0], at.at.shape[1], state.shape[1], state.shape[3]), FLOATS, state)
    if at.new is not None:
        g, beta = (torch.where(at.new.unsqueeze(-1), t, torch.zeros_like(t)) for t in (g, beta))
    y, last = gated_delta_rule_fwd(q, k, v, g, beta, state, of.scale_of(q.shape[3]), of.chunk)
    state.copy_(last)
    return y, None


def _no_gradient(where: str, needs: Needs) -> None:
    if needs:
        fail(where, "needs", "Needs.NONE: a cache that is written to has no gradient", needs)


BACKWARD: Any = dict(dgrad=no_backward, wgrad=no_backward, bwd=no_backward)
cached_conv = make_op("cached_conv", CachedConvConfig, init=cached_conv_init, fwd=cached_conv_fwd, **BACKWARD)
cached_delta_rule = make_op(
    "cached_delta_rule", CachedDeltaRuleConfig, init=cached_delta_rule_init, fwd=cached_delta_rule_fwd, **BACKWARD
)


def of_linear_attention(attn: Any, layer: RecurrentCache) -> dict[str, Any]:
    """The params that change in a layer's linear attention, by step."""
    parts: dict[str, Any] = {}
    for name, held in (("q", layer.q), ("k", layer.k), ("v", layer.v)):
        conv = attn["parts"][name]["conv"]
        parts[name] = {"conv": CachedConvParams(conv.weight, conv.bias, held)}
    return {"parts": parts, "mix": CachedState(layer.state)}
