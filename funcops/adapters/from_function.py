"""`op_from_torch(fn)`: an op out of any differentiable torch function, so that no one is stuck for a missing operator.

The function and its autograd backward are traced together, and the graph is cut in three. What crosses the first cut are the
residuals, by the names of the graph's nodes; what crosses the second is pending.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from funcops.adapters.cut import Graphs, cut
from funcops.adapters.hollow import gradients, hollow, refill
from funcops.errors import check, describe, fail
from funcops.needs import Needs
from funcops.op import Op, accumulate, check_needs, config, dgrad_of, make_op
from funcops.residuals.donate import donate
from funcops.schema import DGRAD, WGRAD, open_node, pending, residuals, saved, static
from funcops.trees import nothing_like, paths, tree_map_tensors


@config
class TorchConfig:
    """The config of an op that needs none."""


@residuals
class TorchResiduals:
    kept: Any = saved("{name: tensor}", needed_by=DGRAD | WGRAD, tree=True)
    traced: Any = static()
    inputs: Any = static()


@pending
class TorchPending:
    kept: Any = saved("{name: tensor}", needed_by=WGRAD, tree=True)
    traced: Any = static()


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """The graphs of a call's shapes, and the trees around them."""

    graphs: Graphs
    params_shape: Any
    x_shape: Any
    y_shape: Any
    asked: tuple[bool, ...]
    params: int  # leaves of params

    def nothing(self) -> Any:
        """dx where there is no gradient."""
        return refill(self.x_shape, [None] * len(self.asked))

    def spread(self, found: Any, first: int, last: int) -> list[Any]:
        """Gradients of the leaves that were asked for, at the places of all."""
        values = iter(found)
        return [next(values) if ask and first <= i < last else None for i, ask in enumerate(self.asked)]


def op_from_torch(
    fn: Callable[[Any, Any, Any], Any], *, name: str | None = None, config: type = TorchConfig,
    init: Callable[..., Any] | None = None,
) -> Op:  # fmt: skip
    """An `Op` of `fn(params, x, cfg) -> y`, which torch's autograd can differentiate.

    params, x and y are trees of tensors. The function is traced once for the shapes, strides and dtypes that it meets: Python
    control flow over values is not seen. `init(cfg, *, key, device, dtype)` makes params; without it the op has none. Raises
    `TypeError` for a y that holds anything but tensors, `ValueError` for a function that cannot be traced without writes.

        softplus = op_from_torch(lambda params, x, cfg: torch.nn.functional.softplus(x), name="softplus")
        y, residuals = softplus.fwd(None, x, TorchConfig())
    """
    label = name or fn.__name__
    memo: dict[Any, Traced] = {}

    def traced(params: Any, x: Any, cfg: Any, needs: Needs) -> tuple[Traced, list[Tensor]]:
        leaves: list[Tensor] = []
        params_shape = hollow(params, leaves)
        count = len(leaves)
        x_shape = hollow(x, leaves)
        for path, t in paths({"params": params, "x": x}).items():
            if isinstance(t, Tensor):
                check(f"{label}_fwd", path, t, (...,))
        key = cfg, needs, count, repr((params_shape, x_shape)), tuple([(t.shape, t.stride(), t.dtype, t.device) for t in leaves])
        if key not in memo:
            memo[key] = _trace(label, fn, cfg, needs, params_shape, x_shape, leaves, count)
        return memo[key], leaves

    def fwd(params: Any, x: Any, cfg: Any, *, needs: Needs = Needs.ALL) -> tuple[Any, Any]:
        if type(cfg) is not config:
            fail(f"{label}_fwd", "cfg", config.__name__, describe(cfg), TypeError)
        if init is None and params is not None:
            fail(f"{label}_fwd", "params", "None (op_from_torch got no init)", describe(params), TypeError)
        if needs is not Needs.ALL:
            check_needs(f"{label}_fwd", needs, params, x)
        own, leaves = traced(params, x, cfg, needs)
        found, count = own.graphs.forward(*leaves), len(own.graphs.outputs)
        values = iter(found[count:])
        kept = {n: leaves[int(n[6:])] if n.startswith("input.") else next(values) for n in own.graphs.kept}
        node: Any = TorchResiduals
        return refill(own.y_shape, found[:count]), node.keep(cfg, needs, kept=kept, traced=own, inputs=own) if needs else None

    @dgrad_of(TorchResiduals)
    def dgrad(residuals: Any, dy: Any, cfg: Any) -> tuple[Any, Any]:
        own: Traced = residuals.traced
        outputs, values = own.graphs.outputs, gradients(own.y_shape, dy, [])
        for i, (d, like) in enumerate(zip(values, outputs, strict=True)):
            if d is not None:
                check(f"{label}_dgrad", "dy" if len(outputs) == 1 else f"dy.{i}", d, like.shape, like.dtype)
        dys = [like.zeros() if d is None else d for d, like in zip(values, outputs, strict=True)]
        found = own.graphs.dgrad(*[residuals.kept[n] for n in own.graphs.kept], *dys)
        count = sum(own.asked[own.params :])
        dx = refill(own.x_shape, own.spread(found[:count], own.params, len(own.asked)))
        if not residuals.needs.params:
            return dx, None
        middle, kept = iter(found[count:]), {}
        for n in own.graphs.waiting:
            kept[n] = residuals.kept[n] if n in residuals.kept else dys[int(n[3:])] if n.startswith("dy.") else next(middle)
        node: Any = TorchPending
        return dx, node.keep(cfg, residuals.needs, kept=kept, traced=own)

    def wgrad(pending: Any, cfg: Any, *, into: Any = None) -> Any:
        if pending is None:
            return nothing_like(init(cfg, key=None, device="meta", dtype=None)) if into is None and init is not None else into
        node = open_node(f"{label}_wgrad", pending, TorchPending, cfg)
        own: Traced = node.traced
        found = own.graphs.wgrad(*[node.kept[n] for n in own.graphs.waiting])
        dparams = refill(own.params_shape, own.spread(found, 0, own.params))
        if node is not pending:
            node.empty()
        elif into is None:
            dparams = _apart(dparams, node.kept)
        return accumulate(f"{label}_wgrad", dparams, into)

    def bwd(residuals: Any, dy: Any, cfg: Any, *, into: Any = None) -> tuple[Any, Any]:
        dx, waiting = dgrad(residuals, dy, cfg)
        return wgrad(donate(waiting), cfg, into=into), dx

    def no_params(cfg: Any, *, key: Any = None, device: Any = None, dtype: Any = None) -> None:
        return None

    wgrad.node_class, wgrad.params_class = TorchPending, object  # type: ignore[attr-defined]
    return make_op(label, config, init=init or no_params, fwd=fwd, dgrad=dgrad, wgrad=wgrad, bwd=bwd)


def _apart(dparams: Any, kept: Any) -> Any:
    """The gradients, copied where a pending that lives on holds them: what dgrad had computed already."""
    held = {t.untyped_storage()._cdata for t in kept.values() if isinstance(t, Tensor)}
    return tree_map_tensors(lambda t: t.clone() if t.untyped_storage()._cdata in held else t, dparams)


def _trace(
    label: str, fn: Any, cfg: Any, needs: Needs, params_shape: Any, x_shape: Any, leaves: list[Tensor], count: int
) -> Traced:
    names = list(paths({"p": refill(params_shape, leaves), "x": refill(x_shape, leaves)}).items())
    by_id = {id(t): path for path, t in names}
    asked = []
    for i, t in enumerate(leaves):
        path = by_id[id(t)][2:]
        wanted = needs.param(path) if i < count else (needs.input(path) if path else bool(needs.x))
        asked.append(bool(t.is_floating_point() and wanted))
    shape: list[Any] = []

    def run(flat: Any) -> Any:
        found: list[Tensor] = []
        y = fn(refill(params_shape, flat), refill(x_shape, flat), cfg)
        for path, value in paths(y).items():
            if not isinstance(value, Tensor):
                fail(f"{label}_fwd", "y" + (f".{path}" if path else ""), "a tensor", describe(value), TypeError)
        shape[:] = [hollow(y, found)]
        return found

    with torch.enable_grad():
        graphs = cut(f"{label}_fwd", run, leaves, asked, count)
    return Traced(graphs, params_shape, x_shape, shape[0], tuple(asked), count)
