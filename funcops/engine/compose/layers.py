"""The layers of a repeat: their turns, with what starts before one and what waits until after it; their needs and their trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from funcops.engine.backend import notes, scopes
from funcops.engine.compose.step import live_inputs
from funcops.engine.contract.needs import Needs, sub_mask
from funcops.engine.contract.trace_safe_cache import remember
from funcops.engine.errors import describe, fail, in_step
from funcops.engine.program.accumulator_checks import check_into_tree
from funcops.engine.program.run import taken_apart
from funcops.engine.program.turns import turns
from funcops.engine.trees import leaves, tree_map


def in_turn(
    cfg: Any,
    order: Sequence[int],
    read: Callable[[int], Any],
    run: Callable[[int, Any], Any],
    begin: bool = True,
    sums: Sequence[Any] | None = None,
    bring: Callable[[int], Any] | None = None,
) -> list[Any]:
    """The results, by layer, of `run(i, read(i))`, called in this order (`turns`). What starts before a layer's turn is `bring(i)`,
    and, if the body can prefetch (`Op.prefetch`), what the layer reads, unless `begin` is False. If it can, and accumulators are
    given, in `sums`, the results are gradients in flight. An error gets the number of its layer."""
    ahead, i = cfg.ahead, order[0]
    begin, late = begin and ahead is not None, () if sums is None or ahead is None else ahead.late
    starts = begin or bring is not None
    run = scopes.by_number(run) if scopes.on else run
    found: list[Any] = [None for _ in order]  # torch 2.11 cannot trace a write to [None] * times
    coming = tree = None
    try:
        for kind, i in turns(order, starts, late):
            if kind == "start":
                if bring is not None:
                    bring(i)
                coming = read(i) if begin else None
                # None: this layer kept nothing, so there is nothing to begin
                coming = None if coming is None else cfg.of_layer[i][0].prefetch.begin(coming, cfg.of_layer[i][1])
            elif kind == "wait" and begin:
                tree = None if coming is None else coming.ready()
            elif kind == "run":
                found[i] = run(i, tree if begin else read(i))
            elif kind != "wait":
                found[i] = getattr(cfg.of_layer[i][0].prefetch, kind)(found[i], sums[i])  # type: ignore[index]
                if kind == "settle" and scopes.on == scopes.NOTED:
                    notes.tell_by_step("dparams" if sums[i] is None else "sums", found[i], f"{i}.")  # type: ignore[index]
    except Exception as error:
        in_step(error, i)
        raise
    return found


def needs_of_layers(cfg: Any, needs: Needs) -> tuple[Needs, ...]:
    """The needs of each layer. With stacked params a mask holds for all layers."""
    if is_dynamo_compiling():  # the tracer would guard on the number of entries, and compile anew after each new one
        return _needs_by_layer(cfg, needs)
    # a memo on the config, as every call asks; the config's own init fills it for the two usual needs
    found = cfg.layer_needs.get(needs)
    return remember(cfg.layer_needs, needs, _needs_by_layer(cfg, needs)) if found is None else found


def _needs_by_layer(cfg: Any, needs: Needs) -> tuple[Needs, ...]:
    live = live_inputs(needs.x, cfg.extras)
    found = []
    for i in range(cfg.times):
        params = needs.params if cfg.stacked else sub_mask(needs.params, str(i))
        x: Any = live[""]
        if cfg.extras:
            x = [label for label, name in (("main", ""), *((f"extras.{n}", n) for n in cfg.extras)) if live[name]]
            # all parts by name are True: a layer may then get `Needs.ALL` itself, which `keep` knows by identity
            x = True if len(x) == len(cfg.extras) + 1 else x
        wanted = Needs(x=x, params=params if cfg.has_params else False)
        found.append(wanted)
        live[""] = wanted.any
    return tuple(found)


def stacked(layers: tuple[Any, ...]) -> Any:
    """Stack the leaves of the layers. A gradient that only some layers have, as no dy reaches the others, is zero for the
    others."""

    def one(*ts: Any) -> Any:
        like = next((t for t in ts if t is not None), None)
        return None if like is None else torch.stack([torch.zeros_like(like) if t is None else t for t in ts])

    return tree_map(one, *layers)


def collected(found: list[Any], into: Any, cfg: Any) -> Any:
    """The params or gradients of all layers, as the config has them; `into`, if they were added to it."""
    return into if into is not None else stacked(tuple(found)) if cfg.stacked else tuple(found)


def by_layer(where: str, what: str, params: Any, cfg: Any) -> tuple[Any, ...]:
    """The per-layer trees of `params`, as views if they are stacked."""
    if not cfg.stacked:
        if not isinstance(params, tuple) or len(params) != cfg.times:
            fail(where, what, f"a tuple of {cfg.times} layers", describe(params), TypeError)
        return params
    for t in leaves(params):
        if t is not None and (not isinstance(t, Tensor) or t.dim() == 0 or t.shape[0] != cfg.times):
            axis = cfg.cfg.fsdp
            how = f" of shards over {axis}, as init makes them (own_shards cuts the layers: stacked=False)" if axis else ""
            fail(where, what, f"stacked leaves [{cfg.times}, ...]{how}", describe(t))
    return tuple(tree_map(lambda t, i=i: None if t is None else t[i], params) for i in range(cfg.times))


def accumulators(where: str, into: Any, op: Any, cfg: Any, node: Any, dy: Any = None) -> tuple[Any, ...]:
    """The accumulators of each layer, all checked; None for each if none are given."""
    if into is None:
        return (None,) * cfg.times
    check_into_tree(where, into, op, cfg, node, dy)
    return by_layer(where, "into", into, cfg)


def like_the_first(where: str, name: str, t: Any, found: list[Any], part: str = "layer") -> Tensor:
    """Check that a layer's output can be stacked with the outputs of the layers before it."""
    if not isinstance(t, Tensor):
        fail(where, f"y.extras.{name}", "a tensor, to be stacked", describe(t), TypeError)
    if found and (t.shape != found[0].shape or t.dtype is not found[0].dtype):
        fail(where, f"y.extras.{name}", f"{describe(found[0])}, as in the first {part}", describe(t))
    return t


def outputs_by_layer(
    where: str, dy: Any, names: tuple[str, ...], times: int, part: str = "layer"
) -> tuple[Any, list[dict[str, Any]]]:
    """The gradient of the main value, and the gradients of each layer's outputs of these names."""
    main, *given = taken_apart(where, dy, names)
    for name, t in zip(names, given, strict=True):
        if t is not None and (t.dim() == 0 or t.shape[0] != times):
            fail(where, f"dy.extras.{name}", f"[{times}, ...], a part for each {part}", describe(t))
    parts = [(None,) * times if t is None else t.unbind(0) for t in given]
    return main, [dict(zip(names, own, strict=True)) for own in zip(*parts, strict=True)]
