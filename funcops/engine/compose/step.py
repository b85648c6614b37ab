"""`Step`, the part of a combinator, and how its x, y and their gradients are put together with extras."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from funcops.engine import random
from funcops.engine.contract.configs import Composite, Replace, Width, require_config
from funcops.engine.contract.needs import Mask, Needs, sub_mask
from funcops.engine.contract.op import Op, config
from funcops.engine.errors import check, describe, fail, in_step, require, require_type
from funcops.engine.program.values import abstract_params, add, has_params
from funcops.engine.trees import WithExtras

__all__ = ["AroundBody", "OneBody", "Step", "WithExtras", "check_body", "live_inputs", "note", "split_x"]


@config
class Step:
    """A named op in a combinator. Its x is `(main, *takes)`, its y `(main, *gives)`, by name. An op that is a combinator takes its
    extras and gives its outputs by their own names; `gives`, one name for each output, renames these. `folds=False`: random keys
    reach the op as they are, without the step's name folded in; then two such steps with one key draw the same bits.

    >>> from funcops import ScaleConfig, Step, scale
    >>> step = Step("double", scale, ScaleConfig(2.0), takes=("mask",))
    >>> step.name, step.op, step.takes
    ('double', scale, ('mask',))
    """

    name: str = field(kw_only=False)
    op: Op = field(kw_only=False)
    cfg: Any = field(kw_only=False)
    takes: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()
    folds: bool = True

    def __post_init__(self) -> None:
        require(self.name.isidentifier(), "Step", "name", "an identifier", repr(self.name))
        require_type(f"Step {self.name!r}", "op", self.op, Op)
        check_body(f"Step {self.name!r}", self.op, self.cfg)
        for side in ("takes", "gives"):
            names = getattr(self, side)
            right = isinstance(names, tuple) and all(isinstance(n, str) for n in names)
            require(right, f"Step {self.name!r}", side, "a tuple of names", repr(names))
        extras, outputs = self.cfg.extras, self.cfg.outputs
        if extras and self.takes:
            require(self.takes == extras, f"Step {self.name!r}", "takes", f"() or {extras}", self.takes)
        if self.gives and not self.cfg.gives_by_position:
            expected = f"() or a name for each of its outputs {outputs}" if outputs else "() (the config names no outputs)"
            require(len(self.gives) == len(outputs), f"Step {self.name!r}", "gives", expected, self.gives)
        require(len(set(self.gives)) == len(self.gives), f"Step {self.name!r}", "gives", "different names", self.gives)
        # an op with a key takes it as the last part of x
        keys = self.cfg.keys if extras else self.takes[-1:] if self.op.keyed_by(self.cfg) else ()
        note(self, passes=bool(extras), names=extras or self.takes, keys=keys, outputs=outputs, given=self.gives or outputs)
        # of the name and not the position: a step draws the same bits wherever it stands in its chain
        note(self, fold=random.path_id(self.name), has_params=has_params(self.op, self.cfg))

    passes: ClassVar[bool]  # whether the op is a combinator that takes its extras by name
    names: ClassVar[tuple[str, ...]]  # the extras that reach the op, in order
    keys: ClassVar[tuple[str, ...]]  # the names that are random keys
    outputs: ClassVar[tuple[str, ...]]  # a combinator's outputs, by its own names
    given: ClassVar[tuple[str, ...]]  # the names of the op's outputs beside main, in order
    fold: ClassVar[int]  # the number that is folded into every key
    has_params: ClassVar[bool]

    def x(self, main: Any, extras: dict[str, Any]) -> Any:
        """The op's x, with the step's name folded into every random key, if it `folds`."""
        names = self.names
        if not names:
            return main
        if self.keys and self.folds:
            return bundle(main, {n: extras[n] for n in names}, self.keys, self.fold, self.passes)
        if self.passes:
            # a combinator refuses extras that it does not declare, so it gets its own; if these are all, without a copy
            return WithExtras(main, extras if len(extras) == len(names) else {n: extras[n] for n in names})
        return (main, *[extras[n] for n in names])

    def split(self, dx: Any, sums: dict[str, Any]) -> Any:
        """The gradient of main, from the op's dx; the gradients of the extras are added to `sums`."""
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

    def split_y(self, y: Any) -> tuple[Any, dict[str, Any]]:
        """The main value of the op's y, and its other outputs by name."""
        if not self.given:
            return y, {}
        main, *rest = (y.main, *[y.extras[n] for n in self.outputs]) if self.outputs else y
        return main, dict(zip(self.given, rest, strict=True))

    def dy(self, main: Any, gradients: Mapping[str, Any]) -> Any:
        """The gradient of the op's y, from the gradients of its parts; a missing one is zero."""
        if not self.given:
            return main
        rest = [gradients.get(n) for n in self.given]
        if main is None and all([d is None for d in rest]):
            return None
        return WithExtras(main, dict(zip(self.outputs, rest, strict=True))) if self.outputs else (main, *rest)

    def needs(self, live: dict[str, Mask], params: Mask) -> Needs:
        """The needs of this step's op. `live`: which values need a gradient ("" is main)."""
        params = sub_mask(params, self.name) if self.has_params else False
        if not self.names:
            return Needs(x=live[""], params=params)
        labels = ["main" if self.passes else "0"] + [f"extras.{n}" if self.passes else str(i + 1) for i, n in enumerate(self.names)]
        wanted = [label for label, name in zip(labels, ("", *self.names), strict=True) if live[name]]
        # all parts by name are True, so that equal needs are one object, such as `Needs.ALL`
        return Needs(x=True if len(wanted) == len(labels) else wanted, params=params)

    def with_op(self, op: Op, cfg: Any) -> Step:
        """The step with another op, which takes also the names that `takes_also` of its config adds. A step that passes all extras
        of a combinator passes all extras of the new one."""
        # a step that a rewrite leaves alone is not made and checked again
        if op is self.op and cfg is self.cfg:
            return self
        takes = () if self.passes else self.takes
        takes += tuple([name for name in cfg.takes_also if name not in takes])
        return dataclasses.replace(self, op=op, cfg=cfg, takes=() if takes == cfg.extras else takes)


class OneBody(Composite):
    """The base of a config whose one part is the body `op` with the config `cfg`."""

    op: Op
    cfg: Any

    @property
    def first_parts(self) -> tuple[Any, ...]:
        """The config of the body, whose x is this config's x."""
        return (self.cfg,)

    def with_parts(self, replace: Replace, **changes: Any) -> Self:
        """The config with `replace(name, op, cfg)` for the body."""
        op, cfg = replace(None, self.op, self.cfg)  # no name: the body adds none to its paths
        return dataclasses.replace(self, op=op, cfg=cfg, **changes)  # type: ignore[type-var]

    def parts(self) -> list[tuple[Any, Any, Any]]:
        return [(None, self.op, self.cfg)]


class AroundBody(OneBody):
    """The base of a config whose y is its body's."""

    @property
    def gives_by_position(self) -> bool:  # type: ignore[override]
        """See `OpConfig.gives_by_position`."""
        return self.cfg.gives_by_position  # type: ignore[no-any-return]

    @property
    def maps_to_itself(self) -> bool:  # type: ignore[override]
        """See `Composite.maps_to_itself`."""
        return isinstance(self.cfg, Composite) and self.cfg.maps_to_itself

    def follow(self, where: str, path: str, width: Width | None) -> Width | None:
        """See `OpConfig.follow`."""
        return self.cfg.follow(where, path, width)  # type: ignore[no-any-return]


def note(cfg: Any, **derived: Any) -> None:
    """Set attributes that are derived from the fields of a frozen config."""
    for name, value in derived.items():
        object.__setattr__(cfg, name, value)


def bundle(main: Any, extras: dict[str, Any], keys: tuple[str, ...], fold: int, combinator: bool) -> Any:
    for name in keys:
        extras[name] = random.fold_in(extras[name], fold)
    return WithExtras(main, extras) if combinator else (main, *extras.values())


def check_body(where: str, op: Any, cfg: Any) -> None:
    require_type(where, "op", op, Op)
    require_config(where, cfg, op.config)


def by_name(steps: Sequence[Step], make: Callable[[Step], Any]) -> dict[str, Any]:
    """`make(step)` for every step, by the step's name, which is put before its errors."""
    found, name = {}, ""
    try:
        for step in steps:
            name = step.name
            found[name] = make(step)
    except Exception as error:
        in_step(error, name)
        raise
    return found


def init_parts(steps: Sequence[Step], key: Any, device: Any, dtype: Any) -> dict[str, Any]:
    """Params of every step by name, each from a key of its own."""

    def init(step: Step) -> Any:
        own = None if key is None else random.fold_in(key, step.fold)
        return step.op.init(step.cfg, key=own, device=device, dtype=dtype)

    return by_name(steps, init)


def abstract_parts(steps: Sequence[Step]) -> dict[str, Any]:
    """`abstract_params` of every step by name."""
    return by_name(steps, lambda step: abstract_params(step.op, step.cfg))


def split_x(where: str, x: Any, cfg: Any) -> tuple[Any, dict[str, Any]]:
    """Check the extras' names and the random keys of a combinator's x, and return its main value and extras."""
    extras = cfg.extras
    if not extras:
        if type(x) is WithExtras:
            fail(where, "x", "without extras (the config declares none)", f"extras {sorted(x.extras)}")
        return x, {}
    if type(x) is not WithExtras:
        fail(where, "x", f"WithExtras with extras {sorted(extras)}", describe(x), TypeError)
    # any order will do; the config's own is found by the first test, without sets
    if tuple(x.extras) != extras and x.extras.keys() != set(extras):
        fail(where, "x.extras", str(sorted(extras)), sorted(x.extras))
    main = x.main if isinstance(x.main, Tensor) else None
    for name in cfg.keys:  # here, as a key is folded before the step that reads it
        check(where, f"x.extras.{name} (a random key)", x.extras[name], (2,), torch.int64, main)
    return x.main, x.extras


def live_inputs(x: Mask, extras: tuple[str, ...]) -> dict[str, Mask]:
    """Which of a combinator's inputs need a gradient, from the mask over its x."""
    if not extras:
        return {"": x}
    given = sub_mask(x, "extras")
    return {"": sub_mask(x, "main"), **{n: sub_mask(given, n) for n in extras}}
