"""`checking`, or FUNCOPS_CHECK=1: every call of an op is checked against the inexpensive parts of its laws, and guards notice
writes that torch does not count.

In such a block, and only in its context (`contextvars`):

- a mark of residuals and pendings, and of the weight from which a quantised one was made, is a version and a sample of the values:
  1,024 elements, spread evenly. A write through `tensor.data`, NumPy or a raw pointer raises `StaleResidualError` as others do;
- a forward must not change its arguments, and must save the tensors that it declares to alias as the very same objects
  (`aliases_said`);
- dy must have y's shapes and dtypes; a backward must change neither dy nor the residuals, and must return dparams and dx with the
  structure, shapes and dtypes of params and x.

The results are the same bits. Checks cost host time and wait for the device, so use them to find a fault. While no block is open
anywhere they cost nothing: the test in ops' functions, the nodes' `keep` and the programs are replaced when the first block opens,
and restored when the last one closes. Nothing is checked under compilers, tracers, captures and torch.func transforms.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from funcops.engine.backend import select, tracing
from funcops.engine.contract import marks, versions
from funcops.engine.contract.schema import Donated, Saved
from funcops.engine.contract.versions import Versions
from funcops.engine.errors import DonatedError, describe, fail, join_path, require_flag, short
from funcops.engine.trees import at, has, leaves, paths, same_structure, stands_for_one, structure, tensors, tree_map

__all__ = ["aliases_said", "checking"]

any_autocast = torch._C._is_any_autocast_enabled
_on: ContextVar[bool] = ContextVar("funcops.checking", default=select.CHECK)
_calls = threading.local()  # `passed`: the next `asked`, by the call that is being checked, is False
# blocks of all threads: the switches replace functions that every thread calls
_blocks, _lock = 0, threading.Lock()
_switches: list[Callable[[bool], None]] = []


def when_switched(switch: Callable[[bool], None]) -> None:
    """Register a function to be called with whether any block is open, whenever that changes."""
    _switches.append(switch)
    # under FUNCOPS_CHECK=1 a block is open before the modules that register later are imported
    if _blocks:
        switch(True)


def checking(on: bool = True) -> contextlib.AbstractContextManager[None]:
    """A block in which every call of an op is checked, as with FUNCOPS_CHECK=1 in the whole program; with `on=False` no call is.
    The module lists the checks. Raises `TypeError` at once if `on` is not a bool; in the block, besides the errors that ops raise,
    `RuntimeError` for an op that breaks a law.

    >>> import torch
    >>> from funcops import SoftcapConfig, StaleResidualError, checking, softcap
    >>> x = torch.ones(3)
    >>> with checking():
    ...     y, residuals = softcap.fwd(None, x, SoftcapConfig(30.0))
    ...     x.data.add_(1)
    ...     try:
    ...         softcap.bwd(residuals, torch.ones(3), SoftcapConfig(30.0))
    ...     except StaleResidualError as error:
    ...         print(str(error).partition(", got")[0])
    ...
    tensor([2., 2., 2.])
    softcap_bwd: residuals.x must be as the forward left it
    """
    require_flag("checking", on=on)
    return _checking(on)


@contextlib.contextmanager
def _checking(on: bool) -> Iterator[None]:
    # `on=False` adds 0: such a block turns checks off in its own context, not in other threads
    _count(on)
    token = _on.set(on)
    try:
        yield
    finally:
        _on.reset(token)
        _count(-on)


def _count(by: int) -> None:
    global _blocks
    with _lock:
        # only the first and the last block of all threads switch anything
        before, _blocks = _blocks > 0, _blocks + by
        if before != (_blocks > 0):
            for switch in _switches:
                switch(not before)


def active() -> bool:
    """Whether calls are checked here and now."""
    return (
        not torch.compiler.is_compiling() and _on.get() and not tracing() and torch._C._functorch.peek_interpreter_stack() is None
    )


def asked() -> bool:
    """Whether a call must leave the fast path: ops call it in place of `any_autocast` while a block is open."""
    if torch.compiler.is_dynamo_compiling() or any_autocast():
        return any_autocast()
    # a checked call runs the same function again, which must not be checked twice; calls inside of it are asked anew
    if getattr(_calls, "passed", False):
        _calls.passed = False
        return False
    return active()


def unusual(kind: str, where: str, call: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, ...]:
    """Handle a call that must leave the fast path: raise under autocast, return `(result,)` of a checked call, else `()`. `kind`:
    "fwd", "dgrad", "wgrad" or "bwd"."""
    if any_autocast():
        # the trees among the arguments: the second one of a wgrad is its config
        refuse_autocast(where, *args[: 1 if kind == "wgrad" else 2])
    # autocast is on for another kind of device alone: the call goes on as if it were off
    if torch.compiler.is_dynamo_compiling() or not active():
        return ()
    found = _CHECKS[kind](where, functools.partial(_passed, call), *args, **options)
    return (found,)


def _passed(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    _calls.passed = True
    try:
        return call(*args, **options)
    finally:
        # a call that raised before it asked leaves nothing behind for the next one
        _calls.passed = False


def refuse_autocast(where: str, *trees: Any) -> None:
    """Raise if `torch.autocast` is on for the device of a tensor in the trees: it would cast inside the op, silently."""
    kinds = {t.device.type for t in tensors([getattr(tree, "_node", tree) for tree in trees])}  # a donated node is not a tree
    # torch raises for a kind of device that has no autocast, such as meta
    on = [kind for kind in kinds if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)]
    # without a tensor no device can be asked: any region is refused
    if on or not kinds:
        raise RuntimeError(
            f"{where}: must run outside of torch.autocast, got a region where it is on. Leave it with "
            f"torch.autocast({(on or ['cpu'])[0]!r}, enabled=False), and give params and x the dtype that you want with "
            "funcops.trees.cast(tree, dtype); the modules of funcops.nn follow autocast"
        )


class _Noted:
    """The forms of y, params and x in the call that made a node, as text, by leaf."""

    __slots__ = ("params", "x", "y")

    def __init__(self, params: Any, x: Any, y: Any) -> None:
        # as text: the tensors themselves would live as long as the residuals
        self.params, self.x, self.y = [tree_map(_form, tree, is_leaf=stands_for_one) for tree in (params, x, y)]


def _form(leaf: Any) -> Any:
    """The dtype and shape of a leaf as text; for a node that stands for one and has no shape, its gradient's, as a tree."""
    if not stands_for_one(leaf):
        return describe(leaf)
    if hasattr(leaf, "shape"):
        return f"{short(leaf.dtype)}{list(leaf.shape)}"
    return tree_map(describe, leaf.zero_gradient())


def _fwd(where: str, call: Any, params: Any, x: Any, cfg: Any, *, needs: Any) -> Any:
    given = {"params": params, "x": x}
    before = Versions.of(given)
    y, kept = call(params, x, cfg, needs=needs)
    _left(where, before, "arguments", "forward")
    if kept is not None:
        for path, alias in aliases_said(kept, given | {"y": y}):
            fail(where, f"residuals.{path}", f"{alias} itself, as it is declared", "another tensor", RuntimeError)
        kept._noted = _Noted(params, x, y)
    return y, kept


def _backward(kind: str, where: str, call: Any, kept: Any, *args: Any, **options: Any) -> Any:
    node = kept._node if type(kept) is Donated else kept
    noted, dy = getattr(node, "_noted", None), None if kind == "wgrad" else args[0]
    if noted is not None and dy is not None and same_structure(dy, noted.y):
        for (path, d), form in zip(paths(dy).items(), leaves(noted.y), strict=True):
            if isinstance(d, Tensor) and describe(d) != form:
                fail(where, join_path("dy", path), f"{form}, like y", describe(d))
    try:
        # a backward may write over residuals that it was given for good
        before = Versions.of({"dy": dy} if type(kept) is Donated else {"dy": dy, "kept": kept})
    except DonatedError:  # which the call itself raises
        before = Versions.of({"dy": dy})
    found = call(kept, *args, **options)
    _left(where, before, "arguments", "backward")
    if noted is not None:
        dparams, dx = {"bwd": lambda: found, "dgrad": lambda: (None, found[0]), "wgrad": lambda: (found, None)}[kind]()
        if kind != "wgrad":
            _mirrors(where, "dx", dx, noted.x)
        # with `into` the result is the accumulators, which may be wider than params
        if kind != "dgrad" and options.get("into") is None:
            _mirrors(where, "dparams", dparams, noted.params)
        # the wgrad of this pending mirrors the same params; a pending may be any tree, also one that can hold no note
        if kind == "dgrad" and found[1] is not None and hasattr(type(found[1]), "_noted"):
            found[1]._noted = noted
    return found


_CHECKS: dict[str, Callable[..., Any]] = {"fwd": _fwd}
_CHECKS |= {kind: functools.partial(_backward, kind) for kind in ("bwd", "dgrad", "wgrad")}


def _left(where: str, before: Versions, what: str, by: str) -> None:
    """Raise if the op wrote to an argument."""
    hint = "The op writes to its argument: let it write to a tensor of its own"
    before.check(where, what, by=f"caller of the {by}", hint=hint, error=RuntimeError)


def _mirrors(where: str, what: str, tree: Any, forms: Any) -> None:
    """Raise unless a gradient has its tree's structure, shapes and dtypes; a leaf, or a node that stands for one, may be None."""
    outer, wanted = [tree_map(lambda _: None, each, is_leaf=stands_for_one) for each in (tree, forms)]
    if not same_structure(outer, wanted):
        fail(where, what, f"of the structure {structure(wanted)}", structure(outer), RuntimeError)
    parts = zip(leaves(tree, is_leaf=stands_for_one), leaves(forms, is_leaf=stands_for_one), paths(outer), strict=True)
    for part, form, place in parts:
        said = _form(part) if part is None or isinstance(part, Tensor) else tree_map(describe, part)
        for inner, text in zip(leaves(said), leaves(form), strict=True) if part is not None else ():
            if inner != "None" and inner != text:
                fail(where, join_path(what, place), f"{text}, like the leaf of which it is the gradient", inner, RuntimeError)


def aliases_said(kept: Any, given: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The fields of residuals that are not the tensor that they declare to alias, with that alias. A copy would cost bytes that a
    report does not count, and a write to the aliased tensor would go unnoticed."""
    for name, field in kept.fields.items() if isinstance(kept, Saved) else ():
        value = getattr(kept, name)
        if field.alias and value is not None and has(given, field.alias):
            there = {id(t) for t in tensors(at(given, field.alias))}  # if x is a tuple, "x" may be any part of it
            if not {id(t) for t in tensors(value)} <= there:
                yield name, field.alias


_keeps: dict[Any, Any] = {}  # each class's own `keep`, while a block is open


def _sampled(cls: Any) -> None:
    """Replace the `keep` of a class by one whose marks hold samples, too."""
    plain = cls.keep
    _keeps[cls] = plain

    def keep(*args: Any, **options: Any) -> Any:
        node = plain(*args, **options)
        # other marks hold no version that a sample could stand beside
        if node is not None and type(node._marks) is tuple and active():
            node._marks = marks.marks_of(node)
        return node

    cls.keep = staticmethod(keep)


def _switch_marks(on: bool) -> None:
    versions.sampling = active if on else bool
    if on:
        marks.on_new.append(_sampled)
        # a list: another thread may declare a class meanwhile, which the walk over a set refuses
        for cls in list(marks.NODES):
            _sampled(cls)
    else:
        marks.on_new.remove(_sampled)
        for cls, plain in _keeps.items():
            cls.keep = staticmethod(plain)
        _keeps.clear()


when_switched(_switch_marks)
# under FUNCOPS_CHECK=1: a block around the whole program, which nothing closes
_count(select.CHECK)
