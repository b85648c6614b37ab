"""`from_torch(model)`: the layers of a model that have an op run on it, in place."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from funcops.adapters.nn import layers, losses
from funcops.adapters.nn.hugging_face import LOSSES, MODELS, ChainModule, known
from funcops.adapters.nn.module import prepare
from funcops.adapters.nn.sequential import Sequential
from funcops.compose.chain import chain
from funcops.compose.policy import with_policy
from funcops.errors import describe, fail, require_type
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
    the causal loss, by their own classes: a subclass, or a class of the same name from elsewhere, is left. In place: a module
    changes its class; parameters, buffers, names, hooks and state_dict stay what they are. An MLP whose layers are changed later (an
    adapter, a hook, a sharded weight) runs them one by one. `policy`: what MLPs keep, as in `with_policy`; "minimal" keeps their
    inputs and runs them again.

    Raises `TypeError` for a model that is no module, `ValueError` for an unknown policy, one whose rules match nothing, and one for
    a model without an MLP that is known. The model is then as it was, as after any other exception.
    """
    require_type("from_torch", "model", model, nn.Module)
    if policy is not None:
        with_policy(chain, policy)
    done, undo = Replaced([], []), Undo()
    try:
        _swap(model, policy, done, undo)
    except BaseException:
        undo.all()
        raise
    return done


class Undo(list[Any]):
    """What gives modules back the class and the attributes that they had."""

    def note(self, module: nn.Module) -> None:
        self.append((module, type(module), dict(vars(module))))

    def last(self) -> None:
        module, cls, attributes = self.pop()
        module.__class__ = cls
        vars(module).clear()
        vars(module).update(attributes)

    def all(self) -> None:
        while self:
            self.last()


def _swap(model: nn.Module, policy: Any, done: Replaced, undo: Undo) -> None:
    acted = policy is None
    for path, module in list(model.named_modules()):
        before = type(module)
        to = EXACT.get(before) or known(before, MODELS)
        if to is None:
            _left(done, path, module)
            continue
        if "forward" in vars(module):
            done.left.append(Change(path, before.__name__, "a forward of its own is set on it"))
            continue
        undo.note(module)
        module.__class__ = to
        reason = _refusal(module)
        if reason is not None:
            undo.last()
            done.left.append(Change(path, before.__name__, reason))
            continue
        if policy is not None and isinstance(module, ChainModule):
            module.policy, acted = policy, True
            module.op.init(module.cfg, device="meta")
        prepare(module)
        done.replaced.append(Change(path, before.__name__, f"funcops.nn.{to.__name__}"))
    if not acted:
        fail("from_torch", "policy", "None for a model without an MLP that is known (it says what MLPs keep)", describe(policy))
    owners: list[str] = []
    for path, module in model.named_modules():
        given: Any = module.loss_function if isinstance(getattr(type(module), "loss_function", None), property) else None
        loss: Any = LOSSES.get(f"{getattr(given, '__module__', '')}.{getattr(given, '__qualname__', '')}")
        if loss is None or any([not owner or path.startswith(f"{owner}.") for owner in owners]):
            continue  # the module that holds it computes the loss
        owners.append(path)
        undo.note(module)
        module.loss_function = loss
        name = f"{path}.loss_function" if path else "loss_function"
        done.replaced.append(Change(name, given.__name__, loss.__name__))


def _refusal(module: Any) -> str | None:
    """Why a module of the new class cannot run as one."""
    if isinstance(module, Sequential):
        return None
    if isinstance(module, layers.GLU):
        module.kind, module.gate = "glu", "second"
    try:
        module.cfg if isinstance(module, ChainModule) else module.make_cfg()
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
