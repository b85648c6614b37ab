"""Graphs in another process, where the operators of the kernels that they call may not be defined yet."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from torch import fx

from funcops.adapters.from_function.joint import of_schema
from funcops.engine.backend.declare import KERNELS

_BY_TORCH = "_by_torch"  # ends the name of the operator that is a kernel's torch implementation


class Operators:
    """The operators of kernels, by module and name. To load it defines them, so it comes before the graphs."""

    def __init__(self, names: tuple[tuple[str, str], ...]) -> None:
        self.names = names

    @staticmethod
    def of(graphs: Iterable[Any]) -> Operators:
        called = {
            str(schema.name).partition("::")[2]
            for graph in graphs
            if isinstance(graph, fx.GraphModule)
            for node in graph.graph.nodes
            if (schema := of_schema(node)) is not None and schema.name.startswith("funcops::")
        }
        found = [(one.module, name) for one in KERNELS for name in (one.name, one.name + _BY_TORCH) if name in called]
        return Operators(tuple(sorted(found)))

    def __reduce__(self) -> Any:
        return _defined, (self.names,)


def _defined(names: tuple[tuple[str, str], ...]) -> Operators:
    for module, name in names:
        importlib.import_module(module)
        for kernel in [one for one in list(KERNELS) if one.module == module]:
            if kernel.name == name:
                kernel.find_triton()
                kernel.operator()
            elif kernel.name + _BY_TORCH == name:
                kernel.torch_operator()
    return Operators(names)
