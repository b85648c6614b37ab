"""The fastest call of each node of a traced graph: a function of torch costs the host less than the operator that a trace has."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from funcops.adapters.from_function.joint import of_schema, operator_name

_NATIVE = (types.BuiltinFunctionType, types.MethodDescriptorType)
_HOMES = (torch, torch._C._nn, torch.Tensor)
CALL = "call"  # in a node's meta


def find_calls(
    root: fx.GraphModule,
    order: Sequence[fx.Node],
    values: dict[fx.Node, Any],
    kept: Container[fx.Node],
    args_of: Callable[[fx.Node], Any] = operator.attrgetter("args"),
) -> None:
    """Run the nodes, whose inputs are in `values`, and note for each torch's own function of the same name, if it gave the same
    bits. Beside the kept ones, a value is dropped after its last reader."""
    last = {read: i for i, node in enumerate(order) for read in (node, *node.all_input_nodes)}
    for i, node in enumerate(order):
        if node.op == "get_attr":
            values[node] = operator.attrgetter(str(node.target))(root)
        else:
            args, kwargs = fx.node.map_arg((args_of(node), node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            _find_call(node, values[node], args, kwargs)
            del args, kwargs
        for read in (node, *node.all_input_nodes):
            if last[read] == i and read not in kept:
                values.pop(read, None)


def _find_call(node: fx.Node, found: Any, args: Any, kwargs: Any) -> None:
    schema = of_schema(node)
    if schema is None or CALL in node.meta or torch.Tag.nondeterministic_seeded in node.target.tags:  # type: ignore[union-attr]
        return
    for call in _candidates(operator_name(node)):
        try:
            other = call(*args, **kwargs)
        except (TypeError, RuntimeError, ValueError):  # it takes other arguments
            continue
        if same_tensors(found, other):
            node.meta[CALL] = call
            break


def _candidates(name: str) -> Iterator[Callable[..., Any]]:
    for home in _HOMES:
        call = getattr(home, name, None)
        if isinstance(call, _NATIVE):  # a function in Python costs what it is to save
            yield call


def same_tensors(a: Any, b: Any) -> bool:
    """Whether two results are the same tensors, in bits and layout."""
    first, second = tree_leaves(a), tree_leaves(b)
    if len(first) != len(second) or not all(isinstance(one, Tensor) for one in (*first, *second)):
        return False
    return all([_alike(one, other) for one, other in zip(first, second, strict=True)])


def _alike(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype is not b.dtype or a.stride() != b.stride() or a.storage_offset() != b.storage_offset():
        return False
    if a.is_floating_point() and a.itemsize == 1:  # torch compares no codes of 8 bits
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return torch.equal(a, b) or (a.is_floating_point() and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))
