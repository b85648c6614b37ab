"""Activations: one read, one write; the backward reads dy and x."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.engine.backend.launch import launcher
from funcops.library.kernels import activation as declared
from funcops.library.kernels.pins import launched
from funcops.library.kernels.triton.common import cdiv, load_wide, store_rounded

BLOCK = 1024


@triton.jit
def tanh(x):
    """(1 - e) / (1 + e) with e = exp(-2 |x|), and the sign of x, so that neither end overflows; below 1/4, where 1 - e would
    cancel, a series with a relative error of 1e-8."""
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    s = x * x
    series = x + x * (s * (-1 / 3 + s * (2 / 15 + s * (-17 / 315 + s * (62 / 2835)))))
    return tl.where(s < 0.0625, series, tl.where(x < 0, -t, t))


@triton.jit
def sigmoid(x):
    """The sigmoid from exp(-|x|), which never overflows."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def saturated(x, MOST: tl.constexpr = 1e4):
    """Clamp x to the range beyond which f' does not change, so that infinity is not multiplied by 0; NaN stays."""
    return tl.clamp(x, -MOST, MOST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def normal_cdf(x):
    """The standard normal distribution function, as exact as float32 near 0, and to -6 with a relative error below 1e-4: for -|x|
    it is 2^q(|x|), q a polynomial fitted on 0 to 6.5, and 0 from 14 on. One exponential, and half the instructions of an erf."""
    a = tl.minimum(tl.abs(x), 14.0)
    q = -2.5527183922235963e-08 * a + 7.726699777776957e-07
    q = q * a - 1.0017381100624334e-05
    q = q * a + 7.072446896927431e-05
    q = q * a - 0.00025917773018591106
    q = q * a - 4.391145193949342e-05
    q = q * a + 0.007001718506217003
    q = q * a - 0.0524783656001091
    q = q * a - 0.4592090845108032
    q = q * a - 1.1511054039001465
    below = tl.exp2(q * a - 1.0)
    return tl.where(x > 0, 1.0 - below, below)


@triton.jit
def _twice_inner(x):
    """The 2 u of gelu_tanh, as 0.5 (1 + tanh(u)) is sigmoid(2 u). u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    return x * (1.5957691216057308 + 0.07135481627260025 * x * x)


@triton.jit
def activate(x, KIND: tl.constexpr):
    """f(x)."""
    if KIND == "relu":
        return tl.where(x <= 0, 0.0, x)
    elif KIND == "squared_relu":
        r = tl.where(x <= 0, 0.0, x)
        return r * r
    elif KIND == "gelu":
        return x * normal_cdf(x)
    elif KIND == "gelu_tanh":
        return x * sigmoid(_twice_inner(x))
    elif KIND == "quick_gelu":
        return x * sigmoid(1.702 * x)
    elif KIND == "silu":
        return x * sigmoid(x)
    elif KIND == "tanh":
        return tanh(x)
    else:
        tl.static_assert(KIND == "sigmoid")
        return sigmoid(x)


@triton.jit
def derivative(x, KIND: tl.constexpr):
    """f'(x)."""
    if KIND == "relu":
        return tl.where(x <= 0, 0.0, tl.where(x == x, 1.0, x))
    elif KIND == "squared_relu":
        return tl.where(x <= 0, 0.0, 2.0 * x)
    elif KIND == "gelu":
        return normal_cdf(x) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif KIND == "gelu_tanh":
        x = saturated(x, 10.0)  # so that e = exp(-2 u) is at most 2^126
        square = x * x
        e = tl.exp2(x * (-2.302208198144325 - 0.1029432395800235 * square))
        r = 1.0 / (1.0 + e)
        # sigmoid(2 u), and its derivative without 1 - sigmoid(2 u), which cancels where u is large
        return r + r * (r * e) * (x * (1.5957691216057308 + 0.21406444881780074 * square))
    elif KIND == "quick_gelu":
        x = saturated(1.702 * x)
        s = sigmoid(x)
        return s * (1.0 + x * (1.0 - s))
    elif KIND == "silu":
        s = sigmoid(x)
        return s * (1.0 + x * (1.0 - s))
    elif KIND == "tanh":
        t = tanh(x)
        return 1.0 - t * t
    else:
        tl.static_assert(KIND == "sigmoid")
        s = sigmoid(x)
        return s * (1.0 - s)


@triton.jit
def _forward(x_ptr, y_ptr, n, KIND: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    store_rounded(y_ptr + i, activate(load_wide(x_ptr + i, i < n), KIND), i < n)


@triton.jit
def _backward(dy_ptr, x_ptr, dx_ptr, n, KIND: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dx = load_wide(dy_ptr + i, i < n) * derivative(load_wide(x_ptr + i, i < n), KIND)
    store_rounded(dx_ptr + i, dx, i < n)


_launch_forward, _launch_backward = launcher(_forward), launcher(_backward)


@launched(declared.activation_fwd)
@declared.activation_fwd.triton
def activation_fwd(x: Tensor, kind: str) -> Tensor:
    x = x.contiguous()
    y, n = torch.empty_like(x), x.numel()
    if n:
        _launch_forward(cdiv(n, BLOCK), 1, 1, x, y, n, kind, BLOCK)
    return y


@launched(declared.activation_bwd)
@declared.activation_bwd.triton
def activation_bwd(dy: Tensor, x: Tensor, kind: str) -> Tensor:
    x, dy = x.contiguous(), dy.contiguous()
    dx, n = torch.empty_like(x), x.numel()
    if n:
        _launch_backward(cdiv(n, BLOCK), 1, 1, dy, x, dx, n, kind, BLOCK)
    return dx
