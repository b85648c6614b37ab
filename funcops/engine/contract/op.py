"""The contract: what an operator is, and how its few equations become one.

An author writes `fwd`, `dgrad` and `wgrad` as plain functions under decorators (`engine.contract.functions`), and a declaration
per kept field (`funcops.engine.contract.schema`). `make_op` derives the rest. The laws that every operator, combinator and fused op
obeys, checked by `funcops.testing.check_op`:

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
11. Invariant: in the mode of `funcops.invariant` y and dx of a row have the same bits beside any others; or the op says why not.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pickle
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn

from funcops.engine.backend.source import exact
from funcops.engine.contract.by_config import ByConfig as ByConfig
from funcops.engine.contract.by_config import class_by, classes_of
from funcops.engine.contract.checking import refuse_autocast as refuse_autocast
from funcops.engine.contract.configs import OpConfig as OpConfig
from funcops.engine.contract.configs import config as config
from funcops.engine.contract.configs import same_width as same_width
from funcops.engine.contract.functions import ALL as ALL
from funcops.engine.contract.functions import F, derived_bwd, dgrad_as_bwd, no_init, no_wgrad
from funcops.engine.contract.functions import NoneType as NoneType
from funcops.engine.contract.functions import bwd_of as bwd_of
from funcops.engine.contract.functions import dgrad_of as dgrad_of
from funcops.engine.contract.functions import forward as forward
from funcops.engine.contract.functions import init_of as init_of
from funcops.engine.contract.functions import no_gradients as no_gradients
from funcops.engine.contract.functions import raw_of as raw_of
from funcops.engine.contract.functions import recompute_of as recompute_of
from funcops.engine.contract.functions import wgrad_of as wgrad_of
from funcops.engine.contract.functions import with_raw as with_raw
from funcops.engine.contract.schema import Field
from funcops.engine.contract.signatures import (
    Bwd,
    BwdOf,
    C,
    C_in,
    D_in,
    Dgrad,
    DgradOf,
    Forward,
    Fwd,
    Init,
    NoInit,
    P,
    P_any,
    R,
    R_in,
    Wgrad,
    WgradOf,
    X,
    Y,
    Y_out,
)
from funcops.engine.errors import describe, fail, require, require_type
from funcops.engine.trees import FIELDS

__all__ = ["ALL", "Op", "OpConfig", "Prefetch", "TypedOp", "both_halves", "bwd_of", "config", "dgrad_of", "forward"]
__all__ += ["init_of", "make_op", "no_params", "raw_of", "recompute_of", "refuse_autocast", "same_width", "wgrad_of"]
__all__ += ["wrap"]


ANNOTATION = re.compile(r"(: |-> )'([^']*)'")  # which is a string, as the package's annotations are
FUNCTIONS = ("init", "fwd", "bwd", "dgrad", "wgrad")


class PageOf(str):
    """The `__doc__` of a class whose instances have texts of their own: itself of the class, `page(instance)` of an instance."""

    page: Any

    def __new__(cls, text: str, page: Any) -> PageOf:
        made = super().__new__(cls, text)
        made.page = page
        return made

    def __get__(self, instance: Any, owner: type) -> str:
        return str(self) if instance is None else self.page(instance)


def page(op: Any) -> str:
    """The docstring of the file of an op, its config, its functions with their signatures, and how to take gradients."""
    home = sys.modules.get(str(getattr(op.fwd, "__module__", "")))
    # an op made from another, as by remat, has functions in a file that is not about it
    found = inspect.getdoc(home) if home is not None and getattr(home, op.name, None) is op else None
    lines = [found or f"The op {op.name}.", "", _call(op.config.__name__, op.config)]
    if about := inspect.getdoc(op.config):
        lines += ["    " + line for line in about.splitlines()]
    lines.append("")
    for part in FUNCTIONS:
        function = getattr(op, part)
        about = (inspect.getdoc(function) or "").partition("\n\n")[0]
        lines += [_call(f"{op.name}.{part}", function), *("    " + line for line in about.splitlines()), ""]
    lines += [f"Gradients in one call: funcops.vjp({op.name}, params, x, cfg) and funcops.value_and_grad({op.name}).", ""]
    return "\n".join(lines)


def _call(name: str, function: Any) -> str:
    try:
        return name + ANNOTATION.sub(r"\1\2", str(inspect.signature(function)))
    except (TypeError, ValueError):  # Python may know no signature of what is written in C
        return f"{name}(...)"


class Prefetch(NamedTuple):
    """The work that an op can begin before its turn: a `repeat` begins it one layer ahead. `begin(given, cfg)` of params or
    residuals returns an object with `ready()`, whose result the op's functions take in place of these. `bwd` and
    `wgrad(..., cfg, into)` return dparams still in flight, which `settle(dparams, into)` completes. `advance(dparams, into)`, if
    there is a second communication to start in between, returns what `settle` takes instead."""

    begin: Any
    bwd: Any
    wgrad: Any
    settle: Any
    advance: Any = None

    @property
    def late(self) -> tuple[str, ...]:
        """The kinds of rows that take dparams in flight to the end, in order."""
        return ("settle",) if self.advance is None else ("advance", "settle")


class Op(NamedTuple):
    """An operator as data: the functions that generic code takes. `takes_key`: whether the last part of x is a random key; a
    function of the config if it depends on that (`keyed_by(cfg)`). `recomputable`: "norm" or "elementwise" if y costs little more
    than reading x, so that a chain recomputes it in its backward instead of saving it; else "". `params`, `keeps` and `pending` are
    the classes of params, residuals and pending. `keeps` is `ByConfig` if the config chooses among several (`residuals_of(cfg)`),
    `Saved` if each config has a class of its own, and None if the tree is built from the parts', or is any pytree.
    `recompute(residuals, cfg)`, of a recomputable op: recomputes the bits of y from the fields saved with `needed_by=RECOMPUTE`.
    `lower`, of a combinator: writes its parts as calls (`funcops.engine.program.lower`). `view`: whether y is x or a view of it.
    `products(pending, cfg, into=)`: what `wgrad(pending, cfg, into=)` would add to `into`, as products not yet run, which
    `batch_wgrads` joins with others by `join(products, how)` of their class; anything else is added at once. `prefetch`: what it
    can begin before its turn. `layer`: of a linear layer, how rules of fusion run it (`library.ops.linear_layer`). `pausing`: its
    functions as generators that yield while communication is in flight (`engine.contract.pausing`), for `interleave`. `draws`, of
    an op whose forward may draw from torch's generator: `draws(cfg)` says by which operator it was seen to, or "". `named`, of an
    op that keeps tensors by names which a trace gave them, is an object: its `known(cfg)` has the paths of all that its last
    forward could have kept, and `kept(cfg)` of what it kept, with the actions; `under(path, policy)` makes the op that follows the
    policy's rules, where `path` is its own; for `fit`, `plans(x, cfg, needs, budget, flops)` has policies, the bytes that each
    keeps for inputs like x, and its extra operations as a share of all, which `flops(operator, args, kwargs, result)` counts.
    `traces()`, of an op that traces a function, lists the traces that it holds, the last used last; `state()` of that object is
    another text after a change of what they depend on beside their arguments. `logs`: functions that compute one number each, by
    their names, of the forward, `(params, x, y, cfg)`, or of the backward, `(residuals, dy, cfg)`; `funcops.logs` asks for them.
    `mixes`: by what the y or dx of a row depends on other rows that come with it, "" if by nothing but the order in which its
    kernels sum, or a function of the config that says so; None if the author has not said; `funcops.invariant` asks for it.
    `again(call, needs, rows)`, of an op that a policy made: for each field that its residuals leave out, its name, the call of the
    program whose forward runs again for it, and the index in that call's y, or None for the whole.

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
    takes_key: bool | Callable[[Any], bool] = False
    recomputable: str = ""
    params: Any = NoneType
    keeps: Any = None
    pending: Any = None
    recompute: Any = None
    lower: Any = None
    view: bool = False
    products: Any = None
    prefetch: Any = None
    layer: Any = None
    pausing: Any = None
    draws: Any = None
    named: Any = None
    traces: Any = None
    logs: tuple[Callable[..., Any], ...] = ()
    mixes: str | Callable[[Any], str] | None = None
    again: Any = None

    def __call__(self, *args: Any, **options: Any) -> NoReturn:
        wanted = f"called by its functions: {self.name}.fwd(params, x, cfg) -> (y, residuals)"
        raise TypeError(f"{self.name}: must be {wanted}, got a call of the op")

    def residuals_of(self, cfg: Any) -> Any:
        """The class of its residuals under a config; see `keeps`. Raises `TypeError` for a config of another op."""
        return class_by(self.name, self.keeps, cfg)

    def fields(self, cfg: Any) -> dict[str, Field]:
        """The declared fields of its residuals under a config, by name; none if the op declares no class of them."""
        return getattr(self.residuals_of(cfg), "fields", {})

    def keyed_by(self, cfg: Any) -> bool:
        """Whether the last part of x is a random key under a config."""
        return self.takes_key(cfg) if callable(self.takes_key) else self.takes_key

    def __repr__(self) -> str:
        return self.name

    def __copy__(self) -> Op:
        # rules and rewrites compare ops with `is`, so a copied config must hold the same op
        return self

    def __deepcopy__(self, memo: Any) -> Op:
        return self

    def __reduce__(self) -> Any:
        """Pickle by reference: a name in the module of its functions or config, or what made it from others (`made_by`)."""
        for module in dict.fromkeys([str(getattr(of, "__module__", "")) for of in (self.fwd, self.config, self.init)]):
            # a list, as an import in another thread may add names meanwhile
            for name, value in list(vars(sys.modules.get(module, Op)).items()):
                if value is self:
                    return _op_at, (module, name)
        make, args = getattr(self.fwd, "made_by", (None, ()))
        # `op._replace(...)` keeps the fwd and so its `made_by`, which makes the op from before the change
        if make is None or make(*args) != self:
            wanted = "a name of the module of its fwd, or made by remat or with_policy"
            fail("pickle", f"op {self.name!r}", wanted, "another op", pickle.PicklingError)
        return make, args


# what `require_type` adds to an error for a function where an op is wanted; set here, as a body of a named tuple takes fields alone
Op.of_a_function = (  # type: ignore[attr-defined]
    ": op_from_torch(fn) makes one of fn(params, x, cfg) -> y, op_from_module(module, x) of a module"
)


Op.__doc__ = PageOf(inspect.getdoc(Op) or "", page)  # type: ignore[assignment]  # `help(linear)` shows linear's page


def _op_at(module: str, name: str) -> Any:
    """An op that is a name of a module."""
    return getattr(importlib.import_module(module), name)


if TYPE_CHECKING:

    class TypedOp(Op, Generic[P, X, C, Y, R]):
        """An op for an editor, which marks swapped arguments of `linear.fwd`, as of `linear_fwd`."""

        @property
        def fwd(self) -> Forward[P, X, C, Y, R]: ...  # type: ignore[override]


def make_op(
    name: str,
    config: type,
    *,
    init: Any = None,
    fwd: Forward[P, X, C, Y, R],
    dgrad: Any,
    wgrad: Any = None,
    bwd: Any = None,
    keyed: bool | Callable[[Any], bool] = False,
    recomputable: str = "",
    recompute: Any = None,
    lower: Any = None,
    view: bool = False,
    products: Any = None,
    prefetch: Any = None,
    layer: Any = None,
    pausing: Any = None,
    logs: tuple[Callable[..., Any], ...] = (),
    mixes: str | Callable[[Any], str] | None = None,
) -> TypedOp[P, X, C, Y, R]:
    """Build an `Op`, deriving `bwd`, for an op without params `init` and `wgrad`, and `products` if none can be joined. The
    functions carry the decorators `forward`, `dgrad_of`, `wgrad_of`, `recompute_of` and `bwd_of`, which name the classes of its
    trees; a plain `recompute` gets the checks of its decorator here, and without `bwd` so does a plain `fwd`. A given `bwd` must
    equal `dgrad` then `wgrad` bit for bit (the Split law checks it). `keyed`: whether the last part of x
    is a random key, or a function of the config that says so. `recomputable`: `"elementwise"` or `"norm"` if y costs little more
    than reading x, together with `recompute(residuals, cfg)`, which recomputes it; `""` for any other op. The other arguments are
    fields of `Op`.

    Raises `ValueError` for another `recomputable`, for one of these two without the other, for a `wgrad` without `init`, and for a
    path in a declaration that leads to no leaf; `TypeError` for a function without the decorator that it needs."""
    where, said, known = f"make_op {name!r}", repr(recomputable), isinstance(config, type)
    require(
        known and issubclass(config, OpConfig),
        where,
        "config",
        "a subclass of OpConfig, whose methods are the defaults",
        config.__name__ if known else describe(config),
        TypeError,
    )
    require(recomputable in ("", "elementwise", "norm"), where, "recomputable", '"elementwise", "norm" or ""', said)
    require(
        bool(recomputable) == (recompute is not None), where, "recomputable", "given together with recompute(residuals, cfg)", said
    )
    require(
        wgrad is None or init is not None,
        where,
        "init",
        "given together with wgrad: a combinator asks it which params there are",
        None,
    )
    _check_decorated(name, fwd, dgrad, wgrad, bwd, recompute)
    # names get into source and paths as plain text
    name, written = exact(name), bwd
    init = init or no_init(name, config)
    if wgrad is None:
        dgrad.alone = True  # it computes only dx: if that is not needed, nothing
        wgrad, bwd = no_wgrad(name, config), bwd or dgrad_as_bwd(name, dgrad)
    pending, params = getattr(wgrad, "opens", (None, None))
    bwd = bwd or derived_bwd(name, dgrad, wgrad)
    products = _products(wgrad, products)
    trees = params, getattr(dgrad, "opens", None), pending
    _check_paths(name, *trees)
    if written is None and raw_of(fwd) is None:
        fwd = forward(config, params, f"{name}_fwd")(fwd)  # type: ignore[arg-type]
    if recompute is not None and raw_of(recompute) is None:  # unchecked, it would read what was written to since the forward
        recompute = recompute_of(trees[1], f"{name}_recompute")(recompute)
    how = recompute, lower, view, products, prefetch, layer, pausing
    made: Any = Op(name, config, init, fwd, bwd, dgrad, wgrad, keyed, recomputable, *trees, *how, logs=logs, mixes=mixes)  # type: ignore[arg-type]
    return made  # type: ignore[no-any-return]


def _check_decorated(name: str, fwd: Any, dgrad: Any, wgrad: Any, bwd: Any, recompute: Any) -> None:
    """Raise `TypeError` for a function without the decorator that a derived one needs, and for params without a wgrad."""
    where, instead = f"make_op {name!r}", ", or given together with bwd"
    # only a derived bwd asks the halves what they open
    for given, decorator in () if bwd is not None else ((dgrad, "dgrad_of(Residuals)"), (wgrad, "wgrad_of(Pending, Params)")):
        require(
            given is None or hasattr(given, "opens"),
            where,
            decorator.partition("_")[0],
            f"decorated with @{decorator}{instead}",
            "a plain function",
            TypeError,
        )
    require(
        recompute is None or raw_of(recompute) is not None or hasattr(dgrad, "opens"),
        where,
        "recompute",
        "decorated with @recompute_of(Residuals)",
        "a plain function",
        TypeError,
    )
    takes = getattr(fwd, "takes", None)
    if wgrad is None and isinstance(takes, type) and takes is not NoneType:
        fail(where, "wgrad", f"given, as fwd takes params ({takes.__name__})", "None", TypeError)


def _check_paths(name: str, params: Any, keeps: Any, pending: Any) -> None:
    """Raise `ValueError` for a declared field with a path that leads to no leaf of the params, or to no field of the residuals."""
    nodes = [node for node in ((classes_of(keeps)[0], *classes_of(keeps)[1]) if keeps else ()) if hasattr(node, "fields")]
    leaves = {"params": FIELDS[params][0]} if params in FIELDS else {}
    leaves |= {"residuals": tuple(dict.fromkeys(each for node in nodes for each in node.fields))} if nodes else {}
    said = {"params": f"a leaf of {getattr(params, '__name__', '')}", "residuals": "a field of the residuals"}
    for node in (*nodes, *([pending] if hasattr(pending, "fields") else ())):
        for field, declared in node.fields.items():
            for argument, path in (("alias", declared.alias or ""), *(("of", each) for each in declared.of)):
                side, _, rest = path.partition(".")
                # the first name alone: below it may be a tree, whose leaves no class declares
                if rest and side in leaves and rest.partition(".")[0] not in leaves[side]:
                    where, known = f"make_op {name!r}, {node.__name__}.{field}", " or ".join(leaves[side])
                    fail(where, argument, f"{said[side]}, {known}", repr(path))


def _products(wgrad: Any, written: Any) -> Any:
    """The `products` of an op: as `written`, after the checks of its wgrad, which a combinator leaves to its parts."""
    if written is not None and not hasattr(wgrad, "opens"):
        return written
    checked = wgrad
    if written is not None:
        node_class, params_class = wgrad.opens
        # it opens the same pending as the wgrad does, so it needs the same checks
        checked = wgrad_of(node_class, params_class, name=wgrad.__name__)(written)

    def products(pending: Any, cfg: Any, *, into: Any) -> list[Any]:
        found = checked(pending, cfg, into=into)
        # if none was written, `checked` is the wgrad, which has added to `into` already
        return [] if written is None or pending is None else found  # type: ignore[no-any-return]

    return products


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
        # the products of the other op would go past the new wgrad
        changes.setdefault("products", _products(changes["wgrad"], None))
    # each of these runs the op inside, past the new functions; a log of the backward reads residuals of that op
    dropped: Any = dict.fromkeys(("recompute", "lower", "prefetch", "layer", "pausing", "named", "again"))
    dropped["logs"] = tuple([log for log in op.logs if log.__code__.co_varnames[:1] == ("params",)])
    return op._replace(**{"fwd": fwd, **dropped, **changes})


def takes_op(fn: F) -> F:
    """`fn` with a check that its first argument is an op, before Python misses others: `jax.vjp(fn, x)` has fewer than `vjp`."""

    @functools.wraps(fn)
    def checked(op: Any, *args: Any, **options: Any) -> Any:
        require_type(fn.__name__, "op", op, Op)
        return fn(op, *args, **options)

    return checked  # type: ignore[return-value]
