"""Hugging Face's norms, MLPs and losses as ops; `models.py` lists the models."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from funcops.adapters.autocast import LOWER, any_autocast, casts, is_on, outside
from funcops.adapters.nn.layers import KEEP_Y, Dropout, drawn_key
from funcops.adapters.nn.module import OpModule, folded, is_plain, run_op, untouched
from funcops.adapters.nn.parts import ACTS, CONV1D, DROPOUT, GATES, LINEAR, kind_of
from funcops.adapters.nn.sequential import KEY
from funcops.adapters.nn.unchanged import watched
from funcops.engine.compose.chain import ChainConfig, chain
from funcops.engine.compose.parallel import ParallelConfig, parallel
from funcops.engine.compose.step import Step
from funcops.engine.contract.op import Op
from funcops.engine.errors import fail, require
from funcops.engine.trees import WithExtras
from funcops.library.ops.activation import ActivationConfig, activation
from funcops.library.ops.cross_entropy import CrossEntropyConfig, cross_entropy
from funcops.library.ops.dropout import DropoutConfig, dropout
from funcops.library.ops.glu import GLUConfig, glu
from funcops.library.ops.linear import LinearConfig, LinearParams, linear
from funcops.library.ops.rms_norm import RMSNormConfig, RMSNormParams, rms_norm
from funcops.low_precision import with_recipe
from funcops.memory.policy import with_policy

_compiling = torch.compiler.is_dynamo_compiling


class RMSNorm(OpModule):
    """LlamaRMSNorm and similar norms, with `weight` and `variance_epsilon`. If x and weight differ in dtype, y has the wider
    one."""

    op, params_class, fields, values = rms_norm, RMSNormParams, ("weight",), ("variance_epsilon",)
    zero_centered = False

    def make_cfg(self) -> RMSNormConfig:
        eps = getattr(self, self.values[0])
        return RMSNormConfig(dim=tuple(self.weight.shape), eps=eps, zero_centered_gamma=self.zero_centered)

    def forward(self, x: Tensor) -> Any:
        if self._patched() or _is_moved(x):
            return self.plain(x)
        own = self._own()
        weight = own[0]
        if x.dtype is weight.dtype or not all([is_plain(t) for t in (x, *own)]):
            return super().forward(x)
        wide, dtype = torch.promote_types(x.dtype, weight.dtype), self.y_dtype(x.dtype, weight.dtype)
        own = [None if t is None else t.to(wide) for t in own]
        y = self.launched(own, x if wide is torch.float32 and dtype is x.dtype else x.to(wide))
        return y if y.dtype is dtype else y.to(dtype)

    @staticmethod
    def y_dtype(x: torch.dtype, weight: torch.dtype) -> torch.dtype:
        """The dtype of y if x and weight differ in dtype."""
        return torch.promote_types(x, weight)


def _is_moved(x: Any) -> bool:
    """Whether element-wise functions, as a norm's formula has, return the dimensions of x in another order, as for a transposed x:
    the op's y is contiguous. A tracer's compiler chooses layouts itself."""
    if type(x) is not Tensor or _compiling() or x.is_contiguous():
        return False
    return not torch.empty_like(x, device="meta").is_contiguous()


class RMSNormOfX(RMSNorm):
    """Olmo2RMSNorm and similar norms: y has x's dtype."""

    @staticmethod
    def y_dtype(x: torch.dtype, weight: torch.dtype) -> torch.dtype:
        return x


class GemmaRMSNorm(RMSNormOfX):
    """GemmaRMSNorm and similar norms, with `eps`, scaled by 1 + weight."""

    values, zero_centered = ("eps",), True


class T5LayerNorm(RMSNorm):
    """T5LayerNorm, an RMSNorm: y has the weight's dtype if that has 16 bits, else the widest of x's, the weight's and float32."""

    @staticmethod
    def y_dtype(x: torch.dtype, weight: torch.dtype) -> torch.dtype:
        return weight if weight.itemsize == 2 else torch.promote_types(torch.promote_types(x, weight), torch.float32)


class Activation(OpModule):
    """The activations of transformers; most of them hold their function as `act`. One whose backward reads y (a squared ReLU: the
    ReLU), not x, runs its own forward, as `funcops.nn.ReLU` does."""

    op, values = activation, ("act",)

    def make_cfg(self) -> ActivationConfig:
        kind = kind_of(self)
        require(kind is not None, f"funcops.nn.{type(self).__name__}", "act", "the function of its class", "another function")
        return ActivationConfig(kind=kind)

    @property
    def keeps_y(self) -> bool:
        return self.known_cfg().kind in (*KEEP_Y, "squared_relu")

    def other_way(self) -> Any:
        return self.plain if self.keeps_y else None


class Conv1D(OpModule):
    """GPT-2's Conv1D: a linear layer whose weight is [in, out]. The op takes a view of it."""

    op, params_class, fields = linear, LinearParams, ("weight", "bias")
    autocast = LOWER

    def make_cfg(self) -> LinearConfig:
        i, o = self.weight.shape
        return LinearConfig(in_features=i, out_features=o, bias=self.bias is not None)

    def forward(self, x: Tensor) -> Any:
        weight, bias = self._own()
        if self._patched() or not (is_plain(x) and is_plain(weight) and is_plain(bias)):
            return self.plain(x)
        return self.launched([weight, bias], x)

    def _params(self, own: list[Any]) -> LinearParams:
        return LinearParams(own[0].mT, own[1])


class ChainModule(OpModule):
    """A module that runs its layers as one chain. Each call checks the layers, and calls them one by one if any was replaced,
    hooked, sharded or given its own forward. `policy`: the policy of the chain.

    A subclass for a kind of MLP gives the names: `layers`, the linear layers (of `layer_kind`); `act_name`; `drop_name`, a Dropout
    before the last layer; `last_name`, a Dropout after it, which is called as a module.
    """

    policy: Any = None
    layers: tuple[str, ...] = ()
    layer_kind: str = LINEAR
    act_name: str = "act_fn"
    drop_name: str = ""
    last_name: str = ""
    acts: Any = ACTS

    @property
    def op(self) -> Op:  # type: ignore[override]
        return chain if self.policy is None else with_policy(chain, self.policy)

    def known_cfg(self) -> ChainConfig:
        found = self._found()
        if found is None:
            self._explain()
        return self._config(found)

    def op_params(self) -> Any:
        """The chain's params; the leaves are the layers' own parameters."""
        found = self._found()
        return self._explain() if found is None else self._params(found[2:], found[1])

    def forward(self, x: Tensor) -> Any:
        found = None if self._patched() else self._found()
        if found is None or not is_plain(x) or (found[1] and not isinstance(self._modules[self.drop_name], Dropout)):
            return self.plain(x)  # a Dropout of torch draws torch's mask
        y = self._chained(x, found)
        return self._modules[self.last_name](y) if self.last_name else y

    def _chained(self, x: Tensor, found: list[Any]) -> Any:
        x, cfg, own, device = folded(x), self._config(found), found[2:], x.device.type
        if any_autocast() and is_on(device):
            x, own = casts(LOWER, x, device, own)
        given = WithExtras(x, {KEY: drawn_key(x)}) if cfg.extras else x
        with outside(device):
            return run_op(self.op, self._params(own, found[1]), given, cfg)

    def _found(self) -> list[Any] | None:
        """The kind of the activation, the probability of its Dropout, and the layers' weights and biases; None if a layer must be
        called as a module."""
        modules = self._modules
        act = modules.get(self.act_name)
        kind = kind_of(act)
        if kind not in self.acts or not untouched(act, ()) or watched():
            return None
        found: list[Any] = [kind, 0.0]
        if self.drop_name:
            drop: Any = modules.get(self.drop_name)
            if kind_of(drop) is not DROPOUT or not untouched(drop, ()):
                return None
            found[1] = drop.p if drop.training else 0.0
        for name in self.layers:
            layer: Any = modules.get(name)
            if kind_of(layer) is not self.layer_kind or not untouched(layer, FIELDS):
                return None
            parameters = layer._parameters
            found += (parameters["weight"], parameters["bias"])
        recipe = self._recipe()
        if any([modules[name].__dict__.get("recipe") is not recipe for name in self.layers]):  # type: ignore[union-attr]
            return None
        return found

    def _recipe(self) -> Any:
        """The recipe of the first layer, which all layers of a chain share."""
        return self._modules[self.layers[0]].__dict__.get("recipe")  # type: ignore[union-attr]

    def _explain(self) -> NoReturn:
        """Raise an error that names the layer because of which the module cannot run as a chain."""
        where = f"funcops.nn.{type(self).__name__}"
        kinds: list[Any] = [(name, (self.layer_kind,), self.layer_kind, FIELDS) for name in self.layers]
        kinds.append((self.act_name, tuple(self.acts), "an activation that funcops has", ()))
        kinds += [(self.drop_name, (DROPOUT,), DROPOUT, ())] if self.drop_name else []
        for name, allowed, wanted, fields in kinds:
            part = self._modules.get(name)
            got = f"{type(part).__module__}.{type(part).__qualname__}"
            require(kind_of(part) in allowed, where, name, f"{wanted} of a known class", got)
            plain = untouched(part, fields)
            require(plain, where, name, "unchanged from its class, without hooks", f"a {type(part).__name__} that was changed")
        fail(where, "hooks", "absent", "some on all modules")

    def _config(self, found: list[Any]) -> ChainConfig:
        """The config for `found`, cached until it changes."""
        recipe = self._recipe()
        key = [found[0], found[1], recipe, *[None if t is None else t.shape for t in found[2:]]]
        made = self.__dict__.get("_made")
        if made is None or made[0] != key:
            cfg = self.config_of(*found)
            made = self.__dict__["_made"] = key, cfg if recipe is None else with_recipe(cfg, recipe)
        return made[1]  # type: ignore[no-any-return]

    def config_of(self, kind: str, p: float, *own: Any) -> ChainConfig:
        """The chain for the kind of the activation, the probability of the Dropout, and the layers' weights and biases."""
        raise NotImplementedError

    def _params(self, own: list[Any], p: float = 0.0) -> dict[str, Any]:
        raise NotImplementedError


FIELDS = ("weight", "bias")


def _linear(weight: Tensor, bias: Any) -> LinearConfig:
    o, i = weight.shape
    return LinearConfig(in_features=i, out_features=o, bias=bias is not None)


def _drop(p: float) -> Step:
    """A step into whose key no name is folded, nor around it: the mask is the one that the module draws when it is called."""
    return Step(name="drop", op=dropout, cfg=DropoutConfig(p=p), takes=(KEY,), folds=False)


class GatedMLP(ChainModule):
    """LlamaMLP and similar MLPs: down(act(gate(x)) * up(x)), as one chain. A Dropout on the product is applied to up(x) instead,
    which is equal because both multiply, so that the product can be recomputed."""

    layers, acts = ("gate_proj", "up_proj", "down_proj"), GATES

    def config_of(self, kind: str, p: float, *own: Any) -> ChainConfig:
        gate, up, down = (_linear(*own[i : i + 2]) for i in (0, 2, 4))
        branches = [Step(name="gate", op=linear, cfg=gate), Step(name="up", op=linear, cfg=up)]
        extras = (KEY,) if p else ()
        if p:
            dropped = ChainConfig(steps=(Step(name="linear", op=linear, cfg=up), _drop(p)), extras=extras)
            branches[1] = Step(name="up", op=chain, cfg=dropped, takes=extras, folds=False)
        steps = (
            Step(name="project", op=parallel, cfg=ParallelConfig(branches=tuple(branches)), takes=extras, folds=False),
            Step(name="act", op=glu, cfg=GLUConfig(kind=GATES[kind], paired=True)),
            Step(name="down", op=linear, cfg=down),
        )
        return ChainConfig(steps=steps, extras=extras)

    def _params(self, own: list[Any], p: float = 0.0) -> dict[str, Any]:
        gate, up, down = (LinearParams(*own[i : i + 2]) for i in (0, 2, 4))
        return {"project": {"gate": gate, "up": {"linear": up, "drop": None} if p else up}, "act": None, "down": down}


class FusedMLP(ChainModule):
    """Phi3MLP and similar MLPs: down(up * act(gate)), with gate and up the halves of one product."""

    layers, acts = ("gate_up_proj", "down_proj"), GATES

    def config_of(self, kind: str, p: float, *own: Any) -> ChainConfig:
        steps = (
            Step(name="project", op=linear, cfg=_linear(*own[:2])),
            Step(name="act", op=glu, cfg=GLUConfig(kind=GATES[kind], gate="first")),
            Step(name="down", op=linear, cfg=_linear(*own[2:])),
        )
        return ChainConfig(steps=steps)

    def _params(self, own: list[Any], p: float = 0.0) -> dict[str, Any]:
        return {"project": LinearParams(*own[:2]), "act": None, "down": LinearParams(*own[2:])}


class PlainMLP(ChainModule):
    """ViTMLP and similar MLPs: last(act(first(x))), as one chain. A Dropout after a ReLU is applied before it instead, which is
    equal because its factors are not negative, so that the ReLU can be recomputed."""

    layers = ("fc1", "fc2")

    def config_of(self, kind: str, p: float, *own: Any) -> ChainConfig:
        between = [Step(name="act", op=activation, cfg=ActivationConfig(kind=kind))]
        if p:
            between.insert(0 if kind == "relu" else 1, _drop(p))
        first, last = (Step(name=name, op=linear, cfg=_linear(*t)) for name, t in zip(self.layers, self._views(own), strict=True))
        return ChainConfig(steps=(first, *between, last), extras=(KEY,) if p else ())

    def _params(self, own: list[Any], p: float = 0.0) -> dict[str, Any]:
        between = {"act": None, "drop": None} if p else {"act": None}
        first, last = (LinearParams(*found) for found in self._views(own))
        return {self.layers[0]: first, **between, self.layers[1]: last}

    def _views(self, own: Any) -> Any:
        """Weight [out, in] and bias of both layers."""
        return (own[:2], own[2:]) if self.layer_kind is LINEAR else ((own[0].mT, own[1]), (own[2].mT, own[3]))


class T5Dense(ChainModule):
    """The base of T5's MLPs: their names, and a last layer that may have another dtype, to which x is cast."""

    act_name, drop_name = "act", "dropout"

    def _found(self) -> list[Any] | None:
        found = super()._found()
        return None if found is None or found[2].dtype is not found[-2].dtype else found


class Phi3MLP(FusedMLP):
    act_name = "activation_fn"


class ViTMLP(PlainMLP):
    act_name = "activation_fn"


class GPT2MLP(PlainMLP):
    layers, layer_kind, act_name, last_name = ("c_fc", "c_proj"), CONV1D, "act", "dropout"


class T5DenseActDense(T5Dense, PlainMLP):
    layers = ("wi", "wo")


class T5DenseGatedActDense(T5Dense, GatedMLP):
    layers = ("wi_0", "wi_1", "wo")


LOSSES = {reduction: CrossEntropyConfig(reduction=reduction) for reduction in ("mean", "sum")}


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """transformers' ForCausalLMLoss: the cross entropy of the next token, in float32, by one op that keeps the logits and a number
    per row."""
    if shift_labels is None:
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    reduction = "mean" if num_items_in_batch is None else "sum"
    cfg = LOSSES[reduction]  # made before any call: a compiler would guard on a table that calls fill
    if ignore_index != cfg.ignore_index:
        cfg = CrossEntropyConfig(ignore_index=ignore_index, reduction=reduction)
    x = logits.reshape(-1, vocab_size), shift_labels.reshape(-1).to(logits.device)
    with outside(logits.device.type):
        loss: Tensor = run_op(cross_entropy, None, x, cfg)
    if num_items_in_batch is None:
        return loss
    return loss / (num_items_in_batch.to(loss.device) if isinstance(num_items_in_batch, Tensor) else num_items_in_batch)
