"""Norms, MLPs and activations of classes without a row in `models.py`, recognised by what they compute.

A module with the parts of one is compared with each formula that it may have: its forward runs on a copy with small drawn weights,
in float64, in train and eval mode, in other dtypes, and on the meta device, where reading a value raises. Outputs and gradients
must be equal, for NaN too, no attribute may change, and no number but eps may count, as it might change later. Its Python code
must have no branch, nor read what may change (`straight.py`); attributes that it reads are compared in each call. Only then
`from_torch` runs the module by the op of that formula.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from funcops.adapters.nn import hugging_face as hf
from funcops.adapters.nn.module import OpModule
from funcops.adapters.nn.parts import ACTS, DROPOUT, LINEAR, kind_of
from funcops.adapters.nn.straight import attributes_read
from funcops.adapters.nn.unchanged import HOOKS, watched
from funcops.library.ops.activation import KINDS

Formula = Callable[..., Tensor]  # (x, *weights) -> y
FLOATS = torch.float32, torch.bfloat16, torch.float16
WIDTH, HIDDEN = 5, 7  # of the copies of MLPs, seldom written as numbers in a forward
LONG = (1100,)  # a length that most branches and slices of lengths would notice
CLOSE = 1e-5  # a norm may compute in float32
OTHER = 0.37  # for an eps
OF_MODULES = frozenset(vars(nn.Module()))
SHARED = list, dict, set, Tensor  # which a copy would share, and its forward might change


class Found(NamedTuple):
    """The base of the new class, and the attributes that the class gets."""

    base: type
    names: dict[str, Any]


class Candidate(NamedTuple):
    found: Found
    copied: nn.Module  # with drawn weights
    weights: Sequence[Tensor]
    formula: Formula
    shapes: tuple[tuple[int, ...], ...]  # of x
    drops: str = ""  # the attribute that is the probability of a dropout of its output
    small: tuple[float, ...] = ()  # sizes of x at which eps decides the output, besides the sizes that all are tried with
    other: Formula | None = None  # the formula with `OTHER` for eps, if eps is an attribute


class ActOfFunction(hf.ChainModule):
    """A chain whose activation is a function in the forward, of this kind, if it is given. `acts` and `act_name` then name a
    linear layer, which is checked anyway."""

    kind = ""

    def _found(self) -> list[Any] | None:
        found = super()._found()
        kind = type(self).kind  # the module itself may have an attribute of this name
        return [kind, *found[1:]] if found and kind else found


class Guarded(OpModule):
    """A module whose forward reads these attributes: if one has another value than at the swap, the forward of its class runs."""

    guarded: tuple[tuple[str, Any], ...] = ()

    def other_way(self) -> Callable[[Any], Any] | None:
        for name, value in type(self).guarded:
            now = getattr(self, name, None)
            if type(now) is not type(value) or now != value:
                return self.plain
        return super().other_way()

    def forward(self, x: Any) -> Any:
        way = self.other_way()
        return super().forward(x) if way is None else way(x)


class GuardedRMSNorm(Guarded, hf.RMSNorm): ...


class GuardedLayerNorm(Guarded, hf.LayerNorm): ...


class GuardedActivation(Guarded, hf.ActivationOf): ...


class GuardedGatedMLP(Guarded, ActOfFunction, hf.GatedMLP): ...


class GuardedFusedMLP(Guarded, ActOfFunction, hf.FusedMLP): ...


class GuardedPlainMLP(Guarded, ActOfFunction, hf.PlainMLP): ...


GUARDED = {cls.__bases__[-1]: cls for cls in Guarded.__subclasses__()}


def recognised(module: nn.Module, seen: dict[Any, Any]) -> Found | str | None:
    """How to run a module by an op; the reason why not, if it has the parts of a norm or an MLP; None for any other module. `seen`:
    the answers for modules of the same class, attributes and parts."""
    state = _state(module)
    if state not in seen:
        seen[state] = _proved(module)
    return seen[state]  # type: ignore[no-any-return]


def _own(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in OF_MODULES}


def _takes_x(cls: type) -> bool:
    """Whether a class has a forward of one argument."""
    forward = getattr(cls, "forward", None)
    arguments = list(inspect.signature(forward).parameters.values()) if inspect.isfunction(forward) else []
    return len(arguments) == 2 and arguments[1].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


def _state(module: nn.Module) -> Any:
    sizes = [(name, None if p is None else p.shape) for name, p in module._parameters.items()]
    parts = [(name, type(child), kind_of(child), getattr(child, "bias", None) is None) for name, child in module._modules.items()]
    values = [(name, value if type(value) in (bool, int, float, str) else id(value)) for name, value in _own(module).items()]
    return type(module), *values, *sizes, *parts


def _proved(module: nn.Module) -> Found | str | None:
    if watched() or not _takes_x(type(module)) or any(isinstance(value, SHARED) for value in _own(module).values()):
        return None
    said = None
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(torch.random.fork_rng(devices=()))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        warnings.simplefilter("ignore")
        _generator.manual_seed(0)
        for one in _candidates(module):
            try:
                reason = _differs(one)
            except Exception as error:  # whatever the forward of an unknown class raises
                reason = f"its forward raises {type(error).__name__}"
            if reason is None:
                found = _guarded(one)
                known = isinstance(found, Found) and issubclass(one.found.base, hf.RMSNorm)
                return _with_dtypes(one._replace(found=found)) if known else found  # type: ignore[arg-type]
            said = said if one.drops else said or reason  # a dropout is only a guess
    return f"not known: {said}" if said and (module._parameters or module._modules) else None


def _guarded(one: Candidate) -> Found | str:
    """The module's class with the attributes that calls compare; the reason why it may do something else later."""
    base, names = one.found
    read = attributes_read(one.copied, _drawn(*one.shapes[0]), {*names.get("values", ()), one.drops})
    if isinstance(read, str):
        return f"not known: {read}"
    guarded = {"guarded": tuple(read.items())} if read else {}
    return Found(GUARDED[base] if read or "kind" in names and issubclass(base, hf.ChainModule) else base, names | guarded)


def _candidates(module: nn.Module) -> Iterator[Candidate]:
    own = {name: p for name, p in module._parameters.items() if p is not None}
    if next(module.buffers(recurse=False), None) is not None:
        return
    if not module._modules and own:
        yield from _norms(module, own)
    elif not module._modules:
        yield from _activations(module)
    elif not own:
        yield from _mlps(module)


# norms


def _norms(module: nn.Module, own: dict[str, nn.Parameter]) -> Iterator[Candidate]:
    """RMSNorms and LayerNorms over the last dimension, with a weight, and for a LayerNorm a bias."""
    if "weight" not in own or own.keys() - {"weight", "bias"} or any(p.dim() != 1 for p in own.values()):
        return
    own = {name: own[name] for name in ("weight", "bias") if name in own}
    size, weights = own["weight"].numel(), [nn.Parameter(_drawn(p.numel())) for p in own.values()]
    shapes = (2, 3, size), (5, size), (2, 2, 3, size)
    for mean, centered, (name, eps) in itertools.product((False, True), (False, True), _epsilons(module)):
        if len(own) == 2 and not mean:
            continue
        names: dict[str, Any] = {"values": (name,), "zero_centered": centered, **({} if name in vars(module) else {name: eps})}
        if mean and len(own) == 1:
            names["bias"] = None
        if mean and any("layer_norm" in code.co_names for code in _codes(module)):
            names["autocast"] = "aten::layer_norm"

        made = _bare(module, dict(zip(own, weights, strict=True)))
        formula = functools.partial(_normed, mean, float(centered), eps)
        small = *[abs(eps) ** 0.5 * factor for factor in (3.0, 1.0, 0.3, 1e-3)], 1e-6, 1e-12, 0.0
        other = functools.partial(_normed, mean, float(centered), OTHER) if name in vars(module) else None
        yield Candidate(Found(hf.LayerNorm if mean else hf.RMSNorm, names), made, weights, formula, shapes, "", small, other)


def _normed(mean: bool, one: float, eps: float, x: Tensor, w: Tensor, b: Any = 0.0) -> Tensor:
    x = x - x.mean(-1, keepdim=True) if mean else x
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (one + w) + b


def _epsilons(module: nn.Module) -> list[tuple[str, float]]:
    """The numbers that may be its eps, each with its attribute: of the module, or constants of its code."""
    found = [(name, vars(module)[name]) for name in _floats(module)]
    constants = {c for code in _codes(module) for c in code.co_consts if type(c) is float and 0 < c < 0.1}
    return found + [("eps_of_forward", c) for c in sorted(constants)]


def _floats(module: nn.Module) -> list[str]:
    return [name for name, value in vars(module).items() if type(value) is float]


def _codes(module: nn.Module) -> list[Any]:
    return [f.__code__ for f in vars(type(module)).values() if inspect.isfunction(f)]


def _with_dtypes(one: Candidate) -> Found | str:
    """The norm whose y has the dtype of this one for x and weights of two dtypes."""
    known = [hf.RMSNorm.y_dtype, hf.RMSNormOfX.y_dtype, hf.T5LayerNorm.y_dtype]
    for x, w in itertools.product(FLOATS, FLOATS):
        moved = _moved(one.copied, dtype=w)
        try:
            y = type(moved).forward(moved, torch.ones(one.shapes[0], dtype=x, device="cpu")).dtype
        except Exception:  # torch's layer_norm has no mixed dtypes
            continue
        known = [rule for rule in known if y is (x if x is w else rule(x, w))]
    names = one.found.names | {"y_dtype": known[0] if known else None}
    return one.found._replace(names=names) if known else "not known: y has another dtype"


# activations


def _activations(module: nn.Module) -> Iterator[Candidate]:
    for kind in KINDS:
        shapes = (2, 3, 64), (7,), (2, 1, *LONG, 3)
        yield Candidate(Found(hf.ActivationOf, {"kind": kind}), _bare(module), [], functools.partial(_act, kind), shapes)


def _act(kind: str, x: Tensor) -> Tensor:
    if kind == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    act = getattr(torch.nn.functional, {"gelu_tanh": "gelu", "squared_relu": "relu"}.get(kind, kind))
    y = act(x, approximate="tanh") if kind == "gelu_tanh" else act(x)
    return y.square() if kind == "squared_relu" else y  # type: ignore[no-any-return]


# MLPs


def _mlps(module: nn.Module) -> Iterator[Candidate]:
    """Two or three linear layers and an activation, which may be a function, with at most one Dropout, before the last layer or
    after it."""
    kinds = {name: kind_of(child) for name, child in module._modules.items() if child is not None}
    linears = [name for name, kind in kinds.items() if kind is LINEAR]
    acts, drops = ([name for name, kind in kinds.items() if kind in of] for of in (ACTS, (DROPOUT,)))
    if len(acts) > 1 or len(drops) > 1 or len(linears) not in (2, 3) or len(kinds) != len(linears) + len(acts) + len(drops):
        return
    bases: list[Any] = [hf.GatedMLP] if len(linears) == 3 else [hf.PlainMLP, hf.FusedMLP]
    for act, base, names in itertools.product([*acts, *sorted(ACTS)], bases, itertools.permutations(linears)):
        for place in ("last_name", "drop_name")[: 1 if base is hf.FusedMLP else 2] if drops else ("",):
            for p in (*([] if drops else _floats(module)), ""):
                yield _mlp(module, base, names, act, place, drops, p)


def _mlp(module: nn.Module, base: Any, names: Any, act: str, place: str, drops: list[str], p: str) -> Candidate:
    """The candidate with an activation that is the module of this name, or a function of this kind."""
    *ups, down = names
    wide = 2 * HIDDEN if base is hf.FusedMLP else HIDDEN
    given: Any = {name: _linear(module._modules[name], WIDTH, wide) for name in ups}
    given[down] = _linear(module._modules[down], HIDDEN, WIDTH)
    weights = [t for name in names for t in given[name]._parameters.values() if t is not None]
    given |= {name: _Tripled() for name in drops}
    given |= {name: _StandIn() for name, child in module._modules.items() if name not in given and child is not None}
    acts = given[act] if act in given else functools.partial(_act, act)

    def formula(x: Tensor, *_: Tensor) -> Tensor:
        z = [given[name](x) for name in ups]
        halves = z[0].chunk(2, -1) if base is hf.FusedMLP else z
        y = acts(halves[0])
        y = y * halves[1] if len(halves) == 2 else y
        y = given[down](3.0 * y if place == "drop_name" else y)
        return 3.0 * y if place == "last_name" else y  # type: ignore[no-any-return]

    made = {"layers": tuple(names), "act_name": act, "last_p": p, **({place: drops[0]} if place else {})}
    if act not in given:
        made |= {"kind": act, "act_name": down, "acts": (LINEAR,)}
    shapes = (2, 3, WIDTH), (5, WIDTH), (2, 1, *LONG, WIDTH)
    return Candidate(Found(base, made), _bare(module, modules=given), weights, formula, shapes, p)


class _StandIn(nn.Module):
    """Stands for an activation that is a module: no function does the same, so a forward that equals its formula calls it."""

    def forward(self, x: Tensor) -> Tensor:
        return 2.7 * torch.nn.functional.softplus(x) - 0.3 * x


class _Tripled(nn.Module):
    """Stands for a Dropout, to show where it is."""

    def forward(self, x: Tensor) -> Tensor:
        return 3.0 * x


def _linear(like: Any, i: int, o: int) -> nn.Linear:
    made = nn.Linear(i, o, bias=like.bias is not None, device="meta")  # which draws no numbers
    for name, t in made._parameters.items():
        made._parameters[name] = None if t is None else nn.Parameter(_drawn(*t.shape))
    return made


# the proof


_generator = torch.Generator()  # never the same numbers twice: equal weights would hide which layer has which role


def _drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, device="cpu", generator=_generator)


def _bare(module: Any, parameters: Any = None, modules: Any = None) -> Any:
    """A copy of a module without hooks, with these parameters and submodules."""
    made = object.__new__(type(module))
    vars(made).update(vars(module))
    vars(made).update({name: type(vars(module)[name])() for name in HOOKS})
    vars(made).update(_parameters=dict(parameters or {}), _modules=dict(modules or {}))
    return made


def _moved(module: Any, **to: Any) -> Any:
    """A copy without hooks, on another device or in another dtype."""
    own = {name: None if t is None else nn.Parameter(t.detach().to(**to)) for name, t in module._parameters.items()}
    return _bare(module, own, {name: _moved(child, **to) for name, child in module._modules.items()})


def _differs(one: Candidate) -> str | None:
    """How the module differs from the formula; None if it does not."""
    made, (x0, *_) = one.copied, one.shapes
    if one.drops:
        vars(made)[one.drops] = 0.0
    before = dict(vars(made))
    for shape, size, training in itertools.product(one.shapes, (1.0, 1e-3, 30.0, 1e5, *one.small), (False, True)):
        vars(made)["training"] = training
        x = (size * _drawn(*shape)).requires_grad_()
        leaves = [x, *[w.detach().requires_grad_() for w in one.weights]]
        _give(made, one.weights, leaves[1:])
        y, want = type(made).forward(made, x), one.formula(*leaves)
        if not isinstance(y, Tensor) or y.shape != want.shape:
            return "its output has another shape"
        dy = _drawn(*want.shape)
        found, wanted = ([t, *torch.autograd.grad(t, leaves, dy.to(t.dtype))] for t in (y, want))
        _give(made, leaves[1:], one.weights)
        for got, right in zip(found, wanted, strict=True):
            off = float(((got - right).abs().max() / right.abs().max().clamp_min(1e-30)).detach())
            if not off <= CLOSE:
                return f"as {one.found.base.__name__} it differs by {off:.1e}"
    vars(made)["training"] = before["training"]
    if vars(made).keys() != before.keys() or any(vars(made)[name] is not value for name, value in before.items()):
        return "its forward sets attributes"
    if one.drops and not _is_dropped(one):
        return f"{one.drops} is not the probability of a dropout"
    vars(made).update(before)
    reason = _reads(one) or _differs_apart(one)
    if reason is not None:
        return reason
    for shape in (x0, (70001, 70003, x0[-1])):  # without data it may be large, for slices of few
        x = torch.empty(shape, device="meta", dtype=torch.float64)
        if type(made).forward(_moved(made, device="meta"), x).shape != x.shape:
            return "its output has another shape"
    return None


def _reads(one: Candidate) -> str | None:
    """The number, other than eps, on which the output depends: it might change later. An eps must be one on which it depends."""
    made, x = one.copied, _drawn(*one.shapes[0])
    want, known = type(made).forward(made, x), {*one.found.names.get("values", ()), one.drops}
    if one.other is not None:
        (name,) = one.found.names["values"]
        before, vars(made)[name] = vars(made)[name], OTHER
        off = (type(made).forward(made, x) - one.other(x, *one.weights)).abs().max()
        vars(made)[name] = before
        if not float(off) <= CLOSE * float(want.detach().abs().max()):
            return f"{name} is not its eps"
    for name in [name for name in _floats(made) if name not in known]:
        before = vars(made)[name]
        vars(made)[name] = 2.0 * before + 1.0
        same = torch.equal(type(made).forward(made, x), want)
        vars(made)[name] = before
        if not same:
            return f"its forward reads {name}"
    return None


def _differs_apart(one: Candidate) -> str | None:
    """How it differs from the formula in other dtypes, within their rounding, and for NaN and overflow."""
    made, x = one.copied, _drawn(*one.shapes[0])
    x[(0,) * x.dim()] = torch.nan
    if not torch.equal(type(made).forward(made, x).isnan(), one.formula(x, *one.weights).isnan()):
        return "it treats NaN in another way"
    x = _drawn(*one.shapes[0])
    for dtype in FLOATS:
        moved, want = _moved(made, dtype=dtype), one.formula(x, *one.weights)
        y = type(moved).forward(moved, x.to(dtype)).double()
        if not float(((y - want).abs().max() / want.abs().max()).detach()) <= 0.1:
            return f"in {dtype} it differs from {one.found.base.__name__}"
        large, most = 1e4 * x.sign(), torch.finfo(dtype).max
        if one.formula(large, *one.weights).abs().max() > most and type(moved).forward(moved, large.to(dtype)).isfinite().all():
            return f"in {dtype} it does not overflow"
    return None


def _is_dropped(one: Candidate) -> bool:
    """Whether torch's dropout drops elements of the output with the probability of the attribute, in training alone. The same
    random state must give the same mask."""
    made, x = one.copied, _drawn(50, *one.shapes[0][1:])
    want, state = one.formula(x, *one.weights), torch.get_rng_state()
    vars(made)[one.drops] = 0.75
    for training in (False, True):
        vars(made)["training"] = training
        y = type(made).forward(made, x)
        torch.set_rng_state(state)
        if not torch.allclose(y, torch.nn.functional.dropout(want, 0.75, training)):
            return False
        torch.set_rng_state(state)
    return True


def _give(made: nn.Module, before: Any, after: Any) -> None:
    """Put other tensors in the place of some of its parameters."""
    to = {id(t): new for t, new in zip(before, after, strict=True)}
    for one in made.modules():
        one._parameters.update({name: to.get(id(t), t) for name, t in one._parameters.items()})
