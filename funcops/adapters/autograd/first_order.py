"""Gradients that refuse to be differentiated: an op has first derivatives alone.

Under `create_graph=True` the gradients that a node returns get an error as their `grad_fn`. autograd visits a node only where it
lies between what is differentiated and what it is differentiated by, and leaves all others out without a word. So the error has the
edges that the second derivative would have: to the gradient of y, and to whatever the backward was computed of. What that leaves
out (the weight of a product, in the gradient of that weight) has no second derivative in torch either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from funcops.adapters.flatten import flatten
from funcops.errors import FLOATS
from funcops.trees import tensors

_REMEDY = (
    "Compute second derivatives with torch's own layers (funcops.nn.to_torch(model) gives a swapped model its own back), or as "
    "differences of first ones"
)


class Reads(NamedTuple):
    """Of which leaves of a call the gradients are computed, beside the gradient of y."""

    leaves: tuple[int, ...]  # of those that require grad, by number
    params: bool  # whether params are among them that the node does not keep itself
    anchored: bool  # whether the others are not to be found by what the node keeps

    @staticmethod
    def of(leaves: Sequence[Tensor], params: Any, y: Any, residuals: Any) -> Reads:
        """What is kept besides inputs was computed of any of them."""
        kept: list[Tensor] = []
        flatten(residuals, kept)
        asked = {id(t): i for i, t in enumerate(leaves) if t.requires_grad}
        held, inputs = {id(t) for t in kept}, {id(t) for t in leaves}
        own = tensors(params)
        if held <= inputs and all([t.dtype in FLOATS for t in own]):  # codes were computed of a weight
            return Reads(tuple([i for t, i in asked.items() if t in held]), False, False)
        found = held | {id(t) for t in own}
        output = held & {id(t) for t in tensors(y)} - inputs  # its edge is the node's own, before which all others lie
        return Reads(tuple(asked.values()), True, not output and not asked.keys() <= found)


def anchor(y: Any) -> Tensor:
    """An output that is kept for its edge, and holds no memory."""
    return torch.empty(0, device=(y if isinstance(y, Tensor) else tensors(y)[0]).device)


def first_order(where: str, ctx: Any, found: Any, sources: Iterable[Any], reads: Sequence[int]) -> Any:
    """The gradients `found` of a node under `create_graph=True`, with a `grad_fn` that raises `RuntimeError`, where they depend on
    a tensor that requires grad: one of `sources`, among them leaves number `reads` of the call."""
    gradients = found if type(found) is tuple else (found,)
    edges = [t for t in sources if isinstance(t, Tensor) and t.requires_grad]
    if not edges:
        return gradients
    nodes = [get_gradient_edge(t) for t in edges]
    known = [(edge.node, edge.output_nr) for edge in nodes]
    if all([edge.node is not ctx for edge in nodes]) and any([ctx.next_functions[i] not in known for i in reads]):
        said = "a backward of an input that is kept as a copy must be without create_graph=True, got True"
        raise RuntimeError(f"{where}: {said}. {_REMEDY}")
    said = "a gradient must be differentiated no further (an op has first derivatives alone), got a second backward"
    message = f"{where}: {said}. {_REMEDY}".encode()
    raising: Any = torch._C._functions.DelayedError(message, len(gradients) + len(edges))  # type: ignore[attr-defined]
    with torch.enable_grad():
        made = raising(*[g.detach() if isinstance(g, Tensor) else None for g in gradients], *edges)
    return made[: len(gradients)]
