"""logged: an op that also returns named values of its forward and of its backward.

    y = body(x)        dx, dparams: the body's        d(logs) = a row of (1, values)

Its params are the body's with one more leaf, `logs` [runs, 1 + n], whose content is never read. What the op returns as the gradient
of that leaf are the n values: so they leave a backward where gradients do, by path, through every combinator, schedule, graph and
adapter. Column 0 counts the runs in a row. A backward without accumulators fills the first row; one with `into` adds to the first
row without a run, or to the last. Rows that hold several runs hold their sums, of which `split_logs` returns the means.

Values that every op has, each [] in float32 (float64 for float64), over all float tensors of a tree (of `WithExtras`, its main
value): the norms `x_norm`, `y_norm`, `dy_norm`, `dx_norm`, the largest sizes `x_amax`, `y_amax`, `dy_amax`, `dx_amax`, and
`dw_norm`, over the gradients of all params of this run. A dy or dx of None is zero. Others are the
functions of `Op.logs`. Kept beside the body's residuals: the values of the forward.

>>> import torch
>>> from funcops import LinearConfig, linear, random
>>> from funcops.logs import LoggedConfig, logged
>>> cfg = LoggedConfig(linear, LinearConfig(2, 2), ("x_norm", "dy_norm"))
>>> params = logged.init(cfg, key=random.key(0))
>>> y, residuals = logged.fwd(params, torch.tensor([[3.0, 4.0]]), cfg)
>>> dparams, dx = logged.bwd(residuals, torch.tensor([[0.0, 2.0]]), cfg)
>>> dparams.logs, dparams.bias
(tensor([[1., 5., 2.]]), tensor([0., 2.]))
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from funcops.engine.backend import wide
from funcops.engine.compose.step import AroundBody, check_body, note
from funcops.engine.contract.configs import require_config
from funcops.engine.contract.needs import Mask, Needs, check_needs
from funcops.engine.contract.op import Op, config, init_of, make_op
from funcops.engine.contract.schema import WGRAD, Donated, Pending, Residuals, open_node, saved
from funcops.engine.contract.walk import nested as parts_of
from funcops.engine.errors import FLOATS, check, describe, fail, join_path, require, require_count
from funcops.engine.program.accumulator_checks import check_into_tree
from funcops.engine.program.values import abstract_params
from funcops.engine.residuals.donate import donate
from funcops.engine.residuals.nested import nested
from funcops.engine.trees import (
    FIELDS,
    WithExtras,
    at,
    leaf,
    leaves,
    put,
    stands_for_one,
    tensors,
    tree,
    tree_map,
    tree_map_tensors,
)

__all__ = ["LoggedConfig", "LoggedPending", "LoggedResiduals", "Sink"]
__all__ += ["logged", "logged_bwd", "logged_dgrad", "logged_fwd", "logged_init", "logged_wgrad"]

FORWARD, BACKWARD = ("x_norm", "y_norm", "x_amax", "y_amax"), ("dy_norm", "dx_norm", "dy_amax", "dx_amax")
OF_DX, WEIGHTS = ("dx_norm", "dx_amax"), ("dw_norm",)
OF_FORWARD, OF_BACKWARD = ("params", "x", "y", "cfg"), ("residuals", "dy", "cfg")  # the parameters of a function of `Op.logs`
LEAF = "logs"


@tree
class Sink:
    """The params of a logged op whose body has none."""

    logs: Tensor = leaf("[runs, 1 + n]")


NoneType = type(None)
_holders: dict[type, type] = {NoneType: Sink, dict: dict}


def holder_of(kind: type) -> type | None:
    """The class of params of this class with one more leaf, `logs`; None if they cannot have one."""
    if kind not in _holders and kind in FIELDS and LEAF not in FIELDS[kind][0]:
        doc = f"{kind.__name__}, and the leaf `logs`."
        body = {"__annotations__": {LEAF: Any}, LEAF: leaf("[runs, 1 + n]"), "__doc__": doc, "__module__": __name__}
        _holders[kind] = tree(type(f"Logged{kind.__name__}", (kind,), body))
    return _holders.get(kind)


@config
class LoggedConfig(AroundBody):
    """The body (an op and its config), the names of its `logs`, and the number of `runs` whose values are kept apart, such as the
    microbatches of a step. Raises `ValueError` for names that the op does not have, and for a body whose params cannot have one
    more leaf."""

    op: Op = field(kw_only=False)
    cfg: Any = field(kw_only=False)
    logs: tuple[str, ...] = field(kw_only=False)
    runs: int = 1

    def __post_init__(self) -> None:
        where = "LoggedConfig"
        check_body(where, self.op, self.cfg)
        require_count(where, runs=self.runs)
        own = own_logs(self.op)
        known = (*FORWARD, *BACKWARD, *WEIGHTS, *own)
        right = isinstance(self.logs, tuple) and bool(self.logs) and set(self.logs) <= set(known)
        require(right, where, LEAF, f"names among {', '.join(known)}", repr(self.logs))
        forward = [name for name in self.logs if name in FORWARD or own.get(name) == OF_FORWARD]
        backward = [name for name in self.logs if name in BACKWARD or own.get(name) == OF_BACKWARD]
        of_weights = [name for name in self.logs if name in WEIGHTS]
        note(self, forward=tuple(forward), backward=tuple(backward), order=(*forward, *backward, *of_weights))
        like = abstract_params(self.op, self.cfg)
        kind = type(like)
        clash = kind is dict and LEAF in like
        holder = None if clash else holder_of(kind)
        wanted = f"one whose params are a dict, a node with named fields or None, without a part {LEAF!r}"
        require(holder is not None, where, "op", wanted, f"{self.op.name}, {describe(like)}")
        note(self, kind=kind, holder=holder, functions={fn.__name__: fn for fn in self.op.logs})
        inner = [join_path(path, LEAF) for place in places(self.cfg) for path in place.paths]
        note(self, inner=tuple(inner))
        note(self, extras=self.cfg.extras, outputs=self.cfg.outputs, keys=self.cfg.keys, takes_also=self.cfg.takes_also)

    forward: ClassVar[tuple[str, ...]]  # the values that the forward computes
    backward: ClassVar[tuple[str, ...]]  # the values that the first half of a backward computes
    order: ClassVar[tuple[str, ...]]  # all names, as the columns after the first
    kind: ClassVar[Any]  # the class of the body's params
    holder: ClassVar[Any]  # the class of these with the leaf
    functions: ClassVar[dict[str, Any]]  # of the op's own logs, by name
    inner: ClassVar[tuple[str, ...]]  # the leaves of the logged steps inside

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the leaf."""
        return self.runs, 1 + len(self.order)

    def abstract(self) -> Any:
        """See `funcops.engine.program.values.abstract_params`."""
        return holding(abstract_params(self.op, self.cfg), torch.empty(self.shape, device="meta"), self)

    def body_needs(self, needs: Needs) -> Needs:
        """The needs of the body: a log of dx needs dx."""
        params: Any = needs.params
        if isinstance(params, tuple):
            params = tuple([path for path in params if path != LEAF])
        x: Mask = needs.x
        if x is not True and needs.param(LEAF) and any([name in OF_DX for name in self.order]):
            x = (*(x or ()), "main") if self.extras else True
        return Needs(x=x, params=params)


class Place(NamedTuple):
    """A step with logs: its path in the config, its config, the paths of its params, one for each of `layers` of the repeats around
    it, and the numbers of layers in which its params are stacked."""

    key: str
    cfg: LoggedConfig
    paths: tuple[str, ...]
    layers: tuple[int, ...]
    stacked: tuple[int, ...]


def places(cfg: Any) -> Iterator[Place]:
    """The steps with logs, in the order of the forward."""
    for one, around in parts_of(cfg):
        if one.op is not logged:
            continue
        names: list[Any] = []
        layers, stacked = [], []
        for outer, inner in itertools.pairwise((*around, one)):
            name = inner.path[len(outer.path) :].lstrip(".")
            if outer.composite and outer.cfg.times is not None:
                if outer.cfg.stacked:
                    stacked.append(outer.cfg.times)
                    continue
                own = [str(each.layer) for each in outer.parts(layers=True) if (each.op, each.cfg) == (inner.op, inner.cfg)]
                layers.append(len(own))
                names.append(own)
            elif name:
                names.append([name])
        found = tuple([".".join(names) for names in itertools.product(*names)])
        yield Place(one.path, one.cfg, found, tuple(layers), tuple(stacked))


def own_logs(op: Op) -> dict[str, tuple[str, ...]]:
    """The names of an op's own logs, and the parameters of the functions that compute them. Raises `ValueError` for a function with
    other parameters, or with the name of a value that every op has."""
    found: dict[str, tuple[str, ...]] = {}
    for fn in op.logs:
        name, parameters = fn.__name__, tuple(inspect.signature(fn).parameters)
        where = f"op {op.name!r}, logs"
        wanted = f"a function of ({', '.join(OF_FORWARD)}) or of ({', '.join(OF_BACKWARD)})"
        require(parameters in (OF_FORWARD, OF_BACKWARD), where, name, wanted, f"({', '.join(parameters)})")
        require(name not in (*FORWARD, *BACKWARD, *WEIGHTS, *found), where, name, "a new name", repr(name))
        found[name] = parameters
    return found


def holding(params: Any, logs: Any, cfg: LoggedConfig) -> Any:
    """The body's params, or gradients, with the leaf."""
    if cfg.kind is NoneType:
        return Sink(logs)
    if cfg.kind is dict:
        return {**params, LEAF: logs}
    names, statics, _ = FIELDS[cfg.kind]
    values = {name: getattr(params, name) for name in (*names, *statics)}
    return cfg.holder(**values, logs=logs)


def taken(where: str, name: str, params: Any, cfg: LoggedConfig) -> tuple[Any, Any]:
    """The body's own params, or accumulators, and the leaf. Raises `TypeError` for a tree without the leaf."""
    if type(params) is not cfg.holder or (cfg.kind is dict and LEAF not in params):
        wanted = f"{'a dict' if cfg.kind is dict else cfg.holder.__name__} with the leaf {LEAF!r}, as logs_init makes it"
        fail(where, name, wanted, describe(params), TypeError)
    if cfg.kind is NoneType:
        return None, params.logs
    if cfg.kind is dict:
        return {key: value for key, value in params.items() if key != LEAF}, params[LEAF]
    names, statics, _ = FIELDS[cfg.kind]
    return cfg.kind(**{field: getattr(params, field) for field in (*names, *statics)}), params.logs


def floats(value: Any) -> list[Tensor]:
    """The float tensors of a value; of `WithExtras`, of its main value."""
    found = tensors(value.main if type(value) is WithExtras else value)
    return [t.detach() for t in found if t.is_floating_point()]


def norm(value: Any) -> Tensor | None:
    """sqrt(sum of v^2) over all float tensors: [], float32, or float64 if one of them is; None without any."""
    return _joined([torch.linalg.vector_norm(t, dtype=wide(t.dtype)) for t in floats(value)], torch.linalg.vector_norm)


def amax(value: Any) -> Tensor | None:
    """The largest |v| over all float tensors, 0 of one without elements, NaN if one is; None without any."""
    return _joined([t.abs().amax().to(wide(t.dtype)) if t.numel() else t.new_zeros(()) for t in floats(value)], torch.amax)


def _joined(found: list[Tensor], join: Callable[[Tensor], Tensor]) -> Tensor | None:
    if len(found) < 2:
        return found[0] if found else None
    dtype = torch.float64 if any([one.dtype is torch.float64 for one in found]) else torch.float32
    return join(torch.stack([one.to(dtype) for one in found]))


def _measured(name: str, **trees: Any) -> Tensor | None:
    """The value of that name, such as `x_norm`, of one of these trees."""
    what, _, how = name.partition("_")
    return (norm if how == "norm" else amax)(trees[what])


def dense_norm(dparams: Any, cfg: LoggedConfig) -> Tensor | None:
    """The norm of weight gradients; amaxes that travel beside a gradient do not count, nor do values of steps inside."""
    found = leaves(_without_inner(dparams, cfg), is_leaf=stands_for_one)
    return norm([node.value if stands_for_one(node) else node for node in found])


def _row(values: list[Tensor | None], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values [k] in one dtype; None is zero."""
    own = [torch.zeros((), device=device) if value is None else value.detach() for value in values]
    return torch.stack([value.to(wide(dtype)) for value in own]) if own else torch.zeros(0, dtype=wide(dtype), device=device)


def _declared(cfg: LoggedConfig, name: str, *args: Any) -> Tensor:
    """The value of one of the op's own logs. Raises unless it is one number."""
    value = cfg.functions[name](*args)
    check(f"{cfg.op.name}, log {name!r}", "its value", value, (), FLOATS)
    return value  # type: ignore[no-any-return]


class ForwardValues(Residuals, static=("dtype",)):
    """The values of a forward, and the dtype of the leaf."""

    values: Tensor = saved("[k]", needed_by=WGRAD)


class ValuesSoFar(Pending, static=("dtype",)):
    """The values of a forward and of the first half of its backward, and the dtype of the leaf."""

    values: Tensor = saved("[k]", needed_by=WGRAD)


LoggedResiduals, LoggedPending = nested("Logged", "a logged op: of its `body`, and the values as `logs`", __name__)


@init_of(LoggedConfig)
def logged_init(cfg: LoggedConfig, *, key: Any = None, device: Any = None, dtype: Any = None) -> Any:
    """The body's params, and zeros for the leaf, in float32, or in float64 for params in it."""
    params = cfg.op.init(cfg.cfg, key=key, device=device, dtype=dtype)
    return holding(params, zeros(params, cfg.shape, device, dtype), cfg)


def zeros(params: Any, shape: tuple[int, ...], device: Any = None, dtype: Any = None) -> Tensor:
    """A leaf of zeros, on the device of the first of the params, and as wide as `into` would be for them."""
    like = next((t for t in tensors(params) if t.is_floating_point()), None)
    device = like.device if device is None and like is not None else device
    dtype = dtype or (torch.float32 if like is None else like.dtype)
    return torch.zeros(shape, device=device, dtype=wide(dtype))


def logged_fwd(params: Any, x: Any, cfg: LoggedConfig, *, needs: Needs = Needs.ALL) -> tuple[Any, Any]:
    """The body's y. The values of the forward are computed only if a gradient of the leaf is needed. Raises `ValueError` for a log
    of an x, or dx, without a float tensor, `TypeError` for params without the leaf, and whatever the body raises."""
    require_config("logged_fwd", cfg, LoggedConfig)
    own, sink = taken("logged_fwd", "params", params, cfg)
    check("logged_fwd", "params.logs", sink, cfg.shape, FLOATS)
    if needs is not Needs.ALL:
        check_needs("logged_fwd", needs, params, x)
    wanted = needs.param(LEAF)
    if wanted:
        for name in ("x_norm", "x_amax", *OF_DX):
            if name in cfg.order and not floats(x):
                fail("logged_fwd", LEAF, f"without {name!r}, as x has no float tensor", describe(x))
    y, residuals = cfg.op.fwd(own, x, cfg.cfg, needs=cfg.body_needs(needs))
    if not needs.any:
        return y, None
    values: list[Tensor | None] = []
    for name in cfg.forward if wanted else ():
        value = _measured(name, x=x, y=y) if name in FORWARD else _declared(cfg, name, own, x, y, cfg.cfg)
        values.append(value)
    row = _row(values, sink.dtype, sink.device)
    own_values = ForwardValues.keep(cfg, Needs.ALL, values=row, dtype=sink.dtype) if wanted else None
    return y, LoggedResiduals({"body": residuals, LEAF: own_values}, cfg=cfg, needs=needs)


def _first_half(node: Any, dy: Any, cfg: LoggedConfig, run: Any) -> tuple[Any, Any, Any]:
    """Run `run(residuals)` of the body, which returns its dx first. Returns dx, as the needs ask for it, the values so far, and
    what else was returned."""
    kept, of_forward = _part(node, "body"), _part(node, LEAF)
    if of_forward is None:
        dx, found = run(kept)
        return _asked(dx, node.needs), None, found
    before = open_node("logged_dgrad", of_forward, ForwardValues, cfg)
    inner = kept._node if type(kept) is Donated else kept
    # before the body's backward, which may empty its residuals
    values: dict[str, Tensor | None] = {
        name: _declared(cfg, name, inner, dy, cfg.cfg) for name in cfg.backward if name not in BACKWARD
    }
    values |= {name: _measured(name, dy=dy) for name in cfg.backward if name in BACKWARD and name not in OF_DX}
    dx, found = run(kept)
    values |= {name: _measured(name, dx=dx) for name in cfg.backward if name in OF_DX}
    own = _row([values[name] for name in cfg.backward], before.dtype, before.values.device)
    row = torch.cat((before.values, own))
    return _asked(dx, node.needs), ValuesSoFar.keep(cfg, Needs.ALL, values=row, dtype=before.dtype), found


def _asked(dx: Any, needs: Needs) -> Any:
    """dx without the parts that only a log needed."""
    if needs.x is True or dx is None:
        return dx
    if type(dx) is WithExtras:
        return dx if needs.input("main") else WithExtras(None, dx.extras)
    if isinstance(dx, tuple):
        parts = [d if needs.input(i) else None for i, d in enumerate(dx)]
        return type(dx)._make(parts) if hasattr(dx, "_make") else tuple(parts)
    return dx if needs.x else None


def logged_dgrad(residuals: Any, dy: Any, cfg: LoggedConfig) -> tuple[Any, Any]:
    """The body's dx; the pending has its values beside the body's own."""
    require_config("logged_dgrad", cfg, LoggedConfig)
    node = open_node("logged_dgrad", residuals, LoggedResiduals, cfg)
    if dy is None:
        return _dgrad(_part(node, "body"), None, cfg)[0], None
    dx, row, waiting = _first_half(node, dy, cfg, lambda kept: _dgrad(kept, dy, cfg))
    if waiting is None and row is None:
        return dx, None
    return dx, LoggedPending({"body": waiting, LEAF: row}, cfg=cfg, needs=node.needs)


def _part(node: Any, name: str) -> Any:
    """A part of residuals or a pending, donated if these were, which then let go of it."""
    child = node[name]
    if not node.donated or child is None:
        return child
    node[name] = None
    return donate(child)


def _dgrad(kept: Any, dy: Any, cfg: LoggedConfig) -> tuple[Any, Any]:
    # a body that keeps nothing needs nothing
    return (None, None) if kept is None else cfg.op.dgrad(kept, dy, cfg.cfg)


def logged_wgrad(pending: Any, cfg: LoggedConfig, *, into: Any = None) -> Any:
    """The body's weight gradients, and the values as the gradient of the leaf; added to `into` if given."""
    require_config("logged_wgrad", cfg, LoggedConfig)
    node = None if pending is None else open_node("logged_wgrad", pending, LoggedPending, cfg)
    if into is not None:
        check_into_tree("logged_wgrad", into, logged, cfg, node)
    if node is None:
        return _without(cfg) if into is None else into
    body, values = _part(node, "body"), _part(node, LEAF)
    if values is not None:
        values = open_node("logged_wgrad", values, ValuesSoFar, cfg)
    asks = values is not None
    return _second_half("logged_wgrad", cfg, into, asks, lambda sums: (cfg.op.wgrad(body, cfg.cfg, into=sums), values))


def logged_bwd(residuals: Any, dy: Any, cfg: LoggedConfig, *, into: Any = None) -> tuple[Any, Any]:
    """The whole backward. Returns `(dparams, dx)`."""
    require_config("logged_bwd", cfg, LoggedConfig)
    node = open_node("logged_bwd", residuals, LoggedResiduals, cfg)
    if into is not None:
        check_into_tree("logged_bwd", into, logged, cfg, node, dy)
    if dy is None:
        dx, _ = _dgrad(_part(node, "body"), None, cfg)
        return (_without(cfg) if into is None else into), dx
    dx = None

    def run(sums: Any) -> tuple[Any, Any]:
        nonlocal dx

        def both(kept: Any) -> tuple[Any, Any]:
            if kept is None:
                return None, cfg.op.wgrad(None, cfg.cfg, into=sums)
            return cfg.op.bwd(kept, dy, cfg.cfg, into=sums)[::-1]

        dx, row, dparams = _first_half(node, dy, cfg, both)
        return dparams, row

    return _second_half("logged_bwd", cfg, into, node[LEAF] is not None, run), dx


def _second_half(where: str, cfg: LoggedConfig, into: Any, asks: bool, run: Any) -> Any:
    """The weight gradients, and the leaf's, if it is asked for: `run(into)` returns the body's, and the values so far. A log of the
    gradients asks for the sums of this run alone, which are added to `into` behind it."""
    sums, table = (None, None) if into is None else taken(where, "into", into, cfg)  # type: Any, Any
    asks_weights = asks and "dw_norm" in cfg.order
    alone = asks_weights and sums is not None
    dparams, values = run(_apart(sums, cfg) if alone else sums)
    if alone:
        _add_to(sums, dparams, cfg)
    if not asks:
        return holding(dparams, None, cfg) if into is None else into
    row = values.values
    if asks_weights:
        row = torch.cat((row, _row([dense_norm(dparams, cfg)], values.dtype, row.device)))
    if into is None:
        return holding(dparams, _first_row(row, cfg, values.dtype), cfg)
    _next_row(table, row)
    return into


def _without(cfg: LoggedConfig) -> Any:
    """Gradients that are all None."""
    return holding(cfg.op.wgrad(None, cfg.cfg), None, cfg)


def _first_row(row: Tensor, cfg: LoggedConfig, dtype: torch.dtype) -> Tensor:
    """The gradient [runs, 1 + n] of the leaf of one run."""
    counted = torch.cat((row.new_ones(1), row)).to(dtype)[None]
    return counted if cfg.runs == 1 else torch.cat((counted, counted.new_zeros(cfg.runs - 1, counted.shape[1])))


def _next_row(table: Tensor, row: Tensor) -> None:
    """Add a run to the first row without one, or to the last; without a wait for the device."""
    counted = torch.cat((row.new_ones(1), row)).to(table.dtype)[None]
    if table.shape[0] == 1:
        table.add_(counted)
        return
    numbers = torch.arange(table.shape[0], device=table.device)
    at = numbers == table[:, 0].sum().clamp(max=table.shape[0] - 1)
    # not a product with zeros, as a value may be infinite or NaN
    table.add_(torch.where(at[:, None], counted, torch.zeros_like(counted)))


def _apart(sums: Any, cfg: LoggedConfig) -> Any:
    """Accumulators of zeros like these; of the values of steps inside these themselves, as their rows say which run comes next."""
    made = tree_map_tensors(torch.zeros_like, sums)
    for path in cfg.inner:
        made = put(made, path, at(sums, path))
    return made


def _add_to(sums: Any, dparams: Any, cfg: LoggedConfig) -> None:
    """Add gradients to accumulators, but for the values of steps inside, which are there already; of a node that adds by itself,
    such as one with amaxes, the sum that it makes."""

    def one(total: Any, gradient: Any) -> None:
        if hasattr(total, "plus"):
            for held, made in zip(tensors(total), tensors(total.plus(gradient)), strict=True):
                held.copy_(made)
        elif total is not None:
            total.add_(gradient)

    tree_map(one, _without_inner(sums, cfg), dparams, is_leaf=lambda node: hasattr(node, "plus"))


def _without_inner(tree: Any, cfg: LoggedConfig) -> Any:
    """The tree with None for the values of steps inside."""
    for path in cfg.inner:
        tree = put(tree, path, None)
    return tree


logged = make_op(
    "logged",
    LoggedConfig,
    init=logged_init,
    fwd=logged_fwd,
    dgrad=logged_dgrad,
    wgrad=logged_wgrad,
    bwd=logged_bwd,
    keyed=lambda cfg: cfg.op.keyed_by(cfg.cfg),
)
