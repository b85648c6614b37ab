"""Calls of a traced op inside of `torch.func.vmap`, `jvp` and forward mode: its graphs run under them, but a trace does not."""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch import fx

from funcops.adapters.from_function.joint import operator_name
from funcops.engine.errors import fail

_level = torch._C._functorch.maybe_current_level
_forward_ad: Any = torch.autograd.forward_ad


def refuse_trace(where: str, label: str) -> None:
    """Raise inside of a transform of `torch.func`, whose tensors have no memory that a trace could read."""
    if _level() is not None:
        wanted = "called once with these shapes, or in this mode, outside of transforms of torch.func"
        fail(where, label, wanted, "a call inside of one, which would trace it", RuntimeError)


def complain(where: str, graph: fx.GraphModule, error: RuntimeError) -> None:
    """Raise for an operator of a graph that failed inside of a transform or in forward mode; return for any other error."""
    if torch.compiler.is_dynamo_compiling() or (_level() is None and _forward_ad._current_level < 0):
        return
    node = _failed(graph, error)
    if node is None:
        return
    custom = node.meta.get("custom", {})
    path = custom.get("backward", custom.get("path"))
    name = operator_name(node) or str(getattr(node.target, "__name__", node.target))
    remedy = "loop over the batch, or transform the module itself (torch.func.functional_call)"
    wanted, got = "one that torch can run under this transform or in forward mode", str(error).partition("\n")[0]
    fail(where, f"operator {name}{f' in module {path!r}' if path else ''}", wanted, f"{got} ({remedy})", RuntimeError)


def _failed(graph: fx.GraphModule, error: BaseException) -> Any:
    """The node of a graph, or of its copy with scopes, at which an error was raised; None if it was not in its code."""
    names = {node.name: node for node in graph.graph.nodes}
    lines = [frame.line or "" for frame in traceback.extract_tb(error.__traceback__) if "eval_with_key" in frame.filename]
    return next((names[name] for line in lines if (name := line.partition(" = ")[0].strip()) in names), None)
