"""Gradients that refuse to be differentiated: an op has only first derivatives.

Under `create_graph=True`, the gradients that a node returns get an error as their `grad_fn`. autograd visits a node only if it lies
between the differentiated tensor and the tensor to differentiate by, and silently skips all others. So the error has the edges that
the second derivative would have: to the gradient of y, and to all tensors that the backward read. A tensor without such an edge
(the weight of a product, in the gradient of that weight) has no second derivative in torch either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from funcops.adapters.flatten import flatten
from funcops.engine.errors import FLOATS
from funcops.engine.trees import tensors

_REMEDY = (
    "Compute second derivatives with torch's own layers (funcops.nn.to_torch(model) gives a swapped model its own back), or as "
    "differences of first ones"
)


class Reads(NamedTuple):
    """The leaves of a call from which the gradients are computed, besides the gradient of y."""

    leaves: tuple[int, ...]  # the numbers of such leaves that require grad
    params: bool  # whether they include params that the node does not keep itself
    anchored: bool  # whether the node keeps no tensor that leads to the others

    @staticmethod
    def of(leaves: Sequence[Tensor], params: Any, y: Any, residuals: Any) -> Reads:
        """The reads of a call, on the assumption that a kept tensor that is not an input was computed from any of the inputs."""
        kept: list[Tensor] = []
        flatten(residuals, kept)
        asked = {id(t): i for i, t in enumerate(leaves) if t.requires_grad}
        held, inputs = {id(t) for t in kept}, {id(t) for t in leaves}
        own = tensors(params)
        if held <= inputs and all([t.dtype in FLOATS for t in own]):  # codes were computed from a weight
            return Reads(tuple([i for t, i in asked.items() if t in held]), False, False)
        found = held | {id(t) for t in own}
        output = held & {id(t) for t in tensors(y)} - inputs  # its edge is the node itself, from which all leaves are reached
        return Reads(tuple(asked.values()), True, not output and not asked.keys() <= found)


def anchor(y: Any) -> Tensor:
    """An empty output that the node keeps for its edge."""
    return torch.empty(0, device=(y if isinstance(y, Tensor) else tensors(y)[0]).device)


def first_order(where: str, ctx: Any, found: Any, sources: Iterable[Any], reads: Sequence[int]) -> Any:
    """The gradients `found` of a node under `create_graph=True`. If they depend on a tensor that requires grad, their `grad_fn`
    raises `RuntimeError`. `sources`: the tensors from which they were computed, among them the leaves number `reads` of the
    call."""
    gradients = found if type(found) is tuple else (found,)
    edges = [t for t in sources if isinstance(t, Tensor) and t.requires_grad]
    if not edges:
        return gradients
    nodes = [get_gradient_edge(t) for t in edges]
    known = [(edge.node, edge.output_nr) for edge in nodes]
    if all([edge.node is not ctx for edge in nodes]) and any([ctx.next_functions[i] not in known for i in reads]):
        said = "a backward that keeps a copy of an input must run without create_graph=True, got True"
        raise RuntimeError(f"{where}: {said}. {_REMEDY}")
    said = "a gradient must not be differentiated again (an op has only first derivatives), got a second backward"
    message = f"{where}: {said}. {_REMEDY}".encode()
    raising: Any = torch._C._functions.DelayedError(message, len(gradients) + len(edges))  # type: ignore[attr-defined]
    with torch.enable_grad():
        made = raising(*[g.detach() if isinstance(g, Tensor) else None for g in gradients], *edges)
    return made[: len(gradients)]
