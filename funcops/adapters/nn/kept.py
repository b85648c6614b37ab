"""`kept_bytes` and `kept_report`: the tensors that a call of a module leaves with autograd for its backward."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from funcops.adapters.autograd.differentiable import kept_by
from funcops.adapters.from_function.first_run import same_draws
from funcops.adapters.nn.form import Form
from funcops.engine.errors import describe, fail, join_path, short
from funcops.engine.residuals.report import Report, Row, storage_of
from funcops.engine.trees import paths, tensors

HOLDS = "_parameters", "_buffers", "_modules"  # the dicts of a module that a call may change
RAW = "_raw_saved_"  # how the attributes of autograd's nodes begin that have what they saved


def kept_bytes(module: nn.Module, *args: Any, **kwargs: Any) -> int:
    """The bytes that autograd keeps after `module(*args, **kwargs)`, for any module: compare a model before and after `from_torch`.

    Each storage counts once. Parameters, buffers and the tensors among the arguments exist anyway and do not count; an output that
    the backward reads does. A tensor that a function of the user holds by itself, such as the closure that a checkpoint runs again,
    is not seen. The call runs once, in the module's mode and the caller's autocast and grad mode; no gradient is computed. The
    module is put back: the values of its buffers (running means, say), attributes that the call set on it or its parts, and the
    generators of random numbers. Raises `TypeError` for a value that is not a module, `ValueError` for a module whose parameters
    are not made yet, and what the call raises.

    >>> import torch
    >>> from funcops import nn
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.GELU(), torch.nn.Linear(16, 8))
    >>> x = torch.ones(4096, 8)
    >>> before, replaced = nn.kept_bytes(model, x), nn.from_torch(model)
    >>> before, nn.kept_bytes(model, x)
    (819200, 294912)
    """
    check_module("kept_bytes", module)
    with unharmed(module, tensors((args, kwargs))):
        return bytes_of_call(module, lambda: module(*args, **kwargs), tensors((args, kwargs)))


def kept_report(module: nn.Module, *args: Any, **kwargs: Any) -> Report:
    """A table of the tensors that autograd keeps after `module(*args, **kwargs)`, for any module, funcops' or not.

    A path is the module that ran when a tensor was saved, with a number, or the path of a residual behind an op of funcops.
    `needed by`: the node of autograd that reads it, or the halves of an op's backward. A tensor that shares its storage with a
    parameter, a buffer, an argument or an earlier row counts no bytes, and the sum is `kept_bytes(module, *args, **kwargs)`. The
    call leaves the module unchanged, and raises as that function says.

    >>> import torch
    >>> from funcops import nn
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
    >>> print(nn.kept_report(model, torch.ones(4096, 8)))
    path  shape       dtype         bytes  share  alias of         needed by
    0.0   [4096, 8]   float32     0 bytes   0.0%  x.0              AddmmBackward0
    1.0   [4096, 16]  float32  256.00 KiB  50.0%                   GeluBackward0
    2.0   [4096, 16]  float32  256.00 KiB  50.0%                   AddmmBackward0
    2.1   [16, 8]     float32     0 bytes   0.0%  params.2.weight  AddmmBackward0
    kept 512.00 KiB in 4 tensors, aliased 128.50 KiB
    """
    check_module("kept_report", module)
    given = {**{f"x.{i}": value for i, value in enumerate(args)}, **{f"x.{name}": value for name, value in kwargs.items()}}
    with unharmed(module, tensors(given)):
        return _table(module, lambda: module(*args, **kwargs), given)


def check_module(where: str, module: Any) -> None:
    if not isinstance(module, nn.Module):
        fail(where, "module", "a torch.nn.Module", describe(module), TypeError)
    for name, t in (*module.named_parameters(), *module.named_buffers()):
        if nn.parameter.is_lazy(t):
            fail(where, "module", "a module whose parameters are made (its first call makes them)", f"an uninitialised {name}")


@contextmanager
def unharmed(module: nn.Module, given: Sequence[Tensor]) -> Iterator[None]:
    """A block after which a module and the generators of random numbers are as before: the values of buffers, and the attributes,
    buffers and parts that a part has, but for the caches of funcops. What it changes inside an attribute's value stays."""
    parts = [(part, dict(vars(part)), [dict(vars(part)[name]) for name in HOLDS]) for part in module.modules()]
    values = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with same_draws([*module.parameters(), *module.buffers(), *given]):
            yield
    finally:
        for part, attributes, held in parts:
            ours = {name for name, value in vars(part).items() if hasattr(type(value), "_funcops_caches")}
            ours.update(getattr(type(part), "_funcops_caches", ()))
            for name in vars(part).keys() - attributes.keys() - ours:
                del vars(part)[name]
            vars(part).update({name: value for name, value in attributes.items() if name not in ours})
            for name, before in zip(HOLDS, held, strict=True):
                vars(part)[name].clear()
                vars(part)[name].update(before)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)


class _Held:
    """Stands in autograd's nodes for a saved tensor; it lives as long as its node does."""

    __slots__ = ("__weakref__", "at", "tensor")

    def __init__(self, tensor: Tensor, at: str) -> None:
        # of an output that was written in place, the tensor itself would hold the node that holds it
        self.tensor, self.at = tensor.detach(), at


def _held_after(call: Callable[[], Any], at: Callable[[], str]) -> tuple[Any, list[_Held]]:
    """The result of a call, and what autograd still holds after it, in the order in which it was saved."""
    refs: list[weakref.ref[_Held]] = []

    def pack(t: Tensor) -> _Held:
        held = _Held(t, at())
        refs.append(weakref.ref(held))
        return held

    with saved_tensors_hooks(pack, lambda held: held.tensor):
        y = call()
    return y, [held for ref in refs if (held := ref()) is not None]


def bytes_of_call(module: nn.Module, call: Callable[[], Any], given: Sequence[Tensor]) -> int:
    """`kept_bytes` of a call of a module, beside these tensors. The module stays as the call leaves it."""
    own = {storage_of(t) for t in (*module.parameters(), *module.buffers(), *given)}
    y, found = _held_after(call, str)
    own.update([storage_of(t) for t in module.buffers()])  # those that the call has made or replaced, too
    kept = {storage_of(held.tensor): held.tensor.untyped_storage().nbytes() for held in found}
    return sum(size for storage, size in kept.items() if storage not in own)


def _table(module: nn.Module, call: Callable[[], Any], given: Mapping[str, Any]) -> Report:
    names = {id(part): path for path, part in module.named_modules()}
    owners: dict[int, str] = {}
    _own(owners, "params", module.named_parameters())
    _own(owners, "buffers", module.named_buffers())
    _own(owners, "", paths(given).items())
    y, found = _held_after(call, lambda: _running(names))
    _own(owners, "buffers", module.named_buffers())
    readers = _readers(y)
    rows, numbers, aliased = [], dict[str, int](), 0
    for held in found:
        t, storage = held.tensor, storage_of(held.tensor)
        name, reader = readers.get(id(held), ("", ""))
        if not name:
            name = str(numbers.get(held.at, 0))
            numbers[held.at] = int(name) + 1
        size = 0 if storage in owners else t.untyped_storage().nbytes()
        aliased += t.untyped_storage().nbytes() - size
        rows.append(Row(join_path(held.at, name), (*t.shape,), short(t.dtype), size, owners.get(storage, ""), reader))
        owners.setdefault(storage, rows[-1].path)
    return Report(rows, aliased, None)


def _own(owners: dict[int, str], kind: str, held: Iterable[tuple[str, Any]]) -> None:
    for name, t in held:
        if isinstance(t, Tensor):
            owners.setdefault(storage_of(t), join_path(kind, name))


def _running(names: Mapping[int, str]) -> str:
    """The path of the innermost module of which a method runs."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and (path := names.get(id(frame.f_locals.get(code.co_varnames[0])))) is not None:
            return path
        frame = frame.f_back
    return ""


def _readers(y: Any) -> dict[int, tuple[str, str]]:
    """For each `_Held` behind y, by identity: the path of the residual of an op here, or "", and its reader in the backward."""
    found: dict[int, tuple[str, str]] = {}
    try:
        results: Sequence[Tensor] = Form(y, {}).tensors()
    except Exception:  # a result that cannot be pickled; its readers have no names, and the bytes are the same
        results = tensors(y)
    waiting = [t.grad_fn for t in results if t.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node: Any = waiting.pop()
        saved = [raw for name in dir(node) if name.startswith(RAW) for raw in _listed(getattr(node, name))]
        held = [raw.data for raw in saved if isinstance(raw.data, _Held)]
        # inside a checkpoint a node has what the checkpoint put in place of its tensors
        ours = kept_by(node, [one.tensor for one in held]) if len(held) == len(saved) else None
        found.update(zip(map(id, held), ours or [("", node.name())] * len(held), strict=True))
        following = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= following
        waiting += following
    return found


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else (value,)
