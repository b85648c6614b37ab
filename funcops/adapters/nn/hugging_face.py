"""Layers of Hugging Face's decoders as ops. They are known by the names of their classes, so that nothing is imported for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from funcops.adapters.autograd import run
from funcops.adapters.nn.module import OpModule
from funcops.compose.chain import ChainConfig, chain
from funcops.compose.parallel import ParallelConfig, parallel
from funcops.compose.policy import with_policy
from funcops.compose.step import Step
from funcops.errors import require
from funcops.op import Op
from funcops.ops.activation import ActivationConfig, activation
from funcops.ops.cross_entropy import CrossEntropyConfig, cross_entropy
from funcops.ops.glu import GLUConfig, glu
from funcops.ops.linear import LinearConfig, LinearParams, linear
from funcops.ops.rms_norm import RMSNormConfig, RMSNormParams, rms_norm

GATES = {
    "SiLUActivation": "swiglu",
    "SiLU": "swiglu",
    "GELUActivation": "geglu",
    "GELU": "geglu",
    "NewGELUActivation": "geglu_tanh",
}
KINDS = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}


class RMSNorm(OpModule):
    """LlamaRMSNorm and those that are like it: `weight` and `variance_epsilon`."""

    op, params_class, fields, values = rms_norm, RMSNormParams, ("weight",), ("variance_epsilon",)

    def make_cfg(self) -> RMSNormConfig:
        return RMSNormConfig(dim=tuple(self.weight.shape), eps=self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


def _kind(module: nn.Module) -> str:
    name = type(module).__name__
    require(name in GATES, "MLP", "act_fn", f"one of {', '.join(GATES)}", name)
    return GATES[name]


def _plain(layers: tuple[Any, ...]) -> None:
    hooked = [type(m).__name__ for m in layers if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks]
    require(not hooked, "MLP", "layers", "without hooks", hooked)


class ChainModule(OpModule):
    """A module that is a chain; `policy` says what it keeps."""

    policy: Any = None

    @property
    def op(self) -> Op:  # type: ignore[override]
        return chain if self.policy is None else with_policy(chain, self.policy)

    def forward(self, x: Tensor) -> Any:
        return run(self.op, self.op_params(), x, self.cfg)


class GatedMLP(ChainModule):
    """LlamaMLP and those that are like it: down(act(gate(x)) * up(x)), as one chain."""

    def _layers(self) -> tuple[Any, ...]:
        return self.gate_proj, self.up_proj, self.down_proj

    def make_cfg(self) -> ChainConfig:
        gate, up, down = self._layers()
        _plain((gate, up, down))
        require(all(isinstance(m, nn.Linear) for m in (gate, up, down)), "MLP", "layers", "linear", type(gate).__name__)
        branches = tuple(Step(name=n, op=linear, cfg=_linear(m)) for n, m in (("gate", gate), ("up", up)))
        steps = (
            Step(name="project", op=parallel, cfg=ParallelConfig(branches=branches)),
            Step(name="act", op=glu, cfg=GLUConfig(kind=_kind(self.act_fn), paired=True)),
            Step(name="down", op=linear, cfg=_linear(down)),
        )
        return ChainConfig(steps=steps)

    def op_params(self) -> dict[str, Any]:
        gate, up, down = (LinearParams(m.weight, m.bias) for m in self._layers())
        return {"project": {"gate": gate, "up": up}, "act": None, "down": down}


def _linear(module: Any) -> LinearConfig:
    return LinearConfig(in_features=module.in_features, out_features=module.out_features, bias=module.bias is not None)


class GPT2MLP(ChainModule):
    """GPT2MLP: c_proj(act(c_fc(x))), then its dropout. Its weights are [in, out]; the op takes views of them."""

    def make_cfg(self) -> ChainConfig:
        _plain((self.c_fc, self.c_proj))
        (i, h), (_, o) = self.c_fc.weight.shape, self.c_proj.weight.shape
        steps = (
            Step(name="c_fc", op=linear, cfg=LinearConfig(in_features=i, out_features=h)),
            Step(name="act", op=activation, cfg=ActivationConfig(kind=KINDS[_kind(self.act)])),
            Step(name="c_proj", op=linear, cfg=LinearConfig(in_features=h, out_features=o)),
        )
        return ChainConfig(steps=steps)

    def op_params(self) -> dict[str, Any]:
        first, last = (LinearParams(m.weight.mT, m.bias) for m in (self.c_fc, self.c_proj))
        return {"c_fc": first, "act": None, "c_proj": last}

    def forward(self, hidden_states: Tensor) -> Any:
        return self.dropout(super().forward(hidden_states))


def causal_lm_loss(
    logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, ignore_index: int = -100,
    shift_labels: Tensor | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """transformers' ForCausalLMLoss: the cross entropy of the next token, in float32, by one op that keeps the logits and a number a
    row."""
    if shift_labels is None:
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    reduction = "mean" if num_items_in_batch is None else "sum"
    cfg = _loss_config(ignore_index, reduction)
    loss: Tensor = run(cross_entropy, None, (logits.reshape(-1, vocab_size), shift_labels.reshape(-1).to(logits.device)), cfg)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


_loss_configs: dict[Any, CrossEntropyConfig] = {}


def _loss_config(ignore_index: int, reduction: str) -> CrossEntropyConfig:
    key = ignore_index, reduction
    if key not in _loss_configs:
        _loss_configs[key] = CrossEntropyConfig(ignore_index=ignore_index, reduction=reduction)
    return _loss_configs[key]


_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
MODELS: dict[str, type] = {
    **{f"{family}RMSNorm": RMSNorm for family in _FAMILIES},
    **{f"{family}MLP": GatedMLP for family in _FAMILIES},
    "GPT2MLP": GPT2MLP,
}
LOSSES = {"ForCausalLMLoss": causal_lm_loss}
