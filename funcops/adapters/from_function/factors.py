"""The weight gradients of a trace as products of rows not yet run, which `batch_wgrads` joins over calls.

A gradient a^T b, with a row of a and b for each token, is a sum over rows: of several calls it is one product of all their rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from funcops.adapters.from_function.joint import Like, operator_name
from funcops.library.ops.linear_wgrads import Product

_TRANSPOSES = {"t": ((),), "permute": (([1, 0],), ([-1, 0],)), "transpose": ((0, 1), (1, 0), (-1, -2), (-2, -1))}  # of matrices
_COPIES = set("_to_copy clone".split())


class Term(NamedTuple):
    """A part of a gradient: the node that computes it or, of a product a^T b, the nodes of a^T and b; whether it is transposed."""

    nodes: tuple[fx.Node, ...]
    transposed: bool


class Factors(NamedTuple):
    """The graph of a wgrad without its last products. `numbers`: for each term of the gradients the number of the gradient, and
    whether it is a product, of which the graph returns a^T and b."""

    graph: fx.GraphModule
    numbers: tuple[tuple[int, bool], ...]
    gradients: tuple[Like | None, ...]

    def without_data(self) -> list[Tensor | None]:
        """Tensors like the gradients."""
        return [None if g is None else torch.empty((), dtype=g.dtype, device=g.device).expand(g.shape) for g in self.gradients]

    def products(self, found: Any, accumulators: list[Any]) -> list[Product]:
        """The products for these accumulators, of which each gradient has one, from the results of the graph; any other term of a
        gradient is added at once."""
        values, made = iter(found), []
        for i, product in self.numbers:
            if product:
                a, b = next(values), next(values)
                made.append(Product.of(a.mT, b, accumulators[i], None))
            else:
                accumulators[i].add_(next(values))
        return made


def factors_of(wgrad: fx.GraphModule) -> Factors:
    """The factors of the products whose sums, transposes and wider copies are gradients; other terms are computed as before."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    results: list[fx.Node] = []
    numbers: list[tuple[int, bool]] = []
    gradients: Any = ()
    for node in wgrad.graph.nodes:
        if node.op != "output":
            copies[node] = graph.node_copy(node, copies.__getitem__)
            continue
        gradients = node.args[0]
        for i, gradient in enumerate(gradients):
            for term in () if gradient is None else _terms(gradient, False):
                own = [copies[n] for n in term.nodes]
                if term.transposed:  # (a^T b)^T = b^T a
                    own = [graph.call_function(_transposed, (one,)) for one in reversed(own)]
                results += own
                numbers.append((i, len(own) == 2))
    graph.output(tuple(results))
    graph.eliminate_dead_code()
    likes = tuple([None if g is None else Like.of(g.meta["val"]) for g in gradients])
    return Factors(fx.GraphModule(wgrad, graph), tuple(numbers), likes)


def _terms(node: fx.Node, transposed: bool) -> Iterator[Term]:
    name = operator_name(node) or str(getattr(node.target, "__name__", node.target))
    if name == "mm":
        yield Term((node.args[0], node.args[1]), transposed)  # type: ignore[arg-type]
    elif name in ("add", *_TRANSPOSES, *_COPIES) and _is_plain(node, name):
        for part in node.all_input_nodes:
            yield from _terms(part, transposed ^ (name in _TRANSPOSES))
    else:
        yield Term((node,), transposed)


def _is_plain(node: fx.Node, name: Any) -> bool:
    """Whether the node is nothing but a sum of two tensors alike, a transpose, or a copy in a dtype at least as wide, for which
    an accumulator need not wait: it may take sums of products in 16 bits before they are rounded."""
    own, others = node.meta["val"], [n.meta["val"] for n in node.all_input_nodes]
    if name in _COPIES:
        return own.is_floating_point() and own.dtype.itemsize >= others[0].dtype.itemsize and own.device == others[0].device
    if name in _TRANSPOSES:
        return own.dim() == 2 and node.args[1:] in _TRANSPOSES[name]
    return not node.kwargs and len(others) == len(node.args) == 2 and all(t.shape == own.shape for t in others)


def _transposed(t: Tensor) -> Tensor:
    return t.mT
