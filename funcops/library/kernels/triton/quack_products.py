"""Products by quack, whose kernels for Hopper and Blackwell are written in CuTe, where it is installed.

It computes in float32 and rounds once, as ours do. Calls are as in its `gemm_interface`. No device has run them from here.
"""

from __future__ import annotations

import functools
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from funcops.engine.errors import require

KINDS = {"": None, "relu": "relu", "squared_relu": "relu_sq", "gelu_tanh": "gelu_tanh_approx"}


def by_quack(a: Tensor, b: Tensor, out: Tensor, e: Any) -> bool:
    """A provider (`providers.py`) of products of 16 bits with a factor, and a bias or an added tensor, or a bias and an activation.
    Raises `ValueError` where quack is not installed."""
    interface, activates = _interface(), bool(e.kind) or e.z is not None
    fits = e.kind in KINDS and e.mode != "derivative" and not (e.bias is not None and e.add is not None)
    if not fits or (activates and (e.add is not None or e.scale != 1.0)):
        return False
    if a.itemsize != 2 or out.dtype is not a.dtype or not all([_in_vectors(t) for t in (a, b, out)]):
        return False
    if activates:
        interface.gemm_act(a, b, None, e.bias, KINDS[e.kind], preact_out=e.z, postact_out=out, store_preact=e.z is not None)
    elif e.add is None:
        interface.gemm(a, b, out=out, bias=e.bias, alpha=float(e.scale))
    elif e.add is out:
        interface.gemm_add_inplace(a, b, out, alpha=float(e.scale))
    else:
        interface.gemm_add(a, b, e.add, out=out, alpha=float(e.scale))
    return True


@functools.cache
def _interface() -> Any:
    installed = find_spec("quack") is not None
    require(installed, "gemm", "name", "one whose library is installed (pip install quack-kernels)", "'quack', which is not")
    return import_module("quack.gemm_interface")


def _in_vectors(t: Tensor) -> bool:
    """Whether one stride is 1, the other a multiple of 16 bytes, and so the address."""
    outer, inner = max(t.stride()), min(t.stride())
    return inner == 1 and outer * t.itemsize % 16 == 0 and t.data_ptr() % 16 == 0
