"""`from_torch(model)`: swap the layers of a model that have an op, in place; `to_torch(model)` undoes it."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import nn

from funcops.adapters.nn import layers
from funcops.adapters.nn.choose import Chosen
from funcops.adapters.nn.hugging_face import ChainModule
from funcops.adapters.nn.models import LEFT, LOSSES, TORCH, swapped
from funcops.adapters.nn.module import CACHES, OpModule, prepare
from funcops.adapters.nn.parts import ORIGINALS
from funcops.adapters.nn.quantized import take_recipe
from funcops.adapters.nn.report import Change, Replaced
from funcops.adapters.nn.sequential import Sequential
from funcops.adapters.nn.whole import WHOLE, is_ours, place, undo, whole
from funcops.engine.compose.chain import chain
from funcops.engine.errors import describe, fail, join_path, require, require_flag, require_type
from funcops.engine.residuals.policy import Policy
from funcops.library.formats.recipes import Recipe
from funcops.memory.policy import with_policy

LOSS = "loss_function"  # the attribute of a model of transformers


class Swap(NamedTuple):
    """The record of a swap that the module keeps, to undo it."""

    before: type
    after: type
    added: tuple[str, ...]  # attributes that came with the new class
    loss: Any = None  # if the model's loss was swapped: a tuple with the loss that was set on the model, or an empty one


def from_torch(
    model: nn.Module,
    *,
    policy: Policy | str | None = None,
    recipe: Recipe | None = None,
    only: Any = None,
    skip: Any = (),
    trace: bool = True,
    example: Any = None,
) -> Replaced:
    """Swap every known layer of `model` for its funcops module, in place, and return a report of the replaced and left layers.

    Known layers are the layers of torch.nn that `funcops.nn` has, and the norms, MLPs, activations and the causal loss of the
    Hugging Face models with a row in `funcops.adapters.nn.models`, these classes themselves. Subclasses of torch.nn's layers are
    left, and so, in a model on a CPU, is a Dropout or a GLU that joins no other layer, because torch's is faster there. A module's
    class becomes a subclass of its old class; parameters, buffers, names, hooks and state_dict do not change. An MLP whose layers
    are changed later (an adapter, a hook, a sharded weight) runs them one by one.

    A model with other modules than these then runs as the forward and backward of its joint graph, which keeps the fewest bytes in
    between, whatever its classes are. The graph is traced at the first call with gradients, and for further shapes of the arguments
    when they come a second time, up to 32 times. If a call cannot be traced (a part has a hook, or its steps depend on values), the
    model runs its parts, and each of these is traced in its place; so does one inside DistributedDataParallel, which reduces
    gradients as its parts give them. `trace=False` leaves it at the layers, and so does a `policy` or a `recipe`.

    `policy`: the policy for MLPs, as in `with_policy`; "minimal" keeps only their inputs and reruns their forward. `only`, `skip`:
    one pattern or several: a class, or a glob for a module's path ("model.layers.0.*"), for the end of the path ("lm_head") or for
    the name of its class ("*RMSNorm"). A pattern matches a module with all its submodules. A second call sets its policy on MLPs
    that an earlier call has swapped.

    `recipe`: a recipe without state from `funcops.low_precision`, for linear layers, and for MLPs whose layers all have it. A layer
    whose sizes it does not support is left, with the reason. A second call sets its recipe on layers that an earlier call has
    swapped, so that `from_torch(model, recipe=recipe, skip="lm_head")` and then `from_torch(model)` leave the head in high
    precision. `quantize_weights(model)` quantises the weights once per step; a recipe that rounds stochastically needs its `key`.

    `example`: the arguments of a call, as `op_from_module` takes them. With it no layer is swapped: the model itself, of any class,
    runs as the forward and backward of its joint graph, with the same results and gradients to the bit. The call is traced now, and
    a call of another shape, mode or structure when it comes, up to 32 times. A call that cannot be traced runs as before, and so
    does one without gradients; the first warns (`RuntimeWarning`), once for each reason.

    Raises `TypeError` if `model` is not a module, and for an invalid pattern or recipe; `ValueError` for a pattern without a match,
    an unknown policy, a policy whose rules match nothing, a policy for a model without a known MLP, a recipe with state, a
    recipe for a model without a linear layer, an example with which the model does not run or cannot be traced, and an example
    beside other arguments. After any exception, the model is unchanged.

    >>> import torch
    >>> from funcops import nn
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Conv1d(1, 1, 1))
    >>> said = nn.from_torch(model)
    >>> said
    3 replaced, 1 left, 0 already on funcops
       1 x Sequential -> funcops.nn.Sequential: (the model)
       1 x Linear -> funcops.nn.Linear: 0
       1 x Sequential -> its joint graph: (the model)
       1 x Conv1d left: not known: 1
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Conv1d(1, 1, 1))
    >>> nn.from_torch(model, example=torch.ones(1, 4))
    1 replaced, 0 left, 0 already on funcops
       1 x Sequential -> its joint graph: (the model)
    """
    require_type("from_torch", "model", model, nn.Module)
    require_flag("from_torch", trace=trace)
    if example is not None:
        given = dict(policy=policy, recipe=recipe, only=only, skip=skip or None, trace=None if trace else False)
        others = [name for name, value in given.items() if value is not None]
        require(not others, "from_torch", ", ".join(others), "left out with example, which is for a whole model", "both")
        return whole(model, example)
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
        if trace and policy is None and recipe is None and (chosen is None or "" in chosen) and "" not in skipped:
            _trace(model, done, undo)
    except BaseException:
        undo.all()
        raise
    return done


def _trace(model: nn.Module, done: Replaced, undo: Undo) -> None:
    """Let a model run on its joint graph from its next call on, if there is more in it than layers that run on ops."""
    name = type(model).__name__
    if WHOLE in vars(model):
        done.already.append(Change("", name, "on its joint graph"))
    elif not is_ours(model):
        undo.note(model)
        place([model])
        if WHOLE in vars(model):
            done.left[:] = [change for change in done.left if change.path or change.after not in ("not known", *LEFT.values())]
            done.replaced.append(Change("", name, "its joint graph"))


class Undo(list[Any]):
    """A log of modules with their old classes and attributes, to restore them."""

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
    device = next((t.device for t in itertools.chain(model.parameters(), model.buffers())), torch.get_default_device())
    inside = set[int]()  # children that run in a chain with others
    for path, module in list(model.named_modules()):
        before = type(module)
        if isinstance(module, (OpModule, Sequential)):
            inside |= _neighbours(module)
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
        if to._patched():  # type: ignore[attr-defined]
            done.left.append(Change(path, before.__name__, "the forward of its class was replaced"))
            continue
        alone = getattr(to, "alone_on_cpu", "") if device.type == "cpu" and id(module) not in inside else ""
        if alone:
            done.left.append(Change(path, before.__name__, alone))
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
        given = f" ({type(recipe).__name__})" if recipe is not None and isinstance(module, layers.Linear) else ""
        inside |= _neighbours(module)
        vars(module)["_swap"] = Swap(before, to, tuple(sorted(vars(module).keys() - attributes)))
        done.replaced.append(Change(path, before.__name__, _name(to) + given))
    if not acted:
        fail("from_torch", "policy", "left out for a model without a known MLP (it only applies to MLPs)", describe(policy))
    require(lowered, "from_torch", "recipe", "None for a model without a known linear layer", describe(recipe))
    _swap_losses(model, wanted, done, undo)
    for module in model.modules():
        if isinstance(module, ChainModule):
            prepare(module)  # its layers have new classes now; a compiler then finds them cached


def _neighbours(module: Any) -> set[int]:
    """The children of a module that it runs in a chain with others: all of an MLP; in a Sequential, those beside a known layer."""
    if isinstance(module, ChainModule):
        return {id(child) for child in module.children()}
    if not isinstance(module, Sequential):
        return set()
    children = list(module)
    known = [isinstance(m, OpModule) or swapped(type(m)) is not None for m in children]
    return {id(m) for i, m in enumerate(children) if True in (known[max(0, i - 1) : i] + known[i + 1 : i + 2])}


def _reconfigure(path: str, module: Any, policy: Any, recipe: Any, done: Replaced, undo: Undo) -> bool:
    """Report a module that runs on funcops already, and set the policy or the recipe on it."""
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
    """The name of a class in a report: for a class that `swapped` made, the op that it runs."""
    if cls not in ORIGINALS:
        return f"funcops.nn.{cls.__name__}"
    return f"funcops.{(chain if issubclass(cls, ChainModule) else cls.op).name}"  # type: ignore[attr-defined]


def _loss_of(module: Any) -> Any:
    """The loss function of a transformers model if it is known, or ours if it was swapped; None otherwise."""
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
    """The reason why a module cannot run as its new class, or with the recipe; None if it can."""
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
    """Report a layer that is left, if it holds its own parameters or is a subclass of a known layer."""
    known = next((cls for cls in TORCH if isinstance(module, cls)), None)
    reason = next((why for cls, why in LEFT.items() if isinstance(module, cls)), None)
    if reason is not None:
        done.left.append(Change(path, type(module).__name__, reason))
    elif known is not None:
        done.left.append(Change(path, type(module).__name__, f"a subclass of {known.__name__}"))
    elif next(module.parameters(recurse=False), None) is not None:
        done.left.append(Change(path, type(module).__name__, "not known"))


def to_torch(model: nn.Module) -> Replaced:
    """Undo `from_torch`, in place: every module of `model` that it has swapped gets its old class back. Returns a report.

    Parameters, buffers, names, hooks and state_dict do not change. A module that was created as a `funcops.nn` module stays one. A
    module whose class was changed again since (parametrized, sharded) is left, with the reason.

    Raises `TypeError` if `model` is not a module.

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
        undo(path, module, done)
        swap: Any = vars(module).get("_swap")
        if swap is None:
            continue
        if type(module) is not swap.after:
            done.left.append(Change(path, swap.before.__name__, f"its class is now {type(module).__name__}"))
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
            del module.forward  # set by quantize_weights
        for name in (*swap.added, *CACHES, "recipe", "op"):
            vars(module).pop(name, None)
        done.replaced.append(Change(path, _name(after), swap.before.__name__))
    return done
