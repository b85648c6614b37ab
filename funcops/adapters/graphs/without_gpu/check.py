"""`check_capturable`: find what a CUDA graph cannot hold in a function, with its line, on any machine.

The function runs on copies of its inputs, with every torch call and operator recorded; then on other values, where both runs must
call the same operators; last as a recording, replayed on the other values, which must return the function's own results.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from funcops.adapters.graphs.statics import clones
from funcops.adapters.graphs.without_gpu import recorder
from funcops.adapters.graphs.without_gpu.faults import (
    BAKED,
    COPY,
    DYNAMIC,
    ESCAPE,
    GRAD,
    OPTION,
    RANDOM,
    SYNC,
    Fault,
    Line,
    as_if_capturing,
    draws,
    fault_of,
    flat_tensors,
    in_optimiser,
    is_users,
    user_line,
    user_name,
    waits,
    without_autograd,
)
from funcops.engine.errors import CaptureError, require_callable
from funcops.engine.trees import paths, tensors, tree_map


class Undone(TorchDispatchMode):
    """Undoes, at its end, what operators wrote to tensors that were there before. `own` may be written to: their writes stay."""

    runs = True

    def __init__(self, own: list[Tensor]) -> None:
        super().__init__()
        self.own = {_storage(t) for t in own}
        self.alive: list[Tensor] = []  # so that no storage's address is used twice
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema.arguments
        if any(one.alias_info is not None and one.alias_info.is_write for one in schema):
            given = dict(zip([one.name for one in schema], args, strict=False)) | kwargs
            written = [given.get(one.name) for one in schema if one.alias_info is not None and one.alias_info.is_write]
            for t in flat_tensors([written]):
                self._remember(t)
        there = {_storage(t) for t in flat_tensors([args, kwargs])}
        out = func(*args, **kwargs)
        for t in flat_tensors([out]):
            if _storage(t) not in there:  # not a view of an argument
                self.own.add(_storage(t))
                self.alive.append(t)
        return out

    def _remember(self, t: Tensor) -> None:
        if _storage(t) not in self.own and _storage(t) not in self.before:
            whole = torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage())  # t may be a view of a part
            self.before[_storage(t)] = whole, whole.clone()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        with torch.no_grad():
            for whole, before in self.before.values():
                whole.copy_(before)


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata


_TO_HOST = {"cpu", "numpy", "tolist", "__array__"}
_TO_PYTHON = {"item", "__bool__", "__float__", "__int__", "__index__", "__complex__"}
_FROM_HOST = {"tensor", "as_tensor", "asarray", "new_tensor", "pin_memory", "cuda"}
_FROM_HOST_UNSEEN = {"from_numpy", "frombuffer"}
_UNSEEN = {
    "manual_seed": (RANDOM, "manual_seed() acts when captured, not when replayed: give the function a key"),
    "set_rng_state": (RANDOM, "set_rng_state() acts when captured, not when replayed: give the function a key"),
    "synchronize": (SYNC, "synchronize() waits for the device"),
    "save": (SYNC, "torch.save() reads tensors from the device, and no replay does: return them, and save them afterwards"),
    "_str": (SYNC, "printing a tensor reads its values from the device: return it, and print it after the replay"),
}


class Step(NamedTuple):
    """An operator that ran: its name, its arguments other than tensors, and the line."""

    name: str
    constants: str
    where: Line

    @property
    def user(self) -> str:
        return user_name(self.name.rpartition(".")[0].replace(".", "::", 1))


class _Calls(TorchFunctionMode):
    """Watches calls of torch functions, because transfers between host and device do nothing on a machine without a device."""

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__()
        self.faults = faults

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = self._fault(getattr(func, "__name__", ""), args, kwargs)
        if found is not None:
            self.faults.append(Fault(found[0], user_line(), found[1]))
        return func(*args, **kwargs)

    def _fault(self, name: str, args: Any, kwargs: Any) -> tuple[str, str] | None:
        if name in _TO_PYTHON:
            return SYNC, waits(f"{name} of a tensor")
        to = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, str)] if name == "to" else []
        if name in _TO_HOST or "cpu" in to:
            return SYNC, f"{name}() copies a tensor from the device to the host"
        if name in _FROM_HOST or any(value.startswith("cuda") for value in to):
            remedy = OPTION if in_optimiser() else "make them there (torch.full, arange), or pass them to the function"
            return COPY, f"{name}() copies values from the host to the device: {remedy}"
        return None


class _Profile:
    """Watches calls that torch does not let a mode override."""

    def __init__(self, faults: list[Fault]) -> None:
        self.faults = faults

    def __enter__(self) -> None:
        self.before = sys.getprofile()
        sys.setprofile(self._seen)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self.before)

    def _seen(self, frame: Any, event: str, arg: Any) -> None:
        unseen = event == "c_call" and getattr(arg, "__name__", "") in _FROM_HOST_UNSEEN
        if unseen and str(getattr(arg, "__module__", "") or "torch").startswith("torch"):
            said = f"{arg.__name__}() copies values from the host: make them on the device, or pass them to the function"
            self.faults.append(Fault(COPY, user_line(), said))
        elif event == "call" and (name := frame.f_code.co_name) in _UNSEEN:
            if not frame.f_globals.get("__name__", "").startswith("torch.serialization" if name == "save" else "torch."):
                return
            kind, message = _UNSEEN[name]
            self.faults.append(Fault(kind, user_line(), message))


class _Operators(TorchDispatchMode):
    """Watches the operators that run."""

    runs = True

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__()
        self.faults = faults
        self.steps: list[Step] = []
        self.made: list[tuple[StorageWeakRef, int, Line]] = []
        self.returned: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("prim", "profiler"):  # a profiler's ranges run nothing on a device
            return func(*args, **kwargs)
        where, name = user_line(), func._schema.name
        found = fault_of(func, args, kwargs)
        if found is None and draws(func, args, kwargs):
            found = RANDOM, f"{user_name(name)} draws from a generator: use funcops.random with a key that is an input"
        if found is not None:
            self.faults.append(Fault(found[0], where, found[1]))
        out = func(*args, **kwargs)
        if any(t.is_meta for t in flat_tensors([out])):
            return out  # computes shapes on the host: a device runs nothing
        self.steps.append(Step(str(func), repr(_constants([args, kwargs])), where))
        given = {t.untyped_storage()._cdata for t in flat_tensors([args, kwargs])}
        for t in flat_tensors([out]):
            if t.untyped_storage()._cdata not in given:
                self.made.append((StorageWeakRef(t.untyped_storage()), t.untyped_storage()._cdata, where))
        return out

    def outliving(self, returned: bool) -> list[Line]:
        """The lines that made tensors whose memory is still alive, and was, or was not, returned."""
        for _ in range(2):
            found = [where for made, key, where in self.made if (key in self.returned) == returned and not made.expired()]
            if not found:
                break
            gc.collect()  # a reference cycle does not keep a tensor alive for good
        return found


def check_capturable(fn: Callable[..., Any], *trees: Any) -> list[Fault]:
    """Find the faults of `fn(*trees)`, in the order in which its lines ran; an empty list means that it can be captured.

        for fault in check_capturable(step, params, state, x):
            print(fault)          # train.py:41: host sync: item of a tensor waits for the device ...

    It finds host syncs (`item`, `bool` and branches on values, `.cpu()`), shapes that depend on values, values and tensors that
    come from the host, draws from a generator, tensors that outlive the call without being returned, results that pile up outside,
    a backward without autograd, and baked-in values: Python numbers and caches that differ in another run. Inputs are copied, and
    writes to other tensors (a module's weights) are undone, so the caller's tensors stay as they are. Raises `TypeError` if `fn` is
    not a function.

    >>> import torch
    >>> from funcops.graphs import check_capturable
    >>> check_capturable(lambda x: 2 * x, torch.ones(2))
    []
    >>> def clipped(x):
    ...     return x / x.norm() if x.norm() > 1 else x
    ...
    >>> [fault.kind for fault in check_capturable(clipped, torch.ones(4))]
    ['host sync']
    """
    require_callable("check_capturable", fn=fn)
    faults: list[Fault] = []
    first, error = _watched(fn, clones(trees), faults)
    if error is not None:
        return _once([*faults, _raised(error)])
    other = poisoned(trees)
    second, error = _watched(fn, clones(other), [])
    if error is not None:
        said = f"raises for other values: {type(error).__name__}: {_first_line(error)}"
        return _once([*faults, Fault(BAKED, _line_of(error), said)])
    faults += _differences(first.steps, second.steps)
    for where in first.outliving(returned=True):
        said = "a result is also kept outside, one by each call, but a replay keeps none: keep what the calls return"
        faults.append(Fault(ESCAPE, where, said))
    if not faults:
        faults += _replayed(fn, trees, other)
    return _once(faults)


def _watched(fn: Callable[..., Any], trees: Any, faults: list[Fault]) -> tuple[_Operators, Exception | None]:
    calls, operators = _Calls(faults), _Operators(faults)
    try:
        with torch.no_grad(), as_if_capturing(), Undone(tensors(trees)), _Profile(faults), calls, operators:
            result = fn(*trees)
    except Exception as error:
        return operators, error
    # The result stays alive here: what it holds without being a tree outlives the call, too.
    operators.returned = {t.untyped_storage()._cdata for t in tensors((result, trees))}
    for where in operators.outliving(returned=False):
        said = "a tensor made here outlives the call, but the graph will reuse its memory: return the tensor"
        faults.append(Fault(ESCAPE, where, said))
    return operators, None


def _differences(first: list[Step], second: list[Step]) -> list[Fault]:
    """The differences between the operators of two runs on different values."""
    found: list[Fault] = []
    for a, b in zip(first, second, strict=False):
        if a.name != b.name:
            one, other = (a.user, b.user) if a.user != b.user else (a.name, b.name)
            said = f"another run does {other} instead of {one}: the operators depend on values, or on outside state"
            return [*found, Fault(BAKED, b.where, said)]
        if a.constants != b.constants:
            said = f"a value that changes from run to run is a constant of {a.user}: pass it as a tensor"
            found.append(Fault(BAKED, a.where, said))
    if len(first) != len(second):
        longer = max(first, second, key=len)
        extra = longer[min(len(first), len(second))]
        said = f"only one of two runs does {extra.user}: the operators depend on values, or on outside state"
        found.append(Fault(BAKED, extra.where, said))
    return found


def _replayed(fn: Callable[..., Any], trees: Any, other: Any) -> list[Fault]:
    """Record on one set of values, replay on another, and compare with the function itself."""
    statics = clones(trees)
    held = tensors(statics)  # kept, because a tree that the function donates loses them
    with torch.no_grad():
        try:
            with Undone(held):
                recording, result = recorder.record(lambda: fn(*statics), recorder.Pool(), tensors)
        except CaptureError as error:
            return [Fault(BAKED, user_line(), str(error))]
        given = clones(other)
        for static, value in zip(held, tensors(other), strict=True):
            static.copy_(value)
        with Undone([*held, *tensors(result)]):
            recording.replay()
        with Undone(tensors(given)):
            want = fn(*given)
    replayed, wanted = paths({"inputs": statics, "result": result}), paths({"inputs": given, "result": want})
    if list(replayed) != list(wanted):
        said = f"the result has other leaves for other values: {', '.join(wanted)} instead of {', '.join(replayed)}"
        return [Fault(BAKED, user_line(), said)]
    for path, t in wanted.items():
        got = replayed[path]
        if isinstance(t, Tensor) and not _same(got, t):
            said = f"a replay returns another {path} than the function: part of it was computed outside of torch"
            return [Fault(BAKED, recording.calls[-1].where if recording.calls else user_line(), said)]
        if not isinstance(t, Tensor) and type(t) in (int, float, bool) and got != t:
            return [Fault(BAKED, user_line(), f"{path} is {got} in every replay, but {t} in a call: return a tensor")]
    return []


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype is b.dtype and torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)


def poisoned(trees: Any) -> Any:
    """Other valid inputs for the same function: floats scaled, integers and bools in reverse order; in an ascending vector (offsets
    of groups) all but the last reduced by one, so that it still ascends."""

    def other(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        if t.is_floating_point() or t.is_complex():
            return t * 0.75
        if t.dim() == 1 and t.numel() > 1 and t.dtype is not torch.bool and bool((t.diff() >= 0).all()):
            return torch.cat(((t[:-1] - 1).clamp_min(t[0]), t[-1:]))
        return t.flatten().flip(0).reshape(t.shape) if t.numel() > 1 else t.clone()

    return tree_map(other, trees)


def _constants(value: Any) -> Any:
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, (list, tuple)):
        return [_constants(v) for v in value]
    if isinstance(value, dict):
        return {k: _constants(v) for k, v in value.items()}
    return value


def _raised(error: Exception) -> Fault:
    text = _first_line(error)
    if "CUDA" in text or "cuda" in text:
        remedy = ". If one was made on the host, make it there: device=x.device" if "same device" in text else ""
        return Fault(COPY, _line_of(error), f"names the device: {text}{remedy}")
    if remedy := without_autograd(error):
        return Fault(GRAD, _line_of(error), f"{text}{remedy}")
    kind = DYNAMIC if "shape" in text else BAKED
    return Fault(kind, _line_of(error), f"raises {type(error).__name__}: {text}")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def _line_of(error: Exception) -> Line:
    """The innermost line of user code in the traceback."""
    trace, found = error.__traceback__, Line("?", 0)
    while trace is not None:
        if is_users(trace.tb_frame.f_code.co_filename):
            found = Line(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return found


def _once(faults: list[Fault]) -> list[Fault]:
    """The faults, with each kind once per line."""
    seen: dict[tuple[str, Line], Fault] = {}
    for fault in faults:
        seen.setdefault((fault.kind, fault.where), fault)
    return list(seen.values())
