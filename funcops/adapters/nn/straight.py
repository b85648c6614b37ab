"""A check whether a forward does the same in every call, so that it is known from one: its Python code has no branch, compares
nothing, and reads nothing that may change unnoticed. Attributes of the module that it reads are returned, to be compared in calls.
"""

from __future__ import annotations

import builtins
import concurrent.futures
import contextlib
import dis
import inspect
import math
import os
import sys
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import get_overridable_functions

LIBRARIES = tuple(os.path.dirname(str(one.__file__)) + os.sep for one in (torch, sys.modules["funcops"]))
PYTHON = os.path.dirname(os.__file__) + os.sep, "<frozen "
KNOWN = (  # functions that have branches on autocast alone
    "transformers.models.nemotron.modeling_nemotron._cast_if_autocast_enabled",
    "transformers.utils.generic.maybe_autocast",
)
ALWAYS = "JUMP_FORWARD", "JUMP_BACKWARD", "SETUP_WITH"  # without a condition
COMPARES = "COMPARE_OP", "IS_OP", "CONTAINS_OP", "UNARY_NOT"
TESTS = *COMPARES, "TO_BOOL"
REFUSED = {
    "jump": "its forward has a branch or a loop, which may go another way in a later call",
    "compare": "its forward compares values, which may differ in a later call",
    "handler": "its forward catches exceptions",
    "other": "its forward imports modules, or sets global variables",
}
OTHERS = "IMPORT_NAME", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_BUILD_CLASS", "LOAD_LOCALS"
CHANGING = frozenset(
    "requires_grad is_leaf grad grad_fn is_cuda is_contiguous stride is_inference data_ptr _version is_meta".split()
)
CLASSES = float, int, tuple, list, slice, super, torch.autocast, contextlib.nullcontext
CONSTANTS = bool, int, float, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout
ARGUMENTS = (*CONSTANTS, Tensor, nn.Module, type, types.FunctionType)
FREE = "LOAD_DEREF", "LOAD_CLASSDEREF"
LOADS = "LOAD_GLOBAL", "LOAD_NAME"
ABSENT = object()


def attributes_read(module: Any, x: Tensor, known: Any) -> dict[str, Any] | str:
    """The attributes besides `known` that the forward reads, with their values; the reason if a later call may do something else
    although these are the same."""
    known = known | vars(nn.Module()).keys()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # a profile is a thread's own: a profiler of the caller goes on
        names = pool.submit(_names_of_call, module, x, known).result()
    if isinstance(names, str):
        return names
    found = {}
    for name in sorted(names - known - module._parameters.keys() - module._modules.keys()):
        value = vars(module).get(name, inspect.getattr_static(type(module), name, ABSENT))
        code = isinstance(value, (types.FunctionType, property, staticmethod, classmethod)) and name not in vars(module)
        if value is ABSENT or code or hasattr(nn.Module, name):
            continue
        if not _is_constant(value) and not _is_function(value):
            return f"its forward reads {name}, which may change"
        found[name] = value
    return found


def _names_of_call(module: Any, x: Tensor, known: Any) -> set[str] | str:
    """The names in all Python code that runs in the forward and its backward, libraries aside; or the reason."""
    codes, reasons = set[types.CodeType](), list[str]()

    def entered(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code not in codes and not _is_of_library(frame) and not _is_known(frame):
            inner = any(code in outer.co_consts for outer in codes)  # its free variables are local ones of code that was checked
            codes.add(code)
            reasons.extend(_reasons(frame, inner, module, known))

    x = x.requires_grad_()
    sys.setprofile(entered)
    try:
        torch.autograd.grad(type(module).forward(module, x).sum(), x)
    finally:
        sys.setprofile(None)
    return reasons[0] if reasons else {name for code in codes for name in code.co_names}


def _is_of_library(frame: Any) -> bool:
    """Whether it runs code of torch or funcops, or code of Python's library for these."""
    while frame.f_code.co_filename.startswith(PYTHON) and "-packages" not in frame.f_code.co_filename and frame.f_back:
        frame = frame.f_back
    return bool(frame.f_code.co_filename.startswith(LIBRARIES))


def _is_known(frame: Any) -> bool:
    """Whether it runs a function of `KNOWN`, itself, or a context that does nothing."""
    if type(frame.f_locals.get("self")) is contextlib.nullcontext:
        return True
    home, name = frame.f_globals.get("__name__"), frame.f_code.co_name
    found = getattr(sys.modules.get(home), name, None)
    return f"{home}.{name}" in KNOWN and getattr(found, "__code__", None) is frame.f_code


def _reasons(frame: Any, inner: bool, module: Any, known: Any) -> list[str]:
    """The reasons why the code of a frame, at its begin, may do something else later."""
    code, given = frame.f_code, frame.f_locals
    found = [name for name in code.co_names if name.startswith("__") or name in CHANGING]
    count = code.co_argcount + code.co_kwonlyargcount
    found += [n for n in code.co_varnames[:count] if n in given and not _is_argument(given[n])]
    listed = [one for one in dis.get_instructions(code) if one.opname not in ("EXTENDED_ARG", "PUSH_NULL", "CACHE", "NOP")]
    found += _reads(listed, frame, inner)
    why = [f"its forward reads {name}, which may change" for name in found]
    jumps = {*dis.hasjrel, *dis.hasjabs}
    for i, one in enumerate(listed):
        before = [before.opname for before in listed[max(0, i - 2) : i]]
        if one.opcode in jumps and one.opname not in ALWAYS and "WITH_EXCEPT_START" not in before:
            why += [] if _is_of_attribute(listed, i, given, module, known) else [REFUSED["jump"]]
        elif one.opname in COMPARES and not _is_before_jump(listed, i, jumps):
            why.append(REFUSED["compare"])
        elif one.opname == "PUSH_EXC_INFO" and listed[i + 1].opname != "WITH_EXCEPT_START":
            why.append(REFUSED["handler"])
        elif one.opname in OTHERS:
            why.append(REFUSED["other"])
    return sorted(why, key=lambda reason: reason != REFUSED["jump"])  # the clearest reason first


def _is_before_jump(listed: list[Any], i: int, jumps: Any) -> bool:
    """Whether a comparison only decides a jump, which is checked itself."""
    after = next(one for one in listed[i + 1 :] if one.opname not in TESTS)
    return after.opcode in jumps and after.opname not in ALWAYS


def _is_of_attribute(listed: list[Any], i: int, given: Any, module: Any, known: Any) -> bool:
    """Whether a jump only depends on an attribute that calls compare: `self.flag`, or whether `self.flag` is None, which may be a
    parameter."""
    of, load, *test = ([None] * 4 + [one for one in listed[:i] if one.opname not in ("TO_BOOL", "UNARY_NOT")])[-4:]
    none = "NONE" in listed[i].opname
    if test[1].opname == "IS_OP" and test[0].opname == "LOAD_CONST" and test[0].argval is None:
        none = True
    else:
        of, load = test
    if of is None or load.opname != "LOAD_ATTR" or of.opname != "LOAD_FAST" or given.get(of.argval) is not module:
        return False
    stored = any(one.opname.startswith("STORE_FAST") and of.argval in str(one.argval) for one in listed)
    own = vars(module).keys() - known | (module._parameters.keys() if none else set())
    return load.argval in own and not stored


def _reads(listed: list[Any], frame: Any, inner: bool) -> list[str]:
    """The global and free variables, and the attributes of global modules and classes, that may change unnoticed."""
    found, value, of, path = [], ABSENT, None, ""
    for one in [*listed, None]:
        name = "" if one is None else one.opname
        if name in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(value, (types.ModuleType, type)):
            value, of, path = getattr(value, one.argval, None), value, f"{path}.{one.argval}"
            continue
        if value is not ABSENT and not _is_fixed(value, of):
            found.append(path)
        value, of = ABSENT, None
        path = "" if one is None else str(one.argval)
        if name in LOADS:
            value = frame.f_globals.get(path, getattr(builtins, path, None))
        elif name in FREE and not inner and path in frame.f_code.co_freevars and path != "__class__":
            value = frame.f_locals.get(path)
    return found


def _is_fixed(value: Any, of: Any) -> bool:
    """Whether a value, perhaps an attribute of a module or class, is the same in each call, and what its call does is checked."""
    if of is torch or of is math:
        if isinstance(value, CONSTANTS) or of is math:
            return True
    return value in CLASSES if isinstance(value, type) else _is_function(value)


def _is_function(value: Any) -> bool:
    """Whether it is a function of torch on tensors, or a Python function, whose code is checked when it runs."""
    if isinstance(value, types.FunctionType) and not value.__code__.co_filename.startswith(LIBRARIES):
        return True
    kinds = types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType
    return isinstance(value, kinds) and (
        value in (F.tanh, F.sigmoid) or any(value in of for of in get_overridable_functions().values())
    )


def _is_constant(value: Any) -> bool:
    return all(_is_constant(one) for one in value) if isinstance(value, tuple) else isinstance(value, CONSTANTS)


def _is_argument(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_argument(one) for one in value)
    return isinstance(value, ARGUMENTS) or _is_function(value) or isinstance(value, torch.autograd.function.FunctionCtx)
