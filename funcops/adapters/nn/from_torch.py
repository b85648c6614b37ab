"""`from_torch(model)`: the layers of a model that have an op run on it, in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from funcops.adapters.nn import layers, losses
from funcops.adapters.nn.hugging_face import LOSSES, MODELS, ChainModule
from funcops.adapters.nn.module import prepare
from funcops.adapters.nn.sequential import Sequential
from funcops.errors import require_type
from funcops.residuals.policy import Policy

EXACT: dict[type, type] = {
    nn.Linear: layers.Linear,
    nn.Embedding: layers.Embedding,
    nn.LayerNorm: layers.LayerNorm,
    nn.RMSNorm: layers.RMSNorm,
    nn.Dropout: layers.Dropout,
    nn.GELU: layers.GELU,
    nn.ReLU: layers.ReLU,
    nn.SiLU: layers.SiLU,
    nn.Sigmoid: layers.Sigmoid,
    nn.Tanh: layers.Tanh,
    nn.GLU: layers.GLU,
    nn.CrossEntropyLoss: losses.CrossEntropyLoss,
    nn.Sequential: Sequential,
}


class Change(NamedTuple):
    path: str
    before: str
    after: str  # the class now, or why it stayed


class Replaced(NamedTuple):
    """What `from_torch` replaced, and the layers that it left, with the reason."""

    replaced: list[Change]
    left: list[Change]

    def __str__(self) -> str:
        lines = [f"{c.path or '(the model)'}: {c.before} -> {c.after}" for c in self.replaced]
        return "\n".join(lines + [f"{c.path or '(the model)'}: {c.before} left: {c.after}" for c in self.left])


def from_torch(model: nn.Module, *, policy: Policy | str | None = None) -> Replaced:
    """Let every layer of `model` that funcops knows run on funcops, and say what was replaced and what was left.

    Known are the layers of torch.nn that `funcops.nn` has, and of Hugging Face's Llama, Mistral, Qwen and GPT-2 the norms, MLPs and
    the causal loss. In place: a module changes its class; parameters, buffers, names, hooks and state_dict stay what they are. A
    subclass of a known layer is left: what it adds is not known. `policy`: what MLPs keep, as in `with_policy`; "minimal" keeps
    their inputs and runs them again.
    """
    require_type("from_torch", "model", model, nn.Module)
    done = Replaced([], [])
    for path, module in list(model.named_modules()):
        before = type(module)
        to = EXACT.get(before) or MODELS.get(before.__name__)
        if to is None:
            _left(done, path, module)
            continue
        module.__class__ = to
        reason = _refusal(module)
        if reason is None:
            if policy is not None and isinstance(module, ChainModule):
                module.policy = policy
                module.op.init(module.cfg, device="meta")
            prepare(module)
            done.replaced.append(Change(path, before.__name__, f"funcops.nn.{to.__name__}"))
        else:
            module.__class__ = before
            done.left.append(Change(path, before.__name__, reason))
    loss: Callable[..., Any] | None = LOSSES.get(getattr(getattr(model, "loss_function", None), "__name__", ""))
    if loss is not None:
        done.replaced.append(Change("loss_function", model.loss_function.__name__, loss.__name__))  # type: ignore[union-attr]
        model.loss_function = loss  # type: ignore[assignment]
    return done


def _refusal(module: Any) -> str | None:
    """Why a module of the new class cannot run as one."""
    if isinstance(module, Sequential):
        return None
    if isinstance(module, layers.GLU):
        module.kind, module.gate = "glu", "second"
    try:
        module.make_cfg()
    except (ValueError, TypeError) as error:
        return str(error).partition(": ")[2]
    return None


def _left(done: Replaced, path: str, module: nn.Module) -> None:
    """Layers that hold parameters of their own, and subclasses of known ones, are worth a word."""
    known = next((cls for cls in EXACT if isinstance(module, cls) and type(module).__module__.partition(".")[0] != "funcops"), None)
    if known is not None:
        done.left.append(Change(path, type(module).__name__, f"a subclass of {known.__name__}"))
    elif next(module.parameters(recurse=False), None) is not None and not hasattr(module, "op"):
        done.left.append(Change(path, type(module).__name__, "not known"))
