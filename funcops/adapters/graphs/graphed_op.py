"""`graphed_op`: the forward and the halves of the backward of an op as separate graphs, with slots for microbatches in flight.

A slot goes FREE -> fwd -> RESIDUALS -> dgrad -> PENDING -> wgrad -> FREE, or by bwd directly from RESIDUALS to FREE. Residuals and
pendings are named static buffers, which can be read; the handles returned by `fwd` and `dgrad` name their slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from funcops.adapters.graphs.backend import Captured, Capturer, Options
from funcops.adapters.graphs.graphed import Report
from funcops.adapters.graphs.hooks import Hooks
from funcops.adapters.graphs.slot import FREE, PENDING, RESIDUALS, Slot
from funcops.adapters.graphs.statics import Inputs, clones, refuse_copy, restored
from funcops.engine.compose.step import check_body
from funcops.engine.contract.accumulators import accumulate, check_into
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import Op
from funcops.engine.contract.walk import walk
from funcops.engine.errors import BorrowedError, GraphOrderError, describe, fail, require, require_count, require_flag, require_type
from funcops.engine.trees import leaves, paths, tensors, tree_map
from funcops.memory.ledger import Ledger


class InFlight:
    """Residuals or a pending in a slot of a graphed op. `tree`: the static buffers, with the op's names."""

    __slots__ = ("graph", "kind", "slot", "ticket", "tree")

    def __init__(self, graph: GraphedOp, kind: str, slot: int, ticket: int, tree: Any) -> None:
        self.graph, self.kind, self.slot, self.ticket, self.tree = graph, kind, slot, ticket, tree

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy(f"graphed {self.graph.op.name}")

    def __repr__(self) -> str:
        return f"InFlight({self.kind} in slot {self.slot}: {self.tree!r})"


States = list[tuple[Any, Any]]


def states_of(op: Op, cfg: Any) -> States:
    """The traced functions and modules of an op, each with its state."""
    return [(part.op.traces, part.op.traces.state()) for part in walk(cfg, op=op) if part.op.traces is not None]


def check_states(where: str, states: States) -> None:
    """Raise if a traced function or module has changed since."""
    for traces, captured in states:
        if traces.state() != captured:
            wanted = "in the state and mode in which it was captured"
            fail(where, traces.label, wanted, "a change, which a replay would not see: capture again")


class GraphedOp:
    """A captured op, made by `graphed_op`."""

    def __init__(self, op: Op, cfg: Any, capturer: Capturer, slots: list[Slot], into: Any) -> None:
        self.op, self.cfg, self.backend, self.pool = op, cfg, capturer.backend, capturer.pool
        self._slots, self._into, self._capturer = slots, into, capturer
        self._states = states_of(op, cfg)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy(f"graphed {self.op.name}")

    def fwd(self, params: Any, x: Any) -> tuple[Any, InFlight]:
        """Return y, and residuals in a free slot. Raises `GraphOrderError` if all slots are in flight, and the errors of a
        `Graphed` call for inputs that differ from the captured ones."""
        index = next((i for i, slot in enumerate(self._slots) if slot.state == FREE), None)
        if index is None:
            held = ", ".join(f"{i}: {slot.state}" for i, slot in enumerate(self._slots))
            raise GraphOrderError(
                f"graphed {self.op.name}_fwd: a slot must be free, "
                f"got {len(self._slots)} in flight ({held or 'none, after reset()'})"
            )
        check_states(f"graphed {self.op.name}_fwd", self._states)
        slot = self._slots[index]
        y = slot.run("fwd", (params, x))
        _, residuals = slot.results["fwd"]
        return y, InFlight(self, RESIDUALS, index, slot.enter(RESIDUALS), residuals)

    def dgrad(self, residuals: InFlight, dy: Any) -> tuple[Any, InFlight]:
        """Return dx, and the pending weight gradient in the same slot."""
        slot = self._slot("dgrad", residuals, RESIDUALS)
        dx = slot.run("dgrad", (dy,))
        _, pending = slot.results["dgrad"]
        return dx, InFlight(self, PENDING, residuals.slot, slot.enter(PENDING), pending)

    def wgrad(self, pending: InFlight, *, into: Any = None) -> Any:
        """Return dparams, which the caller owns, or `into` with them added. Frees the slot. `into` must be the capture's, to which
        the graph adds by itself, or for a capture without one any tree like dparams."""
        slot = self._slot("wgrad", pending, PENDING)
        self._check_into("wgrad", slot.results["wgrad"], into)
        slot.replay("wgrad")
        slot.enter(FREE)
        return self._added("wgrad", slot.results["wgrad"], into)

    def bwd(self, residuals: InFlight, dy: Any, *, into: Any = None) -> tuple[Any, Any]:
        """Return `(dparams, dx)`, as `dgrad` and then `wgrad` would. Frees the slot."""
        slot = self._slot("bwd", residuals, RESIDUALS)
        dparams, _ = slot.results["bwd"]
        self._check_into("bwd", dparams, into)
        dx = slot.run("bwd", (dy,))
        slot.enter(FREE)
        return self._added("bwd", dparams, into), dx

    def _check_into(self, half: str, dparams: Any, into: Any) -> None:
        """Before a replay: a graph adds to the tensors of its capture alone."""
        where = f"graphed {self.op.name}_{half}"
        if into is not None and self._into is None:
            check_into(where, into, dparams)
        elif into is not None and list(map(id, leaves(into))) != list(map(id, leaves(self._into))):
            remedy = f"leave it out, or capture {self.op.name} again"
            wanted = f"the tensors of graphed_op(..., into=), to which the graph adds ({remedy})"
            fail(where, "into", wanted, "others")

    def _added(self, half: str, dparams: Any, into: Any) -> Any:
        if self._into is not None:
            return self._into
        return clones(dparams) if into is None else accumulate(f"graphed {self.op.name}_{half}", dparams, into)

    def release(self, kept: InFlight) -> None:
        """Free a slot whose backward will not run."""
        self._slot("release", kept, kept.kind).enter(FREE)

    def _slot(self, what: str, kept: Any, kind: str) -> Slot:
        where = f"graphed {self.op.name}_{what}"
        if not isinstance(kept, InFlight):
            fail(where, kind, "what this graph's fwd or dgrad returned", describe(kept), TypeError)
        if kept.graph is not self:
            raise GraphOrderError(f"{where}: {kind} must be this graph's, got another graph's")
        if not self._slots:
            raise GraphOrderError(f"{where}: must not be called after reset()")
        slot = self._slots[kept.slot]
        if kept.kind != kind:
            raise GraphOrderError(f"{where}: must be given {kind}, got {kept.kind} of slot {kept.slot}")
        if slot.ticket != kept.ticket:
            raise GraphOrderError(f"{where}: {kind} of slot {kept.slot} must be unused, got some that were used already")
        if what != "release":
            graphs, by = (("fwd", "dgrad"), "backward") if kind == PENDING else (("fwd",), "forward")
            slot.check(where, f"{kind} of slot {kept.slot}", *graphs, by=by)
        return slot

    def report(self) -> Report:
        slots = self._slots
        inputs = sum(s.inputs["fwd"].nbytes + s.inputs["dgrad"].nbytes for s in slots)
        outputs = sum(s.outputs["fwd"].nbytes + s.outputs["dgrad"].nbytes for s in slots)
        kernels = _sum(slots[0].graphs[name].kernels() for name in ("fwd", "dgrad", "wgrad")) if slots else 0
        return Report(self.backend.name, inputs, outputs, sum(map(_kept_bytes, slots)), self._capturer.pool_bytes(), kernels)

    def pools(self) -> list[Any]:
        """The memory pools of the slots, which another capture may share."""
        return list(self._capturer.pools)

    def reset(self) -> None:
        """Free all graphs and their memory; residuals and pendings in flight are lost."""
        for slot in self._slots:
            slot.reset()
        self._slots = []

    def graphs(self, slot: int = 0) -> Mapping[str, Captured]:
        """The graphs of a slot by name: "fwd", "dgrad", "wgrad", "bwd", each with `raw_graph` and `dot`."""
        return self._slots[slot].graphs

    def instantiate(self) -> None:
        """Instantiate graphs captured with `keep_graph=True` now, rather than at their first replay."""
        for slot in self._slots:
            for captured in slot.graphs.values():
                captured.instantiate()

    def raw_graph(self, name: str, slot: int = 0) -> Any:
        """torch's `CUDAGraph` of that name. Raises `RuntimeError` on the recorder."""
        return self._slots[slot].graphs[name].raw_graph

    def dot(self, path: str, name: str = "fwd", slot: int = 0) -> None:
        """Write a graph for Graphviz; on CUDA it must have been captured with `keep_graph=True`."""
        self._slots[slot].graphs[name].dot(path)


def graphed_op(
    op: Op,
    cfg: Any,
    params: Any,
    x: Any,
    *,
    dy: Any = None,
    slots: int = 1,
    needs: Needs = Needs.ALL,
    into: Any = None,
    inputs: str | Mapping[str, str] = "copy",
    outputs: str = "clone",
    warmup: int = 3,
    pool: Any = None,
    stream: Any = None,
    capture_error_mode: str = "global",
    keep_graph: bool = False,
    hooks: Hooks | None = None,
    debug: bool = False,
) -> GraphedOp:
    """Capture `op.fwd`, `op.dgrad`, `op.wgrad` and `op.bwd` as graphs, with `slots` microbatches in flight.

        graph = graphed_op(chain, cfg, params, x, slots=4)
        y, residuals = graph.fwd(params, x)
        dx, pending = graph.dgrad(residuals, dy)
        dparams = graph.wgrad(pending)

    Params are pinned: an optimiser writes to them in place. x and dy are copied; `inputs` sets other policies for leaves of x, by
    glob over its dotted paths. dy: an example of y's gradient, by default like y, with None for integers; later a None stands for
    zeros. A traced function or module must be in the state and mode of the capture. `into`: accumulators like params, also pinned,
    to which every weight gradient is added (main_grad), by the graph; without them, the caller owns dparams, never a buffer of
    the graph, and `wgrad` and `bwd` take an `into` as an op's do.
    `outputs` (for y and dx), `warmup`, `pool` and the rest are as for `graphed`. Each slot has its own memory pool; `pool`, if
    given, is for the first. Borrowed y and dx are valid until the next `fwd` in their slot.

    Raises `CaptureError`; later `GraphOrderError` for a wrong order, `StaleResidualError` if params were written to between a
    forward and its backward, `BorrowedError` if a buffer in flight was written to, or may have been, because a graph captured
    earlier into `pool` was replayed meanwhile.

    >>> import torch
    >>> from funcops import ScaleConfig, scale
    >>> from funcops.graphs import GraphedOp, InFlight, graphed_op
    >>> graph = graphed_op(scale, ScaleConfig(3.0), None, torch.ones(2), slots=2)
    >>> y, first = graph.fwd(None, torch.ones(2))
    >>> y, isinstance(graph, GraphedOp), isinstance(first, InFlight)
    (tensor([3., 3.]), True, True)
    >>> graph.bwd(first, torch.ones(2))
    (None, tensor([3., 3.]))
    """
    check_body("graphed_op", op, cfg)
    require_count("graphed_op", slots=slots)
    require_flag("graphed_op", keep_graph=keep_graph, debug=debug)
    require_type("graphed_op", "inputs", inputs, str, Mapping)
    require(bool(needs), "graphed_op", "needs", "Needs of at least one gradient", needs)
    capturer = Capturer("graphed_op", (params, x), pool, Options(stream, capture_error_mode, keep_graph, hooks), warmup)
    rules = {"0": "pinned", "1": inputs} if isinstance(inputs, str) else {"0": "pinned", **{f"1.{k}": v for k, v in inputs.items()}}
    if not leaves(params):
        rules.pop("0")
    made = []
    with torch.no_grad(), restored(tensors(into)):
        for i in range(slots):
            reads = Inputs(f"graphed {op.name}_fwd", (params, x), rules)
            slot = Slot(capturer.of_slot(i), [*reads.donated, *tensors(into)])
            slot.inputs["fwd"] = reads
            _capture(op, cfg, slot, dy, needs, into, warm=i == 0)
            (y, residuals), (dx, pending), (_, whole_dx) = [slot.results[name] for name in ("fwd", "dgrad", "bwd")]
            for name, result in (("fwd", y), ("dgrad", dx), ("bwd", whole_dx)):
                slot.give(name, result, outputs, debug)
            in_flight = {"y": y, "residuals": residuals, "read again": _read_again(residuals)}
            slot.leases["fwd"].hold(reads.trees[0], "params").hold(in_flight, f"slot {i}", BorrowedError)
            slot.leases["dgrad"].hold({"pending": pending}, f"slot {i}", BorrowedError)
            made.append(slot)
    return GraphedOp(op, cfg, capturer, made, into)


def _capture(op: Op, cfg: Any, slot: Slot, dy: Any, needs: Needs, into: Any, warm: bool) -> None:
    """Capture all graphs of a slot. The shape of y gives the gradients' buffers."""
    reads = slot.inputs["fwd"]

    def forward() -> Any:
        params, x = reads.trees
        return op.fwd(params, x, cfg, needs=needs)

    y, _ = forward()
    like = tree_map(lambda t: torch.ones_like(t) if isinstance(t, Tensor) and t.is_floating_point() else None, y)
    given = (like if dy is None else dy,)
    slot.inputs["dgrad"] = slot.inputs["bwd"] = dys = Inputs(f"graphed {op.name}_dgrad", given, "copy", gradients=True)

    def all_of_it() -> None:
        _, residuals = forward()
        _, pending = op.dgrad(residuals, dys.trees[0], cfg)
        op.wgrad(pending, cfg, into=into)
        op.bwd(residuals, dys.trees[0], cfg, into=into)

    if warm:
        slot.capturer.warm_up(all_of_it)
    y, residuals = slot.capture("fwd", forward, keep=into)
    _, pending = slot.capture("dgrad", lambda: op.dgrad(residuals, dys.trees[0], cfg), keep=into)
    slot.capture("wgrad", lambda: op.wgrad(pending, cfg, into=into), keep=into)
    slot.capture("bwd", lambda: op.bwd(residuals, dys.trees[0], cfg, into=into), keep=into)
    reads.check_unwritten()
    dys.check_unwritten()


def _kept_bytes(slot: Slot) -> int:
    """Bytes of residuals and pending, without params, inputs and y."""
    (y, residuals), (_, pending) = slot.results["fwd"], slot.results["dgrad"]
    ledger = Ledger(slot.inputs["fwd"].trees, slot.inputs["dgrad"].trees, y)
    ledger.keep("residuals", residuals)
    ledger.keep("pending", pending)
    return ledger.nbytes


def _sum(counts: Any) -> int | None:
    found = list(counts)
    return None if None in found else sum(found)


def _read_again(residuals: Any) -> list[Any]:
    """The tensors beside its arguments that the second run of a forward with these residuals will read."""
    nodes = paths(residuals, is_leaf=lambda node: hasattr(node, "notes")).values()
    return [one.content.tensors for node in nodes for one in getattr(node, "notes", None) or ()]
