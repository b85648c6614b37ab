"""Detection of what a CUDA graph cannot hold, from the operators that run, with the line of user code that ran them."""

from __future__ import annotations

import contextlib
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import funcops

_OWN = tuple(str(Path(package.__file__ or "").parent) for package in (torch, funcops)) + ("<",)
_STDLIB = sysconfig.get_path("stdlib")

_lock, _thread = threading.Lock(), threading.local()
_recordings, _asked = 0, torch.cuda.is_current_stream_capturing  # in all threads, and what answers for those that record nothing

SYNC, DYNAMIC, COPY, RANDOM = "host sync", "dynamic shape", "host copy", "generator"
BAKED, ESCAPE, GRAD = "baked value", "escaping allocation", "grad mode"


class Line(NamedTuple):
    """A line of a source file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Fault(NamedTuple):
    """Something that a graph cannot hold: its kind, its line, and a message with the remedy."""

    kind: str
    where: Line
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.kind}: {self.message}"


@contextlib.contextmanager
def as_if_capturing() -> Iterator[None]:
    """On a machine without CUDA, answer code that asks torch whether a graph is being captured as on a device. With CUDA torch
    answers: its own code and the code of this package must not take a recording of CPU tensors for the capture of a stream."""
    if torch.cuda.is_available():
        yield
        return
    global _asked, _recordings
    with _lock:
        if _recordings == 0:
            _asked, torch.cuda.is_current_stream_capturing = torch.cuda.is_current_stream_capturing, _answer
        _recordings += 1
    outer, _thread.records = _recorded(), True
    try:
        yield
    finally:
        _thread.records = outer
        with _lock:
            _recordings -= 1
            if _recordings == 0:
                torch.cuda.is_current_stream_capturing = _asked


def _recorded() -> bool:
    return getattr(_thread, "records", False)


def _answer() -> bool:
    return _recorded() or _asked()


def without_autograd(error: Exception) -> str:
    """The remedy for a backward in a function that runs without autograd; "" for any other error."""
    if "does not require grad" not in str(error):
        return ""
    return (
        " (a capture runs without autograd: write the step under torch.enable_grad(), "
        "or capture the module alone with make_graphed_callables)"
    )


def is_users(filename: str) -> bool:
    """Whether a source file belongs neither to torch, nor to funcops, nor to Python's standard library."""
    return not filename.startswith(_OWN) and (not filename.startswith(_STDLIB) or "site-packages" in filename)


def user_line() -> Line:
    """The line of the innermost caller in user code."""
    frame = sys._getframe(1)
    outermost = frame
    while frame is not None:
        outermost = frame
        if is_users(frame.f_code.co_filename):
            return Line(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return Line(outermost.f_code.co_filename, outermost.f_lineno)


def flat_tensors(values: Any) -> Iterator[Tensor]:
    """The tensors among an operator's arguments."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from flat_tensors(value)
        elif isinstance(value, dict):
            yield from flat_tensors(value.values())


def argument(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    """An operator's argument by name, or None if the operator lacks it."""
    for i, one in enumerate(func._schema.arguments):
        if one.name == name:
            return kwargs.get(name, args[i] if i < len(args) else one.default_value)
    return None


OPTION = "make the optimiser with capturable=True, if it has that, or use funcops.optim"


def in_optimiser() -> bool:
    """Whether an optimiser of torch runs, which reads and makes tensors on the host without an option of it."""
    frame: Any = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        if frame.f_globals.get("__name__", "").startswith("torch.optim."):
            return True
        frame = frame.f_back
    return False


def waits(what: str) -> str:
    """The message for a call that reads a value of the device."""
    if in_optimiser():
        return f"{what} waits for the device in torch.optim: {OPTION}"
    return f"{what} waits for the device to read a value: keep it a tensor (torch.where, lerp, a 0-d scale)"


_SYNCS = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::item", "aten::allclose"}
# their kernels check for errors, or choose an algorithm by a value: a capture refused each of them
_CHECKING = {"aten::_linalg_eigh", "aten::_linalg_svd", "aten::cholesky"}
_CHECKING |= {f"aten::linalg_{name}" for name in ("eig", "lstsq", "matrix_exp", "pinv")}
_INDEXING = ("aten::index", "aten::index_put_", "aten::index_put", "aten::_unsafe_index")


def fault_of(func: Any, args: Any, kwargs: Any) -> tuple[str, str] | None:
    """The kind and the message of a fault for which capture would refuse this call, or None."""
    name, tags = func._schema.name, func.tags
    if name == "aten::_linalg_check_errors":
        called = f"torch.{str(args[1]).removeprefix('torch.')}"
        return SYNC, f"{called} waits for the device to check for errors: use {called}_ex, unchecked"
    if "linalg" in name and argument(func, args, kwargs, "check_errors"):
        return SYNC, f"{user_name(name)} waits for the device to check for errors: use check_errors=False"
    if name in _CHECKING:
        return SYNC, f"{user_name(name)} waits for the device inside: call it outside of the captured function"
    if name in _SYNCS or torch.Tag.data_dependent_output in tags:
        return SYNC, waits(user_name(name))
    if name in (*_INDEXING, "aten::where") and len({t.is_cpu for t in flat_tensors([args, kwargs]) if not t.is_meta}) > 1:
        return COPY, f"{user_name(name)} copies a tensor of the host to the device: make it there (device=x.device)"
    if name in _INDEXING:
        return _mask_index(name, args)
    if torch.Tag.dynamic_output_shape in tags:
        remedy = "use torch.where, or a fixed number with topk"
        return DYNAMIC, f"{user_name(name)} makes a tensor whose shape depends on values: {remedy}"
    if name in ("aten::_to_copy", "aten::copy_", "aten::_copy_from"):
        return _copy(name, func, args, kwargs)
    return None


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the operator draws from a generator."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for name in ("dropout_p", "dropout", "p"):
        p = argument(func, args, kwargs, name)
        if isinstance(p, (int, float)) and p == 0.0:
            return False
    return True


def _mask_index(name: str, args: Any) -> tuple[str, str] | None:
    masks = [t for t in flat_tensors([args[1]]) if t.dtype in (torch.bool, torch.uint8)]
    if not masks or ("put" in name and args[2].numel() == 1):
        return None
    return DYNAMIC, "indexing with a mask makes a tensor whose shape depends on values: use torch.where"


def _copy(name: str, func: Any, args: Any, kwargs: Any) -> tuple[str, str] | None:
    if name == "aten::_to_copy":
        source, target = args[0].device, argument(func, args, kwargs, "device") or args[0].device
    else:
        source, target = args[1].device, args[0].device
    if source.type == "cpu" and target.type != "cpu":
        return COPY, "a tensor is copied from the host to the device: make it there, or pass it to the function"
    if source.type != "cpu" and target.type == "cpu":
        return SYNC, "a tensor is copied from the device to the host"
    return None


_USERS = {"aten::_local_scalar_dense": "item(), bool(), int() or float() of a tensor", "aten::lift_fresh": "torch.tensor"}
_USERS |= dict.fromkeys((*_INDEXING, "aten::select", "aten::slice"), "indexing") | {"aten::_to_copy": "to()"}


def user_name(operator: str) -> str:
    """The name that a user writes for an operator of torch (`aten::_unique2`): `torch.unique`, `Tensor.add_`, `indexing`."""
    space, _, name = operator.partition("::")
    if operator in _USERS or space != "aten":
        return _USERS.get(operator, name)
    plain = name.lstrip("_")
    if plain.startswith("linalg_"):
        return f"torch.linalg.{plain.removeprefix('linalg_')}"
    written = [(one, of) for one in (plain, plain.rstrip("0123456789")) for of in (torch, Tensor) if hasattr(of, one)]
    return f"{'torch' if written[0][1] is torch else 'Tensor'}.{written[0][0]}" if written else name
