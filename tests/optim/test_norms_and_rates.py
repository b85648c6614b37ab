"""Clipping against torch's, global norms, and the schedule of the learning rate."""

from __future__ import annotations

import contextlib
import copy
import itertools

import pytest
import torch
from optim_model import close, equal, model
from torch.utils._python_dispatch import TorchDispatchMode

from funcops.engine.trees import tensors
from funcops.optim import (
    AdamWConfig,
    MuonConfig,
    SGDConfig,
    adamw_init,
    adamw_update,
    clip_by_global_norm,
    ema_update,
    global_norm,
    muon_init,
    muon_update,
    sgd_init,
    sgd_update,
    update_ratios,
    warmup_cosine,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("max_norm", [1.0, 1e6])
def test_clipping_equals_torch(dtype, max_norm):
    grads = model(dtype)
    ps = [torch.nn.Parameter(torch.zeros_like(g)) for g in tensors(grads)]
    for p, g in zip(ps, tensors(grads), strict=True):
        p.grad = g.clone()
    norm = torch.nn.utils.clip_grad_norm_(ps, max_norm)
    before = copy.deepcopy(grads)
    clipped, ours = clip_by_global_norm(grads, max_norm)
    assert equal(grads, before)
    tol = 1e-2 if dtype is torch.bfloat16 else 1e-6
    torch.testing.assert_close(ours, norm.to(ours.dtype), rtol=tol, atol=tol)
    close(clipped, [p.grad for p in ps], tol)
    same, again = clip_by_global_norm(grads, max_norm, in_place=True)
    assert same is grads and equal(grads, clipped) and torch.equal(again, ours)


def test_norm_of_nothing():
    assert global_norm({"a": None}).item() == 0
    grads, norm = clip_by_global_norm({"a": None}, 1.0)
    assert grads == {"a": None} and norm.item() == 0
    assert global_norm((torch.ones(4), torch.ones(5).double())).dtype is torch.float64


@pytest.mark.parametrize("warmup", [0, 3, 10])
def test_schedule_as_numbers_and_tensors(warmup):
    kw = {"peak": 0.5, "warmup": warmup, "total": 10, "final": 0.1}
    numbers = [warmup_cosine(s, **kw) for s in range(13)]
    ours = warmup_cosine(torch.arange(13), **kw)
    torch.testing.assert_close(ours, torch.tensor(numbers))
    assert numbers[10:] == [0.1] * 3 and max(numbers) == 0.5
    if warmup:
        assert numbers[0] == pytest.approx(0.5 / warmup) and numbers[warmup - 1] == 0.5
    assert numbers[warmup:] == sorted(numbers[warmup:], reverse=True)


def test_norms_of_16_bit_gradients_are_summed_in_float32():
    """10^6 ones, whose sum bfloat16 cannot represent; and a norm of 1e-6, as large as the epsilon that is added to it."""
    ones = {"a": torch.ones(1000, 1000, dtype=torch.bfloat16), "b": None}
    for norm in (global_norm(ones), clip_by_global_norm(ones, 1e9)[1]):
        assert norm.dtype is torch.float32 and abs(float(norm) - 1000) < 1e-3
    clipped, norm = clip_by_global_norm({"a": torch.tensor([1e-6], dtype=torch.float64)}, 1e-6)
    torch.testing.assert_close(clipped["a"], torch.tensor([0.5e-6], dtype=torch.float64), rtol=1e-9, atol=0)


class Watched(TorchDispatchMode):
    """Makes an update take the operators that a tracer follows."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


UPDATES = {
    "adamw": (adamw_init, adamw_update, AdamWConfig(weight_decay=0.3)),
    "sgd": (sgd_init, sgd_update, SGDConfig(momentum=0.9, nesterov=True, weight_decay=0.3)),
    "muon": (muon_init, muon_update, MuonConfig(weight_decay=0.3)),
}
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("name", UPDATES)
def test_a_rate_in_any_dtype_is_used_exactly(name, traced):
    """A step with a rate as a tensor is the step with its number, whatever the dtypes of both: 1 - lr weight_decay of a float32
    rate is not rounded to float32 where params are float64."""
    init, update, cfg = UPDATES[name]
    for dtype, of_rate in itertools.product(FLOATS, FLOATS):
        params, grads = ({"w": torch.linspace(a, 2, 12).reshape(3, 4).to(dtype)} for a in (0.1, -1.0))
        rate = torch.tensor(0.0123, dtype=of_rate)
        with Watched() if traced else contextlib.nullcontext():
            (found, _), (wanted, _) = (update(params, grads, init(params, cfg), cfg, lr=lr) for lr in (rate, float(rate)))
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(found, wanted, rtol=2 * eps, atol=eps)


def test_a_decay_in_any_dtype_is_used_exactly():
    for dtype, of_decay in itertools.product(FLOATS, FLOATS):
        average, params = {"w": torch.linspace(0.1, 2, 12).to(dtype)}, {"w": torch.linspace(-1, 2, 12).to(dtype)}
        decay = torch.tensor(0.9987, dtype=of_decay)
        eps = torch.finfo(dtype).eps
        found, wanted = (ema_update(average, params, one) for one in (decay, float(decay)))
        torch.testing.assert_close(found, wanted, rtol=2 * eps, atol=eps)


def test_the_update_over_each_weight():
    params = {
        "w": torch.randn(4, 3),
        "zero": torch.zeros(2),
        "still": torch.zeros(2),
        "none": None,
        "wide": torch.ones(2, dtype=torch.float64),
    }
    updated = {"w": params["w"] * 1.5, "zero": torch.ones(2), "still": torch.zeros(2), "none": None, "wide": params["wide"] - 0.25}
    found = update_ratios(params, updated)
    assert list(found) == ["still", "w", "wide", "zero"] and found["wide"].dtype is torch.float64
    torch.testing.assert_close([float(t) for t in found.values()], [0.0, 0.5, 0.25, float("inf")])
    with pytest.raises(TypeError, match=r"update_ratios: updated must be a tree like params, .*, got .*"):
        update_ratios(params, {"w": params["w"]})
    with pytest.raises(ValueError, match=r"update_ratios: updated.w must be \[4, 3\], got"):
        update_ratios(params, updated | {"w": torch.ones(3)})
