"""repeat: a body applied n times, each time with params of its own.

    h_0 = x        h_i = body(h_{i-1}; params_i)        y = h_n

x, y and every h_i have one shape and dtype, any that the body maps to itself. Kept: what each layer keeps. Params are a
tuple of per-layer trees, or, with `stacked=True`, one tree whose leaves have a leading layer dimension. Residuals and pending are
dicts by layer number. Extras go to every layer, and their gradients are summed; the layer number is folded into every random key.
Outputs of the body are stacked, layer i's at [i]: y is then `WithExtras(h_n, {name: [n, ...]})`, and so is dy.

>>> import torch
>>> from funcops import LinearConfig, RepeatConfig, linear, random, repeat
>>> cfg = RepeatConfig(linear, LinearConfig(4, 4), times=3)
>>> params = repeat.init(cfg, key=random.key(0))
>>> len(params), params[0].weight.shape
(3, torch.Size([4, 4]))
>>> y, residuals = repeat.fwd(params, torch.ones(2, 4), cfg)
>>> list(residuals)
[0, 1, 2]
>>> dparams, dx = repeat.bwd(residuals, torch.ones(2, 4), cfg)
>>> dparams[2].bias
tensor([2., 2., 2., 2.])
"""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from funcops.engine import random
from funcops.engine.compose.layers import (
    accumulators,
    by_layer,
    collected,
    in_turn,
    like_the_first,
    needs_of_layers,
    outputs_by_layer,
)
from funcops.engine.compose.pausing import Walk, of_layers
from funcops.engine.compose.step import OneBody, bundle, check_body, note, split_x
from funcops.engine.contract.configs import Replace, Width, require_config
from funcops.engine.contract.needs import Needs, check_needs
from funcops.engine.contract.op import Op, config, dgrad_of, init_of, make_op
from funcops.engine.contract.schema import open_node
from funcops.engine.contract.walk import layer_numbers, layer_ranges
from funcops.engine.errors import fail, join_path, require
from funcops.engine.program.programs import forwards
from funcops.engine.program.values import abstract_params, add, has_params
from funcops.engine.residuals.nested import nested, part
from funcops.engine.residuals.offload import copies
from funcops.engine.trees import WithExtras

if TYPE_CHECKING:
    from funcops.engine.contract.op import TypedOp

__all__ = ["RepeatConfig", "RepeatPending", "RepeatResiduals"]
__all__ += ["repeat", "repeat_bwd", "repeat_dgrad", "repeat_fwd", "repeat_init", "repeat_wgrad"]


@config
class RepeatConfig(OneBody):
    """The body (an op and its config), how many `times`, and whether params are `stacked`. `bodies`, which `with_policy` writes:
    bodies with the same params that keep different tensors, `(layers, op, cfg)` for each, such as ("0-9", op, cfg); the first is
    the body of the config."""

    op: Op = field(kw_only=False)
    cfg: Any = field(kw_only=False)
    times: int = field(kw_only=False)
    stacked: bool = False
    bodies: tuple[tuple[str, Op, Any], ...] = ()

    def __post_init__(self) -> None:
        check_body("RepeatConfig", self.op, self.cfg)
        require(isinstance(self.times, int) and self.times >= 1, "RepeatConfig", "times", "an int of at least 1", self.times)
        told = isinstance(self.bodies, tuple) and all(
            [type(one) is tuple and len(one) == 3 and layer_ranges(str(one[0])) and isinstance(one[1], Op) for one in self.bodies]
        )
        require(told, "RepeatConfig", "bodies", 'a tuple of (layers, op, cfg), with layers such as "0-9"', self.bodies)
        parts = [(name, (op, cfg)) for name, op, cfg in self.parts()]
        # one pair for all layers of a body, so that a tracer guards on it once
        bodies = sorted([(i, body) for name, body in parts for i in layer_numbers(name, self.times)], key=lambda one: one[0])
        right = [i for i, _ in bodies] == list(range(self.times)) and parts[0][1] == (self.op, self.cfg)
        require(right, "RepeatConfig", "bodies", f"of each of {self.times} layers, the first with this op and cfg", self.bodies)
        # begun only if every layer has something to begin: a layer whose forward runs again gathers its params by itself
        alike = len({getattr(op.prefetch, "late", None) for _, (op, _) in parts}) == 1
        note(
            self,
            of_layer=tuple([body for _, body in bodies]),
            ahead=self.op.prefetch if alike else None,
            pauses=any([op.pausing is not None for _, (op, _) in parts]),
        )
        note(
            self,
            extras=self.cfg.extras,
            outputs=self.cfg.outputs,
            keys=self.cfg.keys,
            has_params=has_params(self.op, self.cfg),
            layer_needs={},
        )
        # the needs of layers are made here, where no compiler traces: those that it makes are other objects
        needs_of_layers(self, Needs.ALL)
        needs_of_layers(self, Needs.NONE)
        self.follow("RepeatConfig", "", None)

    def parts(self) -> list[tuple[Any, Any, Any]]:
        """See `Composite.parts`."""
        return list(self.bodies) or [("*", self.op, self.cfg)]

    def with_parts(self, replace: Replace, **changes: Any) -> RepeatConfig:
        """See `Composite.with_parts`."""
        made = [replace(*part) for part in self.parts()]
        bodies = tuple([(part[0], *one) for part, one in zip(self.bodies, made, strict=True)]) if self.bodies else ()
        return dataclasses.replace(self, **{"op": made[0][0], "cfg": made[0][1], "bodies": bodies, **changes})

    def follow(self, where: str, path: str, width: Width | None) -> Width | None:
        """See `OpConfig.follow`: the body's y is the next layer's x, so all layers after the second are like the second."""
        first, body = self.cfg.wanted(), join_path(path, "*")
        width = self.cfg.follow(where, body, width)
        if self.times == 1:
            return width
        if first is not None and width is not None and width.size != first:
            fail(
                where,
                f"the body {body!r}",
                f"one whose y is [..., {first}], as the next layer's x",
                f"[..., {width.size}] of step {width.of!r}",
            )
        return self.cfg.follow(where, body, width)

    def abstract(self) -> Any:
        """See `funcops.engine.program.values.abstract_params`."""
        return collected([abstract_params(self.op, self.cfg)] * self.times, None, self)

    maps_to_itself = True
    has_params: ClassVar[bool]
    layer_needs: ClassVar[dict[Needs, tuple[Needs, ...]]]
    of_layer: ClassVar[tuple[tuple[Op, Any], ...]]  # by number
    ahead: ClassVar[Any]  # what every layer can prefetch
    pauses: ClassVar[bool]  # whether a layer can pause


RepeatResiduals, RepeatPending = nested("Repeat", "a repeat, by layer number", __name__)


@init_of(RepeatConfig)
def repeat_init(cfg: RepeatConfig, *, key: Tensor | None = None, device: Any = None, dtype: Any = None) -> Any:
    """Params of every layer, each from a key of its own. Raises what the body's init raises, with the layer's number before it."""

    def run(i: int, _: None) -> Any:
        return cfg.op.init(cfg.cfg, key=None if key is None else random.fold_in(key, i), device=device, dtype=dtype)

    return collected(in_turn(cfg, range(cfg.times), lambda i: None, run, begin=False), None, cfg)


def repeat_fwd(params: Any, x: Any, cfg: RepeatConfig, *, needs: Needs = Needs.ALL) -> tuple[Any, Any]:
    """Run the body `times` times. x: the body's x, in `WithExtras` if it has extras; y: in `WithExtras` if it has outputs, which
    are stacked over the layers. Raises `TypeError` for an output that is not a tensor, `ValueError` for one whose shape or dtype
    differs between layers."""
    layers, (call, took, _, end) = _forward(params, x, cfg, needs, False)
    kept = in_turn(cfg, range(cfg.times), lambda i: layers[i], lambda i, layer: took(call(i, layer)))
    return end(kept)  # type: ignore[no-any-return]


def _forward(params: Any, x: Any, cfg: RepeatConfig, needs: Needs, pauses: bool) -> tuple[Any, Walk]:
    """The params of the layers, and the walk over them, which ends with y and the residuals."""
    require_config("repeat_fwd", cfg, RepeatConfig)
    if needs is not Needs.ALL:
        check_needs("repeat_fwd", needs, params, x)
    layers = by_layer("repeat_fwd", "params", params, cfg)
    main, extras = split_x("repeat_fwd", x, cfg)
    wanted = needs_of_layers(cfg, needs)
    given: dict[str, list[Any]] = {name: [] for name in cfg.outputs}
    joined = forwards(cfg.of_layer, wanted, layers, main, pauses)

    def call(i: int, layer: Any) -> Any:
        # a dict for each layer, as `bundle` puts the folded keys into it
        layer_x = bundle(main, dict(extras), cfg.keys, i, True) if extras else main
        if joined is None:
            op, own = cfg.of_layer[i]
            return ((pauses and op.pausing) or op).fwd(layer, layer_x, own, needs=wanted[i])
        return joined[i](layer, main, layer_x.extras if extras else {})

    def took(result: Any) -> Any:
        nonlocal main
        main, residuals = result
        for name, found in given.items():
            found.append(like_the_first("repeat_fwd", name, main.extras[name], found))
        main = main.main if given else main
        return residuals

    def end(kept: list[Any]) -> tuple[Any, Any]:
        y = WithExtras(main, {name: torch.stack(found) for name, found in given.items()}) if given else main
        return y, RepeatResiduals(dict(enumerate(kept)), cfg=cfg, needs=needs) if needs else None

    return layers, (call, took, None, end)


def _walk(node: Any, dy: Any, cfg: RepeatConfig, sums: tuple[Any, ...] | None) -> tuple[Any, list[Any]]:
    """Run the layers' backward in reverse. Returns dx and, by layer, dparams, added to accumulators in `sums`, or pending without
    `sums`. A layer that kept nothing needs no gradient."""
    call, took, bring, end = _backward(node, dy, cfg, sums, False)
    order = range(cfg.times)[::-1]
    results = in_turn(cfg, order, lambda i: part(node, i), lambda i, kept: took(call(i, kept)), sums=sums, bring=bring)
    return end(results)  # type: ignore[no-any-return]


def _backward(node: Any, dy: Any, cfg: RepeatConfig, sums: tuple[Any, ...] | None, pauses: bool) -> Walk:
    """The walk over the layers' residuals, which ends with dx and what was found by layer."""
    gradients: dict[str, Any] = {}
    of_outputs: Any = None
    if cfg.outputs:
        dy, of_outputs = outputs_by_layer("repeat_dgrad" if sums is None else "repeat_bwd", dy, cfg.outputs, cfg.times)
    # only while something is offloaded: else the tree of each layer would be searched in vain
    bring = (lambda i: copies.prefetch(node.get(i))) if copies.home or copies.elsewhere else None

    def call(i: int, kept: Any) -> Any:
        nonlocal dy
        if of_outputs is not None:
            # None as a whole: so an op is told that no gradient comes
            none = dy is None and all([d is None for d in of_outputs[i].values()])
            dy = None if none else WithExtras(dy, of_outputs[i])
        op, own = cfg.of_layer[i]
        # a prefetch has no dgrad of its own: a first half leaves no gradients in flight
        if sums is None:
            return (None, None) if kept is None else ((pauses and op.pausing) or op).dgrad(kept, dy, own)
        ahead = None if pauses or cfg.ahead is None else op.prefetch
        if kept is None:
            return (ahead or op).wgrad(None, own, into=sums[i]), None  # `Pausing` has no wgrad of its own
        return (ahead or (pauses and op.pausing) or op).bwd(kept, dy, own, into=sums[i])

    def took(result: Any) -> Any:
        nonlocal dy
        dy, found = result if sums is None else result[::-1]
        if type(dy) is WithExtras:
            for name, gradient in dy.extras.items():
                gradients[name] = add(gradients.get(name), gradient)
            dy = dy.main
        return found

    def end(found: list[Any]) -> tuple[Any, list[Any]]:
        return (WithExtras(dy, {n: gradients.get(n) for n in cfg.extras}) if cfg.extras else dy), found

    return call, took, bring, end


@dgrad_of(RepeatResiduals)
def repeat_dgrad(residuals: Any, dy: Any, cfg: RepeatConfig) -> tuple[Any, Any]:
    """All dgrads, last layer first. Returns dx and the pending weight gradients by layer."""
    dx, waiting = _walk(residuals, dy, cfg, None)
    return dx, _pending(waiting, cfg, residuals.needs)


def _pending(waiting: list[Any], cfg: RepeatConfig, needs: Needs) -> Any:
    some = any([p is not None for p in waiting])
    return RepeatPending(dict(enumerate(waiting)), cfg=cfg, needs=needs) if some else None


def repeat_wgrad(pending: Any, cfg: RepeatConfig, *, into: Any = None) -> Any:
    """All weight gradients, last layer first; added to `into` if given."""
    return collected(_by_layer("wgrad", pending, cfg, into), into, cfg)


def _products(pending: Any, cfg: RepeatConfig, *, into: Any) -> list[Any]:
    # last layer first, in the order in which `wgrad` adds
    return [product for layer in reversed(_by_layer("products", pending, cfg, into)) for product in layer]


def _by_layer(which: str, pending: Any, cfg: RepeatConfig, into: Any) -> list[Any]:
    """The results of the body's "wgrad" or "products" by layer, called for the last layer first."""
    require_config("repeat_wgrad", cfg, RepeatConfig)
    wgrad = which == "wgrad"
    node = None if pending is None else open_node("repeat_wgrad", pending, RepeatPending, cfg)
    sums = accumulators("repeat_wgrad", into, repeat, cfg, node)

    def run(i: int, _: None) -> Any:
        op, own = cfg.of_layer[i]
        # a prefetch has a wgrad, but no products: these are joined later, and none is in flight
        call = getattr(op.prefetch if wgrad and cfg.ahead is not None else op, which)
        return call(None if node is None else part(node, i), own, into=sums[i])

    return in_turn(cfg, range(cfg.times)[::-1], lambda i: None, run, begin=False, sums=sums if wgrad else None)


def repeat_bwd(residuals: Any, dy: Any, cfg: RepeatConfig, *, into: Any = None) -> tuple[Any, Any]:
    """The whole backward, a layer at a time, so that donated residuals are freed layer by layer. Returns `(dparams, dx)`."""
    require_config("repeat_bwd", cfg, RepeatConfig)
    node = open_node("repeat_bwd", residuals, RepeatResiduals, cfg)
    dx, found = _walk(node, dy, cfg, accumulators("repeat_bwd", into, repeat, cfg, node, dy))
    return collected(found, into, cfg), dx


repeat: TypedOp[Any, Any, RepeatConfig, Any, Any] = make_op(
    "repeat",
    RepeatConfig,
    init=repeat_init,
    fwd=repeat_fwd,
    dgrad=repeat_dgrad,
    wgrad=repeat_wgrad,
    bwd=repeat_bwd,
    products=_products,
    pausing=of_layers(_forward, _backward, RepeatResiduals, _pending, lambda: repeat),
    mixes="",
)
