"""Values that steps compute, told to whoever asks. In a recording programs are other functions, with a line more for each step.

A step's values go through one operator, which computes nothing and writes to a token: so a tracer keeps it and its place, a
recorder of operators reruns it, and a compiled step has it between its kernels.
"""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops.engine.backend import scopes
from funcops.engine.errors import fail

__all__ = ["Told", "note", "takers", "tell", "tell_by_step", "thread"]

Item = tuple[str | None, str, str, Any]  # the step's path, beside or in place of the one that runs; half; name; value


class Told(NamedTuple):
    """A tensor that a step computed, or was given: the path and half of the step, the tensor's `name` there, and the path of the
    call that `ran`, which is another one if a rule ran several steps as one."""

    path: str
    half: str
    name: str
    value: Tensor
    ran: str


takers: list[Callable[[list[Told], Any], None]] = []  # each gets the tensors of every step, and what its forward kept


def note(**values: Any) -> None:
    """Tell a `recording` values of yours, tensors or trees of them by name, at the path and half of the scope around. Outside of a
    recording it does nothing.

    >>> import torch
    >>> from funcops import named_scope, note, recording
    >>> with recording() as run, named_scope("data", "fwd"):
    ...     note(ids=torch.arange(4), batch={"labels": torch.ones(2)})
    ...
    >>> [row.place for row in run.rows]
    ['data: fwd, ids', 'data: fwd, batch.labels']
    """
    if scopes.on == scopes.NOTED:
        tell([(None, "", name, value) for name, value in values.items()])


def tell(items: Iterable[Item], kept: Any = None) -> None:
    """Tell the tensors of a step that runs in a scope, with its half if none is given. A path that begins with `<` is in the
    layer before the one that runs."""
    found = [(path, half, name + under, t) for path, half, name, value in items for under, t in _tensors(value, "")]
    if not found:
        return
    paths, halves, names = (["" if row[i] is None else row[i] for row in found] for i in range(3))
    values = [row[3] for row in found]
    if torch.compiler.is_dynamo_compiling():
        torch.ops.funcops.note(scopes._token, values, paths, halves, names)
        return
    thread.kept = kept
    try:
        torch.ops.funcops.note(scopes._token, values, paths, halves, names)
    finally:
        thread.kept = None


def tell_by_step(name: str, gradients: Any, under: str = "") -> None:
    """Tell a tree of gradients, each at the path of its step, as the steps themselves do that compute theirs at once."""
    with scopes.named_scope("", "wgrad"):
        found = [(path[1:].rpartition("."), t) for path, t in _tensors(gradients, "")]
        tell([(under + step, "wgrad", f"{name}.{leaf}", t) for (step, _, leaf), t in found])


class _Thread(threading.local):
    kept: Any = None  # by the step that this thread tells of
    captured: tuple[Any, ...] = ()  # the taker of the graph that it captures on a device, in place of all others


thread = _Thread()


def _tensors(value: Any, path: str) -> list[tuple[str, Any]]:
    """The tensors in a value, with their paths; nothing of what is in flight. Plain code, which a tracer follows."""
    if isinstance(value, Tensor):
        return [(path, value)]
    if isinstance(value, (tuple, list)):
        return [one for i, part in enumerate(value) for one in _tensors(part, f"{path}.{i}")]
    if isinstance(value, dict):
        return [one for key, part in value.items() for one in _tensors(part, f"{path}.{key}")]
    if dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value) if not field.metadata.get("hidden")]
        return [one for name in fields for one in _tensors(getattr(value, name), f"{path}.{name}")]
    return []


def _told(token: Tensor, values: list[Tensor], paths: list[str], halves: list[str], names: list[str]) -> None:
    if not takers:
        return
    if not thread.captured and values[0].is_cuda and torch.cuda.is_current_stream_capturing():
        fail("recording", "a step", "in a capture of funcops.graphs", "torch.cuda.graph, which tells nothing", RuntimeError)
    inner = scopes.label()
    outer = scopes._thread.open[-2][0] if len(scopes._thread.open) > 1 else scopes.Label()
    found = []
    for value, path, half, name in zip(values, paths, halves, names, strict=True):
        # a layer's number is the last part of its path
        around = outer if path[:1] != "<" else outer._replace(path=re.sub(r"\d+$", lambda one: str(int(one[0]) - 1), outer.path))
        where = around.inside(path.lstrip("<"), "").path if path else inner.path
        half = scopes.RECOMPUTE if inner.half == scopes.RECOMPUTE else half or inner.half
        found.append(Told(where, half, name, value, inner.path))
    for take in thread.captured or tuple(takers):
        take(found, thread.kept)


_operators = torch.library.Library("funcops", "FRAGMENT")
_operators.define("note(Tensor(a!) token, Tensor[] values, str[] paths, str[] halves, str[] names) -> ()")
_operators.impl("note", _told, "CompositeExplicitAutograd")
_operators.impl("note", scopes._nothing, "Meta")
