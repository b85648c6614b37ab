"""Activations and GLUs at the ends of every dtype, against float64 formulas that saturate."""

import math

import pytest
import torch

from funcops.engine.backend import backend
from funcops.library.kernels import glu
from funcops.library.kernels.activation import ACTIVATIONS, activation_bwd, activation_fwd
from funcops.library.kernels.bias_activation import bias_activation_bwd, bias_activation_fwd
from funcops.library.kernels.softcap import softcap_fwd

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")  # numpy's, of the interpreter
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
RUNS = [(name, dtype) for dtype in DTYPES for name in ("torch", "triton") if (name, dtype) != ("triton", torch.float64)]
INF = math.inf


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x > -700 else math.exp(max(x, -800))


def gated(slope):
    """x sigmoid(slope x) and its derivative."""

    def derivative(x):
        s = sigmoid(slope * x)
        return s + slope * x * s * (1 - s) if abs(x) < 1e5 else s

    return lambda x: x * sigmoid(slope * x), derivative


def gelu_tanh(x):
    inner = 0.7978845608028654 * (x + 0.044715 * x**3) if abs(x) < 1e5 else math.copysign(INF, x)
    return 0.5 * x * (1 + math.tanh(inner)) if x > -1e5 else -0.0


def gelu_tanh_derivative(x):
    if abs(x) >= 1e5:
        return float(x > 0)
    t = math.tanh(0.7978845608028654 * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.7978845608028654 * (1 + 3 * 0.044715 * x * x)


def normal(x):
    return math.exp(-0.5 * x * x) / math.sqrt(2 * math.pi) if abs(x) < 1e5 else 0.0


def cdf(x):
    return 0.5 * math.erfc(-x / math.sqrt(2))


FORMULAS = {
    "relu": (lambda x: max(x, 0.0), lambda x: float(x > 0)),
    "squared_relu": (lambda x: max(x, 0.0) * max(x, 0.0), lambda x: 2 * max(x, 0.0)),
    "gelu": (lambda x: x * cdf(x) if x > -1e5 else -0.0, lambda x: cdf(x) + x * normal(x)),
    "gelu_tanh": (gelu_tanh, gelu_tanh_derivative),
    "quick_gelu": gated(1.702),
    "silu": gated(1.0),
    "tanh": (math.tanh, lambda x: 1 - math.tanh(x) ** 2),
    "sigmoid": (sigmoid, lambda x: sigmoid(x) * (1 - sigmoid(x))),
}


def ends(dtype):
    """The largest and smallest numbers, both zeros, and the numbers where exponents and cubes begin to overflow."""
    limits = torch.finfo(dtype)
    sizes = [limits.max, limits.max / 2, limits.max / 4, math.sqrt(limits.max), limits.max ** (1 / 3), limits.tiny, limits.eps]
    sizes += [0.0, 1e-3, 1.0, 3.0, 10.0, 90.0, 110.0, 720.0, 1e4, 6e4]
    return torch.tensor([sign * size for size in sizes for sign in (1, -1)], dtype=torch.float64).to(dtype)


def wanted(formula, x):
    return torch.tensor([formula(float(v)) for v in x.flatten()], dtype=torch.float64).view(x.shape).to(x.dtype)


def check(got, want, x, what):
    """Errors within a few roundings of the result or, near zeros of the function, of terms as large as 1; overflow is infinity."""
    eps = torch.finfo(x.dtype).eps
    g, w = got.double(), want.double()
    bad = ~(((g - w).abs() <= 8 * eps * (w.abs() + w.abs().clamp(max=1.0) + eps)) | (g == w) | ((g - w).abs() <= 8 * eps))
    assert not bad.any(), f"{what}: at {x[bad].tolist()} {got[bad].tolist()} instead of {want[bad].tolist()}"


def doubled(kind, x):
    """Whether torch's gelu overflows: oneDNN's kernel for float32 and bfloat16 doubles x."""
    return (kind == "gelu") & (x.double() > torch.finfo(torch.float32).max / 2)


@pytest.mark.parametrize(("name", "dtype"), RUNS, ids=str)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations(kind, name, dtype):
    x, (f, derivative) = ends(dtype), FORMULAS[kind]
    y, slope, one = wanted(f, x), wanted(derivative, x), torch.ones_like(x)
    rows, ones = x.view(-1, 2), one.view(-1, 2)
    with backend(name):
        got = activation_fwd(x, kind), activation_fwd(rows, kind).view(-1), bias_activation_fwd(x, torch.zeros_like(x), kind)
        found = activation_bwd(one, x, kind), activation_bwd(ones, rows, kind).view(-1)
        found += (bias_activation_bwd(one, x, None, kind, False)[0],)
    for a, b in zip(got, found, strict=True):
        known = ~doubled(kind, x)
        check(a[known], y[known], x[known], "y")
        check(b, slope, x, "derivative")


SMALL = torch.cat([sign * 2.0 ** -torch.linspace(1, 12, 89, dtype=torch.float64) for sign in (1, -1)])
FROM_ZERO = {kind: f for kind, (f, _) in FORMULAS.items() if f(0.0) == 0.0}


def keeps_digits(got, formula, x):
    """Errors of a few roundings of the result itself, however small it is."""
    want = torch.tensor([formula(float(v)) for v in x], dtype=torch.float64)
    error = (got.double() - want).abs() / want.abs().clamp(min=torch.finfo(x.dtype).tiny)
    assert error.max() <= 8 * torch.finfo(x.dtype).eps, f"at {x[error.argmax()]:.3g}: {got[error.argmax()]}"


@pytest.mark.parametrize(("name", "dtype"), RUNS, ids=str)
@pytest.mark.parametrize("kind", FROM_ZERO)
def test_activations_of_small_inputs_keep_their_digits(kind, name, dtype):
    x = SMALL.to(dtype)
    with backend(name):
        keeps_digits(activation_fwd(x, kind), FROM_ZERO[kind], x)


@pytest.mark.parametrize(("name", "dtype"), RUNS, ids=str)
@pytest.mark.parametrize("cap", [0.5, 1.0, 3.0, 30.0])
def test_softcap_of_small_inputs_keeps_their_digits(cap, name, dtype):
    x = SMALL.to(dtype)
    with backend(name):
        keeps_digits(softcap_fwd(x, cap), lambda v: cap * math.tanh(v / cap), x)


@pytest.mark.parametrize(("name", "dtype"), RUNS, ids=str)
@pytest.mark.parametrize("kind", glu.GATES)
def test_glus(kind, name, dtype):
    """A row of all ends: gate and linear part 1 in either order, one tensor or two."""
    gate, (f, derivative) = ends(dtype)[None], FORMULAS[glu.GATES[kind]]
    one, y, slope = torch.ones_like(gate), wanted(f, gate), wanted(derivative, gate)
    known = ~doubled(glu.GATES[kind], gate)
    with backend(name):
        pair = glu.glu_pair_fwd(gate, one, kind), *glu.glu_pair_bwd(one, gate, one, kind)
        over = one.clone()
        runs = [pair, (over, *glu.glu_pair_bwd_recompute(over, gate, one, kind))]
        for first in (True, False):
            x = torch.cat((gate, one) if first else (one, gate), -1)
            dx, _ = glu.glu_bwd(one, x, None, kind, first, True, False)
            again = one.clone()
            dx2 = glu.glu_bwd_recompute(again, x, kind, first)
            halves = [d.chunk(2, -1) if first else d.chunk(2, -1)[::-1] for d in (dx, dx2)]
            runs += [(glu.glu_fwd(x, None, kind, first), *halves[0]), (again, *halves[1])]
    for got_y, d_gate, d_linear in runs:
        check(got_y[known], y[known], gate[known], "y")
        check(d_linear[known], y[known], gate[known], "d linear")
        check(d_gate, slope, gate, "d gate")


@pytest.mark.parametrize(("name", "dtype"), RUNS, ids=str)
def test_clamped_swiglu(name, dtype):
    gate = ends(dtype)[None]
    one, (f, derivative) = torch.ones_like(gate), gated(1.702)
    below = gate.double() <= 7.0
    want_y = wanted(lambda v: 2 * f(min(v, 7.0)), gate)
    slope = torch.where(below, wanted(lambda v: 2 * derivative(min(v, 7.0)), gate).double(), 0.0).to(dtype)
    x = torch.cat((gate, one), -1)
    with backend(name):
        y = glu.clamped_swiglu_fwd(x, None, True, 7.0, 1.702, 1.0)
        dx, _ = glu.clamped_swiglu_bwd(one, x, None, True, 7.0, 1.702, 1.0, True, False)
    check(y, want_y, gate, "y")
    check(dx.chunk(2, -1)[0], slope, gate, "d gate")


@pytest.mark.parametrize(("name", "dtype"), RUNS, ids=str)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_nan_stays_nan(kind, name, dtype):
    """And infinities give the function's limit if torch computes it."""
    x = torch.tensor([math.nan, INF, -INF], dtype=dtype)
    with backend(name):
        y = activation_fwd(x, kind)
        dx = activation_bwd(torch.ones_like(x), x, kind)
    assert y[0].isnan() and (dx[0].isnan() or kind == "relu"), "torch's relu has a slope of 1 there"
    if kind in ("relu", "squared_relu", "tanh", "sigmoid"):
        f, _ = FORMULAS[kind]
        assert torch.equal(y[1:], wanted(f, x[1:])) and not dx[2].isnan()
