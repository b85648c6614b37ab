"""What combinators share: `Step`, `WithExtras`, residuals by name, and how a step's x is put together."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any, ClassVar

import torch
from torch import Tensor

from funcops import random
from funcops.errors import DonatedError, check, describe, fail, in_step, require, require_type
from funcops.needs import Mask, Needs, sub_mask
from funcops.op import Op, config
from funcops.residuals.donate import donate
from funcops.schema import Donated
from funcops.trees import Aside, leaf, register_node, tensors, tree, tree_map

Replace = Callable[[Any, Op, Any], tuple[Op, Any]]  # of a part's name, op and config


@tree
class WithExtras:
    """x at a combinator's boundary: the main value, and named extra inputs."""

    main: Any = leaf("x")
    extras: Any = leaf("{name: tensor}")


@config
class Step:
    """A named op in a combinator. Its x is `(main, *takes)`, its y `(main, *gives)`, by name."""

    name: str = field(kw_only=False)
    op: Op = field(kw_only=False)
    cfg: Any = field(kw_only=False)
    takes: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_type("Step", "name", self.name, str)
        require(self.name.isidentifier(), "Step", "name", "an identifier", repr(self.name))
        require_type(f"Step {self.name!r}", "op", self.op, Op)
        check_body(f"Step {self.name!r}", self.op, self.cfg)
        for side in ("takes", "gives"):
            names = getattr(self, side)
            right = isinstance(names, tuple) and all(isinstance(n, str) for n in names)
            require(right, f"Step {self.name!r}", side, "a tuple of names", repr(names))
        extras = extras_of(self.cfg)
        if extras and self.takes:
            require(self.takes == extras, f"Step {self.name!r}", "takes", f"() or {extras}", self.takes)
        object.__setattr__(self, "passes", bool(extras))
        object.__setattr__(self, "names", extras or self.takes)
        object.__setattr__(self, "keys", keys_of(self.cfg) if extras else self.takes[-1:] if self.op.keyed else ())
        object.__setattr__(self, "fold", random.path_id(self.name))
        object.__setattr__(self, "has_params", has_params(self.op, self.cfg))

    passes: ClassVar[bool]  # whether the op is a combinator that takes its extras by name
    names: ClassVar[tuple[str, ...]]  # the extras that reach the op, in order
    keys: ClassVar[tuple[str, ...]]  # those of them that are random keys
    fold: ClassVar[int]  # what is folded into a key on its way down
    has_params: ClassVar[bool]

    def x(self, main: Any, extras: dict[str, Any]) -> Any:
        """The op's x, with the step's name folded into every random key."""
        names = self.names
        if not names:
            return main
        if self.keys:
            return bundle(main, {n: extras[n] for n in names}, self.keys, self.fold, self.passes)
        if self.passes:
            return WithExtras(main, extras if len(extras) == len(names) else {n: extras[n] for n in names})
        return (main, *[extras[n] for n in names])

    def split(self, dx: Any, sums: dict[str, Any]) -> Any:
        """The gradient of main, from the op's dx; those of the extras are added to `sums`."""
        if dx is None or not self.names:
            return dx
        if self.passes:
            main, extras = dx.main, [dx.extras[n] for n in self.names]
        else:
            main, *extras = dx
        for name, gradient in zip(self.names, extras, strict=True):
            if gradient is not None:
                sums[name] = add(sums.get(name), gradient)
        return main

    def needs(self, live: dict[str, Mask], params: Mask) -> Needs:
        """What this step's op needs, where `live` says which values need a gradient ("" is main)."""
        params = sub_mask(params, self.name) if self.has_params else False
        if not self.names:
            return Needs(x=live[""], params=params)
        labels = ["main" if self.passes else "0"] + [f"extras.{n}" if self.passes else str(i + 1) for i, n in enumerate(self.names)]
        wanted = [label for label, name in zip(labels, ("", *self.names), strict=True) if live[name]]
        return Needs(x=True if len(wanted) == len(labels) else wanted, params=params)

    def with_op(self, op: Op, cfg: Any) -> Step:
        return self if op is self.op and cfg is self.cfg else dataclasses.replace(self, op=op, cfg=cfg)


def bundle(main: Any, extras: dict[str, Any], keys: tuple[str, ...], fold: int, combinator: bool) -> Any:
    for name in keys:
        extras[name] = random.fold_in(extras[name], fold)
    return WithExtras(main, extras) if combinator else (main, *extras.values())


def extras_of(cfg: Any) -> tuple[str, ...]:
    """The extra inputs that a combinator's config asks for; () for any other op."""
    return getattr(cfg, "extras", ())


def keys_of(cfg: Any) -> tuple[str, ...]:
    """Those of a combinator's extras that are random keys."""
    return getattr(cfg, "keys", ())


def check_body(where: str, op: Any, cfg: Any) -> None:
    require_type(where, "op", op, Op)
    if type(cfg) is not op.config:
        fail(where, "cfg", op.config.__name__, describe(cfg), TypeError)


def has_params(op: Op, cfg: Any) -> bool:
    return bool(tensors(abstract_params(op, cfg)))


@functools.lru_cache(maxsize=1024)
def abstract_params(op: Op, cfg: Any) -> Any:
    """The op's params on the meta device: their structure and shapes. Not to be changed."""
    return op.init(cfg, key=None, device="meta")


def init_parts(steps: Sequence[Step], key: Any, device: Any, dtype: Any) -> dict[str, Any]:
    """Params of every step by name, each from a key of its own."""
    params, name = {}, ""
    try:
        for step in steps:
            name = step.name
            own = None if key is None else random.fold_in(key, step.fold)
            params[name] = step.op.init(step.cfg, key=own, device=device, dtype=dtype)
    except Exception as error:
        in_step(error, name)
        raise
    return params


def split_x(where: str, x: Any, cfg: Any) -> tuple[Any, dict[str, Any]]:
    """The main value and the extras of a combinator's x, after a check of their names and of the random keys."""
    extras = cfg.extras
    if not extras:
        if type(x) is WithExtras:
            fail(where, "x", "without extras (the config declares none)", f"extras {sorted(x.extras)}")
        return x, {}
    if type(x) is not WithExtras:
        fail(where, "x", f"WithExtras with extras {sorted(extras)}", describe(x), TypeError)
    if tuple(x.extras) != extras and x.extras.keys() != set(extras):
        fail(where, "x.extras", str(sorted(extras)), sorted(x.extras))
    for name in cfg.keys:
        check(where, f"x.extras.{name} (a random key)", x.extras[name], (2,), torch.int64)
    return x.main, x.extras


def live_inputs(x: Mask, extras: tuple[str, ...]) -> dict[str, Mask]:
    """Which of a combinator's inputs need a gradient, from the mask over its x."""
    if not extras:
        return {"": x}
    given = sub_mask(x, "extras")
    return {"": sub_mask(x, "main"), **{n: sub_mask(given, n) for n in extras}}


def add(a: Any, b: Any) -> Any:
    """The sum of two gradients of one structure, where None is zero."""
    if a is None or b is None:
        return b if a is None else a
    return a + b if isinstance(a, Tensor) else tree_map(add, a, b)


def part(node: Any, name: Any) -> Any:
    """A child of residuals or pending; given away with its parent where the parent was."""
    child = node[name]
    if not node.donated or child is None:
        return child
    node[name] = None
    return donate(child)


def run_backward(op: Op, cfg: Any, kept: Any, dy: Any, whole: bool, into: Any) -> tuple[Any, Any]:
    """dx and, where `whole`, dparams; otherwise dx and the pending. A part that kept nothing needs nothing."""
    if not whole:
        return (None, None) if kept is None else op.dgrad(kept, dy, cfg)
    if kept is None:
        return None, op.wgrad(None, cfg, into=into)
    dparams, dx = op.bwd(kept, dy, cfg, into=into)
    return dx, dparams


def needs_of(kept: Any) -> Needs:
    """The needs under which residuals were kept, donated or not."""
    node = kept._node if type(kept) is Donated else kept
    return getattr(node, "needs", Needs.NONE)


class Nested(dict):  # type: ignore[type-arg]
    """Residuals or pending of a combinator: those of its parts by name, None where a part keeps nothing."""

    __slots__ = ("cfg", "donated", "gone", "had", "needs")
    kind: ClassVar[str] = "residuals"
    had: tuple[str, ...]  # the parts that must not be None, of a node that was made of another

    def __init__(self, parts: Any = (), *, cfg: Any = None, needs: Needs = Needs.ALL) -> None:
        if parts:
            dict.update(self, parts)
        self.cfg, self.needs = cfg, needs
        self.donated = self.gone = False
        self.had = ()

    def fresh(self) -> bool:
        return not self.gone and (not self.had or self.missing() is None)

    def missing(self) -> Any:
        """The name of a part that was there in the node that this one is made of."""
        return next((name for name in self.had if self.get(name) is None), None)

    def complain(self, where: str) -> None:
        if not self.gone:
            fail(where, f"{self.kind}.{self.missing()}", "as the forward kept it", None, TypeError)
        raise DonatedError(f"{where}: {self.kind} must be unused, got {type(self).__name__} given away with donate()")

    def give(self) -> Nested:
        node = type(self)(self, cfg=self.cfg, needs=self.needs)
        node.donated = True
        self.empty()
        return node

    def empty(self) -> None:
        dict.clear(self)
        self.gone, self.had = True, ()

    def parts(self) -> tuple[str, ...]:
        return self.had or tuple([name for name, part in dict.items(self) if part is not None])

    def moved(self, had: Any) -> Any:
        """This node, made of another's parts, with what is known of that."""
        if had is not None:
            self.had = had
        return self

    def __copy__(self) -> Any:
        made: Any = type(self)(self, cfg=self.cfg, needs=self.needs)
        made.donated = self.donated
        return made.moved(self.parts())

    copy = __copy__

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._open()
        return super().__reduce_ex__(protocol)

    def _open(self) -> Any:
        """This node, which must not have been given away."""
        if self.gone:
            raise DonatedError(f"{type(self).__name__} was given away with donate(): it must not be used again")
        return self

    def nothing(self) -> Any:
        """dx where there is no gradient at all."""
        extras = extras_of(self.cfg)
        return WithExtras(None, dict.fromkeys(extras)) if extras else None

    def __missing__(self, name: Any) -> Any:
        self._open()
        raise KeyError(name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({super().__repr__()})"


# Every other method of a dict, but for what a launch calls (`node[name]` finds nothing in a node that was given away, and asks
# `__missing__`), with that check before. Written out as source, with `super`, as a tracer follows no method that is called by its class.
_SOURCE = """
def {name}(self, *args, **options):
    if self.gone:
        self._open()
    return super(Nested, self).{name}(*args, **options)
"""
for _name in ("get keys values items pop popitem update setdefault clear __iter__ __reversed__ __len__ __contains__ __eq__ __ne__ __or__ "
              "__ror__ __ior__ __delitem__").split():  # fmt: skip
    _scope: dict[str, Any] = {"Nested": Nested}
    exec(_SOURCE.format(name=_name), _scope)
    setattr(Nested, _name, _scope[_name])


def nested(kind: str) -> Callable[[type], type]:
    """Class decorator: a `Nested` of this kind, registered as a pytree node."""

    def decorate(cls: Any) -> Any:
        cls.kind = kind
        register_node(
            cls,
            lambda node: tuple(dict.values(node)),
            lambda node: (node._open().cfg, node.needs, tuple(dict.keys(node)), Aside(node.parts())),
            lambda values, data: cls(zip(data[2], values, strict=True), cfg=data[0], needs=data[1]).moved(data[3].value),
            lambda node: tuple(dict.keys(node)),
        )
        return cls

    return decorate
