"""`from_torch(model)`: the layers of a model that have an op run on it, in place; `to_torch(model)` undoes it."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from funcops.adapters.nn import layers
from funcops.adapters.nn.choose import Chosen
from funcops.adapters.nn.hugging_face import ChainModule
from funcops.adapters.nn.models import LOSSES, TORCH, swapped
from funcops.adapters.nn.module import CACHES, OpModule, prepare
from funcops.adapters.nn.parts import ORIGINALS
from funcops.adapters.nn.quantized import take_recipe
from funcops.adapters.nn.report import Change, Replaced
from funcops.adapters.nn.sequential import Sequential
from funcops.compose.chain import chain
from funcops.errors import describe, fail, join_path, require, require_type
from funcops.formats.recipes import Recipe
from funcops.memory.policy import with_policy
from funcops.residuals.policy import Policy

LOSS = "loss_function"  # the attribute of a model of transformers


class Swap(NamedTuple):
    """What a swapped module keeps about what it was."""

    before: type
    after: type
    added: tuple[str, ...]  # attributes that came with the new class
    loss: Any = None  # of a model whose loss was swapped: a tuple of the one that was set on it, or empty


def from_torch(
    model: nn.Module, *, policy: Policy | str | None = None, recipe: Recipe | None = None, only: Any = None, skip: Any = ()
) -> Replaced:
    """Let every layer of `model` that funcops knows run on funcops, and say what was replaced and what was left.

    Known are the layers of torch.nn that `funcops.nn` has, and the norms, MLPs, activations and the causal loss of those models of
    Hugging Face that have a row in `funcops.adapters.nn.models`, by their own classes: a subclass, or a class of the same name from
    elsewhere, is left. In place: a module changes its class to a subclass of the one that it had; parameters, buffers, names, hooks
    and state_dict stay what they are. An MLP whose layers are changed later (an adapter, a hook, a sharded weight) runs them one by
    one.

    `policy`: what MLPs keep, as in `with_policy`; "minimal" keeps their inputs and runs them again. A second call gives it to MLPs
    that the first has swapped. `only`, `skip`: a pattern or several: a class, or a glob for a module's path ("model.layers.0.*"),
    for the end of it ("lm_head") or for the name of its class ("*RMSNorm"). A pattern finds a module and all that is in it.

    `recipe`: of `funcops.low_precision`, one without state: linear layers compute by it, and MLPs whose layers all have it. A layer
    of sizes that it does not serve is left, with the reason. A second call gives it to layers that the first has swapped, so that
    `from_torch(model, recipe=recipe, skip="lm_head")` and then `from_torch(model)` leave the head in high precision.
    `quantize_weights(model)` makes the codes of weights once a step.

    Raises `TypeError` for a model that is no module and for what is no pattern or recipe, `ValueError` for a pattern that finds no
    module, an unknown policy, one whose rules match nothing, one for a model without an MLP that is known, a recipe with state, and
    one for a model without a linear layer. The model is then as it was, as after any other exception.

    >>> import torch
    >>> from funcops import nn
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Conv1d(1, 1, 1))
    >>> said = nn.from_torch(model)
    >>> isinstance(model[0], nn.Linear), type(model[1]).__name__
    (True, 'Conv1d')
    """
    require_type("from_torch", "model", model, nn.Module)
    if policy is not None:
        require_type("from_torch", "policy", policy, str, Policy)
        with_policy(chain, policy)
    if recipe is not None:
        take_recipe("from_torch", layers.Linear(64, 64, device="meta"), recipe)
    losses = [join_path(path, LOSS) for path, module in model.named_modules() if _loss_of(module) is not None]
    chosen = None if only is None else Chosen("from_torch", "only", only, model, (*losses,))
    if chosen is not None and not chosen.paths:
        fail("from_torch", "only", "None or at least one pattern", "none")
    skipped = Chosen("from_torch", "skip", skip, model, (*losses,))
    done, undo = Replaced([], [], []), Undo()
    try:
        _swap(model, policy, recipe, lambda path: (chosen is None or path in chosen) and path not in skipped, done, undo)
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


def _swap(model: nn.Module, policy: Any, recipe: Any, wanted: Any, done: Replaced, undo: Undo) -> None:
    acted, lowered = policy is None, recipe is None
    for path, module in list(model.named_modules()):
        before = type(module)
        if not wanted(path):
            continue
        if isinstance(module, (OpModule, Sequential)):
            acted |= _reconfigure(path, module, policy, recipe, done, undo)
            lowered |= isinstance(module, layers.Linear)
            continue
        to = swapped(before)
        if to is None:
            _left(done, path, module)
            continue
        if "forward" in vars(module):
            done.left.append(Change(path, before.__name__, "a forward of its own is set on it"))
            continue
        undo.note(module)
        attributes = {*vars(module), *CACHES}
        module.__class__ = to
        lowered |= isinstance(module, layers.Linear)
        reason = _refusal(module, recipe)
        if reason is not None:
            undo.last()
            done.left.append(Change(path, before.__name__, reason))
            continue
        if policy is not None and isinstance(module, ChainModule):
            acted = _keep(module, policy)
        prepare(module)
        vars(module)["_swap"] = Swap(before, to, tuple(sorted(vars(module).keys() - attributes)))
        done.replaced.append(Change(path, before.__name__, _name(to)))
    if not acted:
        fail("from_torch", "policy", "None for a model without an MLP that is known (it says what MLPs keep)", describe(policy))
    require(lowered, "from_torch", "recipe", "None for a model without a linear layer that is known", describe(recipe))
    _swap_losses(model, wanted, done, undo)
    for module in model.modules():
        if isinstance(module, ChainModule):
            prepare(module)  # its layers have other classes now; a compiler finds them known


def _reconfigure(path: str, module: Any, policy: Any, recipe: Any, done: Replaced, undo: Undo) -> bool:
    """Note a module that runs on funcops already, and give it the policy or the recipe."""
    acts = policy is not None and isinstance(module, ChainModule)
    if acts:
        undo.note(module)
        _keep(module, policy)
    given = " (policy given)" if acts else ""
    if recipe is not None and isinstance(module, layers.Linear):
        undo.note(module)
        try:
            take_recipe("from_torch", module, recipe)
            given = " (recipe given)"
        except ValueError as error:
            given = f" without the recipe: {_reason(error)}"
    swap = vars(module).get("_swap")
    before = type(module) if swap is None else swap.before
    done.already.append(Change(path, before.__name__, _name(type(module)) + given))
    return acts


def _keep(module: Any, policy: Any) -> bool:
    module.policy = policy
    module.op.init(module.known_cfg(), device="meta")
    return True


def _name(cls: type) -> str:
    """A class as a report names it: one that was made of a row by what the row says."""
    return f"funcops.nn.{(cls.__bases__[0] if cls in ORIGINALS else cls).__name__}"


def _loss_of(module: Any) -> Any:
    """The loss that a model of transformers computes, where that is known; the op's own where it was swapped."""
    given: Any = module.loss_function if isinstance(getattr(type(module), LOSS, None), property) else None
    known = LOSSES.get(f"{getattr(given, '__module__', '')}.{getattr(given, '__qualname__', '')}")
    return given if known is not None or given in LOSSES.values() else None


def _swap_losses(model: nn.Module, wanted: Any, done: Replaced, undo: Undo) -> None:
    owners: list[str] = []
    for path, module in model.named_modules():
        given = _loss_of(module)
        if given is None or any([not owner or path.startswith(f"{owner}.") for owner in owners]):
            continue  # the module that holds it computes the loss
        owners.append(path)
        name = join_path(path, LOSS)
        if not wanted(name):
            continue
        if given in LOSSES.values():
            done.already.append(Change(name, given.__name__, "of funcops.nn"))
            continue
        loss: Any = LOSSES[f"{given.__module__}.{given.__qualname__}"]
        undo.note(module)
        set_before = tuple(vars(module)[at] for at in (f"_{LOSS}",) if at in vars(module))
        module.loss_function = loss
        vars(module)["_swap"] = Swap(type(module), type(module), (), loss=set_before)
        done.replaced.append(Change(name, given.__name__, loss.__name__))


def _reason(error: Exception) -> str:
    return str(error).partition(": ")[2]


def _refusal(module: Any, recipe: Any = None) -> str | None:
    """Why a module of the new class cannot run as one, or by the recipe."""
    if isinstance(module, Sequential):
        return None
    if isinstance(module, layers.GLU):
        module.kind, module.gate = "glu", "second"
    try:
        if recipe is not None and isinstance(module, layers.Linear):
            take_recipe("from_torch", module, recipe)
        module.known_cfg() if isinstance(module, ChainModule) else module.make_cfg()
    except (ValueError, TypeError) as error:
        return _reason(error)
    return None


def _left(done: Replaced, path: str, module: nn.Module) -> None:
    """Layers that hold parameters of their own, and subclasses of known ones, are worth a word."""
    known = next((cls for cls in TORCH if isinstance(module, cls)), None)
    if known is not None:
        done.left.append(Change(path, type(module).__name__, f"a subclass of {known.__name__}"))
    elif next(module.parameters(recurse=False), None) is not None:
        done.left.append(Change(path, type(module).__name__, "not known"))


def to_torch(model: nn.Module) -> Replaced:
    """Undo `from_torch`: every module of `model` that it has swapped gets back the class that it had, and says so.

    In place: parameters, buffers, names, hooks and state_dict stay what they are. A module that was made as one of `funcops.nn`
    stays one. So does one whose class was changed again since (parametrized, sharded): it is left, with the reason.

    Raises `TypeError` for a model that is no module.

    >>> import torch
    >>> from funcops import nn
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8))
    >>> said = nn.from_torch(model)
    >>> said = nn.to_torch(model)
    >>> type(model[0]) is torch.nn.Linear
    True
    """
    require_type("to_torch", "model", model, nn.Module)
    done = Replaced([], [], [])
    for path, module in model.named_modules():
        swap: Any = vars(module).get("_swap")
        if swap is None:
            continue
        if type(module) is not swap.after:
            done.left.append(Change(path, swap.before.__name__, f"its class is {type(module).__name__} by now"))
            continue
        del vars(module)["_swap"]
        if swap.loss is not None:
            given: Any = _loss_of(module)
            if given in LOSSES.values():
                vars(module).pop(f"_{LOSS}", None)
                vars(module).update(dict.fromkeys([f"_{LOSS}"], *swap.loss) if swap.loss else {})
                done.replaced.append(Change(join_path(path, LOSS), given.__name__, module.loss_function.__name__))  # type: ignore[union-attr]
            continue
        after = type(module)
        module.__class__ = swap.before
        if getattr(vars(module).get("forward"), "transient", False):
            del module.forward  # that of quantised weights
        for name in (*swap.added, *CACHES, "recipe", "op"):
            vars(module).pop(name, None)
        done.replaced.append(Change(path, _name(after), swap.before.__name__))
    return done
