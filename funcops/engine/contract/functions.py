"""The functions of an op: the decorators under which its author writes them, and those that `make_op` derives.

A decorated function checks what it is given, then runs the function below it; `raw_of` returns that one to a program, which checks
by itself. The checks are written out in each function, not shared: a call of an op costs a few microseconds of host time.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from funcops.engine import random
from funcops.engine.contract.by_config import class_by, classes_of
from funcops.engine.contract.checking import asked, unusual, when_switched
from funcops.engine.contract.configs import own_function, require_config
from funcops.engine.contract.fields import DGRAD, RECOMPUTE, WGRAD
from funcops.engine.contract.marks import IDLE
from funcops.engine.contract.needs import Needs, check_needs
from funcops.engine.contract.schema import Donated, open_node
from funcops.engine.contract.signatures import (
    BwdOf,
    C_in,
    D_in,
    DgradOf,
    Forward,
    G_in,
    P_any,
    P_in,
    R_in,
    R_out,
    WgradOf,
    Written,
    WrittenBwd,
    WrittenDgrad,
    WrittenWgrad,
    X_in,
    Y_out,
)
from funcops.engine.errors import StaleResidualError, describe, fail, require_device, require_dtype

F = TypeVar("F", bound=Callable[..., Any])
ALL = Needs.ALL
NoneType = type(None)
any_autocast = torch._C._is_any_autocast_enabled
# replaced, not tested: while no block is open a call pays only for the question about autocast
when_switched(lambda on: globals().update(any_autocast=asked if on else torch._C._is_any_autocast_enabled))


def forward(
    config: type, params_class: type = NoneType, name: str = ""
) -> Callable[[Written[P_in, X_in, C_in, Y_out, R_out]], Forward[P_in, X_in, C_in, Y_out, R_out]]:
    """Decorator of a `fwd`: checks the types of cfg, params and needs, then runs it. The new function raises `TypeError` if one has
    another type, `ValueError` if `needs` names a path that does not exist, `RuntimeError` under autocast."""

    def decorate(fn: Any) -> Any:
        where = name or fn.__name__

        @functools.wraps(fn)
        def fwd(params: Any, x: Any, cfg: Any, *, needs: Needs = ALL) -> Any:
            if type(cfg) is not config:
                _bad_type(where, "cfg", cfg, config)
            if type(params) is not params_class:
                _bad_type(where, "params", params, params_class)
            if any_autocast() and (found := unusual("fwd", where, fwd, params, x, cfg, needs=needs)):
                return found[0]
            # ALL names no path that could be missing
            if needs is not ALL:
                check_needs(where, needs, params, x)
            return fn(params, x, cfg, needs=needs)

        fwd.takes = params_class  # type: ignore[attr-defined]
        return with_raw(fwd, fn)

    return decorate


def init_of(config: type) -> Callable[[F], F]:
    """Decorator of an `init`: checks cfg, key, device and dtype, then runs it. The new function raises `TypeError` or `ValueError`
    if one is invalid."""

    def decorate(fn: Any) -> Any:
        where = fn.__name__

        @functools.wraps(fn)
        def init(cfg: Any, *, key: Tensor | None = None, device: Any = None, dtype: torch.dtype | None = None) -> Any:
            require_config(where, cfg, config)
            require_device(where, device)
            require_dtype(where, dtype)
            # without a key params may be on the meta device, where nothing is drawn
            if key is not None:
                random.check_key(where, key)
            return fn(cfg, key=key, device=device, dtype=dtype)

        return init

    return decorate


def dgrad_of(
    node_class: Any, name: str = ""
) -> Callable[[WrittenDgrad[R_in, D_in, C_in, Y_out]], DgradOf[R_in, D_in, C_in, Y_out]]:
    """Decorator of a `dgrad` (or a `bwd` override): opens the residuals (donated or not), checks class, config and
    staleness, and answers a dy of None, which means zero, with gradients of None. `node_class`: the class of the residuals, or
    `ByConfig` if it depends on the config."""
    first, others = classes_of(node_class)

    def decorate(fn: Any) -> Any:
        where = name or fn.__name__

        @functools.wraps(fn)
        def dgrad(residuals: Any, dy: Any, cfg: Any) -> Any:
            if any_autocast() and (found := unusual("dgrad", where, dgrad, residuals, dy, cfg)):
                return found[0]
            node = residuals
            if type(node) is Donated and node._node is not None:  # `take` written out; of a spent cell `open_node` raises
                node, residuals._node = node._node, None
            # the usual call enters no further function; `open_node` passes an equal config, and says what is wrong otherwise
            if (
                (type(node) is first or type(node) in others)
                and node.cfg is cfg
                and dy is not None
                and node.fresh()
                and not node.needs.drop
            ):
                return fn(node, dy, cfg)
            node = open_node(where, node, class_by(where, node_class, cfg), cfg, DGRAD, dy)
            # an IDLE node has nothing to read; an op with params runs all the same, as a bias gets its gradient from dy alone
            nothing = dy is None or (dgrad.alone and node._marks is IDLE)  # type: ignore[attr-defined]
            return (node.nothing(), None) if nothing else fn(node, dy, cfg)

        if fn.__code__.co_argcount > 3:  # the op's function hides an argument that only fusion rules give
            signature = inspect.signature(fn)
            dgrad.__signature__ = signature.replace(parameters=[*signature.parameters.values()][:3])  # type: ignore[attr-defined]
        dgrad.opens, dgrad.alone = node_class, False  # type: ignore[attr-defined]
        return with_raw(dgrad, fn)

    return decorate


def recompute_of(node_class: Any, name: str = "") -> Callable[[F], F]:
    """Decorator of a `recompute`: checks the class, config and staleness of the residuals, which it does not change. The new
    function raises `StaleResidualError` after a write to what they alias, `TypeError` or `ValueError` for another op's or
    config's."""
    first, others = classes_of(node_class)

    def decorate(fn: Any) -> Any:
        where = name or fn.__name__

        @functools.wraps(fn)
        def recompute(residuals: Any, cfg: Any) -> Any:
            kind = type(residuals)
            if not ((kind is first or kind in others) and residuals.cfg is cfg and residuals.fresh() and not residuals.needs.drop):
                try:
                    open_node(where, residuals, class_by(where, node_class, cfg), cfg, RECOMPUTE)
                except StaleResidualError as error:  # a chain decided to recompute, so its caller has one more remedy
                    raise StaleResidualError(f"{error}; or pass recompute=False to the chain, so that this y is kept") from None
            return fn(residuals, cfg)

        return with_raw(recompute, fn)

    return decorate


def bwd_of(
    node_class: Any, params_class: type, name: str = ""
) -> Callable[[WrittenBwd[R_in, D_in, C_in, P_any, Y_out]], BwdOf[R_in, D_in, C_in, P_any, Y_out]]:
    """Decorator of a whole `bwd` that is written out: as `dgrad_of`, with the answer for parameters too."""
    first, others = classes_of(node_class)

    def decorate(fn: Any) -> Any:
        where = name or fn.__name__

        @functools.wraps(fn)
        def bwd(residuals: Any, dy: Any, cfg: Any, *, into: Any = None) -> Any:
            if into is not None and type(into) is not params_class:
                _bad_type(where, "into", into, params_class)
            if any_autocast() and (found := unusual("bwd", where, bwd, residuals, dy, cfg, into=into)):
                return found[0]
            node = residuals
            if type(node) is Donated and node._node is not None:  # `take` written out; of a spent cell `open_node` raises
                node, residuals._node = node._node, None
            if (
                (type(node) is first or type(node) in others)
                and node.cfg is cfg
                and dy is not None
                and node.fresh()
                and not node.needs.drop
            ):
                return fn(node, dy, cfg, into=into)
            node = open_node(where, node, class_by(where, node_class, cfg), cfg, DGRAD | WGRAD, dy)
            # a dy of None means zero, which adds nothing to `into`
            nothing = no_gradients(params_class, cfg) if into is None else into
            return (nothing, node.nothing()) if dy is None else fn(node, dy, cfg, into=into)

        return with_raw(bwd, fn)

    return decorate


def wgrad_of(
    node_class: Any, params_class: type, name: str = ""
) -> Callable[[WrittenWgrad[G_in, C_in, P_any]], WgradOf[G_in, C_in, P_any]]:
    """Decorator of a `wgrad`: opens the pending, and answers a pending of None with a tree of None, or `into` unchanged."""

    def decorate(fn: Any) -> Any:
        where = name or fn.__name__

        @functools.wraps(fn)
        def wgrad(pending: Any, cfg: Any, *, into: Any = None) -> Any:
            if into is not None and type(into) is not params_class:
                _bad_type(where, "into", into, params_class)
            if pending is None:
                return no_gradients(params_class, cfg) if into is None else into
            if any_autocast() and (found := unusual("wgrad", where, wgrad, pending, cfg, into=into)):
                return found[0]
            node = pending
            if type(node) is Donated and node._node is not None:  # `take` written out; of a spent cell `open_node` raises
                node, pending._node = node._node, None
            if not (type(node) is node_class and node.cfg is cfg and node.fresh() and not node.needs.drop):
                node = open_node(where, node, node_class, cfg, WGRAD)
            return fn(node, cfg, into=into)

        wgrad.opens = node_class, params_class  # type: ignore[attr-defined]
        return with_raw(wgrad, fn)

    return decorate


def no_gradients(params_class: Any, cfg: Any) -> Any:
    """A tree of params in which every leaf is None: `without(cfg)` of a class that has it, as its fields are trees."""
    return params_class.without(cfg) if hasattr(params_class, "without") else params_class()


def with_raw(checked: Any, raw: Any) -> Any:
    """Note on a function what it runs after its checks. It notes itself, too, as a wrapper copies its attributes."""
    checked.raw = checked, raw
    return checked


def raw_of(fn: Any) -> Any:
    """The function that runs after the checks of a decorated one, for a program, which checks by itself; for a `bwd` derived from
    its halves, a pair of these. None for any other function."""
    checked, raw = getattr(fn, "raw", (None, None))
    return raw if checked is fn else None


def derived_bwd(name: str, dgrad: Any, wgrad: Any) -> Any:
    """The bwd that runs dgrad, then wgrad."""
    where = f"{name}_bwd"
    raw_dgrad, raw_wgrad, node_class, (_, params_class) = dgrad.__wrapped__, wgrad.__wrapped__, dgrad.opens, wgrad.opens
    first, others = classes_of(node_class)

    def bwd(residuals: Any, dy: Any, cfg: Any, *, into: Any = None) -> Any:
        if into is not None and type(into) is not params_class:
            _bad_type(where, "into", into, params_class)
        if any_autocast() and (found := unusual("bwd", where, bwd, residuals, dy, cfg, into=into)):
            return found[0]
        node = residuals
        if type(node) is Donated and node._node is not None:  # `take` written out; of a spent cell `open_node` raises
            node, residuals._node = node._node, None
        if not ((type(node) is first or type(node) in others) and node.cfg is cfg and node.fresh() and not node.needs.drop):
            node = open_node(where, node, class_by(where, node_class, cfg), cfg, DGRAD | WGRAD, dy)
        # the halves without their checks, which are done above
        dx, pending = (node.nothing(), None) if dy is None else raw_dgrad(node, dy, cfg)
        del node  # nobody else has one that was given away: its leaves are freed before the weight gradient
        # the checked wgrad answers a pending of None, the raw one does not
        if pending is None:
            return wgrad(None, cfg, into=into), dx
        return raw_wgrad(pending, cfg, into=into), dx

    return with_raw(_named(bwd, where, dgrad.__module__, _BWD_DOC.format(name=name)), (raw_dgrad, raw_wgrad))


def dgrad_as_bwd(name: str, dgrad: Any) -> Any:
    """The bwd of an op without params."""
    where = f"{name}_bwd"
    raw_dgrad, node_class = dgrad.__wrapped__, dgrad.opens
    first, others = classes_of(node_class)

    def bwd(residuals: Any, dy: Any, cfg: Any, *, into: Any = None) -> Any:
        if into is not None:
            _bad_type(where, "into", into, NoneType)
        if any_autocast() and (found := unusual("bwd", where, bwd, residuals, dy, cfg, into=into)):
            return found[0]
        node = residuals
        if type(node) is Donated and node._node is not None:  # `take` written out; of a spent cell `open_node` raises
            node, residuals._node = node._node, None
        if (
            (type(node) is first or type(node) in others)
            and node.cfg is cfg
            and dy is not None
            and node.fresh()
            and not node.needs.drop
        ):
            return None, raw_dgrad(node, dy, cfg)[0]
        node = open_node(where, node, class_by(where, node_class, cfg), cfg, DGRAD, dy)
        # as in `dgrad_of`: an IDLE node has nothing that a dx could be made of
        return None, node.nothing() if dy is None or node._marks is IDLE else raw_dgrad(node, dy, cfg)[0]

    return with_raw(_named(bwd, where, dgrad.__module__, _BWD_DOC.format(name=name)), (raw_dgrad, None))


_BWD_DOC = "The whole backward of `{name}_fwd`: `{name}_dgrad`, then `{name}_wgrad`. Returns `(dparams, dx)`."


def no_init(name: str, config: type) -> Any:
    """The init of an op without params."""

    def init(cfg: Any, *, key: Any = None, device: Any = None, dtype: Any = None) -> None:
        require_config(f"{name}_init", cfg, config)

    doc = f"`{name}` has no params: returns None. Raises `TypeError` for the config of another op."
    return _named(init, f"{name}_init", config.__module__, doc)


def no_wgrad(name: str, config: type) -> Any:
    """The wgrad of an op without params."""

    def wgrad(pending: Any, cfg: Any, *, into: Any = None) -> None:
        require_config(f"{name}_wgrad", cfg, config)
        for argument, value in (("pending", pending), ("into", into)):
            if value is not None:
                _bad_type(f"{name}_wgrad", argument, value, NoneType)

    wgrad.opens = None, NoneType  # type: ignore[attr-defined]
    return _named(wgrad, f"{name}_wgrad", config.__module__, f"`{name}` has no params: takes None and returns None.")


def _named(fn: Any, name: str, module: str, doc: str) -> Any:
    fn.__name__ = fn.__qualname__ = name
    # an op is pickled as a name of this module (`Op.__reduce__`)
    fn.__module__ = module
    fn.__doc__ = doc
    return fn


def _bad_type(where: str, name: str, got: Any, expected: type) -> None:
    wanted = "None (this op has no params)" if expected is NoneType else expected.__name__
    remedy = own_function(where, got) if name == "cfg" else ""
    fail(where, name, wanted, (describe(got) if got is not None else "None") + remedy, TypeError)
