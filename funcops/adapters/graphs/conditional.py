"""`when`: an update that a captured step makes or leaves out by a value on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from funcops.adapters.graphs.statics import clones
from funcops.engine.backend import scopes
from funcops.engine.contract.marks import Versions
from funcops.engine.errors import check, fail, require_callable
from funcops.engine.trees import tensors


@torch.no_grad()
def when(flag: Tensor, update: Callable[..., Any], *trees: Any) -> None:
    """Run `update(*trees)`, which writes to the tensors of `trees` in place, if `flag`, a bool tensor of no dimension, is true. The
    host does not wait for the flag.

        when(all_finite(grads), lambda params, state: adamw_update(params, grads, state, cfg, lr=lr, in_place=True), params, state)

    In a CUDA graph it is a conditional node, where torch has them (CUDA 12.4): a step that is left out costs nothing. Elsewhere,
    and in a `recording`, the update runs, and with a false flag the tensors get their old bits back; what the update returns, and
    what it writes to other tensors, is not undone. Raises `TypeError` or `ValueError` for a flag of another form, and
    `ValueError` for an update that writes to no tensor of `trees`.

    >>> import torch
    >>> from funcops.graphs import when
    >>> p = torch.zeros(2)
    >>> when(torch.tensor(False), lambda p: p.add_(1), p)
    >>> when(torch.tensor(True), lambda p: p.add_(2), p)
    >>> p
    tensor([2., 2.])
    """
    check("when", "flag", flag, (), torch.bool)
    require_callable("when", update=update)
    own = list({id(t): t for t in tensors(trees)}.values())
    versions = Versions.of(own)

    def updated() -> None:
        update(*trees)
        if not versions.written() and not any([t.is_inference() for t in own]):
            remedy = "in_place=True, or after a kernel of your own torch.autograd.graph.increment_version"
            fail(
                "when",
                "update",
                "a function that writes to tensors of its trees, in place",
                f"no write that torch counts: {remedy}",
            )

    # in a recording both ways run, as a node that is left out would tell the values of the replay before
    graph = _capturing() if flag.is_cuda and scopes.on != scopes.NOTED else None
    if graph is not None:
        graph.begin_capture_to_if_node(flag)
        try:
            updated()
        finally:
            graph.end_capture_to_conditional_node()
        return
    before = clones(own)
    updated()
    for t, old in zip(own, before, strict=True):
        t.copy_(torch.where(flag.to(t.device), t, old))


def _capturing() -> Any:
    """The graph that is being captured, if it can hold a conditional node; else None."""
    found = getattr(torch.cuda.CUDAGraph, "get_currently_capturing_graph", None)
    if found is None or not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return None
    graph = found()
    return graph if hasattr(graph, "begin_capture_to_if_node") else None
