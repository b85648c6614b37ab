"""`torch.autocast` and ops: an op runs outside of it, on tensors that its module has cast as `torch.nn` would."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from funcops.engine.contract.marks import version
from funcops.engine.trees import tensors

LOWER, FLOAT32 = "lower", "float32"  # autocast's lists: products, and operators that lose too much precision in 16 bits
CAST = (torch.float32, torch.bfloat16, torch.float16)  # float64 is not cast
any_autocast = torch._C._is_any_autocast_enabled
_transforms = torch._C._functorch.maybe_current_level
_compiling = torch.compiler.is_dynamo_compiling


class Outside:
    """A region without autocast on one kind of device, at the cost of two calls, less than `torch.autocast(kind,
    enabled=False)`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __enter__(self) -> None:
        torch.set_autocast_enabled(self.kind, False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_enabled(self.kind, True)


_outside: dict[str, Outside] = {}
_HERE = nullcontext()


def is_on(kind: str) -> bool:
    """Whether autocast is on for a kind of device; False for kinds without autocast, such as "meta"."""
    return _available(kind) and torch.is_autocast_enabled(kind)


def _available(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)


# `torch.compiler.assume_constant_result` sets this mark, but imports the compiler. The tracer of torch 2.11 supports neither this
# function nor the dispatcher's query below.
_available._dynamo_marked_constant = True  # type: ignore[attr-defined]


def outside(kind: str) -> Any:
    """A region without autocast on a kind of device."""
    if not (any_autocast() and is_on(kind)):
        return _HERE
    if _compiling():
        return torch.autocast(kind, enabled=False)
    found = _outside.get(kind)
    if found is None:
        found = _outside[kind] = Outside(kind)
    return found


def without_autocast(tree: Any) -> Any:
    """A region without autocast on the device of a tree's first tensor."""
    return outside(next(t.device.type for t in tensors(tree)))


def casts(rule: str, x: Any, kind: str, own: list[Any]) -> tuple[Any, list[Any]]:
    """Cast x (a tensor, or a tuple whose first tensor is cast) and parameters as autocast would. `rule`: "lower" for autocast's
    dtype, "float32", the name of an operator of torch for float32 if autocast has a rule for that operator, or "" for no cast."""
    if not rule or (rule not in (LOWER, FLOAT32) and not _known(rule, kind)):
        return x, own
    dtype = torch.get_autocast_dtype(kind) if rule == LOWER else torch.float32
    x = (cast(x[0], dtype), *x[1:]) if type(x) is tuple else cast(x, dtype)
    return x, [None if t is None else cast(t, dtype) for t in own]


def is_rule(rule: Any) -> bool:
    """Whether `casts` accepts `rule`."""
    if rule in ("", LOWER, FLOAT32):
        return True
    if not isinstance(rule, str) or not rule.startswith("aten::"):
        return False
    name, _, overload = rule.removeprefix("aten::").partition(".")
    return hasattr(torch.ops.aten, name) and (not overload or hasattr(getattr(torch.ops.aten, name), overload))


_knows: dict[tuple[str, str], bool] = {}


def _known(operator: str, kind: str) -> bool:
    """Whether autocast has a rule for an operator on a kind of device. CPUs have no rules for norms, and CUDA has a rule for
    rms_norm only in some versions of torch."""
    key = operator, kind
    if key not in _knows:
        where = "Autocast" + torch._C._dispatch_key_for_device(kind)
        _knows[key] = torch._C._dispatch_has_kernel_for_dispatch_key(operator, where)
    return _knows[key]


_known._dynamo_marked_constant = True  # type: ignore[attr-defined]


def cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a tensor as autocast does. A float32 parameter is cast once per region."""
    if t.dtype is dtype or t.dtype not in CAST:
        return t
    if _compiling() or type(t) is not nn.Parameter or not t.requires_grad or t.dtype is not torch.float32 or t.is_inference():
        return t.to(dtype)
    region = _region()
    if region is None:
        return t.to(dtype)
    key = id(t), dtype, torch.is_grad_enabled()
    found = region.get(key)
    if found is None or found[1] != version(t):
        made: Any = t.to(dtype)
        made._cast_of = t
        found = region[key] = t, version(t), made
    return found[2]  # type: ignore[no-any-return]


def cast_from(t: Any) -> Any:
    """The parameter of which `t` is a cast by `cast`, or `t` itself."""
    return getattr(t, "_cast_of", t)


class _Region(dict[Any, Any]):
    """The casts of an autocast region: (parameter, its version, the cast)."""


_current: Any = None  # a weak reference to the open region
_canary: Any = None


def _region() -> _Region | None:
    """The casts of the current region. torch drops its own cached casts at the region's end, without notice; so ours are stored on
    the autograd node of a cast that torch has cached, and are freed with it."""
    global _current, _canary
    found: _Region | None = None if _current is None else _current()
    if found is not None:
        return found
    if not torch.is_autocast_cache_enabled() or torch._C._len_torch_dispatch_stack() or _transforms() is not None:
        return None
    before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.bfloat16)
    try:
        with torch.inference_mode(False), torch.enable_grad(), saved_tensors_hooks(lambda t: t, lambda t: t):
            if _canary is None:
                _canary = torch.zeros(1, 1, device="cpu", dtype=torch.float32, requires_grad=True)
            product: Any = torch.mm(_canary, _canary).grad_fn
    finally:
        torch.set_autocast_enabled("cpu", before[0])
        torch.set_autocast_dtype("cpu", before[1])
    found = product.next_functions[0][0].metadata["funcops"] = _Region()
    _current = weakref.ref(found)
    return found
