"""`Sequential`: each run of funcops modules as one chain, with one autograd node, planned and fused."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from funcops.adapters.autocast import CAST, LOWER, any_autocast, cast, is_on, outside
from funcops.adapters.autograd.differentiable import run
from funcops.adapters.nn.layers import Dropout, drawn_key
from funcops.adapters.nn.module import OpModule, Prepared, config_or_absent, is_plain, run_op, untouched
from funcops.adapters.nn.unchanged import follows, same_modules, state_of, watched
from funcops.engine.compose.chain import ChainConfig, chain
from funcops.engine.compose.step import Step
from funcops.engine.contract.trace_safe_cache import reading
from funcops.engine.errors import require
from funcops.engine.program.rules import FEW
from funcops.engine.trees import WithExtras

KEY = "key"
_compiling = torch.compiler.is_dynamo_compiling


class Group:
    """Neighbouring modules that run as one chain, or one ordinary module. Small inputs run with `small`, which recomputes only
    outputs that torch keeps in place of inputs. Modules that keep their y run before the chain if they are its first, or x would be
    kept, of which someone else may be the owner, and after it if they are its last, as they keep nothing more there: `run_cfg`
    lacks them."""

    def __init__(self, named: list[tuple[str, Any]], cfg: ChainConfig | None) -> None:
        self.names, self.modules, self.cfg = [n for n, _ in named], [m for _, m in named], cfg
        keep_y = [cfg is not None and getattr(module, "keeps_y", False) for module in self.modules]
        begin = (*keep_y, False).index(False)
        end = len(named) - (keep_y[-1] and begin < len(named))
        self.first, self.last, inside = self.modules[:begin], self.modules[end:], named[begin:end]
        self.run_cfg = None if cfg is None or not inside else dataclasses.replace(cfg, steps=cfg.steps[begin:end])
        again = tuple([name for name, module in inside if getattr(module, "keeps_y", False)])  # or they would keep x beside y
        self.small = None if self.run_cfg is None else dataclasses.replace(self.run_cfg, recompute=again or False)
        self.inside = dict(inside)
        self.in_order = [module for _, module in sorted(inside, key=lambda pair: pair[0])]  # the order of a dict's leaves
        self.head = inside[0][1] if inside else self.modules[0]
        self.dtypes: Any = getattr(self.head, "dtypes", frozenset())  # of x
        self.copies = self.head if getattr(self.head, "reads_dense", False) else None
        self.lent = False  # whether a `functional_call` has lent the parameters, which are not kept alive
        self.own: list[Any] = []
        self.leaves: list[Any] = []  # of `params`
        self.params: Any = None
        self.bounds: dict[Any, Any] = {}
        self.small_bounds: dict[Any, Any] = {}

    def refresh(self) -> None:
        """Read the modules' current parameters."""
        own: list[Any] = []
        for module in self.in_order:
            own += module._own()
        if self.params is None or len(own) != len(self.own) or any([a is not b for a, b in zip(own, self.own, strict=True)]):
            self.own, self.leaves = own, [t for t in own if t is not None]
            self.lent = any([type(t) is Tensor for t in own])
            self.params = {name: m.op_params() for name, m in self.inside.items()}

    def run(self, x: Any) -> Any:
        for module in self.first:
            x = module(x)
        y = self.run_inside(x)
        if self.lent:
            self.own, self.leaves, self.params = [], [], None
        for module in self.last:
            y = module(y)
        return y

    def run_inside(self, x: Any) -> Any:
        if self.run_cfg is None or not (type(x) is Tensor or is_plain(x)) or getattr(x, "dtype", None) not in self.dtypes:
            return self.one_by_one(x)
        if self.copies is not None:
            x = self.copies.op_input(x)
        if any_autocast() and is_on(x.device.type):
            return self.followed(x, x.device.type)
        if _compiling():
            self.refresh()
        few = _is_few(x)
        cfg: Any = self.small if few else self.run_cfg
        if cfg.extras:
            return run_op(chain, self.params, WithExtras(x, {key: drawn_key(x) for key in cfg.extras}), cfg)
        launch = run if type(x) is Tensor and not _compiling() else run_op
        return launch(chain, self.params, x, cfg, [*self.leaves, x], self.small_bounds if few else self.bounds)

    def one_by_one(self, x: Any) -> Any:
        for module in self.modules if self.cfg is None else self.inside.values():
            x = module(x)
        return x

    def followed(self, x: Any, kind: str) -> Any:
        """Run under autocast: as one chain if every step would run in autocast's dtype, else one by one."""
        dtype = torch.get_autocast_dtype(kind)
        lower = x.dtype is dtype or (x.dtype in CAST and self.head.autocast == LOWER)
        if not lower or not all([m.autocast == LOWER or not m.fields for m in self.inside.values()]):
            return self.one_by_one(x)
        params = {name: m._params([None if t is None else cast(t, dtype) for t in m._own()]) for name, m in self.inside.items()}
        x = cast(x, dtype)
        cfg: Any = self.small if _is_few(x) else self.run_cfg
        given = WithExtras(x, {key: drawn_key(x) for key in cfg.extras}) if cfg.extras else x
        with outside(kind):
            return run_op(chain, params, given, cfg)


def _is_few(x: Any) -> bool:
    """Whether x is so small that what torch keeps is kept. A tracer takes no size for a constant: all that can be is recomputed,
    and its compiler keeps what it chooses."""
    return not _compiling() and type(x) is Tensor and x.numel() < FEW


class Sequential(Prepared, nn.Sequential):
    """`torch.nn.Sequential` that runs neighbouring funcops modules as one `chain`, which recomputes the outputs of recomputable
    steps and uses fused kernels. An ordinary module, or a module with hooks, splits the chain.

    >>> import torch
    >>> from funcops import nn
    >>> model = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 2))
    >>> model(torch.ones(4, 3)).shape, [step.op for step in model.cfg.steps]
    (torch.Size([4, 2]), [linear, activation, linear])
    """

    op = chain
    if TYPE_CHECKING:

        def __call__(self, input: Any) -> Any: ...

    def forward(self, input: Any) -> Any:
        if self._patched():
            return nn.Sequential.forward(self, input)
        x = input
        for group in self._groups():
            x = group.run(x)
        return x

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self.__dict__.get("_modules", ()):
            self.__dict__.pop("_cached", None)  # or a module that was replaced would live until the next call

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self.__dict__.pop("_cached", None)

    @property
    def cfg(self) -> ChainConfig:
        """The chain of all modules. Raises `AttributeError` if they are not one chain."""
        return config_or_absent(self)  # type: ignore[no-any-return]

    def known_cfg(self) -> ChainConfig:
        """`cfg`. Raises `ValueError` for modules that are not one chain."""
        return self._whole().cfg  # type: ignore[return-value]

    def op_params(self) -> dict[str, Any]:
        """The chain's params; the leaves are the modules' own parameters."""
        group = self._whole()
        return {name: module.op_params() for name, module in zip(group.names, group.modules, strict=True)}

    def _whole(self) -> Group:
        groups = self._groups()
        one = len(groups) == 1 and groups[0].cfg is not None
        require(one, "funcops.nn.Sequential", "modules", "all of funcops.nn, without hooks", [type(m).__name__ for m in self])
        return groups[0]

    def _groups(self) -> list[Group]:
        """The groups, cached until a module, its config or its hooks change."""
        if _compiling():
            self._looked_through_while_tracing()
        cached = self.__dict__.get("_cached")
        if cached is None or _compiling() or cached.same is None or not cached.same(self._modules, cached.before):
            cached = self._looked_through(cached)
        return cached.groups  # type: ignore[no-any-return]

    def _looked_through_while_tracing(self) -> bool:
        """Update the groups outside of the traced code: a tracer cannot make a config, but can read one."""
        with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError), reading():  # the tracer will meet the same error
            self._looked_through(self.__dict__.get("_cached"))
        return True

    # Makes the tracer run it, as `torch.compiler.assume_constant_result` would, which imports the compiler.
    _looked_through_while_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _looked_through(self, cached: Any) -> Any:
        """Check every module, and make the groups again if any has changed."""
        seen, modules = watched(), list(self._modules.values())
        now = [m if seen or not _joins(m) else m.known_cfg() for m in modules]
        if (
            cached is None
            or len(cached.now) != len(now)
            or any([a is not b for a, b in zip(cached.now, now, strict=True)])
            or cached.modules != modules
        ):
            joins = [made is not m for made, m in zip(now, modules, strict=True)]
            cached = self.__dict__["_cached"] = Cached(now, modules, _grouped(dict(self._modules), joins))
        if not _compiling():
            cached.refresh()
        return cached


class Cached:
    """The groups of modules. `now`: for each module, its config if it can join a chain, else the module itself."""

    def __init__(self, now: list[Any], modules: list[Any], groups: list[Group]) -> None:
        self.now, self.modules, self.groups = now, modules, groups
        self.same: Any = None  # if all modules join: a function that checks whether they are unchanged
        self.before: Any = None

    def refresh(self) -> None:
        """Read the modules' current parameters."""
        for group in self.groups:
            if group.run_cfg is not None:
                group.refresh()
        self.same = self.before = None
        lent = any([group.lent for group in self.groups])
        if not lent and all([made is not m for made, m in zip(self.now, self.modules, strict=True)]):
            fields = tuple([m.fields for m in self.modules])
            self.before = state_of(self.modules, fields)
            self.same = same_modules(fields, follows(self.modules))


def _joins(module: Any) -> bool:
    """Whether the module can be a step of a chain: it takes only x, and its call only runs its op. A module that writes to its x
    can, if x is an earlier step's y, which no one else has."""
    if not isinstance(module, OpModule) or type(module).forward is not type(module)._of_step or module._patched():
        return False
    return untouched(module, module.fields) and (_by_torch_alone(module) or module.other_way() is None)


def _by_torch_alone(module: Any) -> bool:
    """Whether the module runs torch's forward only if it is called by itself. A Dropout in place always does, or its mask would
    depend on its neighbours."""
    return (_in_place(module) and not isinstance(module, Dropout)) or getattr(module, "keeps_y", False)


def _in_place(module: Any) -> bool:
    return getattr(module, "inplace", False) is True


def _grouped(modules: dict[str, Any], joins: list[bool]) -> list[Group]:
    groups: list[Group] = []
    joined: list[tuple[str, Any]] = []

    def close() -> None:
        if joined:
            steps = tuple(_step(name, module) for name, module in joined)
            extras = tuple([key for step in steps for key in step.takes])
            groups.append(Group(list(joined), ChainConfig(steps=steps, extras=extras)))
            joined.clear()

    for i, (name, module) in enumerate(modules.items()):
        if joins[i] and isinstance(module, Dropout) and module.rests():
            continue  # it returns x itself
        if joins[i] and (joined or not _in_place(module)):
            joined.append((f"m{i}", module))  # a module's name need not be an identifier
        else:
            close()
            groups.append(Group([(name, module)], None))
    close()
    return groups


def _step(name: str, module: Any) -> Step:
    """The step of a module. A Dropout takes a key of its own, drawn in the order of the modules and used as it is: the mask is the
    one that the module draws when it is called."""
    takes = (f"{KEY}_{name}",) if isinstance(module, Dropout) else ()
    return Step(name=name, op=module.op, cfg=module.known_cfg(), takes=takes, folds=False)
