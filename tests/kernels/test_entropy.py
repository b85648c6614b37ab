"""Entropies of rows at the ends of what floats hold, against float64."""

import pytest
import torch

from funcops.engine.backend import backend
from funcops.library.kernels.entropy import entropy_bwd, entropy_fwd
from funcops.testing.tolerances import assert_close

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")  # numpy's, of the interpreter
INF = float("inf")


@pytest.mark.parametrize("width", [8, 13])
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_certain_shifted_and_masked_rows(name, width):
    """A certain row has entropy 0; a shift changes nothing; a class of -inf adds nothing, whatever the gradient is."""
    logits = torch.randn(6, width)
    logits[1] += 3e4
    logits[2] -= 3e4
    logits[3, 1:] = -INF
    logits[4, 2:] = -INF
    logits[5, 0] = 200.0
    labels = torch.zeros(6, dtype=torch.int64)
    seen = logits.double().masked_fill(logits == -INF, -1e9).requires_grad_()
    want = torch.distributions.Categorical(logits=seen).entropy()
    slopes = torch.tensor([1.0, -2.0, 3.0, 1e30, 0.5, 1e30])
    (of_logits,) = torch.autograd.grad(want, seen, slopes.double())
    with backend(name):
        losses, lse, found = entropy_fwd(logits, labels, 0.0, -100, 0.0)
        got = entropy_bwd(torch.zeros(6), slopes, logits, labels, lse, found, 0.0, -100, 0.0)
    assert found[3] == 0 and bool((found >= 0).all())
    assert_close(found, want.detach(), dtype=torch.float32, length=width)
    assert_close(got[:5], of_logits[:5], dtype=torch.float32, length=width)
    assert bool((got[logits == -INF] == 0).all()) and bool(got.isfinite().all())


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_an_ignored_row_has_neither_entropy_nor_gradient(name):
    logits, labels = torch.randn(2, 9), torch.tensor([-100, 3])
    with backend(name):
        losses, lse, found = entropy_fwd(logits, labels, 0.0, -100, 0.0)
        got = entropy_bwd(torch.ones(2), torch.ones(2), logits, labels, lse, found, 0.0, -100, 0.0)
    assert losses[0] == found[0] == 0 and bool((got[0] == 0).all())
    assert losses[1] > 0 and found[1] > 0 and bool((got[1] != 0).all())


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_a_nan_is_seen(name):
    logits = torch.randn(2, 9)
    logits[1, 4] = float("nan")
    with backend(name):
        found = entropy_fwd(logits, torch.zeros(2, dtype=torch.int64), 0.0, -100, 0.0)[2]
    assert found[0].isfinite() and found[1].isnan()
