"""Layers of Hugging Face's decoders as ops. They are known by where their classes are defined, so that nothing is
imported for them."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from funcops.adapters.autocast import LOWER, any_autocast, casts, is_on, outside
from funcops.adapters.autograd import run
from funcops.adapters.nn.module import OpModule, is_plain, untouched, watched
from funcops.compose.chain import ChainConfig, chain
from funcops.compose.parallel import ParallelConfig, parallel
from funcops.compose.policy import with_policy
from funcops.compose.step import Step
from funcops.errors import fail, require
from funcops.op import Op
from funcops.ops.activation import ActivationConfig, activation
from funcops.ops.cross_entropy import CrossEntropyConfig, cross_entropy
from funcops.ops.glu import GLUConfig, glu
from funcops.ops.linear import LinearConfig, LinearParams, linear
from funcops.ops.rms_norm import RMSNormConfig, RMSNormParams, rms_norm

LINEAR, CONV1D = "a linear layer", "a Conv1D"
KINDS: dict[str, str] = {
    "torch.nn.modules.linear.Linear": LINEAR,
    "funcops.adapters.nn.layers.Linear": LINEAR,
    "transformers.pytorch_utils.Conv1D": CONV1D,
    "torch.nn.modules.activation.SiLU": "swiglu",
    "funcops.adapters.nn.layers.SiLU": "swiglu",
    "transformers.activations.SiLUActivation": "swiglu",
    "torch.nn.modules.activation.GELU": "geglu",
    "funcops.adapters.nn.layers.GELU": "geglu",
    "transformers.activations.GELUActivation": "geglu",
    "transformers.activations.NewGELUActivation": "geglu_tanh",
}
WITHOUT_GATE = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}


def known(cls: type, table: dict[str, Any]) -> Any:
    """What the table has for a class, by where it is defined: a class of the same name elsewhere is another, and so is one whose
    forward was replaced."""
    found = table.get(f"{cls.__module__}.{cls.__qualname__}")
    forward = getattr(cls, "forward", None)
    return found if getattr(forward, "__module__", None) in (cls.__module__, OpModule.__module__) else None


_kinds: dict[type, str] = {}


def kind_of(module: Any) -> str | None:
    """What a part of an MLP is, if a call of it is no more than that."""
    cls = type(module)
    kind = _kinds.get(cls)
    if kind is None:
        kind = known(cls, KINDS)
        if kind is None:
            return None  # and is not remembered: such classes are made on the fly
        _kinds[cls] = kind
    if kind == "geglu":
        state = module.__dict__
        if state.get("approximate", "none") != "none":
            return "geglu_tanh"
        if state.get("act", nn.functional.gelu) is not nn.functional.gelu:
            return None
    return kind


class RMSNorm(OpModule):
    """LlamaRMSNorm and those that are like it: `weight` and `variance_epsilon`. x and weight of two dtypes give the wider one."""

    op, params_class, fields, values = rms_norm, RMSNormParams, ("weight",), ("variance_epsilon",)

    def make_cfg(self) -> RMSNormConfig:
        return RMSNormConfig(dim=tuple(self.weight.shape), eps=self.variance_epsilon)

    def forward(self, x: Tensor) -> Any:
        (weight,) = self._own()
        if x.dtype is weight.dtype or not (is_plain(x) and is_plain(weight)):
            return super().forward(x)
        dtype = torch.promote_types(x.dtype, weight.dtype)
        return self.launched([weight.to(dtype)], x.to(dtype))

    def plain(self, *given: Any) -> Any:
        (x,) = given
        n = x.to(torch.float32)
        n = n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * n.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


class ChainModule(OpModule):
    """A module that is a chain of its layers, as long as they are what they were: each call looks, and goes through the layers where
    one was replaced, hooked, sharded or given a forward of its own. `policy` says what the chain keeps."""

    policy: Any = None
    layers: tuple[str, ...] = ()
    layer_kind: str = LINEAR
    act_name: str = ""

    @property
    def op(self) -> Op:  # type: ignore[override]
        return chain if self.policy is None else with_policy(chain, self.policy)

    @property
    def cfg(self) -> ChainConfig:
        found = self._found()
        if found is None:
            self._explain()
        return self._config(found)

    def op_params(self) -> Any:
        """The chain's params; the leaves are the layers' own parameters."""
        found = self._found()
        return self._explain() if found is None else self._params(found[1:])

    def forward(self, x: Tensor) -> Any:
        found = self._found()
        if found is None or not is_plain(x):
            return self.plain(x)
        cfg, own = self._config(found), found[1:]
        if any_autocast() and is_on(x.device.type):
            x, own = casts(LOWER, x, x.device.type, own)
            with outside(x.device.type):
                return run(self.op, self._params(own), x, cfg)
        return run(self.op, self._params(own), x, cfg)

    def _found(self) -> list[Any] | None:
        """The kind of the activation, and the layers' weights and biases; None where a part must be called."""
        modules = self._modules
        act = modules.get(self.act_name)
        kind = kind_of(act)
        if kind not in WITHOUT_GATE or not untouched(act, ()) or watched():
            return None
        found: list[Any] = [kind]
        for name in self.layers:
            layer: Any = modules.get(name)
            if kind_of(layer) is not self.layer_kind or not untouched(layer, FIELDS):
                return None
            parameters = layer._parameters
            found += (parameters["weight"], parameters["bias"])
        return found

    def _explain(self) -> NoReturn:
        """Say which part keeps the module from being a chain."""
        where = f"funcops.nn.{type(self).__name__}"
        for name in (*self.layers, self.act_name):
            part, kind = self._modules.get(name), kind_of(self._modules.get(name))
            ok = kind in WITHOUT_GATE if name == self.act_name else kind == self.layer_kind
            wanted = "an activation that GLU has" if name == self.act_name else self.layer_kind
            got = f"{type(part).__module__}.{type(part).__qualname__}"
            require(ok, where, name, f"{wanted}, of a class that is known", got)
            plain = untouched(part, () if name == self.act_name else FIELDS)
            require(plain, where, name, "as its class has it, without hooks", f"a {type(part).__name__} that was changed")
        fail(where, "hooks", "absent", "some on all modules")

    def _config(self, found: list[Any]) -> ChainConfig:
        """The config for what was found; made anew only where it would be another."""
        key = [found[0], *[None if t is None else t.shape for t in found[1:]]]
        made = self.__dict__.get("_made")
        if made is None or made[0] != key:
            made = self.__dict__["_made"] = key, self.make_cfg()
        return made[1]  # type: ignore[no-any-return]


FIELDS = ("weight", "bias")


class GatedMLP(ChainModule):
    """LlamaMLP and those that are like it: down(act(gate(x)) * up(x)), as one chain."""

    layers, act_name = ("gate_proj", "up_proj", "down_proj"), "act_fn"

    def make_cfg(self) -> ChainConfig:
        gate, up, down = (_linear(self._modules[name]) for name in self.layers)
        branches = (Step(name="gate", op=linear, cfg=gate), Step(name="up", op=linear, cfg=up))
        steps = (
            Step(name="project", op=parallel, cfg=ParallelConfig(branches=branches)),
            Step(name="act", op=glu, cfg=GLUConfig(kind=kind_of(self.act_fn), paired=True)),
            Step(name="down", op=linear, cfg=down),
        )
        return ChainConfig(steps=steps)

    def _params(self, own: list[Any]) -> dict[str, Any]:
        gate, up, down = (LinearParams(*own[i : i + 2]) for i in (0, 2, 4))
        return {"project": {"gate": gate, "up": up}, "act": None, "down": down}

    def plain(self, *given: Any) -> Any:
        (x,) = given
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def _linear(module: Any) -> LinearConfig:
    o, i = module.weight.shape
    return LinearConfig(in_features=i, out_features=o, bias=module.bias is not None)


class GPT2MLP(ChainModule):
    """GPT2MLP: c_proj(act(c_fc(x))), then its dropout. Its weights are [in, out]; the op takes views of them."""

    layers, layer_kind, act_name = ("c_fc", "c_proj"), CONV1D, "act"

    def make_cfg(self) -> ChainConfig:
        (i, h), (_, o) = self.c_fc.weight.shape, self.c_proj.weight.shape
        steps = (
            Step(name="c_fc", op=linear, cfg=LinearConfig(in_features=i, out_features=h)),
            Step(name="act", op=activation, cfg=ActivationConfig(kind=WITHOUT_GATE[str(kind_of(self.act))])),
            Step(name="c_proj", op=linear, cfg=LinearConfig(in_features=h, out_features=o)),
        )
        return ChainConfig(steps=steps)

    def _params(self, own: list[Any]) -> dict[str, Any]:
        first, last = (LinearParams(own[i].mT, own[i + 1]) for i in (0, 2))
        return {"c_fc": first, "act": None, "c_proj": last}

    def forward(self, hidden_states: Tensor) -> Any:
        return self.dropout(super().forward(hidden_states))

    def plain(self, *given: Any) -> Any:
        return self.c_proj(self.act(self.c_fc(given[0])))


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
    x = logits.reshape(-1, vocab_size), shift_labels.reshape(-1).to(logits.device)
    with outside(logits.device.type):
        loss: Tensor = run(cross_entropy, None, x, cfg)
    if num_items_in_batch is None:
        return loss
    return loss / (num_items_in_batch.to(loss.device) if isinstance(num_items_in_batch, Tensor) else num_items_in_batch)


_loss_configs: dict[Any, CrossEntropyConfig] = {}


def _loss_config(ignore_index: int, reduction: str) -> CrossEntropyConfig:
    key = ignore_index, reduction
    if key not in _loss_configs:
        _loss_configs[key] = CrossEntropyConfig(ignore_index=ignore_index, reduction=reduction)
    return _loss_configs[key]


_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
_MODELING = "transformers.models.{0}.modeling_{0}."
MODELS: dict[str, type] = {
    **{f"{_MODELING.format(family.lower())}{family}RMSNorm": RMSNorm for family in _FAMILIES},
    **{f"{_MODELING.format(family.lower())}{family}MLP": GatedMLP for family in _FAMILIES},
    f"{_MODELING.format('gpt2')}GPT2MLP": GPT2MLP,
}
LOSSES = {"transformers.loss.loss_utils.ForCausalLMLoss": causal_lm_loss}
