"""The contract: what an operator is, and how its few equations become one.

An author writes `fwd`, `dgrad` and `wgrad` as plain functions under the decorators below, and a declaration per kept
field (`funcops.contract.schema`). `Op` derives the rest. The laws that every operator, combinator and fused op obeys, checked
by `funcops.testing.check_op`:

1. Split: `bwd` is `dgrad` then `wgrad`, bit for bit, into accumulators too.
2. Pure: no argument is written to, `into` and donated trees aside; the same call gives the same bits.
3. Mirror: dparams has the structure of params, dx the structure of x; None where no gradient was needed or none exists.
4. Frugal: residuals hold exactly what the backward reads under `needs`, inputs as the very same objects; pending what wgrad reads.
5. Right: gradients match autograd and finite differences in float64.
6. Two implementations, one meaning.
7. Traceable: no graph break, no host sync, no data-dependent control flow.
8. Edges: zero-size, non-contiguous, odd-sized inputs, and an x without leading dimensions.
9. Loud: a bad argument raises before anything runs, naming op, argument, what came and what was expected.
10. Guarded: residuals and pending that are mapped, rebuilt, edited, copied, saved or given away give the gradients of their
    forward, or raise: `StaleResidualError` after a write to what they alias, by name where they lack what a backward reads.
"""

from __future__ import annotations

import functools
import importlib
import pickle
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from funcops import random
from funcops.backend.source import exact
from funcops.contract.checking import asked, unusual, when_switched
from funcops.contract.checking import refuse_autocast as refuse_autocast
from funcops.contract.configs import OpConfig as OpConfig
from funcops.contract.configs import config as config
from funcops.contract.configs import require_config, with_hooks
from funcops.contract.configs import same_width as same_width
from funcops.contract.marks import IDLE
from funcops.contract.needs import Needs, check_needs
from funcops.contract.renamed import old_arguments, old_attributes, old_names
from funcops.contract.schema import Field, open_node
from funcops.contract.signatures import (
    Bwd,
    BwdOf,
    C_in,
    D_in,
    Dgrad,
    DgradOf,
    Forward,
    Fwd,
    G_in,
    Init,
    NoInit,
    P_any,
    P_in,
    R_in,
    R_out,
    Wgrad,
    WgradOf,
    Written,
    WrittenBwd,
    WrittenDgrad,
    WrittenWgrad,
    X_in,
    Y_out,
)
from funcops.errors import StaleResidualError, describe, fail, require_device, require_dtype

F = TypeVar("F", bound=Callable[..., Any])
ALL = Needs.ALL
NoneType = type(None)
any_autocast = torch._C._is_any_autocast_enabled
when_switched(lambda on: globals().update(any_autocast=asked if on else torch._C._is_any_autocast_enabled))


class Prefetch(NamedTuple):
    """The work that an op can begin before its turn: a `repeat` begins it one layer ahead. `begin(given, cfg)` of params or
    residuals returns an object with `ready()`, whose result the op's functions take in place of these. `bwd` and
    `wgrad(..., cfg, into)` return dparams still in flight, which `settle(dparams, into)` completes."""

    begin: Any
    bwd: Any
    wgrad: Any
    settle: Any


@old_attributes(cheap="recomputable", again="recompute", ahead="prefetch")
class Op(NamedTuple):
    """An operator as data: the functions that generic code takes. `keyed`: the last part of x is a random key. `recomputable`:
    "norm" or "elementwise" if y costs little more than reading x, so that a chain recomputes it in its backward instead of saving
    it; else "". `params`, `residuals` and `pending` are the classes of these trees; `residuals` is `Saved` if its class depends on
    the config; None if the tree is built from the parts', or is any pytree. `recompute(residuals, cfg)`, of a recomputable op:
    recomputes the bits of y from the fields saved with `needed_by=RECOMPUTE`. `lower`, of a combinator: writes its parts as calls
    (`funcops.program.lower`). `view`: whether y is x or a view of it. `products(pending, cfg, into=)`: what `wgrad(pending, cfg,
    into=)` would add to `into`, as products not yet run, which `batch_wgrads` joins with others by `join(products, how)` of their
    class; anything else is added at once. `prefetch`: what it can begin before its turn.

    Raises, of every op's functions, before any of them computes or changes anything: `TypeError` or `ValueError` for a config,
    params, residuals or a pending of another op, for an x or dy of another shape, dtype or device (`dy` must be like y), and
    for an `into` that is not like the gradients; `DonatedError` and `StaleResidualError` for residuals that were given away or
    changed.

    >>> from funcops import Op, scale
    >>> isinstance(scale, Op), scale.config.__name__, scale.fwd.__name__, scale.recomputable
    (True, 'ScaleConfig', 'scale_fwd', '')
    """

    name: str
    config: type
    init: Init
    fwd: Fwd
    bwd: Bwd
    dgrad: Dgrad
    wgrad: Wgrad
    keyed: bool = False
    recomputable: str = ""
    params: Any = NoneType
    residuals: Any = None
    pending: Any = None
    recompute: Any = None
    lower: Any = None
    view: bool = False
    products: Any = None
    prefetch: Any = None

    def __call__(self, *args: Any, **options: Any) -> NoReturn:
        wanted = f"called by its functions: {self.name}.fwd(params, x, cfg) -> (y, residuals)"
        raise TypeError(f"{self.name}: must be {wanted}, got a call of the op")

    def fields(self) -> dict[str, Field]:
        """The declared fields of its residuals, by name; none if their class depends on the config."""
        return getattr(self.residuals, "fields", {})

    def __repr__(self) -> str:
        return self.name

    def __copy__(self) -> Op:
        return self

    def __deepcopy__(self, memo: Any) -> Op:
        return self

    def __reduce__(self) -> Any:
        """Pickle by reference: a name in the module of its functions or config, or what made it from others (`made_by`)."""
        for module in dict.fromkeys([str(getattr(of, "__module__", "")) for of in (self.fwd, self.config, self.init)]):
            for name, value in list(vars(sys.modules.get(module, Op)).items()):
                if value is self:
                    return _op_at, (module, name)
        make, args = getattr(self.fwd, "made_by", (None, ()))
        if make is None or make(*args) != self:
            wanted = "a name of the module of its fwd, or made by remat or with_policy"
            fail("pickle", f"op {self.name!r}", wanted, "another op", pickle.PicklingError)
        return make, args


def _op_at(module: str, name: str) -> Any:
    """An op that is a name of a module."""
    return getattr(importlib.import_module(module), name)


@old_arguments(cheap="recomputable", again="recompute", ahead="prefetch")
def make_op(
    name: str,
    config: type,
    *,
    init: Any = None,
    fwd: Any,
    dgrad: Any,
    wgrad: Any = None,
    bwd: Any = None,
    keyed: bool = False,
    recomputable: str = "",
    recompute: Any = None,
    lower: Any = None,
    view: bool = False,
    products: Any = None,
    prefetch: Any = None,
) -> Op:
    """Build an `Op`, deriving `bwd`, for an op without params `init` and `wgrad`, and `products` if none can be joined. The
    functions carry the decorators `forward`, `dgrad_of`, `wgrad_of`, `recompute_of` and `bwd_of`, which name the classes of its
    trees; a given `bwd` must equal `dgrad` then `wgrad` bit for bit (the Split law checks it). `recomputable`: `"elementwise"` or
    `"norm"` if y costs little more than reading x, together with `recompute(residuals, cfg)`, which recomputes it; `""` for any
    other op. The other arguments are fields of `Op`.

    Raises `ValueError` for another `recomputable`, for one of these two without the other, and for a `wgrad` without `init`."""
    if recomputable not in ("", "elementwise", "norm"):
        fail(f"make_op {name!r}", "recomputable", '"elementwise", "norm" or ""', repr(recomputable))
    if bool(recomputable) != (recompute is not None):
        fail(f"make_op {name!r}", "recomputable", "given together with recompute(residuals, cfg)", repr(recomputable))
    if wgrad is not None and init is None:
        fail(f"make_op {name!r}", "init", "given together with wgrad: a combinator asks it which params there are", None)
    name = exact(name)
    config, init = with_hooks(config), init or _no_params(name, config)
    if wgrad is None:
        dgrad.alone = True  # it computes only dx: if that is not needed, nothing
        wgrad, bwd = _no_wgrad(name, config), bwd or _dgrad_as_bwd(name, dgrad)
    pending, params = getattr(wgrad, "opens", (None, None))
    bwd = bwd or _derived_bwd(name, dgrad, wgrad)
    products = _products(wgrad, products)
    trees = params, getattr(dgrad, "opens", None), pending
    return Op(name, config, init, fwd, bwd, dgrad, wgrad, keyed, recomputable, *trees, recompute, lower, view, products, prefetch)


def no_params(
    op: Op, dgrad: DgradOf[R_in, D_in, C_in, tuple[Y_out, None]]
) -> tuple[NoInit[C_in], BwdOf[R_in, D_in, C_in, None, Y_out], WgradOf[None, C_in, None]]:
    """The `init`, `bwd` and `wgrad` that `make_op` derives for an op without params, with the types of its dgrad."""
    return op.init, op.bwd, op.wgrad


def both_halves(
    op: Op, dgrad: DgradOf[R_in, D_in, C_in, tuple[Y_out, Any]], wgrad: WgradOf[Any, C_in, P_any]
) -> BwdOf[R_in, D_in, C_in, P_any, Y_out]:
    """The `bwd` that `make_op` derives, with the types of its halves."""
    return op.bwd


def wrap(op: Op, made_by: tuple[Callable[..., Op], tuple[Any, ...]], *, fwd: Any, **changes: Any) -> Op:
    """An op made from another, with functions of its own: one call of a program, whose y is recomputed only if told how. `made_by`:
    the function and arguments that make it, by which it is pickled."""
    fwd.made_by = made_by
    if "wgrad" in changes:
        changes.setdefault("products", _products(changes["wgrad"], None))
    return op._replace(**{"fwd": fwd, "recompute": None, "lower": None, "prefetch": None, **changes})


def forward(
    config: type, params_class: type = NoneType
) -> Callable[[Written[P_in, X_in, C_in, Y_out, R_out]], Forward[P_in, X_in, C_in, Y_out, R_out]]:
    """Decorator of a `fwd`: checks the types of cfg, params and needs, then runs it. The new function raises `TypeError` if one has
    another type, `ValueError` if `needs` names a path that does not exist, `RuntimeError` under autocast."""

    def decorate(fn: Any) -> Any:
        where = fn.__name__

        @functools.wraps(fn)
        def fwd(params: Any, x: Any, cfg: Any, *, needs: Needs = ALL) -> Any:
            if type(cfg) is not config:
                _bad_type(where, "cfg", cfg, config)
            if type(params) is not params_class:
                _bad_type(where, "params", params, params_class)
            if any_autocast() and (found := unusual("fwd", where, fwd, params, x, cfg, needs=needs)):
                return found[0]
            if needs is not ALL:
                check_needs(where, needs, params, x)
            return fn(params, x, cfg, needs=needs)

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
            if key is not None:
                random.check_key(where, key)
            return fn(cfg, key=key, device=device, dtype=dtype)

        return init

    return decorate


def dgrad_of(node_class: Any) -> Callable[[WrittenDgrad[R_in, D_in, C_in, Y_out]], DgradOf[R_in, D_in, C_in, Y_out]]:
    """Decorator of a `dgrad` (or a `bwd` override): opens the residuals (donated or not), checks class, config and
    staleness, and answers a dy of None, which means zero, with gradients of None."""

    def decorate(fn: Any) -> Any:
        where = fn.__name__

        @functools.wraps(fn)
        def dgrad(residuals: Any, dy: Any, cfg: Any) -> Any:
            if any_autocast() and (found := unusual("dgrad", where, dgrad, residuals, dy, cfg)):
                return found[0]
            node = residuals
            if type(node) is node_class and node.cfg is cfg and dy is not None and node.fresh():
                return fn(node, dy, cfg)
            node = open_node(where, node, node_class, cfg)
            nothing = dy is None or (dgrad.alone and node._marks is IDLE)  # type: ignore[attr-defined]
            result = (node.nothing(), None) if nothing else fn(node, dy, cfg)
            if node is not residuals:
                node.empty()
            return result

        dgrad.opens, dgrad.alone = node_class, False  # type: ignore[attr-defined]
        return with_raw(dgrad, fn)

    return decorate


def recompute_of(node_class: Any) -> Callable[[F], F]:
    """Decorator of a `recompute`: checks the class, config and staleness of the residuals, which it does not change. The new
    function raises `StaleResidualError` after a write to what they alias, `TypeError` or `ValueError` for another op's or
    config's."""

    def decorate(fn: Any) -> Any:
        where = fn.__name__

        @functools.wraps(fn)
        def recompute(residuals: Any, cfg: Any) -> Any:
            if not (type(residuals) is node_class and residuals.cfg is cfg and residuals.fresh()):
                try:
                    open_node(where, residuals, node_class, cfg)
                except StaleResidualError as error:
                    raise StaleResidualError(f"{error}; or pass recompute=False to the chain, so that this y is kept") from None
            return fn(residuals, cfg)

        return with_raw(recompute, fn)

    return decorate


def bwd_of(
    node_class: Any, params_class: type
) -> Callable[[WrittenBwd[R_in, D_in, C_in, P_any, Y_out]], BwdOf[R_in, D_in, C_in, P_any, Y_out]]:
    """Decorator of a whole `bwd` that is written out: as `dgrad_of`, with the answer for parameters too."""

    def decorate(fn: Any) -> Any:
        where = fn.__name__

        @functools.wraps(fn)
        def bwd(residuals: Any, dy: Any, cfg: Any, *, into: Any = None) -> Any:
            if into is not None and type(into) is not params_class:
                _bad_type(where, "into", into, params_class)
            if any_autocast() and (found := unusual("bwd", where, bwd, residuals, dy, cfg, into=into)):
                return found[0]
            node = residuals
            if type(node) is node_class and node.cfg is cfg and dy is not None and node.fresh():
                return fn(node, dy, cfg, into=into)
            node = open_node(where, node, node_class, cfg)
            nothing = no_gradients(params_class, cfg) if into is None else into
            result = (nothing, node.nothing()) if dy is None else fn(node, dy, cfg, into=into)
            if node is not residuals:
                node.empty()
            return result

        return with_raw(bwd, fn)

    return decorate


def wgrad_of(
    node_class: Any, params_class: type, name: str = ""
) -> Callable[[WrittenWgrad[G_in, C_in, P_any]], WgradOf[G_in, C_in, P_any]]:
    """Decorator of a `wgrad`: opens the pending, and answers a pending of None with a tree of None, or `into` as it is."""

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
            if type(node) is node_class and node.cfg is cfg and node.fresh():
                return fn(node, cfg, into=into)
            node = open_node(where, node, node_class, cfg)
            result = fn(node, cfg, into=into)
            if node is not pending:
                node.empty()
            return result

        wgrad.opens = node_class, params_class  # type: ignore[attr-defined]
        return wgrad

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


def _derived_bwd(name: str, dgrad: Any, wgrad: Any) -> Any:
    where = f"{name}_bwd"
    raw_dgrad, raw_wgrad, node_class, (_, params_class) = dgrad.__wrapped__, wgrad.__wrapped__, dgrad.opens, wgrad.opens

    def bwd(residuals: Any, dy: Any, cfg: Any, *, into: Any = None) -> Any:
        if into is not None and type(into) is not params_class:
            _bad_type(where, "into", into, params_class)
        if any_autocast() and (found := unusual("bwd", where, bwd, residuals, dy, cfg, into=into)):
            return found[0]
        node = residuals
        if not (type(node) is node_class and node.cfg is cfg and node.fresh()):
            node = open_node(where, node, node_class, cfg)
        dx, pending = (node.nothing(), None) if dy is None else raw_dgrad(node, dy, cfg)
        if node is not residuals:
            node.empty()
        if pending is None:
            return wgrad(None, cfg, into=into), dx
        return raw_wgrad(pending, cfg, into=into), dx

    return with_raw(_named(bwd, where, dgrad.__module__, _BWD_DOC.format(name=name)), (raw_dgrad, raw_wgrad))


def _dgrad_as_bwd(name: str, dgrad: Any) -> Any:
    """The bwd of an op without params."""
    where = f"{name}_bwd"
    raw_dgrad, node_class = dgrad.__wrapped__, dgrad.opens

    def bwd(residuals: Any, dy: Any, cfg: Any, *, into: Any = None) -> Any:
        if into is not None:
            _bad_type(where, "into", into, NoneType)
        if any_autocast() and (found := unusual("bwd", where, bwd, residuals, dy, cfg, into=into)):
            return found[0]
        node = residuals
        if type(node) is node_class and node.cfg is cfg and dy is not None and node.fresh():
            return None, raw_dgrad(node, dy, cfg)[0]
        node = open_node(where, node, node_class, cfg)
        dx = node.nothing() if dy is None or node._marks is IDLE else raw_dgrad(node, dy, cfg)[0]
        if node is not residuals:
            node.empty()
        return None, dx

    return with_raw(_named(bwd, where, dgrad.__module__, _BWD_DOC.format(name=name)), (raw_dgrad, None))


_BWD_DOC = "The whole backward of `{name}_fwd`: `{name}_dgrad`, then `{name}_wgrad`. Returns `(dparams, dx)`."


def _no_params(name: str, config: type) -> Any:
    def init(cfg: Any, *, key: Any = None, device: Any = None, dtype: Any = None) -> None:
        require_config(f"{name}_init", cfg, config)

    doc = f"`{name}` has no params: returns None. Raises `TypeError` for the config of another op."
    return _named(init, f"{name}_init", config.__module__, doc)


def _no_wgrad(name: str, config: type) -> Any:
    def wgrad(pending: Any, cfg: Any, *, into: Any = None) -> None:
        require_config(f"{name}_wgrad", cfg, config)
        for argument, value in (("pending", pending), ("into", into)):
            if value is not None:
                _bad_type(f"{name}_wgrad", argument, value, NoneType)

    wgrad.opens = None, NoneType  # type: ignore[attr-defined]
    return _named(wgrad, f"{name}_wgrad", config.__module__, f"`{name}` has no params: takes None and returns None.")


def _products(wgrad: Any, written: Any) -> Any:
    """The `products` of an op: as `written`, after the checks of its wgrad, which a combinator leaves to its parts."""
    if written is not None and not hasattr(wgrad, "opens"):
        return written
    checked = wgrad
    if written is not None:
        node_class, params_class = wgrad.opens
        checked = wgrad_of(node_class, params_class, name=wgrad.__name__)(written)

    def products(pending: Any, cfg: Any, *, into: Any) -> list[Any]:
        found = checked(pending, cfg, into=into)
        return [] if written is None or pending is None else found  # type: ignore[no-any-return]

    return products


def _named(fn: Any, name: str, module: str, doc: str) -> Any:
    fn.__name__ = fn.__qualname__ = name
    fn.__module__ = module
    fn.__doc__ = doc
    return fn


def _bad_type(where: str, name: str, got: Any, expected: type) -> None:
    wanted = "None (this op has no params)" if expected is NoneType else expected.__name__
    fail(where, name, wanted, describe(got) if got is not None else "None", TypeError)


if not TYPE_CHECKING:  # a checker would take every name for one of the module's
    __getattr__ = old_names(__name__, Ahead="Prefetch", again_of="recompute_of")
