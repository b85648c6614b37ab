"""Linear attention in some layers of a decoder: Gated DeltaNet (arXiv:2412.06464), as in Qwen3-Next.

    q, k, v = conv(W x), in heads, q and k of length 1        g = log_decay(W_g x)        beta = sigmoid(W_beta x)
    y = W_out (norm(gated_delta_rule(q, k, v, g, beta)) silu(W_z x))

The norm is over each head of v, with a weight of its own that all heads share.
"""

from __future__ import annotations

from funcops.engine.compose.chain import ChainConfig, chain
from funcops.engine.compose.parallel import ParallelConfig, parallel
from funcops.engine.compose.step import Step
from funcops.library.ops.activation import ActivationConfig, activation
from funcops.library.ops.causal_conv1d import CausalConv1dConfig, causal_conv1d
from funcops.library.ops.gated_delta_rule import GatedDeltaRuleConfig, gated_delta_rule
from funcops.library.ops.glu import GLUConfig, glu
from funcops.library.ops.l2_norm import L2NormConfig, l2_norm
from funcops.library.ops.linear import LinearConfig, linear
from funcops.library.ops.log_decay import LogDecayConfig, log_decay
from funcops.library.ops.reshape import ReshapeConfig, reshape
from funcops.library.ops.rms_norm import RMSNormConfig, rms_norm
from funcops.models.decoder_config import DecoderConfig, LinearAttentionConfig

PACKED = (
    "False for a config with linear attention, whose state would pass from one document to the next: give each a row of its own"
)


def gated(gate: tuple[Step, ...], mixed: ChainConfig, kind: str) -> tuple[Step, ...]:
    """Make the steps of what `mixed` makes of x, times an activation of what `gate` makes of it, a gate of `glu`."""
    branches = Step("gate", chain, ChainConfig(steps=gate)), Step("mixed", chain, mixed)
    return Step("gated", parallel, ParallelConfig(branches=branches)), Step("act", glu, GLUConfig(kind=kind, paired=True))


def linear_steps(cfg: DecoderConfig, of: LinearAttentionConfig) -> ChainConfig:
    """Make the chain of a layer's linear attention."""

    def heads(name: str, count: int, size: int) -> Step:
        steps = [
            Step("proj", linear, LinearConfig(cfg.dim, count * size, bias=False)),
            Step("conv", causal_conv1d, CausalConv1dConfig(count * size, width=of.width, bias=False)),
            Step("heads", reshape, ReshapeConfig((count * size,), (count, size))),
        ]
        if name != "v":
            steps.append(Step("norm", l2_norm, L2NormConfig(size)))
        return Step(name, chain, ChainConfig(steps=tuple(steps)))

    def number(name: str, then: Step) -> Step:
        proj = Step("proj", linear, LinearConfig(cfg.dim, of.value_heads, bias=False))
        return Step(name, chain, ChainConfig(steps=(proj, then)))

    z = (
        Step("proj", linear, LinearConfig(cfg.dim, of.values, bias=False)),
        Step("heads", reshape, ReshapeConfig((of.values,), (of.value_heads, of.value_size))),
    )
    branches = (
        heads("q", of.key_heads, of.key_size),
        heads("k", of.key_heads, of.key_size),
        heads("v", of.value_heads, of.value_size),
        number("g", Step("decay", log_decay, LogDecayConfig(of.value_heads))),
        number("beta", Step("sigmoid", activation, ActivationConfig("sigmoid"))),
    )
    mixed = (
        Step("parts", parallel, ParallelConfig(branches=branches)),
        Step("mix", gated_delta_rule, GatedDeltaRuleConfig()),
        Step("norm", rms_norm, RMSNormConfig(of.value_size, eps=cfg.eps)),
    )
    merge = Step("merge", reshape, ReshapeConfig((of.value_heads, of.value_size), (of.values,)))
    out = Step("out", linear, LinearConfig(of.values, cfg.dim, bias=False))
    return ChainConfig(steps=(*gated(z, ChainConfig(steps=mixed), "swiglu"), merge, out))
