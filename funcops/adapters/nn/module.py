"""`OpModule`, the base of modules that run one op."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import Proxy

from funcops.adapters.autocast import FLOAT32, LOWER, any_autocast, casts, is_on, is_rule, outside
from funcops.adapters.autograd.differentiable import run
from funcops.adapters.nn.unchanged import HOOKS, parameters_of, same_parameters
from funcops.engine.backend.source import exact
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import Op
from funcops.engine.errors import FLOATS, describe, fail
from funcops.engine.trees import tensors, tree_map_tensors

_compiling = torch.compiler.is_dynamo_compiling
CACHES = ("_cfg", "_cached", "_made")  # attributes in which calls cache
CASTING = (LOWER, FLOAT32)  # autocast's rules that give x and the parameters one dtype on any device
UNPREPARED = object()
PLAIN: dict[type, bool] = {Tensor: True, nn.Parameter: True, type(None): True}  # other classes are added by `is_plain`


class _Exported(torch.autograd.Function):
    """The forward of an op as the operators that torch.export records, whose gradients are the program's: nothing is kept."""

    @staticmethod
    def forward(ctx: Any, op: Any, params: Any, x: Any, cfg: Any, *leaves: Any) -> Any:
        return op.fwd(params, x, cfg, needs=Needs.NONE)[0]


def run_op(op: Any, params: Any, x: Any, cfg: Any, leaves: Any = None, bounds: Any = None) -> Any:
    """`run`, for tensors that may be a tracer's. While torch.export traces, only the op's forward: the program's operators have
    gradients of their own, and a node would compare sizes to choose what to keep. Dynamo refuses a node that gets a tensor twice,
    as a tied weight is: each further one becomes a view."""
    if not _compiling():
        if torch.compiler.is_exporting():
            return _Exported.apply(op, params, x, cfg, *tensors((params, x)))
        return run(op, params, x, cfg, leaves, bounds)
    seen: list[Any] = []

    def apart(t: Tensor) -> Tensor:
        if any([t is before for before in seen]):
            return t.view_as(t)
        seen.append(t)
        return t

    return run(op, tree_map_tensors(apart, params), tree_map_tensors(apart, x), cfg)


class Prepared(nn.Module):
    """A module that makes its config when it is constructed, and again when its mode or dtype changes, because torch.compile cannot
    make a config, but can read one."""

    _origin: Any = nn.Module  # the class from which it also inherits: torch's, or a model's
    _theirs: Any = nn.Module.forward  # the forward that class had when this class was made
    _funcops_caches = CACHES  # what `ReadByModule` leaves out

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        origin = next(base for base in cls.__mro__ if issubclass(base, nn.Module) and not issubclass(base, Prepared))
        if origin is not cls._origin:
            cls._origin, cls._theirs = origin, origin.forward

    @classmethod
    def _patched(cls) -> bool:
        """Whether a program has replaced the forward of `_origin`, for all its modules: then that one must run."""
        return cls._origin.forward is not cls._theirs

    def __init__(self, *args: Any, **options: Any) -> None:
        recipe: Any = options.pop("recipe", None) if hasattr(self, "take") else None
        super().__init__(*args, **options)
        if recipe is not None:
            self.take(recipe)
        prepare(self)
        if self.complete and type(self).__init__ is Prepared.__init__ and self.other_way() != self.plain:
            self.known_cfg()  # raises the errors that every call would raise

    complete = False  # whether torch's constructor sets all attributes that the config needs

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        prepare(self)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.__dict__.pop("_cfg", None)  # the dtype may have changed
        self.__dict__.pop("_cached", None)  # or parameters that were replaced would live until the next call
        prepare(self)
        return self

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        self.__dict__.pop("_cached", None)  # for assign=True, as in `_apply`
        super()._load_from_state_dict(*args, **options)

    def __prepare_scriptable__(self) -> Any:
        """torch.jit.script asks every module for what to compile: an op is no TorchScript."""
        wanted = "of torch.nn for torch.jit.script: call funcops.nn.to_torch(model) first, if from_torch swapped it"
        fail(f"funcops.nn.{type(self).__name__}", "the module", wanted, "a layer that runs an op", TypeError)

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in self.__dict__.items() if name != "_cached"}
        if getattr(kept.get("forward"), "transient", False):
            del kept["forward"]
        return kept


class OpModule(Prepared):
    """A module that runs one op; `op`, `cfg` and `op_params()` are the arguments of the functional API. A subclass defines

    - `op`; `params_class`, the class of the op's params, or None if it has no params; `fields`, the attributes that hold the
      parameters, in the order of `params_class`;
    - `values`, the attributes from which the config is made. They have the names of the config's fields; otherwise the class
    defines
      `make_cfg(self)`, which returns the config. Setting one of them makes a new config;
    - `autocast`, the dtype of x and the parameters under `torch.autocast`: "" (the default) for no cast, "lower" for autocast's
      dtype, as for a product, "float32", as for a loss, or the name of an operator of torch, such as "aten::layer_norm", for
      float32 if autocast has a rule for that operator;
    - `dtypes` and `pairs`: if x's dtype is not in `dtypes`, or x's and the first parameter's are not in `pairs`, `plain(x)` runs
      instead: the forward of the torch module from which the class also inherits, if any.

    Set attributes and parameters after `super().__init__()`, as in any module: the config is made on first use.

    Defining the class raises `ValueError` for values that do not make a config and for an unknown `autocast`; a call raises the
    op's errors, and `ValueError` for an attribute with the name of a field of the config that `values` leaves out.

    >>> import torch
    >>> from funcops import nn, softcap
    >>> class Softcap(nn.OpModule):
    ...     op, values, autocast = softcap, ("cap",), "float32"
    ...     def __init__(self, cap):
    ...         super().__init__()
    ...         self.cap = cap
    ...
    >>> layer = Softcap(2.0)
    >>> layer(torch.zeros(3)), layer.cfg
    (tensor([0., 0., 0.]), SoftcapConfig(cap=2.0))
    >>> isinstance(nn.Linear(3, 2), nn.OpModule), nn.Linear.values
    (True, ('in_features', 'out_features', 'recipe'))
    """

    op: Op
    params_class: Any = None
    values: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    autocast: str = ""
    dtypes: frozenset[Any] = frozenset(FLOATS)
    pairs: frozenset[Any] = frozenset()
    _of_torch: bool = False  # whether the class inherits a forward for `plain`
    _left_out: tuple[str, ...] = ()  # fields of the config, with defaults, that `values` does not name
    cfg_follows: str = ""  # the parameter on whose dtype the config depends
    reads_dense: bool = False  # whether `op_input` copies some x that are not contiguous
    _of_step: Any = None  # the forward that only runs the op; a class with another forward cannot be a step of a chain

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for names in ("values", "fields"):
            if names in cls.__dict__:
                setattr(cls, names, exact(cls.__dict__[names]))
        if not is_rule(cls.autocast):
            known = '"", "lower", "float32" or an operator of torch ("aten::layer_norm")'
            fail(cls.__name__, "autocast", known, repr(cls.autocast))
        cls._left_out = ()
        if cls.make_cfg is OpModule.make_cfg and isinstance(getattr(cls, "op", None), Op):
            if "values" in cls.__dict__:
                _check_values(cls)
            read = (*cls.values, *cls.fields, "training")
            cls._left_out = tuple([f.name for f in dataclasses.fields(cls.op.config) if f.init and f.name not in read])
        beside = cls.__mro__[cls.__mro__.index(OpModule) + 1 :]
        theirs = next((vars(base)["forward"] for base in beside if base is not nn.Module and "forward" in vars(base)), None)
        cls._of_torch = theirs is not None
        owner = next(base for base in cls.__mro__ if "forward" in vars(base))
        if owner is not cls and issubclass(owner, OpModule):
            of_step = owner.forward is owner._of_step
            cls.forward = copied(owner.forward, theirs)  # type: ignore[method-assign]
            cls._of_step = cls.forward if of_step else cls._of_step

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "qconfig":  # which torch.ao.quantization sets on every module before it looks for classes of torch.nn
            wanted = "not set: torch.ao.quantization knows torch's own classes alone, and would leave this layer as it is"
            remedy = "call funcops.nn.to_torch(model) first, if from_torch swapped it"
            fail(f"funcops.nn.{type(self).__name__}", name, f"{wanted} ({remedy})", describe(value), TypeError)
        super().__setattr__(name, value)
        OpModule._changed(self, name)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        OpModule._changed(self, name)

    def register_parameter(self, name: str, param: Any) -> None:
        super().register_parameter(name, param)
        OpModule._changed(self, name)

    @staticmethod
    def _changed(self: Any, name: str) -> None:
        """Make the config anew if it is made from the attribute of this name, which was set or deleted."""
        if name in OpModule._read_by(self):
            self.__dict__.pop("_cached", None)  # or a replaced parameter would live until the next call
            if self.__dict__.pop("_cfg", UNPREPARED) is not UNPREPARED and not _compiling():
                prepare(self)  # attributes set after super().__init__() may complete the config

    @staticmethod
    def _read_by(module: Any) -> tuple[str, ...]:
        """The attributes from which a module's config is made; empty after `to_torch` has restored its class."""
        cls = type(module)
        return (*cls.values, *cls.fields, *cls._left_out) if issubclass(cls, OpModule) else ()

    @property
    def cfg(self) -> Any:
        """The op's config, from the module's current attributes. Raises `AttributeError` if they do not make a config;
        `known_cfg()` raises the original error."""
        return config_or_absent(self)

    def known_cfg(self) -> Any:
        """`cfg`. Raises `ValueError` for values that the op does not support."""
        made = self.__dict__.get("_cfg")
        if made is None:
            made = self.__dict__["_cfg"] = self.make_cfg()
        return made

    def make_cfg(self) -> Any:
        """Make the config; by default, from the attributes `values`, which have the names of its fields. Raises `ValueError` for
        values that the op does not support."""
        if not isinstance(getattr(type(self), "op", None), Op):
            fail(type(self).__name__, "op", "an op, set as an attribute of the class", "none", TypeError)
        _check_values(cls := type(self))
        for name in cls._left_out:
            if name in vars(self) or (hasattr(cls, name) and not hasattr(OpModule, name)):
                said = f"a field of {self.op.config.__name__} and an attribute, or the class have a make_cfg(self)"
                fail(cls.__name__, "values", f"with {name!r}, {said}", repr(self.values))
        return self.op.config(**{name: getattr(self, name) for name in self.values})

    def op_params(self) -> Any:
        """The op's params tree; its leaves are the module's own parameters."""
        return self._params(self._own())

    def op_input(self, x: Any) -> Any:
        """The op's x for the module's x."""
        return x

    def other_way(self) -> Callable[[Any], Any] | None:
        """The function that a call runs on x instead of the op, for values that need one; None to run the op."""
        return None

    def plain(self, *given: Any) -> Any:
        """Run torch's forward, for tensor subclasses (a DTensor, a quantised weight) and dtypes that the op does not support.
        Raises `TypeError` if the class does not also inherit from a torch module."""
        if not self._of_torch:
            wanted = f"plain tensors, x of {', '.join(sorted(map(str, self.dtypes)))}, because the class has no plain(x)"
            fail(type(self).__name__, "x and parameters", wanted, ", ".join(map(_kind_of, [*given, *self._own()])), TypeError)
        return super().forward(*given)  # type: ignore[misc]

    def forward(self, x: Any) -> Any:
        if not _compiling() and type(x) is Tensor and not any_autocast():
            call = self.__dict__.get("_cached")
            if call is not None and call.fits(self, x):
                return run(call.op, call.params, x, call.cfg, [*call.leaves, x], call.bounds)
        way = self.plain if self._patched() else self.other_way()
        if way is not None:
            return way(x)
        if not hasattr(x, "__torch_function__") and type(x) is not tuple:
            fail(type(self).__name__, "x", "a tensor", describe(x), TypeError)
        own = self._own()
        for t in (x, *own):
            if not (PLAIN.get(type(t)) or is_plain(t)):
                return self.plain(x)
        dtype = getattr(x, "dtype", None)
        if dtype not in self.dtypes and dtype is not None:
            return self.plain(x)
        if self.pairs and own[0] is not None and (dtype, own[0].dtype) not in self.pairs:
            return self.plain(x)
        given = self.op_input(x)
        if any_autocast() and is_on(x.device.type):
            return self.followed(own, given, x.device.type)
        leaves = [t for t in own if t is not None]
        if given is x and not _compiling() and PreparedCall.may_be_of(self):
            call = self.__dict__["_cached"] = PreparedCall(self, own, leaves)
            return run_op(call.op, call.params, x, call.cfg, [*leaves, x], call.bounds)
        leaves += given if type(given) is tuple else (given,)
        return run_op(self.op, self._params(own), given, self.known_cfg(), leaves)

    def followed(self, own: list[Any], given: Any, kind: str) -> Any:
        """Run the op outside of autocast, on tensors cast as autocast would."""
        given, own = casts(self.autocast, given, kind, own)
        with outside(kind):
            if self.autocast in CASTING or not self.fields or _compiling():
                return run_op(self.op, self._params(own), given, self.known_cfg())
            try:
                return run_op(self.op, self._params(own), given, self.known_cfg())
            except (TypeError, ValueError) as error:
                dtypes = {t.dtype for t in tensors((given, own)) if t.is_floating_point()}
                if len(dtypes) < 2:
                    raise
                name = type(self).__name__
                hint = f'torch.autocast is on: {name}.autocast = "lower" or "float32" gives x and the parameters one dtype'
                raise type(error)(f"{error} ({hint})") from error

    def launched(self, own: list[Any], given: Any) -> Any:
        """Run the op, with or without autocast, for modules with their own forward."""
        kind = (given[0] if type(given) is tuple else given).device.type
        if any_autocast() and is_on(kind):
            return self.followed(own, given, kind)
        return run_op(self.op, self._params(own), given, self.known_cfg())

    def _params(self, own: list[Any]) -> Any:
        return None if self.params_class is None else self.params_class(*own)

    def _own(self) -> list[Any]:
        parameters = self._parameters
        return [parameters[name] if name in parameters else getattr(self, name) for name in self.fields]


OpModule._of_step = OpModule.forward


def copied(forward: Any, theirs: Any) -> Any:
    """A copy of a forward for one class, because torch.compile counts compilations per code object. Its first argument gets the
    name that it has in `theirs`, torch's forward, because callers may pass it by name."""
    code, names = forward.__code__, forward.__code__.co_varnames
    known = getattr(theirs, "__code__", code)
    name = known.co_varnames[1] if known.co_argcount > 1 else names[1]
    if name not in names[2:]:
        names = (names[0], name, *names[2:])
    own: Any = types.FunctionType(code.replace(co_varnames=names), forward.__globals__, forward.__name__, None, forward.__closure__)
    functools.update_wrapper(own, forward)
    del own.__wrapped__
    own.__defaults__, own.__kwdefaults__ = forward.__defaults__, forward.__kwdefaults__
    own.__annotations__ = {name if at == code.co_varnames[1] else at: hint for at, hint in forward.__annotations__.items()}
    return own


def _check_values(cls: Any) -> None:
    """Raise unless a config can be made from the `values` of a class without its own `make_cfg`."""
    config = cls.op.config
    fields = [f for f in dataclasses.fields(config) if f.init]
    asked = {f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING}
    if not asked <= set(cls.values) <= {f.name for f in fields}:
        names = ", ".join(f.name + ("" if f.name in asked else " (optional)") for f in fields) or "(none)"
        fail(cls.__name__, "values", f"fields of {config.__name__}: {names}; or the class has a make_cfg(self)", repr(cls.values))


def _kind_of(t: Any) -> str:
    return f"{type(t).__name__} of {t.dtype}" if isinstance(t, Tensor) else describe(t)


class PreparedCall:
    """The cached arguments of `run` besides x for calls of a module, valid as long as the module does not change."""

    __slots__ = (
        *("before", "bounds", "cfg", "first", "first_dtype", "leaves", "op", "origin", "params", "reads_dense", "same", "theirs"),
    )

    def __init__(self, module: Any, own: list[Any], leaves: list[Any]) -> None:
        self.cfg = module.known_cfg()
        self.op, self.params, self.reads_dense = module.op, module._params(own), module.reads_dense
        self.leaves, self.first = leaves, own[0] if own else None
        self.first_dtype = None if self.first is None else self.first.dtype
        self.same, self.before = same_parameters(module.fields), parameters_of(module, module.fields)
        self.origin, self.theirs = module._origin, type(module)._theirs
        self.bounds: dict[Any, Any] = {}

    @staticmethod
    def may_be_of(module: Any) -> bool:
        """Whether the params are the module's own parameters, and nothing else: what `functional_call` lends is not kept alive,
        nor what a forward that is set on the module lends, as accelerate's does to a module whose weights are offloaded."""
        cls, parameters = type(module), module._parameters
        if "forward" in module.__dict__:
            return False
        plain = cls._own is OpModule._own and cls._params is OpModule._params
        return plain and all([name in parameters and type(parameters[name]) is not Tensor for name in cls.fields])

    def fits(self, module: Any, x: Tensor) -> bool:
        state, dtype = module.__dict__, x.dtype
        return (
            state.get("_cfg") is self.cfg
            and module.op is self.op
            and self.origin.forward is self.theirs
            and dtype in module.dtypes
            and (self.first is None or self.first.dtype is self.first_dtype)
            and (not module.pairs or self.first is None or (dtype, self.first_dtype) in module.pairs)
            and (not self.reads_dense or x.is_contiguous())
            and self.same(state["_parameters"], self.before)
        )


def is_plain(t: Any) -> bool:
    """Whether `t` is a tensor without a foreign subclass: torch's own, or a fake tensor while torch traces, but not a proxy of
    torch.fx, which records torch's functions. Also True for other values, which the op will refuse."""
    kind = type(t)
    found = PLAIN.get(kind)
    if found is None:
        found = PLAIN[kind] = not issubclass(kind, (Tensor, Proxy)) or issubclass(kind, (FakeTensor, FunctionalTensor, nn.Buffer))
    return found


def folded(x: Any) -> Any:
    """x, or a copy if x cannot be viewed as rows, [N, D]: then a product copies it anyway, as torch's does, and what is kept is the
    copy, instead of all the memory of which x is a slice. A tracer's compiler chooses what is kept."""
    if type(x) is not Tensor or x.dim() < 3 or _compiling() or x.is_contiguous():
        return x
    # each outer dimension of more than one must step over exactly the one inside of it
    outer = [(size, step) for size, step in zip(x.shape[:-1], x.stride(), strict=False) if size != 1]
    rows = all([step == size * inner for (_, step), (size, inner) in zip(outer, outer[1:], strict=False)])
    return x if rows else x.contiguous()


def untouched(module: Any, fields: tuple[str, ...]) -> bool:
    """Whether a call of the module only runs its class's forward on its own plain parameters. A module with anything else (a hook,
    a forward on the instance, a parametrization, a pruned or sharded weight) must be called."""
    state = module.__dict__
    if "forward" in state or any([state[name] for name in HOOKS]):
        return False
    parameters = state["_parameters"]
    for name in fields:
        if name not in parameters or not (PLAIN.get(type(parameters[name])) or is_plain(parameters[name])):
            return False
    return True


def prepare(module: Any) -> None:
    """Make the config now, if possible."""
    try:
        module.known_cfg()
    except (AttributeError, KeyError, TypeError, ValueError):
        module.__dict__.setdefault("_cfg", None)  # incomplete or wrong: the first use raises


def config_or_absent(module: Any) -> Any:
    """A module's config. Raises `AttributeError` if it cannot be made, for `hasattr` and `inspect`."""
    try:
        return module.known_cfg()
    except (TypeError, ValueError) as error:
        raise AttributeError(str(error)) from error


def functional(module: Any) -> tuple[Op, Any, Any]:
    """Return `(op, cfg, params)` of a module, or a Sequential of modules, for `op.fwd(params, x, cfg)`: params are detached views
    of the module's parameters, so that both see an in-place update. Raises `ValueError` for a Sequential that is not one chain.

    >>> import torch
    >>> from funcops import nn
    >>> op, cfg, params = nn.functional(nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 2)))
    >>> y, residuals = op.fwd(params, torch.ones(4, 3), cfg)
    >>> op, y.shape, list(residuals)
    (chain, torch.Size([4, 2]), ['m0', 'm1', 'm2'])
    """
    if not hasattr(type(module), "op_params"):
        remedy = (
            ": call funcops.nn.from_torch(module) first, if it is a layer or a Sequential" if isinstance(module, nn.Module) else ""
        )
        fail("functional", "module", "a layer or a Sequential of funcops.nn", describe(module) + remedy, TypeError)
    if isinstance(module, OpModule) and module.other_way() is not None:
        wanted = "one whose call is its op on its own parameters (with a weight, over the last dimension, not in place)"
        fail("functional", "module", wanted, repr(module))
    return module.op, module.known_cfg(), tree_map_tensors(lambda t: t.detach(), module.op_params())
