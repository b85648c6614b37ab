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
from collections.abc import Iterable, Iterator
from dataclasses import field
from typing import Any, ClassVar

import torch
from torch import Tensor

from funcops import random
from funcops.compose.step import bundle, check_body, live_inputs, note, split_x
from funcops.contract.configs import Composite, Replace, Width, require_config
from funcops.contract.needs import Needs, check_needs, sub_mask
from funcops.contract.op import Op, config, dgrad_of, init_of, make_op
from funcops.contract.schema import open_node
from funcops.errors import describe, fail, in_step, join_path, require
from funcops.program.accumulator_checks import check_into_tree
from funcops.program.run import taken_apart
from funcops.program.values import abstract_params, add, has_params
from funcops.residuals.nested import nested, part
from funcops.residuals.offload import copies
from funcops.trees import WithExtras, leaves, tree_map

__all__ = ["RepeatConfig", "RepeatPending", "RepeatResiduals"]
__all__ += ["repeat", "repeat_bwd", "repeat_dgrad", "repeat_fwd", "repeat_init", "repeat_wgrad"]


@config
class RepeatConfig(Composite):
    """The body (an op and its config), how many `times`, and whether params are `stacked`."""

    op: Op = field(kw_only=False)
    cfg: Any = field(kw_only=False)
    times: int = field(kw_only=False)
    stacked: bool = False

    def __post_init__(self) -> None:
        check_body("RepeatConfig", self.op, self.cfg)
        require(isinstance(self.times, int) and self.times >= 1, "RepeatConfig", "times", "an int of at least 1", self.times)
        note(self, outputs=self.cfg.outputs)
        note(self, extras=self.cfg.extras, keys=self.cfg.keys, has_params=has_params(self.op, self.cfg), layer_needs={})
        needs_of_layers(self, Needs.ALL)
        needs_of_layers(self, Needs.NONE)
        self.follow("RepeatConfig", "", None)

    @property
    def first_parts(self) -> tuple[Any, ...]:
        """The config of the body, whose x is this config's x."""
        return (self.cfg,)

    def follow(self, where: str, path: str, width: Width | None) -> Width | None:
        """See `OpConfig.follow`: all layers after the second are like the second."""
        for _ in range(min(self.times, 2)):
            width = self.cfg.follow(where, join_path(path, "*"), width)
        return width

    def abstract(self) -> Any:
        """See `funcops.program.values.abstract_params`."""
        layers = (abstract_params(self.op, self.cfg),) * self.times
        return _stack(layers) if self.stacked else layers

    def with_parts(self, replace: Replace, **changes: Any) -> RepeatConfig:
        """The config with `replace("*", op, cfg)` for the body."""
        op, cfg = replace("*", self.op, self.cfg)
        return dataclasses.replace(self, op=op, cfg=cfg, **changes)

    def parts(self) -> list[tuple[Any, Any, Any]]:
        return [("*", self.op, self.cfg)]

    maps_to_itself = True
    has_params: ClassVar[bool]
    layer_needs: ClassVar[dict[Needs, tuple[Needs, ...]]]


RepeatResiduals, RepeatPending = nested("Repeat", "a repeat, by layer number", __name__)


def needs_of_layers(cfg: RepeatConfig, needs: Needs) -> tuple[Needs, ...]:
    """The needs of each layer. With stacked params a mask holds for all layers."""
    if needs not in cfg.layer_needs:
        live = live_inputs(needs.x, cfg.extras)
        found = []
        for i in range(cfg.times):
            params = needs.params if cfg.stacked else sub_mask(needs.params, str(i))
            x: Any = live[""]
            if cfg.extras:
                x = [label for label, name in (("main", ""), *((f"extras.{n}", n) for n in cfg.extras)) if live[name]]
                x = True if len(x) == len(cfg.extras) + 1 else x
            wanted = Needs(x=x, params=params if cfg.has_params else False)
            found.append(wanted)
            live[""] = bool(wanted)
        cfg.layer_needs[needs] = tuple(found)
    return cfg.layer_needs[needs]


@init_of(RepeatConfig)
def repeat_init(cfg: RepeatConfig, *, key: Tensor | None = None, device: Any = None, dtype: Any = None) -> Any:
    """Params of every layer, each from a key of its own. Raises what the body's init raises, with the layer's number before it."""
    layers, i = [], 0
    try:
        for i in range(cfg.times):
            layers.append(cfg.op.init(cfg.cfg, key=None if key is None else random.fold_in(key, i), device=device, dtype=dtype))
    except Exception as error:
        in_step(error, i)
        raise
    return _stack(tuple(layers)) if cfg.stacked else tuple(layers)


def _stack(layers: tuple[Any, ...]) -> Any:
    """Stack the leaves of the layers. A gradient that only some layers have, as no dy reaches the others, is zero for the
    others."""

    def one(*ts: Any) -> Any:
        like = next((t for t in ts if t is not None), None)
        return None if like is None else torch.stack([torch.zeros_like(like) if t is None else t for t in ts])

    return tree_map(one, *layers)


def _layers(where: str, what: str, params: Any, cfg: RepeatConfig) -> tuple[Any, ...]:
    """The per-layer trees of `params`, as views if they are stacked."""
    if not cfg.stacked:
        if not isinstance(params, tuple) or len(params) != cfg.times:
            fail(where, what, f"a tuple of {cfg.times} layers", describe(params), TypeError)
        return params
    for t in leaves(params):
        if t is not None and (not isinstance(t, Tensor) or t.dim() == 0 or t.shape[0] != cfg.times):
            fail(where, what, f"stacked leaves [{cfg.times}, ...]", describe(t))
    return tuple(tree_map(lambda t, i=i: None if t is None else t[i], params) for i in range(cfg.times))


def repeat_fwd(params: Any, x: Any, cfg: RepeatConfig, *, needs: Needs = Needs.ALL) -> tuple[Any, Any]:
    """Run the body `times` times. x: the body's x, in `WithExtras` if it has extras; y: in `WithExtras` if it has outputs, which
    are stacked over the layers. Raises `TypeError` for an output that is not a tensor, `ValueError` for one whose shape or dtype
    differs between layers."""
    require_config("repeat_fwd", cfg, RepeatConfig)
    if needs is not Needs.ALL:
        check_needs("repeat_fwd", needs, params, x)
    layers = _layers("repeat_fwd", "params", params, cfg)
    main, extras = split_x("repeat_fwd", x, cfg)
    kept = RepeatResiduals(cfg=cfg, needs=needs)
    given: dict[str, list[Any]] = {name: [] for name in cfg.outputs}
    i = 0
    try:
        turns = layers if cfg.op.prefetch is None else _begun(layers, cfg)
        for i, (layer, wanted) in enumerate(zip(turns, needs_of_layers(cfg, needs), strict=True)):
            layer_x = bundle(main, dict(extras), cfg.keys, i, True) if extras else main
            main, kept[i] = cfg.op.fwd(layer, layer_x, cfg.cfg, needs=wanted)
            if given:
                for name, found in given.items():
                    found.append(_like_the_first(name, main.extras[name], found))
                main = main.main
    except Exception as error:
        in_step(error, i)
        raise
    y = WithExtras(main, {name: torch.stack(found) for name, found in given.items()}) if given else main
    return y, kept if needs else None


def _like_the_first(name: str, t: Any, found: list[Any]) -> Tensor:
    """Check that a layer's output can be stacked with the outputs of the layers before it."""
    if not isinstance(t, Tensor):
        fail("repeat_fwd", f"y.extras.{name}", "a tensor, to be stacked", describe(t), TypeError)
    if found and (t.shape != found[0].shape or t.dtype is not found[0].dtype):
        fail("repeat_fwd", f"y.extras.{name}", f"{describe(found[0])}, as in the first layer", describe(t))
    return t


def _of_layers(where: str, dy: Any, cfg: RepeatConfig) -> tuple[Any, list[dict[str, Any]]]:
    """The gradient of the last layer's main value, and the gradients of each layer's outputs."""
    main, *stacked = taken_apart(where, dy, cfg.outputs)
    for name, t in zip(cfg.outputs, stacked, strict=True):
        if t is not None and (t.dim() == 0 or t.shape[0] != cfg.times):
            fail(where, f"dy.extras.{name}", f"[{cfg.times}, ...], a part for each layer", describe(t))
    parts = [(None,) * cfg.times if t is None else t.unbind(0) for t in stacked]
    return main, [dict(zip(cfg.outputs, own, strict=True)) for own in zip(*parts, strict=True)]


def _begun(given: Iterable[Any], cfg: RepeatConfig) -> Iterator[Any]:
    """Yield params or residuals of the layers in turn; the next layer's are prefetched while a layer runs."""
    rest = iter(given)

    def begin(one: Any) -> Any:
        return None if one is None else cfg.op.prefetch.begin(one, cfg.cfg)

    coming = begin(next(rest))
    for after in rest:
        now = None if coming is None else coming.ready()
        coming = begin(after)
        yield now
    yield None if coming is None else coming.ready()


def _settle(results: list[Any], i: int, cfg: RepeatConfig, sums: tuple[Any, ...]) -> None:
    """Complete the gradients of layer i, if the op returns them in flight."""
    if cfg.op.prefetch is not None and i < cfg.times:
        results[i] = cfg.op.prefetch.settle(results[i], sums[i])


def _backward(op: Op, cfg: Any, kept: Any, dy: Any, whole: bool, into: Any) -> tuple[Any, Any]:
    """dx and dparams if `whole`, else dx and the pending. A layer that kept nothing needs no gradient."""
    if not whole:
        return (None, None) if kept is None else op.dgrad(kept, dy, cfg)
    if kept is None:
        return None, (op if op.prefetch is None else op.prefetch).wgrad(None, cfg, into=into)
    dparams, dx = (op if op.prefetch is None else op.prefetch).bwd(kept, dy, cfg, into=into)
    return dx, dparams


def _walk(node: Any, dy: Any, cfg: RepeatConfig, sums: tuple[Any, ...] | None) -> tuple[Any, list[Any]]:
    """Run the layers' backward in reverse. Returns dx and, by layer, dparams, added to accumulators in `sums`, or pending without
    `sums`."""
    gradients: dict[str, Any] = {}
    results: list[Any] = [None for _ in range(cfg.times)]  # torch 2.11 cannot trace a write to [None] * times
    whole, i = sums is not None, 0
    of_outputs: Any = None
    if cfg.outputs:
        dy, of_outputs = _of_layers("repeat_bwd" if whole else "repeat_dgrad", dy, cfg)
    turns = None if cfg.op.prefetch is None else _begun((part(node, i) for i in reversed(range(cfg.times))), cfg)
    try:
        for i in reversed(range(cfg.times)):
            if copies.home:  # prefetch what the layer before this one offloaded, while this one computes
                copies.prefetch([node.get(i), node.get(i - 1)])
            kept = part(node, i) if turns is None else next(turns)
            if of_outputs is not None:
                none = dy is None and all([d is None for d in of_outputs[i].values()])
                dy = None if none else WithExtras(dy, of_outputs[i])
            dy, results[i] = _backward(cfg.op, cfg.cfg, kept, dy, whole, sums[i] if sums else None)
            if sums:
                _settle(results, i + 1, cfg, sums)
            if type(dy) is WithExtras:
                for name, gradient in dy.extras.items():
                    gradients[name] = add(gradients.get(name), gradient)
                dy = dy.main
        if sums:
            _settle(results, 0, cfg, sums)
    except Exception as error:
        in_step(error, i)
        raise
    return (WithExtras(dy, {n: gradients.get(n) for n in cfg.extras}) if cfg.extras else dy), results


@dgrad_of(RepeatResiduals)
def repeat_dgrad(residuals: Any, dy: Any, cfg: RepeatConfig) -> tuple[Any, Any]:
    """All dgrads, last layer first. Returns dx and the pending weight gradients by layer."""
    needs = residuals.needs
    dx, waiting = _walk(residuals, dy, cfg, None)
    empty = all(p is None for p in waiting)
    return dx, None if empty else RepeatPending(dict(enumerate(waiting)), cfg=cfg, needs=needs)


def repeat_wgrad(pending: Any, cfg: RepeatConfig, *, into: Any = None) -> Any:
    """All weight gradients, last layer first; added to `into` if given."""
    return _collect(_by_layer("wgrad", pending, cfg, into), into, cfg)


def _products(pending: Any, cfg: RepeatConfig, *, into: Any) -> list[Any]:
    return [product for layer in reversed(_by_layer("products", pending, cfg, into)) for product in layer]


def _by_layer(part_of_op: str, pending: Any, cfg: RepeatConfig, into: Any) -> list[Any]:
    """The results of the body's "wgrad" or "products" by layer, called for the last layer first."""
    require_config("repeat_wgrad", cfg, RepeatConfig)
    late = cfg.op.prefetch is not None and part_of_op == "wgrad"
    run = cfg.op.prefetch.wgrad if late else getattr(cfg.op, part_of_op)
    node = None if pending is None else open_node("repeat_wgrad", pending, RepeatPending, cfg)
    sums = _accumulators("repeat_wgrad", into, node, cfg)
    found: list[Any] = [None for _ in range(cfg.times)]
    i = 0
    try:
        for i in reversed(range(cfg.times)):
            found[i] = run(None if node is None else part(node, i), cfg.cfg, into=sums[i])
            if late:
                _settle(found, i + 1, cfg, sums)
        if late:
            _settle(found, 0, cfg, sums)
    except Exception as error:
        in_step(error, i)
        raise
    if node is not None and node is not pending:
        node.empty()
    return found


def repeat_bwd(residuals: Any, dy: Any, cfg: RepeatConfig, *, into: Any = None) -> tuple[Any, Any]:
    """The whole backward, a layer at a time, so that donated residuals are freed layer by layer. Returns `(dparams, dx)`."""
    require_config("repeat_bwd", cfg, RepeatConfig)
    node = open_node("repeat_bwd", residuals, RepeatResiduals, cfg)
    dx, found = _walk(node, dy, cfg, _accumulators("repeat_bwd", into, node, cfg, dy))
    if node is not residuals:
        node.empty()
    return _collect(found, into, cfg), dx


def _accumulators(where: str, into: Any, node: Any, cfg: RepeatConfig, dy: Any = None) -> tuple[Any, ...]:
    if into is None:
        return (None,) * cfg.times
    check_into_tree(where, into, repeat, cfg, node, dy)
    return _layers(where, "into", into, cfg)


def _collect(found: list[Any], into: Any, cfg: RepeatConfig) -> Any:
    if into is not None:
        return into
    return _stack(tuple(found)) if cfg.stacked else tuple(found)


repeat: Op = make_op(
    "repeat",
    RepeatConfig,
    init=repeat_init,
    fwd=repeat_fwd,
    dgrad=repeat_dgrad,
    wgrad=repeat_wgrad,
    bwd=repeat_bwd,
    products=_products,
)
