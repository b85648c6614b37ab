"""Tolerances of all comparisons, in one place.

A result that sums n terms in a dtype with unit roundoff u carries an error of about sqrt(n) u of its terms' size
(rounding errors are independent), so the bound is

    |got - want| <= u * factor * sqrt(n) * (scale + |want|)

where scale is the largest absolute value in the whole tree `want` (a leaf's terms may cancel down to nothing), or with `by_leaf`
in the leaf (except for leaves under the paths of `cancels`, whose terms cancel by nature: softmax over one class), n is the
reduction length, and factor 8 leaves room for the few roundings of one formula. 16-bit results are computed in float32 and rounded
once a kernel, so n is 1 for them and an op that chains kernels rounds a few times: factor 16.

Sums that keep fewer `bits` of mantissa than their dtype have a unit roundoff of 2^-bits. Tensor cores add products of 8-bit codes
this way: Hopper's keep 13 (DeepSeek-V3, arXiv 2412.19437, 3.5.2; measured: 1.3e-4 of the whole at K = 4096), whatever dtype is
requested.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcops.engine.errors import require, require_count, require_dtype, require_flag, require_type
from funcops.engine.trees import paths

ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
FACTOR = {torch.float64: 8.0, torch.float32: 8.0, torch.bfloat16: 16.0, torch.float16: 16.0}


def relative(dtype: torch.dtype, length: int, bits: int | None = None) -> float:
    """u * factor * sqrt(n), relative to a result's size; the same bound holds for a whole tensor in the Euclidean norm."""
    n = length if dtype in (torch.float64, torch.float32) else 1
    least = 0.0 if bits is None else 2.0**-bits * FACTOR[torch.float32]
    return max(float(ROUNDOFF[dtype] * FACTOR[dtype] * n**0.5), least)


def bound(want: Tensor, scale: float, dtype: torch.dtype, length: int, bits: int | None = None) -> Tensor:
    return relative(dtype, length, bits) * (scale + want.abs()) + ROUNDOFF[dtype]


def assert_close(
    got: Any,
    want: Any,
    *,
    dtype: torch.dtype,
    length: int = 256,
    what: str = "",
    by_leaf: bool = False,
    cancels: tuple[str, ...] = (),
    bits: int | None = None,
) -> None:
    """Compare two trees leaf by leaf and report every leaf that differs: path, largest error, where, bound. Raises
    `AssertionError` that lists them; `TypeError` or `ValueError` for wrong options.

    >>> import torch
    >>> from funcops.testing import assert_close
    >>> assert_close({"w": torch.ones(2)}, {"w": torch.ones(2) + 1e-7}, dtype=torch.float32)
    """
    require_dtype("assert_close", dtype)
    require_count("assert_close", length=length)
    if bits is not None:
        require_count("assert_close", bits=bits)
    require_flag("assert_close", by_leaf=by_leaf)
    require_type("assert_close", "what", what, str)
    right = isinstance(cancels, tuple) and all(isinstance(path, str) for path in cancels)
    require(right, "assert_close", "cancels", "a tuple of paths", repr(cancels))
    got_paths, want_paths = paths(got), paths(want)
    problems = []
    sizes: dict[str, float] = {}
    if got_paths.keys() != want_paths.keys():
        problems.append(f"structure: {sorted(got_paths)} instead of {sorted(want_paths)}")
    for path in got_paths.keys() & want_paths.keys():
        g, w = got_paths[path], want_paths[path]
        if g is None or w is None:
            if g is not w:
                problems.append(f"{path or 'value'}: {g!r} instead of {w!r}")
            continue
        kinds = [_kind(t) for t in (g, w)]
        if kinds[0] != kinds[1] or "number" not in kinds[0]:
            problems.append(f"{path or 'value'}: {kinds[0]} instead of {kinds[1]}")
            continue
        if g.shape != w.shape:
            problems.append(f"{path or 'value'}: shape {list(g.shape)} instead of {list(w.shape)}")
            continue
        if (g.dtype, g.device) == (w.dtype, w.device) and torch.equal(g, w):  # NaN is not equal to NaN
            continue
        sizes = sizes or {at: _largest(t) for at, t in want_paths.items() if isinstance(t, Tensor) and not t.is_meta}
        whole = max(sizes.values())
        scale = sizes[path] if by_leaf and not any(path == p or path.startswith(p + ".") for p in cancels) else whole
        g, w = g.double(), w.double()
        error, allowed = (g - w).abs(), bound(w, scale, dtype, length, bits)
        bad = ~((error <= allowed) | (g == w) | (g.isnan() & w.isnan()))
        if bad.any():
            at = int(torch.where(bad, error.nan_to_num(float("inf")), -1.0).flatten().argmax())
            index = [int(i) for i in torch.unravel_index(torch.tensor(at), g.shape)] if g.dim() else []
            problems.append(
                f"{path or 'value'}: error {float(error.flatten()[at]):.3e} at {index}, bound "
                f"{float(allowed.flatten()[at]):.3e}, {int(bad.sum())} of {g.numel()} elements"
            )
    if problems:
        raise AssertionError("; ".join([f"{what} differs", *problems]))


def _kind(t: Any) -> str:
    """The kind of a leaf, which must agree before numbers are compared."""
    if not isinstance(t, Tensor):
        return f"a {type(t).__name__}"
    return "a tensor without values" if t.is_meta else "complex numbers" if t.is_complex() else "real numbers"


def _largest(t: Tensor) -> float:
    return float(t.double().nan_to_num().abs().max()) if t.numel() else 0.0


# Whole models against Hugging Face's, whose sums have another order: logits of a few layers in float32, and gradients in float64,
# where Hugging Face's casts to float32 become casts to float64.
HF_LOGITS, HF_GRADIENTS = 1e-5, 1e-8

# Decoding in float64 against one forward of the whole: the same sums, some keys in another order.
DECODING = 1e-12

# Against PyTorch's own error, on inputs that are shifted and scaled: both make a few roundings of the same formulas in another
# order, so that one may be lucky where the other is not (factor 4); and a result has a few roundings of its own size, or of the
# terms whose difference it is. A statistic rounded at the size of a shift is 10 to 1e4 times as far off.
SHIFTED_FACTOR, SHIFTED_ROUNDINGS = 4.0, 8.0

# The same for the mean error of some draws of one sum, in roundings of the sum of its terms' sizes: luck is evened out.
SUM_FACTOR, SUM_ROUNDINGS = 1.25, 0.05
