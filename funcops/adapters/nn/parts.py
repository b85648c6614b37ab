"""Recognition of other libraries' classes by the place of their definition, so that these libraries need not be imported."""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch import nn

from funcops.adapters.nn.module import OpModule

LINEAR, CONV1D, DROPOUT = "a linear layer", "a Conv1D", "a Dropout"
KINDS: dict[str, str] = {
    "torch.nn.modules.linear.Linear": LINEAR,
    "funcops.adapters.nn.layers.Linear": LINEAR,
    "transformers.pytorch_utils.Conv1D": CONV1D,
    "torch.nn.modules.dropout.Dropout": DROPOUT,
    "funcops.adapters.nn.layers.Dropout": DROPOUT,
    "torch.nn.modules.activation.ReLU": "relu",
    "funcops.adapters.nn.layers.ReLU": "relu",
    "torch.nn.modules.activation.SiLU": "silu",
    "funcops.adapters.nn.layers.SiLU": "silu",
    "torch.nn.modules.activation.GELU": "gelu",
    "funcops.adapters.nn.layers.GELU": "gelu",
    "transformers.activations.SiLUActivation": "silu",
    "transformers.activations.GELUActivation": "gelu",
    "transformers.activations.GELUTanh": "gelu_tanh",
    "transformers.activations.NewGELUActivation": "gelu_tanh",
    "transformers.activations.FastGELUActivation": "gelu_tanh",
    "transformers.activations.AccurateGELUActivation": "gelu_tanh",
    "transformers.activations.QuickGELUActivation": "quick_gelu",
    "transformers.activations.ReLUSquaredActivation": "squared_relu",
}
# the GLU of an activation
GATES = {"relu": "reglu", "squared_relu": "squared_reglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh"}
GATES |= {"quick_gelu": "quick_geglu", "silu": "swiglu"}
ACTS = frozenset(GATES)


def known(cls: type, table: dict[str, Any]) -> Any:
    """The table's entry for a class, by module and name; None for a class of the same name from elsewhere, or one whose forward was
    replaced or wrapped."""
    found = table.get(f"{cls.__module__}.{cls.__qualname__}")
    if found is None or getattr(sys.modules.get(cls.__module__), cls.__qualname__, None) is not cls:
        return None
    forward = getattr(cls, "forward", None)
    own = getattr(forward, "__module__", None) in (cls.__module__, OpModule.__module__) and not hasattr(forward, "__wrapped__")
    return found if own else None


ORIGINALS: dict[type, type] = {}  # the originals of classes that `swapped` has made
_kinds: dict[type, tuple[str, Any, Any]] = {}  # with the class whose forward must run, and that forward


def kind_of(module: Any) -> str | None:
    """The kind of a layer of an MLP, or None if its call may do more."""
    cls = type(module)
    found = _kinds.get(cls)
    if found is None:
        kind = known(ORIGINALS.get(cls, cls), KINDS)
        if kind is None:
            return None  # not cached: such classes may be made on the fly
        of: Any = cls if not issubclass(cls, OpModule) else cls._origin
        found = _kinds[cls] = kind, of, cls._theirs if issubclass(cls, OpModule) else of.forward
    kind, of, theirs = found
    if of.forward is not theirs:  # a program has replaced it, for all modules of the class
        return None
    if kind in _VARIANTS:
        return _VARIANTS[kind](module.__dict__)
    return kind


def _gelu(state: dict[str, Any]) -> str | None:
    if state.get("approximate", "none") != "none":
        return "gelu_tanh"
    return "gelu" if state.get("act", nn.functional.gelu) is nn.functional.gelu else None


def _gelu_tanh(state: dict[str, Any]) -> str | None:
    act = state.get("act")
    if act is None:
        return "gelu_tanh"
    found = type(act) is functools.partial and act.func is nn.functional.gelu and act.keywords == {"approximate": "tanh"}
    return "gelu_tanh" if found else None


_VARIANTS = {"gelu": _gelu, "gelu_tanh": _gelu_tanh}
