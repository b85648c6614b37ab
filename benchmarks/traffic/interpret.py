"""Runs one program of a launch at a time in Triton's interpreter, and reports every access.

Values do not matter here, as a kernel's accesses depend on no values except ids: memory need not be filled, CUDA's mathematical
library is left out, and reductions with custom functions, and assembly, return any of their operands.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl  # noqa: F401
from triton.language import core  # noqa: F401
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from benchmarks.traffic.calls import RequestedLaunch

HOOKED = ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas")
Access = Callable[[Any, Any, bool], None]  # pointers, mask, whether it stores


def _hooks(before: list[Any], access: Access) -> list[Any]:
    """The hooks for the four functions through which every load and store goes."""
    load, store, _, swap = before

    def counted_load(self: Any, ptrs: Any, mask: Any, *args: Any, **named: Any) -> Any:
        access(ptrs, mask, False)
        return load(self, ptrs, mask, *args, **named)

    def counted_store(self: Any, ptrs: Any, value: Any, mask: Any, *args: Any, **named: Any) -> Any:
        access(ptrs, mask, True)
        return store(self, ptrs, value, mask, *args, **named)

    def counted_update(self: Any, op: Any, ptr: Any, value: Any, mask: Any, *_: Any) -> Any:
        access(ptr, mask, False)
        access(ptr, mask, True)
        return value  # the interpreter cannot update 16-bit numbers

    def counted_swap(self: Any, ptr: Any, *args: Any) -> Any:
        access(ptr, None, False)
        access(ptr, None, True)
        return swap(self, ptr, *args)

    return [counted_load, counted_store, counted_update, counted_swap]


@contextlib.contextmanager
def interpreting(call: RequestedLaunch, access: Access) -> Iterator[Callable[[tuple[int, ...]], None]]:
    """A function that runs one program of the launch."""
    builder, kind = interpreter.interpreter_builder, interpreter.InterpreterBuilder
    function = python(call.kernel)
    constants = {name for name, kind in function.__annotations__.items() if "constexpr" in str(kind)}
    arguments = {name: value if name in constants else _converted(value) for name, value in call.arguments.items()}
    replaced: list[tuple[Any, str, Any]] = [
        *((kind, name, hook) for name, hook in zip(HOOKED, _hooks([getattr(kind, n) for n in HOOKED], access), strict=True)),
        *(
            (one, "__call__", lambda self, *a, **named: python(self)(*a, **named))
            for one in (JITFunction, interpreter.InterpretedFunction)
        ),
        (interpreter.ReduceOps, "generic_reduce", _any_reduction),
        (kind, "create_inline_asm", lambda self, asm, constraints, values, *_: SimpleNamespace(get_result=values.__getitem__)),
        (builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False)),  # sanitising takes half of the time
    ]
    before = [(place, name, getattr(place, name)) for place, name, _ in replaced]
    scope = interpreter._patch_lang(python)  # the modules of the language that this file names

    def run(program: tuple[int, ...]) -> None:
        builder.set_grid_idx(*program)
        function(**arguments)

    try:
        builder.set_grid_dim(*call.grid)
        for place, name, value in replaced:
            setattr(place, name, value)
        with warnings.catch_warnings(), np.errstate(all="ignore"), _library_functions_as_identity(call.kernel.fn.__globals__):
            warnings.simplefilter("ignore")  # uninitialised memory overflows
            yield run
    finally:
        for place, name, value in before:
            setattr(place, name, value)
        scope.restore()


def _converted(value: Any) -> Any:
    """The value as a kernel's argument; floats become tensors, too."""
    return (
        interpreter.interpreter_semantic.to_tensor(value, False) if isinstance(value, float) else interpreter._implicit_cvt(value)
    )


def _any_reduction(self: Any, operands: Any) -> Any:
    """Replaces the reduction that runs Python for every element: values do not matter here, only shapes."""
    return [self.to_tensor(np.max(one.handle.data, axis=self.axis, keepdims=self.keep_dims), one.dtype) for one in operands]


class _Identity:
    """Replaces CUDA's mathematical library, or any of its functions, which return None in the interpreter."""

    def __call__(self, first: Any, *_: Any, **__: Any) -> Any:
        return first

    def __getattr__(self, name: str) -> Any:
        return self


@contextlib.contextmanager
def _library_functions_as_identity(names: dict[str, Any]) -> Iterator[None]:
    """Replace library functions in the globals of a kernel's file, and in the modules that it imports."""
    modules = [vars(value) for value in names.values() if isinstance(value, ModuleType) and not _is_library(value)]
    found = [(scope, {name: v for name, v in scope.items() if _is_library(v)}) for scope in (names, *modules)]
    for scope, library in found:
        scope.update(dict.fromkeys(library, _Identity()))
    try:
        yield
    finally:
        for scope, library in found:
            scope.update(library)


def _is_library(value: Any) -> bool:
    return isinstance(value, (FunctionType, ModuleType)) and "libdevice" in str(getattr(value, "__module__", value.__name__))


def python(kernel: Any) -> Callable[..., Any]:
    """A kernel, or a helper of one, as a Python function."""
    interpreted = kernel if isinstance(kernel, interpreter.InterpretedFunction) else interpreter.InterpretedFunction(kernel.fn)
    return interpreted.rewrite()
